"""Changing a running library, so that it can be undone, is listed, and can never hurt: one small class a change."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from headway.events.recorder import is_from_signal_handler

MISSING = object()

torch: Any = None
"""Set once it is imported."""

_INTERNAL = "<headway importlib._bootstrap>"
"""The file that wrappers claim to be from. `warnings` takes it for Python's own and looks further up, so that a warning
about the caller's line still names that line."""


class Patch:
    """One attribute of a module or class, replaced. Whatever goes wrong in the hook, the original takes over again."""

    def __init__(self, what: str, owner: Any, attribute: str, told: "Callable[[Patch, BaseException], None]") -> None:
        self.what, self.state = what, "off"
        self._owner, self._attribute, self._told = owner, attribute, told
        own = vars(owner).get(attribute, MISSING)
        self._inherited = own is MISSING
        self.original: Any = getattr(owner, attribute, MISSING) if self._inherited else own
        """As it stands in its owner: a staticmethod stays one."""
        self.handle: Any = None
        """For a hook that the library offers itself: what takes it out again."""
        self._put: Any = MISSING

    def put(self, replacement: Any) -> None:
        """Replaces the original, unless somebody else has replaced it since."""
        if self._now() is self.original:
            setattr(self._owner, self._attribute, replacement)
            self._put, self.state = replacement, "on"

    def _now(self) -> Any:
        current = vars(self._owner).get(self._attribute, MISSING)
        return self.original if current is MISSING and self._inherited else current

    def undo(self) -> None:
        """Puts the original back, unless somebody else has changed it since: then the hook only falls silent."""
        if self.state == "on":
            self.state = "off"
            if self.handle is not None:
                self.handle.remove()
            if self._put is MISSING or self._now() is not self._put:
                return
            if self.original is MISSING or self._inherited:
                delattr(self._owner, self._attribute)
            else:
                setattr(self._owner, self._attribute, self.original)

    def __reduce__(self) -> Any:
        # Ray copies the attributes of a function to wrappers of its own, and sends those to other processes.
        return str, (self.what,)

    def failed(self, error: BaseException) -> None:
        """The hook raised: it is switched off, and that is told once. What a signal handler of the program's raised
        while the hook ran is not the hook's, and goes on its way."""
        if is_from_signal_handler(error):
            raise error
        if self.state == "on":
            self.undo()
            self.state = f"failed: {type(error).__name__}: {error}"
            self._told(self, error)


def parameters(function: Any) -> tuple[str, ...]:
    """The names a function takes, first to last; empty for one that does not tell."""
    while hasattr(function, "__wrapped__") or hasattr(function, "__func__"):
        function = getattr(function, "__wrapped__", None) or function.__func__
    code = getattr(function, "__code__", None)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()


def around(patch: Patch, before: Callable[..., Any], after: Callable[[Any, Any, BaseException | None], None]) -> Any:
    """The original, with `before(*args, **kwargs)` called ahead of it, and `after(token, result, error)` behind, where
    `token` is what `before` returned. Neither can change what the caller sees."""
    kind = type(patch.original) if isinstance(patch.original, classmethod | staticmethod) else None
    original = patch.original.__func__ if kind else patch.original

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if patch.state != "on" or (torch is not None and torch.compiler.is_compiling()):
            return original(*args, **kwargs)  # compiled code does not come here again, so nothing is to be traced
        try:
            token = before(*args, **kwargs)
        except Exception as error:  # measuring must not stop the job: the hook is switched off, and that is journaled
            patch.failed(error)
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as raised:
            _then(patch, after, token, None, raised)
            raise
        _then(patch, after, token, result, None)
        return result

    wrapper.__headway__ = patch  # type: ignore[attr-defined]
    looks_like(wrapper, original)
    return kind(wrapper) if kind else wrapper


def looks_like(wrapper: Any, original: Any) -> None:
    """Lets a function tell of itself what another one tells: its name, its source, its arguments."""
    wrapper.__code__ = wrapper.__code__.replace(co_filename=_INTERNAL)
    functools.update_wrapper(wrapper, original)
    try:
        wrapper.__signature__ = inspect.signature(original)
    except (TypeError, ValueError):  # the original does not tell either
        pass


def _then(patch: Patch, after: Callable[..., None], token: Any, result: Any, error: BaseException | None) -> None:
    try:
        after(token, result, error)
    except Exception as problem:  # as above
        patch.failed(problem)


def guarded(patch: Patch, hook: Callable[..., Any]) -> Callable[..., Any]:
    """A callback that a library calls by itself, and that never raises into it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if patch.state == "on":
            try:
                return hook(*args, **kwargs)
            except Exception as error:  # as above
                patch.failed(error)
        return None

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # not for compiled code to look into
    return call


def say(text: str) -> None:
    """One line on standard error."""
    try:
        print(f"headway: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # closed, or none: nobody would read it
        pass
