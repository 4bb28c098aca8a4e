"""A publisher as a job of a real Slurm: submitted from outside or by a job that ends; refused, cancelled, requeued."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from slurm import Slurm, free_ports
from small_job import wait_until

from headway.errors import InputError, PlatformError
from headway.publish.request import Desk, Publish, Request, open_desk
from headway.publish.runners import queue_state, runner_named

pytestmark = pytest.mark.needs("scontrol", "slurmctld", "slurmd", "munged")

WORKER = Path(__file__).parents[1] / "publish" / "worker_on_command.py"

SUBMITS = """
import json, sys
from pathlib import Path
from headway.errors import InputError
from headway.publish.request import Desk
from headway.publish.runners import runner_named
desk = Desk(Path(sys.argv[1]))
try:
    runner_named("local").submit(desk.request, desk, json.loads(sys.argv[2]))
except InputError as error:
    print("refused:", error)
print(runner_named("slurm").submit(desk.request, desk, json.loads(sys.argv[2])), flush=True)
"""


@pytest.fixture(autouse=True)
def _this_slurm(slurm: Slurm, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Slurm that is asked, and no job around; what a user's shell may hold must not reach the job."""
    monkeypatch.setenv("SLURM_CONF", str(slurm.config))
    monkeypatch.setenv("SBATCH_PARTITION", "nonexistent")


def new_desk(home: Path, sbatch: str = "") -> Desk:
    """Of a job with a slash in its name: the folder has a % in its own."""
    what = Publish(runner="slurm", sbatch=sbatch)
    return open_desk(home, Request(id="a%2Fb-1", what=what, root="/r", checkpoint="c", job="a/b", folder=str(home)))


def command(desk: Desk, *plans: str) -> list[str]:
    """A supervisor and its worker; without plans, one that has begun when there is a file `begun`, and publishes when
    there is a file `go`."""
    plans = plans or (f"pid={desk.folder}/begun+until={desk.folder}/go+publish",)
    return [sys.executable, str(WORKER), "supervise", str(desk.folder), *plans]


def submit(desk: Desk, *plans: str) -> str:
    """The job's id."""
    told = runner_named("slurm").submit(desk.request, desk, command(desk, *plans))
    job = desk.state().queued.removeprefix("slurm:")
    assert told.startswith(f"Slurm job {job}, ")
    return job


def test_a_job_of_its_own_publishes_and_its_words_are_in_the_log(slurm: Slurm, home: Path) -> None:
    filler = slurm.fill()
    desk = new_desk(home, "--cpus-per-task=2 --comment='two words'")
    job = submit(desk)
    assert desk.state().phase == "waiting"
    wait_until(lambda: queue_state(f"slurm:{job}") == "PENDING (Resources)")
    again = runner_named("slurm").submit(desk.request, desk, command(desk))
    assert again.startswith(f"Slurm job {job} is there already, PENDING (Resources).")
    slurm.cancel(filler)
    wait_until((desk.folder / "begun").exists)
    assert queue_state(f"slurm:{job}").startswith("RUNNING on ")
    assert (slurm._field(job, "NumTasks"), slurm._field(job, "CPUs/Task")) == ("1", "2")
    assert slurm._field(job, "Requeue") == "1"
    assert desk.state().phase == "running"
    (desk.folder / "go").touch()
    slurm.wait_for(job, "COMPLETED")
    assert queue_state(f"slurm:{job}") == "COMPLETED"
    assert desk.state().phase == "published"
    assert desk.log.read_text() == "published as v1\n"


