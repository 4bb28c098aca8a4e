"""What a job wastes with the interval left on auto, against the best of many fixed ones, over thousands of failures.

The job is simulated event by event: it trains, saves, uploads (which slows its steps), fails, loses work, goes on from
the save that is left. It knows nothing of any formula. All schedules meet the same failures. Auto begins with what it
guesses, and learns costs and rates from what it meets; the fixed ones are chosen afterwards, with all of that known.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, product

from bench.measure import Row
from headway.checkpoint.interval import Costs, Tuner, two_tiers

DAY_S = 86400.0
Failure = tuple[float, bool]
"""When, counted in time that the job runs; and whether it took the node."""


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A job and its luck."""

    name: str
    costs: Costs
    process_per_day: float
    node_per_day: float = 0.0
    step_s: float = 1.0
    memory_tier: bool = True
    shape: float = 1.0
    """Of the times between failures: 1 for none that depends on another, below 1 for failures that come in flocks."""

    @property
    def rates(self) -> tuple[float, float]:
        """Of what a save to memory outlives, and of what it does not, per second."""
        process, node = self.process_per_day / DAY_S, self.node_per_day / DAY_S
        return (process, node) if self.memory_tier else (0.0, process + node)

    def failures(self, count: int, seed: int = 1) -> list[Failure]:
        """So many, the same for the same seed."""
        luck, per_day = random.Random(seed), self.process_per_day + self.node_per_day
        gaps = [luck.weibullvariate(1.0, self.shape) for _ in range(count)]
        mean_gap_s = DAY_S / per_day * count / sum(gaps)
        takes_node = [luck.random() * per_day < self.node_per_day for _ in range(count)]
        return list(zip(accumulate(gap * mean_gap_s for gap in gaps), takes_node, strict=True))


REGIMES = (
    Regime(name="15 s, 3 a day", costs=Costs(blocking_s=15), process_per_day=3, memory_tier=False),
    Regime(name="15 s, one each 20 saves' time", costs=Costs(blocking_s=15), process_per_day=288, memory_tier=False),
    Regime(name="15 s, one each 5 saves' time", costs=Costs(blocking_s=15), process_per_day=1152, memory_tier=False),
    Regime(name="1 s, slowed by 2 s, durable after 60 s, 24 a day", memory_tier=False, process_per_day=24,
           costs=Costs(blocking_s=1, inflation_s=2, upload_s=60)),
    Regime(name="uploads of 10 min, 24 a day", memory_tier=False, process_per_day=24,
           costs=Costs(blocking_s=1, inflation_s=5, upload_s=600)),
    Regime(name="15 s, 3 a day, in flocks", memory_tier=False, process_per_day=3, shape=0.7,
           costs=Costs(blocking_s=15)),
    Regime(name="two tiers, 12 and 3 a day", process_per_day=12, node_per_day=3,
           costs=Costs(blocking_s=2, inflation_s=10, upload_s=120)),
    Regime(name="two tiers, 96 and 24 a day", process_per_day=96, node_per_day=24,
           costs=Costs(blocking_s=2, inflation_s=10, upload_s=120)),
)  # fmt: skip


def run(quick: bool) -> list[Row]:
    """The rows on intervals."""
    return [_row(regime, 1000 if quick else 3000) for regime in REGIMES]


def _row(regime: Regime, count: int) -> Row:
    failures = regime.failures(count)
    chosen = two_tiers(regime.costs, *regime.rates)
    ours = wasted_percent(regime, failures, auto(regime))
    told = wasted_percent(regime, failures, fixed(chosen.memory_s, chosen.every))
    best, memory_s, every = best_fixed(regime, failures)
    note = (
        f"auto {ours:.2f}%; best fixed {best:.2f}% ({memory_s:,.0f} s, 1 in {every} durable); with the rates known"
        f" {told:.2f}% ({chosen.memory_s:,.0f} s, 1 in {chosen.every}), predicted {chosen.wasted_percent:.2f}%"
    )
    return Row(f"interval, {regime.name}: wasted", "× best fixed", [ours / best], at_most=1.05, note=note)


# --- schedules -------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """What can be measured of a simulated job."""

    now_s: float = 0.0
    process_failures: int = 0
    node_failures: int = 0
    saves: list[float] = field(default_factory=list)
    """What each blocked, since somebody asked."""
    uploads: list[tuple[float, float]] = field(default_factory=list)
    """What each took, and what training lost to it."""


