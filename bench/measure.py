"""How things are measured here: CPU time, medians over rounds, whatever is compared taking turns in every round."""

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

INSTALL = "python -m pip install -e '.[bench]'"
Timed = Callable[[], float]


@dataclass
class Row:
    """One line of the table: what headway takes, next to a peer or a floor, and the bar it has to meet."""

    name: str
    unit: str
    ours: list[float]
    theirs: list[float] = field(default_factory=list)
    peer: str = ""
    at_most: float | None = None
    """Bar: headway's median may not be higher."""
    times: float | None = None
    """Bar: the peer must take at least this many times as much."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times as much the peer takes; round by round where both took turns."""
        if not self.theirs:
            return None
        if len(self.ours) == len(self.theirs):
            return median(b / a for a, b in zip(self.ours, self.theirs, strict=True))
        return median(self.theirs) / median(self.ours)

    @property
    def bar(self) -> str:
        """The bars in words; empty if there is none."""
        absolute = [] if self.at_most is None else [f"≤ {self.at_most:g} {self.unit}"]
        return ", ".join(absolute + ([] if self.times is None else [f"≥ {self.times:g}×"]))

    @property
    def met(self) -> bool | None:
        """Whether all bars are met; None without one."""
        if not self.bar:
            return None
        short = self.at_most is None or median(self.ours) <= self.at_most
        return short and (self.times is None or (self.ratio or 0) >= self.times)

    def cells(self) -> list[str]:
        """The line as text."""
        low, high = min(self.ours), max(self.ours)
        spread = f" ({short(low)}…{short(high)})" if high > low else ""
        theirs = f"{short(median(self.theirs))} {self.unit} {self.peer}" if self.theirs else self.peer
        ratio = "" if self.ratio is None else f"{short(self.ratio)}×"
        met = {None: "", True: "yes", False: "NO"}[self.met]
        return [self.name, f"{short(median(self.ours))} {self.unit}{spread}", theirs, ratio, self.bar, met]

    def as_json(self) -> dict[str, Any]:
        """Everything, samples included."""
        both = {"ours": self.ours, "theirs": self.theirs}
        figures = {
            who: {"median": median(samples), "min": min(samples), "max": max(samples), "samples": samples}
            for who, samples in both.items()
            if samples
        }
        told = {"name": self.name, "unit": self.unit, "peer": self.peer, "note": self.note}
        return told | figures | {"ratio": self.ratio, "bar": self.bar, "met": self.met}


def short(figure: float) -> str:
    """Three digits, and no exponent."""
    return f"{figure:,.0f}" if figure >= 1000 else f"{figure:.3g}"


def take_turns(rounds: int, **timed: Timed) -> dict[str, list[float]]:
    """Runs each once a round, every round beginning with another one, after a first round that is thrown away."""
    names = list(timed)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for at in range(len(names)):
            name = names[(number + at) % len(names)]
            took = timed[name]()
            if number:
                samples[name].append(took)
    return samples


def cpu_us(work: Callable[[], object], count: int) -> float:
    """CPU time of the whole process, all threads, in microseconds for one of `count`."""
    begin = time.process_time_ns()
    work()
    return (time.process_time_ns() - begin) / count / 1000


def peak_mb() -> float:
    """Most memory this process ever held. `ru_maxrss` would not do: it begins with the size of the parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def apart(call: str, *args: object) -> dict[str, Any]:
    """Runs `module.function` of this package in a new process and returns what it returns."""
    module, _, function = call.rpartition(".")
    code = f"import json; from bench.{module} import {function} as f; print(json.dumps(f(*{args!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{call}{args} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def children_ms(command: list[str]) -> float:
    """CPU time of a command, in milliseconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def machine() -> dict[str, Any]:
    """Where this ran."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(": ")[2] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
