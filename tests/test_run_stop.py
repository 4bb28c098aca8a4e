"""A job that is told to stop: all ranks save once, after the same step, and no signal handler is lost."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import warm
from headway.cli.source import open_job
from headway.events.journal import Follower
from headway.events.vocabulary import ProcessEnd
from headway.launch.notice import EXIT_STOPPED, Board

PREAMBLE = """
import os, signal, sys, time
import headway
run = headway.current()
def endless():
    while True:
        time.sleep(0.01)
        yield None
def say(*words):
    print(*words, flush=True)
"""

CALLBACK = """
run.on_stop(lambda step: say("saved", step))
say("ready")
last = 99
for step, _ in run.steps(endless(), start=100):
    last = step
say("left after", last, run.stop.reason)
for step, _ in run.steps(endless()):
    say("one more")
run.finish()
say("not reached")
"""

OWN_LOOP = """
run.should_stop
say("ready")
steps = 0
while True:
    time.sleep(0.01)
    steps += 1
    if run.should_stop:
        say("saved")
        break
run.finish()
"""


@contextmanager
def started(home: Path, text: str, *command: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A script that has said `ready`."""
    path = home / "train.py"
    path.write_text(text)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    words = [*(command or [sys.executable]), str(path)]
    with subprocess.Popen(words, env=os.environ | environ, text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate(timeout=120)
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str], code: int) -> tuple[list[str], str]:
    """What a script still said, on both streams."""
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = process.stdout.read(), process.stderr.read()  # not `communicate`, which forgets what was read ahead
    assert process.wait(120) == code, err
    return out.splitlines(), err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_steps_and_what_saves_is_called_once_with_the_next_step(home: Path, number: int) -> None:
    with started(home, PREAMBLE + CALLBACK) as process:
        time.sleep(0.1)
        process.send_signal(number)
        out, _ = ended(process, EXIT_STOPPED)
    saved, left = (line.split() for line in out)
    assert saved[0] == "saved"
    assert int(saved[1]) == int(left[2]) + 1
    assert left[3] == signal.Signals(number).name.lower()


def test_a_loop_of_ones_own_asks(home: Path) -> None:
    with started(home, PREAMBLE + OWN_LOOP) as process:
        process.send_signal(signal.SIGTERM)
        assert ended(process, EXIT_STOPPED)[0] == ["saved"]


def test_the_journal_tells_a_stop_from_an_end(home: Path) -> None:
    with started(home, PREAMBLE + CALLBACK) as process:
        process.send_signal(signal.SIGTERM)
        ended(process, EXIT_STOPPED)
    [journal] = home.rglob("*.hwj")
    ends = [record for record in Follower(journal).poll().records if isinstance(record, ProcessEnd)]
    assert [(end.error, end.category) for end in ends] == [(None, "sigterm")] * 2
    assert open_job(None).ledger().attempts[0].attempt.failed is False


def test_a_script_that_does_not_ask_is_ended_by_the_signal_as_ever(home: Path) -> None:
    with started(home, PREAMBLE + "say('ready')\nfor _ in run.steps(endless()): pass") as process:
        process.send_signal(signal.SIGTERM)
        ended(process, -signal.SIGTERM)


def test_the_handler_that_was_there_before_is_called_too(home: Path) -> None:
    before = "signal.signal(signal.SIGTERM, lambda number, frame: say('handler', number, frame is not None))\n"
    with started(home, PREAMBLE + before + OWN_LOOP) as process:
        process.send_signal(signal.SIGTERM)
        assert ended(process, EXIT_STOPPED)[0] == ["handler 15 True", "saved"]


def test_a_handler_that_is_installed_later_stays(home: Path) -> None:
    text = OWN_LOOP.replace('say("ready")', 'signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); say("ready")')
    with started(home, PREAMBLE + text) as process:
        process.send_signal(signal.SIGTERM)
        assert ended(process, 5)[0] == []


STUCK = """
run.should_stop
from headway.launch import notice
notice._now_s = lambda: 1000.0 if os.path.exists(sys.argv[0] + ".later") else 1.0
tell = notice.Listener.tell
notice.Listener.tell = lambda *given: (tell(*given), os.write(1, b"told\\n"))
say("ready")
while True:
    time.sleep(0.01)
"""


def test_a_second_sigterm_ends_a_program_that_does_not_come_to_an_edge(home: Path) -> None:
    with started(home, PREAMBLE + STUCK) as process:
        assert process.stdout is not None
        for _ in range(3):  # as when a launcher and a scheduler both pass on the same one
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "told\n"
        (home / "train.py.later").touch()  # its clock is the test's: a real one would run while it is not scheduled
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        ended(process, -signal.SIGTERM)


DATA_WORKER = """
import multiprocessing
run.should_stop
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
worker.start()
worker.terminate()
worker.join(120)
say("ready")
say(worker.exitcode)
"""


