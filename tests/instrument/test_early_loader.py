"""Data workers that start early give the batches that they would have given, and leave no trace where they cannot."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from running import python, train, wait_for

from headway.events.journal import Follower
from headway.events.vocabulary import LoopBegin, Mark, StepRun, Told

SCRIPT = """
import hashlib, json, multiprocessing, os, random, signal, sys, threading, time
import numpy, torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from headway.instrument import early_loaders
early_loaders.LOADERS = 1000

FACTOR, TABLE = 1, {"bias": 0}

class Numbers(Dataset):
    def __init__(self):
        self.items, self.array, self.tensor, self.scale = list(range(40)), numpy.arange(40.0), torch.arange(40.0), 1
    def __len__(self):
        return 40
    def __getitem__(self, index):
        time.sleep(0)
        drawn = torch.rand(()).item() + random.random() + numpy.random.rand()
        value = self.items[index] + self.array[index] + self.tensor[index].item()
        return torch.tensor([value * self.scale * FACTOR + TABLE["bias"], drawn], dtype=torch.float64)

class Drawing(Numbers):
    def __init__(self):
        super().__init__()
        self.generators = [random.Random(1), numpy.random.default_rng(1), torch.Generator().manual_seed(1)]
    def __getitem__(self, index):
        one, two, three = self.generators
        drawn = one.random() + two.random() + torch.rand((), generator=three).item()
        return torch.tensor([index, drawn], dtype=torch.float64)

class Reading(Numbers):
    def __init__(self):
        self.file = open(__file__, "rb")
    def __getitem__(self, index):  # not by where the file is at: its workers share that
        return torch.tensor([index, os.pread(self.file.fileno(), 1, index)[0]])

class Stream(IterableDataset):
    def __iter__(self):
        yield from range(8)

def made(seed=7, kind=Numbers, **options):
    options.setdefault("shuffle", "sampler" not in options)
    return DataLoader(kind(), 4, num_workers=2, generator=torch.Generator().manual_seed(seed), **options)

def distributed(**options):
    return made(sampler=DistributedSampler(range(40), 2, 0, **options))

def otherwise():
    return made(sampler=RandomSampler(range(40), generator=torch.Generator().manual_seed(1)))

def in_a_thread():
    loaders = []
    thread = threading.Thread(target=lambda: loaders.append(made()))
    thread.start(), thread.join()
    return loaders[0]

def seeds(worker):
    numpy.random.seed(torch.initial_seed() % 2**32)

def end_a_worker(loader):
    for child in multiprocessing.active_children()[:1]:
        os.kill(child.pid, signal.SIGKILL)
        child.join()

def set_global(loader):
    global FACTOR
    FACTOR += 1

CASES = {
    "shuffled": (made, None),
    "in order": (lambda: made(shuffle=False), None),
    "seeded in workers": (lambda: made(worker_init_fn=seeds), None),
    "distributed": (distributed, None),
    "unused draws of others": (made, lambda loader: (torch.rand(3), random.random(), numpy.random.rand())),
    "another epoch": (distributed, lambda loader: loader.sampler.set_epoch(3)),
    "generator drawn from": (made, lambda loader: torch.rand(3, generator=loader.generator)),
    "generator seeded": (made, lambda loader: loader.generator.manual_seed(8)),
    "attribute set": (made, lambda loader: setattr(loader.dataset, "scale", 3)),
    "item set": (made, lambda loader: loader.dataset.items.__setitem__(11, 99)),
    "array changed": (made, lambda loader: loader.dataset.array.__imul__(2)),
    "tensor changed": (made, lambda loader: loader.dataset.tensor.mul_(2)),
    "global set": (made, set_global),
    "global changed": (made, lambda loader: TABLE.update(bias=5)),
    "environment set": (made, lambda loader: os.environ.update(X="y")),
    "python draws": (lambda: made(kind=Drawing), lambda loader: loader.dataset.generators[0].random()),
    "numpy draws": (lambda: made(kind=Drawing), lambda loader: loader.dataset.generators[1].random()),
    "torch draws": (lambda: made(kind=Drawing), lambda loader: loader.dataset.generators[2].manual_seed(2)),
    "another sharing": (made, lambda loader: torch.multiprocessing.set_sharing_strategy("file_system")),
    "worker killed": (made, end_a_worker),
    "no generator": (lambda: DataLoader(Numbers(), 4, shuffle=True, num_workers=2), None),
    "a stream": (lambda: DataLoader(Stream(), 4, num_workers=1, generator=torch.Generator()), None),
    "persistent": (lambda: made(persistent_workers=True), None),
    "sampler's generator seeded": (otherwise, lambda loader: loader.sampler.generator.manual_seed(8)),
    "an open file": (lambda: made(kind=Reading), None),
    "made in a thread": (in_a_thread, None),
}

def digest(value):
    return hashlib.sha256(value.numpy().tobytes()).hexdigest()[:12]

def outcome(make, change):
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    loader = make()
    if change is not None:
        change(loader)
    got = [[batch.tolist() for batch in loader] for epoch in range(2)]
    states = [digest(torch.get_rng_state()), random.random(), numpy.random.rand()]
    return got, states, loader.generator and digest(loader.generator.get_state())

def main():
    if sys.argv[1:]:
        return globals()[sys.argv[1]]()
    print(json.dumps({name: outcome(*case) for name, case in CASES.items()}))

def not_forked():
    print(json.dumps(outcome(lambda: made(multiprocessing_context="forkserver"), None)))

