"""What is saved of a training job, under which names, and how it gets back into place.

The names are those of `torch.distributed.checkpoint.state_dict`: a parameter is called the same in the model and in the
optimizer, whatever wraps the model, and however many ranks there are. Torch's own functions find them anew each time,
which takes longer than the copy of a small state; here they are found once, and compared with torch's. Where the two do
not agree, torch's are used.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from headway.checkpoint.image import ShardedTensor
from headway.errors import InputError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


class TrainingState:
    """A model, its optimizers, and other things with a `state_dict`."""

    def __init__(self, model: nn.Module | None, optimizer: Any, parts: Mapping[str, Any]) -> None:
        self.model, self.parts = model, dict(parts)
        self.optimizers: list[Optimizer] = _listed(optimizer)
        self._as_they_say: dict[str, Any] = {}
        """What is saved by names of its own, which may differ between ranks."""
        if model is not None and _names_itself(model):
            if len(self.optimizers) > 1:
                raise InputError(
                    f"a {type(model).__name__} is saved with one optimizer: join them by TorchRec's CombinedOptimizer."
                )
            self._as_they_say = {"model": model}
            if self.optimizers:
                self._as_they_say["optimizer"] = self.optimizers[0]
            self.model, self.optimizers = None, []
        self._names = self._known_names()
        """Of parameters, by identity; None: torch is asked each time."""
        self._checked = False

    # --- out ---

    def capture(self) -> dict[str, Any]:
        """The state by name, with the very tensors that training goes on to change."""
        names = self._names
        if names is not None and any(id(parameter) not in names for parameter in self._parameters()):
            self._names = self._known_names()  # a group was added
        state: dict[str, Any] = {}
        if self.model is not None:
            state["model"] = self._model_state()
        parts = self._with_optimizer(_has_nested_state(self.optimizers))
        if self.optimizers and "optimizer" not in parts:
            state["optimizer"] = self._optimizer_state()
            self._check_names(state)
        state |= {name: each.state_dict() for name, each in self._as_they_say.items()}
        for name, part in parts.items():
            rest, tensors = _divided(part.state_dict())
            state |= {name: tensors, f"{_REST}.{name}": (rest,)} if tensors else {name: (rest,)}
        return state

    def _with_optimizer(self, is_whole: bool) -> dict[str, Any]:
        """The parts, and the optimizers among them if they are saved as a whole."""
        return self.parts | ({"optimizer": _Whole(self.optimizers)} if is_whole else {})

    def _known_names(self) -> dict[int, str] | None:
        if self.model is None:
            return None
        ours: dict[str, Any] = {_plain(name): value for name, value in self._prefixed(self.model.state_dict())}
        theirs: dict[str, Any] = get_model_state_dict(self.model)
        if ours.keys() != theirs.keys() or not all(_is_same(ours[name], theirs[name]) for name in ours):
            return None
        named = {id(value): _plain(name) for name, value in self._prefixed(dict(self.model.named_parameters()))}
        known = all(id(parameter) in named for parameter in self._parameters())
        return named if known and set(named.values()) <= ours.keys() else None

    def _prefixed(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Names without the prefix of a wrapper around the whole model."""
        prefix = "module." if isinstance(self.model, nn.parallel.DistributedDataParallel) else ""
        for name, value in values.items():
            yield name.removeprefix(prefix), value

    def _parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _model_state(self) -> dict[str, Any]:
        assert self.model is not None
        if self._names is None:
            return get_model_state_dict(self.model)
        return {_plain(name): value for name, value in self._prefixed(self.model.state_dict())}

    def _optimizer_state(self) -> dict[str, Any]:
        assert self.model is not None
        names = self._names
        if names is None:
            return get_optimizer_state_dict(self.model, self.optimizers)
        state: dict[str, Any] = {"state": {}, "param_groups": []}
        for optimizer in self.optimizers:
            state["state"] |= {names[id(parameter)]: values for parameter, values in optimizer.state.items()}
            for group in optimizer.param_groups:
                state["param_groups"].append(group | {"params": [names[id(each)] for each in group["params"]]})
        return state

    def _check_names(self, state: dict[str, Any]) -> None:
        """Compares the optimizers' state with torch's, once."""
        if self._checked or self._names is None or not state.get("optimizer", {}).get("state"):
            return  # without any state torch would have the optimizer take a step
        assert self.model is not None
        self._checked = True
        theirs = get_optimizer_state_dict(self.model, self.optimizers)
        if not _is_alike(state["optimizer"], theirs):
            self._names, state["optimizer"] = None, theirs

    # --- in ---

    def template(self, metadata: Metadata, names_fit: bool = True) -> dict[str, Any]:
        """The state to load into. Tensors that training has are loaded in place; an optimizer that has none yet gets
        new ones, with nothing in them, so that they are written to once. If `names_fit`, they will be compared with
        those that were saved, and need not be with torch's."""
        state: dict[str, Any] = {}
        if self.model is not None:
            state["model"] = self._model_state()
        parts = self._with_optimizer(f"{_REST}.optimizer" in metadata.state_dict_metadata)
        if self.optimizers and "optimizer" not in parts:
            new = self._new_optimizer_state(metadata)
            state["optimizer"] = new or self._optimizer_state()
            if not new and not names_fit:
                self._check_names(state)
        for name, each in self._as_they_say.items():
            state[name] = each.state_dict()
            if absent := _without_state(each, state[name], metadata):
                raise InputError(
                    f"the optimizer has no state of {', '.join(absent[:3])} yet that could be loaded: call its "
                    f"init_state() before restore()."
                )
        for name, part in parts.items():
            state[name] = ()
            if f"{_REST}.{name}" in metadata.state_dict_metadata:
                saved, start = metadata.state_dict_metadata, len(name) + 1
                saved = {key[start:]: each for key, each in saved.items() if key.startswith(f"{name}.")}
                live = _divided(part.state_dict())[1]
                state[name] = {key: _room(key, saved, live) for key in saved}
                state[f"{_REST}.{name}"] = ()
        return state

    def _new_optimizer_state(self, metadata: Metadata) -> dict[str, Any] | None:
        if self._names is None or any(optimizer.state for optimizer in self.optimizers):
            return None
        parameters = {self._names[id(parameter)]: parameter for parameter in self._parameters()}
        new: dict[str, Any] = {"state": {}, "param_groups": []}
        for name, path in metadata.planner_data.items():
            if path[:2] == ("optimizer", "state") and len(path) == 4:
                made = _empty(metadata.state_dict_metadata[name], parameters.get(path[2]))
                if made is None:
                    return None
                new["state"].setdefault(path[2], {})[path[3]] = made[0]
            elif path[:2] == ("optimizer", "state"):
                return None
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                new["param_groups"].append(group | {"params": [self._names[id(each)] for each in group["params"]]})
        return new

    def apply(self, state: Mapping[str, Any]) -> None:
        """Puts what was loaded into place, as far as it is not there already."""
        if self.model is not None and self._names is None:  # else it is the very memory of the model
            live = self._model_state()
            if not all(_is_same(value, live.get(name)) for name, value in state["model"].items()):
                set_model_state_dict(self.model, dict(state["model"]))
        parts = self._with_optimizer(f"{_REST}.optimizer" in state)
        if self.optimizers and "optimizer" not in parts:
            self._apply_optimizer(state["optimizer"])
        for name, each in self._as_they_say.items():
            each.load_state_dict(state[name])
        for name, part in parts.items():
            tensors = state[name] if f"{_REST}.{name}" in state else {}
            part.load_state_dict(_joined(state[f"{_REST}.{name}"][0] if tensors else state[name][0], tensors))

    def _apply_optimizer(self, state: Mapping[str, Any]) -> None:
        assert self.model is not None
        if self._names is None:
            set_optimizer_state_dict(self.model, self.optimizers, dict(state))
            return
        divided = [(optimizer, self._saved_groups(optimizer, state)) for optimizer in self.optimizers]
        if any(groups is None for _, groups in divided):
            set_optimizer_state_dict(self.model, self.optimizers, dict(state))
            return
        for optimizer, groups in divided:
            numbers = {name: number for number, name in enumerate(self._names_in(optimizer))}
            saved = {numbers[name]: values for name, values in state["state"].items() if name in numbers}
            optimizer.load_state_dict({"state": saved, "param_groups": groups})

    def _saved_groups(self, optimizer: Optimizer, state: Mapping[str, Any]) -> list[Any] | None:
        """The saved groups in the optimizer's order, by the names in them; None if they are divided otherwise."""
        assert self._names is not None
        found, first = [], 0
        for group in optimizer.param_groups:
            names = {self._names[id(parameter)] for parameter in group["params"]}
            like = [saved for saved in state["param_groups"] if set(saved["params"]) == names]
            if len(like) != 1:
                return None
            found.append(like[0] | {"params": list(range(first, first + len(group["params"])))})
            first += len(group["params"])
        return found

    def _names_in(self, optimizer: Optimizer) -> list[str]:
        assert self._names is not None
        return [self._names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


class _Whole:
    """Optimizers whose state does not divide into one value per parameter and name, such as LBFGS with its history.
    They are saved by their own `state_dict`, which is the same on all ranks unless parameters are sharded."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def state_dict(self) -> dict[str, Any]:
        for optimizer in self._optimizers:
            if any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"]):
                raise InputError(
                    f"{type(optimizer).__name__} cannot be saved with sharded parameters: it keeps lists in its state, "
                    f"which nothing divides among ranks. Use an optimizer with one state per parameter."
                )
        return {str(number): optimizer.state_dict() for number, optimizer in enumerate(self._optimizers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for number, optimizer in enumerate(self._optimizers):
            optimizer.load_state_dict(state[str(number)])


def _has_nested_state(optimizers: Sequence[Optimizer]) -> bool:
    """Whether an optimizer keeps lists or dicts for a parameter; for its first one, if for any."""
    firsts: list[dict[str, Any]] = [next(iter(each.state.values()), {}) for each in optimizers]
    return any(isinstance(value, list | tuple | dict) for state in firsts for value in state.values())


def _names_itself(model: nn.Module) -> bool:
    """Whether a model has names of its own for what it holds, the same on any number of ranks, which torch cannot find
    in its modules: TorchRec's `DistributedModelParallel`. It and its optimizers are saved as they say."""
    return any(each.__module__.startswith("torchrec.distributed.") for each in type(model).__mro__)


def _without_state(optimizer: Any, state: Mapping[str, Any], metadata: Metadata) -> list[str]:
    """Parameters of a keyed optimizer of which it has no state yet, while the checkpoint has."""
    known = state.get("state", {})
    saved = {path[2] for path in metadata.planner_data.values() if path[:2] == ("optimizer", "state") and path[2:]}
    return [name for name in getattr(optimizer, "params", ()) if name in saved and not known.get(name)]


def _listed(optimizer: Any) -> list[Optimizer]:
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _is_same(one: Any, other: Any) -> bool:
    """Whether both are the same memory."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    if type(one) is not type(other):
        return False
    if hasattr(one, "local_shards"):  # as TorchRec has them
        return _shards(one) == _shards(other)
    return one.shape == other.shape and _memory(one) == _memory(other)


def _shards(tensor: Any) -> list[tuple[int, int]]:
    return [_memory(shard.tensor) for shard in tensor.local_shards()]


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return (local.data_ptr(), local.numel()) if local.numel() else (0, 0)


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_alike, one, other))
    return _is_same(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def _empty(saved: Any, parameter: torch.Tensor | None) -> tuple[Any] | None:
    """Room for a value of an optimizer's state; None if only the optimizer itself can make it."""
    if not isinstance(saved, TensorStorageMetadata):
        return (None,)
    if not saved.size:
        return (torch.empty((), dtype=saved.properties.dtype),)
    if parameter is None or saved.size != parameter.shape:
        return None
    return (torch.empty_like(parameter, dtype=saved.properties.dtype, requires_grad=False),)


_REST = "headway.parts"
_TENSOR, _LITERAL = "headway.tensor", "headway.literal"


def check_part(name: str, part: Any) -> None:
    """InputError if something cannot be saved under that name."""
    if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
        raise InputError(f"{name} cannot be saved: it has no state_dict and load_state_dict.")
    if "." in name or name == "headway":
        raise InputError(f"{name!r} is no name for a part: it may have no dots, and must not be headway's own.")


def _divided(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A state's tensors by their paths, and the rest with those paths in their place: one value, whatever its structure
    becomes, that keeps numbers for keys. Tensors that are more than their bytes stay in the rest, and are pickled."""
    tensors: dict[str, torch.Tensor] = {}

    def rest(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor) and _is_plain(value):
            path = _unused(path, tensors)
            tensors[path] = value
            return {_TENSOR: path}
        if isinstance(value, torch.Tensor) and value.is_nested and value.layout == torch.strided:
            raise InputError(
                f"{path} is a nested tensor of the strided layout, which torch cannot read back. Use torch.jagged."
            )
        if type(value) in (dict, OrderedDict):
            made = type(value)((key, rest(part, f"{path}.{key}" if path else str(key))) for key, part in value.items())
            return {_LITERAL: made} if made.keys() in ({_TENSOR}, {_LITERAL}) else made
        if type(value) in (list, tuple):
            return type(value)(rest(part, f"{path}.{number}") for number, part in enumerate(value))
        return value

    return rest(state, ""), tensors


def _unused(path: str, tensors: Mapping[str, Any]) -> str:
    """The path, with a number where another tensor has the same: `{"a.b": …, "a": {"b": …}}`, or `1` and `"1"`."""
    numbered = (f"{path}#{number}" for number in count(2))
    return next(name for name in chain([path], numbered) if name not in tensors)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether torch saves a tensor by its bytes, or knows how to divide it among ranks."""
    if isinstance(tensor, DTensor | ShardedTensor):
        return True
    is_wrapper = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return not (is_wrapper or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested)


def _joined(rest: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if type(rest) in (dict, OrderedDict):
        if rest.keys() == {_TENSOR}:
            return tensors[rest[_TENSOR]]
        found = rest[_LITERAL] if rest.keys() == {_LITERAL} else rest
        return type(found)((key, _joined(part, tensors)) for key, part in found.items())
    if type(rest) in (list, tuple):
        return type(rest)(_joined(part, tensors) for part in rest)
    return rest


def _room(name: str, saved: Mapping[str, Any], live: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Where to load a tensor: in place, where there is one of its name and size."""
    found = live.get(name)
    path = name.partition("#")[0]
    if found is not None and found.shape == saved[name].size and f"{path}#2" not in saved:
        return found
    return torch.empty(saved[name].size, dtype=saved[name].properties.dtype)
