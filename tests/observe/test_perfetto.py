import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from headway.accounting.ledger import Ledger, by_bucket
from headway.observe.perfetto import moments, rank_stretches, trace
from headway.testing import Story

Event = dict[str, Any]
HOSTILE = '</script><img src=x onerror="alert(1)"> "\\ \N{SNOWMAN} \u2028'


@pytest.fixture
def failed_once(tmp_path: Path) -> Ledger:
    """Two ranks, odd times; rank 1 dies, both start again, rank 0 leaves 5 s before rank 1."""
    story = Story(tmp_path)
    for number in range(2):
        rank = story.rank(number, 2, node=f"node-{number}", launch="a")
        rank.span("imports", 1.234567891 + number).span("train_module_creation", 3.3)
        rank.steps(7, each=0.777777777, data=0.1, inside={4: ("checkpoint_blocking", 0.333333333)}).saved(7)
        rank.steps(9, each=0.777777777, first=7)
        rank.killed(seen=True) if number else rank.crashed()
    for number in range(2):
        rank = story.rank(number, 2, start=40.000000001, node=f"node-{number}", launch="b")
        rank.span("imports", 2).restored(7).steps(20, each=0.9, first=7).saved(27).wait(0.5 + 5 * number)
        rank.finished()
    return story.ledger()


def events_of(ledger: Ledger) -> list[Event]:
    """The trace as a viewer reads it: from JSON by the book, numbers as written."""
    text = json.dumps(trace(ledger), allow_nan=False)
    events: list[Event] = json.loads(text, parse_float=Decimal)["traceEvents"]
    return events


def names(events: list[Event], kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == kind}


def ns(microseconds: Decimal | int) -> int:
    nanoseconds = Decimal(microseconds) * 1000
    assert nanoseconds == int(nanoseconds), "finer than a nanosecond"
    return int(nanoseconds)


def bucket_slices(events: list[Event], rank: int) -> list[Event]:
    threads = names(events, "thread_name")
    return [
        e for e in events if e["ph"] == "X" and e["pid"] == rank and threads[rank, e["tid"]] == "time by bucket"
    ]  # fmt: skip


def test_bucket_slices_of_a_rank_add_up_to_its_wall_time_to_the_nanosecond(failed_once: Ledger) -> None:
    events = events_of(failed_once)
    for rank in failed_once.ranks:
        slices = bucket_slices(events, rank)
        assert sum(ns(e["dur"]) for e in slices) == sum(failed_once.rank_sums(rank).values()) == failed_once.wall_ns
        by_name: dict[str, int] = defaultdict(int)
        for e in slices:
            by_name[e["args"]["bucket"]] += ns(e["dur"])
        expected = {str(key): total for key, total in by_bucket(failed_once.rank_sums(rank)).items() if total}
        assert by_name == expected


def test_bucket_slices_follow_one_another_without_gap_or_overlap(failed_once: Ledger) -> None:
    events = events_of(failed_once)
    for rank in failed_once.ranks:
        at = 0
        for e in bucket_slices(events, rank):
            assert ns(e["ts"]) == at
            at += ns(e["dur"])


def test_slices_of_one_thread_nest_even_where_recorded_spans_cross(tmp_path: Path) -> None:
    story = Story(tmp_path)
    rank = story.rank()
    first, second = rank.recorder.span("first"), rank.recorder.span("second")
    first.__enter__()
    rank.wait(1)
    second.__enter__()
    rank.wait(1)
    first.__exit__(None, None, None)
    rank.wait(1)
    second.__exit__(None, None, None)
    with rank.during("outer"):
        rank.span("inner", 1)
    rank.finished()
    events = events_of(story.ledger())
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            tracks[e["pid"], e["tid"]].append((ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])))
    for slices in tracks.values():
        for a, b in slices:
            assert all(b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d) for c, d in slices)
    assert {"first", "second", "outer", "inner"} <= {e["name"] for e in events}
    assert "spans, overlapping" in names(events, "thread_name").values()


def test_every_attempt_failure_and_checkpoint_is_on_the_job_track(failed_once: Ledger) -> None:
    events = events_of(failed_once)
    (job,) = (pid for (pid, _), name in names(events, "process_name").items() if name == "job story")
    attempts = [e for e in events if e["ph"] == "X" and e["pid"] == job]
    assert [e["name"] for e in attempts] == ["attempt 0 (failed on rank 0)", "attempt 1 (ended)"]
    assert sum(ns(e["dur"]) for e in attempts) == failed_once.wall_ns
    told = [e["name"] for e in events if e["ph"] == "i" and e["pid"] == job]
    assert told == [
        "checkpoint saved: step 7", "rank 0 failed", "checkpoint restored: step 7", "checkpoint saved: step 27"
    ]  # fmt: skip
    assert [m.what for m in moments(failed_once)] == ["saved", "failed", "restored", "saved"]


