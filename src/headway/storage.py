"""Where files are kept: a folder, or an object store. Whatever is written is there whole and safe, or not at all.

Typical use::

    storage = open_storage("s3://bucket/job")
    storage.write("latest", b"step-00000100")
    storage.upload("step-00000100/__0_000000010a0b.distcp", chunks, size)
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from headway.errors import InputError

CHUNK_BYTES = 16 << 20
"""Large enough that a disk never waits for us, small enough for a buffer."""
PART_BYTES = 32 << 20
"""One request of an upload to an object store."""
PART = ".part-"
"""In the name of a file that is still being written; such a name begins with a dot."""

_BLOCK = 4096
_YOUNG_S = 60.0
_DIRTY_BYTES = 64 << 20
_MOST_PARTS = 9_000  # S3 allows 10,000
_SLOWEST_BYTES_PER_S = 1 << 20

Progress = Callable[[int], None]
"""Is told of every few bytes that are done."""
T = TypeVar("T")


def open_storage(url: str | os.PathLike[str]) -> "Storage":
    """The folder of that path, or what fsspec knows by that URL. It need not exist yet."""
    text = os.fspath(url)
    if "://" in text and not text.startswith("file://"):
        return ObjectStore(text)
    if not (path := text.removeprefix("file://")):
        raise InputError("the place is empty. Give a folder, or a URL such as s3://bucket/job.")
    return LocalFolder(Path(path))


def is_part(name: str) -> bool:
    """Whether a file of that name was never finished, if nobody writes it now."""
    return name.startswith(".") and PART in name


class Storage(ABC):
    """Files by name; a name is relative to the root and may have folders in it."""

    url: str
    """The absolute path, or the URL without a slash at its end."""
    is_local: bool

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """What is directly inside, sorted, as it is now; nothing if there is no such folder."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The whole file; FileNotFoundError if there is none."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Puts a small file into place, whole and safe."""

    @abstractmethod
    def upload(self, name: str, chunks: Iterable[memoryview], size: int) -> str:
        """Puts a large file into place, whole and safe; its hash.

        Chunks are fastest when they lie on page boundaries and all but the last are multiples of 4096 long. Each must
        stay as it is until the next is asked for.
        """

    @abstractmethod
    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """How many bytes were read: fewer than asked for only at the end of the file."""

    @abstractmethod
    def size(self, name: str) -> int:
        """In bytes; FileNotFoundError if there is none."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Deletes a file, if it is there."""

    @abstractmethod
    def remove_folder(self, folder: str, first: str = "") -> None:
        """Deletes a folder, and one file of it first: so that what a crash leaves behind never loads."""

    def remove_if_empty(self, folder: str) -> bool:
        """Deletes a folder that has been empty for a minute: in a younger one somebody may be at work. Returns whether
        it did; object stores have no empty folders."""
        return False

    def chunks(self, name: str, progress: Progress | None = None) -> Iterator[memoryview]:
        """A file's bytes, in one buffer that is used over and over; those count as done when more are asked for."""
        size = self.size(name)
        buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        for offset in range(0, size, CHUNK_BYTES):
            wanted = min(CHUNK_BYTES, size - offset)
            if self.read_into(name, offset, buffer[:wanted]) < wanted:
                raise OSError(errno.EIO, f"ends before its {size} bytes: someone shortens it", f"{self.url}/{name}")
            yield buffer[:wanted]
            if progress:
                progress(wanted)

    def digest(self, name: str, progress: Progress | None = None) -> str:
        """The hash of a file."""
        hasher = xxhash.xxh3_128()
        for chunk in self.chunks(name, progress):
            hasher.update(chunk)
        return hasher.hexdigest()

    def fetch(self, name: str, to: Path) -> str:
        """Copies a file to a local path, where it is whole and safe, or not there; its hash."""
        return LocalFolder(to.parent).upload(to.name, self.chunks(name), self.size(name))


# --- a folder --------------------------------------------------------------------------------------------------------


