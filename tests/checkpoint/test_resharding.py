"""A state comes back bit by bit: with more ranks, with fewer, however it is divided, and whatever it is made of."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trainers
from keeping import end_keepers
from torch import nn
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard
from trainers import Notes, fork

from headway import Checkpointer
from headway.checkpoint import Reader, Writer
from headway.errors import InputError

RANKS = [1, 2, 3, 1]
TRAINED = 2
"""Steps between two saves."""


@pytest.fixture(autouse=True, scope="session")
def _warm() -> None:
    trainers.warm_up()


# --- ranks that come and go ------------------------------------------------------------------------------------------


def launch(work: Callable[..., None], home: Path, ranks: int, *args: Any) -> None:
    """Runs it on so many ranks, each of which is killed in the end, and not before."""
    meeting = home / f"meeting-{len(list(home.glob('meeting-*')))}"
    meeting.touch()
    started = [
        fork(begin, home, work, rank, ranks, f"file://{meeting}-", *args, HEADWAY_JOB="j") for rank in range(ranks)
    ]
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [-signal.SIGKILL] * ranks, (home / "said").read_text()


def begin(work: Callable[..., None], rank: int, ranks: int, meeting: str, *args: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=ranks)
    work(*args)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def is_same(one: Any, other: Any) -> bool:
    """Bit by bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(as_bytes(one), as_bytes(other))
    return bool(one == other)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def training(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Its layers cannot be divided evenly."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(17, 13), nn.LayerNorm(13), nn.Linear(13, 7, bias=False), nn.Linear(7, 1))
    if kind == "ddp":
        return (wrapped := nn.parallel.DistributedDataParallel(model)), torch.optim.AdamW(wrapped.parameters())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def whole(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """All of the state, gathered from all ranks."""
    state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {"model": state[0], "optimizer": state[1], "scheduler": scheduler.state_dict()}


def train_on(root: str, kind: str, saved: Path, notes: Path, leaves: bool) -> None:
    """Goes on where the job was, and says from where."""
    model, optimizer = training(kind)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    checkpointer = Checkpointer(root, model=model, optimizer=optimizer, scheduler=scheduler, interval=None)
    restored = checkpointer.restore()
    now = whole(model, optimizer, scheduler)
    first = dist.get_rank() == 0
    if first and restored:
        then = torch.load(saved, weights_only=False)
        assert is_same(now, then), f"{now} instead of {then}"
        Notes(notes).add(restored.tier, restored.step)
    for step in range(checkpointer.step, checkpointer.step + TRAINED):
        torch.manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(4, 17)).pow(2).sum().backward()
        optimizer.step()
        scheduler.step()
        checkpointer.step = step + 1
    now = whole(model, optimizer, scheduler)
    if first:
        torch.save(now, saved)
    dist.barrier()
    checkpointer.save(wait=True)
    if leaves:
        checkpointer.close()


@pytest.mark.parametrize(
    ("tier", "kind"),
    [
        ("memory", "fsdp"),
        ("disk", "ddp"),
        pytest.param("memory", "ddp", marks=pytest.mark.thorough),
        pytest.param("disk", "fsdp", marks=pytest.mark.thorough),
    ],
)
def test_the_whole_state_survives_every_change_of_the_number_of_ranks(
    kind: str, tier: str, root: Path, home: Path
) -> None:
    notes = Notes(home / "notes")
    for ranks in RANKS:
        launch(train_on, home, ranks, str(root), kind, home / "saved", notes.path, tier == "disk")
        if tier == "disk":
            end_keepers(root)
    assert notes.read(tier) == [(TRAINED * count, 0) for count in range(1, len(RANKS))], notes.path.read_text()


# --- sharded tensors, as TorchRec has them ---------------------------------------------------------------------------

ROWS, COLUMNS = 10, 6


def table(cuts: list[int], fill: float | None = None) -> ShardedTensor:
    """A table whose rows are divided among the ranks at these cuts; a rank may have none."""
    edges = [0, *cuts, ROWS]
    start, end = edges[dist.get_rank()], edges[dist.get_rank() + 1]
    values = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)[start:end].clone()
    if fill is not None:
        values.fill_(fill)
    shards = [Shard.from_tensor_and_offsets(values, [start, 0], dist.get_rank())] if end > start else []
    return init_from_local_shards(shards, ROWS, COLUMNS)


