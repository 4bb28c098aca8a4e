"""The states that a process has had and loaded: where its training goes on, if it goes on from one of them.

Takes states by name: a path, a file, or a content that is the same however a state was stored. Writes down what was
loaded, so that the ledger can match it with what any rank had before. Knows nothing of torch.
"""

import weakref
from typing import Any, NamedTuple

from headway.events.recorder import Recorder
from headway.events.vocabulary import Restored, Saved
from headway.instrument.evaluation import News

MOST_LOADS = 16
"""Of what was loaded before a step, so many are kept."""

MOST_CONTENTS = 256
"""Of the states that a process has had, so many are kept."""


class Load(NamedTuple):
    """Something that was loaded: training may go on from it."""

    path: str = ""
    file: str = ""
    content: str = ""
    """What the state itself is known by, however it was stored."""
    fills: bool = False
    """Whether it went into the model, and was not only read."""


class Past:
    """What one process has had and loaded."""

    def __init__(self, recorder: Recorder, news: News) -> None:
        self._recorder, self._news = recorder, news
        self.loads: list[Load] = []
        """What was loaded since the last step."""
        self._contents: dict[str, int] = {}
        """How many steps each state holds that the process has had."""
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers whose state was loaded: their own count of steps is a position. A fresh one's is not."""

    def had(self, content: str, steps: int) -> bool:
        """The process has a state that holds so many steps. Returns whether that is new."""
        is_new = content not in self._contents
        self._contents[content] = steps
        while len(self._contents) > MOST_CONTENTS:
            del self._contents[next(iter(self._contents))]
        return is_new

    def loaded(self, *loads: Load) -> None:
        """States were loaded, or read at least."""
        self._news.any = True
        self.loads = [*(load for load in self.loads if load not in loads), *loads][-MOST_LOADS:]

    def filled(self, content: str = "", optimizer: Any = None) -> None:
        """What was loaded has gone into what is trained: a model with this content, or an optimizer."""
        if optimizer is not None:
            self._counted.add(optimizer)
        else:
            self.loaded(Load(content=content))
        self._news.any = True
        self.loads = [load._replace(fills=True) for load in self.loads]

    @property
    def is_filled(self) -> bool:
        """Whether something was loaded into what is trained."""
        return any(load.fills for load in self.loads)

    def resumed_at(self, optimizer: Any, is_lead: bool, steps_done: int) -> int | None:
        """Write down what was loaded before the step that an optimizer has made; `is_lead` if it was the lead before as
        well. Returns where training goes on, if only the optimizer's own count can tell."""
        loads, self.loads = self.loads, []
        known = [load for load in loads if load.content in self._contents]
        now, done = self._recorder.now_ns(), own_steps(optimizer) or 0
        for load in known:
            step = self._contents[load.content]
            if step or is_lead:  # a fresh optimizer on the first weights is another training
                self._recorder.record(Saved(t_ns=now, step=step, content=load.content, durable=False))
            else:
                loads.remove(load)
        is_counted = not known and done > 1 and optimizer in self._counted
        first = done - 1 if is_counted and done - 1 != steps_done else None
        if first is not None:
            named = next((load for load in reversed(loads) if load.path), Load())
            loads = [named._replace(content=next((load.content for load in reversed(loads) if load.content), ""))]
        for load in loads:
            self._recorder.record(Restored(t_ns=now, step=first, path=load.path, file=load.file, content=load.content))
        return first


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
