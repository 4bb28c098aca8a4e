"""One job under one launcher, from its command to its end: started, made to fail, and watched by what it wrote.

The job is `crashing.py`. When it failed and when it trained again is known from its own stamps, or from the clock at
the instant before a signal was sent; both are the machine's monotonic clock. Only for the phases in between are the
launchers believed: torchrun's log, and the journal of headway's supervisor.
"""

import importlib.util
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from headway.accounting.timeline import Timeline
from headway.events.journal import Follower
from headway.paths import JobPaths

SCRIPT = Path(__file__).with_name("crashing.py")
PAUSE_S = 0.02
PATIENCE_S = 60.0
"""Longest wait for a job to train, the 30 s included that torchrun waits for a survivor."""
BLOCKED_S = 0.3
"""How long a survivor is blocked before the other rank is killed."""
FRESH = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""With it, every attempt of torchrun's has a store of its own, and does not find the addresses of the last one."""


PHASES = {
    "detection": ("crashed", "detected"),
    "teardown": ("detected", "ended"),
    "rendezvous": ("ended", "started"),
    "spawn": ("started", "begun"),
    "imports": ("begun", "imported"),
    "process group": ("imported", "joined"),
    "model": ("joined", "built"),
    "first step": ("built", "trained"),
}
"""Between which moments each phase lies. They follow each other without a gap, and the launcher has the first four."""


@dataclass(frozen=True)
class Launcher:
    """A command that starts two ranks, and starts them again when one fails."""

    name: str
    command: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    tells: str = ""
    """Who knows its phases: `log` or `journal`."""


_PYTHON = (sys.executable, "-m")
_TWO = ("--nproc-per-node", "2")
_RESTARTS = ("--max-restarts", "1000")

HEADWAY = Launcher("headway", (*_PYTHON, "headway", "run", *_TWO, "--job", "bench"), tells="journal")
TORCHRUN = Launcher(
    "torchrun", (*_PYTHON, "torch.distributed.run", "--standalone", *_TWO, *_RESTARTS), {FRESH: "1"}, "log"
)
TORCHRUN_AS_IT_IS = Launcher("torchrun as it is", (*_PYTHON, "torch.distributed.run", *_TWO, *_RESTARTS))
FT_LAUNCHER = Launcher(
    "ft_launcher",
    (*_PYTHON, "nvidia_resiliency_ext.fault_tolerance.launcher", "--rdzv-backend", "c10d", "--rdzv-endpoint",
     "127.0.0.1:0", *_TWO, *_RESTARTS, "--ignore-missing-fault-tol-cfg"),
    {FRESH: "1"},
)  # fmt: skip


def has_ft_launcher() -> bool:
    """Whether nvidia's launcher is installed."""
    return importlib.util.find_spec("nvidia_resiliency_ext") is not None


class Stamp(NamedTuple):
    """One line of the script's."""

    pid: int
    attempt: int
    moment: str
    at_ns: int


class Recovery(NamedTuple):
    """From a crash, or from the command, to the first step that all ranks have trained after it."""

    crash_ns: int
    trained_ns: int
    restarts: int

    @property
    def seconds(self) -> float:
        """The time to recover."""
        return (self.trained_ns - self.crash_ns) / 1e9


class Stuck(RuntimeError):
    """A job does not train."""


