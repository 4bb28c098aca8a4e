"""When the trained model goes to evaluation and back: whether it evaluated, or collected experience to train on.

A model counts if it holds at least half of what the optimizer trains: teachers, frozen parts and layers that are
switched one by one do not. `train` and the functions that compute gradients are watched only while such a model is in
evaluation mode. Blocks without gradients (`no_grad`, `inference_mode`) are timed; the tracker decides what they were.
"""

import re
import sys
import weakref
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from headway.events.vocabulary import Activity
from headway.instrument.loop import LEAST_NS
from headway.instrument.patches import Patch, around, guarded, looks_like

if TYPE_CHECKING:
    from headway.instrument.session import Session

FRAMES = 8
"""So many callers of `eval` are looked at."""

_EVALUATES = frozenset(
    ("eval", "evaluate", "evaluation", "evaluator", "val", "valid", "validate", "validation", "test", "testing",
     "metrics", "accuracy", "score", "estimate", "benchmark")
)  # fmt: skip
_PLAYS = frozenset(
    ("rollout", "rollouts", "collect", "collector", "play", "selfplay", "explore", "episode", "episodes", "experience",
     "trajectory", "trajectories", "interact", "simulate", "act")
)  # fmt: skip

_ENVIRONMENTS = frozenset(
    ("env", "envs", "environment", "environments", "vec_env", "venv", "gym", "gymnasium", "game", "games", "simulator")
)


class Modes:
    """Follows the modes of one process's models."""

    def __init__(self, session: "Session", base: Any) -> None:
        self._session, self._base = session, base
        self._trained: weakref.WeakKeyDictionary[Any, tuple[tuple[int, int], bool]] = weakref.WeakKeyDictionary()
        self._plays: dict[tuple[CodeType, int], bool] = {}
        self._watchers: list[tuple[Patch, Any]] | None = None
        if patch := session.patch(base, "eval", ("self",)):
            patch.put(around(patch, lambda model: model, self._evaluates))

    def _evaluates(self, model: Any, result: Any, error: BaseException | None) -> None:
        """A model was switched to evaluation."""
        session, tracker = self._session, self._session.tracker
        if tracker is None or tracker.evaluation.is_in_window or session.is_open(Activity.EVALUATION):
            return
        plays = self._is_to_play(sys._getframe(2))
        if not (plays if tracker.lead is None else self._is_trained(model)):
            return
        tracker.evaluation.to_evaluation_mode(model, plays)
        for patch, watcher in self._watch():
            if patch.state == "off":
                patch.put(watcher)  # unless somebody else has put something there

    def _is_trained(self, model: Any) -> bool:
        lead = self._session.tracker.lead if self._session.tracker is not None else None
        if lead is None:
            return False
        key = (id(lead), len(lead.param_groups))
        known = self._trained.get(model)
        if known is None or known[0] != key:
            known = self._trained[model] = key, holds(model, lead)
        return known[1]

    # --- while it is in evaluation mode ---

    def _watch(self) -> list[tuple[Patch, Any]]:
        if self._watchers is None:
            self._watchers = []
            if patch := self._session.patch(self._base, "train", ("self", "mode")):
                goes = around(patch, lambda model, mode=True: model if mode else None, self._trains)
                self._watchers.append((patch, goes))
            for name, first in (("backward", "tensors"), ("grad", "outputs")):
                if patch := self._session.patch(sys.modules["torch"].autograd, name, (first,)):
                    self._watchers.append((patch, around(patch, self._computes_gradients, lambda *_: None)))
        return self._watchers

    def _trains(self, model: Any, result: Any, error: BaseException | None) -> None:
        tracker = self._session.tracker
        evaluation = tracker.evaluation if tracker is not None else None
        if (
            evaluation is None
            or not evaluation.is_in_window
            or (model is not None and evaluation.to_training_mode(model))
        ):
            self._rest()

    def _computes_gradients(self, *args: Any, **kwargs: Any) -> None:
        if self._session.tracker is not None:
            self._session.tracker.evaluation.computes_gradients()
        self._rest()

    def _rest(self) -> None:
        for patch, _ in self._watchers or ():
            patch.undo()

    # --- blocks without gradients ---

    def time_blocks(self, kind: Any) -> None:
        """Time the blocks of one kind, if gradients are on around them."""
        session, on = self._session, self._session.gradients_on
        enter, leave = session.patch(kind, "__enter__", ("self",)), session.patch(kind, "__exit__", ("self",))
        if enter is None or leave is None:
            return
        goes_in, comes_out, was_quiet = enter.original, leave.original, guarded(leave, self._was_quiet)

        def __enter__(self: Any) -> Any:  # noqa: N807
            is_outer = session.tracker is not None and on()
            result = goes_in(self)
            if is_outer and session.recorder is not None:
                self.__dict__["_headway"] = session.recorder.now_ns()
            return result

        def __exit__(self: Any, *problem: Any) -> Any:  # noqa: N807
            result = comes_out(self, *problem)
            if "_headway" in self.__dict__:
                was_quiet(self.__dict__.pop("_headway"))
            return result

        for patch, hook in ((enter, __enter__), (leave, __exit__)):
            looks_like(hook, patch.original)
            hook.__headway__ = patch  # type: ignore[attr-defined]
            patch.put(hook)

    def _was_quiet(self, began_ns: int) -> None:
        tracker, recorder = self._session.tracker, self._session.recorder
        if tracker is None or recorder is None or tracker.thread not in (0, get_ident()):
            return
        now = recorder.now_ns()
        if now - began_ns > LEAST_NS:
            tracker.evaluation.was_quiet(began_ns, now, self._is_to_play(sys._getframe(3)))

    # --- what it is for ---

    def _is_to_play(self, frame: FrameType | None) -> bool:
        """Whether the model is to collect experience: the nearest caller with a telling name says so. Where no name
        tells, it is so if a caller has to do with an environment."""
        while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(("headway.", "torch.")):
            frame = frame.f_back
        if frame is None:
            return False
        key = (frame.f_code, frame.f_lineno)
        if key not in self._plays:
            self._plays[key] = _tells_of_play(frame)
        return self._plays[key]


