"""A publisher that fails in every way, and a supervisor that ends in every way."""

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from worker_on_command import Worker, command, decide, supervisor

from headway import sessions
from headway.errors import InputError
from headway.events.clock import start_ticks
from headway.publish import supervisor as supervising
from headway.publish.request import Desk, Publish, Request, open_desk
from headway.publish.supervisor import End, Retry, Stillness, Stop, supervise

LIMIT_S = 120.0


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return open_desk(tmp_path, Request(id="model-1", what=Publish(), root="/r", checkpoint="c"))


class Heard:
    """What was said, and how each try ended."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ends: list[End] = []

    def decide(self, end: End) -> Retry | Stop:
        self.ends.append(end)
        return decide(end)


def run(desk: Desk, *plans: str, stall_s: float = 60.0) -> tuple[int, Heard]:
    heard = Heard()
    code = supervise(desk, command(desk, *plans), heard.decide, stall_s=stall_s, say=heard.said.append)
    return code, heard


# --- how a try ends --------------------------------------------------------------------------------------------------


def test_what_a_worker_publishes_is_published_at_the_first_try(desk: Desk) -> None:
    code, heard = run(desk, "say=from stdout+publish=v7")
    assert (code, heard.ends, heard.said) == (0, [], ["published as v7"])
    state = desk.state()
    assert (state.phase, state.tries, state.pid) == ("published", 1, os.getpid())
    assert desk.log.read_text() == "from stdout\nheadway: published as v7\n"


@pytest.mark.parametrize(
    ("plan", "code", "phase"), [("input=no such part", 2, "failed"), ("reject=NaN", 3, "rejected")]
)
def test_what_cannot_be_published_is_not_tried_again(desk: Desk, plan: str, code: int, phase: str) -> None:
    assert run(desk, plan)[0] == code
    assert (desk.state().phase, desk.state().problem, desk.state().tries) == (phase, plan.partition("=")[2], 1)


def test_an_exception_is_told_in_one_line_and_the_log_has_all(desk: Desk) -> None:
    code, heard = run(desk, "fail=no room for it")
    state = desk.state()
    assert (code, state.phase, state.category) == (1, "failed", "exception")
    assert state.problem == "ValueError: no room for it (exit code 1): it would fail again"
    assert "Traceback (most recent call last)" in desk.log.read_text()
    assert heard.said == [f"not published. {state.problem}"]
    [end] = heard.ends
    assert (end.exit_code, end.signal, end.stalled_s, end.steps_done) == (1, None, None, 0)
    assert end.last_lines.endswith("ValueError: no room for it\n")


def test_a_killed_worker_is_started_again_until_it_publishes(desk: Desk) -> None:
    code, heard = run(desk, "step=a+step=b+kill", "kill", "publish")
    assert (code, desk.state().phase, desk.state().tries) == (0, "published", 3)
    assert [(end.exit_code, end.signal, end.steps_done) for end in heard.ends] == [
        (-9, "SIGKILL", 2),
        (-9, "SIGKILL", 0),
    ]
    assert heard.said[0] == "try 1 failed. it was ended by SIGKILL: it may pass"
    assert (desk.state().problem, desk.state().category) == ("", "")


def test_while_it_waits_for_the_next_try_the_state_says_why(desk: Desk) -> None:
    seen = []
    waits = iter([0.5, 0.0])

    def after_a_while(end: End) -> Retry:
        return Retry(why="the store is down", category="storage", wait_s=next(waits))

    supervise(desk, command(desk, "kill", "publish"), after_a_while, say=lambda text: seen.append(desk.state()))
    assert (seen[0].phase, seen[0].category) == ("retrying", "storage")
    assert seen[0].problem == "it was ended by SIGKILL: the store is down"


@pytest.mark.parametrize("code", [0, 2, pytest.param(3, marks=pytest.mark.thorough)])
def test_an_exit_code_is_no_word_from_the_worker(desk: Desk, code: int) -> None:
    exit_code, heard = run(desk, f"exit={code}")  # by a recipe that calls sys.exit, or a parser of options
    assert (exit_code, desk.state().phase) == (1, "failed")
    assert [end.exit_code for end in heard.ends] == [code]


def test_what_is_published_stays_so_even_if_the_worker_dies_after_it(desk: Desk) -> None:
    code, heard = run(desk, "published=v2+kill")
    assert (code, heard.ends, desk.state().phase, desk.state().version) == (0, [], "published", "v2")


def test_a_command_that_does_not_exist_is_a_failure_with_its_name(desk: Desk) -> None:
    heard = Heard()
    assert supervise(desk, ["/nonexistent/python"], heard.decide, say=heard.said.append) == 1
    assert "/nonexistent/python cannot be started" in desk.state().problem


def test_a_policy_that_fails_itself_is_told_and_ends_it(desk: Desk) -> None:
    def broken(end: End) -> Retry:
        raise KeyError("category")

    assert supervise(desk, command(desk, "kill"), broken, say=lambda text: None) == 1
    assert desk.state().problem.startswith(
        "it was ended by SIGKILL: what decides about failures failed itself (KeyError"
    )


def test_without_a_decision_it_ends(desk: Desk) -> None:
    assert supervise(desk, command(desk, "kill"), lambda end: None, say=lambda text: None) == 1
    assert (desk.state().phase, desk.state().problem) == ("failed", "it was ended by SIGKILL")


def test_megabytes_on_stderr_block_nobody_and_the_end_is_kept(desk: Desk) -> None:
    code, heard = run(desk, "flood=8+fail=after the flood")
    assert code == 1
    [end] = heard.ends
    assert len(end.last_lines) == 64 * 1024
    assert end.last_lines.endswith("ValueError: after the flood\n")
    assert desk.log.stat().st_size > 8 << 20


def test_a_grandchild_ends_with_its_worker(desk: Desk, tmp_path: Path) -> None:
    code, _ = run(desk, f"child={tmp_path}/child+kill", "publish")
    assert code == 0
    assert is_gone(int((tmp_path / "child").read_text()))


# --- hangs -----------------------------------------------------------------------------------------------------------


def busy_until(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker counts as busy until that file exists: on a busy machine its start may look like a hang."""
    work_done, seconds = sessions.work_done, itertools.count(1)

    def measured(leaders: list[int]) -> dict[int, tuple[int, int]]:
        found = work_done(leaders)
        return found if place.exists() else {pid: (10_000 * next(seconds), 0) for pid in found}

    monkeypatch.setattr(sessions, "work_done", measured)


