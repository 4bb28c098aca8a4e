"""All ranks begin with the same parameters: compared by a hash, and sent only where they differ.

Ranks that share a seed, or have restored the same checkpoint, hold the same parameters already. A hash of all of them
shows that with one collective of 32 bytes, where torch would send every parameter from rank 0. Where they differ, all
go out, small ones together in large buckets.

What is compared and sent are the plain tensors of a module, parameters and buffers, of which every rank holds all.
Tensors of a class of their own are left out, since ranks rightly hold different parts of them: `DTensor`,
`ShardedTensor`, the flat parameters of FSDP, TorchRec's tables. So is what DDP was told to ignore.

Typical use::

    model = data_parallel(Model())
"""

import ctypes
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from headway.errors import InputError
from headway.run import current

BUCKET_BYTES = 32 << 20
"""So much of small tensors goes out at a time."""
ALONE_BYTES = 4 << 20
"""Tensors from this size on go out by themselves: packing them would take longer than the collective it saves."""

_CHUNK_BYTES = 64 << 20
"""So much of a tensor on a device is copied to the host at a time, to be hashed."""

Named = dict[str, torch.Tensor]
Given = nn.Module | torch.Tensor | Iterable[nn.Module | torch.Tensor]


class Compared(Enum):
    """How the ranks' tensors compare."""

    SAME = "same"
    OTHER_CONTENTS = "other contents"
    OTHER_SHAPES = "other names, shapes or types"


def broadcast_parameters(given: Given, src: int = 0, group: Any = None) -> None:
    """Has every rank hold the parameters and buffers of rank `src`, bit for bit. `given` is a module, a tensor, or
    several of them. One small collective shows that they fit together, and few large ones send them."""
    named = tensors(given)
    if _size(group) < 2:
        return
    _check_source(src, group)
    if not _agreed([_layout_hash(named)], group)[0]:
        raise _unlike(_explained(named, Compared.OTHER_SHAPES, group))
    _send(named, src, group)


def same_parameters(given: Given, group: Any = None) -> bool:
    """Whether all ranks hold the same parameters and buffers, bit for bit, under the same names: one small collective.

    `difference` says which are not."""
    return _compared(tensors(given), group) is Compared.SAME


def difference(given: Given, group: Any = None) -> str:
    """Which parameter is the first that not all ranks hold alike, and on which ranks it is another than on the first;
    empty if there is none."""
    named = tensors(given)
    return _explained(named, _compared(named, group), group)


def synchronised(given: Given, src: int = 0, group: Any = None) -> bool:
    """Has every rank hold the parameters and buffers of rank `src`. True if they did already: nothing else was sent."""
    named = tensors(given)
    _check_source(src, group)
    if (found := _compared(named, group)) is Compared.SAME:
        return _told(named, "")
    why = _explained(named, found, group)
    if found is Compared.OTHER_SHAPES:
        raise _unlike(why)
    _send(named, src, group)
    return _told(named, why)


