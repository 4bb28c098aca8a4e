"""The DLRM of the examples under faults: one arm, one job, from its first command to its last process.

Every arm trains the same steps on the same data, and meets the same faults at the same steps. All are measured alike:
plain ones run under `headway exec`, which changes nothing about them, and the ledger says where their time went. A job
that was told to leave is started again by a loop around its launcher, as a scheduler would.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.launched import FT_LAUNCHER, TORCHRUN, Launcher, has_ft_launcher
from headway.accounting.ledger import Ledger
from headway.cli.source import Source
from headway.errors import UnknownJob
from headway.events.job import JobReader
from headway.observe.summary import summary
from headway.paths import JobPaths

EXAMPLE = Path(__file__).parents[1] / "examples" / "dlrm"
READ_AHEAD = 10
"""So many steps before its batch is trained on, a read fails: the worker is that far ahead."""
PATIENCE_S = 180.0
"""Longest wait for one more step: the cold compilation, and the minute a broken collective may take, included."""


class Fault(NamedTuple):
    """What happens when a step is trained for the first time."""

    kind: str
    """`kill`: SIGKILL of rank 1. `exception`: a read of rank 1 fails. `notice`: the launcher is told to leave."""
    at: int

    @property
    def since(self) -> int:
        """When it has to be arranged: batches are read before they are trained on."""
        return self.at - READ_AHEAD if self.kind == "exception" else self.at


@dataclass(frozen=True)
class Arm:
    """A way to train it."""

    name: str
    script: str
    command: tuple[str, ...]
    """What comes after `headway exec`, or after `headway run`."""
    options: tuple[str, ...] = ()
    """Of the script."""
    before: tuple[str, ...] = ()
    """What stands before the script's options."""
    environ: dict[str, str] = field(default_factory=dict)
    is_warm: bool = False
    """What jobs before it have left is there: compiled code, learned imports, plans."""
    is_headway: bool = False


def _plain(name: str, launcher: Launcher, *options: str, is_warm: bool = False) -> Arm:
    return Arm(name, "train_plain.py", launcher.command, options, environ=launcher.environ, is_warm=is_warm)


def headway_arm(name: str, *options: str, is_warm: bool = True, **environ: str) -> Arm:
    """`headway run` with these options more."""
    command = ("--nproc-per-node", "2", "--fast-start", *options)
    return Arm(name, "train_headway.py", command, environ=environ, is_warm=is_warm, is_headway=True)


PLAIN = _plain("torchrun", TORCHRUN)
BEST = _plain("torchrun, best settings", TORCHRUN, "--reuse-stager", is_warm=True)
NVIDIA = _plain("ft_launcher", FT_LAUNCHER)
COLD = headway_arm("headway, first of its kind", is_warm=False)
WARM = headway_arm("headway")


def arms() -> list[Arm]:
    """All that can be run here."""
    return [PLAIN, BEST, *([NVIDIA] if has_ft_launcher() else []), COLD, WARM]


FAIR = (
    "each attempt of torchrun's has a fresh store, without which most of its restarts fail; collectives give up after "
    "60 s; a loop starts the job again after a notice, for which the script has no handler; compiled code stays on the "
    "machine between attempts; one fixed interval, near the best for what its saves cost"
)
"""What the plain arms are given."""
BETTER = "memory that is reused from save to save, and compiled code that a job before it has left on the machine"
"""What the best settings add. ft_launcher is torchrun's script, under nvidia's launcher."""


@dataclass
class Outcome:
    """What became of a job."""

    arm: Arm
    report: dict[str, Any]
    """The summary of its ledger."""
    losses: dict[int, str]
    checkpoint: Path
    """Of the last step."""
    faults: list[tuple[Fault, int]]
    """Each with the number of the attempt that came after it."""
    recovering: list[tuple[float, float]]
    """Of each attempt, the seconds of recovery before its first step and after its last one."""

    def seconds(self, *prefixes: str, attempt: int | None = None) -> float:
        """Time in the buckets that begin so."""
        ledger = self.report["ledger"] if attempt is None else self.report["attempts"][attempt]["ledger"]
        return sum(seconds for key, seconds in ledger.items() if key.startswith(prefixes))

    def lost_to(self, kind: str) -> list[tuple[float, float]]:
        """For each fault of a kind the seconds until the job trained again, and those it spent on steps again."""
        numbers = [number for _, number in self.faults] + [len(self.recovering)]
        spans = zip(self.faults, numbers[1:], strict=True)
        return [(self._until(at, end), self._again(at, end)) for (fault, at), end in spans if fault.kind == kind]

    def _until(self, first: int, end: int) -> float:
        """Recovery from the last step before these attempts on, up to the next fault."""
        return sum(before for before, _ in self.recovering[first:end]) + sum(
            after for _, after in self.recovering[first - 1 : end - 1]
        )

    def _again(self, first: int, end: int) -> float:
        repeated = sum(self.seconds("waste.repeated_steps", attempt=each) for each in range(first, end))
        return repeated + sum(self.seconds("waste.unsaved_steps", attempt=each) for each in range(first - 1, end - 1))


class Stuck(Exception):
    """A job makes no step any more."""


