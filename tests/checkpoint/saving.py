"""Checkpoints as headway saves them, without torch."""

import mmap
import os

import xxhash

from headway.checkpoint import layout
from headway.checkpoint.layout import Manifest, Shard
from headway.storage import Storage


def image(size: int) -> memoryview:
    """Bytes on page boundaries in shared memory, as a trainer's are."""
    if size == 0:
        return memoryview(b"")
    file = os.memfd_create("image")
    try:
        os.ftruncate(file, size)
        pages = mmap.mmap(file, size)
    finally:
        os.close(file)
    pages[:] = os.urandom(size)
    return memoryview(pages)


def save(
    storage: Storage,
    step: int,
    generation: int,
    *,
    metric: float | None = None,
    ranks: int = 2,
    until: str = "committed",
    job: str = "",
) -> str:
    """Saves a checkpoint of a few kilobytes as headway does, up to a point; the tag it has."""
    folder, tag = layout.step_folder(step), layout.new_tag(generation)
    files = {}
    for rank in range(ranks):
        name, data = layout.shard_name(rank, tag), image(5000 + rank)
        digest = storage.upload(f"{folder}/{name}", [data], len(data))
        files[name] = Shard(bytes=len(data), xxh3=digest, rank=rank)
        storage.write(f"{folder}/{layout.marker_name(tag, rank)}", layout.marker({name: files[name]}).encode())
    if until == "shards":
        return tag
    metadata = f"metadata of {tag}".encode()
    its = Shard(bytes=len(metadata), xxh3=xxhash.xxh3_128_hexdigest(metadata), rank=0)
    manifest = Manifest(
        tag=tag,
        step=step,
        world_size=ranks,
        saved_ns=generation * 10**9,
        metric=metric,
        files=files,
        metadata=its,
        job=job,
    )
    storage.write(f"{folder}/{layout.manifest_name(tag)}", manifest.to_json().encode())
    if until == "manifest":
        return tag
    storage.write(f"{folder}/{layout.METADATA}", metadata)
    for rank in range(ranks):
        storage.remove(f"{folder}/{layout.marker_name(tag, rank)}")
    return tag
