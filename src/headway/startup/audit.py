"""What ranks sent each other before the first step, what of it they can do without, and what it costs with more ranks.

Pure: it knows the marks that the hooks of `headway exec` and `headway run` have left, and nothing of torch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Any

from headway.events.vocabulary import Mark, Told

SMALL_BYTES = 64 * 1024
"""Less than this in one call costs its latency, and hardly anything for its size."""
MANY = 8
"""So many calls from one line are worth being made one."""

MAKES_GROUPS = ("init_process_group", "new_group", "new_subgroups", "split_group", "shrink_group")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one call site has sent to groups of one size, over all ranks."""

    op: str
    site: str
    through: str
    """The way through libraries from there, outermost first; empty if there is none."""
    step: bool
    """Whether it was part of a forward or a backward pass: the first step's, and not the start-up's."""
    size: int
    """How many ranks the groups have; 0 for groups that the rank is not in."""
    world: int
    backend: str
    lazy: bool
    """Of a group that was made: whether it connects its ranks only when it first has to."""
    why: str
    """Of a group: `duplicate`, `single`, `eager`, or empty if there is nothing to say against it."""
    count: int
    """Operations of the backend's on one rank; where ranks differ, the most."""
    calls: int
    seconds: float
    """Of the rank that took longest: it may have waited for others."""
    least_s: float
    """Of the rank that took least, and so waited least: what it costs by itself."""
    bytes: int
    """Of one rank; where ranks differ, the most."""
    ranks: int
    """How many ranks did so."""
    total: int
    """Operations of all ranks."""

    @property
    def shape(self) -> "Shape":
        """How its cost grows."""
        if self.op.startswith(MAKES_GROUPS):
            return STORE if self.backend == "gloo" and not self.lazy else EACH
        if any(word in self.op for word in ("gather", "scatter", "all_to_all", "alltoall", "verify")):
            return RING
        if "reduce" in self.op:
            return REDUCE
        return PAIR if any(word in self.op for word in ("send", "recv")) else TREE


# --- scaling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """How long an operation takes among n ranks: `a · latency(n) + b · bytes · volume(n)`, with one rank's bytes."""

    name: str
    formula: str
    latency: Callable[[int], float]
    volume: Callable[[int], float]
    gathers: bool = False
    """Whether what a rank gives and gets is as many times its own bytes as there are ranks."""


def _rounds(n: int) -> float:
    return log2(n) if n > 1 else 0.0


TREE = Shape("broadcast, barrier", "log2(n)·(a + b·bytes)", _rounds, _rounds)
REDUCE = Shape("reduce", "a·(n-1) + b·bytes", lambda n: n - 1.0, lambda n: 1.0)
RING = Shape("gather, scatter, all-to-all", "a·(n-1) + b·bytes·n", lambda n: n - 1.0, float, gathers=True)
PAIR = Shape("send, receive", "a + b·bytes", lambda n: 1.0, lambda n: 1.0)
STORE = Shape("new gloo group, for which a store is asked", "a·n·(2n+1)", lambda n: n * (2.0 * n + 1.0), lambda n: 0.0)
EACH = Shape("new group, lazy or not gloo's", "a·n", float, lambda n: 0.0)


@dataclass(frozen=True)
class Fit:
    """What operations of one shape were measured to take."""

    shape: Shape
    latency_s: float
    """The `a` of the formula."""
    s_per_byte: float
    """The `b`; 0 where all that was sent was of one size, or too small to show."""

    def seconds(self, count: int, sent: float, size: int) -> float:
        """For so many operations, and bytes, in a group of that size."""
        each = self.latency_s * self.shape.latency(size)
        return count * each + self.s_per_byte * sent * self.shape.volume(size)


