"""Real processes that write on command, and readers of what reached the job's folder."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.accounting.attempts import Instant
from headway.accounting.ledger import JobAccounts, Ledger
from headway.events.clock import Clock
from headway.events.job import JobReader
from headway.events.journal import Cell
from headway.events.vocabulary import Mark, Process, ProcessGone, Record
from headway.paths import JobPaths

HERE = Path(__file__).parent
PATIENCE_S = 120.0


class Child:
    """A process with a journal in the spool, which does what it is told and answers when it is done."""

    def __init__(self, spool: Path, rank: int = 0, world_size: int = 1) -> None:
        environ = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        command = [sys.executable, str(HERE / "process_on_command.py"), str(spool), "job"]
        self.popen = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = self._answer()

    def tell(self, command: str) -> "Child":
        self._say(command)
        assert self._answer() == "done"
        return self

    def replace(self, number: int) -> None:
        """Makes it replace itself by `exec`, and go on in a journal of its own."""
        self._say(f"exec {number}")
        self.name = self._answer()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def finish(self) -> None:
        self.tell("finish")
        self.popen.communicate()

    def _say(self, command: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(command + "\n")
        self.popen.stdin.flush()

    def _answer(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()


class Reading:
    """A reader that stays, and all it was ever given."""

    def __init__(self, paths: JobPaths) -> None:
        self.reader = JobReader(paths)
        self.accounts = JobAccounts()
        self.records: dict[str, list[Record]] = {}
        self.problems: list[str] = []

    def poll(self) -> "Reading":
        for name, batch in self.reader.poll():
            self.records.setdefault(name, []).extend(batch.load()[0] if batch.load else batch.records)
            self.problems += batch.problems
            self.accounts.take(name, batch)
        return self

    def told(self, name: str) -> list[Record]:
        """What the process itself said."""
        return [record for record in self.records.get(name, []) if not isinstance(record, ProcessGone)]

    def gone(self, name: str) -> list[ProcessGone]:
        return [record for record in self.records.get(name, []) if isinstance(record, ProcessGone)]

    def cell(self, name: str) -> Cell | None:
        """Where the process's training loop stands, as far as accounting knows."""
        return self.accounts._timelines[name].cell

    def ledger(self) -> Ledger:
        clock = Clock()
        now = Instant(clock.boot(), clock.now_ns(), clock.wall_ns())
        ledger = self.accounts.ledger(now, self.reader.alive(), self.reader.lost())
        assert ledger is not None
        return ledger


def read(paths: JobPaths) -> Reading:
    """All that a new reader finds."""
    return Reading(paths).poll()


def has_ended(job: JobPaths) -> bool:
    """Whether a new reader finds a rank in the job, and that all is over."""
    reading = read(job)
    return any(isinstance(record, Process) for told in reading.records.values() for record in told) and (
        reading.ledger().state == "ended"
    )


def node_files(job: JobPaths) -> list[Path]:
    return sorted(job.nodes.glob("*.hwn"))


def pulse_files(job: JobPaths) -> list[Path]:
    return sorted(job.nodes.glob("*.hwp"))


def marks(reading: Reading, name: str) -> list[str]:
    return [record.name for record in reading.told(name) if isinstance(record, Mark)]


def account(ledger: Ledger) -> dict[str, Any]:
    """Everything a ledger says, in a form that can be compared."""
    return {
        "wall": ledger.wall_ns,
        "state": ledger.state,
        "sums": ledger.sums,
        "ranks": {rank: ledger.rank_sums(rank) for rank in ledger.ranks},
        "steps": ledger.steps,
        "failures": ledger.failures,
        "notes": ledger.notes,
    }


def eventually(true: Callable[[], object], what: str) -> None:
    """Waits for something that must come about; how long it takes is not tested."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"{what} did not come about in {PATIENCE_S} s"
        time.sleep(0.02)


def wait_for_end(pid: int) -> None:
    """Waits until a process is gone that may be nobody's child here."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poller = select.poll()  # `select` takes no descriptor above 1023, and a long test session may have more
    poller.register(pidfd, select.POLLIN)
    ready = poller.poll(PATIENCE_S * 1000)
    os.close(pidfd)
    assert ready, f"process {pid} did not end in {PATIENCE_S} s"


def collectors_of(spool: Path) -> list[int]:
    """The processes that collect from this spool."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"headway.collect" in words and f"--spool={spool}".encode() in words and words[1] == b"-m":
                found.append(int(entry.name))
    return found
