"""None of the ways in which torch's own checkpoints, and DLRover's, were seen to lose or spoil data exists here.

Where it takes no time and no luck, torch's own failure is shown as well, on the same stage.
"""

import os
import random
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import trainers
from click.testing import CliRunner
from file_systems import mounted
from keeping import halted, keeper, keepers, uploader
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from trainers import Obedient, folder_of, fork, has, is_equal, loaded, newest, state_at, wait_for

from headway.checkpoint import Writer, catalog
from headway.cli import main
from headway.storage import open_storage

LARGE = {"length": 1 << 20, "tensors": 6}
"""A state of 25 megabytes: copying it takes a while."""
SEED = int(os.environ.get("SEED", "0"))


@pytest.fixture(autouse=True, scope="session")
def _warm() -> None:
    trainers.warm_up()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(do: Callable[..., None], home: Path, *args: Any) -> int | None:
    """The exit code of a process that does this."""
    process = fork(do, home, *args)
    process.join(trainers.PATIENCE_S)
    assert process.exitcode is not None, "it did not end"
    if process.exitcode > 0:
        raise AssertionError((home / "said").read_text()[-4000:])
    return process.exitcode


# --- 1: the disk is full ---------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for three checkpoints, and something to spare."""
    with mounted(tmp_path / "disk", "size=4m,mode=700") as folder:
        yield folder


def test_a_save_to_a_full_disk_is_said_to_have_failed_and_the_one_before_it_stays(
    disk: Path, root: Path, home: Path
) -> None:
    (disk / "others").write_bytes(bytes(2 << 20))
    with Obedient(disk / "root", home) as trainer:
        trainer.train(1)
        trainer.save(1)
        assert trainer.wait() == ""
        trainer.train(2)
        trainer.save(2)
        assert "No space left on device" in trainer.wait()
        assert [
            each.name for each in catalog.checkpoints(open_storage(disk / "root")) if each.state == "committed"
        ] == ["step-00000001"]
        assert has(folder_of(disk / "root", 1), 1)
        (disk / "others").unlink()
        trainer.save(2)
        assert trainer.wait() == ""
    assert has(folder_of(disk / "root", 2), 2)


class FullForAWhile(FileSystemWriter):
    """Torch's own, on a disk that has room again when the data could not be written."""

    def finish(self, *args: Any, **kwargs: Any) -> None:
        (Path(self.path).parent / "others").unlink()
        super().finish(*args, **kwargs)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_torch_says_that_it_has_saved_if_a_thread_of_its_writer_finds_the_disk_full(disk: Path) -> None:
    state = {name: torch.zeros(size) for name, size in {"large": 1 << 19, "a": 1, "b": 1, "c": 1}.items()}
    for attempt in range(20):  # it does say so if the large one falls to its main thread
        (disk / "others").write_bytes(bytes(7 << 19))
        folder = disk / str(attempt)
        try:
            dcp.save(state, storage_writer=FullForAWhile(folder, thread_count=4), no_dist=True)
            break
        except dcp.CheckpointException:
            shutil.rmtree(folder, ignore_errors=True)  # other threads may still be writing small files
    with pytest.raises(dcp.CheckpointException):
        dcp.load(state, checkpoint_id=folder, no_dist=True)


# --- 2: saves that overlap -------------------------------------------------------------------------------------------


def save_back_to_back(root: str) -> None:
    """Three at once, with one writer and one state that is changed in between."""
    writer, state = Writer(root), {"model": state_at(1)}
    futures = []
    for step in (1, 2, 3):
        for name, value in state_at(step).items():
            state["model"][name].copy_(value)
        path = str(folder_of(Path(root), step))
        futures.append(dcp.async_save(state, storage_writer=writer, async_stager=writer, checkpoint_id=path))
    for future in futures:
        future.result()
    writer.close()


def test_each_of_overlapping_saves_has_its_own_values(root: Path, home: Path) -> None:
    assert run(save_back_to_back, home, str(root)) == 0
    assert all(has(folder_of(root, step), step) for step in (1, 2, 3))


def test_each_of_overlapping_saves_of_a_checkpointer_has_its_own_values(root: Path, home: Path) -> None:
    with Obedient(root, home) as trainer:
        trainer.train(1)
        trainer.save(1)
        with halted(uploader(root)):
            trainer.train(2)
            trainer.save(2)
            trainer.train(3)
            trainer.tell("save", 3)  # there is no memory left for a third
        trainer.hear()
        assert trainer.wait() == ""
        trainer.close()
    assert all(has(folder_of(root, step), step) for step in (1, 2, 3))


