"""What all workers of one test run share: a folder, and servers that the first worker to need them starts."""

import fcntl
import os
import secrets
import socket
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


def free_port() -> int:
    """A port that nobody has. The kernel gives those below 32768 to nobody by itself, and no other test gets this one,
    so it is still free when it is used."""
    with open(folder() / "ports", "a+") as given:
        fcntl.flock(given, fcntl.LOCK_EX)
        given.seek(0)
        taken = given.read().split()
        while True:
            port = 10_000 + secrets.randbelow(22_000)
            with socket.socket() as probe:
                try:
                    probe.bind(("", port))
                except OSError:
                    continue
            if str(port) not in taken:
                print(port, file=given)
                return port
