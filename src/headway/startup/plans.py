"""The sharding plan of a TorchRec model: found once, and read from a folder or an object store ever after.

::

    ROOT/<key>.json    a plan, and a hash of it

The key is made of all that a planner's result depends on. What is not understood has no key, and is planned each time.
The first rank reads or plans, and tells the others through the store that they have met through: all have the same
plan, whoever can read the folder, and no collective is needed.

Typical use::

    plan = sharding_plan(planner, model, sharders)
    model = DistributedModelParallel(model, plan=plan, sharders=sharders)
"""

import base64
import hashlib
import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from headway.config import Settings
from headway.errors import HeadwayError, InputError
from headway.events.vocabulary import Told, clean_text
from headway.run import current
from headway.startup.ranks import Difference, Ranks
from headway.startup.words import say_once
from headway.storage import open_storage

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan

FORMAT = 1

_PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")
_UNDERSTOOD = ("torchrec.", "fbgemm_gpu.")
"""Packages whose classes do the same wherever their versions are the same."""
_LEFT_OUT = {
    "EmbeddingShardingPlanner": "_stats _debug _num_proposals _num_plans _best_plan",
    "EmbeddingEnumerator":
        "_sharder_map _sharder_data_map _last_stored_search_space _last_stored_module _last_stored_sharders",
    "HeuristicalStorageReservation": "_dense_storage _kjt_storage _last_reserved_topology",
    "InferenceStorageReservation": "_dense_storage _kjt_storage _last_reserved_topology",
    "FixedPercentageStorageReservation": "_kjt_storage _last_reserved_topology",
    "FixedAbsoluteStorageReservation": "_kjt_storage _last_reserved_topology",
    "GreedyProposer": "_sharding_options_by_fqn _current_proposal",
    "UniformProposer": "_grouped_sharding_options _proposal_index",
    "GridSearchProposer": "_sharding_options_by_fqn _proposal_index _proposals",
    "EmbeddingBagConfig": "init_fn",
    "EmbeddingConfig": "init_fn",
}  # fmt: skip
"""Attributes no plan depends on: what an earlier one has left behind, what is only shown, and values of weights."""
_PLAIN = (bool, int, float, str, type(None))
_ENUMS = {"bounds_check_mode", "output_dtype"}
_SIMPLE = ("sharding_type", "compute_kernel", "ranks", "enforce_hbm", "stochastic_rounding")

_calls: Counter[tuple[int, ...]] = Counter()


class Unknown(Exception):
    """Something that cannot be described: what it does, and so what it would lead to, is not known."""


class Unfit(Exception):
    """A stored plan that is not to be used."""