def test_a_forked_data_worker_ends_when_told_to(home: Path) -> None:
    with started(home, PREAMBLE + DATA_WORKER) as process:
        assert ended(process, 0)[0] == [str(-signal.SIGTERM)]


IN_A_THREAD = """
import threading
thread = threading.Thread(target=lambda: say(run.should_stop))
say("ready")
thread.start()
thread.join()
time.sleep(600)
"""


def test_outside_of_the_main_thread_signals_stay_as_they_were_and_that_is_said(home: Path) -> None:
    with started(home, PREAMBLE + IN_A_THREAD) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "False\n"
        process.send_signal(signal.SIGTERM)
        assert "outside of the main thread" in ended(process, -signal.SIGTERM)[1]


def test_a_supervisors_board_tells_why_and_is_told_when_it_is_done(home: Path) -> None:
    board = Board.create(home / "board", 2)
    with started(home, PREAMBLE + CALLBACK, HEADWAY_BOARD=str(home / "board"), LOCAL_RANK="1") as process:
        assert (board.listeners, board.stopped) == ({1}, set())
        board.post("preempted", time.monotonic_ns() + 60 * 10**9)
        out, err = ended(process, 0)  # what comes next is the supervisor's affair
    saved, left, _ = (line.split() for line in out)
    assert int(saved[1]) == int(left[2]) + 1
    assert (left[3], out[2]) == ("preempted", "not reached")
    assert (board.stopped, err) == ({1}, "")


def test_a_file_that_appears_is_a_notice(home: Path) -> None:
    with started(home, PREAMBLE + OWN_LOOP, HEADWAY_NOTICE=f"file:{home}/notice") as process:
        (home / "notice").touch()
        assert ended(process, EXIT_STOPPED)[0] == ["saved"]


def test_a_wrong_source_of_notices_is_said_and_does_no_harm(home: Path) -> None:
    with started(home, PREAMBLE + OWN_LOOP, HEADWAY_NOTICE="nowhere:nothing") as process:
        process.send_signal(signal.SIGTERM)
        out, err = ended(process, EXIT_STOPPED)
    assert out == ["saved"]
    assert "HEADWAY_NOTICE=nowhere:nothing names no source" in err


# --- several ranks -------------------------------------------------------------------------------------------------

TRAINER = """
import json, os, random, sys, time
import torch, torch.distributed as dist
import headway

def train(folder, pace_s, own_loop, **meeting):
    run = headway.current()
    dist.init_process_group("gloo", **(meeting and {**meeting, "rank": run.rank, "world_size": 2}))
    told = open(f"{folder}/rank-{run.rank}", "a", buffering=1)
    save = lambda step: print("saved", step, file=told)
    ones = torch.ones(4)
    def step():
        time.sleep(random.uniform(0, pace_s))
        dist.all_reduce(ones)
        ones.div_(dist.get_world_size())
    run.should_stop if own_loop else run.on_stop(save)
    print("ready", os.getpid(), file=told)
    if own_loop:
        for number in range(1_000_000):
            step()
            if run.should_stop:
                save(number + 1)
                break
    else:
        for number, _ in run.steps(range(1_000_000)):
            step()
            if run.rank == 0:
                run.should_stop  # what only one rank asks must not lead it astray
    dist.barrier()
    dist.destroy_process_group()
    run.finish()
"""

PAIRS = (
    TRAINER
    + """
import multiprocessing
def rank(number, folder, *how):
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    place = f"{folder}/port"
    if number == 0:  # the system chooses a port that nobody else has
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        open(f"{place}.part", "w").write(str(store.port))
        os.rename(f"{place}.part", place)
    else:
        while not os.path.exists(place):
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(open(place).read()), 2)
    train(folder, *how, store=store)
if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    pairs = json.loads(sys.argv[1])
    ranks = [fork.Process(target=rank, args=(number, *pair)) for pair in pairs for number in (0, 1)]
    for each in ranks: each.start()
    for each in ranks: each.join()
    print(json.dumps([each.exitcode for each in ranks]))
"""
)


def test_two_ranks_stop_at_the_same_step_whenever_either_is_told(home: Path, tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("SEED", "0")))
    folders = [tmp_path / f"pair-{number}" for number in range(6)]
    for folder in folders:
        folder.mkdir()
    pairs = [
        (str(folder), chance.choice([0.002, 0.01, 0.05, 0.8]), number % 2) for number, folder in enumerate(folders)
    ]
    (home / "pairs.py").write_text(PAIRS)
    files = [folder / f"rank-{rank}" for folder in folders for rank in (0, 1)]
    with ready([str(home / "pairs.py"), json.dumps(pairs)], files) as process:
        for folder in chance.sample(folders, len(folders)):
            time.sleep(chance.uniform(0, 0.5))
            for rank in chance.choice([[0], [1], [0, 1], [1, 0], [1, 1, 0]]):
                with suppress(ProcessLookupError):  # the first signal may have ended it already
                    os.kill(pid_of(folder / f"rank-{rank}"), chance.choice([signal.SIGTERM, signal.SIGUSR1]))
                time.sleep(chance.choice([0, 0, 0.01, 0.3]))
        out, err = process.communicate(timeout=120)
    assert json.loads(out) == [EXIT_STOPPED] * 2 * len(folders), err
    assert "after the other ranks" not in err
    for folder in folders:
        saved = [(folder / f"rank-{rank}").read_text().splitlines()[1:] for rank in (0, 1)]
        assert len(saved[0]) == 1, (folder, saved)
        assert saved[0] == saved[1], folder


