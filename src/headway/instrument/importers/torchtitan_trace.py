"""The lines of a torchtitan trace: read one by one, put in the order they were written, and placed in time.

A line is one JSON object. `log_type_name` says what it is: `NAME_start`, `NAME_end` or `NAME_error` of a span, or the
name of a moment. `time_us` is wall time, `delta_ms` what passed since the thread's last line, `seq_id` counts lines.
"""

import heapq
import itertools
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from headway.errors import InputError

LINE_LIMIT_BYTES = 1 << 20
"""A longer line is none of torchtitan's: it cuts what is long at 1000 characters."""

WINDOW = 1024
"""So many lines may come between a line and its place."""

JUMP_NS = 250_000_000
"""Wall time that passes so much faster or slower than the threads' own clock has been set."""

_MOMENTS = frozenset(["metric_value", "training_start", "structured_logger_started"])
_COLUMNS = ("int", "normal", "double", "normvector")
_RANKS = 1 << 20
_FIRST_DELTA_MS = 0.005
_EARLY_SEQ = 16


class Line(NamedTuple):
    """One line, as far as it matters here."""

    name: str
    is_moment: bool
    wall_ns: int
    rank: int
    source: str
    host: str
    pid: int
    tid: int
    task: str
    local_rank: int
    step: int | None
    relative_step: int | None
    tags: tuple[str, ...]
    took_ms: float | None
    """On the last line of a span: how long it was."""
    delta_ms: float | None
    seq: int | None
    message: str

    @property
    def process(self) -> tuple[str, int]:
        """Who wrote it."""
        return self.host, self.pid

    @property
    def is_first(self) -> bool:
        """Whether a process begins with it."""
        return self.seq == 0 or (self.seq is None and self.name == "structured_logger_started")


@dataclass
class Damage:
    """Lines that could not be read, over all files."""

    lines: int = 0
    unreadable: int = 0
    first: str = ""
    """Where the first of them stands: `FILE:LINE`."""

    def note(self, path: Path, number: int) -> None:
        """Counts an unreadable line."""
        self.unreadable += 1
        self.first = self.first or f"{path}:{number}"

    def add(self, other: "Damage") -> None:
        """Counts what another reading found."""
        self.lines += other.lines
        self.unreadable += other.unreadable
        self.first = self.first or other.first


def lines(path: Path, damage: Damage, at_most: int | None = None) -> Iterator[Line]:
    """The file's readable lines, one at a time however large it is; the others are counted in `damage`."""
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(itertools.islice(_raw_lines(file), at_most), 1):
                if raw.isspace():
                    continue
                damage.lines += 1
                line = parse(raw)
                if line is None:
                    damage.note(path, number)
                else:
                    yield line
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): nothing was imported.") from error


def _raw_lines(file: BinaryIO) -> Iterator[bytes]:
    while raw := file.readline(LINE_LIMIT_BYTES):
        is_whole = len(raw) < LINE_LIMIT_BYTES or raw.endswith(b"\n")
        yield raw if is_whole else b"too long"
        while not is_whole and (raw := file.readline(LINE_LIMIT_BYTES)):
            is_whole = raw.endswith(b"\n")


def parse(raw: bytes) -> Line | None:
    """The line in these bytes; None if they are none of torchtitan's."""
    try:
        found = json.loads(raw)
        if "normal" in found:  # commits before release 0.3 sorted fields by type
            found = {key: value for column in _COLUMNS for key, value in found.get(column, {}).items()}
        return _line(found)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None


