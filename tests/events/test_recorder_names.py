"""Names and attributes are the caller's own: whatever they are, recording them never fails and never misleads."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from journals import named_spans, read

from headway.accounting.rules import Bucket
from headway.events.journal import Writer
from headway.events.recorder import Recorder
from headway.events.vocabulary import NAME_LIMIT, LoopBegin, Mark, Name, SpanBegin, SpanEnd, StepRun
from headway.testing import Story

HOSTILE = {
    "empty": "",
    "nul": "a\0b",
    "control characters": "a\nb\rc\td\x07\x08\x1b\x7f\x85",
    "terminal escapes": "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J",
    "lone surrogates": "a\ud800b\udfffc",
    "undecodable file name": b"caf\xe9".decode("utf-8", "surrogateescape"),
    "right to left": "a\u202egnp.exe\u2066\u200b\ufeff",
    "line separators": "a\u2028b\u2029c",
    "ten megabytes": "x" * (10 << 20),
    "ten megabytes of escapes": "\x1b[0m" * (5 << 19),
    "emoji": "\N{WHITE HEAVY CHECK MARK}" * 300,
}


def told(path: Path) -> tuple[list[str], list[str]]:
    """The names of spans and of marks, as read back."""
    batch = read(path)
    assert batch.problems == []
    return [name for name, _ in named_spans(batch.records)], [
        record.name for record in batch.records if isinstance(record, Mark)
    ]


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_name_is_kept_short_printable_and_harmless(tmp_path: Path, name: str) -> None:
    recorder = Recorder(Writer(tmp_path / "a.hwj"))
    for _ in range(3):
        with recorder.span(name):
            recorder.mark(name)
    with recorder.span("evaluation"):
        pass
    recorder.close()
    assert (tmp_path / "a.hwj").stat().st_size < 16_000
    spans, marks = told(tmp_path / "a.hwj")
    assert spans == [*marks, "evaluation"]
    assert len(set(marks)) == 1
    assert len(marks[0]) <= NAME_LIMIT
    assert marks[0].encode().decode().isprintable()
    assert marks[0][:1] == name[:1] or not name[:1].isprintable()


def test_names_that_begin_alike_beyond_the_limit_are_one_name(tmp_path: Path) -> None:
    recorder = Recorder(Writer(tmp_path / "a.hwj"))
    for end in "abc":
        with recorder.span("x" * NAME_LIMIT + end):
            pass
    batch = read(tmp_path / "a.hwj")
    assert [record.text for record in batch.records if isinstance(record, Name)] == ["x" * NAME_LIMIT]


def test_more_names_than_numbers_never_give_a_span_anothers_name(tmp_path: Path) -> None:
    recorder = Recorder(Writer(tmp_path / "a.hwj"))
    expected = []
    for n in range(70_000):
        for name in (f"span {n}", "checkpoint_blocking", "") if n % 1000 == 0 else (f"span {n}",):
            expected.append(name)
            with recorder.span(name):
                pass
    recorder.close()
    batch = read(tmp_path / "a.hwj")
    assert batch.problems == []
    assert [name for name, _ in named_spans(batch.records)] == expected
    assert len(recorder._names) <= 0x10000


def test_an_activity_counts_after_any_number_of_other_names(tmp_path: Path) -> None:
    story = Story(tmp_path)
    rank = story.rank().span("evaluation", 1.0)
    for n in range(66_000):
        with rank.recorder.span(f"span {n}"):
            pass
    rank.steps(1, each=1.0).span("evaluation", 5.0).steps(1, each=1.0).finished()
    assert story.ledger().buckets[Bucket.WASTE_EVALUATION] >= 5_000_000_000


class Unspeakable:
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words for it")

    __repr__ = __str__


def deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


def circular() -> dict[str, Any]:
    ring: dict[str, Any] = {}
    ring["ring"] = ring
    return ring


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (float("nan"), True), (float("inf"), True), (Path("/x"), True), (b"\xff", True), ({1, 2}, True),
        ("\ud800\x1b[31m", True), ("x" * (3 << 20), True), (numpy.float32(1.5), True), (numpy.zeros(3), True),
        (10**5000, False), (circular(), False), ({(1, 2): 3}, False), (Unspeakable(), False), (deep(), False),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_any_attribute_is_written_or_said_to_be_unwritable(tmp_path: Path, value: object, kept: bool) -> None:
    recorder = Recorder(Writer(tmp_path / "a.hwj"))
    with recorder.span("my own", value=value):
        recorder.mark("mark", value=value)
    recorder.mark("after", n=1)
    batch = read(tmp_path / "a.hwj")
    assert batch.problems == []
    assert [type(record) for record in batch.records] == [Name, SpanBegin, Mark, SpanEnd, Mark]
    for record in batch.records[1:3]:
        assert isinstance(record, Mark | SpanBegin)
        assert record.attrs
        assert list(record.attrs) == ["value" if kept else "unwritable"]


def test_a_loop_may_be_numbered_by_an_array_librarys_integers(tmp_path: Path) -> None:
    recorder = Recorder(Writer(tmp_path / "a.hwj"))
    steps = [step for step, _ in recorder.steps(range(3), numpy.int64(7), numpy.int32(16))]  # type: ignore[arg-type]
    assert steps == [7, 8, 9]
    batch = read(tmp_path / "a.hwj")
    assert batch.problems == []
    [begin] = (record for record in batch.records if isinstance(record, LoopBegin))
    assert (begin.first, begin.batch_size) == (7, 16)
    assert [record.next for record in batch.records if isinstance(record, StepRun)][-1] == 10
