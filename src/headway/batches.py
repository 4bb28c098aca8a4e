"""What a batch looks like, without what is in it: enough to make up one that compiles to the same code.

Kept with the bundle, so that the next job can compile before its data has come.
"""

import json
from collections.abc import Mapping
from typing import Any

NAME = "batch.json"
_PLAIN = (bool, int, float, str, type(None))
_MOST_TEXT = 1000


def spec(batch: Any) -> Any:
    """The structure of a batch, for JSON: of each tensor its size, strides, type and device, and for integers the range
    they are in (they may be indices). Raises TypeError for something that cannot be made up."""
    if hasattr(batch, "dtype") and hasattr(batch, "stride"):
        return _tensor(batch)
    if isinstance(batch, Mapping):
        return {"mapping": [[_plain(key), spec(value)] for key, value in batch.items()], "type": _kind(batch)}
    if isinstance(batch, list | tuple):
        return {"sequence": [spec(value) for value in batch], "type": _kind(batch)}
    return {"value": _plain(batch)}


def as_bytes(batch: Any) -> bytes:
    """The spec as a member of a bundle."""
    return json.dumps(spec(batch), sort_keys=True).encode()


def _tensor(tensor: Any) -> dict[str, Any]:
    told = {
        "tensor": list(tensor.shape), "strides": list(tensor.stride()), "dtype": str(tensor.dtype),
        "device": tensor.device.type,
    }  # fmt: skip
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.numel():
        told["range"] = [int(tensor.min()), int(tensor.max())]
    return told


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _plain(value: Any) -> Any:
    if not isinstance(value, _PLAIN) or (isinstance(value, str) and len(value) > _MOST_TEXT):
        raise TypeError(f"{_kind(value)} cannot be made up from a description")
    return value
