"""The training script of the journeys: two gloo ranks, checkpoints, deaths on cue.

Says what it did, and when, in a log of its own, so that the ledger can be held against it.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import headway
from headway.testing import kill_at

folder, steps, kill_step, mode = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
run = headway.current()
stopwatch = open(folder / f"stopwatch-{run.rank}.jsonl", "a", buffering=1)


def note(what: str, **more: object) -> None:
    print(json.dumps({"what": what, "at": time.time(), "pid": os.getpid(), **more}), file=stopwatch)


note("begin")
with run.stage("process_group_init"):
    dist.init_process_group("gloo")
with run.stage("train_module_creation"):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    time.sleep(0.5)
checkpoint, first = folder / "checkpoint.pt", 0
if checkpoint.exists():
    with run.span("checkpoint_restore"):
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        first = state["step"]
    run.checkpoint_restored(first)
note("loop", first=first)
for step, batch in run.steps((torch.randn(32, 64) for _ in range(first, steps)), start=first):
    model(batch).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    note("step", step=step)
    if mode == "kill":
        kill_at(kill_step, step, rank=1, marker=folder / "killed")
    elif mode == "raise" and step == kill_step and run.rank == 1 and not (folder / "killed").exists():
        (folder / "killed").touch()
        raise RuntimeError("the journey wants it so")
    if (step + 1) % 20 == 0:
        with run.span("checkpoint_blocking"):
            if run.rank == 0:
                torch.save({"model": model.state_dict(), "step": step + 1}, folder / "new.pt")
                os.replace(folder / "new.pt", checkpoint)
            dist.barrier()
        run.checkpoint_saved()
note("done")
dist.destroy_process_group()
run.finish()
