"""The ledger: every nanosecond of a job, and of each of its ranks, in exactly one bucket.

The job's own timeline is stitched from its ranks': up to the first step from the rank that everyone waited for, then
from the one that lost most in the loop, after the last step from the one that left last. Each rank's time is a
partition, so the job's is one too.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from headway.accounting.attempts import CLOCK_TOLERANCE_NS, Attempt, Gap, Instant, gather_attempts
from headway.accounting.members import Member
from headway.accounting.publishing import Axis, Publication, is_publisher, publications
from headway.accounting.rollup import Load, restore
from headway.accounting.rules import OTHER, Bucket, Key, Lineage, StallRule, label_steps
from headway.accounting.timeline import Piece, Timeline
from headway.accounting.view import UNATTRIBUTED, Labels, RankView, Sums
from headway.accounting.waterfall import Waterfall, gather_waterfalls
from headway.events.journal import Batch, Cell
from headway.events.vocabulary import STAGES, Record, Told

_UNTRAINED = (
    "no training step was seen: no optimizer of torch's stepped. A script that changes its weights by hand can count "
    "its steps with headway.current().steps(...)"
)
_UNSEEN = "no PyTorch training was seen in this job: its processes neither fetched batches nor stepped an optimizer"

HOLDS_UP = 0.02
"""A rank is named as the slowest if it lost this share of the loop more than the one that lost least. Below that, ranks
only wait for one another in turn, and the clock of each sees the same."""

MOST_STARTS = 8
"""So many start-ups are looked into for advice: with thousands of ranks, each takes a tenth of a second."""


class JobAccounts:
    """Takes a job's records as they come, and gives its ledger at any moment."""

    def __init__(self, stall: StallRule | None = None) -> None:
        self._stall = stall or StallRule()
        self._timelines: dict[str, Timeline] = {}
        self._problems: dict[str, None] = {}

    def add(
        self, process: str, records: Iterable[Record], cell: Cell | None = None, problems: Iterable[str] = ()
    ) -> None:
        """Takes in what one process wrote since it was last asked."""
        if process not in self._timelines:
            self._timelines[process] = Timeline(self._stall)
        self._timelines[process].add(records, cell)
        self._problems.update(dict.fromkeys(problems))

    def take(self, process: str, batch: Batch) -> None:
        """Takes in what a reader brings: records, or for a finished process their roll-up."""
        if batch.rolled_up and batch.load is not None:
            self.add_finished(process, batch.rolled_up, batch.load)
        else:
            self.add(process, batch.records, batch.cell, batch.problems)

    def add_finished(self, process: str, rolled_up: bytes, load: Load) -> None:
        """Takes in a finished process by its roll-up; `load` gives its records, for when they are needed."""
        timeline = restore(rolled_up, load, self._stall)
        if timeline is None:
            timeline = Timeline(self._stall)
            timeline.add(*load())
        self._timelines[process] = timeline

    @property
    def problems(self) -> list[str]:
        """What could not be read."""
        return list(self._problems)

    def ledger(self, now: Instant, alive: Collection[str] = (), lost: Collection[str] = ()) -> "Ledger | None":
        """The ledger as of `now`; None while no process has begun.

        `alive` names the processes that live, `lost` those that lived when their node was heard of for the last time.
        """
        trainers = {name: each for name, each in self._timelines.items() if not is_publisher(each)}
        attempts = gather_attempts(trainers, now, alive, lost)
        if not attempts:
            return None
        last = attempts[-1]
        lineage = label_steps(
            [stint for attempt in attempts for stint in attempt.stints], ended=not last.alive, failed=last.has_lost
        )
        axis = Axis({m.process.boot: m.offset_ns for a in attempts for m in a.members.values()}, now)
        notes = self._notes(attempts, trainers.values())
        ledger = _Assembly(attempts, lineage, self._launcher_pieces(trainers.values(), axis)).ledger(notes)
        ledger.publications = publications(self._timelines, axis, alive, last.world_size)
        return ledger

    @staticmethod
    def _launcher_pieces(timelines: Iterable[Timeline], axis: Axis) -> list[Piece]:
        """What supervisors recorded of launching and recovering, on the job's time axis."""
        pieces = []
        for timeline in timelines:
            if timeline.process is not None and timeline.process.role == "supervisor":
                offset = axis.offset(timeline.process)
                for piece in timeline.look(timeline.last_ns, False).tail:
                    if piece.what and piece.what not in STAGES:
                        pieces.append(Piece(piece.begin_ns + offset, piece.end_ns + offset, piece.what))
        return sorted(pieces)

    def _notes(self, attempts: list[Attempt], timelines: Collection[Timeline]) -> list[str]:
        notes = list(self._problems)
        if attempts[0].trains_unseen:
            notes.append(_UNSEEN)
        for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
            missing = sorted(set(range(attempt.world_size)) - set(attempt.members))
            if missing:
                notes.append(f"attempt {attempt.number}: no journal of rank {_ranks(missing)} of {attempt.world_size}")
            for rank, member in sorted(attempt.members.items()):
                others_run = attempt.alive and not attempt.awaits_restart
                if others_run and not member.alive and not member.is_clean:
                    since = (member.last_sign_ns - attempts[0].begin_ns) / 1e9
                    notes.append(f"rank {rank} is gone since {since:.0f} s into the job, while others still run")
            for node in sorted({m.process.node for m in attempt.members.values() if m.lost and not m.is_clean}):
                gone = sorted(rank for rank, m in attempt.members.items() if m.process.node == node)
                notes.append(f"attempt {attempt.number}: node {node} (rank {_ranks(gone)}) was not heard of again")
            if any(member.was_numbered for member in attempt.members.values()):
                notes.append(
                    f"attempt {attempt.number}: {len(attempt.members)} processes trained side by side without a "
                    f"process group, and count as ranks. Give jobs of their own an id of their own with HEADWAY_JOB"
                )
            if following and any(_outlived(m, following) for m in attempt.members.values()):
                notes.append(
                    f"attempt {attempt.number} still ran when attempt {following.number} began: two jobs seem to share "
                    f"this id. Give each its own with HEADWAY_JOB."
                )
        boots = {m.process.boot for a in attempts for m in a.members.values()}
        if len(boots) > 1 and not all(m.timeline.group_ready_ns for a in attempts for m in a.members.values()):
            notes.append(
                "hosts are placed by their wall clocks: some ranks recorded no process_group_init to check them"
            )
        members = [member for attempt in attempts for member in attempt.members.values() if not member.is_launcher]
        if members and not attempts[-1].alive and not any(attempt.stints for attempt in attempts):
            notes.append(_UNTRAINED)
        if attempts[0].scheduled is None:
            notes.append("scheduling and hardware setup unknown: no scheduler's timestamps (see HEADWAY_ELIGIBLE)")
        notes += self._told(timelines)
        lost = sum(timeline.dropped for timeline in timelines)
        if lost:
            notes.append(f"{lost} records are missing: the disk was full. Steps are complete, spans may not be")
        return notes

    @staticmethod
    def _told(timelines: Iterable[Timeline]) -> list[str]:
        """What hooks said of themselves, each thing once, whichever rank said it."""
        notes: dict[str, None] = {}
        devices: dict[str, int] = {}
        cached: dict[str, str] = {}
        for timeline in timelines:
            for mark in timeline.marks:
                if mark.name == Told.HOOK_OFF:
                    text = f"the hook on {mark.attrs.get('hook')} was switched off ({mark.attrs.get('error')})"
                    notes[f"{text}: what it would have seen is missing"] = None
                elif mark.name == Told.COMPILE_CACHE:
                    cached[str(mark.attrs.get("outcome"))] = _outcome(mark.attrs)
                elif mark.name == Told.ASYNCHRONOUS_DEVICE:
                    device, looked = str(mark.attrs.get("device")), mark.attrs.get("looked")
                    devices[device] = devices.get(device, 0) + (looked if isinstance(looked, int) else 0)
        hidden = {"saved", "hit" if "used" in cached else ""}
        notes |= {f"compile cache: {text}": None for outcome, text in cached.items() if outcome not in hidden}
        for device, looked in devices.items():
            known = (
                f"what it felt of waits for data is known from {looked} of them" if looked else "only totals are known"
            )
            notes[f"steps run on a device that does not wait for the host ({device}): {known}"] = None
        return list(notes)


