"""The collector, batch by batch, on real journals of real processes."""

import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from collecting import Child, Reading, account, eventually, marks, node_files, read

from headway.collect import Collector
from headway.events.clock import Clock
from headway.events.journal import FRAME_LIMIT_BYTES, Follower, Writer
from headway.events.process import describe, process_name
from headway.events.recorder import Recorder
from headway.events.vocabulary import Process, ProcessEnd
from headway.paths import JobPaths
from headway.testing import Story

Begin = Callable[..., Child]


def a_story(home: Path) -> Story:
    """Two ranks; one is killed in a step, both start again and finish."""
    story = Story(home, "job")
    for rank in (0, 1):
        told = story.rank(rank, 2, start=0).span("train_module_creation", 5).steps(100, each=1.0).saved(50)
        told.dies_in_step(0.5)
        told.killed()
    for rank in (0, 1):
        story.rank(rank, 2, start=120).restored(50).steps(80, each=1.0, data=0.1, first=50).finished()
    return story


# --- batches -------------------------------------------------------------------------------------------------------


def test_a_collected_job_has_the_ledger_of_its_journals(tmp_path: Path) -> None:
    story = a_story(tmp_path / "spool")
    job = JobPaths(tmp_path / "home", "job")
    assert Collector(story.paths, job).collect() > 0
    assert account(read(job).ledger()) == account(story.ledger())


def test_a_batch_brings_only_what_is_new(spool: JobPaths, job: JobPaths, begin: Begin) -> None:
    child, collector, reading = begin(), Collector(spool, job), Reading(job)
    child.tell("mark one")
    collector.collect()
    assert marks(reading.poll(), child.name) == ["one"]
    child.tell("mark two").tell("marks 300")
    grown = collector.collect()
    quiet = collector.collect()
    assert marks(reading.poll(), child.name)[:2] == ["one", "two"]
    assert quiet == 0 < grown
    assert reading.told(child.name) == read(job).told(child.name) == Follower(spool.journal(child.name)).poll().records
    assert len(node_files(job)) == 1


def test_a_dead_process_is_told_of_once(spool: JobPaths, job: JobPaths, begin: Begin) -> None:
    child, collector = begin().tell("mark one"), Collector(spool, job)
    collector.collect()
    assert read(job).reader.alive() == {child.name}
    child.kill()
    assert collector.collect() > 0
    reading = read(job)
    assert reading.reader.alive() == set()
    assert len(reading.gone(child.name)) == 1
    assert collector.collect() == 0


def test_a_journal_that_has_not_begun_is_waited_for(spool: JobPaths, job: JobPaths) -> None:
    path = spool.journal("new")
    path.touch()
    collector = Collector(spool, job)
    assert collector.collect() == 0
    collector.tidy()
    assert path.exists()
    path.unlink()
    process = describe({}, "job", Clock())
    Recorder(Writer(path)).record(process)
    collector.collect()
    assert read(job).told("new") == [process]


def journal_of(spool: JobPaths) -> Recorder:
    """A journal that this very process writes."""
    process = describe({}, "job", Clock())
    recorder = Recorder(Writer(spool.journal(process_name(process))))
    recorder.record(process)
    return recorder


def test_more_than_a_chunk_holds_is_cut_between_records(spool: JobPaths, job: JobPaths) -> None:
    recorder = journal_of(spool)
    for number in range(40):
        recorder.mark(f"large {number}", text="x" * 100_000)
    Collector(spool, job).collect()
    reading = read(job)
    assert marks(reading, recorder.writer.path.stem) == [f"large {number}" for number in range(40)]
    assert reading.problems == []


