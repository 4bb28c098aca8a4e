"""Which rank holds up a job that makes no progress, in which collective, and where in the script.

The Flight Recorder's entries, where ranks have them, say who entered which collective; the stacks say where a rank is
instead. Stacks alone serve too. Dumps of several nodes are one mapping; ranks may be missing from it.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal, Protocol

Kind = Literal["missing_rank", "mismatch", "same_collective", "not_in_collective", "left_early"]
Entry = Mapping[str, Any]

PLACES_SHOWN = 8
"""How many different places of ranks the text lists: stuck ranks first."""


class Dump(Protocol):
    """What is known of one rank."""

    @property
    def flight(self) -> Sequence[Entry] | None: ...
    @property
    def stacks(self) -> str: ...
    @property
    def state(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Why nothing moves."""

    stuck_ranks: tuple[int, ...]
    """Those to look at: they did not enter, or differ from the others; all, if no one stands out."""
    collective: str
    """What the others wait in, such as "all_reduce"; empty if nobody is in a collective."""
    kind: Kind
    where: str
    """The innermost line of the user's own code that the first stuck rank with a stack is in; empty if none has one."""
    text: str
    """The same in plain lines, for a terminal."""


def explain(dumps: Mapping[int, Dump], left: Collection[int] = ()) -> Finding:
    """Which ranks are stuck, and in or before which collective. `left` are ranks that have ended with exit code 0."""
    calls = {rank: call_in(dump.stacks) for rank, dump in sorted(dumps.items())}
    waits = [*_collective_waits(dumps, calls), *_pair_waits(dumps)]
    halted = {rank for rank, dump in dumps.items() if dump.state}
    verdict = _verdict_of_flights(waits, calls, halted) if waits else _verdict_of_stacks(calls, halted)
    if left:
        waiting = {rank for wait in waits for rank in wait.waiting} | {rank for rank in calls if calls[rank].collective}
        verdict = _without_those_that_left(verdict, sorted(left), sorted(waiting))
    where = next((calls[rank].where for rank in verdict.stuck if rank in calls and calls[rank].where), "")
    return Finding(
        stuck_ranks=tuple(sorted(verdict.stuck)),
        collective=verdict.collective,
        kind=verdict.kind,
        where=where,
        text="\n".join([verdict.headline, *_places(verdict.stuck, calls, dumps)]),
    )


@dataclass(frozen=True)
class _Verdict:
    kind: Kind
    stuck: list[int]
    collective: str
    headline: str


# --- what the Flight Recorder says -----------------------------------------------------------------------------------

# Of these, every rank must bring as much as every other. Of the rest, ranks may bring different amounts.
_ALIKE = {"all_reduce", "allreduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base", "barrier"}

_PAIR = re.compile(r"(?:send|recv) (\d+)(?:->|<-)(\d+)")


@dataclass(frozen=True)
class _Wait:
    """A collective that some ranks of a group are in, and which does not end."""

    title: str
    """Its name, number, size and group, for people."""
    name: str
    waiting: frozenset[int]
    missing: frozenset[int]
    sides: Mapping[str, list[int]]
    """Where ranks of a group did different things under the same number: which did which."""


def is_open(entry: Entry) -> bool:
    """Whether a collective was begun and is not over."""
    return not entry["retired"] and entry["state"] != "completed"


