"""A program for tests that compiles and prints what it found as one line of JSON. It runs in its own process."""

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import headway
from headway.compile import session as compile_session
from headway.run import current

compile_session.WAIT_S = compile_session.EXIT_S = 100.0  # a busy machine takes longer to load a bundle, and to save it


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu() * 2


class Base(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + 1


class Inherits(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def step(function: Any, x: torch.Tensor) -> float:
    loss = function(x).square().mean()
    if loss.requires_grad:
        loss.backward()
    return float(loss)


def train(model: nn.Module, compiled: Any) -> list[float]:
    """From a loader, with an optimizer."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for (x,) in DataLoader(TensorDataset(torch.ones(12, 8)), batch_size=4):
        losses.append(step(compiled, x))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def at_a_file(meets: str | bool) -> dict[str, Any]:
    """How ranks meet at a file; nothing if a launcher has told them where."""
    if meets is True:
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {"init_method": f"file://{meets}", "rank": rank, "world_size": size}


def main(told: dict[str, Any]) -> dict[str, Any]:
    if told.get("meets"):
        dist.init_process_group("gloo", **at_a_file(told["meets"]))
    torch.manual_seed(0)
    model = Inherits() if told.get("inherits") else Small()
    for store in told.get("before", []):
        headway.compile_cache(store, model=nn.Linear(2, 2))
    if told.get("store"):
        headway.compile_cache(told["store"], model=model, group=told.get("group", ""))
    if told.get("moves_to"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = told["moves_to"]
    compiled = torch.compile(model, backend=told.get("backend", "inductor"))
    sizes = told.get("sizes", [4])
    losses = train(model, compiled) if told.get("loads") else [step(compiled, torch.ones(size, 8)) for size in sizes]
    if told.get("second"):
        session = current().compiles
        assert session is not None
        session.save()
        losses.append(step(torch.compile(lambda x: (x.sin() + 3).sum(dim=0)), torch.ones(4, 8)))
    if told.get("lingers"):
        time.sleep(told["lingers"])
    session, counters = current().compiles, torch._dynamo.utils.counters
    return {
        "losses": losses, "outcome": session.outcome if session else None, "key": session.key if session else "",
        "compiles": counters["stats"]["unique_graphs"], "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"], "rank": int(os.environ.get("RANK", 0)),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
