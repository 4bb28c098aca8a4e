"""How often a job has failed, over all its runs."""

import json
import time
from pathlib import Path

import pytest

from headway.checkpoint.history import History
from headway.checkpoint.layout import HISTORY
from headway.checkpoint.lease import Owner
from headway.storage import Storage, open_storage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "root")


def who_ran(seconds: float) -> Owner:
    """A run that ended without a goodbye, after so long."""
    began = 10**18
    return Owner(
        session="one", job="llama", node="n", boot="b", pid=1, started=1, began_ns=began,
        seen_ns=began + int(seconds * 1e9),
    )  # fmt: skip


def known(storage: Storage) -> dict[str, float]:
    return History(storage, None, first=True).failures()


def restore(history: History, tier: str | None) -> None:
    history.restored(tier)
    history.wait()


def test_a_job_that_never_failed_has_no_failures(storage: Storage) -> None:
    history = History(storage, None, first=True)
    restore(history, None)
    assert history.failures()["process"] == history.failures()["node"] == 0


def test_a_run_without_a_goodbye_has_failed_alone_if_its_memory_is_still_there(storage: Storage) -> None:
    restore(History(storage, who_ran(100), first=True), "memory")
    assert (known(storage)["process"], known(storage)["node"]) == (1, 0)


@pytest.mark.parametrize("tier", ["local", "disk", "remote", None])
def test_otherwise_its_node_has(storage: Storage, tier: str | None) -> None:
    restore(History(storage, who_ran(100), first=True), tier)
    assert (known(storage)["process"], known(storage)["node"]) == (0, 1)


def test_every_restart_adds_to_what_was_known(storage: Storage) -> None:
    for tier in ("memory", "disk", "memory"):
        restore(History(storage, who_ran(100), first=True), tier)
    found = known(storage)
    assert (found["process"], found["node"]) == (2, 1)
    assert found["over_s"] >= 300


def test_one_failure_counts_once_however_often_it_is_restored_from(storage: Storage) -> None:
    history = History(storage, who_ran(100), first=True)
    restore(history, "memory")
    restore(history, "memory")
    assert known(storage)["process"] == 1


def test_a_run_that_ends_well_adds_its_time_and_no_failure(storage: Storage) -> None:
    restore(History(storage, who_ran(100), first=True), "memory")
    before = json.loads(storage.read(HISTORY))["over_s"]
    history = History(storage, None, first=True)
    time.sleep(0.05)
    history.close()
    assert json.loads(storage.read(HISTORY))["over_s"] > before
    assert known(storage)["process"] == 1


def test_only_the_first_rank_writes(storage: Storage) -> None:
    history = History(storage, who_ran(100), first=False)
    restore(history, "memory")
    history.close()
    assert storage.names(".headway") == []


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"process": "many", "node": 0, "over_s": 0}', b"\xff"])
def test_an_unreadable_history_is_none(storage: Storage, text: bytes) -> None:
    storage.write(".headway/history.json", text)
    assert known(storage)["process"] == 0


def test_a_root_that_cannot_be_written_only_costs_the_memory_of_it(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "root").write_text("no folder")
    history = History(storage, who_ran(100), first=True)
    restore(history, "memory")
    history.close()
    assert history.failures()["process"] == 1