def sharding_plan(
    planner: Any, module: nn.Module, sharders: Sequence[Any], group: dist.ProcessGroup | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> "ShardingPlan":  # fmt: skip
    """What `planner.collective_plan` returns: stored, if the same was planned before, else planned by the first rank,
    and stored. All ranks of the group call it. InputError, on all of them, if their models are not the same.

    `cache` is a folder or a URL; by default a folder below headway's home.
    """
    began, run = time.perf_counter(), current()
    if (ranks := _Group.of(group)) is None:
        say_once("torch does not show its store: sharding plans are made each time, and broadcast.")
        return planner.collective_plan(module, list(sharders), group)
    model = _described(lambda: _model(module, sharders))
    if ranks.size > 1 and (found := ranks.compare(_packed(model))):
        raise InputError(_difference(found.ranks, [_unpacked(word) for word in found.words]))
    plan, outcome = _found(planner, module, sharders, model, cache, ranks)
    seconds = round(time.perf_counter() - began, 4)
    run.mark(Told.SHARDING_PLAN, seconds=seconds, **{name: clean_text(text) for name, text in outcome.items()})
    if outcome["why"] and ranks.rank == 0:
        say_once(f"the sharding plan was {outcome['outcome']}: {outcome['why']}.")
    return plan


def _found(
    planner: Any, module: nn.Module, sharders: Sequence[Any], model: Any, cache: Any, ranks: "_Group"
) -> "tuple[ShardingPlan, dict[str, str]]":
    """The plan, the same on all ranks, and what became of it."""
    plan: Any = None
    if ranks.rank == 0:
        try:
            plan, outcome = _Cache(planner, module, sharders, model, cache).plan()
        except Exception as error:
            ranks.tell({"error": f"{type(error).__name__}: {error}"})
            ranks.part()
            raise
        try:
            ranks.tell({"plan": _encoded(plan), "outcome": outcome})
        except Unfit:
            ranks.tell({"outcome": outcome})
            plan = ranks.broadcast(plan)
        return plan, outcome
    told = ranks.hear()
    if "error" in told:
        ranks.part()
        raise HeadwayError(f"there is no sharding plan, since rank 0 could not make one: {told['error']}")
    return (_decoded(told["plan"]) if "plan" in told else ranks.broadcast(None)), told["outcome"]


# --- what is stored --------------------------------------------------------------------------------------------------


@dataclass
class _Cache:
    """What the first rank does."""

    planner: Any
    module: nn.Module
    sharders: Sequence[Any]
    model: Any
    url: str | os.PathLike[str] | None

    def plan(self) -> "tuple[ShardingPlan, dict[str, str]]":
        """The stored plan, or a new one; and `outcome`, `why` and `key`."""
        planned = _described(lambda: _plain(self.planner, "planner"))
        unknown = next((each["unknown"] for each in (self.model, planned) if "unknown" in each), "")
        if unknown:
            return self._made(), {"outcome": "planned", "why": f"it is not stored, since {unknown}", "key": ""}
        told = _text({"format": FORMAT, "model": self.model, "planner": planned})
        key, why = hashlib.sha256(told.encode()).hexdigest()[:32], ""
        try:
            storage = open_storage(self.url or _default_folder())
            return self._read(storage.read(f"{key}.json"), key), {"outcome": "hit", "why": "", "key": key}
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, HeadwayError, Unfit) as error:
            why = f"what is stored cannot be used ({error})"
        began = time.perf_counter()
        plan = self._made()
        try:
            limit_s = getattr(self.planner, "_timeout_seconds", None)
            if limit_s and time.perf_counter() - began >= limit_s:
                raise Unfit("its planner ran out of time")
            open_storage(self.url or _default_folder()).write(f"{key}.json", self._written(plan, key))
        except (OSError, HeadwayError, Unfit) as error:
            why = "; ".join(filter(None, (why, f"it is not stored ({error})")))
        return plan, {"outcome": "planned", "why": why, "key": key}

    def _made(self) -> "ShardingPlan":
        return self.planner.plan(self.module, list(self.sharders))

    def _written(self, plan: "ShardingPlan", key: str) -> bytes:
        body = {"key": key, "plan": _encoded(plan)}
        self._check(plan)
        return _text({"format": FORMAT, "hash": _hash(body), **body}).encode()

    def _read(self, data: bytes, key: str) -> "ShardingPlan":
        try:
            stored = json.loads(data)
            body = {"key": stored["key"], "plan": stored["plan"]}
            if stored["hash"] != _hash(body):
                raise Unfit("it is damaged: its hash is another one")
            plan = _decoded(stored["plan"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unfit(f"it is damaged: {type(error).__name__}: {error}") from error
        if stored["key"] != key:
            raise Unfit(f"it is the plan of another model or planner, with the key {stored['key']}")
        self._check(plan)
        return plan

    def _check(self, plan: "ShardingPlan") -> None:
        """Raises `Unfit` unless the plan divides each table of the model, whole, among ranks there are."""
        world = self.planner._topology.world_size
        found = {path: dict(sharder.shardable_parameters(each)) for path, each, sharder in self._shardable()}
        planned: dict[str, Any] = plan.plan
        if {path: {*tables} for path, tables in found.items()} != {path: {*each} for path, each in planned.items()}:
            raise Unfit("it has other tables than the model")
        for path, tables in planned.items():
            for table, sharding in tables.items():
                try:
                    _check_shards(sharding, found[path][table], world)
                except ValueError as error:
                    raise Unfit(f"it does not fit table {path}.{table}: {error}") from error

    def _shardable(self) -> Iterator[tuple[str, nn.Module, Any]]:
        kinds = {sharder.module_type: sharder for sharder in self.sharders}
        yield from _outermost("", self.module, kinds)


def _check_shards(sharding: Any, parameter: torch.Tensor, world: int) -> None:
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.types import ShardingType

    ShardingType(sharding.sharding_type)
    EmbeddingComputeKernel(sharding.compute_kernel)
    spec = sharding.sharding_spec
    ranks = [*(sharding.ranks or []), *(shard.placement.rank() for shard in (spec.shards if spec else []))]
    if any(not 0 <= rank < world for rank in ranks):
        raise ValueError(f"it is for ranks {sorted(set(ranks))}, and there are {world}")
    if spec is None and sharding.sharding_type != ShardingType.DATA_PARALLEL.value:
        raise ValueError("it does not say who has which part")
    if spec is not None and sharding.sharding_type != ShardingType.DATA_PARALLEL.value:
        spec.build_metadata(parameter.shape, TensorProperties(dtype=parameter.dtype))


def _encoded(plan: "ShardingPlan") -> dict[str, Any]:
    """The plan as JSON has it. Raises `Unfit` if something of it would be lost."""
    modules: dict[str, Any] = plan.plan
    try:
        told = {
            path: {table: _encoded_sharding(each) for table, each in tables.items()} for path, tables in modules.items()
        }
        same = _decoded(json.loads(_text(told))) == plan
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unfit(f"something in it has no place in a file: {type(error).__name__}: {error}") from error
    if not same:
        raise Unfit("something in it has no place in a file")
    return told


def _encoded_sharding(sharding: Any) -> dict[str, Any]:
    told = {name: getattr(sharding, name) for name in _SIMPLE}
    told |= {name: _name(getattr(sharding, name)) for name in sorted(_ENUMS)}
    if (spec := sharding.sharding_spec) is not None:
        told["shards"] = [[shard.shard_offsets, shard.shard_sizes, str(shard.placement)] for shard in spec.shards]
    if (params := sharding.cache_params) is not None:
        told["cache_params"] = {
            "algorithm": _name(params.algorithm), "load_factor": params.load_factor,
            "reserved_memory": params.reserved_memory, "precision": _name(params.precision),
            "prefetch_pipeline": params.prefetch_pipeline,
        }  # fmt: skip
    return told


def _decoded(told: dict[str, Any]) -> "ShardingPlan":
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan({table: _decoded_sharding(each) for table, each in tables.items()})
            for path, tables in told.items()
        }
    )


