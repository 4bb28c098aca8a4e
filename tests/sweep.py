"""`make sweep`: the tests that kill and crash, repeated with new seeds until they have reached full size.

    make sweep                       # to full size, about 20 minutes on two cores
    make sweep HOURS=8               # for eight hours, whatever size that gives
    make sweep ARGS="publisher"      # some of them

Each round is one pytest run with its own SEED. What is done is in out/sweep.json, so that a sweep that was stopped
resumes with the next round; a sweep of another commit starts over. A round that failed leaves its output in out/sweep/,
and `SEED=… pytest TEST` repeats it.
"""

import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

OUT = Path("out")
AT_ONCE = 2
RUNNING: list["subprocess.Popen[bytes]"] = []
"""The rounds that run now."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A test, and how many of its events are full size."""

    tests: str
    counted: str
    """The property in which the test records how many events it had."""
    full: int
    what: str


SWEEPS = {
    "journal": Sweep(
        tests="tests/events/test_journal_kills.py",
        counted="kills",
        full=1000,
        what="SIGKILLs of a process that writes its journal: no acknowledged record or step is lost",
    ),
    "checkpoint": Sweep(
        tests="tests/checkpoint/test_kills.py -k 'not whoever'",
        counted="kills",
        full=200,
        what="SIGKILLs of trainers, uploaders, keepers and supervisors: every committed save loads, bit for bit",
    ),
    "job": Sweep(
        tests="tests/checkpoint/test_kills.py -k whoever",
        counted="kills",
        full=1000,
        what="SIGKILLs of ranks, supervisors, zygotes, keepers and uploaders of jobs (`headway run` and torchrun, DDP "
        "and FSDP2, all memory modes) whose saves are mostly in memory: nothing is lost, torn, foreign or out of order",
    ),
    "power": Sweep(
        tests="tests/checkpoint/test_power_loss.py",
        counted="prefixes",
        full=2500,
        what="power failures after a system call of a save: what was committed loads, and nothing torn does",
    ),
    "crash": Sweep(
        tests="tests/launch/test_crashes.py",
        counted="crashes",
        full=100,
        what="crashes of ranks under `headway run`: one restart cures each",
    ),
    "healthy": Sweep(
        tests="tests/launch/test_healthy.py",
        counted="job_minutes",
        full=600,
        what="minutes of jobs that behave oddly and are healthy, ten kinds, under `headway run`: none is killed",
    ),
    "publisher": Sweep(
        tests="tests/publish/test_versions.py tests/publish/test_publisher.py -k killed_at",
        counted="kills",
        full=50,
        what="SIGKILLs of publishers: each version is whole or absent",
    ),
    "property": Sweep(
        tests="tests/accounting tests/recover tests/checkpoint -m hypothesis",
        counted="examples",
        full=20_000,
        what="random journals, start-ups, logs and manifests: every property of the ledger and of checkpoints holds",
    ),
}


@dataclass
class Progress:
    """What was done so far, as it lies in out/sweep.json."""

    commit: str
    seed: int
    """The first round's; each round has the next one."""
    rounds: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    failed: dict[str, list[int]] = field(default_factory=dict)
    """Seeds of the rounds that failed."""

    def add(self, name: str, events: int, seed: int, passed: bool) -> None:
        self.events[name] = self.events.get(name, 0) + events
        if not passed:
            self.failed.setdefault(name, []).append(seed)
        text = json.dumps(asdict(self), indent=1)
        part = OUT / "sweep.json.part"
        part.write_text(text)
        part.rename(OUT / "sweep.json")

    def is_full(self, name: str) -> bool:
        return self.events.get(name, 0) >= SWEEPS[name].full

    def next_seed(self, name: str) -> int:
        self.rounds[name] = self.rounds.get(name, 0) + 1
        return self.seed + self.rounds[name] - 1


