"""One process's time, folded from its records as they come, into pieces that do not overlap and leave no gap.

A piece is settled once the step run that covers it is known; from then on it never changes, so a new record costs
what it brings and nothing of what came before. What is not settled yet (the run in the step cell, the step under way,
the time after the last step) is laid over the settled part whenever the timeline is looked at.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from headway.accounting.rules import NOTHING, PRECEDENCE, Loop, Pace, StallRule, winner
from headway.accounting.stalls import LEAST_KNOWN, Stalls
from headway.accounting.waterfall import Startup, startup_of
from headway.events.journal import BETWEEN, Cell
from headway.events.vocabulary import (
    KNOWN_NAMES,
    ROLLOUT,
    WAITS_ANYWHERE,
    Activity,
    Dropped,
    LoopBegin,
    Mark,
    Name,
    Period,
    Process,
    ProcessEnd,
    ProcessGone,
    Record,
    Restored,
    Saved,
    Scheduled,
    SpanBegin,
    SpanEnd,
    StepRun,
    Told,
)

STEP_PLACE = PRECEDENCE[Loop.STEP]

REACH = 1024
"""A period that is told late takes its time from at most so many of the newest pieces: no history makes it dear."""

Timed = Process | ProcessEnd | Scheduled | LoopBegin | Saved | Restored | Mark | Dropped

_ACTIVITIES = {activity.value: activity for activity in Activity}
_KNOWN = {number: Activity(name) for name, number in KNOWN_NAMES.items()}


class Piece(NamedTuple):
    """A stretch of one process's time, and what it was spent on."""

    begin_ns: int
    end_ns: int
    what: str
    stint: int = -1
    """For steps: which of the process's stints they belong to …"""
    first: float = 0
    next: float = 0
    """… and which steps: from `first` up to `next`, in fractions where a step is cut."""


_begin = itemgetter(0)
_piece = partial(tuple.__new__, Piece)


@dataclass(slots=True)
class RankStint:
    """Steps this process trained one after the other."""

    first: int
    next: int
    batch_size: int | None = None
    restored: int | None = None
    saved: int | None = None
    steps: list[float] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)
    """Net time of all settled loop steps before the step beside it: what a stretch of steps took, by subtraction."""

    def took_ns(self, first: float, next: float) -> int:
        """Net time of the settled loop steps from `first` up to `next`."""
        return self._until(next) - self._until(first)

    def _until(self, step: float) -> int:
        at = bisect_right(self.steps, step)
        if at == 0:
            return 0
        if at == len(self.steps):
            return self.step_ns[-1]
        a, b = self.steps[at - 1], self.steps[at]
        return self.step_ns[at - 1] + round((self.step_ns[at] - self.step_ns[at - 1]) * (step - a) / (b - a))


class Pieces:
    """Settled pieces in order, with their sums, so that any stretch of them is summed from its shorter side."""

    __slots__ = ("items", "sums")

    def __init__(self) -> None:
        self.items: list[Piece] = []
        self.sums: dict[str | int, int] = {}
        """Time by activity; for steps, by their stint."""

    def extend(self, pieces: list[Piece]) -> int:
        """Appends pieces behind all others; returns how much of them is time in steps."""
        sums, net = self.sums, 0
        for piece in pieces:
            begin, end, what, stint, _, _ = piece
            key: str | int = what
            if what is Loop.STEP:
                net += end - begin
                key = stint
            sums[key] = sums.get(key, 0) + end - begin
        self.items += pieces
        return net

    def within(self, begin_ns: int, end_ns: int) -> dict[str | int, int]:
        """Sums over a stretch."""
        low, high = self._overlapping(begin_ns, end_ns)
        if 2 * (high - low) <= len(self.items):
            sums: dict[str | int, int] = {}
            for piece in self.items[low:high]:
                _count(sums, piece, min(piece.end_ns, end_ns) - max(piece.begin_ns, begin_ns))
            return sums
        sums = dict(self.sums)
        for piece in (*self.items[:low], *self.items[high:]):
            _count(sums, piece, piece.begin_ns - piece.end_ns)
        for piece in {self.items[low], self.items[high - 1]}:
            outside = max(begin_ns - piece.begin_ns, 0) + max(piece.end_ns - end_ns, 0)
            _count(sums, piece, -outside)
        return sums

    def steps_within(self, begin_ns: int, end_ns: int) -> dict[int, tuple[float, float]]:
        """From where to where the stints at the ends of a stretch reach inside it; those between lie in it whole."""
        inside = range(*self._overlapping(begin_ns, end_ns))
        first = next((self.items[at] for at in inside if self.items[at].what is Loop.STEP), None)
        last = next((self.items[at] for at in reversed(inside) if self.items[at].what is Loop.STEP), None)
        if first is None or last is None:
            return {}
        bounds = {first.stint: (cut(first, begin_ns, end_ns).first, math.inf)}
        bounds[last.stint] = (bounds.get(last.stint, (-math.inf,))[0], cut(last, begin_ns, end_ns).next)
        return bounds

    def _overlapping(self, begin_ns: int, end_ns: int) -> tuple[int, int]:
        low = bisect_right(self.items, begin_ns, key=_begin) - 1
        if low < 0 or self.items[low].end_ns <= begin_ns:
            low += 1
        return low, max(bisect_left(self.items, end_ns, key=_begin), low)


