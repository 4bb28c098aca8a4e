"""How far the ranks of this node are, read from their journals while they write them."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.events.journal import Cell, Follower
from headway.events.vocabulary import (
    KNOWN_NAMES,
    Activity,
    LoopBegin,
    ProcessEnd,
    Record,
    Restored,
    Saved,
    SpanBegin,
    SpanEnd,
)

PATIENCE_S, PATIENCE_STEPS, PATIENCE_PAUSES = 60.0, 20, 3
"""Nothing has happened for too long when it is longer than each of these: seconds, typical steps, longest pauses."""

LENIENCE, MOST_LENIENCE = 10, 80
"""How many times as long a rank may take that is in no collective; and one that is at work besides."""

UNSEEN_S = 60.0
"""An attempt that lives longer than that without a step has some that cannot be seen."""

BUSY_FACTOR = 10
"""How much longer a rank may be at something that is known to take its time."""

_SLOW = {
    KNOWN_NAMES[activity]
    for activity in (
        Activity.PT2_COMPILATION, Activity.CHECKPOINT_BLOCKING, Activity.CHECKPOINT_RESTORE, Activity.EVALUATION,
        Activity.DATA_SKIP, Activity.PUBLISH,
    )
}  # fmt: skip


class Lineage:
    """What is known of the job's steps over all attempts of this supervisor's life."""

    def __init__(self) -> None:
        self.saved: dict[str, int] = {}
        """The step that each checkpoint holds, by content, file and path."""
        self.has_steps = False
        """Whether any step was ever seen."""
        self.reached = 0
        """The first step that no attempt has done yet."""


class RankWatch:
    """One rank's steps and pauses."""

    def __init__(self, places: Iterable[Path], lineage: Lineage) -> None:
        self._followers = [Follower(path) for path in places]
        self._lineage = lineage
        self._restored: int | None = None
        self._shift = 0
        self._cell: Cell | None = None
        self._slow: set[int] = set()
        self._began: tuple[int, int] | None = None
        self.longest_ns = self.typical_ns = self.last_ns = 0
        self.has_finished = False
        """Whether it has said that its work is done."""
        self.steps = 0
        """Steps done in this attempt."""
        self.next = 0
        """The job's step that comes next."""

    def poll(self) -> None:
        """Takes in what it has written since."""
        for follower in self._followers:
            batch = follower.poll()
            for record in batch.records:
                self._take(record)
            if batch.cell is not None:
                self._advance(batch.cell)

    @property
    def has_begun(self) -> bool:
        """Whether it writes a journal at all."""
        return any(follower.has_begun for follower in self._followers)

    @property
    def is_busy(self) -> bool:
        """Whether it is at something that takes its time, or outside its loop."""
        return bool(self._slow) or self._cell is None or self._cell.since_ns < 0

    def patience_ns(self) -> int:
        """How long it may go without a step."""
        patience = max(PATIENCE_S * 1e9, PATIENCE_STEPS * self.typical_ns, PATIENCE_PAUSES * self.longest_ns)
        return int(patience * (BUSY_FACTOR if self.is_busy else 1))

    def _take(self, record: Record) -> None:
        match record:
            case SpanBegin() if record.name in _SLOW:
                self._slow.add(record.span)
            case SpanEnd():
                self._slow.discard(record.span)
            case Restored():
                step = record.step
                if step is None:
                    step = next((self._lineage.saved[k] for k in _keys(record) if k in self._lineage.saved), None)
                self._restored = step if step is not None else self._restored
            case LoopBegin() if self._began is None:
                self._began = (record.first, record.t_ns)
                self._shift = max(0, (self._restored or 0) - record.first)
                self.last_ns = record.t_ns
            case ProcessEnd():
                self.has_finished = True
            case Saved():
                for key in _keys(record):
                    self._lineage.saved[key] = record.step + self._shift

    def _advance(self, cell: Cell) -> None:
        before, self._cell = self._cell, cell
        if self._began is None:
            return
        self.next = cell.next + self._shift
        done = cell.next - self._began[0]
        if done > self.steps:
            if self.steps:
                each = (cell.end_ns - self.last_ns) // (done - self.steps)
                self.longest_ns = max(self.longest_ns, each)
                self.typical_ns = (cell.end_ns - cell.begin_ns) // cell.count if cell.count else self.typical_ns or each
            self._lineage.has_steps = True
            self.steps, self.last_ns = done, max(cell.end_ns, self.last_ns)
            self._lineage.reached = max(self._lineage.reached, self.next)
        elif before is not None and before.since_ns == -1 and cell.since_ns != -1:
            self.last_ns = max(self.last_ns, cell.end_ns)  # the loop goes on: what came between was none of it


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Why nobody makes progress."""

    stuck: dict[int, str]
    """What to say of each rank that holds the others up."""
    may_be_busy: bool
    """Whether they are outside of the collective that others wait in, and so may only take their time."""
    is_unclear: bool
    """Whether nobody waits for anybody: that may be work after the training."""


class Progress:
    """The steps of this node's ranks, and when there have been none for too long. `after_s` is what a user calls too
    long: None for the ranks' own pace, 0 for never."""

    def __init__(self, after_s: float | None = None) -> None:
        self.lineage = Lineage()
        self.best = 0
        """What had been reached when this attempt began."""
        self._after_s = after_s
        self._watches: list[RankWatch] = []
        self._lenience = 1
        self._began_s = 0.0

    def begin(self, places: Iterable[Iterable[Path]]) -> None:
        """An attempt begins: here is where each rank's journal may lie."""
        self._watches = [RankWatch(paths, self.lineage) for paths in places]
        self.best, self._lenience, self._began_s = self.lineage.reached, 1, time.monotonic()

    def poll(self) -> None:
        """Takes in what the ranks have written since."""
        for watch in self._watches:
            watch.poll()

    @property
    def steps(self) -> list[int]:
        """How many steps each rank of this node has trained in this attempt."""
        return [watch.steps for watch in self._watches]

    @property
    def trained(self) -> bool:
        """Whether this attempt trained a step."""
        return any(watch.steps for watch in self._watches)

    @property
    def is_measured(self) -> bool:
        """Whether steps would be seen if there were any: one was, or there was hardly time for one."""
        is_young = time.monotonic() - self._began_s < UNSEEN_S
        return self.lineage.has_steps or (is_young and any(watch.has_begun for watch in self._watches))

    def still_since_ns(self, over: Sequence[bool], now_ns: int, is_asked: bool) -> int | None:
        """Since when nothing moves, if that is too long, or somebody asks; ranks that are over are left out."""
        if self._after_s == 0:
            return None
        pairs = zip(over, self._watches, strict=True)
        at_work = [watch for is_over, watch in pairs if not is_over and watch.steps > 1 and not watch.has_finished]
        if not is_asked and not any(now_ns - watch.last_ns > self._patience_ns(watch) for watch in at_work):
            return None
        return min((watch.last_ns for watch in at_work), default=now_ns)

    def _patience_ns(self, watch: RankWatch) -> float:
        return watch.patience_ns() * self._lenience if self._after_s is None else self._after_s * 1e9

    def gives_time(self, hang: Hang, is_active: bool) -> bool:
        """Whether there is more time for what may be no hang. Where nobody waits for anybody, always. What others wait
        for may be a long save: it gets ten times as long, and longer while it works."""
        if self._after_s is not None:
            return False
        if hang.is_unclear:
            self._lenience *= LENIENCE
        elif hang.may_be_busy and self._lenience < LENIENCE:
            self._lenience = LENIENCE
        elif hang.may_be_busy and is_active and self._lenience < MOST_LENIENCE:
            self._lenience *= 2
        else:
            return False
        return True


def _keys(record: Saved | Restored) -> list[str]:
    return [key for key in (record.content, record.file, record.path) if key]
