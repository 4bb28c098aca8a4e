"""What a rule is: a pattern that a line of a log matches, and the category it speaks for."""

import re
import tomllib
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from headway.errors import InputError, nearest
from headway.recover.categories import CATEGORIES, Action, Category, Klass


class Strength(IntEnum):
    """How much a match says about the cause. The strongest match of a log decides; among equals the first line."""

    OWN = 100
    """A rule of the user's."""
    HARDWARE = 90
    """A device, its driver or a link names its own fault."""
    SCHEDULER = 80
    """Whoever ended the job says why."""
    SPECIFIC = 70
    """A message with one cause."""
    BROAD = 60
    """A message that often wraps a more specific one."""
    PROGRAM = 50
    """An uncaught exception or a crash. It counts unless the same rank had been cut off before."""
    CASCADE = 40
    """The echo of another rank's failure."""
    VAGUE = 35
    """A library says that something failed, and not what."""
    SIGNAL = 30
    """The bare end of a process. Whoever sent the signal may have had a reason."""
    SUMMARY = 20
    """A launcher's table of what its workers ended with."""
    SENT = 15
    """SIGTERM in such a table: mostly the launcher's own."""
    SOFT = 10
    """A warning, or an attempt that was to be repeated. It counts only at the end of a log, if nothing else does."""


class Message:
    """A pattern, and the words without one of which no line can match it; no words: every line is tried."""

    def __init__(self, pattern: str) -> None:
        self.regex = re.compile(pattern, re.IGNORECASE)
        self.words = needed_words(pattern)


@dataclass(frozen=True)
class Rule:
    """A line that matches one of the patterns, in any case, speaks for `category`."""

    name: str
    category: Category
    patterns: tuple[str, ...]
    strength: Strength = Strength.OWN
    messages: tuple[Message, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", tuple(map(Message, self.patterns)))


def needed_words(pattern: str) -> tuple[str, ...]:
    """Lower-case words of which every match of a pattern has one; empty if none can be told.

    They make rules cheap: most lines have none of a rule's words, and are never tried.
    """
    words = _Reader(pattern.lower()).alternatives()
    return tuple(dict.fromkeys(words)) if _worth(words) >= _SHORTEST else ()


_SHORTEST = 3
_OPTIONAL = re.compile(r"[?*]|\{(?:0|,)")
_REPEAT = re.compile(r"[?*+]\??|\{[\d,]+\}\??")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
_GROUP = re.compile(r"\((?:\?(?:<?[!=]|<?[a-z-]*:?|p<\w+>))?")


def _worth(words: list[str]) -> int:
    return min(map(len, words), default=0)


class _Reader:
    """Reads a pattern as far as its plain texts go."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def alternatives(self) -> list[str]:
        """One needed word for each alternative of the group that begins here; nothing if one has none."""
        words = [self._sequence()]
        while self.pattern.startswith("|", self.at):
            self.at += 1
            words.append(self._sequence())
        return [word for found in words for word in found] if all(words) else []

    def _sequence(self) -> list[str]:
        """The best words of one alternative: its longest plain text, or those of a group in it."""
        best: list[str] = []
        text = ""
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            plain, words = self._piece()
            if plain:
                text += plain
                words = [text]
            else:
                text = ""
            if _worth(words) > _worth(best):
                best = words
        return best

    def _piece(self) -> tuple[str, list[str]]:
        """One character that must be there, or the needed words of a group; neither if it may be absent."""
        pattern, begin = self.pattern, self.at
        words: list[str] = []
        plain = ""
        if group := _GROUP.match(pattern, begin):
            self.at = group.end()
            words = self.alternatives()
            self.at += 1
            if "!" in group[0] or "=" in group[0]:
                words = []
        elif bracket := _CLASS.match(pattern, begin):
            self.at = bracket.end()
        elif pattern[begin] == "\\":
            self.at += 2
            plain = "" if pattern[begin + 1].isalnum() else pattern[begin + 1]
        else:
            self.at += 1
            plain = "" if pattern[begin] in ".^$" else pattern[begin]
        optional = _OPTIONAL.match(pattern, self.at)
        if repeat := _REPEAT.match(pattern, self.at):
            self.at = repeat.end()
            # What is repeated ends a text: `ab+c` needs "ab", and "c", but not "abc".
            return "", [] if optional else (words or ([plain] if plain else []))
        return plain, words


def load_rules(path: str | Path) -> list[Rule]:
    """The rules of a TOML file: `[[rule]]` tables with name, category and pattern, and class and action for a category
    that headway does not have."""
    try:
        told = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"the failure rules {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the failure rules {path} are not TOML: {error}.") from error
    entries = told.get("rule", [])
    if set(told) - {"rule"} or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"the failure rules {path} are to be [[rule]] tables, and nothing else.")
    return [_rule(entry, f"rule {number} of {path}") for number, entry in enumerate(entries, 1)]


_REQUIRED = ("name", "category", "pattern")
_KEYS = (*_REQUIRED, "class", "action")
_Kind = TypeVar("_Kind", Klass, Action)


def _rule(entry: dict[str, object], where: str) -> Rule:
    for key, value in entry.items():
        if key not in _KEYS:
            raise InputError(f"{where} has an unknown key {key!r}: {nearest(key, _KEYS)}")
        if not isinstance(value, str):
            raise InputError(f"{where}: {key} is {value!r}, and is to be a text in quotes.")
    missing = [key for key in _REQUIRED if not entry.get(key)]
    if missing:
        raise InputError(f"{where} has no {' and no '.join(missing)}.")
    given = {key: str(value) for key, value in entry.items()}
    try:
        return Rule(given["name"], _category(given, where), (given["pattern"],))
    except re.error as error:
        raise InputError(f"{where} ({given['name']}): the pattern is no regular expression: {error}.") from error


def _category(given: dict[str, str], where: str) -> Category:
    name = given["category"]
    known = CATEGORIES.get(name)
    if known is None and not ("class" in given and "action" in given):
        hint = nearest(name, CATEGORIES)
        raise InputError(f"{where}: there is no category {name!r}: {hint} A new one needs class and action as well.")
    klass = _member(Klass, given.get("class", known.klass if known else ""), where)
    action = _member(Action, given.get("action", known.action if known else ""), where)
    return Category(name, klass, action, known.meaning if known else given["name"])


def _member(kind: type[_Kind], given: str, where: str) -> _Kind:
    try:
        return kind(given)
    except ValueError:
        what = kind.__name__.lower().replace("klass", "class")
        raise InputError(f"{where}: there is no {what} {given!r}: {nearest(given, list(kind))}") from None
