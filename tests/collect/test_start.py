"""The collector as a process: one a node, started by whoever comes first, gone when nobody is left."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from collecting import Child, Reading, collectors_of, eventually, node_files, read, wait_for_end

from headway.collect import ensure_collector
from headway.collect.start import take_lock
from headway.events.journal import Follower
from headway.events.vocabulary import Mark
from headway.paths import JobPaths

Begin = Callable[..., Child]
RunCollector = Callable[..., "subprocess.Popen[bytes]"]


def has_mark(job: JobPaths, name: str, mark: str) -> bool:
    return any(isinstance(record, Mark) and record.name == mark for record in read(job).told(name))


def is_locked(spool: JobPaths) -> bool:
    lock = take_lock(spool)
    if lock is not None:
        os.close(lock)
    return lock is None


def test_a_collector_leaves_when_its_processes_have_left(
    spool: JobPaths, job: JobPaths, begin: Begin, run_collector: RunCollector
) -> None:
    child = begin().tell("steps 10")
    collector = run_collector("--linger=0.5")
    eventually(lambda: child.name in read(job).reader.alive(), "a delivery")
    child.finish()
    assert collector.wait() == 0
    reading = read(job)
    assert reading.ledger().state == "ended"
    assert len(reading.gone(child.name)) == 1
    assert list(spool.journals.iterdir()) == []


def test_a_collector_told_to_stop_delivers_first(
    spool: JobPaths, job: JobPaths, begin: Begin, run_collector: RunCollector
) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        child = begin()
        collector = run_collector()
        eventually(lambda child=child: child.name in read(job).reader.alive(), "a delivery")
        child.tell("mark last")
        collector.send_signal(number)
        assert collector.wait() == 0
        assert has_mark(job, child.name, "last")
        assert spool.journal(child.name).exists()


def test_a_killed_collector_and_the_next_one_lose_nothing(
    spool: JobPaths, job: JobPaths, begin: Begin, run_collector: RunCollector
) -> None:
    child, reading = begin(), Reading(job)
    for turn in range(3):
        child.tell("marks 50").tell("steps 20").tell(f"mark turn {turn}")
        collector = run_collector()
        eventually(lambda turn=turn: has_mark(job, child.name, f"turn {turn}"), "a delivery")
        collector.kill()
        collector.wait()
        reading.poll()
    child.tell("marks 50").tell("finish")
    written = Follower(spool.journal(child.name)).poll().records
    child.popen.communicate()
    assert run_collector("--linger=0.1").wait() == 0
    assert reading.poll().told(child.name) == read(job).told(child.name) == written
    assert len(node_files(job)) == 4
    assert list(spool.journals.iterdir()) == []


def test_of_two_collectors_one_works_and_the_other_leaves_at_once(
    spool: JobPaths, job: JobPaths, begin: Begin, run_collector: RunCollector
) -> None:
    child = begin().tell("mark one")
    first = run_collector()
    eventually(lambda: has_mark(job, child.name, "one"), "a delivery")
    assert run_collector().wait() == 0
    assert first.poll() is None
    assert len(node_files(job)) == 1


def test_processes_that_start_together_start_one_collector(spool: JobPaths, job: JobPaths, begin: Begin) -> None:
    home = job.folder.parent.parent
    children = [begin(rank, 4) for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda child: child.tell(f"ensure {home}"), children))
    eventually(lambda: read(job).reader.alive() == {child.name for child in children}, "a delivery of all four")
    assert len(collectors_of(spool.folder.parent.parent)) == 1
    assert len(node_files(job)) == 1


def test_a_started_collector_is_nobodys_child_and_outlives_who_started_it(
    spool: JobPaths, job: JobPaths, begin: Begin
) -> None:
    child, other = begin(), begin()
    child.tell(f"ensure {job.folder.parent.parent}")
    eventually(lambda: child.name in read(job).reader.alive(), "a delivery")
    child.kill()
    eventually(lambda: read(job).gone(child.name), "the news of its end")
    other.tell("mark later")
    eventually(lambda: has_mark(job, other.name, "later"), "a delivery")
    (pid,) = collectors_of(spool.folder.parent.parent)
    os.kill(pid, signal.SIGTERM)
    wait_for_end(pid)
    assert not is_locked(spool)
    assert (spool.folder / "collector.log").read_text() == ""


def test_ensuring_starts_nothing_where_a_collector_is_at_work(
    tmp_path: Path, spool: JobPaths, job: JobPaths, begin: Begin, run_collector: RunCollector
) -> None:
    child = begin()
    run_collector()
    # Who looks at the lock holds it for a moment. A collector that starts then would leave.
    eventually(lambda: child.name in read(job).reader.alive(), "a delivery")
    assert ensure_collector(tmp_path / "spool", tmp_path / "home", "job") is None
    assert not (spool.folder / "collector.log").exists()


def test_a_module_of_the_job_that_shadows_the_standard_library_does_not_stop_the_collector(
    tmp_path: Path, job: JobPaths, begin: Begin
) -> None:
    child = begin().tell("mark one")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in ("argparse", "select", "signal", "sitecustomize"):
        (scripts / f"{name}.py").write_text("raise SystemExit('not the one you wanted')")
    code = (
        "from pathlib import Path; from headway.collect import ensure_collector\n"
        f"assert ensure_collector(Path({str(tmp_path / 'spool')!r}), Path({str(tmp_path / 'home')!r}), 'job') is None"
    )
    subprocess.run([sys.executable, "-P", "-c", code], cwd=scripts, check=True)
    eventually(lambda: has_mark(job, child.name, "one"), "a delivery")


def test_a_collector_that_cannot_be_started_is_an_answer_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "NotADirectoryError" in (ensure_collector(tmp_path / "file", tmp_path / "home", "job") or "")
    assert "needs a name" in (ensure_collector(tmp_path / "spool", tmp_path / "home", "") or "")


LEAVES_SLOWLY = """
import sys, time
from pathlib import Path
from headway.collect import Collector
from headway.collect.__main__ import main

tidy = Collector.tidy

def tidy_slowly(self):
    tidy(self)
    Path(sys.argv[1], "leaving").touch()
    while not Path(sys.argv[1], "go").exists():
        time.sleep(0.01)

Collector.tidy = tidy_slowly
sys.exit(main(sys.argv[2:]))
"""


def test_a_process_that_comes_while_the_collector_leaves_is_collected(
    tmp_path: Path, spool: JobPaths, job: JobPaths, begin: Begin
) -> None:
    options = [f"--spool={tmp_path / 'spool'}", f"--home={tmp_path / 'home'}", "--job=job", "--linger=0"]
    collector = subprocess.Popen([sys.executable, "-c", LEAVES_SLOWLY, str(tmp_path), *options])
    try:
        eventually((tmp_path / "leaving").exists, "the collector's leave")
        child = begin().tell(f"ensure {tmp_path / 'home'}").tell("mark here")
        assert not (spool.folder / "collector.log").exists(), "it relies on the one that holds the lock"
        (tmp_path / "go").touch()
        eventually(lambda: has_mark(job, child.name, "here"), "a delivery")
        child.kill()
        assert collector.wait() == 0
    finally:
        collector.kill()
        collector.wait()
