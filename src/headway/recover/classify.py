"""From evidence to a verdict: the strongest line decides, and the verdict names it.

A log ends with what is loudest, not with what came first: a GPU's memory error brings down a collective, that aborts
the process, and the launcher lists an exit code. So every rule has a strength, and the strongest match counts.
"""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from io import StringIO
from typing import Any

from headway.errors import InputError
from headway.recover.categories import CATEGORIES, UNKNOWN
from headway.recover.evidence import Evidence
from headway.recover.known import RULES
from headway.recover.log import FINAL, Book, Log, Match
from headway.recover.rules import Rule, Strength


@dataclass(frozen=True)
class Verdict:
    """What a failure is, and which line of which source says so."""

    category: str
    klass: str
    action: str
    rule: str = ""
    line: str = ""
    source: str = ""
    line_number: int | None = None


Ask = Callable[[Evidence], Verdict | None]


class Classifier:
    """headway's rules, after a user's own: `ask` is asked first, then `extra_rules` win over all that headway knows."""

    def __init__(self, extra_rules: Iterable[Rule] = (), ask: Ask | None = None) -> None:
        self._book = Book((*extra_rules, *RULES))
        self._ask = ask

    def classify(self, evidence: Evidence) -> Verdict:
        """What one rank's failure is."""
        if self._ask and (verdict := self._ask(evidence)):
            return verdict
        found = [match for source, lines in _texts(evidence) if (match := self._said(evidence, source, lines))]
        found += _circumstances(evidence)
        return _verdict(max(found, key=lambda match: match.strength, default=None))  # among equals, the first source

    def _said(self, evidence: Evidence, source: str, lines: Iterable[str]) -> Match | None:
        """Return the match of one source. A process killed by SIGKILL or SIGTERM did not fail on a full disk, and a
        rank that hangs did not lose its peer, whatever the finding says of other ranks."""
        is_stderr = source == "stderr"
        steps = _steps_by_line(evidence) if is_stderr else ()
        match = Log(self._book, states=source == "scheduler", steps=steps).read(lines).strongest(source)
        if match and source == "hang" and not match.category.name.startswith("collective_"):
            return None
        was_killed = _signal_of(evidence.exit_code) in (9, 15) and not evidence.exception
        return None if match and is_stderr and was_killed and match.category.name in FINAL else match

    def explain(self, log: str | Iterable[str]) -> Verdict:
        """What a log tells of a failure: `log` is a text, or lines as a file gives them, with their ends."""
        lines = _lines(log) if isinstance(log, str) else log
        return _verdict(Log(self._book).read(lines).strongest("log"))

    def is_effect(self, evidence: Evidence) -> bool:
        """Whether a rank's failure says itself that another's came first. A hang that was analysed is no effect."""
        return evidence.silent_s is None and _doubt(self.classify(evidence)) == 2

    def root_of(self, evidences: Sequence[Evidence]) -> tuple[Evidence, Verdict]:
        """The rank whose failure the others' follow from, and what it was."""
        told = [(evidence, self.classify(evidence)) for evidence in evidences]
        return min(told, key=lambda pair: (_doubt(pair[1]), pair[0].at_ns))


@cache
def _default() -> Classifier:
    return Classifier()


def classify(evidence: Evidence) -> Verdict:
    """What one rank's failure is, by headway's own rules."""
    return _default().classify(evidence)


def load_callable(name: str) -> Ask:
    """The function that `pkg.module:function` names."""
    module, _, attribute = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        raise InputError(f"{name!r} does not name a function: {error}. It is to be package.module:function.") from error
    if not callable(found):
        raise InputError(f"{name!r} is a {type(found).__name__}, and is to be a function of an Evidence.")
    ask: Ask = found
    return ask


# --- several ranks ---------------------------------------------------------------------------------------------------

_CUT_OFF = ("net_peer_lost", "collective_timeout")
_UNEXPLAINED = ("sigkill_unexplained", "sigabrt")


