"""One process of this node: its journal in the spool, whether it lives, and what of it is yet to be told."""

import os
import select
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from headway.events.clock import Clock
from headway.events.journal import FRAME_LIMIT_BYTES, Batch, Cell, Follower, decode_frames, is_being_written
from headway.events.node import Chunk, rolled_up, sign_of_life, witnessed
from headway.events.process import open_pidfd, process_name
from headway.events.vocabulary import Process, ProcessEnd, ProcessGone, Record
from headway.paths import JOURNAL, folder_name

CHUNK_LIMIT_BYTES = FRAME_LIMIT_BYTES - 4096
"""Most journal bytes in one chunk: with its head and the process's name it must be a frame that readers accept."""

RollUp = Callable[[Iterable[Record], Cell | None], bytes]
"""Makes of a finished process's records what a reader can take in their place."""


class Source:
    """A journal on its way to the job's folder."""

    def __init__(self, path: Path, roll_up: RollUp | None = None) -> None:
        self.path = path
        self._roll_up = roll_up
        self.name = path.name.removesuffix(JOURNAL)
        self.alive = False
        self.pidfd = -1
        """Readable once the process has ended; -1 after that, or if it cannot be watched from here."""
        self.pid = self.began_ns = 0
        """Who writes this journal, and since when; 0 while that is not known."""
        self.problems: dict[str, None] = {}
        self._ended = False
        self._gone: ProcessGone | None = None
        self.rewind()

    def rewind(self) -> None:
        """Everything is to be told again, from the first byte on."""
        self.settled = False
        """Whether the process is gone and all of it was told."""
        self.sign: Chunk | None = None
        """The sign of life that goes with what was told last."""
        self._follower = Follower(self.path)
        self._told: tuple[bool, Cell | None] | None = None
        self._told_gone = False

    def look(self, clock: Clock) -> None:
        """Finds out whether the process lives."""
        if self.settled:
            return
        if not self.pid and (process := _writer_of(self.path)):
            self.pid, self.began_ns = process.pid, process.t_ns
            self.pidfd = watch_end(self.name, process, clock)
        was_alive = self.alive
        # Its lock alone would do, but for a process that has lost it: one that opened its own journal to read.
        self.alive = (self.pidfd >= 0 and not self._ended) or is_being_written(self.path)
        if was_alive and not self.alive and self.pidfd < 0:
            self.saw_end(clock.now_ns())

    def saw_end(self, now_ns: int) -> None:
        """Notes that the process, which lived, is gone."""
        self.close()
        self.alive = False
        self._gone = self._gone or ProcessGone(t_ns=now_ns)

    def chunks(self, wall_ns: int) -> list[Chunk]:
        """What is new to tell: what the process wrote, and its end. That it lives is told by its sign."""
        if self.settled:
            return []
        # Decided before the journal is read: what a dead process wrote is then all there.
        over = bool(self.pid) and not self.alive and self.pidfd < 0
        batch = self._follower.poll()
        self._ended = self._ended or any(isinstance(record, ProcessEnd) for record in batch.records)
        self.problems.update(dict.fromkeys(batch.problems))
        if not self._follower.has_begun:
            return []
        told = self._tell(batch, wall_ns)
        if self._gone and not self._told_gone:
            told.append(witnessed(self.name, self._gone, wall_ns))
            self._told_gone = True
        self.settled = over and not batch.problems
        if self.settled and self._roll_up:
            told += self._rolled_up(self._roll_up, wall_ns)
        return told

    def _rolled_up(self, roll_up: RollUp, wall_ns: int) -> list[Chunk]:
        whole = Follower(self.path).poll()
        try:
            data = roll_up([*whole.records, *([self._gone] if self._gone else [])], whole.cell)
        except Exception as error:  # the records have arrived, and readers do without: it only takes them longer
            self.problems[f"{self.path.name} could not be rolled up ({type(error).__name__}: {error})"] = None
            return []
        return [rolled_up(self.name, data, wall_ns)] if 0 < len(data) <= CHUNK_LIMIT_BYTES else []

    def _tell(self, batch: Batch, wall_ns: int) -> list[Chunk]:
        alive = self.alive and (not self._ended or is_being_written(self.path))
        told = [Chunk(self.name, alive, wall_ns, batch.offset + at, raw, batch.cell) for at, raw in cut(batch.raw)]
        self.sign = sign_of_life(self.name, batch.cell, wall_ns) if alive else None
        state = (alive, None if alive else batch.cell)
        if not told and state != self._told:
            told.append(Chunk(self.name, alive, wall_ns, batch.offset, b"", batch.cell))
        self._told = state
        return told

    def close(self) -> None:
        """Lets go of the process."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def watch_end(name: str, process: Process, clock: Clock) -> int:
    """A descriptor that becomes readable when the process with the journal `name` ends; -1 if it has ended, or is not
    to be seen from here."""
    if process.boot != clock.boot():
        return -1
    try:
        pidfd = open_pidfd(process.pid)
    except OSError:
        return -1
    # Compared while the descriptor holds the process, so that the pid cannot change hands in between. The name tells
    # when the process started; after an `exec` it is followed by a number.
    holder = folder_name(process_name(process))
    if (name == holder or name.startswith(holder + "-")) and not ended_among([pidfd], 0.0):
        return pidfd
    os.close(pidfd)
    return -1


def ended_among(pidfds: list[int], timeout_s: float) -> list[int]:
    """Those whose process has ended; waits for the first one up to `timeout_s`."""
    poller = select.poll()
    for pidfd in pidfds:
        poller.register(pidfd, select.POLLIN)
    return [pidfd for pidfd, _ in poller.poll(timeout_s * 1000)]


def cut(raw: bytes, limit: int = CHUNK_LIMIT_BYTES) -> Iterator[tuple[int, bytes]]:
    """Stretches of whole frames that each fit into a chunk, with their offsets."""
    at = 0
    while len(raw) - at > limit:
        whole = len(decode_frames(raw[at : at + limit]).raw)
        if whole:
            yield at, raw[at : at + whole]
        # A record larger than a chunk is left out; readers find its end before the next one, and say so.
        at += whole or limit
    if at < len(raw):
        yield at, raw[at:]


def _writer_of(path: Path) -> Process | None:
    """The process that writes this journal; None while it has not said so."""
    records = Follower(path).poll().records
    return records[0] if records and isinstance(records[0], Process) else None
