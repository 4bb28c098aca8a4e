"""Long steps, judged again once more is known: did one stall, or does the loop take that long every so many steps?"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from statistics import median_low
from typing import TYPE_CHECKING

from headway.accounting.rules import Loop, Pace, StallRule

if TYPE_CHECKING:
    from headway.accounting.timeline import Pieces, RankStint

LEAST_KNOWN = 5
"""A process that has ended is judged by its own pace if it made at least this many steps."""

LONG = 3
"""A step is long if it takes this many typical ones."""

MOST_KEPT = 64
"""Of the long steps, only the newest are compared with one another."""


def recurring(steps: Sequence[int], took_ns: Sequence[int]) -> list[int]:
    """Return which long steps belong to the loop: those that come at regular distances and take about as long."""
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    if len(gaps) < 2:
        return []
    gap, typical_ns = median_low(gaps), median_low(took_ns)
    regular = [at for at, each in enumerate(gaps) if abs(each - gap) <= max(1, gap // 20)]
    if len(regular) < 2:
        return []
    found = sorted({*regular, *(at + 1 for at in regular)})
    return [at for at in found if typical_ns <= 3 * took_ns[at] and took_ns[at] <= 3 * typical_ns]


class Stalls:
    """The long steps of one process. Each is a place in its loop's pieces."""

    __slots__ = ("_early", "_found", "_long", "_rule")

    def __init__(self, rule: StallRule) -> None:
        self._rule = rule
        self._early: list[tuple[int, int, int]] | None = []
        """First and last place of the pieces of each early step, and its rollouts; None once they are judged."""
        self._found: list[list[int]] = []
        """Place and step of each stall."""
        self._long: list[tuple[int, int]] = []
        """All steps that took long, stalled or not, and what they took."""

    def add(
        self, loop: "Pieces", stints: "list[RankStint]", base: int, step: int, pace: Pace, played_ns: int = 0
    ) -> None:
        """Take in the pieces of one step, from place `base` on; `played_ns` of it were rollouts, and are no stall."""
        took_ns = sum(p.end_ns - p.begin_ns for p in loop.items[base:] if p.what in (Loop.STEP, Loop.STALL))
        if took_ns > LONG * pace.typical_ns:
            self._long = [*self._long[1 - MOST_KEPT :], (step, took_ns)]
        if self._early is not None:
            if pace.steps >= self._rule.early_steps:
                self.judge(loop, stints, pace)
            else:
                self._early.append((base, len(loop.items), played_ns))
        places = [at for at in range(base, len(loop.items)) if loop.items[at].what is Loop.STALL]
        if places:
            self._found = [*self._found[1 - MOST_KEPT :], [places[-1], step]]
            self._find_recurring(loop, stints)

    def judge(self, loop: "Pieces", stints: "list[RankStint]", pace: Pace) -> None:
        """Judge the early steps by a pace that is known by now."""
        early, self._early = self._early or [], None
        for begin, end, played_ns in reversed(early):
            own = [at for at in range(begin, end) if loop.items[at].what is Loop.STEP]
            took_ns = sum(loop.items[at].end_ns - loop.items[at].begin_ns for at in own) - played_ns
            others = pace.without(took_ns)
            if own and took_ns > self._rule.limit_ns(others.typical_ns, others.slow_ns, self._rule.early_steps):
                longest = max(own, key=lambda at: loop.items[at].end_ns - loop.items[at].begin_ns)
                self._cut(loop, stints, longest, took_ns - others.typical_ns)

    def first_step_ns(self, first: int) -> int:
        """Return how long the first step is likely to have been, if it is one of those that recur; else 0."""
        found = recurring([step for step, _ in self._long], [took_ns for _, took_ns in self._long])
        if not found:
            return 0
        steps = [self._long[at][0] for at in found]
        gap = median_low([later - earlier for earlier, later in pairwise(steps)])
        return median_low([self._long[at][1] for at in found]) if (steps[0] - first) % gap == 0 else 0

    def _cut(self, loop: "Pieces", stints: "list[RankStint]", at: int, stall_ns: int) -> None:
        """Make the end of a step a stall."""
        piece = loop.items[at]
        cut_ns = max(piece.end_ns - stall_ns, piece.begin_ns)
        stall_ns = piece.end_ns - cut_ns
        loop.items[at : at + 1] = [
            piece._replace(end_ns=cut_ns),
            piece._replace(begin_ns=cut_ns, what=Loop.STALL, stint=-1, first=0, next=0),
        ]
        self._found = [[place + (place > at), step] for place, step in self._found]
        self._move(loop, stints, piece.stint, int(piece.first), -stall_ns)

    def _find_recurring(self, loop: "Pieces", stints: "list[RankStint]") -> None:
        took_ns = [loop.items[at].end_ns - loop.items[at].begin_ns for at, _ in self._found]
        found = recurring([step for _, step in self._found], took_ns)
        for number in found:
            at, step = self._found[number]
            piece = loop.items[at]
            if piece.what is Loop.STALL:
                stint = next(n for n in reversed(range(len(stints))) if stints[n].first <= step < stints[n].next)
                loop.items[at] = piece._replace(what=Loop.STEP, stint=stint, first=float(step), next=float(step + 1))
                self._move(loop, stints, stint, step, took_ns[number])

    @staticmethod
    def _move(loop: "Pieces", stints: "list[RankStint]", stint: int, step: int, ns: int) -> None:
        """Move time from the stalls to a step."""
        loop.sums[Loop.STALL] = loop.sums.get(Loop.STALL, 0) - ns
        loop.sums[stint] = loop.sums.get(stint, 0) + ns
        points = stints[stint]
        for at in range(bisect_right(points.steps, step), len(points.steps)):
            points.step_ns[at] += ns
