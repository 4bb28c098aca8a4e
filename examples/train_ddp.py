"""Data-parallel training that loses nothing: checkpoints that block for one copy in memory, and come back from it.

    headway run --nproc-per-node 2 examples/train_ddp.py

Kill a rank (`kill -9 PID`) and watch it go on; stop it and start it again, with as many ranks as you like.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import headway


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", default="out/ddp")
    options = parser.parse_args()

    run = headway.current()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    with run.stage("train_module_creation"):
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    inputs = torch.randn(8192, 32)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)

    loader = DataLoader(data, 32, sampler=sampler)

    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    with headway.Checkpointer(options.folder, **parts) as ckpt:
        ckpt.restore()
        for epoch in range(ckpt.loader.epoch, options.epochs):
            sampler.set_epoch(epoch)
            for step, (x, y) in run.steps(ckpt.loader, start=ckpt.step):
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                ckpt.after(step)
    if dist.get_rank() == 0:
        print(f"trained {ckpt.step} steps, last loss {loss.item():.4f}", flush=True)
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
