"""In a Slurm job whose scontrol is missing, fails, babbles or hangs: the job goes on, and says what is not known."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from small_job import environ, ledger, says_unknown, train

from headway.accounting.rules import Bucket
from headway.events import scheduler
from headway.events.scheduler import parse_slurm, scheduled

JOB = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}

ANSWERS = {
    "fails": "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
    "fails after an answer": "echo 'EligibleTime=2026-11-16T00:00:00 StartTime=2026-11-16T00:00:05'; exit 1",
    "says nothing": "exit 0",
    "says garbage": "echo EligibleTime=soon StartTime=later; head -c 2000 /dev/urandom",
    "has not started it": "echo 'JobId=12 EligibleTime=2026-11-16T00:00:00 StartTime=Unknown EndTime=Unknown'",
    "is killed": "kill -9 $$",
}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers at once is heard, however slow the machine."""
    monkeypatch.setattr(scheduler, "TIMEOUT_S", 100.0)


@pytest.mark.parametrize("answer", ANSWERS)
def test_without_an_answer_nothing_is_known(home: Path, answer: str) -> None:
    path, asked = fake_scontrol(home, ANSWERS[answer])
    assert scheduled(environ(home, PATH=path, **JOB), "", "", 0) is None
    assert asked.exists()


@pytest.mark.parametrize("answer", ["fails", pytest.param("says garbage", marks=pytest.mark.thorough)])
def test_without_an_answer_the_job_goes_on_and_scheduling_is_unknown(home: Path, answer: str) -> None:
    path, asked = fake_scontrol(home, ANSWERS[answer])
    said = train(home, until=asked.exists, PATH=path, **JOB)
    told = ledger("slurm-12")
    assert said == ""
    assert told.state == "ended"
    assert says_unknown(told)
    assert told.buckets[Bucket.START_SCHEDULING] == told.buckets[Bucket.START_HARDWARE_SETUP] == 0


def test_without_scontrol_the_job_goes_on_and_scheduling_is_unknown(home: Path) -> None:
    assert train(home, PATH=str(home / "nowhere"), **JOB) == ""
    assert says_unknown(ledger("slurm-12"))


def test_a_job_does_not_wait_for_a_scontrol_that_hangs(home: Path) -> None:
    path, asked = fake_scontrol(home, "exec sleep 600")
    try:
        said = train(home, until=asked.exists, PATH=path, **JOB)
        os.kill(int(asked.read_text()), 0)  # it hangs still, and the job is over
    finally:
        if asked.exists():
            with suppress(ProcessLookupError):
                os.kill(int(asked.read_text()), signal.SIGKILL)
    assert said == ""
    assert says_unknown(ledger("slurm-12"))


def test_a_scontrol_that_hangs_is_given_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = fake_scontrol(home, "exec sleep 600")
    patience_s = 0.3
    while not asked.exists():  # on a busy machine it may be given up before it has begun
        monkeypatch.setattr(scheduler, "TIMEOUT_S", patience_s)
        assert scheduled(environ(home, PATH=path, **JOB), "", "", 0) is None
        patience_s *= 2
    with pytest.raises(ProcessLookupError):
        os.kill(int(asked.read_text()), 0)


def test_a_job_name_in_any_encoding_does_no_harm(home: Path) -> None:
    times = "EligibleTime=2026-11-16T00:00:00 AccrueTime=2026-11-16T00:00:00 StartTime=2026-11-16T00:00:05"
    path, _ = fake_scontrol(
        home, rf"printf 'JobId=12 JobName=entra\356nement Comment=\377\376 {times} EndTime=Unknown\n'"
    )
    told = scheduled(environ(home, PATH=path, LC_ALL="C", **JOB), "", "", 0)
    assert told is not None
    assert told.allocated_wall_ns - told.eligible_wall_ns == 5_000_000_000


def test_scontrol_does_not_read_what_is_typed_to_the_job(home: Path) -> None:
    path, _ = fake_scontrol(home, f"readlink /proc/self/fd/0 >{home}/stdin.new; mv {home}/stdin.new {home}/stdin")
    train(home, until=(home / "stdin").exists, PATH=path, **JOB)
    assert (home / "stdin").read_text().strip() == "/dev/null"


def test_only_the_eligible_and_the_start_time_are_read() -> None:
    text = (
        "JobId=12 JobName=x SubmitTime=2026-11-15T23:00:00 EligibleTime=2026-11-16T00:00:00 "
        "AccrueTime=2026-11-16T00:00:00 StartTime=2026-11-16T00:01:00 EndTime=2026-11-17T00:01:00 Deadline=N/A "
        "PreemptEligibleTime=2026-11-16T00:01:00 PreemptTime=None LastSchedEval=2026-11-16T00:01:00 Scheduler=Main"
    )
    assert parse_slurm(text) == (1794787200_000_000_000, 1794787260_000_000_000)


def fake_scontrol(home: Path, answer: str) -> tuple[str, Path]:
    """A PATH that begins with a scontrol of our own, and the file that holds its pid once it has been asked."""
    folder, asked = home / "bin", home / "asked"
    folder.mkdir()
    script = folder / "scontrol"
    script.write_text(f"#!/bin/sh\necho $$ >{asked}.new\nmv {asked}.new {asked}\n{answer}\n")
    script.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}", asked
