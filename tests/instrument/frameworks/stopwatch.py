"""A stopwatch for training scripts: when what began and ended, one line each, also if the process is killed then."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(os.environ["STOPWATCH"])


def note(what: str) -> None:
    """Something happens now."""
    queued_s = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9  # so long it has waited for a core
    line = json.dumps({"what": what, "at": time.monotonic(), "queued_s": queued_s})
    with open(FOLDER / f"{os.getpid()}.jsonl", "a") as file:
        file.write(line + "\n")


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Something begins now, and ends with the block."""
    note(f"{what} begins")
    try:
        yield
    finally:
        note(f"{what} ends")
