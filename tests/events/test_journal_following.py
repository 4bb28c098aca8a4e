"""A reader of a journal that is being written sees each record once, in order, and never half a cell."""

import multiprocessing
from pathlib import Path

import pytest
from journals import numbers, read, write_as

from headway.events.journal import Follower, Writer
from headway.events.vocabulary import Mark, encode

RECORDS = 60_000
PART = 8_000


def write_fast(path: Path, how: str, polls: "multiprocessing.synchronize.Semaphore") -> None:
    """Waits after each part for one poll, so that it is not done before a reader that was stopped goes on."""
    write_as(how)
    writer = Writer(path)
    for n in range(RECORDS):
        if n and n % PART == 0:
            assert polls.acquire(timeout=120)
        writer.append(encode(Mark(t_ns=n, name="x" * (n % 30), attrs={"n": n})))
        for at in range(4 * n, 4 * n + 4):
            writer.cell.write(at, at + 1, at + 2, at + 3, at + 4, at + 5, at + 6)
    writer.close()


@pytest.mark.parametrize("how", ["mapped", pytest.param("plain", marks=pytest.mark.thorough)])
def test_a_follower_sees_each_record_once_and_no_torn_cell(tmp_path: Path, how: str) -> None:
    path = tmp_path / "live.hwj"
    spawn = multiprocessing.get_context("spawn")
    met = spawn.Semaphore(0)
    process = spawn.Process(target=write_fast, args=(path, how, met), daemon=True)
    process.start()
    while not path.exists():
        process.join(0.001)
    follower, seen, polls, last = Follower(path), 0, 0, -1
    while seen < RECORDS:
        lives = process.is_alive()
        batch = follower.poll()
        assert batch.problems == []
        assert numbers(batch.records) == list(range(seen, seen + len(batch.records)))
        seen += len(batch.records)
        if batch.records:
            polls += 1
            met.release()
        if batch.cell:
            cell = batch.cell
            at = cell.first
            assert (cell.next, cell.begin_ns, cell.end_ns) == (at + 1, at + 2, at + 3)
            assert (cell.data_ns, cell.count, cell.since_ns) == (at + 4, at + 5, at + 6)
            assert at >= last
            last = at
        assert lives or batch.records or seen == RECORDS
    process.join()
    assert process.exitcode == 0
    assert polls > 5, "the reader never met the writer at work"
    assert follower.poll().records == []
    assert numbers(read(path).records) == list(range(RECORDS))


def test_a_follower_of_a_file_that_is_not_there_yet_says_so_and_reads_it_later(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "late.hwj")
    assert "cannot be read" in follower.poll().problems[0]
    writer = Writer(tmp_path / "late.hwj")
    assert follower.poll().records == []
    writer.append(encode(Mark(t_ns=1, name="m", attrs={"n": 0})))
    assert numbers(follower.poll().records) == [0]
    writer.close()
    assert follower.poll().records == []


def test_each_part_of_a_journal_is_given_once_with_the_bytes_it_stands_in(tmp_path: Path) -> None:
    writer, follower, copy = Writer(tmp_path / "a.hwj"), Follower(tmp_path / "a.hwj"), b""
    for n in range(5):
        writer.append(encode(Mark(t_ns=1, name="m", attrs={"n": n})))
        batch = follower.poll()
        assert numbers(batch.records) == [n]
        assert batch.offset == 512 + len(copy)
        copy += batch.raw
    writer.close()
    assert (tmp_path / "a.hwj").read_bytes()[512:] == copy
