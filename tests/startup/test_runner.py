"""Stages that run at the same time: what they return, what they draw, how they fail, and what is left of them."""

import json
import operator
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import trainers
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split
from trainers import fork

import headway
import warm
from headway.cli.source import marks_of
from headway.events.clock import living_ticks
from headway.events.job import JobReader
from headway.events.vocabulary import Told
from headway.paths import JobPaths
from headway.startup import randomness, runner
from headway.startup.children import Child
from headway.startup.randomness import own_random, seed_of

SIGNALS = 40
"""How many starts are interrupted at random moments, which the environment variable SEED decides."""


@pytest.fixture(autouse=True, scope="session")
def _warm() -> None:
    trainers.warm_up()


# --- processes in which to start up ----------------------------------------------------------------------------------


def outcome(work: Callable[..., Any], folder: Path, *args: Any, **settings: str) -> Any:
    """Return its result in a process of its own."""
    return outcomes(1, work, folder, *args, **settings)[0]


def outcomes(ranks: int, work: Callable[..., Any], folder: Path, *args: Any, **settings: str) -> list[Any]:
    """Return its results on this many ranks, which meet at a store in this process, as under torchrun."""
    folder.mkdir(exist_ok=True, parents=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True,
               "TORCHELASTIC_RESTART_COUNT": 0}  # fmt: skip
    started = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, **meeting}
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


def failure(
    setup: headway.Startup, first: Callable[[], object] = lambda: None, grace_s: float = 100.0
) -> dict[str, Any]:
    """What a start-up fails with, and what is left of it. Stages have long to stop: the machine may be busy."""
    runner.GRACE_S = grace_s
    try:
        first()
        setup.run()
    except BaseException as error:
        return {
            "kind": type(error).__name__, "text": str(error), "cause": type(error.__cause__).__name__,
            "notes": getattr(error, "__notes__", []),
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


def test_stages_of_other_names_and_runs_of_other_seeds_have_other_seeds() -> None:
    assert len({seed_of(seed, name) for seed in (1, 2) for name in ("model", "data")}) == 4
    assert seed_of(1, "model") == seed_of(1, "model")


FILLING: dict[str, Callable[[], Any]] = {
    "layer": lambda: nn.Linear(3, 3).weight,
    "attention": lambda: nn.MultiheadAttention(4, 2).in_proj_weight,
    "like": lambda: torch.rand_like(torch.ones(3)) + torch.randn_like(torch.ones(3)),
    "integers like": lambda: torch.randint_like(torch.ones(3), 100),
    "gamma": lambda: torch.distributions.Gamma(1.0, 1.0).sample(),
    "binomial": lambda: torch.binomial(torch.full((3,), 50.0), torch.full((3,), 0.5)),
    "split": lambda: list(random_split(range(50), [0.5, 0.5])[0]),
}


@pytest.mark.parametrize("kind", FILLING)
def test_what_is_drawn_beside_a_stage_that_computes_comes_from_a_generator_of_its_own(kind: str) -> None:
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with own_random(7, False):
            drawn.append(str(FILLING[kind]()))
        assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0] == drawn[1]


def test_a_fork_waits_while_a_stage_of_another_thread_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    is_beginning, is_forked, seen = threading.Event(), threading.Event(), []

    def states() -> dict[str, Any]:
        is_beginning.set()
        seen.append(is_forked.wait(0.3))
        return {"torch": torch.get_rng_state(), "python": random.getstate()}

    def begin() -> None:
        with own_random(1, computes=True):
            pass

    monkeypatch.setattr(randomness, "states", states)
    stage = threading.Thread(target=begin)
    stage.start()
    assert is_beginning.wait(120)
    if not (child := os.fork()):
        os._exit(0)
    is_forked.set()
    os.waitpid(child, 0)
    stage.join()
    assert seen == [False]


def first_of_numpy() -> dict[str, Any]:
    numpy.random.seed(os.getpid())
    for name in [name for name in sys.modules if name.startswith("numpy.random")]:
        del sys.modules[name]  # as in a program that has not asked for it yet: NumPy makes it at first use
    vars(numpy).pop("random", None)
    torch.manual_seed(1)
    setup = headway.Startup()
    setup.stage(name="drawn")(lambda: float(numpy.random.rand()))
    return {"drawn": setup.run().drawn}