UNDER_TORCHRUN = TRAINER + "\nrun = headway.current()\ntrain(sys.argv[1], 0.02, '')\n"


@pytest.mark.thorough
def test_a_sigterm_to_torchrun_stops_all_ranks_at_the_same_step(home: Path, tmp_path: Path) -> None:
    with torchrun(home, UNDER_TORCHRUN, tmp_path) as (agent, files):
        agent.send_signal(signal.SIGTERM)
        err = agent.communicate(timeout=120)[1]
    saved = [file.read_text().splitlines()[1:] for file in files]
    assert len(saved[0]) == 1, err
    assert saved[0] == saved[1]


SLOW_TO_SAVE = """
    def save(step):
        while run.rank and "saved" not in open(f"{folder}/rank-0").read():
            time.sleep(0.01)
        time.sleep(2 * run.rank)
        print("saved", time.monotonic(), file=told)
    from multiprocessing.util import Finalize
    Finalize(None, lambda: print("left", time.monotonic(), file=told), exitpriority=1)
    ones = """


def test_a_rank_that_has_saved_waits_for_those_that_have_not(home: Path, tmp_path: Path) -> None:
    (home / "pairs.py").write_text(PAIRS.replace("\n    ones = ", SLOW_TO_SAVE).replace("    dist.barrier()\n", ""))
    files = [tmp_path / f"rank-{rank}" for rank in (0, 1)]
    with ready([str(home / "pairs.py"), json.dumps([(str(tmp_path), 0.02, 0)])], files) as process:
        os.kill(pid_of(files[1]), signal.SIGUSR1)
        err = process.communicate(timeout=120)[1]
    quick, slow = (dict(line.split() for line in file.read_text().splitlines()) for file in files)
    assert float(quick["saved"]) < float(slow["saved"]) < float(quick["left"]), err


def test_where_torch_hides_its_store_a_rank_stops_at_once_and_says_so(home: Path, tmp_path: Path) -> None:
    hidden = "\nimport torch.distributed.distributed_c10d as c10d\ndel c10d._get_default_store\n"
    (home / "pairs.py").write_text(PAIRS.replace("\ndef train(", hidden + "def train(", 1))
    pairs = [(str(tmp_path), 0.01, 0)]
    files = [tmp_path / f"rank-{rank}" for rank in (0, 1)]
    with ready([str(home / "pairs.py"), json.dumps(pairs)], files) as process:
        os.kill(pid_of(files[0]), signal.SIGTERM)
        wait_until(lambda: "saved" in files[0].read_text(), process)
        for file in files:
            with suppress(ProcessLookupError):  # the other rank may have failed in the collective that this one left
                os.kill(pid_of(file), signal.SIGKILL)
        err = process.communicate(timeout=120)[1]
    assert "this version of torch hides its store" in err


@contextmanager
def torchrun(home: Path, text: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[Path]]]:
    """torchrun with two ranks of a script, which are ready; and the files to which they write what they do."""
    (home / "train.py").write_text(text)
    files = [folder / f"rank-{rank}" for rank in (0, 1)]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    with ready([*launcher, str(home / "train.py"), str(folder)], files) as agent:
        yield agent, files


@contextmanager
def ready(words: list[str], files: list[Path]) -> Iterator[subprocess.Popen[str]]:
    """A Python whose ranks have all begun their files; none of them outlives the test."""
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with warm.Popen([sys.executable, *words], text=True, start_new_session=True, **pipes) as process:
        try:
            wait_until(lambda: all(file.exists() and "\n" in file.read_text() for file in files), process)
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for file in filter(Path.exists, files):  # torchrun's ranks have sessions of their own
                with suppress(OSError):
                    if str(file.parent) in Path(f"/proc/{pid_of(file)}/cmdline").read_text():
                        os.kill(pid_of(file), signal.SIGKILL)


def pid_of(file: Path) -> int:
    """Of the process that writes it."""
    return int(file.read_text().split()[1])


def wait_until(ready, process: subprocess.Popen[str]) -> None:  # type: ignore[no-untyped-def]
    """Wait until it is so. AssertionError if the process ends before, or if it takes too long."""
    deadline = time.monotonic() + 100
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