class Drill:
    """One job of an arm in a folder of its own. `machine` is where what jobs leave behind is kept: a new one is a
    machine that has never seen such a job."""

    def __init__(self, arm: Arm, folder: Path, machine: Path, *, steps: int, save_every: int, step_s: float) -> None:
        self.arm, self.folder, self.machine, self.steps = arm, folder, machine, steps
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._environ = os.environ | arm.environ | {
            "OMP_NUM_THREADS": "1",
            "HEADWAY_HOME": str(machine / "home"),
            "TORCHINDUCTOR_CACHE_DIR": str((machine if arm.is_warm and not arm.is_headway else folder) / "compiled"),
            "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        self.job = f"{folder.name}-{time.strftime('%H%M%S')}"
        words = ["--steps", str(steps), "--folder", str(folder), "--step-s", str(step_s)]
        words += [] if arm.is_headway else ["--save-every", str(save_every)]
        self._command = [sys.executable, "-m", "headway", "run" if arm.is_headway else "exec", "--job", self.job]
        self._command += [*arm.command, str(EXAMPLE / arm.script), *arm.before, *words, *arm.options]
        self._source: Source | None = None
        self._losses, self._read = dict[int, str](), 0
        self.step = -1
        """The newest that was ever trained."""

    def run(self, faults: list[Fault], hear: Callable[["Drill"], None] = lambda _: None) -> Outcome:
        """Trains to the end through these faults; `hear` is called a few times a second."""
        due, met = list(faults), list[tuple[Fault, int]]()
        with open(self.folder / "log", "ab") as log:
            process, since = self._started(log), time.monotonic()
            try:
                while (code := process.poll()) is None or self.step + 1 < self.steps:
                    since = time.monotonic() if self._look() else since
                    if code is not None and self.step + 1 < self.steps:  # told to leave: a scheduler starts it again
                        self._check_left(code, met)
                        process = self._started(log)
                    if due and self.step >= due[0].since:
                        fault = due.pop(0)
                        met.append((fault, len(self.ledger().attempts)))
                        self._inject(fault, process)
                    if time.monotonic() - since > PATIENCE_S:
                        raise Stuck(f"{self.arm.name} made no step for {PATIENCE_S:g} s. {self._last_words()}")
                    hear(self)
                    time.sleep(0.05)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if process.returncode:
            raise Stuck(f"{self.arm.name} ended with exit code {process.returncode}. {self._last_words()}")
        self._look()
        ledger = self.ledger()
        recovering = [(before / 1e9, after / 1e9) for before, after in (each.recovering_ns for each in ledger.attempts)]
        return Outcome(self.arm, summary(ledger), self._losses, self._checkpoint(), met, recovering)

    def _started(self, log: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, env=self._environ, stdout=log, stderr=subprocess.STDOUT)

    def ledger(self) -> Ledger:
        """As of now."""
        if self._source is None:
            self._source = Source(JobReader(JobPaths(self.machine / "home", self.job)))
        return self._source.ledger()

    def known(self) -> Ledger | None:
        """The same; None before anything has begun."""
        try:
            return self.ledger()
        except UnknownJob:
            return None

    def _look(self) -> bool:
        """Reads what was trained since; whether that is anything."""
        path = self.folder / "losses.txt"
        if not path.exists():
            return False
        with open(path, encoding="utf-8") as file:
            file.seek(self._read)
            lines = file.read().rpartition("\n")[0]
        self._read += len(lines) + bool(lines)
        for line in lines.splitlines():
            step, loss = line.split()
            if self._losses.setdefault(int(step), loss) != loss:
                raise Stuck(f"{self.arm.name} trained step {step} to {loss}, and before to {self._losses[int(step)]}")
            self.step = max(self.step, int(step))
        return bool(lines)

    def _inject(self, fault: Fault, process: subprocess.Popen[bytes]) -> None:
        if fault.kind == "kill":
            os.kill(self.ledger().attempts[-1].attempt.members[1].process.pid, signal.SIGKILL)
        elif fault.kind == "exception":
            (self.folder / "corrupt-1").touch()
        else:
            process.send_signal(signal.SIGTERM)

    def _check_left(self, code: int, met: list[tuple[Fault, int]]) -> None:
        if not met or met[-1][0].kind != "notice":
            raise Stuck(f"{self.arm.name} ended with exit code {code} at step {self.step}. {self._last_words()}")

    def _last_words(self) -> str:
        return "Its last lines:\n" + "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-15:])

    def _checkpoint(self) -> Path:
        name = f"step-{self.steps:08}" if self.arm.is_headway else f"{self.steps:08}"
        return self.folder / "checkpoints" / name

    def wait_for_publisher(self, patient: bool = True) -> dict[str, Any] | None:
        """Until what the job has handed over is published, or else told to stop: it must not run beside another."""
        while self.arm.is_headway:
            mine = [each for each in self._headway("publish", "status", "--json") if each["job"] == self.job]
            if not mine or mine[0]["phase"] not in ("waiting", "running", "retrying"):
                return mine[0] if mine else None
            if not patient and mine[0]["pid"]:
                with suppress(ProcessLookupError):
                    os.kill(mine[0]["pid"], signal.SIGTERM)
            time.sleep(0.5)
        return None

    def _headway(self, *words: str) -> Any:
        command = [sys.executable, "-m", "headway", *words]
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)


def same_state(one: Path, other: Path) -> list[str]:
    """The tensors in which two checkpoints differ, bit for bit; all of them where one has others."""
    import torch

    first, second = _tensors(one), _tensors(other)
    names = sorted(first.keys() | second.keys())
    return [name for name in names if not _equal(torch, first.get(name), second.get(name))]


def _equal(torch: Any, one: Any, other: Any) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and bool(torch.equal(one, other))


def _tensors(checkpoint: Path) -> dict[str, Any]:
    """Of model and optimizer, by name."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    file = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, file)
    state = torch.load(file, weights_only=False)
    file.unlink()
    found: dict[str, Any] = {}

    def gather(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, part in value.items():
                gather(part, f"{name}.{key}")

    gather({key: state[key] for key in ("model", "optimizer")}, "")
    return found
