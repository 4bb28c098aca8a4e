"""Lightning, Hugging Face, Accelerate and Ray jobs, unmodified: the report, held against a stopwatch of their own."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from running import HEADWAY, witnessed

from headway.cli import main
from headway.events.job import JobReader
from headway.events.vocabulary import Process, Record, Saved
from headway.instrument.patches import Patch
from headway.paths import JobPaths

SCRIPTS = Path(__file__).parent / "frameworks"
STEPS, EPOCH, KILLED_AT = 24, 12, 15

ACCELERATE = [str(Path(sys.executable).parent / "accelerate"), "launch"]


# --- the stopwatch ---------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """What one process noted of its own time, in a run that the test saw begin and end."""

    notes: list[tuple[str, float]]
    begin: float
    end: float
    queued: float = 0.0
    """Seconds that it or the test waited for a core: so far apart may two looks at a clock be."""

    def times(self, what: str) -> list[float]:
        return [at for name, at in self.notes if name == what]

    def spans(self, what: str) -> Iterator[tuple[float, float]]:
        return zip(self.times(f"{what} begins"), self.times(f"{what} ends"), strict=False)

    def during(self, what: str, begin: float = 0.0, end: float = float("inf")) -> float:
        """Seconds spent on something that began in a stretch of time."""
        return sum(b - a for a, b in self.spans(what) if begin <= a < end)

    @property
    def first_step(self) -> float:
        return self.times("step")[0]

    @property
    def last_step(self) -> float:
        return self.times("step")[-1]

    @property
    def loop(self) -> float:
        """When the first batch was asked for."""
        return next(self.spans("train batch"))[0]

    def phases(self, ledger: dict[str, float]) -> dict[str, float]:
        """Seconds, by what a report should call them: it counts what a first step took too long as start-up."""
        found = self._phases()
        first_s = self.first_step - self.loop - self.during("train batch", self.loop, self.first_step)
        warm_up_s = min(max(found["steps"] - phases(ledger)["steps"], 0.0), first_s)
        return found | {"start": found["start"] + warm_up_s, "steps": found["steps"] - warm_up_s}

    def _phases(self) -> dict[str, float]:
        inside = (self.loop, self.last_step)
        waited = self.during("train batch", self.loop, self.first_step)
        lost = sum(self.during(what, *inside) for what in ("train batch", "evaluation", "checkpoint"))
        return {
            "start": self.loop + waited - self.begin - self.during("evaluation", end=self.loop),
            "steps": self.last_step - self.loop - lost,
            "waste.data_wait": self.during("train batch", self.first_step),
            "waste.evaluation": self.during("evaluation"),
            "waste.checkpoint_blocking": self.during("checkpoint", end=self.last_step),
            "shutdown.final_checkpoint": self.during("checkpoint", self.last_step),
            "shutdown": self.end - self.last_step - self.during("evaluation", self.last_step),
        }

    @property
    def rank(self) -> tuple[int, int]:
        """Its rank, and how many there are, as its framework told it."""
        told = [name.split() for name, _ in self.notes if name.startswith("rank ")]
        return (int(told[0][1]), int(told[0][3])) if told else (0, 1)


def phases(ledger: dict[str, float]) -> dict[str, float]:
    """The same phases, as a report has them."""
    steps = ("training.effective", "waste.repeated_steps", "waste.unsaved_steps")
    return {
        "start": sum(s for bucket, s in ledger.items() if bucket.startswith(("start.", "recover."))),
        "steps": sum(ledger.get(bucket, 0.0) for bucket in steps),
        **{bucket: ledger.get(bucket, 0.0) for bucket in ("waste.data_wait", "waste.evaluation")},
        **{bucket: ledger.get(bucket, 0.0) for bucket in ("waste.checkpoint_blocking", "shutdown.final_checkpoint")},
        "shutdown": sum(s for bucket, s in ledger.items() if bucket.startswith("shutdown.")),
    }


def assert_alike(ledger: dict[str, float], stopwatch: Watched, queued: float) -> None:
    """Every phase is within 10% of the stopwatch, or within 1% of the whole run where it is short, but for the time
    that was spent waiting for a core."""
    measured, watched = phases(ledger), stopwatch.phases(ledger)
    whole = sum(watched[name] for name in ("start", "steps", "shutdown"))
    print(json.dumps({name: [round(measured[name], 3), round(watched[name], 3)] for name in watched}))
    apart = {
        name: (measured[name], seconds)
        for name, seconds in watched.items()
        if abs(measured[name] - seconds) > max(0.1 * seconds, 0.01 * whole, 0.1) + queued
    }
    assert not apart


# --- jobs ------------------------------------------------------------------------------------------------------------


class Job:
    """A job under `headway exec`: what its scripts noted, what headway wrote, and what it reports."""

    def __init__(self, folder: Path, short: str) -> None:
        self.folder, self.home, self.notes = folder / "work", folder / "home", folder / "notes"
        for each in (self.folder, self.notes):
            each.mkdir()
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "SLURM_"))}
        self.environ = outside | {
            "HEADWAY_HOME": str(self.home),
            "HEADWAY_JOB": "job",
            "HOME": str(folder),  # frameworks keep caches and tokens there
            "RAY_TMPDIR": short,  # it makes sockets there, whose paths must not be long
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",  # on a busy machine, workers take longer than its minute
            "STOPWATCH": str(self.notes),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *command: str, status: int = 0) -> list[Watched]:
        """Runs a command to its end; what its processes noted, by rank and in order."""
        known, queued, begin = set(self.notes.iterdir()), _queued_s(), time.monotonic()
        done = subprocess.run(
            [*HEADWAY, "exec", *command], env=self.environ, cwd=self.folder, capture_output=True, text=True, timeout=800
        )
        end = time.monotonic()
        assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
        assert "headway:" not in done.stdout + done.stderr
        queued = _queued_s() - queued + self._late_s(end)
        new = set(self.notes.iterdir()) - known
        found = [Watched(_read(path), begin, end, queued + _noted_queued_s(path)) for path in new]
        return sorted(found, key=lambda watched: (watched.rank, watched.notes[0][1]))

    def _late_s(self, end: float) -> float:
        """How long after the test its witness saw the command end."""
        last = max(records[-1].t_ns for _, records in witnessed(self.home))  # type: ignore[union-attr]
        return max(last / 1e9 - end, 0.0)

    def report(self, *options: str) -> dict[str, Any]:
        witnessed(self.home)  # the command's witness ends after it
        environ = {"HEADWAY_HOME": str(self.home)}
        asked = CliRunner().invoke(main, ["report", "job", "--json", *options], env=environ, catch_exceptions=False)
        report: dict[str, Any] = json.loads(asked.stdout)
        return report

    def records(self) -> dict[int, list[Record]]:
        """What each process wrote, by its id; those of launchers are left out."""
        found: dict[int, list[Record]] = {}
        for _, batch in JobReader(JobPaths(self.home, "job")).poll():
            first = next((record for record in batch.records if isinstance(record, Process)), None)
            if first is not None and first.role != "launcher":
                found[first.pid] = batch.records
        return found

    def ranks(self) -> dict[int, tuple[int, int]]:
        """The processes that turned out to be ranks: by process id, rank and number of ranks."""
        last = {
            pid: [record for record in records if isinstance(record, Process)][-1]
            for pid, records in self.records().items()
        }
        return {pid: (process.rank, process.world_size) for pid, process in last.items() if process.role == "rank"}

    def noted_ranks(self) -> dict[int, tuple[int, int]]:
        return {int(path.stem): Watched(_read(path), 0, 0).rank for path in self.notes.iterdir()}

    def saved(self, rank: int = 0) -> list[tuple[int, str]]:
        """The checkpoints of a rank in the order they were saved: the step by its own count, and where."""
        return [
            (record.step, record.path)
            for pid, records in sorted(self.records().items())
            for record in records
            if isinstance(record, Saved) and record.durable and self.ranks()[pid][0] == rank
        ]


def _read(path: Path) -> list[tuple[str, float]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["what"], line["at"]) for line in lines]


def _noted_queued_s(path: Path) -> float:
    """Since the first batch was asked for: before that, there is little to tell apart."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first = next((line for line in lines if line["what"] == "train batch begins"), lines[0])
    return float(lines[-1]["queued_s"] - first["queued_s"])


