"""What all workers of one test run share: a folder, and servers that the first worker to need them starts."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

FOLDER = "TESTS_FOLDER"
"""The environment variable with the run's folder. The guard sets it, and removes the folder when pytest has ended."""


def folder() -> Path:
    """The folder of this test run."""
    return Path(os.environ[FOLDER])


def once(name: str, start: Callable[[], str]) -> str:
    """What `start` returned in the first worker to ask. What it has started lives until the guard ends it."""
    path = folder() / name
    with open(folder() / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(start())
        return path.read_text()
