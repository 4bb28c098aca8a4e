"""From a crash to the first step after it: `headway run` next to torchrun and nvidia's ft_launcher.

All run the same script with two gloo ranks and take turns, round by round. In every round each starts a job and makes
it fail in four ways, one after the other; in the first two rounds, in twelve. torchrun runs with its restart defect
worked around: as it is, most of its restarts fail and cost another one, or hang. The crashes that are only counted come
in one long job each.
"""

import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

from bench.launched import (
    FT_LAUNCHER,
    HEADWAY,
    PHASES,
    TORCHRUN,
    TORCHRUN_AS_IT_IS,
    Job,
    Launcher,
    Stuck,
    has_ft_launcher,
)
from bench.measure import Row, short

FAULTS = {"kill": 25.0, "exception": 25.0, "cut-off": 25.0, "blocked": 25.0}
"""How a job fails, and how many times as long torchrun must take at least to train again."""
WORDS = {
    "kill": "SIGKILL of a rank",
    "exception": "an exception in a rank",
    "cut-off": "an exception that names a lost peer",
    "blocked": "SIGKILL, and the survivor is blocked",
    "kill 0 1": "SIGKILL of both ranks",
    "terminate": "SIGTERM of a rank",
    "segfault": "a segmentation fault",
    "bus": "a bus error",
    "abort": "an abort",
    "recursion": "an exception with a long traceback",
    "exit": "sys.exit(1)",
    "leave": "os._exit(1)",
}
"""The twelve ways in which a rank ends here."""
OTHER_ROUNDS = 2
"""In so many rounds a job fails in all of these ways."""
MIXED = (
    "kill", "exception", "exit", "kill 0", "segfault", "kill 0 1", "abort 0", "exception 0", "exit 0", "segfault 0",
)  # fmt: skip
STEADY, SHORT = 100, 12
"""Steps before each fault, about two seconds of them; and before those that are only counted."""

Samples = dict[str, list[float]]


