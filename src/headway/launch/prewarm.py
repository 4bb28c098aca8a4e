"""What earlier starts of a program imported, kept in a small file: the next zygote has it before the program asks.

Only installed packages are kept, never modules of the program's own, which may have changed by then. What was learned
counts as long as it is sure to be the same: a package that was installed anew, or a file of the program's that has
changed and speaks of the environment, is learned again.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.paths import folder_name

MOST = 40
"""Packages to import ahead, at most: those that take longest."""

WORTH_S = 0.2
"""What another zygote has to spare a restart for it to be made beside the training, which it takes a core from."""

_CHANGES = re.compile(r"\benviron\b|\bputenv\b|\bsys\.path\b|\bload_dotenv\b")
"""Words of a program that may have a package behave otherwise if it is imported later."""


@dataclass(kw_only=True)
class Package:
    """One module that took its time to import, and that is none of the program's own."""

    seconds: float
    file: str
    stamp: int
    """When that file was written."""
    later: bool
    """The program imported it when its data was on the way already."""
    why: str = ""
    """Why it is not imported ahead; empty if it is."""


class Prewarm:
    """The packages of one program, as one interpreter imports them."""

    def __init__(self, home: Path, program: str) -> None:
        digest = hashlib.sha256(f"{sys.executable}\0{program}".encode("utf-8", "replace")).hexdigest()[:12]
        self.path = home / "prewarm" / f"{folder_name(Path(program).name)[:80]}-{digest}.json"
        self.read: Callable[[int, int], Mapping[str, Any] | None] = lambda pid, ticks: None
        """Finds what a process told of its imports: `modules`, each with its seconds and its file, and `sources`."""
        self.tell: Callable[[str, bool], None] = lambda why, on: None
        """Called with what became of a package, and whether it is imported ahead."""
        self.packages: dict[str, Package] = {}
        self.sources: dict[str, int] = {}
        """The program's own files, and when each was written."""
        self._heard = 0
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):  # then it is learned anew
            self._load(json.loads(self.path.read_text()))

    def _load(self, kept: dict[str, Any]) -> None:
        if any(_written(file) != stamp and _may_matter(file) for file, stamp in kept["sources"].items()):
            return
        found = {name: Package(**fields) for name, fields in kept["packages"].items() if _can_be_named(name)}
        if any(not isinstance(each.seconds, int | float) for each in found.values()):
            return
        self.packages = {name: each for name, each in found.items() if _written(each.file) == each.stamp}
        self.sources = kept["sources"]

    def names(self) -> list[str]:
        """What to import ahead, the slowest first: a package comes before those that it imports itself. Last comes what
        the program imports later."""
        good = {name: package for name, package in self.packages.items() if not package.why}
        return sorted(sorted(good, key=lambda name: -good[name].seconds)[:MOST], key=lambda name: good[name].later)

    def look(self, pid: int, ticks: int) -> bool:
        """Takes what a worker told of its imports, the process that started then; True if some are new, and so many
        that the next restart should find them. The next job does in any case."""
        if pid == self._heard or (told := self.read(pid, ticks)) is None:
            return False
        self._heard = pid
        new = {name: took for name, took in told["modules"].items() if name not in self.packages}
        for name, (seconds, file) in new.items():
            self.packages[name] = Package(seconds=seconds, file=file, stamp=_written(file), later=False)
        if (later := told.get("later")) is not None:  # else it had no data workers, this time
            for name in told["modules"]:
                self.packages[name].later = name in later
        self.sources = {file: _written(file) for file in told["sources"]}
        if told.get("why"):
            self.tell(told["why"], False)
        if new:
            self.tell(f"from the next start on: {', '.join(new)}", True)
        self.save()
        return sum(self.packages[name].seconds for name in new) >= WORTH_S

    def has_heard_of(self, pid: int) -> bool:
        """Whether this worker has told of its imports, as they do when they train."""
        return pid == self._heard

    def patience_s(self, name: str) -> float:
        """How long a start may be kept waiting for this one: longer than it takes on a machine that is busy."""
        return 10.0 + 5.0 * self.packages[name].seconds

    def drop(self, names: Sequence[str], why: str) -> None:
        """These are not imported ahead any more."""
        for name in names:
            self.packages[name].why = why
            self.tell(f"{name} is imported by the workers again: {why}", False)
        self.save()

    def save(self) -> None:
        """Keeps it for the next job."""
        kept = {"packages": {name: asdict(each) for name, each in self.packages.items()}, "sources": self.sources}
        fresh = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.write_text(json.dumps(kept, indent=1))
            fresh.replace(self.path)
        except OSError as error:
            self.tell(f"what was learned is lost with this job ({error})", False)


def _can_be_named(name: str) -> bool:
    """Whether a zygote can be told this name of a module."""
    return all(part.isidentifier() for part in name.split("."))


def _written(file: str) -> int:
    """When a file was written, in ns; 0 if it is not there."""
    try:
        return os.stat(file).st_mtime_ns
    except (OSError, ValueError):
        return 0


def _may_matter(file: str) -> bool:
    """Whether a file that has changed may now have packages imported in another way. One that is gone was generated, as
    Inductor's are, or whoever imported it has changed as well."""
    try:
        return bool(_CHANGES.search(Path(file).read_text(errors="replace")))
    except FileNotFoundError:
        return False
    except OSError:
        return True
