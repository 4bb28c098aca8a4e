"""From what a job's journal tells of its compilations: what was compiled again, why, and what to tell torch."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from headway.events.vocabulary import Mark, Told

VARIABLE = "TORCH_COMPILE_DYNAMIC_SOURCES"


class Cause(StrEnum):
    """Why a function was compiled again."""

    SIZE = "a size changed"
    ZERO_ONE = "a size was 0 or 1"
    VALUE = "a Python value changed"
    IDENTITY = "a type, an object or an attribute changed"
    GRAD_MODE = "grad mode changed"
    OTHER = "another guard failed"


REMEDIES = {
    Cause.SIZE: "Let torch compile for any size from the start.",
    Cause.ZERO_ONE: "torch compiles for 0 and for 1 alone, whatever it is told. Pad such inputs, or leave them out.",
    Cause.VALUE: "Integers can be told to torch, as sizes can. Pass a float as a tensor.",
    Cause.IDENTITY: "Build it once, before the loop, and keep it as it is.",
    Cause.GRAD_MODE: "Each mode needs a graph of its own. Warm up both, or evaluate a copy that is not compiled.",
    Cause.OTHER: "The guard says what was taken for constant.",
}

_GUARDS = (
    (Cause.GRAD_MODE, r"GLOBAL_STATE changed:.*grad_mode"),
    (Cause.OTHER, r"stride mismatch|\blen\(|dict\.keys\(|GLOBAL_STATE"),
    (Cause.SIZE, r"size mismatch|\.size\(\)\["),
    (Cause.IDENTITY, r"\w mismatch|___check_(type|obj)_id|\bis (not )?|hasattr|type\("),
    (Cause.VALUE, r"^[^=<>!]+ == (-?[\d.]|True|False|'|\")"),
)
"""The cause by the words of a guard, the first that fits. Its names are not taken from here: guards abbreviate them."""

_IS_EXACT = re.compile(r"[\w.'\[\]]+", re.ASCII)
_ARGUMENT = re.compile(r"[LG]\['(\w+)'\](.*)")


@dataclass(frozen=True)
class Change:
    """An input of a compiled function that was not as it was before."""

    source: str
    """Its name, as torch calls it."""
    kind: str
    """`size`, `int`, `float`, or `dims`: how many dimensions it has."""
    dim: int | None
    values: tuple[Any, ...]
    """What it was, and at last what it is."""
    is_shared: bool = False
    """Whether another function has an input of that name, which did not change."""
    takes_dim: bool = True
    """Whether the torch that ran can be told of one dimension."""

    @property
    def what(self) -> tuple[str, str, int | None]:
        """What changed, whatever the values."""
        return self.source, self.kind, self.dim

    @property
    def is_avoidable(self) -> bool:
        """Whether this would have been no reason, had torch known from the start that it changes."""
        return self.varies and (self.kind == "int" or self.values[-1] > 1)

    @property
    def varies(self) -> bool:
        """Whether torch can compile for all of its values at once. Of sizes, 0 and 1 never count."""
        return self.kind == "int" or (self.kind == "size" and len({size for size in self.values if size > 1}) > 1)


@dataclass(frozen=True)
class Recompile:
    """A function that was compiled again for one reason, on how many processes, and how often on one of them."""

    function: str
    """With file and line."""
    cause: Cause
    guard: str
    changes: tuple[Change, ...]
    seconds: float
    """Of the process that lost most by it; with the backward."""
    times: int = 1
    processes: int = 1
    is_last: bool = False
    """It was one too many, and the function ran uncompiled from there on."""


@dataclass(frozen=True)
class CacheUse:
    """How often one of torch's caches had no answer for a function."""

    function: str
    cache: str
    state: str
    reason: str
    count: int


_Use = tuple[str, str, str, str]


