"""Compiling while the data warms up: on a batch that is made up to look like the first one of an earlier run.

The loader's workers are started first. While they fetch, forward and backward run once on a made-up batch, so that
torch compiles both; then comes the first real batch, and finds all compiled. Nothing else is as if that had happened.
The first run has nothing to go by: it records what its first batch looks like. All ranks do this, or none: a sharded
forward communicates.

Typical use::

    batches = headway.fast_batch(loader, lambda batch: loss_of(model, batch), model=model)
    for batch in batches:                      # the same batches, and the same losses, as from the loader
        ...
"""

import hashlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headway import batches
from headway.config import Settings
from headway.events.vocabulary import Told, clean_text
from headway.machine import cores, ranks_here
from headway.run import Run, current, structure_of
from headway.startup.randomness import have_changed, put_back, states
from headway.startup.ranks import Ranks
from headway.startup.unchanged import CannotUndo, Unchanged

SETTLE_S = 600.0
"""So long a rank whose made-up batch failed waits to hear that no other one waits for it."""
_ROOM = 0.75
"""Of a core, so much must be left beside the loader's workers: then compiling does not hold them up."""
_calls = itertools.count()

Loss = Callable[[Any], torch.Tensor]


def fast_batch(
    loader: Iterable[Any], forward: Loss, *, model: nn.Module | Sequence[nn.Module],
    started: Iterator[Any] | None = None, where: str | os.PathLike[str] | None = None, name: str = "",
) -> "FastBatches":  # fmt: skip
    """The batches of a loader, whose first one finds `forward` compiled, and its backward. Train on what this returns
    in place of the loader, from the first batch on.

    `forward` is given a batch as the loader gives it, and returns the loss: nothing in it may count, log or step.
    `model` is what it computes with: all that is in there is as it was afterwards. Call this last before the loop: it
    begins the loader's first pass, unless that is `started` already. What a batch looks like is kept in the folder
    `where`, by default below headway's home; `name` tells several loaders of one model apart.
    """
    run, models = current(), [model] if isinstance(model, nn.Module) else list(model)
    made = FastBatches(loader, started, run)
    made.prepare(models, forward, lambda: _Record(run, models, name, where))
    return made