def fit(shape: Shape, measured: Iterable[tuple[int, float, int, float]]) -> Fit:
    """The latency and the bandwidth that explain `(count, bytes, size, seconds)` best: least squares, in which what was
    done more often says more.

    `bytes` are those of one rank. Where no message is large, their sizes explain nothing, and only noise would seem so.
    """
    known = [each for each in measured if each[3] > 0 and each[2] > 0 and each[0] > 0]
    is_large = any(sent >= SMALL_BYTES * count for count, sent, _, _ in known)
    xx = yy = xy = xt = yt = 0.0
    for count, sent, size, seconds in known:
        x, y = count * shape.latency(size), sent * shape.volume(size) if is_large else 0.0
        xx, yy, xy = xx + x * x / count, yy + y * y / count, xy + x * y / count
        xt, yt = xt + x * seconds / count, yt + y * seconds / count
    if (determinant := xx * yy - xy**2) > 1e-9 * xx * yy:
        latency, per_byte = (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
        if latency >= 0 and per_byte >= 0:
            return Fit(shape, latency, per_byte)
        is_large = latency < 0
    if is_large and yy:  # one of the two has to explain it all
        return Fit(shape, 0.0, yt / yy)
    return Fit(shape, xt / xx if xx else 0.0, 0.0)


def fits(rows: Iterable[Traffic]) -> dict[Shape, Fit]:
    """For each shape, what its operations were measured to take."""
    measured = defaultdict(list)
    for row in rows:
        measured[row.shape].append((row.count, _sent_by_one(row), row.size, row.least_s))
    return {shape: fit(shape, points) for shape, points in measured.items()}


def _sent_by_one(row: Traffic) -> float:
    return row.bytes / max(1, row.size) if row.shape.gathers else float(row.bytes)


def size_at(row: Traffic, ranks: int) -> int:
    """How large its groups would be in a job of that many ranks: those of all ranks grow, smaller ones stay."""
    return ranks if row.size == row.world else row.size


def seconds_at(row: Traffic, ranks: int, model: Fit) -> float:
    """What a row would cost a job of that many ranks: as measured, and what the model says is added."""
    now, then = (model.seconds(row.count, _sent_by_one(row), n) for n in (row.size, size_at(row, ranks)))
    return max(0.0, row.least_s + then - now)


# --- findings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that a job can do without."""

    title: str
    fix: str
    rows: tuple[Traffic, ...]
    count: int
    seconds: float
    saves: float
    """Seconds of each rank's, at the present size, without the waits for others."""
    saves_at: Mapping[int, float]
    """The same by the model, by number of ranks."""


@dataclass(frozen=True)
class _Rule:
    title: str
    fix: str
    matches: Callable[[Traffic], bool]
    keeps: Callable[[int, int], float] = field(default=lambda calls, ranks: 0.0)
    """The share that remains after the fix, of so many calls among so many ranks."""


def _through(*names: str) -> Callable[[Traffic], bool]:
    return lambda row: all(name in row.through for name in names)


def _once(calls: int, ranks: int) -> float:
    return 1.0 / calls if calls else 1.0


_RULES = (
    _Rule(
        "groups with the same ranks as another",
        "headway.startup.process_group(ranks) returns the one that is there",
        lambda row: row.why == "duplicate",
    ),
    _Rule(
        "groups of one rank",
        "headway.startup.process_group(ranks), and device_mesh(...) for a mesh, make none that nobody uses",
        lambda row: row.why == "single",
    ),
    _Rule(
        "groups that connect all ranks at once",
        "TORCH_GLOO_LAZY_INIT=1 in the job's environment: each pair connects when it first has to",
        lambda row: row.why == "eager" and row.backend == "gloo",
        lambda calls, ranks: 1.0 / (2 * ranks + 1),
    ),
    _Rule(
        "groups that connect all ranks at once",
        "leave out device_id: a communicator is then made at its first use, or never",
        lambda row: row.why == "eager",
    ),
    _Rule(
        "EmbeddingCollection gathers each table's shards",
        "headway.startup.local_shard_metadata() before the model is sharded: the plan says it all",
        _through("ShardedEmbeddingCollection", "ShardedTensor"),
    ),
    _Rule(
        "ShardedTensor gathers its shards' metadata",
        "headway.startup.sharded_tensor(...) builds it from what every rank knows",
        _through("ShardedTensor."),
    ),
    _Rule(
        "DTensor.from_local compares all ranks",
        "run_check=False, once the program is known to be right",
        _through("DTensor.from_local"),
    ),
    _Rule(
        "rank 0's values are sent to be distributed",
        "src_data_rank=None, if all ranks have the same seed or restore a checkpoint afterwards",
        lambda row: any(name in row.through for name in ("parallelize_module", "distribute_")),
    ),
    _Rule(
        "DistributedDataParallel compares and sends all parameters",
        "headway.startup.data_parallel(model) leaves it out (init_sync=False) where all ranks have the same",
        _through("DistributedDataParallel.__init__"),
    ),
    _Rule(
        "FullyShardedDataParallel sends all parameters",
        "sync_module_states=False, if all ranks have the same seed or restore a checkpoint",
        _through("FullyShardedDataParallel.__init__"),
    ),
    _Rule(
        "data-parallel tables are sent one by one",
        "headway.startup.broadcast_parameters(...) sends them as one",
        lambda row: row.op == "broadcast" and row.calls > 1 and "ShardedEmbedding" in row.through,
        _once,
    ),
    _Rule(
        "one rank plans, and all wait for its plan",
        "headway.startup's cache of sharding plans spares planning, too, which is not counted here",
        _through("ShardingPlanner"),
    ),
    _Rule(
        "barriers",
        "one before the first step will do, if any: every collective waits for all ranks by itself",
        lambda row: "barrier" in row.op,
        _once,
    ),
    _Rule(
        "many small messages from one line",
        "collect what there is to say, and send it as one list",
        lambda row: row.calls >= MANY and row.bytes < SMALL_BYTES * row.calls and not row.op.startswith(MAKES_GROUPS),
        _once,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """All of it."""

    ranks: int
    """How many were heard."""
    world: int
    rows: tuple[Traffic, ...]
    """Before the first step, the costliest first."""
    first_step: tuple[Traffic, ...]
    """In its forward and backward passes."""
    findings: tuple[Finding, ...]
    """What can be saved, the most first."""
    models: Mapping[Shape, Fit]
    at: tuple[int, ...]
    seconds_at: Mapping[int, float]
    """What all of the rows cost together, by number of ranks."""


def audit(ranks: Iterable[Iterable[Mark]], at: Sequence[int] = (8, 64, 512)) -> Audit:
    """What the marks of all ranks tell."""
    told = [[mark.attrs for mark in marks if mark.name == Told.COLLECTIVE] for marks in ranks]
    heard = [each for each in told if each]
    everything = sorted(_rows(heard), key=lambda row: -row.seconds)
    rows = tuple(row for row in everything if not row.step)
    models = fits(rows)
    return Audit(
        ranks=len(heard),
        world=max((row.world for row in rows), default=0),
        rows=rows,
        first_step=tuple(row for row in everything if row.step),
        findings=tuple(_findings(rows, models, at)),
        models=models,
        at=tuple(at),
        seconds_at={n: sum(seconds_at(row, n, models[row.shape]) for row in rows) for n in at},
    )


_KEY = ("op", "site", "through", "step", "size", "world", "backend", "lazy")


def _rows(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[Traffic]:
    """What the ranks told, each site once."""
    by_site: dict[Any, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for rank, told in enumerate(ranks):
        for each, why in zip(told, _objections(told), strict=True):
            key = tuple(each.get(name) for name in _KEY)
            by_site[(*key, why)][rank].append(each)
    return [_row(key, list(told.values())) for key, told in by_site.items()]


def _row(key: Any, ranks: list[list[dict[str, Any]]]) -> Traffic:
    op, site, through, step, size, world, backend, lazy, why = key
    counts, calls, seconds, sizes = (
        [sum(each.get(name, 0) for each in told) for told in ranks] for name in ("count", "calls", "seconds", "bytes")
    )
    return Traffic(
        op=op, site=site or "", through=through or "", step=bool(step), size=size or 0, world=world or 0,
        backend=backend or "", lazy=bool(lazy), why=why, count=max(counts), calls=max(calls), seconds=max(seconds),
        least_s=min(seconds), bytes=max(sizes), ranks=len(ranks), total=sum(counts),
    )  # fmt: skip


_OURS = ("Checkpointer", "process_group")
"""What sends while others train, and so beside their groups; and what asks no other rank for a group of one."""


def _objections(told: Sequence[dict[str, Any]]) -> list[str]:
    """What is to be said against each group that one rank is in, in the order they were made."""
    known: set[Any] = set()
    found = []
    for each in told:
        why, size = "", each.get("size", 0)
        if str(each.get("op")).startswith(MAKES_GROUPS) and size and each.get("world", 0) > 1:
            members = (tuple(each.get("ranks", ())), size, each.get("backend"))
            usual = "" if each.get("lazy") else "eager"
            why = "single" if size == 1 else "duplicate" if members in known else usual
            if any(ours in str(each.get("through")) for ours in _OURS):
                why = ""
            known.add(members)
        found.append(why)
    return found


def _findings(rows: Sequence[Traffic], models: Mapping[Shape, Fit], at: Sequence[int]) -> list[Finding]:
    matched: dict[_Rule, list[Traffic]] = defaultdict(list)
    for row in rows:
        if (rule := next((rule for rule in _RULES if rule.matches(row)), None)) is not None:
            matched[rule].append(row)
    found = [_finding(rule, tuple(mine), models, at) for rule, mine in matched.items()]
    return sorted((each for each in found if each is not None), key=lambda each: -each.saves)


def _finding(rule: _Rule, rows: tuple[Traffic, ...], models: Mapping[Shape, Fit], at: Sequence[int]) -> Finding | None:
    calls = sum(row.calls for row in rows)

    def saved(row: Traffic, seconds: float, ranks: int) -> float:
        return seconds * (1.0 - rule.keeps(calls, size_at(row, ranks)))

    if calls and all(rule.keeps(calls, row.size) >= 1.0 for row in rows):
        return None
    return Finding(
        title=rule.title,
        fix=rule.fix,
        rows=rows,
        count=sum(row.count for row in rows),
        seconds=sum(row.seconds for row in rows),
        saves=sum(saved(row, row.least_s, row.world) for row in rows),
        saves_at={n: sum(saved(row, seconds_at(row, n, models[row.shape]), n) for row in rows) for n in at},
    )
