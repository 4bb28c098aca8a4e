"""How much disk a million steps take: of a microsecond by the real clock, of 100 ms ± 1% by a fake one."""

import random
import tempfile
from pathlib import Path

from bench.measure import Row
from headway.events.journal import Writer
from headway.events.recorder import Recorder
from headway.testing import FakeClock


def run(quick: bool) -> list[Row]:
    """The rows on journal size."""
    steps = 100_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"real clock": _real(Path(folder, "real"), steps), "100 ms ± 1%": _even(Path(folder, "even"), steps)}
    limit = steps / 1e6
    return [Row(f"journal, {steps:,} steps, {what}", "MB", [mb], at_most=limit) for what, mb in sizes.items()]


def _real(path: Path, steps: int) -> float:
    recorder = Recorder(Writer(path))
    for _ in recorder.steps(range(steps)):
        pass
    recorder.close()
    return path.stat().st_blocks * 512 / 1e6


def _even(path: Path, steps: int) -> float:
    clock, jitter = FakeClock(), random.Random(1)
    recorder = Recorder(Writer(path, clock.now_ns), clock)
    for _ in recorder.steps(range(steps)):
        clock.advance(jitter.gauss(0.1, 0.001))
    recorder.close()
    return path.stat().st_blocks * 512 / 1e6
