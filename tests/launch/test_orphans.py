"""Whatever is killed, nothing is left behind that still runs, waits to be reaped, or is held open: real processes, real
signals."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from supervising import WARM_HEADWAY

import warm
from headway.events.journal import is_being_written

PATIENCE_S = 120.0
"""For things that must happen in the end, on however slow a machine."""

TORCH = """
class cuda:
    is_initialized = staticmethod(lambda: False)
    _is_in_bad_fork = staticmethod(lambda: False)
class backends:
    class cuda:
        is_built = staticmethod(lambda: True)
class default_generator:
    seed = staticmethod(lambda: None)
"""
"""Enough of torch for a zygote: what is tested here is who outlives whom."""

DIES_AFTER_A_FORK = """
import os, signal
def die(me=os.getpid()):
    if os.getpid() == me and os.path.exists("die"):
        os.unlink("die")
        os.kill(me, signal.SIGKILL)
os.register_at_fork(after_in_parent=die)
"""
"""What has a zygote killed after the next fork; its successor goes on."""

SUPERVISOR = """
import json, os, signal, sys
from headway.launch.crew import Crew
from headway.launch.worker import Assignment

def show(attempt):
    told = dict(attempt=attempt, zygote=crew._zygote.pid, ready=crew._zygote.heard and not crew._zygote.dead,
                workers=[worker.pid for worker in crew.workers], warm=[worker.warm for worker in crew.workers],
                standbys=[worker.pid for worker in crew._standbys], notes=notes)
    with open("state.part", "w") as file:
        json.dump(told, file)
    os.replace("state.part", "state")

notes = []
crew = Crew(["program.py"], os.environ, ["torch"], True, float(os.environ.get("PATIENCE_S", "60")))
crew.note = notes.append
attempt = 0
while True:
    works = [Assignment(kind="script", argv=["program.py"], folder=os.environ["DUMPS"], rank=rank,
                        environ={**os.environ, "RANK": str(rank), "ATTEMPT": str(attempt)}) for rank in range(2)]
    crew.start(works, [[1, 2]] * 2)
    while not any(worker.failed_ns for worker in crew.workers):
        crew.get_ready()
        show(attempt)
        crew.look(0.05)
    crew.stop(signal.SIGTERM, 0.2)
    attempt += 1
"""

FAMILY = """
import json, multiprocessing, os, signal, subprocess, time

def orphan(leave):
    read, write = os.pipe()
    if not os.fork():
        if not os.fork():
            leave()
            os.write(write, str(os.getpid()).encode())
            time.sleep(1000)
        os._exit(0)
    os.wait()
    return int(os.read(read, 20))

if __name__ == "__main__":
    helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=[1000], daemon=True)
    helper.start()
    family = dict(
        helper=helper.pid,
        child=subprocess.Popen(["sleep", "1000"]).pid,
        grandchild=int(subprocess.check_output("sleep 1000 > /dev/null & echo $!", shell=True)),
        own_group=subprocess.Popen(["sleep", "1000"], process_group=0).pid,
        orphan=orphan(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)),
    )
    if os.environ.get("DAEMON"):
        family["daemon"] = orphan(os.setsid)
    name = f"family-{os.environ['RANK']}-{os.environ['ATTEMPT']}"
    with open(name + ".part", "w") as file:
        json.dump(family, file)
    os.replace(name + ".part", name)
    time.sleep(1000)
"""


class Job:
    """A supervisor at work in a folder, and what it says of its processes."""

    def __init__(self, folder: Path, program: str, torch: str = TORCH, **environ: str) -> None:
        self.folder = folder
        (folder / "lib").mkdir()
        (folder / "lib" / "torch.py").write_text(torch)
        (folder / "dumps").mkdir()
        (folder / "program.py").write_text(textwrap.dedent(program))
        environ = {**os.environ, **environ, "PYTHONPATH": str(folder / "lib"), "DUMPS": str(folder / "dumps")}
        self.process = subprocess.Popen([sys.executable, "-P", "-c", SUPERVISOR], cwd=folder, env=environ)
        self.pid = self.process.pid

    def state(self) -> dict[str, Any]:
        until((self.folder / "state").exists)
        return json.loads((self.folder / "state").read_text())

    def settled(self, attempt: int = 0, besides: Sequence[int] = ()) -> dict[str, Any]:
        """The state, when the workers of this attempt are at work and two other standbys are up."""

        def is_settled() -> bool:
            state = self.state()
            standbys = [pid for pid in state["standbys"] if pid and pid not in besides]
            found[:] = [state]
            return state["attempt"] >= attempt and state["ready"] and len(standbys) == 2

        found: list[dict[str, Any]] = []
        until(is_settled)
        return found[0]

    def family(self, attempt: int = 0) -> dict[str, int]:
        """The processes that the workers of this attempt have started."""
        files = [self.folder / f"family-{rank}-{attempt}" for rank in range(2)]
        until(lambda: all(file.exists() for file in files))
        return {f"{name}-{file.name}": pid for file in files for name, pid in json.loads(file.read_text()).items()}

    def end(self) -> None:
        state = self.state() if (self.folder / "state").exists() else {}
        kill(*(pid for key in ("standbys", "workers") for pid in state.get(key, []) if pid))
        self.process.kill()
        self.process.wait()
        for file in self.folder.glob("family-*-*"):
            for pid in json.loads(file.read_text()).values():
                kill(pid)


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a supervisor with two workers."""
    jobs: list[Job] = []

    def start(program: str = FAMILY, **environ: str) -> Job:
        jobs.append(Job(tmp_path, program, **environ))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


