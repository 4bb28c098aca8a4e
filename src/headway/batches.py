"""What a batch looks like, without what is in it: enough to make up one that compiles to the same code.

A spec is kept with the compiled code or in headway's home, so that the next job can compile before its data has come.
It is read from a file: no class is imported because a spec names it, and none is called that does not look like what
the spec says of it.

Typical use::

    told = spec(batch)                     # JSON
    made_up = build(told, seed=0)          # the same structure, sizes and strides, other values
    misfits = differences(told, spec(next_batch))
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

NAME = "batch.json"
_PLAIN = (bool, int, float, str, type(None))
_MOST_TEXT = 1000
_MAPPINGS = ("builtins.dict", "collections.OrderedDict", "collections.UserDict",
             "transformers.tokenization_utils_base.BatchEncoding")  # fmt: skip
_SEQUENCES = ("builtins.list", "builtins.tuple")
_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter")
_JAGGED = "torchrec.sparse.jagged_tensor.JaggedTensor"
_KEYED = "torchrec.sparse.jagged_tensor.KeyedJaggedTensor"


def as_bytes(batch: Any) -> bytes:
    """The spec as a member of a bundle."""
    return json.dumps(spec(batch), sort_keys=True).encode()


# --- a batch, told -------------------------------------------------------------------------------------------------


def spec(batch: Any) -> Any:
    """The structure of a batch, for JSON: of each tensor its size, strides, type and device, and for integers the range
    they are in (they may be indices). Raises TypeError for something that cannot be made up."""
    kind = _kind(batch)
    if kind in (_JAGGED, _KEYED):
        return {"jagged": _jagged(batch, kind == _KEYED), "type": kind}
    if hasattr(batch, "dtype") and hasattr(batch, "stride"):
        return _tensor(batch)
    if isinstance(batch, Mapping) and kind in _MAPPINGS:
        return {"mapping": [[_plain(key), spec(value)] for key, value in batch.items()], "type": kind}
    if isinstance(batch, list | tuple) and kind in _SEQUENCES:
        return {"sequence": [spec(value) for value in batch], "type": kind}
    if (names := _fields(type(batch))) and "<locals>" not in kind:
        return {"fields": [[name, spec(getattr(batch, name))] for name in names], "type": kind}
    return {"value": _plain(batch)}


def _tensor(tensor: Any) -> dict[str, Any]:
    if _kind(tensor) not in _TENSORS or str(tensor.layout) != "torch.strided" or getattr(tensor, "is_quantized", False):
        raise TypeError(f"{_kind(tensor)} ({tensor.layout}) cannot be made up from a description")
    told = {
        "tensor": list(tensor.shape), "strides": list(tensor.stride()), "dtype": str(tensor.dtype),
        "device": tensor.device.type,
    }  # fmt: skip
    if tensor.requires_grad:
        told["requires_grad"] = True
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.numel():
        told["range"] = _range(tensor)
    return told


def _jagged(batch: Any, is_keyed: bool) -> dict[str, Any]:
    """Of each key how many values there are, and in which ranges they and the lengths are. Nothing is asked of the
    batch that it would keep: a batch that was looked at compiles as one that was not."""
    if is_keyed and (batch._stride_per_key_per_rank is not None or batch.inverse_indices_or_none() is not None):
        raise TypeError("a KeyedJaggedTensor with a batch size for each key cannot be made up from a description")
    lengths, offsets = batch.lengths_or_none(), batch.offsets_or_none()
    each = lengths if lengths is not None else offsets.diff()
    keys = list(batch.keys()) if is_keyed else [""]
    values, weights, parts, at = batch.values(), batch.weights_or_none(), [], 0
    for part in each.reshape(len(keys), -1) if keys else []:
        total = int(part.sum())
        mine = values[at : at + total]
        is_index = total and not values.dtype.is_floating_point
        parts.append([total, _range(part) if part.numel() else [0, 0], _range(mine) if is_index else [0, 0]])
        at += total
    return {
        "keys": keys, "stride": batch._stride if is_keyed else None, "rows": each.numel() // max(len(keys), 1),
        "parts": parts, "values": _tensor(values), "weights": None if weights is None else _tensor(weights),
        "lengths": None if lengths is None else str(lengths.dtype),
        "offsets": None if offsets is None else str(offsets.dtype),
    }  # fmt: skip


def _range(tensor: Any) -> list[int]:
    return [int(tensor.min()), int(tensor.max())]


def _fields(kind: type) -> list[str]:
    """The names of what a dataclass or a named tuple is made with, in order; none if it is neither."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind) if field.init]
    names = getattr(kind, "_fields", ())
    return list(names) if issubclass(kind, tuple) and hasattr(kind, "_make") else []


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _plain(value: Any) -> Any:
    if not isinstance(value, _PLAIN) or (isinstance(value, str) and len(value) > _MOST_TEXT):
        raise TypeError(f"{_kind(value)} cannot be made up from a description")
    return value


