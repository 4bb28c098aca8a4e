"""Watching modules being imported: how long each took, and a word to whoever waits for one.

A finder in front of all others lets them find a module, and times its way from there to the end of its body. Modules
that are there already cost nothing. Of imports inside imports only whole packages are timed, and those that somebody
waits for. The module keeps the loader it would have had, and who only asks where a module is gets Python's own answer.
This file is loaded at the start of every interpreter: it imports nothing that would not be there anyway.
"""

import _frozen_importlib
import sys
from _thread import get_ident
from time import monotonic_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Hook = Callable[[Any], None]

_IMPORT = _frozen_importlib._find_and_load_unlocked.__code__  # type: ignore[attr-defined]
"""Where Python finds a module in order to import it."""


class ImportWatch:
    """A finder for `sys.meta_path`. What it sees before anybody listens is kept."""

    def __init__(self, trigger: str, pulled: "Hook") -> None:
        self.began_ns = monotonic_ns()
        self.early: list[tuple[str, int, int]] = []
        """Imports that were over before there was anybody to tell: name, begin, end."""
        self.took_ns: dict[str, int] = {}
        """Time each package took, with all that it imported."""
        self.begins: Callable[[str], Any] | None = None
        """Called when an import begins that no other import asked for; what it returns goes to `ends` …"""
        self.ends: Callable[[Any, str, int, int], None] | None = None
        """… with the module's name, and when it began and ended."""
        self._trigger, self._pulled = trigger, pulled
        self._hooks: dict[str, list[Hook]] = {}
        self._inside: dict[int, int] = {}
        self._busy: set[int] = set()

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """The module's spec as the other finders give it, with a loader that tells when it is done."""
        thread = get_ident()
        if thread in self._busy:
            return None
        # Who executes a module by himself asks for its parts first.
        pulls = self._pulled is not None and name.partition(".")[0] == self._trigger
        if thread in self._inside and "." in name and name not in self._hooks and not pulls:
            return None
        if target is None and not _is_import(name, sys._getframe(1)):  # a reload names its target
            return None
        began = monotonic_ns()
        self._busy.add(thread)
        try:
            if pulls:
                pulled, self._pulled = self._pulled, None  # type: ignore[assignment]
                pulled(self)
            spec = self._find(name, path, target)
        finally:
            self._busy.discard(thread)
        loader = getattr(spec, "loader", None)
        if hasattr(loader, "exec_module") and hasattr(loader, "create_module"):
            spec.loader = _Loader(loader, self, name, began)
        return spec

    def _find(self, name: str, path: "Any", target: "Any") -> "Any":
        """What the finders behind this one find. Of a kind that has no `find_spec`, only Python itself asks."""
        behind = False
        for finder in sys.meta_path:
            if not behind:
                behind = finder is self
                continue
            find = getattr(finder, "find_spec", None)
            if find is None:
                return None
            spec = find(name, path, target)
            if spec is not None:
                return spec
        return None

    def execute(self, name: str, module: "Any", loader: "Any", began_ns: int) -> None:
        """Runs the module's body."""
        thread = get_ident()
        outermost = thread not in self._inside
        token = self.begins(name) if outermost and self.begins is not None else None
        self._inside[thread] = self._inside.get(thread, 0) + 1
        try:
            loader.exec_module(module)
        finally:
            now = monotonic_ns()
            self._inside[thread] -= 1
            if not self._inside[thread]:
                del self._inside[thread]
                if self.ends is not None:
                    self.ends(token, name, began_ns, now)
                else:
                    self.early.append((name, began_ns, now))
            if outermost or "." not in name:
                self.took_ns[name] = now - began_ns
        for hook in self._hooks.get(name, ()):
            hook(sys.modules.get(name, module))  # a module may put another in its place

    def waited_for(self) -> list[str]:
        """The modules that are waited for."""
        return [name for name in self._hooks if name not in sys.modules]

    def call_for(self, name: str, hook: "Hook") -> None:
        """Calls `hook` with the module whenever it has been imported or reloaded; now, if it is there."""
        self._hooks.setdefault(name, []).append(hook)
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            hook(module)

    def forked(self) -> None:
        """In a forked child, forgets the threads that only its parent has: new ones may get their numbers."""
        thread = get_ident()
        self._busy &= {thread}
        self._inside = {number: depth for number, depth in self._inside.items() if number == thread}


def _is_import(name: str, finding: "Any") -> bool:
    """Whether the frame that asks a finder does so to import the module; another finder may have asked it to."""
    frame = finding.f_back
    if frame is not None and frame.f_code is _IMPORT:
        return True
    while frame is not None:
        if frame.f_code is _IMPORT and frame.f_locals["name"] == name:
            return True
        frame = frame.f_back
    return False


class _Loader:
    """A module's own loader, for as long as it takes to load it."""

    def __init__(self, loader: "Any", watch: ImportWatch, name: str, began_ns: int) -> None:
        self._loader, self._watch, self._name, self._began_ns = loader, watch, name, began_ns

    def create_module(self, spec: "Any") -> "Any":
        outermost = spec.loader is self  # others may have wrapped it in turn
        if outermost:
            spec.loader = self._loader  # so that a module which looks sees its own
        try:
            return self._loader.create_module(spec)
        finally:
            if outermost:
                spec.loader = self

    def exec_module(self, module: "Any") -> None:
        spec: Any = getattr(module, "__spec__", None)  # whatever a loader calls a module
        if getattr(spec, "loader", None) is self:
            spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        # What is loaded lazily is executed long after the import that found it is over.
        began_ns = self._began_ns if getattr(spec, "_initializing", False) else monotonic_ns()
        self._watch.execute(self._name, module, self._loader, began_ns)

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)


def _pass_for_importlib() -> None:
    """Makes these frames count as Python's own import machinery, which it leaves out of the traceback of a module that
    fails: what a user sees there stays what it was."""
    for function in (_Loader.exec_module, ImportWatch.execute):
        function.__code__ = function.__code__.replace(co_filename=_IMPORT.co_filename)


_pass_for_importlib()
