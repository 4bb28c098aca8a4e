"""The ranks of a job, and words they exchange through the store they have met through: no collective is needed."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

_WAIT = timedelta(seconds=0.5)
"""So long at a time, between two looks whether there is still something to wait for."""


@dataclass(frozen=True)
class Difference:
    """Two ranks that have said different things, and what."""

    ranks: tuple[int, int]
    words: tuple[str, str]


class Ranks:
    """The ranks of the default group. Their store is asked over a connection of its own: on the group's, a wait in
    another thread would hold this one up."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self._store = rank, size, store

    @classmethod
    def met(cls) -> "Ranks | None":
        """Those that have met; None if there is no process group, or this torch does not show its store."""
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return None
        find = getattr(sys.modules["torch.distributed.distributed_c10d"], "_get_default_store", None)
        if find is None:
            return None
        store = find()
        return cls(dist.get_rank(), dist.get_world_size(), store.clone() if hasattr(store, "clone") else store)

    def compare(self, name: str, word: str, waiting: Callable[[], object] = lambda: None) -> Difference | None:
        """Whether all ranks say the same word: None if they do. Comes back when all have said it, or one has said
        another. Each rank must ask, with a name of its own for each question; `waiting` is called now and then, and
        may raise. A few messages a rank, however many there are."""
        if self.size == 1:
            return None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store over a restart
        place = f"headway/{name}/{attempt}"
        mine = f"{self.rank}\n{word}"
        first = self._set_first(f"{place}/first", mine)
        if first.partition("\n")[2] != word:
            self._set_first(f"{place}/verdict", mine)
        elif self._store.add(f"{place}/count", 1) == self.size:
            self._set_first(f"{place}/verdict", "same")
        verdict = self._awaited(f"{place}/verdict", waiting)
        return None if verdict == "same" else _difference(first, verdict)

    def _set_first(self, key: str, word: str) -> str:
        """Sets it unless it is set. Returns what it is."""
        return str(self._store.compare_set(key, "", word).decode())

    def _awaited(self, key: str, waiting: Callable[[], object]) -> str:
        until = time.monotonic() + self._store.timeout.total_seconds()
        while True:
            waiting()
            try:
                self._store.wait([key], _WAIT)
                return str(self._store.get(key).decode())
            except RuntimeError:  # not yet, or never
                if time.monotonic() > until:
                    raise


def _difference(one: str, other: str) -> Difference:
    (a, _, said_a), (b, _, said_b) = one.partition("\n"), other.partition("\n")
    return Difference((int(a), int(b)), (said_a, said_b))
