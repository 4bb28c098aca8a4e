"""A stopwatch for training programs: which part of the program runs, from when to when. It knows nothing of headway.

Each begin and end is one line of the file that TRUTH_FILE names, written at once: a SIGKILL loses nothing. A line holds
the time (monotonic, ns), the process, the thread, the rank, and one of `+ label [position]`, `-` (the end), `x` (the
end by an exception), `= saved`, `= begin`. Without TRUTH_FILE nothing is written.

Typical use::

    from stopwatch import watch

    for step, (x, y) in enumerate(watch.waits(loader)):
        with watch("effective", step):
            train(x, y)
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopwatch:
    """Writes what runs in this process. A part inside another takes its time away from the outer one."""

    def __init__(self) -> None:
        path = os.environ.get("TRUTH_FILE")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if path else -1
        self._rank = os.environ.get("RANK", "?")
        self._write("= begin")

    @contextmanager
    def __call__(self, label: str, position: int | None = None) -> Iterator[None]:
        """Times a block. A step gives its position in the data where the same one may be trained twice."""
        self.begin(label, position)
        try:
            yield
        except BaseException:
            self._write("x")
            raise
        self._write("-")

    def begin(self, label: str, position: int | None = None) -> None:
        """Starts a part, for frameworks that call one hook before it and another after it."""
        self._write(f"+ {label}" if position is None else f"+ {label} {position}")

    def end(self) -> None:
        """Ends the part that began last."""
        self._write("-")

    def waits(self, batches: Iterable[Any], skipped: int = 0) -> Iterator[Any]:
        """Yields the batches of a loader, and times each wait for the next one; the first ones may be thrown away."""
        self.begin("data_skip" if skipped else "data_wait")
        for number, batch in enumerate(batches, 1):
            self.end()
            yield batch
            self.begin("data_skip" if number < skipped else "data_wait")
        self.end()

    def saved(self) -> None:
        """Notes that a checkpoint holds everything trained so far."""
        self._write("= saved")

    def _write(self, what: str) -> None:
        if self._file >= 0:
            line = f"{time.monotonic_ns()} {os.getpid()} {threading.get_native_id()} {self._rank} {what}\n"
            os.write(self._file, line.encode())


watch = Stopwatch()
