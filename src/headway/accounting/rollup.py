"""A finished process's timeline in about a kilobyte, so that a job of 8,192 ranks and 50 attempts stays cheap to read.

A node's collector folds each process once, when it has ended, and delivers the result beside the records. Whoever reads
the job restores the fold instead of folding again. Only the loop's single pieces are left out; they are folded from the
records when somebody looks inside the loop, which a report does for the few ranks that determined the job's time.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable
from sys import intern
from typing import Any

from headway.accounting.rules import NOTHING, Loop, Pace, StallRule
from headway.accounting.timeline import Piece, Pieces, RankStint, Timeline, may_be_known
from headway.accounting.waterfall import restored as restored_startup
from headway.events.journal import Cell
from headway.events.vocabulary import (
    Activity,
    Mark,
    Process,
    ProcessEnd,
    ProcessGone,
    Record,
    Restored,
    Saved,
    Scheduled,
    Told,
)

VERSION = 6
"""Changes with anything that changes what a fold gives. Another version's roll-ups are not used."""

MOST_POINTS = 512
"""Of a stint with more runs, only so many points of the steps' time are kept; between them it is taken as even."""

Load = Callable[[], tuple[Iterable[Record], Cell | None]]

_WHAT: dict[str, str] = {NOTHING: NOTHING} | {str(what): what for what in (*Activity, *Loop)}
_CHECKPOINTS: dict[str, type[Saved] | type[Restored]] = {"s": Saved, "r": Restored}


_TOLD = (
    Told.HOOK_OFF, Told.ASYNCHRONOUS_DEVICE, Told.DECISION, Told.COMPILE_CACHE, Told.ANCHOR, Told.PUBLISHED
)  # fmt: skip
"""Marks that a report speaks of whichever rank they are of; for others the records are folded."""


def roll_up(records: Iterable[Record], cell: Cell | None) -> bytes:
    """The fold of a finished process; empty if its records do not say whose they are."""
    timeline = Timeline()
    timeline.add(records, cell)
    timeline.settle()
    if timeline.process is None:
        return b""
    loop = timeline.loop
    data = {
        "version": VERSION,
        "process": {key: value for key, value in dataclasses.asdict(timeline.process).items() if value or value == 0},
        "ended": timeline.ended and dataclasses.asdict(timeline.ended),
        "gone": timeline.gone and dataclasses.asdict(timeline.gone),
        "scheduled": timeline.scheduled and dataclasses.asdict(timeline.scheduled),
        "cell": timeline.cell and dataclasses.astuple(timeline.cell),
        "dropped": timeline.dropped,
        "rollout": timeline.rollout_ns,
        "ready": timeline.group_ready_ns,
        "last": timeline.last_ns,
        "first_step": timeline.first_step,
        "first_step_ns": timeline.first_step_ns,
        "last_step": timeline.last_step_ns,
        "init": _trimmed(timeline._warm_init()),
        "loop": [loop.items[0].begin_ns, loop.items[-1].end_ns] if loop.items else None,
        "sums": list(loop.sums.items()),
        "stints": [_thinned(stint) for stint in timeline.stints],
        "checkpoints": [_checkpoint(at, record) for at, record in timeline.checkpoints],
        "open": [timeline._at, timeline._floor, timeline._winner, _trimmed(timeline._pending)],
        "waits_anywhere": timeline._waits_anywhere,
        "others_gone": [dataclasses.asdict(gone) for gone in timeline.others_gone],
        "told": [[m.t_ns, m.name, m.attrs] for m in timeline.marks if m.name in _TOLD],
        "startups": [startup.rolled_up() for startup in timeline.startups],
        "pace": timeline._pace.condensed(),
    }  # fmt: skip
    return json.dumps(data, separators=(",", ":")).encode()


def restore(data: bytes, load: Load, rule: StallRule | None = None) -> Timeline | None:
    """The timeline that was rolled up; None if another version did it. `load` gives the records, should they be needed.

    A stall rule of one's own changes the fold, so it needs the records as well.
    """
    try:
        told = json.loads(data)
        if told["version"] != VERSION or rule not in (None, StallRule()):
            return None
        return _restored(told, load)
    except (KeyError, TypeError, ValueError):
        return None


