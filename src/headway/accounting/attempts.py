"""From processes to attempts: which processes ran together, on one time axis, and when each began and failed."""

import re
import signal
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from headway.accounting.anchors import place_stints
from headway.accounting.members import NEVER_NS, TICK_NS, Member, gather_members
from headway.accounting.rules import Stint
from headway.accounting.timeline import Piece, RankStint, Timeline
from headway.accounting.waterfall import Startup
from headway.events.vocabulary import Activity, Scheduled, Told

CLOCK_TOLERANCE_NS = 250_000_000
"""Hosts whose clocks differ by less are taken to agree: the end of process-group initialisation is no sharper mark."""


CRASH_NS = 1_000_000_000
"""How long the kernel may take to report a process that was killed."""

_CRASHES = frozenset([signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE])
"""Signals that end the first rank. To the others a launcher sends SIGTERM, and torch aborts what waits too long."""


_PEER_LOST = re.compile(r"\bpeers?\b|connection (?:reset|closed|refused)|broken pipe|nccl|gloo|timed out", re.I)


class Instant(NamedTuple):
    """One moment on a machine's clocks."""

    boot: str
    t_ns: int
    wall_ns: int


@dataclass(slots=True)
class Attempt:
    """The processes that trained together, between one failure and the next."""

    number: int
    members: dict[int, Member] = field(default_factory=dict)
    """By rank."""
    begin_ns: int = 0
    """The job's begin, or the failure of the attempt before."""
    end_ns: int = 0
    """Its failure; for the last attempt, the job's end so far."""
    stopped_ns: int = 0
    """Its own processes' end. That of the last attempt may come before the job's, which its launcher lives to see."""
    failed: bool = False
    stopped: bool = False
    """It was told to stop, and did."""
    failed_rank: int | None = None
    """None where no rank failed, and yet its launcher did."""
    unseen_ranks: tuple[int, ...] = ()
    """The other ranks that ended with it when nobody was looking: one of them may have failed first."""
    decision: str = ""
    """What a supervisor did about its failure, and why, in its own words."""
    exit_code: int | None = None
    """Of the launcher that ended in its time, if that was a failure."""
    is_shells_word: bool = False
    """Whether that launcher was a shell: its exit code is that of its last command, whatever that was."""
    alive: bool = False
    awaits_restart: bool = False
    """Its processes failed and are gone, and its launcher lives: it may start them again."""
    abandoned_ns: int | None = None
    """When the last launcher ended that would have started it again: from then on nobody did, until somebody did."""
    launched_ns: int | None = None
    """When the first launcher began that is new to this attempt."""
    prepared_ns: int | None = None
    """When a script that only prepared the training started, if one did."""
    is_new: bool = False
    """It begins another training: the one before it ended well, and nothing of that was restored."""
    followed: list[Member] = field(default_factory=list)
    """Scripts that ran after the training had ended well and did not train: exports, evaluations."""
    stints: list[Stint] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """How many ranks it should have had."""
        sizes = [member.process.world_size for member in self.members.values()]
        return max([*sizes, max(self.members) + 1])

    @property
    def is_first(self) -> bool:
        """Whether its start-up is a start, and no recovery."""
        return self.number == 0 or self.is_new

    @property
    def has_lost(self) -> bool:
        """Whether what it had not saved is lost: a rank failed, or the launcher says that one did."""
        ranks_failed = any(not member.alive and not member.is_clean for member in self.members.values())
        return self.failed and (ranks_failed or not self.is_shells_word)

    @property
    def first_start_ns(self) -> int:
        """When the first of its processes started."""
        starts = [member.begin_ns for member in self.members.values()]
        return min(starts) if self.prepared_ns is None else min(self.prepared_ns, *starts)

    @property
    def scheduled(self) -> Scheduled | None:
        """What the platform said of its wait for hardware."""
        return next((m.timeline.scheduled for m in self.members.values() if m.timeline.scheduled), None)

    @property
    def startups(self) -> dict[int, list[Startup]]:
        """What each rank told of its start-up, in job time."""
        told = {rank: (m.timeline.startups, m.offset_ns) for rank, m in self.members.items() if m.timeline.startups}
        return {rank: [startup.moved(by_ns) for startup in each] for rank, (each, by_ns) in told.items()}

    @property
    def left_ns(self) -> int:
        """The last sign of any of its processes."""
        return max(member.last_sign_ns for member in (*self.members.values(), *self.followed))

    @property
    def is_witnessed(self) -> bool:
        """Whether somebody saw its processes end."""
        return any(member.gone for member in self.members.values())

    @property
    def trains_unseen(self) -> bool:
        """Whether all that is known of it is its launcher."""
        return any(member.is_launcher for member in self.members.values())


