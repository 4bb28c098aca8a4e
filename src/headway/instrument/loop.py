"""From batches fetched and optimizers stepped to training steps: which pass trains, where a step ends, what waited.

Neither sign is enough alone. A batch may be fetched for evaluation, or be one of several for a step. An optimizer may
be one of two, one of hundreds (a step in the backward of each parameter), or skip (a gradient scaler that found an
infinity).

- A **step** ends when the *lead* optimizer has stepped: the first one to do so. Another optimizer takes the lead if it
  steps on a batch that was fetched since, or `TAKEOVER` times since the lead last stepped.
- A **pass** is one way through a loader. It trains once an optimizer steps after a fetch from it with gradients on. A
  pass that ends without a step was evaluation; before the first step of all it was preparation. So it does not matter
  what the same loader did before.
- A batch that is fetched while gradients are off is for **evaluation**, and so is a pass that begins while the trained
  model is in evaluation mode. Evaluation lasts until that pass ends or a batch is fetched to train on.
- The time from `eval()` to `train()` of the trained model is evaluation as well, unless an optimizer stepped or a
  gradient was computed in between. So is a block without gradients, if steps usually have none.
- In either of them a model may also collect experience to train on, and then it is part of the step (`modes.py`).
- A loop without a loader is measured from optimizer step to optimizer step. When its first step began is not known.

No torch here: everything known about it comes in as calls.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from headway.events.journal import BETWEEN
from headway.events.recorder import Recorder, Span
from headway.events.vocabulary import ROLLOUT, Activity
from headway.instrument.devices import DeviceWaits
from headway.instrument.past import Past

TAKEOVER = 3
"""An optimizer that stepped this often since the lead last did takes the lead, even without a new batch."""

RARE = 3
"""A block without gradients is evaluation if as many steps before it had none: else it is part of each step."""

SINGLES = 2
"""A batch without a step was left out if as many steps before took one batch each."""

WARM_UP_STEPS = 3
"""At most this many steps without a loader, before the first one with a loader, were a warm-up."""

LEAST_NS = 1_000_000
"""Shorter waits outside of steps are not recorded. A batch that is held for less was skipped."""

_thread = threading.get_ident


class Loader:
    """What is known of one DataLoader."""

    __slots__ = ("batch_size", "is_quiet", "trains")

    def __init__(self, batch_size: int | None = None) -> None:
        self.batch_size = batch_size
        self.trains = False
        """Whether one of its passes has trained."""
        self.is_quiet = False
        """Whether the program fetches batches to train on while gradients are off."""


class Pass:
    """One way through a loader, from the call of `iter` to the end of its data, or until it is dropped."""

    __slots__ = ("__weakref__", "asked_ns", "began_ns", "drawn_at", "dropped", "fetches", "got_ns", "held_ns",
                 "is_quiet", "left_ns", "loader", "over", "resumes", "thread", "trains", "waited_ns")  # fmt: skip

    KEPT: ClassVar = (
        "fetches", "waited_ns", "left_ns", "thread", "asked_ns", "got_ns", "held_ns", "resumes", "is_quiet", "over"
    )  # fmt: skip
    """What outlives a pass that is dropped."""

    def __init__(self, dropped: "Callable[[Pass], None]", loader: Loader, began_ns: int) -> None:
        self.dropped, self.loader, self.began_ns = dropped, loader, began_ns
        self.thread = _thread()
        self.fetches = self.waited_ns = self.left_ns = self.asked_ns = self.got_ns = self.held_ns = 0
        self.drawn_at = -2
        """The number of steps done when it was last drawn from without training."""
        self.over = self.trains = self.resumes = False
        self.is_quiet = False
        """Whether gradients were off at its last fetch."""

    def __del__(self) -> None:
        if not self.over:
            self.dropped(self)


class Tracker:
    """Follows one process's training loop."""

    def __init__(self, recorder: Recorder, gradients_on: Callable[[], bool] = lambda: True) -> None:
        self._recorder = recorder
        self._meter = recorder.steps_meter
        self._now = recorder.now_ns
        self.gradients_on = gradients_on
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
        self._fetched_ns = self._known_ns = 0
        """When a batch was last fetched to train on, and when from a pass that is known to train; 0 after each step."""
        self._gave = self._gave_ns = 0
        """Which pass that trains has given the last batch, and when; 0 after each step."""
        self._batches = self._singles = 0
        """Batches since the last step, and how many steps in a row took one each."""
        self._left_out_at = -2
        """How many steps were done when a batch was last left out."""
        self.on_fetch_elsewhere: Callable[[], None] | None = None
        """Called once if batches turn out to be fetched in another thread than the one that trains."""
        self._unknown: list[weakref.ref[Pass]] = []
        """Passes drawn from since the last step that may train or evaluate; weak, so that dropping them shows."""
        self._left: list[Pass] = []
        """Those of them that were dropped since: copies."""
        self._stepped_ns = self._count = 0
        self._paces: deque[int] = deque(maxlen=9)
        self._window: tuple[weakref.ref[Any], int, bool] | None = None
        """The trained model in evaluation mode, since when, and whether it plays."""
        self._span: Span | None = None
        """The evaluation under way, …"""
        self._evaluator: weakref.ref[Pass] | None = None
        """… and the pass that it reads."""
        self._quiet: list[tuple[int, int]] = []
        """The blocks without gradients since the last step."""
        self._quiet_at = 0
        """How many steps were done when there was the last one."""
        self._played_ns = 0
        """When the model began to collect experience for the next step; 0 if it did not."""
        self._evaluated_ns: int | None = None
        """When the last evaluation came to the end of its data."""
        self.past = Past(recorder)
        self.is_retired = False
        """Whether the process has ended, or the script measures its steps itself."""
        recorder.told = self.retire

    # --- data ---

    def begins(self, loader: Loader) -> Pass:
        """A pass through a loader begins; the loader may take its time to start workers."""
        way = Pass(self.dropped, loader, self._now())
        if not self.is_retired and self._is_for_evaluation(way):
            self._evaluate(way)
        return way

    def ready(self, way: Pass) -> None:
        """The loader can now be asked for batches."""
        now = self._now()
        took = now - way.began_ns
        if self._span is not None or took < LEAST_NS or self.is_retired:
            return
        if self.running and self._empty_ns is None and way.loader.trains and way.thread == self.thread:
            way.waited_ns += took
        else:
            self._recorder.period(Activity.DATA_WAIT, way.began_ns, now)

    def fetching(self, way: Pass, thread: int) -> int:
        """A batch is asked for in this thread. Returns the time."""
        self.asking.add(thread)
        now = self._now()
        if (self._window is not None or not self.gradients_on()) and self._is_for_evaluation(way):
            self._evaluate(way)
            return now
        if self._span is not None:
            self._end_evaluation(now)
        if self._window is not None and way.loader.trains:
            self._close_window(now)
        self._fetched_ns = now
        if way.trains:
            self._known_ns = now
            if self._gave == id(way) and self._singles >= SINGLES:
                self._left_out(now)
        else:
            self._consider(way, thread, now)
        if way.loader.trains and self._by_loader and thread == self.thread:
            if self.device is not None:
                self.device.asked()
            if self.running and self._empty_ns is None:
                self._meter.waits(0)
            else:
                self._go_on(way, now)
        return now

    def _consider(self, way: Pass, thread: int, now: int) -> None:
        """Remember a pass that has not trained so far: whether it does shows at the next step."""
        if way.fetches:
            way.held_ns += now - way.got_ns
        else:
            way.thread, way.began_ns = thread, now
        way.asked_ns, way.is_quiet = now, not self.gradients_on()
        if not any(ref() is way for ref in self._unknown):
            self._unknown = [*self._unknown[-7:], weakref.ref(way)]

    def fetched(self, way: Pass, asked_ns: int, thread: int) -> None:
        """It has come."""
        now = self._now()
        self.asking.discard(thread)
        way.fetches += 1
        waited, is_loop = now - asked_ns, self._by_loader and thread == self.thread
        if is_loop and way.loader.trains and self._span is None:
            if self.device is not None:
                waited = self.device.came(waited)
            self._meter.waits(now)
        if way.trains:
            self._gave, self._gave_ns = id(way), now
            self._batches += 1
            self._waited_ns += waited if is_loop else 0
        elif way.asked_ns == asked_ns:  # else it is for evaluation
            way.waited_ns += waited
            way.got_ns = now

    def exhausted(self, way: Pass, asked_ns: int, thread: int) -> None:
        """There is no batch left, or none came."""
        now = self._now()
        self.asking.discard(thread)
        way.over, way.left_ns = True, now
        if way.trains and self._gave not in (0, id(way)):  # another loader goes on: only this one begins again
            self._waited_ns += now - asked_ns
            return
        self._fetched_ns = self._known_ns = 0
        if self._evaluator is not None and self._evaluator() is way:
            self._end_evaluation(now)
        elif not way.trains:
            self._unknown = [ref for ref in self._unknown if ref() is not way]
            if way.fetches == 1:
                self._leave(way)  # a step may still follow
            else:
                self._was_evaluation(way)
        elif self.running and self._by_loader and thread == self.thread:
            self._empty_ns = asked_ns
            self._meter.waits(-1)
            if now - asked_ns > LEAST_NS:
                self._recorder.period(Activity.DATA_WAIT, asked_ns, now)

    def dropped(self, way: Pass) -> None:
        """Nobody will ask this loader again: the loop was left, or only one batch was wanted."""
        way.over, way.left_ns = True, self._now()
        if self.is_retired or not way.fetches:
            return
        if self._evaluator is not None and self._evaluator() in (way, None):
            self._end_evaluation(way.left_ns)
        elif not way.trains:
            if way.got_ns:  # else it was read for evaluation alone
                self._unknown = [ref for ref in self._unknown if ref() is not None]
                self._leave(way)
        elif self.running and self._by_loader and way.thread == self.thread and way.fetches > 1:
            self._pause()

    def waited(self, ns: int) -> None:
        """The thread that trains has waited for a batch that another thread had fetched."""
        self._waited_ns += ns

    def _leave(self, way: Pass) -> None:
        """Keep what is known of a pass that is dropped, until a step shows whether it was for training."""
        twin = Pass(way.dropped, way.loader, way.began_ns)
        for name in Pass.KEPT:
            setattr(twin, name, getattr(way, name))
        self._left = [*self._left[-7:], twin]

    # --- evaluation ---

    def _is_for_evaluation(self, way: Pass) -> bool:
        """Whether a batch fetched now is not to train on. Before the first step, that cannot be told."""
        if self.is_retired or not self._count:
            return False
        if not self.gradients_on():
            return not way.loader.is_quiet
        return not way.trains and not way.loader.trains and self._is_in_evaluation_mode()

    def _evaluate(self, way: Pass) -> None:
        """Begin an evaluation, unless one is under way."""
        if self._span is None:
            self._span = self._recorder.span(Activity.EVALUATION)
            self._span.__enter__()
            self._evaluator = weakref.ref(way)

    def _end_evaluation(self, at_ns: int) -> None:
        span, self._span, self._evaluator = self._span, None, None
        if span is not None:
            span.end(at_ns)
            self._evaluated_ns = at_ns

    def _was_evaluation(self, way: Pass) -> None:
        """Record a pass that ended without a step."""
        if way.resumes and self.running:  # it was taken for the next epoch
            self._pause()
        if way.fetches and not self.is_retired:
            what = Activity.EVALUATION if self._count else Activity.PREPROC_CREATION
            self._recorder.period(what, way.began_ns, way.left_ns)

    def saves(self) -> None:
        """Something is about to be saved: an evaluation that has left its model in evaluation mode is over now."""
        ended_ns, self._evaluated_ns = self._evaluated_ns, None
        if ended_ns is not None and self._is_in_evaluation_mode():
            self._recorder.period(Activity.EVALUATION, ended_ns, self._now())

    def to_evaluation_mode(self, module: Any, plays: bool = False) -> None:
        """The model that is trained, or most of it, was switched to evaluation. If it plays, it collects experience to
        train on, and does not evaluate."""
        if self._window is None or self._window[0]() is None:
            self._window = (weakref.ref(module), self._now(), plays)

    def to_training_mode(self, module: Any) -> bool:
        """A model was switched to training; True if it was the one that evaluated."""
        if self._window is None or self._window[0]() is not module:
            return False
        self._close_window(self._now())
        return True

    def _close_window(self, now: int) -> None:
        assert self._window is not None
        _, began_ns, plays = self._window
        has_read = self._span is not None or self._evaluated_ns is not None
        self._end_evaluation(now)
        if plays and not has_read:
            self._plays(began_ns, now)
        elif self._count:
            self._recorder.period(Activity.EVALUATION, began_ns, now)
        self._window = None

    def _plays(self, began_ns: int, ended_ns: int) -> None:
        """The model has collected experience: the next step began with that."""
        self._played_ns = self._played_ns or began_ns
        self._recorder.period(ROLLOUT, began_ns, ended_ns)

    def was_quiet(self, began_ns: int, ended_ns: int, plays: bool) -> None:
        """Gradients were off for a while in the thread that trains."""
        if self.is_retired or self._window is not None:
            return
        if plays and self._span is None:
            self._plays(began_ns, ended_ns)
        elif self._count:
            self._quiet.append((began_ns, ended_ns))

    def _judge_quiet(self) -> None:
        periods, self._quiet = self._quiet, []
        is_rare, self._quiet_at = self._count - self._quiet_at >= RARE, self._count
        for began_ns, ended_ns in periods if is_rare else ():
            self._recorder.period(Activity.EVALUATION, began_ns, ended_ns)

    def computes_gradients(self) -> None:
        """A gradient is computed: whatever mode the model is in, this is part of a step."""
        self._window = None

    @property
    def evaluating(self) -> bool:
        """Whether the trained model was switched to evaluation, and not back."""
        return self._window is not None and self._window[0]() is not None

    def _is_in_evaluation_mode(self) -> bool:
        """Whether a model that was switched to evaluation still is; before the first step that means nothing."""
        module = self._window[0]() if self._window and self._count else None
        return module is not None and not module.training

    # --- steps ---

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        lead = self._lead_ref
        is_lead = lead is not None and lead() is optimizer
        if not is_lead and not self._takes_lead(optimizer):
            self._window = None
            return
        now = self._now()
        if not self.running:
            self._open(optimizer, now, is_lead)
        elif self._unknown or self._left or self._span is not None or self.past.loads:
            self._sort_out(optimizer, now, is_lead)
        if self._quiet:
            self._judge_quiet()
        waited, self._waited_ns = self._waited_ns, 0
        self._window = self._evaluated_ns = None
        if self._others:
            self._others.clear()
        if self._empty_ns is not None:
            self._empty_ns = now
        if self._stepped_ns:
            self._paces.append(now - self._stepped_ns)
        self._stepped_ns = now
        self._fetched_ns = self._known_ns = self._played_ns = self._gave = 0
        self._singles = self._singles + 1 if self._batches == 1 else 0
        self._batches = 0
        self._count += 1
        self._meter.step(now, waited, BETWEEN if self._by_loader else now)

    def began(self, at_ns: int) -> None:
        """The first step, which is done in a moment, began at this time, if no batch says better."""
        self._played_ns = self._played_ns or at_ns

    def skipped(self) -> None:
        """A gradient scaler decides whether its optimizer steps: the batch counts as trained either way."""
        self._gave = self._batches = 0

    def _left_out(self, now: int) -> None:
        """A batch was fetched and no step followed, where each batch so far had one: it raised, or was not wanted. If
        that happens at once again, the program has begun to accumulate gradients over several batches."""
        again, self._left_out_at = self._count - self._left_out_at <= 1, self._count
        if again:
            self._singles = 0
        else:
            self._recorder.period(Activity.LEFT_OUT, self._gave_ns, now)
            self._batches -= 1

    def _takes_lead(self, optimizer: Any) -> bool:
        if self.is_retired:
            return False
        key = id(optimizer)
        alive = self._lead_ref is not None and self._lead_ref() is not None
        count = self._others[key] = self._others.get(key, 0) + 1
        if len(self._others) > 4096:  # optimizers made anew for every step
            self._others.clear()
        if alive and count < TAKEOVER and not self._fetched_ns:
            return False
        self._lead_ref = weakref.ref(optimizer)
        self._others.clear()
        return True

    def _open(self, optimizer: Any, now: int, is_lead: bool) -> None:
        """The first step of a loop is done: since when it was under way, and where in the data, is found out here."""
        ways = self._recognise(now)
        began = self._began_ns(ways, now)
        self.running, self._stepped_ns = True, began
        goes_on = self.past.is_filled or (self.past.loads and not self._count)
        if self._count and not goes_on:
            self._meter.resume(began)
            return
        began = self._skipped(ways, began)
        first = self.past.resumed_at(optimizer, is_lead, self._meter.steps_done)
        sizes = [way.loader.batch_size * way.fetches for way in ways if way.loader.batch_size]
        # After a restore, batches before the first step may have been skipped, not accumulated.
        is_known = sizes and not (goes_on and any(way.fetches > 1 for way in ways))
        self._meter.open(first, sizes[0] if is_known else None, began)

    def _sort_out(self, optimizer: Any, now: int, is_lead: bool) -> None:
        """A step is done in a loop under way, and something happened since the last one."""
        had_loader = self._by_loader
        ways = self._recognise(now)
        began = self._began_ns(ways, now)
        if self.past.is_filled:
            first = self.past.resumed_at(optimizer, is_lead, self._meter.steps_done)
            self._meter.pause()
            self._meter.open(first, None, max(began if ways else self._stepped_ns, self._stepped_ns))
        elif ways and not had_loader and self._count <= WARM_UP_STEPS:
            self._meter.open(None, None, began, after_warm_up=True)
        elif ways and self._empty_ns is not None:  # another loader than the one that was empty: another loop
            self._pause()
            self._meter.resume(began)
            self.running, self._waited_ns = True, sum(way.waited_ns for way in ways)
        self.past.loads = []

    def _began_ns(self, ways: list[Pass], now: int) -> int:
        """When the first step of a loop began: with its first batch, or with the experience collected for it."""
        began = min([way.began_ns for way in ways], default=self._played_ns or now)
        return min(began, self._played_ns) if self._played_ns else began

    def _recognise(self, now: int) -> list[Pass]:
        """The passes that turn out to train, now that an optimizer has stepped. Their waits are added to the step's."""
        if self._span is not None:
            self._step_in_evaluation(now)
        opened = [way for ref in self._unknown if (way := ref()) is not None and not way.over]
        is_loud = any(not way.is_quiet for way in opened)
        ways = [way for way in opened if not self._is_a_glance(way) and not (is_loud and way.is_quiet)]
        for way in opened:
            if way not in ways:
                self._glanced(way, now)
        left = [] if ways or self._known_ns else [way for way in self._left if not way.is_quiet]
        left = [way for way in left if way.loader is left[-1].loader]
        for way in self._left:
            if way not in left:
                self._was_evaluation(way)
        self._unknown, self._left = [], []
        return self._train(ways + left)

    def _is_a_glance(self, way: Pass) -> bool:
        """Whether a pass is only drawn from now and then, while another one trains."""
        drawn_at, way.drawn_at = way.drawn_at, self._count
        is_new = not way.loader.trains and self._count > WARM_UP_STEPS and drawn_at != self._count - 1
        return is_new and bool(self._known_ns)

    def _glanced(self, way: Pass, now: int) -> None:
        """Record an evaluation on one batch. It ended when a batch to train on was fetched, or a step before now."""
        end = self._fetched_ns if self._fetched_ns > way.asked_ns else now - self._pace_ns()
        what = Activity.EVALUATION if self._count else Activity.PREPROC_CREATION
        self._recorder.period(what, way.asked_ns, max(end, way.got_ns))
        way.fetches = way.waited_ns = way.held_ns = 0

    def _step_in_evaluation(self, now: int) -> None:
        """An optimizer has stepped while evaluation seems to be under way. It ended before this step began; or it was
        none, and the program only trains in evaluation mode, or fetches its batches while gradients are off."""
        way = self._evaluator() if self._evaluator is not None else None
        self._end_evaluation(max(now - self._pace_ns(), self._stepped_ns))
        if way is None or self._fetched_ns:
            return
        follows, way.drawn_at = way.drawn_at == self._count - 1, self._count
        if self._is_in_evaluation_mode() or follows:
            way.is_quiet = follows
            self._train([way])

    def _pace_ns(self) -> int:
        return sorted(self._paces)[len(self._paces) // 2] if self._paces else 0

    def _train(self, ways: list[Pass]) -> list[Pass]:
        """Mark passes as training. Returns those that the training thread reads."""
        for way in ways:
            way.trains = way.loader.trains = True
            way.loader.is_quiet |= way.is_quiet
        if not ways:
            self.thread = self.thread or _thread()
            return []
        self._by_loader = True
        main = threading.main_thread().ident or 0
        # An optimizer may step in a thread of autograd's, and a batch may be fetched ahead in one of the user's.
        self.thread = main if main in {way.thread for way in ways} else _thread()
        own = [way for way in ways if way.thread == self.thread]
        if not own and self.on_fetch_elsewhere is not None:
            call, self.on_fetch_elsewhere = self.on_fetch_elsewhere, None
            call()
        self._waited_ns += sum(way.waited_ns for way in own)
        return own

    def _skipped(self, ways: list[Pass], began: int) -> int:
        """Record batches that were only read, to get to where training goes on. Returns when the step itself began."""
        way = ways[0] if len(ways) == 1 else None
        if way is None or not self.past.loads or way.fetches < 3 or way.held_ns > LEAST_NS * way.fetches:
            return began
        self._recorder.period(Activity.DATA_SKIP, began, way.asked_ns)
        self._waited_ns = max(0, way.got_ns - way.asked_ns)
        return way.asked_ns

    def _go_on(self, way: Pass, now: int) -> None:
        """A loader that trains is asked again, after the loop was over."""
        if self.running:
            self._pause()
        if self.past.is_filled:  # where that leads to shows at the next step
            if way.trains:
                way.trains, way.began_ns, way.waited_ns = False, now, 0
                self._unknown.append(weakref.ref(way))
            return
        self.running = way.resumes = True
        self._stepped_ns = self._played_ns or now
        self._meter.resume(self._stepped_ns)

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
        if self._span is not None:
            self._end_evaluation(self._now())
        for way in self._left:
            self._was_evaluation(way)
        self._judge_quiet()
        if self.running:
            self._pause()
        self.is_retired = True

    def retire(self) -> None:
        """The script measures its steps itself."""
        if not self.is_retired:
            self.finish()
            self._lead_ref, self._by_loader = None, False
