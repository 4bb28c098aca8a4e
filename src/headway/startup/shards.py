"""Metadata of sharded tensors, made of what every rank knows already: nothing is sent.

Torch gathers a description of each shard from every rank to learn how a tensor is divided. Where a plan or a spec says
that, each rank can work it out by itself.

Typical use::

    with local_shard_metadata():
        model = DistributedModelParallel(model, plan=plan, sharders=sharders)
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec, ShardingSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from headway.errors import InputError
from headway.startup.words import say_once

KNOWN = ("1.8.",)
"""Versions of TorchRec whose metadata was compared with ours, field by field."""

_KERNELS = frozenset(["dense", "fused"])
_TYPES = frozenset(["FP32", "FP16", "BF16"])
_SIGNATURES = {
    "_initialize_torch_state": ["self", "skip_registering"],
    "_init_from_local_shards": ["local_shards", "global_size", "process_group", "init_rrefs"],
    "_init_from_local_shards_and_global_metadata": ["local_shards", "sharded_tensor_metadata", "process_group"],
}
_sharding: ContextVar[Any] = ContextVar("the collection that is being sharded", default=None)
_lock = threading.Lock()
_users = 0
_undo = ExitStack()


# --- plain torch -----------------------------------------------------------------------------------------------------


def sharded_tensor(
    local_shards: list[Shard], spec: ShardingSpec, size: Sequence[int], *,
    properties: TensorProperties | None = None, group: dist.ProcessGroup | None = None,
) -> ShardedTensor:  # fmt: skip
    """What torch's `init_from_local_shards` makes of the same shards, without a collective.

    `spec` says which rank has what, and is the same everywhere. A rank that holds no shard has to be told by
    `properties` what kind of tensor it is.
    """
    if properties is None:
        if not local_shards:
            raise InputError(
                "this rank has no shard, and so cannot know what kind of tensor the others have. Give `properties`."
            )
        properties = TensorProperties.create_from_tensor(local_shards[0].tensor)
    shape = torch.Size(size)
    found = spec.build_metadata(shape, properties).shards_metadata
    # The order in which torch gathers them: by rank, and as the spec has them within one.
    shards = sorted(found, key=lambda shard: _rank(shard.placement))
    mine = [shard for shard in shards if _rank(shard.placement) == dist.get_rank()]
    held = [shard.metadata for shard in local_shards]
    if held != mine:
        raise InputError(
            f"rank {dist.get_rank()} holds {_parts(held)} of the tensor of size {list(shape)}, and its spec says "
            f"{_parts(mine)}. All ranks need the same spec, and each its own shards in the order of it."
        )
    metadata = ShardedTensorMetadata(shards, shape, properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(local_shards, metadata, process_group=group)


def dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """The distributed tensor of that shape of which this rank has `local`, shards of uneven sizes included; without a
    collective."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    due, _ = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    if tuple(local.shape) != tuple(due) or not local.is_contiguous():
        raise InputError(
            f"rank {dist.get_rank()} has a part of shape {list(local.shape)}, where {list(due)} of {list(shape)}, "
            f"contiguous, is its own under {tuple(placements)}."
        )
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _rank(placement: Any) -> int:
    return int(placement.rank())


def _parts(shards: Sequence[Any]) -> str:
    found = [f"{shard.shard_sizes} at {shard.shard_offsets} ({shard.placement})" for shard in shards]
    return ", ".join(found) or "nothing"


# --- TorchRec's EmbeddingCollection ----------------------------------------------------------------------------------


def local_shard_metadata() -> ExitStack:
    """Has TorchRec shard an `EmbeddingCollection` without gathering from all ranks for each table, from now on.

    What is returned ends this with a `with` block, or with `close()`. Call it on all ranks or on none: whoever gathers
    waits for the others. For a TorchRec that is not known, or a table of a special kind (virtual, key-value, 2D), all
    stays as it is.
    """
    global _users
    ending = ExitStack()
    with _lock:
        if _users == 0:
            if problem := _problem():
                say_once(f"shard metadata is gathered from all ranks as ever: {problem}.", "local shard metadata")
                return ending
            _install()
        _users += 1
    ending.callback(_leave)
    return ending


def _problem() -> str:
    """Why TorchRec is left alone; empty if nothing speaks against it."""
    try:
        found = version("torchrec")
    except PackageNotFoundError:
        return "TorchRec is not installed"
    if not found.startswith(KNOWN):
        return f"TorchRec {found} is not known to headway, only {', '.join(f'{known}x' for known in KNOWN)}"
    from torchrec.distributed.embedding import ShardedEmbeddingCollection

    for name, expected in _SIGNATURES.items():
        call = getattr(ShardedEmbeddingCollection, name, None) or getattr(ShardedTensor, name, None)
        if call is None or list(inspect.signature(call).parameters)[: len(expected)] != expected:
            return f"{name} is not what it was when this was written"
    return ""


def _install() -> None:
    from torchrec.distributed.embedding import ShardedEmbeddingCollection

    own_state: Callable[..., None] = ShardedEmbeddingCollection._initialize_torch_state
    own_tensor = ShardedTensor.__dict__["_init_from_local_shards"]

    def _initialize_torch_state(self: Any, skip_registering: bool = False) -> None:
        token = _sharding.set(self)
        try:
            own_state(self, skip_registering)
        finally:
            _sharding.reset(token)

    def _init_from_local_shards(cls: Any, local_shards: list[Shard], *size: Any, **options: Any) -> Any:
        made = _made_locally(_sharding.get(), local_shards, options.get("process_group"))
        return own_tensor.__get__(None, cls)(local_shards, *size, **options) if made is None else made

    for owner, name, own, replacement in (
        (ShardedEmbeddingCollection, "_initialize_torch_state", own_state, _initialize_torch_state),
        (ShardedTensor, "_init_from_local_shards", own_tensor, classmethod(_init_from_local_shards)),
    ):
        _undo.callback(setattr, owner, name, own)
        setattr(owner, name, replacement)


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            _undo.close()


def _made_locally(collection: Any, local_shards: list[Shard], group: Any) -> ShardedTensor | None:
    """The tensor of the table these shards are of; None if no collection has them, or if it is of a special kind."""
    if collection is None:
        return None
    tables = collection._model_parallel_name_to_local_shards
    table = next((name for name, shards in tables.items() if shards is local_shards), None)
    if table is None or not _is_plain(collection, table):
        return None
    from torchrec.modules.embedding_configs import data_type_to_dtype

    spec = collection.module_sharding_plan[table].sharding_spec
    dtype = data_type_to_dtype(collection._table_name_to_config[table].data_type)
    size = collection._name_to_table_size[table]
    return sharded_tensor(local_shards, spec, size, properties=TensorProperties(dtype=dtype), group=group)


def _is_plain(collection: Any, table: str) -> bool:
    """Whether the plan says all that there is to know. It is the same on all ranks, and so is the answer."""
    from torchrec.distributed.types import ShardingEnv2D

    sharding, config = collection.module_sharding_plan[table], collection._table_name_to_config[table]
    return (
        isinstance(sharding.sharding_spec, EnumerableShardingSpec)
        and sharding.compute_kernel in _KERNELS
        and config.data_type.name in _TYPES
        and not config.use_virtual_table
        and not isinstance(collection._env, ShardingEnv2D)
    )