def run(quick: bool) -> list[Row]:
    """The rows on recovery."""
    launchers = [HEADWAY, TORCHRUN]
    if has_ft_launcher():
        launchers.append(FT_LAUNCHER)
    else:
        print("  ft_launcher is skipped: nvidia-resiliency-ext is not installed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        samples = _rounds(launchers, folder, 1 if quick else 5)
        starts = _starts(folder, 1 if quick else 10)
        for launcher, more in starts.items():
            samples[launcher]["start"] += more
        crashes = _counted(folder, 5 if quick else 100, 1 if quick else 10)
        return [
            *_recovery_rows(samples), *_phase_rows(samples), *crashes, _start_row(samples),
            _cpu_row(folder, 2 if quick else 15),
        ]  # fmt: skip


# --- time to recover -------------------------------------------------------------------------------------------------


def _rounds(launchers: list[Launcher], folder: Path, rounds: int) -> dict[str, Samples]:
    """Every launcher's samples, by what was measured. Caches fill in a first round, of starts alone."""
    samples: dict[str, Samples] = {launcher.name: {} for launcher in launchers}
    for number, launcher in _turns(launchers, rounds):
        faults = () if number == 0 else WORDS if number <= OTHER_ROUNDS and launcher is not FT_LAUNCHER else FAULTS
        took = _session(launcher, folder / f"{launcher.name}-{number}", faults)
        for what, seconds in took.items() if number else ():
            samples[launcher.name].setdefault(what, []).append(seconds)
    return samples


def _turns(launchers: list[Launcher], rounds: int) -> Iterator[tuple[int, Launcher]]:
    for number in range(rounds + 1):
        for at in range(len(launchers)):
            yield number, launchers[(number + at) % len(launchers)]


def _session(launcher: Launcher, folder: Path, faults: Iterable[str]) -> dict[str, float]:
    """Starts a job and makes it fail in these ways. Returns what everything took, in seconds."""
    with Job(launcher, folder) as job:
        last = job.trains(job.started_ns, STEADY)
        took = {"start": last.seconds}
        for fault in faults:
            last = job.trains(job.crash(fault), STEADY)
            took[fault] = last.seconds
            took |= {f"{fault} {phase}": seconds for phase, seconds in job.phases(last).items()}
        return took


def _recovery_rows(samples: dict[str, Samples]) -> list[Row]:
    ours, theirs = samples["headway"], samples["torchrun"]
    nvidia = samples.get("ft_launcher", {})
    rows = []
    for fault, name in WORDS.items():
        times, note = FAULTS.get(fault), _parts(ours, fault) if fault in FAULTS else ""
        rows.append(Row(name, "s", ours[fault], theirs[fault], "torchrun", times=times, note=note))
        if nvidia and fault in FAULTS:
            rows.append(Row("…", "s", ours[fault], nvidia[fault], "ft_launcher"))
    return rows


def _parts(ours: Samples, fault: str) -> str:
    """Where headway's time goes."""
    took = {phase: ours[key] for phase in PHASES if (key := f"{fault} {phase}") in ours}
    return ", ".join(f"{phase} {1000 * median(seconds):.0f} ms" for phase, seconds in took.items())


def _phase_rows(samples: dict[str, Samples]) -> list[Row]:
    """Each phase apart, so that imports do not hide the rest."""
    shown = [f"kill {phase}" for phase in list(PHASES)[:4]] + ["exception detection", "blocked teardown"]
    rows = []
    for what in shown:
        fault, _, phase = what.partition(" ")
        ours, theirs = ([1000 * s for s in samples[who].get(what, [])] for who in ("headway", "torchrun"))
        if ours and theirs:
            rows.append(Row(f"{phase} after {WORDS[fault]}", "ms", ours, theirs, "torchrun", times=1.0))
        else:
            print(f"  {what} is left out: a launcher did not say when it was")
    return rows


# --- many crashes ----------------------------------------------------------------------------------------------------


def _counted(folder: Path, ours: int, theirs: int) -> list[Row]:
    """How many crashes of all kinds were not over with the first restart."""
    missed, notes = _missed(HEADWAY, folder / "many", ours)
    peers = []
    for launcher in (TORCHRUN, TORCHRUN_AS_IT_IS):
        count, more = _missed(launcher, folder / f"many-{launcher.name}", theirs)
        peers.append(f"{count} of {theirs} {launcher.name}{' with a fresh store' if launcher is TORCHRUN else ''}")
        notes += more
    name = f"of {ours} crashes, not over with one restart"
    return [Row(name, "crashes", [float(missed)], peer=", ".join(peers), at_most=ours // 100, note="; ".join(notes))]


def _missed(launcher: Launcher, folder: Path, crashes: int) -> tuple[int, list[str]]:
    """How many of so many crashes took more than one restart, and a note on each of those."""
    notes: list[str] = []
    done = 0
    while done < crashes:
        with Job(launcher, folder / str(done)) as job:
            job.trains(job.started_ns, SHORT)
            restarts = 1
            while done < crashes and restarts:  # from a job that does not train again, another one takes over
                fault = MIXED[done % len(MIXED)]
                done += 1
                restarts = _restarts(job, fault)
                if restarts != 1:
                    notes.append(f"{launcher.name}: {restarts or 'no'} restarts helped after crash {done} ({fault})")
    return len(notes), notes


def _restarts(job: Job, fault: str) -> int:
    """How many restarts it took to train again; 0 if it did not."""
    try:
        return job.trains(job.crash(fault), SHORT).restarts
    except Stuck:
        return 0


# --- without a crash -------------------------------------------------------------------------------------------------


def _starts(folder: Path, rounds: int) -> dict[str, list[float]]:
    """From the command to the first step, in seconds."""
    found: dict[str, list[float]] = {HEADWAY.name: [], TORCHRUN.name: []}
    for number, launcher in _turns([HEADWAY, TORCHRUN], rounds):
        with Job(launcher, folder / f"start-{launcher.name}-{number}") as job:
            took = job.trains(job.started_ns).seconds
        if number:
            found[launcher.name].append(took)
    return found


def _start_row(samples: dict[str, Samples]) -> Row:
    ours, theirs = samples["headway"]["start"], samples["torchrun"]["start"]
    return Row("from the command to the first step", "s", ours, theirs, "torchrun", times=0.95)


def _cpu_row(folder: Path, window_s: float) -> Row:
    """What the launcher itself takes while the job trains."""
    shares = {}
    for launcher in (HEADWAY, TORCHRUN):
        with Job(launcher, folder / f"cpu-{launcher.name}") as job:
            job.trains(job.started_ns, 200)
            shares[launcher.name] = [_share(job, window_s) for _ in range(3)]
    peer = f"{short(median(shares['torchrun']))} % torchrun"
    return Row("the supervisor's own CPU, of a core", "%", shares["headway"], peer=peer, at_most=1.0)


def _share(job: Job, window_s: float) -> float:
    begin, before = time.monotonic(), job.own_cpu_s()
    time.sleep(window_s)
    return 100 * (job.own_cpu_s() - before) / (time.monotonic() - begin)
