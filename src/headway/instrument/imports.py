"""Watching modules being imported: how long each took, and a word to whoever waits for one.

A finder in front of all others lets them find a module, and times its way from there to the end of its body. Modules
that are there already cost nothing. Of imports inside imports only whole packages are timed, and those that somebody
waits for. The module keeps the loader it would have had. This file is loaded at the start of every interpreter: it
imports nothing that would not be there anyway.
"""

import sys
from _thread import get_ident
from time import monotonic_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Hook = Callable[[Any], None]


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
        self._waiting: dict[str, list[Hook]] = {}
        self._inside: dict[int, int] = {}
        self._busy: set[int] = set()

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """The module's spec as the other finders give it, with a loader that tells when it is done."""
        thread = get_ident()
        nested = thread in self._inside
        if thread in self._busy or (nested and "." in name and name not in self._waiting):
            return None
        began = monotonic_ns()
        self._busy.add(thread)
        try:
            if name == self._trigger and self._pulled is not None:
                pulled, self._pulled = self._pulled, None  # type: ignore[assignment]
                pulled(self)
            spec = self._find(name, path, target)
        finally:
            self._busy.discard(thread)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self, began)
        return spec

    def _find(self, name: str, path: "Any", target: "Any") -> "Any":
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None:
                spec = find(name, path, target)
                if spec is not None:
                    return spec
        return None

    def execute(self, module: "Any", loader: "Any", began_ns: int) -> None:
        """Runs the module's body."""
        thread, name = get_ident(), module.__name__
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
        for hook in self._waiting.pop(name, ()):
            hook(module)

    def waited_for(self) -> list[str]:
        """The modules that are waited for."""
        return list(self._waiting)

    def call_for(self, name: str, hook: "Hook") -> None:
        """Calls `hook` with the module once it is imported; now, if it has been."""
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            hook(module)
        else:
            self._waiting.setdefault(name, []).append(hook)


class _Loader:
    """A module's own loader, for as long as it takes to load it."""

    def __init__(self, loader: "Any", watch: ImportWatch, began_ns: int) -> None:
        self._loader, self._watch, self._began_ns = loader, watch, began_ns

    def create_module(self, spec: "Any") -> "Any":
        spec.loader = self._loader  # so that a module which looks sees its own
        try:
            return self._loader.create_module(spec)
        finally:
            spec.loader = self

    def exec_module(self, module: "Any") -> None:
        module.__spec__.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        self._watch.execute(module, self._loader, self._began_ns)

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)


def _pass_for_importlib() -> None:
    """Makes these frames count as Python's own import machinery, which it leaves out of the traceback of a module that
    fails: what a user sees there stays what it was."""
    import _frozen_importlib

    machinery = _frozen_importlib._call_with_frames_removed.__code__.co_filename  # type: ignore[attr-defined]
    for function in (_Loader.exec_module, ImportWatch.execute):
        function.__code__ = function.__code__.replace(co_filename=machinery)


try:
    _pass_for_importlib()
except (ImportError, AttributeError):  # another Python: there, two frames more are seen
    pass
