"""Whole families of processes: each worker leads a session of its own, and is ended together with all that is in it.

That is all a worker starts, in whatever process group and however orphaned, except what leaves the session by
`setsid`: whoever does that wants to outlive the worker, as under torchrun.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PF_EXITING = 0x4


def adopt_orphans() -> None:
    """Makes this process the new parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends; ends it now if that is too late."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Takes that back."""
    _prctl(_PR_SET_PDEATHSIG, 0)


_libc = ctypes.CDLL(None, use_errno=True)  # looked up here: after a fork, little may be done


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def members(leaders: Collection[int]) -> list[int]:
    """The living processes of the sessions that these processes lead, or led."""
    found = []
    for name in os.listdir("/proc") if leaders else ():
        if name.isdecimal():
            state, session = _state_and_session(int(name))
            if session in leaders and state not in ("Z", "X"):
                found.append(int(name))
    return found


def end(
    leaders: Collection[int], patience_s: float = 5.0, among: Callable[[int], bool] = lambda pid: True
) -> list[int]:
    """Kills all that is in these sessions, or those `among` it that are meant; also what they start meanwhile. Returns
    what cannot be killed: a process that the kernel holds in a call to a device or a file system."""
    until = time.monotonic() + patience_s
    while (alive := list(filter(among, members(leaders)))) and time.monotonic() < until:
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    return alive


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would else end it."""
    with suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def is_ending(pid: int) -> bool:
    """Whether the kernel is taking a process down, or has. Until that is over its exit code is not known, though other
    processes may have seen its connections close."""
    fields = _fields(pid)
    return not fields or fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _PF_EXITING)


def signal_name(number: int) -> str:
    """A signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"


def work_done(leaders: Collection[int]) -> dict[int, tuple[int, int]]:
    """What each of these sessions has done so far, with children that were waited for: kernel ticks of processor time,
    and bytes read and written."""
    done = dict.fromkeys(leaders, (0, 0))
    for pid in members(leaders):
        with suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            with open(f"/proc/{pid}/io", "rb") as file:
                moved = sum(int(line.split()[1]) for line in file if line.startswith((b"rchar", b"wchar")))
            ticks, size = done[int(fields[3])]
            done[int(fields[3])] = (ticks + sum(map(int, fields[11:15])), size + moved)
    return done


def reap_others(ours: Collection[int]) -> None:
    """Takes the ended children that were adopted: nobody else will ask how they ended. Those of this process's own
    session it started itself, and somebody here is waiting for them."""
    for pid in _children():
        state, session = _state_and_session(pid)
        if pid not in ours and state == "Z" and session != os.getsid(0):
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found += map(int, file.read().split())
    return found


def _state_and_session(pid: int) -> tuple[str, int]:
    fields = _fields(pid)
    return (fields[0].decode(), int(fields[3])) if fields else ("X", 0)


def _fields(pid: int) -> list[bytes]:
    """What /proc/PID/stat says, from the state on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []
