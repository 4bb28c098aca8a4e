"""The process that makes checkpoints durable: it reads arenas and writes files, and never imports torch.

A shard goes to its place under a name of its own, hashed on its way, and then the rank's marker. Where rank 0 is, the
coordinator waits for all markers, writes the manifest, and last `.metadata`: from that instant on the checkpoint
exists. Only then `latest` moves, and only then older ones are pruned. Whatever dies at whatever instant, the last
checkpoint that was committed stays as it is.
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.checkpoint import catalog, lease
from headway.checkpoint.arena import Arena, Shape
from headway.checkpoint.layout import (
    METADATA,
    Manifest,
    Shard,
    manifest_name,
    marker,
    marker_name,
    read_marker,
    shard_name,
    tag_of,
)
from headway.checkpoint.retention import Retention
from headway.checkpoint.wire import Wire
from headway.errors import InputError
from headway.storage import Storage, open_storage

CHUNK = 16 << 20
THREADS = 4
LOCAL_COPIES = 3
STALLED_S = 60.0
"""How long a trainer may take for the next part of a stream."""

_NICE = 10
_IOPRIO_BEST_EFFORT_LAST = (2 << 13) | 7
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


class Broken(Exception):
    """A save cannot be made durable; the text says why."""


class Uploader:
    """Does the tasks that come in, a few at a time."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._tasks: queue.SimpleQueue[tuple[dict[str, Any], Arena]] = queue.SimpleQueue()
        self._gone: set[int] = set()
        self._lease: dict[str, Any] | None = None
        self._active: set[tuple[str, int]] = set()
        self._newest = ""
        self._lock, self._tidying = threading.Lock(), threading.Lock()

    def run(self) -> None:
        for _ in range(THREADS):
            threading.Thread(target=self._work, daemon=True).start()
        threading.Thread(target=self._hold, daemon=True).start()
        while (received := self._wire.receive()) is not None:
            message, fds = received
            if "task" in message:
                self._gone.discard(message["task"]["rank"])
                self._tasks.put((message["task"], Arena(Shape(**message["shape"]), fds[0])))
            elif "gone" in message:
                self._gone.add(message["gone"])
            elif "lease" in message:
                self._lease = message["lease"]

    def _hold(self) -> None:
        """Says now and then that the root is still in use."""
        while True:
            time.sleep(lease.REFRESH_S)
            if (told := self._lease) is not None:
                with suppress(Exception):  # the next one may get through; until then the old word counts
                    storage, owner = open_storage(told["root"]), lease.Owner(**told["owner"])
                    if lease.holds(storage, owner.session):
                        lease.refresh(storage, owner)

    def _work(self) -> None:
        while True:
            task, arena = self._tasks.get()
            self._active.add((task["tag"], task["rank"]))
            try:
                self._do(task, arena)
            except Exception as error:  # reported to the trainer, which decides what a failed save means
                text = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
                _excuse(task, text)
                self._tell(task, "failed", error=text, errno=getattr(error, "errno", None))
            finally:
                self._active.discard((task["tag"], task["rank"]))
                arena.close()

    def _tell(self, task: dict[str, Any], event: str, **more: Any) -> None:
        with self._lock:
            self._wire.send({"event": event, "tag": task["tag"], "rank": task["rank"], **more})

    def _note(self, task: dict[str, Any], about: str, error: Exception) -> None:
        self._tell(task, "note", about=about, error=f"{type(error).__name__}: {error}")

    def _do(self, task: dict[str, Any], arena: Arena) -> None:
        if "error" in task:
            raise Broken(task["error"])
        began, cpu = time.monotonic(), time.thread_time()
        size = task["image_bytes"]
        chunks = self._stream(task, arena) if task["streams"] else _chunks(arena.image(task["slot"]))
        storage, kept = open_storage(task["root"]), task.get("local")
        if _is_committed(storage, task):
            if task["coordinator"]:  # whoever did it may have died before the name was safe
                storage.write(_join(task["folder"], METADATA), arena.metadata(task["tag"]))
            self._finish(storage, task, seconds=0.0, cpu_s=0.0, bytes=size)
            return
        _check_wanted(storage, task)
        if not task.get("stored"):  # by an uploader that died while it waited for other ranks
            _check_memory(arena, task)
            if kept:
                chunks = self._copied(kept, task, arena, chunks)
            digest = _store(storage, task, chunks, size)
            _check_memory(arena, task)
            self._tell(task, "uploaded", seconds=time.monotonic() - began, bytes=size, xxh3=digest)
        if task["coordinator"]:
            size = self._commit(storage, task, arena.metadata(task["tag"])).size
        self._finish(storage, task, seconds=time.monotonic() - began, cpu_s=time.thread_time() - cpu, bytes=size)

    def _finish(self, storage: Storage, task: dict[str, Any], **told: float) -> None:
        if task["coordinator"]:
            self._tell(task, "committed", **told)
            with self._tidying:
                self._tidy(storage, task)
        self._active.discard((task["tag"], task["rank"]))  # before "done": the next save tidies only if none is active
        self._tell(task, "done")

    def _copied(
        self, kept: str, task: dict[str, Any], arena: Arena, chunks: Iterator[memoryview]
    ) -> Iterator[memoryview]:
        """Puts a copy onto the local disk. Returns what to upload: the copy, since what streams comes only once."""
        place = open_storage(kept)
        with suppress(OSError):  # another rank tidies up, too
            _make_room(place, task["tag"])
        try:
            _store(place, task, chunks, task["image_bytes"], metadata=arena.metadata(task["tag"]))
        except OSError as error:  # told, and not fatal: only a restore takes longer
            if task["streams"]:
                raise
            self._note(task, "there is no local copy", error)
            return _chunks(arena.image(task["slot"]))
        return _chunks_of_file(Path(kept) / task["folder"] / shard_name(task["rank"], task["tag"]))

    def _stream(self, task: dict[str, Any], arena: Arena) -> Iterator[memoryview]:
        """The parts of an image as the trainer makes them. Each slot is free for another one afterwards."""
        room, left, number = arena.shape.image_bytes, task["image_bytes"], 0
        while left:
            slot = number % arena.shape.slots
            self._await_part(task, arena, slot, number)
            size = min(room, left)
            yield arena.image(slot)[:size]
            arena.open(slot)
            left, number = left - size, number + 1

    def _await_part(self, task: dict[str, Any], arena: Arena, slot: int, number: int) -> None:
        until, patience_s = time.monotonic() + STALLED_S, 0.0002
        while not any(h.slot == slot and h.step == number and h.tag == task["tag"] for h in arena.held()):
            if task["rank"] in self._gone or time.monotonic() > until:
                raise Broken("the trainer ended before it had saved everything")
            time.sleep(patience_s)
            patience_s = min(2 * patience_s, 0.005)

    # --- the coordinator ---

    def _commit(self, storage: Storage, task: dict[str, Any], metadata: bytes) -> Manifest:
        import xxhash

        files = self._await_markers(storage, task)
        seal = Shard(bytes=len(metadata), xxh3=xxhash.xxh3_128_hexdigest(metadata), rank=0)
        manifest = Manifest(
            tag=task["tag"], step=task["step"], world_size=task["world_size"], saved_ns=task["saved_ns"],
            job=task["job"], metric=task["metric"], files=files, metadata=seal,
        )  # fmt: skip
        if task["unclaimed"]:
            lease.claim(storage, lease.Owner(**task["unclaimed"]))
        elif not any(lease.holds(storage, session) for session in self._sessions(task)):
            raise Broken(f"another job has begun to write to {storage.url}: this one must not any more")
        with self._tidying:  # who tidies up may be deleting what an earlier save has left in this folder
            names = storage.names(task["folder"])
            if any((tag_of(name) or "") > task["tag"] for name in names):
                raise Broken("a later save of the same step is there already")
            if lost := sorted(files.keys() - set(names)):
                raise Broken(f"{lost[0]} was deleted before it was committed, with what an earlier save had left there")
            storage.write(_join(task["folder"], manifest_name(task["tag"])), manifest.to_json().encode())
            storage.write(_join(task["folder"], METADATA), metadata)
        return manifest

    def _sessions(self, task: dict[str, Any]) -> list[str]:
        """Who may commit: the run that saved, and the one that came after it on this node when it had died."""
        return [task["session"], *([self._lease["owner"]["session"]] if self._lease else [])]

    def _is_of_past(self, task: dict[str, Any]) -> bool:
        """Whether another run has begun since."""
        return self._lease is not None and self._lease["owner"]["session"] != task["session"]

    def _tidy(self, storage: Storage, task: dict[str, Any]) -> None:
        """What comes after the commit, and may fail without harm: the next one does it again."""
        try:
            for rank in range(task["world_size"]):
                storage.remove(_join(task["folder"], marker_name(task["tag"], rank)))
            if not self._newest and (found := catalog.newest(storage)):  # of the uploader before this one
                self._newest = found.tag
            if task["folder"] and task["tag"] >= self._newest:
                self._newest = task["tag"]
                catalog.set_latest(storage, task["folder"])
            # An earlier save that is still under way would be taken for the remains of one that failed.
            if min(self._active)[0] >= task["tag"]:
                if task["retention"] is not None:
                    catalog.prune(storage, Retention(**task["retention"]))
                elif task["folder"]:
                    catalog.sweep(storage, task["folder"])
        except Exception as error:
            self._note(task, "older checkpoints were not tidied up", error)

    def _await_markers(self, storage: Storage, task: dict[str, Any]) -> dict[str, Shard]:
        until, patience_s, found = time.monotonic() + task["deadline_s"], 0.005, dict[int, dict[str, Shard]]()
        while missing := [rank for rank in range(task["world_size"]) if rank not in found]:
            present = set(storage.names(task["folder"]))
            for rank in missing:
                if (name := marker_name(task["tag"], rank)) in present:
                    found[rank] = _heard(rank, storage.read(_join(task["folder"], name)))
            if len(found) < task["world_size"]:
                if self._newest > task["tag"] and self._is_of_past(task):
                    raise Broken("its run had ended before all ranks had saved, and the next one has saved since")
                if time.monotonic() > until:
                    ranks = ", ".join(str(rank) for rank in missing if rank not in found)
                    raise Broken(f"no word from rank {ranks} after {task['deadline_s']:.0f} s: not committed")
                time.sleep(patience_s)
                patience_s = min(1.5 * patience_s, 1.0)
        return {name: shard for shards in found.values() for name, shard in shards.items()}


