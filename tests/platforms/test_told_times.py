"""HEADWAY_ELIGIBLE and HEADWAY_ALLOCATED: what a platform we do not know, or a user, tells of the wait for hardware."""

import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from small_job import began_s, ledger, says_unknown, train

from headway.accounting.ledger import Ledger
from headway.accounting.rules import Bucket
from headway.events.scheduler import scheduled

S = 1_000_000_000


def iso(moment_s: float, hours: float = 0) -> str:
    """ISO 8601 with a zone that many hours ahead of UTC."""
    return datetime.fromtimestamp(moment_s, timezone(timedelta(hours=hours))).isoformat()


FORMS = {
    "seconds": str,
    "seconds and a fraction": lambda moment_s: f"{moment_s}.25",
    "iso in utc": iso,
    "iso with Z": lambda moment_s: datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    "iso in india": lambda moment_s: iso(moment_s, 5.5),
    "iso in hawaii": lambda moment_s: iso(moment_s, -10),
}


@pytest.mark.parametrize("form", FORMS)
def test_times_are_read_in_every_form(form: str) -> None:
    write, extra_ns = FORMS[form], S // 4 if "fraction" in form else 0
    known = scheduled({}, write(1794787200), write(1794787400), 7)
    assert known is not None
    assert known.eligible_wall_ns == 1794787200 * S + extra_ns
    assert known.allocated_wall_ns == 1794787400 * S + extra_ns


def test_told_times_are_in_the_ledger_to_the_nanosecond(home: Path) -> None:
    now, write = int(time.time()), FORMS["iso in india"]
    # The machine's own time zone must not matter.
    given = {"HEADWAY_ELIGIBLE": write(now - 300), "HEADWAY_ALLOCATED": write(now - 100), "TZ": "FAR-14"}
    assert train(home, cold=True, **given) == ""

    told = ledger()
    assert told.notes == []
    assert told.begin_ns == (now - 300) * S
    assert told.buckets[Bucket.START_SCHEDULING] == 200 * S
    assert told.buckets[Bucket.START_HARDWARE_SETUP] == start_ns(told) - (now - 100) * S
    assert start_ns(told) <= began_s(home) * S


UNREADABLE = {
    "2026-11-16T00:00:00": "no time zone",
    "2026-11-16": "no time zone",
    "20261116": "no time zone",
    "soon": "is not a time",
    "1e9": "is not a time",
    "-5": "is not a time",
    "1794787200000": "is not a time",
    "9" * 400: "is not a time",
    "2026-13-45T00:00:00+00:00": "is not a time",
    "\N{FIRE}": "is not a time",
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_time_that_cannot_be_read_is_refused_with_the_way_to_write_it(text: str) -> None:
    for eligible, allocated in ((text, ""), ("", text), (text, "1794787200"), ("1794787200", text)):
        with pytest.raises(ValueError, match=UNREADABLE[text]) as refused:
            scheduled({}, eligible, allocated, 0)
        assert str(refused.value).endswith("write it as seconds since 1970, or like 2026-04-17T09:30:00+00:00")
        assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("name", "text"),
    [("HEADWAY_ELIGIBLE", "2026-11-16T00:00:00"), ("HEADWAY_ALLOCATED", "9" * 400)],
    ids=["no zone", "long"],
)
def test_a_time_that_cannot_be_read_is_said_once_and_the_job_goes_on(home: Path, name: str, text: str) -> None:
    told_well = {"HEADWAY_ELIGIBLE": "1794787200", "HEADWAY_ALLOCATED": "1794787200"}
    [line] = train(home, **(told_well | {name: text})).splitlines()
    assert line.startswith("headway: HEADWAY_ELIGIBLE or HEADWAY_ALLOCATED cannot be read: ")
    assert "seconds since 1970, or like 2026-04-17T09:30:00+00:00" in line
    assert says_unknown(ledger())


def test_with_only_the_eligible_time_the_wait_is_known_as_a_whole(home: Path) -> None:
    now = int(time.time())
    assert train(home, HEADWAY_ELIGIBLE=str(now - 300)) == ""
    told = ledger()
    waited_ns = told.buckets[Bucket.START_SCHEDULING] + told.buckets[Bucket.START_HARDWARE_SETUP]
    assert told.begin_ns == (now - 300) * S
    assert waited_ns == start_ns(told) - told.begin_ns


def test_with_only_the_allocated_time_the_job_begins_with_its_hardware(home: Path) -> None:
    now = int(time.time())
    assert train(home, HEADWAY_ALLOCATED=str(now - 100)) == ""
    told = ledger()
    assert told.begin_ns == (now - 100) * S
    assert told.buckets[Bucket.START_SCHEDULING] == 0
    assert told.buckets[Bucket.START_HARDWARE_SETUP] == start_ns(told) - told.begin_ns


def test_hardware_before_the_job_was_eligible_means_no_wait(home: Path) -> None:
    now = int(time.time())
    known = scheduled({}, str(now - 100), str(now - 300), 0)
    assert known is not None
    assert known.eligible_wall_ns == known.allocated_wall_ns == (now - 100) * S
    assert train(home, HEADWAY_ELIGIBLE=str(now - 100), HEADWAY_ALLOCATED=str(now - 300)) == ""
    told = ledger()
    assert told.begin_ns == (now - 100) * S
    assert told.buckets[Bucket.START_SCHEDULING] == 0
    assert told.buckets[Bucket.START_HARDWARE_SETUP] == start_ns(told) - told.begin_ns


@pytest.mark.parametrize("eligible_in_s", [-100, 500])
def test_a_clock_that_runs_ahead_takes_no_more_than_the_wait(home: Path, eligible_in_s: int) -> None:
    now = int(time.time())
    assert train(home, HEADWAY_ELIGIBLE=str(now + eligible_in_s), HEADWAY_ALLOCATED=str(now + 1000)) == ""
    told = ledger()
    assert told.begin_ns == min(start_ns(told), (now + eligible_in_s) * S)
    assert told.buckets[Bucket.START_SCHEDULING] == start_ns(told) - told.begin_ns
    assert told.buckets[Bucket.START_HARDWARE_SETUP] == 0


def test_what_is_told_wins_over_what_the_platform_says(home: Path) -> None:
    now = int(time.time())
    (home / "bin").mkdir()
    (home / "bin" / "scontrol").write_text(f"#!/bin/sh\ntouch {home}/asked\n")
    (home / "bin" / "scontrol").chmod(0o755)
    train(home, HEADWAY_ELIGIBLE=str(now - 300), PATH=f"{home}/bin:/usr/bin:/bin", SLURM_JOB_ID="12")
    assert ledger("slurm-12").begin_ns == (now - 300) * S
    assert not (home / "asked").exists()


def start_ns(told: Ledger) -> int:
    """When the job's process started."""
    return told.attempts[0].attempt.first_start_ns