def data_parallel(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """The module in DDP, which sends its parameters from rank 0 only if a hash shows that they are not the same.

    `options` are those of DDP. A module with tensors that are left out here is synchronised by DDP, as ever.
    """
    if "init_sync" in options or _left_out(module):
        return DistributedDataParallel(module, **options)
    mesh = options.get("device_mesh")
    group = options.get("process_group") if mesh is None else mesh.get_group()
    # Ranks that train different parameters would wait for each other's gradients: DDP finds that when it sends.
    named = {f"{name} (frozen)" if _is_frozen(each) else name: each for name, each in tensors(module).items()}
    same = _told(named, _explained(named, _compared(named, group), group))
    return DistributedDataParallel(module, **options, init_sync=not same)


# --- which tensors ---------------------------------------------------------------------------------------------------


def tensors(given: Given) -> Named:
    """What is compared and sent: the plain tensors, by name. InputError for one that has no contents yet."""
    if isinstance(given, nn.Module):
        found = {name: tensor for name, tensor in _all(given) if _is_plain(tensor)}
    else:
        found = {}
        for at, each in enumerate([given] if isinstance(given, torch.Tensor) else given):
            own = {"": each} if isinstance(each, torch.Tensor) else tensors(each)
            found |= {f"{at}.{name}".rstrip("."): tensor for name, tensor in own.items()}
    for name, tensor in found.items():
        if is_lazy(tensor) or tensor.is_meta:
            raise InputError(f"{name} holds nothing yet: build the module on its device, or run a lazy layer once.")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise InputError(f"{name} is sparse or quantised: only dense tensors can be compared and sent.")
    return found


def _all(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for named in (module.named_parameters(), module.named_buffers()):
        yield from ((name, tensor) for name, tensor in named if name not in ignored)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) or is_lazy(tensor)


def _is_frozen(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def _left_out(module: nn.Module) -> bool:
    return any(not _is_plain(tensor) for _, tensor in _all(module))


# --- comparing -------------------------------------------------------------------------------------------------------


def _compared(named: Named, group: Any) -> Compared:
    if _size(group) < 2:
        return Compared.SAME
    hashes = b"".join(number.to_bytes(8, "little") for number in _hashes(named))
    same_layout, same_contents = _agreed([_layout_hash(named), xxhash.xxh3_64_intdigest(hashes)], group)
    if not same_layout:
        return Compared.OTHER_SHAPES
    return Compared.SAME if same_contents else Compared.OTHER_CONTENTS


def _explained(named: Named, found: Compared, group: Any) -> str:
    """The first difference. Every rank has to ask, and all of them learn it."""
    if found is Compared.SAME:
        return ""
    if found is Compared.OTHER_SHAPES:
        return _first_line(_layout(named), group)
    mine = _on_wire([_signed(number) for number in _hashes(named)], group)
    gathered = [torch.empty_like(mine) for _ in range(_size(group))]
    dist.all_gather(gathered, mine, group=group)
    rows = torch.stack(gathered).cpu()
    at = int((rows != rows[0]).any(0).nonzero()[0])
    return f"{list(named)[at]} holds {_against(rows[:, at].tolist(), group)}"


def _first_line(layout: list[str], group: Any) -> str:
    """What is declared first in another way."""
    gathered: list[list[str]] = [[] for _ in range(_size(group))]
    dist.all_gather_object(gathered, layout, group=group)
    longest = max(map(len, gathered))
    rows = [[*lines, *["nothing"] * (longest - len(lines))] for lines in gathered]
    at = next(at for at in range(longest) if len({row[at] for row in rows}) > 1)
    said = [row[at] for row in rows]
    other = next(line for line in said if line != said[0])
    return f"tensor {at} is {said[0]} or {other}: {_against(said, group)}"


def _against(said: list[Any], group: Any) -> str:
    """On which ranks something is another than on the first."""
    ranks = _ranks(group)
    others = [str(rank) for rank, each in zip(ranks, said, strict=True) if each != said[0]]
    some = ", ".join(others[:8]) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
    return f"something else on rank{'s' * (len(others) > 1)} {some} than on rank {ranks[0]}"


def _agreed(numbers: list[int], group: Any) -> list[bool]:
    """Of each number whether it is the same on all ranks. The greatest of `~x` is the complement of the least `x`."""
    signed = [_signed(number) for number in numbers]
    greatest = _on_wire(signed + [~number for number in signed], group)
    dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
    found = greatest.tolist()
    return [high == ~low for high, low in zip(found, found[len(numbers) :], strict=False)]


def _layout(named: Named) -> list[str]:
    return [
        f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in named.items()
    ]


def _layout_hash(named: Named) -> int:
    return xxhash.xxh3_64_intdigest("\n".join(_layout(named)).encode())


def _hashes(named: Named) -> list[int]:
    """Of what each tensor holds: bytes, so that -0.0 is not 0.0, and one NaN not another."""
    return [_hash(_bytes(tensor)) for tensor in named.values()]


def _hash(flat: torch.Tensor) -> int:
    """On the host nothing is copied. From a device, chunk by chunk: not run where headway is developed."""
    found = xxhash.xxh3_64()
    for chunk in torch.split(flat, _CHUNK_BYTES):
        held = chunk.cpu()
        if held.numel():
            found.update((ctypes.c_ubyte * held.numel()).from_address(held.data_ptr()))
    return found.intdigest()


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


# --- sending ---------------------------------------------------------------------------------------------------------


def _send(named: Named, src: int, group: Any) -> None:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in named.values():
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    for each in by_device.values():
        for bucket in _buckets(sorted(each, key=lambda tensor: -tensor.element_size())):  # so that all are aligned
            _send_bucket(bucket, src, group)


def _buckets(each: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    yield from ([tensor] for tensor in each if tensor.nbytes >= ALONE_BYTES)
    bucket: list[torch.Tensor] = []
    held = 0
    for tensor in (tensor for tensor in each if tensor.nbytes < ALONE_BYTES):
        if bucket and held + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def _send_bucket(bucket: list[torch.Tensor], src: int, group: Any) -> None:
    pieces = [_bytes(tensor) for tensor in bucket]
    packed = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    dist.broadcast(packed, src, group=group)
    if dist.get_rank() == src:
        return
    for tensor, piece in zip(bucket, torch.split(packed, [piece.numel() for piece in pieces]), strict=True):
        if piece.data_ptr() != tensor.data_ptr():
            once = tuple(slice(None if stride else 1) for stride in tensor.stride())  # what was expanded is there once
            tensor[once].copy_(piece.view(tensor.dtype).view(tensor.shape)[once])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory, row by row; a copy only if it is not so already."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


# --- the group -------------------------------------------------------------------------------------------------------


def _size(group: Any) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def _check_source(src: int, group: Any) -> None:
    if _size(group) > 1 and src not in _ranks(group):
        raise InputError(f"rank {src}, whose parameters all should get, is not in the group: {_ranks(group)}.")


def _on_wire(numbers: list[int], group: Any) -> torch.Tensor:
    """The numbers where the group's backend can send them from."""
    on_host = "cpu" in dist.get_backend_config(group)
    return torch.tensor(
        numbers, dtype=torch.int64, device="cpu" if on_host else torch.accelerator.current_accelerator()
    )


def _unlike(why: str) -> InputError:
    return InputError(f"the ranks' tensors cannot be made the same: {why}. Build the same module on every rank.")


def _told(named: Named, why: str) -> bool:
    """Says whether parameters had to be sent, and why."""
    size = sum(tensor.nbytes for tensor in named.values())
    run = current()
    run.mark("synchronised", sent_bytes=size if why else 0, tensors=len(named), why=why)
    if why and run.rank == 0:
        print(f"headway: {size / 1e6:,.1f} MB of parameters are sent, since {why}.", file=sys.stderr, flush=True)
    return not why