def gather_attempts(
    timelines: dict[str, Timeline], now: Instant, alive: Collection[str], lost: Collection[str]
) -> list[Attempt]:
    """All attempts of a job in order, on one time axis, each with its begin and end."""
    members, launchers = gather_members(timelines, alive, lost)
    if not members:
        return []
    attempts = _group(members)
    _align_hosts(attempts, launchers)
    _set_launches(attempts, launchers)
    _set_ends(attempts, launchers, now)
    _set_decisions(attempts, timelines.values())
    place_stints(attempt.members for attempt in attempts)
    for attempt in attempts:
        attempt.stints = _stints(attempt)
    _set_trainings(attempts)
    return attempts


def _set_trainings(attempts: list[Attempt]) -> None:
    """Tell another training from the same one that goes on: its steps repeat nothing of what came before."""
    trainings = 0
    for attempt, before in zip(attempts, [None, *attempts], strict=False):
        if before is not None and _ended_for_good(before):
            goes_on = any(stint.restored is not None or stint.first for stint in attempt.stints[:1])
            attempt.is_new = not goes_on or _commands(attempt) != _commands(before)
        trainings += attempt.is_new
        for stint in attempt.stints:
            stint.program = f"{trainings} {stint.program}"


def _ended_for_good(attempt: Attempt) -> bool:
    """Whether it trained and ended well, by itself."""
    went_on = any(member.went_on_as for member in attempt.members.values())
    return bool(attempt.stints) and not (attempt.failed or attempt.stopped or went_on)


def _commands(attempt: Attempt) -> set[str]:
    return {member.process.command for member in attempt.members.values()}


# --- grouping ------------------------------------------------------------------------------------------------------


def _group(members: list[Member]) -> list[Attempt]:
    members = sorted(members, key=lambda m: (m.begin_ns, m.process.rank, m.name))
    ordered = _group_by_number(members) or _group_by_turn(members) or _group_by_time(members)
    for number, attempt in enumerate(ordered):
        attempt.number = number
    return ordered


def _group_by_number(members: list[Member]) -> list[Attempt]:
    """Where a supervisor numbered all attempts, and each rank once in each: as it says."""
    groups: dict[int, Attempt] = {}
    for member in members:
        number, rank = member.process.attempt, member.process.rank
        if number is None or rank in groups.setdefault(number, Attempt(number)).members:
            return []
        groups[number].members[rank] = member
    return [groups[number] for number in sorted(groups)]


def _group_by_time(members: list[Member]) -> list[Attempt]:
    """A new attempt begins when a rank starts again, or when a launcher starts its workers anew."""
    attempts: list[Attempt] = []
    launches: dict[str, str] = {}
    for member in members:
        process = member.process
        earlier = attempts[-1].members.get(process.rank) if attempts else None
        if earlier is not None and _follows(earlier, member):
            attempts[-1].followed.append(member)
            continue
        again = earlier is not None and _starts_again(earlier, member)
        launch = process.launch if process.attempt is None else f"attempt {process.attempt}"
        relaunched = bool(launch) and launches.get(process.node, launch) != launch
        resized = bool(attempts) and process.world_size != attempts[-1].world_size and _has_tried(attempts[-1])
        if not attempts or again or ((relaunched or resized) and earlier is None):
            attempts.append(Attempt(len(attempts)))
            launches = {}
        elif earlier is not None:
            attempts[-1].prepared_ns = attempts[-1].first_start_ns
        launches[process.node] = launch
        attempts[-1].members[process.rank] = member
    return attempts


