"""The node file: what one collector brought to the job's folder, the journals of all processes of its node in one.

It is a log of frames like a journal's, each a chunk: whose journal, from which byte, the step cell, whether the process
lived, and the bytes themselves. Chunks that tell the same bytes twice are harmless, so a collector that starts anew
begins from the beginning, in a file of its own.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

from headway.events.journal import HEADER_BYTES, Batch, Cell, decode_frames, frame, frames
from headway.events.vocabulary import ProcessGone, encode

_HEAD = struct.Struct("<HBBQq7q")
_WITNESSED = (1 << 64) - 1


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


def witnessed(process: str, gone: ProcessGone, wall_ns: int) -> Chunk:
    """A chunk that says the collector saw the process end."""
    return Chunk(process, False, wall_ns, _WITNESSED, frame(encode(gone)))


def decode_chunk(payload: bytes) -> Chunk:
    """The chunk in a frame's payload."""
    length, alive, has_cell, offset, seen, *cell = _HEAD.unpack_from(payload)
    name = payload[_HEAD.size : _HEAD.size + length].decode()
    raw = payload[_HEAD.size + length :]
    return Chunk(name, bool(alive), seen, offset, raw, Cell(*cell) if has_cell else None)


class NodeReader:
    """Reads node files from where it last stopped, and gives each process's new records once."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[bool, int]] = {}
        """For each process, whether it lived when a collector last looked, and when that was in wall time."""
        self._read: dict[Path, int] = {}
        self._have: dict[str, int] = {}

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
        batches, used = [], 0
        for payload, used in frames(data, problems):  # noqa: B007
            try:
                batches.append(self._batch(decode_chunk(payload)))
            except (struct.error, UnicodeDecodeError):
                problems.append("holds a chunk that cannot be read, which is left out")
        self._read[path] = self._read.get(path, 0) + used
        if problems:
            batches.append((path.name, Batch(problems=[f"{path.name} {problem}" for problem in problems])))
        return batches

    def _batch(self, chunk: Chunk) -> tuple[str, Batch]:
        process = chunk.process
        if chunk.seen_wall_ns >= self.seen.get(process, (False, 0))[1]:
            self.seen[process] = (chunk.alive, chunk.seen_wall_ns)
        raw = chunk.raw
        if chunk.offset != _WITNESSED:
            have = self._have.get(process, HEADER_BYTES)
            raw = raw[max(have - chunk.offset, 0) :]
            self._have[process] = max(have, chunk.offset + len(chunk.raw))
        batch = decode_frames(raw)
        batch.cell = chunk.cell
        return process, batch