def _queued_s() -> float:
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as short:
        yield Job(tmp_path, short)


def assert_measured(job: Job, ranks: list[Watched], stages: dict[str, float]) -> None:
    """One attempt that went well: each rank's report agrees with its stopwatch, and the job's with all of them."""
    report = job.report()
    wall, queued = ranks[0].end - ranks[0].begin, max(rank.queued for rank in ranks)
    assert (report["state"], report["failures"], len(report["attempts"])) == ("ended", [], 1)
    assert job.ranks() == job.noted_ranks()
    assert [rank["rank"] for rank in report["ranks"]] == list(range(len(ranks)))
    assert report["attempts"][0]["world_size"] == len(ranks)
    assert report["wall_s"] == pytest.approx(wall, abs=max(0.03 * wall, 0.3) + queued)
    assert report["steps"] == {"new": STEPS, "repeated": 0, "unsaved": 0}
    assert report["unattributed_s"] <= 0.02 * wall
    for rank, watched in zip(report["ranks"], ranks, strict=True):
        assert_alike(rank["ledger"], watched, watched.queued)
        expected = 100 * watched.phases(rank["ledger"])["steps"] / wall
        assert report["ett_percent"] == pytest.approx(expected, abs=2 + 100 * queued / wall)
    for stage, seconds in stages.items():
        assert seconds - 0.01 <= report["stages"][stage] <= seconds + max(0.2, 0.03 * wall) + queued


