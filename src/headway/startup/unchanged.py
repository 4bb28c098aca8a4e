"""A model that computes something which leaves no trace: what it holds, and what random numbers come next, stays as it
was, bit for bit.

Gradients are taken without being accumulated, so that nothing that waits for one wakes: no hook of DDP, no optimizer
inside the backward. Two kinds of module do more. `fully_shard` moves parameters around as gradients are accumulated, so
they are, and are taken away again. TorchRec's fused tables update themselves; they are left out of the backward, and
put back if a compiled graph includes them all the same.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.machine import free_memory, ranks_here
from headway.startup.randomness import put_back, states

SHARE = 0.25
"""Of the memory that is free, a copy of the state takes at most so much."""
_MOST_ITEMS = 10_000
_QUIET = {
    "require_backward_grad_sync": False, "require_forward_param_sync": False,
    "_static_graph_delay_allreduce_enqueued": True,
}  # fmt: skip
"""With these DDP sends nothing in a forward, prepares for no backward, and adds nothing to the graph."""


class CannotUndo(Exception):
    """Something in this model could not be put back."""


class Unchanged:
    """A model, and how it was."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._modules, self._tensors = _inside(models)
        self._fused = [module for module in self._modules if _is_fused(module)]
        self._is_sharded = any(_is_a(module, "FSDPModule") for module in self._modules)
        if any(_is_a(module, "FullyShardedDataParallel") for module in self._modules):
            raise CannotUndo("FullyShardedDataParallel keeps state of its own that could not be put back: fully_shard")
        if any(nn.parameter.is_lazy(tensor) for tensor in self._tensors):
            raise CannotUndo("the first batch decides how large its parameters are, and draws them")
        self._storages, self.keeps_all = self._kept()
        self.backward = self.keeps_all or not self._fused
        """Whether a backward can be undone; else there is only the forward."""
        if not self.backward and self._is_sharded:
            raise CannotUndo("its tables are too large to be kept twice, and fully_shard needs a backward")

    def _kept(self) -> tuple[list[torch.UntypedStorage], bool]:
        """What is to be copied: all, or without the parameters where that would take too much memory."""
        everything = _storages(self._tensors)
        if _fit(everything):
            return everything, True
        rest = _storages(tensor for tensor in self._tensors if not isinstance(tensor, nn.Parameter))
        if not _fit(rest):
            raise CannotUndo(f"its buffers are larger than {SHARE:.0%} of the free memory")
        return rest, False

    def compute(self, loss_of: Callable[[], torch.Tensor]) -> None:
        """Computes a loss and its gradients, and puts everything back, also after an error."""
        with self._kept_state(), self._quiet():
            loss = loss_of()
            if not isinstance(loss, torch.Tensor):
                raise TypeError(f"the forward must return the loss as a tensor, and returned {type(loss).__name__}")
            if not self.backward or not loss.requires_grad:
                return
            if self._is_sharded:
                loss.backward()  # type: ignore[no-untyped-call]
            elif leaves := self._leaves():
                torch.autograd.grad(loss, leaves, allow_unused=True)

    def _leaves(self) -> list[torch.Tensor]:
        """What gradients are taken of. Gradients of a fused table would be its update."""
        fused = {id(tensor) for module in self._fused for tensor in nn.Module.parameters(module)}
        return [t for t in self._tensors if t.requires_grad and t.is_leaf and id(t) not in fused]

    @contextmanager
    def _kept_state(self) -> Iterator[None]:
        random = states()
        copies = [storage.clone() for storage in self._storages]  # type: ignore[no-untyped-call]
        gradients = [(tensor, tensor.grad) for tensor in self._tensors if tensor.is_leaf]
        bound, hooks = list(_bound(self._modules)), list(_gradient_hooks(self._tensors))
        data, flags = _data(self._modules), list(_flags(self._modules))
        try:
            for tensor, _ in gradients:
                tensor.grad = None
            for calls, _ in hooks:
                calls.clear()
            yield
        finally:
            for calls, kept in hooks:
                calls.update(kept)
            for tensor, gradient in gradients:
                tensor.grad = gradient
            for module, name, value in flags:
                if vars(module).get(name) is not value and _is_filled(module, data, self._storages, copies):
                    vars(module)[name] = value
            for tensor, kept_data in data.values():
                if tensor.data_ptr() != kept_data.data_ptr():
                    tensor.data = kept_data
            for place, name, value in bound:
                if place.get(name) is not value:
                    place[name] = value
            for storage, copy in zip(self._storages, copies, strict=True):
                storage.copy_(copy)
            put_back(random)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """DDP as within its `no_sync`; and the next forward still sends what the first one does."""
        found = [module for module in self._modules if isinstance(module, DistributedDataParallel)]
        kept = [(module, name, vars(module)[name]) for module in found for name in _QUIET if name in vars(module)]
        try:
            for module, name, _ in kept:
                setattr(module, name, _QUIET[name])
            yield
        finally:
            for module, name, value in kept:
                setattr(module, name, value)


