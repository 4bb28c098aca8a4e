"""Writes the weights of a checkpoint as safetensors, block by block, as they are read.

The format's own library wants all tensors of a file in memory at once. But a file is no more than the length of its
header, the header, which is JSON, and the tensors' bytes; so they are written here, in whatever order they come.
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from headway.errors import InputError
from headway.publish.pieces import Block, Weight
from headway.publish.shards import Shards, one_thread
from headway.storage import Progress, reserve

_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
_ALIGNMENT = 8
INDEX = "model.safetensors.index.json"
"""Tells which of several files has which tensor."""


def write_safetensors(
    shards: Shards, folder: Path, progress: Progress | None = None, max_bytes: int = 5_000_000_000
) -> dict[str, Any]:
    """Writes `model.safetensors`, or several files and their index if that were larger than `max_bytes`.

    Returns how many tensors, bytes and parameters there are, and how many values of which are NaN or infinite. If it
    raises, what is in the folder is worth nothing.
    """
    weights = list(shards.tensors.values())
    _check_types(weights)
    files = _named(list(_divided(weights, max_bytes)))
    nonfinite = dict.fromkeys((weight.name for weight in weights), 0)
    with one_thread(), ExitStack() as opened:
        put: dict[str, Callable[[Block], None]] = {}
        for name, its in files.items():
            file = opened.enter_context(_file(folder / name, its))
            put |= dict.fromkeys((weight.name for weight in its), file.put)
        for block in shards.blocks(progress=progress):
            put[block.weight.name](block)
            nonfinite[block.weight.name] += nonfinite_values(block.values)
    total = sum(weight.nbytes for weight in weights)
    if len(files) > 1:
        where = {weight.name: name for name, its in files.items() for weight in its}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return {
        "tensors": len(weights),
        "bytes": total,
        "parameters": sum(weight.parameters for weight in weights),
        "nonfinite": {name: count for name, count in nonfinite.items() if count},
    }


def nonfinite_values(values: torch.Tensor) -> int:
    """How many of them are NaN or infinite."""
    if not (values.is_floating_point() or values.is_complex()):
        return 0
    if values.dtype.itemsize == 1:  # such types can do little; but they have 256 values only
        codes = torch.arange(256, dtype=torch.uint8)
        bad = ~codes.view(values.dtype).float().isfinite()
        return int(torch.bincount(values.view(torch.uint8), minlength=256)[bad].sum())
    if values.sum().isfinite():  # none, then; many times faster than to look at each
        return 0
    return int((~values.isfinite()).sum())


def _check_types(weights: Iterable[Weight]) -> None:
    if unknown := [f"{weight.name} ({weight.dtype})" for weight in weights if weight.dtype not in _TYPES]:
        raise InputError(
            f"safetensors has no such type: {', '.join(unknown)}. Save them as another type, or publish with a "
            "recipe of your own."
        )


def _divided(weights: Iterable[Weight], max_bytes: int) -> Iterator[list[Weight]]:
    """The weights of each file, in their order; one that is too large has a file of its own."""
    its: list[Weight] = []
    size = 0
    for weight in weights:
        if its and size + weight.nbytes > max_bytes:
            yield its
            its, size = [], 0
        its.append(weight)
        size += weight.nbytes
    yield its


def _named(groups: list[list[Weight]]) -> dict[str, list[Weight]]:
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": its for number, its in enumerate(groups, 1)}


def _header(weights: Iterable[Weight]) -> tuple[bytes, dict[str, int], int]:
    """How a file begins, where in it each tensor's bytes are, and where the last of them ends."""
    told: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in sorted(weights, key=lambda weight: (-weight.dtype.itemsize, weight.name)):  # each is aligned so
        at, end = end, end + weight.nbytes
        told[weight.name] = {"dtype": _TYPES[weight.dtype], "shape": weight.shape, "data_offsets": [at, end]}
    text = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    places = {name: len(head) + its["data_offsets"][0] for name, its in told.items() if name != "__metadata__"}
    return head, places, len(head) + end


@contextmanager
def _file(path: Path, weights: Iterable[Weight]) -> Iterator["_File"]:
    """A file with its header, and room for the rest, which a full disk refuses at once."""
    head, places, size = _header(weights)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        reserve(file, size)
        os.truncate(file, size)  # where room cannot be reserved
        _write(file, memoryview(head), 0)
        yield _File(file, places)
    finally:
        os.close(file)


class _File:
    """One file of safetensors, of which the header is written."""

    def __init__(self, file: int, places: Mapping[str, int]) -> None:
        self._file, self._places = file, places
        self._mapped: mmap.mmap | None = None

    def put(self, block: Block) -> None:
        """Writes values where they belong."""
        weight, place = block.weight, self._places[block.weight.name]
        if (at := block.at) is not None:
            _write(self._file, block.data, place + at * weight.dtype.itemsize)
            return
        if self._mapped is None:
            self._mapped = mmap.mmap(self._file, 0)
        whole = torch.frombuffer(self._mapped, dtype=weight.dtype, count=weight.parameters, offset=place)
        for part in block.divided(-(-weight.parameters // math.prod(block.piece.sizes))):  # each is as wide as a block
            part.copy_to(whole.view(weight.shape))
            self._mapped.madvise(mmap.MADV_DONTNEED)  # it stays in the file, and is no longer in our memory


def _write(file: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count
