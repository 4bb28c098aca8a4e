"""Stages that run at the same time: what they return, what they draw, how they fail, and what is left of them."""

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import trainers
from torch.utils.data import DataLoader, Dataset
from trainers import fork

import headway
from headway.cli.source import marks_of
from headway.events.job import JobReader
from headway.events.vocabulary import Told
from headway.paths import JobPaths


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    trainers.warm_up()


# --- processes in which to start up ----------------------------------------------------------------------------------


def outcome(work: Callable[..., Any], folder: Path, *args: Any, **settings: str) -> Any:
    """What it returns in a process of its own."""
    return outcomes(1, work, folder, *args, **settings)[0]


def outcomes(ranks: int, work: Callable[..., Any], folder: Path, *args: Any, **settings: str) -> list[Any]:
    """What it returns on each of so many ranks."""
    folder.mkdir(exist_ok=True, parents=True)
    port = _free_port()
    started = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        environ = {"HEADWAY_HOME": str(folder), "HEADWAY_JOB": "j", "GLOO_SOCKET_IFNAME": "lo"} | settings
        started.append(fork(_keep, folder, work, folder, args, **environ, **{k: str(v) for k, v in place.items()}))
    for process in started:
        process.join()
    said = (folder / "said").read_text() if (folder / "said").exists() else ""
    assert [process.exitcode for process in started] == [0] * ranks, said
    return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(ranks)]


def _keep(work: Callable[..., Any], folder: Path, args: tuple[Any, ...]) -> None:
    result = work(*args)
    (folder / f"result-{os.environ['RANK']}").write_text(json.dumps(result))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def failure(setup: headway.Startup) -> dict[str, Any]:
    """What a start-up fails with, and what is left of it."""
    began = time.monotonic()
    try:
        setup.run()
    except BaseException as error:
        return {
            "kind": type(error).__name__, "text": str(error), "cause": type(error.__cause__).__name__,
            "notes": getattr(error, "__notes__", []), "seconds": time.monotonic() - began,
            "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("stage")],
            "children": children(),
        }  # fmt: skip
    return {}


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


# --- results ---------------------------------------------------------------------------------------------------------


