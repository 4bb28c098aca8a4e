"""A script that replaces itself by `exec` keeps its pid and its start, and is two processes all the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from collecting import eventually, has_ended, read

from headway.cli.source import open_job
from headway.events.job import JobReader
from headway.events.vocabulary import Process
from headway.observe.summary import summary
from headway.paths import JobPaths

TWICE = """
import os, sys, time, headway
from pathlib import Path
from headway.events.clock import start_ticks
from headway.paths import JobPaths

def pause():  # until the collector has told that this process lives, if so asked
    nodes = JobPaths(Path(os.environ["HEADWAY_HOME"]), "twice").nodes
    name = f"-{os.getpid()}-{start_ticks(os.getpid())}{'-2' * again}".encode()
    while os.environ.get("PAUSE") and not any(name in told.read_bytes() for told in nodes.glob("*.hwp")):
        time.sleep(0.05)

again = len(sys.argv) > 1
run = headway.current()
for step, batch in run.steps(range(20), start=10 * again):
    time.sleep(0.01)
    if step == 9:
        run.checkpoint_saved()
if not again:
    pause()
    os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
run.checkpoint_saved()
pause()
"""


def run_twice(home: Path, **environ: str) -> None:
    (home / "train.py").write_text(TWICE)
    environ = {"HEADWAY_JOB": "twice", **environ}
    done = subprocess.run(
        [sys.executable, str(home / "train.py")], env=os.environ | environ, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def check_report() -> None:
    report = summary(open_job("twice").ledger())
    assert [attempt["outcome"] for attempt in report["attempts"]] == ["ended", "ended"]
    assert [attempt["next_step"] for attempt in report["attempts"]] == [20, 30]
    assert report["steps"] == {"new": 30, "repeated": 10, "unsaved": 0}
    assert not [note for note in report["notes"] if "still ran" in note]


def test_a_script_that_executes_itself_again_is_two_processes(home: Path) -> None:
    run_twice(home)
    found = dict(JobReader(JobPaths(home, "twice")).poll())
    first, second = sorted(found)
    assert second == f"{first}-2"
    begun, again = found[first].records[0], found[second].records[0]
    assert isinstance(begun, Process)
    assert isinstance(again, Process)
    assert begun.pid == again.pid
    assert begun.started_ns < again.started_ns
    check_report()


@pytest.mark.parametrize("pause", ["", "1"], ids=["in one batch", "in several"])
def test_its_collector_sees_the_first_end_when_the_second_begins(home: Path, spool: JobPaths, pause: str) -> None:
    run_twice(home, HEADWAY_SPOOL=str(home / "spool"), PAUSE=pause)
    job = JobPaths(home, "twice")
    eventually(lambda: has_ended(job), "a delivery")
    check_report()
    reading = read(job)
    first, second = sorted(reading.records)
    gone = [record.t_ns for record in reading.gone(first)]
    assert gone in ([], [reading.told(second)[0].t_ns])
    assert gone or not pause
