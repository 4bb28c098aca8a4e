"""A file of a checkpoint as a stream: each byte is read once, and hashed; what belongs to a piece comes in blocks."""

import io
import itertools
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import xxhash

from headway.checkpoint.source import BadCheckpoint
from headway.errors import InputError
from headway.publish.pieces import Block, Piece, Weight
from headway.storage import CHUNK_BYTES, Progress

_HEAD = 8192
"""Within so many bytes `torch.save` says how a tensor lies, and where."""
_LEAD = 4 * _HEAD
"""Room for what is left of a chunk, before the next."""

BUFFER_BYTES = _LEAD + CHUNK_BYTES


class Stream:
    """A file's bytes in order, each read once and hashed, the next ones while these are used."""

    def __init__(
        self,
        read: Callable[[int, memoryview], None],
        size: int,
        buffers: list[memoryview],
        threads: ThreadPoolExecutor,
        progress: Progress | None,
    ) -> None:
        self.at = 0
        self._read, self._size, self._threads, self._progress = read, size, threads, progress
        self._buffers = itertools.cycle(buffers)
        self._hasher = xxhash.xxh3_128()
        self._asked = 0
        self._here = memoryview(b"")
        self._next = self._ask()

    @property
    def digest(self) -> str:
        return self._hasher.hexdigest()

    def ahead(self, count: int) -> memoryview:
        """The next bytes: at least so many, which is not more than a head has, unless the file ends before."""
        while len(self._here) < count and self._next:
            self._turn()
        return self._here

    def go_to(self, at: int) -> None:
        if at < self.at:
            raise BadCheckpoint(f"two tensors have the same bytes at {at:,}")
        while at - self.at > len(self._here):
            self.at += len(self._here)
            self._here = self._here[:0]
            if not self._next:
                raise BadCheckpoint(f"ends after {self.at:,} bytes, and more should follow")
            self._turn()
        self._here, self.at = self._here[at - self.at :], at

    def finish(self) -> None:
        self.go_to(self._size)

    def _ask(self) -> "Future[memoryview] | None":
        if (offset := self._asked) == self._size:
            return None
        buffer = next(self._buffers)[: _LEAD + min(CHUNK_BYTES, self._size - offset)]
        self._asked += len(buffer) - _LEAD

        def work() -> memoryview:
            self._read(offset, buffer[_LEAD:])
            self._hasher.update(buffer[_LEAD:])
            return buffer

        return self._threads.submit(work)

    def _turn(self) -> None:
        """Goes to the next chunk; what is left of this one comes before it."""
        assert self._next
        buffer, begin = self._next.result(), _LEAD - len(self._here)
        buffer[begin:_LEAD] = self._here
        self._here = buffer[begin:]
        self._next = self._ask()
        if self._progress:
            self._progress(len(buffer) - _LEAD)


def blocks(stream: Stream, weight: Weight, piece: Piece) -> Iterator[Block]:
    """The values of a piece."""
    size, count = weight.dtype.itemsize, math.prod(piece.sizes)
    try:
        stream.go_to(piece.at)
        begin, order = _lie(bytes(stream.ahead(min(_HEAD, piece.length))[:_HEAD]), weight, piece)
        if begin + count * size > piece.length:
            raise BadCheckpoint("has no room for its values")
        stream.go_to(piece.at + begin)
        done = 0
        while done < count:
            data = stream.ahead(size)
            here = min(len(data) // size, count - done)
            if not here:
                raise BadCheckpoint(f"ends after {stream.at:,} bytes")
            yield Block(weight=weight, piece=piece, order=order, start=done, data=data[: here * size])
            stream.go_to(stream.at + here * size)
            done += here
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{piece.file}, where {weight.name} should be: {error}") from error


def _lie(head: bytes, weight: Weight, piece: Piece) -> tuple[int, tuple[int, ...]]:
    """Where the values of a piece begin in what `torch.save` wrote, and in which order its dimensions lie there."""
    pickled, begin = _record(head, b"archive/data.pkl"), _record(head, b"archive/data/0")
    if pickled is None or begin is None:
        raise BadCheckpoint("there is no tensor as torch.save writes them")
    try:
        _, offset, sizes, strides, *more = _Rebuilt(io.BytesIO(head[pickled:])).load()
    except Exception as error:
        raise InputError(
            f"{weight.name} is no plain tensor ({error}), and cannot be streamed. Save it as one, or load the "
            "checkpoint with dcp.load in a recipe of your own."
        ) from error
    order = tuple(sorted(range(len(sizes)), key=lambda each: (-strides[each], -sizes[each], each)))
    dense = [math.prod(sizes[later] for later in order[number + 1 :]) for number in range(len(order))]
    wide = [number for number, dimension in enumerate(order) if sizes[dimension] > 1]
    if tuple(sizes) != piece.sizes or any(strides[order[number]] != dense[number] for number in wide):
        raise BadCheckpoint(f"there is a tensor of {list(sizes)} with strides {list(strides)}, not {piece.sizes}")
    if offset or any(each for each in more[2:] if isinstance(each, dict)):
        raise InputError(f"{weight.name} was saved as a view (conjugate or negative). Save a copy of it.")
    return begin, order


def _record(head: bytes, name: bytes) -> int | None:
    """Where the content of a file in the archive begins."""
    at = head.find(name)
    if at < 30 or head[at - 30 : at - 26] != b"PK\3\4":
        return None
    return at + len(name) + int.from_bytes(head[at - 2 : at], "little")


class _Rebuilt(pickle.Unpickler):
    """Of a pickled tensor, what it would be rebuilt from. Nothing that a pickle may name is run."""

    def persistent_load(self, told: Any) -> Any:
        return told

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")):
            return lambda *told: told
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")
