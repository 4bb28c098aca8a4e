"""Shard metadata made locally is the metadata that torch and TorchRec gather, and nothing is sent for it."""

import importlib.metadata
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as On
from torchrec_models import Model, on_ranks, rows, sharded, train

import ranks as warm_ranks
from headway.errors import InputError
from headway.startup.shards import dtensor, local_shard_metadata, sharded_tensor

pytestmark = pytest.mark.needs_package("torchrec")
RANKS = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])


def sent(work: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and how many collectives it has sent on the default group, C++ callers included."""
    before = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    result = work()
    return result, dist.group.WORLD._get_sequence_number_for_group() - before  # type: ignore[union-attr]


def fields(tensor: ShardedTensor) -> dict[str, Any]:
    """All that a sharded tensor says of itself."""
    metadata, properties = tensor.metadata(), tensor.metadata().tensor_properties
    return {
        "shards": [(s.shard_offsets, s.shard_sizes, str(s.placement)) for s in metadata.shards_metadata],
        "size": list(metadata.size),
        "size type": type(metadata.size).__name__,
        "properties": {name: str(value) for name, value in vars(properties).items()},
        "spec": str(tensor.sharding_spec()),
        "local": [(str(shard.metadata), list(shard.tensor.shape)) for shard in tensor.local_shards()],
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "requires_grad": tensor.requires_grad,
        "group": dist.get_process_group_ranks(tensor._process_group),
    }


# --- TorchRec --------------------------------------------------------------------------------------------------------


def kinds() -> dict[str, tuple[str, Any]]:
    """The data type and the sharding of one table, by name."""
    from torchrec.distributed import sharding_plan as to

    def uneven(*args: Any) -> Any:
        sharding, at = to.row_wise()(*args), 0
        for rank, shard in enumerate(sharding.sharding_spec.shards):  # type: ignore[union-attr]
            count = 201 - at if rank == size - 1 else 40 + rank
            shard.shard_offsets, shard.shard_sizes, at = [at, 0], [count, 32], at + count
        return sharding

    size = dist.get_world_size()
    return {
        "table-wise": ("FP32", to.table_wise(rank=size - 1)),
        "table-wise, fused": ("FP32", to.table_wise(rank=0, compute_kernel="fused")),
        "table-wise, half": ("FP16", to.table_wise(rank=0)),
        "row-wise": ("FP32", to.row_wise()),
        "row-wise, fused": ("FP32", to.row_wise(compute_kernel="fused")),
        "row-wise, fewer rows than ranks": ("FP32", to.row_wise()),
        "row-wise, uneven": ("FP32", uneven),
        "column-wise, backwards": ("FP32", to.column_wise(ranks=list(reversed(range(size))))),
        "column-wise, two of a rank": ("FP32", to.column_wise(ranks=[1, 0, 1, 0])),
        "data-parallel": ("FP32", to.data_parallel()),
    }


def one_table(kind: str) -> Any:
    """What an EmbeddingCollection of one table has in its state."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan
    from torchrec.distributed.types import ShardingEnv

    data_type, sharding = kinds()[kind]
    count = {"row-wise, fewer rows than ranks": 0, "row-wise, uneven": 200}.get(kind, 100)
    collection, size = rows(1, count, 32, data_type=data_type), dist.get_world_size()
    plan = construct_module_sharding_plan(
        collection, {"row0": sharding}, EmbeddingCollectionSharder(), size, size, "cpu"
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    made = EmbeddingCollectionSharder().shard(collection, plan, env, torch.device("cpu"))
    return made.state_dict()["embeddings.row0.weight"]


def gather_and_make() -> dict[str, Any]:
    found = {}
    for kind in kinds():
        gathered, by_torchrec = sent(partial(one_table, kind))
        with local_shard_metadata():
            made, by_us = sent(partial(one_table, kind))
        if isinstance(gathered, ShardedTensor):
            found[kind] = {"gathered": fields(gathered), "made": fields(made), "sent": (by_torchrec, by_us)}
        else:
            found[kind] = {"gathered": list(gathered.shape), "made": list(made.shape), "sent": (by_torchrec, by_us)}
    return found


@RANKS
def test_metadata_is_what_torchrec_gathers(ranks: int, tmp_path: Path) -> None:
    for found in on_ranks(ranks, "test_shards:gather_and_make", tmp_path):
        assert len(found) == 10
        for kind, each in found.items():
            assert each["made"] == each["gathered"], kind
            if kind != "data-parallel":
                assert each["sent"][0] > 0, "TorchRec gathers no more: this remedy is not needed"
                assert each["sent"][1] == 0, kind


def table_wise_bags_and_row_wise_rows(tables: int, **options: Any) -> Any:
    from torchrec.distributed import sharding_plan as to

    torch.manual_seed(0)
    bag_ranks = [i % dist.get_world_size() for i in range(tables)]
    shardings = {
        "bags": {f"bag{i}": to.table_wise(rank=rank) for i, rank in enumerate(bag_ranks)},
        "rows": {f"row{i}": to.row_wise(compute_kernel="fused") for i in range(tables)},
    }
    return sharded(Model(tables), shardings, **options)


def wrapper() -> Any:
    from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

    return DefaultDataParallelWrapper(ddp_kwargs={"init_sync": False})


def count_collectives() -> dict[str, int]:
    counts = {}
    with local_shard_metadata():  # the first model of a process pays for what TorchRec asks once
        for tables in (3, 9):
            made = sent(
                lambda tables=tables: table_wise_bags_and_row_wise_rows(tables, data_parallel_wrapper=wrapper())
            )  # type: ignore[misc]
            counts[f"made, {tables} tables"] = made[1]
    for tables in (3, 9):
        counts[f"gathered, {tables} tables"] = sent(lambda tables=tables: table_wise_bags_and_row_wise_rows(tables))[1]  # type: ignore[misc]
    return counts


@RANKS
def test_what_is_sent_does_not_grow_with_tables(ranks: int, tmp_path: Path) -> None:
    for counts in on_ranks(ranks, "test_shards:count_collectives", tmp_path):
        assert counts["made, 3 tables"] <= 3
        assert counts["made, 9 tables"] <= 3
        assert counts["gathered, 9 tables"] - counts["gathered, 3 tables"] >= 6, "TorchRec gathers no more"


def train_and_save(folder: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    told: dict[str, Any] = {}
    for name, context in (("gathered", nullcontext), ("made", local_shard_metadata)):
        with context():
            model = table_wise_bags_and_row_wise_rows(3)
        told[name] = train(model, 3)
        told[f"{name} state"] = {
            key: fields(value) if isinstance(value, ShardedTensor) else value.tolist()
            for key, value in model.state_dict().items()
        }
        dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{name}")
        told[f"{name} rest"] = train(model, 3)
    for name, other in (("made", "gathered"), ("gathered", "made")):  # what one has saved the other loads
        with local_shard_metadata() if name == "made" else nullcontext():
            torch.manual_seed(7)
            model = table_wise_bags_and_row_wise_rows(3)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{other}")
        model.load_state_dict(state)
        told[f"{name} from {other}"] = train(model, 3)
    return told


@RANKS
def test_losses_and_checkpoints_are_the_same_to_the_last_bit(ranks: int, tmp_path: Path) -> None:
    for told in on_ranks(ranks, "test_shards:train_and_save", tmp_path, str(tmp_path / "saved")):
        assert told["made"] == told["gathered"]
        assert len(set(told["made"])) > 1, "it does not learn"
        assert told["made state"] == told["gathered state"]
        assert told["made from gathered"] == told["gathered from made"] == told["gathered rest"] == told["made rest"]


# --- versions that are not known -------------------------------------------------------------------------------------


def test_an_unknown_torchrec_is_left_alone_and_that_is_said_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    own = ShardedTensor.__dict__["_init_from_local_shards"]
    monkeypatch.setattr("headway.startup.shards.version", lambda name: "1.99.0")
    for _ in range(2):
        with local_shard_metadata():
            assert ShardedTensor.__dict__["_init_from_local_shards"] is own
    assert capfd.readouterr().err.count("TorchRec 1.99.0 is not known to headway, only 1.8.x") == 1


def test_a_torch_of_another_shape_is_left_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def _init_from_local_shards(cls: type, shards: list[Shard], *sizes: int) -> None: ...

    changed = classmethod(_init_from_local_shards)
    monkeypatch.setattr(ShardedTensor, "_init_from_local_shards", changed)
    with local_shard_metadata():
        assert ShardedTensor.__dict__["_init_from_local_shards"] is changed
    assert "_init_from_local_shards is not what it was" in capfd.readouterr().err


def test_all_is_as_before_when_the_last_user_has_left() -> None:
    assert importlib.metadata.version("torchrec").startswith("1.8.")
    own = ShardedTensor.__dict__["_init_from_local_shards"]
    first, second = local_shard_metadata(), local_shard_metadata()
    first.close()
    assert ShardedTensor.__dict__["_init_from_local_shards"] is not own
    second.close()
    assert ShardedTensor.__dict__["_init_from_local_shards"] is own


# --- plain torch -----------------------------------------------------------------------------------------------------


def divide(spec: Any, size: list[int]) -> dict[str, Any]:
    """This rank's shards under a spec, made by torch and by us."""
    rank, properties = dist.get_rank(), TensorProperties(dtype=torch.float64)
    metadata = spec.build_metadata(torch.Size(size), properties)
    mine = [each for each in metadata.shards_metadata if each.placement.rank() == rank]
    shards = [Shard(torch.full(each.shard_sizes, 1.0 + rank, dtype=torch.float64), each) for each in mine]
    gathered, _ = sent(lambda: init_from_local_shards(shards, *size))
    made, count = sent(lambda: sharded_tensor(shards, spec, size, properties=None if shards else properties))
    return {"gathered": fields(gathered), "made": fields(made), "sent": count}


def make_plain() -> dict[str, Any]:
    size = dist.get_world_size()
    names = [f"rank:{rank}/cpu" for rank in range(size)]
    return {
        "even": divide(ChunkShardingSpec(0, names), [4 * size, 3]),  # type: ignore[arg-type]
        "uneven": divide(ChunkShardingSpec(0, names), [4 * size - 1, 3]),  # type: ignore[arg-type]
        "one rank has all": divide(EnumerableShardingSpec([_part([0, 0], [5, 3], size - 1)]), [5, 3]),
        "mixed": divide(
            EnumerableShardingSpec([_part([0, 0], [5, 2], 1), _part([0, 2], [5, 1], 0), _part([5, 0], [1, 3], 1)]),
            [6, 3],
        ),
    }


def _part(offsets: list[int], sizes: list[int], rank: int) -> Any:
    from torch.distributed._shard.metadata import ShardMetadata

    return ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")


@RANKS
def test_sharded_tensors_are_what_torch_gathers(ranks: int, tmp_path: Path) -> None:
    for found in on_ranks(ranks, "test_shards:make_plain", tmp_path):
        for kind, each in found.items():
            assert each["made"] == each["gathered"], kind
            assert each["sent"] == 0


def distribute() -> list[tuple[str, bool, int]]:
    mesh, told = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for shape, placements in (
        ((8, 3), [On(0)]), ((7, 3), [On(0)]), ((1, 3), [On(0)]), ((3, 10), [On(1)]), ((3, 3), [Replicate()]),
    ):  # fmt: skip
        whole = torch.arange(float(shape[0] * shape[1])).view(shape)
        stock = distribute_tensor(whole, mesh, placements)
        local = stock.to_local().contiguous()
        made, count = sent(partial(dtensor, local, mesh, placements, shape))
        same = made._spec == stock._spec and made.stride() == stock.stride() and torch.equal(made.full_tensor(), whole)
        told.append((f"{shape} {placements}", same, count))
    return told


@RANKS
def test_dtensors_are_what_torch_distributes(ranks: int, tmp_path: Path) -> None:
    for told in on_ranks(ranks, "test_shards:distribute", tmp_path):
        assert [(same, count) for _, same, count in told] == [(True, 0)] * 5, told


def give_wrong_parts() -> list[str]:
    mesh, size, texts = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size(), []
    spec = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(size)])  # type: ignore[arg-type]
    other = Shard(torch.zeros(1, 3), _part([0, 0], [1, 3], dist.get_rank()))
    for wrong in (
        lambda: sharded_tensor([], spec, [4, 3]),
        lambda: sharded_tensor([other], spec, [4, 3]),
        lambda: dtensor(torch.zeros(3, 3), mesh, [On(0)], [4, 3]),
    ):
        with pytest.raises(InputError) as raised:
            wrong()
        texts.append(str(raised.value))
    return texts


def test_a_part_that_is_not_this_ranks_is_refused(tmp_path: Path) -> None:
    for rank, (nothing, other, shape) in enumerate(on_ranks(2, "test_shards:give_wrong_parts", tmp_path)):
        assert "no shard" in nothing
        assert "Give `properties`" in nothing
        assert f"rank {rank} holds [1, 3] at [0, 0]" in other
        assert f"its spec says [2, 3] at [{2 * rank}, 0] (rank:{rank}/cpu)" in other
        assert "shape [3, 3], where [2, 3] of [4, 3]" in shape


# --- all of it together ----------------------------------------------------------------------------------------------


@RANKS
def test_the_example_comes_to_the_same_losses_serially_and_overlapped(ranks: int, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "train_torchrec.py"
    losses = []
    for serial in ("1", "0"):
        environ = os.environ | {"HEADWAY_SERIAL": serial, "HEADWAY_HOME": str(tmp_path)}
        words = [example, "--cache", str(tmp_path / "plans")]
        done = warm_ranks.run(ranks, words, env=environ, imports=warm_ranks.IMPORTS)
        assert done.returncode == 0, done.stderr[-5000:]
        losses.append(done.stdout.splitlines())
    serially, overlapped = losses
    assert serially == overlapped
    assert len(set(serially)) == 10
    assert len(list((tmp_path / "plans").glob("*.json"))) == 1
