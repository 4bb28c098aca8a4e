"""The node file: what one collector brought to the job's folder, the journals of all processes of its node in one.

It is a log of frames like a journal's, each a chunk: whose journal, from which byte, the step cell, whether the process
lived, and the bytes themselves. Chunks that tell the same bytes twice are harmless, so a collector that starts anew
begins from the beginning, in a file of its own.

Beside it lies the pulse: a single frame, written over again and again, that holds a chunk without bytes for each
process that lives. So the node file grows only by what the processes wrote.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headway.events.journal import HEADER_BYTES, Batch, Cell, decode_frames, frame, frames
from headway.events.vocabulary import ProcessGone, Record, encode

_HEAD = struct.Struct("<HBBQq7q")
_ADDRESS = struct.Struct("<HxxQ")
_WITNESSED = (1 << 64) - 1
_ROLLED_UP = (1 << 64) - 2
_PULSE_READS = 3


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of one process's journal."""

    process: str
    alive: bool
    seen_wall_ns: int
    """When the collector looked."""
    offset: int
    raw: bytes
    cell: Cell | None = None

    def encode(self) -> bytes:
        """The chunk as a frame of the node file."""
        name = self.process.encode()
        cell = self.cell or Cell(0, 0, 0, 0, 0, 0, 0)
        fields = (cell.first, cell.next, cell.begin_ns, cell.end_ns, cell.data_ns, cell.count, cell.since_ns)
        head = _HEAD.pack(len(name), self.alive, self.cell is not None, self.offset, self.seen_wall_ns, *fields)
        return frame(head + name + self.raw)


def sign_of_life(process: str, cell: Cell | None, wall_ns: int) -> Chunk:
    """A chunk that says the process lives, and where its training loop stands."""
    return Chunk(process, True, wall_ns, 0, b"", cell)


def witnessed(process: str, gone: ProcessGone, wall_ns: int) -> Chunk:
    """A chunk that says the collector saw the process end."""
    return Chunk(process, False, wall_ns, _WITNESSED, frame(encode(gone)))


def rolled_up(process: str, data: bytes, wall_ns: int) -> Chunk:
    """A chunk that says what all of a finished process's chunks come to, for readers who know how to use it."""
    return Chunk(process, False, wall_ns, _ROLLED_UP, data)


def decode_chunk(payload: bytes) -> Chunk:
    """The chunk in a frame's payload."""
    length, alive, has_cell, offset, seen, *cell = _HEAD.unpack_from(payload)
    name = payload[_HEAD.size : _HEAD.size + length].decode()
    raw = payload[_HEAD.size + length :]
    return Chunk(name, bool(alive), seen, offset, raw, Cell(*cell) if has_cell else None)


def _address(payload: bytes) -> tuple[str, int]:
    """Whose chunk it is, and from which byte; most chunks of a large job are never looked at further."""
    length, offset = _ADDRESS.unpack_from(payload)
    if _HEAD.size + length > len(payload):
        raise struct.error("the chunk is shorter than its name")
    return payload[_HEAD.size : _HEAD.size + length].decode(), offset


def encode_pulse(signs: Iterable[Chunk]) -> bytes:
    """All that a pulse file holds."""
    return frame(b"".join(sign.encode() for sign in signs))


def read_pulse(path: Path) -> bytes:
    """The payload of a pulse file; empty if it is gone, or was written to whenever it was read."""
    for _ in range(_PULSE_READS):
        try:
            data = path.read_bytes()
        except OSError:
            return b""
        # Behind it may be the rest of a longer one.
        for payload, _ in frames(data[: 8 + int.from_bytes(data[:4], "little")], []):
            return payload
    return b""