def _decoded_sharding(told: dict[str, Any]) -> Any:
    from torchrec.distributed import types

    spec, params = None, None
    if "shards" in told:
        spec = EnumerableShardingSpec([ShardMetadata(*shard) for shard in told["shards"]])
    if "cache_params" in told:
        given = told["cache_params"]
        params = types.CacheParams(
            **given
            | {
                "algorithm": _member(types.CacheAlgorithm, given["algorithm"]),
                "precision": _member(types.DataType, given["precision"]),
            }
        )
    return types.ParameterSharding(
        **{name: told[name] for name in _SIMPLE},
        sharding_spec=spec,
        cache_params=params,
        bounds_check_mode=_member(types.BoundsCheckMode, told["bounds_check_mode"]),
        output_dtype=_member(types.DataType, told["output_dtype"]),
    )


def _name(member: Enum | None) -> str | None:
    return None if member is None else member.name


def _member(kind: Any, name: str | None) -> Any:
    return None if name is None else kind[name]


# --- what a plan depends on ------------------------------------------------------------------------------------------


def _model(module: nn.Module, sharders: Sequence[Any]) -> dict[str, Any]:
    """All that a planner looks at: the tables with their settings, and the size of everything else."""
    kinds = {sharder.module_type: sharder for sharder in sharders}
    own = vars(nn.Module()).keys()
    tables = {
        path: {"class": _class_name(type(each))}
        | {name: _plain(value, f"{path}.{name}") for name, value in vars(each).items() if name not in own}
        for path, each, _ in _outermost("", module, kinds)
    }
    held = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {
        "versions": {name: _version(name) for name in _PACKAGES},
        "sharders": [_plain(sharder, "sharder") for sharder in sharders],
        "modules": tables,
        "tensors": {name: f"{list(each.shape)} {each.dtype}" for name, each in held},
    }


def _outermost(path: str, module: nn.Module, kinds: dict[type, Any]) -> Iterator[tuple[str, nn.Module, Any]]:
    """The modules that are sharded, as a planner goes about them: not what is inside of one."""
    if type(module) in kinds:
        yield path, module, kinds[type(module)]
        return
    for name, child in module.named_children():
        yield from _outermost(f"{path}.{name}" if path else name, child, kinds)


