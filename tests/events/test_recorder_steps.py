"""The step meter: every step is counted, unlike ones stand alone, and a long job's journal stays small."""

import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from journals import finished_steps, read

from headway.events.journal import Cell, Writer
from headway.events.recorder import RUN_LIMIT, UNLIKE_LIMIT, Recorder
from headway.events.vocabulary import LoopBegin, SpanEnd, StepRun
from headway.testing import FakeClock


class Trainer:
    """A recorder on a clock turned by hand, and what can be read from its journal."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.recorder = Recorder(Writer(folder / "a.hwj", self.clock.now_ns), self.clock)
        self.path = folder / "a.hwj"

    def train(self, durations: Iterable[float], data: float = 0.0, first: int | None = None) -> None:
        """A loop of steps of these lengths in seconds, each after a wait for its data."""

        def batches() -> Iterator[float]:
            for duration in durations:
                self.clock.advance(data)
                yield duration

        for _, duration in self.recorder.steps(batches(), first):
            self.clock.advance(duration)

    @property
    def runs(self) -> list[StepRun]:
        return [record for record in read(self.path).records if isinstance(record, StepRun)]

    @property
    def cell(self) -> Cell:
        cell = read(self.path).cell
        assert cell is not None
        return cell

    @property
    def finished(self) -> int:
        return finished_steps(read(self.path))


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def seconds(run: StepRun) -> float:
    return (run.end_ns - run.begin_ns) / 1e9


# --- runs ------------------------------------------------------------------------------------------------------------


def test_the_first_step_stands_alone(trainer: Trainer) -> None:
    trainer.train([30.0] + [0.1] * 50)
    first, *rest = trainer.runs
    assert (first.count, first.first, first.next, seconds(first)) == (1, 0, 1, 30.0)
    assert sum(run.count for run in rest) == 50


def test_time_and_waits_of_all_steps_are_in_their_runs(trainer: Trainer) -> None:
    durations = [random.Random(5).choice((0.1, 0.11, 5.0)) for _ in range(3000)]
    trainer.train(durations, data=0.02)
    runs = trainer.runs
    assert trainer.finished == 3000
    assert sum(run.data_ns for run in runs) == 3000 * 20_000_000
    assert sum(map(seconds, runs)) == pytest.approx(sum(durations) + 3000 * 0.02)
    assert all(before.end_ns == after.begin_ns for before, after in itertools.pairwise(runs))
    assert all(run.count <= RUN_LIMIT for run in runs)


def test_an_outlier_stands_alone_with_its_own_times(trainer: Trainer) -> None:
    durations = [0.1] * 1000
    durations[400] = 20.0
    trainer.train(durations)
    [outlier] = [run for run in trainer.runs if run.first <= 400 < run.next]
    assert (outlier.first, outlier.next, outlier.count, seconds(outlier)) == (400, 401, 1, 20.0)


def test_an_outlier_that_waits_for_data_stands_alone_too(trainer: Trainer) -> None:
    def batches() -> Iterator[int]:
        for number in range(600):
            trainer.clock.advance(15.0 if number == 500 else 0.01)
            yield number

    for _ in trainer.recorder.steps(batches()):
        trainer.clock.advance(0.1)
    [outlier] = [run for run in trainer.runs if run.first <= 500 < run.next]
    assert (outlier.count, outlier.data_ns) == (1, 15_000_000_000)


def shifted(before: float, after: float) -> list[float]:
    return [before] * 5000 + [after] * 5000


def ragged(low: float, high: float, share: float) -> list[float]:
    chance = random.Random(11)
    return [chance.uniform(low, high) if chance.random() < share else low for _ in range(10_000)]


@pytest.mark.parametrize(
    "durations",
    [
        shifted(0.1, 10.0),
        shifted(10.0, 0.1),
        shifted(0.001, 5.0),
        [0.1, 3.0] * 5000,
        [0.1] * 3 + [2.0] * 5000 + [60.0] * 5000,
        ragged(0.1, 30.0, 1.0),
        ragged(0.1, 30.0, 0.3),
        ragged(0.01, 1.0, 0.1),
        [1.001**at for at in range(10_000)],
    ],
    ids=[
        "slower",
        "faster",
        "much slower",
        "in turn",
        "in stairs",
        "ragged",
        "often ragged",
        "ragged at times",
        "creeping",
    ],
)
def test_no_change_of_pace_makes_a_record_of_every_step_for_ever(trainer: Trainer, durations: list[float]) -> None:
    trainer.train(durations)
    assert trainer.finished == len(durations)
    runs = trainer.runs
    assert len(runs) < len(durations) // 5
    late = [run for run in runs if run.first >= len(durations) - 1000]
    assert len(late) < 250


def test_a_new_level_is_learnt_within_a_few_steps_and_outliers_from_it_still_stand_alone(trainer: Trainer) -> None:
    durations = shifted(0.1, 10.0)
    durations[8000] = 300.0
    trainer.train(durations)
    alone = [run.first for run in trainer.runs if run.count == 1]
    assert len([step for step in alone if 5000 <= step < 8000]) <= UNLIKE_LIMIT
    assert 8000 in alone


def test_a_million_like_steps_take_less_than_a_megabyte(trainer: Trainer) -> None:
    meter, clock = trainer.recorder.steps_meter, trainer.clock
    meter.open()
    for step in range(1_000_000):
        clock._now += 1_000_000
        meter.begin()
        clock._now += 100_000_000 + step % 7 * 1_000_000
        meter.end(step + 1)
    meter.close()
    trainer.recorder.close()
    assert trainer.path.stat().st_size <= 1 << 20
    assert trainer.finished == 1_000_000


# --- the cell --------------------------------------------------------------------------------------------------------


def test_the_cell_tells_of_the_step_under_way_and_of_the_wait_for_its_data(trainer: Trainer) -> None:
    seen = []

    def batches() -> Iterator[int]:
        for number in range(3):
            seen.append((trainer.cell.next, trainer.cell.since_ns))
            trainer.clock.advance(1.0)
            yield number

    for step, _ in trainer.recorder.steps(batches()):
        cell = trainer.cell
        assert (cell.next, cell.since_ns) == (step, trainer.clock.now_ns())
        trainer.clock.advance(2.0)
    assert seen == [(0, 0), (1, 0), (2, 0)]
    assert trainer.cell.since_ns == -1
    assert trainer.cell.count == 0


def test_runs_and_cell_always_account_for_each_step_once(trainer: Trainer) -> None:
    chance = random.Random(2)
    for done, (step, _) in enumerate(trainer.recorder.steps(range(2000))):
        assert step == done
        if step % 37 == 0:
            batch = read(trainer.path)
            runs = [record for record in batch.records if isinstance(record, StepRun)]
            assert batch.cell is not None
            assert sum(run.count for run in runs) + batch.cell.count == done
            assert batch.cell.first == (runs[-1].next if runs else 0)
            assert batch.cell.begin_ns == (runs[-1].end_ns if runs else batch.cell.begin_ns)
        trainer.clock.advance(chance.choice((0.1, 0.1, 0.1, 9.0)))


def test_a_break_counts_the_step_it_left(trainer: Trainer) -> None:
    for step, _ in trainer.recorder.steps(range(100)):
        trainer.clock.advance(1.0)
        if step == 41:
            break
    assert trainer.finished == 42
    assert trainer.cell.since_ns == -1
    trainer.train([1.0] * 8)
    assert trainer.finished == 50


def leave_by_return(trainer: Trainer) -> None:
    for step, _ in trainer.recorder.steps(range(100)):
        trainer.clock.advance(1.0)
        with trainer.recorder.span("inside"):
            if step == 41:
                return


def test_a_return_out_of_the_loop_counts_the_step_it_left(trainer: Trainer) -> None:
    leave_by_return(trainer)
    trainer.recorder.close()
    assert trainer.finished == 42


def fail_in_step(trainer: Trainer, number: int, in_span: bool) -> None:
    for step, _ in trainer.recorder.steps(range(100)):
        trainer.clock.advance(1.0)
        if step == number and in_span:
            with trainer.recorder.span("inside"):
                raise RuntimeError("boom")
        elif step == number:
            raise RuntimeError("boom")


@pytest.mark.parametrize("in_span", [False, True], ids=["in the body", "in a span in the body"])
@pytest.mark.parametrize("number", [0, 1, 41])
def test_an_exception_that_ends_the_process_leaves_its_step_open(trainer: Trainer, number: int, in_span: bool) -> None:
    with pytest.raises(RuntimeError) as caught:
        fail_in_step(trainer, number, in_span)
    begun = trainer.clock.now_ns() - 1_000_000_000
    trainer.recorder.close(caught.value)
    assert trainer.finished == number
    cell = trainer.cell
    assert (cell.next, cell.count, cell.since_ns) == (number, 0, begun)
    assert [record.failed for record in read(trainer.path).records if isinstance(record, SpanEnd)] == [1] * in_span


def test_an_exception_that_is_caught_counts_the_step_and_training_goes_on(trainer: Trainer) -> None:
    with pytest.raises(RuntimeError):
        fail_in_step(trainer, 41, in_span=False)
    assert trainer.cell.since_ns == -1
    trainer.train([1.0] * 8)
    trainer.recorder.close(ValueError("much later, elsewhere"))
    assert trainer.finished == 50


def test_an_exception_out_of_the_loader_counts_the_steps_before_it(trainer: Trainer) -> None:
    def batches() -> Iterator[int]:
        yield from range(5)
        raise OSError("the loader died")

    def train() -> None:
        for _ in trainer.recorder.steps(batches()):
            trainer.clock.advance(1.0)

    with pytest.raises(OSError, match="the loader died") as caught:
        train()
    trainer.recorder.close(caught.value)
    assert trainer.finished == 5
    assert trainer.cell.next == 5


# --- several loops ---------------------------------------------------------------------------------------------------


def test_epochs_go_on_numbering(trainer: Trainer) -> None:
    steps = [step for _ in range(3) for step, _ in trainer.recorder.steps(range(4))]
    assert steps == list(range(12))
    assert trainer.finished == 12
    begins = [record.first for record in read(trainer.path).records if isinstance(record, LoopBegin)]
    assert begins == [0, 4, 8]


def test_the_time_between_epochs_belongs_to_no_step(trainer: Trainer) -> None:
    for _ in range(3):
        trainer.train([1.0] * 10)
        trainer.clock.advance(100.0)
    assert sum(map(seconds, trainer.runs)) == 30.0


def test_a_loop_begins_at_the_step_it_is_given(trainer: Trainer) -> None:
    trainer.train([1.0] * 10, first=1000)
    trainer.train([1.0] * 10, first=500)
    assert [step for run in trainer.runs for step in range(run.first, run.next)] == [
        *range(1000, 1010),
        *range(500, 510),
    ]
    assert trainer.recorder.steps_meter.open() == 510


def test_a_loop_that_is_never_begun_or_has_no_batches_counts_nothing(trainer: Trainer) -> None:
    trainer.recorder.steps(range(10))
    trainer.train([])
    assert trainer.runs == []
    assert trainer.cell.count == 0


def test_a_loop_begun_anew_leaves_the_old_one_without_counting_twice(trainer: Trainer) -> None:
    forgotten = trainer.recorder.steps(range(100))
    for _ in range(5):
        next(forgotten)
        trainer.clock.advance(1.0)
    trainer.train([1.0] * 10)
    del forgotten
    trainer.recorder.close()
    # The fifth step was left before it was done.
    assert trainer.finished == 14


@pytest.mark.parametrize("left_by", ["its end", "break"])
def test_a_loop_inside_a_loop_loses_no_step_and_both_come_to_an_end(trainer: Trainer, left_by: str) -> None:
    def batches() -> Iterator[int]:
        for number in range(4):
            trainer.clock.advance(0.1)
            yield number

    begun = trainer.clock.now_ns()
    for step, _ in trainer.recorder.steps(batches()):
        trainer.clock.advance(1.0)
        for _ in trainer.recorder.steps(range(2)) if step < 2 else ():
            trainer.clock.advance(10.0)
        if step == 3 and left_by == "break":
            break
    assert trainer.cell.since_ns == -1
    trainer.recorder.close()
    batch = read(trainer.path)
    assert batch.problems == []
    runs = [record for record in batch.records if isinstance(record, StepRun)]
    assert sum(run.count for run in runs) == 8
    for before, after in itertools.pairwise(runs):
        assert begun <= before.begin_ns <= before.end_ns <= after.begin_ns <= after.end_ns


def test_a_clock_that_stands_still_is_no_obstacle(trainer: Trainer) -> None:
    trainer.train([0.0] * 5000)
    assert trainer.finished == 5000
    assert {(run.begin_ns, run.end_ns, run.data_ns) for run in trainer.runs} == {
        (trainer.clock.now_ns(), trainer.clock.now_ns(), 0)
    }
    assert len(trainer.runs) <= 5000 // RUN_LIMIT + 1
