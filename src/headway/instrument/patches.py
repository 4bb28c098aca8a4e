"""Changing a running library, so that it can be undone, is listed, and can never hurt: one small class a change."""

import functools
import sys
from collections.abc import Callable
from typing import Any

MISSING = object()


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

    def put(self, replacement: Any) -> None:
        """Replaces the original."""
        setattr(self._owner, self._attribute, replacement)
        self.state = "on"

    def undo(self) -> None:
        """Puts the original back, unless somebody else has changed it since: then the hook only falls silent."""
        if self.state == "on":
            self.state = "off"
            if self.handle is not None:
                self.handle.remove()
            current = getattr(self._owner, self._attribute, None)
            if getattr(current, "__headway__", None) is not self:
                return
            if self.original is MISSING or self._inherited:
                delattr(self._owner, self._attribute)
            else:
                setattr(self._owner, self._attribute, self.original)

    def __reduce__(self) -> Any:
        # Ray copies the attributes of a function to wrappers of its own, and sends those to other processes.
        return str, (self.what,)

    def failed(self, error: BaseException) -> None:
        """The hook raised: it is switched off, and that is told once."""
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

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if patch.state != "on":
            return original(*args, **kwargs)
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
    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]  # not for compiled code to look into
    return kind(wrapper) if kind else wrapper


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

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def say(text: str) -> None:
    """One line on standard error."""
    try:
        print(f"headway: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # closed, or none: nobody would read it
        pass
