"""What holds for every journal, however it came about."""

import dataclasses
import os
import tempfile
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headway.accounting.attempts import Instant
from headway.accounting.ledger import JobAccounts, Ledger
from headway.accounting.publishing import Publication
from headway.accounting.rollup import roll_up
from headway.events.journal import HEADER, HEADER_BYTES, MAGIC, Cell, Follower, frame
from headway.events.vocabulary import (
    FORMAT,
    Activity,
    Dropped,
    LoopBegin,
    Mark,
    Name,
    Period,
    Process,
    ProcessEnd,
    ProcessGone,
    Record,
    Restored,
    Saved,
    Scheduled,
    SpanBegin,
    SpanEnd,
    StepRun,
    Told,
    encode,
)
from headway.testing import Story

SECOND = 10**9
NAMES = [*Activity, "forward", "<script>"]
SAID = [Name(number, str(name)) for number, name in enumerate(NAMES, 1)]
NOW = Instant("a", 100 * SECOND, 5_000 * SECOND)

moments = st.integers(2 * SECOND, 90 * SECOND) | st.integers(2, 90).map(lambda s: s * SECOND)
steps = st.integers(0, 30)
paths = st.sampled_from(("", "", "a.pt", "b.pt"))
roles = st.sampled_from(("rank", "rank", "rank", "process", "launcher", "supervisor", "publisher"))
ids = st.sampled_from(("", "x", "y"))
outcomes = st.sampled_from(("running", "published", "rejected", "failed", 7, None))


@st.composite
def step_runs(draw: st.DrawFn) -> StepRun:
    begin = draw(moments)
    first = draw(steps)
    count = draw(st.integers(0, 8))
    length = draw(st.integers(0, 20 * SECOND))
    flags, data = draw(st.integers(0, 1)), draw(st.integers(-5, 20 * SECOND))
    return StepRun(flags, count, first, first + count, begin, begin + length, data)


@st.composite
def periods(draw: st.DrawFn) -> Period:
    begin = draw(st.integers(-5 * SECOND, 90 * SECOND))
    return Period(draw(st.integers(1, len(NAMES))), 7, begin, begin + draw(st.integers(-5, 40 * SECOND)))


@st.composite
def records(draw: st.DrawFn) -> list[Record]:
    """One process's records: any mixture, in any order, with any times."""
    boot = draw(st.sampled_from("ab"))
    started = draw(moments)
    begins = started + draw(st.integers(-SECOND, 5 * SECOND))
    process = Process(
        t_ns=begins, wall_ns=begins + (4_000 if boot == "a" else 4_000 + draw(st.sampled_from((0, 0, 70)))) * SECOND,
        boot=boot, node=boot, pid=draw(st.integers(1, 2)), job="j", role=draw(roles),
        rank=draw(st.integers(0, 2)), world_size=draw(st.integers(1, 3)),
        started_ns=started, launcher=draw(st.sampled_from(("", "l"))), launch=draw(st.sampled_from(("", "0", "1"))),
        launcher_started_ns=draw(st.none() | moments), program=draw(st.sampled_from(("train.py", "tune.py"))),
    )  # fmt: skip
    span = st.integers(1, 6)
    some = st.one_of(
        st.builds(SpanBegin, st.integers(1, len(NAMES)), span, st.just(7), moments),
        st.builds(SpanEnd, st.integers(0, 1), span, moments),
        step_runs(),
        step_runs(),
        periods(),
        st.builds(LoopBegin, t_ns=moments, first=steps, batch_size=st.sampled_from((None, 8))),
        st.builds(Saved, t_ns=moments, step=steps, path=paths, file=paths),
        st.builds(Restored, t_ns=moments, step=st.none() | steps, path=paths, file=paths),
        st.builds(dataclasses.replace, st.just(process), t_ns=moments, role=roles, rank=st.integers(0, 2)),
        st.builds(ProcessEnd, t_ns=moments, error=st.sampled_from((None, "boom"))),
        st.builds(ProcessGone, t_ns=moments, exit_code=st.sampled_from((None, 0, 1, -9))),
        st.builds(
            Scheduled,
            t_ns=moments,
            eligible_wall_ns=moments.map(lambda t: t + 3_990 * SECOND),
            allocated_wall_ns=moments.map(lambda t: t + 3_990 * SECOND),
            source=st.just("s"),
        ),
        st.builds(Dropped, t_ns=moments, count=st.integers(1, 5)),
        st.builds(Mark, t_ns=moments, name=st.just(Told.ANCHOR), attrs=st.fixed_dictionaries({"id": ids})),
        st.builds(
            Mark,
            t_ns=moments,
            name=st.just(Told.PUBLISHED),
            attrs=st.fixed_dictionaries({"id": ids, "outcome": outcomes, "accelerators": st.sampled_from((4, "x"))}),
        ),
    )
    body = draw(st.lists(some, max_size=14))
    if draw(st.booleans()):
        body.sort(key=lambda record: getattr(record, "t_ns", None) or getattr(record, "end_ns", 0))
    return [process, *body]