def _store(
    storage: Storage, task: dict[str, Any], chunks: Iterator[memoryview], size: int, metadata: bytes | None = None
) -> str:
    """Brings a rank's shard to its place, and then its marker. Returns the hash."""
    name, folder = shard_name(task["rank"], task["tag"]), task["folder"]
    digest = storage.upload(_join(folder, name), chunks, size)
    if metadata is not None:
        storage.write(_join(folder, f"{task['tag']}.metadata"), metadata)
    shards = {name: Shard(bytes=size, xxh3=digest, rank=task["rank"])}
    storage.write(_join(folder, marker_name(task["tag"], task["rank"])), marker(shards).encode())
    return digest


def _make_room(place: Storage, tag: str) -> None:
    """Of the local copies leaves the last few: another rank may still upload the one before the last."""
    older = [each for each in catalog.checkpoints(place) if "" < each.tag < tag]
    for each in older[: 1 - LOCAL_COPIES]:
        place.remove_folder(each.name, METADATA)


def _is_committed(storage: Storage, task: dict[str, Any]) -> bool:
    """Whether an uploader has come that far that died before it could tell."""
    import xxhash

    try:
        manifest = Manifest.from_json(storage.read(_join(task["folder"], manifest_name(task["tag"]))))
        digest = xxhash.xxh3_128_hexdigest(storage.read(_join(task["folder"], METADATA)))
    except (FileNotFoundError, InputError):
        return False
    return manifest.metadata is not None and manifest.metadata.xxh3 == digest


