"""The model and the data of this example: a DLRM whose tables TorchRec shards, and clicks with ragged features.

Without TorchRec the tables are one plain `nn.EmbeddingBag`, which every rank has. There is not a word of headway in it.
"""

import argparse
import errno
import os
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

HAS_TORCHREC = find_spec("torchrec") is not None and not os.environ.get("PLAIN_TABLES")
if HAS_TORCHREC:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

TABLES, WIDTH, DENSE, BATCH, MOST_IDS = 26, 32, 13, 1024, 3
ROWS = 20_000 if HAS_TORCHREC else 500
"""Of each table. The plain ones are sent whole at every step."""
NAMES = [f"t{number}" for number in range(TABLES)]
RATE = 0.02


# --- the model -------------------------------------------------------------------------------------------------------


class Bags(nn.Module):
    """What stands for an `EmbeddingBagCollection` without TorchRec: all tables, one under the other. Takes ids, and how
    many of each table a sample has."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(TABLES * ROWS, WIDTH, mode="sum", include_last_offset=True)

    def forward(self, sparse: tuple[Tensor, Tensor]) -> Tensor:
        ids, lengths = sparse
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return self.rows(ids, offsets).reshape(TABLES, -1, WIDTH).transpose(0, 1).flatten(1)


class Towers(nn.Module):
    """The dense half: all pairs of features multiplied, between two towers. This is what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(DENSE, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, WIDTH), nn.ReLU()]
        self.bottom = nn.Sequential(*layers)
        pairs = torch.triu_indices(TABLES + 1, TABLES + 1, 1)
        layers = [nn.Linear(WIDTH + pairs.shape[1], 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)]
        self.top = nn.Sequential(*layers)
        self.register_buffer("pairs", pairs, persistent=False)

    def forward(self, dense: Tensor, bags: Tensor) -> Tensor:
        low = self.bottom(dense)
        features = torch.cat([low.unsqueeze(1), bags.reshape(-1, TABLES, WIDTH)], 1)
        products = features @ features.transpose(1, 2)
        return self.top(torch.cat([low, products[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)


class DLRM(nn.Module):
    """Tables of ids, towers over them. On `meta` the tables take no memory until they are sharded."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = _collection(device) if HAS_TORCHREC else Bags()
        self.towers = Towers()

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        bags = self.tables(sparse)
        return self.towers(dense, bags.values() if HAS_TORCHREC else bags)


def _collection(device: str) -> "EmbeddingBagCollection":
    configs = [
        EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=WIDTH, name=name, feature_names=[name]) for name in NAMES
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device(device))


def sharders() -> list[Any]:
    """How the tables are sharded and updated."""
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": RATE}
    return [EmbeddingBagCollectionSharder(fused_params=fused)]


def planner() -> "EmbeddingShardingPlanner":
    """Which table goes where; on a CPU TorchRec shards bags by table."""
    size = dist.get_world_size()
    constraint = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    return EmbeddingShardingPlanner(
        topology=Topology(world_size=size, local_world_size=size, compute_device="cpu"),
        batch_size=BATCH, constraints=dict.fromkeys(NAMES, constraint), debug=False,
    )  # fmt: skip


def shard(whole: DLRM, plan: Any = None, init_sync: bool = True) -> nn.Module:
    """The model over all ranks, tables divided by `plan`, its towers compiled."""
    whole.towers.compile()
    torch.manual_seed(1 + dist.get_rank())
    if not HAS_TORCHREC:
        return DistributedDataParallel(whole)
    wrapper = DefaultDataParallelWrapper(ddp_kwargs={"init_sync": init_sync})
    return DistributedModelParallel(
        whole, device=torch.device("cpu"), plan=plan, sharders=sharders(), data_parallel_wrapper=wrapper
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Of towers and tables. TorchRec's tables update themselves in the backward pass, and keep their state there."""
    if not HAS_TORCHREC:
        return torch.optim.Adagrad(model.parameters(), lr=RATE)
    towers = {name: each for name, each in model.named_parameters() if "towers." in name}
    dense = KeyedOptimizerWrapper(towers, lambda parameters: torch.optim.Adagrad(parameters, lr=RATE))
    return CombinedOptimizer([model.fused_optimizer, dense])


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """How far it is off."""
    dense, sparse, clicked = batch
    return nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), clicked)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, step_s: float) -> float:
    """One step, and its loss. An accelerator would let the host wait: up to `step_s` a sleep stands for that."""
    until = time.monotonic() + step_s
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    time.sleep(max(0.0, until - time.monotonic()))
    optimizer.step()
    return loss.item()


