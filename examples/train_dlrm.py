"""A small DLRM in plain torch: two gloo ranks under torchrun, checkpoints, torch.compile.

    headway exec torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_dlrm.py

There is not a word of headway in it.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

TABLES, ROWS, WIDTH, DENSE = 8, 20_000, 32, 13
Batch = tuple[Tensor, Tensor, Tensor]


class Clicks(Dataset[Batch]):
    """Synthetic clicks: the same index always gives the same sample."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Batch:
        if index >= self._size:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        dense = torch.randn(DENSE, generator=generator)
        sparse = torch.randint(ROWS, (TABLES,), generator=generator)
        clicked = (dense[0] + (sparse[0] % 2) > 0.5).float()
        return dense, sparse, clicked


class DLRM(nn.Module):
    """Embeddings and a dense tower, all pairs of them multiplied, and a tower on top."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(DENSE, 256), nn.ReLU(), nn.Linear(256, WIDTH))
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(
            nn.Linear(WIDTH + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )
        self.register_buffer("pairs", torch.triu_indices(TABLES + 1, TABLES + 1, 1), persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        low = self.bottom(dense)
        features = torch.stack([low, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products = features @ features.transpose(1, 2)
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([low, crossed], 1)).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("out/train_dlrm"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = options.folder / "checkpoint.pt"

    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DLRM()
    compiled = torch.compile(DistributedDataParallel(model))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    loss_of = nn.BCEWithLogitsLoss()

    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]

    data = Clicks(options.steps * options.batch_size * dist.get_world_size())
    sampler = DistributedSampler(data, shuffle=False)
    rest = Subset(data, list(sampler)[first * options.batch_size :])
    loader = DataLoader(rest, options.batch_size, num_workers=1, prefetch_factor=8)

    for step, (dense, sparse, clicked) in enumerate(loader, first):
        loss = loss_of(compiled(dense, sparse), clicked)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % options.save_every == 0:
            if dist.get_rank() == 0:
                save(checkpoint, step + 1, model, optimizer)
            dist.barrier()

    if dist.get_rank() == 0:
        print(f"trained {options.steps} steps, last loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes a checkpoint that is either whole or not there."""
    beside = path.with_suffix(".tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, beside)
    os.replace(beside, path)


if __name__ == "__main__":
    main()
