"""What a training script holds: says when to save, what belongs to the state, and where to go on after a restart."""

import gc
import os
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from headway.checkpoint import catalog
from headway.checkpoint.ahead import Ahead
from headway.checkpoint.arena import Arena, complete
from headway.checkpoint.history import History
from headway.checkpoint.layout import own_key, step_folder
from headway.checkpoint.position import resumable, rng_state, set_position, set_rng_state
from headway.checkpoint.ranks import PeerLost
from headway.checkpoint.reader import BadCheckpoint, Reader, Source
from headway.checkpoint.retention import Retention
from headway.checkpoint.schedule import Schedule, schedule
from headway.checkpoint.stager import DEADLINE_S, Save, SaveFailed, Stager
from headway.checkpoint.state import TrainingState, check_part
from headway.errors import HeadwayError, InputError, PlatformError
from headway.events.vocabulary import Activity, Told, clean_text
from headway.run import Run, current
from headway.storage import open_storage

FAILURES = 5
"""So many saves in a row may fail before the job stops."""

_OWN = "headway"
"""The name of what is saved beside the user's parts."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a restore found."""

    step: int
    """Training goes on with this one."""
    tier: str
    """`memory`, `local`, `disk` or `remote`: the farthest that something was read from."""
    bytes: int
    seconds: float
    tag: str
    folder: str
    steps_lost: int | None
    """Steps that were trained and have to be again, where that is known."""
    ahead_bytes: int = 0
    """Of files that had been read ahead."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A save that may be restored."""

    tag: str
    step: int
    folder: str
    stored: bool


