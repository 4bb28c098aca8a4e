"""The ranks that save together, and what they tell each other. With one rank, nothing is sent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from headway.errors import HeadwayError
from headway.machine import ranks_here

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
"""As long as a rank may be late."""


class PeerLost(RuntimeError):
    """Another rank is gone: nothing can be agreed on any more, nor trained. Its text is that of the backend."""


class Elsewhere(HeadwayError):
    """Another rank could not do its part."""


def local_size() -> int:
    """How many ranks share this node: what the launcher says, or all of them."""
    return ranks_here(dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1)


class Ranks:
    """A gloo group of its own: the job's may be for another device, or be in use by another thread."""

    def __init__(self, group: Any = None) -> None:
        self.rank, self.size, self._group = 0, 1, None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            members = dist.get_process_group_ranks(group or dist.group.WORLD)
            # Groups that are made at the same time for different ranks must not have the same name.
            alone = group is not None
            self._group = dist.new_group(members, TIMEOUT, backend="gloo", use_local_synchronization=alone)
            self.rank, self.size = dist.get_rank(self._group), len(members)
            self._first = members[0]

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def highest(self, *numbers: int) -> list[int]:
        """Of each of these, the highest that any rank gives."""
        if self._group is None:
            return list(numbers)
        sent = torch.tensor(numbers, dtype=torch.int64)
        with _in_company():
            dist.all_reduce(sent, dist.ReduceOp.MAX, group=self._group)
        return [int(number) for number in sent.tolist()]

    def all(self, value: T) -> list[T]:
        """What each rank gives."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        with _in_company():
            dist.all_gather_object(found, value, group=self._group)
        return found

    def of_first(self, make: Callable[[], T]) -> T:
        """What the first rank makes; its error, if it makes one, on all."""
        box: list[Any] = [_attempted(make) if self.is_first else None]
        if self._group is not None:
            with _in_company():
                dist.broadcast_object_list(box, self._first, group=self._group)
        made: T = _unpacked(box[0], self.is_first)
        return made

    def planned(self, mine: Callable[[], Any], divide: Callable[[list[Any]], list[Any]]) -> Any:
        """Each rank's part of what the first one makes of all ranks' own. Any error is everyone's."""
        given = _attempted(mine)
        if self._group is None:
            return divide([_unpacked(given, True)])[0]
        gathered: list[Any] | None = [None] * self.size if self.is_first else None
        with _in_company():
            dist.gather_object(given, gathered, self._first, group=self._group)
        box: list[Any] = [None]
        parts = None
        if gathered is not None:
            made = _attempted(lambda: divide([_unpacked(told, True) for told in gathered]))
            parts = [(part, None) for part in made[0]] if made[1] is None else [made] * self.size
        with _in_company():
            dist.scatter_object_list(box, parts, self._first, group=self._group)
        return _unpacked(box[0], self.is_first)


@contextmanager
def _in_company() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error)) from error


def _attempted(make: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return make(), None
    except Exception as error:  # goes to every rank: alone it would leave the others waiting
        return None, error


def _unpacked(told: tuple[Any, Exception | None], here: bool) -> Any:
    value, error = told
    if error is not None:
        raise error if here else Elsewhere(f"{type(error).__name__}: {error}") from error
    return value
