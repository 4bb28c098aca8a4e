"""Finding the processes that keep and upload the checkpoints of a root, and waiting for what they do."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from supervising import descendants, wait_for

_KEEPER = "headway.checkpoint.keeper"


def keepers(root: str | Path) -> list[int]:
    """The living keepers of roots at or below a path."""
    return [pid for pid, command in descendants(1).items() if _KEEPER in command and str(root) in command]


def keeper(root: str | Path) -> int:
    """The one keeper of a root, once it is up."""
    # A keeper that forks is two for a moment, until the child has become an uploader.
    [pid] = wait_for(lambda: found if len(found := keepers(root)) == 1 else [])
    return int(pid)


def uploader(root: str | Path) -> int:
    """The keeper's uploader, once it is up."""
    [pid] = wait_for(lambda: [pid for pid, text in descendants(keeper(root)).items() if "uploader" in text])
    return int(pid)


def end_keepers(root: str | Path) -> None:
    """Kills the keepers of a root, whose uploaders end with them, and waits until they are gone."""
    for pid in keepers(root):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: not is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def halted(pid: int) -> Iterator[None]:
    """A process does nothing meanwhile, if it lives."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def memory_of_checkpoints(pid: int | str = "self") -> list[int]:
    """The inodes of arenas that a process holds open or has mapped."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if "memfd:headway-checkpoint" in os.readlink(entry):
                found.add(entry.stat().st_ino)
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:headway-checkpoint" in line:
                found.add(int(line.split()[4]))
    return sorted(found)