# --- a batch, made up ----------------------------------------------------------------------------------------------


def build(spec: Any, seed: int = 0) -> Any:
    """A batch of that structure, with values that are valid: finite floats, integers in their ranges. No generator but
    its own is used. Raises ValueError if the spec is none, or a class it names is not to be had."""
    import torch

    try:
        return _made(spec, torch.Generator().manual_seed(seed))
    except (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"no batch can be made up from this spec ({type(error).__name__}: {error})") from error


def _made(told: Mapping[str, Any], random: Any) -> Any:
    if "tensor" in told:
        return _made_tensor(told, random)
    if "jagged" in told:
        return _made_jagged(told["jagged"], _class(told["type"], (_JAGGED, _KEYED)), random)
    if "mapping" in told:
        pairs = {key: _made(value, random) for key, value in told["mapping"]}
        return _class(told["type"], _MAPPINGS)(pairs)
    if "sequence" in told:
        return _class(told["type"], _SEQUENCES)(_made(value, random) for value in told["sequence"])
    if "fields" in told:
        made = {name: _made(value, random) for name, value in told["fields"]}
        kind = _class(told["type"])
        if _fields(kind) != list(made):
            raise ValueError(f"{told['type']} has other fields than on the run that was recorded")
        return kind(**made)
    return _plain(told["value"])


def _class(name: str, known: tuple[str, ...] = ()) -> Any:
    """The class of that name, if something has imported it already; one of `known`, where those are all."""
    parts = name.split(".")
    for at in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:at]))
        for part in parts[at:]:
            found = vars(found).get(part) if isinstance(found, type | ModuleType) else None
        if isinstance(found, type) and (name in known or (not known and _fields(found))):
            return found
    raise ValueError(f"{name} is not imported, or is no class that a batch can be made of")


def _made_tensor(told: Mapping[str, Any], random: Any) -> Any:
    import torch

    size, strides = [int(each) for each in told["tensor"]], [int(each) for each in told["strides"]]
    dtype = _dtype(told["dtype"])
    own = [1 if stride == 0 else length for length, stride in zip(size, strides, strict=True)]
    tensor = torch.empty_strided(own, strides, dtype=dtype)
    tensor.copy_(_values(own, dtype, told.get("range", [0, 1]), random))
    tensor = tensor.expand(size) if own != size else tensor
    tensor = tensor if told["device"] == "cpu" else tensor.to(told["device"])
    return tensor.requires_grad_(True) if told.get("requires_grad") else tensor


def _dtype(name: str) -> Any:
    import torch

    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no type of numbers")
    return found


def _values(size: list[int], dtype: Any, limits: list[int], random: Any) -> Any:
    """Floats from 0 up to 1: labels and probabilities may be so much, and logarithms and square roots can be taken."""
    import torch

    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(size, generator=random)
    lowest, highest = (int(limit) for limit in limits)
    return torch.randint(lowest, min(highest + 1, 2**63 - 1) if highest > lowest else lowest + 1, size,
                         generator=random, dtype=torch.int64)  # fmt: skip


