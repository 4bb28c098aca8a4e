"""Where compiled code is kept: for each key a folder of segments, in a local folder or an object store.

::

    ROOT/<key>/
      <tag>-<hash>.bundle    what one job has saved, or what several have, merged; it never changes
      used                   when somebody last loaded from here

A job writes files of its own and deletes none but those it has replaced, so that jobs never meet. Whoever loads takes
the union of all segments that pass.

Typical use::

    store = Store("s3://bucket/compile", keys=Keys.at(), mirror=Path("/tmp/mirror"))
    loaded = store.load(key)
    store.save(key, members, about, tag)
"""

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash

from headway.compile import bundle
from headway.compile.bundle import Damaged, Manifest, Members, Refused, Segment
from headway.compile.trust import Keys, others_can_write
from headway.errors import HeadwayError, InputError, PlatformError
from headway.paths import folder_name, private_folder
from headway.storage import LocalFolder, Progress, is_part, open_storage

BOUND_BYTES = 10 << 30
"""A local folder stays below; keys that were not used for longest go."""
MOST_SEGMENTS = 8
"""So many of one key are left side by side before they are merged."""

_SUFFIX = ".bundle"
_USED = "used"
_KEY = re.compile(r"[0-9a-f]{8,128}")
_TAG = re.compile(r"[0-9A-Za-z_]{1,64}")
_NAME = re.compile(r"[0-9A-Za-z_-]{1,120}\.bundle")
_PREFIX_BYTES = 1 << 16
_LOOKS = 5
_DEAD_PART_S = 3600
_MOST_LETTERS = 2000

Told = TypeVar("Told", Manifest, Segment)


@dataclass(frozen=True)
class Loaded:
    """What the store has for a key."""

    members: Members
    about: dict[str, str]
    digest: str
    """The same wherever the same was loaded; empty if nothing was."""
    problems: list[str]
    """Why something was not loaded, a line each."""
    segments: int


@dataclass(frozen=True)
class Entry:
    """One key of a store."""

    key: str
    about: dict[str, str]
    bytes: int
    members: int
    segments: int
    used_ns: int
    saved_ns: int


