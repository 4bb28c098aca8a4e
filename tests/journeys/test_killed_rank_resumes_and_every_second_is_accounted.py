"""A real job on real processes: torchrun, two gloo ranks, one of them killed or crashed, restarted, read back."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import warm
from headway.cli.source import open_job
from headway.observe.summary import summary

STEPS, DIES_AT = 100, 50


@pytest.mark.parametrize("mode", ["kill", pytest.param("raise", marks=pytest.mark.thorough)])
def test_a_failed_rank_resumes_and_every_second_is_accounted(home: Path, mode: str) -> None:
    run_job(home, mode)
    told = summary(open_job(None).ledger())
    stopwatch = [json.loads(line) for rank in (0, 1) for line in (home / f"stopwatch-{rank}.jsonl").open()]
    first, second = phases(stopwatch)

    assert told["state"] == "ended"
    assert sum(told["ledger"].values()) == pytest.approx(told["wall_s"], abs=1e-6)
    assert [attempt["outcome"] for attempt in told["attempts"]] == ["failed", "ended"]
    assert told["failures"][0]["attempt"] == 0
    if mode == "raise":
        assert told["failures"][0]["rank"] == 1
        assert "the journey wants it so" in told["attempts"][0]["error"]

    # Steps 40 to 50 were trained, lost and trained again, and perhaps the one under way; none is missing.
    assert told["steps"]["new"] == STEPS
    assert 10 <= told["steps"]["repeated"] <= 12
    assert told["steps"]["unsaved"] == 0

    # On a busy machine, time passes between the script's notes and ours.
    begun = told["begin"]
    assert first["loop"] - begun == pytest.approx(told["time_to_start_s"], abs=1.0)
    died = max(at for at in first["steps"])
    assert second["loop"] - died == pytest.approx(told["time_to_recover_s"][0], abs=1.0)
    assert told["stages"]["train_module_creation"] >= 1.0
    assert told["unattributed_s"] < 0.01 * told["wall_s"]
    stepping = (died - first["loop"]) + (max(second["steps"]) - second["loop"])
    in_loop = sum(s for key, s in told["ledger"].items() if key.startswith(("training.", "waste.")))
    assert in_loop == pytest.approx(stepping, rel=0.05, abs=1.0)


def phases(stopwatch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each attempt, when the last rank came to its loop, and when each step was done."""
    result = []
    for first in (0, 40):
        pids = {note["pid"] for note in stopwatch if note["what"] == "loop" and note["first"] == first}
        mine = [note for note in stopwatch if note["pid"] in pids]
        loop = max(note["at"] for note in mine if note["what"] == "loop")
        result.append({"loop": loop, "steps": [note["at"] for note in mine if note["what"] == "step"]})
    return result


def run_job(folder: Path, mode: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "--monitor-interval", "0.1"]
    if mode == "kill":  # torchrun then forks its ranks, and would report an exception without their error
        command += ["--run-path", "--start-method", "fork"]
    command += [str(Path(__file__).with_name("trainer.py"))]
    command += [str(folder), str(STEPS), str(DIES_AT), mode]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = warm.run(command, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
