"""The witness: a small process that outlives a command, and writes down when the command began and ended, and how.

It also sees how the measured processes of this node end: after a crash under torchrun, the order of their ends tells
which rank failed first.
"""

import fcntl
import os
import re
import select
import signal
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from headway.config import Settings
from headway.events.clock import start_ticks
from headway.events.journal import Writer
from headway.events.process import open_pidfd, process_name
from headway.events.vocabulary import Mark, Process, ProcessGone, clean_text, encode
from headway.paths import JOURNAL, JobPaths, folder_name
from headway.run import ROLL_UP, open_somewhere, takes_the_spool

PATIENCE_S = 2.0
"""Longest time that a command waits for its witness to begin."""

LOOK_S = 0.5
"""How often the witness looks for new journals, and whether its own is still there."""

REAP_S = 1.0
"""How long it waits for the parent of an ended command to ask how that ended: only then does the kernel tell others."""

_TICK_NS = 50_000_000
"""Times of files are no finer than this."""

_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes)
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("=QQ11Ii")  # mask, then what is not asked for, then the exit status

# Schedulers send these to all processes of a job, some long before its end. The witness leaves with its command.
_NOT_FOR_IT = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def leave_witness(process: Process, settings: Settings) -> str:
    """Starts a witness of this process, which may then replace itself by `exec`. Returns what the user should know of
    it: mostly nothing. OSError if it cannot be started.

    A process that adopts orphans, such as the first one of a container, gets none: the witness would turn up among the
    command's own children, and not outlive it.
    """
    pidfd = open_pidfd(process.pid)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        _become_witness(process, settings, pidfd, tell)
    os.close(pidfd)
    os.close(tell)
    for whom in (child, -child):  # -child: whoever is left of its session, if this process adopted it
        with suppress(ChildProcessError):
            os.waitpid(whom, 0)
    text = os.read(told, 4096) if _happens(told, select.POLLIN, PATIENCE_S) else b""
    os.close(told)
    return text.decode("utf-8", "replace")


def _become_witness(process: Process, settings: Settings, pidfd: int, tell: int) -> NoReturn:
    try:
        for number in _NOT_FOR_IT:
            signal.signal(number, signal.SIG_IGN)
        os.setsid()
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.0005)
        if os.getppid() != process.pid:
            pidfd, tell = _let_go_but(pidfd, tell)
            _witness(process, settings, pidfd, tell)
    finally:
        os._exit(0)  # the caller's stack must not go on in two processes, whatever happened


def _let_go_but(*kept: int) -> list[int]:
    """Gives up the command's files, terminal and folder, but for the kept descriptors; returns those anew.

    Whoever reads the command's output must see it end, and what it locked or mounted must be free after it.
    """
    kept_now = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in kept]
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in kept_now:
            with suppress(OSError):  # the listing's own is closed already
                os.close(fd)
    os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: 0
    os.dup2(0, 1)
    os.dup2(0, 2)
    os.chdir("/")
    with suppress(OSError):
        Path("/proc/self/comm").write_text("headway-witness")
    return kept_now


def _witness(process: Process, settings: Settings, pidfd: int, tell: int) -> None:
    try:
        writer, note = open_somewhere(settings, lambda folder: _create(folder, process))
        if writer is not None:
            writer.append(encode(process))
    except Exception as error:  # the command runs all the same, and its user is told
        writer, note = None, str(error)
    with suppress(OSError):  # nobody waits for it any more
        os.write(tell, note.encode("utf-8", "replace")[:4096])
    os.close(tell)
    if writer is None:
        return
    if takes_the_spool(settings):
        _ensure_collector(process, settings, writer)
    _watch(process, writer, pidfd)


def _watch(process: Process, writer: Writer, pidfd: int) -> None:
    """Write down how the command and its measured processes end. Leave without a word if the journal is deleted."""
    ticks, others = start_ticks(process.pid), _Others(process, writer)
    while not others.wait(pidfd, LOOK_S):
        if not writer.path.exists():
            return
        others.find()
    now = time.monotonic_ns()
    code = _exit_code(pidfd, process.pid, ticks, patience_s=REAP_S)
    writer.append(encode(ProcessGone(t_ns=now, exit_code=code)))
    writer.close()


