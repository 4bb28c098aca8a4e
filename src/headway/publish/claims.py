"""Of several that are about to complete the same version, one does: on any store, without a lock."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from headway.publish.layout import CLAIMS
from headway.storage import Storage

PATIENCE_S = 30.0
"""A claim is held for a few round trips; after so long, whoever made it is dead."""

_POLL_S = 0.05
T = TypeVar("T")


class Claim:
    """One publisher's word that it is about to complete a version.

    Nothing is known of stores but that a listing shows all that was written before it began. So each first writes its
    claim, and only then looks for those of others. If A does not see B's, then A looked before B wrote it, so that B,
    who looks later still, sees A's claim, or A's version if the claim has gone: at least one of the two knows of both.
    Who sees a claim whose name sorts before its own takes its own back, and waits. Who is first waits, too: whether the
    other has seen its claim shows in what becomes of the other's. So one of them completes its version; and what is
    complete is never taken back, since it may be served already.

    A claim of which nothing becomes within `patience_s` is a dead publisher's. If that one only slept, there are two
    versions of the same in the end: a waste, and no harm.
    """

    def __init__(self, storage: Storage, name: str, prefix: str, patience_s: float = PATIENCE_S) -> None:
        """`prefix`: how the names of all begin that would be the same version."""
        self._storage, self._name, self._prefix, self._patience_s = storage, name, prefix, patience_s
        self._since: dict[str, float] = {}
        """Others, and when they were first seen."""

    def await_turn(self, completed: Callable[[], T | None]) -> T | None:
        """What another has completed, if there is such a thing; None if it is this one's turn."""
        while True:
            self._storage.write(f"{CLAIMS}/{self._name}", b"")
            gave_way = False
            while rivals := self._rivals():
                if found := completed():
                    return found
                if min(rivals) < self._name and not gave_way:
                    self.release()
                    gave_way = True
                time.sleep(_POLL_S)
            # Looked for only now that the claims are gone: whoever completes a version releases its claim afterwards.
            if (found := completed()) or not gave_way:
                return found

    def release(self) -> None:
        """Takes the claim back; one that cannot be costs others some patience, and is no reason to fail."""
        with suppress(OSError):
            self._storage.remove(f"{CLAIMS}/{self._name}")

    def _rivals(self) -> list[str]:
        """Who else has a claim, and is alive."""
        now = time.monotonic()
        there = [each for each in self._storage.names(CLAIMS) if each.startswith(self._prefix) and each != self._name]
        self._since = {each: self._since.get(each, now) for each in there}
        return [each for each in there if now - self._since[each] < self._patience_s]
