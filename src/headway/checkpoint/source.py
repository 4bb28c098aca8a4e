"""Where the files of a checkpoint come from: memory, what was read ahead, the local disk, or where they are stored.

What comes from a file is compared with its hash before any of it is used. Torch is not needed here.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.checkpoint import catalog
from headway.checkpoint.arena import Arena
from headway.checkpoint.layout import METADATA, Manifest, Shard, marker_name, read_marker
from headway.errors import HeadwayError
from headway.storage import Storage, open_storage


class BadCheckpoint(HeadwayError):
    """A checkpoint is not what was saved; the text says which part of it."""


@dataclass
class Source:
    """Where files can come from, nearest first."""

    tag: str
    arenas: Sequence[Arena] = ()
    local: str | None = None
    storage: Storage | None = None
    folder: str = ""
    manifest: Manifest | None = None
    ahead: Callable[[str], tuple[str, Any] | None] = lambda name: None
    """What was read ahead: the tier and the bytes of a file, checked; None if it was not."""
    used: dict[str, int] = field(default_factory=dict)
    """Bytes that were read from each tier."""
    ahead_bytes: int = 0
    """Bytes of files that had been read ahead."""

    def metadata(self) -> bytes:
        for arena in self.arenas:
            if any(held.tag == self.tag for held in arena.held()):
                return arena.metadata(self.tag)
        if (found := self.ahead(METADATA)) is not None:
            return bytes(found[1])
        if self.storage is None or (manifest := self._known()).metadata is None:
            raise BadCheckpoint(f"nothing says what the save {self.tag} consists of")
        data = self.storage.read(join(self.folder, METADATA))
        check(data, manifest.metadata, METADATA)
        return data

    def open(self, name: str) -> tuple[str, Any]:
        """Where a file is found, and its bytes, checked."""
        for arena in self.arenas:
            for held in arena.held():
                if held.tag == self.tag and name == f"__{arena.shape.rank}_{self.tag}.distcp":
                    return "memory", arena.image(held.slot)
        if (found := self.ahead(name)) is not None:
            self.ahead_bytes += len(found[1])
            return found
        if (path := self._on_disk(name)) is not None:
            return "local", path
        return "remote" if self.storage and not self.storage.is_local else "disk", self._stored(name)

    def was_unreadable(self, error: BaseException) -> bool:
        """Whether a store did not give what it may have, so that nothing is known of the checkpoint itself. On a local
        disk an error is the file's own: a bad sector."""
        causes = (error, error.__cause__)
        failed = any(isinstance(each, OSError) and not isinstance(each, FileNotFoundError) for each in causes)
        return failed and self.storage is not None and not self.storage.is_local

    def _known(self) -> Manifest:
        """What is stored; looked up when something is not in memory."""
        if self.manifest is None:
            assert self.storage is not None
            found = catalog.find(self.storage, self.folder)
            if found.manifest is None:
                raise BadCheckpoint(catalog.verify(self.storage, found)[0])
            self.manifest = found.manifest
        return self.manifest

    def count(self, tier: str, size: int) -> None:
        self.used[tier] = self.used.get(tier, 0) + size

    def _on_disk(self, name: str) -> Any:
        """The local copy, if it is there and whole."""
        if self.local is None:
            return None
        place = open_storage(self.local)
        try:
            rank = int(name.split("_")[2])
            shard = read_marker(place.read(join(self.folder, marker_name(self.tag, rank))))[name]
            return mapped(Path(place.url) / self.folder / name, shard, name)
        except (OSError, KeyError, ValueError, BadCheckpoint):
            return None

    def _stored(self, name: str) -> Any:
        if self.storage is None or name not in (manifest := self._known()).files:
            raise BadCheckpoint(f"{name} is neither in memory nor stored")
        shard, where = manifest.files[name], join(self.folder, name)
        try:
            if self.storage.is_local:
                return mapped(Path(self.storage.url) / where, shard, name)
            if self.local is not None:
                Path(self.local).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.local) as folder:
                self.storage.fetch(where, Path(folder) / "shard")
                return mapped(Path(folder) / "shard", shard, name)
        except OSError as error:
            raise BadCheckpoint(f"{name} cannot be read ({error})") from error


def join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def check(data: Any, shard: Shard, name: str) -> None:
    import xxhash

    if len(data) != shard.bytes:
        raise BadCheckpoint(f"{name} has {len(data):,} bytes instead of {shard.bytes:,}")
    if xxhash.xxh3_128_hexdigest(data) != shard.xxh3:
        raise BadCheckpoint(f"{name} is not what was saved: its hash differs")


def mapped(path: Path, shard: Shard, name: str) -> mmap.mmap:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != shard.bytes:
            raise BadCheckpoint(f"{name} has {os.fstat(file.fileno()).st_size:,} bytes instead of {shard.bytes:,}")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    check(data, shard, name)
    return data
