"""A program that trains the same model without a fast batch, with one that is recorded, and with one that is used.

Each rank writes what it found to a file. The program runs alone or on several ranks.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import headway
from headway.run import current
from headway.startup.fast import fast_batch

STEPS, ROWS, TABLES = 4, 6, ("t0", "t1")
Loss = Callable[[Any], torch.Tensor]


class Items(Dataset[Any]):
    """Items that depend on their number only, so that each run has the same."""

    def __init__(self, is_jagged: bool) -> None:
        self.is_jagged = is_jagged

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, at: int) -> Any:
        random = torch.Generator().manual_seed(100 + at)
        x, y = (torch.rand(ROWS, size, generator=random) for size in (8, 4))
        if not self.is_jagged:
            return {"x": x, "y": y}
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        keys = [f"f{number}" for number in range(len(TABLES))]
        lengths = torch.full((len(keys) * ROWS,), 2)
        values = torch.randint(0, 20, (int(lengths.sum()),), generator=random)
        return {"x": x, "y": y, "ids": KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)}


class Dense(nn.Module):
    """Has all that a forward may change: statistics, random numbers, a counter, a buffer that is replaced."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(width, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.drop, self.calls = nn.Dropout(0.3), 0
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.one(x)).relu()
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.two(self.drop(hidden)) + self.mean.sum()


class Counting(nn.Module):
    """Counts its calls, and is not compiled."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) / self.calls


class Sparse(nn.Module):
    """Tables of TorchRec's, and a dense part that is compiled."""

    def __init__(self, is_pooled: bool) -> None:
        import torchrec

        super().__init__()
        self.is_pooled = is_pooled
        width = {"embedding_dim": 8, "num_embeddings": 20}
        device = torch.device("meta")
        if is_pooled:
            tables = [torchrec.EmbeddingBagConfig(name=name, feature_names=[f"f{at}"], **width)
                      for at, name in enumerate(TABLES)]  # fmt: skip
            self.tables: nn.Module = torchrec.EmbeddingBagCollection(tables=tables, device=device)
        else:
            configs = [torchrec.EmbeddingConfig(name=name, feature_names=[f"f{at}"], **width)
                       for at, name in enumerate(TABLES)]  # fmt: skip
            self.tables = torchrec.EmbeddingCollection(tables=configs, device=device)
        self.dense = torch.compile(Dense(8 + 16), backend="eager")

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        found = self.tables(batch["ids"])
        if self.is_pooled:
            pooled = found.values()
        else:
            pooled = torch.cat([found[f"f{at}"].values().reshape(ROWS, 2, 8).sum(1) for at in range(len(TABLES))], 1)
        return self.dense(torch.cat([batch["x"], pooled], 1))


