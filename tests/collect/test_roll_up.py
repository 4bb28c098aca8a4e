"""Roll-ups: what a collector makes of finished processes, and that readers need not trust it."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from collecting import Reading

from headway.accounting.ledger import Ledger
from headway.accounting.rollup import roll_up
from headway.collect import Collector
from headway.events.journal import Cell
from headway.events.vocabulary import Record
from headway.paths import JobPaths
from headway.testing import Story


def spooled(folder: Path) -> Story:
    """A spool with a job that failed once, after its collector has come too late to see anything but dead processes."""
    story = Story(folder / "spool")
    for rank in (0, 1):
        told = story.rank(rank, of=2).span("train_module_creation", 5).steps(300, each=1.0, data=0.1, stall={150: 60.0})
        told.saved(200).killed()
    for rank in (0, 1):
        told = story.rank(rank, of=2, start=500).restored(200).steps(900, each=1.0, first=200)
        told.saved(1100).finished()
    return story


def read(folder: Path) -> tuple[Reading, Ledger]:
    reading = Reading(JobPaths(folder / "home", "story")).poll()
    return reading, reading.ledger()


def figures(ledger: Ledger) -> object:
    return ledger.sums, [ledger.rank_sums(rank) for rank in ledger.ranks], ledger.steps, ledger.failures


def test_a_rolled_up_job_has_the_ledger_of_its_records(tmp_path: Path) -> None:
    story = spooled(tmp_path)
    Collector(story.paths, JobPaths(tmp_path / "home", "story"), roll_up=roll_up).collect()
    reading, ledger = read(tmp_path)
    assert figures(ledger) == figures(story.ledger())
    assert all(timeline.unroll for timeline in reading.accounts._timelines.values()), "none was folded again"
    assert [view.pieces() for a in ledger.attempts for view in a.views.values()] == [
        view.pieces() for a in story.ledger().attempts for view in a.views.values()
    ]


def other_version(records: Iterable[Record], cell: Cell | None) -> bytes:
    return json.dumps(json.loads(roll_up(records, cell)) | {"version": 0}).encode()


def fails(records: Iterable[Record], cell: Cell | None) -> bytes:
    raise RuntimeError("no")


@pytest.mark.parametrize("made", [other_version, fails, lambda records, cell: b"{", lambda records, cell: b""])
def test_a_roll_up_that_cannot_be_used_is_done_without(tmp_path: Path, made: object) -> None:
    story = spooled(tmp_path)
    collector = Collector(story.paths, JobPaths(tmp_path / "home", "story"), roll_up=made)  # type: ignore[arg-type]
    collector.collect()
    assert not collector.problem
    assert figures(read(tmp_path)[1]) == figures(story.ledger())
