"""One log, read once: which of its lines says most about the failure.

A line counts for what it says in its place: behind launchers' and log shippers' prefixes, as part of a traceback or of
a chain of them, as a warning that had no consequence, as the echo of what its rank had lost before.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import itemgetter

from headway.recover.categories import CATEGORIES, Category
from headway.recover.rules import Message, Rule, Strength


@dataclass(frozen=True)
class Match:
    """A line that a rule knows."""

    strength: Strength
    category: Category
    rule: str
    line: str
    number: int | None = None
    source: str = ""
    steps: int = 0
    """How many steps had been trained when the line came, as far as is known."""


_LONGEST = 4000
_SHOWN = 500
_TAIL_LINES = 20
"""A warning that so many lines follow had no consequence."""
_OUTLIVED_STEPS = 10
"""A line after which so many steps were trained is not why the job failed, except what devices and schedulers say."""
_OUTLIVED_NOTICES = 100
"""The same, for those: who gives notice lets training go on for a while."""
FINAL = ("disk_full", "quota_exceeded")
"""What no retry can help. It takes the exception itself or one of the last lines: a program may try again, or go on."""
_REMEMBERED = 20_000
"""Shapes of lines, and ranks, that a log is remembered by: a bound on memory."""

_ANSI = re.compile(r"(?:\x1b|#033)(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_PREFIX = re.compile(
    r"""\s*(?:
      \[rank\ ?(?P<rank>\d+)\]:? | \[\d+,(?P<mpi>\d+)\]<std\w+>:? | \[default(?P<default>\d+)\]:? | (?P<srun>\d+):(?=\ )
    | \([\w.:*]+\ (?:rank=\d+,\ )?pid=(?P<ray>\d+)[^)]{0,60}\)
    | \[?\d{4}[-/]\d\d[-/]\d\d[T\ ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?\]?
    | [A-Z][a-z]{2}\ +\d+\ \d\d:\d\d:\d\d\ \S+\ [\w./-]+(?:\[\d+\])?: | \[\ *\d+\.\d{4,}\] | std(?:out|err)\ [FP]\b
    | \[?(?:ERROR|CRITICAL|FATAL)\]?(?:\ *[:|-])? | [|│>]
    | (?![\w.]*(?:Error|Exception|Failed|Interrupt)\b)[\w.-]+:\ (?=[\w.]*(?:Error|Exception)\b)
    )""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"\d[\d.:,/%]{3,}|[▀-▟#=\s-]{3,}")
"""What makes like lines differ: times, steps, losses, bars. Short integers stay: they may be error numbers."""

_WARNING_CLASS = re.compile(r"\b\w+Warning\b")
_RETRIED = re.compile(
    r"\bINFO\b|\bDEBUG\b|(?i:\bretrying\b|\bwill (?:be )?retr\w+|\bretry(?: \d| in | loop|/)|\[retry \d"
    r"|attempt \d+ ?(?:of|/) ?\d+|falling back|\busing (?:the )?cpu\b|\bautotun|select_algorithm\.py"
    r"|\bignor(?:ed|ing)\b|\bskipping\b)"
)
_WARNING = re.compile(r"\bWARNING\b|\[W\d* ?|^\s*W\d{4} |: W tensorflow")
_HARMLESS = re.compile(
    r"OMP_NUM_THREADS|no eligible providers|NET/IB ?: ?No device|NET/(?:Plugin|OFI)?.{0,20}(?:No plugin|Failed to find)"
    r"|find_unused_parameters=True was specified|\b(?:if|when|in case|unless)\b.{0,30}\bpreempt|signal handler"
    r"|\bINFO\b.{0,80}(?:no error|success)|is not a failure|error resolved|^\s*(?:if|when|in case) you\b"
    r"|^\s*(?:usage:|-\w\b|--\w[\w-]+[ =])"  # a program's help
    r"|^\s*#(?! out of bounds values| ?\()"
    r"|^\s+(?:raise|except|assert|import|from|return|def|if|elif|with) ",  # its source
    re.IGNORECASE,
)
_FRAME = re.compile(r'\s*File "[^"]{1,400}", line \d+')
_OURSELVES = re.compile(r"headway: (?!cannot run )")
"""What headway says is no evidence, except that the program could not be started."""
_STEP = re.compile(r"\b(?:step|iter(?:ation)?|batch)s?\b[^\d\n]{0,12}(\d+)|\b(\d+)/\d+ \[[\d:]+<", re.IGNORECASE)
"""How programs count their steps: `step 12`, `iteration=12`, a progress bar."""
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_EXCEPTION = re.compile(
    r"\s{0,8}(?:[a-zA-Z_][\w]*\.){0,8}_?[A-Z]\w*(?:Error|Exception|Failure|Exceeded|Invalid|NotFound)(?::|\(|\s*$)"
)
_BUILTIN = re.compile(
    r"\b(?:Type|Value|Key|Attribute|Name|UnboundLocal|Index|Lookup|Assertion|NotImplemented|ZeroDivision|Overflow"
    r"|FileNotFound|FileExists|IsADirectory|NotADirectory|Permission|Recursion|Syntax|Indentation|UnicodeDecode"
    r"|UnicodeEncode|JSONDecode|Runtime)Error: \S|^\s*(?i:runtime error: )"
)
"""Python's own exceptions, which are told from prose behind any prefix."""
_ANY_EXCEPTION = re.compile(r"(?:[a-zA-Z_]\w*\.){0,8}_?[A-Z]\w*(?:: |:?\s*$)")
_WRAPPER = re.compile(
    r"ChildFailedError|ProcessRaisedException|ProcessExitedException|CalledProcessError|SystemExit|RayTaskError"
    r"|TrainingFailedError|SignalException|JobFailed|ActorError"
)
_PYTHON = Rule("python_error.exception", CATEGORIES["python_error"], (), Strength.PROGRAM)


