"""Who a job's processes were: those that trained, and the launchers that started them, all on one time axis."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

from headway.accounting.timeline import Timeline
from headway.events.vocabulary import Process, ProcessGone, Saved

TICK_NS = 10_000_000
"""The kernel tells in such ticks when a process started: it may seem to begin before the one before it ended."""

NEVER_NS = 1 << 62
"""Later than any moment."""


@dataclass(slots=True)
class Member:
    """One process of a job, on the job's time axis: a rank in one attempt, or a launcher."""

    name: str
    timeline: Timeline
    process: Process
    offset_ns: int
    """Adds to the process's own clock to give job time."""
    gone: ProcessGone | None = None
    """Its end, as somebody else saw it."""
    alive: bool = False
    lost: bool = False
    """It lived when its node was last heard of, and the node was not heard of again."""
    was_numbered: bool = False
    """Whether it trained side by side with others, without a process group: then its rank is made up."""
    went_on_as: str = ""
    """The process that it became, by `exec`: then it did not fail, though it never said that it ended."""
    joint: list[int] = field(default_factory=list)
    """For each of its stints, which of the attempt's it is part of."""
    placed: Sequence[tuple[int, int | None]] = ()
    """For each of its stints, what to add to its own step numbers to give the job's, and the job's step that it was
    restored to. Empty where the process knew both itself."""

    @property
    def is_launcher(self) -> bool:
        """Whether it only started others."""
        return self.process.role == "launcher"

    @property
    def begin_ns(self) -> int:
        """When the operating system started it."""
        return min(self.process.started_ns, self.process.t_ns) + self.offset_ns

    @property
    def last_sign_ns(self) -> int:
        """The last moment it is known to have lived."""
        gone = self.gone.t_ns if self.gone else 0
        return max(self.timeline.last_ns, gone, self.process.t_ns) + self.offset_ns

    @property
    def life(self) -> tuple[int, int]:
        """From its start to its last sign, which has no end while it lives."""
        return self.begin_ns, NEVER_NS if self.alive else max(self.last_sign_ns, self.begin_ns + 1)

    @property
    def is_clean(self) -> bool:
        """Whether it ended by itself, without an error. A launcher does not say so itself."""
        ended, gone = self.timeline.ended, self.gone
        said = gone is not None if self.is_launcher else ended is not None and ended.error is None
        return self.has_stopped or bool(self.went_on_as) or (said and (gone is None or gone.exit_code in (None, 0)))

    @property
    def has_stopped(self) -> bool:
        """Whether it stopped on notice: its work is saved, and not done. Its exit code then says just that."""
        if self.gone is not None and self.gone.stopped:
            return True
        ended = self.timeline.ended
        return ended is not None and ended.error is None and ended.category is not None

    @property
    def failed_at_ns(self) -> int | None:
        """When it failed, where that was seen: by itself in an exception, or by whoever watched it."""
        ended, gone = self.timeline.ended, self.gone
        if ended is not None and ended.error is not None:
            return ended.t_ns + self.offset_ns
        if gone is not None and not self.is_clean:
            return gone.t_ns + self.offset_ns
        return None

    @property
    def trained_ns(self) -> tuple[int, int]:
        """From its first step to its last; nothing if it made none."""
        timeline = self.timeline
        if timeline.first_step is None:
            return (0, 0)
        ends = (timeline.last_step_ns or 0, timeline.cell.end_ns if timeline.cell else 0)
        return timeline.first_step[0] + self.offset_ns, max(ends) + self.offset_ns

    @property
    def checkpoints(self) -> list[tuple[int, str, int]]:
        """When it saved or restored which step of the job; what it loaded besides is left out."""
        told = []
        for at, record in self.timeline.checkpoints:
            shift, restored = self.placed[at] if 0 <= at < len(self.placed) else (0, None)
            if isinstance(record, Saved):
                told.append((record.t_ns + self.offset_ns, "saved", record.step + shift))
            elif (step := restored if record.step is None else record.step) is not None:
                told.append((record.t_ns + self.offset_ns, "restored", step))
        return told


def gather_members(
    timelines: dict[str, Timeline], alive: Collection[str], lost: Collection[str]
) -> tuple[list[Member], list[Member]]:
    """The processes whose time is the job's, and its launchers."""
    offsets = _boot_offsets(timelines.values())
    watched = _ends_of_others(timelines)
    by_role: dict[str, list[Member]] = {}
    for name, timeline in timelines.items():
        process = timeline.process
        if process is not None:
            seen = (watched.get(name, timeline.gone), name in alive, name in lost)
            by_role.setdefault(process.role, []).append(Member(name, timeline, process, offsets[process.boot], *seen))
    ranks, processes, launchers = (by_role.get(role, []) for role in ("rank", "process", "launcher"))
    _follow_execs([*ranks, *processes], launchers)
    if launchers:
        _pass_on_ends(launchers, [*ranks, *processes])
    if ranks:
        _number(ranks)
        return [*ranks, *_apart_from(ranks, processes)], launchers
    if processes:
        return _launched(processes), launchers
    if launchers:
        last = max(launchers, key=lambda launcher: (launcher.begin_ns, launcher.name))
        return [replace(last, process=replace(last.process, rank=0, world_size=1))], launchers
    return [], []


def _ends_of_others(timelines: dict[str, Timeline]) -> dict[str, ProcessGone]:
    """How processes ended, as others saw it. A supervisor knows best whether a rank did its work. Against a witness the
    rank's own word counts if the program said that it is done, or was killed: some launchers end their ranks then."""
    found = {}
    for timeline in timelines.values():
        is_witness = timeline.process is not None and timeline.process.role == "launcher"
        for gone in timeline.others_gone:
            theirs = timelines.get(gone.name)
            ended = theirs.ended if theirs is not None else None
            if not is_witness or ended is None or ((gone.exit_code or 0) > 0 and not ended.done):
                found[gone.name] = gone
    return found


