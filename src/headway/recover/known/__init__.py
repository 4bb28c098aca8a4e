"""The messages headway knows. A rule is named `category.what`; where several match a line, the strongest counts, and of
equals the one that stands first.

Patterns are regular expressions, matched in any case, anywhere in a line, unless they are anchored. Gaps are bounded
(`.{0,60}`), so that the time a line takes is bounded too.
"""

from headway.recover.categories import CATEGORIES
from headway.recover.known.broad import BROAD, PROGRAM
from headway.recover.known.echoes import CASCADE, SENT, SIGNAL, SOFT, SUMMARY, VAGUE
from headway.recover.known.hardware import HARDWARE
from headway.recover.known.scheduler import SCHEDULER
from headway.recover.known.specific import SPECIFIC
from headway.recover.rules import Rule, Strength

_TABLES = {
    Strength.HARDWARE: HARDWARE,
    Strength.SCHEDULER: SCHEDULER,
    Strength.SPECIFIC: SPECIFIC,
    Strength.BROAD: BROAD,
    Strength.PROGRAM: PROGRAM,
    Strength.CASCADE: CASCADE,
    Strength.VAGUE: VAGUE,
    Strength.SUMMARY: SUMMARY,
    Strength.SENT: SENT,
    Strength.SIGNAL: SIGNAL,
    Strength.SOFT: SOFT,
}

RULES: tuple[Rule, ...] = tuple(
    Rule(f"{category}.{what}", CATEGORIES[category], patterns, strength)
    for strength, table in _TABLES.items()
    for category, known in table.items()
    for what, patterns in known.items()
)
