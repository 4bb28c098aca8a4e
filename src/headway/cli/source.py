"""From a job's name on the command line to its accounts."""

import gc
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.accounting.attempts import Instant
from headway.accounting.ledger import JobAccounts, Ledger
from headway.config import Settings
from headway.errors import UnknownJob, nearest
from headway.events.clock import Clock
from headway.events.job import JobReader
from headway.events.vocabulary import Mark, Told
from headway.paths import JobPaths, jobs_in

if TYPE_CHECKING:
    from headway.compile.store import Store


@dataclass
class Source:
    """A job's folder, followed: each `ledger()` costs what was written since the last."""

    reader: JobReader
    accounts: JobAccounts = field(default_factory=JobAccounts)
    clock: Clock = field(default_factory=Clock)

    def ledger(self) -> Ledger:
        """The job's ledger as of now."""
        with _without_collections():
            return self._ledger()

    def _ledger(self) -> Ledger:
        for process, batch in self.reader.poll():
            self.accounts.take(process, batch)
        now = Instant(self.clock.boot(), self.clock.now_ns(), self.clock.wall_ns())
        ledger = self.accounts.ledger(now, self.reader.alive(), self.reader.lost())
        if ledger is None:
            raise UnknownJob(
                f"job {self.reader.paths.job!r} has no readable journal of any rank in {self.reader.paths.folder}: "
                f"its processes have not begun, or wrote elsewhere. Check HEADWAY_HOME where the job runs."
                + "".join(f"\n  {problem}" for problem in self.accounts.problems)
            )
        return ledger


@contextmanager
def _without_collections() -> Iterator[None]:
    """Reading a large job makes millions of objects and no cycle: looking for cycles all the while is half its cost."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def home() -> Path:
    """The folder that holds the jobs."""
    return Settings.from_environment().home_folder


def open_store(url: str | None = None) -> "Store":
    """A store of compiled code; by default the one in this home."""
    from headway.compile.store import Store
    from headway.compile.trust import Keys

    keys, mirror = Keys.at(home() / "keys"), Settings.from_environment().spool_folder / "compile"
    return Store(url or str(home() / "compile"), keys=keys, mirror=mirror)


def marks_of(reader: JobReader) -> dict[str, list[Mark]]:
    """What each process of a job has marked."""
    marks: dict[str, list[Mark]] = {}
    for name, batch in reader.poll():
        records = batch.load()[0] if batch.load else batch.records  # of a finished process, a node keeps the sum
        marks.setdefault(name, []).extend(each for each in records if isinstance(each, Mark))
    return marks


def compile_cache_of(marks: Iterable[Mark]) -> dict[str, Any] | None:
    """The bundle that a job has used last, as its journal tells: `key`, `url` and `about`; None if it had none."""
    told = [mark for mark in marks if mark.name == Told.COMPILE_CACHE and mark.attrs.get("url")]
    if not told:
        return None
    last = max(told, key=lambda mark: mark.t_ns).attrs
    return {"key": str(last["key"]), "url": str(last["url"]), "about": json.loads(last.get("about") or "{}")}


def open_job(name: str | None) -> Source:
    """The named job, or the one that was active last; UnknownJob if there is none."""
    folder = home()
    jobs = jobs_in(folder)
    if not jobs:
        raise UnknownJob(
            f"no jobs in {folder}. Call headway.current() in a training script and run it, or point HEADWAY_HOME "
            f"at the folder your jobs write to."
        )
    name = name or jobs[0]
    if name not in jobs:
        raise UnknownJob(f"no job {name!r} in {folder}: {nearest(name, jobs[:50])} `headway jobs` lists them.")
    return Source(JobReader(JobPaths(folder, name)))
