"""Reading a checkpoint before there is a model to load it into: its bytes are near when `restore` asks for them.

What is read is a guess (`newest`). What was guessed wrong is dropped, what is missing is read by the restore.
"""

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from headway.checkpoint.layout import METADATA, Manifest, Shard
from headway.checkpoint.newest import Newest, Rank, look
from headway.checkpoint.source import Source, check
from headway.machine import free_memory
from headway.storage import open_storage

_THREADS = 4
_PART_BYTES = 8 << 20
_LEAVE_S = 5.0


def read_ahead(
    root: str | os.PathLike[str], *, local: str | os.PathLike[str] | None = None, most_bytes: int | None = None
) -> "Ahead":
    """Begins to read the newest checkpoint, in threads, and returns at once. Give what it returns to `Checkpointer`.

    `root` and `local` are those of the `Checkpointer`. `most_bytes` is how much to read at most: if it is not given, a
    half of the memory that is free, shared among the ranks of this node.
    """
    return Ahead(root, local, most_bytes)


class _File:
    """A file that is read, or will be."""

    def __init__(self, name: str, shard: Shard) -> None:
        self.name, self.shard = name, shard
        self.found: Future[tuple[str, Any]] = Future()
        """The tier that it came from, and its bytes."""
        self.data: mmap.mmap | None = None
        self.parts_left = 0
        self.path: Path | None = None
        self.stamp: tuple[int, ...] = ()
        """Tells whether a file that is mapped is still the one that was checked."""


