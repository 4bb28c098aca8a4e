"""Records as bytes: what is written comes back, and what an older writer left out is filled in."""

import struct

import pytest

from headway.events.vocabulary import (
    KNOWN_NAMES,
    Activity,
    Period,
    Process,
    Record,
    Restored,
    Saved,
    SpanBegin,
    decode,
    encode,
)


@pytest.mark.parametrize(
    "record",
    [
        Period(KNOWN_NAMES[Activity.EVALUATION], 7, 5, 9),
        Period(300, 0xFFFFFFFF, -5, 1 << 62, {"loader": "validation", "batches": 12}),
        SpanBegin(1, 2, 3, 4),
        SpanBegin(1, 2, 3, 4, {"why": "\N{SNOWMAN}"}),
        Saved(t_ns=1, step=60, path="last.pt", file="8:1:2:3"),
        Restored(t_ns=1, step=None, path="last.pt", file="8:1:2:3"),
        Restored(t_ns=1, step=60),
    ],
)
def test_a_record_comes_back_as_it_was_written(record: Record) -> None:
    assert decode(encode(record)) == record


def test_a_period_is_24_bytes_and_its_numbers_stand_where_the_format_says() -> None:
    assert encode(Period(3, 7, 5, 9)) == struct.pack("<BxHIqq", 5, 3, 7, 5, 9)


def test_checkpoints_of_an_older_writer_name_no_file() -> None:
    assert decode(b'\x25{"t_ns":1,"step":60,"path":"a.pt"}') == Saved(t_ns=1, step=60, path="a.pt", file="")
    assert decode(b'\x26{"t_ns":1,"step":60,"path":"a.pt"}') == Restored(t_ns=1, step=60, path="a.pt", file="")


def test_a_process_of_an_older_writer_is_a_rank() -> None:
    told = b'{"t_ns":1,"wall_ns":2,"boot":"b","node":"n","pid":3,"job":"j","started_ns":1}'
    process = decode(bytes([Process.KIND]) + told)
    assert isinstance(process, Process)
    assert process.role == "rank"


@pytest.mark.parametrize("rest", [b"", bytes(22), bytes(23) + b"{", bytes(23) + b"\xff"])
def test_a_period_that_is_cut_off_is_no_record(rest: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode(bytes([Period.KIND]) + rest)