def settles():
    loader = made()
    multiprocessing.set_start_method("spawn")  # which can be done once only
    list(loader)
    print(json.dumps(multiprocessing.get_start_method()))

def ends():
    loader = made()
    print(json.dumps([child.pid for child in multiprocessing.active_children()]))

def errs():
    class Bad(Numbers):
        def __getitem__(self, index):
            raise ValueError(f"item {index} is bad")
    loader = DataLoader(Bad(), 4, num_workers=1, generator=torch.Generator())
    try:
        next(iter(loader))
    except ValueError as error:
        print(json.dumps(str(error).splitlines()[-1]))

def trains():
    torch.manual_seed(1)
    loader, other = made(), made(9)
    waiting = len(multiprocessing.active_children())
    child = os.fork()
    if not child:  # it must not end its parent's workers
        del loader, other
        os._exit(len(list(made(5))) - 10)
    assert os.waitpid(child, 0)[1] == 0
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    left = []
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch).sum()
            loss.backward()
            optimizer.step()
            left.append(len(multiprocessing.active_children()))
    print(json.dumps([waiting, left[0], len(multiprocessing.active_children()), loss.item()]))

if __name__ == "__main__":
    main()
"""


def outcome_of(folder: Path, job: str, fast: bool, *words: str, text: str = SCRIPT) -> Any:
    """What the script prints, with all items of a fast start or without one."""
    script = folder / "script.py"
    script.write_text(text)
    environ = os.environ | ({"HEADWAY_FAST_START": "all"} if fast else {})
    done = train(str(script), *words, options=("--job", job), fast=fast, env=environ, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def records(home: Path, job: str) -> list[Any]:
    return [record for path in (home / "jobs" / job).rglob("*.hwj") for record in Follower(path).poll().records]


def told(home: Path, job: str) -> list[tuple[bool, str]]:
    """What became of each loader."""
    marks = [record for record in records(home, job) if isinstance(record, Mark) and record.name == Told.FAST_START]
    return [(mark.attrs["on"], mark.attrs["why"]) for mark in marks if mark.attrs["item"] == "loader"]


@pytest.mark.thorough
def test_batches_and_random_states_are_the_same_whether_workers_start_early_or_not(home: Path) -> None:
    early, stock = outcome_of(home, "early", True), outcome_of(home, "stock", False)
    assert early.keys() == stock.keys()
    for case, outcome in stock.items():
        assert early[case] == outcome, case
    assert told(home, "stock") == []
    begun = "its workers were started when it was made"
    changed, used = "its sampler or its dataset has changed since", "its generator was used since"
    assert [why for _, why in told(home, "early")] == [
        *[begun] * 5, changed, used, used, *[changed] * 11, "one of its workers has died",
        "it has no generator of its own, so what it draws depends on when it is asked",
        "its kind of loader, or of dataset, has a state of its own",
        "its workers are persistent, or its memory is pinned",
        "its sampler does not draw from the loader's generator",
        "what it holds cannot be compared (TypeError: a file that is open)",
        "it is made in a thread, and a fork beside others may hang",
    ]  # fmt: skip


@pytest.mark.thorough
def test_batches_are_the_same_where_workers_are_not_forked(home: Path) -> None:
    assert outcome_of(home, "early", True, "not_forked") == outcome_of(home, "stock", False, "not_forked")
    assert told(home, "early") == [(False, "its workers are not forked")]


def test_an_item_that_cannot_be_had_is_the_same_error(home: Path) -> None:
    early, stock = outcome_of(home, "early", True, "errs"), outcome_of(home, "stock", False, "errs")
    assert early == stock == "ValueError: item 0 is bad"
    assert told(home, "early") == [(True, "its workers were started when it was made")]


@pytest.mark.thorough
def test_the_program_can_still_say_how_its_processes_start(home: Path) -> None:
    assert outcome_of(home, "early", True, "settles") == "spawn"
    assert told(home, "early") == [(False, "its sampler or its dataset has changed since")]


def test_a_program_that_ends_without_asking_leaves_no_workers(home: Path) -> None:
    pids = outcome_of(home, "early", True, "ends")
    assert len(pids) == 2
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))  # torch ends slow ones without waiting


def test_steps_are_counted_as_ever_and_workers_that_nobody_asked_for_end_with_the_first(home: Path) -> None:
    early, stock = outcome_of(home, "early", True, "trains"), outcome_of(home, "stock", False, "trains")
    assert early[3] == stock[3]
    assert (early[0], stock[0]) == (4, 0)
    assert early[1:3] == stock[1:3]
    for job in ("early", "stock"):
        found = records(home, job)
        assert sum(record.count for record in found if isinstance(record, StepRun)) == 20
        assert [record.batch_size for record in found if isinstance(record, LoopBegin)] == [4]
    assert told(home, "early") == [
        (True, "its workers were started when it was made"),
        (False, "it was not asked before the first step, or not at all"),
    ]


def test_only_the_first_loader_is_started_early(home: Path) -> None:
    outcome_of(home, "two", True, "trains", text=SCRIPT.replace("early_loaders.LOADERS = 1000", ""))
    assert "another one was before it" in [why for _, why in told(home, "two")]


@pytest.mark.thorough
def test_without_the_item_nothing_is_started(home: Path) -> None:
    script = home / "script.py"
    script.write_text(SCRIPT)
    environ = {"HEADWAY_JOB": "off", "HEADWAY_FAST_START": "imports,groups"}
    assert json.loads(python(str(script), "trains", environ=environ, timeout=500))[0] == 0