class Ahead:
    """A checkpoint that is read ahead of its restore."""

    def __init__(self, root: str | os.PathLike[str], local: str | os.PathLike[str] | None, most: int | None) -> None:
        self._storage, self._most = open_storage(root), most
        self._local = os.path.abspath(local) if local else None
        self.url = self._storage.url
        self.problem = ""
        """Why not all could be read."""
        self._rank = Rank.this()
        self._newest: Future[Newest | None] = Future()
        self._files: dict[str, _File] = {}
        self._parts: deque[Callable[[], None]] = deque()
        self._lock, self._over = threading.Lock(), False
        self._threads: list[threading.Thread] = []
        self._start(self._begin)

    # --- what is asked of it ---

    @property
    def tag(self) -> str:
        """Of the save that is read, once that is known; empty if there is none."""
        found = self._newest.result()
        return found.tag if found else ""

    @property
    def manifest(self) -> Manifest | None:
        """Of the save that is read; None if it is in memory."""
        found = self._newest.result()
        return found.manifest if found else None

    def take(self, name: str) -> tuple[str, Any] | None:
        """Where a file came from, and its bytes, checked; None if it was not read. Waits for one that just is."""
        found, file = self._newest.result(), self._files.get(name)
        if found is not None and name == METADATA and found.metadata:
            return "", found.metadata
        try:
            data = file.found.result() if file else None
        except OSError:  # told as `problem`
            return None
        return data if file and (file.path is None or _stamp(file.path) == file.stamp) else None

    def loader(self, loader: Any) -> Any:
        """The loader at its saved position, with its workers at work: for `Checkpointer(loader=…)`. In any but the main
        thread they are not sent off yet, as that takes random numbers."""
        from headway.checkpoint.position import resumable, set_position_ahead
        from headway.checkpoint.reader import value_of
        from headway.events.vocabulary import Activity
        from headway.run import current

        resumed = resumable(loader, lambda: current().span(Activity.DATA_SKIP))
        found = self._newest.result()
        if found is None and not self.problem and threading.current_thread() is threading.main_thread():
            resumed.begin()
        if found is not None and found.own:
            try:
                [told] = value_of(found.own)
                set_position_ahead(resumed, told, found.is_known, found.saved_ranks, self._rank.ranks)
            except Exception as error:  # nothing was compared with a hash yet: the restore does, and sets it
                resumed.take_back()
                self._fail(error)
        return resumed

    def wait(self) -> "Ahead":
        """Waits until all is read. What interrupts that ends the reading as well."""
        try:
            while alive := [thread for thread in self._threads if thread.is_alive()]:
                alive[0].join(0.05)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Ends the reading, and gives the memory back."""
        self._end(OSError("it was closed"))
        until = time.monotonic() + _LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._files = {}

    # --- what to read ---

    def _begin(self) -> None:
        found = None
        try:
            skipped = os.environ.get("HEADWAY_SKIP_CHECKPOINTS", "")
            found = look(self._storage, self._rank, int(skipped) if skipped.isdecimal() else 0)
            self._plan(found)
        except Exception as error:  # a guess less: the restore finds out for itself what is wrong
            self._fail(error)
        finally:
            if self._over:  # meanwhile it was closed
                self._end(OSError("it was closed"))
            self._newest.set_result(found)
        for _ in range(min(_THREADS, len(self._parts)) - 1):
            self._start(self._work)
        self._work()

    def _plan(self, found: Newest | None) -> None:
        """Divides what is to be read into parts, as far as there is room."""
        if found is None or found.manifest is None:
            return
        room = free_memory() // 2 // self._rank.on_node if self._most is None else self._most
        source = Source(found.tag, (), self._local, self._storage, found.folder, found.manifest)
        for name in found.files:
            file = _File(name, found.manifest.files[name])
            if file.shard.bytes <= room:
                room -= file.shard.bytes
                self._files[name] = file
                self._parts += self._parts_of(file, source)

    def _parts_of(self, file: _File, source: Source) -> Iterable[Callable[[], None]]:
        root = self._storage.url if self._storage.is_local else self._local
        if root is not None and (path := Path(root) / source.folder / file.name).exists():
            file.path = path
            return [partial(self._map, file, source)]
        offsets = range(0, file.shard.bytes, _PART_BYTES)
        file.parts_left = len(offsets)
        return [partial(self._fetch, file, f"{source.folder}/{file.name}", offset) for offset in offsets]

    # --- reading it ---

    def _start(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, name="headway-ahead", daemon=True))
        self._threads[-1].start()

    def _work(self) -> None:
        while self._parts and not self._over:
            try:
                part = self._parts.popleft()
            except IndexError:  # another thread has taken the last one
                return
            try:
                part()
            except Exception as error:
                self._fail(error)

    def _map(self, file: _File, source: Source) -> None:
        """A file of this node: the page cache has it then, and gives it back by itself."""
        assert file.path is not None
        file.stamp = _stamp(file.path)
        tier, data = source.open(file.name)
        if tier == "remote":  # the local copy was no good
            file.path = None
        _settle(file.found, (tier, data))

    def _fetch(self, file: _File, where: str, offset: int) -> None:
        """A part of a file that is elsewhere. With the last one the file is there."""
        with self._lock:
            if file.data is None:
                file.data = mmap.mmap(-1, file.shard.bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                file.data.madvise(mmap.MADV_DONTFORK)  # data workers would keep it for as long as they live
            data = file.data
        into = memoryview(data)[offset : offset + _PART_BYTES]
        if self._storage.read_into(where, offset, into) < len(into):
            raise OSError(f"{where} ends before its {file.shard.bytes:,} bytes")
        with self._lock:
            file.parts_left -= 1
            is_last = not file.parts_left
        if is_last:
            check(data, file.shard, file.name)
            _settle(file.found, ("remote", data))

    # --- the end of it ---

    def _fail(self, error: Exception) -> None:
        """What was read stays; the rest is left to the restore."""
        if not self._over:
            self.problem = self.problem or f"{type(error).__name__}: {error}"
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._over = True
        self._parts.clear()
        for file in list(self._files.values()):
            _settle(file.found, OSError(str(error)))


def _settle(found: "Future[tuple[str, Any]]", result: tuple[str, Any] | OSError) -> None:
    with suppress(InvalidStateError):  # it came to its end before
        found.set_exception(result) if isinstance(result, OSError) else found.set_result(result)


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes with the file; empty if it is gone."""
    try:
        told = path.stat()
    except OSError:
        return ()
    return told.st_dev, told.st_ino, told.st_size, told.st_mtime_ns, told.st_ctime_ns


__all__ = ["Ahead", "read_ahead"]
