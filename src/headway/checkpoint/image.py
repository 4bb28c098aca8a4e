"""What a rank's checkpoint file looks like: where each tensor's bytes are, and what stands between them.

A plan of torch's own planner becomes an image. All of it but the tensors' bytes and a few pickled values is made once;
a save only copies. Parts of torch that are not public are imported in this file alone; beyond that, `reader` knows how
`torch.save` lays out a value, and `position` whether a loader is in use.
"""

import inspect
import io
import pickle
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as ShardedTensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from headway.checkpoint.arena import PAGE, aligned
from headway.checkpoint.layout import TAG_LENGTH, shard_name
from headway.errors import InputError, PlatformError

_SMALL = 64
"""Alignment of what is small; tensors larger than a page begin on one."""

_save = inspect.unwrap(torch.save)
"""Without the hooks of whoever looks for checkpoints that are stored: none is, here."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One item of the plan in the file."""

    index: MetadataIndex
    offset: int
    length: int
    data: int
    """Where its bytes begin in the file; those of a pickled value fill it from `offset` on."""
    shape: torch.Size | None
    """None: a pickled value, of up to `length` bytes."""
    dtype: torch.dtype | None


@dataclass(frozen=True, kw_only=True)
class Image:
    """A rank's file under a plan."""

    pieces: tuple[Piece, ...]
    constant: tuple[tuple[int, bytes], ...]
    """Bytes that are the same in every save, and where."""
    size: int


def draw(plan: SavePlan, planner: SavePlanner) -> Image:
    """The image of a rank's plan."""
    pieces, constant, end = [], [], 0
    for item in plan.items:
        if _is_plain(item, planner):
            assert item.tensor_data is not None
            shape, dtype = item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype
            head, tail, size = _frame(shape, dtype)
            offset = aligned(end, PAGE if size >= PAGE else _SMALL)
            end = offset + len(head) + size + len(tail)
            pieces.append(Piece(item.index, offset, end - offset, offset + len(head), shape, dtype))
            constant += [(offset, head), (offset + len(head) + size, tail)]
        else:
            offset = aligned(end, _SMALL)
            end = offset + aligned(2 * len(pickled(planner, item)) + 512, _SMALL)
            pieces.append(Piece(item.index, offset, end - offset, offset, None, None))
    return Image(pieces=tuple(pieces), constant=tuple(constant), size=max(end, 1))


def _is_plain(item: WriteItem, planner: SavePlanner) -> bool:
    """Whether it is a tensor whose bytes are its values."""
    if item.type == WriteItemType.BYTE_IO:
        return False
    found = planner.lookup_object(item.index)  # type: ignore[attr-defined]
    return isinstance(found, torch.Tensor) and found.layout == torch.strided and not found.is_quantized


def _frame(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes, int]:
    """What `torch.save` writes before and after the bytes of a tensor, and how many those are."""
    sink = _Sink()
    with torch.serialization.skip_data():
        _save(torch.empty(shape, dtype=dtype), sink)
    size = shape.numel() * dtype.itemsize
    if size and sink.skipped != [size]:
        raise PlatformError("torch.save lays out its files in another way than headway knows. Use torch 2.6 to 2.13.")
    return bytes(sink.before if size else sink.before + sink.after), bytes(sink.after if size else b""), size


