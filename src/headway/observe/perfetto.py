"""A job as a Chrome trace: open it in ui.perfetto.dev or chrome://tracing.

One process track for the job, with its attempts and what happened in them, then one for each rank: its time by bucket,
and under it every span as it was recorded, thread by thread; last, one for each publication, whose time is no part of
the job's. Times are microseconds since the job began, to the nanosecond.

Typical use::

    Path("job.json").write_text(json.dumps(perfetto.trace(ledger)))
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from headway.accounting.ledger import AttemptLedger, Ledger
from headway.accounting.publishing import Publication
from headway.accounting.rules import Bucket, Key
from headway.accounting.timeline import Timeline
from headway.observe.palette import group, who_failed

Bar = tuple[str, int, int, int]

_CNAMES = {
    "start": "rail_response",
    "recover": "terrible",
    "training": "good",
    "waste": "bad",
    "shutdown": "grey",
    "unattributed": "generic_work",
}
"""chrome://tracing knows colours only by names of its own; Perfetto goes by the slice's name."""


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
    drawn = _Drawing(ledger)
    drawn.job()
    for rank in ledger.ranks:
        drawn.rank(rank)
    for at, publication in enumerate(ledger.publications, 1):
        drawn.publication(at, publication)
    about = {"job": ledger.job, "state": ledger.state, "begin_unix_ns": str(ledger.begin_ns)}
    return {"traceEvents": drawn.events, "displayTimeUnit": "ns", "otherData": about}


def rank_stretches(ledger: Ledger, rank: int) -> list[Stretch]:
    """All of a rank's time in order, over all attempts: what `Ledger.rank_sums` adds up, as it happened."""
    stretches: list[Stretch] = []
    for attempt in ledger.attempts:
        number, begin, end = attempt.attempt.number, attempt.attempt.begin_ns, attempt.attempt.end_ns
        if rank in attempt.views:
            stretches += [Stretch(number, *piece) for piece in attempt.views[rank].pieces()]
        elif rank < attempt.attempt.world_size and begin < end:
            stretches.append(Stretch(number, begin, end, (Bucket.UNATTRIBUTED, "")))
    return stretches


def rank_nodes(ledger: Ledger, rank: int) -> str:
    """Where a rank ran: the nodes of its attempts in order, each once; empty if it left no journal."""
    views = [attempt.views[rank] for attempt in ledger.attempts if rank in attempt.views]
    return ", ".join(dict.fromkeys(view.member.process.node for view in views))


def attempt_title(attempt: AttemptLedger) -> str:
    """An attempt's number and how it ended."""
    on = f" on {who_failed(attempt.attempt.failed_rank)}" if attempt.attempt.failed else ""
    return f"attempt {attempt.attempt.number} ({attempt.outcome}{on})"


def moments(ledger: Ledger) -> list[Moment]:
    """Failures and checkpoints in order; a checkpoint once, when the last rank told of it."""
    found: list[Moment] = []
    causes = {failure["attempt"]: failure["category"] for failure in ledger.failures}
    for attempt in ledger.attempts:
        checkpoints: dict[tuple[str, int], int] = {}
        for view in attempt.views.values():
            for t_ns, what, step in view.member.checkpoints:
                checkpoints[what, step] = max(checkpoints.get((what, step), 0), t_ns)
        found += [Moment(t_ns, what, f"checkpoint {what}: step {step}") for (what, step), t_ns in checkpoints.items()]
        if attempt.attempt.failed:
            cause = causes.get(attempt.attempt.number)
            rank = attempt.attempt.failed_rank
            at_ns = attempt.attempt.end_ns if rank is None else attempt.attempt.stopped_ns
            found.append(Moment(at_ns, "failed", f"{who_failed(rank)} failed" + (f": {cause}" if cause else "")))
    return sorted(found)


