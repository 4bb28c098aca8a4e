"""Two clocks, always read together: monotonic time orders events, wall time places them in the world.

On Linux the monotonic clock is one per boot, so all processes of one boot share one axis whatever happens to the wall
clock; `boot` names that axis.
"""

import os
import time
from pathlib import Path

_TICKS_PER_S = 100  # USER_HZ, which the kernel fixes at 100 for every /proc reader


class Clock:
    """The machine's clocks. Tests pass `headway.testing.FakeClock` instead."""

    now_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)

    def boot(self) -> str:
        """The id of this boot: processes with the same one share a monotonic clock."""
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def process_started_ns(self, pid: int) -> int | None:
        """When process `pid` started, on the monotonic clock (to 10 ms); None if it is gone."""
        ticks = start_ticks(pid)
        if ticks is None:
            return None
        asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
        return min(ticks * (1_000_000_000 // _TICKS_PER_S) - asleep_ns, self.now_ns())


def start_ticks(pid: int) -> int | None:
    """The process's start in kernel ticks since boot: with the pid, it names a process for ever."""
    told = _stat(pid)
    return int(told[19]) if told else None


def living_ticks(pid: int) -> int | None:
    """The same of a process that has not ended; None also if its parent has not looked yet."""
    told = _stat(pid)
    return int(told[19]) if told and told[0] not in (b"Z", b"X") else None


def pid_space() -> str:
    """Where numbers of processes mean the same: another one after a reboot, and in another container."""
    return f"{Clock().boot()} {os.readlink('/proc/self/ns/pid')}"


def _stat(pid: int) -> list[bytes]:
    """What the kernel tells of a process, after its name; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []
