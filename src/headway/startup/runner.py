"""Running the stages of a start-up at the same time, as far as they allow it.

The main thread runs the stages of lane `main`, and waits. Whoever ends a stage starts what has become possible. With
`HEADWAY_SERIAL=1` the same stages run one after another in the main thread, with the same results: to debug, and to see
how long each takes alone.
"""

import ctypes
import itertools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, overload

import torch

from headway.errors import HeadwayError, InputError
from headway.events.recorder import is_from_signal_handler
from headway.events.vocabulary import Told
from headway.run import Run, current
from headway.startup.children import Child, signals_later
from headway.startup.graph import Graph, Stage, stage_of
from headway.startup.randomness import have_changed, own_random, put_back, seed_of, states
from headway.startup.ranks import Difference, Ranks

F = TypeVar("F", bound=Callable[..., Any])

GRACE_S = 5.0
"""After a failure, the other stages have so long to stop."""

_numbers = itertools.count()


class StageError(HeadwayError):
    """A stage failed; what it raised is the cause."""

    def __init__(self, stage: str, rank: int, what: str) -> None:
        super().__init__(stage, rank, what)
        self.stage, self.rank = stage, rank

    def __str__(self) -> str:
        stage, rank, what = self.args
        return f"stage {stage} failed on rank {rank}: {what}"


class Parts(SimpleNamespace):
    """The results of all stages, by their names."""


class Startup:
    """Stages of starting up, as functions that need one another. `run` has them run at the same time where it can.

    Each stage has random numbers of its own, derived from `seed` (by default, what `torch.manual_seed` was last given)
    and its name. `timeout_s` is the longest that one stage may take.
    """

    def __init__(self, *, seed: int | None = None, timeout_s: float | None = None) -> None:
        if timeout_s is not None and timeout_s <= 0:
            raise InputError(f"timeout_s={timeout_s} leaves a stage no time: give seconds, or None for no limit.")
        self._seed, self._timeout_s = seed, timeout_s
        self._graph = Graph()

    @overload
    def stage(self, function: F, /) -> F: ...
    @overload
    def stage(
        self, /, *, name: str = "", lane: str = "main", needs: Sequence[str] = (), computes: bool | None = None,
        activity: str = "",
    ) -> Callable[[F], F]: ...  # fmt: skip
    def stage(
        self, function: Any = None, /, *, name: str = "", lane: str = "main", needs: Sequence[str] = (),
        computes: bool | None = None, activity: str = "",
    ) -> Any:  # fmt: skip
        """Declares a function as a stage. An argument named like a stage is given its result; `needs` names others
        that have to be done before.

        `lane` is where it runs: `main`, `comm` for collectives, `io` for a thread of its own, `process` for a process
        of its own. `computes` says that it keeps the interpreter busy or draws random numbers by anything but torch,
        which is so in `main` unless said otherwise: no two such stages run at once. `activity` is the stage of the
        report that its time counts as, unless its name is one.
        """

        def declare(function: F) -> F:
            self._graph.add(stage_of(function, name, lane, needs, computes, activity))
            return function

        return declare if function is None else declare(function)

    def run(self) -> Parts:
        """Runs all stages and returns their results. StageError if one fails: then the others are cancelled.

        InputError for stages that need what is not there, or each other, before anything runs; and for ranks that have
        not declared the same ones, before the first collective."""
        if threading.current_thread() is not threading.main_thread():
            raise InputError("start-up stages have to be run from the main thread: lane `main` is that thread.")
        order = self._graph.order()
        seed = torch.initial_seed() if self._seed is None else self._seed
        execution = _Execution(self._graph, order, seed, current())
        try:
            if os.environ.get("HEADWAY_SERIAL") == "1":
                execution.serial()
            else:
                execution.overlapped(self._timeout_s)
        finally:
            execution.tell()
        return Parts(**{name: execution.results[name] for name in self._graph.stages})


class _Cancelled(BaseException):
    """Raised in a stage that is not wanted any more, since another one has failed."""


