"""Trains on two ranks, and does one odd thing half way: `healthy.py KIND PAUSE_S`. Nothing is ever wrong with it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

KIND, PAUSE_S = sys.argv[1], float(sys.argv[2])
STEPS, ODD_STEP, STEP_S = 40, 20, 0.05
BUSY = "import os, sys, time\nos.nice(19)\nuntil = time.time() + float(sys.argv[1])\nwhile time.time() < until: pass"


class Batches(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(STEPS):
            if (KIND, step) == ("paused loader", ODD_STEP):
                time.sleep(PAUSE_S)
            yield torch.ones(2, 4)


def save_slowly(state: object) -> None:
    """Write a checkpoint to a store that takes its time."""
    with open("saved.pt", "wb") as file:
        torch.save(state, file)
        for _ in range(100):
            time.sleep(PAUSE_S / 100)
            file.write(b"\0" * 1000)


def be_stopped() -> None:
    """Have this process stopped and continued, as `scontrol suspend` does."""
    pause = f"kill -STOP {os.getpid()}; sleep {min(PAUSE_S, 20)}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", pause]).wait()


def behave_oddly(rank: int, step: int, model: nn.Module) -> None:
    if KIND == "growing steps" and step > ODD_STEP:
        time.sleep(PAUSE_S * 1.4 ** (step - STEPS))
    if step != ODD_STEP:
        return
    if KIND == "long step" or (KIND == "upload by one rank" and rank == 0):
        time.sleep(PAUSE_S)
    elif KIND == "slow save" and rank == 0:
        save_slowly(model.state_dict())
    elif KIND == "evaluation by one rank" and rank == 0:
        evaluate(model)
    elif KIND == "compilation":
        subprocess.run([sys.executable, "-c", BUSY, str(PAUSE_S)], check=True)
    elif KIND == "stopped":
        be_stopped()


@torch.no_grad()
def evaluate(model: nn.Module) -> None:
    model.eval()
    until = time.monotonic() + PAUSE_S
    while time.monotonic() < until:
        model.module(torch.ones(2, 4))  # type: ignore[operator]
        time.sleep(0.2)
    model.train()


def main() -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if KIND == "slow start":
        time.sleep(PAUSE_S)
    for step, batch in enumerate(DataLoader(Batches(), batch_size=None, num_workers=1)):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        time.sleep(STEP_S)
        behave_oddly(rank, step, model)
    if KIND == "slow end":
        time.sleep(PAUSE_S)
    Path(f"done-{rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
