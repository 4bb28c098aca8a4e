"""Torch's plug-in points with plain `dcp`, and the rule by which saves share the memory."""

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from keeping import halted, memory_of_checkpoints, uploader
from supervising import wait_for
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from trainers import fork, warm_up

import warm
from headway.checkpoint import SaveFailed, Writer, catalog, image
from headway.errors import HeadwayError, InputError
from headway.storage import open_storage


@pytest.fixture
def make(root: Path) -> Iterator[Callable[..., Writer]]:
    made = []

    def writer(**settings: Any) -> Writer:
        made.append(Writer(root, **settings))
        return made[-1]

    yield writer
    for each in made:
        each.close()


def a_state(number: float = 0.0, size: int = 1000) -> dict[str, Any]:
    number = float(number)
    return {"model": {"w": torch.full((size,), number), "b": torch.full((3,), number)}, "step": number}


def value_in(folder: Path, size: int = 1000) -> float:
    """The number of which the state in a folder consists, and of nothing else."""
    state = a_state(-1.0, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    values = {state["step"], *(float(end) for each in state["model"].values() for end in each.aminmax())}
    assert len(values) == 1, f"a mixture: {values}"
    return float(values.pop())


def spoil(state: dict[str, Any]) -> None:
    for tensor in state["model"].values():
        tensor.fill_(-7)


# --- with plain dcp --------------------------------------------------------------------------------------------------


def test_async_save_takes_it_as_stager_and_writer_and_the_state_may_change_at_once(
    make: Callable[..., Writer], root: Path
) -> None:
    writer, state = make(), a_state(1.0)
    future = dcp.async_save(state, storage_writer=writer, async_stager=writer, checkpoint_id=root / "step-1")
    spoil(state)
    future.result(120)
    assert value_in(root / "step-1") == 1.0
    [found] = catalog.checkpoints(open_storage(root))
    assert (found.name, found.step, found.state) == ("step-1", 1, "committed")


def test_async_saves_one_after_the_other_each_have_what_was_there_when_they_began(
    make: Callable[..., Writer], root: Path
) -> None:
    writer, state, futures = make(), a_state(), []
    for number in range(5):
        for tensor in state["model"].values():
            tensor.fill_(number)
        state["step"] = float(number)
        where = root / f"step-{number}"
        futures.append(dcp.async_save(state, storage_writer=writer, async_stager=writer, checkpoint_id=where))
    for future in futures:
        future.result(120)
    assert [value_in(root / f"step-{number}") for number in range(5)] == [0, 1, 2, 3, 4]


def test_save_takes_it_as_writer(make: Callable[..., Writer], root: Path) -> None:
    writer = make()
    for number in range(3):
        dcp.save(a_state(number), storage_writer=writer, checkpoint_id=root / f"n{number}")
    assert [value_in(root / f"n{number}") for number in range(3)] == [0, 1, 2]


def test_a_save_to_the_same_place_replaces_what_was_there(make: Callable[..., Writer], root: Path) -> None:
    writer = make()
    dcp.save(a_state(1), storage_writer=writer, checkpoint_id=root / "same")
    dcp.save(a_state(2), storage_writer=writer, checkpoint_id=root / "same")
    assert value_in(root / "same") == 2


def test_the_root_itself_may_be_the_place(make: Callable[..., Writer], root: Path) -> None:
    dcp.save(a_state(1), storage_writer=make())
    assert value_in(root) == 1


def test_a_stager_that_was_told_where_to_has_the_save_in_safe_hands_when_it_returns(root: Path, home: Path) -> None:
    script = home / "train.py"
    script.write_text(
        "import os, signal, sys, torch\nfrom headway.checkpoint import Writer\n"
        "writer = Writer(sys.argv[1])\nwriter.reset(sys.argv[1] + '/step-4')\n"
        "writer.stage({'model': {'w': torch.full((1000,), 4.0), 'b': torch.full((3,), 4.0)}, 'step': 4.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert warm.run([sys.executable, script, root]).returncode == -signal.SIGKILL
    wait_for(lambda: (root / "step-4/.metadata").exists())
    assert value_in(root / "step-4") == 4


def test_a_place_below_another_root_is_refused(make: Callable[..., Writer], root: Path) -> None:
    writer = make()
    with pytest.raises(InputError, match=r"elsewhere is not below .*checkpoints, where this writer puts"):
        dcp.save(a_state(), storage_writer=writer, checkpoint_id=root.parent / "elsewhere")
    with pytest.raises(InputError, match="is not below"):
        writer.reset(f"{root}-2/step-1")


@pytest.mark.thorough
def test_another_process_as_executor_is_refused_with_what_to_do(make: Callable[..., Writer], root: Path) -> None:
    writer = make()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(InputError, match="save with the default, a thread"):
            dcp.async_save(
                a_state(), storage_writer=writer, async_stager=writer, checkpoint_id=root / "x",
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            ).result(120)  # fmt: skip
    finally:
        dist.destroy_process_group()


def test_a_planner_that_divides_otherwise_is_refused_and_later_saves_work(
    make: Callable[..., Writer], root: Path
) -> None:
    writer, wrong = make(), DefaultSavePlanner(flatten_state_dict=False)
    for _ in range(3):  # more than there are slots
        future = dcp.async_save(
            a_state(1), storage_writer=writer, async_stager=writer, checkpoint_id=root / "wrong", planner=wrong
        )
        with pytest.raises(CheckpointException, match="Give it to `Writer`, too"):
            future.result(120)
    assert not (root / "wrong/.metadata").exists()
    dcp.async_save(
        a_state(2), storage_writer=writer, async_stager=writer, checkpoint_id=root / "right"
    ).result(120)  # fmt: skip
    assert value_in(root / "right") == 2


def test_a_planner_that_the_writer_knows_too_is_taken(make: Callable[..., Writer], root: Path) -> None:
    def planner() -> DefaultSavePlanner:
        return DefaultSavePlanner(flatten_state_dict=False)

    writer = make(planner=planner)
    state = {"w": torch.full((5,), 3.0), "nested": {"a": 1}}
    dcp.async_save(
        state, storage_writer=writer, async_stager=writer, checkpoint_id=root / "x", planner=planner()
    ).result(120)
    found = {"w": torch.zeros(5)}
    dcp.load(found, checkpoint_id=root / "x", no_dist=True)
    assert found["w"].tolist() == [3.0] * 5


@pytest.mark.thorough
def test_what_it_stages_has_no_values_that_another_writer_could_save_while_they_change(
    make: Callable[..., Writer], root: Path, tmp_path: Path
) -> None:
    writer = make()
    for _ in range(3):  # more than there are slots
        other = dcp.FileSystemWriter(tmp_path / "other")
        future = dcp.async_save(a_state(1), storage_writer=other, async_stager=writer)
        with pytest.raises(CheckpointException, match="meta tensor"):
            future.result(120)
        del future
        gc.collect()
    assert not (tmp_path / "other/.metadata").exists()
    saves(writer, 2).wait(120)
    assert value_in(root / "f2") == 2, "the memory is not taken for ever"


def test_an_unknown_kind_of_memory_is_refused(root: Path) -> None:
    with pytest.raises(InputError, match="memory='three-slot' is none of auto, two-slot, one-slot, streaming"):
        Writer(root, memory="three-slot")


# --- who waits for whom ----------------------------------------------------------------------------------------------


def saves(writer: Writer, number: int, **settings: Any) -> Any:
    return writer.save(a_state(number), folder=f"f{number}", step=number, **settings)


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A list that will have what the call returned, or raised."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except HeadwayError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def test_with_two_slots_a_save_beside_an_upload_does_not_wait_and_the_next_one_does(
    make: Callable[..., Writer], root: Path
) -> None:
    writer = make(memory="two-slot")
    saves(writer, 0).wait(120)
    with halted(uploader(root)):
        first, second = saves(writer, 1), saves(writer, 2)
        assert not first.wait(0)
        assert saves(writer, 3, may_skip=True) is None, "it may be skipped instead"
        thread, results = in_thread(lambda: saves(writer, 4))
        thread.join(0.3)
        assert not results, "both slots are being uploaded"
    thread.join(120)
    for save in (first, second, *results):
        assert save.wait(120)
    assert [value_in(root / f"f{number}") for number in (0, 1, 2, 4)] == [0, 1, 2, 4]
    assert not (root / "f3").exists()


def test_with_one_slot_a_save_waits_for_the_upload_before_it(make: Callable[..., Writer], root: Path) -> None:
    writer = make(memory="one-slot")
    saves(writer, 0).wait(120)
    with halted(uploader(root)):
        first = saves(writer, 1)
        assert saves(writer, 2, may_skip=True) is None
        thread, results = in_thread(lambda: saves(writer, 3))
        thread.join(0.3)
        assert not results
    thread.join(120)
    assert first.wait(120)
    assert results[0].wait(120)
    assert [value_in(root / f"f{number}") for number in (0, 1, 3)] == [0, 1, 3]


def test_a_save_to_memory_alone_keeps_the_newest_one_and_is_not_uploaded(
    make: Callable[..., Writer], root: Path
) -> None:
    writer = make(memory="two-slot")
    for number in range(5):
        assert saves(writer, number, durable=False).wait(0), "there is nothing to wait for"
    steps = [held.step for arena, _ in writer.link.arenas() for held in arena.held()]
    assert steps == [3, 4]
    assert catalog.checkpoints(open_storage(root)) == []


def test_while_everything_changes_all_the_time_no_save_is_a_mixture(make: Callable[..., Writer], root: Path) -> None:
    writer, size = make(), 300_000
    state, done = a_state(0, size), []
    for number in range(1, 25):
        for tensor in state["model"].values():
            tensor.fill_(number)
        state["step"] = float(number)
        if (save := writer.save(state, folder=f"f{number}", step=number, may_skip=bool(number % 3))) is not None:
            done.append((number, save))
        spoil(state)
    for number, save in done:
        assert save.wait(120)
        assert value_in(root / f"f{number}", size) == number
    assert len(done) >= 8


def test_the_uploader_may_die_at_any_time_and_the_save_still_commits(make: Callable[..., Writer], root: Path) -> None:
    writer = make()
    saves(writer, 0).wait(120)
    with halted(pid := uploader(root)):
        save = saves(writer, 1)
        os.kill(pid, signal.SIGKILL)
    assert save.wait(120)
    assert value_in(root / "f1") == 1
    assert uploader(root) != pid


def test_what_cannot_be_written_says_why_and_the_next_one_may_succeed(make: Callable[..., Writer], root: Path) -> None:
    writer = make()
    saves(writer, 0).wait(120)
    (root / "f1").write_text("a file where a folder should be")
    with pytest.raises(SaveFailed, match=r"the checkpoint of step 1 was not saved: .*f1"):
        saves(writer, 1).wait(120)
    assert saves(writer, 2).wait(120)
    assert value_in(root / "f2") == 2


def named_memory() -> set[str]:
    """The files of shared memory that this process has mapped."""
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}


