"""One instrumented process: when it joins its job, what its hooks write to, and how it leaves."""

import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from headway import run as runs
from headway.events.recorder import Recorder, Span
from headway.events.vocabulary import STAGES, Activity, Told
from headway.instrument.checkpoints import LOADING
from headway.instrument.faststart import Imports
from headway.instrument.hooks import install, watch_queues
from headway.instrument.imports import ImportWatch
from headway.instrument.loop import Tracker
from headway.instrument.patches import Patch, around, guarded, parameters, say

SHOWN_IMPORT_NS = 20_000_000
"""Packages that took less to import are not worth a word."""


class Session:
    """What the hooks of one process share. Until it has joined a job, and in a child that only helps, it is asleep."""

    def __init__(self, watch: ImportWatch) -> None:
        self.watch = watch
        self.patches: list[Patch] = []
        self.run: runs.Run | None = None
        self.recorder: Recorder | None = None
        self.tracker: Tracker | None = None
        self.gradients_on: Callable[[], bool] = lambda: True
        self.datasets: Patch | None = None
        self.imports: Imports | None = None
        """Set where packages are to be imported ahead."""
        self.has_trained = False
        """Whether this process has made a step, whatever number that has: after a restore, not the first."""
        self.on_first_step: list[Callable[[], None]] = []
        self.on_optimizer: list[Callable[[], None]] = []
        """Called when an optimizer of torch's steps for the first time."""
        self.on_leave: list[Callable[[], None]] = []
        self._open = threading.local()
        self._stacks: dict[int, list[tuple[str, Span]]] = {}
        self._joined_ns = 0
        self.exits: tuple[int, int] | None = None
        """The status that the program wants to end with, and how many steps it had done by then."""
        self.ignores_steps = 0
        """Above 0 while an optimizer steps that trains nothing."""
        self.awaits_batch = False
        """Whether the compile cache wants to see the batch that the first step is for."""
        self.waited = False
        """Whether the process was kept waiting for something to do, and counts from there."""

    def begin(self, asked_ns: int, joins: bool = True) -> None:
        """Called when torch is about to be imported, at `asked_ns`: joins, and installs all hooks."""
        os.register_at_fork(after_in_child=self._forked)
        if joins and not runs.may_be_helper():
            self.join()
        imports = Patch("sys.meta_path", self.watch, "begins", self.tell)
        imports.state = "on"
        self.patches.append(imports)
        self.watch.begins = guarded(imports, self._import_begins)
        self.watch.ends = guarded(imports, self._import_ends)
        install(self)
        if self.recorder is not None:
            self.recorder.period(Activity.IMPORTS, asked_ns, self.recorder.now_ns(), module="headway")

    # --- the job ---

    def join(self, role: str = "", rank: int | None = None, world_size: int | None = None) -> None:
        """Takes part in the job: as a rank where something says so, else as a process that may turn out to be one."""
        if self.recorder is None:
            run = runs.join_unasked(self.watch.began_ns, self.waited)
            self.run, self.recorder, self._joined_ns = run, run.recorder, run.recorder.now_ns()
            self.tracker = Tracker(run.recorder, self.gradients_on)
            self.tracker.on_fetch_elsewhere = lambda: watch_queues(self)
            run.leaving.append(self._leave)
            for name, begin_ns, end_ns in self.watch.early:
                run.recorder.period(Activity.IMPORTS, begin_ns, end_ns, module=name)
            self.watch.early.clear()
            run.watches_compiles = True
            self.awaits_batch = runs.begin_compile_cache(run) is not None
        if role and self.run is not None:
            self.run.becomes(role, rank, world_size)

    def trains(self) -> Tracker:
        """This process trains, whatever it seemed to be."""
        self.join("rank")
        assert self.tracker is not None
        return self.tracker

    def _forked(self) -> None:
        self.run = self.recorder = self.tracker = None
        self.awaits_batch = False
        self._open = threading.local()
        self._stacks.clear()

    def _leave(self) -> None:
        if self.exits is not None and self.run is not None:
            status, steps = self.exits
            if self.tracker is None or self.tracker.steps_done == steps:
                self.run.status = status
        if self.tracker is not None:
            self.tracker.finish()
        for call in self.on_leave:
            call()
        self._tell_imports()

    def _tell_imports(self) -> None:
        if self.imports is not None:
            self.imports.tell()
        slow = {name: ns for name, ns in self.watch.took_ns.items() if ns > SHOWN_IMPORT_NS}
        if slow and self.recorder is not None:
            first = sorted(slow, key=lambda name: -slow[name])[:30]
            self.recorder.mark(Told.IMPORTS, seconds={name: round(slow[name] / 1e9, 3) for name in first})
        self.watch.took_ns.clear()

    def came(self, batch: Any) -> None:
        """A batch, before the first step."""
        if self.run is not None and self.run.compiles is not None:
            self.run.compiles.fetched(batch)

    def first_step_done(self) -> None:
        """Training has begun: what only watched the start-up goes, and the imports of the start are told."""
        self.awaits_batch, self.has_trained = False, True
        calls, self.on_first_step = self.on_first_step, []
        for call in calls:
            call()
        self._tell_imports()

    # --- spans ---

    def _import_begins(self, name: str) -> Span | None:
        return self.begins(Activity.IMPORTS, module=name)

    def _import_ends(self, span: Span | None, name: str, began_ns: int, ended_ns: int) -> None:
        if span is not None:
            self.ends(span)
        elif self.recorder is None:
            self.watch.early.append((name, began_ns, ended_ns))
        elif began_ns < self._joined_ns:  # it was this one that asked for torch
            self.recorder.period(Activity.IMPORTS, began_ns, ended_ns, module=name)

    def begins(self, activity: str, **attrs: Any) -> Span | None:
        """An activity begins in this thread. None if it is not to be recorded: the process is asleep, the thread is
        fetching a batch (whatever it does is part of that), or does the same already."""
        if self.recorder is None or self.tracker is None or self.tracker.is_asking(threading.get_ident()):
            return None
        stack = self._stack()
        if any(same(activity, other) for other, _ in stack):
            return None
        span = self.recorder.span(activity, **attrs)
        stack.append((activity, span))
        self._stacks[id(span)] = stack
        return span.__enter__()

    def ends(self, span: Span | None, failed: bool = False) -> None:
        """It ends, maybe in another thread than it began in."""
        if span is None:
            return
        stack = self._stacks.pop(id(span), [])
        stack[:] = [entry for entry in stack if entry[1] is not span]
        span.__exit__(Exception if failed else None, None, None)

    def dataset_begins(self, init: Any) -> Span | None:
        """A dataset is being made."""
        if (
            self.datasets is None
            or self.datasets.state != "on"
            or (self.tracker is not None and self.tracker.steps_done)
        ):
            return None
        try:
            return self.begins(Activity.PREPROC_CREATION, what=init.__qualname__)
        except Exception as error:  # measuring must not stop the job: the hook is switched off, and that is journaled
            self.datasets.failed(error)
            return None

    def is_open(self, activity: str) -> bool:
        """Whether this thread is at it."""
        return any(other == activity for other, _ in self._stack())

    def _stack(self) -> list[tuple[str, Span]]:
        try:
            stack: list[tuple[str, Span]] = self._open.stack
        except AttributeError:
            stack = self._open.stack = []
        return stack

    def in_background(self) -> bool:
        """Whether this thread is neither the main one nor the one that trains."""
        return threading.get_ident() not in (threading.main_thread().ident, self.tracker and self.tracker.thread)

    # --- patches ---

    def patch(self, owner: Any, attribute: str, expected: tuple[str, ...] = ()) -> Patch | None:
        """A patch for an attribute, if it is what this version of headway knows: there, and taking these arguments."""
        kind = owner if isinstance(owner, type) else type(owner)
        where = owner.__name__ if isinstance(owner, ModuleType) else f"{kind.__module__}.{kind.__qualname__}"
        patch = Patch(f"{where}.{attribute}", owner, attribute, self.tell)
        self.patches.append(patch)
        if not callable(patch.original) and not hasattr(patch.original, "__func__"):
            patch.state = "missing: this version of the library has no such function"
        elif expected and (found := parameters(patch.original))[: len(expected)] != expected:
            patch.state = f"skipped: it takes {', '.join(found) or 'unknown arguments'}"
        else:
            return patch
        return None

    def timed(self, owner: Any, attribute: str, activity: str, expected: tuple[str, ...] = (), **attrs: Any) -> None:
        """Records every call of a function as an activity."""
        if patch := self.patch(owner, attribute, expected):

            def after(span: Span | None, result: Any, error: BaseException | None) -> None:
                self.ends(span, error is not None)

            patch.put(around(patch, lambda *args, **kwargs: self.begins(activity, **attrs), after))
            # What comes later is none of the start-up, and may come at every step; groups are always told of.
            if activity in STAGES and activity != Activity.PROCESS_GROUP_INIT:
                self.on_first_step.append(patch.undo)

    def tell(self, patch: Patch, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        say(f"the hook on {patch.what} is switched off ({text}). The job goes on, with less measured.")
        if self.recorder is not None:
            self.recorder.mark(Told.HOOK_OFF, hook=patch.what, error=text[:200])

    def undo(self) -> None:
        """Takes every hook out again."""
        for patch in self.patches:
            patch.undo()
        if self.watch in sys.meta_path:
            sys.meta_path.remove(self.watch)


_CHECKPOINT = (Activity.CHECKPOINT_BLOCKING, Activity.CHECKPOINT_RESTORE, LOADING)


def same(one: str, other: str) -> bool:
    """Whether one activity inside the other is nothing new: a save that saves, a load that loads."""
    return one == other or (one in _CHECKPOINT and other in _CHECKPOINT)
