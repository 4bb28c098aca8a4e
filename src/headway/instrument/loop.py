"""From batches fetched and optimizers stepped to training steps: which loader trains, where a step ends, what waited.

Neither sign is enough alone. A fetch may be for evaluation, or one of several for a step; an optimizer may be one of
two, one of hundreds (a step in the backward of each parameter), or skip (a gradient scaler that found an infinity).

- A **step** ends when the *lead* optimizer has stepped: the first one to do so. Another takes the lead when it has
  stepped `TAKEOVER` times since the lead last did.
- A loader **trains** once an optimizer steps after a fetch from it. What it gave until then is counted from its first
  fetch, so nothing is lost by not knowing at first.
- A loader that is read to its end, or dropped, without a step was **evaluation**; before the first step of all, and
  without any sign of evaluation, it was preparation. With a sign (gradients are off, or the model is in evaluation
  mode) it is known as such from its first fetch.
- A loop without a loader is measured from optimizer step to optimizer step; its first step has no known begin, and is
  told without any time.

No torch here: all that is known of it comes in as calls.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

from headway.events.recorder import Recorder, Span
from headway.events.vocabulary import Activity, Restored
from headway.instrument.devices import DeviceWaits

TAKEOVER = 3
"""An optimizer that stepped this often since the lead last did takes the lead."""

LEAST_NS = 1_000_000
"""Shorter waits outside of steps are not worth a record."""

_thread = threading.get_ident


class Loader:
    """What is known of one DataLoader."""

    __slots__ = ("batch_size", "trains")

    def __init__(self, batch_size: int | None = None) -> None:
        self.batch_size = batch_size
        self.trains = False


class Pass:
    """One way through a loader, from the call of `iter` to the end of its data, or until it is dropped."""

    __slots__ = ("__weakref__", "began_ns", "dropped", "evaluation", "fetches", "left_ns", "loader", "over", "sure",
                 "thread", "waited_ns")  # fmt: skip

    def __init__(self, dropped: "Callable[[Pass], None]", loader: Loader, began_ns: int) -> None:
        self.dropped, self.loader, self.began_ns = dropped, loader, began_ns
        self.thread = _thread()
        self.fetches = self.waited_ns = self.left_ns = 0
        self.evaluation: Span | None = None
        self.over = self.sure = False

    def __del__(self) -> None:
        if not self.over:
            self.dropped(self)


class Tracker:
    """Follows one process's training loop."""

    def __init__(self, recorder: Recorder, is_evaluating: Callable[[], bool] = lambda: False) -> None:
        self._recorder = recorder
        self._meter = recorder.steps_meter
        self._now = recorder.now_ns
        self.is_evaluating = is_evaluating
        self.thread = 0
        """The thread that trains; 0 until one has."""
        self.running = False
        self.asking: set[int] = set()
        """The threads that are waiting for a batch."""
        self.device: DeviceWaits | None = None
        """Set where steps run on a device that does not wait for the host."""
        self._lead_ref: weakref.ref[Any] | None = None
        self._others: dict[int, int] = {}
        self._waited_ns = 0
        self._empty_ns: int | None = None
        """When the loader was found empty: the loop was over then, unless a step still comes (it asked ahead)."""
        self._by_loader = False
        self._unknown: list[weakref.ref[Pass]] = []
        """Passes that may train or evaluate; not held, so that it shows when they are dropped …"""
        self._left: Pass | None = None
        """… and the last one that was, while no loader is known to train: a step may follow."""
        self._window: tuple[weakref.ref[Any], int] | None = None
        self._looked_at = False
        """Whether there was a sign of evaluation since the model was switched to it."""
        self._evaluation: Pass | None = None
        self._evaluated_ns: int | None = None
        """When the last evaluation came to the end of its data."""
        self.loads: list[tuple[str, str]] = []
        """Path and identity of the files loaded since the last loop began: where training may go on from."""
        self._retired = False
        recorder.told = self.retire

    # --- data ---

    def begins(self, loader: Loader) -> Pass:
        """A way through a loader begins; the loader may take its time to start workers."""
        way = Pass(self.dropped, loader, self._now())
        way.sure = not loader.trains and self.is_evaluating()
        if self._retired or loader.trains or not (way.sure or self._evaluates()):
            return way
        if self._evaluation is not None:
            way.over = True  # part of the evaluation that is under way
        else:
            way.evaluation = self._recorder.span(Activity.EVALUATION)
            way.evaluation.__enter__()
            self._evaluation = way
        return way

    def ready(self, way: Pass) -> None:
        """The loader can now be asked for batches."""
        now = self._now()
        took = now - way.began_ns
        if way.evaluation is not None or way.over or took < LEAST_NS or self._retired:
            return
        if self.running and self._empty_ns is None and way.loader.trains and way.thread == self.thread:
            self._waited_ns += took
        else:
            self._recorder.period(Activity.DATA_WAIT, way.began_ns, now)

    def fetching(self, way: Pass) -> int:
        """A batch is asked for. Returns the time."""
        thread = _thread()
        self.asking.add(thread)
        now = self._now()
        if way.loader.trains:
            if self._by_loader and thread == self.thread:
                if self._evaluation is not None:
                    self._evaluated(self._evaluation)
                if self.device is not None:
                    self.device.asked()
                if self.running and self._empty_ns is None:
                    self._meter.waits(0)
                else:
                    self._go_on(way, now)
        elif not way.fetches and way.evaluation is None and not way.over:
            if self._evaluation is not None:
                self._evaluated(self._evaluation)
            way.thread = thread
            way.began_ns = now
            self._unknown = [*self._unknown[-7:], weakref.ref(way)]
        return now

    def fetched(self, way: Pass, asked_ns: int) -> None:
        """It has come."""
        now = self._now()
        thread = _thread()
        self.asking.discard(thread)
        way.fetches += 1
        if not way.loader.trains:
            way.waited_ns += now - asked_ns
        elif self._by_loader and thread == self.thread:
            waited = now - asked_ns
            self._waited_ns += waited if self.device is None else self.device.came(waited)
            self._meter.waits(now)

    def exhausted(self, way: Pass, asked_ns: int) -> None:
        """There is no batch left, or none came."""
        now = self._now()
        self.asking.discard(_thread())
        way.over = True
        if way.evaluation is not None:
            self._evaluated(way)
        elif not way.loader.trains:
            way.left_ns = now
            self._was_evaluation(way)
        elif self.running and self._by_loader and _thread() == self.thread:
            self._empty_ns = asked_ns
            self._meter.waits(-1)
            if now - asked_ns > LEAST_NS:
                self._recorder.period(Activity.DATA_WAIT, asked_ns, now)

    def dropped(self, way: Pass) -> None:
        """Nobody will ask this loader again: the loop was left, or only one batch was wanted."""
        way.over, way.left_ns = True, self._now()
        if self._retired or not way.fetches:
            return
        if way.evaluation is not None:
            self._evaluated(way)
        elif not way.loader.trains:
            if self._by_loader:
                self._was_evaluation(way)
            else:
                self._leave(way)
        elif self.running and self._by_loader and way.thread == self.thread and way.fetches > 1:
            self._pause()

    # --- evaluation ---

    def _evaluated(self, way: Pass) -> None:
        span, way.evaluation = way.evaluation, None
        if span is not None:
            span.__exit__(None, None, None)
        if way is self._evaluation:
            self._evaluation, self._evaluated_ns = None, self._now()
            self._looked_at = True

    def _was_evaluation(self, way: Pass) -> None:
        if way.fetches and not self._retired:
            what = Activity.EVALUATION if self._meter.steps_done else Activity.PREPROC_CREATION
            self._recorder.period(what, way.began_ns, way.left_ns)

    def _leave(self, way: Pass) -> None:
        """Only the first batch of a loader was wanted, so far: for evaluation, or for a step that is to follow."""
        if self._left is not None:
            self._was_evaluation(self._left)
        self._left = twin = Pass(way.dropped, way.loader, way.began_ns)
        twin.fetches, twin.waited_ns, twin.left_ns, twin.thread, twin.over = (
            way.fetches, way.waited_ns, way.left_ns, way.thread, True,
        )  # fmt: skip

    def saves(self) -> None:
        """Something is about to be saved: an evaluation that has left its model in evaluation mode is over now."""
        ended_ns, self._evaluated_ns = self._evaluated_ns, None
        if ended_ns is not None and self._evaluates():
            self._recorder.period(Activity.EVALUATION, ended_ns, self._now())

    def to_evaluation_mode(self, module: Any) -> None:
        """A model was switched to evaluation."""
        if self._window is None or self._window[0]() is None:
            self._window = (weakref.ref(module), self._now())
            self._looked_at = self.is_evaluating()

    def to_training_mode(self, module: Any) -> bool:
        """A model was switched to training; True if it was the one that evaluated."""
        if self._window is None or self._window[0]() is not module:
            return False
        # Parts of a model go to evaluation and back inside of a step, too; but then with gradients.
        if self._looked_at or self.is_evaluating():
            self._recorder.period(Activity.EVALUATION, self._window[1], self._now())
        self._window = None
        return True

    @property
    def evaluating(self) -> bool:
        """Whether a model was switched to evaluation, and not back."""
        return self._window is not None and self._window[0]() is not None

    def _evaluates(self) -> bool:
        """Whether a model that was switched to evaluation still is; before the first step that means nothing."""
        module = self._window[0]() if self._window and self._meter.steps_done else None
        return module is not None and not module.training

    # --- steps ---

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        lead = self._lead_ref
        if (lead is None or lead() is not optimizer) and not self._takes_lead(optimizer):
            return
        now = self._now()
        if not self.running:
            self._open(optimizer, now)
        elif self._unknown or self._left is not None or self._evaluation is not None:
            ways = self._recognise()
            if ways and self._empty_ns is not None:  # another loader than the one that was empty: another loop
                self._pause()
                self._meter.resume(min(way.began_ns for way in ways))
                self.running = True
            self._waited_ns += sum(way.waited_ns for way in ways)
        waited, self._waited_ns = self._waited_ns, 0
        self._window = self._evaluated_ns = None
        if self._others:
            self._others.clear()
        if self._empty_ns is not None:
            self._empty_ns = now
        self._meter.step(now, waited, -1 if self._by_loader else now)

    def _takes_lead(self, optimizer: Any) -> bool:
        if self._retired:
            return False
        key = id(optimizer)
        alive = self._lead_ref is not None and self._lead_ref() is not None
        count = self._others[key] = self._others.get(key, 0) + 1
        if len(self._others) > 4096:  # optimizers made anew for every step
            self._others.clear()
        if alive and count < TAKEOVER:
            return False
        self._lead_ref = weakref.ref(optimizer)
        self._others.clear()
        return True

    def _open(self, optimizer: Any, now: int) -> None:
        """The first step of a loop is done: since when it was under way, and where in the data, is found out here."""
        ways = self._recognise()
        began = min([way.began_ns for way in ways], default=now)
        self._waited_ns += sum(way.waited_ns for way in ways)
        self.running = True
        loads = len(self.loads)
        first = self._resumed_at(optimizer)
        if self._meter.steps_done and first is None and not loads:
            self._meter.resume(began)
        else:
            sizes = [way.loader.batch_size * way.fetches for way in ways if way.loader.batch_size]
            # After a restore, batches before the first step may be such that were skipped, not accumulated.
            skipped = loads and any(way.fetches > 1 for way in ways)
            self._meter.open(first, sizes[0] if sizes and not skipped else None, began)

    def _recognise(self) -> list[Pass]:
        """The passes that turn out to train, now that an optimizer has stepped."""
        if self._evaluation is not None:
            way = self._evaluation
            self._evaluated(way)
            # A model may seem to evaluate while another trains; but nobody trains without gradients.
            way.loader.trains = not way.sure and not self._unknown
        known = [ref() for ref in self._unknown]
        ways = [way for way in known if way is not None and not way.over]
        if self._left is not None:
            if ways:
                self._was_evaluation(self._left)
            else:
                ways = [self._left]
        self._unknown, self._left = [], None
        for way in ways:
            way.loader.trains = True
        if ways:
            self._by_loader = True
            main = threading.main_thread().ident or 0
            # An optimizer may step in a thread of autograd's, and a batch may be fetched ahead in one of the user's.
            self.thread = main if main in {way.thread for way in ways} else _thread()
            return [way for way in ways if way.thread == self.thread]
        self.thread = self.thread or _thread()
        return []

    def _resumed_at(self, optimizer: Any) -> int | None:
        """Where training goes on, if the optimizer's own count says so; else what was loaded is told, for whoever can
        match it with what was saved."""
        loads, self.loads = self.loads, []
        done = own_steps(optimizer) or 0
        if self._meter.steps_done and not loads:
            return None  # another optimizer, perhaps, but nothing that would have brought training back
        if done > 1:
            if done - 1 == self._meter.steps_done:
                return None
            loads = loads[-1:] or [("", "")]
        for path, file in loads:
            step = done - 1 if done > 1 else None
            self._recorder.record(Restored(t_ns=self._now(), step=step, path=path, file=file))
        return done - 1 if done > 1 else None

    def _go_on(self, way: Pass, now: int) -> None:
        """A loader that trains is asked again, after the loop was over."""
        if self.running:
            self._pause()
        if self.loads:  # a checkpoint was loaded since: where that leads to shows at the next step
            way.loader.trains = False
            way.began_ns, way.waited_ns = now, 0
            self._unknown.append(weakref.ref(way))
            return
        self.running = True
        self._meter.resume(now)

    def _pause(self) -> None:
        self.running, self._waited_ns = False, 0
        self._meter.pause(self._empty_ns)
        self._empty_ns = None

    # --- the end ---

    @property
    def steps_done(self) -> int:
        """How many steps a checkpoint taken now would hold."""
        return self._meter.steps_done

    @property
    def lead(self) -> Any:
        """The optimizer whose steps count."""
        return self._lead_ref and self._lead_ref()

    def finish(self) -> None:
        """The process ends: the loop ended with its last step."""
        if self._evaluation is not None:
            self._evaluated(self._evaluation)
        if self._left is not None:
            self._was_evaluation(self._left)
        if self.running:
            self._pause()
        self._retired = True

    def retire(self) -> None:
        """The script measures its steps itself."""
        if not self._retired:
            self.finish()
            self._lead_ref, self._by_loader = None, False


def own_steps(optimizer: Any) -> int | None:
    """How many steps an optimizer says it has taken (Adam and its kin count); None if it does not, or only its device
    knows."""
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, int | float):
            return int(step)
        if step is not None and getattr(getattr(step, "device", None), "type", "") == "cpu":
            return int(step.item())
        return None
    return None
