"""Which save will be restored, and what a rank will read of it: a guess, made before there is a model.

All ranks agree on the save when they restore; here it is the newest that is whole as far as this node knows. What a
rank needs only its model can tell; here it is what it would need if nothing has changed since the save. Neither torch
nor a collective is used: other threads may be using both.
"""

import io
import os
import pickle
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.checkpoint import catalog, wire
from headway.checkpoint.arena import Arena, Shape, complete
from headway.checkpoint.layout import METADATA, Manifest, Shard, own_key, shard_name
from headway.checkpoint.lease import holder
from headway.checkpoint.source import check
from headway.machine import ranks_here
from headway.storage import Storage

_ANSWER_S = 10.0
"""How long a keeper may take to answer on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Which rank this is."""

    number: int
    ranks: int
    on_node: int
    """How many share this node."""

    @staticmethod
    def this() -> "Rank":
        """As torch says, if its ranks have met already; else as the launcher does."""
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            ranks = dist.get_world_size()
            return Rank(number=dist.get_rank(), ranks=ranks, on_node=ranks_here(ranks))
        return Rank(number=_told("RANK", 0), ranks=_told("WORLD_SIZE", 1), on_node=ranks_here())


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The save that will most likely be restored, and what of it is worth having."""

    tag: str
    saved_ranks: int
    own: bytes
    """What a rank had for itself, as torch saved it; empty if there is none. Not compared with any hash."""
    is_known: bool
    """Whether that was a rank of this number."""
    metadata: bytes = b""
    """What is to be read, if not all is in memory: `.metadata` itself, …"""
    manifest: Manifest | None = None
    """… what the files are like, …"""
    folder: str = ""
    """… where they are, …"""
    files: Sequence[str] = ()
    """… and which of them, the most likely first."""


class Place(NamedTuple):
    """Where a part of what was saved is."""

    key: str
    file: str
    offset: int
    length: int


def look(storage: Storage, rank: Rank, skipped: int = 0) -> Newest | None:
    """The newest save that is whole, but for so many that are to be skipped; None if there is none."""
    # Without a holder, what memory holds is of the past.
    arenas, committed = _arenas(storage.url) if holder(storage) is not None else ([], [])
    try:
        found = catalog.once_committed(storage)
        stored, deleted = {each.tag: each for each in found}, catalog.deleted(committed, found)
        held = {tag: step for tag, step in complete(arenas).items() if not deleted or tag < deleted}
        tags = sorted(held.keys() | stored.keys(), reverse=True)
        for tag in tags[min(skipped, max(len(tags) - 1, 0)) :]:
            if tag in held:
                return _in_memory(tag, arenas, rank)
            if stored[tag].state == "committed":
                return _stored(storage, stored[tag], arenas, rank)
        return None
    finally:
        for arena in arenas:
            arena.close()


def _in_memory(tag: str, arenas: Sequence[Arena], rank: Rank) -> Newest:
    images = {shard_name(arena.shape.rank, tag): arena for arena in arenas if tag in _tags(arena)}
    first = next(iter(images.values()))
    place, is_known = _own_place(places(first.metadata(tag)), rank.number)
    own = b""
    if place is not None:
        arena = images[place.file]
        slot = next(held.slot for held in arena.held() if held.tag == tag)
        own = bytes(arena.image(slot)[place.offset : place.offset + place.length])
        if tag not in _tags(arena):  # a trainer that still lives has begun to write over it
            own = b""
    return Newest(tag=tag, saved_ranks=first.shape.world_size, own=own, is_known=is_known)


def _stored(storage: Storage, found: catalog.Checkpoint, arenas: Sequence[Arena], rank: Rank) -> Newest:
    manifest = found.manifest
    assert manifest is not None
    assert manifest.metadata is not None
    metadata = storage.read(f"{found.name}/{METADATA}")
    check(metadata, manifest.metadata, METADATA)
    saved = places(metadata)
    place, is_known = _own_place(saved, rank.number)
    own = bytearray(place.length if place else 0)
    if place is not None:
        storage.read_into(f"{found.name}/{place.file}", place.offset, memoryview(own))
    near = {shard_name(arena.shape.rank, found.tag) for arena in arenas if found.tag in _tags(arena)}
    return Newest(
        tag=found.tag, saved_ranks=manifest.world_size, own=bytes(own), is_known=is_known, metadata=metadata,
        manifest=manifest, folder=found.name,
        files=[name for name in wanted(saved, manifest.files, manifest.world_size, rank) if name not in near],
    )  # fmt: skip


def wanted(saved: Sequence[Place], files: Mapping[str, Shard], saved_ranks: int, rank: Rank) -> list[str]:
    """The files that a rank reads: those that ranks of its place have written, and those with something in them that
    is there only once, and so is everyone's. Its own come first."""
    begin, end = rank.number * saved_ranks // rank.ranks, -(-(rank.number + 1) * saved_ranks // rank.ranks)
    shards = Counter(place.key for place in saved)
    own, others = _own_place(saved, rank.number)[0], own_key(0)[:-1]
    shared = {place.file for place in saved if shards[place.key] == 1 and not place.key.startswith(others)}
    shared |= {own.file} if own else set()
    written = {name for name, shard in files.items() if begin <= shard.rank < end}
    return sorted((shared | written) & files.keys(), key=lambda name: (name not in written, files[name].rank, name))


def places(metadata: bytes) -> list[Place]:
    """Where everything is, as `.metadata` says."""
    data = _WithoutTorch(io.BytesIO(metadata)).load().storage_data
    return [Place(index.fqn, at.relative_path, at.offset, at.length) for index, at in data.items()]


def _own_place(saved: Sequence[Place], rank: int) -> tuple[Place | None, bool]:
    """Where a rank's own state is, and that it is there; else where that of the first is."""
    found = {place.key: place for place in saved}
    return (found[own_key(rank)], True) if own_key(rank) in found else (found.get(own_key(0)), False)


class _Plain:
    """Stands for any of torch's types: has what was pickled of it."""

    def __init__(self, *given: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        vars(self).update(state if isinstance(state, dict) else {})


class _WithoutTorch(pickle.Unpickler):
    """To import torch's part for checkpoints takes a second, in which nothing else gets on."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if (module, name) == ("collections", "OrderedDict") else _Plain


def _arenas(root: str) -> tuple[list[Arena], list[str]]:
    """What the node's memory holds, if somebody keeps it, and what is known to have been committed. Nobody is started,
    and nothing changes hands."""
    found, committed = list[Arena](), list[str]()
    link = wire.connect(wire.place(root))
    if link is None:
        return found, committed
    try:
        is_ours = link.peer()[1] == os.getuid() and link.send({"do": "arenas"})
        while is_ours and link.has_message(_ANSWER_S) and (answer := link.receive()) is not None:
            if "arenas" in answer[0]:
                committed = answer[0]["committed"]
                break
            found.append(Arena(Shape(**answer[0]["arena"]), answer[1][0]))
    finally:
        link.close()
    return found, committed


def _tags(arena: Arena) -> set[str]:
    return {held.tag for held in arena.held()}


def _told(name: str, default: int) -> int:
    told = os.environ.get(name, "")
    return int(told) if told.isdecimal() else default


__all__ = ["Newest", "Place", "Rank", "look", "places", "wanted"]
