"""A job's folder, read as one: all its processes' journals, while they are written or after."""

import time
from collections.abc import Iterator
from pathlib import Path

from headway.events.journal import Batch, Follower, is_being_written
from headway.events.node import NodeReader
from headway.paths import JOURNAL, NODE, JobPaths

LOST_AFTER_S = 60.0
"""A process on another node counts as dead when its collector has not told of it for so long."""


class JobReader:
    """Follows every journal of a job. Readers do not disturb each other, nor the job."""

    def __init__(self, paths: JobPaths) -> None:
        self.paths = paths
        self._followers: dict[str, Follower] = {}
        self._alive: set[str] = set()
        self._finished: set[str] = set()
        self._nodes = NodeReader()

    def poll(self) -> Iterator[tuple[str, Batch]]:
        """Each process's new records since the last poll."""
        for path in _files(self.paths.journals, JOURNAL):
            name = path.name.removesuffix(JOURNAL)
            if name not in self._followers:
                self._followers[name] = Follower(path)
            if name not in self._finished:
                lives = is_being_written(path)
                (self._alive.add if lives else self._alive.discard)(name)
                batch = self._followers[name].poll()
                if not lives and not batch.raw and self._followers[name].has_begun:
                    self._finished.add(name)
                yield name, batch
        for path in _files(self.paths.nodes, NODE):
            yield from self._nodes.poll(path)

    def alive(self) -> set[str]:
        """The processes that live, as far as can be told from here."""
        limit = time.time_ns() - int(LOST_AFTER_S * 1e9)
        return self._alive | {name for name, (alive, seen) in self._nodes.seen.items() if alive and seen > limit}


def _files(folder: Path, suffix: str) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith(suffix)) if folder.is_dir() else []
