"""Where a recipe puts what it makes: a folder whose steps are kept, so that a retry does not make them again."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.errors import InputError
from headway.storage import LocalFolder, is_part

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class Check:
    """What a check found."""

    name: str
    passed: bool
    told: str = ""
    """What was compared, and how; if it failed, what differs."""
    figures: dict[str, Any] = field(default_factory=dict)


class Rejected(Exception):
    """A check failed: nothing of this is published. Trying again would fail again."""


class Out:
    """The folder that a recipe fills. Everything in it is published, and nothing else.

    ::

        def publish(anchor, out):
            weights = out.step("weights", lambda folder: write_weights(anchor, folder))
            (out / "labels.txt").write_text("click\\n")
    """

    def __init__(
        self,
        place: Path,
        tell: Callable[[str, int, int], None] = lambda what, done, total: None,
        span: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
    ) -> None:
        """`place` is kept from one try to the next. `tell` hears what is done, how many bytes of it, and of how many;
        `span` times a step."""
        self.folder = place / "out"
        self.checks: list[Check] = []
        self.signature: dict[str, Any] = {}
        """What goes in and comes out, as far as a ready recipe knows; compared with the version before."""
        self.facts: dict[str, Any] = {}
        """What else is told in the version's manifest."""
        self._tell, self._span = tell, span
        self._known = place / "steps"
        for each in (self.folder, self._known):
            each.mkdir(parents=True, exist_ok=True)
        self._clear()

    def __fspath__(self) -> str:
        return str(self.folder)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def step(self, name: str, make: Callable[[Path], Any]) -> Path:
        """The folder `name`, which `make(folder)` fills. If that was done before, by a publisher that died later, it is
        not done again. What `make` returns, if it can be JSON, is there for `told`."""
        if not _NAME.fullmatch(name):
            raise InputError(f"{name!r} is no name of a step: it becomes a folder's. Use letters, digits and . _ -")
        place = self.folder / name
        if self._is_done(name):
            return place
        self.progress(name)
        scratch = self._known / f"{name}.part"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        began = time.monotonic()
        try:
            with self._span(name):
                told = make(scratch)
                files = _sealed(scratch)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)  # a full disk has room again
            raise
        _remove(place)
        os.rename(scratch, place)
        record = {"files": files, "seconds": time.monotonic() - began, "told": _as_json(told)}
        LocalFolder(self._known).write(f"{name}.json", json.dumps(record).encode())
        self.progress(f"{name} is done")
        return place

    def told(self, name: str) -> Any:
        """What `make` returned of a step that is done; None of one that is not."""
        return self._record(name).get("told")

    def progress(self, what: str, done: int = 0, total: int = 0) -> None:
        """Tells whoever looks what is being done, and how many bytes of it are."""
        self._tell(what, done, total)

    def add(self, check: Check) -> None:
        """Notes what a check found; if it failed, nothing more is done."""
        self.checks.append(check)
        if not check.passed:
            raise Rejected(f"{check.name}: {check.told}")

    @property
    def steps(self) -> dict[str, float]:
        """The steps that are done, and how many seconds each took when it was."""
        names = sorted(entry.stem for entry in self._known.glob("*.json"))
        return {name: record["seconds"] for name in names if (record := self._record(name))}

    def files(self) -> dict[str, Path]:
        """All there is to publish, by name."""
        return {name: path for name, path in _files(self.folder).items() if not is_part(path.name)}

    def hashes(self) -> dict[str, dict[str, Any]]:
        """Bytes and hash of each file; of what steps made and nobody changed since, as it was then."""
        known = dict[str, dict[str, Any]]()
        for step in self.steps:
            known |= {f"{step}/{name}": told for name, told in self._record(step)["files"].items()}
        found = {name: _as_it_was(path, known.get(name)) or _told(path) for name, path in self.files().items()}
        return {name: {"bytes": told["bytes"], "xxh3": told["xxh3"]} for name, told in found.items()}

    def _clear(self) -> None:
        """Deletes what a try that died has left beside the steps: it is made again, or is not to be published."""
        for entry in self.folder.iterdir():
            if not self._record(entry.name):
                _remove(entry)

    def _record(self, name: str) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads((self._known / f"{name}.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return record

    def _is_done(self, name: str) -> bool:
        """Whether it was done, and its files are as they were then: a power failure may have come since."""
        files, place = self._record(name).get("files"), self.folder / name
        return place.is_dir() and files is not None and all(_as_it_was(place / each, files[each]) for each in files)


def _sealed(folder: Path) -> dict[str, dict[str, Any]]:
    """Makes all files of a folder safe. Returns what is told of each."""
    found = _files(folder)
    for path in found.values():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return {name: _told(path) for name, path in found.items()}


def _files(folder: Path) -> dict[str, Path]:
    """The files in a folder and in those below, by name."""
    paths = sorted(folder.rglob("*"))
    for path in paths:
        if path.is_symlink():
            raise InputError(f"{path.name} is a link: a version holds files alone. Copy what it points to.")
        if not path.is_file() and not path.is_dir():
            raise InputError(f"{path.name} is neither a file nor a folder, which a version cannot hold. Delete it.")
    return {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}


def _told(path: Path) -> dict[str, Any]:
    """Bytes and hash of a file, and when it was changed last."""
    stat = path.stat()
    return {"bytes": stat.st_size, "xxh3": LocalFolder(path.parent).digest(path.name), "changed_ns": stat.st_mtime_ns}


def _as_it_was(path: Path, told: dict[str, Any] | None) -> dict[str, Any] | None:
    """What was told of a file, if that is still so."""
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return told if told and (stat.st_size, stat.st_mtime_ns) == (told["bytes"], told["changed_ns"]) else None


def _as_json(told: Any) -> Any:
    """What a step returned, if it can be JSON."""
    try:
        return json.loads(json.dumps(told))
    except (TypeError, ValueError):
        return None


def _remove(path: Path) -> None:
    """Deletes a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
