"""`headway startup audit` on real jobs, and on journals told as stories."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headway.cli import main
from headway.cli import startup as startup_cli
from headway.events.clock import living_ticks
from headway.paths import jobs_in
from headway.testing import Rank, Story

HEADWAY = [sys.executable, "-P", "-m", "headway"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

TRAINER = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn

if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
dist.init_process_group("gloo", **alone)
with open(os.path.join(os.path.dirname(__file__), f"pid-{dist.get_rank()}"), "w") as file:
    file.write(str(os.getpid()))  # before the first step: after it, the audit may end this at any moment
for number in range(9):
    dist.all_gather_object([None] * dist.get_world_size(), number)
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = 3 if "short" in sys.argv else 10**9
for number in range(steps):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
print("trained", flush=True)
"""


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    return script


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["startup", "audit", *map(str, words)], env={"COLUMNS": "140"})


def audit(*words: str | Path, code: int = 0) -> "subprocess.CompletedProcess[str]":
    given = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "140"}
    command = [*HEADWAY, "startup", "audit", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=given, timeout=500)
    assert done.returncode == code, done.stderr
    return done


def tell(rank: Rank, op: str, seconds: float, **attrs: Any) -> Rank:
    told = {
        "op": op, "group": "0", "ranks": [0, 1], "size": 2, "world": 2, "backend": "gloo", "lazy": True, "through": "",
        "site": "train.py:7 main", "step": False, "count": 1, "calls": 1, "bytes": 2000, "first_ns": 0,
    }  # fmt: skip
    rank.recorder.mark("collective", seconds=seconds, **told | attrs)
    return rank


def told(home: Path, *ops: str, job: str = "story", start: float = 0.0, world: int = 2) -> str:
    """A job of two ranks, the second of which is late."""
    story = Story(home, job)
    for number in range(world):
        rank = story.rank(number, world, start=start)
        for op in ops:
            tell(rank, op, 0.25 if number else 0.5, count=20, calls=20)
        rank.steps(2, each=1.0).finished()
    return job


# --- a job that has run ----------------------------------------------------------------------------------------------


def test_a_job_is_told_with_what_is_needless_and_what_it_would_cost(home: Path) -> None:
    done = call(told(home, "all_gather_object", "broadcast"))
    assert done.exit_code == 0
    assert "2 of 2 ranks heard" in done.output
    assert "each sent or made 40, in 1.0 s, of which 500.0 ms at most was waiting" in done.output
    assert "train.py:7 main" in done.output
    assert "many small messages from one line" in done.output
    (header,) = [line for line in done.output.splitlines() if "needless" in line]
    assert header.split() == ["needless", "sent", "at", "2", "at", "8", "at", "64", "at", "512"]
    assert "extrapolated, not measured" in done.output
    assert "a·(n-1) + b·bytes·n   a = 12500.0 µs" in done.output


def test_json_has_all_of_it(home: Path) -> None:
    found = json.loads(call("--json", "--ranks", "4,2", told(home, "all_gather_object")).output)
    assert (found["job"], found["ranks"], found["world"]) == ("story", 2, 2)
    assert found["seconds_at"] == {"2": pytest.approx(0.25), "4": pytest.approx(0.75)}
    (finding,) = found["findings"]
    assert (finding["count"], finding["sites"]) == (20, ["train.py:7 main"])
    assert finding["saves"] == pytest.approx(0.25 * 19 / 20)
    (row,) = found["rows"]
    assert (row["op"], row["total"], row["seconds"], row["least_s"]) == ("all_gather_object", 40, 0.5, 0.25)
    assert found["models"][0]["formula"] == "a·(n-1) + b·bytes·n"


def test_of_a_job_that_was_started_again_the_last_start_counts(home: Path) -> None:
    story = Story(home)
    for start, seconds in ((0.0, 1.0), (100.0, 2.0)):
        for number in range(2 if start else 3):
            tell(story.rank(number, 2 if start else 3, start=start), "broadcast", seconds).finished()
    (row,) = json.loads(call("--json", "story").output)["rows"]
    assert (row["seconds"], row["ranks"]) == (2.0, 2)