@dataclass
class Diagnosis:
    """What a job compiled. Seconds and counts are of the process that has most of each."""

    compilations: int = 0
    compiling_s: float = 0.0
    lost_s: float = 0.0
    recompiles: list[Recompile] = field(default_factory=list)
    graph_breaks: list[tuple[str, str]] = field(default_factory=list)
    """Where, and why."""
    cache_hits: int = 0
    caches: list[CacheUse] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    """Folders with torch's own traces."""
    given: list[str] = field(default_factory=list)
    """What torch had been told already."""

    @property
    def sources(self) -> list[str]:
        """What torch is to be told, in the words of the variable: each input that changes, and what it had been told.
        Empty if that would spare it nothing."""
        new = {source_entry(each.source, each.dim if each.takes_dim else None) for each in self._varying}
        return sorted({*new, *self.given}) if new else []

    @property
    def mark_dynamic(self) -> list[str]:
        """Lines of code in place of names that say too much: those that other functions have as well, or that torch
        made up where it broke a graph."""
        sizes = [each for each in self._varying if each.kind == "size"]
        narrow = [each for each in sizes if each.is_shared or "___" in each.source]
        return sorted({f"torch._dynamo.mark_dynamic({_expression(each.source)}, {each.dim})" for each in narrow})

    @property
    def _varying(self) -> list[Change]:
        return [change for each in self.recompiles for change in each.changes if change.varies]


def source_entry(name: str, dim: int | None = None) -> str:
    """An input in the words of the variable: a name that torch compares, or, where one of its characters would mean
    something else there, an expression that fits nothing but this name."""
    if not _IS_EXACT.fullmatch(name):
        name = "".join(f"\\x{ord(c):02x}" if c in " ,:" else re.escape(c) for c in name) + "$"
    return name if dim is None else f"{name}:{dim}"


def _expression(source: str) -> str:
    match = _ARGUMENT.fullmatch(source)
    return f"{match[1]}{match[2]}" if match and "___" not in source else "tensor"


# --- reading ---------------------------------------------------------------------------------------------------------


def diagnose(processes: Iterable[Iterable[Mark]]) -> Diagnosis:
    """What the marks of a job's processes tell."""
    total, by_reason, uses, breaks = Diagnosis(), dict[Any, Recompile](), Counter[_Use](), dict[Any, None]()
    for marks in processes:
        one = _Reading(marks)
        total.compilations = max(total.compilations, one.compilations)
        total.compiling_s = max(total.compiling_s, one.compiling_s)
        total.lost_s = max(total.lost_s, sum(each.seconds for each in one.recompiles.values()))
        total.cache_hits = max(total.cache_hits, one.hits)
        for key, each in one.recompiles.items():
            by_reason[key] = _on_another(by_reason[key], each) if key in by_reason else each
        uses |= one.uses
        breaks |= dict.fromkeys(one.breaks)
        total.traces += [folder for folder in one.traces if folder not in total.traces]
        total.given += [source for source in one.given if source not in total.given]
    total.recompiles = sorted(by_reason.values(), key=lambda each: (-each.seconds, each.function))
    total.caches = [CacheUse(*key, count) for key, count in uses.most_common()]
    total.graph_breaks = list(breaks)
    return total