class LocalFolder(Storage):
    """A folder of a file system, local or mounted."""

    is_local = True

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root.expanduser()))
        self.url = str(self.root)
        self._safe: set[Path] = set()  # folders that a power failure does not take away

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._path(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        with self._new_file(name) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]

    def upload(self, name: str, chunks: Iterable[memoryview], size: int) -> str:
        """Puts a large file into place, past the page cache where that is possible; its hash."""
        hasher = xxhash.xxh3_128()
        with self._new_file(name) as file, ThreadPoolExecutor(1, "headway-hash") as threads:
            reserve(file, size)
            output = _Output(file)
            for chunk in _sliced(chunks, CHUNK_BYTES):
                hashed = threads.submit(hasher.update, chunk)
                try:
                    output.write(chunk)
                finally:
                    hashed.result()
            _check_size(name, output.at, size)
        return hasher.hexdigest()

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        rest = into.cast("B")
        with open(self._path(name), "rb", buffering=0) as file:
            while rest and (count := os.preadv(file.fileno(), [rest], offset)):
                rest, offset = rest[count:], offset + count
        return into.nbytes - len(rest)

    def size(self, name: str) -> int:
        return self._path(name).stat().st_size

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def remove_folder(self, folder: str, first: str = "") -> None:
        path = self._path(folder)
        if path.is_dir():
            if first:
                (path / first).unlink(missing_ok=True)
            sync(path)
            shutil.rmtree(path, onerror=_unless_gone)

    def remove_if_empty(self, folder: str) -> bool:
        path = self._path(folder)
        try:
            if is_old := time.time() - path.stat().st_mtime > _YOUNG_S:
                path.rmdir()
        except OSError:  # it is not empty, or somebody else has deleted it
            return False
        return is_old

    def _path(self, name: str) -> Path:
        if name.startswith("/") or ".." in name.split("/"):
            raise InputError(f"{name!r} is not the name of a file of {self.url}: it leads out of it.")
        return self.root / name

    @contextlib.contextmanager
    def _new_file(self, name: str) -> Iterator[int]:
        """A file under a name of its own, which is renamed once it is whole and safe."""
        path = self._path(name)
        part = path.with_name(f".{path.name}{PART}{secrets.token_hex(4)}")
        file = self._create(part)
        try:
            try:
                yield file
                os.fsync(file)
            finally:
                os.close(file)
            os.rename(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        sync(path.parent)

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._make(path.parent)
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:  # somebody tidied up the empty folder
            self._make(path.parent)
            return os.open(path, flags, 0o666)

    def _make(self, folder: Path) -> None:
        """Creates a folder, and makes it and those above it safe: whoever created them may have died before."""
        chain = (folder, *folder.parents)
        missing = [each for each in chain if not each.is_dir()]
        folder.mkdir(parents=True, exist_ok=True)
        for each in chain:
            if each in missing or (each.is_relative_to(self.root) and each not in self._safe):
                with contextlib.suppress(PermissionError):  # above the root, one may pass through and not look
                    sync(each.parent)
                self._safe.add(each)


class _Output:
    """Writes past the page cache; where that cannot be done, leaves little in it."""

    def __init__(self, file: int) -> None:
        self.at = 0
        self._file = file
        self._written_back = 0
        self._direct = self._set_direct(True)

    def write(self, data: memoryview) -> None:
        """Appends."""
        while data:
            aligned = len(data) // _BLOCK * _BLOCK
            if self._direct and not aligned:  # the last bytes of a file
                self._direct = self._set_direct(False)
            try:
                count = os.pwrite(self._file, data[:aligned] if self._direct else data, self.at)
            except OSError as error:
                if not self._direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._direct = self._set_direct(False)
                continue
            self.at, data = self.at + count, data[count:]
        if not self._direct and self.at - self._written_back >= _DIRTY_BYTES:
            os.fdatasync(self._file)
            os.posix_fadvise(self._file, self._written_back, self.at - self._written_back, os.POSIX_FADV_DONTNEED)
            self._written_back = self.at

    def _set_direct(self, wanted: bool) -> bool:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | (os.O_DIRECT if wanted else 0))
        except OSError:  # a file system without it
            return False
        return wanted


def reserve(file: int, size: int) -> None:
    """Takes the room on the disk, so that a full one is found out before the first byte.

    The system call itself: where a file system has none, libc's `posix_fallocate` writes zeros all over the file.
    """
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if size and fallocate(file, 0, 0, size):
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EINTR):
            raise OSError(number, os.strerror(number))


