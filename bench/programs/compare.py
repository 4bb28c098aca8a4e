"""What the stopwatch says, and what headway says, of the same run: phase by phase."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Note = tuple[str, int, int]
"""What, begin, end."""

PRECEDENCE = (
    "checkpoint", "restore", "compile", "wait", "evaluation", "step", "launcher", "imports", "group", "model", "data",
)  # fmt: skip
"""Where phases overlap, the first counts: what happens inside a step, or inside an evaluation, is not that."""

SPREAD, LEAST_S, ETT_POINTS = 0.05, 0.03, 1.0
"""A phase is right if it is within 5%, or 30 ms for a short one; ETT is right within one point."""


def notes(path: Path) -> list[Note]:
    """What one process's stopwatch noted."""
    lines = (line.split("\t") for line in path.read_text().splitlines())
    return sorted(((what, int(begin), int(end)) for what, begin, end in lines), key=lambda note: note[1])


class Watched:
    """One run, by the notes of a process that was started and gone at these times."""

    def __init__(
        self, noted: list[Note], marks: list[str], began_ns: int, ended_ns: int, is_command: bool = True
    ) -> None:
        self.began_ns, self.ended_ns = began_ns, ended_ns
        spans = [note for note in noted if note[0] in PRECEDENCE]
        # A process that is not the command itself was launched by it; Python's own start is part of the imports.
        spans += [("launcher", began_ns, begin) for what, begin, _ in noted if what == "begin" and not is_command]
        spans += [("imports", began_ns, end) for what, _, end in noted if what == "begin"]
        spans += _steps_between(noted, marks)
        self._steps = sorted((begin, end) for what, begin, end in spans if what == "step")
        self._saves = [begin for what, begin, _ in spans if what == "checkpoint"]
        first, last = (self._steps[0][0], self._steps[-1][1]) if self._steps else (ended_ns, ended_ns)
        self.phases: dict[str, float] = {}
        """Seconds by phase. They add up to the wall time."""
        self.steps = [0.0] * len(self._steps)
        """What each step took, without what happened inside it."""
        at = 0
        for begin, end, what in _pieces(spans, began_ns, ended_ns, (first, last)):
            if what == "step":
                while self._steps[at][1] <= begin:
                    at += 1
                self.steps[at] += (end - begin) / 1e9
            elif not what:
                what = "start, other" if end <= first else "shutdown" if begin >= last else "between"
            elif what == "wait" and begin < first:
                what = "first batch"
            self.phases[what] = self.phases.get(what, 0.0) + (end - begin) / 1e9

    @property
    def saved(self) -> int | None:
        """How many steps the last checkpoint holds; None without one."""
        return sum(end <= max(self._saves) for _, end in self._steps) if self._saves else None


def effective_percent(runs: list[Watched]) -> float:
    """The share of all runs' time in steps that were trained for the first time, and were saved in the end if anything
    was: each run goes on from the last checkpoint of the one before."""
    first, known, kept = 0, 0, None
    new: list[tuple[int, float]] = []
    for run in runs:
        new += [(first + at, took) for at, took in enumerate(run.steps) if first + at >= known]
        known = max(known, first + len(run.steps))
        if run.saved is not None:
            first = kept = first + run.saved
    taken = sum(took for step, took in new if kept is None or step < kept)
    return 100e9 * taken / (runs[-1].ended_ns - runs[0].began_ns)


def _steps_between(noted: list[Note], marks: list[str]) -> list[Note]:
    """The steps of a loop without a loader: from one assignment of a name to the next."""
    if not marks:
        return []
    before, each = marks
    start = next((begin for what, begin, _ in noted if what == f"mark {before}"), None)
    if start is None:
        return []
    times = [start, *(begin for what, begin, _ in noted if what == f"mark {each}" and begin > start)]
    return [("step", begin, end) for begin, end in pairwise(times)]


