"""What was published of a job, by processes of their own that ran beside or after it.

A publisher is neither a rank nor a launcher: it begins and ends no attempt, it fails none, and its time is no part of
the job's. What it gives back is the time for which the trainer's accelerators would have waited, had the trainer
published by itself and at the same speed: the publisher's wall time, on each of them.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headway.accounting.attempts import Instant
from headway.accounting.timeline import Timeline
from headway.events.vocabulary import Process, Told

ROLE = "publisher"
ENDS = ("published", "rejected", "failed")
"""What a publisher can say became of it."""

Said = dict[str, Any]


class Axis(NamedTuple):
    """How to place a process on the job's time axis, and where on it is now."""

    offsets: Mapping[str, int]
    """For each boot that the job ran on: what adds to its monotonic clock to give job time."""
    now: Instant

    def offset(self, process: Process) -> int:
        """Another machine's clock is believed."""
        return self.offsets.get(process.boot, process.wall_ns - process.t_ns)

    def now_ns(self, process: Process) -> int:
        return self.now.t_ns + self.offset(process) if process.boot == self.now.boot else self.now.wall_ns


@dataclass(frozen=True)
class Try:
    """One publisher's life, in job time."""

    begin_ns: int
    end_ns: int
    """Its last sign; now, while it lives."""
    alive: bool
    node: str
    timeline: Timeline
    offset_ns: int

    @property
    def told(self) -> list[Said]:
        """What it said became of it, in order."""
        return [mark.attrs for mark in self.timeline.marks if mark.name == Told.PUBLISHED]

    @property
    def bars(self) -> list[tuple[str, int, int, int]]:
        """Every span as recorded: name, thread, begin and end in job time."""
        found = []
        for bar in self.timeline.bars():
            end_ns = self.end_ns if bar.end_ns is None else bar.end_ns + self.offset_ns
            begin_ns = bar.begin_ns + self.offset_ns
            found.append((bar.name, bar.thread, begin_ns, max(end_ns, begin_ns)))
        return found


@dataclass(frozen=True)
class Publication:
    """One checkpoint, and what became of it."""

    id: str
    outcome: str
    """`published`, `rejected`, `failed`, `running`, `interrupted`, or `waiting` for a publisher to begin."""
    step: int | None = None
    recipe: str = ""
    to: str = ""
    runner: str = ""
    version: str = ""
    why: str = ""
    """Why it was rejected, failed, or was not submitted."""
    submitted: bool = True
    """Whether somebody took it over from the trainer."""
    handover_s: float | None = None
    """What the trainer took to hand it over; None if it did not."""
    accelerators: int = 0
    """The trainer's."""
    device: str = ""
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds that each step took when it was done."""
    tries: tuple[Try, ...] = ()

    @property
    def begin_ns(self) -> int | None:
        """When its first publisher began, in job time."""
        return self.tries[0].begin_ns if self.tries else None

    @property
    def end_ns(self) -> int | None:
        """The last sign of any of them."""
        return max((each.end_ns for each in self.tries), default=None)

    @property
    def took_ns(self) -> int:
        """The wall time of all its publishers."""
        return sum(each.end_ns - each.begin_ns for each in self.tries)

    @property
    def saved_ns(self) -> int:
        """Accelerator time that was not spent waiting for it; none before something is published."""
        return self.took_ns * self.accelerators if self.outcome == "published" else 0

    def pieces(self) -> list[tuple[int, int, str]]:
        """Its publishers' time in order, none twice: begin, end and the outermost span, or none."""
        pieces, at = [], 0
        for each in self.tries:
            at = max(at, each.begin_ns)
            for name, _, begin, end in sorted(each.bars, key=lambda bar: (bar[2], -bar[3])):
                begin, end = max(begin, at), min(end, each.end_ns)
                if begin < end:
                    pieces += [(at, begin, "")] if begin > at else []
                    pieces.append((begin, end, name))
                    at = end
            pieces += [(at, each.end_ns, "")] if each.end_ns > at else []
            at = max(at, each.end_ns)
        return pieces


def is_publisher(timeline: Timeline) -> bool:
    """Whether a process's time is no part of the job's, since all it did was publish."""
    return timeline.process is not None and timeline.process.role == ROLE


