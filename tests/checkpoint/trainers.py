"""Trainers whose state at any step is known, each a process of its own.

They are forked from a warm process that has imported this module: a new one trains within milliseconds.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first process group would import
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import headway
from headway import Checkpointer
from headway.checkpoint import Save, SaveFailed, catalog
from headway.storage import open_storage

PATIENCE_S = 120.0
"""Longer than anything takes on the slowest machine."""

TENSORS, LENGTH = 16, 1 << 14
LARGE = {"length": 1 << 16, "tensors": 256}
"""A state of 64 MB: a copy takes a fraction of what an upload does."""


# --- a state that is known -------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Every element of its weights grows by one at each step: two steps have no element in common."""

    def __init__(self, length: int = LENGTH, tensors: int = TENSORS) -> None:
        super().__init__()
        start = torch.arange(length, dtype=torch.float32)
        self.weights = nn.ParameterList([nn.Parameter(start * (number % 16 + 1) + number) for number in range(tensors)])

    @torch.no_grad()
    def train_step(self) -> None:
        for weight in self.weights:
            weight.add_(1)

    def forward(self) -> None:
        raise NotImplementedError


def state_at(step: int, length: int = LENGTH, tensors: int = TENSORS) -> dict[str, torch.Tensor]:
    """The weights that training has at a step."""
    return {name: weight + step for name, weight in Counting(length, tensors).state_dict().items()}


def loaded(folder: str | os.PathLike[str], key: str = "model", **size: int) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, as plain torch reads them."""
    weights = {name: torch.full_like(weight, -1) for name, weight in state_at(0, **size).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({key: weights} if key else weights, checkpoint_id=folder, no_dist=True)
    return weights


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def has(folder: Path, step: int, **size: int) -> bool:
    """Whether plain torch reads the values of a step there."""
    return is_equal(loaded(folder, **size), state_at(step, **size))


# --- trainers --------------------------------------------------------------------------------------------------------


class Process:
    """A forked trainer, with the methods that `multiprocessing.Process` has."""

    def __init__(
        self, train: Callable[..., None], folder: Path, args: tuple[Any, ...], settings: dict[str, str]
    ) -> None:
        import warm  # which this module does not find where it is a script under `headway run`

        command = [sys.executable, "-c", "import trainers; trainers._begin()"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self._popen = warm.Popen(command, imports=["pytest", "trainers"], env=environ, **pipes)
        assert self._popen.stdin
        assert self._popen.stdout
        self.orders = Connection(os.dup(self._popen.stdin.fileno()), readable=False)
        self.answers = Connection(os.dup(self._popen.stdout.fileno()), writable=False)
        self._popen.stdin.close()
        self._popen.stdout.close()
        self.orders.send((train, folder / "said", {**os.environ, **settings}, args))

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exitcode(self) -> int | None:
        """Negative if a signal has ended it; None while it runs."""
        return self._popen.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        self._popen.kill()

    def join(self, timeout: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)


def fork(train: Callable[..., None], folder: Path, *args: Any, **settings: str) -> Process:
    """Start a process that runs `train(*args)`; its output goes to `folder/said`."""
    return Process(train, folder, args, settings)


def _begin() -> None:
    """Run in a forked process what the test sends, with its environment. Both ends of the line stay open."""
    global _orders, _answers
    _orders, _answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    train, said, environ, args = _orders.recv()
    os.environ.clear()
    os.environ.update(environ)
    null, file = os.open(os.devnull, os.O_RDONLY), os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(null)
    os.close(file)
    train(*args)


_orders: Connection
_answers: Connection


def warm_up() -> None:
    """Start the process that trainers are forked from, so that no test's own time includes that."""
    import warm

    warm.run([sys.executable, "-c", ""], imports=["pytest", "trainers"])


