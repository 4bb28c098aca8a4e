"""Who publishes: processes that outlive everything, and refusals that say what to do."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from worker_on_command import supervisor

from headway.errors import InputError, PlatformError
from headway.publish import runners
from headway.publish.request import Desk, Publish, Request, open_desk
from headway.publish.runners import (
    ALLOCATIONS,
    environment,
    is_launchers_container,
    queue_state,
    runner_named,
    torn_down,
)

LIMIT_S = 120.0

REPORT = """
import json, os, sys
from pathlib import Path
files = {}
for name in os.listdir("/proc/self/fd"):
    try:
        files[name] = os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        pass
told = {"pid": os.getpid(), "session": os.getsid(0), "nice": os.nice(0), "cwd": os.getcwd(), "files": files}
told["cpus"] = sorted(os.sched_getaffinity(0))
Path(sys.argv[1] + ".part").write_text(json.dumps(told | {"environ": dict(os.environ)}))
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""

TRAINER = """
import json, os, sys
from pathlib import Path
from headway.publish.request import Desk
from headway.publish.runners import runner_named
for fd in os.listdir("/proc/self/fd"):
    if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}"):
        os.set_inheritable(int(fd), True)
desk = Desk(Path(sys.argv[1]))
print(runner_named("local").submit(desk.request, desk, json.loads(sys.argv[2])), flush=True)
"""


@pytest.fixture(autouse=True)
def _outside_of_allocations(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATIONS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """What it has started is gone afterwards."""
    desk = new_desk(tmp_path)
    yield desk
    with suppress(FileNotFoundError):
        (desk.folder / "go").touch()
    state = desk.state()
    if state.phase == "running" and state.pid != os.getpid():
        with suppress(ProcessLookupError):  # it may have published meanwhile, and be gone
            os.kill(state.pid, signal.SIGTERM)


def new_desk(home: Path, **what: str) -> Desk:
    folder = home / "where the trainer ran"
    folder.mkdir(exist_ok=True)
    request = Request(id="model-1", what=Publish(**what), root="/r", checkpoint="c", job="dlrm", folder=str(folder))  # type: ignore[arg-type]
    return open_desk(home, request)


def command(desk: Desk) -> list[str]:
    """A publisher that has begun when there is a file `begun`, and publishes when there is a file `go`."""
    return supervisor(desk, f"pid={desk.folder}/begun+until={desk.folder}/go+publish")


# --- this machine ----------------------------------------------------------------------------------------------------


def train(desk: Desk, *launcher: str) -> subprocess.Popen[str]:
    """A trainer that gives its request to the local runner and ends."""
    script = desk.folder / "train.py"
    script.write_text(TRAINER)
    words = [*(launcher or [sys.executable]), str(script), str(desk.folder), json.dumps(command(desk))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload, no-any-return]


LAUNCHERS = {
    "python": [],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"],
    "headway run": [sys.executable, "-m", "headway", "run", "--nproc-per-node=1"],
}


@pytest.mark.parametrize(
    "launcher", ["python", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("torchrun", "headway run"))]
)
def test_a_publisher_outlives_its_trainer_and_holds_none_of_its_pipes(desk: Desk, launcher: str) -> None:
    trainer = train(desk, *LAUNCHERS[launcher])
    said, problems = trainer.communicate(timeout=LIMIT_S)  # to the end of its pipes: nobody else holds them
    assert trainer.returncode == 0, problems
    assert f" on {os.uname().nodename}" in said
    wait_until((desk.folder / "begun").exists)
    with suppress(ProcessLookupError):
        os.killpg(trainer.pid, signal.SIGKILL)
    state = desk.state()
    assert state.phase == "running"
    assert f"process {state.pid} on" in said
    assert os.getsid(state.pid) not in (os.getsid(0), trainer.pid)
    (desk.folder / "go").touch()
    wait_until(lambda: desk.state().phase == "published")
    wait_until(lambda: desk.log.read_text() == "published as v1\n")  # once: its stderr is the log


def test_a_publisher_outlives_the_death_of_its_trainer_by_sigkill_and_sighup(desk: Desk) -> None:
    trainer = train(desk)
    assert trainer.stdout is not None
    assert trainer.stdout.readline().startswith("process ")
    os.killpg(trainer.pid, signal.SIGHUP)
    os.killpg(trainer.pid, signal.SIGKILL)
    trainer.communicate(timeout=LIMIT_S)
    wait_until((desk.folder / "begun").exists)
    (desk.folder / "go").touch()
    wait_until(lambda: desk.state().phase == "published")


