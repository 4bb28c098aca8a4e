"""What was read ahead is used if it is what all ranks restore, and dropped if it is not: the state is the same."""

import ctypes
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trainers
from broken_line import Line
from keeping import end_keepers, keepers
from test_resharding import Part, is_same, launch, table, training, whole
from torch.utils.data import DataLoader, Dataset
from trainers import Counting, Notes, is_equal, state_at, wait_for

from headway import Checkpointer
from headway.checkpoint import Ahead, read_ahead
from headway.checkpoint.layout import METADATA, Shard, own_key
from headway.checkpoint.newest import Place, Rank, places, wanted
from headway.checkpoint.position import Resumable
from headway.errors import InputError

SIZE = {"length": 1 << 13, "tensors": 4}


def save(root: str | Path, *steps: int) -> None:
    """Saves the states of these steps. Nobody holds them in memory afterwards."""
    model = Counting(**SIZE)
    with Checkpointer(root, model=model, interval=None, keep=10) as checkpointer:
        for step in steps:
            model.load_state_dict(state_at(step, **SIZE))
            checkpointer.save(step, wait=True)
    end_keepers(root)


def restore(root: str | Path, ahead: Ahead) -> tuple[int, str, int]:
    """Step, tier, and how much of it had been read ahead, if the weights are those of the step."""
    model = Counting(**SIZE)
    with Checkpointer(root, model=model, interval=None, ahead=ahead) as checkpointer:
        restored = checkpointer.restore()
        assert restored
        assert is_equal(dict(model.state_dict()), state_at(restored.step, **SIZE))
    return restored.step, restored.tier, restored.ahead_bytes


def shard(root: Path, step: int) -> Path:
    [found] = (root / f"step-{step:08d}").glob("*.distcp")
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "headway-ahead"]


# --- the guess -------------------------------------------------------------------------------------------------------


def guess(number: int, ranks: int, saved_ranks: int, *shared: int) -> list[str]:
    """What a rank reads of a tensor that is divided among all that saved, and of what some wrote for everyone."""
    saved = [Place("divided", f"f{rank}", 0, 9) for rank in range(saved_ranks)]
    saved += [Place(own_key(rank), f"f{rank}", 9, 9) for rank in range(saved_ranks)]
    saved += [Place(f"everyones {rank}", f"f{rank}", 18, 9) for rank in shared]
    files = {f"f{rank}": Shard(bytes=27, xxh3="", rank=rank) for rank in range(saved_ranks)}
    return wanted(saved, files, saved_ranks, Rank(number=number, ranks=ranks, on_node=1))


def test_a_rank_reads_its_own_file_first_and_then_those_with_something_for_everyone() -> None:
    assert guess(2, 4, 4) == ["f2"]
    assert guess(2, 4, 4, 0, 3) == ["f2", "f0", "f3"]


def test_on_other_ranks_the_files_of_the_same_part_are_guessed() -> None:
    assert guess(0, 2, 4) == ["f0", "f1"]
    assert guess(1, 2, 4) == ["f2", "f3", "f1"], "what it had for itself is where it was"
    assert guess(3, 4, 2) == ["f1", "f0"], "the position of a rank that was not there is that of the first"