# --- what a model consists of ----------------------------------------------------------------------------------------


def _inside(models: Iterable[nn.Module]) -> tuple[list[nn.Module], list[torch.Tensor]]:
    """All modules and tensors, also those in lists and dictionaries: TorchRec keeps its tables in such."""
    seen, todo = dict[int, Any](), list[Any](models)
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        if isinstance(value, nn.Module):
            todo.extend(vars(value).values())
        elif isinstance(value, list | tuple | dict) and len(value) <= _MOST_ITEMS:
            todo.extend(value.values() if isinstance(value, dict) else value)
        elif hasattr(value, "local_shards"):  # a ShardedTensor refuses to be asked for anything else
            todo.extend(shard.tensor for shard in value.local_shards())
            continue
        elif not isinstance(value, torch.Tensor):
            continue
        seen[id(value)] = value
    found = list(seen.values())
    modules = [value for value in found if isinstance(value, nn.Module)]
    return modules, [value for value in found if isinstance(value, torch.Tensor)]


def _is_a(module: nn.Module, name: str) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, name, ()))


def _is_fused(module: nn.Module) -> bool:
    """Whether it is a table of fbgemm's that updates itself in its backward."""
    kind = type(module)
    return kind.__module__.startswith("fbgemm_gpu.") and kind.__name__.startswith(("SplitTable", "SSDTable"))


def _bound(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Buffers, counters and tensors by name: a forward may put another one in their place. Parts that are made when
    first needed come with a flag, and stay; so flags do."""
    for module in modules:
        for place in (vars(module), vars(module).get("_buffers", {})):
            for name, value in place.items():
                if isinstance(value, torch.Tensor | int | float) and not isinstance(value, bool):
                    yield place, name, value


_Data = dict[int, tuple[torch.Tensor, torch.Tensor]]


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    """The plain tensors of a module itself."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and type(tensor) in (torch.Tensor, nn.Parameter):
            yield tensor


def _data(modules: Iterable[nn.Module]) -> _Data:
    """Where the numbers of each tensor are: a forward may set its `data`."""
    return {id(tensor): (tensor, tensor.data) for module in modules for tensor in _own(module)}


def _flags(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, bool]]:
    for module in modules:
        if not _is_fused(module):
            yield from ((module, name, value) for name, value in vars(module).items() if isinstance(value, bool))


def _is_filled(module: nn.Module, data: _Data, storages: list[Any], copies: list[Any]) -> bool:
    """Whether a forward has changed the module's tensors. If it has set a flag as well, they are taken from the first
    batch, and have to be once more: the flag goes back with them."""
    kept = {storage.data_ptr(): copy for storage, copy in zip(storages, copies, strict=True)}
    for tensor in _own(module):
        storage = tensor.untyped_storage()
        if id(tensor) not in data or tensor.data_ptr() != data[id(tensor)][1].data_ptr():
            return True
        copy = kept.get(storage.data_ptr())
        if copy is not None and not torch.equal(*(torch.empty(0, dtype=torch.uint8, device=s.device).set_(s)
                                                  for s in (storage, copy))):  # fmt: skip
            return True
    return False


def _gradient_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[dict[int, Any], dict[int, Any]]]:
    """What is called after a gradient was accumulated: an optimizer, say. Private to torch: if it is gone, so is the
    way to keep `fully_shard` from calling it."""
    for tensor in tensors:
        if calls := getattr(tensor, "_post_accumulate_grad_hooks", None):
            yield calls, dict(calls)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The memory that the tensors lie in, each piece once."""
    found = {}
    for piece in (piece for tensor in tensors for piece in _pieces(tensor)):
        if piece.layout == torch.strided and piece.device.type != "meta":
            storage = piece.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage
    return list(found.values())


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors on this rank that a tensor consists of."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, torch.Tensor):  # and not the mesh that it is spread over
                yield from _pieces(part)
    else:
        yield tensor


# --- memory ----------------------------------------------------------------------------------------------------------


def _fit(storages: Iterable[torch.UntypedStorage]) -> bool:
    """Whether a copy of each has room beside it."""
    needed: dict[torch.device, int] = {}
    for storage in storages:
        needed[storage.device] = needed.get(storage.device, 0) + storage.nbytes()
    return all(size <= SHARE * free_bytes(device) for device, size in needed.items())


def free_bytes(device: torch.device) -> float:
    """The memory that this rank may still take, shared fairly with the other ranks of this node. Not known: none."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return 0.0
    return free_memory() / ranks_here()
