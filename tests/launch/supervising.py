"""Running `headway run` as a user would, in a process of its own."""

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

TRAINER = Path(__file__).parent / "trainer.py"
HEADWAY = [sys.executable, "-m", "headway"]
LONG_S = 120.0
"""Longer than anything takes on the slowest machine."""


def environment(**settings: str) -> dict[str, str]:
    """This one, with these."""
    return {**os.environ, **settings}


def start(
    words: Sequence[str], folder: Path, out: IO[str] | None = None, err: IO[str] | None = None, **settings: str
) -> subprocess.Popen[str]:
    """`headway run` with these words in a folder; its output goes to files there, or to the ones given."""
    out, err = out or (folder / "stdout").open("a"), err or (folder / "stderr").open("a")
    with out, err:
        return subprocess.Popen(
            [*HEADWAY, "run", *words], cwd=folder, env=environment(**settings), stdout=out, stderr=err, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip


def run(words: Sequence[str], folder: Path, **settings: str) -> tuple[int, str, str]:
    """Its exit code, and what it printed."""
    process = start(words, folder, **settings)
    try:
        code = process.wait(LONG_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        raise AssertionError(f"it did not end: {(folder / 'stderr').read_text()}") from None
    return code, (folder / "stdout").read_text(), (folder / "stderr").read_text()


def report(job: str) -> dict[str, Any]:
    """The job's report."""
    done = subprocess.run([*HEADWAY, "report", job, "--json"], capture_output=True, text=True, check=True)
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
