"""Trainer, uploader, keeper and supervisor are killed at random instants: every committed checkpoint loads with the
right values, and no save that was reported is lost.

The environment variable SEED chooses other instants.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import supervising
import torch.distributed.checkpoint as dcp
import trainers
from keeping import is_alive, keepers
from supervising import descendants
from trainers import Notes, Process, fork, is_equal, loaded, newest, state_at, wait_for

from headway.checkpoint import wire

SEED = int(os.environ.get("SEED", "0"))
LONGEST_S = 0.03
"""The longest wait before a kill: a few saves take as long."""


@pytest.fixture(autouse=True, scope="session")
def _warm() -> None:
    trainers.warm_up()


def kill(pid: int | None) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):  # it has ended by itself, or was killed just before
            os.kill(pid, signal.SIGKILL)


class Watch:
    """Knows what was promised so far, and looks whether it is kept."""

    def __init__(self, root: Path, notes: Notes, ranks: int, holds: bool = True, **size: int) -> None:
        self.root, self.notes, self.ranks, self.size = root, notes, ranks, size
        self.holds = holds
        """Whether memory always has a save that all ranks have."""
        self.committed = 0
        self.began = 0
        """So many notes there were before the trainers of now began."""
        self.kept_after = 0
        """Once a later step than this was committed, there is a keeper again after one was killed."""

    def keeper_is_killed(self) -> None:
        steps = [step for step, _ in self.notes.read("staged")]
        self.kept_after = max(steps, default=0) + 1  # one more may be staged, and not noted

    def promised(self) -> int:
        """The step that the next trainers have to begin with, or a later one: what was committed, or copied by all."""
        saved = self.notes.highest("saved", rank=0)
        if saved <= self.kept_after or not self.holds:
            return saved
        return max(saved, min(self.notes.highest("staged", rank, self.began) for rank in range(self.ranks)))

    def look(self) -> None:
        """The newest checkpoint is no older than those before it, or than what was said to be saved, and is right."""
        promised = self.notes.highest("saved", rank=0)
        found = newest(self.root)
        if found is None:
            assert promised == self.committed == 0
            return
        assert found.step is not None
        assert found.step >= promised
        assert found.step >= self.committed
        self.committed = found.step
        try:
            weights = loaded(self.root / found.name, **self.size)
        except dcp.CheckpointException:
            if newest(self.root) == found:
                raise
            self.look()  # it was pruned meanwhile: there are newer ones
        else:
            expected = state_at(found.step, **self.size)
            assert is_equal(weights, expected), f"{found.name} has other values than step {found.step} had"


class Crew:
    """The trainers of a job, and whoever works for them."""

    def __init__(self, root: Path, home: Path, chance: random.Random, ranks: int = 1, kind: str = "") -> None:
        self.root, self.home, self.chance, self.ranks, self.kind = root, home, chance, ranks, kind
        self.notes = Notes(home / "notes")
        self.watch = Watch(root, self.notes, ranks)
        self.trainers: list[Process] = []
        self._meetings = itertools.count()

    def start(self) -> None:
        """They go on where the promise was, or later."""
        promised, before = self.watch.promised(), len(self.notes.read("restored"))
        self.watch.began = len(self.notes.read())
        meeting = str(self.home / f"meeting-{next(self._meetings)}")
        words = (str(self.root), self.notes.path)
        self.trainers = [
            fork(trainers.train, self.home, *words, rank, self.ranks, meeting, self.kind, HEADWAY_JOB="j")
            for rank in range(self.ranks)
        ]
        if self.chance.random() < 0.8:  # else the next kill may come before they have begun
            self._await_restored(promised, before)

    def _await_restored(self, promised: int, before: int) -> None:
        self._await(lambda: len(self.notes.read("restored")) >= before + self.ranks)
        assert all(step >= promised for step, _ in self.notes.read("restored")[before:])

    def _await(self, what: Callable[[], object]) -> None:
        def or_dead() -> bool:
            dead = [each for each in self.trainers if not each.is_alive()]
            assert not dead, f"a trainer ended by itself: {(self.home / 'said').read_text()[-4000:]}"
            return bool(what())

        wait_for(or_dead)

    def progress(self) -> None:
        """Waits until something was saved again, so that the next instant is in the middle of things."""
        before = len(self.notes.read("saved"))
        self._await(lambda: len(self.notes.read("saved")) > before)

    def stop(self, first: int = 0) -> None:
        """Kills all trainers, this one a little before the others, as a launcher does that sees it dead."""
        kill(self.trainers[first].pid)
        for other in self.trainers:
            time.sleep(self.chance.uniform(0, LONGEST_S) if len(self.trainers) > 1 else 0)
            kill(other.pid)
            other.join()

    def strike(self, victim: str) -> None:
        """Kills one of a kind now."""
        if victim == "trainer":
            self.stop(self.chance.randrange(self.ranks))
            self.start()
        elif victim == "keeper":
            for pid in keepers(self.root):
                kill(pid)
            self.watch.keeper_is_killed()
        else:
            for pid in self.uploaders():
                kill(pid)

    def uploaders(self) -> Iterator[int]:
        for keeper in keepers(self.root):
            yield from descendants(keeper)


def strike_at_random(crew: Crew, instants: dict[str, int]) -> None:
    """Kills this many of each kind, in any order."""
    victims = [victim for victim, count in instants.items() for _ in range(count)]
    crew.chance.shuffle(victims)
    crew.start()
    try:
        for victim in victims:
            if crew.chance.random() < 0.7:
                crew.progress()
            time.sleep(crew.chance.uniform(0, LONGEST_S))
            crew.strike(victim)
            crew.watch.look()
        crew.progress()
    finally:
        crew.stop()
    crew.watch.look()
    latest = crew.root / "latest"  # it comes after the commit
    wait_for(lambda: (found := newest(crew.root)) and latest.exists() and latest.read_text() == found.name)


class Supervised(Crew):
    """A trainer under `headway run`."""

    def start(self) -> None:
        promised, before = self.watch.promised(), len(self.notes.read("restored"))
        self.watch.began = len(self.notes.read())
        words = ["--job", "j", "--max-restarts", "1000", trainers.__file__, str(self.root), str(self.notes.path)]
        self.supervisor = supervising.start(words, self.home)
        self._await_restored(promised, before)

    def _await(self, what: Callable[[], object]) -> None:
        wait_for(what, self.supervisor)

    def strike(self, victim: str) -> None:
        if victim == "supervisor":
            self.stop()
            self.start()
        elif victim == "trainer":
            before = len(self.notes.read("restored"))
            kill(self.notes.last_pid())
            self._await_restored(self.watch.promised(), before)
            self.watch.began = len(self.notes.read())
        else:
            super().strike(victim)

    def stop(self, first: int = 0) -> None:
        self.supervisor.kill()
        self.supervisor.wait()


class Job(Supervised):
    """Two ranks under `headway run` or torchrun, whose state is so large that most saves are in memory alone."""

    def __init__(self, root: Path, home: Path, chance: random.Random, launcher: str, kind: str, memory: str) -> None:
        super().__init__(root, home, chance, ranks=2, kind=kind)
        self.launcher, self.memory = launcher, memory
        self.watch = Watch(root, self.notes, 2, holds=memory in ("auto", "two-slot"), **trainers.LARGE)

    def start(self) -> None:
        promised, before = self.watch.promised(), len(self.notes.read("restored"))
        self.watch.began = len(self.notes.read())
        words = ["--nproc-per-node", "2", "--max-restarts", "1000", trainers.__file__, str(self.root)]
        words += [str(self.notes.path), self.kind, self.memory]
        settings = {"HEADWAY_JOB": "j", "OMP_NUM_THREADS": "1"}
        if self.launcher == "torchrun":
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
            environ = {**os.environ, **settings, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            with (self.home / "stderr").open("a") as file:
                self.supervisor = subprocess.Popen(
                    command, cwd=self.home, env=environ, stdout=file, stderr=file, text=True
                )
        else:
            self.supervisor = supervising.start(words, self.home, cold=False, **settings)
        self._await_restored(promised, before)

    def _await_restored(self, promised: int, before: int) -> None:
        super()._await_restored(promised, before)
        assert len({step for step, _ in self.notes.read("restored")[before:]}) == 1, "ranks differ"

    def progress(self) -> None:
        before = len(self.notes.read("staged"))
        self._await(lambda: len(self.notes.read("staged")) >= before + self.ranks)

    def strike(self, victim: str) -> None:
        if victim == "zygote":
            for pid in supervising.zygotes(self.supervisor.pid):
                kill(pid)
        elif victim == "trainer":
            before = len(self.notes.read("restored"))
            kill(self.chance.choice(self.notes.last_pids(self.ranks)))
            self._await_restored(self.watch.promised(), before)
            self.watch.began = len(self.notes.read())
        else:
            super().strike(victim)

    def stop(self, first: int = 0) -> None:
        """Kill the launcher. What headway started ends with it; torchrun's ranks are killed as a scheduler would."""
        family = supervising.descendants(self.supervisor.pid)
        super().stop(first)
        if self.launcher == "torchrun":
            for pid in family:
                kill(pid)
        ours = [pid for pid, command in family.items() if "headway.checkpoint" not in command]
        wait_for(lambda: not any(map(is_alive, ours)))