@st.composite
def cells(draw: st.DrawFn) -> Cell | None:
    if draw(st.booleans()):
        return None
    begin, first, count = draw(moments), draw(steps), draw(st.integers(0, 5))
    end = begin + draw(st.integers(0, 5 * SECOND))
    since = draw(st.sampled_from((-1, 0)) | st.integers(0, 3 * SECOND).map(lambda t: end + t))
    return Cell(first, first + count, begin, end, draw(st.integers(0, 5 * SECOND)), count, since)


jobs = st.lists(st.tuples(records(), cells(), st.booleans()), min_size=1, max_size=5)
Job = list[tuple[list[Record], Cell | None, bool]]


def account(job: Job, now: Instant = NOW) -> Ledger | None:
    accounts = JobAccounts()
    for at, (told, cell, _) in enumerate(job):
        accounts.add(f"p{at}", [*SAID, *told], cell)
    return accounts.ledger(now, {f"p{at}" for at, (_, _, alive) in enumerate(job) if alive})


def check(ledger: Ledger) -> None:
    """The parts of the job, of each attempt and of each rank are not negative, and add up to it."""
    assert ledger.wall_ns >= 0
    assert sum(ledger.sums.values()) == ledger.wall_ns
    assert min(ledger.sums.values(), default=0) >= 0
    for attempt in ledger.attempts:
        assert sum(attempt.sums.values()) == attempt.wall_ns
        for view in attempt.views.values():
            assert sum(view.sums_all.values()) == attempt.wall_ns, view.sums_all
            assert min(view.sums_all.values(), default=0) >= 0
            pieces = view.pieces()
            assert sum(end - begin for begin, end, _ in pieces) == attempt.wall_ns
            assert all(a[1] == b[0] for a, b in pairwise(pieces)), "pieces leave no gap and do not overlap"
            drawn: dict[object, int] = {}
            for begin, end, key in pieces:
                drawn[key] = drawn.get(key, 0) + end - begin
            for key in view.sums_all.keys() | drawn.keys():  # steps of one run are shared out piece by piece
                assert abs(view.sums_all.get(key, 0) - drawn.get(key, 0)) <= len(pieces)
    for rank in ledger.ranks:
        assert min(ledger.rank_sums(rank).values(), default=0) >= 0
    assert sum(ledger.times_to_recover_ns) == sum(ns for (b, _), ns in ledger.sums.items() if b.startswith("recover."))
    assert min(ledger.steps.values()) >= 0
    for each in ledger.publications:
        drawn_pieces = each.pieces()
        assert all(begin < end for begin, end, _ in drawn_pieces)
        assert all(a[1] <= b[0] for a, b in pairwise(drawn_pieces)), "no time is drawn twice"
        assert sum(end - begin for begin, end, _ in drawn_pieces) <= each.took_ns


def the_job(ledger: Ledger) -> object:
    return ledger.sums, ledger.failures, ledger.steps, ledger.state, [a.wall_ns for a in ledger.attempts]


def pieces(publication: Publication) -> list[tuple[int, int, str]]:
    """Begin, length and span."""
    return [(begin, end - begin, what) for begin, end, what in publication.pieces()]


def told(ledger: Ledger | None) -> object:
    if ledger is None:
        return None
    ranks = {rank: ledger.rank_sums(rank) for rank in ledger.ranks}
    publications = [
        (
            each.id,
            each.outcome,
            each.saved_ns,
            len(each.tries),
            [(b - ledger.begin_ns, e, w) for b, e, w in pieces(each)],
        )
        for each in ledger.publications
    ]
    return the_job(ledger), ranks, ledger.times_to_recover_ns, publications


def shift(record: Record, ns: int, wall_ns: int) -> Record:
    if isinstance(record, Name):
        return record
    if isinstance(record, StepRun | Period):
        return dataclasses.replace(record, begin_ns=record.begin_ns + ns, end_ns=record.end_ns + ns)
    changes: dict[str, int] = {"t_ns": record.t_ns + ns}
    for name in ("started_ns", "launcher_started_ns"):
        if getattr(record, name, None) is not None:
            changes[name] = getattr(record, name) + ns
    for name in ("wall_ns", "eligible_wall_ns", "allocated_wall_ns"):
        if hasattr(record, name):
            changes[name] = getattr(record, name) + wall_ns
    return dataclasses.replace(record, **changes)