@pytest.mark.parametrize("size", [FRAME_LIMIT_BYTES - 200, FRAME_LIMIT_BYTES + 200, 3 * FRAME_LIMIT_BYTES])
def test_a_record_larger_than_any_chunk_is_left_out_and_hides_none_behind_it(
    spool: JobPaths, job: JobPaths, size: int
) -> None:
    recorder, collector = journal_of(spool), Collector(spool, job)
    recorder.mark("before")
    recorder.mark("huge", text="x" * size)
    for number in range(15):
        recorder.mark(f"after {number}", text="x" * 100_000)
    collector.collect()
    recorder.mark("later")
    collector.collect()
    reading, name = read(job), recorder.writer.path.stem
    assert marks(reading, name) == ["before", *(f"after {number}" for number in range(15)), "later"]
    assert reading.problems != []


# --- a job folder that refuses -------------------------------------------------------------------------------------


def test_a_job_folder_that_cannot_be_written_for_a_while_loses_nothing(
    spool: JobPaths, job: JobPaths, begin: Begin, tmp_path: Path
) -> None:
    child, collector = begin().tell("mark one"), Collector(spool, job)
    (tmp_path / "home").write_text("a file where the folder should be")
    assert collector.collect() == 0
    assert "home" in collector.problem
    child.tell("mark two")
    assert collector.collect() == 0
    child.kill()
    assert collector.collect() == 0
    collector.tidy()
    assert spool.journal(child.name).exists()
    (tmp_path / "home").unlink()
    assert collector.collect() > 0
    assert collector.problem == ""
    reading = read(job)
    assert marks(reading, child.name) == ["one", "two"]
    assert len(reading.gone(child.name)) == 1


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """A write beyond `size` bytes is cut short, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_cut_short_leaves_all_chunks_readable_for_old_and_new_readers(
    spool: JobPaths, job: JobPaths, begin: Begin
) -> None:
    children, collector, reading = [begin(), begin(), begin()], Collector(spool, job), Reading(job)
    collector.collect()
    reading.poll()
    (file,) = node_files(job)
    # Each time the write ends somewhere else: in a head, in a chunk, after one or two whole chunks.
    for room in (3, 100, 150, 1000, 2500, 3700, 5100):
        for child in children:
            child.tell("marks 10")
        with files_at_most(file.stat().st_size + room):
            assert collector.collect() == 0
        reading.poll()
        for child in children:
            child.tell("marks 3")
        assert collector.collect() > 0
    for child in children:
        written = Follower(spool.journal(child.name)).poll().records
        assert reading.poll().told(child.name) == written
        assert read(job).told(child.name) == written
    assert reading.problems == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs to mount a tmpfs ({mounted.stderr.strip()}): run as root, where mounting is allowed")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.needs("mount")
def test_a_full_disk_loses_nothing_once_there_is_space(spool: JobPaths, begin: Begin, small_disk: Path) -> None:
    job = JobPaths(small_disk, "job")
    child, collector, reading = begin(), Collector(spool, job), Reading(job)
    child.tell("mark one")
    collector.collect()
    free = shutil.disk_usage(small_disk).free
    (small_disk / "filler").write_bytes(bytes(free - 2 * 4096))
    child.tell("marks 200")
    assert collector.collect() == 0
    assert "No space" in collector.problem
    reading.poll()
    child.tell("mark two")
    assert collector.collect() == 0
    (small_disk / "filler").unlink()
    assert collector.collect() > 0
    written = Follower(spool.journal(child.name)).poll().records
    assert reading.poll().told(child.name) == read(job).told(child.name) == written
    assert reading.problems == []


def test_a_removed_job_folder_gets_everything_again(spool: JobPaths, job: JobPaths, begin: Begin) -> None:
    dead, alive, collector = begin().tell("mark one"), begin().tell("mark two"), Collector(spool, job)
    collector.collect()
    dead.kill()
    collector.collect()
    before = read(job)
    shutil.rmtree(job.folder)
    collector.tidy()
    assert spool.journal(dead.name).exists(), "what did not stay in the job's folder stays in the spool"
    collector.collect()
    after = read(job)
    assert marks(after, dead.name) == ["one"]
    assert marks(after, alive.name) == ["two"]
    assert after.gone(dead.name) == before.gone(dead.name)


# --- starting again ------------------------------------------------------------------------------------------------


def test_a_collector_that_starts_again_changes_no_ledger(tmp_path: Path) -> None:
    story = a_story(tmp_path / "spool")
    job = JobPaths(tmp_path / "home", "job")
    reading = Reading(job)
    Collector(story.paths, job).collect()
    once = account(reading.poll().ledger())
    Collector(story.paths, job).collect()
    assert len(node_files(job)) == 2
    assert account(reading.poll().ledger()) == account(read(job).ledger()) == once


# --- processes that end --------------------------------------------------------------------------------------------


def test_the_end_of_a_process_is_told_with_its_instant_and_does_not_wait_for_the_next_batch(
    spool: JobPaths, job: JobPaths, begin: Begin
) -> None:
    first, second = begin(), begin()
    collector, stop = Collector(spool, job), threading.Event()
    collector.collect()
    thread = threading.Thread(target=collector.run, args=(stop,), kwargs={"batch_s": 3600.0, "linger_s": 3600.0})
    thread.start()
    try:
        before = time.monotonic_ns()
        first.kill()
        eventually(lambda: read(job).gone(first.name), "the news of its end")
        between = time.monotonic_ns()
        second.kill()
        eventually(lambda: read(job).gone(second.name), "the news of its end")
        after = time.monotonic_ns()
    finally:
        stop.set()
        thread.join()
    reading = read(job)
    (one,), (two,) = reading.gone(first.name), reading.gone(second.name)
    assert before <= one.t_ns < between <= two.t_ns < after


def test_an_end_is_told_with_the_instant_it_was_seen_at_however_late_the_batch(
    spool: JobPaths, job: JobPaths, begin: Begin
) -> None:
    child, collector = begin(), Collector(spool, job)
    collector.look()
    child.kill()
    assert collector.look(120.0)
    seen = time.monotonic_ns()
    collector.collect()
    (gone,) = read(job).gone(child.name)
    assert gone.t_ns < seen


def test_an_end_that_nobody_saw_has_no_instant(spool: JobPaths, job: JobPaths, begin: Begin) -> None:
    child = begin().tell("mark one")
    child.popen.kill()  # and not yet waited for: a zombie still has its pid
    os.waitid(os.P_PID, child.popen.pid, os.WEXITED | os.WNOWAIT)  # it is one now
    collector = Collector(spool, job)
    collector.collect()
    reading = read(job)
    assert marks(reading, child.name) == ["one"]
    assert reading.gone(child.name) == []
    assert reading.reader.alive() == set()


def test_a_process_that_got_the_pid_later_is_not_taken_for_the_first(
    spool: JobPaths, job: JobPaths, begin: Begin
) -> None:
    other, clock = begin(), Clock()
    started = clock.process_started_ns(other.popen.pid)
    assert started is not None
    forged = Process(
        t_ns=started - 30_000_000_000,
        wall_ns=clock.wall_ns(),
        boot=clock.boot(),
        node="here",
        pid=other.popen.pid,
        job="job",
        started_ns=started - 60_000_000_000,
    )
    writer = Writer(spool.journal("earlier"))
    Recorder(writer).record(forged)
    writer.close()
    Collector(spool, job).collect()
    assert read(job).reader.alive() == {other.name}


def test_a_process_that_lost_its_lock_is_followed_all_the_same(spool: JobPaths, job: JobPaths, begin: Begin) -> None:
    child, collector = begin().tell("lose-lock"), Collector(spool, job)
    collector.collect()
    assert read(job).reader.alive() == {child.name}
    child.tell("mark later")
    collector.collect()
    assert marks(read(job), child.name) == ["later"]


def test_a_process_that_cannot_be_watched_is_known_by_its_lock(spool: JobPaths, job: JobPaths, begin: Begin) -> None:
    """As from a container with process ids of its own: here the collector believes in another boot."""

    class OtherBoot(Clock):
        def boot(self) -> str:
            return "another"

    child, collector = begin().tell("mark one"), Collector(spool, job, OtherBoot())
    collector.collect()
    assert read(job).reader.alive() == {child.name}
    child.kill()
    collector.collect()
    reading = read(job)
    assert reading.reader.alive() == set()
    assert len(reading.gone(child.name)) == 1


def test_a_process_that_ended_well_is_dead_before_it_has_left(spool: JobPaths, job: JobPaths, begin: Begin) -> None:
    child, collector = begin().tell("steps 3"), Collector(spool, job)
    collector.collect()
    child.tell("finish")
    collector.collect()
    collector.collect()
    assert collector.collect() == 0
    assert read(job).reader.alive() == set()
    assert collector.anyone_lives, "it may have things to do yet, and its end is still to be seen"
    child.popen.communicate()
    collector.collect()
    reading = read(job)
    assert isinstance(reading.told(child.name)[-1], ProcessEnd)
    assert len(reading.gone(child.name)) == 1
    assert reading.ledger().state == "ended"


def test_a_process_that_replaced_itself_lives_in_its_newest_journal_only(
    spool: JobPaths, job: JobPaths, begin: Begin
) -> None:
    child, collector = begin().tell("mark one"), Collector(spool, job)
    first = child.name
    collector.collect()
    child.replace(2)
    child.tell("mark two")
    for late in (collector, Collector(spool, job)):
        late.collect()
        reading = read(job)
        assert reading.reader.alive() == {child.name}
        assert (marks(reading, first), marks(reading, child.name)) == (["one"], ["two"])
        assert {gone.t_ns for gone in reading.gone(first)} == {reading.told(child.name)[0].t_ns}
        late.collect()
        late.tidy()
        assert spool.journal(first).exists(), "it would take the name again"
    child.kill()
    collector.collect()
    collector.tidy()
    assert list(spool.journals.iterdir()) == []


# --- tidying up ----------------------------------------------------------------------------------------------------


def test_the_spool_loses_a_journal_only_when_it_is_complete_and_delivered(
    spool: JobPaths, job: JobPaths, begin: Begin, tmp_path: Path
) -> None:
    dead, alive, collector = begin().tell("mark one"), begin().tell("mark two"), Collector(spool, job)
    collector.look()
    dead.kill()
    collector.tidy()
    assert spool.journal(dead.name).exists(), "not delivered"
    collector.collect()
    collector.tidy()
    assert not spool.journal(dead.name).exists()
    assert spool.journal(alive.name).exists(), "alive"
    alive.tell("mark three")
    collector.collect()
    reading = read(job)
    assert marks(reading, dead.name) == ["one"]
    assert marks(reading, alive.name) == ["two", "three"]


def test_the_spool_keeps_a_journal_whose_last_batch_did_not_arrive(
    spool: JobPaths, job: JobPaths, begin: Begin
) -> None:
    child, collector = begin(), Collector(spool, job)
    collector.collect()
    child.tell("mark last")
    child.kill()
    (file,) = node_files(job)
    with files_at_most(file.stat().st_size + 20):
        assert collector.collect() == 0
    collector.tidy()
    assert spool.journal(child.name).exists()
    collector.collect()
    collector.tidy()
    assert not spool.journal(child.name).exists()
    assert marks(read(job), child.name) == ["last"]


def test_a_damaged_journal_stays_in_the_spool(spool: JobPaths, job: JobPaths, begin: Begin) -> None:
    child, collector = begin().tell("mark one").tell("mark two"), Collector(spool, job)
    collector.look()
    child.kill()
    path = spool.journal(child.name)
    path.write_bytes(path.read_bytes().replace(b'"one"', b'"0ne"'))
    collector.collect()
    collector.collect()
    collector.tidy()
    assert path.exists()
    reading = read(job)
    assert marks(reading, child.name) == ["two"]
    assert reading.problems[0].startswith(f"{child.name} has a damaged record")
