"""A job that is interrupted and resumed sees the same batches and draws the same random numbers as one that is not."""

import io
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import warm
from headway.checkpoint.position import Resumable, rng_state, set_position, set_rng_state

SAMPLES, EPOCHS = 11, 3
DRAWN = 70
"""With replacement: torch draws 32 at a time, so that some batches consist of two draws."""


# --- data ------------------------------------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    """0, 1, 2 …; remembers which were looked up in this process."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length
        self.looked_up: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.looked_up.append(index)
        return index


class Augmented(Numbers):
    """Numbers with noise from torch's own random numbers."""

    def __getitem__(self, index: int) -> float:  # type: ignore[override]
        return super().__getitem__(index) + torch.rand(()).item()


class Stream(IterableDataset[float]):
    """Numbers of which each worker gives its share, shuffled within a window.

    By the worker's random numbers; without workers, by a generator of its own, seeded when the epoch begins.
    """

    def __iter__(self) -> Iterator[float]:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        draw: Any = random if worker else random.Random(int(torch.randint(99, ())))
        window: list[int] = []
        for number in range(first, SAMPLES, step):
            window.append(number)
            if len(window) > 3:
                yield window.pop(draw.randrange(len(window)))
        yield from window


class EagerOrder:
    """A sampler that draws when it is asked for an iterator, before its loader draws anything."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class NumpyOrder:
    def __iter__(self) -> Iterator[list[int]]:
        order = numpy.random.permutation(SAMPLES).tolist()
        random.shuffle(order)
        return iter([order[:2], order[2:7], order[7:]])


class DrawsAsItGoes:
    """A sampler that draws each sample when it is asked for it, between the draws of training."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, ()))


class Doubled(DataLoader[Any]):
    """A loader that does something to another one's batches."""

    def __init__(self, inner: DataLoader[Any]) -> None:
        super().__init__(inner.dataset, inner.batch_size)
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (2 * batch for batch in self.inner)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _shared_generator() -> DataLoader[int]:
    generator = _generator()
    return DataLoader(Numbers(), 2, sampler=RandomSampler(Numbers(), generator=generator), generator=generator)


KINDS: dict[str, Callable[[], Iterable[Any]]] = {
    "in order": lambda: DataLoader(Numbers(), 2),
    "shuffled": lambda: DataLoader(Numbers(), 2, shuffle=True),
    "shuffled, last dropped": lambda: DataLoader(Numbers(), 2, shuffle=True, drop_last=True),
    "shuffled by its own generator": lambda: DataLoader(Numbers(), 2, shuffle=True, generator=_generator()),
    "sampler and loader with one generator": _shared_generator,
    "with augmentation": lambda: DataLoader(Augmented(), 2, shuffle=True),
    "distributed": lambda: DataLoader(Numbers(), 2, sampler=DistributedSampler(Numbers(), 2, 1)),
    "single samples": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "eager sampler": lambda: DataLoader(Numbers(), 3, sampler=EagerOrder()),
    "eager sampler, single samples": lambda: DataLoader(Numbers(), batch_size=None, sampler=EagerOrder()),
    "batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(SubsetRandomSampler(range(SAMPLES)), 3, False)
    ),
    "numpy's batch sampler": lambda: DataLoader(Numbers(), batch_sampler=NumpyOrder()),
    "drawn again": lambda: DataLoader(Numbers(), 9, sampler=RandomSampler(Numbers(), True, DRAWN)),
    "drawn again by its own generator": lambda: DataLoader(
        Numbers(), 9, sampler=RandomSampler(Numbers(), True, DRAWN, _generator())
    ),
    "weighted": lambda: DataLoader(Numbers(), 2, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
    "draws as it goes": lambda: DataLoader(Numbers(), 2, sampler=DrawsAsItGoes()),
    "iterable": lambda: DataLoader(Stream(), 2),
    "iterable, single samples": lambda: DataLoader(Stream(), batch_size=None),
    "subclass": lambda: Doubled(DataLoader(Numbers(), 2, shuffle=True)),
    "no loader of torch's": lambda: [[1, 2], [3], [4, 5]],
    "workers": lambda: DataLoader(Numbers(), 2, shuffle=True, num_workers=2),
    "workers, own generator": lambda: DataLoader(Numbers(), 2, shuffle=True, num_workers=2, generator=_generator()),
    "workers, drawn again by its own generator": lambda: DataLoader(
        Numbers(), 9, sampler=RandomSampler(Numbers(), True, DRAWN, _generator()), num_workers=2
    ),
    "workers that stay": lambda: DataLoader(Numbers(), 2, shuffle=True, num_workers=2, persistent_workers=True),
    "workers that stay, own generator": lambda: DataLoader(
        Numbers(), 2, shuffle=True, num_workers=2, persistent_workers=True, generator=_generator()
    ),
    "workers, distributed": lambda: DataLoader(
        Numbers(), 2, sampler=DistributedSampler(Numbers(), 2, 1), num_workers=2
    ),
    "workers, single samples": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True, num_workers=2),
    "workers, eager sampler": lambda: DataLoader(Numbers(), 3, sampler=EagerOrder(), num_workers=2),
    "workers, iterable": lambda: DataLoader(Stream(), 2, num_workers=2),
}  # fmt: skip


