"""What torch works out anew in every process, for a second, before it looks into its compile cache: hashes of all its
own sources, and of Triton's. As long as none of those files changes they are what an earlier process has found. That is
kept, under the files' sizes and times. This is the only file that touches those functions of torch's.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.compile import caches
from headway.compile.trust import others_can_write

_MODULE, _PACKAGES = "torch._inductor.codecache", ("torch", "triton")
_NAMES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "torch_key": (bytes.hex, bytes.fromhex),
    "triton_key": (lambda key: key, lambda key: key),
}
"""The functions, and how their results are written down and read."""
_SOURCES, _ELSE = (".py", ".so", ".cpp", ".ld"), {"__pycache__", "include", "lib"}
"""Files that such a hash is made of, and folders that have none of them."""


class SourceHashes:
    """Kept in a folder, a small file for each state of the sources. Whatever goes wrong, torch works them out."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, dict[str, Any]()
        self._state = ""

    def load(self) -> None:
        """Finds what an earlier process has worked out. Torch need not be imported for it."""
        with suppress(OSError, ValueError, TypeError, AttributeError):  # a file may hold anything
            self._state = state_of(_PACKAGES)
            if not others_can_write(self._file):
                kept = json.loads(self._file.read_text())
                self._known = {name: _NAMES[name][1](key) for name, key in kept.items() if name in _NAMES}

    def give(self) -> None:
        """Has torch take them for known, as soon as its compiler is imported."""
        if self._known:
            caches.when_imported(_MODULE, self._tell)

    def _tell(self, module: Any) -> None:
        for name, key in self._known.items():
            with suppress(Exception):  # torch knows it already, or is of another version: it is its own affair then
                getattr(module, name).set(key)

    def keep(self) -> None:
        """Writes down what torch has worked out, once it has compiled."""
        module = sys.modules.get(_MODULE)
        functions: dict[str, Any] = {name: getattr(module, name, None) for name in _NAMES}
        functions = {name: function for name, function in functions.items() if hasattr(function, "set")}
        if self._known or not self._state or not functions:
            return
        found = {name: function() for name, function in functions.items()}
        if state_of(_PACKAGES) == self._state:  # else another torch has been installed meanwhile
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = self._file.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps({name: _NAMES[name][0](key) for name, key in found.items()}))
            fresh.replace(self._file)
        self._known = found

    @property
    def _file(self) -> Path:
        return self._folder / f"{self._state}.json"


def state_of(packages: tuple[str, ...]) -> str:
    """A name for the sources of these packages as they are now: another one when any of them has changed."""
    told = hashlib.sha256()
    for package in packages:
        spec = find_spec(package)
        for place in (spec and spec.submodule_search_locations) or ():
            told.update("\n".join(sorted(_stamps(place))).encode("utf-8", "surrogateescape"))
    return told.hexdigest()[:32]


def _stamps(root: str) -> Iterator[str]:
    """Each source file below a folder, its size, and when it was written: what Python's own cache goes by."""
    folders, seen = [root], set[tuple[int, int]]()
    while folders:
        folder = folders.pop()
        told = os.stat(folder)
        if (told.st_dev, told.st_ino) in seen:  # links may lead in a circle
            continue
        seen.add((told.st_dev, told.st_ino))
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders += [entry.path] if entry.name not in _ELSE else []
                elif entry.name.endswith(_SOURCES):
                    told = entry.stat()
                    yield f"{entry.path} {told.st_size} {told.st_mtime_ns}"
