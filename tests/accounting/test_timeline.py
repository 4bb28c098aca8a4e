"""One process's records, folded: what periods cost, and a process that says more than once who it is."""

import time
from itertools import pairwise

from headway.accounting.members import Member
from headway.accounting.timeline import REACH, Timeline
from headway.events.vocabulary import (
    KNOWN_NAMES,
    Activity,
    Mark,
    Period,
    Process,
    Record,
    SpanBegin,
    SpanEnd,
    StepRun,
)

SECOND = 10**9
SAVING, EVALUATING = KNOWN_NAMES[Activity.CHECKPOINT_BLOCKING], KNOWN_NAMES[Activity.EVALUATION]


def process(t_s: int = 0, **fields: object) -> Process:
    told = {"boot": "b", "node": "n", "pid": 1, "job": "j", "started_ns": t_s * SECOND} | fields
    return Process(t_ns=t_s * SECOND, wall_ns=t_s * SECOND, **told)  # type: ignore[arg-type]


def folded(*records: Record) -> Timeline:
    timeline = Timeline()
    timeline.add(records)
    return timeline


def saves(count: int) -> list[Record]:
    """Many short spans with as long pauses, of which nothing is ever settled."""
    told: list[Record] = []
    for n in range(count):
        told += [SpanBegin(SAVING, n, 7, 2 * n * SECOND), SpanEnd(0, n, (2 * n + 1) * SECOND)]
    return told


def time_to_fold(periods: int, spans: int) -> float:
    timeline = folded(process(), *saves(spans))
    end = 2 * spans * SECOND
    told = [Period(EVALUATING, 7, 0, end) for _ in range(periods)]
    began = time.thread_time()  # of the CPU: what else runs on the machine does not count
    timeline.add(told)
    return time.thread_time() - began


def test_periods_over_all_of_a_long_history_cost_no_more_than_over_a_short_one() -> None:
    short, long = (min(time_to_fold(40, spans) for _ in range(3)) for spans in (REACH, 32 * REACH))
    assert long < 8 * short


def test_periods_told_over_and_over_leave_few_pieces() -> None:
    told: list[Record] = [process()]
    for end in range(SECOND, 5000 * SECOND, SECOND):
        told += [Period(EVALUATING, 7, end - SECOND, end), Period(EVALUATING, 7, 0, end)]
    timeline = folded(*told)
    assert timeline.look(end, True).tail == [(0, end, Activity.EVALUATION, -1, 0, 0)]


def test_a_period_that_ends_before_it_begins_takes_nothing() -> None:
    timeline = folded(process(), Period(EVALUATING, 7, 8 * SECOND, 3 * SECOND))
    assert [piece.what for piece in timeline.look(10 * SECOND, True).tail] == ["", ""]
    assert [(bar.begin_ns, bar.end_ns) for bar in timeline.bars()] == [(8 * SECOND, 8 * SECOND)]


def test_a_later_word_on_who_a_process_is_changes_its_part_and_nothing_else() -> None:
    first = process(5, role="process", program="train.py", launcher="agent", started_ns=2 * SECOND)
    timeline = folded(first, process(9, role="rank", rank=3, local_rank=1, world_size=4, program="x", pid=8))
    assert timeline.process == process(
        5, role="rank", rank=3, local_rank=1, world_size=4, program="train.py", launcher="agent", started_ns=2 * SECOND
    )
    assert timeline.last_ns == 9 * SECOND


def test_records_before_the_first_word_on_who_writes_them_are_counted_once_it_comes() -> None:
    timeline = Timeline()
    span = [SpanBegin(EVALUATING, 1, 7, 3 * SECOND), SpanEnd(0, 1, 5 * SECOND), Mark(t_ns=5 * SECOND, name="m")]
    timeline.add(span)
    assert timeline.last_ns == 0
    timeline.add([process(6, started_ns=SECOND), StepRun(0, 1, 0, 1, 6 * SECOND, 7 * SECOND, 0)])
    pieces = timeline.look(7 * SECOND, True).init
    assert pieces[0].begin_ns == SECOND
    assert pieces[-1].end_ns == 7 * SECOND
    assert all(a.end_ns == b.begin_ns for a, b in pairwise(pieces))
    assert len(timeline.marks) == 1


def test_a_life_has_no_end_while_it_is_lived() -> None:
    timeline = folded(process(5, started_ns=2 * SECOND))
    assert timeline.process is not None
    dead, alive = (Member("p", timeline, timeline.process, 0, alive=lives) for lives in (False, True))
    assert dead.life == (2 * SECOND, 5 * SECOND)
    assert alive.life[1] > 10**18
