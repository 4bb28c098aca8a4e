"""How fast a job starts: next to what it would take one after another, to torch and TorchRec as they are, or to the
longest path of waits that nothing can shorten.

Sleeps stand for far-off machines: storage, a rendezvous. All that computes is real. What is compared takes turns.
"""

import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.launched import FRESH, Job, Launcher
from bench.measure import Row, take_turns
from bench.starting import LATENCIES, MIXED, Found, on_ranks

Stages = Mapping[str, tuple[str, tuple[str, ...]]]


def run(quick: bool) -> list[Row]:
    """The rows on start-up."""
    rounds = 1 if quick else 5
    rows = [_runner_row(rounds), *_overlap_rows(rounds), *_group_rows(2 if quick else 5), _first_step_row(rounds)]
    if importlib.util.find_spec("torchrec") is None:
        print("  the rows on TorchRec are skipped: it is not installed")
        return rows
    return [*rows, *_restart_rows(rounds), _plan_row(quick), _collective_row(), _metadata_row(rounds)]


# --- overlap ---------------------------------------------------------------------------------------------------------


def longest_path_s(stages: Stages, took_s: Mapping[str, float]) -> float:
    """The least that a start-up can take: a stage follows what it needs, and those of the main thread, and those that
    communicate, each follow one another in the order they are declared in."""
    ends: dict[str, float] = {}
    last: dict[str, float] = {}
    for name, (lane, needs) in stages.items():
        begin = max([last.get(lane, 0.0) if lane in ("main", "comm") else 0.0, *(ends[need] for need in needs)])
        ends[name] = last[lane] = begin + took_s[name]
    return max(ends.values())


def _runner_row(rounds: int) -> Row:
    path_s = longest_path_s(
        {name: (lane, needs) for name, (lane, needs, _) in LATENCIES.items()},
        {name: seconds for name, (*_, seconds) in LATENCIES.items()},
    )
    walls = [on_ranks(1, "latency_bound")[0]["wall_s"] for _ in range(rounds)]
    serial_s = sum(seconds for *_, seconds in LATENCIES.values())
    note = f"{1000 * (median(walls) - path_s):.1f} ms over a path of {path_s:.1f} s; one after another {serial_s:.1f} s"
    name, unit = "stages that only wait", "× their longest path"
    return Row(name, unit, [wall / path_s for wall in walls], at_most=1.02, note=note)


def _overlap_rows(rounds: int) -> list[Row]:
    """On two ranks; the slowest counts. What each stage takes alone is known from the run one after another."""
    runs: dict[str, list[list[Found]]] = {"serial": [], "overlapped": []}

    def timed(way: str) -> float:
        found = on_ranks(2, "mixed", **({"HEADWAY_SERIAL": "1"} if way == "serial" else {}))
        runs[way].append(found)
        return float(max(each["wall_s"] for each in found))

    walls = take_turns(rounds, overlapped=lambda: timed("overlapped"), serial=lambda: timed("serial"))
    paths = [max(longest_path_s(MIXED, _took(each)) for each in found) for found in runs["serial"][1:]]
    over = [wall / path for wall, path in zip(walls["overlapped"], paths, strict=True)]
    note = f"longest path {median(paths):.2f} s, from what each stage takes alone"
    return [
        Row("a start-up that computes and waits", "× its longest path", over, at_most=1.05, note=note),
        Row("… in seconds", "s", walls["overlapped"], walls["serial"], "one after another"),
    ]


def _took(found: Found) -> dict[str, float]:
    times: dict[str, Any] = found["times"]
    return {name: end - begin for name, (begin, end) in times.items()}


# --- process groups --------------------------------------------------------------------------------------------------

FEW, MANY = 2, 16


def _group_rows(rounds: int) -> list[Row]:
    """Each round makes ten groups on few ranks, then on many. A rank's fastest counts, and the median rank: where there
    are fewer cores than ranks, the others have above all waited for one."""
    took: dict[str, list[float]] = {}
    for _ in range(rounds):
        for ranks in (FEW, MANY):
            found = on_ranks(ranks, "made_groups", 10)
            for what in found[0]:
                took.setdefault(f"{what} {ranks}", []).append(median(min(rank[what]) for rank in found))
    growth = {
        who: [many / few for few, many in zip(took[f"{who} made {FEW}"], took[f"{who} made {MANY}"], strict=True)]
        for who in ("ours", "stock")
    }
    ms = {what: [1000 * each for each in seconds] for what, seconds in took.items()}
    name = f"making a group, {MANY} ranks over {FEW}"
    return [
        Row(name, "×", growth["ours"], growth["stock"], "new_group", at_most=5.0),
        *(
            Row(name, "ms", ms[f"ours {what} {MANY}"], ms[f"stock {what} {MANY}"], "new_group")
            for what, name in (("made", f"… at {MANY} ranks"), ("used", "… and its first collective"))
        ),
    ]


# --- fast batch ------------------------------------------------------------------------------------------------------


