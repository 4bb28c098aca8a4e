"""A job as a Chrome trace: open it in ui.perfetto.dev or chrome://tracing.

One process track for the job, with its attempts and what happened in them, then one for each rank: its time by bucket,
and under it every span as it was recorded, thread by thread. Times are microseconds since the job began, to the
nanosecond.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from headway.accounting.ledger import AttemptLedger, Ledger
from headway.accounting.rules import Bucket, Key, Part, bucket
from headway.events.vocabulary import Mark, Restored, Saved
from headway.observe.palette import LABELS, group

Event = dict[str, Any]

_CNAMES = {
    "start": "rail_response",
    "recover": "terrible",
    "training": "good",
    "waste": "bad",
    "shutdown": "grey",
    "unattributed": "generic_work",
}
"""chrome://tracing knows colours only by these names of its own; Perfetto chooses by a slice's name."""


class Stretch(NamedTuple):
    """A part of one rank's time, in job time."""

    attempt: int
    begin_ns: int
    end_ns: int
    key: Key


class Moment(NamedTuple):
    """Something that happened to the whole job, in job time."""

    t_ns: int
    what: str
    """`failed`, `saved` or `restored`."""
    text: str


def trace(ledger: Ledger) -> dict[str, Any]:
    """The whole job in the Trace Event Format, ready for `json.dump`."""
    ranks = ledger.ranks
    job_pid = ranks[-1] + 1
    events = _track(job_pid, 0, f"job {ledger.job}")
    events += _thread(job_pid, job_pid, 0, "attempts")
    events += [_slice(ledger, job_pid, job_pid, *_attempt_slice(attempt)) for attempt in ledger.attempts]
    tid = job_pid + 1
    events += _thread(job_pid, tid, 1, "events")
    for t_ns, what, text in moments(ledger):
        cname = {"cname": "terrible"} if what == "failed" else {}
        events.append(_instant(ledger, job_pid, tid, t_ns, text, {"what": what}) | cname)
    for rank in ranks:
        events += _rank_events(ledger, rank, tid + 1)
        tid = max(event["tid"] for event in events[-1:]) if False else _last_tid(events, tid)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"job": ledger.job, "state": ledger.state, "begin_unix_ns": str(ledger.begin_ns)},
    }
