"""One run at a time writes to a root."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headway.checkpoint import lease
from headway.checkpoint.lease import Owner, Taken, claim, holder, holds, refresh, release
from headway.storage import Storage, open_storage

NOW_NS = 10**18


def an_owner(session: str, job: str = "", **more: object) -> Owner:
    """A run on another machine, of which only its word is known."""
    found = Owner(session=session, job=job, node="elsewhere", boot="another boot", pid=1, started=1)
    return replace(found, **more)  # type: ignore[arg-type]


def at(seconds: float) -> int:
    return NOW_NS + int(seconds * 1e9)


def claimed(storage: Storage, owner: Owner, seconds: float) -> Owner | None:
    return claim(storage, owner, lambda: at(seconds))


def test_an_empty_root_is_free_and_then_taken(anywhere: Storage) -> None:
    assert claim(anywhere, an_owner("one")) is None
    found = holder(anywhere)
    assert found is not None
    assert found.session == "one"
    assert holds(anywhere, "one")
    assert not holds(anywhere, "two")


def test_another_job_is_refused_and_told_who_writes_there_and_what_to_do(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    claimed(storage, an_owner("one", "llama", pid=4711), 0)
    with pytest.raises(Taken, match=r"job llama on elsewhere \(process 4711\).*heard of 12 s ago.*another folder"):
        claimed(storage, an_owner("two", "other"), 12)
    assert holds(storage, "one"), "who was refused has changed nothing"


def test_jobs_without_a_name_are_not_the_same_job(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    claimed(storage, an_owner("one", ""), 0)
    with pytest.raises(Taken):
        claimed(storage, an_owner("two", ""), 1)


def test_a_later_attempt_of_the_same_job_follows_and_learns_whom(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    claimed(storage, an_owner("one", "llama"), 0)
    former = claimed(storage, an_owner("two", "llama"), 1)
    assert former is not None
    assert former.session == "one"
    assert not holds(storage, "one"), "the first must not commit any more"


def test_a_job_that_was_not_heard_of_for_long_is_followed_and_one_that_was_is_not(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    claimed(storage, an_owner("one", "llama"), 0)
    refresh(storage, an_owner("one", "llama"), lambda: at(60))
    with pytest.raises(Taken):
        claimed(storage, an_owner("two", "other"), 60 + lease.STALE_S - 1)
    former = claimed(storage, an_owner("two", "other"), 60 + lease.STALE_S + 1)
    assert former is not None
    assert former.session == "one"


def test_owners_say_so_often_enough_that_a_missed_word_is_no_death() -> None:
    assert lease.REFRESH_S * 3 < lease.STALE_S


def test_a_process_of_this_machine_that_has_ended_is_followed_at_once(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    code = (
        "import sys; from headway.checkpoint.lease import Owner, claim; "
        "from headway.storage import open_storage; "
        "claim(open_storage(sys.argv[1]), Owner.this('one', 'llama', 'here'))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    former = claim(storage, Owner.this("two", "other", "here"))
    assert former is not None
    assert former.job == "llama"
    assert former.is_dead()


def test_a_process_that_lives_is_not_taken_for_dead_and_one_that_reuses_its_number_is_not_taken_for_it() -> None:
    this = Owner.this("one", "job", "here")
    assert not this.is_dead()
    assert replace(this, started=this.started - 1).is_dead()
    assert not replace(this, boot="another boot").is_dead(), "nothing is known about processes of another machine"
    assert this.pid == os.getpid()


def test_whoever_leaves_gives_the_root_back_and_only_what_is_its_own(anywhere: Storage) -> None:
    claim(anywhere, an_owner("one"))
    release(anywhere, "two")
    assert holds(anywhere, "one")
    release(anywhere, "one")
    assert not holds(anywhere, "one"), "who has left commits nothing more"
    assert claim(anywhere, an_owner("three")) is None, "nobody is said to have died"
    assert holds(anywhere, "three")


@pytest.mark.parametrize("text", [b"", b"{}", b"not json", b'{"session": 1}', b"[]"])
def test_an_unreadable_word_is_nobodys(tmp_path: Path, text: bytes) -> None:
    storage = open_storage(tmp_path)
    storage.write(".headway/owner.json", text)
    assert holder(storage) is None
    assert claim(storage, an_owner("one")) is None


def test_of_two_that_come_at_the_same_instant_the_first_gives_way(tmp_path: Path) -> None:
    """The other one writes its word between our writing and our looking again."""
    storage = open_storage(tmp_path)
    clock = iter([at(0), at(0)])

    def now() -> int:
        return next(clock)

    class Raced(type(storage)):  # type: ignore[misc]
        def write(self, name: str, data: bytes) -> None:
            super().write(name, data)
            refresh(storage, an_owner("two", "other"), lambda: at(0))

    with pytest.raises(Taken, match="at this moment"):
        claim(Raced(tmp_path), an_owner("one", "llama"), now)
    assert holds(storage, "two")