def _plain(value: Any, where: str) -> Any:
    """A value in terms of JSON. Raises `Unknown` for what is not made of numbers, texts, and TorchRec's own classes."""
    if isinstance(value, _PLAIN) and not isinstance(value, Enum):
        return value
    if isinstance(value, Enum):
        return f"{_class_name(type(value))}.{value.name}"
    if isinstance(value, torch.dtype | torch.device):
        return value.type if isinstance(value, torch.device) else str(value)
    if isinstance(value, list | tuple):
        return [_plain(each, f"{where}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted((_plain(each, where) for each in value), key=_text)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(each, f"{where}.{key}") for key, each in value.items()}
    name = _class_name(value if isinstance(value, type) else type(value))
    if isinstance(value, type) and name.startswith(_UNDERSTOOD):
        return name
    if isinstance(value, nn.Module | type) or not name.startswith(_UNDERSTOOD) or not hasattr(value, "__dict__"):
        raise Unknown(f"{where} is {name}, and it is not known what plan that leads to")
    left_out = _LEFT_OUT.get(type(value).__name__, "").split()
    parts = {key: each for key, each in vars(value).items() if key not in left_out}
    return {"class": name} | {key: _plain(each, f"{where}.{key}") for key, each in parts.items()}


def _described(describe: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = describe()
    except (Unknown, RuntimeError, RecursionError) as error:  # a lazy layer has no shape yet
        return {"unknown": str(error)}
    return found


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _hash(value: Any) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()


def _default_folder() -> str:
    known = Settings.variables()
    settings = Settings.from_environment({name: os.environ[name] for name in os.environ if name in known})
    return str(settings.home_folder / "plans")


# --- the other ranks -------------------------------------------------------------------------------------------------


class _Group:
    """The ranks of a group, the first of which tells the others something."""

    def __init__(self, ranks: Ranks, name: str = "", group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self._ranks, self._name, self._group = ranks.rank, ranks.size, ranks, name, group

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "_Group | None":
        """None if their store is not to be had."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(Ranks(0, 1, None))
        if (met := Ranks.met()) is None:
            return None
        members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store over a restart
        name = f"plan/{_hash(members)[:16]}/{attempt}/{_calls[members]}"
        _calls[members] += 1
        return cls(met.within(members), name, group)

    def compare(self, word: str) -> Difference | None:
        """Two of them that say different words; None if all say the same."""
        return self._ranks.compare(f"{self._name}/model", word)

    def tell(self, told: dict[str, Any]) -> None:
        self._ranks.tell(f"{self._name}/told", _packed(told))

    def hear(self) -> dict[str, Any]:
        return _unpacked(self._ranks.hear(f"{self._name}/told"))

    def part(self) -> None:
        """Waits until all have heard of an error."""
        self._ranks.linger(f"{self._name}/heard")

    def broadcast(self, plan: Any) -> Any:
        """For a plan that only pickle can take along, as TorchRec's own planner does."""
        held = [plan]
        if self.size > 1:
            dist.broadcast_object_list(held, group=self._group, group_src=0)
        return held[0]


def _packed(value: dict[str, Any]) -> str:
    return base64.b64encode(zlib.compress(_text(value).encode())).decode()


def _unpacked(word: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(word)))
    return found


def _difference(ranks: tuple[int, int], models: Sequence[dict[str, Any]]) -> str:
    """What two ranks have said of their models that is not the same, in order of the ranks."""
    (one, first), (other, second) = sorted(zip(ranks, models, strict=True), key=lambda each: each[0])
    found = [
        f"{path} is {_short(a)} on rank {one} and {_short(b)} on rank {other}"
        for path, a, b in _unlike("", first, second)
    ]
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    told = "; ".join(found[:3]) or "their parts come in another order"
    return (
        f"ranks {one} and {other} have different models: {told}{more}. One plan cannot be for both: "
        f"build the same model on every rank."
    )


def _unlike(path: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, list) and isinstance(other, list):
        one, other = ({f"[{i}]": each for i, each in enumerate(side)} for side in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from _unlike(f"{path}.{key}" if path else key, one.get(key, "missing"), other.get(key, "missing"))
    elif one != other:
        yield path, one, other


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else _text(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
