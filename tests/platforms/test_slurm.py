"""Jobs in a real Slurm: how long each waited, whether it was requeued, and what Slurm's own clock says of it."""

import shlex
import sys
import time
from pathlib import Path

import pytest
from slurm import Slurm
from small_job import STEPS, began_s, command, environ, is_scheduling_known, ledger, noted_s, wait_until

from headway.accounting.rules import Bucket
from headway.events import scheduler
from headway.events.scheduler import scheduled
from headway.paths import jobs_in

pytestmark = pytest.mark.needs("scontrol", "slurmctld", "slurmd", "munged")

FAR_AWAY = {"TZ": "FAR-14", "SLURM_TIME_FORMAT": "relative"}
"""Fourteen hours ahead of UTC, and times written as people say them."""

S = 1_000_000_000


def test_a_jobs_wait_in_the_queue_is_in_its_ledger(slurm: Slurm, home: Path) -> None:
    filler = slurm.fill()
    before_s = int(time.time())
    job = submit(slurm, home, environ=FAR_AWAY)
    submitted_s = time.time()
    wait_until(lambda: time.time() > slurm.eligible_s(job) + 2)
    freed_s = int(time.time())
    slurm.cancel(filler)
    finish(slurm, home, job)

    told = ledger()
    eligible_s, started_s = slurm.eligible_s(job), slurm.started_s(job)
    # Slurm counts whole seconds; within those, its times are those of the clock on the wall.
    assert before_s <= eligible_s <= submitted_s
    assert freed_s <= started_s <= min(began_s(home, 0), began_s(home, 1))
    assert started_s - eligible_s >= 2

    assert jobs_in(home) == [told.job] == [f"slurm-{job}"]
    assert told.state == "ended"
    assert told.notes == []
    assert told.ranks == [0, 1]
    assert [sorted(account.views) for account in told.attempts] == [[0, 1]]
    assert told.begin_ns == eligible_s * S
    assert told.buckets[Bucket.START_SCHEDULING] == (started_s - eligible_s) * S
    assert 0 <= told.buckets[Bucket.START_HARDWARE_SETUP] <= (max(began_s(home, 0), began_s(home, 1)) - started_s) * S
    for rank in told.ranks:
        mine = told.rank_sums(rank)
        assert mine[Bucket.START_SCHEDULING, ""] == (started_s - eligible_s) * S
        assert 0 <= mine[Bucket.START_HARDWARE_SETUP, ""] <= (began_s(home, rank) - started_s) * S


def test_a_requeued_job_stays_one_job_and_its_second_wait_is_recovery(slurm: Slurm, home: Path) -> None:
    job = submit(slurm, home, environ=FAR_AWAY)
    wait_until(lambda: is_scheduling_known(f"slurm-{job}"))
    wait_until(lambda: (home / "checkpoint-0").exists() and (home / "checkpoint-1").exists())
    first_eligible_s, first_started_s = slurm.eligible_s(job), slurm.started_s(job)

    filler = slurm.submit("exec sleep 600", "--exclusive")  # before, so that it is there when the node is free
    slurm.requeue(job)
    slurm.wait_for(filler, "RUNNING")
    wait_until(lambda: time.time() > slurm.eligible_s(job) + 2)
    last_steps_s = [noted_s(home, rank, "step")[-1] for rank in (0, 1)]
    slurm.cancel(filler)
    finish(slurm, home, job, attempt=1)

    told = ledger()
    eligible_s, started_s = slurm.eligible_s(job), slurm.started_s(job)
    assert started_s - eligible_s >= 1
    assert jobs_in(home) == [told.job] == [f"slurm-{job}"]
    assert [account.outcome for account in told.attempts] == ["failed", "ended"]
    assert [sorted(account.views) for account in told.attempts] == [[0, 1], [0, 1]]
    assert told.notes == []

    assert told.begin_ns == first_eligible_s * S
    assert told.buckets[Bucket.START_SCHEDULING] == (first_started_s - first_eligible_s) * S
    assert told.buckets[Bucket.RECOVER_SCHEDULING] == (started_s - eligible_s) * S
    # Slurm holds a requeued job back until the old one's credentials have expired, and only then lets it wait.
    held_back_ns = sum(told.buckets[key] for key in (Bucket.RECOVER_TEARDOWN, Bucket.RECOVER_BACKOFF))
    assert told.attempts[1].attempt.begin_ns + held_back_ns == eligible_s * S
    assert told.buckets[Bucket.RECOVER_BACKOFF] > 0
    assert told.buckets[Bucket.RECOVER_DETECTION] == 0
    assert held_back_ns / S == pytest.approx(eligible_s - max(last_steps_s), abs=3)
    [recovery_ns] = told.times_to_recover_ns
    assert recovery_ns >= held_back_ns + (started_s - eligible_s) * S