def test_a_job_without_collectives_says_so(home: Path) -> None:
    done = call(told(home, world=1))
    assert done.exit_code == 0
    assert "job story made no collectives and no groups before its first step." in done.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("no-such-job",), "no job 'no-such-job'"),
        (("story", "--", "true"), "one of the two"),
        (("--",), "one of the two"),
        (("--ranks", "many", "story"), "'many' is no list of numbers of ranks. Give some such as 8,64,512."),
        (("--ranks", "0", "story"), "'0' is no list of numbers of ranks"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(home: Path, words: tuple[str, ...], says: str) -> None:
    told(home, "broadcast")
    done = call(*words)
    assert done.exit_code in (1, 2)
    assert says in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_a_site_cannot_change_the_terminal(home: Path) -> None:
    tell(Story(home).rank(0, 1), "broadcast", 0.1, site="\x1b[31mt.py:1 f", through="\x1b]0;x").finished()
    assert "\x1b" not in call("story").output


# --- a command -------------------------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def are_gone(*pids: int) -> bool:
    return all(living_ticks(pid) is None for pid in pids)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.thorough
def test_a_training_is_ended_once_all_ranks_have_made_their_first_step(home: Path, trainer: Path) -> None:
    done = audit("--json", "--", *TORCHRUN, trainer)
    found = json.loads(done.stdout)
    assert (found["ranks"], found["world"]) == (2, 2)
    assert [row["count"] for row in found["rows"] if row["op"] == "all_gather_object"] == [18]
    titles = [finding["title"] for finding in found["findings"]]
    assert "DistributedDataParallel compares and sends all parameters" in titles
    assert "many small messages from one line" in titles
    assert "the command is ended" in done.stderr
    assert "trained" not in done.stderr
    pids = [int(file.read_text()) for file in trainer.parent.glob("pid-*")]
    assert pids
    wait_for(lambda: are_gone(*pids))  # the audit may have killed them, and does not wait for their end then


def test_a_short_command_runs_to_its_end_and_its_output_is_passed_on(home: Path, trainer: Path) -> None:
    done = audit("--to-the-end", "--", sys.executable, trainer, "short")
    assert done.stdout.partition("job ")[0].count("trained") == 1
    assert "1 of 1 ranks heard" in done.stdout
    assert "the command is ended" not in done.stderr


def test_a_command_that_fails_keeps_its_exit_code(home: Path, trainer: Path) -> None:
    done = audit("--", sys.executable, "-c", "print('out'); raise SystemExit(3)", code=3)
    assert done.stdout.startswith("out\n")
    assert "made no collectives" in done.stdout
    assert "cannot run no-such-command" in audit("--", "no-such-command", code=127).stderr


@pytest.mark.thorough
def test_ranks_that_fail_before_their_first_step_are_told_and_keep_their_exit_code(home: Path, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    # Torchrun ends the other rank when one has failed, and that one may still have to tell.
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script.write_text(f"{deaf}import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n1 / 0")
    done = audit("--", *TORCHRUN, script, code=1)
    assert "2 of 2 ranks heard" in done.stdout
    assert "the command is ended" not in done.stderr


@pytest.mark.thorough
def test_a_command_that_does_not_end_is_killed(home: Path, trainer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_cli, "GRACE_S", 0.5)
    before = signal.getsignal(signal.SIGTERM)
    done = call("--ranks", "2", "--", sys.executable, trainer, "deaf")
    assert done.exit_code == 0
    pid = int((trainer.parent / "pid-0").read_text())
    wait_for(lambda: are_gone(pid))
    assert signal.getsignal(signal.SIGTERM) is before
    assert "the command is ended" in done.stderr


@pytest.mark.thorough
def test_a_signal_is_passed_on_to_the_command(home: Path, trainer: Path) -> None:
    words = [*HEADWAY, "startup", "audit", "--to-the-end", "--", sys.executable, str(trainer)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as asked:
        pid = trainer.parent / "pid-0"
        wait_for(lambda: pid.exists() and pid.read_text())
        wait_for(lambda: catches(asked.pid, signal.SIGTERM))  # it starts the command before it listens
        asked.send_signal(signal.SIGTERM)
        assert asked.wait(120) == 128 + signal.SIGTERM
    wait_for(lambda: are_gone(int(pid.read_text())))
    assert len(jobs_in(home)) == 1
