"""How often to save: what the formulas say, and what a simulated job says that knows none of them."""

import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.checkpoint.interval import (
    DAY_S,
    FEWEST_STEPS,
    LONGEST_S,
    PROCESS,
    Bounds,
    Costs,
    Rate,
    Tuner,
    curve,
    optimum,
    tiers,
    two_tiers,
    waste,
    weighed,
)
from headway.errors import InputError

sys.path.append(str(Path(__file__).parents[2]))

from bench.interval import REGIMES, Regime, auto, best_fixed, fixed, wasted_percent

FAILURES = 1000
BAR = 1.05
PROMISED = ("15 s, 3 a day", "two tiers, 96 and 24 a day")
"""The regimes of one and of two tiers that every run simulates; the others take longer."""

seconds = st.floats(0.01, 300)
per_day = st.floats(0.01, 300)


# --- one tier --------------------------------------------------------------------------------------------------------


def test_a_save_of_15_s_and_3_failures_a_day_make_15_and_a_half_minutes() -> None:
    best = optimum(Costs(blocking_s=15), 3 / DAY_S)
    assert round(best.interval_s, 1) == 929.5
    assert round(best.wasted_percent, 2) == 3.23


@pytest.mark.parametrize(("minutes", "percent"), [(10, 3.54), (30, 3.96), (60, 6.67)])
def test_other_intervals_waste_more(minutes: float, percent: float) -> None:
    assert round(waste(Costs(blocking_s=15), 3 / DAY_S, 60 * minutes).wasted_percent, 2) == percent


@given(seconds, per_day, st.floats(1.01, 20))
def test_longer_saves_mean_longer_intervals_and_more_failures_shorter_ones(s: float, n: float, more: float) -> None:
    best = optimum(Costs(blocking_s=s), n / DAY_S).interval_s
    assert optimum(Costs(blocking_s=s * more), n / DAY_S).interval_s > best
    rarer = optimum(Costs(blocking_s=s), n / DAY_S / more).interval_s
    assert rarer > best


@given(seconds, per_day, st.floats(0.05, 20))
def test_to_be_off_by_a_factor_multiplies_the_waste_by_its_mean_with_its_inverse(s: float, n: float, k: float) -> None:
    costs = Costs(blocking_s=s)
    best = _root(s, n / DAY_S)
    least = waste(costs, n / DAY_S, best).wasted_percent
    assert waste(costs, n / DAY_S, best * k).wasted_percent == pytest.approx(least * (k + 1 / k) / 2)


def _root(cost_s: float, per_s: float) -> float:
    return math.sqrt(2 * cost_s / per_s)


def test_slower_steps_count_like_blocking_and_upload_latency_moves_nothing() -> None:
    plain = optimum(Costs(blocking_s=15), 3 / DAY_S)
    assert optimum(Costs(blocking_s=5, inflation_s=10), 3 / DAY_S) == plain
    late = optimum(Costs(blocking_s=15, upload_s=300), 3 / DAY_S)
    assert late.interval_s == plain.interval_s
    assert late.wasted_percent == pytest.approx(plain.wasted_percent + 100 * 300 * 3 / DAY_S)


def test_saves_never_queue() -> None:
    slow = Costs(blocking_s=1, inflation_s=1, upload_s=1200)
    assert optimum(slow, 24 / DAY_S).interval_s == slow.end_to_end_s
    assert two_tiers(slow, 24 / DAY_S, 24 / DAY_S).durable_s >= slow.end_to_end_s
    assert two_tiers(slow, 0, 24 / DAY_S, Bounds(longest_s=60)).durable_s >= slow.end_to_end_s


@given(st.floats(1e-6, 30))
def test_the_first_order_interval_wastes_at_most_3_percent_more_than_the_least_at_any_rate(rate: float) -> None:
    costs, free = Costs(blocking_s=1), _root(1, rate)
    least = min(tiers(costs, 0, rate, free * 1.05**-at, 1).wasted_percent for at in range(-10, 60))
    assert tiers(costs, 0, rate, free, 1).wasted_percent <= 1.03 * least


def test_the_curve_is_a_u_with_the_optimum_in_its_midst_and_two_parts_that_make_the_whole() -> None:
    costs, rate = Costs(blocking_s=15, inflation_s=5, upload_s=30), 3 / DAY_S
    points = curve(costs, rate)
    wasted = [point.wasted_percent for point in points]
    middle = len(points) // 2
    assert points[middle].interval_s == pytest.approx(optimum(costs, rate).interval_s)
    assert all(a > b for a, b in pairwise(wasted[: middle + 1]))
    assert all(a < b for a, b in pairwise(wasted[middle:]))
    assert all(point.blocking_percent + point.lost_percent == point.wasted_percent for point in points)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["blocking_s", "inflation_s", "upload_s"])
