"""What the machine knows about a worker's end: its control group, its kernel log, its scheduler."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_KERNEL_LOG = "/dev/kmsg"
_DEVICES = re.compile(r"NVRM|Xid|nvidia|amdgpu|mlx5|infiniband|oom|Out of memory|Machine check|EDAC|I/O error", re.I)
_MOST_LINES = 40


def oom_kills(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """How many processes of this control group the kernel has killed for want of memory; None if it does not say."""
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places = [root / path.lstrip("/") / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            places = [root / "memory" / path.lstrip("/") / "memory.oom_control", root / "memory" / "memory.oom_control"]
        else:
            continue
        for place in places:
            if match := re.search(r"^oom_kill (\d+)", _read(place), re.M):
                return int(match[1])
    return None


class KernelLog:
    """The kernel's messages of one attempt, where this user may read them."""

    def __init__(self, path: str = _KERNEL_LOG) -> None:
        self._fd = -1
        self._lines: list[str] = []
        with suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def begin(self) -> None:
        """An attempt begins: what was said before is none of it."""
        self._read()
        self._lines.clear()

    def about(self, pids: set[int]) -> dict[int, str]:
        """The lines that name one of these processes, each with those that name a device: what a device did, it did
        to all."""
        self._read()
        lines = self._lines
        devices = [line for line in lines if _DEVICES.search(line)]
        found = {}
        for pid in pids:
            named = re.compile(rf"(?:\bpid[ =:]*|\bprocess |\[|\(){pid}\b(?!\.)")
            mine = [line for line in lines if named.search(line)]
            others = [line for line in devices if line not in mine and not re.search(r"Killed process|oom-kill:", line)]
            found[pid] = "\n".join([*others, *mine][-_MOST_LINES:])
        return found

    def _read(self) -> None:
        while self._fd >= 0:
            try:
                record = os.read(self._fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # some were overwritten before they were read
                continue
            except OSError:
                break
            self._lines.append(record.decode("utf-8", "replace").partition(";")[2].partition("\n")[0])


def scheduler_says(environ: Mapping[str, str]) -> str:
    """Where the platform's own variables put this job, in a line; empty outside any."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_JOB_PARTITION", "KUBERNETES_SERVICE_HOST", "POD_NAME",
             "JOB_COMPLETION_INDEX", "RAY_JOB_ID")  # fmt: skip
    return " ".join(f"{name}={environ[name]}" for name in names if environ.get(name))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
