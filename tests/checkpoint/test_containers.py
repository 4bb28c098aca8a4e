"""Containers that share a network, with different folders at the same path: each job has its own checkpoints."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from keeping import end_keepers

import warm

pytestmark = [
    pytest.mark.needs("mount"),
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount one folder at another's path"),
]

OWN_MOUNTS, OWN_PROCESSES = 0x00020000, 0x20000000
PROGRAM = """
import ctypes, os, signal, subprocess, sys
import torch
folder, root, spaces, step = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
assert ctypes.CDLL(None).unshare(spaces) == 0
if spaces & 0x20000000 and os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "--bind", folder, root], check=True)
if spaces & 0x20000000:
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
import headway
ckpt = headway.Checkpointer(root, model=torch.nn.Linear(2, 2), interval=None)
found = ckpt.restore()
print("restored", found.step if found else None, flush=True)
ckpt.save(step, wait=True)
print("saved", flush=True)
sys.stdin.read()
"""


@contextmanager
def container(folder: Path, root: Path, step: int, spaces: int = OWN_MOUNTS) -> Iterator["subprocess.Popen[str]"]:
    """A job whose folder is at `root`. It has saved a step, and is killed in the end."""
    folder.mkdir(exist_ok=True)
    environ = {**os.environ, "HEADWAY_HOME": str(folder.parent / "home"), "HEADWAY_JOB": folder.name}
    words = [sys.executable, "-c", PROGRAM, str(folder), str(root), str(spaces), str(step)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with warm.Popen(words, env=environ, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def shared_path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "checkpoints"
    path.mkdir()
    yield path
    end_keepers(path)


def said(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(2)]


def test_a_job_never_restores_what_another_container_has_in_memory(tmp_path: Path, shared_path: Path) -> None:
    with container(tmp_path / "one", shared_path, 1) as one:
        assert said(one) == ["restored None", "saved"]
    with container(tmp_path / "two", shared_path, 2) as two:  # the first one's keeper still holds its memory
        assert said(two) == ["restored None", "saved"]
    assert [sorted(path.name for path in (tmp_path / name).glob("step-*")) for name in ("one", "two")] == [
        ["step-00000001"],
        ["step-00000002"],
    ]


@pytest.mark.thorough
def test_jobs_of_containers_with_their_own_processes_run_side_by_side(tmp_path: Path, shared_path: Path) -> None:
    spaces = OWN_MOUNTS | OWN_PROCESSES
    with (
        container(tmp_path / "one", shared_path, 1, spaces) as one,
        container(tmp_path / "two", shared_path, 2, spaces) as two,
    ):
        assert said(one) == said(two) == ["restored None", "saved"]
