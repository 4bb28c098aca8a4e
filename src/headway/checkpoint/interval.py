"""How often to save so that the least time is lost: to saving, and to failures. Pure: values in, values out.

An interval is the training between the end of one save and the beginning of the next. A job that fails at rate λ and
pays C for each save loses, to first order, the share ``C/τ + λ·(τ/2 + upload)``, least at ``τ = √(2C/λ)``. That is what
`Interval` says. Its *interval* serves at any rate: failures during saves and repeated work move the true optimum, but
never so far that this one wastes more than 1.03 times the least. Its *share* is too high by about a third of itself:
3.23% are 3.19% of the wall time, but 32% are 29%. `Tiers` has the share of the wall time, at any rate.

Upload latency costs λ·upload whatever the interval is, and so moves no optimum.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from headway.errors import InputError

HOUR_S, DAY_S = 3600.0, 86400.0

LONGEST_S = HOUR_S
"""No interval is longer, however rarely a job has failed: it costs a 15 s save 0.4% at most, and bounds what a failure
that nobody foresaw can take."""

FEWEST_STEPS = 3
"""Between durable saves, whatever was measured."""

GUESSES = {"blocking_s": 0.5, "inflation_s": 0.5, "upload_s": 10.0, "step_s": 1.0}
"""What counts until it is measured: as for a model of about a gigabyte."""

FIRST_S, PROBES = 1.0, 3
"""The first saves come after 1, 2 and 4 s, if they stay in memory: what one takes is better known than guessed."""

TICK_S = 1e-4
"""Less is not told from nothing."""

MOVES = 0.1
"""A schedule stays until the best one differs by more than this: off by as much, it wastes 1.005 times the least."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one save takes from training."""

    blocking_s: float
    """Training stands still."""
    inflation_s: float = 0.0
    """Training lost to slower steps while a durable save is uploaded."""
    upload_s: float = 0.0
    """From the end of blocking until the save is durable."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (0 <= value < math.inf) or (name == "blocking_s" and value == 0):
                least = "above 0" if name == "blocking_s" else "of 0 or more"
                raise InputError(f"a save cannot have {name} of {value:g}. Give a number of seconds {least}.")

    @property
    def end_to_end_s(self) -> float:
        """What must be over before the next durable save begins."""
        return self.blocking_s + self.upload_s


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How often a job fails: a Gamma prior, to be weighed against what is seen.

    The prior is worth half a failure: the first that is seen outweighs it, and a long time without one is a low rate,
    but never none. It stands for an hour because jobs fail most when they are new, and because it wears off by itself:
    after a day without a failure it says one in two days. A longer one would cost a job that fails every few minutes
    more than this one costs a job that never does.
    """

    prior_failures: float = 0.5
    prior_s: float = HOUR_S

    def per_s(self, failures: float = 0, over_s: float = 0.0) -> float:
        """The mean of the posterior after so many failures in so long."""
        return (self.prior_failures + failures) / (self.prior_s + over_s)

    def likelihood(self, failures: float, over_s: float) -> float:
        """How well this prior foresaw so many failures in so long; a logarithm, to be compared with another's."""
        after, prior = self.prior_failures + failures, self.prior_failures
        odds = math.lgamma(after) - math.lgamma(prior)
        return odds + prior * math.log(self.prior_s) - after * math.log(self.prior_s + over_s)


PROCESS = Rate()
STORM, STORMY = Rate(prior_failures=1, prior_s=300.0), 0.1
"""One job in ten fails every few minutes. It shows soon: an hour's worth of prior would take an hour to outweigh."""
NODE = Rate(prior_s=6 * HOUR_S)
"""Nodes fail less often than what runs on them."""


def weighed(usual: Rate, failures: float, over_s: float) -> float:
    """The rate of a job's processes: of the usual kind of job or of one in a storm, each as likely as what was seen
    makes it."""
    odds = STORM.likelihood(failures, over_s) - usual.likelihood(failures, over_s)
    storm = STORMY / (1 - STORMY) * math.exp(min(odds, 500.0))
    return (usual.per_s(failures, over_s) + storm * STORM.per_s(failures, over_s)) / (1 + storm)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An interval, and the share of time that it wastes, to first order."""

    interval_s: float
    blocking_percent: float
    """Saving: blocked, or slowed down."""
    lost_percent: float
    """Work done after the last save before a failure."""

    @property
    def wasted_percent(self) -> float:
        return self.blocking_percent + self.lost_percent


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """When to save to memory, and which of those saves are durable: one in `every`."""

    memory_s: float
    every: int
    wasted_percent: float
    """Expected share of the wall time, at any rate of failures; without that of restarts, which no interval changes."""

    @property
    def durable_s(self) -> float:
        return self.memory_s * self.every


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What no schedule goes beyond. Nor is a durable interval ever shorter than a save: saves must not queue."""

    memory_s: float = 0.0
    durable_s: float = 0.0
    longest_s: float = LONGEST_S


