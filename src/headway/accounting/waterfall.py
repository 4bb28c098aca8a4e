"""How the ranks of an attempt started together: what held them up, and what more could have run at once.

In come the marks that each rank's `Startup` wrote, on one time axis. Out comes one `Waterfall` for the attempt. Its
critical path leads back from the last stage to end, over whatever each stage had to wait for, and from rank to rank
where ranks meet: it covers the whole wall time of the start-up, gaps included.

What overlap can give is bounded by what no order of stages changes: a stage follows what it needs, ranks meet in `comm`
stages, those never run at once, and one interpreter computes one thing at a time.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import add
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from headway.events.vocabulary import clean_text

BEFORE = "before its start-up"
BETWEEN = "between stages"
STOPPING = "until the rest had stopped"

COMPUTES, WAITS = 1 / 3, 1 / 4
"""A stage that had the processor for more than the one share of its time computes, even if it took turns with another;
for less than the other, it waits."""

NOTABLE_S = 0.1
"""Shorter stages are not worth a word of advice."""


class Stage(NamedTuple):
    """A stage as it was declared."""

    name: str
    activity: str
    lane: str
    computes: bool
    needs: tuple[str, ...]


Graph = tuple[Stage, ...]


class Startup(NamedTuple):
    """One process's start-up as it marked it, in a few hundred bytes; the graph is one object for all ranks."""

    graph: Graph
    serial: bool
    begin_ns: int
    times_ns: tuple[int, ...]
    """Begin and end of each stage in turn, since `begin_ns`; -1 twice if it was never reached."""
    cpu_s: tuple[float, ...]
    failed: tuple[int, ...]
    """Places of the stages that raised, or were cancelled because another had."""

    @property
    def end_ns(self) -> int:
        """When its last stage ended."""
        return self.begin_ns + max(self.times_ns, default=0)

    def moved(self, by_ns: int) -> "Startup":
        """The same, later."""
        return Startup(self.graph, self.serial, self.begin_ns + by_ns, self.times_ns, self.cpu_s, self.failed)

    def rolled_up(self) -> list[str]:
        """As words that `restored` reads. They need no escapes in JSON: a job has hundreds of thousands of them."""
        cpu_ms = [round(1000 * seconds) for seconds in self.cpu_s]
        parts = ([int(self.serial), self.begin_ns], self.times_ns, cpu_ms, self.failed)
        return [_text(self.graph), ";".join(" ".join(map(str, part)) for part in parts)]


def restored(told: Sequence[str]) -> Startup:
    """A start-up that was rolled up."""
    graph, numbers = told
    (serial, begin_ns), times_ns, cpu_ms, failed = (tuple(map(int, part.split())) for part in numbers.split(";"))
    return Startup(_graph(graph), bool(serial), begin_ns, times_ns, tuple(ms / 1000 for ms in cpu_ms), failed)


def startup_of(attrs: Mapping[str, Any]) -> Startup | None:
    """What a mark `Told.STARTUP` says; None if it is not one of ours."""
    try:
        begin_ns, stages = int(attrs["begin_ns"]), list(attrs["stages"])
        declared = tuple(_declared(stage) for stage in stages)
        until_ns = max((int(stage.get(key) or 0) for stage in stages for key in ("begin_ns", "end_ns")), default=0)
        times = [at for stage in stages for at in _times(stage, begin_ns, until_ns)]
        cpu_s = tuple(round(1000 * float(stage.get("cpu_s") or 0.0)) / 1000 for stage in stages)
        failed = tuple(at for at, stage in enumerate(stages) if stage.get("failed") and times[2 * at] >= 0)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    if len({stage.name for stage in declared}) < len(declared):
        return None
    return Startup(_shared(declared), bool(attrs.get("serial")), begin_ns, tuple(times), cpu_s, failed)


def _declared(told: Mapping[str, Any]) -> Stage:
    name, activity, lane = (clean_text(str(told.get(key) or "")) for key in ("name", "activity", "lane"))
    needs = tuple(clean_text(str(need)) for need in told.get("needs") or ())
    return Stage(name, activity, lane, bool(told.get("computes")), needs)


