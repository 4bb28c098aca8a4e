"""Waits for data as an asynchronous device felt them.

The host's clock sees work being queued: while it waits for a batch, the device may still be busy with the last one, and
then nothing is lost. Two events around the host's wait, on the device's own queue, tell: the first is reached when the
device has done all it had, the second when the host goes on. The time between them is the time it stood idle. Events
are put in only at every `EVERY`-th wait, are asked later whether they were reached, and nobody ever waits for them.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

EVERY = 16
"""One wait in so many is looked at."""

PENDING = 8
"""No more are looked at while so many are not reached yet."""


class DeviceWaits:
    """Which share of the host's waits a device felt. `event` makes one with `record`, `query` and `elapsed_time`; on a
    device that has none, nothing is known of waits."""

    def __init__(self, event: Callable[[], Any] | None) -> None:
        self._event = event
        self._asked = 0
        self._first: Any = None
        self._pending: deque[tuple[Any, Any, int]] = deque()
        self._host_ns = self._felt_ns = 0
        self.looked = 0
        """How many waits were looked at."""

    def asked(self) -> None:
        """The host begins to wait for a batch."""
        self._asked += 1
        if self._event is not None and self._asked % EVERY == 1 and len(self._pending) < PENDING:
            self._first = self._event()
            self._first.record()

    def came(self, waited_ns: int) -> int:
        """The batch came after `waited_ns`. Returns what the device felt of that, as far as is known."""
        if self._first is not None and self._event is not None:
            second = self._event()
            second.record()
            self._pending.append((self._first, second, waited_ns))
            self._first = None
        while self._pending and self._pending[0][1].query():
            first, second, host_ns = self._pending.popleft()
            felt_ns = int(first.elapsed_time(second) * 1e6)
            self._host_ns += host_ns
            self._felt_ns += min(max(felt_ns, 0), host_ns)
            self.looked += 1
        return waited_ns * self._felt_ns // self._host_ns if self._host_ns else 0