def holds(model: Any, optimizer: Any) -> bool:
    """Whether a model holds at least half of what an optimizer trains."""
    own = {id(each): each.numel() for group in optimizer.param_groups for each in group["params"]}
    return bool(2 * sum(own.get(id(each), 0) for each in model.parameters()) >= sum(own.values()))


def _tells_of_play(frame: FrameType) -> bool:
    at: FrameType | None = frame
    callers: list[FrameType] = []
    while at is not None and len(callers) < FRAMES:
        words = set(re.findall(r"[a-z]+", at.f_code.co_name.lower()))
        if words & _PLAYS or words & _EVALUATES:
            return bool(words & _PLAYS)
        callers.append(at)
        at = at.f_back
    return _have_environment(callers)


def _have_environment(callers: list[FrameType]) -> bool:
    """Whether functions speak of an environment that they reset, or a module of theirs has one. What their variables
    hold is not looked at: Python would keep it alive until they return."""
    names: set[str] = set()
    for code in (each.f_code for each in callers):
        names.update(code.co_varnames, code.co_names, code.co_freevars, code.co_cellvars)
    if "reset" in names and not _ENVIRONMENTS.isdisjoint(names):
        return True
    kinds = {type(value) for each in callers for value in each.f_globals.copy().values()}
    return any(callable(getattr(kind, "reset", None)) and callable(getattr(kind, "step", None)) for kind in kinds)


def _modes(session: "Session", torch: Any) -> None:
    modes = Modes(session, torch.nn.Module)
    for kind in (torch.no_grad, torch.inference_mode):
        modes.time_blocks(kind)


MODULES = {"torch": _modes}
"""What to do with which module once it is imported."""
