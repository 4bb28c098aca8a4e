"""Training programs with a stopwatch of their own, under `headway exec`: does the report say what the stopwatch says?

Takes the cases (`cases.py`) and their programs; returns rows that say how far the report's ETT is off. The programs
tell the stopwatch what they do; the wall time is taken around the whole command. All details go to out/truth.json.

Typical use::

    make bench ARGS=truth
    make bench ARGS="truth kfold-adam rollback"

TRUTH_PYTHON is a Python with headway, torch and the frameworks; by default the one that runs this. Cases whose modules
it lacks are skipped. TRUTH_KEEP names a folder in which the jobs stay.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.measure import Row
from bench.truth.cases import CASES, Case
from bench.truth.reading import Truth, read_truth

HERE = Path(__file__).parent

ALLOWED_POINTS, ALLOWED_S = 1.0, 0.15
"""A report is right if its ETT is off by no more than this: points, or a share of the wall time."""

FAR_POINTS = 5.0
"""A report that is off by more than this has to say what could not be seen."""

LIMIT_S = 120
"""No case takes as long."""

BUCKETS = {
    "evaluation": ("waste.evaluation",),
    "repeated": ("waste.repeated_steps",),
    "unsaved": ("waste.unsaved_steps",),
    "data_wait": ("waste.data_wait",),
    "data_skip": ("recover.data_skip",),
    "stall": ("waste.stall",),
    "checkpoint_blocking": ("waste.checkpoint_blocking", "shutdown.final_checkpoint"),
}
"""The buckets of the ledger for each label of the stopwatch, where both mean the same."""

_ALWAYS_NOTED = "scheduling and hardware setup unknown"


@dataclass(frozen=True)
class Outcome:
    """What the report and the stopwatch say of one case."""

    case: Case
    truth: Truth
    report: dict[str, Any]

    @property
    def off(self) -> float:
        """How many points of ETT the report is off."""
        return float(self.report["ett_percent"]) - self.truth.ett_percent

    @property
    def allowed(self) -> float:
        """How many it may be off."""
        return max(ALLOWED_POINTS, 100 * ALLOWED_S / self.truth.wall_s)

    @property
    def is_right(self) -> bool:
        """Whether it is within that limit."""
        return abs(self.off) <= self.allowed

    @property
    def failures(self) -> int:
        """How many attempts failed, by the report."""
        return len(self.report["failures"])

    @property
    def notes(self) -> list[str]:
        """Notes on this job, without the one that every job outside of a scheduler has."""
        return [note for note in self.report["notes"] if not note.startswith(_ALWAYS_NOTED)]

    @property
    def wrong_facts(self) -> list[str]:
        """Facts besides the ETT that are wrong."""
        attempts = len(self.report["attempts"])
        wrong = []
        if self.case.failures not in (None, self.failures):
            wrong.append(f"failures {self.failures}, not {self.case.failures}")
        if self.case.attempts not in (None, attempts):
            wrong.append(f"attempts {attempts}, not {self.case.attempts}")
        if self.case.slow_rank not in (None, self.report["slowest_rank"]):
            wrong.append(f"slowest rank {self.report['slowest_rank']}, not {self.case.slow_rank}")
        return wrong

    @property
    def misplaced(self) -> list[str]:
        """Labels besides effective training whose time is off by more than the limit."""
        found = []
        for label, buckets in BUCKETS.items():
            ours, true = sum(self.report["ledger"][bucket] for bucket in buckets), self.truth.seconds.get(label, 0.0)
            if abs(ours - true) > self.allowed * self.truth.wall_s / 100:
                found.append(f"{label} {ours:.1f} s, not {true:.1f}")
        return found


def run(quick: bool, names: Sequence[str] = ()) -> list[Row]:
    """Run the cases of these names, or all; with `quick` one of each topic."""
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        sys.exit(f"no case {', '.join(sorted(unknown))}: there are {', '.join(case.name for case in CASES)}")
    chosen = [case for case in CASES if not names or case.name in names]
    if quick and not names:
        chosen = list({case.topic: case for case in reversed(chosen)}.values())[::-1]
    outcomes = []
    for case in chosen:
        if missing := [module for module in case.needs if not _has(module)]:
            print(f"  {case.name} is skipped: {_python()} has no {', '.join(missing)}; TRUTH_PYTHON names another")
            continue
        outcomes.append(measure(case))
        print(f"  {'  '.join(cells(outcomes[-1]))}", flush=True)
    print_table(outcomes)
    write_json(outcomes)
    return rows(outcomes)


def rows(outcomes: list[Outcome]) -> list[Row]:
    """One row for each case."""
    return [
        Row(one.case.name, "points off", [abs(one.off)], at_most=one.allowed,
            peer=f"{one.report['ett_percent']:.1f}%, stopwatch {one.truth.ett_percent:.1f}%")
        for one in outcomes
    ]  # fmt: skip


def cells(one: Outcome) -> list[str]:
    """The line of a case as text."""
    failures = "any" if one.case.failures is None else one.case.failures
    return [
        one.case.name, f"{one.report['ett_percent']:.1f}", f"{one.truth.ett_percent:.1f}", f"{one.off:+.1f}",
        f"{one.allowed:.1f}", "right" if one.is_right else "WRONG", f"{one.failures}/{failures}",
        "yes" if one.notes else "no", f"{100 * one.truth.uncovered:.1f}%", "; ".join(one.wrong_facts + one.misplaced),
    ]  # fmt: skip


def print_table(outcomes: list[Outcome]) -> None:
    """Case, headway's ETT, truth, difference, allowed, verdict, failures, note, uncovered; then the sums."""
    head = ["case", "headway", "truth", "off", "allowed", "", "failures", "note", "uncovered", ""]
    lines = [head, *map(cells, outcomes)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    print()
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    right = [one for one in outcomes if one.is_right]
    far = [one for one in outcomes if abs(one.off) > FAR_POINTS and not one.notes]
    noted = [one for one in right if one.notes]
    print(f"\n{len(right)} of {len(outcomes)} are within the limit.")
    print(f"{len(far)} are off by more than {FAR_POINTS:g} points without a note.")
    print(f"{len(noted)} right ones carry a note on something that was not seen.")
    wrong = [one for one in outcomes if one.wrong_facts]
    print(f"{len(wrong)} have a wrong number of failures or attempts, or name a wrong rank.")
    print(f"{sum(bool(one.misplaced) for one in right)} right ones have other time in a wrong bucket.")


def write_json(outcomes: list[Outcome]) -> None:
    """Write all there is to know of each case to out/truth.json."""
    told = [
        asdict(one.case)
        | {"headway": one.report["ett_percent"], "truth": one.truth.ett_percent, "off": one.off, "right": one.is_right,
           "wall_s": one.truth.wall_s, "stopwatch_s": one.truth.seconds, "uncovered": one.truth.uncovered,
           "wrong_facts": one.wrong_facts, "misplaced": one.misplaced, "notes": one.notes, "report": one.report}
        for one in outcomes
    ]  # fmt: skip
    Path("out").mkdir(exist_ok=True)
    Path("out", "truth.json").write_text(json.dumps(told, indent=1))


# --- running -------------------------------------------------------------------------------------------------------


def measure(case: Case) -> Outcome:
    """Run a case under headway and compare."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(os.environ.get("TRUTH_KEEP") or temporary, case.name)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(HERE / "programs", place / "work", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(HERE / "stopwatch.py", place / "work")
        if case.prepare:
            _start(shlex.split(case.prepare), place, {})
        headway = ["headway", "exec", "--job", case.name]
        truth = {"TRUTH_FILE": str(place / "truth")}
        begin_ns = time.monotonic_ns()
        for command in filter(None, (case.command, case.again)):
            code = _start([*headway, *(["bash", "-c", command] if case.shell else shlex.split(command))], place, truth)
        end_ns = time.monotonic_ns()
        if code != case.exit_code:
            raise RuntimeError(f"{case.name} ended with {code}:\n{(place / 'output').read_text()[-3000:]}")
        with (place / "truth").open() as lines:
            found = read_truth(lines, begin_ns, end_ns, case.fails)
        asked = ["headway", "report", case.name, "--json"]
        told = subprocess.run(asked, env=_environ(place), cwd=place, capture_output=True, text=True, check=True)
    return Outcome(case, found, json.loads(told.stdout))


def _start(command: list[str], place: Path, environ: dict[str, str]) -> int:
    """Run a command in the case's folder; return its exit code."""
    with (place / "output").open("ab") as output:
        process = subprocess.Popen(
            command, cwd=place / "work", env=_environ(place) | environ, stdout=output, stderr=output,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its workers, which have sessions of their own
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def _environ(place: Path) -> dict[str, str]:
    path = f"{Path(_python()).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    fixed = {"HEADWAY_HOME": str(place / "home"), "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **fixed, "TORCHINDUCTOR_CACHE_DIR": str(place / "cache")}


def _python() -> str:
    return os.environ.get("TRUTH_PYTHON") or sys.executable


def _has(module: str) -> bool:
    return not subprocess.run([_python(), "-c", f"import {module}"], capture_output=True, check=False).returncode
