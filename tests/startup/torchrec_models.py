"""Small TorchRec models, and real ranks to shard them on."""

import importlib
import json
import multiprocessing.connection
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ranks as warm_ranks
import warm

PATIENCE_S = 500.0
META = torch.device("meta")


def on_ranks(ranks: int, work: str, folder: Path, *args: Any) -> list[Any]:
    """Return the results of `module:function(*args)` on this many gloo ranks. They are forked from a warm process."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, __file__, work, str(ranks), str(folder), json.dumps(args)]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HEADWAY_HOME": str(folder / "home"), "HEADWAY_JOB": "j"}
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.path.dirname(warm.__file__)}
    done = warm.run(words, imports=warm_ranks.IMPORTS, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-5000:]
    (folder / "said").write_text(done.stderr)
    return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(ranks)]


def _rank(work: str, rank: int, ranks: int, folder: Path, args: Sequence[Any]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting-{os.getppid()}", rank=rank, world_size=ranks)
    module, _, name = work.partition(":")
    result = getattr(importlib.import_module(module), name)(*args)
    (folder / f"result-{rank}").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    work, ranks, folder, args = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    warnings.simplefilter("ignore")
    importlib.import_module(work.partition(":")[0])
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=_rank, args=(work, rank, ranks, folder, args)) for rank in range(ranks)]
    for process in started:
        process.start()
    left = {process.sentinel: process for process in started}
    while left:
        for ended in multiprocessing.connection.wait(list(left)):
            process = left.pop(ended)  # type: ignore[index]
            process.join()
            if process.exitcode:
                for other in left.values():  # it may wait for the failed one
                    other.kill()
                sys.exit(abs(process.exitcode))


# --- models ----------------------------------------------------------------------------------------------------------


def bags(tables: int = 3, rows: int = 50, width: int = 8, device: torch.device = META) -> Any:
    """An EmbeddingBagCollection."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(
            name=f"bag{i}", embedding_dim=width, num_embeddings=rows * (i + 1), feature_names=[f"many{i}"]
        )
        for i in range(tables)
    ]
    return EmbeddingBagCollection(tables=configs, device=device)


def rows(tables: int = 3, rows: int = 50, width: int = 8, device: torch.device = META, data_type: str = "FP32") -> Any:
    """An EmbeddingCollection."""
    from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingCollection

    configs = [
        EmbeddingConfig(
            name=f"row{i}", embedding_dim=width, num_embeddings=rows * (i + 1) + 1, feature_names=[f"one{i}"],
            data_type=DataType[data_type],
        )
        for i in range(tables)
    ]  # fmt: skip
    return EmbeddingCollection(tables=configs, device=device)


class Model(nn.Module):
    """Bags, rows, and a dense layer over both."""

    def __init__(self, tables: int = 3, width: int = 8) -> None:
        super().__init__()
        self.tables, self.bags, self.rows = tables, bags(tables, width=width), rows(tables, width=width)
        self.dense = nn.Linear(2 * tables * width, 1)

    def forward(self, many: Any, one: Any) -> torch.Tensor:
        found = self.rows(one)
        ones = [found[f"one{i}"].values() for i in range(self.tables)]
        return self.dense(torch.cat([self.bags(many).values(), *ones], 1))


def batch(tables: int, step: int, size: int = 4) -> tuple[Any, Any]:
    """What one rank trains on at a step: some words of each bag, one of each table of rows."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    random = torch.Generator().manual_seed(100 * step + dist.get_rank())
    lengths = torch.randint(3, (tables * size,), generator=random)
    words = torch.randint(50, (int(lengths.sum()),), generator=random)
    many = KeyedJaggedTensor([f"many{i}" for i in range(tables)], words, lengths=lengths)
    ones = torch.randint(50, (tables * size,), generator=random)
    one = KeyedJaggedTensor([f"one{i}" for i in range(tables)], ones, lengths=torch.ones_like(ones))
    return many, one


def sharded(model: nn.Module, shardings: dict[str, Any], **options: Any) -> Any:
    """The model as TorchRec shards it by `{path: {table: sharding}}`."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, get_default_sharders
    from torchrec.distributed.types import ShardingPlan

    size = dist.get_world_size()
    plan = ShardingPlan(
        {
            path: construct_module_sharding_plan(
                model.get_submodule(path), each, local_size=size, world_size=size, device_type="cpu"
            )
            for path, each in shardings.items()
        }
    )
    return DistributedModelParallel(model, plan=plan, sharders=get_default_sharders(), **options)


def train(model: nn.Module, tables: int, steps: int = 4) -> list[str]:
    """The losses, to the last bit."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        loss = model(*batch(tables, step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


if __name__ == "__main__":
    main()
