"""What real ranks send each other before their first step is seen whole, and nothing of it is disturbed."""

import json
import os
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from running import PATIENCE_S, begin_train, plain

from headway.cli.source import marks_of
from headway.events.job import JobReader
from headway.events.vocabulary import Told
from headway.paths import JobPaths

HEAD = """
import json, os, sys
import torch
import torch.distributed as dist
from torch import nn

def numbers():
    return {group.group_name: group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map}

def step():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

def say(**told):
    sys.stdout.write(json.dumps(told) + "\\n")  # at once: the other rank writes, too

dist.init_process_group("gloo", init_method=f"file://{os.environ['HEADWAY_HOME']}/store",
                        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
rank, world = dist.get_rank(), dist.get_world_size()
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def write(folder: Path, body: str) -> Path:
    script = folder / "train.py"
    script.write_text(HEAD + textwrap.dedent(body))
    return script


def ranks(home: Path, script: Path, size: int = 2) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]], str]:
    """What each rank's journal holds, what each rank printed, and what went wrong, after a run under `headway exec`."""
    running = [
        begin_train(str(script), options=("--job", "job"), env=os.environ | place_of(rank, size))
        for rank in range(size)
    ]
    printed, errors = zip(*(process.communicate(timeout=PATIENCE_S) for process in running), strict=True)
    assert [process.returncode for process in running] == [0] * size, "".join(errors)
    marks = marks_of(JobReader(JobPaths(home, "job"))).values()
    told = [[mark.attrs for mark in each if mark.name == Told.COLLECTIVE] for each in marks]
    said = [json.loads(line) for line in "".join(printed).splitlines()]
    return [each for each in told if each], said, "".join(errors)


def place_of(rank: int, size: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}


def count(told: list[dict[str, Any]], op: str, **attrs: Any) -> tuple[int, int]:
    """Operations and calls."""
    mine = [each for each in told if each["op"] == op and all(each[key] == value for key, value in attrs.items())]
    return sum(each["count"] for each in mine), sum(each["calls"] for each in mine)


def test_every_operation_is_told_once_with_its_site_and_as_the_groups_count(home: Path, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        def gather():
            for number in range(5):
                dist.all_gather_object([None] * world, {"number": number})

        gather()
        dist.barrier()
        dist.barrier()
        dist.all_reduce(torch.ones(1000), async_op=True).wait()
        dist.broadcast_object_list(["plan"], 0)
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
        other = dist.new_group([0, 1])
        dist.broadcast(torch.ones(3), 0, group=other)
        say(before=numbers())
        step()
        left = [name for name in dir(dist.ProcessGroup) if hasattr(getattr(dist.ProcessGroup, name), "__headway__")]
        dist.all_reduce(torch.ones(1))
        say(after=numbers(), left=left + [hasattr(dist.Work.wait, "__headway__")])
        dist.destroy_process_group()
        """,
    )
    told, said, _ = ranks(home, script)
    before = [each["before"] for each in said if "before" in each]
    assert len(told) == len(before) == 2
    for mine in told:
        by_group: Counter[str] = Counter()
        for each in mine:
            by_group[each["group"]] += each["count"] if "group" not in each["op"] else 0
        assert dict(by_group) == before[0] == before[1]
        assert count(mine, "all_gather_object") == (10, 5)
        assert count(mine, "barrier") == (2, 2)
        assert count(mine, "broadcast_object_list") == (2, 1)
        (reduced,) = [each for each in mine if each["op"] == "all_reduce"]
        assert (reduced["count"], reduced["bytes"], reduced["ranks"], reduced["world"]) == (1, 4000, [0, 1], 2)
        assert reduced["seconds"] > 0
        (gathered,) = [each for each in mine if each["op"] == "all_gather_object"]
        line = 1 + script.read_text().splitlines().index(
            '        dist.all_gather_object([None] * world, {"number": number})'
        )
        assert gathered["site"] == f"{script}:{line} gather"
        assert not any(each["step"] for each in mine)
    assert [each["left"] for each in said if "left" in each] == [[False], [False]]


def test_groups_are_told_with_their_ranks_and_for_what_they_were_made(home: Path, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        from torch.distributed.device_mesh import init_device_mesh

        groups = [dist.new_group([0, 1]) for _ in range(2)] + [dist.new_group([0]), dist.new_group([1])]
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        dist.new_group([0, 1])
        init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        step()
        """,
    )
    told, _, _ = ranks(home, script)
    for rank, mine in enumerate(sorted(told, key=lambda mine: [each["ranks"] == [1] for each in mine])):
        made = [each for each in mine if each["op"] in ("init_process_group", "new_group")]
        both = [each for each in made if each["ranks"] == [0, 1]]
        assert [each["lazy"] for each in both] == [False, False, False, True]
        assert len({each["group"] for each in both}) == 4
        alone = [each for each in made if each["size"] == 1]
        assert [each["through"] for each in alone] == ["", "init_device_mesh > DeviceMesh.__init__"]
        assert {tuple(each["ranks"]) for each in alone} == {(rank,)}
        assert sum(each["count"] for each in made if each["group"] == "") == 2  # those of the other rank