# --- training --------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


class Job:
    """A training job in miniature: what each step was trained on and with which dropout, and what it saved."""

    def __init__(self, loader: Iterable[Any], saved: bytes | None = None) -> None:
        self.loader = Resumable(loader)
        self.steps: list[Any] = []
        if saved is not None:
            state = torch.load(io.BytesIO(saved), weights_only=True)
            self.loader.load_state_dict(state["loader"])
            set_rng_state(state["rng"])

    def saved(self) -> bytes:
        file = io.BytesIO()
        torch.save({"loader": self.loader.state_dict(), "rng": rng_state()}, file)
        return file.getvalue()

    def train(self, steps: int | None = None) -> None:
        """Trains to the end, or until so many steps are done."""
        evaluation = DataLoader(Numbers(4), 2, shuffle=True, generator=getattr(self.loader, "generator", None))
        for epoch in range(self.loader.epoch, EPOCHS):
            if isinstance(sampler := getattr(self.loader, "sampler", None), DistributedSampler):
                sampler.set_epoch(epoch)
            for batch in self.loader:
                noise = (torch.rand(()).item(), random.random(), numpy.random.rand())
                self.steps.append((epoch, torch.as_tensor(batch).tolist(), noise))
                if len(self.steps) % 2:
                    self.steps[-1] += ([ids.tolist() for ids in evaluation],)
                if len(self.steps) == steps:
                    raise Interrupted
            self.steps[-1] += (torch.rand(()).item(),) if self.steps else ()


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def _whole(kind: str) -> list[Any]:
    _seed(1)
    job = Job(KINDS[kind]())
    job.train()
    return job.steps


def _resumed(kind: str, *after: int) -> list[Any]:
    """The steps of a job that was interrupted each time it had done so many."""
    _seed(1)
    saved: bytes | None = None
    steps: list[Any] = []
    for number, stop in enumerate([*after, None]):
        job = Job(KINDS[kind](), saved)
        job.steps = steps
        if stop is None:
            job.train()
        else:
            with pytest.raises(Interrupted):
                job.train(stop)
            saved = job.saved()
        _seed(100 + number)
    return steps


def _epochs(steps: list[Any]) -> list[int]:
    return [epoch for epoch, *_ in steps]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "workers" not in kind])
def test_interrupted_after_any_step_and_resumed_it_is_as_if_it_had_not_been(kind: str) -> None:
    whole = _whole(kind)
    for stop in range(1, len(whole)):
        assert _resumed(kind, stop) == whole, f"interrupted after {stop} of {len(whole)} steps"


PROMISED = ("workers", "workers that stay", "workers, iterable")
"""The kinds with workers that every run resumes."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in PROMISED else pytest.mark.thorough)
        for kind in KINDS
        if "workers" in kind or kind == "shuffled"
    ],
)
def test_interrupted_again_and_again_it_is_as_if_it_had_not_been(kind: str) -> None:
    whole = _whole(kind)
    length = _epochs(whole).count(0)
    assert _resumed(kind, 1, length - 1, length, length + 1) == whole


@pytest.mark.parametrize("kind", ["shuffled", "shuffled by its own generator", "workers that stay", "iterable"])
def test_rolled_back_in_the_same_process_it_trains_the_same_steps_again(kind: str) -> None:
    whole = _whole(kind)
    _seed(1)
    job = Job(KINDS[kind]())
    with pytest.raises(Interrupted):
        job.train(8)
    position, rng = job.loader.state_dict(), rng_state()
    for _ in range(2):
        job.steps = job.steps[:8]
        job.loader.load_state_dict(position)
        set_rng_state(rng)
        job.train()
        assert job.steps == whole


TRAIN = """
import os, sys, torch
from torch.utils.data import DataLoader
from headway.checkpoint.position import Resumable, rng_state, set_rng_state

