"""Checkpoints to publish from, as real jobs save them. Run by torchrun, it is such a job, of two ranks."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from headway.checkpoint.layout import METADATA, Shard
from headway.publish.shards import Shards
from headway.storage import Storage, open_storage

NAME = "step-00000007"

TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.bool, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def counted(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of which no two neighbours are the same."""
    return (torch.arange(torch.Size(shape).numel()) % 97).reshape(shape).to(dtype)


def odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors of every type, and of forms that are easily got wrong."""
    return {
        **{f"typed.{str(dtype).removeprefix('torch.')}": counted(5, 7, dtype=dtype) for dtype in TYPES},
        "number": torch.tensor(3.5),
        "one": torch.tensor([[[2.5]]]),
        "empty": torch.empty(0, 5),
        "transposed": counted(6, 4).t(),
        "permuted": counted(2, 3, 4, dtype=torch.bfloat16).permute(2, 0, 1),
        "channels_last": counted(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "slice": counted(10, 10)[:, 2:5],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "große Tabelle/0": counted(11),
    }


def save_plainly(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    """By `dcp.save`, without a word of headway's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(folder, **options), no_dist=True)
    return folder


def hashes(storage: Storage, folder: str) -> dict[str, Shard]:
    """What the files of a checkpoint are now."""
    names = {name: f"{folder}/{name}" for name in storage.names(folder) if not name.endswith(".json")}
    return {name: Shard(bytes=storage.size(path), xxh3=storage.digest(path), rank=0) for name, path in names.items()}


def sealed(folder: Path, part: str = "model") -> Shards:
    """Shards that know what the files of a checkpoint are now."""
    storage = open_storage(folder.parent)
    files = hashes(storage, folder.name)
    return Shards(storage, folder.name, files, files.pop(METADATA), part=part)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(as_bytes(one), as_bytes(other))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# --- two ranks -------------------------------------------------------------------------------------------------------


def divided() -> dict[str, torch.Tensor]:
    """The tensors that two ranks share, whole."""
    return {
        "rows": counted(7, 6),
        "columns": counted(9, 10, dtype=torch.bfloat16),
        "middle": counted(3, 5, 4, dtype=torch.int64),
        "last": counted(4, 3, 6, dtype=torch.float8_e5m2),
        "replicated": counted(5, 3),
        "fewer": counted(1, 4),
        "table.0": counted(8, 3) + 1,
        "table.1": counted(8, 3) + 2,
        "torchrec": counted(10, 6),
    }


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(17, 13), nn.LayerNorm(13), nn.Linear(13, 7, bias=False), nn.BatchNorm1d(7))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(counted(*parameter.shape) + number)
    return model


def saved_on_two_ranks() -> Path:
    """Where two ranks saved `plain`, the divided tensors, by `dcp.save`, and `headway/step-...`, a network, by headway.

    That is done once per test run: nothing in it may be changed.
    """
    import shared

    return Path(shared.once("publish-two-ranks", _save_on_two_ranks))


def _save_on_two_ranks() -> str:
    from keeping import end_keepers  # a script that imports this module does not find these

    import ranks
    import shared

    root = shared.folder() / "two_ranks"
    root.mkdir()
    environment = os.environ | {"HEADWAY_JOB": "anchors", "HEADWAY_HOME": str(root / "home")}
    done = ranks.run(2, [__file__, str(root)], env=environment)
    end_keepers(root)
    assert done.returncode == 0, done.stderr
    return str(root)


def _train(root: Path) -> None:
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard as Local
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor import Shard as Along

    from headway import Checkpointer

    dist.init_process_group("gloo")
    rank, mesh, state = dist.get_rank(), init_device_mesh("cpu", (2,)), dict[str, Any](divided())
    for name, along in {"rows": 0, "columns": 1, "middle": 1, "last": 2, "fewer": 0}.items():
        kept = state[name].view(torch.uint8) if name == "last" else state[name]  # gloo cannot send its type
        kept = distribute_tensor(kept, mesh, [Along(along)])
        state[name] = kept.view(torch.float8_e5m2) if name == "last" else kept
    state["replicated"] = distribute_tensor(state["replicated"], mesh, [Replicate()])
    rows = state["torchrec"][4 * rank : 4 + 6 * rank].clone()
    state["torchrec"] = init_from_local_shards([Local.from_tensor_and_offsets(rows, [4 * rank, 0], rank)], 10, 6)
    del state[f"table.{1 - rank}"]
    save({"model": state, "optimizer": {"sum": torch.ones(50)}, "step": 7}, checkpoint_id=root / "plain")

    model = network()
    for layer in model:
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.ones(4, 17)).sum().backward()
    optimizer.step()
    torch.save({name: _whole(value) for name, value in model.state_dict().items()}, root / f"whole-{rank}.pt")
    with Checkpointer(root / "headway", model=model, optimizer=optimizer, interval=None) as checkpointer:
        checkpointer.save(7, wait=True)
    dist.destroy_process_group()


def _whole(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
