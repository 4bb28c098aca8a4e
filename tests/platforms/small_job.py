"""A job small enough to start a hundred times: its processes, and its ledger."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import warm
from headway.accounting.ledger import Ledger
from headway.cli.source import open_job
from headway.errors import UnknownJob

TRAINER = Path(__file__).with_name("trainer_without_torch.py")
PLATFORMS = ("SLURM", "KUBERNETES_", "POD_NAME", "HEADWAY_", "TORCHELASTIC_")
STEPS = 10
LIMIT_S = 500.0
"""How long anything may take on a busy machine."""


def command(folder: Path, *more: object) -> list[str]:
    """The command line of one rank."""
    return [sys.executable, str(TRAINER), str(folder), str(STEPS), *map(str, more)]


def environ(home: Path, **given: str) -> dict[str, str]:
    """An environment of no platform but the given one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PLATFORMS)}
    return kept | {"HEADWAY_HOME": str(home)} | given


def train(home: Path, until: Callable[[], bool] = lambda: True, *, cold: bool = False, **given: str) -> str:
    """Run a job of one rank that trains on at least until `until` says so. Return what it said on stderr.

    A `cold` one is started as a new interpreter, the others are forked from one.
    """
    pipes = dict.fromkeys(("stdin", "stderr"), subprocess.PIPE)
    start = subprocess.Popen if cold else warm.Popen
    with start(command(home), env=environ(home, **given), text=True, **pipes) as process:
        try:
            wait_until(lambda: until() or process.poll() is not None)
            (home / "enough").touch()
            said: str = process.communicate(timeout=LIMIT_S)[1]
        finally:
            process.kill()
    assert process.returncode == 0, said
    return said


def wait_until(ready: Callable[[], bool]) -> None:
    """Wait until it is so; AssertionError if it never is."""
    deadline = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < deadline, f"waited {LIMIT_S:.0f} s for {ready}"
        time.sleep(0.1)


def ledger(job: str | None = None) -> Ledger:
    """The job's ledger, whose parts add up: for the job, and for each of its ranks."""
    found = open_job(job).ledger()
    assert sum(found.sums.values()) == found.wall_ns
    for rank in found.ranks:
        assert sum(found.rank_sums(rank).values()) == found.wall_ns
    assert min(found.sums.values()) >= 0
    return found


def is_scheduling_known(job: str | None = None, attempt: int = 0) -> bool:
    """Whether an attempt of the job has begun and knows of its wait for hardware."""
    try:
        attempts = ledger(job).attempts
    except UnknownJob:
        return False
    return len(attempts) > attempt and attempts[attempt].attempt.scheduled is not None


def says_unknown(found: Ledger) -> bool:
    """Whether the report says that nobody knows how long the job waited."""
    return any(note.startswith("scheduling and hardware setup unknown") for note in found.notes)


def began_s(home: Path, rank: int = 0, attempt: int = 0) -> float:
    """When the trainer's first line ran, by its own stopwatch, in seconds since 1970."""
    return noted_s(home, rank, "begin")[attempt]


def noted_s(home: Path, rank: int, what: str) -> list[float]:
    """All moments of that kind on a rank's stopwatch."""
    notes = [line.split() for line in (home / f"stopwatch-{rank}").read_text().splitlines()]
    return [float(at) for kind, at in notes if kind == what]
