"""What a process does between its steps: it evaluates, or collects experience to train on.

Takes calls about modes, gradients and passes; writes periods and spans. Does not know what a step is: the tracker says
when one is done, and asks whether something has happened since.
"""

import weakref
from typing import Any

from headway.events.recorder import Recorder, Span
from headway.events.vocabulary import ROLLOUT, Activity
from headway.instrument.passes import Pass

RARE = 3
"""A block without gradients is evaluation if this many steps before it had none; otherwise it is part of each step."""


class News:
    """Set when something besides training has happened since the last step."""

    __slots__ = ("any",)

    def __init__(self) -> None:
        self.any = True


class Evaluation:
    """Follows the evaluations and rollouts of one process."""

    __slots__ = (
        "_evaluated_ns", "_evaluator", "_now", "_quiet", "_quiet_at", "_recorder", "_span", "_window", "_news",
        "has_trained", "is_retired", "played_ns",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, news: News) -> None:
        self._recorder, self._now, self._news = recorder, recorder.now_ns, news
        self.has_trained = self.is_retired = False
        self._span: Span | None = None
        self._evaluator: weakref.ref[Pass] | None = None
        """The pass that the evaluation under way reads."""
        self._evaluated_ns: int | None = None
        """When the last evaluation came to the end of its data."""
        self._window: tuple[weakref.ref[Any], int, bool] | None = None
        """The trained model in evaluation mode, since when, and whether it collects experience."""
        self._quiet: list[tuple[int, int]] = []
        """The blocks without gradients since the last step."""
        self._quiet_at = 0
        """How many steps were done when there was the last one."""
        self.played_ns = 0
        """When the model began to collect experience for the next step; 0 if it did not."""

    # --- passes ---

    @property
    def reads(self) -> bool:
        """Whether an evaluation that reads a loader is under way."""
        return self._span is not None

    @property
    def evaluator(self) -> Pass | None:
        """The pass that is read by the evaluation under way."""
        return self._evaluator() if self._evaluator is not None else None

    def reads_from(self, way: Pass, or_is_gone: bool = False) -> bool:
        """Whether the evaluation under way reads this pass, or one that is gone."""
        return self._evaluator is not None and self._evaluator() in ((way, None) if or_is_gone else (way,))

    def begin(self, way: Pass) -> None:
        """Begin an evaluation, unless one is under way."""
        if self._span is None:
            self._news.any = True
            self._span = self._recorder.span(Activity.EVALUATION)
            self._span.__enter__()
            self._evaluator = weakref.ref(way)

    def end(self, at_ns: int) -> None:
        """End the evaluation under way, if there is one."""
        span, self._span, self._evaluator = self._span, None, None
        if span is not None:
            span.end(at_ns)
            self._news.any, self._evaluated_ns = True, at_ns

    def saves(self) -> None:
        """Something is about to be saved: an evaluation that has left its model in evaluation mode is over now."""
        ended_ns, self._evaluated_ns = self._evaluated_ns, None
        if ended_ns is not None and self.is_in_mode():
            self._recorder.period(Activity.EVALUATION, ended_ns, self._now())

    # --- modes ---

    @property
    def is_in_window(self) -> bool:
        """Whether the trained model was switched to evaluation, and not back."""
        return self._window is not None and self._window[0]() is not None

    def is_in_mode(self) -> bool:
        """Whether a model that was switched to evaluation still is; before the first step that means nothing."""
        module = self._window[0]() if self._window and self.has_trained else None
        return module is not None and not module.training

    def to_evaluation_mode(self, module: Any, plays: bool = False) -> None:
        """The model that is trained, or most of it, was switched to evaluation. If it plays, it collects experience to
        train on, and does not evaluate."""
        if not self.is_in_window:
            self._news.any = True
            self._window = (weakref.ref(module), self._now(), plays)

    def to_training_mode(self, module: Any) -> bool:
        """A model was switched to training; True if it was the one that evaluated."""
        if self._window is None or self._window[0]() is not module:
            return False
        self.close_window(self._now())
        return True

    def close_window(self, now: int) -> None:
        """The time in evaluation mode is over, if there was one."""
        if self._window is None:
            return
        _, began_ns, plays = self._window
        has_read = self._span is not None or self._evaluated_ns is not None
        self.end(now)
        if plays and not has_read:
            self._plays(began_ns, now)
        elif self.has_trained:
            self._recorder.period(Activity.EVALUATION, began_ns, now)
        self._window = None

    def computes_gradients(self) -> None:
        """A gradient is computed: whatever mode the model is in, this is part of a step."""
        self._window = None

    # --- blocks without gradients ---

    def was_quiet(self, began_ns: int, ended_ns: int, plays: bool) -> None:
        """Gradients were off for a while in the thread that trains."""
        if self.is_retired or self._window is not None:
            return
        if plays and self._span is None:
            self._plays(began_ns, ended_ns)
        elif self.has_trained:
            self._news.any = True
            self._quiet.append((began_ns, ended_ns))

    def judge_quiet(self, steps: int) -> None:
        """Decide about the blocks since the last step, of this many so far."""
        if not self._quiet:
            return
        periods, self._quiet = self._quiet, []
        is_rare, self._quiet_at = steps - self._quiet_at >= RARE, steps
        for began_ns, ended_ns in periods if is_rare else ():
            self._recorder.period(Activity.EVALUATION, began_ns, ended_ns)

    def _plays(self, began_ns: int, ended_ns: int) -> None:
        """The model has collected experience: the next step began with that."""
        self._news.any = True
        self.played_ns = self.played_ns or began_ns
        self._recorder.period(ROLLOUT, began_ns, ended_ns)

    def began(self, at_ns: int) -> None:
        """The first step, which is done in a moment, began at this time, if no batch says better."""
        self._news.any = True
        self.played_ns = self.played_ns or at_ns

    def stepped(self, steps: int) -> None:
        """A step is done, after this many others: what has happened here belongs to it, or is recorded."""
        self.judge_quiet(steps)
        self._window = self._evaluated_ns = None
        self.played_ns = 0