def test_a_job_that_ends_leaves_its_publisher_behind_in_another_job(slurm: Slurm, home: Path) -> None:
    desk, script = new_desk(home), home / "submits.py"
    script.write_text(SUBMITS)
    report = f"import os, json, pathlib; pathlib.Path({str(home / 'told')!r}).write_text(json.dumps(dict(os.environ)))"
    publisher = [sys.executable, "-c", report]
    words = [sys.executable, str(script), str(desk.folder), json.dumps(publisher)]
    environ = {"HEADWAY_HOME": str(home), "HEADWAY_ATTEMPT": "3", "RANK": "1", "CUDA_VISIBLE_DEVICES": "2"}
    environ |= {"SBATCH_PARTITION": "main"}
    trainer = slurm.submit(f"exec {shlex.join(words)}", "--ntasks=2", "--cpus-per-task=2", environ=environ)
    slurm.wait_for(trainer, "COMPLETED")
    said = slurm.output(trainer)
    assert f"refused: a process that publishes would end with Slurm job {trainer}, " in said
    assert "headway publish submit a%2Fb-1 --runner slurm" in said
    job = desk.state().queued.removeprefix("slurm:")
    assert job != trainer
    assert f"Slurm job {job}, " in said
    slurm.wait_for(job, "COMPLETED")
    told = json.loads((home / "told").read_text())
    assert told["SLURM_JOB_ID"] == job
    assert told["HEADWAY_JOB"] == "a/b"
    assert told["HEADWAY_HOME"] == str(home)
    assert "SLURM_CPUS_PER_TASK" not in told
    assert told["SLURM_NTASKS"] == "1"
    assert not {"RANK", "HEADWAY_ATTEMPT", "CUDA_VISIBLE_DEVICES"} & told.keys()
    assert not [name for name in told if name.startswith("SBATCH_")]
    assert told["PATH"] == slurm.environ["PATH"]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--partition=no-such", "invalid partition"),
        pytest.param("--no-such=1", "no-such", marks=pytest.mark.thorough),
    ],
)
def test_what_sbatch_refuses_is_told_in_its_own_words(slurm: Slurm, home: Path, option: str, says: str) -> None:
    desk = new_desk(home, option)
    with pytest.raises(InputError, match=f"sbatch refused it: .*{says}") as refusal:
        submit(desk)
    assert "headway publish submit a%2Fb-1 --runner slurm" in str(refusal.value)
    assert (desk.state().phase, desk.state().problem) == ("failed", str(refusal.value))


@pytest.mark.thorough
def test_a_slurm_that_does_not_answer_is_the_platforms_fault(
    slurm: Slurm, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = home / "slurm.conf"
    deaf.write_text(re.sub(r"SlurmctldPort=\d+", f"SlurmctldPort={free_ports(1)[0]}", slurm.config.read_text()))
    monkeypatch.setenv("SLURM_CONF", str(deaf))
    with pytest.raises(PlatformError, match=r"sbatch refused it: .*Unable to contact slurm controller"):
        submit(new_desk(home))
    assert queue_state("slurm:1") == ""


def test_a_job_that_slurm_does_not_know_is_gone(slurm: Slurm) -> None:
    assert queue_state("slurm:999999") == "gone"


@pytest.mark.thorough
def test_a_cancelled_publisher_says_so_and_can_be_submitted_again(slurm: Slurm, home: Path) -> None:
    desk = new_desk(home)
    job = submit(desk)
    wait_until((desk.folder / "begun").exists)
    slurm.cancel(job)
    wait_until(lambda: queue_state(f"slurm:{job}") == "CANCELLED")
    wait_until(lambda: desk.state().phase == "interrupted")
    assert desk.state().problem.startswith(f"interrupted by SIGTERM in Slurm job {job}")
    (desk.folder / "go").touch()
    second = submit(desk)
    assert second != job
    slurm.wait_for(second, "COMPLETED")
    assert (desk.state().phase, desk.state().tries) == ("published", 2)


@pytest.mark.thorough
def test_a_requeued_publisher_goes_on_where_it_was(slurm: Slurm, home: Path) -> None:
    desk = new_desk(home)
    first = f"step=weights+pid={desk.folder}/begun+sleep"
    job = submit(desk, first, "step=package+publish")
    wait_until((desk.folder / "begun").exists)
    slurm.requeue(job)
    wait_until(lambda: slurm._field(job, "Restarts") == "1")
    slurm.wait_for(job, "COMPLETED")
    state = desk.state()
    assert (state.phase, state.tries, state.steps) == ("published", 2, ("weights", "package"))
    assert desk.log.read_text().count(f"interrupted by SIGTERM in Slurm job {job}") == 1