class Obedient:
    """A trainer that does what it is told, one thing at a time."""

    def __init__(self, root: str | os.PathLike[str], folder: Path, **size: int) -> None:
        self.process = fork(_obey, folder, os.fspath(root), size, HEADWAY_JOB="j")

    def __enter__(self) -> "Obedient":
        return self

    def __exit__(self, *problem: object) -> None:
        self.die()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.tell(name, *args)
            return self.hear()

        return call

    def tell(self, name: str, *args: Any) -> None:
        """Has it do something, without waiting for it."""
        self.process.orders.send((name, args))

    def hear(self) -> Any:
        """What the last thing that it was told to do came to."""
        assert self.process.answers.poll(PATIENCE_S), "it does not answer"
        try:
            done, result = self.process.answers.recv()
        except EOFError:
            self.process.join(PATIENCE_S)
            raise AssertionError(f"it ended with {self.process.exitcode}") from None
        assert done, result
        return result

    def die(self) -> None:
        """Killed, and gone."""
        self.process.kill()
        self.process.join()


class Orders:
    """What an obedient trainer can do."""

    def __init__(self, root: str, size: dict[str, int]) -> None:
        self.size, self.model = size, Counting(**size)
        self.checkpointer = Checkpointer(root, model=self.model, interval=None)
        self.save_: Save | None = None

    def restore(self) -> tuple[int, str] | None:
        """Step and tier, if the weights are those of the step."""
        found = self.checkpointer.restore()
        if found is None:
            return None
        assert is_equal(dict(self.model.state_dict()), state_at(found.step, **self.size)), "restored other values"
        return found.step, found.tier

    def train(self, step: int) -> None:
        """Has the weights of a step."""
        self.model.load_state_dict(state_at(step, **self.size))

    def save(self, step: int) -> float:
        """Saves the weights that it has, as those of a step."""
        self.save_ = self.checkpointer.save(step)
        return self.save_.blocked_s

    def hold(self, step: int) -> None:
        """Saves the weights that it has in memory alone."""
        self.checkpointer._save(step, None, durable=False, may_skip=False)

    def save_and_spoil(self, step: int) -> None:
        """The weights change as soon as the call has returned."""
        self.save(step)
        with torch.no_grad():
            for weight in self.model.weights:
                weight.fill_(-2)

    def save_and_die(self, step: int) -> None:
        """Nothing comes after the call."""
        self.checkpointer.save(step)
        os.kill(os.getpid(), signal.SIGKILL)

    def wait(self) -> str:
        """Why the last save failed; empty if it did not."""
        assert self.save_ is not None
        try:
            assert self.save_.wait(PATIENCE_S), "it took too long"
            # It is committed. The keeper knows that only when the uploader has tidied up as well.
            assert self.checkpointer._writer.wait(PATIENCE_S), "tidying up took too long"
        except SaveFailed as error:
            return str(error)
        return ""

    def close(self) -> None:
        self.checkpointer.close()


def _obey(root: str, size: dict[str, int]) -> None:
    orders = None
    while True:
        name, args = _orders.recv()
        try:
            orders = orders or Orders(root, size)
            _answers.send((True, getattr(orders, name)(*args)))
        except Exception:
            _answers.send((False, traceback.format_exc()))


