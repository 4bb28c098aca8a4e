"""The store that the ranks of a job have met through: the one place that asks torch for it.

torch has no public name for it. Where the private one is gone, whoever needs it does without, and says so.
"""

import sys
from contextlib import suppress
from typing import Any, NamedTuple


class Met(NamedTuple):
    """The ranks of the default group."""

    rank: int
    size: int
    store: Any
    """None if this torch does not show it, or if there is nobody behind it."""


def met(own_connection: bool = False) -> Met | None:
    """The ranks that have met; None before they have. With a connection of its own, a wait on the group's in another
    thread does not hold this one up."""
    dist = sys.modules.get("torch.distributed.distributed_c10d")
    if dist is None or not getattr(dist, "is_initialized", bool)():
        return None
    find = getattr(dist, "_get_default_store", None)
    store = find() if find is not None and dist.get_backend() != "fake" else None
    if own_connection and store is not None:
        with suppress(AttributeError, RuntimeError):  # an older torch's, or one of the user's own, has none to give
            store = store.clone()
    return Met(dist.get_rank(), dist.get_world_size(), store)
