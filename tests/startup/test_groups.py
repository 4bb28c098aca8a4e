"""Process groups are made once, by their members alone, and hold what torch's own hold."""

import itertools
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torchrec_models import on_ranks

from headway.errors import InputError
from headway.startup import groups
from headway.startup.groups import device_mesh, lazy_groups, process_group

SOON = timedelta(seconds=120)


def total(group: Any) -> float:
    """The sum of one plus its rank over the members of a group."""
    mine = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(mine, group=group)
    return mine.item()


def said(work: Callable[[], Any]) -> str:
    """What the InputError says that it raises."""
    with pytest.raises(InputError) as raised:
        work()
    return str(raised.value)


class Counting(dist.Store):
    """A store that counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count = dist.HashStore(), 0

    def set(self, key: str, value: Any) -> None:
        self.count += 1
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.count += 1
        return self.inner.get(key)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.count += 1
        self.inner.wait(keys, *timeout)


# --- once ------------------------------------------------------------------------------------------------------------


def made_once() -> list[bool]:
    rank, world = dist.get_rank(), dist.group.WORLD
    before = dist.new_group([1, 2])
    first, again = process_group([1, 0]), process_group((0, 1))
    others = process_group([1, 2])
    short = process_group([0, 1], timeout=SOON)
    return [
        process_group() is world and process_group(range(3), "gloo") is world,
        first is again if rank < 2 else first == again == dist.GroupMember.NON_GROUP_MEMBER,
        others is before if rank else others == dist.GroupMember.NON_GROUP_MEMBER,
        short is not first and short is process_group([0, 1], timeout=SOON) if rank < 2 else True,
        process_group(timeout=SOON) is not world and process_group(timeout=SOON) is process_group(timeout=SOON),
        rank == 2 or total(first) == total(short) == 3.0,
        rank == 0 or total(others) == 5.0,
        dist.get_process_group_ranks(first) == [0, 1] if rank < 2 else True,
    ]


def test_a_group_is_made_once_for_the_same_ranks_whoever_made_it(tmp_path: Path) -> None:
    assert on_ranks(3, "test_groups:made_once", tmp_path) == [[True] * 8] * 3


def members_only() -> float:
    """Rank 0 has two groups before it makes the one with rank 2, which has none; rank 3 never calls at all."""
    rank, sum_ = dist.get_rank(), 0.0
    for ranks in ([0, 1], [0, 1], [0, 2]):
        if rank in ranks:
            sum_ = total(process_group(ranks, timeout=SOON))
    return sum_ + total(dist.new_group([0, 3]))  # torch's own numbering was left in step


@pytest.mark.filterwarnings("ignore")
def test_ranks_outside_need_not_call_and_members_may_have_other_groups(tmp_path: Path) -> None:
    zero, one, two, three = on_ranks(4, "test_groups:members_only", tmp_path)
    assert zero == 4.0 + 5.0
    assert three == 5.0
    assert (one, two) == (3.0 + 2.0, 4.0 + 3.0)  # with NON_GROUP_MEMBER, what they had stays


def destroyed(meeting: str) -> list[Any]:
    first = process_group([0, 1], timeout=SOON)
    dist.destroy_process_group(first)
    second = process_group([0, 1], timeout=SOON)
    found = [second is not first, total(second)]
    world = weakref.ref(dist.group.WORLD)  # type: ignore[arg-type]
    dist.destroy_process_group()
    found.append(world() is None)
    dist.init_process_group("gloo", f"file://{meeting}", rank=int(os.environ["RANK"]), world_size=2)
    third = process_group([0, 1], timeout=SOON)
    return [*found, third not in (first, second), total(third)]


def test_a_destroyed_group_is_never_returned(tmp_path: Path) -> None:
    found = on_ranks(2, "test_groups:destroyed", tmp_path, str(tmp_path / "again"))
    assert found == [[True, 3.0, True, True, 3.0]] * 2


# --- without connecting ----------------------------------------------------------------------------------------------


def store_operations() -> list[int]:
    """Of a group of one rank, as torch makes it and as we do, on a store that counts."""
    store, counts = Counting(), []
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    for make in (dist.new_group, lambda ranks: process_group(ranks, timeout=SOON)):
        store.count = 0
        total(make([0]))
        counts.append(store.count)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return counts


def test_a_group_of_one_rank_asks_the_store_for_nothing(tmp_path: Path) -> None:
    ((stock, ours),) = on_ranks(1, "test_groups:store_operations", tmp_path)
    assert ours == 0 < stock


def sockets() -> list[int]:
    """How many more are open after each of: nothing, torch's group, our group, its first use."""
    counts = []

    def look() -> None:
        dist.barrier()
        counts.append(sum(_target(fd).startswith("socket:") for fd in os.listdir("/proc/self/fd")))
        dist.barrier()

    look()
    dist.new_group([0, 1, 2, 3], timeout=SOON)
    look()
    ours = process_group(range(4), timeout=2 * SOON)
    look()
    for _ in range(3):
        total(ours)
    look()
    assert groups.LAZY not in os.environ
    return [after - before for before, after in itertools.pairwise(counts)]


