"""The commands as a user types them, on real journals."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from headway.accounting.rules import Bucket
from headway.cli import main
from headway.events.journal import Follower
from headway.testing import Story

HEADWAY = [sys.executable, "-m", "headway"]


def headway(*words: str, width: int = 100, code: int = 0) -> str:
    done = CliRunner().invoke(main, words, env={"COLUMNS": str(width), "NO_COLOR": "1"})
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def failed_job(home: Path) -> Story:
    story = Story(home, "dlrm")
    for rank in (0, 1):
        told = story.rank(rank, of=2).span("process_group_init", 2).span("train_module_creation", 4 + rank)
        told.span("pt2_compilation", 9 - rank).steps(200, each=0.1, data=0.01)
        told.saved(100).crashed("RuntimeError: boom") if rank else told.killed()
    for rank in (0, 1):
        told = story.rank(rank, of=2, start=60).restored(100).steps(300, each=0.1, data=0.01, first=100)
        told.saved(400).span("publish", 3).finished()
    return story


def test_jobs_lists_what_there_is_last_active_first(home: Path) -> None:
    assert "No jobs" in headway("jobs")
    for name in ("old", "new"):
        Story(home, name).rank().steps(10, each=1.0).finished()
        time.sleep(0.02)
    assert [row["job"] for row in json.loads(headway("jobs", "--json"))] == ["new", "old"]
    assert "and 1 more" in headway("jobs", "--limit", "1")


def test_the_json_report_has_every_documented_field_and_sums(failed_job: Story) -> None:
    told = json.loads(headway("report", "dlrm", "--json"))
    assert set(told) >= {
        "job", "wall_s", "ett_percent", "idleness_percent", "failure_percent", "time_to_start_s", "time_to_recover_s",
        "failures", "attempts", "ranks", "ledger", "stages", "unattributed_s", "steps", "slowest_rank", "advice",
    }  # fmt: skip
    assert list(told["ledger"]) == [str(key) for key in Bucket]
    assert sum(told["ledger"].values()) == pytest.approx(told["wall_s"], abs=1e-9)
    assert told["ett_percent"] + told["idleness_percent"] + told["failure_percent"] == pytest.approx(100)
    assert told["failures"] == [{"attempt": 0, "rank": 1, "unseen_ranks": [], "category": None, "decision": ""}]
    assert told["steps"] == {"new": 400, "repeated": 100, "unsaved": 0}
    assert {rank["rank"] for rank in told["ranks"]} == {0, 1}
    for rank in told["ranks"]:
        assert sum(rank["ledger"].values()) == pytest.approx(rank["wall_s"])
    points = [advice["points"] for advice in told["advice"]]
    assert points == sorted(points, reverse=True)
    assert all(advice["fix"] for advice in told["advice"])


@pytest.mark.parametrize("width", [80, 160])
def test_the_terminal_report_fits_one_screen(failed_job: Story, width: int) -> None:
    text = headway("report", width=width)
    lines = text.splitlines()
    assert len(lines) <= 44
    assert max(map(len, lines)) <= width
    for word in ("ETT", "idleness", "failure", "time to start", "time to recover", "start", "recover", "trainer init",
                 "attempt 0 failed on rank 1: RuntimeError: boom", "points"):  # fmt: skip
        assert word in text, word


def test_one_attempt_and_one_rank_can_be_looked_at_alone(failed_job: Story) -> None:
    whole = json.loads(headway("report", "--json"))
    attempts = [json.loads(headway("report", "--json", "--attempt", str(n))) for n in (0, 1)]
    assert sum(a["wall_s"] for a in attempts) == pytest.approx(whole["wall_s"])
    rank = json.loads(headway("report", "--json", "--rank", "1"))
    assert rank["ledger"]["start.trainer_init"] == pytest.approx(7.01)
    assert "has no attempt 7: it has 0 to 1" in headway("report", "--attempt", "7", code=1)
    assert "has no rank 9" in headway("report", "--rank", "9", code=1)


def test_html_and_perfetto_are_written_to_files(failed_job: Story, tmp_path: Path) -> None:
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    headway("report", "--html", str(page), "--perfetto", str(trace))
    assert "<html" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert "cannot be written" in headway("report", "--html", str(tmp_path / "no" / "x.html"), code=1)


def test_compare_shows_the_largest_change(failed_job: Story, home: Path) -> None:
    Story(home, "calm").rank().steps(400, each=0.1).saved(400).finished()
    text = headway("compare", "dlrm", "calm")
    assert re.search(r"ETT .*points", text)
    told = json.loads(headway("compare", "dlrm", "calm", "--json"))
    assert told["ett_points"] == pytest.approx(told["b"]["ett_percent"] - told["a"]["ett_percent"])


def test_unknown_jobs_and_verbs_name_the_nearest(failed_job: Story) -> None:
    done = subprocess.run([*HEADWAY, "report", "dlmr"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert "did you mean dlrm?" in done.stderr
    assert "did you mean report?" in headway("reprot", code=2)
    assert "No such option" in headway("report", "--jsn", code=2)


def test_a_misspelt_setting_stops_with_the_nearest_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOEM", "/x")
    assert "did you mean HEADWAY_HOME?" in headway("jobs", code=1)


def test_no_jobs_says_what_to_do(home: Path) -> None:
    assert "headway.current()" in headway("report", code=1)


def test_hostile_names_cannot_write_to_the_terminal(home: Path) -> None:
    story = Story(home, "evil\x1b]0;pwned\x07 [red]<script>")
    told = story.rank(node="\x1b[2J[bold]node").steps(10, each=1.0)
    told.crashed("ValueError: \x1b[31m[link=file:///etc/passwd]click[/link]\nsecond line")
    for words in (["report"], ["jobs"], ["compare", story.paths.job, story.paths.job]):
        text = headway(*words)
        assert "\x1b" not in text
        assert "\x07" not in text
    assert "[link=file:///etc/passwd]" in headway("report", width=160)


def test_watch_follows_a_live_job_and_stops_when_it_ends(home: Path) -> None:
    script = home / "train.py"
    script.write_text(
        "import headway, sys, time\n"
        "run = headway.current()\n"
        "for step, _ in run.steps(iter(int, 1)):\n"
        "    time.sleep(0.01)\n"
        "    if sys.stdin in __import__('select').select([sys.stdin], [], [], 0)[0]:\n"
        "        break\n"
        "run.checkpoint_saved()\nrun.finish()\n"
    )
    job = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE)
    wait_for(lambda: any(Follower(path).poll().records for path in home.rglob("*.hwj")))
    controller, terminal = pty.openpty()
    environ = os.environ | {"COLUMNS": "100", "LINES": "50", "TERM": "xterm"}
    watch = subprocess.Popen([*HEADWAY, "watch", "--interval", "0.2"], stdout=terminal, stderr=terminal, env=environ)
    os.close(terminal)
    try:
        seen = read_until(controller, b"running")
        assert b"ETT" in seen or read_until(controller, b"ETT")  # the rest of a screen may come later
        job.communicate(b"stop\n", timeout=120)
        read_until(controller, b"ended")
        assert watch.wait(timeout=120) == 0
    finally:
        for process in (job, watch):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
        os.close(controller)


def wait_for(condition, seconds: float = 120.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_until(fd: int, text: bytes, seconds: float = 120.0) -> bytes:
    seen, deadline = b"", time.monotonic() + seconds
    while text not in seen:
        ready, _, _ = select.select([fd], [], [], max(deadline - time.monotonic(), 0))
        assert ready, seen[-500:]
        seen += os.read(fd, 65536)
    return seen
