"""From a trainer to whoever publishes: the checkpoint is pinned, the request written down, and given to a runner."""

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.layout import step_of
from headway.errors import HeadwayError, InputError
from headway.events.process import without_logins
from headway.publish import named
from headway.publish.anchor import Code, NotCommitted, pin, pinned, torch_version
from headway.publish.ready import ready
from headway.publish.request import REQUEST, Desk, Publish, Request, open_desk, request_id
from headway.publish.runners import runner_named
from headway.storage import Progress, open_storage

if TYPE_CHECKING:
    from headway.events.vocabulary import Process


def hand_over(
    what: Publish, process: "Process", home: Path, code: Code | None, *,
    root: str, checkpoint: str, data: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """What a trainer asks for when it has saved. A refusal is no error of the training's: it is told, with how to go
    on, and the checkpoint stays."""
    what = counted_from_here(what)
    request = Request(
        id=request_id(process.job, root, checkpoint, what), what=what, root=root, checkpoint=checkpoint,
        job=process.job, accelerators=process.world_size, device=_device(),
        folder=os.getcwd(), python=sys.executable, asked_s=time.time(),
    )  # fmt: skip
    told = {
        "id": request.id, "checkpoint": checkpoint, "recipe": what.recipe, "to": without_logins(request.to),
        "runner": what.runner,
    }  # fmt: skip
    try:
        known = {"job": process.job, "attempt": process.attempt, "data": dict(data), "torch": torch_version()}
        desk, step = ask(home, request, known | (code.told() if code else {}))
        where = submit(desk)
        return told | {"step": step, "submitted": True, "why": "", "where": where}
    except (HeadwayError, OSError) as error:
        why = f"the model is not published yet: {error}\n  {_left(home, request)}"
        return told | {"submitted": False, "why": without_logins(why)}


def _left(home: Path, request: Request) -> str:
    """What there is of a request that was refused, and what to type next."""
    anchor = f"{request.root}/{request.checkpoint}"
    try:
        is_kept = pinned(open_storage(request.root), request.checkpoint, request.id) is not None
    except (HeadwayError, OSError):  # a store that does not answer has not kept it either, as far as is known
        is_kept = False
    kept = "is kept for it" if is_kept else "is not pinned for it, and may be pruned like any other"
    is_asked = os.path.isfile(home / "publish" / request.id / REQUEST)  # never raises, whatever is wrong with the home
    return f"{anchor} {kept}. Then: {f'headway publish submit {request.id}' if is_asked else _submit_again(request)}"


def _submit_again(request: Request) -> str:
    """The command that asks for the same, where nothing of it could be written down."""
    what, default = request.what, Publish()
    options = [
        word for name in ("recipe", "model", "to", "part", "runner", "sbatch")
        if (value := getattr(what, name)) != getattr(default, name) for word in (f"--{name}", value)
    ]  # fmt: skip
    options += [word for name in what.checks for word in ("--check", name)]
    options += [word for name in what.allow for word in ("--allow", name)]
    options += [] if what.promote else ["--no-promote"]
    return shlex.join(["headway", "publish", "submit", f"{request.root}/{request.checkpoint}", *options])


def ask(home: Path, request: Request, known: Mapping[str, Any], progress: Progress | None = None) -> tuple[Desk, int]:
    """Has the checkpoint kept, and writes down what is to become of it. Returns also the checkpoint's step."""
    storage, name = open_storage(request.root), request.checkpoint
    try:
        manifest = pin(storage, name, request.id, request.what.recipe, known, progress)
        step, content = manifest.step, manifest.content
    except NotCommitted:  # the publisher waits for it
        step, content = step_of(name) or 0, ""
    desk = open_desk(home, request)
    if (state := desk.state()).phase not in ("running", "retrying"):
        # Of one that was published before, the publisher finds the version again, unless something has changed.
        version = state.version if state.anchor == content else ""
        desk.change(phase="waiting", problem="", category="", version=version)
    try:
        check_request(request)
    except InputError as error:
        desk.change(phase="failed", problem=str(error))
        raise
    return desk, step


def counted_from_here(what: Publish) -> Publish:
    """The same, wherever it is read: a folder to publish to counts from the present one."""
    return replace(what, to=open_storage(what.to).url) if what.to else what


def check_request(request: Request) -> None:
    """InputError if it can be seen, without running anything of the user's, that it cannot be published."""
    what, root, to = request.what, request.root, open_storage(request.to).url
    if to == root or f"{to}/".startswith((f"{root}/{request.checkpoint}/", f"{root}/.headway/")):
        raise InputError(
            f"versions cannot be put into {to}: that is the checkpoints' own, which have a `latest`, too, and are "
            f"pruned. Name another folder, or one below it: {root}/published."
        )
    if not named.is_function(what.recipe):
        ready(what.recipe, _later if what.model else None)
    runner_named(what.runner)
    for name in (what.recipe, what.model, what.runner, *what.checks):
        if named.is_function(name):
            named.check_named(name, request.folder)


def _later() -> Any:
    """Stands for a function that the publisher calls."""


def submit(desk: Desk) -> str:
    """Gives a request to its runner. Says where it runs."""
    request, state = desk.request, desk.state()
    if state.phase in ("running", "retrying"):
        return f"process {state.pid} on {state.node}, which is at it already"
    return runner_named(request.what.runner).submit(request, desk, command(request))


def command(request: Request) -> Sequence[str]:
    """What publishes it, in the foreground."""
    return [request.python or sys.executable, "-m", "headway", "publish", "run", request.id]


def _device() -> str:
    """What the trainer computes on."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "cpu"
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else "cpu"