# --- one tier --------------------------------------------------------------------------------------------------------


def optimum(costs: Costs, failures_per_s: float) -> Interval:
    """The interval that wastes least, and not less than one save takes end to end."""
    if not 0 < failures_per_s < math.inf:
        raise InputError(
            f"{failures_per_s:g} failures per second have no best interval: a job that never fails need not save."
            " Give a rate above 0; one failure in a month is little."
        )
    free = _root(costs.blocking_s + costs.inflation_s, failures_per_s)
    return waste(costs, failures_per_s, max(free, costs.end_to_end_s))


def waste(costs: Costs, failures_per_s: float, interval_s: float) -> Interval:
    """What an interval wastes, by cause."""
    return Interval(
        interval_s=interval_s,
        blocking_percent=100 * (costs.blocking_s + costs.inflation_s) / interval_s,
        lost_percent=100 * failures_per_s * (interval_s / 2 + costs.upload_s),
    )


def curve(costs: Costs, failures_per_s: float, points: int = 61) -> list[Interval]:
    """What intervals around the best one waste: evenly spaced by ratio, from a sixth of it to six times it."""
    best = optimum(costs, failures_per_s).interval_s
    ratios = (6.0 ** (2 * at / (points - 1) - 1) for at in range(points))
    return [waste(costs, failures_per_s, best * ratio) for ratio in ratios]


def _root(cost_s: float, failures_per_s: float) -> float:
    return math.sqrt(2 * cost_s / failures_per_s) if failures_per_s else math.inf


# --- two tiers, two rates --------------------------------------------------------------------------------------------


def two_tiers(costs: Costs, process_rate: float, node_rate: float, bounds: Bounds | None = None) -> Tiers:
    """The schedule that wastes least where a save to memory outlives processes, and only a durable one the node.

    With rates λp and λn the loss is ``b/m + i/D + λp·m/2 + λn·(D/2 + upload)``. It is convex in log m and log D, so if
    D is to be a multiple of m, the best multiple lies next to the ratio of the two that are best for themselves.
    Without a memory tier every failure is one of the node: a process rate of 0 makes every save durable.
    """
    limits = bounds or Bounds()
    shortest = max(limits.durable_s, costs.end_to_end_s)
    longest = max(limits.longest_s, shortest)

    def first_order(memory_s: float, every: int) -> float:
        paid = (costs.blocking_s + costs.inflation_s / every) / memory_s
        return paid + (process_rate + every * node_rate) * memory_s / 2

    def best_memory_s(every: int) -> float:
        free = _root(costs.blocking_s + costs.inflation_s / every, process_rate + every * node_rate)
        return _within(free, max(limits.memory_s, shortest / every), longest / every)

    memory = _within(_root(costs.blocking_s, process_rate), limits.memory_s, longest)
    durable = _within(_root(costs.inflation_s, node_rate), shortest, longest)
    most = longest / limits.memory_s if limits.memory_s else math.inf
    multiples = {max(1, math.floor(min(k, most))) for k in (durable / memory, math.ceil(durable / memory))}
    every = min(sorted(multiples), key=lambda k: first_order(best_memory_s(k), k))
    return tiers(costs, process_rate, node_rate, best_memory_s(every), every)


def tiers(costs: Costs, process_rate: float, node_rate: float, memory_s: float, every: int) -> Tiers:
    """What a schedule wastes. Of a stretch of length x/λ without a save in it, failures leave the part x/(eˣ−1)."""
    wall_s = memory_s + costs.blocking_s + costs.inflation_s / every
    kept = memory_s / wall_s * _left(process_rate * wall_s)
    if kept:
        kept *= _left(node_rate * every * memory_s / kept) * math.exp(-node_rate * costs.upload_s)
    return Tiers(memory_s=memory_s, every=every, wasted_percent=100 * (1 - kept))


def _left(x: float) -> float:
    return x / math.expm1(x) if 0 < x < 500 else float(x <= 0)


def _within(value: float, lowest: float, highest: float) -> float:
    """The value, held between the two; where they contradict each other, the lowest counts: saves must not queue."""
    return max(lowest, min(value, highest))