@dataclass
class _Timing:
    """When a stage began, in which thread, and when it ended."""

    thread: int
    """0 before it is known."""
    begin_ns: int
    end_ns: int = 0
    cpu_s: float = 0.0
    failed: bool = False
    stoppable: bool = False
    """Whether something may be raised in its thread: it is in the stage's function."""


class _Execution:
    """One run of a graph. All that threads share is changed under one lock, and every change is announced. Both
    are C's own: a thread in which something is raised as it enters a `threading.Condition` would keep that locked."""

    def __init__(self, graph: Graph, order: Sequence[Stage], seed: int, run: Run) -> None:
        self._graph, self._order, self._seed, self._run = graph, order, seed, run
        self._name = f"startup/{next(_numbers)}"
        self._begin_ns, self._before = run.recorder.now_ns(), states()
        self._is_serial = True
        self.results: dict[str, Any] = {}
        self._timings: dict[str, _Timing] = {}
        """Of every stage that has begun."""
        self._running: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._children: dict[str, Child] = {}
        self._lock, self._news, self._watched = threading.RLock(), queue.SimpleQueue[None](), queue.SimpleQueue[None]()
        self._error: BaseException | None = None
        self._agreeing, self._has_agreed = threading.Lock(), False
        self._device: int | None = None
        self._now_ns = run.recorder.now_ns

    def serial(self) -> None:
        """One after another, here."""
        with suppress(_Cancelled):
            self._agree()
            for stage in self._order:
                with self._lock:
                    self._begins(stage)
                self._do(stage)
                if self._error is not None:
                    break
                self._check_generators(stage.name)
        self._raise_error()

    def overlapped(self, timeout_s: float | None) -> None:
        """As many at once as may be."""
        self._is_serial = False
        try:
            self._agree()
            with signals_later():
                for stage in self._order:
                    if stage.lane == "process":
                        self._children[stage.name] = Child(self._call(stage))
            if timeout_s is not None:
                self._start("the watch over stages", self._watch, timeout_s)
            while (mine := self._next_for_main()) is not None:
                self._do(mine)
        except _Cancelled:  # the error that led to this is raised below
            pass
        except BaseException as error:  # a signal's handler has raised, or the signal is from `_stop`
            self._cancel(error)
        finally:
            self._end()
        self._raise_error()
        self._check_generators("a stage")

    def _check_generators(self, who: str) -> None:
        """Puts the process's generators back, where something has drawn from them that ran beside those who have them
        to themselves."""
        if have_changed(self._before):
            put_back(self._before)
            print(
                f"headway: {who} drew from generators of the process, or seeded them, without computes=True: what runs "
                f"beside it may draw other numbers. Say so{'' if self._is_serial else ' (HEADWAY_SERIAL=1 names it)'}.",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # --- what runs next ---

    def _next_for_main(self) -> Stage | None:
        """Waits for the next stage of the main thread; None when all is done."""
        while True:
            with self._lock:
                if self._error is not None or len(self.results) == len(self._order):
                    return None
                self._start_threads()
                for stage in self._order:
                    if stage.lane == "main" and self._may_begin(stage):
                        self._begins(stage)
                        self._start_threads()  # what let it go first, if it need not have
                        return stage
            self._news.get()

    def _announce(self) -> None:
        self._news.put(None)
        self._watched.put(None)

    def _start_threads(self) -> None:
        """Starts each stage of another lane that can begin."""
        for stage in self._order:
            if stage.lane != "main" and self._may_begin(stage):
                self._begins(stage)
                self._start(f"stage {stage.name}", self._in_thread, stage)

    def _start(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        with signals_later():
            thread.start()
            self._threads.append(thread)

    def _may_begin(self, stage: Stage) -> bool:
        if self._error is not None or not self._is_waiting(stage):
            return False
        running = [self._graph.stages[name] for name in self._running]
        if stage.computes and (any(other.computes for other in running) or self._main_is_first(stage, running)):
            return False
        return self.results.keys() >= self._graph.before(stage)

    def _main_is_first(self, stage: Stage, running: Sequence[Stage]) -> bool:
        """Whether the main thread is about to begin a stage that computes, too, and was declared before this one: that
        goes first, since others may wait for it. In its own lane the order is that of declaration anyway."""
        if stage.lane == "main" or any(other.lane == "main" for other in running):
            return False
        earlier = itertools.takewhile(lambda other: other is not stage, self._order)
        waiting = [other for other in earlier if other.lane == "main" and other.computes and self._is_waiting(other)]
        return any(self.results.keys() >= self._graph.before(other) for other in waiting)

    def _is_waiting(self, stage: Stage) -> bool:
        return stage.name not in self._timings

    def _begins(self, stage: Stage) -> None:
        self._running.add(stage.name)
        thread = threading.get_ident() if stage.lane == "main" or self._is_serial else 0
        self._timings[stage.name] = _Timing(thread=thread, begin_ns=self._now_ns())

    # --- one stage ---

    def _in_thread(self, stage: Stage) -> None:
        try:
            if self._device is not None:  # which device is the current one is each thread's own affair
                torch.cuda.set_device(self._device)
            self._do(stage)
        except _Cancelled:
            pass
        except BaseException as error:  # nothing may end here unheard: the main thread would wait for ever
            with self._lock:
                self._fails(stage, error)

    def _do(self, stage: Stage) -> None:
        """Runs a stage, and announces how it went."""
        timing = self._timings[stage.name]
        cpu_s = time.thread_time()
        result, error = None, None
        try:
            with self._run.span(stage.activity or stage.name, stage=stage.name, lane=stage.lane):
                arguments = {name: self.results[name] for name in stage.arguments}
                child = self._children.get(stage.name)
                result = self._stoppably(timing, child.call if child else self._call(stage), arguments)
            self._agree()
        except _Cancelled:
            timing.failed = True
            raise
        except BaseException as raised:
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and (not isinstance(raised, Exception) or is_from_signal_handler(raised)):
                raise  # an interrupt, an exit, or a data worker that died: it is not the stage that failed
            error = raised
        with self._lock:
            timing.end_ns, timing.cpu_s = self._now_ns(), time.thread_time() - cpu_s
            if error is not None:
                self._fails(stage, error)
                return
            if stage.lane == "main" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                self._device = torch.cuda.current_device()
            self.results[stage.name] = result
            self._running.discard(stage.name)
            if not self._is_serial:
                self._start_threads()
            self._announce()

    def _stoppably(
        self, timing: _Timing, call: Callable[[Mapping[str, Any]], Any], arguments: Mapping[str, Any]
    ) -> Any:
        """Calls what `_stop` may end by an exception. Nothing else in its thread is ended so: what was sent arrives
        before this returns, at the latest while it has the lock."""
        with self._lock:
            self._check()
            timing.thread, timing.stoppable = threading.get_ident(), True
        try:
            return call(arguments)
        finally:
            with self._lock:
                timing.stoppable = False

    def _call(self, stage: Stage) -> Callable[[Mapping[str, Any]], Any]:
        """The stage's function, with random numbers of its own."""
        seed, is_away = seed_of(self._seed, stage.name), stage.lane == "process"

        def call(arguments: Mapping[str, Any]) -> Any:
            with own_random(seed, stage.computes or is_away), _one_thread() if is_away else nullcontext():
                return stage.function(**arguments)

        return call

    def _agree(self) -> None:
        """Compares the graph with those of the other ranks, as soon as they have met."""
        with self._agreeing:
            ranks = None if self._has_agreed else Ranks.met()
            if ranks is None:
                return
            found = ranks.compare(self._name, str(self._graph), self._check)
            self._has_agreed = True
        if found is not None:
            self._cancel(_different(found))
            raise _Cancelled

    def _check(self) -> None:
        if self._error is not None:
            raise _Cancelled

    # --- failing ---

    def _fails(self, stage: Stage, error: BaseException) -> None:
        """Under the lock: the stage has failed, and with it the start-up."""
        self._timings[stage.name].failed = True
        failure = StageError(stage.name, self._run.rank, f"{type(error).__name__}: {_said(error)}")
        failure.__cause__ = error
        self._cancel(failure)

    def _cancel(self, error: BaseException) -> None:
        """Ends all that runs elsewhere, for this reason; only the first counts."""
        with self._lock:
            if self._error is None:
                self._error = error
                for name in self._running:
                    self._stop(self._graph.stages[name])
            self._announce()

    def _stop(self, stage: Stage) -> None:
        """Has a running stage stop at its next line. What waits in C for something else than a signal goes on waiting:
        there is no safe way to end that."""
        timing = self._timings[stage.name]
        if stage.name in self._children:
            self._children[stage.name].kill()
        elif timing.stoppable and timing.thread != threading.get_ident():
            if stage.lane == "main" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.pthread_kill(timing.thread, signal.SIGINT)  # which ends a sleep, too
            else:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(timing.thread), ctypes.py_object(_Cancelled))
            if stage.lane == "main":
                print(f"headway: {self._error}. Stopping.", file=sys.stderr, flush=True)

    def _end(self) -> None:
        """Nothing of this runs any longer when it returns, but for what cannot be stopped, and that is said."""
        try:
            until = time.monotonic() + GRACE_S
            for thread in self._threads:
                thread.join(max(until - time.monotonic(), 0.0) if self._error is not None else None)
        finally:  # a second signal ends the wait for threads, and leaves no process either
            with signals_later():
                for child in self._children.values():
                    child.close()
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left and self._error is not None:
            self._error.add_note(f"headway: could not be stopped, and end with this process: {', '.join(left)}.")

    def _watch(self, timeout_s: float) -> None:
        """Waits for a stage that takes too long."""
        while True:
            with self._lock:
                if self._error is not None or len(self.results) == len(self._order):
                    return
                begun = {name: self._timings[name].begin_ns for name in self._running}
                due_s = (min(begun.values(), default=self._now_ns()) - self._now_ns()) / 1e9 + timeout_s
                if due_s <= 0:
                    late = min(begun, key=begun.__getitem__)
                    where = "in its process" if late in self._children else _place(self._timings[late].thread)
                    self._fails(self._graph.stages[late], TimeoutError(f"no end after {timeout_s:g} s. It is {where}"))
                    return
            with suppress(queue.Empty):
                self._watched.get(timeout=due_s)

    # --- telling ---

    def tell(self) -> None:
        """Writes into the journal when each stage began and ended."""
        stages = []
        for stage in self._order:
            if (timing := self._timings.get(stage.name)) is not None:
                stages.append({
                    "name": stage.name, "activity": stage.activity, "lane": stage.lane, "needs": list(stage.needs),
                    "computes": stage.computes, "begin_ns": timing.begin_ns, "end_ns": timing.end_ns or self._now_ns(),
                    "cpu_s": round(timing.cpu_s, 6), "failed": timing.failed or not timing.end_ns,
                })  # fmt: skip
        self._run.mark(Told.STARTUP, serial=self._is_serial, begin_ns=self._begin_ns, stages=stages)


def _different(found: Difference) -> InputError:
    """What to say of two ranks that have not declared the same stages."""
    (a, one), (b, other) = sorted(zip(found.ranks, found.words, strict=True))
    return InputError(
        f"ranks {a} and {b} have declared different stages, and would wait for each other in different collectives."
        f"\nRank {a}:\n{one}\nRank {b}:\n{other}\nDeclare the same stages on every rank, in the same order; what only "
        "some ranks do belongs inside a stage."
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """For what runs in a process of its own: the pool of threads that torch computes with has not come along. Without
    such a process it is the same, since a sum over other parts may be another one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # the user's class may do anything
        return f"(it cannot be shown: {type(problem).__name__})"


def _place(thread: int) -> str:
    """Where a thread is."""
    frame = sys._current_frames().get(thread)
    return f"in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else "about to begin"