def test_the_first_stage_that_asks_numpy_for_a_number_gets_its_own(tmp_path: Path) -> None:
    assert outcome(first_of_numpy, tmp_path / "a") == outcome(first_of_numpy, tmp_path / "b")


def threads_of_torch() -> list[int]:
    torch.set_num_threads(3)
    setup = headway.Startup()
    setup.stage(name="away", lane="process")(torch_threads)
    return [setup.run().away, torch.get_num_threads()]


def torch_threads() -> int:
    return torch.get_num_threads()


@pytest.mark.parametrize("serial", ["0", "1"])
def test_a_stage_with_a_process_of_its_own_sums_in_one_thread_everywhere(serial: str, tmp_path: Path) -> None:
    assert outcome(threads_of_torch, tmp_path, HEADWAY_SERIAL=serial) == [1, 3]


def printing(path: str) -> None:
    with open(path, "w") as sys.stdout:
        print("before")
        setup = headway.Startup()
        setup.stage(name="away", lane="process")(lambda: print("inside"))
        setup.run()
        print("after")
    sys.stdout = sys.__stdout__


def test_what_a_process_prints_is_not_lost_and_nothing_is_printed_twice(tmp_path: Path) -> None:
    outcome(printing, tmp_path, str(tmp_path / "printed"))
    assert (tmp_path / "printed").read_text() == "before\ninside\nafter\n"


def overlapping() -> dict[str, Any]:
    met = threading.Barrier(4, timeout=120)
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


def declared() -> list[str]:
    begun: list[str] = []
    setup = headway.Startup()
    setup.stage(name="position", lane="io")(lambda: time.sleep(0.05))
    setup.stage(name="loader", needs=["position"])(lambda: begun.append("loader"))

    @setup.stage
    def whole() -> None:
        while any(thread.name == "stage position" for thread in threading.enumerate()):
            time.sleep(0.01)  # until `loader` can begin, too

    setup.stage(name="model", lane="comm", computes=True, needs=["whole"])(lambda: begun.append("model"))
    setup.stage(name="waits", computes=False, needs=["whole"])(lambda: time.sleep(0.05))
    setup.stage(name="last", lane="io", computes=True, needs=["model"])(lambda: begun.append("last"))
    setup.run()
    return begun


def test_of_stages_that_compute_those_of_the_main_thread_go_first_if_they_were_declared_first(tmp_path: Path) -> None:
    assert outcome(declared, tmp_path) == ["loader", "model", "last"]


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
    assert found["cause"] == "ValueError"
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
    setup, watch = headway.Startup(timeout_s=1.0), runner._Execution._watch

    def watch_once_it_hangs(self: Any, timeout_s: float) -> None:
        """On a busy machine, a stage may take longer than its time to begin."""
        while lane != "process" and not any(map(hangs, sys._current_frames().values())):
            time.sleep(0.01)
        watch(self, timeout_s)

    runner._Execution._watch = watch_once_it_hangs  # type: ignore[method-assign]

    @setup.stage(lane=lane)
    def stuck() -> None:
        wait_for_nothing()

    return failure(setup)


def wait_for_nothing() -> None:
    while True:
        time.sleep(0.01)


def hangs(frame: Any) -> bool:
    return frame.f_code is wait_for_nothing.__code__


@pytest.mark.parametrize("lane", ["main", "comm", "io", "process"])
def test_a_stage_that_hangs_is_ended_and_the_error_says_where_it_was(lane: str, tmp_path: Path) -> None:
    found = outcome(hanging, tmp_path, lane)
    assert "stage stuck failed on rank 0: TimeoutError: no end after 1 s" in found["text"]
    assert ("in its process" if lane == "process" else "in wait_for_nothing") in found["text"]
    assert (found["threads"], found["children"]) == ([], [])


def wait_in_c(line: socket.socket) -> None:
    """Say so, and wait for an answer. Between the two is no line of Python at which the thread could be stopped."""
    list(map(operator.call, (partial(line.send, b"x"), partial(line.recv, 1))))


def unstoppable() -> dict[str, Any]:
    setup = headway.Startup()
    one, other = socket.socketpair()
    setup.stage(name="deaf", lane="io")(lambda: wait_in_c(one))

    @setup.stage
    def broken() -> None:
        other.recv(1)
        raise ValueError

    found = failure(setup, grace_s=1.0)
    other.send(b"x")
    return found