def _collective_waits(dumps: Mapping[int, Dump], calls: Mapping[int, "Call"]) -> Iterator[_Wait]:
    # The same name may stand for several groups, of different ranks: torch's split groups share one.
    groups: dict[tuple[str, tuple[int, ...]], dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for rank, entry in _entries(dumps):
        if not entry.get("is_p2p"):
            groups[entry["process_group"][0], tuple(entry.get("ranks") or ())][rank].append(entry)
    for (_, members), histories in groups.items():
        if wait := _wait_in_group(members, histories, dumps, calls):
            yield wait


def _entries(dumps: Mapping[int, Dump]) -> Iterator[tuple[int, Entry]]:
    return ((rank, entry) for rank, dump in sorted(dumps.items()) for entry in dump.flight or ())


def _wait_in_group(
    members: Collection[int],
    histories: Mapping[int, Sequence[Entry]],
    dumps: Mapping[int, Dump],
    calls: Mapping[int, "Call"],
) -> _Wait | None:
    open_entries = [entry for history in histories.values() for entry in history if is_open(entry)]
    if not open_entries:
        return None
    first = min(open_entries, key=_number)
    waiting = frozenset(rank for rank, history in histories.items() if any(map(is_open, history)))
    if (differing := _first_difference(histories)) is not None:
        name = " / ".join(sorted({_name(entry) for entry in differing.values()}))
        return _Wait(_title(first, name), name, waiting, frozenset(), _sides(differing))
    missing = _absent(members or dumps.keys(), _number(first), histories, dumps, calls)
    return _Wait(_title(first, _signature(first)), _name(first), waiting, missing, {})


def _absent(
    members: Collection[int],
    number: int,
    histories: Mapping[int, Sequence[Entry]],
    dumps: Mapping[int, Dump],
    calls: Mapping[int, "Call"],
) -> frozenset[int]:
    """The members that did not enter a collective. Those of which nothing is known count only if no other does."""
    last = {rank: max(map(_number, history)) for rank, history in histories.items()}
    entered = {rank for rank in last if last[rank] >= number}
    # One that could not tell its collectives may wait in this one all the same, unless it cannot run at all.
    likely = {rank for rank in calls if dumps[rank].flight is None and calls[rank].collective and not dumps[rank].state}
    absent = frozenset(members) - entered - likely
    return absent & dumps.keys() or absent


def _first_difference(histories: Mapping[int, Sequence[Entry]]) -> dict[int, Entry] | None:
    """The first number under which ranks of one group have different collectives: rank → entry."""
    by_number: dict[int, dict[int, Entry]] = defaultdict(dict)
    for rank, history in histories.items():
        for entry in history:
            by_number[_number(entry)].setdefault(rank, entry)  # of those launched as one, the first
    differ = (number for number in sorted(by_number) if len(set(map(_signature, by_number[number].values()))) > 1)
    return next((by_number[number] for number in differ), None)


def _sides(entries: Mapping[int, Entry]) -> dict[str, list[int]]:
    sides = defaultdict(list)
    for rank, entry in entries.items():
        sides[_signature(entry)].append(rank)
    return dict(sides)


def _pair_waits(dumps: Mapping[int, Dump]) -> Iterator[_Wait]:
    """The sends and receives whose other end is not there. Their numbers are each rank's own: they are not compared."""
    open_pairs = [(rank, entry) for rank, entry in _entries(dumps) if entry.get("is_p2p") and is_open(entry)]
    ends = {(rank, _peer(rank, entry)) for rank, entry in open_pairs}
    for rank, entry in open_pairs:
        peer = _peer(rank, entry)
        if peer is not None:
            missing = frozenset() if (peer, rank) in ends else frozenset([peer])
            yield _Wait(_title(entry, _name(entry)), _name(entry), frozenset([rank]), missing, {})


def _peer(rank: int, entry: Entry) -> int | None:
    found = _PAIR.search(entry["profiling_name"])
    if found is None:
        return None
    members = entry.get("ranks")
    ends = [members[int(end)] if members else int(end) for end in found.groups()]
    return next((end for end in ends if end != rank), None)


def _number(entry: Entry) -> int:
    return int(entry["collective_seq_id"])


def _name(entry: Entry) -> str:
    return str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])


def _signature(entry: Entry) -> str:
    name = _name(entry)
    sizes = entry.get("input_sizes") if name in _ALIKE else None
    return f"{name} of {', '.join(map(str, sizes))}" if sizes else name


def _title(entry: Entry, what: str) -> str:
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    name, description = entry["process_group"]
    return f"{what} (number {number} of group {description if description not in ('', 'undefined') else name})"


def _verdict_of_flights(waits: Sequence[_Wait], calls: Mapping[int, "Call"], halted: Collection[int]) -> _Verdict:
    for wait in waits:
        if wait.sides:
            return _different(wait.name, wait.sides)
    waiting = {rank for wait in waits for rank in wait.waiting}
    missing = {rank for wait in waits for rank in wait.missing}
    # One that is missing here because it waits there is a victim too; the cause is one that waits nowhere.
    causes = {rank for rank in missing - waiting if rank not in calls or not calls[rank].collective}
    if causes:
        wait = max(waits, key=lambda wait: (len(wait.missing & causes), len(wait.waiting)))
        return _never_entered(sorted(causes), wait.title, wait.name, sorted(wait.waiting - causes))
    if missing:
        return _crossed(waits, calls, missing - waiting)
    widest = max(waits, key=lambda wait: len(wait.waiting))
    return _all_in(widest.title, widest.name, sorted(widest.waiting), halted)