def test_each_rank_is_a_process_named_with_its_node_in_order(failed_once: Ledger) -> None:
    events = events_of(failed_once)
    assert set(names(events, "process_name").values()) == {"job story", "rank 0 (node-0)", "rank 1 (node-1)"}
    places = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert sorted(places, key=lambda pid: places[pid]) == [2, 0, 1]
    threads = names(events, "thread_name")
    assert all((e["pid"], e["tid"]) in threads for e in events if e["ph"] != "M")
    assert len({tid for _, tid in threads}) == len(threads)


def test_every_event_has_what_the_format_asks_for(failed_once: Ledger) -> None:
    for e in events_of(failed_once):
        assert isinstance(e["name"], str)
        assert isinstance(e["pid"], int)
        assert isinstance(e["tid"], int)
        assert isinstance(e["args"], dict)
        match e["ph"]:
            case "X":
                assert e["ts"] >= 0
                assert e["dur"] >= 0
            case "i":
                assert e["ts"] >= 0
                assert e["s"] in ("t", "p")
            case phase:
                assert phase == "M"


def test_hostile_names_survive_as_data(tmp_path: Path) -> None:
    story = Story(tmp_path)
    rank = story.rank(node=HOSTILE)
    rank.span(HOSTILE, 1)
    rank.recorder.mark(HOSTILE, why=HOSTILE, loss=float("nan"))
    rank.steps(3, each=1).finished()
    events = events_of(story.ledger())
    kept = HOSTILE.replace("\u2028", "\N{REPLACEMENT CHARACTER}")
    assert kept in {e["name"] for e in events if e["ph"] == "X"}
    (mark,) = (e for e in events if e["ph"] == "i")
    assert (mark["name"], mark["args"]) == (kept, {"why": HOSTILE, "loss": "nan"})
    assert f"rank 0 ({HOSTILE})" in names(events, "process_name").values()


def test_rank_without_a_journal_is_drawn_as_unattributed(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.rank(0, 2).steps(5, each=1).finished()
    ledger = story.ledger()
    (stretch,) = rank_stretches(ledger, 1)
    assert stretch.key == ("unattributed", "")
    assert stretch.end_ns - stretch.begin_ns == ledger.wall_ns
    assert "rank 1 (no journal)" in names(events_of(ledger), "process_name").values()


def test_each_publication_is_a_process_of_its_own_beside_the_ranks(tmp_path: Path) -> None:
    story = Story(tmp_path)
    for number in range(2):
        story.rank(number, 2).steps(10, each=1).handed_over("x", 10).finished()
    story.publisher(start=20, node="cpu-7").span("weights", 3).killed(seen=True)
    last = story.publisher(start=30, node="cpu-8").span("weights", 4).published("x", version="v1")
    last.finished()
    story.publisher(start=50, node=HOSTILE).published("y", step=20).finished()
    ledger = story.ledger()
    events = events_of(ledger)
    processes = names(events, "process_name")
    assert list(processes.values())[-2:] == ["publisher of step 10 (cpu-7, cpu-8)", f"publisher of step 20 ({HOSTILE})"]
    pid = next(pid for (pid, _), name in processes.items() if "cpu-7" in name)
    assert pid not in (*ledger.ranks, 2)
    slices = [
        (e["name"], ns(e["ts"]) // 10**9, ns(e["dur"]) // 10**9) for e in events if e["pid"] == pid and e["ph"] == "X"
    ]
    assert slices == [("try 1", 20, 3), ("try 2 (published)", 30, 4), ("weights", 20, 3), ("weights", 30, 4)]
    assert [e["args"]["version"] for e in events if e["pid"] == pid and e["ph"] == "i"] == ["v1"]
    threads, pids = names(events, "thread_name"), {pid for pid, _ in processes}
    assert len({tid for _, tid in threads}) == len(threads)
    assert not {tid for _, tid in threads} & pids
    for rank in ledger.ranks:
        assert sum(ns(e["dur"]) for e in bucket_slices(events, rank)) == ledger.wall_ns
