"""Workers that hang are asked what they are doing, by signal and by fifo: real processes, real gloo."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import shared
import warm
from headway.launch import dumps
from headway.recover import hang

PATIENCE_S = 120.0
"""For things that must happen in the end, on however slow a machine."""

START = """
import faulthandler, os, sys, threading, time
from pathlib import Path
from headway.launch import dumps
RANK = int(os.environ["RANK"])
dumps.answer(Path(sys.argv[1]), RANK)
def ready():
    Path(sys.argv[1], f"ready-{RANK}").touch()
"""

GLOO = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(3)
dist.all_reduce(tensor)
ready()
"""

Start = Callable[..., dict[int, subprocess.Popen[bytes]]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts ranks of a script and waits until each has said that it is ready."""
    monkeypatch.setattr("shutil.which", lambda *words, **more: None)  # stacks by signal; py-spy has a test of its own
    processes: list[subprocess.Popen[bytes]] = []

    def start(script: str, ranks: int = 2) -> dict[int, subprocess.Popen[bytes]]:
        port = shared.free_port()
        file = tmp_path / "train.py"
        file.write_text(START + textwrap.dedent(script))
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        popen = warm.Popen if GLOO in script else subprocess.Popen
        started = {
            rank: popen(
                [sys.executable, str(file), str(tmp_path)],
                env={**common, "RANK": str(rank), "WORLD_SIZE": str(ranks)},
                stdout=(tmp_path / f"out-{rank}").open("wb"),
                stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        }
        processes.extend(started.values())
        until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in started))
        return started

    yield start
    for process in processes:
        process.kill()
        process.wait()


def until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happens():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def stop(pid: int) -> None:
    """Stops a process: all of its threads, which takes the kernel a while."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all(map(is_stopped, Path(f"/proc/{pid}/task").glob("*/stat"))))


def is_stopped(thread: Path) -> bool:
    try:
        return " T " in thread.read_text()
    except OSError:
        return True  # it has ended meanwhile


def pids(workers: Mapping[int, subprocess.Popen[bytes]]) -> dict[int, int]:
    return {rank: worker.pid for rank, worker in workers.items()}


def when_found(
    workers: Mapping[int, subprocess.Popen[bytes]],
    folder: Path,
    is_it: Callable[[hang.Finding], object],
    patience_s: float = 60,
) -> tuple[dict[int, dumps.Dump], hang.Finding]:
    """Asks until the answer is the expected one: ranks need a while to get to where they hang."""
    last: list[tuple[dict[int, dumps.Dump], hang.Finding]] = []

    def found() -> bool:
        told = dumps.collect(pids(workers), folder, patience_s)
        last[:] = [(told, hang.explain(told))]
        return bool(is_it(last[0][1]))

    try:
        until(found)
    except AssertionError:
        raise AssertionError(last[0][1].text if last else "nothing was collected") from None
    return last[0]


def test_a_rank_that_sleeps_before_an_all_reduce_is_named_with_its_line(start: Start, tmp_path: Path) -> None:
    workers = start(
        GLOO
        + """
def fetch():
    time.sleep(1000)
if RANK == 1:
    fetch()
dist.all_reduce(tensor)
""",
        ranks=3,
    )
    told, finding = when_found(workers, tmp_path, lambda it: "in fetch" in it.where and it.collective == "all_reduce")
    assert (finding.kind, finding.stuck_ranks) == ("missing_rank", (1,))
    assert "train.py:" in finding.where
    assert finding.where.endswith("in fetch: time.sleep(1000)")
    assert "rank 1 is missing from all_reduce of [3] (number 2 of group default_pg)" in finding.text
    assert [dump.how for dump in told.values()] == ["faulthandler"] * 3
    by_stacks = hang.explain({rank: dumps.Dump(rank=rank, stacks=dump.stacks) for rank, dump in told.items()})
    assert (by_stacks.stuck_ranks, by_stacks.kind, by_stacks.collective, by_stacks.where) == (
        finding.stuck_ranks, finding.kind, finding.collective, finding.where,
    )  # fmt: skip


def test_ranks_in_backward_wait_for_the_one_that_computes_for_ever(start: Start, tmp_path: Path) -> None:
    script = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
def compute():
    while True:
        torch.ones(4).sum()
loss = model(torch.ones(4)).sum()
if RANK == 0:
    compute()
loss.backward()
"""
    told, finding = when_found(
        start(GLOO + script), tmp_path, lambda it: "in compute" in it.where and it.collective == "all_reduce"
    )
    assert (finding.kind, finding.stuck_ranks) == ("missing_rank", (0,))
    by_stacks = hang.explain({rank: dumps.Dump(rank=rank, stacks=dump.stacks) for rank, dump in told.items()})
    assert (by_stacks.stuck_ranks, by_stacks.collective) == ((0,), "backward")


def test_ranks_in_different_collectives_are_a_mismatch(start: Start, tmp_path: Path) -> None:
    script = GLOO + "dist.broadcast(tensor, 0) if RANK == 2 else dist.all_reduce(tensor)\n"
    told, finding = when_found(start(script, ranks=3), tmp_path, lambda finding: finding.kind == "mismatch")
    assert (finding.stuck_ranks, finding.collective) == ((2,), "all_reduce / broadcast")
    assert all(dump.flight for dump in told.values())


def test_the_rank_of_a_subgroup_that_others_wait_for_in_turn_is_the_cause(start: Start, tmp_path: Path) -> None:
    script = """
pair, others = dist.new_group([0, 1]), dist.new_group([1, 2], group_desc="stage")
if RANK == 0:
    dist.all_reduce(tensor, group=pair)
if RANK == 1:
    dist.broadcast(tensor, 1, group=others)
    dist.barrier(group=others)
    dist.all_reduce(tensor, group=pair)
if RANK == 2:
    dist.broadcast(tensor, 1, group=others)
    while True:
        pass
"""
    _, finding = when_found(start(GLOO + script, ranks=3), tmp_path, lambda finding: finding.collective == "barrier")
    assert (finding.kind, finding.stuck_ranks) == ("missing_rank", (2,))
    assert "of group stage" in finding.text


def test_a_stopped_rank_does_not_answer_and_is_named(start: Start, tmp_path: Path) -> None:
    workers = start(GLOO + "while True:\n    dist.all_reduce(tensor)\n")
    stop(workers[1].pid)
    told, finding = when_found(workers, tmp_path, lambda it: it.stuck_ranks == (1,) and it.collective, patience_s=3)
    assert (finding.kind, finding.collective, finding.where) == ("missing_rank", "all_reduce", "")
    assert (told[1].how, told[1].flight, told[1].state) == ("none", None, "is stopped")
    assert "rank 1: is stopped" in finding.text


def test_ranks_that_wait_for_a_queue_are_not_in_a_collective(start: Start, tmp_path: Path) -> None:
    script = GLOO + "import queue\ndef batch():\n    return queue.Queue().get()\nbatch()\n"
    told, finding = when_found(start(script), tmp_path, lambda finding: "queue" in finding.text)
    assert (finding.kind, finding.collective, finding.stuck_ranks) == ("not_in_collective", "", (0, 1))
    assert "in batch" in finding.where
    assert all(dump.flight and not any(map(hang.is_open, dump.flight)) for dump in told.values())


def test_a_rank_that_holds_the_gil_in_c_still_gives_its_stack(start: Start, tmp_path: Path) -> None:
    script = """
import ctypes
def stuck():
    library, semaphore = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.sem_init(semaphore, 0, 0)
    library.sem_wait(semaphore)  # goes on waiting after a signal, unlike a sleep
if RANK == 0:
    stuck()
dist.all_reduce(tensor)
"""
    told, finding = when_found(
        start(GLOO + script), tmp_path, lambda it: "sem_wait" in it.where and "(number 2 " in it.text, patience_s=3
    )
    assert (finding.kind, finding.collective, finding.stuck_ranks) == ("missing_rank", "all_reduce", (0,))
    assert "in stuck: library.sem_wait" in finding.where
    assert (told[0].flight, told[0].how) == (None, "faulthandler")
    assert told[1].flight is not None


def test_a_stack_can_be_had_before_torch_is_imported(start: Start, tmp_path: Path) -> None:
    workers = start("ready()\nthreading.Lock().acquire() and threading.Event().wait()\n", ranks=1)
    told, finding = when_found(workers, tmp_path, lambda finding: "lock" in finding.text)
    assert (told[0].flight, finding.kind) == (None, "not_in_collective")


def test_training_goes_on_unchanged_after_every_dump(start: Start, tmp_path: Path) -> None:
    script = """
torch.manual_seed(RANK)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = torch.utils.data.DataLoader(data, 4, num_workers=2, multiprocessing_context="fork")
step = 0
while True:  # until rank 0 says so: each for itself, one could leave and the other go on
    for batch, in loader:
        if step < 16:
            loss = model(batch).square().mean()
            loss.backward()
            Path(sys.argv[1], f"losses-{RANK}").open("a").write(f"{loss.item()!r} ")
        dist.barrier()
        step += 1
    told = torch.tensor(float(Path(sys.argv[1], "asked").exists()))
    dist.broadcast(told, 0)
    if told and step >= 16:
        break
"""
    workers = start(GLOO + script)
    answers = [dumps.collect(pids(workers), tmp_path, 100) for _ in range(5)]
    assert all(dump.how == "faulthandler" for told in answers for dump in told.values())
    (tmp_path / "asked").touch()
    assert [worker.wait(PATIENCE_S) for worker in workers.values()] == [0, 0], (tmp_path / "out-0").read_text()
    disturbed = [(tmp_path / f"losses-{rank}").read_text() for rank in workers]
    for file in [*tmp_path.glob("losses-*"), *tmp_path.glob("ready-*")]:
        file.unlink()
    undisturbed = start(GLOO + script)
    assert [worker.wait(PATIENCE_S) for worker in undisturbed.values()] == [0, 0]
    assert disturbed == [(tmp_path / f"losses-{rank}").read_text() for rank in workers]
    assert len(disturbed[0].split()) == 16


def test_telling_the_collectives_imports_nothing(start: Start, tmp_path: Path) -> None:
    script = """
before = set(sys.modules)
for _ in range(100):
    dist.all_reduce(tensor)
Path(sys.argv[1], "waits").touch()
while not Path(sys.argv[1], "asked").exists():
    time.sleep(0.05)
Path(sys.argv[1], "imported").write_text(" ".join(set(sys.modules) - before) + "\\n")
while True:
    time.sleep(1)
"""
    workers = start(GLOO + script, ranks=1)
    until((tmp_path / "waits").exists)
    flight = dumps.collect(pids(workers), tmp_path, 300)[0].flight
    assert flight is not None
    assert [entry["collective_seq_id"] for entry in flight] == list(range(102 - dumps.KEPT, 102))
    (tmp_path / "asked").touch()
    told = tmp_path / "imported"
    until(lambda: told.exists() and told.read_text().endswith("\n"))
    assert told.read_text() == "\n"


def test_the_users_own_faulthandler_keeps_working(start: Start, tmp_path: Path) -> None:
    script = """
import signal
own = open(Path(sys.argv[1], "own"), "w")
faulthandler.register(signal.SIGUSR1, file=own)
faulthandler.enable(file=own)
ready()
def rest():
    while True:
        time.sleep(1000)
rest()
"""
    workers = start(script, ranks=1)
    _, finding = when_found(workers, tmp_path, lambda finding: "in rest" in finding.where)
    assert (tmp_path / "own").read_text() == ""
    workers[0].send_signal(signal.SIGUSR1)
    until(lambda: "in rest" in (tmp_path / "own").read_text())
    assert "sleeps" in finding.text


def test_a_process_that_cannot_answer_is_not_asked_and_lives(start: Start, tmp_path: Path) -> None:
    workers = start('ready()\nos.execvp("sleep", ["sleep", "1000"])\n', ranks=1)
    until(lambda: Path(f"/proc/{workers[0].pid}/comm").read_text() == "sleep\n")
    told = dumps.collect(pids(workers), tmp_path, 3)
    assert (told[0].how, told[0].flight, workers[0].poll()) == ("none", None, None)
    workers[0].kill()
    workers[0].wait()
    assert dumps.collect(pids(workers), tmp_path, 3)[0].state == "is dead"


def test_stacks_are_never_written_into_a_file_of_the_users(start: Start, tmp_path: Path) -> None:
    script = """
os.closerange(3, 100)
files = [open(Path(sys.argv[1], "mine"), "a") for _ in range(20)]
ready()
while True:
    time.sleep(1)
"""
    workers = start(script, ranks=1)
    told = dumps.collect(pids(workers), tmp_path, 3)
    assert (told[0].how, told[0].flight, workers[0].poll()) == ("none", None, None)
    assert (tmp_path / "mine").read_text() == ""


@pytest.mark.needs("py-spy")
def test_py_spy_reads_the_stack_of_a_rank_that_is_stopped(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = start("def rest():\n    ready()\n    time.sleep(1000)\nrest()\n", ranks=1)
    monkeypatch.undo()
    stop(workers[0].pid)
    told, finding = when_found(workers, tmp_path, lambda finding: "in rest" in finding.where, patience_s=12)
    assert (told[0].how, told[0].state) == ("py-spy", "is stopped")
    assert (finding.kind, finding.stuck_ranks) == ("not_in_collective", (0,))


def test_a_torn_reading_of_py_spy_is_none() -> None:
    thread = {"pid": 1, "os_thread_id": 1, "thread_id": 5, "frames": []}
    assert dumps.stacks_of_py_spy(json.dumps([thread]).encode()) == ""
    assert dumps.stacks_of_py_spy(b"") == dumps.stacks_of_py_spy(b'[{"pid": 1}]') == ""