class NodeReader:
    """Reads node files from where it last stopped, and gives each process's new records once."""

    def __init__(self) -> None:
        self.living: dict[str, int] = {}
        """Each process that lived when a collector last looked, and when that was, in wall time."""
        self._heard: dict[str, int] = {}
        self._cells: dict[str, Cell] = {}
        self._have: dict[str, int] = {}
        self._read: dict[Path, int] = {}
        self._places: dict[str, list[tuple[Path, int, int]]] = {}
        self._pulses: dict[Path, bytes] = {}

    def poll(self, path: Path) -> list[tuple[str, Batch]]:
        """What one node file holds beyond what was read before."""
        problems: list[str] = []
        try:
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
        except OSError as error:
            problem = f"{path.name} cannot be read ({error.strerror}): its node is missing here"
            return [(path.name, Batch(problems=[problem]))]
        at, found, used = self._read.get(path, 0), [], 0
        for payload, used in frames(data, problems):
            try:
                process, offset = _address(payload)
            except (struct.error, UnicodeDecodeError):
                problems.append("holds a chunk that cannot be read, which is left out")
                continue
            found.append((process, offset, payload))
            place = (path, at + used - (len(payload) + 3 & ~3), len(payload))
            self._places.setdefault(process, []).append(place)
        self._read[path] = at + used
        batches = self._batches(found)
        if problems:
            batches.append((path.name, Batch(problems=[f"{path.name} {problem}" for problem in problems])))
        return batches

    def _batches(self, found: list[tuple[str, int, bytes]]) -> list[tuple[str, Batch]]:
        """What the chunks tell; a process that is new to this reader and rolled up is told by its roll-up alone."""
        rolled = {process for process, offset, _ in found if offset == _ROLLED_UP and process not in self._have}
        batches = []
        for process, offset, payload in found:
            if process not in rolled:
                if offset != _ROLLED_UP:
                    batches.append(self._batch(decode_chunk(payload)))
            elif offset == _ROLLED_UP:
                chunk = decode_chunk(payload)
                self._note(chunk)
                self._have[process] = 1 << 62  # nothing of it is new any more
                batches.append((process, Batch(rolled_up=chunk.raw, load=partial(self._load, process))))
        return batches

    def _load(self, process: str) -> tuple[list[Record], Cell | None]:
        """All records of a process after all, from where they lie in the node files."""
        reader, cell, records = NodeReader(), None, []
        for path, begin, length in self._places[process]:
            with open(path, "rb") as file:
                file.seek(begin)
                chunk = decode_chunk(file.read(length))
            if chunk.offset != _ROLLED_UP:
                batch = reader._batch(chunk)[1]
                records += batch.records
                cell = batch.cell or cell
        return records, cell

    def poll_pulse(self, path: Path) -> list[tuple[str, Batch]]:
        """The step cells that changed since one pulse was last read. To be read before the node file beside it: a cell
        that is newer than the records would hide the steps between them."""
        pulse = read_pulse(path)
        if not pulse or pulse == self._pulses.get(path):
            return []
        self._pulses[path] = pulse
        try:
            told = [self._batch(decode_chunk(payload)) for payload, _ in frames(pulse, [])]
        except (struct.error, UnicodeDecodeError):  # its CRC is right: a newer headway's, which has more to say
            return []
        return [(process, batch) for process, batch in told if batch.cell]

    def _batch(self, chunk: Chunk) -> tuple[str, Batch]:
        process, raw = chunk.process, chunk.raw
        if chunk.offset != _WITNESSED:
            have = self._have.get(process, HEADER_BYTES)
            raw = raw[max(have - chunk.offset, 0) :]
            self._have[process] = max(have, chunk.offset + len(chunk.raw))
        batch = decode_frames(raw)
        batch.problems = [f"{process} {problem}" for problem in batch.problems]
        batch.cell = self._note(chunk)
        return process, batch

    def _note(self, chunk: Chunk) -> Cell | None:
        """Keeps what a chunk says of the present, unless newer is known; returns its step cell if that is new."""
        process, seen, cell = chunk.process, chunk.seen_wall_ns, chunk.cell
        if seen < self._heard.get(process, 0):
            return None
        self._heard[process] = seen
        if chunk.alive:
            self.living[process] = seen
        else:
            self.living.pop(process, None)
        if cell is None or cell == self._cells.get(process):
            return None
        self._cells[process] = cell
        return cell
