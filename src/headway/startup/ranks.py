"""The ranks of a job, and words they exchange through the store they have met through: no collective is needed."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headway.meeting import met

_PAUSE_S = 0.2
"""At most so long between two looks at the store."""
_LINGER_S = 5.0


@dataclass(frozen=True)
class Difference:
    """Two ranks that have said different things, and what."""

    ranks: tuple[int, int]
    words: tuple[str, str]


class Ranks:
    """The ranks of the default group."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self._store = rank, size, store

    @classmethod
    def met(cls) -> "Ranks | None":
        """Those that have met; None if there is no process group, or one without other ranks behind it, or this
        torch does not show its store."""
        found = met(own_connection=True)
        return None if found is None or found.store is None else cls(*found)

    def within(self, members: Sequence[int]) -> "Ranks":
        """Those of a smaller group, numbered as in there."""
        return Ranks(members.index(self.rank), len(members), self._store)

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
        if verdict == "same":
            return None
        self.linger(f"{name}/{attempt}/read")
        return _difference(first, verdict)

    def tell(self, name: str, word: str) -> None:
        """Says something that the others wait to hear."""
        if self.size > 1:
            self._store.set(f"headway/{name}", word)

    def hear(self, name: str) -> str:
        """Waits for what another one tells."""
        return self._awaited(f"headway/{name}", lambda: None)

    def _set_first(self, key: str, word: str) -> str:
        """Sets it unless it is set. Returns what it is."""
        return str(self._store.compare_set(key, "", word).decode())

    def _awaited(self, key: str, waiting: Callable[[], object]) -> str:
        until, pause_s = time.monotonic() + self._store.timeout.total_seconds(), 0.002
        while not self._store.check([key]):  # to wait for it would log a warning each time it is not there yet
            if time.monotonic() > until:
                raise TimeoutError(f"not all ranks have come to {key.partition('/')[2]} within {self._store.timeout}")
            waiting()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)
        return str(self._store.get(key).decode())

    def linger(self, name: str) -> None:
        """Waits until all have come here, five seconds at most: the store may live in a process that is about to
        fail, and others have yet to read why."""
        if self.size == 1:
            return
        until = time.monotonic() + _LINGER_S
        with suppress(RuntimeError):  # the store is gone: all have
            count = self._store.add(f"headway/{name}", 1)
            while count < self.size and time.monotonic() < until:
                time.sleep(0.01)
                count = self._store.add(f"headway/{name}", 0)


def _difference(one: str, other: str) -> Difference:
    (a, _, said_a), (b, _, said_b) = one.partition("\n"), other.partition("\n")
    return Difference((int(a), int(b)), (said_a, said_b))