def _crossed(waits: Sequence[_Wait], calls: Mapping[int, "Call"], elsewhere: Collection[int]) -> _Verdict:
    """Ranks wait for each other in a ring, each in another collective."""
    sides: dict[str, list[int]] = {}
    for wait in waits:
        sides.setdefault(wait.title, []).extend(sorted(wait.waiting))
    for rank in sorted(elsewhere):
        sides.setdefault(calls[rank].collective, []).append(rank)
    names = {wait.name for wait in waits} | {calls[rank].collective for rank in elsewhere}
    return _different(" / ".join(sorted(names)), sides)


# --- what the stacks say ---------------------------------------------------------------------------------------------

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|^<|/headway/(launch|instrument|events)/")
_PLUMBING = re.compile(r"/torch/|/lib/python3[^/]*/(?!(site|dist)-packages/)|^<|/headway/(launch|instrument|events)/")
_COLLECTIVE = re.compile(r"/torch/(distributed/(?!checkpoint/|elastic/|launcher/|run\.py)|nn/parallel/distributed\.py)")
_WRAPPERS = {"wrapper", "inner", "_fn", "decorate_context", "_call_impl", "_wrapped_call_impl"}

_DOING = [
    (re.compile(pattern), doing)
    for pattern, doing in (
        (r"<frozen importlib", "imports a module"),
        (r"/torch/autograd/", "is in backward"),
        (r"/torch/utils/data/", "waits for the data loader"),
        (r"/queue\.py (get|put)", "waits at a queue"),
        (r"/threading\.py ", "waits for a lock or a thread"),
        (r"/subprocess\.py ", "waits for a child process"),
        (r"/multiprocessing/|/concurrent/", "waits for another process or thread"),
        (r"/(socket|ssl|selectors)\.py |/urllib3?/|/requests/", "waits for the network"),
        (r"\bsleep\(", "sleeps"),
        (r"\.acquire\(|^with .*lock", "waits for a lock"),
        (r"\b(open|read|readline|readlines|readinto|write|fsync|stat|listdir)\(", "reads or writes files"),
    )
]


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.source}" if self.source else "")


@dataclass(frozen=True)
class Call:
    """What a rank is in, as its stack tells."""

    where: str = ""
    collective: str = ""
    """What of torch.distributed the user's code has called and is in; empty if nothing."""
    doing: str = ""
    """In words, if it is not in a collective."""


def threads_in(stacks: str) -> list[list[Frame]]:
    """Each thread's frames, innermost first; the main thread is the last."""
    threads: list[list[Frame]] = []
    lines = stacks.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=False):
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
        elif threads and (found := _FRAME.match(line)):
            source = after.strip() if after.startswith("    ") else ""
            threads[-1].append(Frame(found["file"], int(found["line"]), found["function"], source))
    return threads


def call_in(stacks: str) -> Call:
    """What a rank is in: what its main thread is, or if that is in backward, a thread that is in a collective."""
    threads = threads_in(stacks)
    if not threads:
        return Call()
    main = _call_of(threads[-1])
    if main.doing != "is in backward":
        return main
    others = (_call_of(frames) for frames in threads[:-1])
    return next((Call(main.where, other.collective) for other in others if other.collective), main)


def _call_of(frames: Sequence[Frame]) -> Call:
    inside = list(takewhile(lambda frame: _LIBRARY.search(frame.file), frames))
    own = frames[len(inside)] if len(inside) < len(frames) else None
    where = own or next((frame for frame in frames if not _PLUMBING.search(frame.file)), None)
    collective = _collective_of(inside)
    return Call(str(where or ""), collective, "" if collective else _doing(inside, own, frames))


def _collective_of(inside: Sequence[Frame]) -> str:
    """What of torch.distributed was called; empty if nothing, or if that is only importing."""
    if any("<frozen importlib" in frame.file for frame in inside):
        return ""
    entered = [it for it in inside if _COLLECTIVE.search(it.file) and it.function not in _WRAPPERS]
    if not entered:
        return ""
    of_ddp = "/nn/parallel/" in entered[-1].file
    return f"DistributedDataParallel.{entered[-1].function}" if of_ddp else entered[-1].function


def _doing(inside: Sequence[Frame], own: Frame | None, frames: Sequence[Frame]) -> str:
    signs = [f"{frame.file} {frame.function}" for frame in inside]
    signs += [own.source] if own and not inside else []  # what it calls is in C, and has no frame
    found = (doing for pattern, doing in _DOING if any(map(pattern.search, signs)))
    in_loader = any("/torch/utils/data/" in frame.file for frame in frames)
    return next(found, "reads data" if in_loader else "")