class Store:
    """A folder or an object store. Whatever is in it is believed only as `trust` says."""

    def __init__(
        self, url: str, *, keys: Keys | None = None, mirror: Path | None = None, bound_bytes: int = BOUND_BYTES
    ) -> None:
        """`mirror` is a folder of this node's: what comes from another machine comes there once for all processes."""
        self._storage = open_storage(url)
        if isinstance(self._storage, LocalFolder) and self._storage.root.exists() and not self._storage.root.is_dir():
            raise InputError(
                f"{self._storage.root} is no folder: compiled code cannot be kept there. Choose another place."
            )
        self.url = self._storage.url
        self._keys = keys
        self._mirror_folder = None if self._storage.is_local else mirror
        self._bound_bytes = bound_bytes
        # What can be wrong with one file, and not with the whole store.
        self._of_one_file = (Refused, *([OSError] if self._storage.is_local else [FileNotFoundError, PermissionError]))
        self._mine: dict[str, str] = {}  # the segment of each key that this process has saved last

    # --- a job's ---

    def load(self, key: str) -> Loaded:
        """What there is for a key. Nothing is raised: what cannot be had, or believed, is told as a problem."""
        problems: list[str] = []
        found: dict[str, Segment] = {}
        try:
            found = self._segments(_checked(key), problems)
        except (OSError, HeadwayError) as error:
            problems.append(f"{self.url}: {_why(error)}")
        members = bundle.merge(*(segment.members for segment in found.values()))
        newest = max(found.values(), key=lambda segment: segment.saved_ns, default=None)
        about = newest.about if newest else {}
        return Loaded(members, about, bundle.digest(members), problems, len(found))

    def save(self, key: str, members: Members, about: Mapping[str, str], tag: str) -> int:
        """Puts this job's segment into place, instead of the one this process put there before; its size in bytes."""
        if not _TAG.fullmatch(tag):
            raise InputError(f"{tag!r} cannot name a segment: it has to be letters and digits.")
        self._make_folder(_checked(key))
        data = bundle.pack(members, about, self._sign(key), key=key)
        name = self._put(key, tag, data)
        if (old := self._mine.get(key, name)) != name:
            self._storage.remove(f"{key}/{old}")
        self._mine[key] = name
        with contextlib.suppress(OSError, HeadwayError):  # what was to be saved is safe, and the next save tries again
            self._tidy(key, tag)
        return len(data)

    def touch(self, key: str) -> None:
        """Notes that a key was used just now: it will be among the last to go."""
        if self._names(_checked(key)):
            self._storage.write(f"{key}/{_USED}", str(time.time_ns()).encode())

    # --- an administrator's ---

    def stored(self) -> list[str]:
        """All keys that have a segment."""
        return [name for name in self._storage.names() if _KEY.fullmatch(name) and self._names(name)]

    def entries(self) -> list[Entry]:
        """All keys, the one that was used last first."""
        return sorted(map(self.entry, self.stored()), key=lambda entry: (-entry.used_ns, entry.key))

    def entry(self, key: str) -> Entry:
        """What is known of a key, by the manifests of the segments that are believed."""
        sizes = self._sizes(_checked(key))
        manifests = list(self.manifests(key).values())
        newest = max(manifests, key=lambda manifest: manifest.saved_ns, default=None)
        saved_ns = newest.saved_ns if newest else 0
        members = len({name for manifest in manifests for name in manifest.members})
        about = newest.about if newest else {}
        return Entry(key, about, sum(sizes.values()), members, len(sizes), self._used_ns(key, saved_ns), saved_ns)

    def manifests(self, key: str) -> dict[str, Manifest]:
        """What each segment that is believed says of itself; its members are not read."""
        found = {}
        for name in self._names(_checked(key)):
            with contextlib.suppress(*self._of_one_file):
                found[name] = self._peek(key, name)
        return found

    def remove(self, key: str) -> None:
        """Deletes all that there is for a key."""
        self._storage.remove_folder(_checked(key))

    def prune(self, max_bytes: int, keep: str = "") -> list[Entry]:
        """Deletes the keys that were not used for longest, until the rest fits; those that went. `keep` stays."""
        entries, gone = self.entries(), []
        total = sum(entry.bytes for entry in entries)
        for entry in reversed(entries):
            if total > max_bytes and entry.key != keep:
                self.remove(entry.key)
                total -= entry.bytes
                gone.append(entry)
        return gone

    def verify(self, key: str, progress: Progress | None = None) -> list[str]:
        """What is wrong with the segments of a key, a line each. Every byte is read, and compared with its hash."""
        problems: list[str] = []
        names = self._names(_checked(key))
        for name in names:
            try:
                data = self._read(key, name)
                if progress:
                    progress(len(data))
                self._unpack(key, name, data)
            except (OSError, Refused) as error:
                problems.append(f"{name} {_why(error)}")
        return problems if names else [f"{self.url} has nothing under the key {key}."]

    def copy(self, key: str, to: "Store", progress: Progress | None = None) -> list[str]:
        """Copies the segments that are believed, with their signatures; why others were left, a line each. One that
        nobody has signed is signed on its way into a store that others can write."""
        problems: list[str] = []
        to._make_folder(_checked(key))
        for name in self._names(key):
            try:
                data = self._read(key, name)
                segment = self._unpack(key, name, data)
            except self._of_one_file as error:
                problems.append(f"{name} {_why(error)}")
                continue
            if not segment.signer and to._shared(key):
                data = bundle.pack(segment.members, segment.about, to._sign(key), key=key)
            to._put(key, name.partition("-")[0], data)
            if progress:
                progress(len(data))
        to.touch(key)
        if to._storage.is_local:
            to._fit(key)
        return problems

    # --- segments ---

    def _segments(self, key: str, problems: list[str]) -> dict[str, Segment]:
        """The segments that pass, by name. One that goes away meanwhile is in another one by now: we look again."""
        found: dict[str, Segment] = {}
        refused: set[str] = set()
        with self._nearby(problems) as mirror:
            for _ in range(_LOOKS):
                names = mirror.fill(key, problems) if mirror else self._names(key)
                ahead = [name for name in names if name not in found and name not in refused]
                for name in ahead:
                    try:
                        found[name] = self._segment(key, name, mirror)
                    except FileNotFoundError:
                        continue
                    except self._of_one_file as error:
                        problems.append(f"{name} {_why(error)}")
                        refused.add(name)
                    except OSError as error:  # the next one would fail alike, after as long a wait
                        problems.append(f"{self.url}: {_why(error)}")
                        return found
                if found.keys() | refused >= set(ahead):
                    break
        return found

    def _segment(self, key: str, name: str, mirror: "Mirror | None") -> Segment:
        if mirror is None or (data := mirror.read(key, name)) is None:
            return self._unpack(key, name, self._read(key, name))
        try:
            return self._unpack(key, name, data)
        except Damaged:  # here or there: the next one to load fetches it again
            mirror.forget(key, name)
            raise

    def _unpack(self, key: str, name: str, data: bytes) -> Segment:
        return _belongs(bundle.unpack(data, partial(self._believe, key, name)), key)

    def _believe(self, key: str, name: str, manifest: bytes, signature: str | None) -> str:
        if signature is None:
            if reason := self._shared(f"{key}/{name}"):
                raise Refused(f"is not signed, and is not believed without: {reason}")
            return ""
        if self._keys is None:
            raise Refused("is signed, and there is no list of keys to trust.")
        return self._keys.believes(manifest, signature)

    def _shared(self, name: str) -> str:
        """Why others could have written this; empty if nobody but this user can."""
        if isinstance(self._storage, LocalFolder):
            return others_can_write(self._storage.root / name)
        return f"others can write to {self.url}."

    def _sign(self, key: str) -> bundle.Sign | None:
        """What signs segments of a key. `InputError` where an unsigned one would be of no use to anybody."""
        if self._keys is not None and self._keys.own():
            return self._keys.sign
        if reason := self._shared(key):
            raise InputError(
                f"nobody would load what is saved without a signature. Run headway cache keygen. ({reason})"
            )
        return None

    def _names(self, key: str) -> list[str]:
        return [name for name in self._storage.names(key) if _NAME.fullmatch(name)]

    def _sizes(self, key: str) -> dict[str, int]:
        sizes = {}
        for name in self._names(key):
            with contextlib.suppress(*self._of_one_file):
                sizes[name] = self._storage.size(f"{key}/{name}")
        return sizes

    def _read(self, key: str, name: str) -> bytes:
        if (size := self._storage.size(f"{key}/{name}")) > bundle.MOST_FILE_BYTES:
            raise Refused(f"has {size} bytes: no segment is so large.")
        return self._part(f"{key}/{name}", 0, size)

    def _peek(self, key: str, name: str) -> Manifest:
        """What a segment says of itself. The beginning of the file, where that usually ends, is read in one go."""
        part = partial(self._part, f"{key}/{name}")
        start = part(0, _PREFIX_BYTES)
        read: bundle.Read = lambda at, size: start[at : at + size] if at + size <= len(start) else part(at, size)  # noqa: E731
        manifest = bundle.peek(read, partial(self._believe, key, name))
        return _belongs(manifest, key)

    def _part(self, path: str, at: int, size: int) -> bytes:
        """Some bytes of a file, and never more than it has: in a shared folder it may be a pipe, or a link to
        /dev/zero."""
        buffer = bytearray(max(0, min(size, self._storage.size(path) - at)))
        count = self._storage.read_into(path, at, memoryview(buffer)) if buffer else 0
        return bytes(buffer[:count])

    def _put(self, key: str, tag: str, data: bytes) -> str:
        """The name of the new segment: no two have the same unless they are the same."""
        name = f"{tag}-{xxhash.xxh3_64_hexdigest(data)}{_SUFFIX}"
        self._storage.write(f"{key}/{name}", data)
        if isinstance(self._storage, LocalFolder):
            file = self._storage.root / key / name
            with contextlib.suppress(FileNotFoundError):  # somebody has merged it already
                file.chmod(stat.S_IMODE(file.stat().st_mode) & ~0o022)  # whatever the umask: nobody changes a segment
        return name

    def _make_folder(self, key: str) -> None:
        """Makes a key's folder, for those who can write to the root, and nobody else."""
        if not isinstance(self._storage, LocalFolder):
            return
        root = self._storage.root
        for folder in reversed([each for each in (root, *root.parents) if not each.is_dir()]):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        with contextlib.suppress(FileExistsError):
            (root / key).mkdir()
            (root / key).chmod(stat.S_IMODE(root.stat().st_mode))

    def _used_ns(self, key: str, otherwise: int) -> int:
        try:
            used_ns = int(self._part(f"{key}/{_USED}", 0, 20))
            return max(min(used_ns, time.time_ns()), otherwise)
        except (OSError, ValueError):
            return otherwise

    # --- room ---

    def _tidy(self, key: str, tag: str) -> None:
        self._merge(key, tag)
        if isinstance(self._storage, LocalFolder):
            self._sweep(self._storage.root / key)
            self._fit(key)

    def _merge(self, key: str, tag: str) -> None:
        """Makes one of many segments. Only those that this user could have signed: who trusts somebody else has not
        thereby trusted this user, nor the other way round."""
        own = self._keys.own() if self._keys else None
        signers = {"" if not self._shared(key) else None, own[0] if own else None}
        old = [name for name, manifest in self.manifests(key).items() if manifest.signer in signers]
        if len(old) <= MOST_SEGMENTS:
            return
        segments: dict[str, Segment] = {}
        for name in old:
            with contextlib.suppress(Refused):  # the rest of it is damaged: `verify` tells
                segments[name] = self._unpack(key, name, self._read(key, name))
        newest = max(segments.values(), key=lambda segment: segment.saved_ns)
        merged = bundle.newest(bundle.merge(*(segment.members for segment in segments.values())))
        new = self._put(key, tag, bundle.pack(merged, newest.about, self._sign(key), key=key))
        for name in segments.keys() - {new}:
            self._storage.remove(f"{key}/{name}")

    def _sweep(self, folder: Path) -> None:
        """Deletes what saves that were killed have left."""
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if is_part(path.name) and time.time() - path.stat().st_mtime > _DEAD_PART_S:
                    path.unlink()

    def _fit(self, keep: str) -> None:
        if sum(sum(self._sizes(key).values()) for key in self.stored()) > self._bound_bytes:
            self.prune(self._bound_bytes, keep)

    @contextlib.contextmanager
    def _nearby(self, problems: list[str]) -> Iterator["Mirror | None"]:
        """This node's mirror, if it is to have one and can."""
        mirror = None
        if self._mirror_folder is not None:
            try:
                mirror = Mirror(self, private_folder(self._mirror_folder), self._bound_bytes)
            except (OSError, PlatformError) as error:
                problems.append(f"nothing is shared on this node: {_why(error)}")
        yield mirror


