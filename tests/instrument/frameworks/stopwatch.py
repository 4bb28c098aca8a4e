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
    line = json.dumps({"what": what, "at": time.monotonic()})
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