def _line(found: dict[str, Any]) -> Line:
    name, wall_us = found["log_type_name"], found["time_us"]
    rank = found["global_rank"] if "global_rank" in found else found["rank"]
    if not isinstance(name, str) or not 0 < wall_us < 1 << 53 or not 0 <= rank < _RANKS:
        raise ValueError(f"not a line of a trace: {name!r:.40}")
    return Line(
        name=name,
        is_moment=found.get("log_type") == "instant" or name in _MOMENTS,
        wall_ns=int(wall_us) * 1000,
        rank=int(rank),
        source=str(found.get("source", "")),
        host=str(found.get("host_name", "")),
        pid=_whole(found.get("pid")) or 0,
        tid=_whole(found.get("tid")) or 0,
        task=str(found.get("task_name") or ""),
        local_rank=_whole(found.get("local_rank")) or 0,
        step=_whole(found.get("step")),
        relative_step=_whole(found.get("relative_step")),
        tags=tuple(map(str, found.get("step_tags") or ())),
        took_ms=_finite(found.get("value")),
        delta_ms=_finite(found.get("delta_ms")),
        seq=_whole(found.get("seq_id")),
        message=str(found.get("message") or ""),
    )


def _whole(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise ValueError(f"not a number of a trace: {value!r:.40}")
    return value


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def by_process(found: Iterator[Line]) -> Iterator[Iterator[Line]]:
    """The lines of each process in the file, in order. There is one, unless a restart went on in the same file."""
    for _, own in itertools.groupby(found, _Starts()):
        yield _once(_in_order(own))


class _Starts:
    """Counts the processes that have started, line by line. A forked child that writes to its parent's file goes on
    with the parent's numbers, and so is no start."""

    def __init__(self) -> None:
        self._count = self._due = 0
        self._process: tuple[str, int] | None = None
        self._has_first = False
        self._starts: set[tuple[str, int, int]] = set()

    def __call__(self, line: Line) -> int:
        if self._process is None or self._is_start(line):
            self._count += 1
            self._process, self._due, self._has_first = line.process, 0, False
        self._due = max(self._due, (line.seq or 0) + 1)
        if line.is_first:
            self._has_first = True
            self._starts.add((*line.process, line.wall_ns))
        return self._count

    def _is_start(self, line: Line) -> bool:
        if line.is_first and self._has_first:
            return (*line.process, line.wall_ns) not in self._starts  # else the same line came twice
        is_early = line.seq is None or line.seq < min(self._due, _EARLY_SEQ)
        return line.process != self._process and is_early


def _in_order(found: Iterable[Line]) -> Iterator[Line]:
    """A process's lines by their numbers; one that is missing is waited for over `WINDOW` others."""
    early: list[tuple[int, int, Line]] = []
    due = 0
    for number, line in enumerate(found):
        if line.seq is None or (line.seq <= due and not early):
            due = max(due, (line.seq or 0) + 1)
            yield line
            continue
        heapq.heappush(early, (line.seq, number, line))
        while early and (early[0][0] <= due or len(early) > WINDOW):
            seq, _, ready = heapq.heappop(early)
            due = max(due, seq + 1)
            yield ready
    while early:
        yield heapq.heappop(early)[2]


def _once(found: Iterable[Line]) -> Iterator[Line]:
    """The lines without those that whoever carried the file brought twice."""
    due, recent = 0, deque[Line](maxlen=WINDOW)
    for line in found:
        if line.seq is not None and line.seq < due and line in recent:
            continue
        due = max(due, (line.seq or 0) + 1)
        recent.append(line)
        yield line


@dataclass
class Axis:
    """A process's wall clock as an axis that never goes back, with what was set on the clock while it ran taken out."""

    now_ns: int = 0
    _shift_ns: int = 0
    _seq: int | None = None
    _threads: dict[int, int] = field(default_factory=dict)
    """When each thread wrote its last line."""

    def place(self, line: Line) -> int:
        """When the line was written."""
        if line.seq is None or self._seq is None or line.seq != self._seq + 1:
            self._threads.clear()  # what passed since a line that is missing is not known
        self._seq = line.seq
        at = line.wall_ns + self._shift_ns
        last = self._threads.get(line.tid)
        if last is not None and line.delta_ms is not None and line.delta_ms > _FIRST_DELTA_MS:  # else a new thread's
            expected = last + round(line.delta_ms * 1e6)
            if abs(at - expected) > JUMP_NS:
                self._shift_ns += expected - at
                at = expected
        self._threads[line.tid] = at
        self.now_ns = max(self.now_ns, at)
        return self.now_ns
