"""One training step: headway's loop against the bare loop, and against ml-goodput-measurement's one call a step.

headway measures the wait for data and the step, and keeps both safe from a SIGKILL. The peer notes when a step began.
"""

import tempfile
from pathlib import Path

from bench.goodput import InMemoryLog, recorder_in_memory, recorder_with_handler
from bench.measure import Row, Timed, cpu_us, take_turns
from headway.events.journal import Writer
from headway.events.recorder import Recorder

STEPS = 20_000


def run(quick: bool) -> list[Row]:
    """The rows on steps."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Writer(Path(folder, "a.hwj")))
        samples = take_turns(
            7 if quick else 21, bare=_bare, ours=_ours(recorder), handler=_with_handler(), memory=_in_memory()
        )
        recorder.close()
    net = {
        name: [took - bare for took, bare in zip(samples[name], samples["bare"], strict=True)]
        for name in ("ours", "handler", "memory")
    }
    return [
        Row("step", "µs", net["ours"], net["handler"], "ml-goodput, its handler an append", 1.5, 4.0),
        Row("", "µs", net["ours"], net["memory"], "ml-goodput, its whole logger an append"),
    ]


def _bare() -> float:
    def loop() -> None:
        for _ in range(STEPS):
            pass

    return cpu_us(loop, STEPS)


def _ours(recorder: Recorder) -> Timed:
    def loop() -> None:
        for _ in recorder.steps(range(STEPS)):
            pass

    return lambda: cpu_us(loop, STEPS)


def _with_handler() -> Timed:
    kept: list[object] = []
    record = recorder_with_handler(kept).record_step_start_time

    def loop() -> None:
        for step in range(STEPS):
            record(step)
        kept.clear()

    return lambda: cpu_us(loop, STEPS)


def _in_memory() -> Timed:
    log = InMemoryLog()
    record = recorder_in_memory(log).record_step_start_time

    def loop() -> None:
        for step in range(STEPS):
            record(step)
        log.entries.clear()

    return lambda: cpu_us(loop, STEPS)