def test_memory_is_given_back_when_it_is_closed(make: Callable[..., Writer], root: Path) -> None:
    # Of earlier tests, something may still be there, and go at any time.
    before, named = set(memory_of_checkpoints()), named_memory()
    writer = make()
    saves(writer, 0)
    assert set(memory_of_checkpoints()) - before
    assert named_memory() <= named, "none of it has a name that could be left behind"
    writer.close()
    assert set(memory_of_checkpoints()) <= before


def test_memory_that_was_left_is_used_again_and_does_not_add_up(make: Callable[..., Writer], root: Path) -> None:
    writer = make()
    for size in (1000, 2000, 3000, 4000):
        writer.save(a_state(1, size), folder=f"s{size}", step=size).wait(120)
        writer.save(a_state(1, size), folder=f"t{size}", step=size).wait(120)
    assert len(writer.link.arenas()) == 1, "plans of other shapes are forgotten"
    assert value_in(root / "s1000") == 1


@pytest.mark.parametrize(("free_mb", "mode"), [(1000, "two-slot"), (3, "one-slot"), (1, "streaming")])
def test_what_is_free_decides_how_saves_are_held(
    make: Callable[..., Writer], root: Path, monkeypatch: pytest.MonkeyPatch, free_mb: int, mode: str
) -> None:
    monkeypatch.setattr("headway.checkpoint.stager.free_memory", lambda: free_mb << 20)
    writer, size = make(stream_bytes=64 << 10), 250_000
    save = writer.save(a_state(1, size), folder="f1", step=1)
    assert save is not None
    assert save.wait(120)
    assert writer.mode == mode
    assert value_in(root / "f1", size) == 1


