"""The versions that a place holds, and which of them is served; layout.py draws the place.

Typical use::

    versions = Versions(open_storage("s3://bucket/model"))
    version = versions.add(folder, manifest.with_files(hashes))
    versions.promote(version.name, why="publish", verified=True)
    versions.rollback()
"""

import json
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from headway.errors import InputError, PlatformError, nearest
from headway.publish.claims import PATIENCE_S, Claim
from headway.publish.history import Serving, before, carried_out
from headway.publish.layout import BEGUN, CLAIMS, HISTORY, LATEST, MANIFEST, WORK, VersionManifest, prefix, step_of
from headway.storage import PART, LocalFolder, Progress, Storage, sync

ABANDONED_S = 24 * 3600.0
"""Who has not completed a version within a day is dead, and what there is of it is deleted."""

_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class Version:
    """One folder of the place."""

    name: str
    step: int
    state: Literal["complete", "partial", "damaged"]
    """partial: its publisher is at work, or died. damaged: its manifest cannot be read."""
    served: bool
    """Whether `latest` names it."""
    manifest: VersionManifest | None = None
    problem: str = ""
    """Why it is not complete."""


class Versions:
    """The versions of one place. At every instant `latest` names a complete one, or what it named before."""

    def __init__(self, storage: Storage, patience_s: float = PATIENCE_S) -> None:
        self._storage, self._patience_s = storage, patience_s
        self.added: set[str] = set()
        """Those that were completed here: what others have made may have changed since."""

    def all(self) -> list[Version]:
        """All there are, complete or not, the oldest first; those without a date come last."""
        pointer = self._pointer()
        with ThreadPoolExecutor(_AT_ONCE, "headway-versions") as threads:
            found = list(filter(None, threads.map(lambda name: self._look(name, pointer), self._names())))
        return sorted(
            found, key=lambda each: (each.manifest.published_ns if each.manifest else float("inf"), each.name)
        )

    def latest(self) -> Version | None:
        """The one that is served; None if nothing is. `problem` tells why, if something should be."""
        found = self._look(name, name) if (name := self._pointer()) in self._names() else None
        return found if found and found.state == "complete" else None

    def problem(self) -> str:
        """What is wrong with `latest`; empty, if it names a complete version, or nothing was ever served."""
        name = self._pointer()
        if not name or self.latest():
            return ""
        found = self._look(name, name) if name in self._names() else None
        why = found.problem if found else "is not there"
        return f"{self._storage.url}/{LATEST} names {name!r}, which {why}. `headway publish rollback` names another."

    def find(self, name: str) -> Version:
        """The one of that name, or the only one whose name begins so."""
        names = self._names()
        found = [name] if name in names else [each for each in names if name and each.startswith(name)]
        if len(found) == 1 and (version := self._look(found[0], self._pointer())):
            return version
        if len(found) > 1:
            raise InputError(f"several versions in {self._storage.url} begin with {name!r}: {', '.join(found)}.")
        hint = nearest(name, names) if names else "there is none yet."
        raise InputError(f"there is no version {name!r} in {self._storage.url}: {hint}")

    def with_key(self, step: int, key: str) -> Version | None:
        """The complete version of that anchor and recipe, with all its files, if there is one."""
        names = [name for name in self._names() if name.startswith(prefix(step, key))]
        found = (self._look(name, self._pointer()) for name in names)
        return next((each for each in found if each and not self._problems(each, whole=False)), None)

    def verify(self, name: str, progress: Progress | None = None) -> list[str]:
        """What is wrong with a version; nothing, if every file has the size and the hash that it was published with."""
        return self._problems(self.find(name), progress=progress)

    def _names(self) -> list[str]:
        return [name for name in self._storage.names() if step_of(name) is not None]

    def _pointer(self) -> str:
        with suppress(FileNotFoundError):
            return self._storage.read(LATEST).decode(errors="replace").strip()
        return ""

    def _look(self, name: str, pointer: str) -> Version | None:
        """What a folder is; None if it is a file."""
        step = step_of(name)
        assert step is not None
        version = Version(name=name, step=step, state="partial", served=name == pointer)
        try:
            manifest = VersionManifest.from_json(self._storage.read(f"{name}/{MANIFEST}"))
        except NotADirectoryError:
            return None
        except FileNotFoundError:
            return replace(version, problem=f"was never completed: there is no {MANIFEST}")
        except InputError as error:
            return replace(version, state="damaged", problem=f"has a {MANIFEST} that cannot be used: {error}")
        if manifest.name != name:
            return replace(version, state="damaged", problem=f"has the {MANIFEST} of another one: {manifest.name}")
        return replace(version, state="complete", manifest=manifest)

    def _problems(self, version: Version, *, whole: bool = True, progress: Progress | None = None) -> list[str]:
        if version.manifest is None:
            return [version.problem]
        return self._wrong_files(version.name, version.manifest, whole, progress)

    def _wrong_files(
        self, place: str, manifest: VersionManifest, whole: bool, progress: Progress | None = None
    ) -> list[str]:
        """What differs from the manifest; only a `whole` look reads the files."""
        problems = []
        for file, told in manifest.files.items():
            path = f"{place}/{file}"
            try:
                if (size := self._storage.size(path)) != told.bytes:
                    problems.append(f"{file} has {size} bytes instead of {told.bytes}")
                elif whole and (digest := self._storage.digest(path, progress)) != told.xxh3:
                    problems.append(f"{file} has the hash {digest} instead of {told.xxh3}: its content changed")
            except (FileNotFoundError, NotADirectoryError):
                problems.append(f"{file} is missing")
        return problems

    # --- one more ---

    def add(
        self, folder: Path, manifest: VersionManifest, progress: Progress | None = None, *, publisher: str = ""
    ) -> Version:
        """The version that a folder becomes, complete and safe; or the one that there is of that anchor and recipe.

        A folder below `work` of a local place is moved, after everything that the manifest does not know has been
        deleted from it. Any other is copied, and stays. What a killed publisher has left is deleted after a day; at
        once, if it has the name of this `publisher`: no two with the same name may be at work at a time.
        """
        self._check(folder, manifest)
        manifest = _without_leftover(folder, manifest)
        self._sweep(publisher)
        if found := self.with_key(manifest.step, manifest.key):
            return found
        name = f"{manifest.prefix}{secrets.token_hex(3)}"
        self._storage.write(f"{BEGUN}/{name}", json.dumps({"publisher": publisher, "at_s": time.time()}).encode())
        place = self._bring(folder, name, manifest, progress)
        claim = Claim(self._storage, name, manifest.prefix, self._patience_s)
        try:
            found = claim.await_turn(lambda: self.with_key(manifest.step, manifest.key))
            if not found:
                self._commit(place, replace(manifest, name=name, published_ns=time.time_ns()))
                self.added.add(name)
        finally:
            claim.release()
        if found:
            self._discard(name)
            return found
        self._storage.remove(f"{BEGUN}/{name}")
        return self.find(name)

    def _check(self, folder: Path, manifest: VersionManifest) -> None:
        if step_of(f"{manifest.prefix}0") != manifest.step:
            raise InputError(
                f"step {manifest.step} and key {manifest.key!r} make no name: keys have letters and digits."
            )
        root = os.path.realpath(folder)
        for name in manifest.files:
            if os.path.realpath(f"{root}/{name}") != f"{root}/{name}":
                raise InputError(f"{name!r} is a link, or leads out of {folder}: a version holds files alone. Copy it.")
        manifest.to_json()

    def _bring(self, folder: Path, name: str, manifest: VersionManifest, progress: Progress | None) -> str:
        """Where the files are in the place, still without a manifest."""
        if self._storage.is_local and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(self._path(WORK))):
            return os.path.relpath(os.path.realpath(folder), os.path.realpath(self._storage.url))
        place = f"{WORK}/{name}" if self._storage.is_local else name
        source = LocalFolder(folder)
        for file, told in manifest.files.items():
            digest = self._storage.upload(f"{place}/{file}", source.chunks(file, progress), source.size(file))
            if digest != told.xxh3:
                self._discard(name)
                raise PlatformError(
                    f"{folder / file} is not what was checked: its hash is {digest}, not {told.xxh3}. Somebody writes "
                    "to it, or the disk fails. Nothing was published. Publish again."
                )
        return place

    def _commit(self, place: str, manifest: VersionManifest) -> None:
        """Makes it a version, with its manifest, in one step."""
        if lost := self._wrong_files(place, manifest, whole=False):
            raise PlatformError(
                f"{self._storage.url}/{place} is not what was put there: {'; '.join(lost)}. Somebody deletes files, or "
                "publishing took over a day. Nothing was published. Publish again."
            )
        text = manifest.to_json().encode()
        if not self._storage.is_local:
            self._storage.write(f"{manifest.name}/{MANIFEST}", text)
            return
        _strip(self._path(place), {*manifest.files, MANIFEST})
        for path in self._path(place).rglob("*"):
            sync(path)
        self._storage.write(f"{place}/{MANIFEST}", text)
        os.rename(self._path(place), self._path(manifest.name))
        sync(self._path(""))

    def _sweep(self, publisher: str) -> None:
        """Deletes what dead publishers have left of versions that they did not complete."""
        for name in self._storage.names(BEGUN):
            if step_of(name) is None:  # a mark that is not whole yet
                continue
            try:
                begun = json.loads(self._storage.read(f"{BEGUN}/{name}"))
            except FileNotFoundError:  # completed just now
                continue
            is_own = publisher != "" and begun["publisher"] == publisher
            is_dead = is_own or time.time() - begun["at_s"] > ABANDONED_S
            version = self._look(name, "")
            if version and version.state == "partial" and is_dead:
                self._discard(name)
            elif is_dead:
                self._storage.remove(f"{CLAIMS}/{name}")
                self._storage.remove(f"{BEGUN}/{name}")

    def _discard(self, name: str) -> None:
        """Deletes what there is of a version that is not to be."""
        self._storage.remove_folder(name, MANIFEST)
        self._storage.remove_folder(f"{WORK}/{name}", MANIFEST)
        self._storage.remove(f"{CLAIMS}/{name}")
        self._storage.remove(f"{BEGUN}/{name}")

    def _path(self, name: str) -> Path:
        return Path(self._storage.url) / name

    # --- which one is served ---

    def promote(
        self, name: str, *, why: str = "promote", verified: bool = False, progress: Progress | None = None
    ) -> Version:
        """From now on this version is served. InputError, if it is not as it was published.

        Of one that is `verified` the files' sizes alone are looked at. If two move `latest` at the same time, the last
        one wins, and the history may lack the other.
        """
        version = self.find(name)
        if problems := self._problems(version, whole=not verified, progress=progress):
            raise InputError(
                f"{version.name} cannot be served: {'; '.join(problems)}. "
                "Delete it and publish it again, or take another."
            )
        self._move(version, why)
        return replace(version, served=True)

    def rollback(self, to: str | None = None, *, say: Callable[[str], None] = lambda text: None) -> Version:
        """From now on the version is served that was before; or the one that is named. Once more goes back further."""
        if to is not None:
            return self.promote(to, why="rollback")
        for name in before(self._carried_out(), self._pointer()):
            problems = self._problems(self.find(name)) if name in self._names() else ["is gone"]
            if not problems:
                return self.promote(name, why="rollback", verified=True)
            say(f"{name} was served before, and is passed over: {'; '.join(problems)}")
        raise InputError(
            f"no version was served in {self._storage.url} before this one, or none is left. Name one to go to: "
            "`headway publish ls` lists those there are."
        )

    def should_promote(self, version: Version) -> tuple[bool, str]:
        """Whether a publisher moves `latest` to its version; and why not.

        It does, if another one has died before it got to that.
        """
        served = self.latest()
        if served is None or served.name == version.name:
            return True, ""
        job = version.manifest.job if version.manifest else ""
        if job and served.manifest and served.manifest.job == job and served.step > version.step:
            return False, f"{served.name} stays served: it is of a later step of the same job."
        try:
            known = {each.version for each in self._carried_out()}
        except InputError as error:
            return False, f"{served.name} stays served: nothing tells whether {version.name} was taken back. {error}"
        if version.name in known:
            return False, (
                f"{served.name} stays served: {version.name} was before, and somebody has moved `latest` since. "
                f"`headway publish promote {version.name}` moves it back."
            )
        return True, ""

    def history(self) -> list[Serving]:
        """Which version was served since when, the oldest first. The last one may be about to be."""
        try:
            return [Serving(**told) for told in json.loads(self._storage.read(HISTORY))]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{self._storage.url}/{HISTORY} is damaged ({error}). "
                "`headway publish promote NAME` names what is served, and begins it anew."
            ) from error

    def _carried_out(self) -> list[Serving]:
        return carried_out(self.history(), self._pointer())

    def _move(self, version: Version, why: str) -> None:
        """History first: it is in it before it is served, so that taking it back is never forgotten."""
        if self._pointer() == version.name:
            return
        entries = []
        with suppress(InputError):
            entries = self._carried_out()
        entries = [*entries, Serving(version=version.name, at_s=time.time(), why=why)]
        self._storage.write(HISTORY, json.dumps([asdict(each) for each in entries], indent=1).encode())
        self._storage.write(LATEST, version.name.encode())


def _without_leftover(folder: Path, manifest: VersionManifest) -> VersionManifest:
    """The manifest without the one that a publisher wrote, or half of it, who was killed before it could move the
    folder."""
    if MANIFEST in manifest.files:
        try:
            left = VersionManifest.from_json((folder / MANIFEST).read_bytes())
        except InputError as error:
            raise InputError(f"the recipe has made a {MANIFEST}: the manifest has that name. Use another.") from error
        if left.prefix != manifest.prefix:
            raise InputError(f"{folder} holds another version, {left.name}. Publish from a folder of its own.")
    left_over = [name for name in manifest.files if name == MANIFEST or name.startswith(f".{MANIFEST}{PART}")]
    return replace(manifest, files={name: told for name, told in manifest.files.items() if name not in left_over})


def _strip(folder: Path, files: set[str]) -> None:
    """Deletes all files but these, and the folders that are empty then."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # not empty
                path.rmdir()
        elif path.relative_to(folder).as_posix() not in files:
            path.unlink()
