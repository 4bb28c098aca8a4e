"""The zygote: a process that has imported torch once, and forks each worker from there.

It never trains, holds no thread and no device, and outlives neither side of its work: when the supervisor is gone, it
ends what is left of the workers, and then itself.
"""

import gc
import importlib
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NoReturn

from headway import sessions
from headway.launch import worker
from headway.launch.channel import Channel, Message
from headway.launch.threads import count_threads, forbid_threads
from headway.launch.worker import Hooks, folder_modules, turn_deaf, work

PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "torch.optim", "torch.utils.data")
"""What every trainer imports; building its first optimizer imports `torch._dynamo`, which takes as long as torch."""

_INSTALLED = ("site-packages", "dist-packages")
_PYTHONS = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

AHEAD = "?"
"""Stands before a module that nobody asked for: if it cannot be had here, it is as if it had not been named."""


def serve(control: Channel, supervisor: int, preload: Sequence[str], folder: str, hooks: Hooks) -> NoReturn:
    """Imports what is to be preloaded, the program's own modules from its folder; says so, and forks a worker for each
    request until the supervisor is gone. Asked for an heir it forks one, which imports more, and serves in turn."""
    turn_deaf()
    sessions.die_with_parent(supervisor)  # an import may hang
    environ = dict(os.environ)
    gc.disable()  # imports make objects that stay: to look for cycles all the while is a quarter of their time
    forbid_threads(os.environ)
    failed = _import_all([name for name in preload if not name.startswith(AHEAD)], folder)
    ahead = [name.removeprefix(AHEAD) for name in preload if name.startswith(AHEAD)]
    while True:
        if ahead and not _unfit() and (bad := _import_ahead(ahead, folder, control)):
            control.send({"dropped": bad})
            _start_over(control, environ, [name for name in preload if name != AHEAD + next(iter(bad))])
        turn_deaf()  # to what an import has handlers for, too
        gc.freeze()
        gc.enable()
        unfit = _unfit()
        sessions.outlive_parent()
        control.send({"unfit": unfit, "failed": failed, "modules": _top_level()})
        message, channel = _serve_until_forked(control, not unfit)
        control.close()
        if channel is None:
            os._exit(0)
        if "heir" not in message:
            work(channel, supervisor, hooks)
        control, ahead, failed = channel, message["heir"], {}
        preload = [*preload, *(AHEAD + name for name in ahead)]
        sessions.die_with_parent(supervisor)
        gc.disable()
        control.send({"pid": os.getpid()})


def _serve_until_forked(control: Channel, forks: bool) -> tuple[Message, Channel | None]:
    """Returns in each child what was asked for, and its channel; without one in the zygote itself, when its supervisor
    is gone."""
    guarded: list[int] = []
    while True:
        try:
            message, fds = control.receive()
        except EOFError:
            sessions.end(guarded)
            return {}, None
        guarded = message.get("guard", guarded)
        for fd in fds:
            if forks and _fork_twice():
                return message, Channel(socket.socket(fileno=fd))
            os.close(fd)


def _fork_twice() -> bool:
    """Forks a child that is nobody's here: it becomes the supervisor's. True in that child."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    os.setsid()
    while os.getppid() == parent:
        time.sleep(0.0005)
    return True


def _import_all(names: Sequence[str], folder: str) -> dict[str, str]:
    """Imports all it can. Returns what could not be imported, and why."""
    failed = {}
    first = sys.path[:1]
    for name in names:
        if not sys.flags.safe_path:
            sys.path[0] = first[0] if name in PRELOAD else folder
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # the worker will meet it where the program imports it, if it does
            failed[name] = f"{type(error).__name__}: {error}"
    sys.path[:1] = first
    return failed


def _import_ahead(names: Sequence[str], folder: str, control: Channel) -> dict[str, str]:
    """Imports installed packages until one does what would not happen, or could be seen, in a fresh worker. Returns
    that one, and why."""
    given = dict(os.environ)
    for name in names:
        control.send({"importing": name})  # it may be the last word
        if why := _why_not_ahead(name, folder_modules(folder)):
            return {name: why}
    for name, (before, after) in _changes(given, os.environ).items():
        worker.imports_set[name] = (worker.imports_set.get(name, (before, after))[0], after)
    return {}


def _why_not_ahead(name: str, own: set[str]) -> str:
    """Imports a package; why that should not have been done here, empty if all is well. `own` are modules of the
    program's."""
    before = set(sys.modules)
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    new = sys.modules.keys() - before
    if shadows := sorted(own & new):
        return f"the program has a module of its own called {shadows[0]}"
    if strange := sorted(each for each in new if not _is_installed(each)):
        return f"it imports {strange[0]}, which is not installed and may change"
    return _unfit()


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """The variables that have changed, with both values."""
    names = {name for name, _ in before.items() ^ after.items()}
    return {name: (before.get(name), after.get(name)) for name in names}


def _start_over(control: Channel, environ: Mapping[str, str], preload: Sequence[str]) -> NoReturn:
    """Begins anew in this process's place, with these modules: what an import has done cannot be undone otherwise."""
    worker.listen_again()
    words = list(sys.orig_argv)
    at = words.index("-c") + 2  # what `crew` starts it with: fd, supervisor, preload, folder, …
    words[at], words[at + 2] = str(control.fileno()), ",".join(preload)
    os.set_inheritable(control.fileno(), True)
    os.execve(sys.executable, words, dict(environ))


def _unfit() -> str:
    """Why this process cannot be forked; empty if it can."""
    if (count := count_threads()) > 1:
        return f"{count - 1} threads were started by an import"
    torch = sys.modules.get("torch")
    if torch is None:
        return "torch is not imported"
    return "an import initialised CUDA" if torch.cuda.is_initialized() or _children_lack_cuda() else ""


def _children_lack_cuda() -> bool:
    """Whether torch refuses CUDA to forked processes. It does even after an import only counted the devices."""
    torch = sys.modules["torch"]
    if not torch.backends.cuda.is_built():
        return False
    child = os.fork()
    if not child:
        os._exit(getattr(torch.cuda, "_is_in_bad_fork", bool)())
    return os.waitpid(child, 0)[1] != 0


def _is_installed(name: str) -> bool:
    """Whether a module is a package's or Python's, as far as its file tells."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return not os.path.isabs(file) or file.startswith(_PYTHONS) or any(f"/{each}/" in file for each in _INSTALLED)


def _top_level() -> dict[str, str]:
    """What is imported, and the folder it was found in."""
    return {name: _place(module) for name, module in sys.modules.copy().items() if "." not in name}


def _place(module: ModuleType) -> str:
    file = getattr(module, "__file__", None) or ""
    levels = 2 if hasattr(module, "__path__") else 1
    for _ in range(levels):
        file = os.path.dirname(file)
    return os.path.realpath(file) if file else ""