def _times(told: Mapping[str, Any], since_ns: int, until_ns: int) -> tuple[int, int]:
    """Begin and end of a stage; one that was cancelled has no end, and ran until the others had ended."""
    begin = int(told.get("begin_ns") or 0)
    if begin <= 0:
        return -1, -1
    end = int(told.get("end_ns") or 0) or until_ns
    return max(begin - since_ns, 0), max(end - since_ns, begin - since_ns, 0)


def _text(graph: Graph) -> str:
    stages = ((s.name, s.activity, s.lane, "1" * s.computes, *s.needs) for s in graph)
    return ";".join(",".join(quote(word, safe="") for word in stage) for stage in stages)


@lru_cache(maxsize=256)
def _graph(text: str) -> Graph:
    stages = []
    for told in text.split(";") if text else ():
        name, activity, lane, computes, *needs = map(unquote, told.split(","))
        stages.append(Stage(name, activity, lane, bool(computes), tuple(needs)))
    return _shared(tuple(stages))


@lru_cache(maxsize=256)
def _shared(graph: Graph) -> Graph:
    """The one object for all graphs that are equal."""
    return graph


# --- one attempt ---------------------------------------------------------------------------------------------------


class Leg(NamedTuple):
    """A part of the critical path: a stage on one rank, or a gap."""

    rank: int
    stage: str
    """Empty for a gap …"""
    gap: str
    """… which this names."""
    begin_ns: int
    end_ns: int

    @property
    def took_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.begin_ns


class Row(NamedTuple):
    """A stage as it ran on one rank, in job time."""

    stage: Stage
    begin_ns: int
    end_ns: int
    cpu_s: float
    failed: bool
    cancelled: bool
    """Another stage had failed."""
    after: str
    """The stage of this rank that it had to wait for; empty if it had not."""
    last_rank: int | None
    """Of a `comm` stage: the rank that came to it last."""


class Move(NamedTuple):
    """A stage that waited for one it does not need."""

    stage: Stage
    behind: str
    took_s: float
    cpu_s: float