def _outlived(member: Member, following: Attempt) -> bool:
    successor = following.members.get(member.process.rank)
    return successor is not None and (
        member.alive or member.timeline.last_ns + member.offset_ns > successor.process.t_ns + successor.offset_ns
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


# --- the job -------------------------------------------------------------------------------------------------------


@dataclass
class AttemptLedger:
    """One attempt's account."""

    attempt: Attempt
    views: dict[int, RankView]
    sums: Sums
    critical_rank: int | None = None
    """The rank everyone waited for until the first step."""
    slowest_rank: int | None = None
    """The rank that lost most in the loop."""
    holds_up: bool = False
    """Whether that rank lost so much more than others that it is worth a word."""
    recovering_ns: tuple[int, int] = (0, 0)
    """Its `recover.*` before the end of its first step, and after."""

    @property
    def held_up_by(self) -> int | None:
        """The slowest rank, if it is worth a word."""
        return self.slowest_rank if self.holds_up else None

    @property
    def wall_ns(self) -> int:
        """From the failure before it, or the job's begin, to its own end."""
        return self.attempt.end_ns - self.attempt.begin_ns

    @property
    def outcome(self) -> str:
        """`running`, `failed`, `stopped` on notice with its work saved, or `ended`."""
        if self.attempt.alive:
            return "running"
        return "failed" if self.attempt.failed else "stopped" if self.attempt.stopped else "ended"


def _outcome(told: Mapping[str, Any]) -> str:
    """What became of a job's compile cache, in words."""
    why = f" ({told['why']})" if told.get("why") else ""
    if "seconds_saved" in told:
        return f"hit, and {told['seconds_saved']:.1f} s of compiling saved"
    return f"{told.get('outcome', '?')}{why}"


class _Assembly:
    """Puts the job's ledger together from its attempts."""

    def __init__(self, attempts: list[Attempt], lineage: Lineage, launcher: list[Piece]) -> None:
        self._attempts, self._lineage, self._launcher = attempts, lineage, launcher

    def ledger(self, notes: list[str]) -> "Ledger":
        ledgers, done = [], 0
        for attempt, previous in zip(self._attempts, [None, *self._attempts], strict=False):
            labels = self._lineage.labels[done : done + len(attempt.stints)]
            done += len(attempt.stints)
            ledgers.append(self._attempt_ledger(attempt, previous, labels))
        process = next(iter(self._attempts[0].members.values())).process
        return Ledger(process.job, ledgers, self._lineage.counts, notes)

    def _attempt_ledger(self, attempt: Attempt, previous: Attempt | None, labels: list[Labels]) -> AttemptLedger:
        following = self._attempts[attempt.number + 1 :][:1]
        is_last = not following or following[0].is_new
        around = [p for p in self._launcher if p.end_ns > attempt.begin_ns and p.begin_ns < attempt.end_ns]
        gap, views = Gap(attempt, previous, around), {}
        for rank in sorted(attempt.members):
            member = attempt.members[rank]
            views[rank] = RankView(attempt, member, is_last, gap.before(member), labels)
        return _stitch(AttemptLedger(attempt, views, {}))


def _stitch(ledger: AttemptLedger) -> AttemptLedger:
    """The job's time in one attempt, from the ranks that determined it: `begin` to `started` from the critical one,
    `started` to `stopped` from the slowest, `stopped` to `end` from the last one out."""
    attempt, views = ledger.attempt, ledger.views
    begin, end = attempt.begin_ns, attempt.end_ns
    trained = [rank for rank, view in views.items() if view.first_step_end_ns is not None]
    if not trained:
        ledger.critical_rank = max(views, key=lambda rank: (views[rank].member.begin_ns, -rank))
        ledger.sums = views[ledger.critical_rank].sums(begin, end)
        ledger.recovering_ns = (_recovering(ledger.sums), 0)
        return ledger
    began = min(views[rank].first_step_end_ns or 0 for rank in trained)
    in_time = [rank for rank in trained if views[rank].member.begin_ns < began]  # nobody waited for who joined later
    critical = max(in_time or trained, key=lambda rank: (views[rank].waited_for_ns, -rank))
    last_out = max(views, key=lambda rank: (views[rank].end_ns, -rank))
    started = min(max(views[critical].first_step_end_ns or begin, begin), end)
    stopped = max((views[rank].last_step_end_ns or begin for rank in trained), default=begin)
    stopped = min(max(stopped, started), end)
    before = views[critical].sums(begin, started)
    by_loss = sorted(trained, key=lambda rank: (-views[rank].lost_in_loop_ns, rank))
    after = _total((_loop_sums(views, by_loss, started, stopped), views[last_out].sums(stopped, end)))
    ledger.critical_rank, ledger.slowest_rank = critical, by_loss[0]
    lost = [views[rank].lost_in_loop_ns for rank in by_loss]
    ledger.holds_up = len(lost) > 1 and lost[0] - lost[-1] > HOLDS_UP * (stopped - started)
    ledger.sums, ledger.recovering_ns = _total((before, after)), (_recovering(before), _recovering(after))
    return ledger


def _loop_sums(views: dict[int, RankView], by_loss: list[int], begin: int, end: int) -> Sums:
    """The loop's time, from the rank that lost most; when that one leaves, from the next of those that stay on."""
    parts, at = [], begin
    for rank in by_loss:
        until = min(views[rank].last_step_end_ns or at, end)
        if until - at > CLOCK_TOLERANCE_NS or until == end > at:
            parts.append(_explained(views, rank, at, until))
            at = until
    return _total(parts)


def _explained(views: dict[int, RankView], slow: int, begin: int, end: int) -> Sums:
    """The slowest rank's time in the loop, its stalls explained by whichever rank knows what it was doing then."""
    sums = views[slow].sums(begin, end)
    stall: Key = (Bucket.WASTE_STALL, "")
    if not sums.get(stall) or len(views) == 1:
        return sums
    for low, high in views[slow].stalls():
        low, high = max(low, begin), min(high, end)
        left = high - low
        for rank, view in views.items():
            if rank == slow or left <= 0 or view.most_caused_ns <= (high - low) // 2:
                continue
            for key, ns in view.sums(low, high).items():
                if key[0] in _CAUSES and ns > (high - low) // 2:
                    took = min(ns, left)
                    sums[stall] -= took
                    sums[key] = sums.get(key, 0) + took
                    left -= took
    return sums


_CAUSES = frozenset(
    (Bucket.WASTE_CHECKPOINT_BLOCKING, Bucket.WASTE_DATA_WAIT, Bucket.WASTE_RECOMPILATION, Bucket.WASTE_EVALUATION)
)


@dataclass
class Ledger:
    """A job's account: its parts add up to its wall time, exactly."""

    job: str
    attempts: list[AttemptLedger]
    steps: dict[Bucket, float]
    notes: list[str] = field(default_factory=list)
    """What is missing or was assumed."""
    publications: list[Publication] = field(default_factory=list)
    """What others published of it: none of its own time."""

    @property
    def begin_ns(self) -> int:
        """When the job could first have run, as wall time."""
        return self.attempts[0].attempt.begin_ns

    @property
    def wall_ns(self) -> int:
        """From there to its end, or to now."""
        return self.attempts[-1].attempt.end_ns - self.begin_ns

    @property
    def state(self) -> str:
        """`running`, `failed`, `stopped` on notice with its work saved, or `ended`."""
        return self.attempts[-1].outcome

    @property
    def sums(self) -> Sums:
        """The job's time by bucket and stage."""
        return _total(attempt.sums for attempt in self.attempts)

    @property
    def buckets(self) -> dict[Bucket, int]:
        """The job's time by bucket, all of them."""
        return by_bucket(self.sums)

    @property
    def rollout_ns(self) -> int:
        """How long the job collected experience to train on, as its slowest ranks saw it: part of its steps."""
        slowest = [(a.views, a.slowest_rank) for a in self.attempts if a.slowest_rank is not None]
        return sum(views[rank].member.timeline.rollout_ns for views, rank in slowest)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """One entry for each attempt that failed: by which rank, why where that is known, what was done about it."""
        return [
            {
                "attempt": a.attempt.number,
                "rank": a.attempt.failed_rank,
                "unseen_ranks": list(a.attempt.unseen_ranks),
                "category": _category(a.attempt),
                "decision": a.attempt.decision,
            }
            for a in self.attempts
            if a.attempt.failed
        ]

    @cached_property
    def waterfalls(self) -> list[Waterfall]:
        """How each attempt started, as far as its start-up was a graph of stages; worked out when first asked for."""
        return gather_waterfalls((a.attempt.number, a.attempt.startups) for a in self.attempts)

    @cached_property
    def slowest_starts(self) -> list[Waterfall]:
        """The longest of them: a job that started often is known by a few."""
        found = sorted(self.waterfalls, key=lambda waterfall: -waterfall.wall_ns)[:MOST_STARTS]
        return [waterfall for waterfall in self.waterfalls if any(waterfall is each for each in found)]

    @property
    def time_to_start_ns(self) -> int:
        """All `start.*`: from being eligible until the first step, what was not training."""
        return sum(ns for (key, _), ns in self.sums.items() if key.startswith("start."))

    @property
    def times_to_recover_ns(self) -> list[int]:
        """For each recovery all its `recover.*`, from the end of one attempt to the first step after it."""
        times: list[int] = []
        open_ns = 0
        for attempt in self.attempts:
            before, after = attempt.recovering_ns
            open_ns += before
            if attempt.slowest_rank is not None:  # it trained: the recovery that led to it is over
                times += [open_ns] if open_ns else []
                open_ns = after
        return [*times, open_ns] if open_ns else times

    @property
    def slowest_rank(self) -> int | None:
        """The rank that held up the attempt that trained longest; None if no rank did."""
        trained = [attempt for attempt in self.attempts if attempt.slowest_rank is not None]
        longest = max(trained, key=lambda attempt: attempt.wall_ns, default=None)
        return longest.held_up_by if longest is not None else None

    def rank_sums(self, rank: int) -> Sums:
        """One rank's time; an attempt it should have been part of and was not is unattributed."""
        return _total(
            attempt.views[rank].sums_all if rank in attempt.views else {UNATTRIBUTED: attempt.wall_ns}
            for attempt in self.attempts
            if rank in attempt.views or rank < attempt.attempt.world_size
        )

    def select(self, attempt: int | None = None, rank: int | None = None) -> Sums:
        """The job's time, or that of one attempt, one rank, or one rank in one attempt."""
        if attempt is None:
            return self.sums if rank is None else self.rank_sums(rank)
        account = self.attempts[attempt]
        if rank is None:
            return account.sums
        return account.views[rank].sums_all if rank in account.views else {UNATTRIBUTED: account.wall_ns}

    @property
    def ranks(self) -> list[int]:
        """Every rank that was, or should have been, part of the job."""
        return sorted({rank for a in self.attempts for rank in (*a.views, *range(a.attempt.world_size))})


def percent(buckets: dict[Bucket, int]) -> tuple[float, float, float]:
    """ETT%, Idleness% and Failure% of time given by bucket."""
    whole = sum(buckets.values()) or 1
    failure = sum(ns for key, ns in buckets.items() if key.is_failure)
    effective = buckets.get(Bucket.TRAINING_EFFECTIVE, 0)
    return 100 * effective / whole, 100 * (whole - effective - failure) / whole, 100 * failure / whole


def by_bucket(sums: Sums) -> dict[Bucket, int]:
    """Sums without stages, every bucket present."""
    result = dict.fromkeys(Bucket, 0)
    for (key, _), ns in sums.items():
        result[key] += ns
    return result


def by_stage(sums: Sums) -> dict[str, int]:
    """Trainer initialisation, first and repeated, by stage, every stage present."""
    result = dict.fromkeys((*map(str, STAGES), OTHER), 0)
    for (_, stage), ns in sums.items():
        if stage:
            result[str(stage)] += ns
    return result


def _recovering(sums: Sums) -> int:
    return sum(ns for (key, _), ns in sums.items() if key.startswith("recover."))


def _total(parts: Iterable[Sums]) -> Sums:
    total: Sums = {}
    for part in parts:
        for key, ns in part.items():
            total[key] = total.get(key, 0) + ns
    return total


def _category(attempt: Attempt) -> str | None:
    member = None if attempt.failed_rank is None else attempt.members.get(attempt.failed_rank)
    if member is None:
        return None
    told = (member.gone, member.timeline.ended)
    return next((record.category for record in told if record and record.category), None)
