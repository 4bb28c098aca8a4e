"""What a failure was, and what to do about it.

In comes evidence: a rank's exit code, its last words, what kernel and scheduler said. Out comes a `Verdict`: one of 45
categories, whose fault that is, what to do, and the line that decided; and from that, a `Decision`. This room reads no
log by itself, starts nothing and retries nothing: the same evidence gives the same verdict everywhere.

    categories   what can go wrong, whose fault it is, and what is done about it
    evidence     what is known of one rank's failure
    rules        what a rule is, and how a user's own are read
    known        the messages headway knows
    log          which line of a log says most
    classify     from evidence to a verdict, of one rank and of many
    hang         which rank holds up a job that makes no progress
    policy       from a verdict, and what went before it, to a decision

Typical use::

    verdict = classify(Evidence(rank=3, exit_code=-6, stderr=last_lines, kernel=kernel_lines))
    print(verdict.category, verdict.action, verdict.line)
    first, verdict = Classifier().root_of(evidence_of_all_ranks)
"""

from headway.recover.categories import CATEGORIES, UNKNOWN
from headway.recover.classify import Classifier, Verdict, classify
from headway.recover.evidence import Evidence
from headway.recover.rules import load_rules

__all__ = ["CATEGORIES", "UNKNOWN", "Classifier", "Evidence", "Verdict", "classify", "load_rules"]