class _Others:
    """The measured processes of a command on this node, found by their journals."""

    def __init__(self, process: Process, writer: Writer) -> None:
        self._command, self._writer = process.pid, writer
        ours = folder_name(f"{process.node}-{process.boot[:8]}-")
        self._name = re.compile(rf"({re.escape(ours)}(\d+)-(\d+)){re.escape(JOURNAL)}")
        self._known: set[str] = set()
        self._watched: dict[int, tuple[str, int, int]] = {}
        """By pidfd: name, process id, start in kernel ticks."""
        self._changed_ns = 0

    def find(self) -> None:
        """Begin to watch processes that have appeared since the last call."""
        folder = self._writer.path.parent
        changed_ns = folder.stat().st_mtime_ns
        if changed_ns == self._changed_ns:
            return
        # A file that is made within the same tick of the file system's clock leaves no other trace: look once more.
        self._changed_ns = changed_ns if time.time_ns() - changed_ns > _TICK_NS else 0
        for match in filter(None, map(self._name.fullmatch, os.listdir(folder))):
            name, pid, ticks = match[1], int(match[2]), int(match[3])
            if name not in self._known and pid != self._command:
                self._known.add(name)
                self._open(name, pid, ticks)

    def _open(self, name: str, pid: int, ticks: int) -> None:
        with suppress(OSError):  # it has ended already, and nobody saw how
            pidfd = open_pidfd(pid)
            if start_ticks(pid) == ticks:
                self._watched[pidfd] = (name, pid, ticks)
            else:
                os.close(pidfd)

    def wait(self, pidfd: int, timeout_s: float) -> bool:
        """Wait for an end, and write it down if it is not the command's. Return whether the command has ended."""
        poller = select.poll()
        for fd in (pidfd, *self._watched):
            poller.register(fd, select.POLLIN)
        ended = [fd for fd, _ in poller.poll(timeout_s * 1000)]
        now = time.monotonic_ns()
        for fd in ended:
            if fd != pidfd:
                name, pid, ticks = self._watched.pop(fd)
                self._writer.append(encode(ProcessGone(t_ns=now, exit_code=_exit_code(fd, pid, ticks), name=name)))
                os.close(fd)
        return pidfd in ended


def _happens(fd: int, event: int, timeout_s: float) -> bool:
    """Whether a descriptor becomes ready, or is at its end, within a time."""
    poller = select.poll()
    poller.register(fd, event)
    return bool(poller.poll(timeout_s * 1000))


# --- where it writes -------------------------------------------------------------------------------------------------


def _create(home: Path, process: Process) -> Writer | None:
    """The launcher's journal; None if this process has a witness already, from before it replaced itself by `exec`."""
    paths = JobPaths(home, process.job).make()
    try:
        # Not the name that the command itself will look for, if it turns out to be a Python that is measured.
        return Writer(paths.journal(f"launcher-{process_name(process)}"))
    except FileExistsError:
        return None


def _ensure_collector(process: Process, settings: Settings, writer: Writer) -> None:
    from headway.collect import ensure_collector

    problem = ensure_collector(settings.spool_folder, settings.home_folder, process.job, ROLL_UP)
    if problem:
        mark = Mark(t_ns=time.monotonic_ns(), name="no collector", attrs={"problem": clean_text(problem)})
        writer.append(encode(mark))


# --- how the command ended -------------------------------------------------------------------------------------------


def _exit_code(pidfd: int, pid: int, ticks: int | None, patience_s: float = 0.0) -> int | None:
    """The exit code of an ended process; None if nobody tells."""
    status = _status_of_zombie(pid, ticks)
    status = _status_of_reaped(pidfd, patience_s) if status is None else status
    return None if status is None else os.waitstatus_to_exitcode(status)


def _status_of_zombie(pid: int, ticks: int | None) -> int | None:
    """The wait status of an ended process as /proc tells it until its parent has asked; None if it does not."""
    try:
        folder = Path(f"/proc/{pid}")
        is_ours = folder.stat().st_uid == os.geteuid()  # of anybody else's it says 0
        fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[49]) if is_ours and fields[0] == b"Z" and int(fields[19]) == ticks else None


def _status_of_reaped(pidfd: int, patience_s: float) -> int | None:
    """The wait status of an ended process as the kernel tells it once its parent has asked; None before Linux 6.15."""
    for timeout_s in (0.0, patience_s):
        _happens(pidfd, 0, timeout_s)  # no event but the one that is always reported: it is reaped
        info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        except OSError:
            return None
        mask, *_, status = _PIDFD_INFO.unpack(info)
        if mask & _PIDFD_INFO_EXIT:
            return int(status)
    return None
