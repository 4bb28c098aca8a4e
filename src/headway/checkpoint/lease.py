"""Who writes to a root: one run at a time, so that two jobs never mix their checkpoints."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from headway.checkpoint.layout import OWNER
from headway.errors import InputError
from headway.events.clock import living_ticks, pid_space

if TYPE_CHECKING:
    from headway.storage import Storage

REFRESH_S = 20.0
STALE_S = 90.0
"""An owner who was not heard of for so long is dead."""


class Taken(InputError):
    """Somebody else writes to this root."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A run that writes checkpoints."""

    session: str
    job: str
    node: str
    boot: str
    """Differs after a reboot, and in another container: process numbers mean something else there."""
    pid: int
    started: int
    """When the process began, in kernel ticks: numbers of processes are used again."""
    began_ns: int = 0
    seen_ns: int = 0
    """When it was last heard of, by its own wall clock."""
    left: bool = False
    """It said goodbye. Its name stays, so that whoever it took over from does not go on behind its back."""

    @staticmethod
    def this(session: str, job: str, node: str) -> "Owner":
        pid = os.getpid()
        return Owner(
            session=session,
            job=job,
            node=node,
            boot=pid_space(),
            pid=pid,
            started=living_ticks(pid) or 0,
            began_ns=time.time_ns(),
        )

    def is_dead(self) -> bool:
        """Whether it is known to have ended: it ran on this machine, and does no more."""
        return self.boot == pid_space() and living_ticks(self.pid) != self.started


def claim(storage: "Storage", owner: Owner, now_ns: Callable[[], int] = time.time_ns) -> Owner | None:
    """Makes this run the one that writes here. Raises `Taken` if another one does. Returns the one before it, if that
    ended without a goodbye."""
    other = holder(storage)
    if other is not None and not other.left and not _may_follow(owner, other, now_ns()):
        age_s = (now_ns() - other.seen_ns) / 1e9
        raise Taken(
            f"job {other.job} on {other.node} (process {other.pid}) writes checkpoints to {storage.url}, and was heard "
            f"of {age_s:.0f} s ago: two jobs would mix theirs. Choose another folder; or stop that job, or, if it is "
            f"dead, wait until {STALE_S:.0f} s have passed."
        )
    refresh(storage, owner, now_ns)
    if (winner := holder(storage)) is not None and winner.session != owner.session:  # both came at the same instant
        raise Taken(f"job {winner.job} on {winner.node} begins to write checkpoints to {storage.url} at this moment.")
    return other if other is not None and not other.left else None


def _may_follow(owner: Owner, other: Owner, now_ns: int) -> bool:
    same = other.session == owner.session or (other.job == owner.job and other.job != "")
    return same or other.is_dead() or now_ns - other.seen_ns > STALE_S * 1e9


def holder(storage: "Storage") -> Owner | None:
    """Who writes here, or did when it died."""
    try:
        return Owner(**json.loads(storage.read(OWNER)))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def refresh(storage: "Storage", owner: Owner, now_ns: Callable[[], int] = time.time_ns) -> None:
    storage.write(OWNER, json.dumps(asdict(owner) | {"seen_ns": now_ns()}).encode())


def holds(storage: "Storage", session: str) -> bool:
    """Whether nobody has taken over from this run."""
    found = holder(storage)
    return found is None or (found.session == session and not found.left)


def release(storage: "Storage", session: str) -> None:
    """Lets others in at once."""
    found = holder(storage)
    if found is not None and found.session == session:
        refresh(storage, replace(found, left=True))