Record = Callable[[str, object], None]


def test_after_any_kill_the_newest_checkpoint_is_right_and_no_older_than_promised(
    root: Path, home: Path, record_property: Record
) -> None:
    crew = Crew(root, home, random.Random(f"alone {SEED}"))
    strike_at_random(crew, {"trainer": 8, "uploader": 6, "keeper": 5})
    record_property("kills", 19)


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.thorough), "fsdp"])
def test_whichever_rank_is_killed_all_go_on_from_the_same_step(
    root: Path, home: Path, kind: str, record_property: Record
) -> None:
    crew = Crew(root, home, random.Random(f"{kind} {SEED}"), ranks=2, kind=kind)
    strike_at_random(crew, {"trainer": 4, "uploader": 2, "keeper": 2})
    record_property("kills", 8)


def test_no_save_is_lost_with_a_killed_supervisor(root: Path, home: Path, record_property: Record) -> None:
    crew = Supervised(root, home, random.Random(f"supervised {SEED}"))
    strike_at_random(crew, {"supervisor": 2, "trainer": 1, "uploader": 1, "keeper": 1})
    record_property("kills", 5)


JOBS = list(
    itertools.product(("headway", "headway", "torchrun"), ("ddp", "fsdp"), ("two-slot", "one-slot", "streaming"))
)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_whoever_is_killed_in_a_job_nothing_is_lost_torn_or_out_of_order(
    root: Path, home: Path, record_property: Record
) -> None:
    launcher, kind, memory = JOBS[SEED % len(JOBS)]
    job = Job(root, home, random.Random(f"job {SEED}"), launcher, kind, memory)
    kills = {"trainer": 2, "keeper": 1, "uploader": 1, "supervisor": 1, "zygote": 1 if launcher == "headway" else 0}
    if "SEED" in os.environ:
        kills = {victim: 6 * count for victim, count in kills.items()}
    try:
        strike_at_random(job, kills)
    finally:
        print((home / "stderr").read_text()[-4000:])
    record_property("kills", sum(kills.values()))


def test_what_the_dead_have_sent_is_received_even_if_they_left_something_unread() -> None:
    here, there = wire.pair()
    here.send({"event": "done"})
    there.send({"do": "save"})
    there.close()
    assert here.has_message()
    assert here.receive() == ({"do": "save"}, [])
    assert here.receive() is None