class _Sink(io.RawIOBase):
    """A file that remembers what was written before and after the one thing that was skipped."""

    def __init__(self) -> None:
        self.before, self.after = bytearray(), bytearray()
        self.skipped: list[int] = []

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        (self.after if self.skipped else self.before).extend(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 1 and offset:
            self.skipped.append(offset)
        return self.tell()

    def tell(self) -> int:
        return len(self.before) + len(self.after) + sum(self.skipped)


def pickled(planner: SavePlanner, item: WriteItem | MetadataIndex) -> bytes:
    """A value that is no plain tensor, as `torch.load` reads it, also with something behind it."""
    index = item if isinstance(item, MetadataIndex) else item.index
    return pickled_value(planner.lookup_object(index))  # type: ignore[attr-defined]


def pickled_value(value: Any) -> bytes:
    buffer = io.BytesIO()
    # The older of torch's formats is read from its beginning on. The newer one is found from the end, which moves.
    _save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


# --- filling it ----------------------------------------------------------------------------------------------------


def tensor_at(where: memoryview, piece: Piece) -> torch.Tensor | None:
    """A tensor over its place in a file; None for a pickled value."""
    if piece.shape is None or piece.dtype is None:
        return None
    size = piece.shape.numel() * piece.dtype.itemsize
    if not size:
        return torch.empty(piece.shape, dtype=piece.dtype)
    return torch.frombuffer(where, dtype=torch.uint8, count=size, offset=piece.data).view(piece.dtype).view(piece.shape)


def segments(
    drawn: Image, planner: SavePlanner, values: list[bytes]
) -> Iterator[tuple[int, int, bytes | torch.Tensor]]:
    """What is where in the file: offset, length, source."""
    left = iter(values)
    for offset, data in drawn.constant:
        yield offset, len(data), data
    for piece in drawn.pieces:
        if piece.shape is None:
            data = next(left)
            yield piece.offset, len(data), data
        elif piece.shape.numel():
            source = planner.lookup_object(piece.index).detach()  # type: ignore[attr-defined]
            yield piece.data, source.nbytes, source


def fill(room: memoryview, start: int, segments: list[tuple[int, int, bytes | torch.Tensor]]) -> None:
    """Copies what the file has from `start` on."""
    target, end = torch.frombuffer(room, dtype=torch.uint8), start + len(room)
    for offset, length, source in segments:
        first, last = max(offset, start), min(offset + length, end)
        if first < last:
            if isinstance(source, torch.Tensor):
                target[first - start : last - start].copy_(_bytes_of(source)[first - offset : last - offset])
            else:
                room[first - start : last - start] = source[first - offset : last - offset]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy only if they are not in order already: it must not outlive the part it is made for."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


# --- metadata ------------------------------------------------------------------------------------------------------


def new_placeholder() -> str:
    """Something as long as a tag that no state's names contain."""
    return secrets.token_hex(TAG_LENGTH // 2)


def results(image: Image, rank: int, tag: str) -> list[WriteResult]:
    """What torch wants to know about the items of a rank's file."""
    name = shard_name(rank, tag)
    places = [(piece, _StorageInfo(name, piece.offset, piece.length)) for piece in image.pieces]
    return [WriteResult(index=piece.index, size_in_bytes=piece.length, storage_data=place) for piece, place in places]


def metadata_template(metadata: Metadata, results_by_rank: Iterable[Sequence[WriteResult]]) -> bytes:
    """`.metadata` with a placeholder for the tag: the saves of a plan differ in nothing else."""
    metadata.storage_data = {result.index: result.storage_data for results in results_by_rank for result in results}
    metadata.storage_meta = StorageMeta()
    return pickle.dumps(metadata)


def plan_name(template: bytes, placeholder: str, world_size: int) -> str:
    """The same for plans that put the same things in the same places."""
    return f"{world_size}-{zlib.crc32(template.replace(placeholder.encode(), bytes(TAG_LENGTH))):08x}-{len(template)}"


def check(flat: Mapping[str, Any]) -> None:
    """Raises if something has nothing to save."""
    for name, value in flat.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor) and value.is_meta:
            raise InputError(
                f"{name} is on the meta device: it has no values to save. Give it memory with `to_empty`, and values, "
                f"before the first save."
            )


# --- is the plan still right? --------------------------------------------------------------------------------------


def flattened(state: dict[str, Any]) -> dict[str, Any]:
    """The state by the names that torch's planner gives its parts, as far as it has nothing out of the ordinary; this
    is done at every save, and torch takes six times as long. Where the two differ, their signatures do, too."""
    return {name: container[key] for name, container, key in leaves(state)}


def chunks_of(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """Which parts of a sharded tensor this rank has."""
    found: list[ChunkStorageMetadata] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return found


def leaves(state: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Each part's name, what contains it, and under which key."""
    found: list[tuple[str, Any, Any]] = []
    for key in state:
        _find_leaves(str(key), state, key, found)
    return found


def _find_leaves(name: str, container: Any, key: Any, found: list[tuple[str, Any, Any]]) -> None:
    value = container[key]
    if isinstance(value, dict):
        for inner in value:
            _find_leaves(f"{name}.{inner}", value, inner, found)
    elif isinstance(value, list) and any(isinstance(part, dict | list | torch.Tensor) for part in value):
        for number in range(len(value)):
            _find_leaves(f"{name}.{number}", value, number, found)
    else:
        found.append((name, container, key))


def signature(flat: Mapping[str, Any]) -> list[Any]:
    """Differs when a plan would."""
    return [(key, *_signature_of(value)) for key, value in flat.items()]


def _signature_of(value: Any) -> tuple[Any, ...]:
    if isinstance(value, ShardedTensor):  # a new division shows on at least one rank, which tells the others
        shards = [shard.metadata for shard in value.local_shards()]
        return (value.metadata().size, [(each.shard_offsets, each.shard_sizes) for each in shards])
    if not isinstance(value, torch.Tensor):
        return ()
    if isinstance(value, DTensor):
        return (value.shape, value.dtype, value.placements, value.device_mesh)
    return (value.shape, value.dtype)