def _group_by_turn(members: list[Member]) -> list[Attempt]:
    """Where several hosts' clocks may disagree and every rank started equally often: each rank's n-th start."""
    turns: dict[int, list[Member]] = {}
    prepared: dict[int, int] = {}
    for member in members:
        mine = turns.setdefault(member.process.rank, [])
        if mine and not _starts_again(mine[-1], member):
            prepared[len(mine) - 1] = min(prepared.get(len(mine) - 1, mine[-1].begin_ns), mine[-1].begin_ns)
            mine[-1] = member
        else:
            mine.append(member)
    counts = {len(mine) for mine in turns.values()}
    if len({m.process.boot for m in members}) == 1 or len(counts) != 1:
        return []
    return [
        Attempt(turn, {rank: turns[rank][turn] for rank in sorted(turns)}, prepared_ns=prepared.get(turn))
        for turn in range(counts.pop())
    ]


def _has_tried(attempt: Attempt) -> bool:
    return any(m.timeline.stints or not m.is_clean for m in attempt.members.values() if not m.alive)


def _follows(earlier: Member, later: Member) -> bool:
    """Whether `later` is work after a training that ended well: another script, which does not train."""
    trained = earlier.timeline.stints and not later.timeline.stints
    return bool(trained) and earlier.is_clean and earlier.process.program != later.process.program


def _starts_again(earlier: Member, later: Member) -> bool:
    """Whether `later` tries again what `earlier` did; a script that ended well without training was preparation."""
    trained = bool(earlier.timeline.stints)
    return trained or (earlier.process.program == later.process.program and not earlier.is_clean)


# --- clocks --------------------------------------------------------------------------------------------------------


def _align_hosts(attempts: list[Attempt], launchers: list[Member]) -> None:
    """Shifts hosts whose clocks disagree so that each process group was ready at one moment on all of them."""
    shifts: dict[str, int] = {}
    for attempt in attempts:
        ready: dict[str, list[int]] = {}
        for rank in sorted(attempt.members):
            member = attempt.members[rank]
            if member.timeline.group_ready_ns is not None:
                moment = member.timeline.group_ready_ns + member.offset_ns
                ready.setdefault(member.process.boot, []).append(moment)
        known = [median_low(moments) + shifts[boot] for boot, moments in ready.items() if boot in shifts]
        for boot, moments in ready.items():
            reference = median_low(known) if known else median_low(moments)
            behind = reference - median_low(moments)
            shifts.setdefault(boot, behind if abs(behind) > CLOCK_TOLERANCE_NS else 0)
            known = known or [median_low(moments)]
    for member in (*launchers, *(member for attempt in attempts for member in attempt.members.values())):
        member.offset_ns += shifts.get(member.process.boot, 0)


# --- begins and ends -----------------------------------------------------------------------------------------------


