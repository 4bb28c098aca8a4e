"""Trains a small model on all ranks, and has it published: `handing_over.py FOLDER [HOW]`."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import headway

SIZE = 6


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(SIZE, 16), nn.Linear(16, 1)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(given).relu())


def served() -> headway.Served:
    """What is served."""
    return headway.Served(Model(), [(torch.ones(3, SIZE),), (torch.arange(5.0 * SIZE).view(5, SIZE) / 10,)])


def main(folder: str, how: str) -> None:
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    dist.init_process_group("gloo")
    run = headway.current()
    model = Model()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(40, 4, SIZE)
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    ckpt = headway.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader, interval=None)
    if how != "anew":
        ckpt.restore()
    for step, batch in run.steps(ckpt.loader, start=ckpt.step):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if how == "only saves" and step == 4:
            ckpt.save(5, wait=True)
        if how != "only saves":
            ckpt.after(step)
        if step == 9:
            break
    if how == "closed":
        ckpt.save(wait=True)
        ckpt.close()
    if how == "never saved":
        ckpt.close()
    runner = os.environ.get("RUNNER", "local")
    what = headway.Publish("safetensors", to=f"{folder}/../published", runner=runner)
    if how == "export":
        what = headway.Publish("export", model=f"{__file__}:served", to=f"{folder}/../published", runner=runner)
    if how == "no such recipe":
        what = headway.Publish("missing.py:publish")
    if how == "without a checkpointer":
        run.anchors = None
    if how == "destroyed":
        dist.destroy_process_group()
    if how == "one fails" and dist.get_rank() == 1:
        ckpt._training.parts["broken"] = torch.nn.Module()
        ckpt._training.parts["broken"].state_dict = None
    run.finish(publish=what)
    if how == "twice":
        run.finish(publish=what)
    if how == "destroyed":
        return
    dist.destroy_process_group()
    print(f"rank {dist.get_rank() if dist.is_initialized() else os.environ['RANK']} is done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
