"""The real `headway exec`, for a program that is not to take its time: where it would sleep, its clock jumps.

Only for programs of one process and one thread: others would not notice that the time has jumped. Run by `warm`, with
what `warm_headway` takes.
"""

import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.events.clock import Clock

WARM_HEADWAY = Path(__file__).parents[1] / "launch" / "warm_headway.py"


class Jumps:
    """How far the clock has jumped."""

    ns = 0

    def sleep(self, seconds: float) -> None:
        """Stand in for `time.sleep`."""
        self.ns += round(seconds * 1e9)

    def shifted(self, clock: Callable[[], Any], ns: bool) -> Callable[[], Any]:
        """A clock that jumps."""
        return (lambda: clock() + self.ns) if ns else (lambda: clock() + self.ns / 1e9)


if __name__ == "__main__":
    jumps = Jumps()
    for name in ("monotonic", "perf_counter", "time"):
        setattr(time, name, jumps.shifted(getattr(time, name), ns=False))
        setattr(time, f"{name}_ns", jumps.shifted(getattr(time, f"{name}_ns"), ns=True))
    time.sleep = jumps.sleep
    Clock.now_ns, Clock.wall_ns = staticmethod(time.monotonic_ns), staticmethod(time.time_ns)
    sys.argv[0] = str(WARM_HEADWAY)
    runpy.run_path(str(WARM_HEADWAY), run_name="__main__")