@dataclass
class Waterfall:
    """The start-up of all ranks of one attempt."""

    attempt: int
    runs: dict[int, Startup]
    """By rank, all of one graph, on the job's time axis."""
    uncontended: "Waterfall | None" = None
    """The same graph, one stage after another: how long its stages take when nothing runs beside them."""
    strangers: int = 0
    """Ranks left out because they ran another graph."""

    @property
    def graph(self) -> Graph:
        """The stages, as declared."""
        return self._first.graph

    @property
    def is_serial(self) -> bool:
        """Whether its stages ran one after another, as asked."""
        return self._first.serial

    @property
    def _first(self) -> Startup:
        return next(iter(self.runs.values()))

    @cached_property
    def begin_ns(self) -> int:
        """When the first rank began."""
        return min(run.begin_ns for run in self.runs.values())

    @cached_property
    def wall_ns(self) -> int:
        """From there until the last stage ended on the last rank."""
        return max(0, max(run.end_ns for run in self.runs.values()) - self.begin_ns)

    @cached_property
    def failed(self) -> list[tuple[int, str]]:
        """Rank and name of the first stage that failed on each rank where one did, in the order they failed."""
        return [(rank, self.graph[at].name) for rank, at in self._failed]

    @cached_property
    def _failed(self) -> list[tuple[int, int]]:
        first = {
            rank: min(run.failed, key=lambda at: run.times_ns[2 * at + 1])
            for rank, run in self.runs.items()
            if run.failed
        }
        return sorted(first.items(), key=lambda each: self._times(*each)[1])

    # --- the critical path ---

    @cached_property
    def path(self) -> list[Leg]:
        """What the start-up took its time for, in order and without a hole."""
        rank, stage = self._last()
        at_ns, seen = self.begin_ns if stage is None else self._times(rank, stage)[1], set[tuple[int, int]]()
        legs = [Leg(rank, "", STOPPING, at_ns, self.begin_ns + self.wall_ns)]
        while stage is not None:
            if self.graph[stage].lane == "comm":
                rank = self._came_last(stage, rank, at_ns)
            seen.add((rank, stage))
            begin_ns = self._times(rank, stage)[0]
            legs.append(Leg(rank, self.graph[stage].name, "", begin_ns, at_ns))
            stage = self._waited_for(rank, stage, seen)
            at_ns = begin_ns if stage is None else self._times(rank, stage)[1]
            legs.append(Leg(rank, "", BETWEEN, at_ns if stage is not None else self.runs[rank].begin_ns, begin_ns))
        legs.append(Leg(rank, "", BEFORE, self.begin_ns, self.runs[rank].begin_ns))
        return [leg for leg in reversed(legs) if leg.took_ns]

    def _last(self) -> tuple[int, int | None]:
        """The stage that the start-up ended with, and its rank: the last to end, or the first to fail."""
        if self._failed:
            return self._failed[0]
        rank = max(self.runs, key=lambda rank: self.runs[rank].end_ns)
        ends = self.runs[rank].times_ns[1::2]
        return rank, ends.index(max(ends)) if max(ends) >= 0 else None

    @cached_property
    def rank(self) -> int:
        """The rank that held up the start: most of the critical path is its own; or else the first to fail."""
        if self._failed:
            return self._failed[0][0]
        took: Counter[int] = Counter()
        for leg in reversed(self.path):  # of equals, the one that was last
            took[leg.rank] += leg.took_ns
        return took.most_common(1)[0][0] if took else min(self.runs)

    def rows(self, rank: int) -> list[Row]:
        """The stages that ran on a rank, in the order they began."""
        run, rows = self.runs[rank], []
        for at, stage in enumerate(self.graph):
            begin, end = self._times(rank, at)
            if run.times_ns[2 * at] >= 0:
                before = self._waited_for(rank, at, {(rank, at)})
                after = "" if before is None else self.graph[before].name
                last = self._came_last(at, rank, end) if stage.lane == "comm" else None
                failed = (rank, at) in self._failed
                cancelled = at in run.failed and not failed
                rows.append(Row(stage, begin, end, run.cpu_s[at], failed, cancelled, after, last))
        return sorted(rows, key=lambda row: (row.begin_ns, row.end_ns))

    def _times(self, rank: int, at: int) -> tuple[int, int]:
        run = self.runs[rank]
        return run.begin_ns + run.times_ns[2 * at], run.begin_ns + run.times_ns[2 * at + 1]

    def _came_last(self, at: int, rank: int, until_ns: int) -> int:
        """The rank whose stage began last of all that met in it; this one, if none came later than it."""
        began = {
            other: run.begin_ns + run.times_ns[2 * at] for other, run in self.runs.items() if run.times_ns[2 * at] >= 0
        }
        later = {other: ns for other, ns in began.items() if began[rank] < ns < until_ns}
        return max(later, key=lambda other: later[other]) if later else rank

    def _waited_for(self, rank: int, at: int, seen: Collection[tuple[int, int]]) -> int | None:
        """Of the stages that this one could not run beside, that which ended last before it began."""
        times = self.runs[rank].times_ns
        before = [
            other
            for other in range(len(self.graph))
            if 0 <= times[2 * other + 1] <= times[2 * at] and (rank, other) not in seen and self._excludes(other, at)
        ]
        return max(before, key=lambda other: times[2 * other + 1], default=None)

    def _excludes(self, earlier: int, later: int) -> bool:
        a, b = self.graph[earlier], self.graph[later]
        in_turn = a.lane == b.lane and a.lane in ("main", "comm")
        return a.name in b.needs or in_turn or (a.computes and b.computes) or self.is_serial

    # --- what overlap gives ---

    @cached_property
    def busy_ns(self) -> int:
        """All stages of the rank that held up the start, one after another, as they took here."""
        times = self.runs[self.rank].times_ns
        return sum(times[1::2]) - sum(times[::2])

    @cached_property
    def serial_ns(self) -> int:
        """How long the start-up would take with one stage after another on every rank."""
        order = _order(self.graph)
        one_by_one = {later: [earlier] for earlier, later in pairwise(order)}
        return self.wall_ns if self.is_serial else self._longest(one_by_one)

    @cached_property
    def saved_ns(self) -> int:
        """What overlap has saved: nothing where stages failed, since nobody knows what the rest would have taken."""
        return 0 if self.failed else max(self.serial_ns - self.wall_ns, 0)

    @cached_property
    def could_save_ns(self) -> int:
        """The most that further overlap could save."""
        return 0 if self.failed else max(self.wall_ns - self._least_ns, 0)

    @cached_property
    def _least_ns(self) -> int:
        """No start-up of these stages is shorter, whichever lanes they run in."""
        places = {stage.name: at for at, stage in enumerate(self.graph)}
        needs = {at: [places[n] for n in stage.needs if n in places] for at, stage in enumerate(self.graph)}
        meeting, computing = max(self._late), self._late
        for at, stage in enumerate(self.graph):
            took = self._took[at]
            if stage.lane == "comm":
                meeting += took[0]
            if stage.computes:
                computing = list(map(add, computing, map(min, took, self._cpu_ns(at))))
        return max(self._longest(needs), meeting, max(computing))

    def _longest(self, needs: Mapping[int, list[int]]) -> int:
        """The longest way through the stages of all ranks, which meet in every `comm` stage."""
        done: dict[int, list[int]] = {}
        for at in _order(self.graph):
            ready = self._late
            for need in needs.get(at, ()):
                ready = list(map(max, ready, done.get(need, ready)))
            if self.graph[at].lane == "comm":
                ready = [max(ready)] * len(ready)
            done[at] = list(map(add, ready, self._took[at]))
        return max(map(max, done.values()))

    @cached_property
    def _late(self) -> list[int]:
        """How much later than the first each rank began."""
        return [run.begin_ns - self.begin_ns for run in self.runs.values()]

    @cached_property
    def _took(self) -> list[list[int]]:
        """What each stage takes on each rank when nothing runs beside it, as far as that is known. Where ranks meet,
        that is the least that any of them took once the last had come: all else may have been waiting."""
        return [self._met(at) if stage.lane == "comm" else self._lasted(at) for at, stage in enumerate(self.graph)]

    def _lasted(self, at: int) -> list[int]:
        return [run.times_ns[2 * at + 1] - run.times_ns[2 * at] for run in self._undisturbed]

    def _met(self, at: int) -> list[int]:
        times = [(run.begin_ns, *run.times_ns[2 * at : 2 * at + 2]) for run in self._undisturbed]
        last_ns = max((since + begin for since, begin, _ in times if begin >= 0), default=0)
        least_ns = min((since + end for since, begin, end in times if begin >= 0), default=0) - last_ns
        return [max(least_ns, 0)] * len(times)

    def _cpu_ns(self, at: int) -> list[int]:
        return [round(run.cpu_s[at] * 1e9) for run in self._undisturbed]

    @cached_property
    def _undisturbed(self) -> list[Startup]:
        if self.uncontended is None:
            return list(self.runs.values())
        alone = self.uncontended.runs
        other = next(iter(alone.values()))
        return [alone.get(rank, other) for rank in self.runs]

    # --- what to do ---

    @cached_property
    def move(self) -> Move | None:
        """The longest stage on the critical path that only waits, and would fit beside the one that it ran after, or
        that ran after it, since neither needs the other."""
        found: list[Move] = []
        legs = [leg for leg in self.path if leg.stage]
        rows = {rank: {row.stage.name: row for row in self.rows(rank)} for rank in {leg.rank for leg in legs}}
        for a, b in pairwise(legs):
            if a.rank == b.rank and not self._builds_on(b.stage, a.stage):
                pair = rows[a.rank][a.stage], rows[b.rank][b.stage]
                found += [_move(*order) for order in (pair, pair[::-1]) if _may_move(*order)]
        return max(found, key=lambda move: move.took_s, default=None)

    def _builds_on(self, name: str, other: str) -> bool:
        needs = {stage.name: stage.needs for stage in self.graph}
        reached, new = set[str](), [name]
        while new:
            reached.update(new)
            new = [need for each in new for need in needs.get(each, ()) if need not in reached]
        return other in reached

    def notes(self) -> list[str]:
        """What is wrong with it, in words."""
        where = f"start-up of attempt {self.attempt}"
        failed = self.failed
        notes = [f"{where}: stage {name} failed on rank {rank}" for rank, name in failed[:1]]
        if len(failed) > 1:
            notes[0] += f", and one on each of {len(failed) - 1} other ranks after it"
        if self.strangers:
            notes.append(f"{where}: {self.strangers} ranks declared other stages than the rest, and are left out")
        rows = [] if self.is_serial else self.rows(self.rank)
        main = [row for row in rows if row.stage.lane == "main"]
        for row in rows:
            beside = max(main, key=lambda other: _shared_s(row, other), default=None)
            if beside is not None and _competes(row, beside):
                notes.append(
                    f"{where}: stage {row.stage.name} computed {row.cpu_s:.1f} s of its {_seconds(row):.1f} s beside "
                    f"{beside.stage.name}, and both may have waited for the interpreter: declare computes=True, or "
                    f'lane="process"'
                )
        return notes