class FastBatches:
    """The batches of a loader, first to last and in every pass. All else is the loader's."""

    def __init__(self, loader: Iterable[Any], started: Iterator[Any] | None, run: Run) -> None:
        others = set(multiprocessing.active_children()) if started is None else set()
        self._loader, self._run, self._began, self._before = loader, run, time.perf_counter(), states()
        self._epoch = _epoch(loader)
        self._started: Iterator[Any] | None = iter(loader) if started is None else started
        self._after = states()
        self._workers = [each for each in multiprocessing.active_children() if each not in others and each.daemon]
        self._record: _Record | None = None
        self._outcome, self._why, self._compile_s = "", "", 0.0

    def __iter__(self) -> Iterator[Any]:
        started, self._started = self._started, None
        if started is None:
            return iter(self._loader)
        if _epoch(self._loader) != self._epoch:
            started = self._begin_anew()
        return self._first_pass(started)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def _begin_anew(self) -> Iterator[Any]:
        """The sampler was told its epoch after the pass had begun. Unless something has been drawn since, the new pass
        draws what it would have drawn then."""
        if not have_changed(self._after):
            put_back(self._before)
        self._tell("began anew", "set_epoch was called after fast_batch: call it before", is_said=True)
        return iter(self._loader)

    def _first_pass(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            self._came(batch)
            yield batch
            break
        yield from iterator

    # --- before the first batch ---

    def prepare(self, models: list[nn.Module], forward: Loss, record: Callable[[], "_Record"]) -> None:
        """Has all compiled that can be, if every rank can."""
        unchanged: Unchanged | None = None
        made_up = None
        try:
            self._record = record()
            self._outcome, self._why = self._reason_not_to(self._record)
            if not self._outcome:
                made_up, unchanged = batches.build(self._record.spec, self._run.rank), Unchanged(models)
        except Exception as error:  # nothing has been done yet, and the other ranks hear of it
            self._outcome, self._why = "not done", _text(error)
        ranks, number = Ranks.met(), next(_calls)
        if ranks is None and dist.is_available() and dist.is_initialized():
            self._outcome, self._why = self._outcome or "not done", self._why or "this torch does not show its store"
        if ranks is not None and ranks.compare(f"fast_batch/{number}/ready", "no" if self._outcome else "yes"):
            self._outcome, self._why = self._outcome or "not done", self._why or "another rank could not"
        if not self._outcome and unchanged is not None:
            failure = self._compile(unchanged, lambda: forward(made_up))
            if ranks is not None:
                ranks.compare(f"fast_batch/{number}/done", "done", self._patience(failure))

    def _reason_not_to(self, record: "_Record") -> tuple[str, str]:
        if record.spec is None:
            return "recorded", record.problem or "no earlier run has told what a batch looks like"
        if getattr(self._loader, "num_workers", None) == 0:
            return "not overlapped", "the loader has no workers: nothing is fetched meanwhile"
        if why := competition(record.busy, cores() / ranks_here()):
            return "not overlapped", why
        return "", ""

    def _compile(self, unchanged: Unchanged, loss_of: Callable[[], torch.Tensor]) -> Exception | None:
        began = time.perf_counter()
        self._outcome = "used"
        if not unchanged.backward:
            self._why = "forward only: a second copy of its tables would take too much memory"
        try:
            with self._run.span("fast_batch"):
                unchanged.compute(loss_of)
                if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                    torch.cuda.synchronize()  # what others wait for has been sent, and not only asked for
        except Exception as error:  # all is as it was: the first real batch compiles, as it would have without
            self._outcome, self._why = "failed", _text(error)
            return error
        finally:
            self._compile_s = time.perf_counter() - began
        return None

    def _patience(self, error: Exception | None) -> Callable[[], None]:
        """What ends the wait for the other ranks. If one waits for this one inside its forward, going on would send
        it what belongs to another batch."""
        until = time.monotonic() + SETTLE_S

        def check() -> None:
            if error is not None and (time.monotonic() > until or any(not each.is_alive() for each in self._workers)):
                raise error

        return check

    # --- when it has come ---

    def _came(self, batch: Any) -> None:
        data_s = time.perf_counter() - self._began
        try:
            if self._record is not None:
                self._compare(self._record, batches.spec(batch), _busy(self._workers))
        except Exception as error:  # the batch is there, and can be trained on
            self._outcome, self._why = "not recorded", _text(error)
        is_said = self._outcome == "failed" or (self._outcome not in ("used", "recorded") and self._run.rank == 0)
        self._tell(self._outcome, self._why, is_said, data_s)

    def _compare(self, record: "_Record", told: Any, busy: float) -> None:
        misfits = batches.differences(record.spec, told) if record.spec is not None else []
        if misfits:
            failure = [self._why] if self._outcome == "failed" else []
            self._outcome, self._why = "misfit", "; ".join(misfits + failure)
        if misfits or record.spec is None:
            record.write(told, busy)

    def _tell(self, outcome: str, why: str, is_said: bool, data_s: float = 0.0) -> None:
        seconds = {"compile_s": round(self._compile_s, 3), "data_s": round(data_s, 3)}
        self._run.mark(Told.FAST_BATCH, outcome=outcome, why=clean_text(why), **seconds)
        if is_said:
            on = f" on rank {self._run.rank}" if outcome == "failed" else ""
            print(f"headway: fast batch {outcome}{on}: {why}. {_ADVICE[outcome]}", file=sys.stderr, flush=True)


_ADVICE = {
    "failed": "All is as it was, and the first real batch compiles.",
    "misfit": "The first step compiles for it, and the next run knows.",
    "began anew": "Its first batch may come later for that.",
    "not recorded": "The next run compiles when its data has come.",
    **dict.fromkeys(("not done", "not overlapped"), "The first step compiles when its data has come."),
}
"""What follows from an outcome."""


# --- what is known of a batch ----------------------------------------------------------------------------------------


class _Record:
    """What a run has written down of its first batch, for those after it: a file for each program, model and rank."""

    def __init__(self, run: Run, models: list[nn.Module], name: str, where: str | os.PathLike[str] | None) -> None:
        self._run, self._model = run, " ".join(map(structure_of, models))
        named = hashlib.sha256(json.dumps([run.program, self._model, name]).encode()).hexdigest()[:24]
        self._folder = Path(where) if where else Settings.from_environment().home_folder / "batches"
        self._folder = self._folder.expanduser().absolute() / named
        self.spec: Any = None
        self.busy, self.problem = 0.0, ""
        """How many cores the loader's workers kept busy until their first batch; why nothing is known."""
        for found in self._looked_for(name):
            if self._take(found):
                break

    def _looked_for(self, name: str) -> Iterator[bytes]:
        """This rank's own, else the one with the compiled code, else the first rank's: that of a smaller job."""
        for at in (self._run.rank, None, 0):
            if at is None:
                yield self._run.compiles.recorded_batch() if self._run.compiles is not None and not name else b""
            else:
                path = self._folder / f"{at}.json"
                yield path.read_bytes() if path.is_file() else b""

    def _take(self, found: bytes) -> bool:
        try:
            told = json.loads(found) if found else {}
            if not isinstance(told, dict) or told.get("model") != self._model:  # none, or another model's
                return False
            self.spec, self.busy = told["spec"], float(told["busy"])
        except (KeyError, TypeError, ValueError) as error:
            self.problem = f"what an earlier run has written cannot be read ({type(error).__name__}: {error})"
            return False
        return True

    def write(self, spec: Any, busy: float) -> None:
        """Writes it down for the next run, whole or not at all."""
        told = json.dumps({"model": self._model, "busy": round(busy, 3), "spec": spec}, sort_keys=True)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self._folder / f".{self._run.rank}-{os.getpid()}"
        part.write_text(told)
        os.replace(part, self._folder / f"{self._run.rank}.json")
        if self._run.compiles is not None:
            self._run.compiles.record_batch(told.encode())


# --- cores -----------------------------------------------------------------------------------------------------------


def competition(busy: float, cores: float) -> str:
    """Why compiling would hold up the loader, which keeps `busy` cores at work; empty if it would not. Compiling is
    mostly one thread's work; what else it could use, it takes only where nobody else does."""
    if cores - busy >= _ROOM:
        return ""
    return f"its workers keep {busy:.1f} of {cores:.1f} cores busy: compiling would hold them up"


def _busy(workers: Iterable[Any]) -> float:
    """How many cores these processes have kept busy since they began; of those that are gone, nothing is known."""
    per_s, now_s, found = os.sysconf("SC_CLK_TCK"), time.clock_gettime(time.CLOCK_BOOTTIME), 0.0
    for worker in workers:
        try:
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        computed, began = int(fields[11]) + int(fields[12]), int(fields[19])
        found += computed / max(now_s * per_s - began, 1)
    return found


def _text(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return first if isinstance(error, CannotUndo) else f"{type(error).__name__}: {first}"


def _epoch(loader: Any) -> Any:
    """What the sampler was told last."""
    samplers = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    return [getattr(sampler, "epoch", None) for sampler in samplers]