def _set_launches(attempts: list[Attempt], launchers: list[Member]) -> None:
    """Finds each attempt's launchers: those that are new to it, and the first that failed before the next one began."""
    begins = sorted(launcher.begin_ns for launcher in launchers)
    failures = sorted(
        (launcher.last_sign_ns, launcher.gone.exit_code, _is_shell(launcher))
        for launcher in launchers
        if launcher.gone and launcher.gone.exit_code
    )
    ends = [launcher.last_sign_ns for launcher in launchers if launcher.gone]
    known = 0
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True) if launchers else ():
        until = NEVER_NS if following is None else max(member.begin_ns for member in attempt.members.values())
        begun = bisect_right(begins, until)
        if begun > known:
            attempt.launched_ns, known = begins[known], begun
        if following is not None:
            gone = [end for end in ends if attempt.first_start_ns < end < following.first_start_ns + TICK_NS]
            attempt.abandoned_ns = max(gone, default=None)
        first = bisect_left(failures, (attempt.first_start_ns + TICK_NS,))
        if first < len(failures) and (following is None or failures[first][0] < following.first_start_ns + TICK_NS):
            attempt.exit_code, attempt.is_shells_word = failures[first][1:]


def _is_shell(launcher: Member) -> bool:
    name = launcher.process.command.partition(" ")[0].rpartition("/")[2]
    return name in ("sh", "bash", "dash", "ksh", "zsh") or name.endswith(".sh")


def _set_ends(attempts: list[Attempt], launchers: list[Member], now: Instant) -> None:
    for attempt in attempts[:-1]:
        _set_failure(attempt)
        following = attempts[attempt.number + 1]
        attempt.end_ns = attempt.stopped_ns = min(attempt.end_ns, following.first_start_ns)
    last = attempts[-1]
    runs = any(member.alive for member in (*last.members.values(), *last.followed))
    last.alive = runs or any(launcher.alive for launcher in launchers)
    _set_failure(last)
    last.stopped_ns = _now_ns(last, now) if runs else last.left_ns
    last.end_ns = _now_ns(last, now) if last.alive else max([last.stopped_ns, *(m.last_sign_ns for m in launchers)])
    last.awaits_restart = last.alive and not runs and not all(member.is_clean for member in last.members.values())
    begin_ns = _job_begin(attempts[0])
    for attempt in attempts:
        attempt.begin_ns = begin_ns
        attempt.end_ns = begin_ns = max(attempt.end_ns, begin_ns)
        attempt.stopped_ns = min(max(attempt.stopped_ns, attempt.begin_ns), attempt.end_ns)


def _set_failure(attempt: Attempt) -> None:
    """When the attempt failed, and by which rank: with its node, as was seen, or else at the last sign of anyone."""
    members = attempt.members
    dead = {rank: m for rank, m in members.items() if not m.alive and not m.is_clean}
    lost = {rank: m.last_sign_ns for rank, m in dead.items() if m.lost}
    seen = {rank: at for rank, m in dead.items() if (at := m.failed_at_ns) is not None}
    attempt.stopped = not dead and any(m.has_stopped for m in members.values())
    attempt.failed = not attempt.alive and (bool(dead) or (attempt.exit_code is not None and not attempt.stopped))
    named = [rank for rank in seen if (gone := dead[rank].gone) is not None and gone.category]
    if named:  # by a supervisor, which heard all of them
        attempt.failed_rank = min(named, key=lambda rank: (seen[rank], rank))
        attempt.end_ns = seen[attempt.failed_rank]
    elif lost and min(lost.values()) <= min(seen.values(), default=1 << 62):  # what survivors raise then is an effect
        attempt.failed_rank = min(lost, key=lambda rank: (lost[rank], rank))
        attempt.end_ns = max(lost.values())
    elif seen:
        attempt.failed_rank = _first_to_fail(seen, dead)
        attempt.end_ns = min(seen.values())
    elif dead:
        attempt.failed_rank = min(dead, key=lambda rank: (dead[rank].last_sign_ns, rank))
        attempt.end_ns = max(m.last_sign_ns for m in dead.values())
    else:
        attempt.end_ns = max(m.last_sign_ns for m in members.values())
    if not named and attempt.failed_rank is not None and _may_be_an_effect(members[attempt.failed_rank]):
        attempt.unseen_ranks = tuple(sorted(dead.keys() - seen.keys() - lost.keys() - {attempt.failed_rank}))
    if attempt.exit_code is not None and attempt.trains_unseen:
        attempt.failed_rank = None


