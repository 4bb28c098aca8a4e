"""What is to be published, and how far that has got: two small files in a folder of its own below headway's home.

::

    $HEADWAY_HOME/publish/<id>/
      request.json      what was asked for
      state.json        how far it has got; replaced whole, so that a reader never sees a half of it
      log               what the publisher said
      lock              held by whoever publishes
      worker            the session of who does the work for them
      token             what tells it from the same request in another home
      work/<key>/       steps that are done, where the target is no folder of this machine
"""

import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from headway.errors import HeadwayError, InputError, PlatformError, nearest
from headway.events.clock import living_ticks, pid_space
from headway.paths import folder_name
from headway.storage import LocalFolder

REQUEST, STATE, LOG, LOCK, TOKEN, WORK = "request.json", "state.json", "log", "lock", "token", "work"

Phase = Literal["waiting", "running", "retrying", "published", "rejected", "failed", "interrupted"]
ENDED = ("published", "rejected", "failed")
"""Phases after which nobody works on it. After `failed` and `rejected` it can be tried again."""

BEGINS_S = 60.0
"""After so long a process that was started to publish has begun, or never will."""

PATIENCE_S = 0.5
"""How long whoever wants to publish waits for the lock: somebody may only be looking whether it is free."""

ALLOWED = ("signature", "size", "latency")
"""What may differ from the version before, if one says so."""


@dataclass(frozen=True)
class Publish:
    """What becomes of a checkpoint, and where."""

    recipe: str = "safetensors"
    """`file.py:function` or `package.module:function`, called with `(anchor, out)`; or ready ones, by name, with commas
    in between: safetensors, export, aotinductor, card."""
    model: str = ""
    """A function, named in the same way, that gives the `Served` which `export` and `aotinductor` need."""
    to: str = ""
    """Folder or URL of the versions. Default: `published` within the folder of the checkpoints."""
    part: str = "model"
    """Which part of the checkpoint holds the weights; where there is no such part, all of it does."""
    checks: tuple[str, ...] = ()
    """Functions, named in the same way, called with the folder of what is about to be published: they raise, or return
    what is wrong with it."""
    allow: tuple[str, ...] = ()
    """What may differ from the version before: signature, size, latency."""
    promote: bool = True
    """Whether `latest` moves to it."""
    runner: str = "local"
    """Who does it: local, slurm, or `package.module:function`."""
    sbatch: str = ""
    """Options for `sbatch`, as on a command line: --partition=cpu --mem=64G."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", os.fspath(self.to or ""))
        for name in ("recipe", "model", "part", "runner", "sbatch"):
            if not isinstance(value := getattr(self, name), str):
                hint = "Functions are given by name, as file.py:function: another process calls them."
                raise InputError(f"{name} is {value!r}, which is no text. {hint}")
        for name in ("checks", "allow"):
            if isinstance(value := getattr(self, name), str):
                raise InputError(f"{name} is {value!r}. Give a tuple, also of one: {name}=({value!r},)")
        for each in self.allow:
            if each not in ALLOWED:
                raise InputError(f"allow has {each!r}, which cannot be allowed: {nearest(each, ALLOWED)}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One thing to publish."""

    id: str
    what: Publish
    root: str
    """Where the checkpoint is: the absolute path or URL of the folder it lies in."""
    checkpoint: str
    """Its name in there."""
    job: str = ""
    accelerators: int = 0
    """How many the trainer would have kept busy meanwhile: its ranks."""
    device: str = ""
    """What they are: cuda, cpu, ..."""
    folder: str = ""
    """Where the trainer ran: names of files count from there."""
    python: str = ""
    asked_s: float = 0.0
    """Seconds since 1970."""

    @property
    def to(self) -> str:
        """Where the versions are."""
        return self.what.to or f"{self.root}/published"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str | bytes) -> "Request":
        try:
            told: dict[str, Any] = json.loads(text)
            what = told.pop("what")
            what = Publish(**what | {"checks": tuple(what["checks"]), "allow": tuple(what["allow"])})
            known = {each.name for each in fields(Request)}  # a request may wait for a headway of another version
            return Request(what=what, **{key: value for key, value in told.items() if key in known})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"this is no request to publish ({type(error).__name__}: {error}).") from error


def request_id(job: str, root: str, checkpoint: str, what: Publish) -> str:
    """The same for the same checkpoint, recipe and target: asking twice is asking once."""
    told = [root, checkpoint, what.recipe, what.model, what.to, what.part, *what.checks]
    return folder_name(f"{job or 'model'}-{checkpoint}-{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:8]}")


@dataclass(frozen=True, kw_only=True)
class State:
    """How far it has got."""

    phase: Phase = "waiting"
    doing: str = ""
    """The step or check under way."""
    done: int = 0
    total: int = 0
    """Bytes of it, where that is known."""
    steps: tuple[str, ...] = ()
    """Those that are done."""
    tries: int = 0
    problem: str = ""
    """Why it failed, was rejected, or is tried again."""
    category: str = ""
    """What kind of failure that was."""
    version: str = ""
    """The name of what was published."""
    anchor: str = ""
    """The content of the checkpoint that it was made of: one of the same name may have been saved since."""
    began_s: float = 0.0
    changed_s: float = 0.0
    node: str = ""
    boot: str = ""
    pid: int = 0
    """Who publishes."""
    ticks: int = 0
    """When that process began: numbers of processes are used again."""
    queued: str = ""
    """What a scheduler calls it."""


