"""A process's own last delivery: its collector may be killed with it, by the end of their container."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from collecting import Child, Reading, eventually, has_ended, marks, node_files, read

from headway.collect import Collector, deliver_once
from headway.collect.start import take_lock
from headway.events.journal import Follower
from headway.events.vocabulary import ProcessEnd
from headway.paths import JobPaths

Begin = Callable[..., Child]
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
SCRIPT = """
import os, sys, headway
run = headway.current()
for step, batch in run.steps(range(20)):
    pass
run.mark("last")
if os.fork() == 0:
    sys.exit()  # a child has nothing to deliver
os.wait()
"""


@pytest.fixture
def home_folder(job: JobPaths) -> Path:
    return job.folder.parent.parent


def test_a_process_that_leaves_can_bring_its_journal_itself(
    spool: JobPaths, job: JobPaths, begin: Begin, home_folder: Path
) -> None:
    child = begin().tell("steps 300").tell("mark last").tell("finish")
    written = Follower(spool.journal(child.name)).poll().records
    assert deliver_once(spool.journal(child.name), home_folder, "job", timeout_s=120) is None
    reading = read(job)
    assert reading.told(child.name) == written
    assert reading.reader.alive() == set()
    assert reading.ledger().state == "ended"
    assert spool.journal(child.name).exists()


@pytest.mark.parametrize("first", ["the process", "the collector"])
def test_what_the_collector_brings_as_well_counts_once(
    spool: JobPaths, job: JobPaths, begin: Begin, home_folder: Path, first: str
) -> None:
    child, collector, reading = begin().tell("marks 5"), Collector(spool, job), Reading(job)
    collector.collect()
    reading.poll()
    child.tell("steps 300").tell("mark last").tell("finish")
    written = Follower(spool.journal(child.name)).poll().records
    if first == "the collector":
        collector.collect()
        reading.poll()
    assert deliver_once(spool.journal(child.name), home_folder, "job", timeout_s=120) is None
    reading.poll()
    collector.collect()
    assert reading.poll().told(child.name) == read(job).told(child.name) == written
    assert reading.reader.alive() == read(job).reader.alive() == set(), "it has ended, and is only yet to leave"
    child.popen.communicate()
    collector.collect()
    assert len(reading.poll().gone(child.name)) == len(read(job).gone(child.name)) == 1


def test_a_job_folder_that_refuses_is_an_answer_not_an_error(spool: JobPaths, begin: Begin, tmp_path: Path) -> None:
    child = begin().tell("finish")
    (tmp_path / "file").touch()
    assert "NotADirectory" in (deliver_once(spool.journal(child.name), tmp_path / "file", "job") or "")


def test_a_job_folder_that_does_not_answer_is_not_waited_for(
    spool: JobPaths, begin: Begin, home_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, answers = begin().tell("finish"), threading.Event()
    monkeypatch.setattr(os, "fsync", lambda fd: answers.wait())
    problem = deliver_once(spool.journal(child.name), home_folder, "job", timeout_s=0.1)
    answers.set()
    assert problem == f"{home_folder} did not answer in 0.1 s"


def test_where_no_thread_can_start_at_exit_it_delivers_all_the_same(
    spool: JobPaths, job: JobPaths, begin: Begin, home_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    child = begin().tell("mark one").tell("finish")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert deliver_once(spool.journal(child.name), home_folder, "job") is None
    assert marks(read(job), child.name) == ["one"]


def run_script(tmp_path: Path, *around: str) -> None:
    """Runs the script with a spool, in a job named `job`."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "TORCHELASTIC_"))}
    environ |= {"HEADWAY_HOME": str(tmp_path / "home"), "HEADWAY_SPOOL": str(tmp_path / "spool"), "HEADWAY_JOB": "job"}
    done = subprocess.run([*around, sys.executable, str(tmp_path / "train.py")], env=environ, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.needs("unshare")
@pytest.mark.parametrize("init", [[], ["sh", "-c", '"$@"; exit', "sh"]], ids=["the rank", "a shell"])
def test_when_a_container_ends_with_its_rank_nothing_is_missing(
    tmp_path: Path, spool: JobPaths, job: JobPaths, init: list[str]
) -> None:
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("needs a process namespace: run as root")
    lock = take_lock(spool)
    assert lock is not None
    run_script(tmp_path, *CONTAINER, *init)
    os.close(lock)
    reading = read(job)
    (name,) = reading.records
    assert marks(reading, name) == ["last"]
    assert isinstance(reading.told(name)[-1], ProcessEnd)
    assert reading.ledger().state == "ended"
    assert sum(reading.ledger().steps.values()) == 20
    assert len(node_files(job)) == 1, "its child brought nothing"


def test_where_the_collector_stays_the_process_leaves_it_all_to_it(
    tmp_path: Path, spool: JobPaths, job: JobPaths
) -> None:
    run_script(tmp_path)
    eventually(lambda: has_ended(job), "a delivery")
    assert len(node_files(job)) == 1
