"""A small transformer, sharded over the ranks by FSDP2: each rank saves its own shards, and any number reads them.

    headway run --nproc-per-node 2 examples/train_fsdp2.py

Then again with `--nproc-per-node 1` and more `--steps`: the shards are divided anew. Its start-up is a graph of stages;
`HEADWAY_SERIAL=1` runs them one after another, to the same loss.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import headway
from headway.startup import device_mesh, lazy_groups

WORDS, WIDTH, LENGTH = 512, 128, 32


class Model(nn.Module):
    """Reads words, and says which comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def start(stock: bool) -> Any:
    """The model, its optimizer and the first words: what does not need one another is made at the same time."""
    setup = headway.Startup()

    @setup.stage(lane="comm")
    def process_group_init() -> Any:
        if not stock:
            lazy_groups()
        dist.init_process_group("gloo")
        shape, names = (1, dist.get_world_size()), ("replicas", "shards")
        return (init_device_mesh if stock else device_mesh)("cpu", shape, mesh_dim_names=names)["shards"]

    @setup.stage(lane="io", activity="preproc_creation")
    def words() -> torch.Tensor:
        return torch.randint(WORDS, (64, 8, 1)) + torch.arange(LENGTH + 1)

    @setup.stage(activity="train_module_creation")
    def whole() -> Model:
        return Model()

    @setup.stage(activity="train_module_creation")
    def model(whole: Model, process_group_init: Any) -> Model:
        for layer in whole.layers:
            fully_shard(layer, mesh=process_group_init)
        return fully_shard(whole, mesh=process_group_init)

    @setup.stage(activity="train_module_creation")
    def optimizer(model: Model) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4)

    return setup.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", default="out/fsdp2")
    parser.add_argument("--stock", action="store_true", help="without headway's remedies, to compare")
    options = parser.parse_args()

    run = headway.current()
    torch.manual_seed(0)
    parts = start(options.stock)
    model, optimizer, loss = parts.model, parts.optimizer, torch.zeros(())
    with headway.Checkpointer(options.folder, model=model, optimizer=optimizer, interval=20) as ckpt:
        ckpt.restore()
        for step, _ in run.steps(range(ckpt.step, options.steps), start=ckpt.step):
            words = parts.words[step % len(parts.words)]
            logits = model(words[:, :-1] % WORDS)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), (words[:, 1:] % WORDS).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.after(step)
    if dist.get_rank() == 0:
        print(f"trained {ckpt.step} steps, loss {loss.item().hex()}", flush=True)
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
