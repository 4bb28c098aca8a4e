"""A small TorchRec DLRM: bags of words table by table, rows of tables divided, and a dense tower on all ranks.

    headway run --nproc-per-node 2 examples/train_torchrec.py

It needs TorchRec: `pip install -c constraints.txt -e '.[rec]'`, then `pip install --no-deps torchrec==1.8.0`. Its
start-up is a graph of stages; `HEADWAY_SERIAL=1` runs them one after another, to the same losses. The sharding plan is
planned on the first run only, and three collectives are sent before the first step, however many tables there are.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import headway
from headway.startup import lazy_groups, local_shard_metadata, sharding_plan, synchronised

TABLES, ROWS, WIDTH, DENSE, BATCH, BATCHES = 8, 2000, 16, 13, 64, 16
BAGS = [f"bag{i}" for i in range(TABLES)]
SINGLES = [f"single{i}" for i in range(TABLES)]
Batch = tuple[Tensor, KeyedJaggedTensor, KeyedJaggedTensor, Tensor]


class DLRM(nn.Module):
    """Sums of words, single words and numbers; a tower over all of them."""

    def __init__(self) -> None:
        super().__init__()
        meta = torch.device("meta")
        bags = [EmbeddingBagConfig(ROWS, WIDTH, name, feature_names=[name]) for name in BAGS]
        singles = [EmbeddingConfig(ROWS, WIDTH, name, feature_names=[name]) for name in SINGLES]
        self.bags = EmbeddingBagCollection(tables=bags, device=meta)
        self.singles = EmbeddingCollection(tables=singles, device=meta)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.top = nn.Sequential(nn.Linear((2 * TABLES + 1) * WIDTH, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, dense: Tensor, bags: KeyedJaggedTensor, singles: KeyedJaggedTensor) -> Tensor:
        found = self.singles(singles)
        parts = [self.bottom(dense), self.bags(bags).values(), *(found[name].values() for name in SINGLES)]
        return self.top(torch.cat(parts, 1)).squeeze(1)


def clicks(seed: int) -> Batch:
    """Synthetic clicks: the same seed always gives the same batch."""
    random = torch.Generator().manual_seed(seed)
    dense = torch.randn(BATCH, DENSE, generator=random)
    lengths = torch.randint(4, (TABLES * BATCH,), generator=random)
    words = torch.randint(ROWS, (int(lengths.sum()),), generator=random)
    single = torch.randint(ROWS, (TABLES * BATCH,), generator=random)
    clicked = (dense[:, 0] + (single[:BATCH] % 2) > 0.5).float()
    bags = KeyedJaggedTensor(BAGS, words, lengths=lengths)
    return dense, bags, KeyedJaggedTensor(SINGLES, single, lengths=torch.ones_like(single)), clicked


def start(cache: str | None, stock: bool) -> Any:
    """The sharded model, its optimizer and the batches: what does not need one another is made at the same time. With
    `stock`, the plan and the sharding are TorchRec's own affair."""
    setup = headway.Startup(seed=0)
    sharders = [
        EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1}),
        EmbeddingCollectionSharder(fused_params={"learning_rate": 0.1}),
    ]

    @setup.stage(lane="comm")
    def process_group_init() -> None:
        if not stock:
            lazy_groups()
        dist.init_process_group("gloo")

    @setup.stage(lane="io", activity="preproc_creation")
    def batches() -> list[Batch]:
        rank = int(os.environ["RANK"])
        return [clicks(1000 * rank + number) for number in range(BATCHES)]

    @setup.stage(activity="train_module_creation")
    def whole() -> DLRM:
        return DLRM()

    @setup.stage(lane="comm", computes=True, activity="train_module_creation")
    def plan(whole: DLRM, process_group_init: None) -> ShardingPlan:
        size = dist.get_world_size()
        table_wise = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
        row_wise = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=size, local_world_size=size, compute_device="cpu"),
            batch_size=BATCH,
            constraints={**dict.fromkeys(BAGS, table_wise), **dict.fromkeys(SINGLES, row_wise)},
            debug=False,
        )
        if stock:
            return planner.collective_plan(whole, sharders, dist.group.WORLD)
        return sharding_plan(planner, whole, sharders, cache=cache)

    @setup.stage(lane="comm", computes=True, activity="train_module_creation")
    def model(whole: DLRM, plan: ShardingPlan) -> DistributedModelParallel:
        if stock:
            return DistributedModelParallel(whole, plan=plan, sharders=sharders)
        wrapper = DefaultDataParallelWrapper(ddp_kwargs={"init_sync": False})
        with local_shard_metadata():
            made = DistributedModelParallel(whole, plan=plan, sharders=sharders, data_parallel_wrapper=wrapper)
        synchronised([made.module.bottom, made.module.top])  # one hash, since all ranks have the same seed
        return made

    @setup.stage(activity="train_module_creation")
    def optimizer(model: DistributedModelParallel) -> torch.optim.Optimizer:
        towers = [*model.module.bottom.parameters(), *model.module.top.parameters()]
        return torch.optim.Adagrad(towers, lr=0.02)  # the tables update themselves

    return setup.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cache", help="folder or URL of sharding plans; by default below headway's home")
    parser.add_argument("--stock", action="store_true", help="without headway's remedies, to compare")
    options = parser.parse_args()

    run = headway.current()
    parts = start(options.cache, options.stock)
    for step, _ in run.steps(range(options.steps)):
        dense, bags, singles, clicked = parts.batches[step % BATCHES]
        loss = nn.functional.binary_cross_entropy_with_logits(parts.model(dense, bags, singles), clicked)
        parts.optimizer.zero_grad()
        loss.backward()
        parts.optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f} {loss.item().hex()}", flush=True)
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
