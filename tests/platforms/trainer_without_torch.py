"""The training script of the platforms' tests: trains until a file `enough` appears, and goes on from its checkpoint.

With a third argument, the first attempt fails at that step or later, as soon as a file `fail` appears.

It notes in a file of its own when it began and when each step was done, so that the ledger can be held against it.
"""

import sys
import time
from pathlib import Path

import headway
from headway.events import scheduler

folder, least_steps = Path(sys.argv[1]), int(sys.argv[2])
fails_at = int(sys.argv[3]) if len(sys.argv) > 3 else None
begin_s = time.time()
scheduler.TIMEOUT_S = 100.0  # the machine may be slow
run = headway.current()
checkpoint, stopwatch = folder / f"checkpoint-{run.rank}", open(folder / f"stopwatch-{run.rank}", "a", buffering=1)
print("begin", begin_s, file=stopwatch)
with run.stage("train_module_creation"):
    time.sleep(0.05)
first = 0
if checkpoint.exists():
    with run.span("checkpoint_restore"):
        first = int(checkpoint.read_text())
    run.checkpoint_restored(first)


def batches():
    while True:
        yield None


for step, _ in run.steps(batches(), start=first):
    time.sleep(0.02)
    if fails_at is not None and step >= fails_at and not first and (folder / "fail").exists():
        raise RuntimeError("the test wants it so")
    (folder / f"new-{run.rank}").write_text(str(step + 1))
    (folder / f"new-{run.rank}").replace(checkpoint)
    run.checkpoint_saved()
    print("step", time.time(), file=stopwatch)
    if step + 1 >= least_steps and (folder / "enough").exists():
        break
run.finish()