def _first_step_row(rounds: int) -> Row:
    """The wait for data is half as long again as compiling takes here: else there is nothing to hide it behind."""
    with tempfile.TemporaryDirectory() as name:
        caches = (str(Path(name, str(number))) for number in itertools.count())

        def took(way: str, wait_s: float) -> Found:
            return on_ranks(1, "first_step", way, wait_s, HEADWAY_HOME=name, TORCHINDUCTOR_CACHE_DIR=next(caches))[0]

        first = took("fast", 0.5)  # it only looks at its batch
        wait_s = 1.5 * (first["step_s"] - first["data_s"])
        rounds_of = [(took("fast", wait_s), took("stock", wait_s)) for _ in range(rounds)]
    ours = [fast["step_s"] / stock["data_s"] for fast, stock in rounds_of]
    theirs = [stock["step_s"] / stock["data_s"] for _, stock in rounds_of]
    name = "first step on a fast batch"
    return Row(
        name, "× the wait for data", ours, theirs, "compiling after it", at_most=1.05, note=f"{wait_s:.1f} s wait"
    )


# --- TorchRec --------------------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).with_name("starting_dlrm.py")
WAITS_S = 3.0
"""What the DLRM spends on far-off machines, one after another."""
_IMPORTS = "torchrec,torchrec.distributed.model_parallel,torchrec.distributed.planner"
_TWO = ("--nproc-per-node", "2")
_ENVIRON = {"PYTHONPATH": str(SCRIPT.parents[1])}


def warm(wait_s: float) -> Launcher:
    """The DLRM, with its imports kept warm for a restart. What `Job` says behind it, the script looks for there."""
    words = ("headway", "run", *_TWO, "--preload", _IMPORTS, "--job", "bench", str(SCRIPT), str(wait_s))
    return Launcher("headway", (sys.executable, "-m", *words), _ENVIRON)


def cold(wait_s: float) -> Launcher:
    """The DLRM under torchrun, one stage after another."""
    words = ("torch.distributed.run", "--standalone", *_TWO, str(SCRIPT), str(wait_s))
    return Launcher("torchrun", (sys.executable, "-m", *words), _ENVIRON | {FRESH: "1", "HEADWAY_SERIAL": "1"})


def _restart_rows(rounds: int) -> list[Row]:
    """From the kill of a rank to the first step, next to a start from nothing."""
    rows = []
    for wait_s, times in ((WAITS_S, 5.0), (0.0, None)):
        with tempfile.TemporaryDirectory() as name:
            folders = (Path(name, str(number)) for number in itertools.count())
            took = take_turns(
                rounds, ours=partial(_restart_s, folders, wait_s), theirs=partial(_cold_s, folders, wait_s)
            )
        title = f"DLRM trains again after a kill, {wait_s:g} s of waits" if wait_s else "… and no waits at all"
        rows.append(Row(title, "s", took["ours"], took["theirs"], "one after another, from nothing", times=times))
    return rows


def _restart_s(folders: Iterator[Path], wait_s: float) -> float:
    with Job(warm(wait_s), next(folders)) as job:
        job.trains(job.started_ns, 50)
        return job.trains(job.crash("kill")).seconds


def _cold_s(folders: Iterator[Path], wait_s: float) -> float:
    with Job(cold(wait_s), next(folders)) as job:
        return job.trains(job.started_ns).seconds


def _plan_row(quick: bool) -> Row:
    tables, ranks = (26, 4) if quick else (52, 8)
    (found,) = on_ranks(1, "planned", tables, ranks, 5)
    share = [100 * hit / found["planned"] for hit in found["hits"]]
    note = f"planned {found['planned']:.1f} s, from the cache {1000 * median(found['hits']):.1f} ms"
    return Row(
        f"a plan from the cache, {tables} tables × {ranks} ranks", "% of planning", share, at_most=1.0, note=note
    )


def _collective_row() -> Row:
    """The most of two sizes counts: it may not grow with tables."""
    ways = ("stock", "remedied")
    found = {(who, tables): on_ranks(2, "collectives", who, tables)[0] for who in ways for tables in (10, 40)}
    if any(found["stock", tables]["loss"] != found["remedied", tables]["loss"] for tables in (10, 40)):
        raise RuntimeError(f"the model is another one: {found}")
    counts = {who: [float(found[who, tables]["sent"]) for tables in (10, 40)] for who in ways}
    few, many = counts["stock"]
    note = f"at 10 and at 40 tables of each kind, TorchRec {few:g} and {many:g}; the same loss"
    ours, theirs = [max(counts["remedied"])], [many]
    return Row("collectives to shard a DLRM", "", ours, theirs, "TorchRec", at_most=3, note=note)


def _metadata_row(rounds: int) -> Row:
    found = on_ranks(4, "shard_metadata", 100, rounds)
    took = {who: [max(each) for each in zip(*(rank[who] for rank in found), strict=True)] for who in ("ours", "stock")}
    name = "sharding an EmbeddingCollection, 4 ranks × 100 tables"
    return Row(name, "s", took["ours"], took["stock"], "TorchRec", times=2.5)
