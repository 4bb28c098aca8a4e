"""When to save: the user's words for it, and that all ranks come to the same answer without queueing saves."""

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.checkpoint.schedule import Due, EverySteps, Schedule, Timed, schedule
from headway.errors import InputError


def alone(*numbers: int) -> list[int]:
    return list(numbers)


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "seconds"),
    [("90s", 90), ("90 s", 90), ("1.5min", 90), ("10min", 600), ("2m", 120), ("1h", 3600), ("30sec", 30), (" 5s ", 5),
     (timedelta(minutes=3), 180), (timedelta(milliseconds=500), 0.5)],
)  # fmt: skip
def test_a_time_is_understood(interval: str | timedelta, seconds: float) -> None:
    made, step_s = schedule(interval, alone, True), seconds / 100
    due = saves(made, steps=350, step_s=step_s)
    assert len(due) == 3
    assert all(abs((after - before) * step_s - seconds) <= 2 * step_s for before, after in pairwise(due))


@pytest.mark.parametrize(
    "interval",
    ["", "often", "10", "10 parsecs", "1.2.3s", "-5s", "0s", "automatic", 0, -3, True, False, 2.5, timedelta(0),
     timedelta(seconds=-1), "infs", "1e3s", b"10s"],
)  # fmt: skip
def test_any_other_word_is_refused_with_those_that_are_known(interval: Any) -> None:
    with pytest.raises(InputError, match=r'interval=.* is none: give "auto", a whole number of steps, a time'):
        schedule(interval, alone, True)


def test_none_saves_only_when_told() -> None:
    assert saves(schedule(None, alone, True), steps=1000, step_s=100.0) == []


# --- a clock that is driven ------------------------------------------------------------------------------------------


class Job:
    """A job whose steps, saves and uploads take as long as given, with two slots of memory. A save that is due takes
    the slot that has not the newest one; if that is still being uploaded, it is skipped."""

    def __init__(self, made: Schedule, step_s: float, block_s: float = 0.0, upload_s: float = 0.0) -> None:
        self.made, self.step_s, self.block_s, self.upload_s = made, step_s, block_s, upload_s
        self.saved, self.dues, self.queued = list[int](), list[Due](), 0
        self._steps, self._now, self._newest, self._uploads = 0, 0.0, 0, dict[int, float]()

    def run(self, steps: int, inflation: float = 1.0) -> "Job":
        first, self._steps = self._steps, self._steps + steps
        for step in range(first, self._steps):
            self._now += self.step_s * (inflation if self._uploads else 1.0)
            for slot in [slot for slot, until in self._uploads.items() if until <= self._now]:
                del self._uploads[slot]
                self.made.uploaded(self._now)
            if (due := self.made.after(step, self._now)) is not None:
                self._save(step, due)
        return self

    def _save(self, step: int, due: Due) -> None:
        slot = 1 - self._newest
        done = slot not in self._uploads
        self._now += self.block_s * done
        if done:
            self.saved.append(step)
            self.dues.append(due)
            self.queued += due.durable and bool(self._uploads)
            self._newest = slot
            if due.durable:
                self._uploads[slot] = self._now + self.upload_s
        self.made.saved(done, self.block_s * done, self._now, due.durable)


def saves(made: Schedule, steps: int, step_s: float, block_s: float = 0.0, upload_s: float = 0.0) -> list[int]:
    """At which steps of a job like this a schedule saves."""
    return Job(made, step_s, block_s, upload_s).run(steps).saved


@given(st.integers(1, 50))
def test_steps_are_counted_in_what_training_goes_on_with(every: int) -> None:
    made = schedule(every, alone, True)
    assert [step + 1 for step in range(200) if made.after(step, 0.0)] == list(range(every, 201, every))


def test_a_fixed_number_of_steps_is_kept_to_even_if_the_save_has_to_wait() -> None:
    assert EverySteps(3).after(2, 0.0) == Due(durable=True, may_skip=False)


def test_a_time_that_is_not_over_after_a_restart_begins_anew() -> None:
    made = schedule("100s", alone, True)
    assert made.after(5000, 1e9) is None, "the first step only starts the clock"


def test_a_save_that_was_skipped_is_due_again_at_the_next_step() -> None:
    made = Timed(alone, True, seconds=10.0)
    now, step = 0.0, 0
    while (due := made.after(step, now)) is None:
        now, step = now + 1.0, step + 1
    assert due.may_skip
    made.saved(False, 0.0, now, due.durable)
    assert made.after(step + 1, now + 1.0) is not None


@settings(max_examples=20, deadline=None)
@given(
    step_s=st.floats(0.01, 30.0), block_s=st.floats(0.001, 20.0), upload_s=st.floats(0.01, 2000.0),
    failures=st.integers(0, 200), inflation=st.floats(1.0, 2.0),
)  # fmt: skip
def test_auto_settles_where_uploads_do_not_queue(
    step_s: float, block_s: float, upload_s: float, failures: int, inflation: float
) -> None:
    made = Timed(alone, True)
    made.failures(process=failures, node=failures, over_s=86_400.0)
    job = Job(made, step_s, block_s, upload_s).run(2000, inflation)
    at_first = job.queued
    assert job.run(2000, inflation).queued - at_first <= 1, "one upload has ended when the next one begins"


