"""A small transformer, sharded over the ranks by FSDP2: each rank saves its own shards, and any number reads them.

    headway run --nproc-per-node 2 examples/train_fsdp2.py

Then again with `--nproc-per-node 1` and more `--steps`: the shards are divided anew.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import headway

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", default="out/fsdp2")
    options = parser.parse_args()

    run = headway.current()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    with run.stage("train_module_creation"):
        model = Model()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    with headway.Checkpointer(options.folder, model=model, optimizer=optimizer, interval=20) as ckpt:
        ckpt.restore()
        for step, _ in run.steps(range(ckpt.step, options.steps), start=ckpt.step):
            words = torch.randint(WORDS, (8, 1)) + torch.arange(LENGTH + 1)
            logits = model(words[:, :-1] % WORDS)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), (words[:, 1:] % WORDS).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.after(step)
    if dist.get_rank() == 0:
        print(f"trained {ckpt.step} steps", flush=True)
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