class Part:
    """Something with a `state_dict`."""

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Embedding(nn.Module):
    """A module whose state is a sharded tensor over its own memory, as TorchRec's modules have it."""

    def __init__(self, cuts: list[int], fill: float | None) -> None:
        super().__init__()
        self.bag, self.dense = nn.Module(), nn.Linear(3, 2)
        self.bag.weight = self.table = table(cuts, fill)
        self._register_state_dict_hook(_with_table)  # type: ignore[no-untyped-call]
        self._register_load_state_dict_pre_hook(self._take_table)  # type: ignore[no-untyped-call]

    def _take_table(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        loaded = state.pop(f"{prefix}bag.weight")
        for mine, its in zip(self.table.local_shards(), loaded.local_shards(), strict=True):
            mine.tensor.copy_(its.tensor)


def _with_table(module: Embedding, state: dict[str, Any], prefix: str, *args: Any) -> None:
    state[f"{prefix}bag.weight"] = module.table


def divide_tables(root: str, cuts: list[int], is_first: bool) -> None:
    """Saves tables, or loads them divided otherwise."""
    fill = None if is_first else -1.0
    part, model = Part(table=table(cuts, fill)), Embedding(cuts, fill)
    checkpointer = Checkpointer(root, model=model, sparse=part, interval=None)
    restored = checkpointer.restore()
    assert (restored is None) == is_first
    for found in (part.state["table"], model.table):
        for mine, right in zip(found.local_shards(), table(cuts).local_shards(), strict=True):
            assert torch.equal(mine.tensor, right.tensor)
    checkpointer.save(checkpointer.step + 1, wait=True)
    checkpointer.close()


def test_sharded_tensors_are_divided_anew(root: Path, home: Path) -> None:
    for number, cuts in enumerate(([4], [7], [2, 5], [5, 5], [])):
        launch(divide_tables, home, len(cuts) + 1, str(root), cuts, number == 0)
        end_keepers(root)
    weights = torch.full((ROWS, COLUMNS), -1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load({"sparse": {"table": weights}}, checkpoint_id=root / "step-00000005", no_dist=True)
    assert torch.equal(weights, torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS))


def divide_again(root: str) -> None:
    """The same job divides its table otherwise between two saves."""
    part = Part(table=table([4]))
    checkpointer = Checkpointer(root, sparse=part, interval=None)
    checkpointer.save(1, wait=True)
    part.state["table"] = table([7])
    checkpointer.save(2, wait=True)
    part.state["table"] = table([7], -1.0)
    checkpointer.restore()
    for mine, right in zip(part.state["table"].local_shards(), table([7]).local_shards(), strict=True):
        assert torch.equal(mine.tensor, right.tensor)
    checkpointer.close()


def test_a_table_that_is_divided_otherwise_is_planned_anew(root: Path, home: Path) -> None:
    launch(divide_again, home, 2, str(root))


def save_by_torch(root: str) -> None:
    """Without a checkpointer: torch's own functions, with our writer."""
    state: dict[str, Any] = {"table": table([4]), "dense": torch.arange(6.0)}
    writer = Writer(root)
    saved = async_save(state, storage_writer=writer, async_stager=writer, checkpoint_id=f"{root}/one")
    state["table"].local_shards()[0].tensor.fill_(-1)
    (saved if isinstance(saved, Future) else saved.upload_completion).result()
    dist.barrier()
    state = {"table": table([8], -1.0), "dense": torch.zeros(6)}
    load(state, storage_reader=Reader(f"{root}/one"))
    for mine, right in zip(state["table"].local_shards(), table([8]).local_shards(), strict=True):
        assert torch.equal(mine.tensor, right.tensor)
    assert torch.equal(state["dense"], torch.arange(6.0))
    writer.close()


def test_torchs_own_functions_save_sharded_tensors_with_our_writer(root: Path, home: Path) -> None:
    launch(save_by_torch, home, 2, str(root))


# --- whatever a state is made of -------------------------------------------------------------------------------------

NAMES = """float64 float32 bfloat16 float16 complex32 complex64 complex128 bool
    uint8 uint16 uint32 uint64 int8 int16 int32 int64
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"""
DTYPES: list[torch.dtype] = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]


