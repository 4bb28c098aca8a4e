"""Programs that nobody here wrote, unmodified, under `headway exec`: does its report say what a stopwatch says?

In come the checkouts of public projects, whose folder PROGRAMS names; out go rows that say how far each phase of each
run is off. The stopwatch runs in the program's process and knows nothing of headway; the wall time is taken around it
all. Where a program is run twice, the second run resumes the job from the checkpoint of the first.

Typical use::

    PROGRAMS=~/checkouts python -m bench programs

`PROGRAMS_PYTHON` is a Python with torch and torchvision; by default the one that runs this.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.measure import Row
from bench.programs.compare import (
    ETT_POINTS,
    Compared,
    Watched,
    compared,
    effective_percent,
    headway_phases,
    headway_rank_phases,
    notes,
    of_rank,
)
from bench.programs.programs import PROGRAMS, SOURCES, Program

HERE = Path(__file__).parent


def run(quick: bool) -> list[Row]:
    """The rows on programs; none where there are no checkouts."""
    sources = os.environ.get("PROGRAMS", "")
    if not sources:
        print(f"  skipped: PROGRAMS names no folder. In one, run: {SOURCES}")
        return []
    wanted = os.environ.get("PROGRAMS_ONLY", "").split()
    rows: list[Row] = []
    for program in PROGRAMS:
        if wanted and program.name not in wanted:
            continue
        lacking = missing(program, Path(sources))
        if lacking:
            print(f"  {program.name} is skipped: {lacking}")
        else:
            rows += measure(program, Path(sources).absolute())
    return rows


def missing(program: Program, sources: Path) -> str:
    """Why a program cannot be run here; empty if it can."""
    if not (sources / program.script).is_file():
        return f"there is no {sources / program.script}. Get it with: {SOURCES}"
    for module in program.needs:
        if subprocess.run([python(), "-c", f"import {module}"], capture_output=True, check=False).returncode:
            return f"{python()} has no {module} that works; PROGRAMS_PYTHON names another Python"
    return ""


def python() -> str:
    """The Python that runs the programs."""
    return os.environ.get("PROGRAMS_PYTHON") or sys.executable


def measure(program: Program, sources: Path) -> list[Row]:
    """Runs a program under headway and the stopwatch, and once more alone, and compares."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(os.environ.get("PROGRAMS_KEEP") or temporary, program.name)
        shutil.rmtree(folder, ignore_errors=True)
        places = _prepared(program, sources, folder / "measured")
        runs: list[list[Watched]] = []
        before: dict[str, Any] | None = None
        for number in range(len(program.runs)):
            runs.append(_measured(program, sources, places, number, folder))
            report = _report(folder / "home", program.name)
            (folder / f"report{number}.json").write_text(json.dumps(report, indent=1))
            name = program.name if len(program.runs) == 1 else f"{program.name}, run {number + 1}"
            if program.ranks == 1:
                rows += _rows(name, [run[0] for run in runs], report, before)
            else:
                rows += _rank_rows(name, runs[-1], report)
            before = report
        if not program.results:
            return rows
        alone = _prepared(program, sources, folder / "alone")
        for arguments in program.runs:
            _start([[python(), str(sources / program.script), *arguments]] * program.ranks, alone, [{}] * program.ranks)
        pairs = [(a / name, b / name) for a, b in zip(alone, places, strict=True) for name in program.results]
        differ = [a.name for a, b in pairs if _sum(a) != _sum(b)]
    note = f"{', '.join(program.results)}, of a run with headway and of one without"
    rows.append(Row(f"{program.name}: results differ", "files", [float(len(differ))], at_most=0.0, note=note))
    return rows


def _rows(name: str, runs: list[Watched], report: dict[str, Any], before: dict[str, Any] | None) -> list[Row]:
    """How far the report is off: the job's ETT up to now, and the phases of its last run."""
    stopwatch = dict(runs[-1].phases)
    if len(runs) > 1:
        stopwatch["down"] = (runs[-1].began_ns - runs[-2].ended_ns) / 1e9
    told = compared(stopwatch, headway_phases(report, before))
    print_table(name, told)
    ours, theirs = report["ett_percent"], effective_percent(runs)
    wall_s = (runs[-1].ended_ns - runs[0].began_ns) / 1e9
    rows = [
        Row(f"{name}: ETT", "points off", [abs(ours - theirs)], at_most=ETT_POINTS,
            peer=f"{ours:.2f}%, stopwatch {theirs:.2f}%"),
        Row("… wall time", "s off", [abs(report["wall_s"] - wall_s)], at_most=max(0.01 * wall_s, 0.03),
            peer=f"{report['wall_s']:.2f} s, stopwatch {wall_s:.2f} s"),
    ]  # fmt: skip
    return rows + _phase_rows(told)


