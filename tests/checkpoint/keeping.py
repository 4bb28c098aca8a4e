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
    found = []
    # Not by the tree of processes: one that gets another parent while the tree is read would be missing.
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended meanwhile
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                if _KEEPER in command and str(root) in command:
                    found.append(int(entry.name))
    return found


def keeper_with_clock(later: Path) -> str:
    """The code of a keeper whose clock leaps ahead, and runs a thousand times as fast, once a file is there: so a test
    says when the keeper has waited long enough, however slow the machine is."""
    return (
        "import os, time, types\nimport headway.checkpoint.keeper as keeper\n"
        f"now = lambda: time.monotonic() * (1000 if os.path.exists({str(later)!r}) else 1)\n"
        "keeper.time = types.SimpleNamespace(monotonic=now)\nkeeper.main()"
    )


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
    """Kills the keepers of a root, whose uploaders end with them, and waits until all of them are gone."""
    for pid in keepers(root):
        family = [pid, *descendants(pid)]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda family=family: not any(map(is_alive, family)))


def is_alive(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0] != "Z" or int(fields[17]) > 1  # its other threads may still be in a system call
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