# --- tuned as the job runs -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What the loop follows."""

    tiers: Tiers
    memory_steps: int
    """Steps between saves."""

    @property
    def every(self) -> int:
        """Each so-manyth save is durable."""
        return self.tiers.every


class Tuner:
    """Measurements in, a schedule out. Ranks measure differently: let one decide for all."""

    def __init__(self, *, memory_tier: bool = True) -> None:
        self._memory_tier = memory_tier
        self._seen: dict[str, deque[float]] = {name: deque(maxlen=31) for name in GUESSES}
        self._failed, self._over_s = (0, 0), 0.0
        self._current: Schedule | None = None
        self._reasons: dict[str, float] = {}
        self.changed: str | None = None
        """Why the last `schedule()` is a new one: the measurement that moved most; None if it stayed as it was."""

    def probe(self) -> tuple[float | None, int]:
        """After how many seconds to save only to find out what a save takes, and how many of those make one durable;
        None once that is known, and where a save takes too much to find out."""
        seen = len(self._seen["blocking_s"])
        return (None if seen >= PROBES or not self._memory_tier else FIRST_S * 2**seen), 1 + PROBES * bool(seen)

    def observe_save(self, blocking_s: float) -> None:
        self._seen["blocking_s"].append(blocking_s)

    def observe_upload(self, seconds: float, inflation_s: float) -> None:
        """`inflation_s` may come out below 0 by chance."""
        self._seen["upload_s"].append(seconds)
        self._seen["inflation_s"].append(inflation_s)

    def observe_step(self, seconds: float) -> None:
        self._seen["step_s"].append(seconds)

    def failures(self, *, process: int, node: int, over_s: float) -> None:
        """All failures of the job so far, in all its attempts, and the time it ran."""
        self._failed, self._over_s = (process, node), over_s

    def schedule(self) -> Schedule:
        """The present schedule: a new one if the best has moved far enough, or if saves would queue with the old."""
        typical = {name: max(median(seen or [GUESSES[name]]), 0.0) for name, seen in self._seen.items()}
        step_s = max(typical.pop("step_s"), TICK_S)
        costs = Costs(**typical | {"blocking_s": max(typical["blocking_s"], TICK_S)})
        rates, shortest_s = self._rates(), max(FEWEST_STEPS * step_s, self._end_to_end_s(costs))
        new = _in_steps(costs, rates, Bounds(memory_s=step_s, durable_s=shortest_s))
        old, self.changed = self._current, None
        if old is None or _moved(old, new) or old.memory_steps * old.every * step_s < shortest_s:
            self._adopt(new, vars(costs) | {"step_s": step_s} | _per_day(rates))
        return self._current or new

    def _adopt(self, new: Schedule, reasons: dict[str, float]) -> None:
        old, self._current = self._current, new
        if old != new:
            self.changed = _moved_most(self._reasons, reasons) if old else "the first"
        self._reasons = reasons

    def _end_to_end_s(self, costs: Costs) -> float:
        """What nine in ten saves do not exceed: half of the uploads take longer than their median."""
        uploads = sorted(self._seen["upload_s"]) or [costs.upload_s]
        return costs.blocking_s + uploads[int(0.9 * len(uploads))]

    def _rates(self) -> tuple[float, float]:
        process = weighed(PROCESS, self._failed[0], self._over_s)
        node = NODE.per_s(self._failed[1], self._over_s)
        return (process, node) if self._memory_tier else (0.0, process + node)


def _in_steps(costs: Costs, rates: tuple[float, float], bounds: Bounds) -> Schedule:
    """The best schedule in whole steps, rounded up where saves would queue otherwise."""
    step_s, best = bounds.memory_s, two_tiers(costs, *rates, bounds)
    fewest = math.ceil(bounds.durable_s / (best.every * step_s) - 1e-9)
    steps = max(1, round(best.memory_s / step_s), fewest)
    return Schedule(tiers=tiers(costs, *rates, steps * step_s, best.every), memory_steps=steps)


def _moved(old: Schedule, new: Schedule) -> bool:
    pairs = ((old.memory_steps, new.memory_steps), (old.memory_steps * old.every, new.memory_steps * new.every))
    return any(abs(b - a) > MOVES * a for a, b in pairs)


def _moved_most(old: dict[str, float], new: dict[str, float]) -> str:
    most = max(new, key=lambda name: abs(math.log(max(new[name], TICK_S) / max(old[name], TICK_S))))
    return f"{most} {old[most]:.3g} → {new[most]:.3g}"


def _per_day(rates: tuple[float, float]) -> dict[str, float]:
    return {"process failures a day": DAY_S * rates[0], "node failures a day": DAY_S * rates[1]}
