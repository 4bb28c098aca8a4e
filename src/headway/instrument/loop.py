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
from collections.abc import Callable
from typing import Any

from headway.events.journal import BETWEEN
from headway.events.recorder import Recorder
from headway.events.vocabulary import Activity
from headway.instrument.devices import DeviceWaits
from headway.instrument.evaluation import Evaluation, News
from headway.instrument.passes import Loader, Pass
from headway.instrument.past import Past

TAKEOVER = 3
"""An optimizer that stepped this often since the lead last did takes the lead, even without a new batch."""

SINGLES = 2
"""A batch without a step was left out if as many steps before took one batch each."""

WARM_UP_STEPS = 3
"""At most this many steps without a loader, before the first one with a loader, were a warm-up."""

LEAST_NS = 1_000_000
"""Shorter waits outside of steps are not recorded. A batch that is held for less was skipped."""

_thread = threading.get_ident


class Tracker:
    """Follows one process's training loop."""

    __slots__ = (
        "_asked_ns", "_asking", "_batches", "_by_loader", "_count", "_cruises", "_empty_ns", "_expected", "_fetched_ns",
        "_gave", "_gave_ns", "_is_regular", "_known_ns", "_lead_ref", "_left", "_left_out_at", "_meter", "_news",
        "_now", "_others", "_recorder", "_saved_ns", "_singles", "_stepped_ns", "_unknown", "_waited_ns", "device",
        "evaluation", "gradients_on", "is_retired", "on_fetch_elsewhere", "past", "running", "thread",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, gradients_on: Callable[[], bool] = lambda: True) -> None:
        self._recorder, self._now = recorder, recorder.now_ns
        self._meter = recorder.steps_meter
        self.gradients_on = gradients_on
        self._news = News()
        self.evaluation, self.past = Evaluation(recorder, self._news), Past(recorder, self._news)
        self.thread = 0
        """The thread that trains; 0 until one has."""
        self.running = self.is_retired = False
        """Whether the loop is under way; whether the process has ended, or the script measures its steps itself."""
        self._asking: set[int] = set()
        """The threads that are waiting for a batch, but for one that was expected."""
        self.device: DeviceWaits | None = None
        """Set where steps run on a device that does not wait for the host."""
        self.on_fetch_elsewhere: Callable[[], None] | None = None
        """Called once if batches turn out to be fetched in another thread than the one that trains."""
        self._lead_ref: Callable[[], Any] = lambda: None
        self._others: dict[int, int] = {}
        """How often other optimizers have stepped since the lead has."""
        self._by_loader = False
        self._waited_ns = 0
        self._empty_ns: int | None = None
        """When the loader was found empty: the loop was over then, unless a step still comes (it asked ahead)."""
        self._fetched_ns = self._known_ns = 0
        """When a batch was last fetched to train on, and when from a pass that is known to train; 0 after each step."""
        self._gave = self._gave_ns = 0
        """Which pass that trains has given the last batch, and when; 0 after each step."""
        self._is_regular = False
        """Whether it is the only one since the last step, and the thread that trains has asked for it."""
        self._cruises = self._expected = self._asked_ns = 0
        """The pass that has given each step its one batch; the same until it is asked for the next one; once that has
        come, when it was asked for. See `_land`."""
        self._batches = self._singles = 0
        """Batches since the last step, and how many steps in a row took one each."""
        self._left_out_at = -2
        """How many steps were done when a batch was last left out."""
        self._unknown: list[weakref.ref[Pass]] = []
        """Passes drawn from since the last step that may train or evaluate; weak, so that dropping them shows."""
        self._left: list[Pass] = []
        """Those of them that were dropped since: copies."""
        self._stepped_ns = self._count = 0
        self._saved_ns = 0
        """When a checkpoint was written since the last step; 0 if none was."""
        recorder.told = self.retire

    # --- data ---

    def begins(self, loader: Loader) -> Pass:
        """A pass through a loader begins; the loader may take its time to start workers."""
        way = Pass(self.dropped, loader, self._now())
        if not self.is_retired and self._is_for_evaluation(way):
            self.evaluation.begin(way)
        return way

    def ready(self, way: Pass) -> None:
        """The loader can now be asked for batches."""
        now = self._now()
        took = now - way.began_ns
        if self.evaluation.reads or took < LEAST_NS or self.is_retired:
            return
        if self.running and self._empty_ns is None and way.loader.trains and way.thread == self.thread:
            way.waited_ns += took
        else:
            self._recorder.period(Activity.DATA_WAIT, way.began_ns, now)

    def fetching(self, way: Pass) -> int | None:
        """A batch is asked for. Returns the time; None if this thread is waiting for another batch, and asks for this
        one on the way."""
        now = self._now()
        if self._expected == way.number and not self._news.any and self.gradients_on():
            self._expected = 0
            self._meter.waits(0)
            return now
        thread = _thread()
        if self.is_asking(thread):
            return None
        self._land()
        self._asking.add(thread)
        if self._is_for_evaluation(way):
            self.evaluation.begin(way)
        else:
            self._ask(way, thread, now)
        return now

    def is_asking(self, thread: int) -> bool:
        """Whether a thread is waiting for a batch."""
        return thread in self._asking or (thread == self.thread and self._awaits_expected)

    @property
    def _awaits_expected(self) -> bool:
        return bool(self._cruises) and not self._expected and not self._asked_ns

    def _land(self) -> None:
        """Something else happens than one batch from the same pass, one step, and so on. Until now only times were
        noted; the rest is made up for here."""
        if not self._cruises:
            return
        if self._asked_ns:
            self._fetched_ns = self._known_ns = self._asked_ns
            self._gave, self._batches, self._is_regular = self._cruises, 1, True
            self._waited_ns = self._gave_ns - self._asked_ns
        elif self._awaits_expected:
            self._asking.add(self.thread)
        self._singles, self._stepped_ns = SINGLES, self._meter.ended_ns
        self._cruises = self._expected = self._asked_ns = 0

    def _ask(self, way: Pass, thread: int, now: int) -> None:
        """A batch to train on is asked for, as far as can be told."""
        self.evaluation.end(now)
        if way.loader.trains:
            self.evaluation.close_window(now)
        self._fetched_ns = now
        if way.trains:
            self._known_ns = now
            if self._gave == way.number and self._singles >= SINGLES:
                self._left_out(now)
        else:
            self._consider(way, thread, now)
        if way.loader.trains and self._by_loader and thread == self.thread:
            if self.device is not None:
                self.device.asked()
            if self.running and self._empty_ns is None:
                self._meter.waits(0)
                self._uploaded(now)
            else:
                self._go_on(way, now)

    def saved(self) -> None:
        """A checkpoint was written by the thread that trains."""
        self._news.any, self._saved_ns = True, self._now()

    def waited_for_process(self, began_ns: int) -> None:
        """The thread that trains has waited for another process since then."""
        now = self._now()
        if self.running and self._empty_ns is None and now - began_ns > LEAST_NS and not self.is_asking(self.thread):
            what = Activity.UPLOAD if self._saved_ns else Activity.EVALUATION
            self._recorder.period(what, began_ns, now)

    def _uploaded(self, now: int) -> None:
        """Record what came after a checkpoint was written, if one was: the loop waited for something about it."""
        began_ns, self._saved_ns = self._saved_ns, 0
        if began_ns and not self._gave and now - began_ns > LEAST_NS:
            self._recorder.period(Activity.UPLOAD, began_ns, now)

    def _consider(self, way: Pass, thread: int, now: int) -> None:
        """Remember a pass that has not trained so far: whether it does shows at the next step."""
        if way.fetches:
            way.held_ns += now - way.got_ns
        else:
            way.thread, way.began_ns = thread, now
        way.asked_ns, way.is_quiet = now, not self.gradients_on()
        if not any(ref() is way for ref in self._unknown):
            self._unknown, self._is_regular = [*self._unknown[-7:], weakref.ref(way)], False

    def fetched(self, way: Pass, asked_ns: int) -> None:
        """It has come."""
        now = self._now()
        way.fetches += 1
        if self._cruises == way.number:
            self._asked_ns, self._gave_ns = asked_ns, now
            self._meter.waits(now)
        else:
            self._came(way, asked_ns, now, _thread())

    def _came(self, way: Pass, asked_ns: int, now: int, thread: int) -> None:
        """A batch has come, and not from where it was expected."""
        self._asking.discard(thread)
        waited_ns, is_loop = now - asked_ns, self._by_loader and thread == self.thread
        if is_loop and way.loader.trains and not self.evaluation.reads:
            if self.device is not None:
                waited_ns = self.device.came(waited_ns)
            self._meter.waits(now)
        if way.trains:
            self._gave, self._gave_ns = way.number, now
            self._batches += 1
            self._is_regular = is_loop and self.device is None and self._batches == 1
            self._waited_ns += waited_ns if is_loop else 0
        elif way.asked_ns == asked_ns:  # else it is for evaluation
            way.waited_ns += waited_ns
            way.got_ns = now

    def exhausted(self, way: Pass, asked_ns: int) -> None:
        """There is no batch left, or none came."""
        now, thread = self._now(), _thread()
        self._land()
        self._asking.discard(thread)
        way.over, way.left_ns, self._is_regular = True, now, False
        if way.trains and self._gave not in (0, way.number):  # another loader goes on: only this one begins again
            self._waited_ns += now - asked_ns
            return
        self._fetched_ns = self._known_ns = 0
        if self.evaluation.reads_from(way):
            self.evaluation.end(now)
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
        self._land()
        way.over, way.left_ns, self._is_regular = True, self._now(), False
        if self.is_retired or not way.fetches:
            return
        if self.evaluation.reads_from(way, or_is_gone=True):
            self.evaluation.end(way.left_ns)
        elif not way.trains:
            if way.got_ns:  # else it was read for evaluation alone
                self._unknown = [ref for ref in self._unknown if ref() is not None]
                self._leave(way)
        elif self.running and self._by_loader and way.thread == self.thread and way.fetches > 1:
            self._pause()

    def waited(self, ns: int) -> None:
        """The thread that trains has waited for a batch that another thread had fetched."""
        self._land()
        self._waited_ns += ns

    def _leave(self, way: Pass) -> None:
        """Keep what is known of a pass that is dropped, until a step shows whether it was for training."""
        twin = Pass(way.dropped, way.loader, way.began_ns)
        for name in Pass.KEPT:
            setattr(twin, name, getattr(way, name))
        self._left, self._is_regular = [*self._left[-7:], twin], False

    def _is_for_evaluation(self, way: Pass) -> bool:
        """Whether a batch fetched now is not to train on. Before the first step, that cannot be told."""
        if self.is_retired or not self._count:
            return False
        if not self.gradients_on():
            return not way.loader.is_quiet
        return not way.trains and not way.loader.trains and self.evaluation.is_in_mode()

    def _was_evaluation(self, way: Pass) -> None:
        """Record a pass that ended without a step."""
        if way.resumes and self.running:  # it was taken for the next epoch
            self._pause()
        if way.fetches and not self.is_retired:
            what = Activity.EVALUATION if self._count else Activity.PREPROC_CREATION
            self._recorder.period(what, way.began_ns, way.left_ns)

    # --- steps ---

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        now = self._now()
        if self._asked_ns and not self._news.any and self._lead_ref() is optimizer:
            self._meter.step(now, self._gave_ns - self._asked_ns, BETWEEN)
            self._expected, self._asked_ns = self._cruises, 0
            self._count += 1
            return
        self._land()
        if self._finds_step(optimizer, now):
            self._count += 1
            self._meter.step(now, self._waited_ns, BETWEEN if self._by_loader else now)
            self._waited_ns = 0

    def _finds_step(self, optimizer: Any, now: int) -> bool:
        """Find out what has happened since the last step. Returns whether this is one."""
        is_lead = self._lead_ref() is optimizer
        if not is_lead and not self._takes_lead(optimizer):
            self._is_regular = False
            self.evaluation.computes_gradients()
            return False
        if not self.running:
            self._open(optimizer, now, is_lead)
        elif self._unknown or self._left or self.past.loads or self.evaluation.reads:
            self._sort_out(optimizer, now, is_lead)
        if self._news.any:
            self.evaluation.stepped(self._count)
            self._news.any = self.evaluation.reads or bool(self.past.loads)
        self._others.clear()
        if self._empty_ns is not None:
            self._empty_ns, self._is_regular = now, False
        self._cruises = self._expected = self._gave if self._is_regular else 0
        self._singles = self._singles + 1 if self._batches == 1 else 0
        self._is_regular = False
        self._fetched_ns = self._known_ns = self._gave = self._batches = 0
        self._stepped_ns, self._saved_ns = now, 0
        return True

    def skipped(self) -> None:
        """A gradient scaler decides whether its optimizer steps: the batch counts as trained either way."""
        if self._asked_ns:
            self._land()
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
        alive = self._lead_ref() is not None
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
        self.evaluation.has_trained = True
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
        played_ns = self.evaluation.played_ns
        began = min([way.began_ns for way in ways], default=played_ns or now)
        return min(began, played_ns) if played_ns else began

    def _recognise(self, now: int) -> list[Pass]:
        """The passes that turn out to train, now that an optimizer has stepped. Their waits are added to the step's."""
        if self.evaluation.reads:
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
        end = self._fetched_ns if self._fetched_ns > way.asked_ns else now - self._meter.typical_ns
        what = Activity.EVALUATION if self._count else Activity.PREPROC_CREATION
        self._recorder.period(what, way.asked_ns, max(end, way.got_ns))
        way.fetches = way.waited_ns = way.held_ns = 0

    def _step_in_evaluation(self, now: int) -> None:
        """An optimizer has stepped while evaluation seems to be under way. It ended before this step began; or it was
        none, and the program only trains in evaluation mode, or fetches its batches while gradients are off."""
        way = self.evaluation.evaluator
        self.evaluation.end(max(now - self._meter.typical_ns, self._stepped_ns))
        if way is None or self._fetched_ns:
            return
        follows, way.drawn_at = way.drawn_at == self._count - 1, self._count
        if self.evaluation.is_in_mode() or follows:
            way.is_quiet = follows
            self._train([way])

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
        self._stepped_ns = self.evaluation.played_ns or now
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
        return self._lead_ref()

    def finish(self) -> None:
        """The process ends: the loop ended with its last step."""
        self._land()
        self.evaluation.end(self._now())
        for way in self._left:
            self._was_evaluation(way)
        self.evaluation.judge_quiet(self._count)
        if self.running:
            self._pause()
        self.is_retired = self.evaluation.is_retired = True

    def retire(self) -> None:
        """The script measures its steps itself."""
        if not self.is_retired:
            self.finish()
            self._lead_ref, self._by_loader = lambda: None, False