class SlowDisk(FileSystemWriter):
    """Torch's own, on a disk that takes its time."""

    def __init__(self, path: Path, ready: threading.Event) -> None:
        super().__init__(path)
        self.ready = ready

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.ready.wait(trainers.PATIENCE_S)
        return super().write_data(plan, planner)


def test_torch_saves_the_values_of_the_next_save_if_its_stager_is_used_again(tmp_path: Path) -> None:
    stager, ready, state = DefaultStager(StagingOptions(False, False, False, False)), threading.Event(), state_at(1)
    first = dcp.async_save(
        {"model": state}, storage_writer=SlowDisk(tmp_path / "1", ready), async_stager=stager, no_dist=True
    )
    for name, value in state_at(2).items():
        state[name].copy_(value)
    stager.stage({"model": state})
    ready.set()
    first.result()
    assert is_equal(loaded(tmp_path / "1"), state_at(2))


# --- 3: the state changes at once ------------------------------------------------------------------------------------


def save_and_spoil(root: str) -> None:
    writer, state = Writer(root), state_at(1)
    future = dcp.async_save(
        {"model": state}, storage_writer=writer, async_stager=writer, checkpoint_id=str(folder_of(Path(root), 1))
    )
    for value in state.values():
        value.fill_(-2)
    future.result()
    writer.close()


def test_what_changes_after_the_call_is_not_in_the_checkpoint(root: Path, home: Path) -> None:
    assert run(save_and_spoil, home, str(root)) == 0
    assert has(folder_of(root, 1), 1)
    with Obedient(root / "below", home) as trainer:
        trainer.train(1)
        trainer.save_and_spoil(1)
        assert trainer.wait() == ""
    assert has(folder_of(root / "below", 1), 1)


class LateStager(DefaultStager):
    """Torch's own, whose thread comes late."""

    ready = threading.Event()

    def _stage(self, *args: Any, **kwargs: Any) -> Any:
        self.ready.wait(trainers.PATIENCE_S)
        return super()._stage(*args, **kwargs)


def test_torch_saves_what_changes_after_the_call(tmp_path: Path) -> None:
    stager, state = LateStager(StagingOptions(False, False, True, False)), state_at(1)
    saved = dcp.async_save(
        {"model": state}, storage_writer=FileSystemWriter(tmp_path / "1"), async_stager=stager, no_dist=True
    )
    for name, value in state_at(2).items():
        state[name].copy_(value)
    stager.ready.set()
    saved.upload_completion.result()  # type: ignore[union-attr]
    stager.close()
    assert is_equal(loaded(tmp_path / "1"), state_at(2))


# --- 4: a bit flips --------------------------------------------------------------------------------------------------


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        [value] = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 1 << bit]))


@pytest.fixture
def two(root: Path, home: Path) -> Path:
    """A root with two checkpoints, and nobody holds them in memory."""
    with Obedient(root, home) as trainer:
        for step in (1, 2):
            trainer.train(step)
            trainer.save(step)
        assert trainer.wait() == ""
        trainer.close()
    wait_for(lambda: not keepers(root))
    return root


def places(folder: Path) -> Iterator[tuple[Path, int]]:
    """One byte in every file of a checkpoint."""
    chance = random.Random(SEED)
    for path in sorted(folder.iterdir()):
        yield path, chance.randrange(path.stat().st_size)


def test_a_flipped_bit_anywhere_is_found_and_the_checkpoint_before_it_is_taken(two: Path, home: Path) -> None:
    found = list(places(folder_of(two, 2)))
    assert {path.suffix for path, _ in found} == {".distcp", ".json", ""}
    for number, (path, at) in enumerate(found):
        flip(path, at, number % 8)
        (home / "said").unlink()
        done = CliRunner().invoke(main, ["checkpoint", "verify", str(two)])
        assert done.exit_code != 0, f"byte {at} of {path.name}: {done.output}"
        assert "step-00000002" in done.output
        with Obedient(two, home) as trainer:
            assert trainer.restore() == (1, "disk"), f"byte {at} of {path.name}"
            trainer.close()
        assert "step 2 cannot be restored" in (home / "said").read_text(), f"byte {at} of {path.name}"
        flip(path, at, number % 8)
    assert CliRunner().invoke(main, ["checkpoint", "verify", str(two)]).exit_code == 0
    with Obedient(two, home) as trainer:
        assert trainer.restore() == (2, "disk")