def _restored(told: dict[str, Any], load: Load) -> Timeline:
    timeline = Timeline()
    process: dict[str, Any] = told["process"]
    process = {key: intern(value) if type(value) is str else value for key, value in process.items()}
    timeline.process = Process(**process)  # all ranks have the same program, command and launcher: one copy will do
    timeline.ended = ProcessEnd(**told["ended"]) if told["ended"] else None
    timeline.gone = ProcessGone(**told["gone"]) if told["gone"] else None
    timeline.others_gone = [ProcessGone(**gone) for gone in told["others_gone"]]
    timeline.scheduled = Scheduled(**told["scheduled"]) if told["scheduled"] else None
    timeline.cell = Cell(*told["cell"]) if told["cell"] else None
    timeline.dropped, timeline.group_ready_ns, timeline.last_ns = told["dropped"], told["ready"], told["last"]
    timeline.rollout_ns = told["rollout"]
    timeline.first_step = tuple(told["first_step"]) if told["first_step"] else None
    timeline.first_step_ns, timeline.last_step_ns = told["first_step_ns"], told["last_step"]
    timeline.init = _pieces(told["init"])
    timeline.stints = [RankStint(*stint) for stint in told["stints"]]
    timeline.checkpoints = [(at, _CHECKPOINTS[kind](**record)) for at, kind, record in told["checkpoints"]]
    timeline.loads = sum(may_be_known(record) for _, record in timeline.checkpoints)
    timeline._waits_anywhere = told["waits_anywhere"]
    timeline.marks = [Mark(t_ns=t_ns, name=name, attrs=attrs) for t_ns, name, attrs in told["told"]]
    timeline._at, timeline._floor, winner, pending = told["open"]
    timeline._winner, timeline._pending = _WHAT[winner], _pieces(pending)
    timeline.startups = [restored_startup(startup) for startup in told["startups"]]
    timeline._pace = Pace(told["pace"])
    timeline.unroll = _Unroll(load)
    if told["loop"]:
        sums = {_WHAT[what] if isinstance(what, str) else what: ns for what, ns in told["sums"]}
        begin_ns, end_ns = told["loop"]
        timeline.loop = _RolledPieces(sums, begin_ns, end_ns, timeline.unroll)
    return timeline


def _checkpoint(at: int, record: Saved | Restored) -> tuple[Any, ...]:
    told = {key: value for key, value in dataclasses.asdict(record).items() if value != ""}
    return at, "s" if isinstance(record, Saved) else "r", told


def _trimmed(pieces: list[Piece]) -> list[tuple[Any, ...]]:
    """Only steps have more to say than when and what."""
    return [tuple(piece) if piece.what is Loop.STEP else tuple(piece[:3]) for piece in pieces]


def _pieces(told: list[list[Any]]) -> list[Piece]:
    return [Piece(begin, end, _WHAT[what], *steps) for begin, end, what, *steps in told]


def _thinned(stint: RankStint) -> tuple[Any, ...]:
    every = -(-len(stint.steps) // MOST_POINTS) or 1
    kept = sorted({*range(0, len(stint.steps), every), len(stint.steps) - 1} - {-1})
    steps, step_ns = [stint.steps[at] for at in kept], [stint.step_ns[at] for at in kept]
    return stint.first, stint.next, stint.batch_size, stint.restored, stint.saved, steps, step_ns


class _Unroll:
    """Folds the records when first asked."""

    __slots__ = ("_load", "_timeline")

    def __init__(self, load: Load) -> None:
        self._load = load
        self._timeline: Timeline | None = None

    def __call__(self) -> Timeline:
        if self._timeline is None:
            self._timeline = Timeline()
            self._timeline.add(*self._load())
            self._timeline.settle()
        return self._timeline


class _RolledPieces(Pieces):
    """The loop's sums; its pieces when something is asked about a part of it."""

    __slots__ = ("_begin_ns", "_end_ns", "_unroll")

    def __init__(self, sums: dict[str | int, int], begin_ns: int, end_ns: int, unroll: _Unroll) -> None:
        self.sums = sums
        self._begin_ns, self._end_ns, self._unroll = begin_ns, end_ns, unroll

    @property
    def items(self) -> list[Piece]:  # type: ignore[override]
        return self._unroll().loop.items

    def within(self, begin_ns: int, end_ns: int) -> dict[str | int, int]:
        """Sums over a stretch."""
        return dict(self.sums) if self._covers(begin_ns, end_ns) else super().within(begin_ns, end_ns)

    def steps_within(self, begin_ns: int, end_ns: int) -> dict[int, tuple[float, float]]:
        """From where to where the stints at the ends of a stretch reach inside it."""
        return {} if self._covers(begin_ns, end_ns) else super().steps_within(begin_ns, end_ns)

    def _covers(self, begin_ns: int, end_ns: int) -> bool:
        return begin_ns <= self._begin_ns and self._end_ns <= end_ns