def sync(path: Path) -> None:
    """Makes a file's content safe, or the names in a folder."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # network file systems whose names are safe at once
            raise
    finally:
        os.close(file)


def _unless_gone(_call: object, _path: str, told: tuple[type, BaseException, object]) -> None:
    if not isinstance(told[1], FileNotFoundError):  # someone else deletes it as well
        raise told[1]


def _sliced(chunks: Iterable[memoryview], most: int) -> Iterator[memoryview]:
    for chunk in chunks:
        data = memoryview(chunk).cast("B")
        for offset in range(0, len(data), most):
            yield data[offset : offset + most]


def _check_size(name: str, given: int, size: int) -> None:
    if given != size:
        raise OSError(errno.EIO, f"{given} bytes came instead of {size}", name)


# --- an object store -------------------------------------------------------------------------------------------------

_WHOLE_PUTS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "ocifs"}
"""Stores in which a file appears when it is complete. In others it is renamed into place."""

_S3 = {"connect_timeout": 10, "read_timeout": 30, "retries": {"mode": "standard", "max_attempts": 4}}


class ObjectStore(Storage):
    """A place that fsspec knows. No call takes longer than `patience_s`, plus a second for each megabyte."""

    is_local = False

    def __init__(self, url: str, patience_s: float = 120) -> None:
        import fsspec  # type: ignore[import-untyped]  # slow, and a local folder does without

        self.url = url.rstrip("/")
        self._patience_s = patience_s
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url, **_options(self.url))
        except (ValueError, ImportError) as error:
            raise InputError(f"nothing can be kept at {url}: {error}.") from error
        self._root: str = root.rstrip("/")

    def names(self, folder: str = "") -> list[str]:
        path = self._path(folder).strip("/")
        try:
            found: list[str] = self._call(folder, self._fs.ls, self._path(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({each.rstrip("/").rpartition("/")[2] for each in found if each.strip("/") != path})

    def read(self, name: str) -> bytes:
        data: bytes = self._call(name, self._fs.cat_file, self._path(name))
        return data

    def write(self, name: str, data: bytes) -> None:
        with self._landing(name) as path:
            self._call(name, self._fs.pipe_file, path, data, size=len(data))

    def upload(self, name: str, chunks: Iterable[memoryview], size: int) -> str:
        hasher, at = xxhash.xxh3_128(), 0
        block = max(PART_BYTES, -(-size // _MOST_PARTS))
        with self._landing(name) as path, self._new_file(name, path, block) as file:
            for chunk in _sliced(chunks, block):
                hasher.update(chunk)
                self._call(name, file.write, chunk, size=block)
                at += len(chunk)
            _check_size(name, at, size)
        return hasher.hexdigest()

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        done, into = 0, into.cast("B")
        for part in _sliced([into], PART_BYTES):
            start = offset + done
            span = {"start": start, "end": start + len(part)}
            data = self._call(name, self._fs.cat_file, self._path(name), size=len(part), **span)
            part[: len(data)] = data
            done += len(data)
            if len(data) < len(part):
                break
        return done

    def size(self, name: str) -> int:
        info: dict[str, Any] = self._call(name, self._fs.info, self._path(name))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "is no file", f"{self.url}/{name}")
        return int(info["size"])

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call(name, self._fs.rm_file, self._path(name))

    def remove_folder(self, folder: str, first: str = "") -> None:
        if first:
            self.remove(f"{folder}/{first}")
        with contextlib.suppress(FileNotFoundError):
            self._call(folder, self._fs.rm, self._path(folder), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def _landing(self, name: str) -> Iterator[str]:
        """The path to write to, from where the file gets its name once it is whole."""
        protocol = self._fs.protocol if isinstance(self._fs.protocol, str) else self._fs.protocol[0]
        if protocol in _WHOLE_PUTS:
            yield self._path(name)
            return
        folder, slash, last = name.rpartition("/")
        part = f"{folder}{slash}.{last}{PART}{secrets.token_hex(4)}"
        self._call(name, self._fs.makedirs, self._path(folder), exist_ok=True)
        try:
            yield self._path(part)
            self._call(name, self._fs.mv, self._path(part), self._path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(part)
            raise

    @contextlib.contextmanager
    def _new_file(self, name: str, path: str, block: int) -> Iterator[Any]:
        """A file that is completed at the end, and discarded after an error; fsspec would complete it then, too."""
        file = self._call(name, self._fs.open, path, "wb", block_size=block)
        try:
            yield file
            self._call(name, file.close, size=block)
        except BaseException:
            with contextlib.suppress(OSError, AttributeError):
                self._call(name, file.discard)
            with contextlib.suppress(AttributeError):
                file.closed = True  # or it is completed when it is collected
            raise

    def _call(self, name: str, call: Callable[..., T], *args: object, size: int = 0, **options: object) -> T:
        """What the store answers, in time; an OSError that says what is wrong, otherwise."""
        where = f"{self.url}/{name}"
        patience_s = self._patience_s + size / _SLOWEST_BYTES_PER_S
        try:
            return _within(patience_s, lambda: call(*args, **options))
        except TimeoutError as error:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {patience_s:.0f} s", where) from error
        except OSError as error:
            number = error.errno or (errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO)
            raise OSError(number, error.strerror or str(error), where) from error
        except Exception as error:  # each store's client has errors of its own, which callers cannot know
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", where) from error


def _options(url: str) -> dict[str, Any]:
    """What fsspec is given: no memory of what was there, and on S3 timeouts, unless fsspec's configuration has some."""
    import fsspec.config  # type: ignore[import-untyped]

    options: dict[str, Any] = {"skip_instance_cache": True}
    protocol = url.partition("://")[0]
    if protocol in _WHOLE_PUTS:
        options["use_listings_cache"] = False
    if protocol in ("s3", "s3a"):
        told = fsspec.config.conf.get("s3", {}) | fsspec.config.conf.get(protocol, {})
        options["config_kwargs"] = _S3 | told.get("config_kwargs", {})
    return options


def _within(patience_s: float, call: Callable[[], T]) -> T:
    """The call's result. One that hangs is left behind: a client may have no timeout for what it sends."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="headway-store", daemon=True).start()
    return result.result(patience_s)
