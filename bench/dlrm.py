"""A TorchRec DLRM, sharded as TorchRec does it and as headway has it done."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, get_default_sharders, row_wise
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from headway.startup.plans import sharding_plan
from headway.startup.shards import local_shard_metadata
from headway.startup.sync import synchronised

TABLES, ROWS, WIDTH, BATCH = 26, 1000, 16, 8
META = torch.device("meta")


class DLRM(nn.Module):
    """As many bags as rows, and a dense tower over both."""

    def __init__(self, tables: int) -> None:
        super().__init__()
        self.tables, self.bags, self.rows = tables, bags(tables), rows(tables)
        self.dense = nn.Sequential(nn.Linear(2 * tables * WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, many: KeyedJaggedTensor, one: KeyedJaggedTensor) -> torch.Tensor:
        found = self.rows(one)
        ones = [found[f"one{at}"].values() for at in range(self.tables)]
        result: torch.Tensor = self.dense(torch.cat([self.bags(many).values(), *ones], 1))
        return result


def bags(tables: int, rows: int = ROWS, width: int = WIDTH) -> EmbeddingBagCollection:
    """Tables whose words of one sample are summed."""
    return EmbeddingBagCollection(
        device=META,
        tables=[
            EmbeddingBagConfig(name=f"bag{at}", embedding_dim=width, num_embeddings=rows, feature_names=[f"many{at}"])
            for at in range(tables)
        ],
    )


def rows(tables: int) -> EmbeddingCollection:
    """Tables of which each sample has one row."""
    return EmbeddingCollection(
        device=META,
        tables=[
            EmbeddingConfig(name=f"row{at}", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[f"one{at}"])
            for at in range(tables)
        ],
    )


def built(tables: int) -> DLRM:
    """The same on every rank."""
    torch.manual_seed(0)
    return DLRM(tables)


def planner(tables: int) -> EmbeddingShardingPlanner:
    """Bags by table, rows by row: all that can be done on CPUs."""
    by = {"bag": ShardingType.TABLE_WISE, "row": ShardingType.ROW_WISE}
    constraints = {
        f"{kind}{at}": ParameterConstraints(sharding_types=[sharding.value])
        for kind, sharding in by.items()
        for at in range(tables)
    }
    size = dist.get_world_size()
    topology = Topology(world_size=size, local_world_size=size, compute_device="cpu")
    return EmbeddingShardingPlanner(topology=topology, constraints=constraints)


def stock(model: DLRM) -> nn.Module:
    """As TorchRec's own examples have it."""
    sharders = get_default_sharders()
    plan = planner(model.tables).collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, plan=plan, sharders=sharders)


def remedied(model: DLRM, cache: str) -> nn.Module:
    """With a plan from the cache, metadata made locally, and the dense part compared before DDP would send it."""
    sharders = get_default_sharders()
    plan = sharding_plan(planner(model.tables), model, sharders, cache=cache)
    synchronised(model.dense)
    wrapper = DefaultDataParallelWrapper(ddp_kwargs={"init_sync": False})
    with local_shard_metadata():
        return DistributedModelParallel(model, plan=plan, sharders=sharders, data_parallel_wrapper=wrapper)


def row_wise_rows(tables: int) -> tuple[nn.Module, ShardingPlan]:
    """An EmbeddingCollection and a plan for it, which no planner had to make."""
    model, size = nn.ModuleDict({"rows": rows(tables)}), dist.get_world_size()
    by_row = {f"row{at}": row_wise(compute_kernel="fused") for at in range(tables)}  # the one that can train here
    plan = construct_module_sharding_plan(
        model["rows"], by_row, local_size=size, world_size=size, device_type="cpu"
    )  # fmt: skip
    return model, ShardingPlan({"rows": plan})


def batch(tables: int, step: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """What one rank trains on at a step."""
    random = torch.Generator().manual_seed(step)
    lengths = torch.randint(3, (tables * BATCH,), generator=random)
    words = torch.randint(ROWS, (int(lengths.sum()),), generator=random)
    ones = torch.randint(ROWS, (tables * BATCH,), generator=random)
    return (
        KeyedJaggedTensor([f"many{at}" for at in range(tables)], words, lengths=lengths),
        KeyedJaggedTensor([f"one{at}" for at in range(tables)], ones, lengths=torch.ones_like(ones)),
    )


def timed_plan(tables: int, ranks: int) -> tuple[nn.Module, EmbeddingShardingPlanner, list[Any]]:
    """A model, its planner for so many GPUs, and the sharders: what a plan is made of."""
    model = nn.ModuleDict({"bags": bags(tables, 100_000, 64), "dense": nn.Linear(512, 256)})
    topology = Topology(world_size=ranks, compute_device="cuda")
    return model, EmbeddingShardingPlanner(topology=topology), get_default_sharders()
