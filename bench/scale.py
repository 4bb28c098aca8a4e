"""The ledger of large jobs from disk: 512 ranks by 10 attempts in journals, 8,192 by 50 in node files.

Node files hold roll-ups of the processes that ended, as their collectors write them; one row shows the cost without,
and one the cost of a stall in each attempt that no rank explains. The job is made apart from the timing, and read in a
process of its own, from a warm page cache. Time is CPU; the wall time is in the notes. The exponent is the slope of log
time over log records: 1 is linear.
"""

import tempfile
import time
from math import log
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from bench import jobs
from bench.measure import Row, apart, peak_mb
from headway.cli.source import Source
from headway.events.job import JobReader
from headway.observe.summary import summary
from headway.paths import JobPaths

PATIENCE_S = 900.0
"""A size that would take longer, going by the one before it, is left out, and its bar counts as missed."""


def run(quick: bool) -> list[Row]:
    """The rows on scale."""
    rounds = 3 if quick else 7
    rows = [_row("journals", *found, 5.0) for found in _sizes("write_journals", [(512, 10)], rounds)]
    kinds = {"write_nodes": "node files", "write_nodes_only": "no roll-ups", "write_nodes_stalled": "stalls"}
    for make, what in kinds.items():
        rows += [_row(what, *found) for found in _sizes(make, [(512, 10)], rounds)]
    sizes = [(128, 10), (256, 10), (512, 10)] if quick else [(2048, 50), (4096, 50), (8192, 50)]
    large = _sizes("write_nodes", sizes, 3)
    rows += [_row("node files", ranks, *found, 60.0 if ranks == 8192 else None) for ranks, *found in large]
    if len(large) < len(sizes):
        note = f"not run: it would have taken longer than {PATIENCE_S:.0f} s"
        rows.append(Row("8,192 ranks × 50 attempts", "s", [float("inf")], at_most=60.0, note=note))
    if len(large) > 1:
        pairs = [(log(found["records"]), log(median(found["cpu_s"]))) for *_, found in large]
        slope = linear_regression(*zip(*pairs, strict=True)).slope
        rows.append(Row("… exponent of time over records", "", [slope], at_most=1.15, note="1 is linear"))
    rows.append(Row("… peak memory", "MB", large[-1][2]["peak_mb"]))
    return rows


def _row(what: str, ranks: int, attempts: int, found: dict[str, Any], at_most: float | None = None) -> Row:
    wall, peak = median(found["wall_s"]), median(found["peak_mb"])
    note = f"wall {wall:.1f} s, {found['records']:,} records, peak {peak:,.0f} MB"
    return Row(f"{ranks:,} ranks × {attempts} attempts, {what}", "s", found["cpu_s"], at_most=at_most, note=note)


def _sizes(make: str, sizes: list[tuple[int, int]], rounds: int) -> list[tuple[int, int, dict[str, Any]]]:
    all_found: list[tuple[int, int, dict[str, Any]]] = []
    for ranks, attempts in sizes:
        if all_found and 2.5 * max(all_found[-1][2]["wall_s"]) > PATIENCE_S:
            break
        with tempfile.TemporaryDirectory() as home:
            records = apart("scale.write", make, home, ranks, attempts)["records"]
            runs = [apart("scale.read", home, ranks, attempts) for _ in range(rounds)]
        found = {"records": records} | {key: [run[key] for run in runs] for key in runs[0]}
        all_found.append((ranks, attempts, found))
    return all_found


def write(make: str, home: str, ranks: int, attempts: int) -> dict[str, Any]:
    """Makes the job."""
    return {"records": getattr(jobs, make)(JobPaths(Path(home), "job"), ranks, attempts)}


def read(home: str, ranks: int, attempts: int) -> dict[str, Any]:
    """All that `headway report` does before it prints; checked, since a fast wrong one would be worth nothing."""
    wall, cpu = time.perf_counter(), time.process_time()
    ledger = Source(JobReader(JobPaths(Path(home), "job"))).ledger()
    summary(ledger, rank_ledgers=False)
    took = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall, "peak_mb": peak_mb()}
    assert sum(ledger.buckets.values()) == ledger.wall_ns, "the parts are not the whole"
    assert (len(ledger.attempts), len(ledger.attempts[0].views)) == (attempts, ranks), "processes are missing"
    assert sum(ledger.steps.values()) == attempts * jobs.STEPS, "steps are missing"
    return took
