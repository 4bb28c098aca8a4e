"""What runs inside a worker: it waits for its assignment, becomes the user's program, and says how that went before
the interpreter is taken down.

A worker that was forked from the zygote must not be told from a fresh `python script.py`: same arguments, paths,
environment, streams, signals and `__main__`, and random numbers of its own. What cannot be hidden: frames of this file
below the program's first one, torch and headway among the imported modules, the supervisor's socket among the open
descriptors, and the zygote's command line and environment in `/proc`. This module is loaded in every worker, so it
imports little.
"""

import atexit
import builtins
import gc
import io
import os
import random
import runpy
import signal
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.machinery import SourceFileLoader, SourcelessFileLoader, all_suffixes
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from headway.launch.channel import Channel
from headway.sessions import die_with_parent

TRACEBACK_LIMIT = 16 * 1024
"""Characters kept of an exception's traceback: its end, where the cause is."""

_NOT_BEFORE_WORK = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Schedulers send these to all processes of a job, and terminals to all of a group. They are the supervisor's, and from
the first line of the program on the worker's."""
_handlers: dict[int, Any] = {}
imports_set: dict[str, tuple[str | None, str | None]] = {}
"""Variables that preloaded packages have changed, from what to what: in a fresh worker their imports would."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What one worker is to do. The descriptors for its output come with it."""

    kind: str
    """`script`, `module`, or `program` for what is no Python, or another one."""
    argv: list[str]
    """As the program will see it: the script or module first."""
    environ: dict[str, str]
    folder: str
    """Where to leave what a supervisor may ask for while the program hangs."""
    rank: int = 0
    numa: str = ""
    streams: list[int] = field(default_factory=lambda: [1, 2])
    """Which of its own descriptors the ones that came with this replace."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What else is to be done in a worker, by whoever wires this room to others."""

    begins: Callable[[Assignment], None] = lambda assignment: None
    """The program is about to run."""
    fails: Callable[[], None] = lambda: None
    """It has failed, and may be killed any moment."""
    has_finished: Callable[[], bool] = lambda: False
    """Whether it has said that its work is done."""


def turn_deaf() -> None:
    """Ignores the signals that are not for this process until it has work; then they are as they were found, or as an
    import has set them meanwhile."""
    for number in _NOT_BEFORE_WORK:
        handler = signal.signal(number, signal.SIG_IGN)
        if number not in _handlers or handler != signal.SIG_IGN:
            _handlers[number] = handler


def listen_again() -> None:
    """Takes that back."""
    for number, handler in _handlers.items():
        signal.signal(number, handler or signal.SIG_DFL)


def work(channel: Channel, supervisor: int, hooks: Hooks) -> NoReturn:
    """Waits for an assignment and carries it out; never returns. Ends when the supervisor does."""
    die_with_parent(supervisor)
    _reseed()
    channel.send({"pid": os.getpid()})
    try:
        message, fds = channel.receive()
    except EOFError:  # it is not needed
        os._exit(0)
    assignment = Assignment(**message)
    _take_place(assignment, fds)
    if assignment.kind == "program":
        _become_program(assignment)
    _by_the_way(lambda: hooks.begins(assignment))
    atexit.register(gc.unfreeze)  # what the zygote froze; extension modules would call it leaked
    os.register_at_fork(after_in_child=channel.close)  # a child that comes back here must not speak for its parent
    me = os.getpid()
    code = _end(_outcome(assignment), channel)
    if code and os.getpid() == me:
        _by_the_way(hooks.fails)
    channel.send({"ends": code, "at_ns": time.monotonic_ns()})
    if code == -signal.SIGINT:  # Python itself ends by the signal then, after all that is to be done at exit
        sys.excepthook = lambda *_: None  # it is printed already
        raise KeyboardInterrupt
    if code == 0 and os.getpid() == me and hooks.has_finished():
        _leave_at_once()
    sys.exit(code)


def _leave_at_once() -> None:
    """Ends the process as Python would, but for taking down every module and object, of which torch has so many that it
    takes longer than a save. All that was registered for the end is done, and what was written is flushed.

    Returns where this Python does not have what it needs; then the process ends as ever.
    """
    last_calls = [getattr(threading, "_shutdown", None), getattr(atexit, "_run_exitfuncs", None)]
    if None in last_calls:
        return
    import ctypes

    atexit.unregister(gc.unfreeze)  # what the zygote froze is none of the program's, and stays shared with it
    for call in last_calls:
        with suppress(Exception):  # it is printed already
            call()  # type: ignore[misc]
    files = (io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)
    for each in gc.get_objects():
        if issubclass(type(each), files):  # `isinstance` would ask a weak proxy for what may be gone
            with suppress(Exception):  # closed, or its descriptor is
                each.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(0)


def _by_the_way(hook: Callable[[], None]) -> None:
    try:
        hook()
    except Exception as error:  # nothing of ours may stop the program, or take its failure's place
        print(f"headway: this worker is not recorded as it should be ({error!r}).", file=sys.stderr, flush=True)


def as_program(assignment: Assignment) -> Assignment:
    """The same, by an interpreter that has imported nothing of ours."""
    options = ["-u", "-m"] if assignment.kind == "module" else ["-u"]
    return replace(assignment, kind="program", argv=[sys.executable, *options, *assignment.argv])


def send_assignment(channel: Channel, assignment: Assignment, fds: list[int]) -> bool:
    """Gives a waiting worker its work; False if it is gone."""
    return channel.send(asdict(assignment), fds)


