"""The rules of the ledger, one function or table each: which bucket time goes to, and which steps were new."""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from headway.events.vocabulary import STAGES, Activity


class Bucket(StrEnum):
    """Where a second of a job can go. The values are the keys in every output."""

    START_SCHEDULING = "start.scheduling"
    START_HARDWARE_SETUP = "start.hardware_setup"
    START_LAUNCHER_INIT = "start.launcher_init"
    START_TRAINER_INIT = "start.trainer_init"
    START_PT2_COMPILATION = "start.pt2_compilation"
    RECOVER_DETECTION = "recover.detection"
    RECOVER_TEARDOWN = "recover.teardown"
    RECOVER_BACKOFF = "recover.backoff"
    RECOVER_SCHEDULING = "recover.scheduling"
    RECOVER_RENDEZVOUS = "recover.rendezvous"
    RECOVER_LAUNCHER_INIT = "recover.launcher_init"
    RECOVER_TRAINER_INIT = "recover.trainer_init"
    RECOVER_CHECKPOINT_RESTORE = "recover.checkpoint_restore"
    RECOVER_DATA_SKIP = "recover.data_skip"
    RECOVER_PT2_COMPILATION = "recover.pt2_compilation"
    TRAINING_EFFECTIVE = "training.effective"
    WASTE_REPEATED_STEPS = "waste.repeated_steps"
    WASTE_UNSAVED_STEPS = "waste.unsaved_steps"
    WASTE_CHECKPOINT_BLOCKING = "waste.checkpoint_blocking"
    WASTE_DATA_WAIT = "waste.data_wait"
    WASTE_RECOMPILATION = "waste.recompilation"
    WASTE_EVALUATION = "waste.evaluation"
    WASTE_STALL = "waste.stall"
    SHUTDOWN_FINAL_CHECKPOINT = "shutdown.final_checkpoint"
    SHUTDOWN_PUBLISH = "shutdown.publish"
    SHUTDOWN_TEARDOWN = "shutdown.teardown"
    UNATTRIBUTED = "unattributed"

    @property
    def is_failure(self) -> bool:
        """Whether the time counts as Failure%; of the rest, all but effective training is Idleness%."""
        return self.startswith("recover.") or self in (Bucket.WASTE_REPEATED_STEPS, Bucket.WASTE_UNSAVED_STEPS)


class Loop(StrEnum):
    """What a training loop does that no span says."""

    STEP = "step"
    STALL = "stall"
    CUT_STEP = "cut_step"
    """A step that its process did not live to finish."""


NOTHING = ""
"""No span and no step covers the time."""

OTHER = "other"
"""The stage of trainer initialisation that no span names."""

_FAILURE_PHASES = (
    Activity.SCHEDULING, Activity.HARDWARE_SETUP, Activity.DETECTION, Activity.TEARDOWN, Activity.BACKOFF,
    Activity.RENDEZVOUS,
)  # fmt: skip

_PRECEDENCE: tuple[tuple[str, ...], ...] = (
    _FAILURE_PHASES,
    (Activity.CHECKPOINT_BLOCKING,),
    (Activity.CHECKPOINT_RESTORE,),
    (Activity.PT2_COMPILATION,),
    (Activity.DATA_WAIT, Activity.DATA_SKIP),
    (Activity.EVALUATION, Activity.PUBLISH, Activity.LEFT_OUT),
    (Activity.UPLOAD,),
    (Loop.STALL, Loop.STEP, Loop.CUT_STEP),  # a stall is what no span explains, so it only ever has a step's own time
    STAGES,
    (Activity.LAUNCHER_INIT,),
    (NOTHING,),
)
PRECEDENCE: dict[str, int] = {what: place for place, group in enumerate(_PRECEDENCE) for what in group}
"""Where activities overlap on one rank, the lowest number wins; among equals, the one that began last."""


def winner(open_activities: Iterable[str]) -> str:
    """The activity that time belongs to, of those under way in the order they began."""
    best = NOTHING
    for what in open_activities:
        if PRECEDENCE[what] <= PRECEDENCE[best]:
            best = what
    return best


