"""A process that compiles a model and trains it for a step, with one cache or another: what `compile.py` starts."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.compile_fx
from torch import nn

from headway.run import current


class DLRM(nn.Module):
    """Eight tables, two towers and their products."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(1000, 32, mode="sum") for _ in range(8)])
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(36 + 32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        low = self.bottom(dense)
        pooled = [table(sparse[:, number]) for number, table in enumerate(self.tables)]
        every = torch.stack([low, *pooled], dim=1)
        products = every @ every.transpose(1, 2)
        rows, columns = torch.tril_indices(9, 9, offset=-1)
        return torch.sigmoid(self.top(torch.cat([low, products[:, rows, columns]], dim=1)))

    @staticmethod
    def batch() -> tuple[torch.Tensor, ...]:
        return torch.randn(64, 13), torch.randint(0, 1000, (64, 8, 4))


class Transformer(nn.Module):
    """Six layers, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.embed, self.layers = nn.Embedding(500, 128), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(128, 500)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens)))

    @staticmethod
    def batch() -> tuple[torch.Tensor, ...]:
        return (torch.randint(0, 500, (8, 32)),)


MODELS: dict[str, Any] = {"DLRM": DLRM, "transformer": Transformer}


def main() -> None:
    """Prints one line of JSON."""
    told = json.loads(sys.argv[1])
    spent = [0.0]
    torch.manual_seed(0)
    began = time.perf_counter()
    model = MODELS[told["model"]]()
    if told["cache"] == "headway":
        _time_hooks(spent)
    if told["cache"] == "mega":
        torch.compiler.load_cache_artifacts(Path(told["mega"]).read_bytes())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled, batch = torch.compile(model), model.batch()
    loss = compiled(*batch).square().mean()
    loss.backward()
    optimizer.step()
    took = time.perf_counter() - began
    losses = [float(loss), float(compiled(*batch).square().mean())]
    for function in (_sines, _cosines):
        _save(told)
        losses.append(float(torch.compile(function)(torch.ones(4, 8))))
    _save(told)
    counters, session = torch._dynamo.utils.counters["inductor"], current().compiles
    outcome = session.outcome if session else {}
    print(json.dumps({
        "took": took, "losses": losses, "misses": counters["fxgraph_cache_miss"], "hits": counters["fxgraph_cache_hit"],
        "outcome": outcome, "hooks": spent[0], "compile": session.seconds if session else 0.0,
    }), flush=True)  # fmt: skip


def _sines(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + 3).sum()


def _cosines(x: torch.Tensor) -> torch.Tensor:
    return (x.cos() * 3).sum()


def _save(told: dict[str, Any]) -> None:
    session = current().compiles
    if told["cache"] == "headway" and session is not None:
        session.save()
    if told["cache"] == "cold":
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        Path(told["mega"]).write_bytes(saved[0])


def _time_hooks(spent: list[float]) -> None:
    """Adds up what the cache takes of each compilation."""
    session = current().compiles
    assert session is not None
    for name in ("before_compile", "after_compile"):
        original = getattr(session, name)

        def timed(original: Any = original) -> None:
            begin = time.perf_counter()
            original()
            spent[0] += time.perf_counter() - begin

        setattr(session, name, timed)


if __name__ == "__main__":
    main()
