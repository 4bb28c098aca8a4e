"""Which version was served since when, and what that says of going back."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Serving:
    """From when on a version was served."""

    version: str
    at_s: float
    """Seconds since 1970."""
    why: str
    """publish, promote or rollback."""


def carried_out(history: list[Serving], served: str) -> list[Serving]:
    """The history without an end that was written by somebody who died before `latest` was moved."""
    last_but_one = history[-2].version if len(history) > 1 else ""
    return history[:-1] if history and history[-1].version != served == last_but_one else history


def before(history: list[Serving], served: str) -> list[str]:
    """What was served before, the last one first. Whoever goes back undoes all that came since, and does not add."""
    stack: list[str] = []
    for entry in history:
        if entry.why == "rollback" and entry.version in stack:
            while stack[-1] != entry.version:
                stack.pop()
        elif stack[-1:] != [entry.version]:
            stack.append(entry.version)
    while served in stack:
        if stack.pop() == served:
            break
    return [name for name in dict.fromkeys(reversed(stack)) if name != served]