class Book:
    """Rules, and which messages of theirs a line has to be tried with.

    A line is looked up by its runs of three characters: of the thousand words that messages need, most lines have none.
    """

    def __init__(self, rules: Iterable[Rule]) -> None:
        ranked = sorted(enumerate(rules), key=lambda item: (-item[1].strength, item[0]))
        entries = [(rank, rule, message) for rank, (_, rule) in enumerate(ranked) for message in rule.messages]
        common = Counter(gram for _, _, message in entries for word in message.words for gram in _grams(word))
        self._always = [entry for entry in entries if not entry[2].words]
        self._by_gram: dict[str, list[tuple[str, tuple[int, Rule, Message]]]] = {}
        for entry in entries:
            for word in entry[2].words:
                rarest = min(_grams(word), key=lambda gram: (common[gram], gram))
                self._by_gram.setdefault(rarest, []).append((word, entry))

    def best(self, line: str) -> Rule | None:
        """The strongest rule that matches a line; among equals the one that is first in the table."""
        lower = line.lower()
        tried = list(self._always)
        for gram in _grams(lower) & self._by_gram.keys():
            tried += [entry for word, entry in self._by_gram[gram] if word in lower]
        for _, rule, message in sorted(tried, key=itemgetter(0)):
            if message.regex.search(line):
                return rule
        return None


def _grams(text: str) -> set[str]:
    return {text[at : at + 3] for at in range(len(text) - 2)}


_STATES = {
    "preempted": "preempted", "timeout": "time_limit", "deadlineexceeded": "time_limit", "node_fail": "node_failure",
    "boot_fail": "node_failure", "cancelled": "cancelled", "evicted": "pod_evicted", "oomkilled": "host_oom",
    "out_of_memory": "host_oom", "nodelost": "node_failure", "terminated": "sigterm", "deadline": "time_limit",
}  # fmt: skip
"""One word from a scheduler is a reason; the same word in a program's log is none."""