class Checkpointer:
    """Saves a training state so that it blocks for one copy in memory, and restores the newest that is whole."""

    def __init__(
        self, root: str | os.PathLike[str], *, model: nn.Module | None = None, optimizer: Any = None,
        loader: Any = None, interval: str | int | float | timedelta | None = "auto", keep: int | Retention = 3,
        memory: str = "auto", stream_bytes: int = 256 << 20, local: str | os.PathLike[str] | None = None,
        failures: int = FAILURES, process_group: Any = None, run: Run | None = None, ahead: Ahead | None = None,
        **parts: Any,
    ) -> None:  # fmt: skip
        """`root` is a folder or a URL. `interval` is `"auto"`, a number of steps, a time such as `"10min"` or a
        `timedelta`, or None to save only when told. `keep` says how many stay. `parts` are anything else with a
        `state_dict`: schedulers, scalers, averages. `ahead` is what `read_ahead` gave. All ranks call this together."""
        if optimizer is not None and model is None:
            raise InputError("an optimizer is saved by the names of its model's parameters: give `model`, too.")
        for name, part in parts.items():
            check_part(name, part)
        schedule(interval, lambda *numbers: list(numbers), True)  # what is wrong is said before the folder is claimed
        if not isinstance(keep, int | Retention):
            raise InputError(f"keep={keep!r} is no number of checkpoints, nor a Retention.")
        if ahead is not None and ahead.url != open_storage(root).url:
            raise InputError(f"what was read ahead is of {ahead.url}, and not of {root}. Give both the same place.")
        retention = keep if isinstance(keep, Retention) else Retention(keep_last=keep)
        self._training = TrainingState(model, optimizer, parts)
        self._run, self._budget, self._ahead = run or current(), failures, ahead
        self.loader: Any = resumable(loader, lambda: self._run.span(Activity.DATA_SKIP))
        """What to iterate: a thin layer around the loader that keeps its position, where it does not do so itself."""
        self._events: list[tuple[str, Save | None, dict[str, Any]]] = []
        self._lock = threading.Lock()
        self._writer = Stager(
            root, memory=memory, stream_bytes=stream_bytes, retention=retention, local=local,
            process_group=process_group, job=self._run.job, hear=self._hear,
        )  # fmt: skip
        self._ranks = self._writer.ranks
        self._history = History(self._writer.storage, self._writer.former, first=self._ranks.is_first)
        self._saves_itself, self._saved_step, self._saved_tag = interval is not None, 0, ""
        self._schedule: Schedule = schedule(interval, self._ranks.highest, self._ranks.is_first)
        self.step = 0
        """Training goes on with this one."""
        self._failed, self._failure = 0, ""
        self._told_mode, self._noted = False, set[str]()
        self._closed = self._is_prepared = False
        self._forget_stop = self._run.on_stop(self._stop)
        self._run.leaving.insert(0, self._leave)
        self._run.anchors = self.anchor
        if self._writer.problem and self._ranks.is_first:
            self._count_failure(self._writer.problem)
        if (steps := sorted(self._writer.revoked)) and self._ranks.is_first:
            which = f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
            self._note(f"{which} would have come from memory, and will not: somebody has deleted checkpoints since.")

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, problem: type[BaseException] | None, *more: object) -> None:
        self.close() if problem is None else self._end(for_good=False)

    # --- saving ---

    def after(self, step: int, metric: float | None = None) -> None:
        """Call after every step, on all ranks. Saves when it pays, and raises only when saving has failed too often."""
        self._check_open()
        self.step = step + 1
        self._take_events()
        self._check_budget()
        if self._writer.reached(step) and not self._is_prepared:
            self.prepare()
        due = self._schedule.after(step, time.monotonic())
        if due is not None:
            failed = self._failed
            save = self._attempt(lambda: self._save(step + 1, metric, durable=due.durable, may_skip=due.may_skip))
            if save is None and self._failed > failed:
                self._schedule.failed(time.monotonic())
            else:
                self._schedule.saved(save is not None, save.blocked_s if save else 0.0, time.monotonic(), due.durable)
        self._check_budget()

    def save(self, step: int | None = None, *, metric: float | None = None, wait: bool = False) -> Save:
        """Saves now, durably. `step` is the one that training would go on with. Waits for an earlier save's upload if
        the memory is still in use; with `wait`, also for its own."""
        self._check_open()
        save = self._save(self.step if step is None else step, metric, durable=True, may_skip=False)
        assert save is not None
        if wait:
            with self._run.span(Activity.CHECKPOINT_BLOCKING):
                save.wait()
            self._take_events()
        return save

    def prepare(self) -> None:
        """Makes the plan and has the memory laid in, in the background. The first `after` does it by itself."""
        self._is_prepared = True
        self._attempt(lambda: self._writer.prepare(lambda: self._state(self.step)))
        self._say_mode()

    def _save(self, step: int, metric: float | None, durable: bool, may_skip: bool) -> Save | None:
        with self._run.span(Activity.CHECKPOINT_BLOCKING):
            save = self._writer.save(
                lambda: self._state(step), folder=step_folder(step), step=step, metric=metric,
                durable=durable, may_skip=may_skip,
            )  # fmt: skip
        self._say_mode()
        if save is not None and save.told.get("died"):
            raise SaveFailed(f"the checkpoint of step {step} was not saved: {save.failure}, each time.")
        if save is not None and durable:
            self._saved_step, self._saved_tag = step, save.tag
        return save

    def _attempt(self, do: Callable[[], Any]) -> Any:
        """What a save returns; if it fails, that is told, and training goes on."""
        try:
            return do()
        except PeerLost:
            raise
        except Exception as error:  # a job that trains is worth more than one checkpoint; the budget bounds it
            self._count_failure(f"{type(error).__name__}: {error}")
            return None

    def _state(self, step: int) -> dict[str, Any]:
        own = {"step": step, "world_size": self._ranks.size}
        # Torch's own pickler asks about every number of the generators' states, and there are thousands.
        return self._training.capture() | {_OWN: (own,), self._own_key: (pickle.dumps(self._own_state()),)}

    @property
    def _own_key(self) -> str:
        return own_key(self._ranks.rank)

    def _own_state(self) -> dict[str, Any]:
        """What each rank has for itself."""
        return {"rng": rng_state(), "loader": self.loader.state_dict() if self.loader is not None else None}

    def _stop(self, step: int) -> None:
        """The job has to stop: what it did must not be lost."""
        self._attempt(lambda: self.save(step, wait=True))

    def anchor(self) -> dict[str, Any] | None:
        """Saves what was not saved yet, and waits until it is committed. Call it on all ranks, after the last step; the
        first one learns which checkpoint it is, and how far its loader had got."""
        if not self._closed:
            self._save_unsaved()
        if not self._ranks.is_first:
            return None
        url, name = self._writer.storage.url, step_folder(max(self.step, self._saved_step))
        if not self._is_committed(name):
            why = self._failure or "this Checkpointer is closed, and had not saved it"
            raise SaveFailed(f"there is nothing to publish: {url}/{name} was not saved ({why}).")
        place = self.loader.state_dict() if self.loader is not None else {}
        data = {key: place[key] for key in ("epoch", "batches", "batch_size") if isinstance(place.get(key), int)}
        return {"root": url, "checkpoint": name, "data": data}

    def _save_unsaved(self) -> None:
        """Saves on all ranks what was trained since the last save, as far as that is known: where nobody calls `after`,
        always."""
        if self._ranks.size > 1 and not dist.is_initialized():
            raise InputError(
                "the last step cannot be saved once torch's destroy_process_group was called. Finish first."
            )
        self.wait(DEADLINE_S)
        is_told = self.step >= self._saved_step
        step = self.step if is_told else max(self._saved_step, self._run.recorder.steps_meter.upcoming)
        if not self._ranks.of_first(lambda: is_told and self._is_committed(step_folder(step))):
            self.save(step, wait=True)

    def _is_committed(self, name: str) -> bool:
        """Whether what is stored there is what was saved or restored here: an earlier run may have left something."""
        storage = self._writer.storage
        found = catalog.find(storage, name) if name in storage.names() else None
        return found is not None and found.state == "committed" and found.tag == self._saved_tag

    # --- what becomes of saves ---

    def _hear(self, event: str, save: Save | None, told: dict[str, Any]) -> None:
        """Called from the link's thread; when a save has to wait, from its own."""
        if event == "waiting":
            waited = f"{told['seconds']:.0f} s"
            self._note(f"the save waits, for {waited} so far: the one before the last is still being uploaded.")
            return
        if event == "committed" and save is not None:
            self._run.checkpoint_saved(save.step, f"{self._writer.storage.url}/{save.folder}")
        with self._lock:
            self._events.append((event, save, told))

    def _take_events(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        for event, save, told in events:
            if event == "failed" and not told.get("died"):  # else it is tried again, and raises if that fails, too
                self._count_failure(told.get("error", ""))
            elif event == "done":
                self._failed = 0
            elif event == "note" and told["about"] not in self._noted:
                self._noted.add(told["about"])
                self._note(f"{told['about']} ({told['error']}). The checkpoint is saved all the same.")
            if event in ("done", "failed") and save is not None:
                self._schedule.uploaded(time.monotonic())
        if (change := self._schedule.take_change()) is not None:
            self._run.mark(Told.CHECKPOINT_INTERVAL, **change)

    def _count_failure(self, why: str) -> None:
        self._failed, self._failure = self._failed + 1, why
        self._run.mark(Told.CHECKPOINT_FAILED, why=clean_text(why), failures=self._failed)
        _say(f"a checkpoint was not saved ({why}). Training goes on; what was committed before is safe.")

    def _note(self, text: str) -> None:
        self._run.mark("note", text=clean_text(text))
        _say(text)

    def _check_budget(self) -> None:
        if self._failed >= self._budget:
            raise SaveFailed(f"{self._failed} saves in a row have failed, the last one because {self._failure}.")

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this Checkpointer is closed. Make another one to go on saving.")

    def _say_mode(self) -> None:
        if not self._told_mode and self._writer.mode:
            self._told_mode = True
            text = self._writer.mode_text()
            if self._writer.mode == "streaming" or self._writer.has_several_nodes:
                self._schedule.without_memory()
            self._run.mark("note", text=text)
            if self._ranks.is_first:
                _say(text)

    # --- restoring ---

    def restore(self) -> Restored | None:
        """Loads the newest state that is whole on all ranks, from the nearest place that has it, and sets `step`.

        None if there is none. A state that turns out to be bad is reported, and the one before it is taken.
        """
        began = time.perf_counter()
        with self._run.span(Activity.CHECKPOINT_RESTORE), _without_garbage():
            arenas = self._writer.arenas()
            try:
                restored = self._restore_first(self._candidates(arenas), arenas, began)
            finally:
                self._drop_ahead()
        if restored is None and self.loader is not None and self.loader.ahead:
            self.loader.take_back()  # what its position was taken from is not there any more
        self._history.restored(restored.tier if restored else None)
        self._schedule.failures(**self._history.failures())
        if restored is not None:
            self.step = restored.step
            self._run.checkpoint_restored(restored.step, f"{self._writer.storage.url}/{restored.folder}")
            self._run.mark(Told.CHECKPOINT_RESTORED, **asdict(restored))
        return restored

    def _candidates(self, arenas: Sequence[Arena]) -> list[Candidate]:
        """What can be restored, the newest first: the same on all ranks."""
        everyones = self._ranks.all(complete(arenas))
        stored = self._ranks.of_first(self._stored)
        steps = {tag: step for theirs in everyones for tag, step in theirs.items()}
        in_memory = set.intersection(*(set(theirs) for theirs in everyones))
        found_stored = {tag: (step, name) for tag, step, name in stored}
        candidates = [
            Candidate(
                tag=tag, step=found_stored[tag][0] if tag in found_stored else steps[tag],
                folder=found_stored[tag][1] if tag in found_stored else step_folder(steps[tag]),
                stored=tag in found_stored,
            )
            for tag in sorted(in_memory | set(found_stored), reverse=True)
        ]  # fmt: skip
        return candidates[min(self._run.skip_checkpoints, max(len(candidates) - 1, 0)) :]

    def _stored(self) -> list[tuple[str, int, str]]:
        if (listing := self._writer.take_listing()) is None:
            listing = catalog.checkpoints(self._writer.storage)
        found = catalog.once_committed(self._writer.storage, listing)
        newest = max((each.tag for each in found), default="")
        for each in listing:
            if each.state == "partial" and each.manifest is not None and each.tag > newest:
                _say(f"{each.name} was saved, and has no .metadata: it is not restored. Was that file deleted?")
        # One that is damaged turns out to be bad when it is read: it is reported then, and never silently trained over.
        return [(each.tag, each.step or 0, each.name) for each in found]

    def _restore_first(self, candidates: Sequence[Candidate], arenas: Sequence[Arena], began: float) -> Restored | None:
        problems = []
        for number, candidate in enumerate(candidates, 1):
            source, problem, is_unread = Source(tag=candidate.tag), "", False
            try:
                source = self._source(candidate, arenas)
                self._load(source)
            except (Exception, CheckpointException) as error:  # reported below, and the one before it is taken
                cause = _cause(error)
                problem, is_unread = f"{type(cause).__name__}: {cause}", source.was_unreadable(cause)
            everyones = self._ranks.all((problem, is_unread))
            if not any(text for text, _ in everyones):
                self._say_if_from_memory_alone(candidate, candidates)
                return self._restored(candidate, source, arenas, time.perf_counter() - began)
            problem = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyones) if text)
            if any(unread for _, unread in everyones):
                raise PlatformError(
                    f"step {candidate.step} could not be read from {self._writer.storage.url} ({problem}). It may well "
                    f"be whole, so no older checkpoint is restored in its place. Start again when the store answers; "
                    f"or set HEADWAY_SKIP_CHECKPOINTS={self._run.skip_checkpoints + number} to take an older one."
                )
            problems.append(f"step {candidate.step}: {problem}")
            self._run.mark(Told.CHECKPOINT_BAD, step=candidate.step, tag=candidate.tag, why=clean_text(problem))
            if self._ranks.is_first:
                _say(
                    f"the checkpoint of step {candidate.step} cannot be restored ({problem}). Taking the one before it."
                )
        if problems:
            raise BadCheckpoint(
                f"none of the checkpoints in {self._writer.storage.url} can be restored ({' | '.join(problems)}). "
                f"Nothing was trained over them. `headway checkpoint verify` tells whether they are damaged; if not, "
                f"and the program has changed since, leave out what is new once, or load it yourself with dcp.load."
            )
        return None

    def _say_if_from_memory_alone(self, candidate: Candidate, candidates: Sequence[Candidate]) -> None:
        if candidate.stored or not self._ranks.is_first:
            return
        stored = next((each for each in candidates if each.stored), None)
        if stored is None:
            rest = f"no checkpoint is stored yet. To start from scratch, delete {self._writer.storage.url}."
        else:
            skipped = self._run.skip_checkpoints + candidates.index(stored)
            rest = f"the newest stored one is step {stored.step}. To take that, set HEADWAY_SKIP_CHECKPOINTS={skipped}."
        _say(f"step {candidate.step} is restored from memory; {rest}")

    def _source(self, candidate: Candidate, arenas: Sequence[Arena]) -> Source:
        usable = [arena for arena in arenas if any(held.tag == candidate.tag for held in arena.held())]
        source = Source(tag=candidate.tag, arenas=usable, local=self._writer.local, folder=candidate.folder)
        if candidate.stored:
            source.storage = self._writer.storage
        if self._ahead is not None and self._ahead.tag == candidate.tag:
            source.ahead, source.manifest = self._ahead.take, self._ahead.manifest
        elif self._ahead is not None and self._ahead.tag > candidate.tag:  # it was bad, or is not what all have
            self._drop_ahead()
        return source

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            if self._ahead.problem:
                self._note(f"not all was read ahead ({self._ahead.problem}): the restore reads the rest by itself.")
        self._ahead = None

    def _load(self, source: Source) -> None:
        reader = Reader(source=source)
        metadata = reader.read_metadata()
        known = _is_saved(self._own_key, metadata)
        own = self._own_key if known else own_key(0)
        state = self._training.template(metadata) | {_OWN: (), own: ()}
        if not reader.load_exactly(state):
            state = self._training.template(metadata, names_fit=False) | {_OWN: (), own: ()}
            if missing := [key for key in state if not _is_saved(key, metadata)]:
                raise BadCheckpoint(f"it has no {', '.join(missing)}")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is")  # each rank reads for itself: that is meant
                load(state, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
        self._training.apply(state)
        self._apply_own(state[own][0], state[_OWN][0]["world_size"], known)

    def _apply_own(self, told: bytes, world_size: int, known: bool) -> None:
        """What a rank has for itself. One that was not there when it was saved takes the position of the first."""
        own = pickle.loads(told)
        if known and own["rng"] is not None:
            set_rng_state(own["rng"])
        if self.loader is None or own["loader"] is None or self._is_there_already(told):
            return
        note = set_position(self.loader, own["loader"], world_size, self._ranks.size)
        if self._ranks.is_first and note:
            _say(note)

    def _is_there_already(self, told: bytes) -> bool:
        """Whether the loader was put to this very position ahead of the restore: its workers may be at work there."""
        ahead, self.loader.ahead = self.loader.ahead, b""
        return bool(ahead == told)

    def _restored(self, candidate: Candidate, source: Source, arenas: Sequence[Arena], seconds: float) -> Restored:
        order = ["memory", "local", "disk", "remote"]
        tier = max(source.used, key=order.index, default="memory")
        reached = max((arena.reached for arena in arenas), default=-1)
        lost = max(0, reached + 1 - candidate.step) if reached >= 0 else None
        self._writer.begin_from(candidate.tag)
        if candidate.stored:  # else `close` has to save it, even if nothing is trained any more
            self._saved_step, self._saved_tag = candidate.step, candidate.tag
        return Restored(
            step=candidate.step, tier=tier, bytes=sum(source.used.values()), seconds=seconds, tag=candidate.tag,
            folder=candidate.folder, steps_lost=lost, ahead_bytes=source.ahead_bytes,
        )  # fmt: skip

    # --- leaving ---

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until everything that was saved is durable. False if that takes longer."""
        done = self._writer.wait(timeout_s)
        self._take_events()
        return done

    def close(self) -> None:
        """The end, on all ranks: saves what was trained since the last save, unless saving is left to you (`interval`
        is None), waits for the uploads, and gives the memory back."""
        failing = sys.exc_info()[0] is not None  # inside `finally`: the other ranks are elsewhere
        is_due = not self._closed and self._saves_itself and not failing
        if is_due and self._ranks.highest(int(self.step > self._saved_step))[0]:
            self._attempt(lambda: self.save(wait=True))
        self._end(for_good=not failing)

    def _end(self, for_good: bool) -> None:
        """After a failure nothing is waited for, and the memory is held for whoever comes next."""
        if self._closed:
            return
        self._closed = True
        self._drop_ahead()
        if for_good:
            with self._run.span(Activity.CHECKPOINT_BLOCKING):
                if not self.wait(DEADLINE_S):
                    _say(f"the last checkpoint is still not uploaded after {DEADLINE_S:.0f} s. Not waiting any longer.")
            self._history.close()
        self._writer.close(for_good)
        self._forget_stop()
        if self._leave in self._run.leaving:
            self._run.leaving.remove(self._leave)

    def _leave(self) -> None:
        """The process ends: after a failure the memory is held for the next one, and what is uploaded goes on."""
        if getattr(sys, "last_value", None) is None and not self._run.status:
            self._end(for_good=True)


def _cause(error: BaseException) -> BaseException:
    """What went wrong: torch wraps it into an error that has a trace for its text, and is no `Exception`."""
    if isinstance(error, CheckpointException):
        error = next((cause for cause, _ in error.failures.values()), error)
    if isinstance(error, KeyboardInterrupt | SystemExit):  # it wraps these, too
        raise error
    return error


def _is_saved(key: str, metadata: Metadata) -> bool:
    return any(name == key or name.startswith(f"{key}.") for name in metadata.state_dict_metadata)


@contextmanager
def _without_garbage() -> Iterator[None]:
    """No garbage collection meanwhile: it would look through all objects several times while many are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _say(text: str) -> None:
    print(f"headway: {text}", file=sys.stderr, flush=True)


__all__ = ["Checkpointer", "HeadwayError", "Restored"]