@pytest.mark.thorough
def test_a_restart_inside_the_allocation_has_no_second_wait(slurm: Slurm, home: Path) -> None:
    fails, lasts = (shlex.join(["srun", "--ntasks=2", *command(home, *more)]) for more in ([STEPS // 2], []))
    job = slurm.submit(f"{fails}\n{lasts}", "--ntasks=2", environ=environ(home, SLURM_CONF=str(slurm.config)))
    wait_until(lambda: is_scheduling_known(f"slurm-{job}"))
    (home / "fail").touch()
    (home / "enough").touch()  # what fails does so before it looks
    slurm.wait_for(job, "COMPLETED")

    told = ledger(f"slurm-{job}")
    assert [account.outcome for account in told.attempts] == ["failed", "ended"]
    assert told.buckets[Bucket.START_SCHEDULING] == (slurm.started_s(job) - slurm.eligible_s(job)) * S
    assert told.buckets[Bucket.RECOVER_SCHEDULING] == told.buckets[Bucket.RECOVER_BACKOFF] == 0
    assert told.buckets[Bucket.RECOVER_DETECTION] > 0


@pytest.mark.thorough
def test_times_are_right_in_every_time_zone_and_format(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "TIMEOUT_S", 100.0)
    job = slurm.submit("true", "--begin=now+2")
    slurm.wait_for(job, "COMPLETED")
    moments_ns = (slurm.eligible_s(job) * S, slurm.started_s(job) * S)
    for zone in ("UTC", "FAR-14", "FAR+11:30", "America/New_York", ":/nonexistent", ""):
        for style in ("", "standard", "relative", "%s", "%H:%M", "nonsense"):
            around = slurm.environ | {"SLURM_JOB_ID": job, "TZ": zone, "SLURM_TIME_FORMAT": style}
            told = scheduled(around, "", "", 7)
            assert told is not None, (zone, style)
            assert (told.eligible_wall_ns, told.allocated_wall_ns) == moments_ns, (zone, style)
            assert (told.t_ns, told.source) == (7, "slurm")


@pytest.mark.thorough
def test_each_task_of_an_array_is_a_job_with_its_own_times(slurm: Slurm, home: Path) -> None:
    told_path, task = home / "ids", "$SLURM_ARRAY_TASK_ID"
    for number in "01":
        (home / number).mkdir()
    train = shlex.join(command(home / "NUMBER")).replace("NUMBER", task)  # which the shell expands
    script = f'echo "{task} $SLURM_JOB_ID" >>{told_path}\nsrun {train}'
    options = ("--array=0-1", "--ntasks=1", "--exclusive")
    array = slurm.submit(f"export HEADWAY_HOME={home}\n{script}", *options)
    for number in "01":
        wait_until(lambda number=number: is_scheduling_known(f"slurm-{array}_{number}"))
        (home / number / "enough").touch()
    wait_until(lambda: len(told_path.read_text().splitlines()) == 2)
    tasks = dict(line.split() for line in told_path.read_text().splitlines())
    # One of the tasks has the array's own id: asked for it, scontrol tells of the whole array.
    assert array in tasks.values()
    for job in tasks.values():
        slurm.wait_for(job, "COMPLETED")

    assert sorted(jobs_in(home)) == [f"slurm-{array}_0", f"slurm-{array}_1"]
    for number, job in tasks.items():
        told = ledger(f"slurm-{array}_{number}")
        assert told.begin_ns == slurm.eligible_s(job) * S
        assert told.buckets[Bucket.START_SCHEDULING] == (slurm.started_s(job) - slurm.eligible_s(job)) * S


def test_a_job_that_slurm_no_longer_knows_is_told_nothing(slurm: Slurm) -> None:
    assert scheduled(slurm.environ | {"SLURM_JOB_ID": "999999"}, "", "", 0) is None


UNMODIFIED = """
import torch
from torch.utils.data import DataLoader
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in DataLoader(torch.randn(40, 4), batch_size=4):
    model(batch).sum().backward()
    optimizer.step()
"""


def test_an_unmodified_program_under_srun_is_measured_by_one_word_before_it(slurm: Slurm, home: Path) -> None:
    (home / "train.py").write_text(UNMODIFIED)
    python = shlex.quote(sys.executable)
    script = f"#!/bin/sh\n{python} -m headway exec srun --ntasks=2 {python} {home}/train.py\n"
    job = slurm.submit(script, "--ntasks=2", environ=environ(home))
    slurm.wait_for(job, "COMPLETED")
    wait_until(lambda: ledger().state == "ended")
    told = ledger()
    assert told.job == f"slurm-{job}"
    assert told.ranks == [0, 1]
    assert len(told.attempts) == 1
    assert told.steps[Bucket.TRAINING_EFFECTIVE] == 10
    assert told.buckets[Bucket.START_LAUNCHER_INIT] > 0


def submit(slurm: Slurm, home: Path, environ: dict[str, str]) -> str:
    """The id of a job of two ranks on the whole node, to which this environment is given."""
    script = f"export HEADWAY_HOME={home}\n{shlex.join(['srun', '--ntasks=2', *command(home)])}"
    return slurm.submit(script, "--ntasks=2", "--exclusive", environ=environ)


def finish(slurm: Slurm, home: Path, job: str, attempt: int = 0) -> None:
    """Lets the job end once it has asked Slurm for its times."""
    wait_until(lambda: is_scheduling_known(f"slurm-{job}", attempt))
    (home / "enough").touch()
    slurm.wait_for(job, "COMPLETED")