class _Drawing:
    """Collects events. Thread numbers are unique in the whole trace, and none is a process number by accident."""

    def __init__(self, ledger: Ledger) -> None:
        self.events: list[dict[str, Any]] = []
        self._ledger = ledger
        self._job_pid = ledger.ranks[-1] + 1
        self._next_tid = self._job_pid + len(ledger.publications) + bool(ledger.publications)

    def job(self) -> None:
        pid = self._job_pid
        self._name_process(pid, 0, f"job {self._ledger.job}")
        tid = self._thread(pid, "attempts")
        for attempt in self._ledger.attempts:
            begin, end = attempt.attempt.begin_ns, attempt.attempt.end_ns
            args = {"outcome": attempt.outcome, "world_size": attempt.attempt.world_size}
            ranks = {"critical_rank": attempt.critical_rank, "slowest_rank": attempt.held_up_by}
            self._slice(pid, tid, attempt_title(attempt), begin, end, args | ranks, "grey")
        tid = self._thread(pid, "events")
        for moment in moments(self._ledger):
            self._instant(pid, tid, "t", moment.text, moment.t_ns, {"what": moment.what})

    def rank(self, rank: int) -> None:
        node = rank_nodes(self._ledger, rank)
        self._name_process(rank, rank + 1, f"rank {rank} ({node or 'no journal'})")
        tid = self._thread(rank, "time by bucket")
        for stretch in rank_stretches(self._ledger, rank):
            key, stage = stretch.key
            name = f"{key} ({stage})" if stage else str(key)
            args = {"bucket": str(key), "stage": str(stage), "attempt": stretch.attempt}
            self._slice(rank, tid, name, stretch.begin_ns, stretch.end_ns, args, _CNAMES[group(key)])
        attempts = self._ledger.attempts
        self._spans(rank, [each.views[rank].bars() for each in attempts if rank in each.views])
        for attempt in self._ledger.attempts:
            if rank not in attempt.views:
                continue
            member = attempt.views[rank].member
            self._marks(rank, tid, member.timeline, member.offset_ns)

    def publication(self, at: int, publication: Publication) -> None:
        pid, step = self._job_pid + at, "" if publication.step is None else f" of step {publication.step}"
        nodes = ", ".join(dict.fromkeys(each.node for each in publication.tries))
        self._name_process(pid, self._job_pid + at, f"publisher{step} ({nodes or 'not begun'})")
        tid = self._thread(pid, "tries")
        for number, each in enumerate(publication.tries, 1):
            name = f"try {number}" if each is not publication.tries[-1] else f"try {number} ({publication.outcome})"
            self._slice(pid, tid, name, each.begin_ns, each.end_ns, {"id": publication.id, "node": each.node})
            self._marks(pid, tid, each.timeline, each.offset_ns)
        self._spans(pid, [each.bars for each in publication.tries])

    def _spans(self, pid: int, runs: list[list[Bar]]) -> None:
        for name, bars in _span_tracks(runs):
            tid = self._thread(pid, name)
            for what, _, begin, end in bars:
                self._slice(pid, tid, what, begin, end, {})

    def _marks(self, pid: int, tid: int, timeline: Timeline, offset_ns: int) -> None:
        for mark in timeline.marks:
            args = {str(key): str(value) for key, value in mark.attrs.items()}
            self._instant(pid, tid, "p", mark.name, mark.t_ns + offset_ns, args)

    def _name_process(self, pid: int, place: int, name: str) -> None:
        self._about(pid, self._next_tid, "process_name", {"name": name})
        self._about(pid, self._next_tid, "process_sort_index", {"sort_index": place})

    def _thread(self, pid: int, name: str) -> int:
        tid = self._next_tid
        self._next_tid += 1
        self._about(pid, tid, "thread_name", {"name": name})
        self._about(pid, tid, "thread_sort_index", {"sort_index": tid})
        return tid

    def _about(self, pid: int, tid: int, name: str, args: dict[str, Any]) -> None:
        self.events.append({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args})

    def _slice(
        self, pid: int, tid: int, name: str, begin_ns: int, end_ns: int, args: dict[str, Any], cname: str = ""
    ) -> None:
        begin, end = self._since_begin(begin_ns), self._since_begin(end_ns)
        event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin / 1000, "dur": (end - begin) / 1000}
        self.events.append(event | {"args": args} | ({"cname": cname} if cname else {}))

    def _instant(self, pid: int, tid: int, scope: str, name: str, t_ns: int, args: dict[str, Any]) -> None:
        ts = self._since_begin(t_ns) / 1000
        self.events.append({"ph": "i", "s": scope, "name": name, "pid": pid, "tid": tid, "ts": ts, "args": args})

    def _since_begin(self, t_ns: int) -> int:
        return max(t_ns - self._ledger.begin_ns, 0)


def _span_tracks(runs: list[list[Bar]]) -> Iterable[tuple[str, list[Bar]]]:
    """Spans by recording thread. Each run's n-th thread shares a track with the n-th of the others."""
    threads: list[list[Bar]] = []
    for run in runs:
        bars = sorted(run, key=lambda bar: bar[2])
        places = {thread: place for place, thread in enumerate(dict.fromkeys(bar[1] for bar in bars))}
        threads += [[] for _ in range(len(places) - len(threads))]
        for bar in bars:
            threads[places[bar[1]]].append(bar)
    for place, bars in enumerate(threads):
        name = "spans" if place == 0 else f"spans, thread {place + 1}"
        for lane, nested in enumerate(_nested(bars)):
            yield name if lane == 0 else f"{name}, overlapping", nested


def _nested(bars: list[Bar]) -> list[list[Bar]]:
    """The bars on as few tracks as it takes for those of one track to nest: viewers drop slices that cross."""
    tracks: list[list[Bar]] = []
    open_ends: list[list[int]] = []
    for bar in sorted(bars, key=lambda bar: (bar[2], -bar[3])):
        _, _, begin, end = bar
        for ends in open_ends:
            while ends and ends[-1] <= begin:
                ends.pop()
        place = next((at for at, ends in enumerate(open_ends) if not ends or end <= ends[-1]), len(tracks))
        if place == len(tracks):
            tracks.append([])
            open_ends.append([])
        open_ends[place].append(end)
        tracks[place].append(bar)
    return tracks
