"""A real Slurm takes a job's node away: the job saves, comes back by itself, and goes on as if nothing had happened.

A job that a person cancelled does not come back, though Slurm would let it.
"""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm as platform
from click.testing import CliRunner
from slurm import Slurm
from small_job import environ, wait_until

import ranks
import shared
from headway.cli import main
from headway.launch.notice import EXIT_STOPPED
from headway.paths import jobs_in

pytestmark = pytest.mark.needs("scontrol", "slurmctld", "slurmd", "munged")

PARTITIONS = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes={host} State=UP PriorityTier=1 GraceTime=3600
PartitionName=high Nodes={host} State=UP PriorityTier=2 PreemptMode=OFF
"""

TRAINER = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import headway

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
os.environ.setdefault("RANK", os.environ.get("SLURM_PROCID", ""))
os.environ.setdefault("WORLD_SIZE", "2")
run = headway.current()
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
checkpoint, first = folder / "checkpoint.pt", 0
if checkpoint.exists():
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
    run.checkpoint_restored(first)

def save(step):
    print("stopped", run.rank, step, run.stop.reason, run.stop.seconds_left, flush=True)
    if run.rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, folder / "new.pt")
        (folder / "new.pt").replace(checkpoint)
    dist.barrier()
    run.checkpoint_saved(step)

run.on_stop(save)
losses = open(folder / f"losses-{run.rank}", "a", buffering=1)
for step, _ in run.steps(range(first, steps), start=first):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + run.rank))
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    print(step, loss.item(), file=losses)
    time.sleep(0.0 if first or "QUICK" in os.environ else 0.05)
    if steps > 9999:
        enough = torch.tensor(float((folder / "enough").exists()))
        dist.broadcast(enough, 0)  # each for itself, one could leave and the other go on
        if enough:
            break
if run.stop is None:
    run.checkpoint_saved()
dist.destroy_process_group()
run.finish()
"""


ALONE = """
import sys, time
from pathlib import Path
import headway

folder = Path(sys.argv[1])
run = headway.current()

def save(step):
    print("stopped", run.rank, step, run.stop.reason, flush=True)
    (folder / "checkpoint").write_text(str(step))
    run.checkpoint_saved(step)

run.on_stop(save)
losses = open(folder / "losses-0", "a", buffering=1)
for step, _ in run.steps(range(100_000)):
    print(step, 0.0, file=losses)
    time.sleep(0.02)
run.finish()
"""
"""A job of one rank that trains without torch until it is stopped."""


@pytest.fixture(scope="module")
def preempting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm with a partition whose jobs take the node from those of another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "CONFIG", platform.CONFIG.replace("KillWait=2", "KillWait=30") + PARTITIONS)
        cluster = Slurm(tmp_path_factory.mktemp("preempting"))
        try:
            yield cluster.start()
        finally:
            cluster.stop()


SRUN = ["srun", "--ntasks=2", sys.executable]
SUPERVISED = ["srun", "--ntasks=1", sys.executable, "-m", "headway", "run", "--nproc-per-node=2"]


LAUNCHERS = pytest.mark.parametrize(
    "launcher",
    [pytest.param(SRUN, id="srun"), pytest.param(SUPERVISED, id="headway run", marks=pytest.mark.thorough)],
)
STEPS = 600
"""Half a minute until it is preempted: Slurm may be slow. Afterwards it trains without a pause."""


@LAUNCHERS
def test_a_preempted_job_comes_back_and_trains_as_if_undisturbed(
    preempting: Slurm, home: Path, launcher: list[str]
) -> None:
    job = submit(preempting, home, STEPS, launcher=launcher)
    wait_until(lambda: steps_done(home) > 5)
    urgent = preempting.submit("true", "--exclusive", "--partition=high")
    preempting.wait_for(urgent, "COMPLETED")  # long before the grace time is over
    preempting.wait_for(job, "COMPLETED")

    said = preempting.output(job)
    assert f"headway: Slurm job {job} goes back into the queue." in said
    stops = [line.split() for line in said.splitlines() if line.startswith("stopped")]
    assert sorted(stop[1] for stop in stops) == ["0", "1"]
    assert stops[0][2] == stops[1][2]
    [(reason, left)] = [(stop[3], stop[4]) for stop in stops if stop[1] == "0"]
    assert reason == "preempted"
    assert 0 < float(left) <= 3600
    assert preempting._field(job, "Restarts") == "1"

    for rank in (0, 1):
        assert losses(home, rank) == undisturbed(home, rank, STEPS)
    wait_until(lambda: report(home)["state"] == "ended")
    told = report(home)
    assert jobs_in(home) == [told["job"]] == [f"slurm-{job}"]
    assert [attempt["world_size"] for attempt in told["attempts"]] == [2, 2]
    assert told["attempts"][0]["next_step"] == told["attempts"][1]["first_step"] == int(stops[0][2])
    assert told["steps"] == {"new": STEPS, "repeated": 0, "unsaved": 0}
    assert told["failures"] == []
    assert told["ledger"]["recover.scheduling"] + told["ledger"]["recover.backoff"] > 0
    assert sum(told["ledger"].values()) == pytest.approx(told["wall_s"], abs=1e-6)