# --- streaming -------------------------------------------------------------------------------------------------------


def test_streaming_takes_no_more_memory_than_its_bound(make: Callable[..., Writer], root: Path) -> None:
    bound = 1 << 20
    writer = make(memory="streaming", stream_bytes=bound)
    save = writer.save(a_state(5, 4_000_000), folder="large", step=5)
    assert save is not None
    assert save.wait(120)
    assert value_in(root / "large", 4_000_000) == 5
    [(arena, _)] = writer.link.arenas()
    assert arena.shape.total - arena.shape.slot_offset(0) <= bound
    assert save.image.size > 15 * bound


def test_a_stream_whose_uploader_dies_in_the_middle_begins_again(make: Callable[..., Writer], root: Path) -> None:
    writer, size = make(memory="streaming", stream_bytes=64 << 10), 1_000_000
    saves(writer, 0).wait(120)
    with halted(pid := uploader(root)):
        thread, results = in_thread(lambda: writer.save(a_state(3, size), folder="f3", step=3))
        thread.join(0.3)
        assert not results, "the stream is longer than its memory"
        os.kill(pid, signal.SIGKILL)
    thread.join(120)
    assert results[0].wait(120)
    assert value_in(root / "f3", size) == 3


@pytest.mark.thorough
def test_a_stream_whose_uploader_always_dies_fails_and_the_next_one_works(
    make: Callable[..., Writer], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, size = make(memory="streaming", stream_bytes=64 << 10), 3_000_000
    saves(writer, 0).wait(120)
    fill, begun, killed = image.fill, list[int](), list[int]()

    def fill_and_wait(where: memoryview, start: int, *more: Any) -> None:
        """In the midst of each try, waits until its uploader was killed."""
        if start == 32 << 10 and len(begun) < 3:
            begun.append(start)
            wait_for(lambda: len(killed) == len(begun))
        fill(where, start, *more)

    monkeypatch.setattr(image, "fill", fill_and_wait)
    thread, results = in_thread(lambda: writer.save(a_state(3, size), folder="f3", step=3))
    for number in range(3):
        wait_for(lambda number=number: len(begun) > number)
        writer.link.arenas()  # the keeper has answered, so it has heard of this try
        assert not results
        pid = uploader(root)
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)
    thread.join(120)
    with pytest.raises(SaveFailed, match="the uploader died"):
        outcome(results[0])
    save = writer.save(a_state(4, size), folder="f4", step=4)
    assert save is not None
    assert save.wait(120)
    assert value_in(root / "f4", size) == 4
    assert not (root / "f3/.metadata").exists()