def assert_resumed(job: Job, killed: Watched, resumed: Watched) -> None:
    """Two attempts, of which the second repeats what the first did after its last checkpoint."""
    report = job.report()
    first, second = report["attempts"]
    repeated = KILLED_AT - EPOCH
    assert (report["state"], len(report["failures"]), first["outcome"]) == ("ended", 1, "failed")
    assert report["steps"] == {"new": STEPS, "repeated": repeated, "unsaved": 0}
    assert (first["next_step"], second["first_step"], second["next_step"]) == (KILLED_AT, KILLED_AT - repeated, STEPS)
    assert report["unattributed_s"] <= 0.02 * report["wall_s"]
    resumed.begin = killed.times("killed")[0]
    of_rank = job.report("--attempt", "1", "--rank", str(resumed.rank[0]))
    assert_alike(of_rank["ledger"], resumed, killed.queued + resumed.queued)
    begin, end = resumed.loop, resumed.times("step")[repeated - 1]
    lost = sum(resumed.during(what, begin, end) for what in ("train batch", "evaluation", "checkpoint"))
    expected = end - begin - lost
    tolerance = max(0.1 * expected, 0.3) + resumed.queued
    assert report["ledger"]["waste.repeated_steps"] == pytest.approx(expected, abs=tolerance)


# --- the frameworks --------------------------------------------------------------------------------------------------


@pytest.mark.needs_package("lightning")
def test_lightning(job: Job) -> None:
    ranks = job.run(sys.executable, str(SCRIPTS / "train_lightning.py"), str(job.folder), "fresh", "-1")
    assert_measured(job, ranks, {"preproc_creation": 0.3, "pre_train": 0.2})
    places = [str(job.folder / "checkpoints" / f"step={step}.ckpt") for step in range(6, 25, 6)]
    assert job.saved() == list(zip(range(6, 25, 6), places, strict=True))