class _Reading:
    """The marks of one process."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        self.compilations, self.compiling_s, self.hits = 0, 0.0, 0
        self.recompiles: dict[Any, Recompile] = {}
        self.uses = Counter[_Use]()
        self.breaks: list[tuple[str, str]] = []
        self.traces: list[str] = []
        self.given: list[str] = []
        self._changes: dict[str, dict[Any, Change]] = {}
        self._keys: dict[str, Any] = {}
        self._functions: dict[str, str] = {}
        asked: list[dict[str, Any]] = []
        for mark in marks:
            match mark.name:
                case Told.SOURCE_CHANGED:
                    self._changed(mark.attrs)
                case Told.COMPILED:
                    self._compiled(mark.attrs)
                case Told.COMPILED_BACKWARD:
                    self._backward(mark.attrs)
                case Told.GRAPH_CACHE:
                    asked.append(mark.attrs)
                case Told.GRAPH_BREAK:
                    self.breaks.append((str(mark.attrs.get("where", "?")), str(mark.attrs.get("reason", "?"))))
                case Told.COMPILE_SETTINGS:
                    self.traces += filter(None, [str(mark.attrs.get("trace", ""))])
                    self.given += filter(None, str(mark.attrs.get("sources", "")).replace(" ", "").split(","))
        for told in asked:
            self._asked(told)
        for number in list(self._changes):  # the process was killed before it could tell of the compilation itself
            self._again(number, {})

    def _changed(self, told: dict[str, Any]) -> None:
        values = (*told.get("seen", ()), told.get("now"))
        change = Change(
            str(told.get("source")), str(told.get("kind")), told.get("dim"), values,
            bool(told.get("elsewhere")), bool(told.get("dims")),
        )  # fmt: skip
        self._functions.setdefault(str(told.get("id")), str(told.get("function", "?")))
        # Where torch breaks a graph it begins the compilation anew, and compares once more.
        self._changes.setdefault(str(told.get("id")), {}).setdefault(change.what, change)

    def _compiled(self, told: dict[str, Any]) -> None:
        number = str(told.get("id"))
        self._functions[number] = str(told.get("function", "?"))
        self._keys.pop(number, None)  # after a reset, torch counts from 0 again
        self.compilations += not told.get("limit")
        self.compiling_s += told.get("seconds", 0.0)
        if told.get("reason"):
            self._again(number, told)
        self._changes.pop(number, None)

    def _again(self, number: str, told: dict[str, Any]) -> None:
        changes = tuple(self._changes.pop(number, {}).values())
        guard, function = str(told.get("reason", "")), self._functions.get(number, "?")
        cause = cause_of(guard, changes)
        what = tuple(each.what for each in changes) or re.sub(r"\d+", "", guard)
        key = self._keys[number] = (function, cause, what)
        new = Recompile(function, cause, guard, changes, told.get("seconds", 0.0), is_last=bool(told.get("limit")))
        old = self.recompiles.get(key)
        self.recompiles[key] = new if old is None else replace(
            new, changes=_united(old.changes, changes), seconds=old.seconds + new.seconds, times=old.times + 1
        )  # fmt: skip

    def _backward(self, told: dict[str, Any]) -> None:
        self.compiling_s += told.get("seconds", 0.0)
        if (key := self._keys.get(str(told.get("id")))) in self.recompiles:
            old = self.recompiles[key]
            self.recompiles[key] = replace(old, seconds=old.seconds + told.get("seconds", 0.0))

    def _asked(self, told: dict[str, Any]) -> None:
        if told.get("state") == "hit":
            self.hits += 1
            return
        function = self._functions.get(str(told.get("id")), "?")
        cache, state, reason = (str(told.get(word, "")) for word in ("cache", "state", "reason"))
        self.uses[function, cache, state, reason] += 1


def cause_of(guard: str, changes: Sequence[Change]) -> Cause:
    """Why a function was compiled again, by the guard that failed and by what is known to have changed."""
    kinds = {each.kind for each in changes}
    by_change = Cause.SIZE if "size" in kinds else Cause.VALUE if kinds & {"int", "float"} else Cause.OTHER
    cause = next((cause for cause, words in _GUARDS if re.search(words, guard)), by_change)
    sizes = [each for each in changes if each.kind == "size"]
    if cause is Cause.SIZE and sizes and not any(each.is_avoidable for each in sizes):
        return Cause.ZERO_ONE
    return cause


def _on_another(one: Recompile, other: Recompile) -> Recompile:
    """The same on two processes."""
    return replace(
        one,
        changes=_united(one.changes, other.changes),
        seconds=max(one.seconds, other.seconds),
        times=max(one.times, other.times),
        processes=one.processes + 1,
        is_last=one.is_last or other.is_last,
    )


def _united(one: tuple[Change, ...], other: tuple[Change, ...]) -> tuple[Change, ...]:
    """The same inputs, with all the values they had."""
    pairs = zip(one, other, strict=True)
    return tuple(replace(a, values=tuple(dict.fromkeys(a.values + b.values))) for a, b in pairs)
