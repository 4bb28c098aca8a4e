"""Starting the node's collector: exactly one, whoever of its processes comes first."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from headway.paths import JobPaths

LOG = "collector.log"
"""In the spool's job folder: what the collector could not do."""

_START_TIMEOUT_S = 10.0


def ensure_collector(spool: Path, home: Path, job: str, roll_up: str = "") -> str | None:
    """Starts a collector from `spool` to `home` unless one is at work. Returns why it could not; never raises.

    To be called when this process's journal exists: a collector that is about to leave looks once more after it has
    let go of its lock, and finds it. `roll_up` names a function, `module:function`, that sums up finished processes.
    """
    try:
        paths = JobPaths(spool.absolute(), job)
        lock = take_lock(paths)
        if lock is not None:
            try:
                _spawn(paths, _command(spool.absolute(), home.absolute(), job, lock, roll_up), lock)
            finally:
                os.close(lock)
    except Exception as error:  # a job can do without its collector: whoever called can say that it has none
        return f"{type(error).__name__}: {error}"
    return None


def take_lock(spool: JobPaths) -> int | None:
    """A descriptor that holds the lock of this spool's collector; None if another one has it."""
    spool.make()
    lock = os.open(spool.collector_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        os.close(lock)
        raise
    return lock


def _command(spool: Path, home: Path, job: str, lock: int, roll_up: str) -> list[str]:
    options = [f"--spool={spool}", f"--home={home}", f"--job={job}", f"--lock-fd={lock}", f"--roll-up={roll_up}"]
    return [sys.executable, "-m", "headway.collect", *options]


def _spawn(paths: JobPaths, command: list[str], lock: int) -> None:
    """Runs the command as nobody's child, with the lock in its hands: it is never free in between."""
    # Of the paths of this process only headway's own: the job's modules may shadow the standard library's.
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "HEADWAY_DISABLE": "1"}
    log = os.open(paths.folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        # The shell leaves it to init: no zombie here, and whoever ends this process's children does not end it too.
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *command], env=environ, cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=log, pass_fds=(lock,), start_new_session=True, check=True,
            timeout=_START_TIMEOUT_S,
        )  # fmt: skip
    finally:
        os.close(log)