def sharded(is_pooled: bool) -> tuple[nn.Module, list[Any]]:
    """In two ranks, by TorchRec, with an optimizer inside the backward."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    sharders: list[Any] = [
        EmbeddingBagCollectionSharder(fused_params=fused),
        EmbeddingCollectionSharder(fused_params=fused),
    ]
    kinds = ["table_wise"] if is_pooled else ["row_wise"]
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    constraints = {name: ParameterConstraints(sharding_types=kinds) for name in TABLES}
    model = Sparse(is_pooled)
    plan = EmbeddingShardingPlanner(topology=topology, constraints=constraints).collective_plan(
        model, sharders, dist.GroupMember.WORLD
    )
    made = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    dense = [tensor for name, tensor in made.named_parameters() if "tables" not in name]
    return made, [torch.optim.Adam(dense, lr=0.01)]


def made(kind: str, backend: str) -> tuple[nn.Module, Any, list[Any]]:
    """A model, what computes with it, and its optimizers."""
    if kind in ("pooled", "sequence"):
        model, optimizers = sharded(kind == "pooled")
        return model, model, optimizers
    dense = nn.Sequential(nn.Linear(8, 4), nn.ReLU()) if kind == "tiny" else Dense()
    if kind.startswith("fsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (dense.one, dense.two, dense):
            fully_shard(part, mesh=mesh)
    if kind.startswith("ddp"):
        more = {"ddp_static": {"static_graph": True}, "ddp_unused": {"find_unused_parameters": True}}.get(kind, {})
        model = torch.compile(DistributedDataParallel(dense, **more), backend=backend)
    elif kind == "counting":
        model = Counting(torch.compile(dense, backend=backend))
    else:
        model = torch.compile(dense, backend=backend)
    if kind == "in_backward":
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.Adam, [dense.one.weight], {"lr": 0.01})
        last = torch.optim.SGD([dense.two.bias], lr=0.1)
        dense.two.bias.register_post_accumulate_grad_hook(lambda tensor: (last.step(), last.zero_grad())[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if kind == "accumulated":  # gradients of an earlier batch are there, and must stay
        model(torch.rand(ROWS, 8)).sum().backward()
    return model, lambda batch: model(batch["x"]), [optimizer]


def train(told: dict[str, Any], fast: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = "aot_eager" if told["kind"] == "plain" else "eager"
    model, compute, optimizers = made(told["kind"], told.get("backend", backend))
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    loader = DataLoader(
        Items(told["kind"] in ("pooled", "sequence")), batch_size=None, shuffle=True,
        num_workers=told.get("workers", 1),
    )  # fmt: skip

    def loss_of(batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", enabled=told["kind"] == "autocast"):
            return (compute(batch) - batch["y"]).square().mean()

    fails, calls = fast and told["kind"].endswith("_fails") and dist.get_rank() == 1, []

    def forward(batch: Any) -> torch.Tensor:
        calls.append(1)
        if fails:
            raise ValueError("made up to fail")
        return loss_of(batch)

    where = None if told.get("store") else f"{told['where']}/{told['kind']}"
    if told["kind"] == "ddp_apart" and dist.get_rank() == 1:
        where = f"{where}/{time.time_ns()}"
    source: Iterable[Any] = fast_batch(loader, forward, model=model, where=where) if fast else loader
    losses, before = [], counters["stats"]["unique_graphs"]
    for _ in range(1 if dist.is_initialized() else 2):
        for batch in source:
            loss = loss_of(batch)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=told["kind"] != "accumulated")
            losses.append(loss.item().hex())
    return {
        "losses": losses, "compiled": counters["stats"]["unique_graphs"] - before, "ahead": before,
        "random": torch.rand(1).item().hex(), "state": sum(_sums(model)).hex(),
        "forwards": len(calls),
    }  # fmt: skip


def _sums(model: nn.Module) -> Iterable[float]:
    for value in model.state_dict().values():
        parts = [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else [value]
        for part in parts:
            yield float((part.to_local() if hasattr(part, "to_local") else part).double().sum())


def main(told: dict[str, Any]) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    marks: list[dict[str, Any]] = []
    fast = sys.modules["headway.startup.fast"]
    fast.cores = lambda: 64.0  # type: ignore[attr-defined]  # on few cores it does not compile ahead
    if "settle_s" in told:
        fast.SETTLE_S = told["settle_s"]  # type: ignore[attr-defined]
    run = current()
    if told.get("store"):
        headway.compile_cache(told["store"], model=Dense())
    mark = run.recorder.mark
    run.recorder.mark = lambda name, **attrs: (marks.append(attrs), mark(name, **attrs))[1]  # type: ignore[method-assign]
    for kind in told["kinds"]:
        found = []
        for is_fast in told.get("runs", [False, True, True]):
            counters.clear()
            found.append(train({**told, "kind": kind}, is_fast))
        text = json.dumps({"kind": kind, "rank": run.rank, "runs": found, "marks": marks})
        Path(told["found"], f"{kind}-{run.rank}.json").write_text(text)
        marks.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
