"""A process's own last delivery, where its collector may not outlive it."""

import threading
import time
from pathlib import Path

from headway.collect.nodefile import NodeFile
from headway.collect.source import Source
from headway.paths import JobPaths

TIMEOUT_S = 5.0
"""Longest time that a process's end waits for a job's folder that does not answer."""


def deliver_once(journal: Path, home: Path, job: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """Brings a journal that is closed to the job's folder, in a node file of its own. Returns why it could not; never
    raises. What the collector brought as well, readers count once."""
    problems = [f"{home} did not answer in {timeout_s:g} s"]

    def deliver() -> None:
        try:
            chunks = Source(journal).chunks(time.time_ns())
            NodeFile(JobPaths(home, job)).deliver(b"".join(chunk.encode() for chunk in chunks))
            problems.clear()
        except Exception as error:  # the process is leaving, and leaves well whatever becomes of its journal
            problems[:] = [f"{type(error).__name__}: {error}"]

    thread = threading.Thread(target=deliver, name="headway-farewell", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # from Python 3.12 on, no thread can be started at exit: then there is no limit
        deliver()
    else:
        thread.join(timeout_s)
    return problems[0] if problems else None