def _pieces(spans: list[Note], began: int, ended: int, cuts: Iterable[int]) -> Iterable[tuple[int, int, str]]:
    edges = sorted({began, ended, *cuts, *(edge for _, *both in spans for edge in both if began < edge < ended)})
    events = sorted([(begin, 1, what) for what, begin, _ in spans] + [(end, -1, what) for what, _, end in spans])
    under_way = dict.fromkeys(PRECEDENCE, 0)
    at = 0
    for begin, end in pairwise(edges):
        while at < len(events) and events[at][0] <= begin:
            under_way[events[at][2]] += events[at][1]
            at += 1
        yield begin, end, next((what for what in PRECEDENCE if under_way[what] > 0), "")


def headway_phases(report: dict[str, Any], before: dict[str, Any] | None) -> dict[str, float]:
    """The same phases of the last run, by headway's report on the job, and by its report `before` that run."""
    last = report["attempts"][-1]["ledger"]
    stages = {key: took - (before["stages"][key] if before else 0.0) for key, took in report["stages"].items()}

    def of(*buckets: str) -> float:
        return sum(last.get(bucket, 0.0) for bucket in buckets)

    other = ("other", "device_init", "init_plugins")
    return {
        "imports": stages["imports"],
        "group": stages["process_group_init"],
        "data": stages["preproc_creation"],
        "model": stages["train_module_creation"],
        "first batch": stages["get_first_batch_data"],
        "start, other": sum(stages[stage] for stage in other),
        "restore": stages["pre_train"] + of("recover.checkpoint_restore"),
        "compile": of("start.pt2_compilation", "recover.pt2_compilation", "waste.recompilation"),
        "step": of("training.effective", "waste.repeated_steps", "waste.unsaved_steps", "waste.stall"),
        "wait": of("waste.data_wait"),
        "evaluation": of("waste.evaluation"),
        "checkpoint": of("waste.checkpoint_blocking", "shutdown.final_checkpoint"),
        "between": of("unattributed"),
        "shutdown": of("shutdown.teardown", "shutdown.publish"),
        "down": of("recover.detection", "recover.teardown", "recover.launcher_init", "recover.rendezvous"),
    }


def of_rank(run: Watched) -> dict[str, float]:
    """A run's phases as headway tells them of a single rank: its start is one."""
    start = ("imports", "group", "data", "model", "first batch", "start, other", "restore")
    took = {phase: s for phase, s in run.phases.items() if phase not in start}
    return took | {"start": sum(run.phases.get(phase, 0.0) for phase in start)}


def headway_rank_phases(rank: dict[str, Any]) -> dict[str, float]:
    """The same by headway's report."""
    found = headway_phases({"attempts": [rank], "stages": dict.fromkeys(_STAGES, 0.0)}, None)
    ledger = rank["ledger"]
    return found | {"launcher": ledger.get("start.launcher_init", 0.0), "start": ledger["start.trainer_init"]}


_STAGES = (
    "imports", "device_init", "process_group_init", "preproc_creation", "train_module_creation", "init_plugins",
    "pre_train", "get_first_batch_data", "other",
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """One phase of one run."""

    phase: str
    stopwatch: float
    headway: float
    allowed: float

    @property
    def off(self) -> float:
        """How far headway is off."""
        return self.headway - self.stopwatch

    @property
    def is_right(self) -> bool:
        """Whether that is within bounds."""
        return abs(self.off) <= self.allowed


def compared(stopwatch: dict[str, float], headway: dict[str, float]) -> list[Compared]:
    """Each phase that either of them knows."""
    found = []
    for phase in dict.fromkeys([*headway, *stopwatch]):
        ours, theirs = headway.get(phase, 0.0), stopwatch.get(phase, 0.0)
        if ours > 0.0005 or theirs > 0.0005:
            found.append(Compared(phase, theirs, ours, max(SPREAD * theirs, LEAST_S)))
    return found