def test_a_publisher_is_no_rank_and_runs_where_the_trainer_did(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    report = desk.folder / "report"
    ranks = {"RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "TORCHELASTIC_RUN_ID": "x", "HEADWAY_BOARD": "/b"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(runners, "LEAVES_S", 0)  # this process stays
    pipe, other = os.pipe()
    os.set_inheritable(other, True)
    where = runner_named("local").submit(desk.request, desk, [sys.executable, "-c", REPORT, str(report)])
    wait_until(report.exists)
    os.close(pipe)
    os.close(other)
    told = json.loads(report.read_text())
    assert where == f"process {told['pid']} on {os.uname().nodename}"
    assert told["session"] not in (told["pid"], os.getsid(0))
    assert told["nice"] == min(19, os.nice(0) + 10)
    assert told["cwd"] == desk.request.folder
    assert {told["files"][name] for name in "012"} == {"/dev/null", str(desk.log)}
    assert not [name for name in told["files"].values() if name.startswith("pipe:")]
    assert not ranks.keys() & told["environ"].keys()
    assert told["environ"]["HEADWAY_JOB"] == "dlrm"
    assert told["environ"]["HEADWAY_HOME"] == str(desk.folder.parents[1])
    assert desk.state().phase == "waiting"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_publisher_runs_on_more_than_the_processors_its_rank_is_bound_to(desk: Desk) -> None:
    report, every = desk.folder / "report", sorted(os.sched_getaffinity(0))
    script = (
        f"import os; os.sched_setaffinity(0, [{every[0]}])\n{TRAINER}\nassert os.sched_getaffinity(0) == {{{every[0]}}}"
    )
    publisher = json.dumps([sys.executable, "-c", REPORT, str(report)])
    subprocess.run([sys.executable, "-c", script, str(desk.folder), publisher], check=True, timeout=LIMIT_S)
    wait_until(report.exists)
    assert json.loads(report.read_text())["cpus"] == every


def test_what_is_published_at_this_moment_is_not_given_to_another(desk: Desk) -> None:
    train(desk).communicate(timeout=LIMIT_S)
    wait_until((desk.folder / "begun").exists)
    with pytest.raises(InputError, match="is being published already"):
        runner_named("local").submit(desk.request, desk, command(desk))
    assert desk.state().phase == "running"


def test_a_folder_that_is_not_there_is_told(desk: Desk) -> None:
    Path(desk.request.folder).rmdir()
    with pytest.raises(PlatformError, match=r"cannot be started in .*where the trainer ran"):
        runner_named("local").submit(desk.request, desk, command(desk))
    assert desk.state().phase == "failed"


def test_the_environment_keeps_what_is_the_users_and_drops_what_is_the_jobs(desk: Desk) -> None:
    kept = {"PATH": "/bin", "VIRTUAL_ENV": "/venv", "SLURM_CONF": "/c", "HEADWAY_POLICY": "a:b", "SBATCH_ACCOUNT": "me"}
    dropped = ["WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "MASTER_PORT", "SLURM_NTASKS", "SBATCH_PARTITION", "PMI_RANK"]
    dropped += ["HEADWAY_ATTEMPT", "HEADWAY_ELIGIBLE", "TORCHELASTIC_RESTART_COUNT", "OMPI_COMM_WORLD_RANK"]
    told = environment(kept | dict.fromkeys(dropped, "1"), desk.request, desk)
    own = {"HEADWAY_JOB": "dlrm", "HEADWAY_HOME": str(desk.folder.parents[1]), "HEADWAY_DISABLE": "1"}
    assert told == kept | own


def test_one_thread_is_torchruns_word_only_under_torchrun(desk: Desk) -> None:
    alone = {"OMP_NUM_THREADS": "1"}
    assert environment(alone, desk.request, desk)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in environment(alone | {"TORCHELASTIC_RUN_ID": "x"}, desk.request, desk)
    chosen = {"OMP_NUM_THREADS": "8", "TORCHELASTIC_RUN_ID": "x"}
    assert environment(chosen, desk.request, desk)["OMP_NUM_THREADS"] == "8"


# --- where nothing lasts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        ("SLURM_JOB_ID", "Slurm job 12, .*headway publish submit model-1 --runner slurm"),
        ("KUBERNETES_SERVICE_HOST", "a Kubernetes pod, .*a Kubernetes Job that runs `headway publish run model-1`"),
        ("PBS_JOBID", "PBS job 12, .*start `headway publish run model-1` where it may last"),
        ("RAY_JOB_ID", "Ray job 12, .*runner of your own"),
    ],
)
def test_where_the_allocation_is_torn_down_it_refuses_and_names_the_next(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, variable: str, says: str
) -> None:
    monkeypatch.setenv(variable, "12")
    with pytest.raises(InputError, match=says) as refusal:
        runner_named("local").submit(desk.request, desk, command(desk))
    assert "Nothing is lost" in str(refusal.value)
    assert (desk.state().phase, desk.state().problem) == ("failed", str(refusal.value))
    assert not desk.log.exists()


def test_a_refusal_does_not_hide_that_it_was_published_before(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.change(phase="published", version="v1")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with pytest.raises(InputError):
        runner_named("local").submit(desk.request, desk, command(desk))
    assert (desk.state().phase, desk.state().version) == ("published", "v1")


@pytest.mark.parametrize(
    ("commands", "ends"),
    [
        (["python train.py"], True),
        (["python train.py", "python /venv/bin/torchrun --nproc-per-node 2 train.py"], True),
        (["python train.py", "python -m torch.distributed.run train.py"], True),
        (["python train.py", "python -m headway run train.py", "bash -c headway run train.py; echo done"], True),
        (["python train.py", "/usr/bin/tini -- python train.py"], True),
        (["python train.py", "torchrun train.py", "/sbin/docker-init -- torchrun train.py"], True),
        (["python train.py", "torchrun train.py", "bash"], False),
        (["python train.py", "torchrun train.py", "bash", "/usr/bin/tini -- bash"], False),
        (["python train.py", "torchrun train.py", "bash", "sshd: me", "sshd: /usr/sbin/sshd -D"], False),
        (["python train.py", "torchrun train.py", "/sbin/init splash"], False),
        (["python kernel.py", "python /opt/conda/bin/jupyter lab"], False),
        ([], False),
    ],
)
def test_a_container_ends_with_its_launcher_and_not_with_a_shell(commands: list[str], ends: bool) -> None:
    assert is_launchers_container(commands) == ends


@pytest.mark.needs("unshare")
def test_the_first_process_of_a_container_takes_all_others_along() -> None:
    script = "import os; from headway.publish.runners import torn_down; print(os.getpid(), torn_down({}))"
    words = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare: run as root, where a new namespace is allowed")
    done = subprocess.run([*words, sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "1 this container\n", done.stderr
    shell = subprocess.run(
        [*words, "/bin/sh", "-c", '"$@"; true', "sh", sys.executable, "-c", script],
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert shell.stdout == "2 \n", shell.stderr


def test_this_machine_stays() -> None:
    assert torn_down({"PATH": "/bin", "HOME": "/h"}) == ""


# --- by name ---------------------------------------------------------------------------------------------------------


def test_an_unknown_runner_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"no runner 'slrum': did you mean slurm\?"):
        runner_named("slrum")


OWN = """
def function(request, desk, command):
    return f"{request.id} by function: {command}"

class Class:
    def submit(self, request, desk, command):
        desk.change(queued="mine:1")

def fails(request, desk, command):
    raise OSError("no such queue")

class Nothing:
    pass
"""


def test_a_runner_of_ones_own_is_a_function_or_a_class(desk: Desk) -> None:
    Path(desk.request.folder, "own_runner.py").write_text(OWN)
    request = desk.request
    assert runner_named("own_runner:function").submit(request, desk, ["a"]) == "model-1 by function: ['a']"
    assert runner_named("own_runner.py:Class").submit(request, desk, ["a"]) == "handed to own_runner.py:Class"
    assert (desk.state().phase, desk.state().queued) == ("waiting", "mine:1")
    assert queue_state("mine:1") == ""


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("own_runner:fails", PlatformError, r"own_runner:fails failed \(OSError: no such queue\)"),
        ("own_runner:Nothing", InputError, "has no method submit"),
        ("own_runner:missing", InputError, "missing"),
        ("no_such_module:function", InputError, "no_such_module"),
    ],
)
def test_a_runner_of_ones_own_that_fails_is_told(desk: Desk, name: str, kind: type[Exception], says: str) -> None:
    Path(desk.request.folder, "own_runner.py").write_text(OWN)
    with pytest.raises(kind, match=says):
        runner_named(name).submit(desk.request, desk, ["a"])
    assert desk.state().phase == "failed"


def test_without_sbatch_slurm_is_refused_with_what_to_do(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(desk.folder))
    with pytest.raises(
        PlatformError, match=r"is Slurm installed here\?.*headway publish submit model-1 --runner slurm"
    ):
        runner_named("slurm").submit(desk.request, desk, ["a"])
    assert desk.state().phase == "failed"
    assert queue_state("slurm:12") == ""


def test_options_for_sbatch_that_no_shell_would_read_are_refused(tmp_path: Path) -> None:
    desk = new_desk(tmp_path, sbatch="--comment='open")
    with pytest.raises(InputError, match="No closing quotation"):
        runner_named("slurm").submit(desk.request, desk, ["a"])


def wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < deadline, f"waited {LIMIT_S:.0f} s for {ready}"
        time.sleep(0.02)