class Numbers(Dataset):  # type: ignore[type-arg]
    """Samples with a random number of their worker's."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> float:
        return at + float(torch.rand(())) / 2 + random.random() / 4


def drawing() -> dict[str, Any]:
    """Stages in all lanes that draw from everything at once."""
    torch.manual_seed(7)
    setup = headway.Startup()
    loader = DataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=1)

    @setup.stage(lane="io")
    def first_batch() -> tuple[Any, Any]:
        iterator = iter(loader)
        return iterator, next(iterator).tolist()

    @setup.stage(lane="comm")
    def noise() -> list[float]:
        drawn = []
        for _ in range(20):
            drawn.append(float(torch.randn(())) + float(torch.empty(()).uniform_()))
            time.sleep(0.002)
        return drawn

    @setup.stage(lane="process")
    def far() -> list[float]:
        return [float(torch.rand(())), random.random(), float(numpy.random.rand())]

    @setup.stage
    def model() -> list[float]:
        drawn = []
        for _ in range(20):
            drawn.append(float(torch.nn.Linear(2, 2).weight.sum()) + random.random() + float(numpy.random.rand()))
            time.sleep(0.002)
        return drawn

    @setup.stage(lane="io", computes=True)
    def table(far: list[float]) -> float:
        return random.random() + sum(far)

    parts = setup.run()
    rest = [batch.tolist() for batch in parts.first_batch[0]]
    return {
        "first": parts.first_batch[1], "rest": rest, "noise": parts.noise, "far": parts.far, "model": parts.model,
        "table": parts.table, "after": float(torch.rand(())),
    }  # fmt: skip


def test_overlapped_stages_draw_bit_for_bit_what_they_draw_one_after_another(tmp_path: Path) -> None:
    one_by_one = outcome(drawing, tmp_path / "serial", HEADWAY_SERIAL="1")
    assert outcome(drawing, tmp_path / "a") == one_by_one
    assert outcome(drawing, tmp_path / "b") == one_by_one


def test_each_stage_draws_other_numbers(tmp_path: Path) -> None:
    drawn = outcome(drawing, tmp_path)
    assert len({*drawn["noise"], *drawn["far"], *drawn["model"], drawn["after"]}) == 20 + 3 + 20 + 1


def overlapping() -> dict[str, Any]:
    met = threading.Barrier(4, timeout=60)
    setup = headway.Startup()

    @setup.stage(lane="comm")
    def comm() -> int:
        return met.wait() * 0 + 1

    @setup.stage(lane="io")
    def one() -> int:
        return met.wait() * 0 + 2

    @setup.stage(lane="io")
    def two() -> int:
        return met.wait() * 0 + 3

    @setup.stage
    def main() -> int:
        return met.wait() * 0 + 4

    @setup.stage(lane="process")
    def own(one: int, two: int) -> tuple[int, bool]:
        return one + two, os.getppid() == parent

    parent = os.getpid()
    parts = setup.run()
    return {**vars(parts), "left": [children(), [t.name for t in threading.enumerate() if t.name.startswith("stage")]]}


def test_every_lane_runs_at_the_same_time_and_results_go_by_name(tmp_path: Path) -> None:
    assert outcome(overlapping, tmp_path) == {
        "comm": 1, "one": 2, "two": 3, "main": 4, "own": [5, True], "left": [[], []],
    }  # fmt: skip


def computing() -> int:
    inside, most = [0], [0]
    setup = headway.Startup()

    def compute() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        inside[0] -= 1

    for number, lane in enumerate(["io", "comm", "main", "io", "comm", "main"]):
        setup.stage(name=f"s{number}", lane=lane, computes=True)(compute)
    setup.run()
    return most[0]


def test_two_stages_that_compute_never_run_at_once(tmp_path: Path) -> None:
    assert outcome(computing, tmp_path) == 1


def ordered() -> list[str]:
    done: list[str] = []
    setup = headway.Startup()
    setup.stage(name="slow", lane="io")(lambda: time.sleep(0.1))
    setup.stage(name="first", lane="comm", needs=["slow"])(lambda: done.append("first"))
    setup.stage(name="second", lane="comm")(lambda: done.append("second"))
    setup.run()
    return done


def test_collectives_run_in_the_order_they_are_declared_in(tmp_path: Path) -> None:
    assert outcome(ordered, tmp_path) == ["first", "second"]


def test_every_stage_is_in_the_journal(tmp_path: Path) -> None:
    outcome(overlapping, tmp_path)
    marks = [mark for told in marks_of(JobReader(JobPaths(tmp_path, "j"))).values() for mark in told]
    (told,) = [mark.attrs for mark in marks if mark.name == Told.STARTUP]
    stages = {stage["name"]: stage for stage in told["stages"]}
    assert not told["serial"]
    assert {name: stage["lane"] for name, stage in stages.items()} == {
        "comm": "comm", "one": "io", "two": "io", "main": "main", "own": "process",
    }  # fmt: skip
    assert stages["own"]["needs"] == ["one", "two"]
    assert all(told["begin_ns"] <= stage["begin_ns"] <= stage["end_ns"] for stage in stages.values())
    assert stages["own"]["begin_ns"] >= max(stages["one"]["end_ns"], stages["two"]["end_ns"])


# --- failing ---------------------------------------------------------------------------------------------------------


def raising(lane: str) -> dict[str, Any]:
    setup = headway.Startup()

    @setup.stage(lane=lane)
    def broken() -> None:
        raise ValueError("no such table")

    @setup.stage(lane="io")
    def patient() -> None:
        for _ in range(10_000):
            time.sleep(0.01)

    @setup.stage(lane="process")
    def away() -> None:
        time.sleep(100)

    @setup.stage
    def never(broken: Any) -> None:
        raise AssertionError

    return failure(setup)


@pytest.mark.parametrize("lane", ["main", "comm", "io", "process"])
def test_an_error_names_its_stage_and_rank_and_leaves_nothing_running(lane: str, tmp_path: Path) -> None:
    found = outcome(raising, tmp_path, lane)
    assert found["kind"] == "StageError"
    assert "stage broken failed on rank 0: " in found["text"]
    assert "no such table" in found["text"]
    assert found["cause"] == ("ChildFailed" if lane == "process" else "ValueError")
    assert (found["threads"], found["children"], found["notes"]) == ([], [], [])


def raising_serially() -> dict[str, Any]:
    return raising("comm")


def test_an_error_one_after_another_names_its_stage_as_well(tmp_path: Path) -> None:
    found = outcome(raising_serially, tmp_path, HEADWAY_SERIAL="1")
    assert found["text"] == "stage broken failed on rank 0: ValueError: no such table"


def raising_beside_main() -> dict[str, Any]:
    setup = headway.Startup()

    @setup.stage
    def long() -> None:
        time.sleep(1000)

    @setup.stage(lane="io")
    def broken() -> None:
        time.sleep(0.1)
        raise OSError("the disk is gone")

    return failure(setup)


def test_the_main_thread_stops_when_a_stage_beside_it_fails(tmp_path: Path) -> None:
    found = outcome(raising_beside_main, tmp_path)
    assert found["text"] == "stage broken failed on rank 0: OSError: the disk is gone"


def hanging(lane: str) -> dict[str, Any]:
    setup = headway.Startup(timeout_s=0.3)

    @setup.stage(lane=lane)
    def stuck() -> None:
        wait_for_nothing()

    return failure(setup)


def wait_for_nothing() -> None:
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize("lane", ["main", "comm", "io", "process"])
def test_a_stage_that_hangs_is_ended_and_the_error_says_where_it_was(lane: str, tmp_path: Path) -> None:
    found = outcome(hanging, tmp_path, lane)
    assert "stage stuck failed on rank 0: TimeoutError: no end after 0.3 s" in found["text"]
    assert ("in its process" if lane == "process" else "in wait_for_nothing") in found["text"]
    assert (found["threads"], found["children"]) == ([], [])


def unstoppable() -> dict[str, Any]:
    setup = headway.Startup()
    one, other = socket.socketpair()
    setup.stage(name="deaf", lane="io")(lambda: one.recv(1))

    @setup.stage
    def broken() -> None:
        time.sleep(0.1)
        raise ValueError

    found = failure(setup)
    other.send(b"x")
    return found


def test_what_cannot_be_stopped_is_named(tmp_path: Path) -> None:
    found = outcome(unstoppable, tmp_path)
    assert "stage deaf" in found["notes"][0]


def dying_child() -> dict[str, Any]:
    setup = headway.Startup()
    setup.stage(name="away", lane="process")(lambda: os.kill(os.getpid(), signal.SIGKILL))
    return failure(setup)


def test_a_process_that_is_killed_fails_its_stage(tmp_path: Path) -> None:
    assert (
        "stage away failed on rank 0: ChildFailed: its process was killed by SIGKILL"
        in outcome(dying_child, tmp_path)["text"]
    )


def sending_back() -> dict[str, Any]:
    setup = headway.Startup()
    setup.stage(name="away", lane="process")(lambda: threading.Lock())
    return failure(setup)


def test_a_result_that_cannot_travel_is_told_to_use_another_lane(tmp_path: Path) -> None:
    assert "use another lane" in outcome(sending_back, tmp_path)["text"]


def interrupted() -> dict[str, Any]:
    setup = headway.Startup()

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(3)

    signal.signal(signal.SIGTERM, leave)

    @setup.stage(lane="io")
    def sends() -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_nothing()

    @setup.stage(lane="process")
    def away() -> None:
        wait_for_nothing()

    @setup.stage
    def main() -> None:
        wait_for_nothing()

    return failure(setup)


def test_a_signal_amid_the_start_ends_all_stages_and_its_exception_goes_on(tmp_path: Path) -> None:
    found = outcome(interrupted, tmp_path)
    assert (found["kind"], found["text"]) == ("SystemExit", "3")
    assert (found["threads"], found["children"]) == ([], [])


def with_children(pids: str) -> None:
    setup = headway.Startup()

    @setup.stage(lane="process")
    def away() -> None:
        wait_for_nothing()

    @setup.stage
    def main() -> None:
        Path(pids).write_text(json.dumps(children()))
        wait_for_nothing()

    setup.run()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_start_that_is_killed_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    process = fork(with_children, tmp_path, str(pids), HEADWAY_HOME=str(tmp_path))
    while not pids.exists() or not pids.read_text():
        time.sleep(0.01)
    (child,) = json.loads(pids.read_text())
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join()
    until = time.monotonic() + 60
    while os.path.exists(f"/proc/{child}") and "\nState:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)


def in_a_thread() -> str:
    setup, said = headway.Startup(), []

    def begin() -> None:
        try:
            setup.run()
        except headway.InputError as error:
            said.append(str(error))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    return said[0]


def test_only_the_main_thread_can_start_up(tmp_path: Path) -> None:
    assert "from the main thread" in outcome(in_a_thread, tmp_path)


def test_a_timeout_that_leaves_no_time_is_refused() -> None:
    with pytest.raises(headway.InputError, match="leaves a stage no time"):
        headway.Startup(timeout_s=0)


# --- several ranks ---------------------------------------------------------------------------------------------------


def agreeing(differs: bool) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    setup = headway.Startup(seed=1)

    @setup.stage(lane="comm")
    def process_group_init() -> None:
        dist.init_process_group("gloo")

    if differs and rank == 1:

        @setup.stage(lane="comm")
        def extra(process_group_init: None) -> None: ...

    @setup.stage(lane="comm")
    def summed(process_group_init: None) -> float:
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    return failure(setup) if differs else {"sum": setup.run().summed}


def test_ranks_that_declare_the_same_stages_start(tmp_path: Path) -> None:
    assert outcomes(3, agreeing, tmp_path, False) == [{"sum": 3.0}] * 3


def test_ranks_that_declare_different_stages_learn_so_before_the_first_collective(tmp_path: Path) -> None:
    for rank, found in enumerate(outcomes(3, agreeing, tmp_path, True)):
        assert found["kind"] == "_Different", (rank, found)
        assert "have declared different stages" in found["text"]
        assert "  extra [comm] after process_group_init" in found["text"]
        assert found["threads"] == []


def failing_rank() -> dict[str, Any]:
    setup = headway.Startup(seed=1)

    @setup.stage(lane="comm")
    def process_group_init() -> None:
        dist.init_process_group("gloo")

    @setup.stage(lane="io")
    def table(process_group_init: None) -> None:
        if dist.get_rank() == 1:
            raise ValueError("a bad table")

    return failure(setup)


def test_the_error_names_the_rank_it_was_on(tmp_path: Path) -> None:
    found = outcomes(2, failing_rank, tmp_path)
    assert found[0] == {}
    assert found[1]["text"] == "stage table failed on rank 1: ValueError: a bad table"
