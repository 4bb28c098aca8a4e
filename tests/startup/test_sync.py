"""All ranks hold the same parameters after it, bit for bit, and no more is sent than has to be."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchrec_models import on_ranks

from headway.errors import InputError
from headway.startup import sync
from headway.startup.sync import broadcast_parameters, data_parallel, difference, same_parameters, synchronised

RANKS = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])


class Odd(nn.Module):
    """Tensors of every kind: of no dimension and of no element, transposed, tied, of all types, with NaN in them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)

        def some(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random)

        self.first, self.norm = nn.Linear(7, 5), nn.BatchNorm1d(5)
        self.tied, self.scale = self.first.weight, nn.Parameter(some().double())
        self.turned = nn.Parameter(some(3, 4, 5, 2).contiguous(memory_format=torch.channels_last))
        self.frozen = nn.Parameter(some(9).to(torch.bfloat16), requires_grad=False)
        self.register_buffer("empty", some(0, 3))
        self.register_buffer("mask", some(11) > 0)
        self.register_buffer("bytes", some(3).to(torch.int8))
        self.register_buffer("eighth", some(5).to(torch.float8_e4m3fn))
        self.register_buffer("waves", torch.complex(some(4), some(4)), persistent=False)
        self.register_buffer("expanded", some(1, 3).expand(4, 3))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("strange", torch.tensor([math.nan, -0.0, math.inf, float(seed)]))
        with torch.no_grad():
            for parameter in self.first.parameters():
                parameter.copy_(some(*parameter.shape))