def test_auto_saves_within_seconds_to_find_out_what_that_takes_unless_nothing_stays_in_memory() -> None:
    assert saves(schedule("auto", alone, True), steps=100, step_s=0.1)[:3] == pytest.approx([10, 30, 70], abs=4)
    streaming = schedule("auto", alone, True)
    streaming.without_memory()
    assert not [step for step in saves(streaming, steps=100, step_s=0.1) if step * 0.1 <= 5.0]


def test_auto_saves_less_often_when_saving_takes_longer_and_more_often_when_much_fails() -> None:
    def count(block_s: float, failures: int) -> int:
        made = Timed(alone, True)
        made.failures(process=failures, node=failures, over_s=86_400.0)
        return len(saves(made, 20_000, 1.0, block_s, 5.0))

    assert count(0.5, 10) > count(20.0, 10)
    assert count(5.0, 100) > count(5.0, 1)


def test_how_long_a_machine_has_been_up_is_no_time_without_failures() -> None:
    def saved(now: float) -> list[int]:
        made = Timed(alone, True)
        made.failures(process=5, node=0, over_s=600.0)  # as at a restore, before the first step
        job = Job(made, 0.1, 0.01)
        job._now = now
        return job.run(1000).saved

    assert saved(0.0) == saved(1e7)


def test_auto_says_what_it_chose_and_again_when_that_changes_but_not_in_between() -> None:
    made, told = Timed(alone, True), []
    now = 0.0
    for step in range(6000):
        now += 1.0
        due = made.after(step, now)
        if due is not None:
            made.saved(True, 1.0 if step < 3000 else 60.0, now, due.durable)
            made.uploaded(now + 0.5)
        if (change := made.take_change()) is not None:
            told.append(change)
        assert made.take_change() is None, "it is told once"
    assert set(told[0]) == {"memory_s", "durable_s", "steps", "every", "wasted_percent", "why"}
    assert any("blocking_s" in change["why"] for change in told[1:])
    assert told[-1]["steps"] > told[0]["steps"]
    assert len(told) < 20


def test_a_fixed_time_has_no_changes_to_tell() -> None:
    made = Timed(alone, True, seconds=10.0)
    saves(made, 100, 1.0)
    assert made.take_change() is None


def test_without_memory_every_save_is_durable() -> None:
    made = Timed(alone, True)
    made.failures(process=50, node=1, over_s=86_400.0)
    made.without_memory()
    kinds = [due.durable for due in dues(made, 5000)]
    assert kinds
    assert all(kinds)


def test_with_memory_and_processes_that_fail_often_some_saves_stay_there() -> None:
    made = Timed(alone, True)
    made.failures(process=200, node=0, over_s=86_400.0)
    kinds = [due.durable for due in dues(made, 5000, upload_s=60.0)]
    assert True in kinds
    assert False in kinds


def dues(made: Timed, steps: int, upload_s: float = 0.0) -> list[Due]:
    """What is saved in a job whose steps take a second, and whose saves block for a tenth."""
    return Job(made, 1.0, 0.1, upload_s).run(steps).dues


# --- all ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [None, 20.0])
def test_ranks_whose_clocks_differ_save_at_the_same_steps_and_meet_at_the_same_steps(seconds: float | None) -> None:
    """The ranks meet by asking for the highest of their numbers. Here one runs after the other: what the first one
    said at each meeting is what the second one hears; that it comes to the same meetings is what is looked at."""
    heard: list[list[int]] = []

    def says(*numbers: int) -> list[int]:
        heard.append(list(numbers))
        return list(numbers)

    first = run_rank(Timed(says, True, seconds), pace=1.0, blocks=0.5, meetings=lambda: len(heard))
    told = iter(heard)
    met = []

    def hears(*numbers: int) -> list[int]:
        assert numbers == (0, 0, 0), "it has no say of its own"
        met.append(next(told))
        return met[-1]

    second = run_rank(Timed(hears, False, seconds), pace=3.7, blocks=2.5, meetings=lambda: len(met))
    assert second == first
    assert len(met) == len(heard)
    assert [step for step, due, _ in first if due], "some were due at all"


def run_rank(made: Timed, pace: float, blocks: float, meetings: Callable[[], int]) -> list[tuple[int, Due | None, int]]:
    """Each step with what was due and how often the rank had met the others by then."""
    now, story = 1e6 * pace, []
    for step in range(2000):
        now += pace
        due = made.after(step, now)
        if due is not None:
            now += blocks
            made.saved(True, blocks, now, due.durable)
            made.uploaded(now)
        story.append((step, due, meetings()))
    return story


def test_ranks_meet_a_few_times_between_two_saves_and_not_at_every_step() -> None:
    met = []

    def counted(*numbers: int) -> list[int]:
        met.append(numbers)
        return list(numbers)

    done = saves(Timed(counted, True, seconds=1000.0), 5000, 1.0)
    assert len(done) == 4
    assert len(met) < 15 * (len(done) + 1)
