"""How far a rank is, read from its journal while it writes it; and how long it may go without a step."""

from pathlib import Path

import pytest

from headway.events.journal import Writer
from headway.events.recorder import Recorder
from headway.events.vocabulary import Activity, Restored, Saved
from headway.launch.progress import BUSY_FACTOR, Lineage, RankWatch
from headway.testing import FakeClock


class Rank:
    """Writes a journal as a rank does, on a clock of its own."""

    def __init__(self, path: Path, lineage: Lineage) -> None:
        self.clock = FakeClock()
        self.recorder = Recorder(Writer(path), self.clock)
        self.watch = RankWatch([path, path.with_name("elsewhere")], lineage)

    def loop(self, first: int = 0) -> None:
        self.recorder.steps_meter.open(first)

    def steps(self, count: int, each_s: float) -> None:
        meter = self.recorder.steps_meter
        for _ in range(count):
            meter.begin()
            self.clock.advance(each_s)
            meter.end(meter.steps_done + 1)
        self.watch.poll()

    def silent_s(self) -> float:
        return (self.clock.now_ns() - self.watch.last_ns) / 1e9

    def patience_s(self) -> float:
        self.watch.poll()
        return self.watch.patience_ns() / 1e9


@pytest.fixture
def lineage() -> Lineage:
    return Lineage()


@pytest.fixture
def rank(tmp_path: Path, lineage: Lineage) -> Rank:
    return Rank(tmp_path / "rank", lineage)


def test_steps_are_seen_as_they_end(rank: Rank, lineage: Lineage) -> None:
    rank.watch.poll()
    assert rank.watch.steps == 0
    rank.loop()
    for done in range(1, 600):
        rank.steps(1, 0.1)
        assert (rank.watch.steps, rank.watch.next, lineage.reached) == (done, done, done)
    assert rank.watch.typical_ns == pytest.approx(0.1e9, rel=0.01)
    assert rank.silent_s() == 0


def test_patience_is_a_minute_at_least_and_follows_the_pace(rank: Rank) -> None:
    rank.loop()
    rank.steps(10, 0.1)
    assert rank.patience_s() == 60
    rank.steps(300, 10.0)
    assert rank.patience_s() == pytest.approx(200, rel=0.01)


def test_a_pause_that_was_seen_once_is_allowed_for_ever_after(rank: Rank) -> None:
    rank.loop()
    rank.steps(10, 0.1)
    rank.steps(1, 100.0)
    rank.steps(10, 0.1)
    assert rank.patience_s() == pytest.approx(300, rel=0.01)


@pytest.mark.parametrize("activity", [Activity.CHECKPOINT_BLOCKING, Activity.EVALUATION, Activity.PT2_COMPILATION])
def test_what_takes_its_time_gets_more_of_it(rank: Rank, activity: Activity) -> None:
    rank.loop()
    rank.steps(10, 0.1)
    with rank.recorder.span(activity):
        assert rank.patience_s() == 60 * BUSY_FACTOR
    assert rank.patience_s() == 60
    with rank.recorder.span("thinking"):
        assert rank.patience_s() == 60


def test_between_loops_there_is_more_time_and_the_break_is_none_of_the_next_loop(rank: Rank) -> None:
    rank.loop()
    rank.steps(10, 0.1)
    rank.recorder.steps_meter.close()
    assert rank.patience_s() == 60 * BUSY_FACTOR
    rank.clock.advance(500)
    rank.loop(10)
    assert rank.patience_s() == 60
    assert rank.silent_s() == 0, "the evaluation between two epochs is no hang of the second"
    rank.steps(3, 0.1)
    assert rank.watch.steps == 13


def test_steps_after_a_restore_are_counted_on_from_there(tmp_path: Path, lineage: Lineage) -> None:
    first = Rank(tmp_path / "first", lineage)
    first.loop()
    first.steps(10, 0.1)
    first.recorder.record(Saved(t_ns=first.clock.now_ns(), step=8, path="/ck", file="1:2"))
    first.watch.poll()
    # It resumes by itself: its own count begins at 0, and only the file tells where it is.
    second = Rank(tmp_path / "second", lineage)
    second.recorder.record(Restored(t_ns=second.clock.now_ns(), step=None, path="/moved", file="1:2"))
    second.loop()
    second.steps(2, 0.1)
    assert (second.watch.steps, second.watch.next, lineage.reached) == (2, 10, 10)
    second.steps(1, 0.1)
    assert lineage.reached == 11
    # It says itself where it goes on.
    third = Rank(tmp_path / "third", lineage)
    third.recorder.record(Restored(t_ns=third.clock.now_ns(), step=8))
    third.loop(8)
    third.steps(2, 0.1)
    assert (third.watch.next, lineage.reached) == (10, 11)


def test_a_job_without_checkpoints_makes_progress_only_beyond_what_it_had_reached(
    tmp_path: Path, lineage: Lineage
) -> None:
    for number, (steps, reached) in enumerate([(10, 10), (5, 10), (12, 12)]):
        rank = Rank(tmp_path / str(number), lineage)
        rank.loop()
        rank.steps(steps, 0.1)
        assert lineage.reached == reached
