"""What a process may use of its machine: memory and cores, as the cgroups around it allow; and the commands there."""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subprocess import CompletedProcess

ROOT = Path("/")


def free_memory(root: Path = ROOT) -> int:
    """Bytes that can still be used without anybody being killed: what the machine has free, or the cgroup allows."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *_left_in_cgroups(root)])


def cores(root: Path = ROOT) -> float:
    """The cores that this process may use, all of its threads together."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas(root)])


def ranks_here(otherwise: int = 1) -> int:
    """How many ranks share this node, as the launcher says; where it says nothing, `otherwise`."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() and int(told) else otherwise


def answer_of(
    command: Sequence[str], timeout_s: float, environ: Mapping[str, str] = os.environ
) -> "CompletedProcess[str] | None":
    """What a command answers; None if there is none of that name, or it does not in time.

    May be called beside other threads. There is no pipe in it: a data worker that is forked meanwhile would hold the
    other end, and the answer would not be over before that worker is gone.
    """
    import shutil  # slow to import, both, and mostly not needed
    import subprocess

    path = shutil.which(command[0], path=environ.get("PATH"))
    if path is None:
        return None
    try:
        with open(memory_file("out"), "rb") as out, open(memory_file("errors"), "rb") as errors:
            # Python spawns without a pipe of its own only what it need not close files for.
            done = subprocess.run(
                [path, *command[1:]], stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=environ,
                timeout=timeout_s, close_fds=False, check=False,
            )  # fmt: skip
            told = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0) for file in (out, errors)]
    except (OSError, subprocess.SubprocessError):
        return None
    return subprocess.CompletedProcess(command, done.returncode, *(text.decode("utf-8", "replace") for text in told))


def memory_file(name: str) -> int:
    """A descriptor of a file that is nowhere but in memory, and is not passed on; OSError if none can be had."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    import ctypes  # Python was built where the C library was older than the one here, as conda's is

    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    fd: int = create(name.encode(), 1) if create is not None else -1  # 1: closed when another program is executed
    if fd < 0:
        number = ctypes.get_errno() or errno.ENOSYS
        raise OSError(number, os.strerror(number))
    return fd


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """What each cgroup around this process still allows. Page cache counts as free: the kernel gives it back."""
    for folder, version in _cgroups(root, "memory"):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
        with suppress(OSError, ValueError):
            most, used = (int((folder / name).read_text()) for name in names)
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield max(0, most - used + int(stat.get("inactive_file", 0)))


def _quotas(root: Path) -> Iterator[float]:
    """How many cores' time each cgroup around this process allows."""
    for folder, version in _cgroups(root, "cpu"):
        with suppress(OSError, ValueError):  # `max` is no number, and no limit
            if version == 1:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            if quota > 0:
                yield quota / period


def _cgroups(root: Path, kind: str) -> Iterator[tuple[Path, int]]:
    """The folders of this process's cgroup and of those around it, and of which version they are."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds or kind in kinds.split(","):
                base = root / "sys/fs/cgroup" / kinds
                folder = base / path.lstrip("/")
                while folder == base or base in folder.parents:
                    yield folder, 1 if kinds else 2
                    folder = folder.parent