def until(happens: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happens():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def kill(*pids: int, number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def runs(pid: int) -> bool:
    return state_of(pid) not in ("Z", "X")


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pids: Sequence[int]) -> None:
    until(lambda: not any(map(runs, pids)))


@pytest.mark.parametrize("first", [[], pytest.param([signal.SIGSTOP], marks=pytest.mark.thorough)])
def test_nothing_outlives_a_killed_supervisor(start: Start, first: list[int]) -> None:
    job = start()
    family, state = job.family(), job.settled()
    for number in [*first, signal.SIGKILL]:
        kill(job.pid, number=number)
    gone([*state["workers"], *family.values(), *state["standbys"], state["zygote"]])


def test_a_supervisor_that_is_killed_while_the_zygote_imports_leaves_no_zygote(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "importing"
    job = start(torch="import os, time\nprint(os.getpid(), file=open('importing', 'w'), flush=True)\ntime.sleep(1000)")
    until(lambda: file.exists() and file.read_text().endswith("\n"))
    job.process.kill()
    gone([int(file.read_text())])


def test_nothing_outlives_a_supervisor_whose_zygote_never_came_up(start: Start) -> None:
    job = start(torch="import time\ntime.sleep(1000)", PATIENCE_S="0.5")
    family = job.family()
    until(lambda: job.state()["ready"])  # the one that only guards
    assert job.state()["warm"] == [False, False]
    kill(job.pid)
    gone([*job.state()["workers"], *family.values(), job.state()["zygote"]])


def test_workers_outlive_neither_supervisor_nor_zygote_when_both_are_killed_at_once(start: Start) -> None:
    job = start()
    job.family()
    state = job.settled()
    kill(state["zygote"], job.pid)
    gone([*state["workers"], *state["standbys"], state["zygote"]])


def test_a_killed_zygote_is_replaced_and_disturbs_no_worker(start: Start) -> None:
    job = start()
    job.family()
    before = job.settled()
    kill(before["zygote"])
    until(lambda: job.state()["zygote"] != before["zygote"])
    after = job.settled()
    assert after["workers"] == before["workers"]
    assert all(map(runs, after["workers"]))
    kill(before["workers"][0])
    job.family(1)
    assert job.settled(1)["warm"] == [True, True]
    kill(job.pid)
    gone([*job.family(1).values(), *job.settled(1)["workers"]])


def test_a_crash_right_after_the_zygote_s_death_still_finds_its_standbys(start: Start) -> None:
    job = start()
    job.family()
    before = job.settled()
    kill(job.pid, number=signal.SIGSTOP)
    kill(before["zygote"], before["workers"][0])
    kill(job.pid, number=signal.SIGCONT)
    job.family(1)
    after = job.settled(1)
    assert (after["warm"], sorted(after["workers"])) == ([True, True], sorted(before["standbys"]))


def test_a_zygote_that_dies_between_two_forks_leaves_nobody_to_wait_for(start: Start, tmp_path: Path) -> None:
    job = start(torch=TORCH + DIES_AFTER_A_FORK)
    job.family()
    before = job.settled()
    kill(before["zygote"], number=signal.SIGSTOP)
    kill(*before["standbys"])
    until(lambda: job.state()["standbys"] == [0, 0])  # both are asked for
    (tmp_path / "die").touch()
    kill(before["zygote"], number=signal.SIGCONT)
    after = job.settled()
    assert after["zygote"] != before["zygote"]
    kill(after["workers"][0])
    job.family(1)
    assert (job.settled(1)["warm"], job.state()["notes"]) == ([True, True], [])


def test_a_killed_standby_is_replaced(start: Start) -> None:
    job = start()
    before = job.settled()
    kill(before["standbys"][0])
    after = job.settled(besides=before["standbys"][:1])
    assert after["workers"] == before["workers"]


def test_what_a_killed_worker_started_is_gone_after_the_restart_but_for_daemons(start: Start) -> None:
    job = start(DAEMON="1")
    family, state = job.family(), job.settled()
    kill(state["workers"][1])
    job.family(1)
    daemons = [pid for name, pid in family.items() if name.startswith("daemon")]
    assert not any(map(runs, [*state["workers"], *(set(family.values()) - set(daemons))]))
    assert all(map(runs, daemons))  # they left the session, and so want to outlive the worker


def test_a_worker_that_ignores_sigterm_is_killed(start: Start) -> None:
    job = start(
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"deaf-{os.environ['RANK']}-{os.environ['ATTEMPT']}", "w").close()
        time.sleep(1000)
        """
    )
    until(lambda: len(list(job.folder.glob("deaf-*-0"))) == 2)
    state = job.settled()
    kill(state["workers"][0])
    until(lambda: len(list(job.folder.glob("deaf-*-1"))) == 2)
    assert not any(map(runs, state["workers"]))


def test_twenty_crashes_leave_no_zombie_and_no_descriptor(start: Start) -> None:
    job = start(
        """
        import os, signal, subprocess, time
        subprocess.Popen(["sh", "-c", "sleep 0 & sleep 1000"])
        if os.environ["RANK"] == "0" and os.environ["ATTEMPT"] not in ("2", "22"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
        """
    )
    early = job.settled(2)
    before = least_held(job.pid, early["zygote"])
    kill(early["workers"][1])
    late = job.settled(22)
    assert late["attempt"] == 22
    assert late["zygote"] == early["zygote"]
    until(lambda: holdings(job.pid, late["zygote"]) == before)


def least_held(supervisor: int, zygote: int) -> tuple[int, ...]:
    """What both hold in the long run: now and then there is a zombie more, or the file that is being written."""
    looks = []
    for _ in range(20):
        looks.append(holdings(supervisor, zygote))
        time.sleep(0.02)
    return tuple(map(min, zip(*looks, strict=True)))


def holdings(supervisor: int, zygote: int) -> tuple[int, int, int, int]:
    """Descriptors of both, the children of the supervisor, and how many of them are zombies."""
    fds = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (supervisor, zygote)]
    born = children(supervisor)
    return fds[0], fds[1], len(born), sum(state_of(pid) == "Z" for pid in born)


TRAINER = """
import json, os, subprocess, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
batches = iter(DataLoader(range(10**6), num_workers=2, multiprocessing_context="fork"))
for step in range(10**6):
    next(batches)
    dist.barrier()
    if step == 3:
        sleep = subprocess.Popen(["sleep", "1000"], process_group=0).pid
        pids = [os.getpid(), sleep, *(worker.pid for worker in batches._workers)]
        with open(f"pids-{dist.get_rank()}-{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w") as file:
            print(json.dumps(pids), file=file)
    time.sleep(0.01)
    enough = torch.tensor(float(os.path.exists("enough")))
    dist.broadcast(enough, 0)  # each for itself, one could leave and the other go on
    if enough:
        break
dist.destroy_process_group()
"""


@pytest.fixture
def training(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A real job of two ranks, with data workers, under `headway run`."""
    (tmp_path / "train.py").write_text(TRAINER)
    ours = ("HEADWAY_", "SLURM_", "TORCH")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [*WARM_HEADWAY, "run", "--nproc-per-node", "2", "--job", "j", "train.py"]
    with tempfile.TemporaryDirectory() as short:  # data workers put sockets there, whose paths have a limit
        (tmp_path / "tmp").symlink_to(short)
        environ |= {"HEADWAY_HOME": str(tmp_path / "home"), "TMPDIR": short}
        process = warm.Popen(command, first=["hooked"], cwd=tmp_path, env=environ)
        yield process
        process.kill()
        process.wait()


def trained(training: "subprocess.Popen[bytes]", folder: Path, attempt: int) -> list[int]:
    """All processes of the ranks of this attempt, once they train."""
    files = [folder / f"pids-{rank}-{attempt}" for rank in range(2)]
    until(lambda: training.poll() is not None or all(file.exists() and file.read_text()[-1:] == "\n" for file in files))
    assert training.poll() is None
    return [pid for file in files for pid in json.loads(file.read_text())]


def test_a_job_that_loses_a_rank_and_then_its_supervisor_leaves_closed_journals(
    training: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    first = trained(training, tmp_path, 0)
    kill(first[0])
    second = trained(training, tmp_path, 1)
    assert not any(map(runs, first))
    everyone = [*second, *children(training.pid)]
    kill(training.pid)
    gone(everyone)
    training.wait()
    journals = list((tmp_path / "home" / "jobs" / "j" / "journals").glob("*.hwj"))
    assert len(journals) >= 4 + 2
    until(lambda: not any(map(is_being_written, journals)))


def test_a_job_that_ends_well_after_a_crash_leaves_no_temporary_file(
    training: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    shared = set(os.listdir("/dev/shm"))
    kill(trained(training, tmp_path, 0)[0])
    second = trained(training, tmp_path, 1)
    (tmp_path / "enough").touch()
    assert training.wait(PATIENCE_S) == 0
    assert not any(map(runs, second))
    left = {path.name for path in (tmp_path / "tmp").resolve().rglob("*") if "headway" in path.name}
    assert left == set()
    # The first number of a name is that of its process; others may be anything, in files of other tests.
    numbers = {number for name in set(os.listdir("/dev/shm")) - shared for number in re.findall(r"\d+", name)[:1]}
    assert not numbers & set(map(str, second))