def _boot_offsets(timelines: Iterable[Timeline]) -> dict[str, int]:
    """Wall minus monotonic time for each boot, as its first process read it: later jumps of the wall clock are void."""
    first: dict[str, Process] = {}
    for timeline in timelines:
        process = timeline.process
        if process is not None and (process.boot not in first or process.t_ns < first[process.boot].t_ns):
            first[process.boot] = process
    return {boot: process.wall_ns - process.t_ns for boot, process in first.items()}


def _follow_execs(members: list[Member], launchers: list[Member]) -> None:
    """A program that replaces itself (`exec`) stays the same process, and the kernel goes on telling its first start.
    So what came before it did not fail; and it began no earlier than others ended that ran before it."""
    latest: dict[tuple[str, str, int], Member] = {}
    first: dict[tuple[str, str, int], str] = {}
    began = {_holder(each): each.process.started_ns for each in launchers}
    for member in sorted(members, key=lambda each: each.process.t_ns + each.offset_ns):
        holder, started_ns = _holder(member), member.process.started_ns
        earlier = latest.get(holder)
        is_same = earlier is not None and (
            abs(earlier.process.started_ns - started_ns) < TICK_NS or member.name.startswith(f"{first[holder]}-")
        )
        if earlier is not None and is_same:
            earlier.went_on_as = member.name
        if is_same or abs(began.get(holder, -NEVER_NS) - started_ns) < TICK_NS:
            here_ns = member.process.t_ns + member.offset_ns
            ends = [each.last_sign_ns for each in members if each is not member and each.last_sign_ns <= here_ns]
            began_ns = max([started_ns, *(end - member.offset_ns for end in ends)])
            member.process = replace(member.process, started_ns=min(began_ns, member.process.t_ns))
        first[holder] = first[holder] if is_same else member.name
        latest[holder] = member


def _number(ranks: list[Member]) -> None:
    """Number processes that trained side by side without a process group: each took itself for the last rank."""
    alone = [each for each in ranks if each.process.world_size == each.process.rank + 1]
    together: list[Member] = []
    for member in [*sorted(alone, key=lambda each: each.begin_ns), None]:
        if member is not None and any(_side_by_side(member, other) for other in together):
            together.append(member)
            continue
        have_numbers = len({each.process.rank for each in together}) == len(together)
        for number, each in enumerate(together if len(together) > 1 else ()):
            rank = each.process.rank if have_numbers else number
            each.process = replace(each.process, rank=rank, world_size=len(together))
            each.was_numbered = not have_numbers
        together = [member] if member is not None else []


def _side_by_side(one: Member, other: Member) -> bool:
    """Whether two processes trained at the same time, for at least half of what the shorter one did."""
    spans = [each.trained_ns for each in (one, other)]
    if one.process.attempt is not None or not all(end for _, end in spans):
        return False
    (begin, end), (its_begin, its_end) = spans
    return 2 * (min(end, its_end) - max(begin, its_begin)) > min(end - begin, its_end - its_begin)


def _pass_on_ends(launchers: list[Member], others: list[Member]) -> None:
    """A launcher that became what it launched (`exec`) is the same process: its end is the other's as well.

    A process id has one holder at a time, so whoever wrote with the launcher's id in the launcher's lifetime was it; of
    several, the last to begin was it at the end.
    """
    holders: dict[tuple[str, str, int], list[Member]] = {}
    for member in others:
        holders.setdefault(_holder(member), []).append(member)
    for launcher in launchers:
        gone = launcher.gone
        same = [
            member
            for member in holders.get(_holder(launcher), [])
            if gone is not None and launcher.process.started_ns <= member.process.t_ns <= gone.t_ns
        ]
        if same:
            last = max(same, key=lambda member: member.process.t_ns)
            last.gone = gone if last.gone is None or last.gone.exit_code is None else last.gone


def _holder(member: Member) -> tuple[str, str, int]:
    return member.process.boot, member.process.node, member.process.pid


def _apart_from(ranks: list[Member], processes: list[Member]) -> list[Member]:
    """The processes that ran when no rank did, and so prepared the training, followed it or began it again. Of those
    beside a rank, only the ones that its own launcher started are more than helpers."""
    lives = _union([rank.life for rank in ranks])
    siblings = {_started_by(rank) for rank in ranks if rank.process.launcher}
    return [member for member in processes if _started_by(member) in siblings or not _meets(lives, member.life)]


def _started_by(member: Member) -> tuple[str, str]:
    return member.process.boot, member.process.launcher


def _union(lives: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(lives):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _meets(lives: list[tuple[int, int]], life: tuple[int, int]) -> bool:
    at = bisect_left(lives, (life[1],)) - 1
    return at >= 0 and lives[at][1] > life[0]


def _launched(processes: list[Member]) -> list[Member]:
    """The processes that started no others: those in whose lifetime none but their siblings started, on their machine.
    If there are no such, all."""
    boots: dict[str, list[Member]] = {}
    for member in sorted(processes, key=lambda member: member.begin_ns):
        boots.setdefault(member.process.boot, []).append(member)
    found = [
        member
        for together in boots.values()
        for at, member in enumerate(together)
        if not _launches(member, islice(together, at + 1, None))
    ]
    return found or processes


def _launches(member: Member, later: Iterable[Member]) -> bool:
    begin, end = member.life
    for other in takewhile(lambda other: other.begin_ns < end, later):
        siblings = member.process.launcher and _started_by(member) == _started_by(other)
        if other.begin_ns > begin and other.process.pid != member.process.pid and not siblings:
            return True
    return False
