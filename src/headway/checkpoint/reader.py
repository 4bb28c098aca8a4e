"""Reads checkpoints back: from memory, from the local disk, or from where they are stored, whichever comes first.

What comes from a file is compared with its hash before any of it is used.
"""

import io
import os
import pickle
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.utils.serialization.config  # by `torch.load`, else, in the middle of a restore
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from headway.checkpoint import catalog
from headway.checkpoint.image import ShardedTensor, chunks_of, leaves
from headway.checkpoint.ranks import local_size
from headway.checkpoint.source import BadCheckpoint, Source
from headway.machine import cores
from headway.storage import open_storage

_RECORD = b"archive/data/0"
_HEAD = 8192
_THREADS = 4


class _Saved(NamedTuple):
    """One part of what was saved."""

    place: Any
    shape: torch.Size
    dtype: torch.dtype


class Reader(StorageReader):
    """A storage reader for `dcp.load` that compares every file with its hash before it believes it.

    ::

        dcp.load(state, storage_reader=Reader("checkpoints/step-00000100"))
    """

    def __init__(self, path: str | os.PathLike[str] = "", source: Source | None = None) -> None:
        self._path, self._source = os.fspath(path), source
        self._metadata: Metadata | None = None
        self._storage_data: dict[Any, Any] = {}
        self._tensors: dict[Any, Any] = {}
        self._heads: dict[Any, int | None] = {}

    @property
    def source(self) -> Source:
        if self._source is None:
            self._source = stored(self._path)
        return self._source

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._path, self._source, self._metadata = os.fspath(checkpoint_id), None, None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = pickle.loads(self.source.metadata())
            self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._storage_data, self._tensors = metadata.storage_data, metadata.state_dict_metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._storage_data[item.storage_index].relative_path, []).append(item)
        on_device = False
        for name, items in by_file.items():
            tier, data = self.source.open(name)
            for item in items:
                on_device |= self._read(data, item, planner)
                self.source.count(tier, self._storage_data[item.storage_index].length)
        if on_device:
            torch.accelerator.synchronize()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, data: Any, item: ReadItem, planner: LoadPlanner) -> bool:
        place = self._storage_data[item.storage_index]
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(data[place.offset : place.offset + place.length]))
            return False
        target = planner.resolve_tensor(item).detach()
        found = self._tensor(data, place, *self._kind(item.storage_index))
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            found = found.narrow(dimension, start, length)
        target.copy_(found, non_blocking=True)
        planner.commit_tensor(item, target)
        return target.device.type != "cpu"

    def _tensor(self, data: Any, place: Any, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor as `torch.save` wrote it, without a copy of its bytes."""
        kind = place.relative_path, shape, dtype
        if kind not in self._heads:  # they look alike in the whole file
            self._heads[kind] = _head(data[place.offset : place.offset + place.length])
        head = self._heads[kind]
        if head is None:
            packed = io.BytesIO(data[place.offset : place.offset + place.length])
            found: torch.Tensor = torch.load(packed, weights_only=True)
            return found
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype, count=shape.numel(), offset=place.offset + head).view(shape)

    def _kind(self, index: MetadataIndex) -> tuple[torch.Size, torch.dtype]:
        """Size and type of the tensor that was saved."""
        told, wanted = self._tensors[index.fqn], index.offset
        if len(told.chunks) == 1:
            return told.chunks[0].sizes, told.properties.dtype
        return next(chunk.sizes for chunk in told.chunks if chunk.offsets == wanted), told.properties.dtype

    # --- without a plan ---

    @torch.no_grad()
    def load_exactly(self, state: dict[str, Any]) -> bool:
        """Loads into a state that is divided as the saved one is, which needs no plan. False if it is not; then nothing
        has changed."""
        metadata = self.read_metadata()
        self.set_up_storage_reader(metadata, True)
        by_file: dict[str, list[tuple[_Saved, Any, Any]]] = {}
        known: dict[Any, Any] = {}
        for name, container, key in leaves(state):
            saved = self._saved(name, container[key], known)
            if saved is None:
                return False
            by_file.setdefault(saved.place.relative_path, []).append((saved, container, key))
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for file, items in by_file.items():
            tier, data = self.source.open(file)
            for saved, container, key in items:
                pairs += self._load_item(data, saved, container, key)
            self.source.count(tier, sum(saved.place.length for saved, _, _ in items))
        _copy(pairs)
        return True

    def _saved(self, name: str, value: Any, known: dict[Any, Any]) -> "_Saved | None":
        """The saved part that is just this one."""
        told = self._tensors.get(name)
        if not isinstance(told, TensorStorageMetadata):
            place = None if isinstance(value, torch.Tensor) else self._storage_data.get(MetadataIndex(name))
            return _Saved(place, torch.Size(), torch.uint8) if place else None
        if not isinstance(value, torch.Tensor) or isinstance(value, ShardedTensor) or told.size != value.shape:
            return None
        offsets, sizes = torch.Size([0] * value.ndim), value.shape
        if isinstance(value, DTensor):
            key = (value.shape, value.placements, value.device_mesh)
            if key not in known:
                known[key] = chunks_of(value)
            if len(known[key]) != 1:
                return None
            offsets, sizes = known[key][0].offsets, known[key][0].sizes
        if not any(chunk.offsets == offsets and chunk.sizes == sizes for chunk in told.chunks):
            return None
        place = self._storage_data.get(MetadataIndex(name, offsets))
        return _Saved(place, sizes, told.properties.dtype) if place else None

    def _load_item(
        self, data: Any, saved: "_Saved", container: Any, key: Any
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Loads a value; of a tensor, returns what is to be copied where."""
        place, value = saved.place, container[key]
        if isinstance(value, torch.Tensor):
            return [(value.to_local() if isinstance(value, DTensor) else value, self._tensor(data, *saved))]
        container[key] = value_of(bytes(data[place.offset : place.offset + place.length]))
        return []

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies each second to its first. Where torch has one thread only, a launcher's default, a few share the work."""
    share = int(cores() / local_size())
    threads = max(1, min(_THREADS, share)) if torch.get_num_threads() == 1 else 1
    left = deque(pairs)

    @torch.no_grad()
    def work() -> None:
        while left:
            with suppress(IndexError):  # another thread has taken the last one
                target, found = left.popleft()
                target.copy_(found, non_blocking=True)

    if threads > 1:
        with ThreadPoolExecutor(threads, "headway-restore") as pool:
            for done in [pool.submit(work) for _ in range(threads)]:
                done.result()
    work()
    if any(target.device.type != "cpu" for target, _ in pairs):
        torch.accelerator.synchronize()


def stored(path: str) -> Source:
    """The checkpoint in a folder."""
    parent, _, name = path.rstrip("/").rpartition("/")
    storage = open_storage(parent or ".")
    found = catalog.find(storage, name)
    if found.manifest is None:
        raise BadCheckpoint(f"{path} has no manifest, so nothing can be checked. Plain dcp.load may read it")
    return Source(tag=found.manifest.tag, storage=storage, folder=name, manifest=found.manifest)


def value_of(data: bytes) -> Any:
    """What is no tensor, as `torch.save` wrote it in its older form: pickles, of which the fourth is the value. Torch
    looks for other forms first, which takes longer than all the rest."""
    file = io.BytesIO(data)
    try:
        if pickle.load(file) == torch.serialization.MAGIC_NUMBER:
            return [pickle.load(file) for _ in range(3)][-1]
    except pickle.UnpicklingError:  # it has tensors in it
        pass
    return torch.load(io.BytesIO(data), weights_only=False)


def _head(data: Any) -> int | None:
    """Where the bytes of a tensor begin in what `torch.save` wrote; None if it is pickled as a whole."""
    head = bytes(data[:_HEAD])
    at = head.find(_RECORD)
    if at < 30 or head[at - 30 : at - 26] != b"PK\3\4":
        return None
    return at + len(_RECORD) + int.from_bytes(head[at - 2 : at], "little")


__all__ = ["BadCheckpoint", "Reader", "Source", "stored"]
