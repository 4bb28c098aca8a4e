"""Does a job waste what the interval's model says? A real one, killed again and again at random instants.

`ballast.py` trains under `headway run`, saves every so often, and is killed with SIGKILL, at times that depend on
nothing, from a seed. The model is told the interval, what a save blocks, as measured, and how often the job was killed.
What was wasted in fact is in the journal: `headway report --json` reads it.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

from bench.measure import Row
from headway.accounting.timeline import Timeline
from headway.checkpoint.interval import Costs, tiers
from headway.events.journal import Follower
from headway.events.vocabulary import Activity
from headway.paths import JobPaths

SCRIPT = Path(__file__).with_name("ballast.py")
INTERVAL_S = 2.5
STATE_MB = 600
SHORTEST_S = 0.02
"""So much memory is not copied in less."""
STEP_S = 0.02
PATIENCE_S = 90.0


def run(quick: bool) -> list[Row]:
    """The row on waste."""
    failures, mean_s = (3, 5.0) if quick else (25, 12.0)
    Path("out").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="waste-", dir="out")).absolute()
    try:
        with Job(folder) as job:
            luck = random.Random(5)
            for _ in range(failures):
                job.train(luck.expovariate(1 / mean_s))
                job.kill()
            job.train(1.0)
        return [_row(job.report(), job.blocked_s(), failures, has_bar=not quick)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _row(report: dict[str, Any], blocked: list[float], failures: int, has_bar: bool) -> Row:
    spent = report["ledger"]
    saving, lost = spent["waste.checkpoint_blocking"], spent["waste.repeated_steps"] + spent["waste.unsaved_steps"]
    loop_s = spent["training.effective"] + saving + lost
    measured = 100 * (saving + lost) / loop_s
    costs = Costs(blocking_s=mean(blocked))
    predicted = tiers(costs, failures / loop_s, 0.0, INTERVAL_S, 1).wasted_percent
    note = (
        f"predicted {predicted:.1f}%, measured {measured:.1f}%: {100 * saving / loop_s:.1f}% blocked, "
        f"{100 * lost / loop_s:.1f}% done again; {failures} kills in {loop_s:.0f} s of training, a save of "
        f"{STATE_MB} MB every {INTERVAL_S:g} s blocks {1000 * mean(blocked):.0f} ms"
    )
    off = 100 * abs(measured / predicted - 1)
    return Row("waste in a real run, off the prediction by", "%", [off], at_most=20.0 if has_bar else None, note=note)


class Job:
    """The job; ended when its `with` is."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._dead = folder, set[int]()
        unwanted = ("HEADWAY_", "TORCH", "PET_")
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        self._environ["HEADWAY_HOME"] = str(folder / "home")

    def __enter__(self) -> "Job":
        told = [str(self._folder), f"{INTERVAL_S}s", str(STATE_MB), str(STEP_S)]
        command = ["headway", "run", "--nproc-per-node", "1", "--job", "waste", "--max-restarts", "1000"]
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command, str(SCRIPT), *told],
                stdout=log, stderr=log, cwd=self._folder, env=self._environ, start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(self, *problem: object) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        for pid in {self._process.pid, *self._lives()} - self._dead:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _lives(self) -> set[int]:
        """Every process that has trained."""
        return {int(path.name.partition("-")[2]) for path in self._folder.glob("trains-*")}

    def train(self, seconds: float) -> None:
        """Waits until it trains, and lets it do so."""
        until = time.monotonic() + PATIENCE_S
        while not self._lives() - self._dead:
            if self._process.poll() is not None or time.monotonic() > until:
                last = "\n".join((self._folder / "log").read_text(errors="replace").splitlines()[-10:])
                raise RuntimeError(f"the job does not train. Its last lines:\n{last}")
            time.sleep(0.01)
        time.sleep(seconds)

    def kill(self) -> None:
        """Ends the trainer as a failure would. The supervisor starts another."""
        (pid,) = self._lives() - self._dead
        os.kill(pid, signal.SIGKILL)
        self._dead.add(pid)

    def blocked_s(self) -> list[float]:
        """What each save has blocked. Calls of torch.save inside one are spans, too, and much shorter."""
        found: list[float] = []
        for path in JobPaths(self._folder / "home", "waste").journals.iterdir():
            timeline = Timeline()
            timeline.add(Follower(path).poll().records)
            bars = [bar for bar in timeline.bars() if bar.name == Activity.CHECKPOINT_BLOCKING and bar.end_ns]
            took = [(bar.end_ns - bar.begin_ns) / 1e9 for bar in bars if bar.end_ns]
            found += [seconds for seconds in took if seconds > SHORTEST_S]
        if not found:
            raise RuntimeError("the job has not saved")
        return found

    def report(self) -> dict[str, Any]:
        """What `headway report --json` says."""
        command = [sys.executable, "-m", "headway", "report", "waste", "--json"]
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, check=True)
        told: dict[str, Any] = json.loads(done.stdout)
        return told