# --- the data --------------------------------------------------------------------------------------------------------


class Clicks(Dataset[Any]):
    """Batches of synthetic clicks: the same number and rank always give the same. Whoever reads the first one waits, as
    one would for a far-off store: `warm_up_s`."""

    def __init__(self, steps: int, rank: int, warm_up_s: float, folder: Path) -> None:
        self._steps, self._rank, self._warm_up_s = steps, rank, warm_up_s
        self._corrupt = folder / f"corrupt-{rank}"

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, number: int) -> tuple[Tensor, Any, Tensor]:
        time.sleep(self._warm_up_s)
        self._warm_up_s = 0.0
        if self._corrupt.exists():  # how the demo has a read fail
            self._corrupt.unlink()
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"batch {number} of rank {self._rank}")
        return clicks(1_000_000 * self._rank + number)


def clicks(seed: int, size: int = BATCH) -> tuple[Tensor, Any, Tensor]:
    """A batch: numbers, ids, and what was clicked."""
    random = torch.Generator().manual_seed(seed)
    dense = torch.randn(size, DENSE, generator=random)
    lengths = torch.randint(MOST_IDS + 1, (TABLES * size,), generator=random)
    ids = torch.randint(ROWS, (int(lengths.sum()),), generator=random)
    clicked = (dense[:, 0] + dense[:, 1] * lengths[:size] > 0.5).float()
    return dense, _sparse(ids, lengths), clicked


def _sparse(ids: Tensor, lengths: Tensor) -> Any:
    if HAS_TORCHREC:
        return KeyedJaggedTensor(NAMES, ids, lengths=lengths)
    table = torch.arange(TABLES).repeat_interleave(len(lengths) // TABLES).repeat_interleave(lengths)
    return ids + ROWS * table, lengths


def loader_of(options: argparse.Namespace, first: int = 0) -> DataLoader[Any]:
    """Batches from step `first` on, read by a process of its own."""
    torch.multiprocessing.set_sharing_strategy("file_system")  # a batch is there in half the time
    data = Clicks(options.steps, int(os.environ["RANK"]), options.warm_up_s, options.folder)
    steps = range(first, options.steps)
    return DataLoader(data, None, sampler=steps, num_workers=1, prefetch_factor=8, worker_init_fn=_share_memory)


def _share_memory(worker: int) -> None:
    """Has torch's manager of shared memory start while the first read waits, and not after it."""
    threading.Timer(0.02, lambda: torch.zeros(1).share_memory_()).start()


# --- around the loop -------------------------------------------------------------------------------------------------


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What both scripts can be told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--folder", type=Path, default=Path("out/dlrm"), help="for checkpoints, losses and what is published"
    )
    parser.add_argument("--warm-up-s", type=float, default=1.0, help="how long the first batch takes")
    parser.add_argument("--step-s", type=float, default=0.0, help="the shortest a step may be, as on an accelerator")
    return parser


class Losses:
    """A file of steps and their losses, to the last bit."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / "losses.txt", "a", buffering=1, encoding="utf-8") if dist.get_rank() == 0 else None

    def add(self, step: int, loss: float) -> None:
        """Written at once."""
        if self._file is not None:
            self._file.write(f"{step} {loss.hex()}\n")