class Part(Enum):
    """The part of a process's life that a piece of time lies in."""

    INIT = "init"
    """Until its first step is done."""
    LOOP = "loop"
    TAIL = "tail"
    """After its last step."""


Key = tuple[Bucket, str]
"""A bucket, and inside trainer initialisation the stage."""


def bucket(what: str, part: Part, first_attempt: bool, last_attempt: bool) -> Key:
    """The bucket of time spent on `what`. Steps go by lineage instead (`label_steps`)."""
    B = Bucket
    init = B.START_TRAINER_INIT if first_attempt else B.RECOVER_TRAINER_INIT
    match what:
        case Activity.SCHEDULING:
            return (B.START_SCHEDULING if first_attempt else B.RECOVER_SCHEDULING, "")
        case Activity.HARDWARE_SETUP:
            return (B.START_HARDWARE_SETUP if first_attempt else B.RECOVER_LAUNCHER_INIT, "")
        case Activity.LAUNCHER_INIT:
            return (B.START_LAUNCHER_INIT if first_attempt else B.RECOVER_LAUNCHER_INIT, "")
        case Activity.RENDEZVOUS:
            return (B.START_LAUNCHER_INIT if first_attempt else B.RECOVER_RENDEZVOUS, "")
        case Activity.TEARDOWN if part is Part.TAIL and last_attempt:
            return (B.SHUTDOWN_TEARDOWN, "")
        case Activity.DETECTION | Activity.TEARDOWN | Activity.BACKOFF:
            return (B(f"recover.{what}"), "")
        case Activity.CHECKPOINT_BLOCKING | Activity.UPLOAD:
            final = part is Part.TAIL and last_attempt
            return (B.SHUTDOWN_FINAL_CHECKPOINT if final else B.WASTE_CHECKPOINT_BLOCKING, "")
        case Activity.CHECKPOINT_RESTORE if part is Part.TAIL and last_attempt:
            return (B.SHUTDOWN_TEARDOWN, "")
        case Activity.CHECKPOINT_RESTORE if part is Part.INIT and first_attempt:
            return (init, Activity.PRE_TRAIN)
        case Activity.CHECKPOINT_RESTORE:
            return (B.RECOVER_CHECKPOINT_RESTORE, "")
        case Activity.PT2_COMPILATION if part is Part.INIT:
            return (B.START_PT2_COMPILATION if first_attempt else B.RECOVER_PT2_COMPILATION, "")
        case Activity.PT2_COMPILATION:
            return (B.WASTE_RECOMPILATION, "")
        case Loop.STALL:
            return (B.WASTE_STALL, "")
        case Loop.CUT_STEP | Activity.LEFT_OUT:
            return (B.WASTE_UNSAVED_STEPS, "")
        case Activity.DATA_SKIP if not first_attempt or part is not Part.INIT:
            return (B.RECOVER_DATA_SKIP, "")
        case Activity.DATA_WAIT | Activity.DATA_SKIP if part is Part.INIT:
            return (init, Activity.GET_FIRST_BATCH_DATA)
        case Activity.DATA_WAIT:
            return (B.WASTE_DATA_WAIT, "")
        case Activity.EVALUATION:
            return (B.WASTE_EVALUATION, "")
        case Activity.PUBLISH:
            return (B.SHUTDOWN_PUBLISH, "")
    if part is Part.INIT:
        return (init, what or OTHER)
    if part is Part.TAIL:
        return (B.SHUTDOWN_TEARDOWN if last_attempt else B.RECOVER_TEARDOWN, "")
    return (B.UNATTRIBUTED, "")