class Mirror:
    """What this node has of a store on another machine. One process fetches, the others wait for it."""

    def __init__(self, store: Store, folder: Path, bound_bytes: int) -> None:
        self._store = store
        self._root = folder / folder_name(store.url)
        self._root.mkdir(mode=0o700, exist_ok=True)
        self._near = Store(str(self._root), bound_bytes=bound_bytes)

    def fill(self, key: str, problems: list[str]) -> list[str]:
        """The segments of a key, all of which are here now, if they could be had; of a store that does not answer,
        those that were here before."""
        try:
            names = self._store._names(key)
        except OSError as error:
            problems.append(f"{self._store.url}: {_why(error)}")
            return self._near._names(key)
        try:
            with self._locked(key):
                here = set(self._near._storage.names(key))
                self._fetch(key, [name for name in names if name not in here])
                for name in here - {*names, _USED}:  # merged meanwhile, or a part that nobody writes any more
                    self._near._storage.remove(f"{key}/{name}")
        except TimeoutError:
            raise
        except OSError as error:  # this node's disk, perhaps: each process fetches for itself, then
            problems.append(f"not kept on this node: {_why(error)}")
        return names

    def read(self, key: str, name: str) -> bytes | None:
        """A segment that is here."""
        with contextlib.suppress(OSError):
            return self._near._read(key, name)
        return None

    def forget(self, key: str, name: str) -> None:
        with contextlib.suppress(OSError):
            self._near._storage.remove(f"{key}/{name}")

    def _fetch(self, key: str, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError, Refused):  # gone, or too large: whoever reads it is told
                self._near._storage.write(f"{key}/{name}", self._store._read(key, name))
        self._near.touch(key)
        if names:
            self._near._fit(key)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Nobody else on this node is in here; the system lets go of it for whoever dies."""
        file = os.open(self._root / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _belongs(told: Told, key: str) -> Told:
    if told.key != key:
        raise Refused(f"belongs to the key {told.key[:40]!r}: somebody has put it here.")
    return told


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise InputError(f"{key!r} is no key: one is 8 or more hexadecimal digits.")
    return key


def _why(error: Exception) -> str:
    """In one line."""
    text = f"{error.strerror or error}" if isinstance(error, OSError) else str(error)
    return " ".join(text.split())[:_MOST_LETTERS]