def test_a_cancelled_job_saves_and_does_not_come_back(preempting: Slurm, home: Path) -> None:
    job = submit_alone(preempting, home)
    wait_until(lambda: steps_done(home) > 5)
    preempting.cancel(job)
    wait_until(lambda: preempting.state(job) == "CANCELLED")
    assert (home / "checkpoint").exists()
    assert f"headway: Slurm job {job} was cancelled, and is not requeued." in preempting.output(job)
    assert "stopped 0" in preempting.output(job)
    assert preempting._field(job, "Restarts") == "0"


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", [SRUN, SUPERVISED], ids=["srun", "headway run"])
def test_a_job_near_its_time_limit_comes_back(preempting: Slurm, home: Path, launcher: list[str]) -> None:
    job = submit(preempting, home, 100_000, "--time=30", "--signal=USR1@600", launcher=launcher)
    wait_until(lambda: steps_done(home) > 5)
    # The end comes near when the job is ready for the signal, however long its start took.
    preempting.ask("scontrol", "update", f"JobId={job}", "TimeLimit=5")
    wait_until(lambda: preempting._field(job, "Restarts") == "1")
    preempting.ask("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    (home / "enough").touch()
    preempting.wait_for(job, "COMPLETED")
    [stop] = [line.split() for line in preempting.output(job).splitlines() if line.startswith("stopped 0")]
    assert stop[3] == "time_limit"
    assert 0 < float(stop[4]) <= 300
    steps = [step for step, _ in losses(home, 0)]
    assert steps == list(range(len(steps)))


@pytest.mark.thorough
def test_a_job_that_may_not_be_requeued_says_so_and_fails(preempting: Slurm, home: Path) -> None:
    job = submit_alone(preempting, home, "--no-requeue")
    wait_until(lambda: steps_done(home) > 5)
    preempting.ask("scancel", "--signal=USR1", job)
    wait_until(lambda: preempting.state(job) == "FAILED")
    assert f"Slurm job {job} may not be requeued (Requeue=0)" in preempting.output(job)
    assert preempting._field(job, "ExitCode") == f"{EXIT_STOPPED}:0"


TWO_CALLERS = """
import os, signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to have a last word
from headway.launch.slurm import requeue, restarts
if restarts(os.environ) == 0:
    folder = Path(__file__).parent
    (folder / f"ready-{os.environ['SLURM_PROCID']}").touch()
    while len(list(folder.glob("ready-*"))) < 2:  # whoever comes first ends the other
        time.sleep(0.01)
    print(requeue(os.environ, "sigusr1"), flush=True)
"""


@pytest.mark.thorough
def test_of_two_ranks_that_requeue_the_same_job_one_does(preempting: Slurm, home: Path) -> None:
    (home / "train.py").write_text(TWO_CALLERS)
    script = shlex.join(["srun", "--ntasks=2", sys.executable, str(home / "train.py")])
    options = ("--array=3", f"--output={home}/out", "--ntasks=2")
    job = preempting.submit(script, *options, environ=environ(home))
    wait_until(lambda: preempting.state(job) == "COMPLETED" and preempting._field(job, "Restarts") != "0")
    said = (home / "out").read_text()
    assert said.count("Requeue(done=True") == 2, said
    assert f"Slurm job {job}_3 goes back into the queue" in said
    assert preempting._field(job, "Restarts") == "1"


# --- the job -------------------------------------------------------------------------------------------------------


def submit(slurm: Slurm, home: Path, steps: int, *options: str, launcher: list[str] = SRUN) -> str:
    """The id of a job of two ranks that trains so many steps, on the whole node."""
    (home / "train.py").write_text(TRAINER)
    command = [*launcher, str(home / "train.py"), str(home), str(steps)]
    options = ("--ntasks=2", "--exclusive", "--partition=low", *options)
    return slurm.submit(shlex.join(command), *options, environ=environ(home) | rendezvous())


def submit_alone(slurm: Slurm, home: Path, *options: str) -> str:
    """The id of a job of one rank that trains until it is stopped, on the whole node."""
    (home / "train.py").write_text(ALONE)
    command = ["srun", "--ntasks=1", sys.executable, str(home / "train.py"), str(home)]
    options = ("--ntasks=1", "--exclusive", "--partition=low", *options)
    return slurm.submit(shlex.join(command), *options, environ=environ(home))


def rendezvous() -> dict[str, str]:
    """Where the ranks meet."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(shared.free_port())}


def steps_done(home: Path) -> int:
    """How many steps the job has trained so far."""
    return len(losses(home, 0)) if (home / "losses-0").exists() else 0


def losses(home: Path, rank: int) -> list[tuple[int, str]]:
    """Each step's number and loss, in the order of training."""
    lines = (home / f"losses-{rank}").read_text().splitlines()
    return [(int(step), loss) for step, loss in (line.split() for line in lines if " " in line)]


def undisturbed(home: Path, rank: int, steps: int) -> list[tuple[int, str]]:
    """The losses of the same training without Slurm and in one go."""
    folder = home / "undisturbed"
    if not folder.exists():
        folder.mkdir()
        words = [str(home / "train.py"), str(folder), str(steps)]
        done = ranks.run(2, words, env=environ(folder, HEADWAY_DISABLE="1", QUICK="1"))
        assert done.returncode == 0, done.stderr
    return losses(folder, rank)


def report(home: Path) -> dict:  # type: ignore[type-arg]
    """What `headway report --json` says of the only job."""
    done = CliRunner().invoke(main, ["report", "--json"], env={"HEADWAY_HOME": str(home)})
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)  # type: ignore[no-any-return]