def outcome(result: Any) -> None:
    """Raises what became of a save: at once, or after all of it was handed over."""
    if isinstance(result, HeadwayError):
        raise result
    result.wait(120)


def test_streaming_through_a_stager_that_does_not_know_where_to_is_refused(
    make: Callable[..., Writer], root: Path
) -> None:
    writer = make(memory="streaming", stream_bytes=64 << 10)
    with pytest.raises(InputError, match="streaming saves must know where to"):
        dcp.async_save(a_state(), storage_writer=writer, async_stager=writer, checkpoint_id=root / "x")
    writer.reset(root / "x")
    dcp.async_save(a_state(2), storage_writer=writer, async_stager=writer, checkpoint_id=root / "x").result(120)
    assert value_in(root / "x") == 2


# --- two ranks -------------------------------------------------------------------------------------------------------


def on_two_ranks(train: Callable[..., None], folder: Path, *args: Any) -> str:
    """What the ranks said."""
    warm_up()
    ranks = [fork(train, folder, rank, str(folder / "meeting"), *args, GLOO_SOCKET_IFNAME="lo") for rank in range(2)]
    try:
        for rank in ranks:
            rank.join(120)
        said = (folder / "said").read_text() if (folder / "said").exists() else ""
        assert [rank.exitcode for rank in ranks] == [0, 0], said
        return said
    finally:
        for rank in ranks:
            rank.kill()


def meet(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)


