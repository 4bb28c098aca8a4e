"""Tensors in pieces, as ranks have saved them: where each belongs in the whole."""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Values of every type are copied as those: not all types can do everything."""


class Piece(NamedTuple):
    """A box of a tensor, as one rank saved it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    """Where it begins in the file; its bytes come a little later."""
    length: int


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One tensor, whole."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.parameters * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Block:
    """Values that follow each other in a piece. They stay until the next block is asked for."""

    weight: Weight
    piece: Piece
    order: tuple[int, ...]
    """The dimensions of the piece as they were saved, the one whose values lie next to each other last."""
    start: int
    """How many values of the piece came before."""
    data: memoryview

    @property
    def values(self) -> torch.Tensor:
        """As a tensor of one dimension, which is not to be written to."""
        return torch.frombuffer(self.data, dtype=self.weight.dtype)

    @property
    def at(self) -> int | None:
        """Where they belong in the tensor, counted in values, if they stay next to each other there; else None."""
        shape, (offsets, sizes, *_) = self.weight.shape, self.piece
        wide = [dimension for dimension in self.order if sizes[dimension] > 1]
        if wide != sorted(wide) or any(sizes[each] != shape[each] for each in range(*_behind(wide, len(shape)))):
            return None
        steps = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
        return self.start + sum(offset * step for offset, step in zip(offsets, steps, strict=True))

    def copy_to(self, tensor: torch.Tensor) -> None:
        """Puts them where they belong in the whole tensor."""
        bits = _BITS[self.weight.dtype.itemsize]
        region = _narrowed(tensor.detach().view(bits), self.piece.offsets, self.piece.sizes).permute(self.order)
        values, used = torch.frombuffer(self.data, dtype=bits), 0
        for origin, extent in _boxes(tuple(region.shape), self.start, self.start + len(values)):
            count = math.prod(extent)
            _narrowed(region, origin, extent).copy_(values[used : used + count].view(extent))
            used += count

    def divided(self, parts: int) -> Iterator["Block"]:
        """The same in smaller blocks."""
        size = self.weight.dtype.itemsize
        step = -(-len(self.data) // size // parts) or 1
        for first in range(0, len(self.data) // size, step):
            data = self.data[first * size : (first + step) * size]
            yield Block(weight=self.weight, piece=self.piece, order=self.order, start=self.start + first, data=data)


def _behind(wide: list[int], dimensions: int) -> tuple[int, int]:
    """The dimensions after the first that is wider than 1."""
    return (wide[0] + 1 if wide else dimensions), dimensions


def _narrowed(tensor: torch.Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> torch.Tensor:
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor


def _boxes(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Origins and extents of boxes that make up a run of values, in order: whole rows, and what is before and after."""
    if len(sizes) < 2:
        yield ((start,), (stop - start,)) if sizes else ((), ())
        return
    row = math.prod(sizes[1:])
    first, last = -(-start // row), stop // row
    edges = [(last, start, stop)] if first > last else [(first - 1, start, first * row), (last, last * row, stop)]
    for number, (at, begin, end) in enumerate(edges):
        if number and first < last:
            yield (first, *[0] * (len(sizes) - 1)), (last - first, *sizes[1:])
        if begin < end:
            for origin, extent in _boxes(sizes[1:], begin - at * row, end - at * row):
                yield (at, *origin), (1, *extent)


def uncovered(shape: tuple[int, ...], boxes: Collection[tuple[tuple[int, ...], tuple[int, ...]]]) -> Any:
    """The first value that is in none of the boxes; None if there is no such value."""
    if not math.prod(shape):
        return None
    cuts = [
        sorted({0, *(edge for at, size in boxes for edge in (at[each], at[each] + size[each]) if edge < shape[each])})
        for each in range(len(shape))
    ]
    covered = torch.zeros([len(each) for each in cuts], dtype=torch.bool)
    for at, size in boxes:
        spans = zip(cuts, at, size, strict=True)
        covered[tuple(slice(bisect_left(cut, low), bisect_left(cut, low + wide)) for cut, low, wide in spans)] = True
    if covered.all():
        return None
    return tuple(cut[at] for cut, at in zip(cuts, (~covered).nonzero()[0].tolist(), strict=True))