def _excuse(task: dict[str, Any], why: str) -> None:
    """Tells the coordinator that this rank's shard will not come."""
    if not task["coordinator"]:
        with suppress(Exception):  # else it learns it at its deadline
            name = _join(task["folder"], marker_name(task["tag"], task["rank"]))
            open_storage(task["root"]).write(name, json.dumps({"error": why}).encode())


def _heard(rank: int, text: bytes) -> dict[str, Shard]:
    if "error" in (told := json.loads(text)):
        raise Broken(f"rank {rank}: {told['error']}")
    return read_marker(text)


def _check_wanted(storage: Storage, task: dict[str, Any]) -> None:
    """A save that memory alone had is not made durable if somebody has deleted what was committed before it."""
    if "after" not in task:
        return
    committed = [task["after"]] if task["after"] else []
    if lease.holder(storage) is None or catalog.deleted(committed, catalog.checkpoints(storage)):
        raise Broken("checkpoints were deleted since")


def _check_memory(arena: Arena, task: dict[str, Any]) -> None:
    held = [found for found in arena.held() if found.tag == task["tag"] and found.slot == task["slot"]]
    if not held and not task["streams"]:
        raise Broken("its memory was given to another save before it was uploaded")


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _chunks(image: memoryview) -> Iterator[memoryview]:
    for offset in range(0, len(image), CHUNK):
        yield image[offset : offset + CHUNK]


def _chunks_of_file(path: Path) -> Iterator[memoryview]:
    with path.open("rb", buffering=0) as file:
        while data := file.read(CHUNK):
            yield memoryview(data)


def _stay_in_background() -> None:
    import ctypes

    os.nice(_NICE)
    if number := _SYS_IOPRIO_SET.get(os.uname().machine):
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_BEST_EFFORT_LAST)


def _die_with(parent: int) -> None:
    """The keeper's death is this process's: the next keeper has its own, and two would write the same files."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def main() -> None:
    """The process: `uploader FD KEEPER`."""
    _die_with(int(sys.argv[2]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _stay_in_background()
    Uploader(Wire(socket.socket(fileno=int(sys.argv[1])))).run()