def _rank_rows(name: str, runs: list[Watched], report: dict[str, Any]) -> list[Row]:
    """How far the report is off for each rank."""
    rows: list[Row] = []
    for number, (run, rank) in enumerate(zip(runs, report["ranks"], strict=True)):
        told = compared(of_rank(run), headway_rank_phases(rank))
        print_table(f"{name}, rank {number}", told)
        ours, theirs = rank["ett_percent"], effective_percent([run])
        peer = f"{ours:.2f}%, stopwatch {theirs:.2f}%"
        row = Row(f"{name}, rank {number}: ETT", "points off", [abs(ours - theirs)], at_most=ETT_POINTS, peer=peer)
        rows += [row, *_phase_rows(told)]
    return rows


def _phase_rows(told: list[Compared]) -> list[Row]:
    return [
        Row(f"… {one.phase}", "s off", [abs(one.off)], at_most=one.allowed,
            peer=f"{one.headway:.3f} s, stopwatch {one.stopwatch:.3f} s")
        for one in told
    ]  # fmt: skip


def print_table(name: str, told: list[Compared]) -> None:
    """Phase, stopwatch, headway, difference."""
    print(f"  {name:16} {'stopwatch':>10} {'headway':>10} {'off':>9}")
    for one in told:
        mark = "" if one.is_right else "  *"
        print(f"    {one.phase:14} {one.stopwatch:8.3f} s {one.headway:8.3f} s {one.off:+7.3f} s{mark}")


# --- running -------------------------------------------------------------------------------------------------------


def _prepared(program: Program, sources: Path, folder: Path) -> list[Path]:
    """A working folder for each rank."""
    places = [folder / str(rank) / program.name for rank in range(program.ranks)]
    for place in places:
        place.mkdir(parents=True)
        program.prepare(place, sources)
    return places


def _measured(program: Program, sources: Path, places: list[Path], number: int, folder: Path) -> list[Watched]:
    """One run of a program under headway and the stopwatch: what the stopwatch says of each rank."""
    script = str(sources / program.script)
    outs = [folder / f"notes{number}-{rank}" for rank in range(program.ranks)]
    told = [{"script": script, "out": str(out), **asdict(program.watch)} for out in outs]
    environs = [{"HEADWAY_HOME": str(folder / "home"), "STOPWATCH": json.dumps(one)} for one in told]
    headway = [sys.executable, "-m", "headway", "exec", "--job", program.name]
    command = [*headway, python(), str(HERE / "stopwatch.py"), script, *program.runs[number]]
    began, ended = _start([command] * program.ranks, places, environs)
    noted = [max((notes(path) for path in folder.glob(f"{out.name}.*")), key=len) for out in outs]
    return [Watched(one, program.watch.marks, began, ended, program.ranks == 1) for one in noted]


def _start(commands: list[list[str]], places: list[Path], environs: list[dict[str, str]]) -> tuple[int, int]:
    """Runs commands at once, each in its place. Returns when that began, and when the last had ended."""
    began, started = time.monotonic_ns(), []
    for rank, (command, place, environ) in enumerate(zip(commands, places, environs, strict=True)):
        fixed = {
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(place / "cache"),
        }
        words = [word.format(rank=rank) for word in command]
        with (place / "output").open("ab") as output:
            environ = {**os.environ, **fixed, **environ}
            started.append(subprocess.Popen(words, cwd=place, env=environ, stdout=output, stderr=output))
    codes = [process.wait() for process in started]
    ended = time.monotonic_ns()
    for code, command, place in zip(codes, commands, places, strict=True):
        if code:
            last = "\n".join((place / "output").read_text().splitlines()[-15:])
            raise RuntimeError(f"{' '.join(command)} failed:\n{last}")
    return began, ended


def _report(home: Path, job: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "headway", "report", job, "--json"]
    environ = {**os.environ, "HEADWAY_HOME": str(home)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _sum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