# --- stalls --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StallRule:
    """When a step has stalled: then all it took beyond the typical step is lost."""

    times: float = 10.0
    """It took more than this many typical steps …"""
    beyond_s: float = 1.0
    """… and more than this beyond one …"""
    spread: float = 3.0
    """… and more than this many times what the slowest 5% of recent steps take: ragged batches are not stalls."""
    early_steps: int = 20
    """Until so many steps are known, nobody can tell what is typical …"""
    early_s: float = 30.0
    """… and it takes this much beyond."""

    def limit_ns(self, typical_ns: int, slow_ns: int, steps: int) -> int:
        """The longest a step may take without having stalled."""
        beyond_s = self.beyond_s if steps >= self.early_steps else max(self.early_s, self.beyond_s)
        return int(max(self.times * typical_ns, typical_ns + beyond_s * 1e9, self.spread * slow_ns))


class Pace:
    """How long steps have taken of late: the last 64 runs, each weighing as many as its steps."""

    __slots__ = ("_least", "_runs")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._runs = [(step_ns, count) for step_ns, count in runs]
        self._least = min((step_ns for step_ns, _ in self._runs), default=1 << 62)
        """No run was ever faster: most steps are told from a stall by it, without a median."""

    def copy(self) -> "Pace":
        """A pace that goes its own way from here."""
        twin = Pace()
        twin._runs = list(self._runs)
        twin._least = self._least
        return twin

    def add(self, step_ns: int, count: int) -> None:
        """Takes in a run of `count` steps of `step_ns` each."""
        self._runs.append((step_ns, count))
        if step_ns < self._least:
            self._least = step_ns
        if len(self._runs) > 64:
            del self._runs[0]

    def condensed(self) -> list[tuple[int, int]]:
        """Runs with the same typical and slow steps, and as many of them: all that is ever asked of a pace."""
        steps = sum(count for _, count in self._runs)
        if len(self._runs) < 3 or steps < 20:
            return list(self._runs)
        slow = max(steps // 10, 1)
        return [(self._least, 0), (self._quantile(0.5) or 0, steps - slow), (self._quantile(0.95) or 0, slow)]

    def stalled_ns(self, took_ns: int, rule: StallRule) -> int:
        """How much of a step was a stall; nothing before there are steps to compare it with."""
        if took_ns <= rule.times * self._least:
            return 0
        typical = self._quantile(0.5)
        if typical is None or took_ns <= rule.times * typical:
            return 0
        limit = rule.limit_ns(typical, self.slow_ns, self.steps)
        return took_ns - typical if took_ns > limit else 0

    @property
    def steps(self) -> int:
        """How many steps it is known from."""
        return sum(count for _, count in self._runs)

    @property
    def typical_ns(self) -> int:
        """The median; 0 before there are steps."""
        return self._quantile(0.5) or 0

    def without(self, step_ns: int) -> "Pace":
        """The pace of all other steps than one that took this long."""
        runs = list(self._runs)
        if (step_ns, 1) in runs:
            runs.remove((step_ns, 1))
        return Pace(runs)

    @property
    def slow_ns(self) -> int:
        """What the slowest 5% take at least."""
        return self._quantile(0.95) or 0

    def _quantile(self, share: float) -> int | None:
        if not self._runs:
            return None
        runs = sorted(self._runs)
        left = share * sum(count for _, count in runs)
        for step_ns, count in runs:
            left -= count
            if left <= 0:
                return step_ns
        return runs[-1][0]


# --- lineage -------------------------------------------------------------------------------------------------------

Intervals = list[tuple[float, float]]


@dataclass
class Stint:
    """Steps trained one after the other, by all ranks of an attempt together, from `first` up to and without `next`."""

    program: str
    first: int
    next: int
    samples: int | None = None
    """Samples all ranks take in one step, where known."""
    restored: int | None = None
    """The step a checkpoint brought training back to, right before this stint."""
    saved: int | None = None
    """The last checkpoint committed in this stint: all steps before this one."""


@dataclass(frozen=True)
class Lineage:
    """Which steps of each stint consumed new data."""

    labels: list[list[tuple[float, float, Bucket]]]
    """For each stint, its steps in order: from, to, bucket."""
    counts: dict[Bucket, float]
    """Steps by bucket."""


def label_steps(stints: Sequence[Stint], *, ended: bool, failed: bool) -> Lineage:
    """Tells new steps from repeated ones, and, once the job has ended for good, kept ones from lost ones.

    Data is known by its position: samples where every stint says how many a step takes, else steps. A position counts
    as new the first time it is trained. It is lost if it is no longer in the weights at the end: trained after the
    last committed checkpoint, or discarded by a restore and then skipped. A job that reported no checkpoint keeps its
    work if it ended well, and loses it if it failed.
    """
    in_samples = all(stint.samples for stint in stints)
    covered: dict[str, Intervals] = {}
    in_weights: dict[str, Intervals] = {}
    placed: list[tuple[Stint, float, float]] = []
    kept: dict[str, float] = {}
    saving = {stint.program for stint in stints if stint.saved is not None}
    fresh: list[Intervals] = []
    for stint in stints:
        scale = float(stint.samples or 1) if in_samples else 1.0
        base = _position(stint, stint.first, placed, scale)
        back_to = base
        if stint.restored is not None:
            back_to = kept[stint.program] = _position(stint, stint.restored, placed, scale)
        span = (base, base + (stint.next - stint.first) * scale)
        placed.append((stint, base, scale))
        seen = covered.setdefault(stint.program, [])
        fresh.append(_minus([span], seen))
        in_weights[stint.program] = _union(_below(in_weights.get(stint.program, []), back_to), span)
        covered[stint.program] = _union(seen, span)
        if stint.saved is not None:
            kept[stint.program] = base + (stint.saved - stint.first) * scale
    if ended and stints:
        for program in saving:
            in_weights[program] = _below(in_weights[program], kept[program])
        if failed and stints[-1].program not in saving:
            in_weights[stints[-1].program] = []
    return _lineage(placed, fresh, in_weights)


def _lineage(
    placed: list[tuple[Stint, float, float]], fresh: list[Intervals], in_weights: dict[str, Intervals]
) -> Lineage:
    labels, counts = (
        [],
        dict.fromkeys((Bucket.TRAINING_EFFECTIVE, Bucket.WASTE_REPEATED_STEPS, Bucket.WASTE_UNSAVED_STEPS), 0.0),
    )
    for (stint, base, scale), new in zip(placed, fresh, strict=True):
        kept = _minus(new, _minus(new, in_weights[stint.program]))
        cuts = sorted(
            [(a, b, Bucket.TRAINING_EFFECTIVE) for a, b in kept]
            + [(a, b, Bucket.WASTE_UNSAVED_STEPS) for a, b in _minus(new, kept)]
            + [
                (a, b, Bucket.WASTE_REPEATED_STEPS)
                for a, b in _minus([(base, base + (stint.next - stint.first) * scale)], new)
            ]
        )
        steps = [(stint.first + (a - base) / scale, stint.first + (b - base) / scale, label) for a, b, label in cuts]
        for a, b, label in steps:
            counts[label] += b - a
        labels.append(steps)
    return Lineage(labels, counts)


def _position(stint: Stint, step: int, placed: list[tuple[Stint, float, float]], scale: float) -> float:
    """Where in the data `step` begins: as the latest stint that reached it says, else counted from the start."""
    for earlier, base, its_scale in reversed(placed):
        if earlier.program == stint.program and earlier.first <= step <= earlier.next:
            return base + (step - earlier.first) * its_scale
    return step * scale


def _below(intervals: Intervals, limit: float) -> Intervals:
    return [(a, min(b, limit)) for a, b in intervals if a < limit]


def _union(intervals: Intervals, new: tuple[float, float]) -> Intervals:
    merged: Intervals = []
    for a, b in sorted([*intervals, new]):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        elif b > a:
            merged.append((a, b))
    return merged


def _minus(intervals: Intervals, other: Intervals) -> Intervals:
    """What of `intervals` is not in `other`; both sorted, each without overlaps."""
    left: Intervals = []
    for a, b in intervals:
        at = max(0, bisect.bisect_right(other, (a, float("inf"))) - 1)
        for c, d in other[at:]:
            if c >= b:
                break
            if c > a:
                left.append((a, c))
            a = max(a, d)
        if a < b:
            left.append((a, b))
    return left