def test_costs_that_cannot_be_are_refused_by_name(name: str, bad: float) -> None:
    with pytest.raises(InputError, match=name):
        Costs(**{"blocking_s": 1.0, name: bad})


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_without_a_best_interval_is_refused(rate: float) -> None:
    with pytest.raises(InputError, match="failures per second"):
        optimum(Costs(blocking_s=1), rate)


# --- two tiers -------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(seconds, st.floats(0, 300), st.floats(0, 600), st.floats(0, 300), st.floats(0, 300), st.floats(0, 60))
@example(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
@example(0.01, 300.0, 0.0, 300.0, 0.01, 59.7)  # so many steps of this length as would be best are more than an hour
def test_no_other_multiple_is_better_and_every_bound_holds(
    blocking: float, inflation: float, upload: float, process: float, node: float, step: float
) -> None:
    costs, rates = Costs(blocking_s=blocking, inflation_s=inflation, upload_s=upload), (process / DAY_S, node / DAY_S)
    chosen = two_tiers(costs, *rates, Bounds(memory_s=step))
    longest = max(LONGEST_S, costs.end_to_end_s)
    assert chosen.memory_s >= step
    assert costs.end_to_end_s * (1 - 1e-9) <= chosen.durable_s <= longest * (1 + 1e-9)

    def first_order(m: float, k: int) -> float:
        return (blocking + inflation / k) / m + (rates[0] + k * rates[1]) * m / 2

    least = first_order(chosen.memory_s, chosen.every)
    for every in {1, 2, 3, 5, 10, 100, chosen.every + 1, max(1, chosen.every - 1)}:
        low, high = max(step, costs.end_to_end_s / every), longest / every
        for at in range(21 if low <= high else 0):
            assert first_order(low * (high / low) ** (at / 20), every) >= least * (1 - 1e-9)


def test_what_costs_nothing_more_is_always_durable_and_what_is_never_needed_is_rare() -> None:
    assert two_tiers(Costs(blocking_s=1), 3 / DAY_S, 3 / DAY_S).every == 1
    never = two_tiers(Costs(blocking_s=1, inflation_s=5), 3 / DAY_S, 0)
    assert never.durable_s == pytest.approx(LONGEST_S, rel=0.3)
    assert never.every > 1


def test_without_a_memory_tier_every_save_is_durable() -> None:
    costs = Costs(blocking_s=1, inflation_s=50)
    chosen = two_tiers(costs, 0, 10 / DAY_S)
    assert chosen.every == 1
    assert chosen.memory_s == pytest.approx(optimum(costs, 10 / DAY_S).interval_s)


# --- failure rates ---------------------------------------------------------------------------------------------------


def test_the_first_failures_outweigh_the_prior_and_a_calm_year_is_a_low_rate_but_not_none() -> None:
    assert Rate().per_s(3, 600) * DAY_S > 50
    assert Rate().per_s(0, DAY_S) * DAY_S == pytest.approx(0.5, rel=0.1)
    assert 0 < Rate().per_s(0, 365 * DAY_S) * DAY_S < 0.01


def test_a_storm_shows_with_its_first_failures_and_a_job_without_any_is_soon_taken_for_a_usual_one() -> None:
    assert weighed(PROCESS, 2, 480) > 1 / 480 > 2 * PROCESS.per_s(2, 480)
    assert weighed(PROCESS, 0, 3600) < 1.2 * PROCESS.per_s(0, 3600)
    assert weighed(PROCESS, 3, 30 * DAY_S) == pytest.approx(PROCESS.per_s(3, 30 * DAY_S), rel=0.01)
    assert weighed(PROCESS, 10_000, 100) == pytest.approx(10_000 / 400, rel=0.01)


# --- the tuner -------------------------------------------------------------------------------------------------------


def tuned(*, step_s: float = 1.0, blocking_s: float = 2.0, upload_s: float = 60.0, inflation_s: float = 10.0) -> Tuner:
    tuner = Tuner()
    for _ in range(5):
        tuner.observe_step(step_s)
        tuner.observe_save(blocking_s)
        tuner.observe_upload(upload_s, inflation_s)
    tuner.failures(process=40, node=10, over_s=10 * DAY_S)
    return tuner


def test_the_schedule_is_the_optimum_in_steps() -> None:
    schedule = tuned(step_s=0.5).schedule()
    best = two_tiers(Costs(blocking_s=2, inflation_s=10, upload_s=60), 4 / DAY_S, 1 / DAY_S)
    assert schedule.memory_steps * 0.5 == pytest.approx(best.memory_s, rel=0.02)
    assert schedule.every == best.every
    assert schedule.tiers.durable_s == schedule.memory_steps * 0.5 * schedule.every


def test_a_change_is_told_once_and_with_what_moved() -> None:
    tuner = tuned()
    first = tuner.schedule()
    assert tuner.changed == "the first"
    assert tuner.schedule() is first
    assert tuner.changed is None
    for _ in range(31):
        tuner.observe_save(2.1)
    assert tuner.schedule() is first
    for _ in range(31):
        tuner.observe_save(8.0)
    second = tuner.schedule()
    assert tuner.changed == "blocking_s 2 → 8"
    assert second.memory_steps > first.memory_steps


def test_one_freak_measurement_moves_nothing() -> None:
    tuner = tuned()
    first = tuner.schedule()
    tuner.observe_save(500.0)
    tuner.observe_step(500.0)
    tuner.observe_upload(60.0, -30.0)
    assert tuner.schedule() is first


def test_more_failures_mean_more_saves_of_the_tier_that_they_call_for() -> None:
    tuner = tuned()
    calm = tuner.schedule()
    tuner.failures(process=400, node=10, over_s=10 * DAY_S)
    assert tuner.schedule().tiers.memory_s < calm.tiers.memory_s / 2
    tuner.failures(process=40, node=100, over_s=10 * DAY_S)
    assert tuner.schedule().tiers.durable_s < calm.tiers.durable_s / 2


@settings(deadline=None)
@given(
    st.floats(0.001, 100), st.lists(st.floats(0, 3000), min_size=1, max_size=40), st.integers(0, 1000), st.booleans()
)
def test_a_schedule_leaves_room_for_nine_in_ten_uploads_and_a_few_steps(
    step_s: float, uploads: list[float], failed: int, memory_tier: bool
) -> None:
    tuner = Tuner(memory_tier=memory_tier)
    tuner.observe_step(step_s)
    tuner.observe_save(0.5)
    for seconds in uploads:
        tuner.observe_upload(seconds, 0.1)
        tuner.failures(process=failed, node=failed, over_s=DAY_S)
        schedule = tuner.schedule()
    durable_steps = schedule.memory_steps * schedule.every
    assert durable_steps >= FEWEST_STEPS
    recent = sorted(uploads[-31:])
    assert durable_steps * step_s >= (0.5 + recent[int(0.9 * len(recent))]) * (1 - 1e-6)
    assert memory_tier or schedule.every == 1


def test_before_anything_is_measured_there_is_a_schedule() -> None:
    schedule = Tuner().schedule()
    assert 1 <= schedule.memory_steps <= LONGEST_S


def test_a_job_that_never_fails_still_saves_every_hour() -> None:
    tuner = tuned(blocking_s=15)
    tuner.failures(process=0, node=0, over_s=365 * DAY_S)
    assert tuner.schedule().tiers.durable_s == pytest.approx(LONGEST_S, rel=0.02)


# --- against a simulated job -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "regime",
    [pytest.param(regime, marks=() if regime.name in PROMISED else pytest.mark.thorough) for regime in REGIMES],
    ids=lambda regime: regime.name,
)
def test_auto_wastes_at_most_1_05_times_what_the_best_fixed_interval_wastes(regime: Regime) -> None:
    failures = regime.failures(FAILURES)
    least, *_ = best_fixed(regime, failures)
    assert wasted_percent(regime, failures, auto(regime)) <= BAR * least


@pytest.mark.parametrize("regime", REGIMES, ids=lambda regime: regime.name)
def test_the_predicted_waste_is_the_simulated_one(regime: Regime) -> None:
    # Uploads in the simulation take up to 1.2 times their mean: with room for them, none is skipped.
    room = Bounds(durable_s=1.2 * regime.costs.end_to_end_s)
    chosen = two_tiers(regime.costs, *regime.rates, room)
    simulated = wasted_percent(regime, regime.failures(FAILURES), fixed(chosen.memory_s, chosen.every))
    assert chosen.wasted_percent == pytest.approx(simulated, rel=0.05)


def test_an_interval_that_is_far_off_does_waste_more_in_the_simulation() -> None:
    """Or the two tests above could not fail."""
    regime = REGIMES[0]
    failures = regime.failures(FAILURES)
    best = optimum(regime.costs, regime.rates[1]).interval_s
    least = wasted_percent(regime, failures, fixed(best))
    for factor in (0.25, 4):
        assert wasted_percent(regime, failures, fixed(best * factor)) == pytest.approx(least * 2.125, rel=0.1)
