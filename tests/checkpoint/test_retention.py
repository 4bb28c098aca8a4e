"""What is kept, and what may go: decided on values alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoint.catalog import Checkpoint, State
from headway.checkpoint.layout import new_tag, step_folder
from headway.checkpoint.retention import Retention, to_prune
from headway.errors import InputError


def a_checkpoint(
    step: int, generation: int, state: State = "committed", pinned: bool = False, metric: float | None = None
) -> Checkpoint:
    tag = new_tag(generation)
    return Checkpoint(name=step_folder(step), tag=tag, step=step, state=state, pinned=pinned, metric=metric)


def saved(*steps: int, **rest: object) -> list[Checkpoint]:
    return [a_checkpoint(step, generation, **rest) for generation, step in enumerate(steps)]  # type: ignore[arg-type]


def pruned(checkpoints: list[Checkpoint], retention: Retention) -> list[int | None]:
    return [each.step for each in to_prune(checkpoints, retention)]


def test_the_last_three_are_kept() -> None:
    assert pruned(saved(100, 200, 300, 400, 500), Retention()) == [100, 200]
    assert pruned(saved(100, 200, 300), Retention()) == []


def test_the_newest_is_the_last_that_was_saved_and_not_the_highest_step() -> None:
    assert pruned(saved(100, 900, 200), Retention(keep_last=1)) == [100, 900]


def test_what_is_pinned_stays() -> None:
    given = [a_checkpoint(100, 0, pinned=True), *saved(200, 300)]
    assert pruned(given, Retention(keep_last=1)) == [200]


def test_only_what_is_committed_is_judged() -> None:
    others = [a_checkpoint(step, step, state) for step, state in enumerate(("partial", "foreign", "damaged"))]
    assert pruned([*others, *saved(100, 200)], Retention(keep_last=1)) == [100]
    assert pruned([*saved(100), a_checkpoint(200, 9, "partial")], Retention(keep_last=1)) == []


def test_the_first_at_or_after_each_multiple_is_kept() -> None:
    given = saved(90, 180, 270, 1000, 1090, 2005, 2100, 2900)
    assert pruned(given, Retention(keep_last=1, keep_every=1000)) == [90, 180, 270, 1090, 2100]


def test_a_milestone_stays_one_whatever_comes_later() -> None:
    steps = [0, 130, 260, 390, 520, 650, 780, 910, 1040]
    retention, kept = Retention(keep_last=2, keep_every=250), []
    for generation, step in enumerate(steps):
        kept.append(a_checkpoint(step, generation))
        gone = to_prune(kept, retention)
        kept = [each for each in kept if each not in gone]
    assert [each.step for each in kept] == [260, 520, 780, 910, 1040]


def test_the_best_by_metric_are_kept() -> None:
    metrics = [0.5, None, 0.2, float("nan"), 0.3, 0.9]
    given = [a_checkpoint(step, step, metric=metric) for step, metric in enumerate(metrics)]
    assert pruned(given, Retention(keep_last=1, keep_best=2)) == [0, 1, 3]
    assert pruned(given, Retention(keep_last=1, keep_best=2, best="max")) == [1, 2, 3, 4]


def test_of_equals_the_later_is_best() -> None:
    assert pruned(saved(1, 2, 3, 4, metric=0.5), Retention(keep_last=1, keep_best=2)) == [1, 2]


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_every": 0}, {"keep_best": -1}, {"best": "loss"}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Retention(**wrong)  # type: ignore[arg-type]


CHECKPOINTS = st.lists(
    st.builds(
        a_checkpoint,
        step=st.integers(0, 10_000),
        generation=st.just(0),
        state=st.sampled_from(["committed", "partial", "foreign", "damaged"]),
        pinned=st.booleans(),
        metric=st.none() | st.floats(),
    ),
    unique_by=lambda each: each.name,
)
COUNTS = st.integers(1, 10)
RETENTIONS = st.builds(
    Retention,
    keep_last=COUNTS,
    keep_every=st.none() | COUNTS,
    keep_best=st.none() | COUNTS,
    best=st.sampled_from(["min", "max"]),
)


@given(CHECKPOINTS, RETENTIONS)
def test_the_newest_and_the_pinned_always_stay_and_pruning_twice_prunes_once(
    checkpoints: list[Checkpoint], retention: Retention
) -> None:
    gone = to_prune(checkpoints, retention)
    committed = [each for each in checkpoints if each.state == "committed"]
    assert all(each in committed and not each.pinned and each not in committed[-retention.keep_last :] for each in gone)
    assert to_prune([each for each in checkpoints if each not in gone], retention) == []