def _verdict_of_stacks(calls: Mapping[int, Call], halted: Collection[int]) -> _Verdict:
    sides: dict[str, list[int]] = defaultdict(list)
    for rank, call in calls.items():
        if call.collective and rank not in halted:
            sides[call.collective].append(rank)
    if not sides:  # DDP's all_reduce is in C++, behind backward
        in_backward = [rank for rank, call in calls.items() if call.doing == "is in backward"]
        sides = {"backward": in_backward} if in_backward else {}
    inside = sorted(rank for ranks in sides.values() for rank in ranks)
    outside = sorted(calls.keys() - set(inside))
    name = " / ".join(sorted(sides))
    if outside and inside:
        return _never_entered(outside, name, name, inside)
    if inside:
        return _all_in(name, name, inside, ()) if len(sides) == 1 else _different(name, sides)
    return _Verdict("not_in_collective", sorted(halted) or list(calls), "", "No rank is in a collective.")


# --- words -----------------------------------------------------------------------------------------------------------


def _never_entered(missing: list[int], title: str, name: str, waiting: list[int]) -> _Verdict:
    line = f"{_ranks(missing)} {_is(missing)} missing from {title}, in which {_ranks(waiting)} {_is(waiting)} waiting."
    return _Verdict("missing_rank", missing, name, line)


def _different(name: str, sides: Mapping[str, list[int]]) -> _Verdict:
    """Ranks that do different things: the fewest are stuck, or all if no side is the smallest."""
    counts = sorted(map(len, sides.values()))
    few = [ranks for ranks in sides.values() if len(ranks) < counts[-1]] or list(sides.values())
    doing = "; ".join(f"{_ranks(ranks)} in {side}" for side, ranks in sides.items())
    stuck = sorted({rank for ranks in few for rank in ranks})
    return _Verdict("mismatch", stuck, name, f"Ranks are in different collectives: {doing}.")


def _all_in(title: str, name: str, ranks: list[int], halted: Collection[int]) -> _Verdict:
    """All that should be are in it; those that cannot run stand out."""
    stuck = [rank for rank in ranks if rank in halted]
    advice = f"{_ranks(stuck)} cannot run." if stuck else "look at the network, and at the devices."
    line = f"{_ranks(ranks)} {_is(ranks)} in {title}, and it does not end: {advice}"
    return _Verdict("same_collective", stuck or ranks, name, line)


def _without_those_that_left(verdict: _Verdict, left: list[int], waiting: list[int]) -> _Verdict:
    """Blame nobody for having ended well, except where others wait in a collective for just those that have."""
    stuck = [rank for rank in verdict.stuck if rank not in left]
    have_left = f"{_ranks(left)} {'has' if len(left) == 1 else 'have'} left, with exit code 0"
    if verdict.kind == "same_collective" or (waiting and not stuck):
        waiting = waiting or stuck
        line = f"{have_left}, while {_ranks(waiting)} {_is(waiting)} still waiting in {verdict.collective}."
        return _Verdict("left_early", waiting, verdict.collective, line)
    return replace(verdict, stuck=stuck, headline=f"{verdict.headline} {have_left}.")


def _places(stuck: Collection[int], calls: Mapping[int, Call], dumps: Mapping[int, Dump]) -> Iterator[str]:
    """A line for each place that ranks are in, with the stuck ranks' first."""
    places: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for rank in sorted({*calls, *stuck}):
        places[rank not in stuck, _place(rank, calls, dumps)].append(rank)
    shown = sorted(places.items(), key=lambda item: (item[0][0], item[1]))
    for (_, place), ranks in shown[:PLACES_SHOWN]:
        yield f"  {_ranks(ranks)}: {place}"
    if len(shown) > PLACES_SHOWN:
        yield f"  … and {len(shown) - PLACES_SHOWN} more places"


def _place(rank: int, calls: Mapping[int, Call], dumps: Mapping[int, Dump]) -> str:
    if rank not in dumps:
        return "nothing is known of it"
    call, state = calls[rank], dumps[rank].state
    doing = f"in {call.collective}" if call.collective else call.doing
    what = ", ".join(filter(None, [state, doing])) or ("" if call.where else "did not answer")
    return " at ".join(filter(None, [what, call.where])) if what else f"at {call.where}"


def _ranks(ranks: Iterable[int]) -> str:
    """Ranks as people write them: rank 3; ranks 0-2, 5."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank {words[0]}" if len(runs) == 1 and len(runs[0]) == 1 else f"ranks {', '.join(words)}"


def _is(ranks: Collection[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
