"""`headway run` in a process of its own, as a user runs it or forked from a process that has imported torch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from click.testing import CliRunner

import warm
from headway.cli import main

TRAINER = Path(__file__).parent / "trainer.py"
HEADWAY = [sys.executable, "-m", "headway"]
WARM_HEADWAY = [sys.executable, str(Path(__file__).parent / "warm_headway.py")]
LONG_S = 500.0
"""Longer than anything takes on the slowest machine."""


def environment(**settings: str) -> dict[str, str]:
    """This one, with these."""
    return {**os.environ, **settings}


def start(
    words: Sequence[str], folder: Path, out: IO[str] | None = None, err: IO[str] | None = None, cold: bool = True,
    **settings: str,
) -> subprocess.Popen[str]:  # fmt: skip
    """Start `headway run` in a folder; its output goes to files there, or to the ones given.

    If not `cold`, the supervisor and its first zygote are forked from a process that has imported torch: one with the
    hooks of a fast start, if the words ask for all of it.
    """
    out, err = out or (folder / "stdout").open("a"), err or (folder / "stderr").open("a")
    with out, err, open(os.devnull) as null:
        streams: dict[str, Any] = {"stdin": null, "stdout": out, "stderr": err, "text": True}
        if cold:
            return subprocess.Popen([*HEADWAY, "run", *words], cwd=folder, env=environment(**settings), **streams)
        first = "hooked_fast" if "--fast-start" in words and "--without" not in words else "hooked"
        return warm.Popen(
            [*WARM_HEADWAY, "run", *words], first=[first], cwd=folder, env=environment(**settings), **streams
        )


def run(words: Sequence[str], folder: Path, cold: bool = True, **settings: str) -> tuple[int, str, str]:
    """Its exit code, and what it printed."""
    process = start(words, folder, cold=cold, **settings)
    try:
        code = process.wait(LONG_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        raise AssertionError(f"it did not end: {(folder / 'stderr').read_text()}") from None
    return code, (folder / "stdout").read_text(), (folder / "stderr").read_text()


def report(job: str) -> dict[str, Any]:
    """The job's report."""
    done = CliRunner().invoke(main, ["report", job, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def trained(folder: Path, rank: int = 0) -> list[tuple[int, int]]:
    """Attempt and number of each step that a rank of the trainer did."""
    path = folder / f"trained-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(attempt), int(step)) for attempt, step in map(str.split, lines)]


def wait_for(what: Callable[[], Any], process: "subprocess.Popen[str] | None" = None) -> Any:
    """What the function returns once that is something."""
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        if found := what():
            return found
        assert process is None or process.poll() is None, "it ended before"
        time.sleep(0.02)
    raise AssertionError("it never happened")


def zygotes(supervisor: int) -> list[int]:
    """The process that a supervisor's workers are forked from, if it has one now."""
    born = {}
    for pid, command in descendants(supervisor).items():
        with suppress(OSError):  # it has ended meanwhile
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if "as_zygote" in command and int(fields[1]) == supervisor:
                born[pid] = int(fields[19])
    return sorted(born, key=born.__getitem__)[:1]  # all others were forked from it


def descendants(pid: int) -> dict[int, str]:
    """The living processes below one, with their command lines."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: dict[int, str] = {}
    todo = [pid]
    while todo:
        for child in parents.get(todo.pop(), []):
            todo.append(child)
            with suppress(OSError):  # it has ended meanwhile, as what stands between a zygote and its forks does
                found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found
