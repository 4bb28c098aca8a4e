"""Stages and what they need: a graph that is checked before anything runs. Pure: nothing here starts a thread.

A stage runs in a lane. `main` is the main thread. `comm` is for collectives: its stages run one at a time, in the order
they are declared in, which is the same on every rank. `io` stages have a thread each, `process` stages a process each.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from headway.errors import InputError, nearest
from headway.events.vocabulary import STAGES

LANES = ("main", "comm", "io", "process")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of starting up: a function, and when it may run."""

    name: str
    function: Callable[..., Any]
    lane: str = "main"
    needs: tuple[str, ...] = ()
    """The stages that have to be done before."""
    arguments: tuple[str, ...] = ()
    """Those of them whose results the function takes."""
    computes: bool = True
    """Whether it keeps the interpreter busy, or draws random numbers: no two such stages run at once."""
    activity: str = ""
    """What its time counts as, of the stages a report knows; empty for none of them."""

    def __str__(self) -> str:
        """As one rank shows it to another."""
        needs = f" after {', '.join(self.needs)}" if self.needs else ""
        return f"{self.name} [{self.lane}{', computes' if self.computes else ''}]{needs}"


def stage_of(
    function: Callable[..., Any], name: str, lane: str, needs: Sequence[str], computes: bool | None, activity: str
) -> Stage:
    """The stage that a function is declared as; InputError for a lane, a name or an argument that cannot be."""
    name = name or getattr(function, "__name__", "<no name>")
    if not name.isidentifier():
        raise InputError(f"a stage cannot be called {name!r}: its name is how others ask for it. Give it one: name=.")
    if lane not in LANES:
        raise InputError(f"stage {name}: there is no lane {lane!r}, {nearest(lane, LANES)}")
    if activity and activity not in STAGES:
        raise InputError(f"stage {name}: its time cannot count as {activity!r}, {nearest(activity, STAGES)}")
    if isinstance(needs, str):
        raise InputError(f"stage {name}: needs is a list of names, as in needs=[{needs!r}].")
    if inspect.iscoroutinefunction(function):
        raise InputError(f"stage {name} is an async function, and nothing would await it: call asyncio.run inside.")
    arguments = _arguments(function, name)
    return Stage(
        name=name, function=function, lane=lane, needs=tuple(dict.fromkeys((*arguments, *needs))), arguments=arguments,
        computes=lane == "main" if computes is None else computes,
        activity=activity or (name if name in STAGES else ""),
    )  # fmt: skip


def _arguments(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """The stages a function asks for by its arguments: those without a default."""
    found = []
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C
        raise InputError(f"stage {name} does not say what it takes: call it in a function of yours.") from None
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InputError(f"stage {name} takes {parameter}: name each stage whose result it needs instead.")
        if parameter.default is parameter.empty:
            found.append(parameter.name)
    return tuple(found)


class Graph:
    """The stages of one start-up, in the order they were declared in."""

    def __init__(self) -> None:
        self.stages: dict[str, Stage] = {}

    def __str__(self) -> str:
        return "\n".join(f"  {stage}" for stage in self.stages.values())

    def add(self, stage: Stage) -> None:
        """Takes a stage in; InputError if there is one of its name."""
        if stage.name in self.stages:
            raise InputError(f"there are two stages called {stage.name}: give one of them another name=.")
        self.stages[stage.name] = stage

    def order(self) -> list[Stage]:
        """All stages, each behind what it needs, else as declared. InputError if one needs a stage that is not there,
        or if some wait for each other."""
        for stage in self.stages.values():
            for need in stage.needs:
                if need not in self.stages:
                    raise InputError(
                        f"stage {stage.name} needs {need}, which is no stage: {nearest(need, self.stages)}"
                    )
        done: dict[str, Stage] = {}
        while len(done) < len(self.stages):
            ready = next(
                (s for s in self.stages.values() if s.name not in done and done.keys() >= self.before(s)), None
            )
            if ready is None:
                raise InputError(self._circle([name for name in self.stages if name not in done]))
            done[ready.name] = ready
        return list(done.values())

    def before(self, stage: Stage) -> set[str]:
        """What has to be done before a stage begins. A collective waits for the one declared before it, too: that is
        how all ranks come to the same order."""
        before = set(stage.needs)
        if stage.lane == "comm":
            comm = [other.name for other in self.stages.values() if other.lane == "comm"]
            before |= set(comm[max(comm.index(stage.name) - 1, 0) : comm.index(stage.name)])
        return before

    def _circle(self, left: list[str]) -> str:
        """Says which of these stages wait for each other."""
        path = [left[0]]
        while path[-1] not in path[:-1]:
            path.append(next(name for name in sorted(self.before(self.stages[path[-1]])) if name in left))
        circle = path[path.index(path[-1]) :]
        why = "".join(_why_later(self.stages[a], self.stages[b]) for a, b in pairwise(circle))
        return f"these stages wait for each other: {' → '.join(circle)}.{why} Take one of these needs out."


def _why_later(stage: Stage, other: Stage) -> str:
    if other.name in stage.needs:
        return ""
    return f" {stage.name} comes after {other.name} because collectives run in the order they are declared in."