# --- becoming the program --------------------------------------------------------------------------------------------


def _take_place(assignment: Assignment, fds: list[int]) -> None:
    for fd, place in zip(fds, assignment.streams, strict=True):
        os.dup2(fd, place)
        os.close(fd)
        _reopen(place)
    listen_again()
    if dict(os.environ) != assignment.environ:
        os.environ.clear()
        os.environ.update(assignment.environ)
    _set_as_imports_do()
    sys.argv[:] = assignment.argv
    sys.orig_argv[:] = [sys.executable, "-u", *(["-m"] if assignment.kind == "module" else []), *assignment.argv]
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # which a fork does not before Python 3.13
    _settle_threads()
    if assignment.numa:
        _bind(assignment)


def _set_as_imports_do() -> None:
    for name, (before, after) in imports_set.items():
        if os.environ.get(name) == before:
            os.environ.pop(name, None)
            os.environ |= {} if after is None else {name: after}


def _reopen(place: int) -> None:
    """Python's stream on this descriptor, as Python makes it for what is there now. It stays the object that modules
    may hold already."""
    stream = (sys.stdin, sys.stdout, sys.stderr)[place]
    if isinstance(stream, io.TextIOWrapper):
        raw = io.FileIO(place, "w", closefd=False)
        raw.name = stream.name
        stream.__init__(raw, stream.encoding, stream.errors, "\n", stream.line_buffering, stream.write_through)  # type: ignore[misc]


def _become_program(assignment: Assignment) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and what is ignored stays so
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(assignment.argv[0], assignment.argv)
    except OSError as error:
        print(f"headway: cannot run {assignment.argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _reseed() -> None:
    """Random numbers of its own, as every fresh process has: forked ones would all draw the same."""
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)


def _settle_threads() -> None:
    """Gives the numerical libraries the threads that the zygote, which must have none, kept them from starting."""
    from headway.launch.threads import allow_threads

    allow_threads(os.environ)


def _bind(assignment: Assignment) -> None:
    """Binds this process to the processors near its device, as `torchrun --numa-binding` does."""
    try:
        from torch.numa import binding

        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(assignment.numa))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        binding._maybe_apply_numa_binding_to_current_process(gpu_index=local_rank, numa_options=options)
    except (ImportError, AttributeError, TypeError) as error:  # private: another torch may do it otherwise
        print(f"headway: not bound to processors near the device ({error}).", file=sys.stderr, flush=True)


# --- running it ------------------------------------------------------------------------------------------------------


def _outcome(assignment: Assignment) -> BaseException | None:
    """Runs the program. Returns what it ended with, if that is an exception."""
    run = _run_module if assignment.kind == "module" else _run_script
    try:
        run(assignment.argv)
    except BaseException as error:
        return error.with_traceback(_without_us(error.__traceback__))
    return None


def _end(error: BaseException | None, channel: Channel) -> int:
    """Does what Python does about the exception that ended a program, and tells of it. Returns the exit code."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return _exit_code(error)
    channel.send({"exception": _described(error), "at_ns": time.monotonic_ns()})
    code = _print_as_python_does(error)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else code


def _run_script(argv: list[str]) -> None:
    path = os.path.join(os.getcwd(), argv[0])
    sys.argv[:] = argv
    main = _fresh_main()
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        _put_first(path)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # what Python itself calls
        return
    _put_first(os.path.dirname(os.path.realpath(path)))
    loader = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
    main.__loader__ = loader("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None)
    exec(_code(path), main.__dict__)


def _code(path: str) -> Any:
    if path.endswith(".pyc"):
        return SourcelessFileLoader("__main__", path).get_code("__main__")
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(2) from None
    return compile(source, path, "exec", dont_inherit=True)


def _run_module(argv: list[str]) -> None:
    _put_first(os.getcwd())
    sys.argv[:] = ["-m", *argv[1:]]
    _fresh_main()
    runpy._run_module_as_main(argv[0])  # type: ignore[attr-defined]  # what `python -m` calls


def _fresh_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = main
    return main


def _put_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _exit_code(error: SystemExit) -> int:
    code = error.code
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF if abs(code or 0) < 1 << 63 else 0xFF
    print(code, file=sys.stderr, flush=True)
    return 1


def _described(error: BaseException) -> str:
    """Type, text and traceback, the cause first if there is one: what a log would show."""
    try:
        return "".join(traceback.format_exception(error))[-TRACEBACK_LIMIT:].encode("utf-8", "replace").decode()
    except Exception as second:  # its own text may raise
        return f"{type(error).__name__} (cannot be shown: {type(second).__name__})"


def _print_as_python_does(error: BaseException) -> int:
    """Shows it by the program's own hook, if it has one. Returns the exit code, which the hook may choose."""
    code = 1
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except BaseException as second:
        print("Error in sys.excepthook:", file=sys.stderr)
        second = second.with_traceback(_without_us(second.__traceback__))
        sys.__excepthook__(type(second), second, second.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the program may have put anything there
            stream.flush()
    return code


def _without_us(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first line on, which is all that Python would show."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def folder_modules(folder: str) -> set[str]:
    """The names that modules of the script's folder would be imported by."""
    found = set()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            name, dot, suffix = entry.name.partition(".")
            if f"{dot}{suffix}" in all_suffixes() or os.path.exists(os.path.join(entry.path, "__init__.py")):
                found.add(name)
    return found