Plan = Callable[[Job], tuple[float, int]]
"""Training until the next save, and the how-manyth of the saves is durable; asked before each."""


def fixed(memory_s: float, every: int = 1) -> Plan:
    """A schedule that stays."""
    return lambda job: (memory_s, every)


def auto(regime: Regime) -> Plan:
    """The tuner's, told what the job measures."""
    tuner = Tuner(memory_tier=regime.memory_tier)
    tuner.observe_step(regime.step_s)

    def plan(job: Job) -> tuple[float, int]:
        while job.saves:
            tuner.observe_save(job.saves.pop())
        while job.uploads:
            tuner.observe_upload(*job.uploads.pop())
        tuner.failures(process=job.process_failures, node=job.node_failures, over_s=job.now_s)
        schedule = tuner.schedule()
        return schedule.memory_steps * regime.step_s, schedule.every

    return plan


def best_fixed(regime: Regime, failures: list[Failure]) -> tuple[float, float, int]:
    """The least that any fixed schedule wastes, and which one it is: of those up to three times as often or rare."""
    start = two_tiers(regime.costs, *regime.rates)
    others = {max(1, round(start.every * 2 ** (at / 2))) for at in range(-3, 4)}
    everies = sorted(others) if regime.memory_tier else [1]
    ratios = [2 ** (at / 4) for at in range(-6, 7)]
    grid = [(start.durable_s * ratio / every, every) for ratio, every in product(ratios, everies)]
    return min((wasted_percent(regime, failures, fixed(*schedule)), *schedule) for schedule in grid)


# --- the job ---------------------------------------------------------------------------------------------------------


def wasted_percent(regime: Regime, failures: Iterable[Failure], plan: Plan) -> float:
    """The share of the time until the last failure that left no trained work; restarts take none of it."""
    job, world = Job(), _World(regime)
    for at_s, takes_node in failures:
        while world.lives_until(at_s, job, *plan(job)):
            pass
        job.now_s = at_s
        world.fail(at_s, takes_node or not regime.memory_tier)
        job.node_failures += takes_node
        job.process_failures += not takes_node
    return 100 * (1 - world.trained / job.now_s)


class _World:
    """The work that is done, and the copies of it that there are, as the training it holds."""

    def __init__(self, regime: Regime) -> None:
        self.costs, self.luck = regime.costs, random.Random(2)
        self.trained = self.in_memory = self.durable = 0.0
        self.pending: tuple[float, float] | None = None  # when an upload is over, and what it holds
        self.since_durable = 0

    def lives_until(self, at_s: float, job: Job, stretch_s: float, every: int) -> bool:
        """Trains and saves once; False if the failure came before that was over."""
        blocking_s = self.costs.blocking_s * self.luck.uniform(0.8, 1.2)
        end_s = self._trained_at(job.now_s, stretch_s) + blocking_s
        if end_s > at_s:
            return False
        job.now_s = end_s
        job.saves.append(blocking_s)
        self.trained += stretch_s
        self.in_memory = self.trained
        self._settle(end_s)
        self.since_durable += 1
        if self.since_durable >= every and self.pending is None:
            self._upload(job)
        return True

    def fail(self, now_s: float, takes_node: bool) -> None:
        self._settle(now_s)
        if takes_node:  # and with it, what was in memory or on its way
            self.in_memory, self.pending, self.since_durable = self.durable, None, 0
        self.trained = self.in_memory

    def _upload(self, job: Job) -> None:
        took_s = self.costs.upload_s * self.luck.uniform(0.8, 1.2)
        self.pending, self.since_durable = (job.now_s + took_s, self.trained), 0
        job.uploads.append((took_s, self.costs.inflation_s))

    def _settle(self, now_s: float) -> None:
        if self.pending and self.pending[0] <= now_s:
            self.durable, self.pending = self.pending[1], None

    def _trained_at(self, now_s: float, stretch_s: float) -> float:
        """When so much training is done: an upload takes its part of every second that it lasts."""
        if self.pending is None or not self.costs.upload_s:
            return now_s + stretch_s
        slow_s = max(0.0, self.pending[0] - now_s)
        speed = 1 - self.costs.inflation_s / self.costs.upload_s
        return now_s + (stretch_s / speed if stretch_s <= slow_s * speed else stretch_s + slow_s * (1 - speed))
