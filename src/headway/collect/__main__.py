"""`python -m headway.collect`: the collector of one node, until its processes are gone."""

import argparse
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from headway.collect.collector import LINGER_S, Collector
from headway.collect.source import RollUp
from headway.collect.start import take_lock
from headway.errors import InputError
from headway.paths import JobPaths


def main(argv: Sequence[str] | None = None) -> int:
    """Collects until told to stop or left alone; at once if another collector is at work."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        spool, job = JobPaths(options.spool, options.job), JobPaths(options.home, options.job)
    except InputError as error:
        parser.error(str(error))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    lock = options.lock_fd if options.lock_fd is not None else take_lock(spool)
    while lock is not None:
        collector = Collector(spool, job, roll_up=_resolve(options.roll_up))
        collector.run(stop, linger_s=options.linger)
        os.close(lock)
        # A process that began just now found the lock taken, and counts on us.
        collector.look()
        lock = take_lock(spool) if collector.anyone_lives and not stop.is_set() else None
        collector.close()
    return 0


def _resolve(name: str) -> RollUp | None:
    try:
        return pkgutil.resolve_name(name) if name else None
    except (ImportError, AttributeError, ValueError) as error:
        print(f"--roll-up {name} is not there ({error}): processes are not rolled up", file=sys.stderr)
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m headway.collect", description=__doc__, allow_abbrev=False)
    parser.add_argument("--spool", type=Path, required=True, help="folder on this node that the processes write to")
    parser.add_argument("--home", type=Path, required=True, help="folder that holds the jobs")
    parser.add_argument("--job", required=True, help="name of the job")
    parser.add_argument(
        "--linger", type=float, default=LINGER_S, help="seconds to stay when no process lives (%(default)s)"
    )
    parser.add_argument("--roll-up", metavar="MODULE:FUNCTION", default="",
                        help="makes one record of a finished process's many")  # fmt: skip
    parser.add_argument("--lock-fd", type=int, help="inherited descriptor that already holds the collector's lock")
    return parser


if __name__ == "__main__":
    sys.exit(main())
