"""A DLRM sharded over two ranks by FSDP2, whose model is published by a process of its own when it is trained.

    headway run --nproc-per-node 2 examples/publish_dlrm.py
    headway publish status

The version is in out/publish/published: its weights, a package that runs without Python code, and a card.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import headway
from train_dlrm import DENSE, DLRM, ROWS, TABLES, Clicks


def served() -> headway.Served:
    """What is served, and the batches that it is checked with."""
    generator = torch.Generator().manual_seed(1)
    sizes = (2, 7, 64)
    batches = [
        (torch.randn(size, DENSE, generator=generator), torch.randint(ROWS, (size, TABLES), generator=generator))
        for size in sizes
    ]
    return headway.Served(DLRM(), batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--folder", type=Path, default=Path("out/publish"))
    options = parser.parse_args()

    run = headway.current()
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DLRM()
    for part in (*model.tables, model.bottom, model.top):
        fully_shard(part)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    data = Clicks(options.steps * options.batch_size * dist.get_world_size())
    loader = DataLoader(data, options.batch_size, sampler=DistributedSampler(data, shuffle=False))

    with headway.Checkpointer(options.folder, model=model, optimizer=optimizer, loader=loader) as ckpt:
        ckpt.restore()
        for step, (dense, sparse, clicked) in run.steps(ckpt.loader, start=ckpt.step):
            loss = nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), clicked)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.after(step)
    run.finish(publish=headway.Publish("safetensors,aotinductor", model=f"{__file__}:served"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