def test_what_cannot_be_stopped_is_named(tmp_path: Path) -> None:
    found = outcome(unstoppable, tmp_path)
    assert "stage deaf" in found["notes"][0]


def pause(seconds: float) -> None:
    time.sleep(seconds)


def failing_often() -> dict[str, Any]:
    """Fails while the main thread and others are anywhere: about to end, about to begin."""
    kinds = set()
    for number in range(150):
        pause_s = 0.0002 * (number % 8)
        setup = headway.Startup(timeout_s=600)
        setup.stage(name="short", lane="io")(lambda: time.sleep(0.0005))
        setup.stage(name="broken", lane="comm")(lambda: 1 / 0)
        setup.stage(name="broken_too", lane="io")(lambda: [][0])
        setup.stage(name="main")(partial(pause, pause_s))
        setup.stage(name="more", needs=["short"])(lambda: None)
        found = failure(setup)
        kinds.add((found["kind"], found["cause"], *found["threads"], *found["notes"]))
    return {"kinds": sorted(kinds), "open": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}


def test_stages_that_fail_at_any_moment_never_hang_and_leave_nothing(tmp_path: Path) -> None:
    found = outcome(failing_often, tmp_path)
    causes = {("StageError", "ZeroDivisionError"), ("StageError", "IndexError")}
    assert {tuple(kind) for kind in found["kinds"]} <= causes
    assert found["threads"] <= 3
    assert found["open"] < 50


class Unshowable(Exception):
    def __str__(self) -> str:
        raise ValueError


def unshowable(lane: str) -> dict[str, Any]:
    setup = headway.Startup()

    @setup.stage(lane=lane)
    def broken() -> None:
        raise Unshowable

    return failure(setup)


@pytest.mark.parametrize("lane", ["main", "io"])
def test_an_error_that_cannot_be_shown_fails_its_stage_too(lane: str, tmp_path: Path) -> None:
    assert "stage broken failed on rank 0: Unshowable" in outcome(unshowable, tmp_path, lane)["text"]


def interrupted_twice() -> dict[str, Any]:
    setup = headway.Startup()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    one, other = socket.socketpair()
    setup.stage(name="deaf", lane="io")(lambda: wait_in_c(one))
    setup.stage(name="away", lane="process", needs=["deaf"])(lambda: time.sleep(1000))

    @setup.stage
    def broken() -> None:
        other.recv(1)
        threading.Thread(target=interrupt_the_wait, daemon=True).start()
        raise ValueError

    found = failure(setup)
    other.send(b"x")
    return found


def interrupt_the_wait() -> None:
    """Send the signal once the main thread waits for the stages to stop."""
    names: set[str] = set()
    while not names >= {"_end", "join"}:
        time.sleep(0.01)
        frame, names = sys._current_frames().get(threading.main_thread().ident or 0), set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_while_stages_are_given_time_to_stop_leaves_no_process(tmp_path: Path) -> None:
    found = outcome(interrupted_twice, tmp_path)
    assert (found["kind"], found["children"]) == ("KeyboardInterrupt", [])


def test_a_process_that_is_reaped_just_now_is_not_killed_and_neither_is_anything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reaped(Child):
        reads = 0

        @property
        def pid(self) -> int:  # type: ignore[override]
            Reaped.reads += 1
            return 2**22 + 1 if Reaped.reads == 1 else 0

    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    Reaped.__new__(Reaped).kill()
    assert 0 not in killed  # which would be every process of this group


def reaping_nothing() -> Any:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    setup = headway.Startup()
    setup.stage(name="away", lane="process")(lambda: 3)
    return setup.run().away


def test_a_program_that_ignores_its_childrens_ends_can_have_them(tmp_path: Path) -> None:
    assert outcome(reaping_nothing, tmp_path) == 3


