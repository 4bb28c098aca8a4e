"""A job's folder, read as one: all its processes' journals, while they are written or after."""

import time
from collections.abc import Iterator
from pathlib import Path

from headway.events.journal import Batch, Follower, is_being_written
from headway.events.node import NodeReader
from headway.paths import JOURNAL, NODE, PULSE, JobPaths

LOST_AFTER_S = 60.0
"""A process on another node counts as lost when its collector has not told of it for so long."""


class JobReader:
    """Follows every journal of a job. Readers do not disturb each other, nor the job."""

    def __init__(self, paths: JobPaths) -> None:
        self.paths = paths
        self._followers: dict[str, Follower] = {}
        self._alive: set[str] = set()
        self._finished: set[str] = set()
        self._nodes = NodeReader()

    def poll(self) -> Iterator[tuple[str, Batch]]:
        """Each process's new records since the last poll, and its step cell where that changed."""
        for path in _files(self.paths.journals, JOURNAL):
            name = path.name.removesuffix(JOURNAL)
            if name not in self._finished:
                yield name, self._follow(name, path)
        found = _files(self.paths.nodes, NODE, PULSE)
        for path in (path for path in found if path.name.endswith(PULSE)):
            yield from self._nodes.poll_pulse(path)
        for path in (path for path in found if path.name.endswith(NODE)):
            yield from self._nodes.poll(path)

    def _follow(self, name: str, path: Path) -> Batch:
        follower = self._followers.setdefault(name, Follower(path))
        lives = is_being_written(path)
        (self._alive.add if lives else self._alive.discard)(name)
        batch = follower.poll()
        if not lives and not batch.raw and follower.has_begun:
            self._finished.add(name)
        return batch

    def alive(self) -> set[str]:
        """The processes that live, as far as can be told from here."""
        limit = _lost_before()
        return self._alive | {name for name, seen in self._nodes.living.items() if seen > limit}

    def lost(self) -> set[str]:
        """The processes that lived when their node was last heard of, which is longer ago than `LOST_AFTER_S`."""
        limit = _lost_before()
        return {name for name, seen in self._nodes.living.items() if seen <= limit} - self._alive


def _lost_before() -> int:
    return time.time_ns() - int(LOST_AFTER_S * 1e9)


def _files(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith(suffixes)) if folder.is_dir() else []