def _seconds(row: Row) -> float:
    return (row.end_ns - row.begin_ns) / 1e9


def _shared_s(row: Row, other: Row) -> float:
    return (min(row.end_ns, other.end_ns) - max(row.begin_ns, other.begin_ns)) / 1e9


def _competes(row: Row, beside: Row) -> bool:
    """Whether a stage took the interpreter from another without having said that it would."""
    silent = row.stage.lane in ("io", "comm") and not row.stage.computes
    return (
        silent and row.cpu_s > max(COMPUTES * _seconds(row), NOTABLE_S) and _shared_s(row, beside) > _seconds(row) / 10
    )


def _may_move(row: Row, other: Row) -> bool:
    """Whether a stage only waits, and what keeps it from doing so beside another is how it was declared."""
    held = row.stage.lane == "main" or (row.stage.computes and row.stage.lane != "process")
    both_meet = row.stage.lane == other.stage.lane == "comm"
    return held and not both_meet and row.cpu_s < WAITS * _seconds(row) and _seconds(row) >= NOTABLE_S


def _move(row: Row, other: Row) -> Move:
    return Move(row.stage, other.stage.name, _seconds(row), row.cpu_s)


def _order(graph: Graph) -> list[int]:
    """The stages' places, each behind what it needs, else as declared; a circle stays as declared."""
    names, left, order = {stage.name for stage in graph}, list(range(len(graph))), list[int]()
    done: set[str] = set()
    while left:
        at = next((at for at in left if done.issuperset(names.intersection(graph[at].needs))), left[0])
        left.remove(at)
        order.append(at)
        done.add(graph[at].name)
    return order