def test_torch_loads_a_flipped_bit_without_a_word(tmp_path: Path) -> None:
    dcp.save({"model": state_at(1)}, checkpoint_id=tmp_path / "1", no_dist=True)
    [shard] = (tmp_path / "1").glob("*.distcp")
    flip(shard, shard.stat().st_size // 2 + (20 << 10))  # amid a tensor
    assert not has(tmp_path / "1", 1)


# --- 5: a checkpoint is saved anew, and that fails -------------------------------------------------------------------


class DyingPlanner(DefaultSavePlanner):
    """Has its process killed in the middle of a save, once it is told to."""

    is_armed = False

    def lookup_object(self, index: Any) -> Any:
        if DyingPlanner.is_armed:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().lookup_object(index)


def save_again(root: str, rank: int, meeting: str) -> None:
    """Two ranks save twice to the same place; the second one dies while it does."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    writer = Writer(root, planner=DyingPlanner)
    for step in (1, 2):
        state = {"model": state_at(step), f"rank-{rank}": torch.full((100,), step)}
        save = writer.save(state, folder="same", step=step)
        assert save is not None
        if step == 1:
            save.wait()
            DyingPlanner.is_armed = rank == 1
            dist.barrier()
    time.sleep(trainers.PATIENCE_S)


def save_for_good(root: str, rank: int, meeting: str) -> None:
    """Two ranks save once more to that place."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    save = Writer(root).save({"model": state_at(3), f"rank-{rank}": torch.full((100,), 3)}, folder="same", step=3)
    assert save is not None
    assert save.wait(trainers.PATIENCE_S)
    dist.barrier()
    os._exit(0)


def test_the_old_checkpoint_loads_until_the_new_one_of_that_name_is_committed(root: Path, home: Path) -> None:
    first, second = (fork(save_again, home, str(root), rank, str(home / "meeting")) for rank in (0, 1))
    try:
        second.join(trainers.PATIENCE_S)
        assert second.exitcode == -signal.SIGKILL, (home / "said").read_text()[-4000:]
        wait_for(lambda: len(list((root / "same").glob("__0_*.distcp"))) == 2, first)
        wait_for(lambda: len(list((root / "same").glob("*.rank-0.json"))) == 1, first)
    finally:
        first.kill()
        first.join()
    assert has(root / "same", 1)
    found = newest(root)
    assert found is not None
    assert (found.name, found.step) == ("same", 1)
    assert catalog.verify(open_storage(root), found) == []
    # The next ranks do not wait for what half of the last ones had begun.
    both = [fork(save_for_good, home, str(root), rank, str(home / "next")) for rank in (0, 1)]
    for process in both:
        process.join(trainers.PATIENCE_S)
    assert [process.exitcode for process in both] == [0, 0], (home / "said").read_text()[-4000:]
    assert has(root / "same", 3)


class DyingWriter(FileSystemWriter):
    """Torch's own, in a process that is killed before the commit."""

    def finish(self, *args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def save_and_die_before_commit(path: str) -> None:
    dcp.save({"model": state_at(2)}, storage_writer=DyingWriter(path), no_dist=True)


def test_torch_loads_what_was_never_committed_in_place_of_what_was(tmp_path: Path) -> None:
    dcp.save({"model": state_at(1)}, checkpoint_id=tmp_path / "1", no_dist=True)
    assert run(save_and_die_before_commit, tmp_path, str(tmp_path / "1")) == -signal.SIGKILL
    assert not has(tmp_path / "1", 1)


# --- 6: the uploader is killed ---------------------------------------------------------------------------------------


def test_a_save_whose_uploader_is_killed_is_committed_all_the_same_and_so_are_later_ones(
    root: Path, home: Path
) -> None:
    with Obedient(root, home) as trainer:
        trainer.train(1)
        trainer.save(1)
        assert trainer.wait() == ""
        for step in (2, 3):
            victim = uploader(root)
            with halted(victim):
                trainer.train(step)
                trainer.save(step)
                os.kill(victim, signal.SIGKILL)
            assert trainer.wait() == ""
            assert has(folder_of(root, step), step)
        trainer.train(4)
        trainer.save(4)
        assert trainer.wait() == ""
    assert has(folder_of(root, 4), 4)


# --- 7: the trainer is killed once it has saved ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "earlier", [0, pytest.param(1, marks=pytest.mark.thorough), pytest.param(5, marks=pytest.mark.thorough)]
)
def test_what_a_trainer_saved_before_it_was_killed_is_committed(root: Path, home: Path, earlier: int) -> None:
    with Obedient(root, home) as trainer:
        for step in range(1, earlier + 1):
            trainer.train(step)
            trainer.save(step)
        trainer.train(earlier + 1)
        trainer.tell("save_and_die", earlier + 1)
        trainer.process.join(trainers.PATIENCE_S)
        assert trainer.process.exitcode == -signal.SIGKILL
    wait_for(lambda: folder_of(root, earlier + 1).joinpath(".metadata").exists())
    assert has(folder_of(root, earlier + 1), earlier + 1)


def test_what_was_saved_before_the_trainer_was_killed_is_committed_even_if_the_keeper_hears_of_both_at_once(
    root: Path, home: Path
) -> None:
    with Obedient(root, home) as trainer:
        trainer.train(1)
        trainer.save(1)
        assert trainer.wait() == ""
        with halted(keeper(root)):
            trainer.train(2)
            trainer.save(2)
            trainer.train(3)
            trainer.save(3)
            trainer.die()
    wait_for(lambda: all(folder_of(root, step).joinpath(".metadata").exists() for step in (2, 3)))
    assert all(has(folder_of(root, step), step) for step in (2, 3))


def test_what_was_committed_is_left_when_trainer_keeper_and_uploader_are_killed_together(
    root: Path, home: Path
) -> None:
    with Obedient(root, home) as trainer:
        trainer.train(1)
        trainer.save(1)
        assert trainer.wait() == ""
        # In this order: a trainer that lives would start another keeper, and a keeper another uploader.
        doomed = [trainer.process.pid, keeper(root), uploader(root)]
        with halted(doomed[-1]), suppress(ProcessLookupError):  # the uploader goes with its keeper
            trainer.train(2)
            trainer.save(2)
            for pid in doomed:
                os.kill(pid, signal.SIGKILL)
    with Obedient(root, home) as trainer:
        assert trainer.restore() == (1, "disk")


def save_by_torch_and_die(root: str) -> None:
    writer, path = Writer(root), str(folder_of(Path(root), 1))
    writer.reset(path)
    dcp.async_save({"model": state_at(1)}, storage_writer=writer, async_stager=writer, checkpoint_id=path)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_was_saved_through_torch_before_the_trainer_was_killed_is_committed(root: Path, home: Path) -> None:
    assert run(save_by_torch_and_die, home, str(root)) == -signal.SIGKILL
    wait_for(lambda: folder_of(root, 1).joinpath(".metadata").exists())
    assert has(folder_of(root, 1), 1)


def save_by_torch_alone_and_die(path: str) -> None:
    writer = SlowDisk(Path(path), threading.Event())  # else it may be faster than the kill
    dcp.async_save({"model": state_at(1)}, storage_writer=writer, no_dist=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_torch_commits_nothing_of_a_trainer_that_is_killed_after_the_call(tmp_path: Path) -> None:
    assert run(save_by_torch_alone_and_die, tmp_path, str(tmp_path / "1")) == -signal.SIGKILL
    assert not (tmp_path / "1" / ".metadata").exists()


# --- DLRover's: the trainer is killed while it copies ----------------------------------------------------------------


def test_a_trainer_killed_in_the_middle_of_a_copy_finds_the_copy_before_it_in_memory(root: Path, home: Path) -> None:
    chance, staged, number, in_the_middle = random.Random(SEED), 0, 0, 0
    while not in_the_middle or number < 4:
        assert number < 40, "no kill came in the middle of a copy"
        with Obedient(root, home, **LARGE) as trainer:
            if number:
                step, tier = trainer.restore()
                assert tier == "memory"
                assert step in (staged, staged + 1), "it is neither the last that was complete nor the one under way"
                in_the_middle += step == staged
                staged = step
            for _ in range(2):
                staged += 1
                trainer.train(staged)
                took_s = trainer.save(staged)
            trainer.train(staged + 1)
            trainer.tell("save", staged + 1)
            time.sleep(chance.uniform(0, took_s))
            trainer.die()
        number += 1