def _target(fd: str) -> str:
    """What a descriptor is of; nothing if a thread of gloo's has closed it meanwhile."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_a_group_connects_when_it_is_first_used(tmp_path: Path) -> None:
    for stock, made, used in on_ranks(4, "test_groups:sockets", tmp_path):
        assert stock >= 3
        assert made < stock
        assert used >= 2


def collectives() -> bool:
    """Whether everything that gloo does comes out the same on a lazy group."""
    size, rank = dist.get_world_size(), dist.get_rank()
    results = []
    for group in (dist.new_group(timeout=SOON), process_group(timeout=2 * SOON)):
        mine, found = torch.arange(8.0) * (rank + 1), []
        for work in (dist.all_reduce, lambda t, group: dist.broadcast(t, size - 1, group=group)):
            work(copy := mine.clone(), group=group)
            found.append(copy)
        gathered = [torch.empty(8) for _ in range(size)]
        dist.all_gather(gathered, mine, group=group)
        exchanged = torch.empty(8)
        dist.all_to_all_single(exchanged, mine, group=group)
        scattered = torch.empty(8)
        dist.scatter(scattered, gathered if rank == 1 else None, src=1, group=group)
        dist.monitored_barrier(group=group)
        sends = dist.isend(mine, (rank + 1) % size, group=group)
        received = torch.empty(8)
        dist.recv(received, (rank - 1) % size, group=group)
        sends.wait()
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, f"rank {rank}", group=group)
        results.append([*found, *gathered, exchanged, scattered, received, torch.tensor([hash(tuple(objects))])])
    return all(map(torch.equal, *results))


def test_collectives_come_out_the_same(tmp_path: Path) -> None:
    assert on_ranks(4, "test_groups:collectives", tmp_path) == [True] * 4


def test_lazy_groups_leaves_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(groups.LAZY, "0")
    assert not lazy_groups()
    assert os.environ[groups.LAZY] == "0"
    monkeypatch.delenv(groups.LAZY)
    assert lazy_groups()
    assert os.environ[groups.LAZY] == "1"


# --- meshes ----------------------------------------------------------------------------------------------------------


def meshes() -> list[Any]:
    names = ("pp", "dp", "tp")
    stock = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
    count = len(dist.distributed_c10d._world.pg_map)
    same = device_mesh("cpu", (1, 2, 2), names)  # whose groups are there already
    reused = len(dist.distributed_c10d._world.pg_map) == count
    other = device_mesh("cpu", (2, 1, 2), names)
    lines = [[dist.get_process_group_ranks(each) for each in mesh.get_all_groups()] for mesh in (stock, same, other)]
    whole = torch.arange(16.0).view(4, 4)
    parts = [distribute_tensor(whole, mesh["dp", "tp"], [Shard(0), Shard(1)]) for mesh in (stock, same)]
    torch.manual_seed(0)
    layer = fully_shard(torch.nn.Linear(4, 4), mesh=other["tp"])
    loss = layer(torch.ones(1, 4)).sum()
    loss.backward()
    return [reused, stock == same, lines, torch.equal(*(part.to_local() for part in parts)), loss.item()]


def test_a_mesh_has_the_groups_of_torchs_own(tmp_path: Path) -> None:
    found = on_ranks(4, "test_groups:meshes", tmp_path)
    for rank, (reused, equal, (stock, same, other), parts, loss) in enumerate(found):
        assert reused
        assert equal
        assert parts
        assert loss == found[0][4]
        assert stock == same
        assert other == [[rank % 2, rank % 2 + 2], [rank], [rank // 2 * 2, rank // 2 * 2 + 1]]


# --- what cannot be ---------------------------------------------------------------------------------------------------


def errors() -> list[str]:
    return [
        said(lambda: process_group([0, 2])),
        said(lambda: process_group([0, -1])),
        said(lambda: process_group([0, 0])),
        said(lambda: process_group([])),
        said(lambda: process_group(["0"])),  # type: ignore[list-item]
        said(lambda: process_group([0], "glue")),
        said(lambda: device_mesh("cpu", (2, 2), ("dp", "tp"))),
        said(lambda: device_mesh("cpu", (2,), ("dp", "tp"))),
    ]


def test_ranks_and_backends_that_cannot_be_are_told(tmp_path: Path) -> None:
    found = on_ranks(2, "test_groups:errors", tmp_path)[0]
    outside, negative, twice, none, text, backend, places, names = found
    assert "no rank 2 among 2" in outside
    assert "no rank -1" in negative
    assert "rank 0 is named more than once" in twice
    assert "without ranks" in none
    assert "'0' is none" in text
    assert "'glue'" in backend
    assert "(2, 2) has no place for each of 2 ranks" in places
    assert "1 different names" in names


def test_without_a_default_group_it_says_what_to_call() -> None:
    assert "init_process_group" in said(process_group)


# --- a torch that is another ------------------------------------------------------------------------------------------


def together() -> list[Any]:
    rank = dist.get_rank()
    groups._NEEDED.add("an argument that no torch has")
    first, again, whole = process_group([0, 1]), process_group([0, 1]), process_group()
    mesh = device_mesh("cpu", (1, 3), ("dp", "tp"))
    found = [first is again, whole is dist.group.WORLD, mesh.shape == (1, 3)]
    if rank < 2:
        found.append(total(first) == 3.0)
        dist.destroy_process_group(first)
        found.append("was destroyed" in said(lambda: process_group([0, 1])))
    else:
        found.append(first == dist.GroupMember.NON_GROUP_MEMBER)
    return found


def test_a_torch_that_is_another_makes_groups_as_ever_and_says_so_once(tmp_path: Path) -> None:
    for found in on_ranks(3, "test_groups:together", tmp_path):
        assert all(found)
        assert len(found) > 3
    assert (tmp_path / "said").read_text().count("made as by new_group") == 1