class Bar(NamedTuple):
    """A span as it was recorded, for waterfalls; `end_ns` is None while it is open."""

    name: str
    thread: int
    begin_ns: int
    end_ns: int | None


def may_be_known(record: Saved | Restored) -> bool:
    """Whether a restore may be known again by what was saved before."""
    return isinstance(record, Restored) and (record.step is None or bool(record.content))


class Timeline:
    """Folds one process's records. Times stay on the process's own monotonic clock."""

    __slots__ = (
        "_at", "_early", "_first_played_ns", "_floor", "_has_loaded", "_names", "_open", "_open_spans", "_pace",
        "_pending", "_restored", "_rollouts", "_rule", "_spans", "_stalls", "_waits_anywhere", "_winner",
        "cell", "checkpoints", "dropped", "ended", "first_step", "first_step_ns", "gone", "group_ready_ns",
        "init", "last_ns", "last_step_ns", "loads", "loop", "marks", "others_gone", "process", "rollout_ns",
        "scheduled", "startups", "stints", "unroll",
    )  # fmt: skip

    def __init__(self, rule: StallRule | None = None) -> None:
        self.process: Process | None = None
        self.ended: ProcessEnd | None = None
        self.gone: ProcessGone | None = None
        self.others_gone: list[ProcessGone] = []
        """The ends of other processes, which this one watched."""
        self.scheduled: Scheduled | None = None
        self.cell: Cell | None = None
        self.dropped = 0
        self.group_ready_ns: int | None = None
        self.last_ns = 0
        """The process's last sign of life in its own journal."""
        self.first_step: tuple[int, int] | None = None
        """When the first step began to wait for its data, and when it was done."""
        self.first_step_ns = 0
        """Net time of the first step, as recorded."""
        self.last_step_ns: int | None = None
        self.init: list[Piece] = []
        """From its start to the end of its first step."""
        self.loop = Pieces()
        """From there to the end of its last settled run of steps."""
        self.stints: list[RankStint] = []
        self.marks: list[Mark] = []
        self.startups: list[Startup] = []
        """The marks that tell of a graph of stages; as they are told, they would take ten times the space."""
        self.checkpoints: list[tuple[int, Saved | Restored]] = []
        """In order, each with the stint it belongs to: that in which it was saved, or that which began from it."""
        self.rollout_ns = 0
        """How long it collected experience to train on: part of its steps."""
        self.loads = 0
        """How many of them may be known again by what was saved before."""
        self._rule = rule or StallRule()
        self._pace = Pace()
        self._stalls = Stalls(self._rule)
        self._first_played_ns = 0
        self._rollouts: list[tuple[int, int]] = []
        """Those since the last run of steps."""
        self._names: dict[int, str] = {}
        # Spans cut time into `_pending` pieces, up to `_at`; from there on it belongs to `_winner`. A step run takes
        # the pending pieces inside it and settles them. `_floor` is the end of what is settled: it never changes.
        self._open: dict[int, Activity] = {}
        self._spans: list[tuple[SpanBegin, int]] = []
        self._open_spans: dict[int, SpanBegin] = {}
        self._winner: str = NOTHING
        self._pending: list[Piece] = []
        self._floor = self._at = 0
        self._restored: int | None = None
        self._has_loaded = False
        self._waits_anywhere = False
        self._early: list[Record] = []
        self.unroll: Callable[[], Timeline] | None = None
        """For a timeline restored from a roll-up: folds its records after all."""

    # --- folding ---

    def add(self, records: Iterable[Record], cell: Cell | None = None) -> None:
        """Takes in records in the order they were written, and the newest step cell."""
        for record in records if self.process is not None else self._from_process_on(records):
            _FOLDS[type(record)](self, record)
        if cell is not None:
            self.cell = cell
            self.last_ns = max(self.last_ns, cell.end_ns, cell.since_ns)

    def _from_process_on(self, records: Iterable[Record]) -> list[Record]:
        """The records, as soon as one of them says whose they are: that one first, even where it was not the first."""
        self._early += records
        at = next((at for at, record in enumerate(self._early) if isinstance(record, Process)), None)
        if at is None:
            return []
        early, self._early = self._early, []
        return [early[at], *early[:at], *early[at + 1 :]]

    def _process_begins(self, record: Process) -> None:
        self._lives(record)
        if self.process is None:
            self.process = record
            self._floor = self._at = min(record.started_ns, record.t_ns)
            self._advance(record.t_ns, Activity.IMPORTS)
        else:
            self.process = replace(
                self.process, role=record.role, rank=record.rank, local_rank=record.local_rank,
                world_size=record.world_size,
            )  # fmt: skip

    def _lives(self, record: Timed) -> None:
        if record.t_ns > self.last_ns:
            self.last_ns = record.t_ns

    def _names_span(self, record: Name) -> None:
        self._names[record.number] = record.text

    def _process_ends(self, record: ProcessEnd) -> None:
        self._lives(record)
        self.ended = record

    def _process_gone(self, record: ProcessGone) -> None:
        if record.name:
            self.others_gone.append(record)
        else:
            self.gone = self.gone or record

    def _scheduled(self, record: Scheduled) -> None:
        self._lives(record)
        self.scheduled = record

    def _marks(self, record: Mark) -> None:
        self._lives(record)
        if record.name == Told.STARTUP and (startup := startup_of(record.attrs)) is not None:
            self.startups.append(startup)
        else:
            self.marks.append(record)

    def _drops(self, record: Dropped) -> None:
        self._lives(record)
        self.dropped += record.count

    def _span_begins(self, record: SpanBegin) -> None:
        number, span, t_ns = record.name, record.span, record.t_ns
        self._open_spans[span] = record
        if t_ns > self.last_ns:
            self.last_ns = t_ns
        activity = _KNOWN.get(number) or _ACTIVITIES.get(self._names.get(number, ""))
        if activity is not None:
            if t_ns > self._at:
                self._advance(t_ns, self._winner)
            self._open[span] = activity
            if PRECEDENCE[activity] <= PRECEDENCE[self._winner]:
                self._winner = activity

    def _span_ends(self, record: SpanEnd) -> None:
        span, t_ns = record.span, record.t_ns
        begun = self._open_spans.pop(span, None)
        if begun is not None:
            self._spans.append((begun, t_ns))
        if t_ns > self.last_ns:
            self.last_ns = t_ns
        activity = self._open.pop(span, None)
        if activity is not None:
            if t_ns > self._at:
                self._advance(t_ns, self._winner)
            self._winner = winner(self._open.values()) if self._open else NOTHING
            if activity is Activity.PROCESS_GROUP_INIT and self.group_ready_ns is None:
                self.group_ready_ns = t_ns

    def _period(self, record: Period) -> None:
        number, begin, end = record.name, record.begin_ns, record.end_ns
        self._spans.append((SpanBegin(number, 0, record.thread, begin), end))
        if end > self.last_ns:
            self.last_ns = end
        activity = _KNOWN.get(number) or _ACTIVITIES.get(self._names.get(number, ""))
        if activity is None:
            if self._names.get(number) == ROLLOUT:
                self.rollout_ns += end - begin
                self._rollouts.append((begin, end))
        else:
            self._advance(end, self._winner)
            self._claim(max(begin, self._floor), end, activity)
            if activity is Activity.PROCESS_GROUP_INIT and self.group_ready_ns is None:
                self.group_ready_ns = end

    def _claim(self, begin: int, end: int, activity: Activity) -> None:
        """Gives `activity` what of a stretch is neither settled nor a stronger one's. Like neighbours become one piece,
        so that periods told over and over do not make each other dear."""
        pending = self._pending
        if begin >= end:
            return
        low = max(bisect_right(pending, begin, key=_begin) - 1, len(pending) - REACH, 0)
        high = bisect_left(pending, end, low, key=_begin)
        before, inside, after = _split(pending[low:high], begin, end)
        for piece in inside:
            what = activity if PRECEDENCE[activity] <= PRECEDENCE[piece.what] else piece.what
            last = before[-1] if before else None
            if last and last.what == what:
                before[-1] = last._replace(end_ns=piece.end_ns)
            else:
                before.append(piece._replace(what=what))
        pending[low:high] = before + after

    def _loop_begins(self, record: LoopBegin) -> None:
        self._lives(record)
        if record.after_warm_up:
            self._was_warm_up()
        stint = self.stints[-1] if self.stints else None
        goes_on = stint and stint.next == record.first and stint.batch_size == record.batch_size
        if not goes_on or self._restored is not None or self._has_loaded:
            self.stints.append(RankStint(record.first, record.first, record.batch_size, self._restored))
            self._restored, self._has_loaded = None, False

    def _was_warm_up(self) -> None:
        """All that was trained so far is part of the start."""
        pieces = [*self.init, *self.loop.items]
        self.init = [p if p.stint < 0 else Piece(p.begin_ns, p.end_ns, NOTHING) for p in pieces]
        self.loop, self.stints, self.checkpoints = Pieces(), [], []
        self._pace, self._stalls = Pace(), Stalls(self._rule)
        self.first_step = self.last_step_ns = None
        self.first_step_ns = 0

    def _checkpoint(self, record: Saved | Restored) -> None:
        self._lives(record)
        restored = isinstance(record, Restored)
        self.checkpoints.append((len(self.stints) - (not restored), record))
        self.loads += may_be_known(record)
        if record.step is None:
            self._has_loaded = True
        elif restored:
            self._restored = record.step
        elif self.stints and isinstance(record, Saved) and record.durable:
            self.stints[-1].saved = record.step

    def _advance(self, to_ns: int, what: str) -> None:
        """The time up to `to_ns` went to `what`, unless a step run claims it later."""
        if to_ns > self._at:
            self._pending.append(_piece((self._at, to_ns, what, -1, 0, 0)))
            self._at = to_ns

    def _steps(self, run: StepRun) -> None:
        first, next, begin, end = run.first, run.next, run.begin_ns, run.end_ns
        if begin < self._floor:
            begin = self._floor
        if end < begin:
            end = begin
        if next < first:
            next = first
        stints = self.stints
        if not stints or stints[-1].next != first:
            stints.append(RankStint(first, first))
            self._has_loaded = False
        stint = stints[-1]
        stint.next = next
        self._waits_anywhere = run.flags & WAITS_ANYWHERE != 0
        if begin == self._at and not self._pending:  # as always, unless a span came since the run before
            self._at = end
            pieces = self._lay_run(run, [_piece((begin, end, self._winner, -1, 0, 0))], len(stints) - 1, self._pace)
        else:
            self._advance(end, self._winner)
            pieces, inside, self._pending = _split(self._pending, begin, end)
            pieces += self._lay_run(run, inside, len(stints) - 1, self._pace)
        self._floor = self.last_step_ns = end
        played_ns, self._rollouts = self._played_ns(run), [each for each in self._rollouts if each[1] > end]
        if end > self.last_ns:
            self.last_ns = end
        if self.first_step is None:
            self.first_step = (begin, end)
            self.init.extend(pieces)
            self.first_step_ns = sum([p.end_ns - p.begin_ns for p in pieces if p.what is Loop.STEP])
            self._first_played_ns = played_ns
            return
        base, net = len(self.loop.items), self.loop.extend(pieces)
        steps, step_ns = stint.steps, stint.step_ns
        if not steps:
            steps.append(first)
            step_ns.append(0)
        if next > steps[-1]:
            steps.append(next)
            step_ns.append(step_ns[-1] + net)
        elif net:  # a run of no steps: its time goes to the step before it
            step_ns[-1] += net
        if run.count <= 1:
            self._stalls.add(self.loop, stints, base, first, self._pace, played_ns)

    def _played_ns(self, run: StepRun | Cell) -> int:
        """How much of a run is known to have been spent on rollouts."""
        inside = [(max(low, run.begin_ns), min(high, run.end_ns)) for low, high in self._rollouts]
        return sum(high - low for low, high in inside if high > low)

    def _lay_run(self, run: StepRun | Cell, inside: list[Piece], stint: int, pace: Pace) -> list[Piece]:
        """The run's time: what spans claim, then in what is left the waits for data, the steps, and what stalled."""
        count, data_ns = run.count, run.data_ns
        whole = inside[0] if len(inside) == 1 and PRECEDENCE[inside[0].what] >= STEP_PLACE else None
        free_ns = whole[1] - whole[0] if whole else _free_ns(inside)
        if data_ns <= 0:
            data_ns = 0
        elif count > 1 or self._waits_anywhere or (whole and whole[0] == run.begin_ns):
            data_ns = data_ns if data_ns < free_ns else free_ns
        else:
            data_ns = _free_ns(_split(inside, run.begin_ns, run.begin_ns + data_ns)[1])
        step_ns = free_ns - data_ns
        stall_ns = 0
        own_ns = max(step_ns - self._played_ns(run), 0)
        if count <= 1:
            count = 1
            stall_ns = pace.stalled_ns(own_ns, self._rule)
        if step_ns or count > 1 or self.first_step is not None:  # else nobody saw when the first one began
            pace.add(own_ns // count, count)
        first, next = run.first, run.next
        if next < first:
            next = first
        if not whole:
            shares = [(Activity.DATA_WAIT, data_ns), (Loop.STEP, step_ns - stall_ns), (Loop.STALL, stall_ns)]
            return _fill(inside, shares, stint, first, next)
        begin, end = whole[0], whole[1]
        stepped, stalled = begin + data_ns, end - stall_ns
        pieces = [_piece((begin, stepped, Activity.DATA_WAIT, -1, 0, 0))] if data_ns else []
        if stalled > stepped:
            pieces.append(_piece((stepped, stalled, Loop.STEP, stint, float(first), float(next))))
        if stall_ns:
            pieces.append(_piece((stalled, end, Loop.STALL, -1, 0, 0)))
        return pieces

    def settle(self) -> None:
        """No more records will come: judge what had to wait for more."""
        if self.unroll is None and self._pace.steps >= LEAST_KNOWN:
            self._stalls.judge(self.loop, self.stints, self._pace)

    # --- looking ---

    def bars(self) -> list[Bar]:
        """Every span as it was recorded: those that ended, then those under way."""
        if self.unroll is not None:
            return self.unroll().bars()
        ended = [self._bar(begun, max(end_ns, begun.t_ns)) for begun, end_ns in self._spans]
        return ended + [self._bar(begun, None) for begun in self._open_spans.values()]

    def _bar(self, begun: SpanBegin, end_ns: int | None) -> Bar:
        name = _KNOWN.get(begun.name) or self._names.get(begun.name, "?")
        return Bar(str(name), begun.thread, begun.t_ns, end_ns)

    def look(self, until_ns: int, alive: bool) -> "Look":
        """The whole timeline up to `until_ns`: the settled part, and over it what the cell and open spans tell."""
        if not alive:
            self.settle()
        look = Look(self._warm_init(), self.loop, [], list(self._pending))
        if until_ns > self._at:
            look.tail.append(Piece(self._at, until_ns, self._winner))
        cell, floor = self.cell, self._floor
        if cell is None or (cell.since_ns == -1 and not cell.count):
            return look
        pace = self._pace.copy()
        if cell.count and floor <= cell.begin_ns and cell.end_ns <= until_ns:
            before, inside, look.tail = _split(look.tail, cell.begin_ns, cell.end_ns)
            look.open_run = before + self._lay_run(cell, inside, self._stint_of(cell), pace)
            floor = cell.end_ns
        if (cell.since_ns >= 0 or cell.since_ns == BETWEEN) and floor <= until_ns:
            look.open_run += self._lay_open_step(cell, floor, look.tail, until_ns, alive, pace)
            look.tail = []
        return look

    def open_stint(self) -> RankStint | None:
        """The newest stint with the steps that so far only the cell knows of."""
        stint, cell = self.stints[-1] if self.stints else None, self.cell
        if cell is None or not cell.count or cell.begin_ns < self._floor:
            return stint
        if stint is None or stint.next != cell.first:
            return RankStint(cell.first, cell.next)
        return RankStint(stint.first, cell.next, stint.batch_size, stint.restored, stint.saved)

    def all_stints(self) -> list[RankStint]:
        """Every stint, with the steps that so far only the cell knows of."""
        newest = self.open_stint()
        if newest is None:
            return self.stints
        known = self.stints[:-1] if self.stints and newest.first == self.stints[-1].first else self.stints
        return [*known, newest]

    def _warm_init(self) -> list[Piece]:
        """The pieces up to the first step's end. A first step far longer than a typical one was warming up; one of no
        time at all began at a moment that nobody saw."""
        if not self.loop.sums or self.unroll is not None:
            return self.init
        if not self.first_step_ns and self.first_step is not None and self.first_step[0] == self.first_step[1]:
            return self._with_first_step(max(self._pace.typical_ns, self._stalls.first_step_ns(self.stints[0].first)))
        warming = self._pace.stalled_ns(self.first_step_ns - self._first_played_ns, self._rule)
        if not warming:
            return self.init
        pieces = []
        for piece in self.init:
            if piece.what is Loop.STEP and warming:
                until = min(piece.begin_ns + warming, piece.end_ns)
                warming -= until - piece.begin_ns
                pieces.append(Piece(piece.begin_ns, until, NOTHING))
                if until == piece.end_ns:
                    continue
                piece = piece._replace(begin_ns=until)
            pieces.append(piece)
        return pieces

    def _with_first_step(self, typical_ns: int) -> list[Piece]:
        """The first step taken to be a typical one, as far as nothing else is known of the time before its end. It may
        have compiled and imported; whatever else happened came before it."""
        left, at, pieces = typical_ns, len(self.init), []
        first = self.stints[0].first
        while at and left:
            at -= 1
            piece = self.init[at]
            if piece.what == NOTHING:
                begin = max(piece.begin_ns, piece.end_ns - left)
                until = first + left / typical_ns
                left -= piece.end_ns - begin
                pieces.append(Piece(begin, piece.end_ns, Loop.STEP, 0, first + left / typical_ns, until))
                if begin > piece.begin_ns:
                    pieces.append(piece._replace(end_ns=begin))
            else:
                pieces.append(piece)
                if piece.what not in (Activity.PT2_COMPILATION, Activity.IMPORTS):
                    break
        return self.init[:at] + pieces[::-1]

    def _stint_of(self, cell: Cell) -> int:
        return len(self.stints) - 1 if self.stints and self.stints[-1].next == cell.first else len(self.stints)

    def _lay_open_step(
        self, cell: Cell, floor: int, pending: list[Piece], until_ns: int, alive: bool, pace: Pace
    ) -> list[Piece]:
        """The step under way: its wait for data, then the step itself, cut short if the process is dead."""
        begun = cell.end_ns if cell.since_ns == BETWEEN else cell.since_ns
        since = min(max(begun, floor), until_ns) if begun > 0 else until_ns
        before, waiting, stepping = _split(pending, floor, since)
        pieces = before + _fill(waiting, [(Activity.DATA_WAIT, _free_ns(waiting))], -1, 0, 0)
        free_ns = _free_ns(stepping)
        stall_ns = pace.stalled_ns(free_ns, self._rule)
        what = Loop.STEP if alive else Loop.CUT_STEP
        stint = max(self._stint_of(cell), 0)
        shares = [(what, free_ns - stall_ns), (Loop.STALL, stall_ns)]
        return pieces + _fill(stepping, shares, stint, cell.next, cell.next)


@dataclass(slots=True)
class Look:
    """A timeline as it stands at one moment: its pieces, in four lists that follow one another."""

    init: list[Piece]
    """Until the first step is done."""
    loop: Pieces
    open_run: list[Piece]
    """What the step cell tells: the run so far, and the step under way."""
    tail: list[Piece]
    """After the last step; or, without any step, all there is."""


def cut(piece: Piece, begin_ns: int, end_ns: int) -> Piece:
    """The part of a piece inside a stretch that it overlaps; steps are cut in proportion."""
    begin, end = max(piece.begin_ns, begin_ns), min(piece.end_ns, end_ns)
    if (begin, end) == piece[:2]:
        return piece
    per_ns = (piece.next - piece.first) / (piece.end_ns - piece.begin_ns)
    first = piece.first + (begin - piece.begin_ns) * per_ns
    return piece._replace(begin_ns=begin, end_ns=end, first=first, next=piece.next - (piece.end_ns - end) * per_ns)


def _count(sums: dict[str | int, int], piece: Piece, ns: int) -> None:
    key = piece.stint if piece.what is Loop.STEP else piece.what
    sums[key] = sums.get(key, 0) + ns


def _split(pieces: list[Piece], begin: int, end: int) -> tuple[list[Piece], list[Piece], list[Piece]]:
    """The pieces before, inside and after a stretch, cut where they cross its ends."""
    before: list[Piece] = []
    inside: list[Piece] = []
    after: list[Piece] = []
    for piece in pieces:
        low, high = piece.begin_ns, piece.end_ns
        if high <= begin:
            before.append(piece)
            continue
        if begin <= low and high <= end:
            inside.append(piece)
            continue
        if low < begin:
            before.append(piece._replace(end_ns=min(high, begin)))
        if max(low, begin) < min(high, end):
            inside.append(piece._replace(begin_ns=max(low, begin), end_ns=min(high, end)))
        if high > end:
            after.append(piece._replace(begin_ns=max(low, end)))
    return before, inside, after


def _free_ns(pieces: list[Piece]) -> int:
    return sum([p.end_ns - p.begin_ns for p in pieces if PRECEDENCE[p.what] >= STEP_PLACE])


def _fill(pieces: list[Piece], shares: Sequence[tuple[str, int]], stint: int, first: float, next: float) -> list[Piece]:
    """Gives the time that no stronger activity claims to `shares`, in order; steps are spread over their share."""
    filled: list[Piece] = []
    left = [(what, share) for what, share in shares if share]
    step_ns = dict(shares).get(Loop.STEP, 0)
    done_ns = at_share = 0
    for piece in pieces:
        if PRECEDENCE[piece.what] < STEP_PLACE:
            filled.append(piece)
            continue
        at, end = piece.begin_ns, piece.end_ns
        while at < end:
            what, share = left[at_share]
            took = min(share, end - at)
            if what is Loop.STEP:
                a = first + (next - first) * done_ns / step_ns
                done_ns += took
                filled.append(Piece(at, at + took, what, stint, a, first + (next - first) * done_ns / step_ns))
            else:
                filled.append(Piece(at, at + took, what))
            at += took
            if took == share:
                at_share += 1
            else:
                left[at_share] = (what, share - took)
    return filled


_FOLDS: dict[type, Callable[[Timeline, Any], None]] = {
    Name: Timeline._names_span,
    SpanBegin: Timeline._span_begins,
    SpanEnd: Timeline._span_ends,
    StepRun: Timeline._steps,
    Period: Timeline._period,
    Process: Timeline._process_begins,
    ProcessEnd: Timeline._process_ends,
    ProcessGone: Timeline._process_gone,
    Scheduled: Timeline._scheduled,
    LoopBegin: Timeline._loop_begins,
    Saved: Timeline._checkpoint,
    Restored: Timeline._checkpoint,
    Mark: Timeline._marks,
    Dropped: Timeline._drops,
}
