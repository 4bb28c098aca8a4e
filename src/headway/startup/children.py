"""Stages with a process of their own: forked before any thread is started, and given their work when it is due."""

import ctypes
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1


class ChildFailed(RuntimeError):
    """A stage's process ended, or what it raised there cannot travel; then this has it as text."""


class Child:
    """A copy of this process that waits for one call of one function. What it changes stays in it; only the function's
    result comes back."""

    def __init__(self, call: Callable[[Mapping[str, Any]], Any]) -> None:
        self._line, theirs = Pipe()
        parent = os.getpid()
        _flush()  # else the copy would print what waits to be printed here once more
        self.pid = os.fork()
        if not self.pid:
            self._line.close()
            _serve(call, theirs, parent)
        theirs.close()

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """The function's result for these arguments. Raises what it raised, or ChildFailed if its process ended."""
        try:
            sent = pickle.dumps(dict(arguments), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise TypeError(f"what it needs cannot be sent to its process ({error}): use another lane") from error
        try:
            self._line.send_bytes(sent)
            received = self._line.recv_bytes()
        except (EOFError, OSError):
            raise ChildFailed(f"its process {_ending(self._reap())}") from None
        failure, trace, result = pickle.loads(received)
        if failure is not None:
            failure.add_note(f"headway: in its process:\n{trace}")
            raise failure
        return result

    def kill(self) -> None:
        """Ends the process, if it has not ended."""
        if pid := self.pid:  # read once: another thread may reap it now, and 0 would be this whole process group
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the process, and leaves nothing of it."""
        self.kill()
        self._reap()
        self._line.close()

    def _reap(self) -> int:
        pid, self.pid = self.pid, 0
        with suppress(ChildProcessError):  # this process has children reaped elsewhere, or ignores SIGCHLD
            return os.waitpid(pid, 0)[1] if pid else 0
        return 0


@contextmanager
def signals_later() -> Iterator[None]:
    """Has the handlers of signals wait for the end of this block: one that raises as a process or thread is started
    would lose it. They run in the main thread, so only there is anything to do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    found = {number: handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))}
    try:
        for number in found:
            signal.signal(number, lambda each, _: came.append(each))
        yield
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _serve(call: Callable[[Mapping[str, Any]], Any], line: Connection, parent: int) -> NoReturn:
    """In the child: never returns, and runs nothing of what its parent does at exit."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal it reaches both, and the parent sees to it
            outcome = _outcome(call, line)
            _flush()
            line.send_bytes(outcome)
            code = 0
    except (EOFError, OSError):  # it is not needed any more
        pass
    finally:
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, or closed
            stream.flush()


def _outcome(call: Callable[[Mapping[str, Any]], Any], line: Connection) -> bytes:
    """An exception, where it was raised, and a result."""
    try:
        result = call(pickle.loads(line.recv_bytes()))
    except BaseException as error:
        return _raised(error)
    try:
        return pickle.dumps((None, "", result), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return _raised(TypeError(f"its result cannot be sent from its process ({error}): use another lane"))


def _raised(error: BaseException) -> bytes:
    """An exception that the other side can have: as it is, or by its text."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        if not isinstance(error, Exception):  # an exit of this process is a failure there
            raise TypeError
        sent = pickle.dumps((error, trace, None))
        pickle.loads(sent)
    except Exception:  # many classes of exceptions can be pickled, and not be read again
        sent = pickle.dumps((ChildFailed(trace.rpartition("\n")[2]), trace, None))
    return sent