def sent(work: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and how many collectives were sent for it on the default group, by C++ as well."""
    before = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    result = work()
    return result, dist.group.WORLD._get_sequence_number_for_group() - before  # type: ignore[union-attr]


def contents(module: nn.Module) -> str:
    """All that it holds, bit for bit."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return json.dumps({name: sync._bytes(tensor).tolist() for name, tensor in named})


# --- sending ---------------------------------------------------------------------------------------------------------


def broadcast() -> dict[str, Any]:
    one_by_one, ours, small = (Odd(dist.get_rank()) for _ in range(3))
    last = dist.get_world_size() - 1
    with torch.no_grad():
        for tensor in sync.tensors(one_by_one).values():
            whole = sync._bytes(tensor)
            dist.broadcast(whole, last)
            received = whole.view(tensor.dtype).view(tensor.shape)
            (tensor[0] if tensor is one_by_one.expanded else tensor).copy_(
                received[0] if tensor is one_by_one.expanded else received
            )
    strides = ours.turned.stride()
    _, count = sent(lambda: broadcast_parameters(ours, last))
    sync.BUCKET_BYTES, sync.ALONE_BYTES = 64, 100
    _, smaller = sent(lambda: broadcast_parameters([small], last))
    a, b = torch.full((3,), float(dist.get_rank())), nn.Linear(2, 1)
    broadcast_parameters([a, b], last)
    return {
        "contents": {contents(model) for model in (one_by_one, ours, small, Odd(last))} == {contents(ours)},
        "sent": count,
        "sent in small buckets": smaller,
        "kept": ours.turned.stride() == strides and ours.tied is ours.first.weight and ours.scale.grad is None,
        "tensors": a.tolist() == [float(last)] * 3 and same_parameters([a, b]),
    }


@RANKS
def test_a_coalesced_broadcast_equals_one_of_each_tensor(tmp_path: Path, ranks: int) -> None:
    for found in on_ranks(ranks, "test_sync:broadcast", tmp_path):
        assert found["contents"]
        assert found["kept"]
        assert found["tensors"]
        assert found["sent"] == 2  # that they fit together, and all of them
        assert found["sent in small buckets"] > 3


# --- comparing -------------------------------------------------------------------------------------------------------


def compared() -> list[Any]:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    seeded, unlike = Odd(0), Odd(0)
    found: list[Any] = [sent(lambda: same_parameters(seeded)), sent(lambda: synchronised(seeded))]
    with torch.no_grad():
        unlike.strange[1] = 0.0 if rank == last else -0.0  # equal, and yet another
    found += [sent(lambda: same_parameters(unlike)), sent(lambda: difference(unlike))]
    found += [sent(lambda: synchronised(unlike, last)), same_parameters(unlike), difference(unlike)]
    return [*found, math.copysign(1.0, unlike.strange[1].item())]


@RANKS
def test_parameters_are_sent_only_if_they_differ(tmp_path: Path, ranks: int) -> None:
    for found in on_ranks(ranks, "test_sync:compared", tmp_path):
        same, untouched, other, named, synced, after, nothing, sign = found
        assert same == untouched == [True, 1]
        assert other == [False, 1]
        assert named == [f"strange holds something else on rank {ranks - 1} than on rank 0", 2]
        assert synced == [False, 3]  # compared, named, and sent at once
        assert after is True
        assert nothing == ""
        assert sign == 1.0
    said = (tmp_path / "said").read_text()
    assert said.count("parameters are sent, since strange holds something else") == 1


def shapes() -> list[str]:
    """Rank 1 has built a module of another shape."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1 + dist.get_rank() % 2))
    said = [difference(model)]
    for work in (synchronised, broadcast_parameters):
        with pytest.raises(InputError) as raised:
            work(model)
        said.append(str(raised.value))
    more = nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + dist.get_rank() % 2)])
    return [*said, difference(more), str(same_parameters(model))]


def test_modules_of_other_shapes_are_told_apart_and_nothing_is_sent(tmp_path: Path) -> None:
    for told, synced, sent_, more, same in on_ranks(4, "test_sync:shapes", tmp_path):
        where = "something else on ranks 1, 3 than on rank 0"
        assert told == f"tensor 2 is 1.weight (1, 4) float32 or 1.weight (2, 4) float32: {where}"
        assert told in synced
        assert told in sent_
        assert more == f"tensor 2 is nothing or 1.weight (2, 2) float32: {where}"
        assert same == "False"


def sharded() -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    ignoring = nn.Linear(3, 3)
    torch.nn.init.constant_(ignoring.bias, dist.get_rank())
    torch.nn.init.constant_(ignoring.weight, 1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["bias"])
    return [list(sync.tensors(model)), same_parameters(model), same_parameters(ignoring), synchronised(ignoring)]


def test_what_ranks_rightly_hold_parts_of_is_left_out(tmp_path: Path) -> None:
    found = on_ranks(2, "test_sync:sharded", tmp_path)
    assert found == [[["1.weight", "1.bias"], True, True, True]] * 2


def subgroup() -> list[Any]:
    pair = dist.new_group([1, 2])
    model = nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, dist.get_rank())
    torch.nn.init.constant_(model.bias, 0)
    if dist.get_rank() == 0:
        return [synchronised(model, 1, pair), 1.0]
    with pytest.raises(InputError, match="rank 0, whose parameters all should get, is not in the group"):
        synchronised(model, 0, pair)
    said = difference(model, pair)
    synchronised(model, 2, pair)
    return [said, model.weight[0, 0].item()]


def test_ranks_of_a_group_are_compared_and_others_left_alone(tmp_path: Path) -> None:
    outside, one, two = on_ranks(3, "test_sync:subgroup", tmp_path)
    assert outside == [True, 1.0]
    assert one == two == ["weight holds something else on rank 2 than on rank 1", 2.0]


# --- DDP -------------------------------------------------------------------------------------------------------------


def losses(wrapped: nn.Module) -> list[str]:
    optimizer, found = torch.optim.SGD(wrapped.parameters(), lr=0.1), []
    for step in range(3):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = wrapped(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item().hex())
    return found


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def wrapped() -> dict[str, Any]:
    stock, count = sent(lambda: DistributedDataParallel(model(0)))
    found: dict[str, Any] = {"stock": count}
    ours, found["seeded"] = sent(lambda: data_parallel(model(0)))
    unlike, found["unlike"] = sent(lambda: data_parallel(model(dist.get_rank())))
    _, found["asked"] = sent(lambda: data_parallel(model(0), init_sync=True))
    _, found["mesh"] = sent(lambda: data_parallel(model(0), device_mesh=init_device_mesh("cpu", (2,))))
    expected = losses(stock)
    return found | {"losses": losses(ours) == expected, "unlike losses": losses(unlike) == expected}


def test_ddp_sends_nothing_if_the_parameters_are_the_same_and_trains_as_ever(tmp_path: Path) -> None:
    for found in on_ranks(2, "test_sync:wrapped", tmp_path):
        assert found["seeded"] == found["mesh"] == 1 < found["stock"]
        assert found["unlike"] == 2 + found["stock"]  # compared, named, and then as ever
        assert found["asked"] == found["stock"]
        assert found["losses"]
        assert found["unlike losses"]


def frozen() -> str:
    part = model(0)
    part[0].requires_grad_(dist.get_rank() == 0)
    with pytest.raises(RuntimeError) as raised:
        data_parallel(part)
    return str(raised.value)


def test_ranks_that_train_different_parameters_are_told_so_as_by_ddp(tmp_path: Path) -> None:
    for text in on_ranks(2, "test_sync:frozen", tmp_path):
        assert "DDP expects same model across all ranks" in text
    assert "tensor 0 is 0.weight (5, 6) float32 or 0.weight (frozen) (5, 6) float32" in (tmp_path / "said").read_text()


# --- without other ranks ---------------------------------------------------------------------------------------------


def test_one_process_has_nothing_to_compare_with(home: Path) -> None:
    assert same_parameters(Odd(0))
    assert difference(Odd(0)) == ""
    assert synchronised(Odd(0))
    broadcast_parameters(Odd(0))


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: nn.Linear(2, 2, device="meta"), "weight holds nothing yet"),
        (lambda: nn.LazyLinear(2), "weight holds nothing yet"),
        (lambda: torch.eye(3).to_sparse(), "0 is sparse"),
    ],
)
def test_what_has_no_contents_to_send_is_named(build: Callable[[], Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        broadcast_parameters(build())


def test_a_hash_tells_chunks_and_bits_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(1000.0)
    flat = sync._bytes(whole)
    assert flat.data_ptr() == whole.data_ptr()
    at_once = sync._hash(flat)
    monkeypatch.setattr(sync, "_CHUNK_BYTES", 7)
    assert sync._hash(flat) == at_once
    whole[999] = math.nextafter(999.0, 1e9) + 1e-3
    assert sync._hash(flat) != at_once