def test_what_cpp_sends_for_ddp_and_for_dtensors_is_seen(home: Path, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        spread = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=True)
        whole = spread.full_tensor()
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        say(before=numbers())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(whole).sum().backward()
        optimizer.step()
        """,
    )
    told, said, _ = ranks(home, script)
    for mine in told:
        early = [each for each in mine if not each["step"] and each["op"] != "init_process_group"]
        assert sum(each["count"] for each in early) == said[0]["before"]["0"]
        ddp = "DistributedDataParallel.__init__"
        assert count(early, "_verify_params_across_processes", through=ddp) == (2, 1)
        assert count(early, "_broadcast_coalesced", through=ddp) == (2, 1)
        assert any(each["through"].startswith("DTensor.from_local") for each in early)
        assert any(each["through"].startswith("distribute_tensor") for each in early)
        (gathered,) = [each for each in early if each["op"] == "all_gather"]
        assert (gathered["count"], gathered["bytes"] > 0) == (1, True)
        assert gathered["site"].startswith(f"{script}:")
        late = [each for each in mine if each["step"]]
        assert count(late, "all_reduce") == (1, 1)  # the gradients
        assert count(late, "_broadcast_coalesced", through="DistributedDataParallel.forward")[1] == 1


def test_a_program_that_never_steps_tells_at_its_end(home: Path, tmp_path: Path) -> None:
    told, _, _ = ranks(home, write(tmp_path, "dist.barrier()\ndist.destroy_process_group()"))
    assert [count(mine, "barrier") for mine in told] == [(1, 1), (1, 1)]


def test_a_program_that_sends_for_ever_and_never_steps_is_listened_to_for_a_while(home: Path, tmp_path: Path) -> None:
    body = """
    from headway.instrument import collectives
    collectives.LISTENS_TO = 10
    stock = type(dist.ProcessGroup.size)
    for _ in range(30):
        dist.barrier()
    say(left=type(dist.ProcessGroup.barrier) is stock)
    """
    told, said, _ = ranks(home, write(tmp_path, body))
    assert [count(mine, "barrier") for mine in told] == [(10, 10), (10, 10)]
    assert said == [{"left": True}] * 2


def test_a_group_that_is_destroyed_goes(home: Path, tmp_path: Path) -> None:
    body = """
    import gc, weakref
    dist.barrier()
    gone = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    say(gone=gone() is None)
    """
    assert ranks(home, write(tmp_path, body))[1] == [{"gone": True}] * 2


def test_a_torch_that_does_not_count_and_has_no_flight_recorder_is_measured_all_the_same(
    home: Path, tmp_path: Path
) -> None:
    body = """
    def refuses(self):
        raise RuntimeError("this backend does not count")

    dist.ProcessGroup._get_sequence_number_for_group = refuses
    del torch._C._distributed_c10d._dump_fr_trace
    dist.all_gather_object([None], 1)
    nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    step()
    """
    ((mine,), _, errors) = ranks(home, write(tmp_path, body), size=1)
    assert count(mine, "all_gather_object") == (2, 1)
    assert count(mine, "_broadcast_coalesced") == (1, 1)
    assert "headway" not in errors


def test_what_cannot_be_named_is_counted(home: Path, tmp_path: Path) -> None:
    body = """
    from torch.distributed._functional_collectives import all_reduce

    del torch._C._distributed_c10d._dump_fr_trace
    all_reduce(torch.ones(1), "sum", dist.group.WORLD).wait()
    step()
    """
    ((mine,), _, _) = ranks(home, write(tmp_path, body), size=1)
    assert count(mine, "unseen") == (1, 1)


def test_a_tensor_that_hides_its_size_costs_the_hook_and_not_the_job(home: Path, tmp_path: Path) -> None:
    body = """
    class Odd(torch.Tensor):
        @property
        def nbytes(self):
            raise ValueError("no size")

    tensor = torch.ones(2).as_subclass(Odd)
    dist.all_reduce(tensor)
    dist.all_reduce(torch.ones(2))
    say(sum=float(tensor.sum()))
    """
    ((mine,), said, errors) = ranks(home, write(tmp_path, body), size=1)
    assert said == [{"sum": 2.0}]
    assert "ProcessGroup.allreduce is switched off (ValueError: no size)" in errors
    assert sum(each["count"] for each in mine if each["op"] in ("all_reduce", "allreduce")) == 2


def test_groups_that_are_written_in_python_work_as_ever(home: Path, tmp_path: Path) -> None:
    body = """
    from torch._C._distributed_c10d import _create_work_from_future

    class Own(dist.ProcessGroup):
        def __init__(self):
            super().__init__(0, 1)

        def allreduce(self, tensors, options=None):
            done = torch.futures.Future()
            done.set_result(tensors)
            return _create_work_from_future(done)

    def outcome(call):
        try:
            return str(call())
        except RuntimeError as error:
            return str(error).splitlines()[0]

    own, ones = Own(), [torch.ones(1)]
    say(reduced=own.allreduce(ones).wait(), others=[outcome(own.barrier), outcome(lambda: own.broadcast(ones))])
    """
    script = write(tmp_path, body)
    _, (measured,), _ = ranks(home, script, size=1)
    (home / "store").unlink()
    without = plain(str(script), env=os.environ | place_of(0, 1))
    assert json.loads(without.stdout) == measured
    assert measured["reduced"] is True


@pytest.mark.needs_package("torchrec")
def test_an_embedding_collection_is_seen_to_gather_each_table(home: Path, tmp_path: Path) -> None:
    body = """
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan

    def table(number):
        return EmbeddingConfig(name=f"t{number}", num_embeddings=16, embedding_dim=4, feature_names=[f"f{number}"])

    tables = [table(number) for number in range(4)]
    model = nn.Sequential(EmbeddingCollection(tables=tables, device=torch.device("meta")))
    sharder = EmbeddingCollectionSharder()
    each = {f"t{number}": row_wise() for number in range(4)}
    mine = construct_module_sharding_plan(model[0], each, sharder, local_size=2, world_size=2, device_type="cpu")
    DistributedModelParallel(model, device=torch.device("cpu"), plan=ShardingPlan({"0": mine}), sharders=[sharder])
    step()
    """
    told, _, _ = ranks(home, write(tmp_path, body))
    for mine in told:
        (gathered,) = [each for each in mine if each["op"] == "all_gather_object"]
        assert (gathered["count"], gathered["calls"]) == (8, 4)
        assert gathered["through"].startswith("DistributedModelParallel.__init__")
        assert "ShardedEmbeddingCollection.__init__ > ShardedTensor._init_from_local_shards" in gathered["through"]


def test_groups_that_headway_makes_are_told_as_well(home: Path, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        from headway.startup import device_mesh, process_group

        process_group([0])
        device_mesh("cpu", (1, 2), ("dp", "tp"))
        step()
        """,
    )
    told, _, errors = ranks(home, script)
    made = [each["ranks"] for mine in told for each in mine if "process_group" in each["through"]]
    assert sorted(made) == [[0], [1]]
    assert "headway" not in errors


def test_the_first_step_after_a_restore_ends_the_start_too(home: Path, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import headway

        for _ in headway.current().steps(range(2), start=41):
            step()
        left = [name for name in dir(dist.ProcessGroup) if hasattr(getattr(dist.ProcessGroup, name), "__headway__")]
        say(left=left)
        """,
    )
    _, said, _ = ranks(home, script)
    assert [each["left"] for each in said] == [[], []]
