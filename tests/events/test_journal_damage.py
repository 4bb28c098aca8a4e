"""A damaged, cut or foreign file never stops a reader: it reads what is whole and says what it leaves out."""

import json
import os
import random
import struct
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from journals import apart, ledger_of, numbers, read

from headway.events.journal import HEADER_BYTES, Writer, frame
from headway.events.vocabulary import FORMAT, LoopBegin, Mark, Process, Record, SpanBegin, StepRun, encode
from headway.testing import Story


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A journal with every kind of record in it, closed well."""
    story = Story(tmp_path_factory.mktemp("sound"))
    rank = story.rank()
    rank.scheduled(-20, -10).span("imports", 5.0).restored(3)
    with rank.recorder.span("train_module_creation", layers=3):
        rank.wait(2.0)
    rank.steps(600, each=1.0, data=0.1, first=3, stall={7: 60.0, 300: 60.0}, batch_size=8)
    rank.recorder.mark("epoch", n=1)
    rank.span("evaluation", 3.0).saved(603)
    rank.finished()
    return rank.recorder.writer.path.read_bytes()


def frame_offsets(journal: bytes) -> list[int]:
    """Where each frame begins, and behind them the end."""
    offsets = [HEADER_BYTES]
    while offsets[-1] < len(journal):
        length = struct.unpack_from("<I", journal, offsets[-1])[0]
        offsets.append(offsets[-1] + 8 + (length + 3 & ~3))
    return offsets


def records_of(path: Path, data: bytes) -> tuple[list[Record], list[str]]:
    """What a reader gets from these bytes; its ledger must add up too."""
    path.write_bytes(data)
    batch = read(path)
    ledger = ledger_of(batch)
    if ledger is not None:
        assert set(batch.problems) <= set(ledger.notes)
    return batch.records, batch.problems


def test_a_flipped_byte_costs_the_record_it_lies_in_and_is_told(tmp_path: Path, sound: bytes) -> None:
    path, offsets = tmp_path / "flipped.hwj", frame_offsets(sound)
    whole, problems = records_of(path, sound)
    assert problems == []
    assert len(whole) == len(offsets) - 1
    for at in range(HEADER_BYTES, len(sound)):
        damaged = bytearray(sound)
        damaged[at] ^= 0xFF
        hit = max(number for number, offset in enumerate(offsets) if offset <= at)
        got, problems = records_of(path, bytes(damaged))
        if got == whole:
            assert problems == []
            continue
        assert got == whole[:hit] + whole[hit + 1 :]
        assert len(problems) == 1
        assert "damaged record, which is left out" in problems[0]


def test_any_damage_leaves_what_is_before_it_readable_and_is_told(tmp_path: Path, sound: bytes) -> None:
    path, offsets, chance = tmp_path / "damaged.hwj", frame_offsets(sound), random.Random(7)
    whole, _ = records_of(path, sound)
    for _ in range(400):
        damaged = bytearray(sound)
        first = len(sound)
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(HEADER_BYTES, len(damaged))
            kind = chance.random()
            if kind < 0.5:
                damaged[at] ^= 1 << chance.randrange(8)
            elif kind < 0.8:
                stretch = chance.randint(1, 200)
                damaged[at : at + stretch] = chance.randbytes(len(damaged[at : at + stretch]))
            elif kind < 0.9:
                damaged[at : at + 100] = bytes(len(damaged[at : at + 100]))
            else:
                del damaged[at : at + chance.randint(1, 9)]
            first = min(first, at)
        got, problems = records_of(path, bytes(damaged))
        before = sum(1 for offset in offsets[1:] if offset <= first)
        assert got[:before] == whole[:before]
        left = iter(whole)
        assert all(record in left for record in got), "a record came out that nobody wrote"
        if len(got) < len(whole) - 1:
            assert problems


def test_a_zeroed_length_hides_one_record_and_the_rest_is_read(tmp_path: Path, sound: bytes) -> None:
    path, offsets = tmp_path / "zeroed.hwj", frame_offsets(sound)
    whole, _ = records_of(path, sound)
    for hit, offset in enumerate(offsets[:-2]):
        got, problems = records_of(path, sound[:offset] + bytes(4) + sound[offset + 4 :])
        assert got == whole[:hit] + whole[hit + 1 :]
        assert len(problems) == 1
    # At the very end it looks like a record that was under way when its process was killed.
    got, problems = records_of(path, sound[: offsets[-2]] + bytes(4) + sound[offsets[-2] + 4 :])
    assert (got, problems) == (whole[:-1], [])


def test_a_journal_cut_off_at_any_byte_reads_up_to_there(tmp_path: Path, sound: bytes) -> None:
    path, offsets = tmp_path / "cut.hwj", frame_offsets(sound)
    whole, _ = records_of(path, sound)
    for size in range(len(sound)):
        got, problems = records_of(path, sound[:size])
        if size < HEADER_BYTES:
            assert got == []
            assert bool(problems) == (0 < size < 12)
            continue
        done = sum(1 for offset in offsets[1:] if offset <= size)
        padding = len(got) == done + 1 and offsets[done + 1] - size < 4
        assert got == whole[: done + padding]
        if not padding:
            # A cut between two records cannot be seen.
            assert bool(problems) == (size not in offsets)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"epoch,loss\n1,0.5\n" * 100, id="text"),
        pytest.param(b"\x89PNG\r\n\x1a\n" + random.Random(1).randbytes(5000), id="png"),
        pytest.param(b"headway", id="half a magic"),
        pytest.param(b"\0" * 20 + b"x" * 600, id="no magic"),
    ],
)
def test_a_foreign_file_is_named_and_left_out(tmp_path: Path, content: bytes) -> None:
    expected = ["foreign.hwj is not a headway journal, and is left out"]
    assert records_of(tmp_path / "foreign.hwj", content) == ([], expected)


@pytest.mark.parametrize("size", [0, 1, 8, 12, 511, 512, 4096, 1 << 20])
def test_an_empty_file_is_a_journal_that_has_not_begun(tmp_path: Path, size: int) -> None:
    assert records_of(tmp_path / "empty.hwj", bytes(size)) == ([], [])


def test_a_folder_in_a_journals_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "folder.hwj").mkdir()
    assert read(tmp_path / "folder.hwj").problems == [
        "folder.hwj cannot be read (Is a directory): its process is missing here"
    ]


def read_as_nobody(path: Path) -> None:
    os.setgid(65534)
    os.setuid(65534)
    assert read(path).problems == [f"{path.name} cannot be read (Permission denied): its process is missing here"]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become a user who may not read the file")
def test_a_journal_of_another_user_is_told(tmp_path: Path, sound: bytes) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "private.hwj").write_bytes(sound)
    (tmp_path / "private.hwj").chmod(0o600)
    assert apart(read_as_nobody, tmp_path / "private.hwj") == 0


def test_a_newer_format_is_not_guessed_at(tmp_path: Path, sound: bytes) -> None:
    newer = sound[:8] + struct.pack("<I", FORMAT + 1) + sound[12:]
    got, problems = records_of(tmp_path / "newer.hwj", newer)
    assert got == []
    assert problems == ["newer.hwj has format 2, and this headway reads up to 1: upgrade headway to count its process"]


def test_a_flip_in_the_header_is_told_or_touches_the_cell_alone(tmp_path: Path) -> None:
    rank = Story(tmp_path).rank().span("imports", 5.0)
    loop = rank.recorder.steps(range(300))
    for _ in range(40):
        next(loop)
        rank.wait(1.0)
    path, killed = tmp_path / "header.hwj", rank.recorder.writer.path.read_bytes()
    whole, _ = records_of(path, killed)
    for at in (*range(16), *range(64, 140), *range(192, 268)):
        for bit in range(8):
            damaged = bytearray(killed)
            damaged[at] ^= 1 << bit
            got, problems = records_of(path, bytes(damaged))
            assert (got, problems) == (whole, []) or (got == [] and problems)
            assert at >= 12 or (at, bit) == (8, 0) or problems


# --- records that are whole, and wrong -------------------------------------------------------------------------------


def journal_of(path: Path, *payloads: bytes) -> tuple[list[Record], list[str]]:
    """What a reader gets from a journal of these payloads, between two good marks."""
    writer = Writer(path)
    for payload in (
        encode(Mark(t_ns=1, name="m", attrs={"n": 0})),
        *payloads,
        encode(Mark(t_ns=1, name="m", attrs={"n": 1})),
    ):
        writer.append(payload)
    writer.close()
    batch = read(path)
    assert numbers(r for r in batch.records if isinstance(r, Mark) and r.name == "m") == [0, 1]
    ledger_of(batch)
    return batch.records[1:-1], batch.problems


def json_record(kind: type, **fields: Any) -> bytes:
    return bytes([kind.KIND]) + json.dumps(fields).encode()  # type: ignore[attr-defined]


def test_kinds_that_a_newer_headway_writes_are_skipped_without_a_word(tmp_path: Path) -> None:
    unknown = [bytes([kind]) + tail for kind in (0, 6, 31, 41, 99, 255) for tail in (b"", b"\0\1\2", b"{}")]
    assert journal_of(tmp_path / "a.hwj", *unknown) == ([], [])


def test_fields_that_a_newer_headway_writes_are_ignored_and_missing_ones_take_their_defaults(tmp_path: Path) -> None:
    got, problems = journal_of(
        tmp_path / "a.hwj",
        json_record(Mark, t_ns=5, name="new", colour="red", depth={"x": 1}),
        json_record(LoopBegin, t_ns=5, first=1),
    )
    assert problems == []
    assert got == [Mark(t_ns=5, name="new"), LoopBegin(t_ns=5, first=1)]


@pytest.mark.parametrize(
    "payload",
    [
        json_record(Mark, name="no time"),
        json_record(Mark, t_ns="5", name="m"),
        json_record(Mark, t_ns=5.5, name="m"),
        json_record(Mark, t_ns=None, name="m"),
        json_record(Mark, t_ns=5, name=["m"]),
        json_record(Mark, t_ns=5, name="m", attrs=[1]),
        json_record(Process, t_ns=5),
        json_record(Process, t_ns=5, wall_ns=5, boot="b", node="n", pid="one", job="j", started_ns=5),
        json_record(LoopBegin, t_ns=5, first={}, batch_size=1),
        bytes([Mark.KIND]),
        bytes([Mark.KIND]) + b"[1, 2]",
        bytes([Mark.KIND]) + b'"text"',
        bytes([Mark.KIND]) + b"null",
        bytes([Mark.KIND]) + b"{",
        bytes([Mark.KIND]) + b"\xff\xfe\x00",
        bytes([Mark.KIND]) + b"[" * 100_000,
        bytes([Mark.KIND]) + b'{"t_ns": ' + b"9" * 10_000 + b', "name": "m"}',
        bytes([StepRun.KIND]) + b"short",
        bytes([SpanBegin.KIND]),
        SpanBegin.LAYOUT.pack(SpanBegin.KIND, 1, 1, 1, 1) + b"{nonsense",
        bytes([1, 0, 1, 0]) + b"\xff\xfe",
    ],
    ids=lambda payload: repr(payload[1:25]),
)
def test_a_record_that_makes_no_sense_is_left_out_and_told(tmp_path: Path, payload: bytes) -> None:
    got, problems = journal_of(tmp_path / "a.hwj", payload)
    assert got == []
    assert len(problems) == 1
    assert problems[0].startswith("a.hwj holds a record that makes no sense, which is left out (")


@pytest.mark.parametrize("length", [1, 2**16, 2**20, 2**20 + 1, 2**31, 2**32 - 1])
def test_absurd_lengths_cost_one_record_wherever_they_stand(tmp_path: Path, sound: bytes, length: int) -> None:
    path, offsets = tmp_path / "absurd.hwj", frame_offsets(sound)
    whole, _ = records_of(path, sound)
    for hit in (0, 3, len(whole) - 1):
        at = offsets[hit]
        got, problems = records_of(path, sound[:at] + struct.pack("<I", length) + sound[at + 4 :])
        assert got == whole[:hit] + whole[hit + 1 :]
        assert len(problems) == 1


def test_a_file_full_of_absurd_lengths_is_given_up_rather_than_searched_for_ever(tmp_path: Path, sound: bytes) -> None:
    garbage = struct.pack("<II", 1_000_000, 1) * 250_000
    got, problems = records_of(tmp_path / "absurd.hwj", sound + garbage)
    assert len(got) == len(frame_offsets(sound)) - 1
    assert len(problems) == 1


def test_a_large_record_is_read_like_any_other(tmp_path: Path) -> None:
    got, problems = journal_of(tmp_path / "a.hwj", encode(Mark(t_ns=1, name="large", attrs={"text": "x" * (5 << 20)})))
    assert problems == []
    assert [len(record.attrs["text"]) for record in got if isinstance(record, Mark)] == [5 << 20]


def test_a_checksum_alone_does_not_make_a_record(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.hwj")
    writer.close()
    with open(tmp_path / "a.hwj", "ab") as file:
        file.write(struct.pack("<II", 0, crc32(b"")) + frame(encode(Mark(t_ns=1, name="m", attrs={"n": 0}))))
    batch = read(tmp_path / "a.hwj")
    assert numbers(batch.records) == [0]
    assert len(batch.problems) == 1
