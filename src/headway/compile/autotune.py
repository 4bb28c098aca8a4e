"""How few configs of a kernel do: from what each took, key by key, to the smallest set that loses little.

A tuner times every config of a kernel anew for each key, which is a combination of sizes and types. Most of those
configs are never the best, nor near it. Nothing here knows Triton or torch.
"""

import json
import math
import threading
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headway.errors import InputError

TIMINGS, CONFIGS = "timings/", "configs.json"
"""Where a bundle has the times of each kernel, and the sets that the next run is to keep to."""

REGRET = 0.05
"""How much slower than the best config of a key the best of a set may be."""

NODES = 5_000
"""Sets looked at before one of a size counts as not to be found: hundredths of a second."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A config was timed for a key: it takes `ms`, infinity if it failed, and the tuner spent `seconds` on it."""

    kernel: str
    kind: str
    """`triton` or `inductor`."""
    key: str
    config: str
    ms: float
    seconds: float


@dataclass(kw_only=True)
class Timings:
    """What tuning a kernel has found out, and has cost, over all runs."""

    kernel: str
    kind: str
    ms: dict[str, dict[str, float]] = field(default_factory=dict)
    """By key, then by config; infinity for one that failed."""
    benchmarks: int = 0
    seconds: float = 0.0

    def add(self, heard: Benchmark) -> None:
        """Takes in one more benchmark of this kernel."""
        self.ms.setdefault(heard.key, {})[heard.config] = heard.ms if _usable(heard.ms) else math.inf
        self.benchmarks += 1
        self.seconds += heard.seconds

    def merged(self, later: "Timings") -> "Timings":
        """Both; of a key that both have, the times of the run that tried more configs, of the later if as many.

        Times of two runs are never mixed within a key: the machine may have been busier in one of them.
        """
        ms = dict(self.ms)
        for key, row in later.ms.items():
            if len(row) >= len(ms.get(key, ())):
                ms[key] = row
        benchmarks, seconds = self.benchmarks + later.benchmarks, self.seconds + later.seconds
        return Timings(kernel=self.kernel, kind=self.kind, ms=ms, benchmarks=benchmarks, seconds=seconds)

    @property
    def configs(self) -> list[str]:
        """Every config that was tried, in the order in which they were."""
        return list(dict.fromkeys(config for row in self.ms.values() for config in row))

    @property
    def member(self) -> str:
        """Its name in a bundle."""
        return f"{TIMINGS}{self.kernel}.json"

    def as_bytes(self) -> bytes:
        """As a member of a bundle."""
        rows = {
            key: {config: ms if _usable(ms) else None for config, ms in row.items()} for key, row in self.ms.items()
        }
        return json.dumps(asdict(self) | {"ms": rows}, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Timings":
        """What `as_bytes` wrote; InputError if it is something else."""
        try:
            told = json.loads(data)
            ms = {str(key): {str(config): _ms(took) for config, took in row.items()} for key, row in told["ms"].items()}
            kernel, kind = str(told["kernel"]), str(told["kind"])
            benchmarks, seconds = int(told["benchmarks"]), float(told["seconds"])
            if benchmarks < 0 or not _usable(seconds):
                raise ValueError(f"{benchmarks} benchmarks in {seconds} s")
            return cls(kernel=kernel, kind=kind, ms=ms, benchmarks=benchmarks, seconds=seconds)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise InputError(
                f"a table of autotune timings cannot be read ({type(error).__name__}: {error}): it was damaged, or"
                f" written by another version. The next run that tunes the kernel writes it anew."
            ) from error


def _usable(ms: float) -> bool:
    return math.isfinite(ms) and ms >= 0


def _ms(told: Any) -> float:
    ms = math.inf if told is None else float(told)
    return ms if _usable(ms) else math.inf


# --- of a bundle -----------------------------------------------------------------------------------------------------


def timings_in(members: Mapping[str, bytes]) -> tuple[list[Timings], list[str]]:
    """The tables of a bundle, those that cost most first; and what is wrong with those that cannot be read."""
    found, problems = [], []
    for name in (name for name in members if name.startswith(TIMINGS)):
        try:
            table = Timings.from_bytes(members[name])
        except InputError as error:
            problems.append(f"{name}: {error}")
            continue
        if table.member == name:
            found.append(table)
        else:
            problems.append(f"{name}: it is of the kernel {table.kernel!r}, and was stored under another name.")
    return sorted(found, key=lambda each: (-each.seconds, each.kernel)), problems


def configs_in(data: bytes) -> dict[str, list[str]]:
    """The sets that a bundle has stored, by kernel; InputError if it has something else."""
    try:
        told = {str(kernel): [str(config) for config in configs] for kernel, configs in json.loads(data).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{CONFIGS} of the bundle cannot be read ({error}): `headway compile autotune --apply` writes it anew."
        ) from error
    return {kernel: configs for kernel, configs in told.items() if configs}


class Tables:
    """What one process finds out, from whichever of its threads; and how that goes into its bundle."""

    def __init__(self) -> None:
        self._tables: dict[str, Timings] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._tables)

    def hear(self, heard: Benchmark) -> None:
        """Takes in one benchmark."""
        with self._lock:
            self._tables.setdefault(heard.kernel, Timings(kernel=heard.kernel, kind=heard.kind)).add(heard)

    def members(self, before: Mapping[str, bytes]) -> dict[str, bytes]:
        """The tables of kernels that were tuned here, as members, together with what the bundle had before this run."""
        with self._lock:
            tables = {table.member: table for table in self._tables.values()}
            known, _ = timings_in({name: before[name] for name in tables if name in before})
            both = tables | {table.member: table.merged(tables[table.member]) for table in known}
            return {name: table.as_bytes() for name, table in both.items()}