def publications(
    timelines: Mapping[str, Timeline], axis: Axis, alive: Collection[str] = (), accelerators: int = 0
) -> list[Publication]:
    """All that was published of a job, or was to be, in order of time. `accelerators` is how many the trainer has, for
    publishers that do not say."""
    anchors = _anchors(timelines.values(), axis)
    tries: dict[str, list[Try]] = {}
    for name, timeline in timelines.items():
        process = timeline.process
        if process is not None and process.role == ROLE:
            each = _try(timeline, process, axis, name in alive)
            tries.setdefault(_id(each, anchors) or name, []).append(each)
    begun = {id_: min(each.begin_ns for each in mine) for id_, mine in tries.items()}
    when = {id_: at_ns for id_, (at_ns, _) in anchors.items()}
    found = sorted((when.get(id_, begun.get(id_, 0)), id_) for id_ in when.keys() | begun.keys())
    return [_publication(id_, anchors.get(id_, (0, None))[1], tries.get(id_, []), accelerators) for _, id_ in found]


def _anchors(timelines: Iterable[Timeline], axis: Axis) -> dict[str, tuple[int, Said]]:
    """What trainers handed over, by id, and when; of several words on one, the last."""
    found: dict[str, tuple[int, Said]] = {}
    for timeline in timelines:
        for mark in timeline.marks:
            if mark.name == Told.ANCHOR and timeline.process is not None:
                id_, at_ns = str(mark.attrs.get("id", "")), mark.t_ns + axis.offset(timeline.process)
                if id_ not in found or found[id_][0] <= at_ns:
                    found[id_] = at_ns, mark.attrs
    return found


def _try(timeline: Timeline, process: Process, axis: Axis, alive: bool) -> Try:
    offset = axis.offset(process)
    begin = min(process.started_ns, process.t_ns) + offset
    gone = timeline.gone.t_ns if timeline.gone else 0
    end = axis.now_ns(process) if alive else max(timeline.last_ns, gone, process.t_ns) + offset
    return Try(begin, max(begin, end), alive, process.node, timeline, offset)


def _id(each: Try, anchors: Mapping[str, tuple[int, Said]]) -> str:
    """Which publication a publisher worked on: the one it names; if it had no time to, the last handed over by then."""
    for told in reversed(each.told):
        if told.get("id"):
            return str(told["id"])
    at = {id_: at_ns for id_, (at_ns, _) in anchors.items() if at_ns <= each.begin_ns}
    return max(at or anchors, key=lambda id_: at.get(id_, 0), default="")


def _publication(id_: str, anchor: Said | None, tries: list[Try], accelerators: int) -> Publication:
    tries = sorted(tries, key=lambda each: (each.begin_ns, each.end_ns))
    said = [told for each in tries for told in each.told]
    last = next((told for told in reversed(said) if told.get("outcome") == "published"), said[-1] if said else {})
    about = {
        **(anchor or {}),
        **{key: value for told in said for key, value in told.items() if value not in ("", None)},
    }
    outcome, why = _became(tries, last)
    submitted = bool(tries) or anchor is None or anchor.get("submitted") is not False
    if not submitted:
        why = str((anchor or {}).get("why") or "")
    steps = last.get("steps")
    return Publication(
        id=id_, outcome=outcome, why=why, submitted=submitted, tries=tuple(tries),
        step=_whole(about.get("step")), recipe=str(about.get("recipe") or ""), to=str(about.get("to") or ""),
        runner=str(about.get("runner") or ""), version=str(last.get("version") or ""),
        handover_s=None if anchor is None else _seconds(anchor.get("seconds")),
        accelerators=max(_whole(about.get("accelerators")) or accelerators, 0), device=str(about.get("device") or ""),
        steps={str(name): _seconds(took) for name, took in steps.items()} if isinstance(steps, dict) else {},
    )  # fmt: skip


def _became(tries: list[Try], last: Said) -> tuple[str, str]:
    """The outcome, and why. What is published stays so, whatever becomes of those who try again."""
    if not tries:
        return "waiting", ""
    if last.get("outcome") == "published":
        return "published", ""
    final = next((told for told in reversed(tries[-1].told) if told.get("outcome") in ENDS), None)
    if tries[-1].alive and final is None:
        return "running", ""
    if final is not None:
        return str(final["outcome"]), str(final.get("why") or "")
    ended = tries[-1].timeline.ended
    return ("failed", ended.error) if ended is not None and ended.error else ("interrupted", "")


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