def test_a_worker_that_does_nothing_is_asked_for_its_stacks_and_ended(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "_DUMP_S", 3.0)  # a busy machine takes its time to write the stacks
    hangs = desk.folder / "hangs"
    busy_until(hangs, monkeypatch)
    heard = Heard()

    def again(end: End) -> Retry | Stop:
        hangs.unlink()  # the next worker does not hang
        return heard.decide(end)

    plans = f"stacks+pid={hangs}+sleep", "publish"
    code = supervise(desk, command(desk, *plans), again, stall_s=1.5, say=heard.said.append)
    assert code == 0
    [end] = heard.ends
    assert end.signal == "SIGKILL"
    assert end.stalled_s is not None
    assert end.stalled_s >= 1.5
    assert " in sleep\n" in end.last_lines  # the function of the worker that hangs, in a dump of its stacks
    assert end.last_lines in desk.log.read_text()
    assert heard.said[0].startswith("try 1 failed. it did nothing for ")


@pytest.mark.thorough
def test_a_worker_that_hangs_and_knows_no_stacks_is_ended_all_the_same(desk: Desk) -> None:
    code, heard = run(desk, "deaf+sleep", "publish", stall_s=1.0)
    assert code == 0
    assert heard.ends[0].stalled_s is not None


@pytest.mark.parametrize("plan", [pytest.param("burn=7", marks=pytest.mark.thorough), "tick=7"])
def test_a_worker_that_computes_or_tells_how_far_it_is_does_not_hang(desk: Desk, plan: str) -> None:
    code, heard = run(desk, f"{plan}+publish", stall_s=5.0)  # a busy machine may stop it for a second or two
    assert (code, heard.ends) == (0, [])


def test_stillness_is_what_was_not_done_since_something_was_done() -> None:
    stillness = Stillness(stall_s=100.0)  # a second of processor time, or 100 kB, are something
    assert stillness.look(1000.0, 20.0, 5.0, 10_000, 1) == 0
    assert stillness.look(1010.0, 20.0, 5.5, 10_000, 1) == 10
    assert stillness.look(1020.0, 20.0, 5.9, 90_000, 1) == 20
    assert stillness.look(1030.0, 20.0, 6.1, 90_000, 1) == 0, "it computed"
    assert stillness.look(1040.0, 20.0, 6.1, 189_000, 1) == 10
    assert stillness.look(1050.0, 20.0, 6.1, 190_000, 1) == 0, "it read"
    assert stillness.look(1060.0, 20.0, 6.1, 190_000, 2) == 0, "it told how far it is"
    assert stillness.look(1070.0, 20.0, 3.0, 190_000, 2) == 0, "a child of it has ended"


def test_time_in_which_the_machine_slept_is_no_stillness() -> None:
    stillness = Stillness(stall_s=100.0)
    stillness.look(1000.0, 20.0, 5.0, 10_000, 1)
    assert stillness.look(9000.0, 20.0, 5.0, 10_000, 1) == 20


# --- the supervisor's own end ----------------------------------------------------------------------------------------


