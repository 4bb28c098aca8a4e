"""A parent for pytest that leaves no process behind.

pytest goes on in a child with a session of its own. The parent adopts every orphan below it. When pytest ends, or when
the parent is asked to end (Ctrl-C, SIGTERM, SIGHUP), it kills whatever is left.
"""

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import shared

GRACE_S = float(os.environ.get("TESTS_GRACE_S", "5"))
"""How long an interrupted pytest may take to tear down its fixtures. The guard's own tests are more patient."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def continue_in_a_guarded_child() -> None:
    """Return in a child process. The parent stays here, and exits with the child's exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    listened = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, *listened])
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.environ[shared.FOLDER] = tempfile.mkdtemp(prefix="headway-tests-")
    parent, child = os.getpid(), os.fork()
    if child:
        os._exit(_guard(child, listened))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    # A job in the background starts with these ignored, and what the tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD, *listened])


def descendants(pid: int) -> list[int]:
    """The processes below one, zombies included."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _guard(child: int, listened: list[signal.Signals]) -> int:
    """Wait for the child, end it if asked to, and kill what is left. Return its exit code, or 128 + the signal."""
    asked = code = None
    while asked is None and code is None:
        info = signal.sigwaitinfo([signal.SIGCHLD, *listened])
        asked = info.si_signo if info.si_signo != signal.SIGCHLD else None
        code = _reap(child)
    if asked is not None and code is None:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGINT)  # what a terminal does: pytest, its workers, and what they started
        if not _ends(child):
            _kill_all(but=child)  # so that pytest has no more workers to wait for, and prints its summary
            _ends(child)
    _kill_all()
    shutil.rmtree(os.environ[shared.FOLDER], ignore_errors=True)
    if asked is not None:
        return 128 + asked
    assert code is not None
    return code if code >= 0 else 128 - code


def _ends(child: int) -> bool:
    """Whether the child ends within the time of grace."""
    deadline = time.monotonic() + GRACE_S
    while _reap(child) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _reap(child: int) -> int | None:
    """Bury every zombie; return the child's exit code if it was among them."""
    code = None
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if found[0] == child:
                code = os.waitstatus_to_exitcode(found[1])
    return code


def _kill_all(but: int | None = None) -> None:
    """Kill all processes below this one, again and again, since a process may fork before it is killed."""
    deadline = time.monotonic() + GRACE_S
    while (left := set(descendants(os.getpid())) - {but}) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        if but is None:
            _reap(0)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
