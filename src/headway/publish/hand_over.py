"""From a trainer to whoever publishes: the checkpoint is pinned, the request written down, and given to a runner."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.layout import step_of
from headway.errors import HeadwayError, InputError
from headway.publish import named
from headway.publish.anchor import Code, NotCommitted, pin
from headway.publish.ready import ready
from headway.publish.request import Desk, Publish, Request, open_desk, request_id
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
    told = {"id": request.id, "checkpoint": checkpoint, "recipe": what.recipe, "to": request.to, "runner": what.runner}
    try:
        known = {"job": process.job, "attempt": process.attempt, "data": dict(data), "torch": _torch()}
        desk, step = ask(home, request, known | (code.told() if code else {}))
        where = submit(desk)
        return told | {"step": step, "submitted": True, "why": "", "where": where}
    except (HeadwayError, OSError) as error:
        why = f"the model is not published yet: {error}\n  {root}/{checkpoint} is saved and is kept for it. Then: "
        return told | {"submitted": False, "why": f"{why}headway publish submit {request.id}"}


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
    for name in (what.recipe, what.model, *what.checks):
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


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
