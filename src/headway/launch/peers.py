"""The agents of a job's other nodes: what they tell each other, through the store of their rendezvous.

One attempt has one outcome. Whoever finds the root of a failure decides what is done about it; the first decision
counts for all.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


Findings = list[dict[str, Any]]
"""What is known of each failed rank, as `recover.evidence` has it."""


VALUE_LIMIT = 16 * 1024
"""Most characters of one text that is told to others: torch's store closes the connection at 8 MB for all of them."""

Dumps = dict[str, Any]
"""What each rank of one node is doing, which of them are active, and the node's name."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be done about a failure, on every node."""

    do: str
    """`restart`, `stop`, `requeue`, or `leave`: the node `node` leaves the job, and the others restart."""
    why: str
    """One line for the user."""
    rank: int = 0
    node: str = ""
    category: str = ""
    rule: str = ""
    line: str = ""
    wait_s: float = 0.0
    environ: dict[str, str] = field(default_factory=dict)
    """What the next attempt's workers get to see differently."""
    joins: bool = False
    """Whether nodes come in or go: then all must meet anew."""
    spends: bool = True
    """Whether it counts as one of the restarts that a user allowed."""
    seen: dict[str, Any] = field(default_factory=dict)
    """What the decision was made from, for the policies of the other nodes."""


class Peers:
    """One attempt's exchange between the nodes."""

    def __init__(self, store: Store, attempt: int, me: int, count: int) -> None:
        self.attempt, self.me, self.count = attempt, me, count
        self._store = store
        self._exchanges = 0
        self._prefix = f"headway/{attempt}/"

    def report(self, findings: Findings) -> None:
        """Tells what failed here, cut to what a store takes."""
        cut = [{key: v[-VALUE_LIMIT:] if isinstance(v, str) else v for key, v in found.items()} for found in findings]
        self._set(f"failure/{self.me}", cut)
        self._set("failed", True)
        self._set("alarm", True)

    def is_alarmed(self) -> bool:
        """Whether anybody told of anything: all that is asked for while all is well."""
        return self.count > 1 and self._has("alarm")

    def has_failed(self) -> bool:
        """Whether anybody told of a failure."""
        return self.count > 1 and self._has("failed")

    def findings(self) -> Findings:
        """What all nodes told so far."""
        told = [f"failure/{number}" for number in range(self.count)]
        return [finding for key in told if self._has(key) for finding in self._get(key)]

    def decide(self, order: Order) -> Order:
        """Proposes what is to be done; returns what is done: the first proposal."""
        if self.count == 1:
            return order
        text = self._store.compare_set(self._prefix + "order", "", json.dumps(asdict(order)))
        self._set("alarm", True)
        return Order(**json.loads(text))

    def decided(self) -> Order | None:
        """What was decided, if anything was."""
        return Order(**self._get("order")) if self.count > 1 and self._has("order") else None

    def is_asked_for_dumps(self) -> bool:
        """Whether somebody looks for what hangs."""
        return self.count > 1 and self._has(f"hang/{self._exchanges}")

    def exchange_dumps(self, mine: Dumps, timeout_s: float) -> list[Dumps]:
        """What the ranks of all nodes are doing; without those of nodes that do not answer in time."""
        if self.count == 1:
            return [mine]
        hang = f"hang/{self._exchanges}"
        self._exchanges += 1
        self._set(hang, True)
        self._set("alarm", True)
        self._set(f"{hang}/{self.me}", mine)
        keys = [f"{hang}/{number}" for number in range(self.count)]
        until = time.monotonic() + timeout_s
        while not self._has(*keys) and time.monotonic() < until:
            time.sleep(0.05)
        return [self._get(key) for key in keys if self._has(key)]

    def finish(self) -> None:
        """Tells that all went well here."""
        self._set(f"done/{self.me}", True)

    def all_finished(self) -> bool:
        """Whether all went well everywhere."""
        return self.count == 1 or self._has(*(f"done/{number}" for number in range(self.count)))

    def _set(self, key: str, value: Any) -> None:
        self._store.set(self._prefix + key, json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(self._prefix + key))

    def _has(self, *keys: str) -> bool:
        return self._store.check([self._prefix + key for key in keys])
