"""A spool, a job's folder, and processes to fill them. Nothing that a test started outlives it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from collecting import Child, collectors_of, wait_for_end

from headway.paths import JobPaths


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[JobPaths]:
    """The spool of a job named `job`. No collector from it outlives the test."""
    folder = tmp_path / "spool"
    yield JobPaths(folder, "job").make()
    for pid in collectors_of(folder):
        with suppress(ProcessLookupError):  # a collector leaves by itself when nobody lives
            os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)


@pytest.fixture
def job(tmp_path: Path) -> JobPaths:
    """The same job's folder, elsewhere."""
    return JobPaths(tmp_path / "home", "job")


@pytest.fixture
def begin(spool: JobPaths) -> Iterator[Callable[..., Child]]:
    """Starts processes that write to the spool on command."""
    children: list[Child] = []

    def start(rank: int = 0, world_size: int = 1) -> Child:
        children.append(Child(spool.folder.parent.parent, rank, world_size))
        return children[-1]

    yield start
    for child in children:
        child.popen.kill()
        child.popen.communicate()


@pytest.fixture
def run_collector(spool: JobPaths, job: JobPaths) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Starts collectors the way a shell would."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> "subprocess.Popen[bytes]":
        folders = [f"--spool={spool.folder.parent.parent}", f"--home={job.folder.parent.parent}", "--job=job"]
        started.append(subprocess.Popen([sys.executable, "-m", "headway.collect", *folders, *options]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