path, die_after = sys.argv[1], int(sys.argv[2])
loader = Resumable(DataLoader(range(20), 3, shuffle=True, num_workers=2))
step = 0
if os.path.exists(path):
    state = torch.load(path, weights_only=True)
    loader.load_state_dict(state["loader"])
    set_rng_state(state["rng"])
    step = state["step"]
for epoch in range(loader.epoch, 2):
    for batch in loader:
        print(epoch, batch.tolist(), torch.rand(()).item(), flush=True)
        step += 1
        torch.save({"loader": loader.state_dict(), "rng": rng_state(), "step": step}, path)
        if step == die_after:
            os.kill(os.getpid(), 9)
"""


def test_a_killed_process_is_continued_by_another_as_if_it_had_lived(tmp_path: Path) -> None:
    def lines(saved: str, die_after: int, seed: int) -> list[str]:
        seeded = f"import torch; torch.manual_seed({seed})\n{TRAIN}"
        command = [sys.executable, "-c", seeded, str(tmp_path / saved), str(die_after)]
        done = warm.run(command, capture_output=True, text=True)
        assert done.returncode == (-9 if die_after else 0), done.stderr
        return done.stdout.splitlines()

    whole = lines("whole", 0, seed=1)
    assert len(whole) == 14
    assert lines("broken", 5, seed=1) + lines("broken", 0, seed=2) == whole


# --- the position ----------------------------------------------------------------------------------------------------


def _given(loader: Iterable[Any], batches: int | None = None) -> list[Any]:
    """The next batches, or all of them."""
    return [torch.as_tensor(batch).tolist() for batch in islice(loader, batches)]


def _moved(loader: Resumable, to: Iterable[Any]) -> Resumable:
    moved = Resumable(to)
    moved.load_state_dict(loader.state_dict())
    return moved


def test_samples_of_skipped_batches_are_not_loaded() -> None:
    first = Resumable(DataLoader(Numbers(), 2))
    _given(first, 3)
    rest = Numbers()
    assert _given(_moved(first, DataLoader(rest, 2))) == [[6, 7], [8, 9], [10]]
    assert rest.looked_up == [6, 7, 8, 9, 10]


def test_batches_that_can_only_be_thrown_away_are_so_inside_the_given_span() -> None:
    told: list[Any] = []

    @contextmanager
    def skipping() -> Iterator[None]:
        told.append("begin")
        yield
        told.append("end")

    class Told(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            for number in range(4):
                told.append(number)
                yield number

    loader = Resumable(DataLoader(Told(), batch_size=None), skipping)
    loader.load_state_dict({**loader.state_dict(), "batches": 2, "begin": _begin(DataLoader(Told(), batch_size=None))})
    assert _given(loader) == [2, 3]
    assert told[-6:] == ["begin", 0, 1, "end", 2, 3]
    assert _given(loader) == [0, 1, 2, 3]
    assert told.count("begin") == 1


def _begin(loader: Iterable[Any]) -> Any:
    begun = Resumable(loader)
    next(iter(begun))
    return begun.state_dict()["begin"]


def test_what_was_given_to_the_loader_holds_for_the_rest_of_an_epoch() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(
            Numbers(), 2, shuffle=True, num_workers=1, collate_fn=_worker_says, worker_init_fn=_initialised,
            multiprocessing_context="fork", prefetch_factor=3, timeout=120, persistent_workers=True,
        )  # fmt: skip

    first = Resumable(build())
    batches = [*islice(first, 2), *_moved(first, build())]
    assert {said for said, _ in batches} == {"initialised"}
    assert sorted(chain.from_iterable(ids for _, ids in batches)) == list(range(SAMPLES))


def _initialised(worker: int) -> None:
    random.headway_test_worker = "initialised"  # type: ignore[attr-defined]


def _worker_says(ids: list[int]) -> tuple[str, list[int]]:
    return getattr(random, "headway_test_worker", ""), ids


def test_all_but_the_iteration_is_the_wrapped_loaders() -> None:
    inner = DataLoader(Numbers(), 4)
    loader = Resumable(inner)
    assert (len(loader), loader.batch_size, loader.sampler) == (3, 4, inner.sampler)
    assert copy(loader).dataset is inner.dataset
    assert not hasattr(loader, "nothing")


def test_an_epoch_is_one_that_came_to_its_end() -> None:
    loader = Resumable(DataLoader(Numbers(), 4))
    assert loader.epoch == 0
    _given(loader)
    _given(loader, 1)
    assert loader.epoch == 1
    assert _given(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]], "after a break, a new epoch begins"
    assert loader.epoch == 2


def test_an_epoch_left_early_is_resumed_where_it_was_left() -> None:
    loader = Resumable(DataLoader(Numbers(), 4))
    _given(loader, 2)
    assert _given(_moved(loader, DataLoader(Numbers(), 4))) == [[8, 9, 10]]


def test_resumed_at_the_end_of_an_epoch_it_ends_without_a_batch() -> None:
    loader = Resumable(DataLoader(Numbers(), 4))
    _given(loader, 3)
    resumed = _moved(loader, DataLoader(Numbers(), 4))
    assert (resumed.epoch, _given(resumed), resumed.epoch) == (0, [], 1)
    assert len(_given(resumed)) == 3


def test_a_position_outlives_a_job_that_was_resumed_and_did_nothing() -> None:
    loader = Resumable(DataLoader(Numbers(), 4))
    _given(loader, 2)
    again = _moved(_moved(loader, DataLoader(Numbers(), 4)), DataLoader(Numbers(), 4))
    assert _given(again) == [[8, 9, 10]]


@pytest.mark.parametrize("epochs", [0, 1])
def test_saved_between_epochs_the_next_one_is_drawn_as_it_would_have_been(epochs: int) -> None:
    _seed(1)
    loader = Resumable(KINDS["workers that stay"]())
    for _ in range(epochs):
        _given(loader)
    saved, rng = loader.state_dict(), rng_state()
    torch.rand(7)
    expected = _given(loader)
    resumed = Resumable(KINDS["workers that stay"]())
    resumed.load_state_dict(saved)
    set_rng_state(rng)
    torch.rand(7)
    assert _given(resumed) == expected


@pytest.mark.parametrize("kind", ["shuffled", "workers"])
def test_numbers_drawn_between_iter_and_the_first_batch_change_nothing(kind: str) -> None:
    loader = Resumable(KINDS[kind]())
    iterator = iter(loader)
    torch.rand(5)
    batches = [next(iterator).tolist(), next(iterator).tolist()]
    resumed = _moved(loader, KINDS[kind]())
    assert [batch.tolist() for batch in iterator] == _given(resumed)
    assert len(batches) == 2


def test_of_two_iterations_the_newest_counts() -> None:
    loader = Resumable(DataLoader(Numbers(), 2))
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    assert len(list(older)) == 5
    assert (loader.epoch, loader.state_dict()["batches"]) == (0, 1)
    assert len(list(newer)) == 5
    assert loader.epoch == 1


def test_a_restored_position_is_not_moved_by_an_iteration_from_before() -> None:
    loader = Resumable(DataLoader(Numbers(), 2))
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.state_dict())
    next(iterator)
    assert _given(loader)[0] == [2, 3]


def test_a_loader_that_fails_while_skipping_can_be_asked_again() -> None:
    class Flaky(IterableDataset[int]):
        fails = False

        def __iter__(self) -> Iterator[int]:
            for number in range(4):
                if self.fails and number == 1:
                    raise OSError("gone for a moment")
                yield number

    dataset = Flaky()
    loader = Resumable(DataLoader(dataset, batch_size=None))
    _given(loader, 2)
    resumed = _moved(loader, DataLoader(dataset, batch_size=None))
    dataset.fails = True
    with pytest.raises(OSError, match="gone for a moment"):
        _given(resumed)
    dataset.fails = False
    assert _given(resumed) == [2, 3]


def test_the_samplers_epoch_is_the_interrupted_ones_even_where_nobody_sets_it() -> None:
    def build() -> DataLoader[int]:
        return DataLoader(Numbers(), 2, sampler=DistributedSampler(Numbers(), 1, 0))

    loader = Resumable(build())
    loader.sampler.set_epoch(7)
    begun = _given(loader, 2)
    resumed = _moved(loader, build())
    assert sorted(chain.from_iterable(begun + _given(resumed))) == list(range(SAMPLES))
    assert resumed.sampler.epoch == 0, "the sampler is left as the job has set it"


# --- another number of ranks -----------------------------------------------------------------------------------------


def test_a_loader_with_a_position_of_its_own_begins_anew_on_other_ranks_and_that_is_said() -> None:
    loaded: list[Any] = []
    loader = SimpleNamespace(load_state_dict=loaded.append)
    said = set_position(loader, {"at": 3}, saved_ranks=4, ranks=2)
    assert said == "the loader's position was that of 4 ranks, not 2: its data begins anew."
    assert loaded == []
    assert set_position(loader, {"at": 3}, saved_ranks=2, ranks=2) == ""
    assert loaded == [{"at": 3}]


def _ranks(size: int, batch_size: int, samples: int) -> list[Resumable]:
    data = Numbers(samples)
    samplers: list[DistributedSampler[int]] = [DistributedSampler(data, size, rank) for rank in range(size)]
    return [Resumable(DataLoader(data, batch_size, sampler=sampler)) for sampler in samplers]


@pytest.mark.parametrize(
    ("before", "after", "batches", "again"),
    [
        ((1, 2), (2, 2), 6, 0),
        ((2, 2), (3, 2), 4, 4),
        ((3, 2), (2, 2), 3, 2),
        ((2, 4), (2, 3), 2, 4),
        ((2, 1), (4, 2), 1, 2),
    ],
)
def test_on_other_ranks_no_sample_is_left_out_and_as_few_as_can_be_come_again(
    before: tuple[int, int], after: tuple[int, int], batches: int, again: int
) -> None:
    samples = 48
    old = _ranks(*before, samples)
    seen = [ids for rank in old for ids in _given(rank, batches)]
    new = _ranks(*after, samples)
    for rank in new:
        rank.load_state_dict(old[0].state_dict())
        assert f"{again} samples of this epoch come again" in rank.note
    rest = [ids for rank in new for ids in _given(rank)]
    flat = [*chain.from_iterable(seen + rest)]
    assert set(flat) == set(range(samples))
    assert len(flat) == samples + again


def test_on_as_many_ranks_there_is_nothing_to_note() -> None:
    old = _ranks(3, 2, 48)[0]
    _given(old, 3)
    new = _ranks(3, 2, 48)[0]
    new.load_state_dict(old.state_dict())
    assert new.note == ""


def test_the_number_of_ranks_is_torchs_unless_the_sampler_knows_better(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        assert Resumable(DataLoader(Numbers())).state_dict()["world_size"] == 4
        assert _ranks(2, 1, 8)[0].state_dict()["world_size"] == 2
    finally:
        dist.destroy_process_group()
    assert Resumable(DataLoader(Numbers())).state_dict()["world_size"] == 1
    monkeypatch.setenv("WORLD_SIZE", "4")  # before they have met
    assert Resumable(DataLoader(Numbers())).state_dict()["world_size"] == 4


# --- random numbers --------------------------------------------------------------------------------------------------


def _drawn() -> list[float]:
    return [torch.rand(()).item(), torch.randn(()).item(), random.gauss(), random.random(), *numpy.random.randn(3)]


@pytest.mark.parametrize("numpys", [numpy.random.MT19937, numpy.random.PCG64])
def test_random_numbers_go_on_as_they_did(numpys: type[numpy.random.BitGenerator]) -> None:
    source: Any = numpy.random
    usual = source.get_bit_generator()
    source.set_bit_generator(numpys(5))
    try:
        _drawn()
        state = rng_state()
        expected = _drawn()
        assert _drawn() != expected
        set_rng_state(state)
        assert _drawn() == expected
    finally:
        source.set_bit_generator(usual)


@pytest.mark.parametrize("initialised", [True, False])
def test_an_accelerators_numbers_are_kept_if_it_was_used(initialised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine of ours has one: a module with the functions that torch's modules for devices have stands in."""
    numbers = torch.Generator().manual_seed(3)
    device = SimpleNamespace(
        is_initialized=lambda: initialised, get_rng_state=numbers.get_state, set_rng_state=numbers.set_state
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda of: {"cuda": device}[of.type])
    state = rng_state()
    assert ("cuda" in state) == initialised
    drawn = torch.rand((), generator=numbers).item()
    set_rng_state(state)
    assert (torch.rand((), generator=numbers).item() == drawn) == initialised
