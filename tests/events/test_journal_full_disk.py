"""A full disk costs records, and the journal says how many; it never costs a step, nor the job."""

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_systems import mounted
from journals import HOW_TO_WRITE, apart, finished_steps, named_spans, numbers, read, write_as

from headway.events.journal import Follower, Writer
from headway.events.vocabulary import Dropped, LoopBegin, Mark, encode
from headway.testing import Rank, Story

DISK_BYTES = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    with mounted(tmp_path / "disk", f"size={DISK_BYTES},mode=700") as folder:
        yield folder


def fill(disk: Path) -> Path:
    """A file that takes up all that is left."""
    ballast = disk / "ballast"
    with open(ballast, "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


def write_on(rank: Rank) -> int:
    """Marks that fill whatever is left of the journal's last segment; returns how many were refused."""
    return sum(not rank.recorder.record(Mark(t_ns=rank.clock.now_ns(), name="m", attrs={"n": n})) for n in range(2000))


def live_through_a_full_disk(disk: Path, how: str) -> None:
    write_as(how)
    story = Story(disk)
    rank = story.rank()
    rank.steps(10, each=1.0)
    ballast = fill(disk)
    refused = write_on(rank)
    assert refused
    for _ in range(3):
        rank.steps(600, each=1.0, stall={5: 60.0, 6: 60.0, 500: 60.0})
    assert sum(story.ledger().steps.values()) == 10 + 3 * 600

    ballast.unlink()
    rank.wait(2.0).steps(5, each=1.0)
    rank.recorder.mark("after", n=-1)
    rank.finished()

    batch = read(rank.recorder.writer.path)
    assert batch.problems == []
    assert finished_steps(batch) == 10 + 3 * 600 + 5
    assert numbers(batch.records)[-1] == -1
    # Marks and the begins of loops are missing, and told. Runs of steps found their place later, and are not.
    missing = 2001 - len(numbers(batch.records)) + 5 - sum(isinstance(record, LoopBegin) for record in batch.records)
    assert missing >= refused
    assert sum(record.count for record in batch.records if isinstance(record, Dropped)) == missing
    ledger = story.ledger()
    assert sum(ledger.steps.values()) == 10 + 3 * 600 + 5
    assert f"{missing} records are missing: the disk was full. Steps are complete, spans may not be" in ledger.notes


@pytest.mark.needs("mount")
@pytest.mark.parametrize("how", HOW_TO_WRITE)
def test_a_full_disk_costs_records_but_no_step_and_the_ledger_says_so(small_disk: Path, how: str) -> None:
    assert apart(live_through_a_full_disk, small_disk, how) == 0


def name_a_span_on_a_full_disk(disk: Path, how: str) -> None:
    write_as(how)
    rank = Story(disk).rank()
    ballast = fill(disk)
    assert write_on(rank)
    rank.span("warm-up", 1.0)
    ballast.unlink()
    rank.wait(2.0).span("warm-up", 7.0)
    name, begin = named_spans(read(rank.recorder.writer.path).records)[-1]
    assert (name, begin.t_ns) == ("warm-up", rank.clock.now_ns() - 7_000_000_000)


@pytest.mark.needs("mount")
@pytest.mark.parametrize("how", HOW_TO_WRITE)
def test_a_span_first_named_on_a_full_disk_has_its_name_later(small_disk: Path, how: str) -> None:
    assert apart(name_a_span_on_a_full_disk, small_disk, how) == 0


def die_on_a_full_disk(disk: Path, how: str) -> None:
    write_as(how)
    rank = Story(disk).rank()
    fill(disk)
    assert write_on(rank)
    for _ in range(2):
        rank.steps(700, each=1.0)
    for step, _ in rank.recorder.steps(range(10)):
        rank.clock.advance(1.0)
        if step == 1405:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.needs("mount")
@pytest.mark.parametrize("how", HOW_TO_WRITE)
def test_a_kill_on_a_full_disk_loses_no_step(small_disk: Path, how: str) -> None:
    assert apart(die_on_a_full_disk, small_disk, how) == -signal.SIGKILL
    story = Story(small_disk)
    ledger = story.ledger()
    assert sum(ledger.steps.values()) == 1405
    [journal] = story.paths.journals.iterdir()
    cell = read(journal).cell
    assert cell is not None
    assert (cell.next, cell.since_ns > 0) == (1405, True)


def run_out_of_space_again_and_again(disk: Path, how: str) -> None:
    write_as(how)
    rank = Story(disk).rank()
    refused = 0
    for spell in range(4):
        ballast = fill(disk)
        refused += write_on(rank)
        ballast.unlink()
        rank.wait(2.0).recorder.mark("after", n=-1 - spell)
    rank.recorder.close()
    batch = read(rank.recorder.writer.path)
    assert batch.problems == []
    assert sum(record.count for record in batch.records if isinstance(record, Dropped)) == refused
    assert [n for n in numbers(batch.records) if n < 0] == [-1, -2, -3, -4]


@pytest.mark.needs("mount")
@pytest.mark.parametrize("how", HOW_TO_WRITE)
def test_each_spell_without_space_is_accounted_for(small_disk: Path, how: str) -> None:
    assert apart(run_out_of_space_again_and_again, small_disk, how) == 0


def open_on_a_full_disk(disk: Path) -> None:
    ballast = fill(disk)
    for how in HOW_TO_WRITE:
        write_as(how)
        descriptors = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match="No space"):
            Writer(disk / f"{how}.hwj")
        assert os.listdir("/proc/self/fd") == descriptors
        batch = read(disk / f"{how}.hwj")
        assert (batch.records, batch.cell, batch.problems) == ([], None, [])
    os.truncate(ballast, ballast.stat().st_size - 2 * 4096)
    writer = Writer(disk / "small.hwj")
    for n in range(5):
        assert writer.append(encode(Mark(t_ns=n, name="m", attrs={"n": n})))
    assert numbers(read(disk / "small.hwj").records) == list(range(5))


@pytest.mark.needs("mount")
def test_a_journal_that_finds_the_disk_full_is_refused_and_one_that_finds_a_page_begins(small_disk: Path) -> None:
    assert apart(open_on_a_full_disk, small_disk) == 0


def reach_the_largest_file_size(folder: Path, how: str) -> None:
    write_as(how)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
    rank = Story(folder).rank()
    refused = write_on(rank)
    assert refused
    rank.steps(1000, each=1.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    rank.wait(2.0).finished()
    batch = read(rank.recorder.writer.path)
    assert batch.problems == []
    assert finished_steps(batch) == 1000
    assert sum(record.count for record in batch.records if isinstance(record, Dropped)) == refused + 1


@pytest.mark.parametrize("how", HOW_TO_WRITE)
def test_a_limit_on_file_sizes_is_survived_like_a_full_disk(tmp_path: Path, how: str) -> None:
    assert apart(reach_the_largest_file_size, tmp_path, how) == 0


def test_a_record_too_large_for_the_disk_does_not_shut_out_the_small_ones_for_good(tmp_path: Path) -> None:
    story = Story(tmp_path)
    rank = story.rank()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        rank.recorder.mark("large", text="x" * (2 << 20))
        rank.wait(2.0).recorder.mark("small", n=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    batch = Follower(rank.recorder.writer.path).poll()
    assert numbers(batch.records) == [0]
    assert [record.count for record in batch.records if isinstance(record, Dropped)] == [1]