def _doubt(verdict: Verdict) -> int:
    """How likely a failure only follows from another rank's: 0 if it has a cause of its own, 1 if it has none that is
    known, 2 if it says itself that it was cut off, or was asked to end."""
    if verdict.category in _CUT_OFF or verdict.category == "sigterm":
        return 2
    return 1 if verdict.category in _UNEXPLAINED or not verdict.rule else 0


# --- one rank --------------------------------------------------------------------------------------------------------


def _verdict(match: Match | None) -> Verdict:
    if match is None:
        return Verdict(UNKNOWN.name, UNKNOWN.klass, UNKNOWN.action)
    kind = match.category
    return Verdict(kind.name, kind.klass, kind.action, match.rule, match.line, match.source, match.number)


def _lines(text: str) -> Iterator[str]:
    return StringIO(text, newline="\n")


def _texts(evidence: Evidence) -> Iterator[tuple[str, Iterator[str]]]:
    """The sources that are text, those first that stand nearest to the cause."""
    for source in ("kernel", "scheduler", "exception", "error_file", "stderr", "hang"):
        text: str = getattr(evidence, source)
        if text:
            yield source, _lines(_elastic_message(text) if source == "error_file" else text)


def _steps_by_line(evidence: Evidence) -> list[tuple[int, int]]:
    """Up to which line of stderr how many steps had been trained; empty if no step was seen."""
    if not evidence.steps:
        return []
    count = evidence.stderr.count("\n")
    return [*((count - left, steps) for left, steps in evidence.stderr_steps), (sys.maxsize, evidence.steps)]


def _elastic_message(text: str) -> str:
    """The message and the traceback in an error file of torch elastic; the text itself if it is none."""
    try:
        told = json.loads(text)["message"]
        return told if isinstance(told, str) else f"{told['extraInfo']['py_callstack']}\n{told['message']}"
    except (ValueError, KeyError, TypeError):
        return text


_BY_SIGNAL = {2: "cancelled", 6: "sigabrt", 7: "sigbus", 9: "sigkill_unexplained", 11: "segfault", 15: "sigterm"}


_READ_TO_ITS_END = re.compile(r"torch/serialization\.py(?:(?!Traceback).){0,2000}\nEOFError\s*$", re.S | re.M)
"""A file that ends before it begins, as one does whose writer was killed."""


def _circumstances(evidence: Evidence) -> list[Match]:
    """What is known besides texts: kills by the kernel, a hang, an exit code."""
    found = []
    signal = _signal_of(evidence.exit_code)
    if evidence.oom_kills > 0:
        strength = Strength.SPECIFIC if signal in (9, None) else Strength.BROAD
        line = f"the cgroup's oom_kill counter rose by {evidence.oom_kills}"
        found.append(Match(strength, CATEGORIES["host_oom"], "host_oom.counter", line, source="oom_kills"))
    if _READ_TO_ITS_END.search(evidence.exception or evidence.stderr):
        kind = CATEGORIES["checkpoint_corrupt"]
        found.append(
            Match(Strength.BROAD, kind, "checkpoint_corrupt.empty", "EOFError, in torch.load", source="exception")
        )
    if evidence.silent_s is not None:
        line = f"no progress for {evidence.silent_s:.0f} s"
        kind = CATEGORIES["collective_timeout"]
        found.append(Match(Strength.CASCADE, kind, "collective_timeout.silence", line, source="silent_s"))
    if signal in _BY_SIGNAL:
        kind = CATEGORIES[_BY_SIGNAL[signal]]
        line = f"exit code {evidence.exit_code}"
        found.append(Match(Strength.SUMMARY, kind, f"{kind.name}.exit_code", line, source="exit_code"))
    return found


def _signal_of(exit_code: int | None) -> int | None:
    """The signal in an exit code, as `subprocess` (-9) or a shell (137) has it."""
    if exit_code is None:
        return None
    return -exit_code if exit_code < 0 else exit_code - 128 if 128 < exit_code < 160 else 0
