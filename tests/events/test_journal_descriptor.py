"""A program that closes descriptors which are not its own loses records, and never a byte of its files."""

import os
from pathlib import Path

import pytest
from journals import apart, numbers, read, write_as

from headway.events.journal import Mapping, Writer
from headway.events.vocabulary import Mark, encode

CONTENT = bytes(range(256)) * 8192
FILES = 12


def close_some(writer: Writer, which: str) -> None:
    """Closes what the program does not own."""
    if which == "all":
        os.closerange(3, 256)
    elif which == "the writer's":
        os.close(writer._fd)
    else:
        assert isinstance(writer._memory, Mapping)
        os.close(writer._memory._fd)


def marks(writer: Writer, count: int) -> int:
    """Appends so many marks; returns how many were refused."""
    return sum(not writer.append(encode(Mark(t_ns=0, name="m", attrs={"n": n}))) for n in range(count))


def lose_the_descriptors(folder: Path, how: str, which: str, end: str) -> None:
    write_as(how)
    writer = Writer(folder / "a.hwj")
    assert marks(writer, 10) == 0
    close_some(writer, which)
    files = [open(folder / f"{number}.bin", "wb") for number in range(FILES)]
    for file in files:
        file.write(CONTENT)
        file.flush()
    if end == "grown":
        refused = marks(writer, 50_000)
        assert refused
        assert writer.lost == refused
        writer.cell.write(0, 1, 2, 3, 4, 5, 6)
    if end != "dropped":
        writer.close()
    del writer
    for file in files:
        file.write(b"the end")
        file.close()


@pytest.mark.parametrize("end", ["grown", "closed", "dropped"])
@pytest.mark.parametrize(
    ("how", "which"),
    [("mapped", "all"), ("mapped", "the writer's"), ("mapped", "the mapping's"), ("plain", "all")],
)
def test_files_that_got_the_journals_descriptors_stay_as_they_are(
    tmp_path: Path, how: str, which: str, end: str
) -> None:
    assert apart(lose_the_descriptors, tmp_path, how, which, end) == 0
    for number in range(FILES):
        assert (tmp_path / f"{number}.bin").read_bytes() == CONTENT + b"the end"
    batch = read(tmp_path / "a.hwj")
    assert batch.problems == []
    assert numbers(batch.records)[:10] == list(range(10))
    if end == "grown" and how == "mapped":
        assert len(batch.records) > 20  # what was mapped is written on


def close_without_opening(folder: Path) -> None:
    writer = Writer(folder / "a.hwj")
    os.closerange(3, 256)
    assert marks(writer, 50_000)
    writer.close()


def test_descriptors_that_are_gone_are_no_error(tmp_path: Path) -> None:
    assert apart(close_without_opening, tmp_path) == 0
    assert read(tmp_path / "a.hwj").problems == []