def _made_jagged(told: Mapping[str, Any], kind: Any, random: Any) -> Any:
    import torch

    rows, parts = int(told["rows"]), told["parts"]
    each = [length for total, limits, _ in parts for length in _lengths(rows, total, limits, random)]
    lengths = torch.tensor(each, dtype=torch.int64)
    values = _made_tensor(told["values"], random)
    if not values.is_floating_point() and parts:
        size = list(values.shape[1:])
        values.copy_(torch.cat([_values([total, *size], torch.int64, limits, random) for total, _, limits in parts]))
    given = {
        "values": values,
        "weights": _made_tensor(told["weights"], random) if told["weights"] else None,
        "lengths": lengths.to(_dtype(told["lengths"]), copy=True) if told["lengths"] else None,
        "offsets": _offsets(lengths).to(_dtype(told["offsets"])) if told["offsets"] else None,
    }
    given = {name: value if value is None else value.to(told["values"]["device"]) for name, value in given.items()}
    is_keyed = kind.__name__ == "KeyedJaggedTensor"
    return kind(keys=list(told["keys"]), stride=told["stride"], **given) if is_keyed else kind(**given)


def _lengths(rows: int, total: int, limits: list[int], random: Any) -> list[int]:
    """So many lengths that come to the total: the shortest and the longest are there, since what is padded is as long
    as the longest."""
    import torch

    lowest, highest = limits
    ends = [highest, lowest] if rows > 1 else [total] * rows
    rest, left = rows - len(ends), total - sum(ends)
    others = [left // rest + (at < left % rest) for at in range(rest)] if rest else []
    made = ends + others
    if sum(made) != total or any(length < 0 for length in made):
        raise ValueError(f"{rows} lengths from {lowest} to {highest} cannot come to {total}")
    return [made[at] for at in torch.randperm(rows, generator=random).tolist()]


def _offsets(lengths: Any) -> Any:
    import torch

    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


# --- two batches, compared -----------------------------------------------------------------------------------------


def differences(old: Any, new: Any) -> list[str]:
    """What of a batch is not as it was, in words: code that was compiled for the one does not serve the other. Values
    may be others, and in other ranges; so may the number of values in a jagged tensor, which differs from batch to
    batch."""
    try:
        return list(_misfits(old, new, "the batch"))
    except (AttributeError, KeyError, TypeError, ValueError):
        return ["what was told of the batch cannot be read"]


def _misfits(old: Any, new: Any, name: str) -> Iterator[str]:
    shape, other = _shape(old), _shape(new)
    if shape != other:
        yield f"{name} was {shape}, and is {other}"
    elif "jagged" in old:
        for part, value in old["jagged"].items():
            one, two = ((each or {}).get("dtype") if part in ("values", "weights") else each
                        for each in (value, new["jagged"].get(part)))  # fmt: skip
            if part != "parts" and one != two:
                yield f"the {part} of {name} were {one}, and are {two}"
    elif "sequence" in old:
        for at, (one, two) in enumerate(zip(old["sequence"], new["sequence"], strict=True)):
            yield from _misfits(one, two, f"{name}[{at}]")
    else:
        for part in ("mapping", "fields"):
            for (key, one), (_, two) in zip(old.get(part, ()), new.get(part, ()), strict=True):
                yield from _misfits(one, two, f"{name}[{key!r}]" if part == "mapping" else f"{name}.{key}")


def _shape(told: Any) -> str:
    """One level of a spec in words: all that compiled code depends on."""
    if not isinstance(told, dict):
        return "unreadable"
    if "tensor" in told:
        strides = "" if _is_dense(told) else f", strides {told['strides']}"
        grad = ", with a gradient" if told.get("requires_grad") else ""
        return f"{told['dtype'].removeprefix('torch.')} {told['tensor']} on {told['device']}{strides}{grad}"
    if "jagged" in told:
        return str(told["type"])
    if "value" in told:
        return type(told["value"]).__name__
    names = [key for part in ("mapping", "fields") for key, _ in told.get(part, ())]
    return f"{told.get('type')} of {names or len(told.get('sequence', ()))}"


def _is_dense(told: Mapping[str, Any]) -> bool:
    """Whether the strides are those that a tensor of that size has if nobody asks for others."""
    size, strides = told["tensor"], told["strides"]
    usual = [math.prod(max(length, 1) for length in size[at + 1 :]) for at in range(len(size))]
    return all(length < 2 or one == two for length, one, two in zip(size, strides, usual, strict=True))
