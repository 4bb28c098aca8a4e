"""The programs of `bench/truth` that need one process only: their stopwatch and the report agree on the time trained.

`make bench ARGS=truth` runs all of them as users would. Here they are forked with torch imported, and where they sleep
their clock jumps, so that seconds take milliseconds.
"""

import shlex
import sys
from pathlib import Path

import pytest
from bench.truth import ALLOWED_POINTS, ALLOWED_S
from bench.truth.cases import CASES, Case
from bench.truth.reading import EFFECTIVE, read_truth
from running import PATIENCE_S

import warm
from headway.cli.source import open_job
from headway.events.clock import Clock
from headway.observe.summary import summary

TRUTH = Path(__file__).parents[2] / "bench" / "truth"
WARPED = Path(__file__).parent / "warped.py"

# The clock of other processes and threads does not jump, and compiling takes real seconds.
SEVERAL = {"hogwild", "execv", "spawn", "spawned-trials", "pool-of-trials", "workers", "fresh-workers", "stream",
           "prefetch-thread", "thread-save", "evaluation-process", "compile", "module"}  # fmt: skip
NOT_RIGHT_YET = {"oom-retry"}
"""The roadmap says why."""

ALONE = [
    case
    for case in CASES
    if case.command.startswith("python ") and not (case.shell or case.again or case.needs or case.exit_code)
    if case.name not in SEVERAL | NOT_RIGHT_YET
]


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_the_time_trained_is_what_the_programs_own_stopwatch_says(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"HEADWAY_HOME": tmp_path / "home", "PYTHONPATH": TRUTH, "OMP_NUM_THREADS": 1, "TRUTH_FILE": ""}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    if case.prepare:
        run(shlex.split(case.prepare), tmp_path)
    monkeypatch.setenv("TRUTH_FILE", str(tmp_path / "truth"))
    run([str(WARPED), "exec", "--job", "job", *shlex.split(case.command)], tmp_path, first=["hooked"])
    lines = (tmp_path / "truth").read_text().splitlines()
    times = [int(line.split()[0]) for line in lines]
    truth = read_truth(lines, min(times), max(times), case.fails)
    for name in ("now_ns", "wall_ns"):  # the report is made after all jumps
        clock = getattr(Clock, name)
        monkeypatch.setattr(Clock, name, staticmethod(lambda clock=clock: clock() + max(times)))
    report = summary(open_job("job").ledger())
    trained_s = sum(truth.seconds.get(label, 0.0) for label in EFFECTIVE)
    # On a busy machine, more time passes between the stopwatch's parts, and in the first step.
    unclear_s = truth.seconds.get("", 0.0) + truth.seconds.get("start", 0.0)
    allowed_s = max(ALLOWED_POINTS / 100 * truth.wall_s, ALLOWED_S) + unclear_s
    assert report["ledger"]["training.effective"] == pytest.approx(trained_s, abs=allowed_s), truth.seconds
    assert case.failures in (None, len(report["failures"]))
    assert case.attempts in (None, len(report["attempts"]))


def run(words: list[str], folder: Path, first: list[str] | None = None) -> None:
    """Run a script, forked with torch imported; `python SCRIPT` means one of the programs."""
    at = words.index("python")
    words = [*words[:at], sys.executable, str(TRUTH / "programs" / words[at + 1]), *words[at + 2 :]]
    words = words if first else words[at + 1 :]
    done = warm.run(
        [sys.executable, *words], first=first or [], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