@pytest.mark.thorough
@pytest.mark.needs_package("lightning")
def test_lightning_killed_and_resumed(job: Job) -> None:
    script = [sys.executable, str(SCRIPTS / "train_lightning.py"), str(job.folder)]
    (killed,) = job.run(*script, "fresh", str(KILLED_AT), status=-9)
    time.sleep(0.5)  # until the failure is noticed
    (resumed,) = job.run(*script, "resume", "-1")
    assert_resumed(job, killed, resumed)


@pytest.mark.needs_package("transformers", "accelerate")
def test_hugging_face(job: Job) -> None:
    ranks = job.run(sys.executable, str(SCRIPTS / "train_huggingface.py"), str(job.folder), "fresh", "-1")
    assert_measured(job, ranks, {"preproc_creation": 0.6})
    places = [str(job.folder / f"checkpoint-{step}") for step in range(6, 25, 6)]
    assert job.saved() == list(zip(range(6, 25, 6), places, strict=True))


@pytest.mark.thorough
@pytest.mark.needs_package("transformers", "accelerate")
def test_hugging_face_killed_and_resumed(job: Job) -> None:
    script = [sys.executable, str(SCRIPTS / "train_huggingface.py"), str(job.folder)]
    (killed,) = job.run(*script, "fresh", str(KILLED_AT), status=-9)
    time.sleep(0.5)  # until the failure is noticed
    (resumed,) = job.run(*script, "resume", "-1")
    assert_resumed(job, killed, resumed)


@pytest.mark.thorough
@pytest.mark.needs_package("accelerate")
@pytest.mark.parametrize("processes", [1, 2])
def test_accelerate(job: Job, processes: int) -> None:
    how = ["--cpu"] if processes == 1 else ["--multi_gpu", "--main_process_port", "0"]  # gloo, without a GPU
    ranks = job.run(
        *ACCELERATE, *how, "--num_processes", str(processes), str(SCRIPTS / "train_accelerate.py"), str(job.folder)
    )
    assert_measured(job, ranks, {"preproc_creation": 0.6})
    places = [str(job.folder / f"step-{step}") for step in range(6, 25, 6)]
    assert job.saved() == list(zip(range(6, 25, 6), places, strict=True))


@pytest.mark.thorough
@pytest.mark.needs_package("ray")
def test_ray(job: Job) -> None:
    ranks = job.run(sys.executable, str(SCRIPTS / "train_ray.py"), str(job.folder), "-1")
    assert_measured(job, ranks, {"preproc_creation": 0.6})
    uploaded = [(step, Path(path)) for step, path in job.saved() if path.startswith(str(job.folder))]
    assert [step for step, _ in uploaded] == [EPOCH, STEPS]
    assert all((path / "model.pt").exists() for _, path in uploaded)


@pytest.mark.thorough
@pytest.mark.needs_package("ray")
def test_ray_starts_workers_again(job: Job) -> None:
    """One of two workers raises an exception; Ray starts both again, and they go on from the last checkpoint."""
    watched = job.run(sys.executable, str(SCRIPTS / "train_ray.py"), str(job.folder), str(KILLED_AT))
    _, first_resumed, killed, _ = watched
    assert_resumed(job, killed, first_resumed)
    assert job.ranks() == job.noted_ranks()
    report = job.report()
    assert [(failure["attempt"], failure["rank"]) for failure in report["failures"]] == [(0, 1)]
    assert report["attempts"][0]["error"] == "RuntimeError: the script wants it so"


def test_what_is_copied_from_a_hooked_function_can_be_sent_elsewhere() -> None:
    """Ray copies the attributes of all methods of an actor's class, inherited ones too, and pickles them."""
    patch = Patch("os.getpid", os, "getpid", lambda patch, error: None)
    assert pickle.loads(pickle.dumps(patch)) == "os.getpid"
