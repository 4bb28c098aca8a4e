"""File systems that a test has for itself."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs of its own."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "headway-test", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs a tmpfs of its own, run as root where mounting is allowed: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def bound(below: Path, above: Path) -> Iterator[Path]:
    """A folder seen through FUSE."""
    above.mkdir()
    try:
        done = subprocess.run(["bindfs", below, above], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs bindfs: apt-get install bindfs, and run as root")
    if done.returncode:
        pytest.skip(f"needs FUSE: {done.stderr.strip()}")
    try:
        yield above
    finally:
        subprocess.run(["umount", "--lazy", above], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    with mounted(tmp_path / "small", "size=1m,mode=700") as folder:
        yield folder


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A file system that cannot be written, not even by root."""
    with mounted(tmp_path / "read-only", "size=1m,mode=700") as folder:
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        yield folder
