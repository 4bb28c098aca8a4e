"""A run begins where memory is newer than storage, another run is still ending, or something is in the way."""

import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trainers
from file_systems import mounted
from keeping import end_keepers, halted, keeper, keeper_with_clock, keepers
from torch import nn
from trainers import Obedient, Orders, folder_of, has, wait_for

from headway.checkpoint import Checkpointer
from headway.checkpoint.guard import Guard
from headway.checkpoint.lease import Owner, Taken, refresh
from headway.checkpoint.link import Link
from headway.checkpoint.newest import Rank, look
from headway.errors import PlatformError
from headway.storage import Storage, open_storage


@pytest.fixture(autouse=True, scope="session")
def _warm() -> None:
    trainers.warm_up()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- memory that is newer than what is stored -------------------------------------------------------------------------


def in_memory_alone(root: Path, home: Path) -> None:
    """A trainer saves steps 1 and 2, holds step 3 in memory, and is killed."""
    with Obedient(root, home) as trainer:
        hold_step_3(trainer)


def hold_step_3(trainer: Obedient | Orders) -> None:
    for step in (1, 2):
        trainer.train(step)
        trainer.save(step)
        assert trainer.wait() == ""
    trainer.train(3)
    trainer.hold(3)


def delete(folder: Path) -> None:
    """Delete a checkpoint as a user does, while the uploader may still remove its own files from it."""
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_what_only_memory_has_is_restored_and_how_to_refuse_it_is_said(root: Path, home: Path) -> None:
    in_memory_alone(root, home)
    with Obedient(root, home) as trainer:
        assert trainer.restore() == (3, "memory")
    said = "headway: step 3 is restored from memory; the newest stored one is step 2. To take that, set HEADWAY_SKIP_CH"
    assert said in (home / "said").read_text()


def test_what_was_deleted_does_not_come_back_from_memory_nor_does_what_came_after_it(root: Path, home: Path) -> None:
    in_memory_alone(root, home)
    delete(folder_of(root, 2))
    ahead = look(open_storage(root), Rank(number=0, ranks=1, on_node=1))
    assert ahead is not None
    assert ahead.folder == "step-00000001", "what was deleted is read ahead"
    with Obedient(root, home) as trainer:
        assert trainer.restore() == (1, "disk")
        said = (home / "said").read_text()
        assert "steps 2, 3 would have come from memory, and will not: somebody has deleted checkpoints since." in said
        trainer.train(2)
        trainer.save(2)
        assert trainer.wait() == ""
    assert has(folder_of(root, 2), 2)
    assert sorted(path.name for path in root.glob("step-*")) == ["step-00000001", "step-00000002"]


