"""Who lives and where each loop stands: told by a small file that is written over, not by one that grows."""

import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from collecting import Child, Reading, eventually, marks, node_files, pulse_files, read

from headway.collect import Collector
from headway.events.clock import Clock
from headway.events.job import LOST_AFTER_S, JobReader
from headway.events.journal import Cell, Follower
from headway.events.node import encode_pulse, read_pulse, sign_of_life
from headway.paths import JobPaths

Begin = Callable[..., Child]


class SetBack(Clock):
    """A clock whose wall time is behind."""

    behind_ns = 0

    def wall_ns(self) -> int:  # type: ignore[override]
        return time.time_ns() - self.behind_ns


def cell_of(spool: JobPaths, child: Child) -> Cell | None:
    """Where the process's loop stands at this moment."""
    return Follower(spool.journal(child.name)).poll().cell


def test_without_news_nothing_grows_and_readers_follow_each_loop(spool: JobPaths, job: JobPaths, begin: Begin) -> None:
    child, collector, reading = begin().tell("cell 1"), Collector(spool, job), Reading(job)
    collector.collect()
    reading.poll()
    (pulse,) = pulse_files(job)
    sizes = [(file.stat().st_size, pulse.stat().st_size) for file in node_files(job)]
    for step in range(2, 7):
        child.tell(f"cell {step}")
        assert collector.collect() == 0
        (told,) = reading.reader.poll()
        assert told[0] == child.name
        assert told[1].records == []
        assert told[1].cell == cell_of(spool, child)
    assert [(file.stat().st_size, pulse.stat().st_size) for file in node_files(job)] == sizes
    assert read(job).cell(child.name) == cell_of(spool, child)


def test_a_pulse_that_says_nothing_new_but_the_time_keeps_its_processes_alive(
    spool: JobPaths, job: JobPaths, begin: Begin
) -> None:
    child, collector, reading = begin().tell("cell 1"), Collector(spool, job), Reading(job)
    collector.collect()
    before = reading.poll().reader._nodes.living[child.name]
    collector.collect()
    assert list(reading.reader.poll()) == []
    assert reading.reader._nodes.living[child.name] > before


def test_the_pulse_is_gone_when_nobody_lives(spool: JobPaths, job: JobPaths, begin: Begin) -> None:
    first, second, collector, reading = begin(), begin().tell("steps 10"), Collector(spool, job), Reading(job)
    collector.collect()
    assert reading.poll().reader.alive() == {first.name, second.name}
    first.kill()
    collector.collect()
    assert reading.poll().reader.alive() == {second.name}
    second.finish()
    collector.collect()
    assert reading.poll().reader.alive() == read(job).reader.alive() == set()
    assert pulse_files(job) == []
    third = begin()
    collector.collect()
    assert reading.poll().reader.alive() == {third.name}


def test_the_end_of_a_process_brings_its_last_steps(spool: JobPaths, job: JobPaths, begin: Begin) -> None:
    child, collector = begin().tell("cell 1"), Collector(spool, job)
    collector.collect()
    child.tell("cell 2")
    last = cell_of(spool, child)
    child.kill()
    assert collector.collect() > 0
    assert pulse_files(job) == []
    assert read(job).cell(child.name) == last


def test_steps_after_the_end_was_told_are_told_too(spool: JobPaths, job: JobPaths, begin: Begin) -> None:
    child, collector = begin().tell("cell 1").tell("finish"), Collector(spool, job)
    collector.collect()
    child.tell("cell 2")
    collector.collect()
    assert collector.collect() == 0
    assert pulse_files(job) == []
    assert read(job).cell(child.name) == cell_of(spool, child)


