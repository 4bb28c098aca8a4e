"""Where workers' output goes: to the console as ever, with the last lines of stderr kept as evidence."""

import fcntl
import os
import pty
import select
import termios
import threading
import tty
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

KEPT_BYTES = 64 * 1024
"""What is kept of each worker's stderr: its end."""


def fill_gaps() -> None:
    """Opens `/dev/null` in place of a standard stream that is closed: the next file to be opened would take its place,
    and what is printed would go there."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free, and so this one


class Tap:
    """Passes workers' stderr on to the console and keeps the end of each.

    Where the console is a terminal, workers get one too: what they print there depends on it. One thread serves all,
    so that no worker ever waits for a supervisor that is busy.
    """

    def __init__(self, console_fd: int = 2) -> None:
        self._console = console_fd
        self._is_terminal = os.isatty(console_fd)
        self._ends: dict[int, _End] = {}
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._wake_r, select.POLLIN)
        self._idle = threading.Condition()
        self._asked = self._answered = 0
        self._mid_line = False
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="headway-stderr", daemon=True)
        self._thread.start()

    def open(self) -> "tuple[int, Kept]":
        """A descriptor to give a worker, to be closed here then; and what will be kept of what it prints."""
        ours, theirs = self._terminal() if self._is_terminal else os.pipe2(os.O_CLOEXEC)
        self._ends[ours] = end = _End()
        self._poller.register(ours, select.POLLIN)
        self._wake()
        return theirs, Kept(lambda: self._settled(end), lambda: end.size)

    def settle(self, timeout_s: float = 0.2) -> None:
        """Waits until what has been printed so far is taken in."""
        with self._idle:
            self._asked = asked = self._asked + 1
            self._wake()
            self._idle.wait_for(lambda: self._answered >= asked, timeout_s)

    def end_line(self) -> None:
        """Begins a new line on the console, if a worker has left one unfinished."""
        if self._mid_line:
            self._mid_line = False
            with suppress(OSError):
                os.write(self._console, b"\n")

    def close(self) -> None:
        """Passes on what is left, and stops."""
        self.settle(1.0)
        self._closing = True
        self._wake()
        self._thread.join(1.0)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it will wake up anyhow
            os.write(self._wake_w, b"w")

    def _settled(self, end: "_End") -> tuple[bytes, int]:
        self.settle()
        return bytes(end.data), end.size

    def _terminal(self) -> tuple[int, int]:
        ours, theirs = pty.openpty()
        with suppress(termios.error, OSError):
            tty.setraw(theirs)
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(self._console, termios.TIOCGWINSZ, b"\0" * 8))
        for fd in (ours, theirs):
            os.set_inheritable(fd, False)
        return ours, theirs

    def _serve(self) -> None:
        while not self._closing:
            asked = self._asked  # before looking: what was printed when this was asked is seen then
            ready = self._poller.poll(0 if asked > self._answered else None)
            fds = [fd for fd, _ in ready if fd != self._wake_r]
            for fd in fds:
                self._pass_on(fd)
            if not fds:
                with suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
                with self._idle:
                    self._answered = asked
                    self._idle.notify_all()

    def _pass_on(self, fd: int) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except OSError:  # a terminal that nobody holds any more
            data = b""
        if not data:
            self._poller.unregister(fd)
            self._ends.pop(fd, None)
            os.close(fd)  # last: from here on the number may be another's
            return
        self._ends[fd].add(data)
        self._mid_line = not data.endswith((b"\n", b"\r"))
        with suppress(OSError):  # nobody reads the console: the workers go on
            _write_all(self._console, data)


class _End:
    """The last bytes of a stream, and how many there were in all."""

    def __init__(self) -> None:
        self.data, self.size = bytearray(), 0

    def add(self, data: bytes) -> None:
        self.data += data
        self.size += len(data)
        del self.data[:-KEPT_BYTES]


class Kept:
    """The end of what one worker printed on stderr, and how far it had trained when it printed each line."""

    def __init__(self, read: Callable[[], tuple[bytes, int]], size: Callable[[], int]) -> None:
        """`read` returns the end, and the size of the whole; `size` the size alone, without waiting."""
        self._read, self._size = read, size
        self._marks: list[tuple[int, int]] = []

    @classmethod
    def of_file(cls, path: str) -> "Kept":
        """The end of a log file."""
        return cls(lambda: _end_of(Path(path)), lambda: _size_of(path))

    def note(self, steps: int) -> None:
        """Remember that what was printed by now came before the end of this step."""
        size = self._size()
        if size > (self._marks[-1][0] if self._marks else 0):
            self._marks = [mark for mark in self._marks if mark[0] > size - KEPT_BYTES] + [(size, steps)]

    def told(self) -> dict[str, Any]:
        """The text, and how far training was at its lines, in an `Evidence`'s words."""
        data, size = self._read()
        before = size - len(data)
        steps = [[data.count(b"\n", max(0, at - before)), steps] for at, steps in self._marks]
        return {"stderr": data.decode("utf-8", "replace"), "stderr_steps": steps}


def _end_of(path: Path) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - KEPT_BYTES))
            return file.read(), size
    except OSError:
        return b"", 0


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