def _may_be_an_effect(member: Member) -> bool:
    """Whether a rank's failure says nothing of its own cause, or says that another rank was lost."""
    error = member.timeline.ended.error if member.timeline.ended else None
    return not error or bool(_PEER_LOST.search(error))


def _first_to_fail(seen: dict[int, int], dead: dict[int, Member]) -> int:
    """The rank that failed first. The others notice at once that a crash cut them off; the crash itself is seen only
    when the kernel has taken the process down."""
    first = min(seen, key=lambda rank: (seen[rank], rank))
    if not _may_be_an_effect(dead[first]):
        return first
    soon = [rank for rank in seen if _has_crashed(dead[rank]) and seen[rank] <= seen[first] + CRASH_NS]
    return min(soon, key=lambda rank: (seen[rank], rank), default=first)


def _has_crashed(member: Member) -> bool:
    return member.gone is not None and member.gone.exit_code is not None and -member.gone.exit_code in _CRASHES


def _set_decisions(attempts: list[Attempt], timelines: Iterable[Timeline]) -> None:
    marks = [mark for timeline in timelines for mark in timeline.marks if mark.name == Told.DECISION]
    why = {mark.attrs.get("attempt"): str(mark.attrs.get("why", "")) for mark in reversed(marks)}
    for attempt in attempts if why else ():
        numbers = (member.process.attempt for member in attempt.members.values())
        attempt.decision = next((why[number] for number in numbers if number in why), "")


def _job_begin(attempt: Attempt) -> int:
    begins = [attempt.first_start_ns]
    begins += [
        member.process.launcher_started_ns + member.offset_ns
        for member in attempt.members.values()
        if member.process.launcher_started_ns is not None
    ]
    if attempt.launched_ns is not None:
        begins.append(attempt.launched_ns)
    if attempt.scheduled:
        begins.append(attempt.scheduled.eligible_wall_ns)
    return min(begins)


def _now_ns(attempt: Attempt, now: Instant) -> int:
    for member in attempt.members.values():
        if member.process.boot == now.boot:
            return now.t_ns + member.offset_ns
    return now.wall_ns


# --- between attempts ----------------------------------------------------------------------------------------------


class Gap:
    """What lies between an attempt's begin and the starts of its processes: looked up once for all its ranks.

    `launcher` holds what a supervisor recorded; it wins over what can be inferred from the processes' own starts.
    """

    def __init__(self, attempt: Attempt, previous: Attempt | None, launcher: list[Piece]) -> None:
        self._attempt, self._is_first = attempt, attempt.is_first
        self._launcher = launcher
        self._scheduled = attempt.scheduled
        self._left_ns = previous.left_ns if previous else 0
        self._abandoned_ns = previous.abandoned_ns if previous else None
        witnessed = previous.members.values() if previous and previous.is_witnessed else ()
        self._launchers = {m.process.launcher for m in witnessed} - {""}

    def before(self, member: Member) -> list[Piece]:
        """What the time from the attempt's begin to the start of this process was spent on.

        Milestones say since when what was done, each until the next. One that lies before an earlier one takes no time.
        """
        attempt, process, start = self._attempt, member.process, member.begin_ns
        launched = process.launcher_started_ns
        launches = [start if launched is None else min(launched + member.offset_ns, start)]
        if attempt.launched_ns is not None:
            launches.append(min(attempt.launched_ns, start))
        milestones: list[tuple[int, str]] = []
        if self._is_first:
            milestones.append((attempt.begin_ns, Activity.LAUNCHER_INIT))
        else:
            # Teardown lasts as long as signs of the failed processes do. After that a launcher that stayed makes the
            # next rendezvous; but if nobody saw the processes end, when that began is unknown: it counts as detection.
            in_place = process.launcher in self._launchers
            milestones.append((attempt.begin_ns, Activity.TEARDOWN))
            milestones.append((self._left_ns, Activity.RENDEZVOUS if in_place else Activity.DETECTION))
            if self._abandoned_ns is not None and self._abandoned_ns >= self._left_ns and not in_place:
                milestones.append((self._abandoned_ns, Activity.BACKOFF))
        scheduled = self._scheduled
        # By the time of allocation: platforms cut to whole seconds, so a job may seem eligible before it failed.
        if scheduled and (self._is_first or scheduled.allocated_wall_ns >= attempt.begin_ns):
            if not self._is_first:
                milestones.append((milestones[-1][0], Activity.BACKOFF))
            milestones.append((scheduled.eligible_wall_ns, Activity.SCHEDULING))
            milestones.append((scheduled.allocated_wall_ns, Activity.HARDWARE_SETUP))
        launches = [launched_ns for launched_ns in launches if launched_ns >= milestones[-1][0]]
        if launches:
            milestones.append((min(launches), Activity.LAUNCHER_INIT))
        pieces = _pieces(milestones, attempt.begin_ns, start)
        return _overlay(self._launcher, pieces) if self._launcher else pieces


