"""When to save: at every Nth step, after a time, or when it pays. All ranks come to the same answer.

The first rank makes decisions that depend on a clock. To learn them, the ranks meet in a small collective a few times
between two saves, at steps that they have agreed on before.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

from headway.checkpoint.interval import Tuner
from headway.errors import InputError

_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
_TIME = re.compile(r"([\d.]+)\s*([a-z]+)")
_RECENT = 32
_MOST_SKIPS = 5
"""A save that was skipped is tried again after 1, 2, 4 … 32 steps: to meet takes time, too."""


@dataclass(frozen=True)
class Due:
    """A save is due."""

    durable: bool
    """Or only in memory."""
    may_skip: bool
    """If the one before it is still being uploaded; otherwise it waits for that."""


class Schedule:
    """Saves only when told."""

    def after(self, step: int, now: float) -> Due | None:
        """What is due after this step."""
        return None

    def saved(self, done: bool, blocked_s: float, now: float, durable: bool) -> None:
        """What was due was done, or skipped because the one before it is still being uploaded."""

    def failed(self, now: float) -> None:
        """What was due could not be done on this rank; the others may have done it."""

    def uploaded(self, now: float) -> None:
        """The last durable save has come to its end."""

    def failures(self, process: float, node: float, over_s: float) -> None:
        """All failures of the job so far."""

    def without_memory(self) -> None:
        """Saves do not stay in memory."""

    def take_change(self) -> dict[str, Any] | None:
        """What has changed, once."""
        return None


class EverySteps(Schedule):
    """Saves at steps that are multiples of a number, whatever happens in between."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def after(self, step: int, now: float) -> Due | None:
        return Due(True, may_skip=False) if (step + 1) % self._steps == 0 else None


class Timed(Schedule):
    """Saves after a time, or at the interval that wastes least."""

    def __init__(self, agree: Callable[..., list[int]], first: bool, seconds: float | None = None) -> None:
        self._agree, self._first, self._seconds = agree, first, seconds
        self._tuner = Tuner()
        self._look: int | None = None
        self._saved_at: tuple[int, float] | None = None
        self._before: float | None = None
        self._plain: list[float] = []
        self._uploads: list[float] = []
        """When those under way began, the oldest first."""
        self._inflation_s = 0.0
        self._since_durable = self._skips = 0
        self._change: dict[str, Any] | None = None
        self._failures: dict[str, float] = {}
        self._failures_at: float | None = None

    def after(self, step: int, now: float) -> Due | None:
        self._observe(now)
        if self._failures_at is None:
            self._failures_at = now
        if self._saved_at is None or self._look is None:
            self._saved_at, self._look = (step, now), step + 1
        if step < self._look:
            return None
        due, durable, ahead = self._agree(*(self._decide(step, now) if self._first else (0, 0, 0)))
        self._look = step + ahead
        self._step = step
        return Due(bool(durable), may_skip=True) if due else None

    def _observe(self, now: float) -> None:
        """Steps beside an upload are slower: by how much belongs to the cost of the save."""
        if self._before is not None:
            took = now - self._before
            if not self._uploads:
                self._plain = [*self._plain[1 - _RECENT :], took]
                self._tuner.observe_step(took)
            elif self._plain:
                self._inflation_s += took - median(self._plain)
        self._before = now

    def _decide(self, step: int, now: float) -> tuple[int, int, int]:
        """Whether to save, whether durably, and after how many steps to meet again."""
        assert self._saved_at is not None
        left, every = self._left(step, now)
        if left < 1:
            return 1, int(self._since_durable + 1 >= every), 1
        return 0, 0, max(1, math.ceil(left / 2))

    def _left(self, step: int, now: float) -> tuple[float, int]:
        """How many steps are left until the next save, and how many saves make one durable."""
        assert self._saved_at is not None
        seconds, every = (self._seconds, 1) if self._seconds is not None else self._tuner.probe()
        if seconds is not None:
            step_s = max(median(self._plain or [1.0]), 1e-4)
            return (seconds - (now - self._saved_at[1])) / step_s + 0.5, every
        if self._failures:
            assert self._failures_at is not None
            told = self._failures | {"over_s": self._failures["over_s"] + now - self._failures_at}
            self._tuner.failures(process=int(told["process"]), node=int(told["node"]), over_s=told["over_s"])
        best = self._tuner.schedule()
        if (why := self._tuner.changed) is not None:
            self._change = {
                "memory_s": best.tiers.memory_s, "durable_s": best.tiers.durable_s, "steps": best.memory_steps,
                "every": best.every, "wasted_percent": best.tiers.wasted_percent, "why": why,
            }  # fmt: skip
        return best.memory_steps - (step - self._saved_at[0]) + 0.0, best.every

    def saved(self, done: bool, blocked_s: float, now: float, durable: bool) -> None:
        self._before = now
        if not done:
            self._look = self._step + 2**self._skips
            self._skips = min(self._skips + 1, _MOST_SKIPS)
            return
        self._skips = 0
        self._saved_at = (self._step, now)
        self._tuner.observe_save(blocked_s)
        self._since_durable = 0 if durable else self._since_durable + 1
        if durable:
            self._uploads.append(now)

    def failed(self, now: float) -> None:
        self._before, self._skips = now, 0
        self._saved_at = (self._step, now)

    def uploaded(self, now: float) -> None:
        if self._uploads:
            self._tuner.observe_upload(now - self._uploads.pop(0), self._inflation_s)
            self._inflation_s = 0.0

    def failures(self, process: float, node: float, over_s: float) -> None:
        self._failures = {"process": process, "node": node, "over_s": over_s}
        self._failures_at = self._before

    def without_memory(self) -> None:
        self._tuner = Tuner(memory_tier=False)

    def take_change(self) -> dict[str, Any] | None:
        change, self._change = self._change, None
        return change


def schedule(interval: str | float | timedelta | None, agree: Callable[..., list[int]], first: bool) -> Schedule:
    """What the user's word for it means."""
    if interval is None:
        return Schedule()
    if interval == "auto":
        return Timed(agree, first)
    if isinstance(interval, int) and not isinstance(interval, bool) and interval > 0:
        return EverySteps(interval)
    seconds = interval.total_seconds() if isinstance(interval, timedelta) else _seconds(interval)
    if seconds is None or not 0 < seconds < math.inf:
        raise InputError(
            f'interval={interval!r} is none: give "auto", a whole number of steps, a time such as "10min" or "90s", '
            f"or None to save only when told."
        )
    return Timed(agree, first, seconds)


def _seconds(interval: object) -> float | None:
    found = _TIME.fullmatch(interval.strip()) if isinstance(interval, str) else None
    if found is None or found[2] not in _UNITS:
        return None
    try:
        return float(found[1]) * _UNITS[found[2]]
    except ValueError:
        return None