def train_as_torchtitan_does(rank: int, meeting: str, root: str) -> None:
    """Every save waits for the one before it; a process group of its own does what planning needs."""
    meet(rank, meeting)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(40, 40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writer, future, group = Writer(root), None, dist.new_group(backend="gloo")
    for step in range(1, 5):
        optimizer.zero_grad()
        model(torch.ones(2, 40) * (rank + 1)).sum().backward()
        optimizer.step()
        state = {"model": model.module.state_dict(), f"rank-{rank}": {"seen": torch.tensor([step, rank])}}
        if future is not None:
            future.result()
        future = dcp.async_save(
            state, storage_writer=writer, async_stager=writer, checkpoint_id=f"{root}/step-{step}", process_group=group
        )
        if rank == 0:
            torch.save(state["model"], f"{root}-{step}.pt")
    assert future is not None
    future.result()
    writer.close()
    dist.destroy_process_group()


def test_torchtitans_way_of_saving_works_on_two_ranks_with_ddp(root: Path, tmp_path: Path) -> None:
    on_two_ranks(train_as_torchtitan_does, tmp_path, str(root))
    for step in range(1, 5):
        wanted = torch.load(f"{root}-{step}.pt")
        found: dict[str, Any] = {"model": {name: torch.zeros_like(value) for name, value in wanted.items()}}
        found |= {f"rank-{rank}": {"seen": torch.zeros(2, dtype=torch.int64)} for rank in range(2)}
        dcp.load(found, checkpoint_id=root / f"step-{step}", no_dist=True)
        assert all(torch.equal(found["model"][name], value) for name, value in wanted.items())
        assert [found[f"rank-{rank}"]["seen"].tolist() for rank in range(2)] == [[step, 0], [step, 1]]
    assert [each.world_size for each in catalog.checkpoints(open_storage(root))] == [2] * 4


def save_what_cannot_be_saved(rank: int, meeting: str, root: str) -> None:
    meet(rank, meeting)
    writer = Writer(root)

    def state() -> dict[str, Any]:
        if rank == 1 and saving == 2:
            raise RuntimeError("no state here")
        return {"w": torch.full((10,), float(saving)), f"r{rank}": saving}

    for saving in (1, 2, 3):
        try:
            save = writer.save(state, folder=f"f{saving}", step=saving)
            assert save is not None
            save.wait(120)
            os.write(1, f"saved {saving}\n".encode())  # whole lines: both ranks write to the same place
        except (HeadwayError, RuntimeError) as error:
            os.write(1, f"rank {rank}: {error}\n".encode())
    writer.close()
    dist.destroy_process_group()


def test_a_state_that_one_rank_cannot_give_fails_on_all_of_them_and_the_next_save_works(
    root: Path, tmp_path: Path
) -> None:
    said = on_two_ranks(save_what_cannot_be_saved, tmp_path, str(root))
    assert sorted(said.splitlines()) == [
        "rank 0: the state of another rank could not be had; it says why", "rank 1: no state here",
        "saved 1", "saved 1", "saved 3", "saved 3",
    ]  # fmt: skip
    assert [each.name for each in catalog.checkpoints(open_storage(root))] == ["f1", "f3"]


class Torn(torch.Tensor):
    """A tensor that can be planned for, and not be copied."""

    def detach(self) -> "Torn":
        raise RuntimeError("the device is gone")


def save_something_that_cannot_be_copied(rank: int, meeting: str, root: str) -> None:
    meet(rank, meeting)
    writer = Writer(root)
    for saving in (1, 2, 3):
        whole = torch.full((10,), float(saving))
        state = {f"w{rank}": whole.as_subclass(Torn) if (rank, saving) == (1, 2) else whole}
        try:
            save = writer.save(state, folder=f"f{saving}", step=saving)
            assert save is not None
            save.wait(120)
            print("saved", saving, flush=True)
        except (HeadwayError, RuntimeError) as error:
            print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        dist.barrier()
    writer.close()
    dist.destroy_process_group()


def test_a_copy_that_fails_on_one_rank_is_not_committed_and_not_waited_for(root: Path, tmp_path: Path) -> None:
    said = on_two_ranks(save_something_that_cannot_be_copied, tmp_path, str(root))
    first, second = sorted(line for line in said.splitlines() if line.startswith("rank"))
    assert first.startswith("rank 0: SaveFailed: the checkpoint of step 2 was not saved: rank 1: RuntimeError")
    assert second.startswith("rank 1: RuntimeError: the device is gone")
    assert said.count("saved 3") == 2
    assert [each.name for each in catalog.checkpoints(open_storage(root)) if each.state == "committed"] == ["f1", "f3"]


def test_a_destination_serves_once(make: Callable[..., Writer], root: Path) -> None:
    writer = make()
    dcp.save({"value": torch.tensor(7.0)}, storage_writer=writer, checkpoint_id=root / "step-7")
    dcp.async_save(
        {"value": torch.tensor(8.0)}, storage_writer=writer, async_stager=writer, checkpoint_id=root / "step-8"
    ).result()
    for step in (7, 8):
        state = {"value": torch.tensor(0.0)}
        dcp.load(state, checkpoint_id=root / f"step-{step}")
        assert state["value"] == step


def test_another_destination_than_reset_has_said_is_an_error(make: Callable[..., Writer], root: Path) -> None:
    writer = make()
    writer.reset(root / "step-8")
    saved = dcp.async_save({"value": torch.ones(2)}, storage_writer=writer, async_stager=writer,
                           checkpoint_id=root / "step-9")  # fmt: skip
    with pytest.raises(BaseException, match="goes to step-8"):
        saved.result()


def test_what_a_save_replaced_is_swept(make: Callable[..., Writer], root: Path) -> None:
    writer = make()
    for _ in range(3):
        dcp.save({"value": torch.ones(2)}, storage_writer=writer, checkpoint_id=root / "same")
    writer.close()
    assert len(list((root / "same").glob("*.distcp"))) == 1
