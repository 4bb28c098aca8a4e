"""A recommender whose features are ragged: every batch has other numbers of ids, and now and then another top-k.

    headway compile doctor -- python examples/ragged.py

names what is compiled again and again, and prints the value that stops it.
"""

import sys

import torch
from torch import nn

FEATURES = ("clicks", "likes", "views", "shares", "queries", "carts")


class Towers(nn.Module):
    """One embedding bag a feature."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleDict({name: nn.EmbeddingBag(1000, 8, mode="sum") for name in FEATURES})
        self.score = nn.Linear(8 * len(FEATURES), 16)

    def forward(self, ids: dict[str, torch.Tensor], starts: torch.Tensor) -> torch.Tensor:
        """A row a sample."""
        return self.score(torch.cat([self.bags[name](ids[name], starts) for name in FEATURES], dim=1))


class Ranker(Towers):
    """The sum of the first `k` columns."""

    def forward(self, ids: dict[str, torch.Tensor], starts: torch.Tensor, k: int = 4) -> torch.Tensor:
        """The loss."""
        return super().forward(ids, starts)[:, :k].sum() / k


def batches(steps: int) -> list[tuple[dict[str, torch.Tensor], int]]:
    """In each step one feature more has another length than at first, and in the last k is another."""
    found = []
    for step in range(steps):
        lengths = [40 + number + (step if number < step else 0) for number, _ in enumerate(FEATURES)]
        ids = {name: torch.randint(1000, (length,)) for name, length in zip(FEATURES, lengths, strict=True)}
        found.append((ids, 4 if step < steps - 1 else 6))
    return found


def main(backend: str = "inductor") -> None:
    """Trains."""
    torch.manual_seed(0)
    model = Ranker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=backend)
    starts = torch.arange(0, 32, 4)
    for ids, k in batches(len(FEATURES) + 2):
        compiled(ids, starts, k).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
