"""The ledger of a long job from its journal on disk, and again after one more record.

The journal is the real recorder's, with a fake clock. The peer, ml-goodput-measurement's calculator, gets its entries
in memory, without the download that it would begin with, and does less: it knows neither data waits nor checkpoints.
It takes so long that it runs once a size, in a process of its own.
"""

import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench.goodput import InMemoryLog, job_of, library, recorder_in_memory
from bench.measure import Row, apart, peak_mb
from headway.cli.source import Source
from headway.events.job import JobReader
from headway.events.vocabulary import StepRun
from headway.paths import JobPaths
from headway.testing import Story


def run(quick: bool) -> list[Row]:
    """The rows on reports."""
    sizes = (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for steps in sizes:
            home = str(Path(folder, str(steps)))
            apart("report.write", home, steps)
            peer = apart("report.peer", steps)
            runs = [apart("report.ours", home, steps) for _ in range(7)]
            found = {key: [run[key] for run in runs] for key in ("first_s", "peak_mb")}
            more_ms = [ms for run in runs for ms in run["more_ms"]]
            bars = (0.5, 20.0) if steps == 1_000_000 else (None, None)
            rows += [
                Row(f"report, {steps:,} steps", "s", found["first_s"], [peer["first_s"]], "ml-goodput", *bars),
                Row("… one more record", "ms", more_ms, [peer["more_ms"]], "ml-goodput"),
                Row("… peak memory", "MB", found["peak_mb"], [peer["peak_mb"]], "ml-goodput"),
            ]
    small, large = (min(row.ours) for row in (rows[1], rows[-2]))
    note = f"one more record: the fastest of {sizes[-1]:,} steps over the fastest of {sizes[0]:,}"
    rows.append(Row("… growth with history", "×", [large / small], at_most=2.0, note=note))
    return rows


def write(home: str, steps: int) -> dict[str, Any]:
    """Writes the job: start-up, steps of 100 ms give or take 1%, a blocking save every 10,000."""
    rank = Story(Path(home), "job").rank(program="train.py")
    rank.span("imports", 8).span("train_module_creation", 20).span("pt2_compilation", 40)
    advance = rank.clock.advance

    def batches() -> Any:
        for number in range(steps):
            advance(0.001)
            yield number

    for step, _ in rank.recorder.steps(batches()):
        advance(0.099 + 0.002 * (step * 7919 % 1000) / 1000)
        if step % 10_000 == 9_999:
            rank.span("checkpoint_blocking", 0.5).saved(step + 1)
    rank.killed(seen=True)
    return {}


def ours(home: str, steps: int) -> dict[str, Any]:
    """The ledger of the job from disk, then of one more run of steps at a time."""
    source = Source(JobReader(JobPaths(Path(home), "job")))
    begin = time.process_time()
    ledger = source.ledger()
    first_s = time.process_time() - begin
    assert sum(ledger.buckets.values()) == ledger.wall_ns
    assert sum(ledger.steps.values()) == steps
    (process,) = source.accounts._timelines
    end, more_ms = source.accounts._timelines[process].last_ns, []
    for number in range(5):
        at = end + number * 10**8
        begin = time.process_time()
        record = StepRun(0, 1, steps + number, steps + number + 1, at, at + 10**8, 10**6)
        source.accounts.add(process, [record])
        source.ledger()
        more_ms.append(1000 * (time.process_time() - begin))
    return {"first_s": first_s, "more_ms": more_ms, "peak_mb": peak_mb()}


def peer(steps: int) -> dict[str, Any]:
    """The goodput of as many steps, then after one more."""
    log = InMemoryLog()
    at = job_of(steps, log)
    with tempfile.TemporaryDirectory() as folder:
        calculator = library().GoodputCalculator("job", "log", log, cache_dir=folder)
        begin = time.process_time()
        calculator.get_job_goodput(include_badput_breakdown=True)
        first_s = time.process_time() - begin
        recorder_in_memory(log).record_step_start_time(steps, at + timedelta(seconds=0.1))
        begin = time.process_time()
        calculator.get_job_goodput(include_badput_breakdown=True)
        return {"first_s": first_s, "more_ms": 1000 * (time.process_time() - begin), "peak_mb": peak_mb()}
