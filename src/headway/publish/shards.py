"""The weights of a checkpoint as a stream: whole, checked, and never all in memory at once.

Each file is read once, from its beginning to its end, and hashed on the way. What it holds is handed on in blocks,
before the hash is known: whoever takes blocks throws away what came of them if this raises.

Typical use::

    shards = Shards(storage, "step-00000100", manifest.files, manifest.metadata)
    for block in shards.blocks():
        block.copy_to(tensors[block.weight.name])
"""

import itertools
import math
import mmap
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from headway.checkpoint.layout import METADATA, Shard, tag_in
from headway.checkpoint.source import BadCheckpoint, check, join
from headway.errors import HeadwayError, InputError
from headway.publish.pieces import Block, Piece, Weight, uncovered
from headway.publish.stream import BUFFER_BYTES, Stream
from headway.publish.stream import blocks as stream_blocks
from headway.storage import Progress, Storage

_LISTED = 20
"""Differences that an error lists."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


class Shards:
    """The weights in a checkpoint of `torch.distributed.checkpoint`."""

    def __init__(
        self, storage: Storage, folder: str, files: Mapping[str, Shard], metadata: Shard | None, part: str = "model"
    ) -> None:
        """`files` and `metadata` are what its files must be; of a plain `dcp.save` nothing is known, nor compared."""
        self._storage, self._folder, self._files, self._told, self._part = storage, folder, files, metadata, part

    @cached_property
    def metadata(self) -> Metadata:
        """What `dcp.save` says it saved; not unpickled unless it is what was written."""
        try:
            data = self._storage.read(join(self._folder, METADATA))
        except FileNotFoundError as error:
            raise BadCheckpoint(f"{METADATA} is missing: the checkpoint was never committed") from error
        if self._told is not None:
            check(data, self._told, METADATA)
        try:
            metadata = pickle.loads(data)
        except Exception as error:  # a damaged pickle may raise anything
            raise BadCheckpoint(f"{METADATA} cannot be read ({type(error).__name__}: {error})") from error
        if not isinstance(metadata, Metadata) or metadata.storage_data is None:
            raise BadCheckpoint(f"{METADATA} is not that of dcp.save")
        return metadata

    @cached_property
    def tensors(self) -> dict[str, Weight]:
        """The weights by name, in the order in which they were saved; every value of each is somewhere."""
        told = self.metadata.state_dict_metadata.items()
        found = {key: its for key, its in told if isinstance(its, TensorStorageMetadata)}
        paths = self.metadata.planner_data
        names = _names_in_part(found, paths if isinstance(paths, Mapping) else {}, self._part)
        if not any(tag_in(place.relative_path) for place in self.metadata.storage_data.values()):  # not headway's
            names = dict(zip(names, _bare(names.values()), strict=True))
        if not names or len(set(names.values())) < len(names):
            raise InputError(f"the checkpoint has {'two tensors of one name' if names else 'no tensors'}.")
        return {name: self._weight(key, name, found[key]) for key, name in names.items()}

    def bytes_to_read(self, names: Collection[str] | None = None) -> int:
        """How much `blocks` reads, and tells its progress of."""
        return sum(map(self._size, self._pieces_by_file(names)))

    def blocks(self, names: Collection[str] | None = None, progress: Progress | None = None) -> Iterator[Block]:
        """The values of some weights, or of all, in the order of the files. Files that have none of them are not read.

        BadCheckpoint if a file turns out not to be what was saved: after its last block, at the latest.
        """
        buffers = [memoryview(mmap.mmap(-1, BUFFER_BYTES)) for _ in range(2)]
        with ThreadPoolExecutor(1, "headway-shards") as threads:
            for file, pieces in self._pieces_by_file(names).items():
                stream = Stream(self._reading(file), self._size(file), buffers, threads, progress)
                try:
                    for weight, piece in pieces:
                        yield from stream_blocks(stream, weight, piece)
                except HeadwayError:
                    self._check(file, stream)  # else it would be told what damage looks like, not that it is damage
                    raise
                self._check(file, stream)

    @torch.no_grad()
    def load(self, model: nn.Module, progress: Progress | None = None) -> None:
        """Fills a model's parameters and persistent buffers. If this raises, the model is not fit for use.

        InputError, before anything is read, if the model's names, shapes or types are not those of the checkpoint.
        """
        state = model.state_dict()
        live = dict(zip(_bare(state), state.values(), strict=True))
        saved = dict(zip(_bare(self.tensors), self.tensors.values(), strict=True))
        _check_fit(live, saved, {each.data_ptr() for each in itertools.chain(model.parameters(), model.buffers())})
        targets = {weight.name: live[name] for name, weight in saved.items()}
        with one_thread():
            for block in self.blocks(progress=progress):
                block.copy_to(targets[block.weight.name])

    def _check(self, file: str, stream: Stream) -> None:
        """Reads a file to its end; BadCheckpoint if it is not what was saved."""
        stream.finish()
        if (told := self._files.get(file)) and stream.digest != told.xxh3:
            raise BadCheckpoint(f"{file} is not what was saved: its hash differs")

    def _weight(self, key: str, name: str, told: TensorStorageMetadata) -> Weight:
        shape, dtype, pieces = tuple(told.size), told.properties.dtype, {}
        for chunk in told.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if any(at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
                raise BadCheckpoint(f"{key} is {list(shape)}, and has a part at {list(offsets)} of {list(sizes)}")
            if math.prod(sizes):
                pieces[offsets, sizes] = Piece(offsets, sizes, *self._place(key, chunk.offsets))
        if (lost := uncovered(shape, pieces)) is not None:
            raise BadCheckpoint(f"{key} is not whole: no file has its values at {list(lost)}, of {list(shape)}")
        return Weight(name=name, dtype=dtype, shape=shape, pieces=tuple(pieces.values()))

    def _place(self, key: str, offsets: torch.Size) -> tuple[str, int, int]:
        place = self.metadata.storage_data.get(MetadataIndex(key, offsets))
        if place is None:
            raise BadCheckpoint(f"{key} is not whole: nothing says which file has its part at {list(offsets)}")
        if self._files and place.relative_path not in self._files:
            raise BadCheckpoint(f"{place.relative_path} is not in the manifest, and {key} is in it")
        if getattr(place, "transform_descriptors", None):
            raise InputError(f"{key} is compressed ({place.transform_descriptors}): only dcp.load can read that.")
        return place.relative_path, place.offset, place.length

    def _pieces_by_file(self, names: Collection[str] | None) -> dict[str, list[tuple[Weight, Piece]]]:
        """What is to be read of each file, in the order in which it lies there."""
        found: dict[str, list[tuple[Weight, Piece]]] = {}
        for weight in self.tensors.values():
            if names is None or weight.name in names:
                for piece in weight.pieces:
                    found.setdefault(piece.file, []).append((weight, piece))
        return {file: sorted(pieces, key=lambda each: each[1].at) for file, pieces in sorted(found.items())}

    def _size(self, file: str) -> int:
        try:
            size = self._storage.size(join(self._folder, file))
        except FileNotFoundError as error:
            raise BadCheckpoint(f"{file} is missing") from error
        if (told := self._files.get(file)) and told.bytes != size:
            raise BadCheckpoint(f"{file} has {size:,} bytes instead of {told.bytes:,}")
        return size

    def _reading(self, file: str) -> Callable[[int, memoryview], None]:
        path = join(self._folder, file)

        def read(offset: int, into: memoryview) -> None:
            if (count := self._storage.read_into(path, offset, into)) < len(into):
                raise BadCheckpoint(f"{file} ends after {offset + count:,} bytes: someone has shortened it")

        return read


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps torch to one thread: it has little to do, and more of them would wait for the core that reads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- names -----------------------------------------------------------------------------------------------------------


def _names_in_part(keys: Collection[str], paths: Mapping[str, tuple[Any, ...]], part: str) -> dict[str, str]:
    """Keys of the checkpoint, and their names within the part; all of them, if a state dict was saved as it is."""
    names = {}
    for key in keys:
        path = paths.get(key)
        if path and len(path) > 1 and path[0] == part:
            names[key] = ".".join(map(str, path[1:]))
        elif not path and key.startswith(f"{part}."):
            names[key] = key[len(part) + 1 :]
    parts = sorted({str(paths[key][0]) for key in keys if len(paths.get(key, ())) > 1})
    if not names and parts:
        raise InputError(
            f"the checkpoint has no part {part!r} with tensors. Name one of its parts: {', '.join(parts)}."
        )
    return names or {key: key for key in keys}


def _bare(names: Iterable[str]) -> list[str]:
    """Names without those of wrappers: of compilation wherever they are, of others if all names begin so."""
    bare = list(names)
    for wrapper in _WRAPPERS:
        bare = [name.replace(wrapper, "") for name in bare]
    while bare and all(name.startswith("module.") for name in bare):
        bare = [name.removeprefix("module.") for name in bare]
    return bare


def _check_fit(live: Mapping[str, Any], saved: Mapping[str, Weight], own: Collection[int]) -> None:
    """InputError that tells all differences between a model and what was saved."""
    tensors = {name: value for name, value in live.items() if isinstance(value, torch.Tensor)}
    if any(value.is_meta for value in tensors.values()):
        raise InputError("the model has no memory yet (device meta). Call model.to_empty(device='cpu') first.")
    loaded = {_memory(tensors[name]) for name in saved.keys() & tensors.keys()}  # and with them those tied to them
    told = [f"{name} is no tensor, which only dcp.load can read" for name in live if name not in tensors]
    for name, value in tensors.items():
        if name in saved:
            told += [f"{name} {difference}" for difference in _differences(value, saved[name], own)]
        elif _memory(value) not in loaded:
            told.append(f"{name} is not in the checkpoint")
    told += [f"{name} is not in the model" for name in saved if name not in tensors]
    if told:
        more = f", and {len(told) - _LISTED} more" if len(told) > _LISTED else ""
        raise InputError(
            f"the model is not the one that was saved: {', '.join(told[:_LISTED])}{more}. Build it as in training."
        )


def _differences(live: torch.Tensor, saved: Weight, own: Collection[int]) -> Iterator[str]:
    if tuple(live.shape) != saved.shape:
        yield f"has the shape {list(live.shape)} instead of {list(saved.shape)}"
    if live.dtype != saved.dtype:
        yield f"is {live.dtype} instead of {saved.dtype}"
    if _is_divided(live):
        yield "is divided among ranks (build it without them)"
    elif live.numel() and live.data_ptr() not in own:
        yield "is a copy in the model's state_dict(), not its memory"


def _is_divided(value: Any) -> bool:
    """Whether ranks share it: as FSDP has them, and TorchRec."""
    return hasattr(value, "to_local") or hasattr(value, "local_shards")


def _memory(value: torch.Tensor) -> tuple[Any, ...]:
    """The same for tied parameters; an empty tensor is its own."""
    if _is_divided(value) or not value.numel():
        return (id(value),)
    return value.data_ptr(), value.shape, value.stride()