def oddities() -> Iterator[tuple[str, torch.Tensor]]:
    torch.manual_seed(1)
    for dtype in DTYPES:
        data = torch.randint(0, 2 if dtype == torch.bool else 256, (7, 5, dtype.itemsize), dtype=torch.uint8)
        yield str(dtype), data.view(dtype).squeeze(-1)
        yield f"no {dtype}", torch.empty(0, 3, dtype=dtype)
        yield f"one {dtype}", data[0, 0].view(dtype)[0]
    base = torch.randn(6, 8)
    yield "transposed", base.t()
    yield "every other", base[::2, 1::3]
    yield "expanded", base[0].expand(4, 8)
    yield "channels last", torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    yield "conjugated", torch.randn(3, 4, dtype=torch.complex64).conj()
    yield "negated", torch.randn(3, dtype=torch.complex64).conj().imag
    yield "not a number", torch.tensor([0x7FC0_1234, 0x7F80_0001, -0x80000000], dtype=torch.int32).view(torch.float32)
    yield "large", torch.randn(3000)
    yield "a view of a part", torch.randn(100)[10:20]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("memory", ["two-slot", "streaming"])
def test_every_kind_of_tensor_comes_back_as_it_was(memory: str, root: Path) -> None:
    was = dict(oddities())
    part = Part(**was)
    settings: dict[str, Any] = {"memory": memory, "stream_bytes": 1 << 16, "interval": None}

    def is_restored(checkpointer: Checkpointer, tier: str) -> bool:
        part.state = {key: blank(value) for key, value in was.items()}
        restored = checkpointer.restore()
        assert restored
        assert restored.tier == tier
        return not [key for key, value in was.items() if not is_same(part.state[key], value)]

    with Checkpointer(root, odd=part, **settings) as checkpointer:
        checkpointer.save(1, wait=True)
        assert is_restored(checkpointer, "disk" if memory == "streaming" else "memory")
    end_keepers(root)
    with Checkpointer(root, odd=part, **settings) as checkpointer:
        assert is_restored(checkpointer, "disk")
    plain = {"odd": {key: blank(value) for key, value in was.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(plain, checkpoint_id=root / "step-00000001", no_dist=True)
    assert not [key for key, value in was.items() if not is_same(plain["odd"][key], value)]


def blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.embedding(words))
        return found


def test_tied_weights_stay_tied(root: Path) -> None:
    def made() -> tuple[Tied, torch.optim.Optimizer]:
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.arange(11)).pow(2).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made()
    with Checkpointer(root, model=model, optimizer=optimizer, interval=None) as checkpointer:
        checkpointer.save(1, wait=True)
    end_keepers(root)
    other, its = made()
    assert not torch.equal(other.head.weight, model.head.weight)
    with Checkpointer(root, model=other, optimizer=its, interval=None) as checkpointer:
        checkpointer.restore()
    assert other.head.weight is other.embedding.weight
    assert torch.equal(other.head.weight, model.head.weight)
    assert is_same(its.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_parameter_without_values_is_an_error_that_names_it(root: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    with (
        Checkpointer(root, model=model, interval=None) as checkpointer,
        pytest.raises(InputError, match=r"model\.1\.weight is on the meta device"),
    ):
        checkpointer.save(1, wait=True)


def test_a_state_of_nothing_but_values_is_saved(root: Path) -> None:
    part = Part(epoch=3, name="x", nested={"list": [1, 2, (3, None)]}, empty={})
    with Checkpointer(root, values=part, interval=None) as checkpointer:
        checkpointer.save(1, wait=True)
        was, part.state = part.state, {}
        checkpointer.restore()
    assert part.state == was


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_the_writer_saved_alone_is_read_alone(root: Path) -> None:
    was = dict(oddities())
    writer = Writer(root)
    try:
        save = writer.save(was, folder="one", step=1)
        assert save
        save.wait()
    finally:
        writer.close()
    now = {key: blank(value) for key, value in was.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(now, checkpoint_id=root / "one", no_dist=True)
    assert not [key for key, value in was.items() if not is_same(now[key], value)]