class Desk:
    """One request's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = LocalFolder(folder)
        self.work = folder / WORK
        self.log = folder / LOG

    @property
    def request(self) -> Request:
        try:
            return Request.from_json(self._files.read(REQUEST))
        except FileNotFoundError as error:
            raise InputError(f"there is no request to publish in {self.folder}.") from error
        except InputError as error:
            raise InputError(f"{self.folder / REQUEST} cannot be used: {error} Ask again, or delete it.") from error

    def ask(self, request: Request) -> None:
        """Writes down what is asked for."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._files.write(REQUEST, request.to_json().encode())

    def state(self) -> State:
        """As it is now. Whoever was at work and is no more has been interrupted."""
        state = self._read()
        goes_on = f"`headway publish run {self.folder.name}` goes on."
        if state.phase in ("running", "retrying") and self._is_gone(state):
            return replace(state, phase="interrupted", problem=f"whoever published it ended without a word. {goes_on}")
        if state.phase == "waiting" and self._nobody_came(state):
            problem = f"whoever was to publish it has not begun; the log may tell why: {self.log}. {goes_on}"
            return replace(state, phase="interrupted", problem=problem)
        return state

    def _nobody_came(self, state: State) -> bool:
        """Whether a process of this machine was started for it, and is not at it."""
        waited_s = time.time() - state.changed_s if state.changed_s else 0.0
        if self.request.what.runner != "local" or waited_s < BEGINS_S:
            return False
        return self._is_free("waiting")

    def _is_gone(self, state: State) -> bool:
        """Whether the process that was at it is no more. One of another machine or container cannot be looked at: there
        the lock tells, which the kernel lets go when its holder ends."""
        boot, here = state.boot.split(), pid_space().split()
        if boot == here:
            return living_ticks(state.pid) != state.ticks
        if state.node == os.uname().nodename and boot[:1] != here[:1]:  # this machine was started anew since
            return True
        return self._is_free("running", "retrying")

    def _is_free(self, *phases: Phase) -> bool:
        """Whether nobody holds it, although it is in one of these phases. False if that cannot be told."""
        try:
            with self.held(patience_s=0.0):
                return self._read().phase in phases
        except (HeadwayError, OSError):
            return False

    def _read(self) -> State:
        try:
            told = json.loads(self._files.read(STATE))
            told["steps"] = tuple(told.get("steps", ()))
            known = {each.name for each in fields(State)}
            return State(**{key: value for key, value in told.items() if key in known})
        except (FileNotFoundError, ValueError, TypeError):
            return State()

    def change(self, **changes: Any) -> State:
        """Replaces what is said to change, whole."""
        state = replace(self._read(), **changes, changed_s=time.time())
        self._files.write(STATE, json.dumps(asdict(state)).encode())
        return state

    def begin(self, tries: int) -> State:
        """This process is at work on it."""
        pid = os.getpid()
        return self.change(
            phase="running", doing="starting", done=0, total=0, tries=tries, problem="", category="",
            node=os.uname().nodename, boot=pid_space(), pid=pid, ticks=living_ticks(pid) or 0,
            began_s=self._read().began_s or time.time(),
        )  # fmt: skip

    @contextmanager
    def held(self, patience_s: float = PATIENCE_S) -> Iterator[None]:
        """For one process at a time; InputError if another one is at it, PlatformError if its folder has no locks. The
        kernel lets go when that one ends."""
        with open(self.folder / LOCK, "a+") as file:
            try:
                _lock(file.fileno(), patience_s)
            except BlockingIOError as error:
                state = self._read()
                raise InputError(
                    f"{self.folder.name} is being published already, by process {state.pid} on {state.node}. "
                    f"`headway publish status {self.folder.name}` tells how far it is."
                ) from error
            except OSError as error:
                raise PlatformError(
                    f"{self.folder} cannot be locked ({error.strerror}), so that two might publish the same at once. "
                    "Its file system has no locks, or its lock server does not answer: mount it with locks, or name a "
                    "home on another one with HEADWAY_HOME."
                ) from error
            yield

    @property
    def token(self) -> str:
        """A name that no other desk has, not even one for the same request in another home."""
        path = self.folder / TOKEN
        with suppress(FileExistsError), open(path, "x") as file:
            file.write(secrets.token_hex(4))
        return path.read_text() or "0"  # whoever made it died before it was written


def open_desk(home: Path, request: Request) -> Desk:
    """The folder of a request, which is written down in it."""
    desk = Desk(home / "publish" / request.id)
    try:
        desk.ask(request)
    except OSError as error:
        raise PlatformError(
            f"the request to publish cannot be written to {desk.folder} ({error.strerror}). Make room or name another "
            f"home with HEADWAY_HOME; then: headway publish submit {request.root}/{request.checkpoint}"
        ) from error
    return desk


def find_desk(home: Path, name: str) -> Desk:
    """The request of that id, or the only one whose id begins so."""
    desks = {desk.folder.name: desk for desk in all_desks(home)}
    found = [desk for id_, desk in desks.items() if id_.startswith(name)]
    if name in desks:
        return desks[name]
    if len(found) != 1:
        if found:
            raise InputError(f"several requests begin with {name!r}: {', '.join(each.folder.name for each in found)}.")
        hint = nearest(name, desks) if desks else "there is none yet."
        raise InputError(f"there is no request to publish {name!r} in {home}: {hint}")
    return found[0]


def _lock(file: int, patience_s: float) -> None:
    """Takes the lock; BlockingIOError if another one keeps it for longer than who only looks whether it is free."""
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.02)


def all_desks(home: Path) -> list[Desk]:
    """All requests, the newest first."""
    folder = home / "publish"
    names = [entry for entry in folder.iterdir() if (entry / REQUEST).is_file()] if folder.is_dir() else []
    return [Desk(entry) for entry in sorted(names, key=lambda entry: -(entry / REQUEST).stat().st_mtime)]


__all__ = ["Desk", "Publish", "Request", "State", "all_desks", "find_desk", "open_desk", "request_id"]