class Notes:
    """What trainers say in a file, one line each: what happened, at which step, on which rank."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, what: str, step: int, rank: int = 0, more: str = "") -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(file, f"{what} {step} {rank} {os.getpid()} {more}\n".encode())
        os.close(file)

    def lines(self) -> list[str]:
        """The notes that are complete: of one that is being written, a reader may see the beginning."""
        text = self.path.read_text() if self.path.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def read(self, *kinds: str, since: int = 0) -> list[tuple[int, int]]:
        """Step and rank of all notes of these kinds, or of any, in order, but for the first so many notes."""
        words = (line.split(maxsplit=4) for line in self.lines()[since:])
        return [(int(step), int(rank)) for what, step, rank, *_ in words if what in kinds or not kinds]

    def last_pid(self) -> int:
        """Who has restored last."""
        return next(int(line.split()[3]) for line in reversed(self.lines()) if "restored" in line)

    def last_pids(self, ranks: int) -> list[int]:
        """The processes that have restored last, one of each rank."""
        lines = [line.split() for line in self.lines() if line.startswith("restored")]
        return [int(next(words[3] for words in reversed(lines) if words[2] == str(rank))) for rank in range(ranks)]

    def highest(self, kind: str, rank: int, since: int = 0) -> int:
        """The highest step that a rank has said this of."""
        return max((step for step, by in self.read(kind, since=since) if by == rank), default=0)


def train(
    root: str, notes: Path, rank: int = 0, ranks: int = 1, meeting: str = "", kind: str = "", memory: str = ""
) -> None:
    """Trains for ever and saves at every step, now and then without waiting for the one before; with `memory`, a large
    state that is held in that way, when the Checkpointer finds that it pays."""
    tell = Notes(notes)
    if ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", (meeting and f"file://{meeting}") or None, rank=rank, world_size=ranks)
    model = inner = Counting(**LARGE if memory else {})
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(inner)  # type: ignore[assignment]
    elif kind == "fsdp":
        fully_shard(inner)
    interval = {"": None, "streaming": "1s"}.get(memory, "auto")
    how: dict[str, Any] = {"interval": interval} | ({"memory": memory} if memory else {})
    keep = 8 if memory else 3  # to load a large one takes a while, in which it must not be pruned
    checkpointer = Checkpointer(root, model=model, keep=keep, **how)
    began = {name: _local(weight).clone() for name, weight in inner.state_dict().items()}
    restored = checkpointer.restore()
    for name, weight in inner.state_dict().items():
        assert _local(weight).equal(began[name] + checkpointer.step), f"{name} is not that of step {checkpointer.step}"
    tell.add("restored", checkpointer.step, rank, restored.tier if restored else "nothing")
    (_train_large if memory else _train_on)(checkpointer, inner, tell, rank)


def _train_large(checkpointer: Checkpointer, model: Counting, tell: Notes, rank: int) -> None:
    """Leaves it to the Checkpointer when to save, and whether to memory alone."""
    run, save, saved = headway.current(), checkpointer._save, headway.current().checkpoint_saved

    def save_and_note(step: int, *words: Any, **more: Any) -> Save | None:
        done = save(step, *words, **more)
        if done is not None:
            tell.add("staged", step, rank)
        return done

    def note_saved(step: int, path: str) -> None:
        saved(step, path)
        tell.add("saved", step, rank)

    checkpointer._save, run.checkpoint_saved = save_and_note, note_saved  # type: ignore[method-assign, assignment]
    for step, _ in run.steps(itertools.count(), start=checkpointer.step):
        model.train_step()
        checkpointer.after(step)


def _train_on(checkpointer: Checkpointer, model: Counting, tell: Notes, rank: int) -> None:
    chance = random.Random(checkpointer.step)  # the same on all ranks
    for step, _ in headway.current().steps(itertools.count(), start=checkpointer.step):
        model.train_step()
        save = checkpointer.save(step + 1)
        tell.add("staged", step + 1, rank)
        if chance.random() < 0.5:
            try:
                save.wait()
                tell.add("saved", step + 1, rank)
            except SaveFailed as error:
                tell.add("failed", step + 1, rank, str(error))


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight  # type: ignore[no-any-return]


# --- watching ---------------------------------------------------------------------------------------------------------


def wait_for(what: Callable[[], Any], alive: "Process | subprocess.Popen[str] | None" = None) -> Any:
    """What the function returns once that is something."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if found := what():
            return found
        ended = alive.exitcode if isinstance(alive, Process) else alive.poll() if alive else None
        assert ended is None, f"the process ended before, with {ended}"
        time.sleep(0.002)
    raise AssertionError("it never happened")


def newest(root: str | os.PathLike[str]) -> catalog.Checkpoint | None:
    return catalog.newest(open_storage(root))


if __name__ == "__main__":
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    train(sys.argv[1], Path(sys.argv[2]), rank, ranks, "", *sys.argv[3:])
