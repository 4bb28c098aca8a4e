"""Places for versions, real ones and such as fail; and publishers that are quickly done."""

import errno
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from headway.publish.layout import WORK, VersionManifest
from headway.publish.versions import Version, Versions
from headway.storage import LocalFolder, Storage
from object_store import s3_root, s3_server  # noqa: F401


def made(folder: Path, step: int, key: str = "abcd1234", names: Iterable[str] = (), **told: Any) -> VersionManifest:
    """Fills a folder as a recipe does; what is known of it."""
    for name in ["weights/model.safetensors", "README.md", *names]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(random.Random(f"{step} {key} {name}").randbytes(5000))
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    storage = LocalFolder(folder)
    hashes = {name: {"bytes": storage.size(name), "xxh3": storage.digest(name)} for name in files}
    return VersionManifest(step=step, key=key, **{"job": "dlrm", "recipe": "safetensors"} | told).with_files(hashes)


def workplace(storage: Storage, folder: Path, name: str) -> Path:
    """Where a recipe works: beside the versions, if they are in a folder."""
    return Path(storage.url) / WORK / name if storage.is_local else folder / name


def publish(storage: Storage, folder: Path, step: int, key: str = "abcd1234", **told: Any) -> Version:
    """Adds a version, and serves it if it should be."""
    versions = Versions(storage)
    work = workplace(storage, folder, f"work-{step}-{key}")
    version = versions.with_key(step, key) or versions.add(work, made(work, step, key, **told), publisher="publisher")
    if versions.should_promote(version)[0]:
        versions.promote(version.name, why="publish", verified=True)
    return version


class Refusing(Storage):
    """A store whose n-th call fails: it is not carried out, or it is and the answer is lost, or nothing works after."""

    def __init__(self, storage: Storage, nth: int, how: Literal["not done", "no answer", "down"]) -> None:
        self.url, self.is_local = storage.url, storage.is_local
        self.calls = 0
        self._storage, self._nth, self._how = storage, nth, how

    def _call(self, what: str, *args: Any) -> Any:
        self.calls += 1
        fails = self.calls == self._nth or (self._how == "down" and self.calls > self._nth)
        if fails and self._how != "no answer":
            raise OSError(errno.EIO, "refused", self.url)
        answer = getattr(self._storage, what)(*args)
        if fails:
            raise TimeoutError(errno.ETIMEDOUT, "no answer", self.url)
        return answer

    def names(self, folder: str = "") -> list[str]:
        return self._call("names", folder)  # type: ignore[no-any-return]

    def read(self, name: str) -> bytes:
        return self._call("read", name)  # type: ignore[no-any-return]

    def write(self, name: str, data: bytes) -> None:
        self._call("write", name, data)

    def upload(self, name: str, chunks: Iterable[memoryview], size: int) -> str:
        return self._call("upload", name, chunks, size)  # type: ignore[no-any-return]

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        return self._call("read_into", name, offset, into)  # type: ignore[no-any-return]

    def size(self, name: str) -> int:
        return self._call("size", name)  # type: ignore[no-any-return]

    def remove(self, name: str) -> None:
        self._call("remove", name)

    def remove_folder(self, folder: str, first: str = "") -> None:
        self._call("remove_folder", folder, first)


class Dawdling(Refusing):
    """A store that takes its time, now more, now less: what others do meanwhile comes in every order."""

    def __init__(self, storage: Storage, seed: int, longest_s: float) -> None:
        super().__init__(storage, 0, "not done")
        self._random, self._longest_s = random.Random(seed), longest_s

    def _call(self, what: str, *args: Any) -> Any:
        time.sleep(self._random.random() * self._longest_s)
        return super()._call(what, *args)