class Unreadable(Exception):
    """Can be pickled, and not be read."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raising_unreadably() -> dict[str, Any]:
    setup = headway.Startup()

    @setup.stage(lane="process")
    def away() -> None:
        raise Unreadable(1, 2)

    return failure(setup)


def test_an_exception_that_cannot_travel_comes_as_text(tmp_path: Path) -> None:
    found = outcome(raising_unreadably, tmp_path)
    assert found["cause"] == "ChildFailed"
    assert found["text"].endswith("Unreadable: 1 and 2")


def seeding(folder: str) -> dict[str, Any]:
    torch.manual_seed(3)
    setup = headway.Startup()

    @setup.stage(lane="io")
    def rude() -> None:
        torch.manual_seed(5)

    setup.run()
    return {"next": float(torch.rand(())), "said": (Path(folder) / "said").read_text()}


@pytest.mark.parametrize("serial", ["0", "1"])
def test_a_stage_that_seeds_the_process_without_saying_so_is_undone_and_told(serial: str, tmp_path: Path) -> None:
    found = outcome(seeding, tmp_path, str(tmp_path), HEADWAY_SERIAL=serial)
    torch.manual_seed(3)
    assert found["next"] == float(torch.rand(()))
    assert ("headway: rude drew" if serial == "1" else "HEADWAY_SERIAL=1 names it") in found["said"]


DEADLY = """
import headway, os, signal, time
from torch.utils.data import DataLoader, Dataset

told, tell = os.pipe()

class Deadly(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, at):
        os.read(told, 1)  # torch listens for their death once they have all been started
        os.kill(os.getpid(), signal.SIGKILL)

setup = headway.Startup()

@setup.stage
def batches():
    return iter(DataLoader(Deadly(), num_workers=1))

@setup.stage
def innocent(batches):
    os.write(tell, b"x")
    while True:
        time.sleep(0.01)

setup.run()
"""


def test_a_data_worker_that_dies_is_not_blamed_on_the_stage_that_runs(home: Path) -> None:
    done = warm.run([sys.executable, "-c", DEADLY], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: DataLoader worker")


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


def interrupted_anywhere() -> dict[str, int]:
    """A signal comes at random moments: amid forks, starts of threads, waits, stages."""
    signal.signal(signal.SIGTERM, leave)
    headway.Startup().run()
    found: dict[str, int] = {}
    moments = random.Random(int(os.environ.get("SEED", "1")))
    for _ in range(SIGNALS):
        setup = headway.Startup(timeout_s=600)
        setup.stage(name="waits", lane="io")(lambda: time.sleep(0.002))
        setup.stage(name="away", lane="process")(lambda: time.sleep(0.002))
        setup.stage(name="main")(lambda: sum(range(20_000)))
        setup.stage(name="late", needs=["waits"])(lambda: time.sleep(1000))
        done = threading.Event()
        sender = threading.Thread(target=send_until, args=(done, moments.uniform(0.0, 0.02)))
        told = failure(setup, sender.start)
        done.set()
        sender.join()
        key = f"{told['kind']} {told['threads']} {len(told['children'])}"
        found[key] = found.get(key, 0) + 1
    return found


def leave(number: int, frame: Any) -> None:
    raise SystemExit(3)


def send_until(done: threading.Event, pause_s: float) -> None:
    while not done.wait(pause_s):
        os.kill(os.getpid(), signal.SIGTERM)
        # Python drops what a handler raises inside of a finalizer: then once more, when all else has long ended.
        pause_s = 60.0


def test_a_signal_at_any_moment_of_the_start_leaves_no_thread_and_no_process(tmp_path: Path) -> None:
    assert outcome(interrupted_anywhere, tmp_path) == {"SystemExit [] 0": SIGNALS}


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
    until = time.monotonic() + 120
    while living_ticks(child) is not None:
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


def test_a_stage_error_can_be_sent_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(headway.StageError("model", 3, "ValueError: no")))
    assert (str(error), error.stage, error.rank) == ("stage model failed on rank 3: ValueError: no", "model", 3)


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
        assert found["kind"] == "InputError", (rank, found)
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

    found = failure(setup)
    dist.barrier()
    return found


def alone_in_a_fake_group() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    setup = headway.Startup()

    @setup.stage(lane="comm")
    def process_group_init() -> int:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        return dist.get_world_size()

    return setup.run().process_group_init


def test_a_dry_run_in_a_group_without_other_ranks_waits_for_none(tmp_path: Path) -> None:
    assert outcome(alone_in_a_fake_group, tmp_path) == 8


def test_the_error_names_the_rank_it_was_on(tmp_path: Path) -> None:
    found = outcomes(2, failing_rank, tmp_path)
    assert found[0] == {}
    assert found[1]["text"] == "stage table failed on rank 1: ValueError: a bad table"
