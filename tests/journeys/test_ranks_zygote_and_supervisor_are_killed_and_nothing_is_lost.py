"""A job whose ranks, zygote and supervisor are killed one after the other, by real signals from outside.

In the end all steps are trained, those that were trained twice are those that the ledger calls repeated, every
nanosecond is accounted for, and each recovery is split into its parts.
"""

import os
import signal
from pathlib import Path

import pytest
from supervising import TRAINER, descendants, report, start, trained, wait_for, zygotes

WORDS = ["--nproc-per-node", "2", "--job", "battered", str(TRAINER)]
# Where an attempt hangs, it waits for its kill, however late that comes.
FAULTS = "0:0@20=hang 1:0@35=hang 2:0@40=raise 3:0@60=hang"
SETTINGS = {"STEPS": "90", "STEP_S": "0.05", "FAULTS": FAULTS}


def reached(home: Path, attempt: int, steps: int) -> bool:
    return len([1 for number, _ in trained(home) if number == attempt]) >= steps


def test_ranks_zygote_and_supervisor_are_killed_and_nothing_is_lost(home: Path) -> None:
    process = start(WORDS, home, **SETTINGS)
    try:
        wait_for(lambda: reached(home, 0, 8), process)
        os.kill(int((home / "pid-1").read_text()), signal.SIGKILL)
        wait_for(lambda: reached(home, 1, 4), process)

        [first] = zygotes(process.pid)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{first}").exists(), process)  # it is taken when another is to be started
        os.kill(int((home / "pid-0").read_text()), signal.SIGKILL)
        wait_for(lambda: reached(home, 3, 4), process)  # attempt 2 has raised by itself

        everybody = descendants(process.pid)
        process.kill()
        process.wait()
        wait_for(lambda: not [pid for pid in everybody if Path(f"/proc/{pid}").exists()])
        process = start(WORDS, home, **SETTINGS)
        assert process.wait(200) == 0
    finally:
        process.kill()
        print((home / "stderr").read_text())  # which is shown if this fails

    told = report("battered")
    assert told["state"] == "ended"
    assert [attempt["outcome"] for attempt in told["attempts"]] == ["failed"] * 4 + ["ended"]
    assert [failure["category"] for failure in told["failures"][:3]] == [
        "sigkill_unexplained", "sigkill_unexplained", "python_error",
    ]  # fmt: skip
    assert [failure["rank"] for failure in told["failures"][:3]] == [1, 0, 0]
    assert "start fresh: " not in (text := (home / "stderr").read_text())
    assert "starts fresh: " not in text

    for rank in (0, 1):
        steps = [step for _, step in trained(home, rank)]
        assert set(steps) == set(range(90))
    assert told["steps"]["new"] == 90
    assert told["steps"]["repeated"] == pytest.approx(len(trained(home)) - 90, abs=4)  # one under way at each kill

    assert sum(told["ledger"].values()) == pytest.approx(told["wall_s"], abs=1e-6)
    recovering = {key: seconds for key, seconds in told["ledger"].items() if key.startswith("recover.")}
    assert sum(recovering.values()) == pytest.approx(sum(told["time_to_recover_s"]), abs=1e-6)
    assert len(told["time_to_recover_s"]) == 4
    for key in ("detection", "teardown", "rendezvous", "launcher_init", "trainer_init", "checkpoint_restore"):
        assert recovering[f"recover.{key}"] > 0, key
    assert told["unattributed_s"] < 0.02 * told["wall_s"]
    for attempt in told["attempts"]:
        assert sum(attempt["ledger"].values()) == pytest.approx(attempt["wall_s"], abs=1e-6)
    for rank in told["ranks"]:
        assert sum(rank["ledger"].values()) == pytest.approx(told["wall_s"], abs=1e-6)
