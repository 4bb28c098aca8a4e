"""The collector: follows all journals of a spool, and appends what is new to its own file in the job's folder."""

import contextlib
import sys
import threading
from pathlib import Path

from headway.collect.nodefile import NodeFile
from headway.collect.source import RollUp, Source, ended_among
from headway.events.clock import Clock
from headway.paths import JOURNAL, JobPaths

BATCH_S = 2.0
"""From one batch to the next. A process's end does not wait for it: often the node is taken away right then."""

LINGER_S = 15.0
"""How long a collector stays when no process lives: the next attempt may be about to begin."""

PATIENCE_S = 600.0
"""How long it stays instead while the job's folder refuses what it brings."""

TICK_S = 0.1
"""Longest time in which a new process goes unnoticed, and a signal unanswered."""


class Collector:
    """Brings the journals of one spool to the job's folder. Nothing leaves the spool before it has arrived."""

    def __init__(
        self, spool: JobPaths, job: JobPaths, clock: Clock | None = None, roll_up: RollUp | None = None
    ) -> None:
        self.spool, self.job = spool, job
        self._roll_up = roll_up
        self.problem = ""
        """Why the last batch did not arrive; empty if it did."""
        self._clock = clock or Clock()
        self._sources: dict[Path, Source] = {}
        self._file = NodeFile(job, self._clock)
        self._wall_ns = 0

    def run(self, stop: threading.Event, *, batch_s: float = BATCH_S, linger_s: float = LINGER_S) -> None:
        """Collects until `stop` is set or no process has lived for `linger_s`; then once more, and tidies up."""
        due = lived = self._clock.now_ns()
        while not stop.is_set():
            ended = self.look(TICK_S)
            now = self._clock.now_ns()
            if self.anyone_lives:
                lived = now
            elif now - lived > 1e9 * (max(PATIENCE_S, linger_s) if self._file.unsent else linger_s):
                break
            if ended or now >= due:
                self.collect()
                due = now + round(batch_s * 1e9)
        self.collect()
        self.tidy()

    def collect(self) -> int:
        """Delivers all that is new, in one write, and returns its size in bytes; then tells who lives. What did not
        arrive is kept, and delivered by the next call."""
        self.look()
        written, problem = 0, ""
        try:
            if not self._file.is_intact():
                self._start_over()
            written += self._file.deliver()
            written += self._file.deliver(self._batch())
            self._file.pulse([source.sign for source in self._sources.values() if source.sign])
        except OSError as error:
            problem = f"{self._file.path} cannot be written ({error.strerror}): what is new waits in the spool"
        if problem not in ("", self.problem):
            _say(problem)
        self.problem = problem
        return written

    def look(self, timeout_s: float = 0.0) -> bool:
        """Notes which processes there are and which live. Waits up to `timeout_s` for one to end; True if one did."""
        watched = {source.pidfd: source for source in self._sources.values() if source.pidfd >= 0}
        ended = ended_among(list(watched), timeout_s)
        now = self._clock.now_ns()
        for pidfd in ended:
            watched[pidfd].saw_end(now)
        for path in self._journals():
            if path not in self._sources:
                self._sources[path] = Source(path, self._roll_up)
        for source in self._sources.values():
            source.look(self._clock)
        self._note_replaced()
        return bool(ended)

    @property
    def anyone_lives(self) -> bool:
        """Whether a process of this node lived at the last look."""
        return any(source.alive or source.pidfd >= 0 for source in self._sources.values())

    def tidy(self) -> None:
        """Deletes from the spool what is complete and has arrived; damaged journals stay for whoever wants to look."""
        try:
            arrived = not self._file.unsent and self._file.is_intact()
        except OSError:
            return
        # One that replaced itself by `exec` finds by its older journals' names which name is free.
        living = {source.pid for source in self._sources.values() if source.pidfd >= 0}
        for path, source in list(self._sources.items()):
            if arrived and source.settled and not source.problems and source.pid not in living:
                with contextlib.suppress(OSError):  # then it stays, and the next collector brings it once more
                    path.unlink()
                del self._sources[path]

    def close(self) -> None:
        """Lets go of the processes it watches."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def _batch(self) -> bytes:
        # Never back, whatever becomes of the node's clock: readers believe the latest.
        self._wall_ns = max(self._wall_ns, self._clock.wall_ns())
        parts = []
        for path in sorted(self._sources):
            source = self._sources[path]
            known = len(source.problems)
            parts += [chunk.encode() for chunk in source.chunks(self._wall_ns)]
            for problem in list(source.problems)[known:]:
                _say(problem)
        return b"".join(parts)

    def _note_replaced(self) -> None:
        """A process that replaced itself by `exec` writes a new journal: the older one ended before that began."""
        newest: dict[int, Source] = {}
        watched = [source for source in self._sources.values() if source.pidfd >= 0]
        for source in sorted(watched, key=lambda source: source.began_ns):
            if source.pid in newest:
                newest[source.pid].saw_end(source.began_ns)
            newest[source.pid] = source

    def _start_over(self) -> None:
        _say(f"{self._file.path} has lost what was delivered: all that is in the spool is delivered again")
        self._file = NodeFile(self.job, self._clock)
        for source in self._sources.values():
            source.rewind()

    def _journals(self) -> list[Path]:
        try:
            return [path for path in self.spool.journals.iterdir() if path.name.endswith(JOURNAL)]
        except OSError:  # no process has begun here yet
            return []


def _say(problem: str) -> None:
    with contextlib.suppress(OSError):  # the log lies on the spool's disk, which may be full: the batches go on
        print(problem, file=sys.stderr, flush=True)
