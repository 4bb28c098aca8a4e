"""Every state that a writer's stores can leave a file in reads as the records that were written by then."""

from pathlib import Path

import pytest
from journals import numbers, read

from headway.events.journal import FIRST_SEGMENT_BYTES, HEADER_BYTES, CellWriter, Writer, parse_cell
from headway.events.vocabulary import Mark, encode


class Stores(bytearray):
    """Memory that remembers all that is stored in it by slice, in order."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.log: list[tuple[int, bytes]] = []

    def __setitem__(self, where, data):  # type: ignore[no-untyped-def,override]
        self.log.append((where.start, bytes(data)))
        super().__setitem__(where, data)


class LoggedWriter(Writer):
    """A writer whose memory is `Stores`. A growth is logged as an empty store at the new end."""

    def _map(self, size: int) -> None:
        if not isinstance(self._memory, Stores):
            self._memory = Stores(0)  # type: ignore[assignment]
        self._memory.extend(bytes(size - len(self._memory)))  # type: ignore[union-attr]
        self._memory.log.append((size, b""))  # type: ignore[union-attr]
        self._size = size


@pytest.mark.parametrize("allocated", [True, False], ids=["mapped", "plain"])
def test_every_prefix_of_the_stores_reads_as_the_records_written_by_then(tmp_path: Path, allocated: bool) -> None:
    writer = LoggedWriter(tmp_path / "logged.hwj")
    log = writer._memory.log  # type: ignore[union-attr]
    returned = []
    for n in range(250):
        assert writer.append(encode(Mark(t_ns=n, name="x" * (n % 100), attrs={"n": n})))
        returned.append(len(log))
    assert len([store for store in log if not store[1]]) >= 2, "the file did not grow"

    image = tmp_path / "image.hwj"
    image.touch()
    with open(image, "r+b", buffering=0) as file:

        def check(done: int) -> None:
            batch = read(image)
            assert batch.problems == []
            seen = numbers(batch.records)
            acknowledged = sum(1 for at in returned if at <= done)
            assert seen == list(range(len(seen)))
            assert acknowledged <= len(seen) <= acknowledged + 1

        for done, (offset, data) in enumerate(log, 1):
            if not data:
                if allocated:
                    file.truncate(offset)
                continue
            # An aligned word (a length, the magic) is stored at once. Anything longer may be torn anywhere.
            for torn in range(1, len(data), 9 if done % 20 else 1) if len(data) > 8 else ():
                file.seek(offset)
                file.write(data[:torn])
                check(done - 1)
            file.seek(offset)
            file.write(data)
            check(done)
    assert len(read(image).records) == 250
    assert image.stat().st_size > FIRST_SEGMENT_BYTES


@pytest.mark.parametrize("number", [0, 1, 254, 255, 256, 65_534, 65_535, 2**32 - 2, 2**32 - 1])
def test_a_cell_torn_at_any_byte_reads_as_the_old_or_the_new_one(number: int) -> None:
    memory = bytearray(HEADER_BYTES)
    cell = CellWriter(memory)  # type: ignore[arg-type]
    cell._number = number
    old = None
    for at in range(1, 6):
        before = bytes(memory)
        cell.write(at, at * 256, at * 65_537, at << 40, at * 3, at * 255, -at)
        after, new = bytes(memory), parse_cell(memory)
        assert new is not None
        assert (new.first, new.next, new.since_ns) == (at, at * 256, -at)
        for torn in range(HEADER_BYTES):
            assert parse_cell(after[:torn] + before[torn:]) in (old, new)
        old = new


def test_a_header_cut_anywhere_has_a_whole_cell_or_none() -> None:
    memory = bytearray(HEADER_BYTES)
    cell = CellWriter(memory)  # type: ignore[arg-type]
    cells = []
    for at in (1, 2):
        cell.write(at, at, at, at, at, at, at)
        cells.append(parse_cell(memory))
    assert all(parse_cell(bytes(memory[:cut])) in (None, *cells) for cut in range(HEADER_BYTES))