def test_a_collector_told_to_stop_leaves_word_of_who_lived(
    spool: JobPaths, job: JobPaths, begin: Begin, run_collector: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    child, collector = begin().tell("cell 1"), run_collector()
    eventually(lambda: child.name in read(job).reader.alive(), "a delivery")
    child.tell("cell 2")
    collector.send_signal(signal.SIGTERM)
    assert collector.wait() == 0
    reading = read(job)
    assert reading.reader.alive() == {child.name}
    assert reading.cell(child.name) == cell_of(spool, child)


# --- which of two is newer -----------------------------------------------------------------------------------------


def test_the_newest_collector_has_the_last_word_on_where_the_loop_stands(
    spool: JobPaths, job: JobPaths, begin: Begin
) -> None:
    child = begin().tell("cell 1")
    for step in range(2, 7):
        Collector(spool, job).collect()
        child.tell(f"cell {step}")
    Collector(spool, job).collect()
    assert len(node_files(job)) == len(pulse_files(job)) == 6
    assert read(job).cell(child.name) == cell_of(spool, child)


@pytest.mark.parametrize("suffix", ["hwn", "hwp"])
def test_an_older_file_that_is_read_later_takes_no_loop_back(
    spool: JobPaths, job: JobPaths, begin: Begin, suffix: str
) -> None:
    child = begin().tell("cell 1")
    Collector(spool, job).collect()
    old = {path: path.read_bytes() for path in job.nodes.iterdir()}
    for path in old:
        path.unlink()
    child.tell("cell 2").tell("mark between")
    Collector(spool, job).collect()
    reading = read(job)
    now = cell_of(spool, child)
    assert reading.cell(child.name) == now
    for path, data in old.items():
        if path.name.endswith(suffix):
            (job.nodes / f"zzz.{suffix}").write_bytes(data)
    assert reading.poll().cell(child.name) == read(job).cell(child.name) == now
    assert marks(reading, child.name) == marks(read(job), child.name) == ["between"]


def test_a_clock_that_is_set_back_does_not_hide_what_comes_after(spool: JobPaths, job: JobPaths, begin: Begin) -> None:
    clock = SetBack()
    child, collector, reading = begin().tell("cell 1"), Collector(spool, job, clock), Reading(job)
    collector.collect()
    reading.poll()
    clock.behind_ns = 30_000_000_000
    child.tell("cell 2")
    collector.collect()
    assert reading.poll().cell(child.name) == cell_of(spool, child)
    child.kill()
    collector.collect()
    assert reading.poll().reader.alive() == set()


# --- a pulse that cannot be read -----------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "mixed", "empty", "zeros", "noise"])
def test_a_torn_pulse_changes_nothing(spool: JobPaths, job: JobPaths, begin: Begin, damage: str) -> None:
    child, collector, reading = begin().tell("cell 1"), Collector(spool, job), Reading(job)
    collector.collect()
    known = reading.poll().cell(child.name)
    (pulse,) = pulse_files(job)
    before = pulse.read_bytes()
    child.tell("cell 2")
    collector.collect()
    after = pulse.read_bytes()
    torn = {
        "cut": after[:-20],
        "mixed": after[:60] + before[60:],
        "empty": b"",
        "zeros": bytes(len(after)),
        "noise": os.urandom(1000),
    }
    pulse.write_bytes(torn[damage])
    assert reading.poll().reader.alive() == {child.name}
    assert reading.cell(child.name) == known
    assert reading.problems == read(job).problems == []
    pulse.write_bytes(after)
    assert reading.poll().cell(child.name) == cell_of(spool, child)


def test_the_rest_of_a_longer_pulse_is_not_read(tmp_path: Path) -> None:
    pulse = tmp_path / "a.hwp"
    long = encode_pulse([sign_of_life(f"process {number}", None, 1) for number in range(3)])
    short = encode_pulse([sign_of_life("process 9", None, 2)])
    pulse.write_bytes(short + long[len(short) :])
    assert read_pulse(pulse) == short[8:]
    assert read_pulse(tmp_path / "missing.hwp") == b""


def test_a_reader_of_a_pulse_under_way_gets_a_whole_one_or_none(tmp_path: Path) -> None:
    pulse, stop = tmp_path / "a.hwp", threading.Event()
    told = [encode_pulse(sign_of_life(f"{turn}", None, turn) for _ in range(20 + 40 * turn)) for turn in range(7)]

    def write() -> None:
        fd = os.open(pulse, os.O_WRONLY | os.O_CREAT)
        for data in itertools.cycle(told):
            os.pwrite(fd, data, 0)
            if stop.is_set():
                break
        os.close(fd)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        eventually(lambda: read_pulse(pulse), "a pulse")
        read = {read_pulse(pulse) for _ in range(1000)}
    finally:
        stop.set()
        writer.join()
    assert read - {b""} <= {data[8 : 8 + int.from_bytes(data[:4], "little")] for data in told}


def test_a_pulse_is_not_ahead_of_the_records(spool: JobPaths, job: JobPaths, begin: Begin, tmp_path: Path) -> None:
    child, collector = begin().tell("cell 1"), Collector(spool, job)
    collector.collect()
    (pulse,), (file,) = pulse_files(job), node_files(job)
    told = pulse.read_bytes()
    child.tell("mark one").tell("cell 2")
    file.rename(tmp_path / "aside")
    file.mkdir()
    assert collector.collect() == 0
    assert collector.problem
    assert pulse.read_bytes() == told
    file.rmdir()
    (tmp_path / "aside").rename(file)
    collector.collect()
    assert pulse.read_bytes() != told
    assert marks(read(job), child.name) == ["one"]


# --- lost ----------------------------------------------------------------------------------------------------------


def test_a_process_is_lost_when_its_node_was_not_heard_of_for_long(
    spool: JobPaths, job: JobPaths, begin: Begin
) -> None:
    dead, alive, clock = begin(), begin(), SetBack()
    clock.behind_ns = round(1.1e9 * LOST_AFTER_S)
    collector, reading = Collector(spool, job, clock), Reading(job)
    collector.collect()
    assert reading.poll().reader.lost() == {dead.name, alive.name}
    dead.kill()
    collector.collect()
    assert reading.poll().reader.lost() == read(job).reader.lost() == {alive.name}
    assert reading.reader.alive() == set()
    clock.behind_ns = 0
    collector.collect()
    assert reading.poll().reader.lost() == set()
    assert reading.reader.alive() == {alive.name}


def test_a_process_whose_journal_is_written_here_is_not_lost(spool: JobPaths, begin: Begin) -> None:
    child = begin()
    reader = JobReader(spool)
    list(reader.poll())
    assert (reader.alive(), reader.lost()) == ({child.name}, set())