def gather_waterfalls(attempts: Iterable[tuple[int, Mapping[int, Sequence[Startup]]]]) -> list[Waterfall]:
    """One for each start-up of each attempt, given every rank's in job time. A script may start up more than once."""
    found: list[Waterfall] = []
    for number, ranks in attempts:
        for turn in range(max(map(len, ranks.values()), default=0)):
            runs = {rank: told[turn] for rank, told in ranks.items() if turn < len(told) and told[turn].graph}
            if runs:
                alike = _alike(runs)
                found.append(Waterfall(number, alike, strangers=len(runs) - len(alike)))
    alone = {each.graph: each for each in found if each.is_serial and not each.failed}
    for each in found:
        each.uncontended = alone.get(each.graph) if not each.is_serial else None
    return found


def _alike(runs: Mapping[int, Startup]) -> dict[int, Startup]:
    """The ranks' start-ups as runs of one graph: of stages that a rank never began, its mark says nothing. Those that
    declared a stage otherwise than the others are left out."""
    some = next(iter(runs.values()))
    if all(run.graph is some.graph and run.serial == some.serial for run in runs.values()):
        return dict(runs)
    (serial, largest), _ = Counter((run.serial, run.graph) for run in runs.values()).most_common(1)[0]
    stages = {stage.name: stage for stage in largest}
    for run in runs.values():
        if run.graph is not largest:
            stages |= {stage.name: stage for stage in run.graph if stage.name not in stages}
    graph = _shared(tuple(stages.values()))
    fit = {rank for rank, run in runs.items() if run.graph is graph or all(stages[s.name] == s for s in run.graph)}
    return {rank: _laid(run, graph) for rank, run in runs.items() if rank in fit and run.serial == serial}


def _laid(run: Startup, graph: Graph) -> Startup:
    """The same start-up, told as one of a graph with more stages."""
    if run.graph is graph:
        return run
    own = {stage.name: at for at, stage in enumerate(run.graph)}
    places = [own.get(stage.name) for stage in graph]
    times = [ns for at in places for ns in ((-1, -1) if at is None else run.times_ns[2 * at : 2 * at + 2])]
    cpu_s = tuple(0.0 if at is None else run.cpu_s[at] for at in places)
    failed = tuple(there for there, at in enumerate(places) if at in run.failed)
    return Startup(graph, run.serial, run.begin_ns, tuple(times), cpu_s, failed)