@contextmanager
def supervised(desk: Desk, *plans: str) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor of its own process, whose worker has begun."""
    place = desk.folder / "worker-pid"
    place.unlink(missing_ok=True)
    with subprocess.Popen(supervisor(desk, *plans), stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(place.exists)
            yield process
        finally:
            process.kill()


def worker_of(desk: Desk) -> int:
    return int((desk.folder / "worker-pid").read_text())


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGTERM, ""),
        pytest.param(signal.SIGTERM, "deaf+", marks=pytest.mark.thorough),
        pytest.param(signal.SIGINT, "", marks=pytest.mark.thorough),
        pytest.param(signal.SIGHUP, "", marks=pytest.mark.thorough),
    ],
)
def test_a_signal_ends_the_worker_and_all_it_started(desk: Desk, number: signal.Signals, how: str) -> None:
    with supervised(desk, f"step=a+child={desk.folder}/child+{how}pid={desk.folder}/worker-pid+sleep") as process:
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 128 + number
    state = desk.state()
    assert state.phase == "interrupted"
    assert state.problem.startswith(f"interrupted by {number.name}. What is done is kept: ")
    assert state.steps == ("a",)
    assert is_gone(worker_of(desk))
    assert is_gone(int((desk.folder / "child").read_text()))
    assert run(desk, "publish")[0] == 0
    assert desk.state().tries == 2


def test_a_worker_that_hears_of_the_end_before_its_supervisor_is_not_started_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRACE_S", "100")  # this process may be stopped for longer than the supervisor waits
    with supervised(desk, f"pid={desk.folder}/worker-pid+sleep") as process:
        worker = worker_of(desk)
        os.kill(worker, signal.SIGTERM)
        wait_until(lambda: not Path(f"/proc/{worker}").exists())  # the supervisor has buried it
        process.terminate()
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert (desk.state().phase, desk.state().tries) == ("interrupted", 1)


def test_what_was_published_when_a_signal_came_is_published(desk: Desk) -> None:
    with supervised(desk, f"published=v3+pid={desk.folder}/worker-pid+sleep") as process:
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    assert (desk.state().phase, desk.state().version) == ("published", "v3")


def test_a_signal_ends_the_wait_for_the_next_try(desk: Desk) -> None:
    def long(end: End) -> Retry:
        os.kill(os.getpid(), signal.SIGTERM)
        return Retry(why="it may pass", wait_s=600)

    assert supervise(desk, command(desk, "kill"), long, say=lambda text: None) == 128 + signal.SIGTERM
    assert desk.state().phase == "interrupted"


def test_signals_are_as_before_when_it_returns(desk: Desk) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    run(desk, "publish")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before


def test_a_worker_dies_with_its_supervisor_and_the_next_one_goes_on(desk: Desk) -> None:
    plan = f"step=a+child={desk.folder}/child+deaf+pid={desk.folder}/worker-pid+sleep"
    with supervised(desk, plan) as process:
        assert desk.state().phase == "running"
        process.kill()
        process.wait(LIMIT_S)
    wait_until(lambda: is_gone(worker_of(desk)))
    child = int((desk.folder / "child").read_text())
    assert not is_gone(child), "what the worker has started has no supervisor now"
    assert desk.state().phase == "interrupted"
    assert "ended without a word" in desk.state().problem
    assert desk.state().steps == ("a",)

    assert run(desk, f"sleep=0.1+step=b+pid={desk.folder}/x+publish")[0] == 0
    assert is_gone(child), "it must not go on beside the next worker"
    assert desk.state().steps == ("a", "b")


def test_what_got_the_number_of_an_old_worker_is_left_alone(desk: Desk) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        try:
            (desk.folder / "worker").write_text(str(other.pid))
            assert run(desk, "publish")[0] == 0
            assert other.poll() is None
        finally:
            other.kill()


def test_of_two_supervisors_the_second_is_refused(desk: Desk) -> None:
    with supervised(desk, f"pid={desk.folder}/worker-pid+sleep") as process:
        with pytest.raises(InputError, match=f"is being published already, by process {process.pid}"):
            run(desk, "publish")
        assert not is_gone(worker_of(desk))
        assert desk.state().phase == "running"


@pytest.mark.needs("mount")
def test_a_full_disk_does_not_end_the_supervisor(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "small", place], capture_output=True).returncode:
        pytest.skip("needs mount: run as root, where mounting a tmpfs is allowed")
    try:
        desk = open_desk(place, Request(id="model-1", what=Publish(), root="/r", checkpoint="c"))

        def make_room(end: End) -> Retry:
            assert "No space left on device" in end.last_lines
            (place / "scratch").unlink()
            return Retry(why="there is room again")

        code = supervise(desk, command(desk, f"fill={place}/scratch", "publish"), make_room, say=lambda text: None)
        assert (code, desk.state().phase) == (0, "published")

        def stay(end: End) -> Stop:
            return Stop(why="no retry can help", category="disk_full")

        said: list[str] = []
        code = supervise(desk, command(desk, f"fill={place}/scratch"), stay, say=said.append)
        assert code == 1
        assert any(text.startswith("how far it is cannot be written") for text in said)
        assert said[-1].startswith("not published. OSError: [Errno 28] No space left on device")
        assert desk.state().phase == "running", "as far as it could be written"

        (place / "scratch").unlink()
        desk.change(phase="published")
        with suppress(OSError):
            Worker(desk).fill(f"{place}/scratch")
        code = supervise(desk, command(desk, "kill"), stay, say=said.append)
        assert code == 1, "that is what was written before, and not by this worker"
    finally:
        subprocess.run(["umount", place], check=True)


# --- processes -------------------------------------------------------------------------------------------------------


def is_gone(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return start_ticks(pid) is None


def wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < deadline, f"waited {LIMIT_S:.0f} s for {ready}"
        time.sleep(0.02)
