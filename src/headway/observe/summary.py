"""The report as plain data: what `--json` prints and every other renderer shows."""

from typing import Any

from headway.accounting.advice import advise
from headway.accounting.ledger import AttemptLedger, Ledger, by_bucket, by_stage, percent
from headway.accounting.publishing import Publication
from headway.accounting.rules import Bucket
from headway.accounting.view import Sums
from headway.accounting.waterfall import Leg, Row, Waterfall


def summary(
    ledger: Ledger, attempt: int | None = None, rank: int | None = None, *, rank_ledgers: bool = True
) -> dict[str, Any]:
    """A ledger as JSON-ready data, times in seconds; `ledger`, `stages`, `startups` and percentages of one attempt or
    rank.

    Without `rank_ledgers` the ranks are only named, and of start-ups the longest is told: for thousands of ranks, all
    else takes as long as the rest.
    """
    sums = ledger.select(attempt, rank)
    buckets = by_bucket(sums)
    ett, idleness, failure = percent(buckets)
    steps = ledger.steps
    return {
        "job": ledger.job,
        "state": ledger.state,
        "begin": ledger.begin_ns / 1e9,
        "wall_s": seconds(sum(sums.values())),
        "ett_percent": ett,
        "idleness_percent": idleness,
        "failure_percent": failure,
        "time_to_start_s": seconds(ledger.time_to_start_ns),
        "time_to_recover_s": [seconds(ns) for ns in ledger.times_to_recover_ns],
        "failures": ledger.failures,
        "attempts": [_attempt(ledger, attempt) for attempt in ledger.attempts],
        "ranks": [rank_summary(ledger, each) if rank_ledgers else {"rank": each} for each in ledger.ranks],
        "ledger": {str(key): seconds(ns) for key, ns in buckets.items()},
        "stages": {stage: seconds(ns) for stage, ns in by_stage(sums).items()},
        "startups": [_startup(ledger, each, rank) for each in _starts(ledger, attempt, longest=not rank_ledgers)],
        "rollout_s": seconds(ledger.rollout_ns),
        "unattributed_s": seconds(buckets[Bucket.UNATTRIBUTED]),
        "steps": {
            "new": round(steps[Bucket.TRAINING_EFFECTIVE], 3),
            "repeated": round(steps[Bucket.WASTE_REPEATED_STEPS], 3),
            "unsaved": round(steps[Bucket.WASTE_UNSAVED_STEPS], 3),
        },
        "slowest_rank": ledger.slowest_rank,
        "publications": [_publication(ledger, each) for each in ledger.publications],
        "advice": [vars(advice) for advice in advise(ledger)],
        "notes": [*ledger.notes, *(note for each in ledger.slowest_starts for note in each.notes())],
    }


def rank_summary(ledger: Ledger, rank: int) -> dict[str, Any]:
    """One rank's account; buckets without time are left out."""
    sums = ledger.rank_sums(rank)
    views = [attempt.views[rank] for attempt in ledger.attempts if rank in attempt.views]
    return {
        "rank": rank,
        "node": views[-1].member.process.node if views else None,
        "wall_s": seconds(sum(sums.values())),
        "ett_percent": percent(by_bucket(sums))[0],
        "ledger": _shown(sums),
    }


def _attempt(ledger: Ledger, account: AttemptLedger) -> dict[str, Any]:
    attempt = account.attempt
    stints = attempt.stints
    return {
        "attempt": attempt.number,
        "outcome": account.outcome,
        "begin_s": seconds(attempt.begin_ns - ledger.begin_ns),
        "wall_s": seconds(account.wall_ns),
        "world_size": attempt.world_size,
        "missing_ranks": sorted(set(range(attempt.world_size)) - set(attempt.members)),
        "first_step": stints[0].first if stints else None,
        "next_step": stints[-1].next if stints else None,
        "critical_rank": account.critical_rank,
        "slowest_rank": account.held_up_by,
        "error": _error(account),
        "ledger": _shown(account.sums),
    }


def _starts(ledger: Ledger, attempt: int | None, longest: bool) -> list[Waterfall]:
    found = [each for each in ledger.waterfalls if attempt in (None, each.attempt)]
    return [max(found, key=lambda each: each.wall_ns)] if found and longest else found


def _startup(ledger: Ledger, waterfall: Waterfall, rank: int | None) -> dict[str, Any]:
    """How the ranks of an attempt started, with the stages of one of them: else of the one that held up the start."""
    shown = waterfall.rank if rank not in waterfall.runs else rank
    critical = {(leg.rank, leg.stage) for leg in waterfall.path}
    begin_ns = waterfall.begin_ns
    return {
        "attempt": waterfall.attempt,
        "rank": shown,
        "ranks": len(waterfall.runs),
        "serial": waterfall.is_serial,
        "begin_s": seconds(begin_ns - ledger.attempts[waterfall.attempt].attempt.begin_ns),
        "wall_s": seconds(waterfall.wall_ns),
        "busy_s": seconds(waterfall.busy_ns),
        "serial_s": seconds(waterfall.serial_ns) if not waterfall.failed else None,
        "saved_s": seconds(waterfall.saved_ns),
        "could_save_s": seconds(waterfall.could_save_ns),
        "uncontended": waterfall.is_serial or waterfall.uncontended is not None,
        "failed": [{"rank": rank, "stage": name} for rank, name in waterfall.failed],
        "critical_path": [_leg(leg) for leg in waterfall.path],
        "stages": [
            _stage(row, begin_ns) | {"critical": (shown, row.stage.name) in critical} for row in waterfall.rows(shown)
        ],
    }


def _leg(leg: Leg) -> dict[str, Any]:
    return {"rank": leg.rank, "stage": leg.stage or None, "gap": leg.gap or None, "seconds": seconds(leg.took_ns)}


def _stage(row: Row, since_ns: int) -> dict[str, Any]:
    return {
        **row.stage._asdict(),
        "begin_s": seconds(row.begin_ns - since_ns),
        "end_s": seconds(row.end_ns - since_ns),
        "cpu_s": row.cpu_s,
        "failed": row.failed,
        "cancelled": row.cancelled,
        "after": row.after or None,
        "last_rank": row.last_rank,
    }


def _publication(ledger: Ledger, publication: Publication) -> dict[str, Any]:
    begin_ns = publication.begin_ns
    told = ("id", "step", "recipe", "to", "runner", "submitted", "outcome", "version", "why", "handover_s", "steps")
    return {key: getattr(publication, key) for key in told} | {
        "tries": len(publication.tries),
        "begin_s": None if begin_ns is None else seconds(begin_ns - ledger.begin_ns),
        "seconds": seconds(publication.took_ns),
        "accelerators": publication.accelerators,
        "device": publication.device,
        "saved_accelerator_s": seconds(publication.saved_ns),
    }


def _error(account: AttemptLedger) -> str | None:
    attempt = account.attempt
    if not attempt.failed:
        return None
    code, error = attempt.exit_code, None
    if attempt.failed_rank is not None:
        member = attempt.members[attempt.failed_rank]
        code = member.gone.exit_code if member.gone else None
        error = member.timeline.ended.error if member.timeline.ended else None
    return error or (f"exit code {code}" if code and code > 0 else None)


def _shown(sums: Sums) -> dict[str, float]:
    return {str(key): seconds(ns) for key, ns in by_bucket(sums).items() if ns}


def seconds(ns: int) -> float:
    """Nanoseconds as seconds, none of them lost."""
    return ns / 1e9