def resumed() -> Progress:
    """The sweep of this commit that was stopped, or a new one."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    OUT.mkdir(exist_ok=True)
    if (OUT / "sweep.json").exists():
        found = Progress(**json.loads((OUT / "sweep.json").read_text()))
        if found.commit == commit:
            print(f"resuming the sweep of {commit} with seed {found.seed} after {sum(found.rounds.values())} rounds")
            return found
    new = Progress(commit, random.SystemRandom().randrange(10**6))
    print(f"a new sweep of {commit} with seed {new.seed}")
    return new


def rounds(progress: Progress, names: list[str], until: float | None) -> Iterator[tuple[str, int]]:
    """The name and seed of each round: the sweep that is farthest behind comes first."""
    while until is None or time.time() < until:
        left = [name for name in names if until is not None or not progress.is_full(name)]
        if not left:
            return
        name = min(left, key=lambda name: progress.rounds.get(name, 0) * _per_round(progress, name) / SWEEPS[name].full)
        yield name, progress.next_seed(name)


def _per_round(progress: Progress, name: str) -> float:
    return max(1.0, progress.events.get(name, 0) / max(1, progress.rounds.get(name, 0)))


def run_round(name: str, seed: int) -> tuple[str, int, int, bool]:
    """One pytest run; its name, seed, events, and whether it passed."""
    folder = OUT / "sweep"
    folder.mkdir(exist_ok=True)
    report, log = folder / f"{name}-{seed}.xml", folder / f"{name}-{seed}.log"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        f"--hypothesis-seed={seed}",
    ]
    command += shlex.split(SWEEPS[name].tests)
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "SEED": str(seed)})
        RUNNING.append(process)
        process.wait()
        RUNNING.remove(process)
    events = 0
    if report.exists():
        found = ElementTree.parse(report).iter("property")
        events = sum(int(each.get("value", 0)) for each in found if each.get("name") == SWEEPS[name].counted)
        report.unlink()
    if process.returncode == 0:
        log.unlink()
    return name, seed, events, process.returncode == 0


def sweep(names: list[str], hours: float | None) -> Progress:
    """Run rounds, two at a time, and say after each how far it is."""
    progress = resumed()
    for number in (signal.SIGINT, signal.SIGTERM):  # ignored, if it was started in the background
        signal.signal(number, _interrupt)
    todo = rounds(progress, names, time.time() + hours * 3600 if hours else None)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {pool.submit(run_round, *each) for each in itertools.islice(todo, AT_ONCE)}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for each in ended:
                name, seed, events, passed = each.result()
                progress.add(name, events, seed, passed)
                size = f"{progress.events[name]:,} of {SWEEPS[name].full:,} {SWEEPS[name].counted}"
                outcome = "passed" if passed else f"FAILED, see out/sweep/{name}-{seed}.log"
                print(f"{time.strftime('%H:%M:%S')}  {name:<11} seed {seed}: {outcome}; {size}", flush=True)
            running |= {pool.submit(run_round, *each) for each in itertools.islice(todo, len(ended))}
    return progress


def _interrupt(*_: object) -> None:
    for process in RUNNING:
        process.terminate()
    raise KeyboardInterrupt


def main() -> int:
    names = sys.argv[1:] or list(SWEEPS)
    if unknown := set(names) - set(SWEEPS):
        sys.exit(f"unknown sweep: {', '.join(sorted(unknown))}. There are: {', '.join(SWEEPS)}.")
    hours = os.environ.get("HOURS")
    try:
        progress = sweep(names, float(hours) if hours else None)
    except KeyboardInterrupt:
        print("stopped; the next `make sweep` goes on from here")
        return 130
    print(f"\n{time.strftime('%Y-%m-%d')}, commit {progress.commit}, seed {progress.seed}\n")
    print("| events | failed rounds | what |\n|---|---|---|")
    for name in names:
        seeds = progress.failed.get(name, [])
        failed = f"{len(seeds)} (SEED={', '.join(map(str, seeds))})" if seeds else "0"
        print(f"| {progress.events.get(name, 0):,} {SWEEPS[name].counted} | {failed} | {SWEEPS[name].what} |")
    return 1 if any(progress.failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