@pytest.fixture
def later(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Once this file is there, keepers have held memory for long enough."""
    monkeypatch.setattr("headway.checkpoint.link._KEEPER", keeper_with_clock(home / "later"))
    return home / "later"


@pytest.fixture
def abandoned(root: Path, home: Path, later: Path) -> Path:
    """A root whose trainer left step 3 in memory, which is held until it is later."""
    trainer = Orders(str(root), {})
    hold_step_3(trainer)
    trainer.checkpointer.__exit__(RuntimeError)
    return root


def test_a_keeper_that_follows_a_killed_one_stores_what_only_memory_has(root: Path, home: Path, later: Path) -> None:
    trainer = Orders(str(root), {})
    hold_step_3(trainer)
    end_keepers(root)
    keeper(root)
    trainer.checkpointer._writer.arenas()  # the new keeper has answered, so it has heard of step 3
    trainer.checkpointer.__exit__(RuntimeError)
    later.touch()
    wait_for(lambda: not keepers(root))
    assert has(folder_of(root, 3), 3)


def test_what_only_memory_has_is_stored_before_the_memory_goes(abandoned: Path, later: Path) -> None:
    later.touch()
    wait_for(lambda: not keepers(abandoned))
    assert has(folder_of(abandoned, 3), 3)


def test_what_only_memory_has_is_not_stored_if_what_came_before_it_was_deleted(abandoned: Path, later: Path) -> None:
    delete(folder_of(abandoned, 2))
    later.touch()
    wait_for(lambda: not keepers(abandoned))
    assert not (folder_of(abandoned, 3) / ".metadata").exists()
    assert not folder_of(abandoned, 2).exists()


def test_what_only_memory_has_is_stored_before_a_supervisor_ends(
    root: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_BOARD", str(home / "board"))
    monkeypatch.setattr("headway.checkpoint.guard._ANSWER_S", trainers.PATIENCE_S)
    with Guard(str(home), lambda text: None):
        in_memory_alone(root, home)
    assert has(folder_of(root, 3), 3)


def test_what_only_memory_has_is_stored_when_a_program_ends_without_close(root: Path, home: Path) -> None:
    trainer = Orders(str(root), {})
    hold_step_3(trainer)
    trainer.checkpointer._leave()
    assert has(folder_of(root, 3), 3)


def test_what_was_restored_from_memory_is_stored_even_if_nothing_is_trained_after_it(
    root: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory_alone(root, home)
    monkeypatch.setenv("HEADWAY_JOB", "j")
    checkpointer = Checkpointer(root, model=trainers.Counting(), interval="1h")
    restored = checkpointer.restore()
    assert restored is not None
    assert (restored.step, restored.tier) == (3, "memory")
    checkpointer.close()
    assert has(folder_of(root, 3), 3)


# --- a run that begins while another one ends -------------------------------------------------------------------------


def test_a_run_that_waited_for_another_to_end_finds_what_that_one_saved_last(root: Path, home: Path) -> None:
    with Obedient(root, home) as first:
        first.train(3)
        first.save(3)
        assert first.wait() == ""
        with Obedient(root, home) as second:
            second.tell("restore")
            time.sleep(1)  # it looks at the folder, and is told to wait
            first.train(4)
            first.save(4)
            first.close()
            assert second.hear()[0] == 4


def test_a_root_that_another_job_took_meanwhile_is_refused(
    root: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Link):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            other = Owner(session="x", job="other", node="elsewhere", boot="", pid=1, started=1, left=True)
            refresh(open_storage(root), other)

    monkeypatch.setattr("headway.checkpoint.stager.Link", Late)
    with pytest.raises(Taken, match=r"job other wrote checkpoints to .* while this one waited"):
        Checkpointer(root, model=nn.Linear(2, 2))


def test_a_stopped_keeper_is_named_and_not_waited_for_without_end(
    root: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headway.checkpoint.link.UP_S", 6.0)
    monkeypatch.setattr("headway.checkpoint.link.SLOW_S", 0.1)
    with Obedient(root, home) as trainer:
        trainer.train(1)
        trainer.save(1)
        assert trainer.wait() == ""
    pid = keeper(root)
    with halted(pid), pytest.raises(PlatformError, match=rf"has not answered .*Is it stopped\? `kill -CONT {pid}`"):
        Checkpointer(root, model=nn.Linear(2, 2))
    assert f"headway: waiting for the keeper of {root} (process {pid}) to answer …" in capsys.readouterr().err


def test_a_store_that_takes_its_time_at_the_start_is_told_of(
    root: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def slowly(storage: Storage) -> None:
        wait_for(lambda: told.append(capsys.readouterr().err) or "waiting for" in "".join(told))

    monkeypatch.setattr("headway.checkpoint.link.SLOW_S", 0.1)
    monkeypatch.setattr("headway.checkpoint.stager.holder", slowly)
    with Checkpointer(root, model=nn.Linear(2, 2), interval=None):
        pass
    assert f"headway: waiting for {root} to answer …" in "".join(told)


def test_a_checkpoint_that_lost_its_commit_marker_is_told_of(root: Path, home: Path) -> None:
    with Obedient(root, home) as trainer:
        trainer.train(1)
        trainer.save(1)
        assert trainer.wait() == ""
    end_keepers(root)
    (folder_of(root, 1) / ".metadata").unlink()
    (root / "latest").unlink(missing_ok=True)  # it moves after the commit
    with Obedient(root, home) as trainer:
        assert trainer.restore() is None
    assert "headway: step-00000001 was saved, and has no .metadata: it is not restored." in (home / "said").read_text()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which can be made read-only."""
    with mounted(tmp_path / "disk", "size=4m,mode=700") as folder:
        yield folder


def test_a_read_only_root_can_be_restored_from(disk: Path, home: Path) -> None:
    with Obedient(disk / "root", home) as trainer:
        trainer.train(1)
        trainer.save(1)
        assert trainer.wait() == ""
    end_keepers(disk / "root")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with Obedient(disk / "root", home) as trainer:
        assert trainer.restore() == (1, "disk")
        trainer.train(2)
        trainer.save(2)
        assert "Read-only file system" in trainer.wait()