class Job:
    """A running job; ended when its `with` is."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self.launcher, self.folder = launcher, folder
        self.home = folder / "home"
        folder.mkdir(parents=True)
        script = shutil.copy(SCRIPT, folder / "train.py")
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        self._files = [_Lines(folder / f"stamps-{rank}") for rank in (0, 1)]
        self.started_ns = time.monotonic_ns()
        with open(folder / "out", "wb") as out:
            self.process = subprocess.Popen(
                [*launcher.command, str(script), str(folder), str(PAUSE_S)],
                stdout=out, stderr=out, cwd=folder, env=self._environ(), start_new_session=True,
            )  # fmt: skip

    def _environ(self) -> dict[str, str]:
        # As where they are installed, the launchers' bytecode is kept.
        unwanted = ("HEADWAY_", "PYTHONDONTWRITEBYTECODE", "TORCH", "PET_")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        environ |= {"HEADWAY_HOME": str(self.home), "TMPDIR": str(self.folder), "LOGLEVEL": "INFO"}
        return environ | self.launcher.environ

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        pids = {self.process.pid, *(stamp.pid for file in self._files for stamp in file.read())}
        for pid in filter(self._has, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _has(self, pid: int) -> bool:
        """Whether a process is of this job: its number may be another's by now."""
        with suppress(OSError):
            return str(self.folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    # --- watching ---

    def trains(self, after_ns: int, steps: int = 1) -> Recovery:
        """Waits until every rank has begun after this instant and trained so many steps; Stuck if they do not."""
        self._wait(lambda: all(len(mine) > steps for mine in self._since(after_ns)), f"no step {steps}")
        ranks = self._since(after_ns)
        before = [stamp.attempt for stamp in self._files[0].read() if stamp.at_ns <= after_ns] or [-1]
        return Recovery(after_ns, max(mine[1].at_ns for mine in ranks), ranks[0][0].attempt - before[-1])

    def _since(self, after_ns: int) -> list[list[Stamp]]:
        """For each rank its last start after this instant, and the steps since."""
        found = []
        for file in self._files:
            begun = [number for number, stamp in enumerate(file.read()) if stamp.moment == "begun"]
            mine = file.read()[begun[-1] :] if begun else []
            is_new = bool(mine) and mine[0].at_ns > after_ns
            found.append([stamp for stamp in mine if is_new and stamp.moment in ("begun", "trained")])
        return found

    def trainers(self) -> list[int]:
        """The processes of both ranks."""
        return [file.read()[-1].pid for file in self._files]

    def _wait(self, done: Callable[[], bool], problem: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not done():
            over = self.process.poll() is not None
            if over or time.monotonic() > until:
                what = "gave up" if over else f"is stuck after {PATIENCE_S:g} s"
                raise Stuck(f"{self.launcher.name} {what}: {problem}. Its last lines:\n{self._last_lines()}")
            time.sleep(0.05)

    def _last_lines(self) -> str:
        return "\n".join((self.folder / "out").read_text(errors="replace").splitlines()[-10:])

    # --- failing ---

    def crash(self, fault: str) -> int:
        """Makes the job fail, and returns when it did. `kill` is SIGKILL, of the ranks named behind it; `blocked` is
        one of rank 1 while rank 0 waits in C++; all others are the script's own doing."""
        what, _, ranks = fault.partition(" ")
        if what == "blocked":
            self._wish("block", 0)
            time.sleep(BLOCKED_S)
        if what not in ("kill", "blocked"):
            return self._wish(what, int(ranks or 1))
        victims = [self.trainers()[int(rank)] for rank in ranks.split() or ["1"]]
        at_ns = time.monotonic_ns()
        os.kill(victims[0], signal.SIGKILL)
        for pid in victims[1:]:
            with suppress(ProcessLookupError):  # the launcher was quicker
                os.kill(pid, signal.SIGKILL)
        return at_ns

    def _wish(self, what: str, rank: int) -> int:
        known = len(self._files[rank].read())
        fresh = self.folder / "wish"
        fresh.write_text(what)
        fresh.rename(self.folder / f"wish-{rank}")

        def granted() -> list[Stamp]:
            return [stamp for stamp in self._files[rank].read()[known:] if stamp.moment == what]

        self._wait(lambda: bool(granted()), f"no {what}")
        return granted()[0].at_ns

    # --- the launcher's own words ---

    def phases(self, recovery: Recovery) -> dict[str, float]:
        """What came between a crash and the first step after it, in seconds; without what the launcher does not say."""
        tells = {"log": self._from_log, "journal": self._from_journal}.get(self.launcher.tells)
        at = {"crashed": recovery.crash_ns} | self._moments(recovery.crash_ns)
        at |= tells(recovery.crash_ns) if tells else {}
        return {
            phase: (at[end] - at[begin]) / 1e9 for phase, (begin, end) in PHASES.items() if begin in at and end in at
        }

    def _moments(self, after_ns: int) -> dict[str, int]:
        """When the slowest rank's script reached each of its stages."""
        found: dict[str, int] = {}
        for file in self._files:
            stamps = file.read()
            last = [stamp.attempt for stamp in stamps if stamp.moment == "begun" and stamp.at_ns > after_ns][-1]
            first = {stamp.moment: stamp.at_ns for stamp in reversed(stamps) if stamp.attempt == last}
            found |= {moment: max(at_ns, found.get(moment, 0)) for moment, at_ns in first.items()}
        return found

    def _from_log(self, after_ns: int) -> dict[str, int]:
        """torchrun's: it says what it is about to do."""
        words = {
            "Sending process": "detected", "failed (exitcode": "detected", "Rendezvous'ing": "ended",
            "Starting worker group": "started",
        }  # fmt: skip
        found: dict[str, int] = {}
        for line in (self.folder / "out").read_text(errors="replace").splitlines():
            at_ns = _logged_ns(line)
            for word, moment in words.items():
                if word in line and at_ns >= after_ns:
                    found.setdefault(moment, at_ns)
        return found

    def _from_journal(self, after_ns: int) -> dict[str, int]:
        path = next(iter(JobPaths(self.home, "bench").journals.glob("supervisor-*")))
        timeline = Timeline()
        timeline.add(Follower(path).poll().records)
        found: dict[str, int] = {}
        for bar in sorted(timeline.bars(), key=lambda bar: bar.begin_ns):
            if bar.begin_ns >= after_ns and bar.end_ns is not None:
                if bar.name == "teardown":
                    found.setdefault("detected", bar.begin_ns)
                if bar.name in ("teardown", "rendezvous"):
                    found.setdefault({"teardown": "ended", "rendezvous": "started"}[bar.name], bar.end_ns)
        return found

    def own_cpu_s(self) -> float:
        """CPU time so far of the launcher and all it started, but for the trainers."""
        trainers = set(self.trainers())
        own, found = [self.process.pid], _parents()
        for pid in own:
            own += [child for child, parent in found.items() if parent == pid and child not in trainers]
        return sum(_cpu_s(pid) for pid in own)


class _Lines:
    """A file of stamps that grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self._stamps: list[Stamp] = []

    def read(self) -> list[Stamp]:
        """All stamps so far."""
        with suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._at)
            whole = file.read().rpartition(b"\n")[0]
            self._at += len(whole) + bool(whole)
            for line in whole.decode().splitlines():
                pid, attempt, moment, _, at_ns = line.split()
                self._stamps.append(Stamp(int(pid), int(attempt), moment, int(at_ns)))
        return self._stamps


def _logged_ns(line: str) -> int:
    """The monotonic time of a line of torch's log, which has milliseconds; 0 if it is none."""
    match = re.match(r"[IWE](\d{4} \d\d:\d\d:\d\d\.\d{6}) ", line)
    if not match:
        return 0
    at = datetime.strptime(f"{datetime.now().year}{match[1]}", "%Y%m%d %H:%M:%S.%f")
    return int(at.timestamp() * 1e9) - time.time_ns() + time.monotonic_ns()


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def _cpu_s(pid: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