# --- the smallest set ------------------------------------------------------------------------------------------------


def smallest(timings: Timings, regret: float = REGRET) -> list[str]:
    """The fewest configs of which, for every key, one is within `regret` of that key's best; in the order tried.

    Of sets that are equally small it is the one with the least regret. Keys for which every config failed ask for none.
    Where too many sets would have to be looked at, the set is a small one that keeps to the regret, found config by
    config, and perhaps not the smallest.
    """
    slower = _slowdowns(timings)
    chosen = _Cover(slower, 1 + regret).greedy()
    for size in range(1, len(chosen)):
        if (found := _Cover(slower, 1 + regret).within(size)) is not None:
            chosen = found
            break
    steps = sorted({times for row in slower.values() for times in row.values() if times <= 1 + regret})
    low, high = 0, len(steps)
    while low < high:  # how little regret so many configs can have
        middle = (low + high) // 2
        if (found := _Cover(slower, steps[middle]).within(len(chosen))) is None:
            low = middle + 1
        else:
            chosen, high = found, middle
    return [config for config in timings.configs if config in chosen]


def regret_of(timings: Timings, chosen: Collection[str]) -> float:
    """How much slower, at worst over the keys, the best of a set is than the best of all; infinity if all fail."""
    rows = _slowdowns(timings).values()
    return (
        max((min((row[config] for config in chosen if config in row), default=math.inf) for row in rows), default=1) - 1
    )


def saved_share(timings: Timings, chosen: Collection[str]) -> float:
    """The share of benchmarks that tuning the same keys again would not run. That of a set of one, which is not
    benchmarked at all, is counted as one a key."""
    tried = sum(map(len, timings.ms.values()))
    return 1 - sum(config in row for row in timings.ms.values() for config in chosen) / tried if tried else 0.0


def _slowdowns(timings: Timings) -> dict[str, dict[str, float]]:
    """By key, how many times as long as the best each config takes that did not fail."""
    slower = {}
    for key, row in timings.ms.items():
        worked = {config: ms for config, ms in row.items() if _usable(ms)}
        if worked:
            best = min(worked.values())
            slower[key] = {
                config: 1.0 if ms == best else ms / best if best else math.inf for config, ms in worked.items()
            }
    return slower


class _Cover:
    """Sets of configs that have, for each key, one that takes no more than `most` times as long as the best."""

    def __init__(self, slower: dict[str, dict[str, float]], most: float) -> None:
        rows = [[config for config, times in row.items() if times <= most] for row in slower.values()]
        self._by_key = sorted(rows, key=len)
        """Which are good for each key, the key that fewest are good for first."""
        self._good: dict[str, int] = {}
        """The keys that each is good for, as bits."""
        for bit, configs in enumerate(self._by_key):
            for config in configs:
                self._good[config] = self._good.get(config, 0) | 1 << bit
        self._all = (1 << len(rows)) - 1
        self._nodes = NODES

    def greedy(self) -> list[str]:
        """Config by config, the one that is good for most of the keys left."""
        chosen, left = [], self._all
        while left:
            chosen.append(max(self._good, key=lambda config: (self._good[config] & left).bit_count()))
            left &= ~self._good[chosen[-1]]
        return chosen

    def within(self, size: int) -> list[str] | None:
        """A set of so many or fewer; None if there is none, or none was found in time."""
        return self._search(self._all, size)

    def _search(self, left: int, size: int) -> list[str] | None:
        if not left:
            return []
        self._nodes -= 1
        most = max((keys & left).bit_count() for keys in self._good.values())
        if self._nodes < 0 or most * size < left.bit_count():
            return None
        # One of those good for the key that fewest are good for has to be in the set: that leaves little to try.
        hardest = (left & -left).bit_length() - 1
        for config in self._by_key[hardest]:
            if (rest := self._search(left & ~self._good[config], size - 1)) is not None:
                return [config, *rest]
        return None
