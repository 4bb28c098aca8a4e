"""Which checkpoints may go. Takes what is known of them, and touches nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headway.errors import InputError

if TYPE_CHECKING:
    from headway.checkpoint.catalog import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is kept: whatever one of these wants, besides the newest and those that are pinned."""

    keep_last: int = 3
    """So many of the newest."""
    keep_every: int | None = None
    """The first at or after each multiple of so many steps: intervals that follow the clock seldom meet one exactly."""
    keep_best: int | None = None
    """So many with the best metric; a later one wins a draw."""
    best: Literal["min", "max"] = "min"
    """Whether a small metric is good, or a large one."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"{name} is {value}: at least 1 is kept. Leave it out where it is not wanted.")
        if self.best not in ("min", "max"):
            raise InputError(f"best is {self.best!r}: a good metric is small (min) or large (max).")


def to_prune(checkpoints: Sequence["Checkpoint"], retention: Retention) -> list["Checkpoint"]:
    """Those nobody wants to keep, the oldest first, as they are given. Only what is committed is judged."""
    committed = [each for each in checkpoints if each.state == "committed"]
    kept = {each.name for each in committed[-retention.keep_last :]}
    kept |= {each.name for each in committed if each.pinned}
    kept |= _milestones(committed, retention.keep_every) | _best(committed, retention)
    return [each for each in committed if each.name not in kept]


def _milestones(committed: Sequence["Checkpoint"], every: int | None) -> set[str]:
    first = {}
    for each in sorted(committed, key=lambda each: each.step or 0, reverse=True):
        first[(each.step or 0) // (every or 1)] = each.name
    first.pop(0, None)  # before the first multiple
    return set(first.values()) if every else set()


def _best(committed: Sequence["Checkpoint"], retention: Retention) -> set[str]:
    sign = 1 if retention.best == "min" else -1
    judged = [
        (sign * each.metric, -age, each.name)
        for age, each in enumerate(committed)
        if each.metric is not None and not math.isnan(each.metric)
    ]
    return {name for _, _, name in sorted(judged)[: retention.keep_best or 0]}