class Log:
    """Reads a log once, in memory that does not grow with it."""

    def __init__(self, book: Book, states: bool = False, steps: Iterable[tuple[int, int]] = ()) -> None:
        """`steps` are pairs `(line, steps)`: the lines up to this one came before so many steps were trained. Without
        them, the step numbers that the lines themselves tell are counted."""
        self._book = book
        self._states = states
        self._known_steps = deque(steps)
        self._steps = self._step = 0
        self._best: Match | None = None
        self._soft: Match | None = None
        self._final: Match | None = None
        self._read = 0
        self._shapes: dict[str, Rule | None] = {}
        self._cut_off: set[str] = set()
        self._in_traceback: set[str] = set()
        self._chained: set[str] = set()
        self._in_frame: set[str] = set()

    def read(self, lines: Iterable[str]) -> "Log":
        """Takes all lines in."""
        begins = True  # a very long line may come in parts
        for line in lines:
            self._read += begins
            begins = line.endswith("\n")
            self._count_steps(line)
            if _TRACEBACK in line:
                line = line.replace("\\n", "\r")  # one that a JSON log holds in one line
            for piece in line.split("\r"):
                if piece and not piece.isspace():
                    self._take(piece.rstrip("\n"), self._read)
        return self

    def strongest(self, source: str) -> Match | None:
        """The match that decides, if there is any."""
        if self._known_steps:
            self._trained(self._known_steps[-1][1])
        late = [each for each in (self._final, self._soft) if each and self._read - (each.number or 0) <= _TAIL_LINES]
        found = max([each for each in (self._best, *late[:1]) if each], key=lambda each: each.strength, default=None)
        return replace(found, source=source) if found else None

    def _count_steps(self, line: str) -> None:
        if self._known_steps:
            while len(self._known_steps) > 1 and self._known_steps[0][0] < self._read:
                self._known_steps.popleft()
            self._trained(self._known_steps[0][1])
        elif (self._best or self._final) and (counted := _STEP.search(line)):
            step = int(counted[1] or counted[2])
            self._trained(self._steps + (step > self._step))
            self._step = step

    def _trained(self, steps: int) -> None:
        """Drop what so many steps were trained after that it cannot be the cause."""
        self._steps = steps
        if self._final and steps - self._final.steps >= _OUTLIVED_STEPS:
            self._final = None
        if self._best and steps - self._best.steps >= _outlived_after(self._best.strength):
            self._best = None
            self._cut_off.clear()

    def _take(self, piece: str, number: int) -> None:
        line = _ANSI.sub("", piece) if "\x1b" in piece or "#033" in piece else piece
        if len(line) > _LONGEST:
            line = f"{line[: _LONGEST * 3 // 4]} … {line[-_LONGEST // 4 :]}"
        rank, rest = _without_prefix(line)
        if _OURSELVES.match(rest):
            return
        if rest.startswith(_CHAINED):
            self._note(self._chained, rank)
            return
        if rest.startswith(_TRACEBACK):
            self._note(self._in_traceback, rank)
            return
        if self._is_code(rest, rank):
            return
        was_raised = rank in self._in_traceback
        rule = self._state(line) or self._rule_of(rest)
        if rule is None:
            rule = self._exception(rest, rank)
        elif _EXCEPTION.match(rest):
            self._end_traceback(rank)
        if rule:
            self._keep(rule, line, rank, number, was_raised)

    def _state(self, line: str) -> Rule | None:
        """The rule for a state, if it was a scheduler that said the word."""
        category = _STATES.get(line.strip().lower().split(" ")[0].rstrip("+")) if self._states else None
        return Rule(f"{category}.state", CATEGORIES[category], (), Strength.SCHEDULER) if category else None

    def _is_code(self, rest: str, rank: str) -> bool:
        """Whether a line is a traceback's: a file's name, or the program's own text, which may speak of any error."""
        if _FRAME.match(rest):
            self._note(self._in_frame, rank)
            return True
        is_code = rank in self._in_frame and rest[0].isspace()
        self._in_frame.discard(rank)
        return is_code

    def _rule_of(self, rest: str) -> Rule | None:
        """The rule for a line, which is that of the first line of its shape."""
        shape = _NUMBER.sub("0", rest)
        if shape not in self._shapes:
            if len(self._shapes) >= _REMEMBERED:
                self._shapes.clear()
            self._shapes[shape] = None if _HARMLESS.search(rest) else self._book.best(rest)
        return self._shapes[shape]

    def _exception(self, rest: str, rank: str) -> Rule | None:
        """The rule for uncaught exceptions, at the line that names one, unless it only passes on an earlier one."""
        unusual = rank in self._in_traceback and not rest[0].isspace() and _ANY_EXCEPTION.match(rest)
        if not (unusual or _EXCEPTION.match(rest) or ("rror: " in rest and _BUILTIN.search(rest))):
            return None
        passed_on = rank in self._chained or _WRAPPER.search(rest) or _WARNING_CLASS.match(rest)
        self._end_traceback(rank)
        return None if passed_on else _PYTHON

    def _end_traceback(self, rank: str) -> None:
        self._chained.discard(rank)
        self._in_traceback.discard(rank)

    def _keep(self, rule: Rule, line: str, rank: str, number: int, was_raised: bool) -> None:
        strength = _in_context(rule.strength, line)
        if strength == Strength.PROGRAM and rank in self._cut_off:
            return
        if strength in (Strength.CASCADE, Strength.VAGUE):
            self._note(self._cut_off, rank)
        match = Match(strength, rule.category, rule.name, line.strip()[:_SHOWN], number, steps=self._steps)
        if strength == Strength.SOFT:
            self._soft = match
        elif rule.category.name in FINAL and not was_raised and strength != Strength.OWN:
            self._final = match
        elif self._best is None or strength > self._best.strength:
            self._best = match

    @staticmethod
    def _note(ranks: set[str], rank: str) -> None:
        if len(ranks) < _REMEMBERED:
            ranks.add(rank)


def _without_prefix(line: str) -> tuple[str, str]:
    """Whose line it is, as far as the log says, and the line without what launchers and log shippers put before it."""
    rank, at = "", 0
    for _ in range(8):
        prefix = _PREFIX.match(line, at)
        if prefix is None:
            break
        rank = next((label for label in prefix.groupdict().values() if label), rank)
        at = prefix.end()
    rest = line[at:]
    return rank, (rest[1:] if at and rest.startswith(" ") else rest) or line


def _outlived_after(strength: Strength) -> int:
    return _OUTLIVED_NOTICES if strength >= Strength.SCHEDULER else _OUTLIVED_STEPS


def _in_context(strength: Strength, line: str) -> Strength:
    """A match's strength, given what the line says of itself: that it only warns, or that it will be tried again."""
    if strength in (Strength.OWN, Strength.SCHEDULER, Strength.SOFT):
        return strength
    warns = _WARNING_CLASS.search(line) or (strength < Strength.HARDWARE and _WARNING.search(line))
    return Strength.SOFT if warns or _RETRIED.search(line) else strength
