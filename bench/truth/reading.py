"""From the stopwatch's lines to the truth: in come the lines of all processes, out go seconds by label.

A process *trains* if it has a step. The job trains while all processes that train do, each from its first line to
the end of its last step: the job is as fast as the slowest of them. The rules are those of docs/ledger.md, applied to
what the program itself said:

- A position in the data counts the first time a rank trains it; then it is `repeated`.
- A step that ended by an exception, or never, is `unsaved`; so is each that began after the last save of a job that
  saves, and each of a job that failed and never saved.
- A wait for data before the first step of a process is `start`.
- A first step that took far longer than a typical one was warming up: the excess is `start`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

EFFECTIVE = ("effective", "rollout")
"""Labels that count as training."""

STEPS = (*EFFECTIVE, "repeated", "unsaved")
"""Labels of steps, whatever became of them."""

WARM_STEPS, WARM_TIMES = 5, 3
"""One of the first steps of a process was warming up if it took this many times as long as a typical one."""

_PRECEDENCE = (
    "checkpoint_blocking", "restore", "data_skip", "data_wait", "evaluation", "stall", "repeated", "unsaved", "start",
    "other", "", "rollout", "effective",
)  # fmt: skip
"""The label of a moment at which ranks do different things: the first of these."""


@dataclass
class Part:
    """What one process did from one begin to its end, without the parts inside."""

    label: str
    rank: str
    position: str
    begin_ns: int
    pieces: list[tuple[int, int]] = field(default_factory=list)
    ended: str = ""

    @property
    def net_ns(self) -> int:
        """How long it took, less the parts inside."""
        return sum(end - begin for begin, end in self.pieces)

    def shorten(self, net_ns: int) -> "Part":
        """Keep the last `net_ns`; return the rest."""
        rest, self.pieces = self.pieces, []
        while rest and net_ns:
            begin, end = rest.pop()
            cut = max(begin, end - net_ns)
            net_ns -= end - cut
            self.pieces.insert(0, (cut, end))
            if cut > begin:
                rest.append((begin, cut))
        return Part("start", self.rank, "", self.begin_ns, rest, self.ended)


@dataclass
class Truth:
    """What the stopwatch says of a job."""

    wall_s: float
    seconds: dict[str, float]
    """By label; `` is the time that no label covers."""
    uncovered: float
    """The share of the time between the first step and the last that no label covers."""

    @property
    def ett_percent(self) -> float:
        """Effective training as a share of the wall time."""
        return 100 * sum(self.seconds.get(label, 0.0) for label in EFFECTIVE) / self.wall_s


def read_truth(lines: Iterable[str], begin_ns: int, end_ns: int, failed: bool) -> Truth:
    """The truth on a job that ran from `begin_ns` to `end_ns`; `failed` if its last attempt did."""
    begins: dict[int, int] = {}
    parts: dict[int, list[Part]] = {}
    open_parts: dict[str, list[Part]] = {}
    since: dict[str, int] = {}
    saved_ns = 0
    for line in lines:
        time, process, thread, rank, sign, *told = line.split()
        now, pid, key = int(time), int(process), f"{process} {thread}"
        stack = open_parts.setdefault(key, [])
        begins.setdefault(pid, now)
        if sign == "=":
            if told[0] == "saved":
                saved_ns = now
            else:
                stack.clear()  # after os.exec the same process begins again: what was open has ended
            continue
        if stack:
            stack[-1].pieces.append((since[key], now))
        since[key] = now
        if sign == "+":
            part = Part(told[0], rank, told[1] if len(told) > 1 else "", now)
            parts.setdefault(pid, []).append(part)
            stack.append(part)
        else:
            stack.pop().ended = sign
    _judge(parts, saved_ns, failed)
    return _swept(begins, parts, begin_ns, end_ns)


def _judge(parts: dict[int, list[Part]], saved_ns: int, failed: bool) -> None:
    """Decide which steps are effective."""
    trained: set[tuple[str, str]] = set()
    for part in sorted((part for own in parts.values() for part in own), key=lambda part: part.begin_ns):
        if part.label not in EFFECTIVE:
            continue
        place = (part.rank, part.position)
        if part.position and place in trained:
            part.label = "repeated"
        elif part.ended != "-" or (part.begin_ns > saved_ns and (saved_ns or failed)):
            part.label = "unsaved"
        if part.ended == "-":
            trained.add(place)
    for own in parts.values():
        steps = [part for part in own if part.label in STEPS and part.label != "rollout"]
        typical = int(median([part.net_ns for part in steps])) if steps else 0
        own += [part.shorten(typical) for part in steps[:WARM_STEPS] if part.net_ns > WARM_TIMES * typical]


def _swept(begins: dict[int, int], parts: dict[int, list[Part]], begin_ns: int, end_ns: int) -> Truth:
    """Go through the job's time, from one change to the next."""
    lives: dict[int, tuple[int, int, int]] = {}
    changes: list[tuple[int, int, str]] = []
    for pid, own in parts.items():
        steps = [end for part in own if part.label in STEPS for piece in part.pieces for end in piece]
        if steps:
            lives[pid] = (begins[pid], min(steps), max(steps))
            for part in own:
                changes += [(begin, pid, part.label) for begin, _ in part.pieces]
                changes += [(end, pid, "") for _, end in part.pieces]
    # At one moment the end of a part comes before the begin of the next.
    changes.sort(key=lambda change: (change[0], change[2] != ""))
    moments = [begin_ns, *sorted({time for life in lives.values() for time in (life[0], life[2])}), end_ns]
    changes += [(moment, 0, "") for moment in moments]
    changes.sort(key=lambda change: change[0])
    doing = dict.fromkeys(lives, "")
    first = min((life[1] for life in lives.values()), default=0)
    last = max((life[2] for life in lives.values()), default=0)
    seconds: dict[str, float] = {}
    uncovered_ns = 0
    for (now, pid, label), (until, _, _) in pairwise(changes):
        if pid:
            doing[pid] = label
        alive = [pid for pid, (begin, _, end) in lives.items() if begin <= now < end]
        what = min((doing[pid] for pid in alive or lives), key=_PRECEDENCE.index, default="")
        starts = any(now < lives[pid][1] for pid in alive)
        if alive and not what and not starts:
            uncovered_ns += until - now
        if what == "data_wait" and starts:
            what = "start"
        seconds[what] = seconds.get(what, 0.0) + (until - now) / 1e9
    return Truth((end_ns - begin_ns) / 1e9, seconds, uncovered_ns / max(last - first, 1))
