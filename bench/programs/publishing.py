"""A DLRM on ranks that share it by FSDP2, as in `examples/publish_dlrm.py`, which ends in one of several ways.

    headway run --nproc-per-node 2 publishing.py inside|handed|saved FOLDER STEPS
    headway run --nproc-per-node 4 publishing.py large FOLDER MEGABYTES

`inside` publishes before it leaves, `handed` has it published, `saved` does neither; `large` trains nothing and saves
so much. Each rank says in FOLDER which process it is, and when its last step was done.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import headway

sys.path += [str(Path(__file__).parents[2] / "examples"), str(Path(__file__).parent)]
import publish_by_hand

from train_dlrm import DLRM, Clicks

BATCH = 128
SIDE = 2048
"""Of the matrices that `large` consists of: 16 MB each."""


def served() -> headway.Served:
    """What is served, and the batches that it is checked with: those of `publish_by_hand.py`."""
    return headway.Served(DLRM(), publish_by_hand.golden_batches())


def stamp(folder: Path, what: str) -> None:
    """One file, with the process and the time."""
    part = folder / f".{what}-{dist.get_rank()}"
    part.write_text(f"{os.getpid()} {time.monotonic_ns()}")
    part.rename(folder / part.name[1:])


def train(way: str, folder: Path, steps: int) -> None:
    """Trains, saves, and ends."""
    run = headway.current()
    stamp(folder, "begun")
    torch.manual_seed(0)
    model = DLRM()
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    data = Clicks(steps * BATCH * dist.get_world_size())
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=False))
    with headway.Checkpointer(folder / "checkpoints", model=model, optimizer=optimizer, loader=loader) as ckpt:
        for step, (dense, sparse, clicked) in run.steps(ckpt.loader, start=ckpt.step):
            loss = nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), clicked)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.after(step)
        stamp(folder, "trained")
    if way == "handed":
        run.finish(publish=headway.Publish("safetensors,aotinductor", model=f"{__file__}:served"))
        return
    if way == "inside":
        with run.span("publish"):
            if run.rank == 0:
                publish_by_hand.package(newest(folder / "checkpoints"), folder / "published")
            dist.barrier()
    run.finish()


def newest(folder: Path) -> Path:
    """The last checkpoint."""
    return max(folder.glob("step-*"))


def save_large(folder: Path, megabytes: int) -> None:
    """A model of so many bytes, each matrix of which is shared by all ranks."""
    count = megabytes * 1_000_000 // (SIDE * SIDE * 4)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(count)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for value in model.parameters():
            value.to_local().uniform_(-1, 1)  # type: ignore[attr-defined]
    with headway.Checkpointer(folder / "checkpoints", model=model, memory="streaming") as ckpt:
        ckpt.save(1, wait=True)
    headway.current().finish()


def main(way: str, folder: Path, size: int) -> None:
    """Whatever is asked for."""
    dist.init_process_group("gloo")
    if way == "large":
        save_large(folder, size)
    else:
        train(way, folder, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