def test_where_everything_is_can_be_read_without_torch(root: Path, home: Path) -> None:
    save(root, 1)
    metadata = (root / "step-00000001" / METADATA).read_bytes()
    data = pickle.loads(metadata).storage_data
    assert places(metadata) == [(index.fqn, at.relative_path, at.offset, at.length) for index, at in data.items()]
    code = (
        "import sys; from headway.checkpoint import read_ahead; a = read_ahead(sys.argv[1]).wait();"
        "assert a.tag and not a.problem, a.problem; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, root], check=True, timeout=120)


# --- files of a disk -------------------------------------------------------------------------------------------------


def test_what_was_read_ahead_is_what_is_restored_and_nothing_of_it_stays(root: Path, home: Path) -> None:
    save(root, 1, 2)
    ahead = read_ahead(root)
    assert restore(root, ahead) == (2, "disk", shard(root, 2).stat().st_size)
    wait_for(lambda: not readers())
    assert ahead.take(shard(root, 2).name) is None
    assert str(root) not in Path("/proc/self/maps").read_text()


def test_without_checkpoints_there_is_nothing_to_read(root: Path, home: Path) -> None:
    ahead = read_ahead(root).wait()
    assert (ahead.tag, ahead.problem) == ("", "")
    with Checkpointer(root, model=Counting(**SIZE), interval=None, ahead=ahead) as checkpointer:
        assert checkpointer.restore() is None


def test_without_a_checkpoint_workers_are_sent_off_at_once_but_only_by_the_main_thread(
    root: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(Resumable, "begin", lambda self: begun.append(threading.current_thread().name))
    other = threading.Thread(target=lambda: read_ahead(root).loader(DataLoader(list(range(4)))), name="other")
    other.start()
    other.join()
    assert begun == []
    read_ahead(root).loader(DataLoader(list(range(4))))
    assert begun == [threading.main_thread().name]


def test_no_more_is_read_than_there_is_room_for(root: Path, home: Path) -> None:
    save(root, 1)
    size = shard(root, 1).stat().st_size
    assert restore(root, read_ahead(root, most_bytes=size - 1)) == (1, "disk", 0)
    assert restore(root, read_ahead(root, most_bytes=size)) == (1, "disk", size)


def test_another_place_is_refused(root: Path, home: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Give both the same place"):
        Checkpointer(tmp_path / "other", model=Counting(**SIZE), ahead=read_ahead(root))


def test_of_a_damaged_checkpoint_what_was_read_is_dropped_and_the_one_before_it_is_taken(
    root: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(root, 1, 2)
    flip(shard(root, 2))
    assert restore(root, read_ahead(root).wait()) == (1, "disk", 0)
    said = capsys.readouterr().err
    assert "the checkpoint of step 2 cannot be restored" in said
    assert said.count("not all was read ahead (BadCheckpoint") == 1


def test_a_file_that_is_damaged_after_it_was_read_is_not_believed(root: Path, home: Path) -> None:
    save(root, 1, 2)
    ahead = read_ahead(root).wait()
    flip(shard(root, 2))
    assert restore(root, ahead) == (1, "disk", 0)


def test_of_a_newest_that_has_no_manifest_any_more_the_one_before_is_read(root: Path, home: Path) -> None:
    save(root, 1, 2)
    for manifest in (root / "step-00000002").glob("*.json"):
        manifest.unlink()
    assert restore(root, read_ahead(root)) == (1, "disk", shard(root, 1).stat().st_size)


def test_one_that_was_committed_since_is_restored_and_not_the_one_that_was_read(root: Path, home: Path) -> None:
    save(root, 1)
    ahead = read_ahead(root).wait()
    save(root, 2)
    assert restore(root, ahead) == (2, "disk", 0)


def test_those_that_a_supervisor_leaves_out_are_not_read(
    root: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, 1, 2)
    monkeypatch.setenv("HEADWAY_SKIP_CHECKPOINTS", "1")
    assert restore(root, read_ahead(root)) == (1, "disk", shard(root, 1).stat().st_size)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_what_is_in_memory_need_not_be_read(root: Path, home: Path) -> None:
    trainers.warm_up()
    with trainers.Obedient(root, home, **SIZE) as trainer:
        trainer.train(1)
        trainer.save(1)
        trainer.wait()
    ahead = read_ahead(root).wait()
    assert ahead.tag
    assert ahead.manifest is None
    assert restore(root, ahead) == (1, "memory", 0)


def test_looking_does_not_keep_memory_that_nobody_will_come_back_for(root: Path, home: Path) -> None:
    model = Counting(**SIZE)
    with Checkpointer(root, model=model, interval=None) as checkpointer:
        checkpointer.save(1, wait=True)
        assert read_ahead(root).wait().tag
    read_ahead(root).wait()
    wait_for(lambda: not keepers(root))


# --- an object store -------------------------------------------------------------------------------------------------


@pytest.fixture
def store(s3_root: str, home: Path, fails_fast: None) -> Iterator[str]:
    """A root in S3 with two checkpoints."""
    save(s3_root, 1, 2)
    yield s3_root
    end_keepers(s3_root)


def test_nothing_is_fetched_from_a_store_a_second_time(store: str, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.checkpoint.ahead._PART_BYTES", 50_000)
    ahead = read_ahead(store).wait()
    fetched = [request for request in line.seen if ".distcp" in request]
    assert len(fetched) > 2, "in parts"
    step, tier, size = restore(store, ahead)
    assert (step, tier) == (2, "remote")
    assert size > 1 << 17
    assert [request for request in line.seen if ".distcp" in request] == fetched


@pytest.mark.parametrize("file", [".distcp", pytest.param(METADATA, marks=pytest.mark.thorough)])
def test_a_read_that_fails_is_said_once_and_the_restore_reads_by_itself(
    store: str, line: Line, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    line.fault = lambda method, path: "500" if method == "GET" and file in path else None
    ahead = read_ahead(store).wait()
    assert "internal error" in ahead.problem
    line.fault = lambda method, path: None
    assert restore(store, ahead) == (2, "remote", 0)
    assert capsys.readouterr().err.count("not all was read ahead") == 1


def shards_asked_for(line: Line) -> int:
    return sum(".distcp" in request for request in line.seen)


@pytest.mark.thorough
def test_a_wait_that_is_cancelled_ends_the_reading(store: str, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cancelled(BaseException):
        pass

    caught: list[BaseException] = []

    def stage() -> None:
        try:
            read_ahead(store).wait()
        except Cancelled as error:
            caught.append(error)

    monkeypatch.setattr("headway.checkpoint.ahead._PART_BYTES", 100)
    line.fault = lambda method, path: "slow" if ".distcp" in path else None
    thread = threading.Thread(target=stage)
    thread.start()
    wait_for(lambda: shards_asked_for(line) > 1)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Cancelled))
    thread.join(120)
    assert caught
    wait_for(lambda: not readers())
    assert shards_asked_for(line) < 1000, "of 1300"


READS = "import sys; from headway.checkpoint import read_ahead; read_ahead(sys.argv[1]).wait()"


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_process_that_is_ended_while_it_reads_leaves_nothing(
    store: str, line: Line, tmp_path: Path, number: signal.Signals
) -> None:
    line.fault = lambda method, path: "silence" if ".distcp" in path else None
    (tmp_path / "scratch").mkdir()
    environ = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
    with subprocess.Popen([sys.executable, "-c", READS, store], text=True, env=environ) as process:
        wait_for(lambda: shards_asked_for(line), process)
        process.send_signal(number)
        assert process.wait(120) == -number
    assert not list((tmp_path / "scratch").iterdir())
    assert not keepers(store)
    line.fault = lambda method, path: None
    assert restore(store, read_ahead(store))[:2] == (2, "remote")


def test_the_copy_of_this_node_is_read_before_what_is_stored(s3_root: str, home: Path, line: Line) -> None:
    model = Counting(**SIZE)
    with Checkpointer(s3_root, model=model, interval=None, local=home / "local") as checkpointer:
        model.load_state_dict(state_at(1, **SIZE))
        checkpointer.save(1, wait=True)
    end_keepers(s3_root)
    line.seen.clear()
    ahead = read_ahead(s3_root, local=home / "local").wait()
    assert restore(s3_root, ahead)[1] == "local"
    assert sum(".distcp" in request for request in line.seen) == 1, "what a rank has for itself, and no file"


# --- several ranks ---------------------------------------------------------------------------------------------------


def train_on(root: str, kind: str, saved: Path, notes: Path) -> None:
    """Goes on where the job was, from what it read while it made the model."""
    ahead = read_ahead(root)
    part = Part(table=table([5, 8][: dist.get_world_size() - 1], -1.0))
    model, optimizer = training(kind)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    checkpointer = Checkpointer(
        root, model=model, optimizer=optimizer, scheduler=scheduler, sparse=part, interval=None, ahead=ahead
    )
    restored = checkpointer.restore()
    now = whole(model, optimizer, scheduler)
    if restored:
        right = table([5, 8][: dist.get_world_size() - 1])
        for mine, its in zip(part.state["table"].local_shards(), right.local_shards(), strict=True):
            assert torch.equal(mine.tensor, its.tensor)
        Notes(notes).add("all" if restored.ahead_bytes >= restored.bytes else "some", restored.step, dist.get_rank())
        if dist.get_rank() == 0:
            assert is_same(now, torch.load(saved, weights_only=False))
    part.state["table"] = table([5, 8][: dist.get_world_size() - 1])
    torch.manual_seed(checkpointer.step)
    model(torch.randn(4, 17)).pow(2).sum().backward()
    optimizer.step()
    scheduler.step()
    now = whole(model, optimizer, scheduler)
    if dist.get_rank() == 0:
        torch.save(now, saved)
    dist.barrier()
    checkpointer.save(checkpointer.step + 1, wait=True)
    checkpointer.close()


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.thorough), "fsdp"])
def test_every_rank_reads_its_part_ahead_and_other_ranks_find_what_they_need(kind: str, root: Path, home: Path) -> None:
    trainers.warm_up()
    notes = Notes(home / "notes")
    for ranks in (2, 2, 3):
        launch(train_on, home, ranks, str(root), kind, home / "saved", notes.path)
        end_keepers(root)
    assert sorted(notes.read("all"))[:2] == [(1, 0), (1, 1)]
    assert sorted(notes.read()) == [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]


# --- the position in the data ----------------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index


def job(root: Path, until: int, save_at: int = 0, early: bool = False, between: Callable[[], None] = int) -> list[Any]:
    """Trains up to a step over epochs of six batches, and saves before one; the batches, and what training drew."""
    torch.manual_seed(3)
    loader: Any = DataLoader(Numbers(), 4, shuffle=True, num_workers=2)
    ahead = read_ahead(root) if early else None
    if ahead is not None:
        loader = ahead.loader(loader)
        assert loader._early is not None, "its workers are at work"
        torch.rand(7)  # the model is made
        between()
    model, seen, step = Counting(**SIZE), [], 0
    with Checkpointer(root, model=model, loader=loader, interval=None, ahead=ahead, keep=10) as checkpointer:
        checkpointer.restore()
        step = checkpointer.step
        while step < until:
            for batch in checkpointer.loader:
                seen.append((batch.tolist(), torch.rand(()).item()))
                step += 1
                if step == save_at and step % 6:
                    checkpointer.save(step, wait=True)
                if step == until and step % 6:
                    break
            if step == save_at and not step % 6:
                checkpointer.save(step, wait=True)
    end_keepers(root)
    return seen


@pytest.mark.parametrize("saved_at", [3, 6, pytest.param(8, marks=pytest.mark.thorough)])
def test_workers_that_start_at_the_saved_position_load_what_they_would_have_loaded(
    root: Path, home: Path, saved_at: int
) -> None:
    whole_run = job(root, 14, save_at=saved_at)
    assert job(root, 14, early=True) == whole_run[saved_at:]


@pytest.mark.thorough
def test_workers_that_start_before_anything_was_saved_start_with_the_data(root: Path, home: Path) -> None:
    assert sorted(number for batch, _ in job(root, 6, early=True) for number in batch) == list(range(24))


@pytest.mark.thorough
def test_early_workers_of_a_checkpoint_that_is_not_restored_are_replaced(root: Path, home: Path) -> None:
    whole_run = job(root, 14, save_at=3)
    job(root, 8, save_at=8)
    flip(shard(root, 8))
    assert job(root, 14, early=True) == whole_run[3:]


@pytest.mark.thorough
def test_a_position_that_turns_out_to_be_another_ones_is_set_again(root: Path, home: Path) -> None:
    whole_run = job(root, 14, save_at=3)
    assert job(root, 14, early=True, between=lambda: job(root, 8, save_at=8) and None) == whole_run[8:]


@pytest.mark.thorough
def test_if_nothing_is_restored_after_all_the_data_begins_anew(root: Path, home: Path) -> None:
    job(root, 14, save_at=3)
    seen = job(root, 14, early=True, between=lambda: shutil.rmtree(root))
    assert sorted(number for batch, _ in seen[:6] for number in batch) == list(range(24))


def test_a_sampler_whose_epoch_is_set_after_its_workers_started_has_that_order() -> None:
    order = torch.utils.data.DistributedSampler(Numbers(), 1, 0)
    loader = Resumable(DataLoader(Numbers(), 24, sampler=order, num_workers=1))
    loader.begin()
    order.set_epoch(5)
    [batch] = loader
    assert batch.tolist() == list(order)


@pytest.mark.thorough
def test_a_second_restore_sets_the_position_back(root: Path, home: Path) -> None:
    whole_run = [batch for batch, _ in job(root, 6, save_at=2)]
    ahead = read_ahead(root)
    loader = ahead.loader(DataLoader(Numbers(), 4, shuffle=True, num_workers=1))
    with Checkpointer(root, model=Counting(**SIZE), loader=loader, interval=None, ahead=ahead) as checkpointer:
        first = next(batches := iter(loader)).tolist()
        checkpointer.restore()
        assert [first, *(batch.tolist() for batch in batches)] == whole_run[2:], "an iteration under way goes on"
        checkpointer.restore()
        assert [batch.tolist() for batch in checkpointer.loader] == whole_run[2:]


def test_in_another_thread_the_position_is_set_and_workers_wait(root: Path, home: Path) -> None:
    job(root, 6, save_at=2)
    found: list[Any] = []
    before = torch.get_rng_state()
    loader = DataLoader(Numbers(), 4, shuffle=True, num_workers=1)
    thread = threading.Thread(target=lambda: found.append(read_ahead(root).loader(loader)))
    thread.start()
    thread.join()
    assert torch.equal(before, torch.get_rng_state())
    assert found[0]._early is None
    assert len(list(found[0])) == 4