def _pieces(milestones: list[tuple[int, str]], begin: int, end: int) -> list[Piece]:
    pieces, at = [], begin
    for (_, what), (until, _) in zip(milestones, [*milestones[1:], (end, "")], strict=True):
        until = min(max(until, at), end)
        if until > at:
            pieces.append(Piece(at, until, what))
        at = max(at, until)
    return pieces


def _overlay(strong: list[Piece], weak: list[Piece]) -> list[Piece]:
    """`weak` with the stretches that `strong` covers replaced; both in order, each without overlaps."""
    result: list[Piece] = []
    for piece in weak:
        at = piece.begin_ns
        for over in strong:
            begin, end = max(over.begin_ns, at), min(over.end_ns, piece.end_ns)
            if begin < end:
                if begin > at:
                    result.append(Piece(at, begin, piece.what))
                result.append(Piece(begin, end, over.what))
                at = end
        if at < piece.end_ns:
            result.append(Piece(at, piece.end_ns, piece.what))
    return result


# --- steps ---------------------------------------------------------------------------------------------------------


def _stints(attempt: Attempt) -> list[Stint]:
    """The attempt's stints, each rank's taken together with those of others that reach the same steps."""
    together: list[Stint] = []
    for rank in sorted(attempt.members):
        member = attempt.members[rank]
        member.joint, place, reached = [], 0, 0
        for at, stint in enumerate(member.timeline.all_stints()):
            if member.placed:
                stint = _shifted(stint, *member.placed[at])
            place += stint.first < reached  # it went back: what it now reaches it has reached before
            reached = stint.next
            while place < len(together) and not _touch(together[place], stint):
                place += 1
            if place == len(together):
                together.append(Stint(member.process.program, stint.first, stint.next, _samples(stint, member)))
                together[place].restored = stint.restored
            joint = together[place]
            joint.first, joint.next = min(joint.first, stint.first), max(joint.next, stint.next)
            joint.samples = joint.samples if joint.samples == _samples(stint, member) else None
            joint.saved = stint.saved if joint.saved is None else max(joint.saved, stint.saved or 0)
            if stint.restored is not None and stint.first == joint.first:
                joint.restored = min(stint.restored, joint.restored or stint.restored)
            member.joint.append(place)
    return together


def _shifted(stint: RankStint, shift: int, restored: int | None) -> RankStint:
    """The stint in the job's step numbers."""
    saved = None if stint.saved is None else stint.saved + shift
    return RankStint(stint.first + shift, stint.next + shift, stint.batch_size, restored, saved)


def _touch(joint: Stint, stint: RankStint) -> bool:
    return joint.first <= stint.next and stint.first <= joint.next


def _samples(stint: RankStint, member: Member) -> int | None:
    return stint.batch_size and stint.batch_size * member.process.world_size