@given(jobs)
def test_the_parts_of_any_journal_sum_to_the_whole_and_none_is_negative(job: Job) -> None:
    ledger = account(job)
    if ledger is not None:
        check(ledger)


@given(jobs)
def test_a_job_is_the_same_with_and_without_its_publishers(job: Job) -> None:
    def is_publisher(told: list[Record]) -> bool:
        return [record.role for record in told if isinstance(record, Process)][-1] == "publisher"

    trainers = [(told if not is_publisher(told) else [], cell, alive) for told, cell, alive in job]
    with_them, without = account(job), account(trainers)
    assert (with_them and the_job(with_them)) == (without and the_job(without))
    assert (with_them and with_them.notes) == (without and without.notes)
    assert without is None or all(not each.tries for each in without.publications)


@given(jobs, st.integers(1, 10**6).map(lambda s: s * SECOND), st.integers(1, 10**6).map(lambda s: s * SECOND))
def test_shifting_all_clocks_changes_nothing(job: Job, ns: int, wall_ns: int) -> None:
    moved: Job = []
    for records, cell, alive in job:
        if cell is not None:
            since = cell.since_ns + ns if cell.since_ns > 0 else cell.since_ns
            cell = dataclasses.replace(cell, begin_ns=cell.begin_ns + ns, end_ns=cell.end_ns + ns, since_ns=since)
        moved.append(([shift(record, ns, wall_ns) for record in records], cell, alive))
    later = Instant(NOW.boot, NOW.t_ns + ns, NOW.wall_ns + wall_ns)
    assert told(account(job)) == told(account(moved, later))


@given(jobs)
def test_adding_records_one_by_one_equals_reading_them_at_once(job: Job) -> None:
    accounts = JobAccounts()
    alive = {f"p{at}" for at, (_, _, lives) in enumerate(job) if lives}
    for at, (records, _, _) in enumerate(job):
        for record in [*SAID, *records]:
            accounts.add(f"p{at}", [record])
            accounts.ledger(NOW, alive)
    for at, (_, cell, _) in enumerate(job):
        accounts.add(f"p{at}", [], cell)
    assert told(accounts.ledger(NOW, alive)) == told(account(job))


@given(jobs)
def test_a_rolled_up_process_gives_the_same_ledger_as_its_records(job: Job) -> None:
    accounts = JobAccounts()
    alive = {f"p{at}" for at, (_, _, lives) in enumerate(job) if lives}
    for at, (records, cell, lives) in enumerate(job):
        everything = [*SAID, *records]
        if lives:
            accounts.add(f"p{at}", everything, cell)
        else:
            accounts.add_finished(f"p{at}", roll_up(everything, cell), lambda r=everything, c=cell: (r, c))
    ledger = accounts.ledger(NOW, alive)
    assert told(ledger) == told(account(job))
    if ledger is not None:
        check(ledger)


@given(records(), st.data())
def test_truncation_at_any_byte_still_gives_a_valid_ledger(records: list[Record], data: st.DataObject) -> None:
    image = HEADER.pack(MAGIC, FORMAT).ljust(HEADER_BYTES, b"\0") + b"".join(frame(encode(r)) for r in records)
    length = data.draw(st.integers(0, len(image)))
    path = Path(tempfile.gettempdir()) / f"headway-property-{os.getpid()}.hwj"
    try:
        path.write_bytes(image[:length])
        batch = Follower(path).poll()
    finally:
        path.unlink(missing_ok=True)
    assert batch.records == records[: len(batch.records)]
    accounts = JobAccounts()
    accounts.add("p", batch.records, batch.cell, batch.problems)
    ledger = accounts.ledger(NOW)
    if ledger is not None:
        check(ledger)


def test_a_real_journal_cut_at_every_byte_still_gives_a_valid_ledger(tmp_path: Path) -> None:
    story = Story(tmp_path)
    rank = story.rank()
    with rank.during("train_module_creation"):
        rank.span("checkpoint_restore", 2)
    rank.restored(3).steps(40, each=1.0, data=0.2, inside={7: ("checkpoint_blocking", 3.0)}, first=3).saved(30)
    rank.finished()
    source = story.paths.journal("p1001")
    image = source.read_bytes()
    assert len(image) < 8000
    cut = tmp_path / "cut.hwj"
    for length in range(len(image) + 1):
        cut.write_bytes(image[:length])
        accounts = JobAccounts()
        batch = Follower(cut).poll()
        accounts.add("p", batch.records, batch.cell, batch.problems)
        ledger = accounts.ledger(NOW)
        if ledger is not None:
            check(ledger)
