"""Two jobs never mix their checkpoints: the second one is refused, and whoever was taken over from commits no more."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trainers
from keeping import keepers
from trainers import Counting, Notes, Process, fork, is_equal, loaded, newest, state_at, wait_for

from headway import Checkpointer
from headway.checkpoint import SaveFailed, lease, link
from headway.checkpoint.layout import LATEST, OWNER
from headway.checkpoint.lease import STALE_S, Owner, Taken, claim, holder, holds, release
from headway.errors import InputError
from headway.events.clock import living_ticks
from headway.storage import Storage, open_storage

S = 10**9
SMALL: dict[str, Any] = {"length": 100, "tensors": 2}


@pytest.fixture(autouse=True, scope="session")
def _warm() -> None:
    trainers.warm_up()


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "root")


def owner(session: str, job: str = "", pid: int | None = None, boot: str = "another machine") -> Owner:
    """A run on another machine, unless one says otherwise."""
    if pid is None:
        return Owner(session=session, job=job or session, node="there", boot=boot, pid=1, started=1)
    return replace(Owner.this(session, job or session, "here"), pid=pid)


# --- whoever comes second --------------------------------------------------------------------------------------------


def train(root: str, notes: Path, patience_s: float = 15.0, die_after: int = -1) -> None:
    """Saves every step, and says what it was told. Dies after a step, when nothing is being saved."""
    link.HANDOVER_S, link.SLOW_S = patience_s, trainers.PATIENCE_S  # a slow machine gets no message
    tell = Notes(notes)
    model = Counting(**SMALL)
    try:
        checkpointer = Checkpointer(root, model=model, interval=None)
    except Taken as error:
        tell.add("refused", 0, more=str(error))
        return
    restored = checkpointer.restore()
    tell.add("restored", checkpointer.step, more=restored.tier if restored else "")
    step = checkpointer.step
    while True:
        model.train_step()
        step += 1
        checkpointer.save(step, wait=True)
        tell.add("saved", step)
        if step == die_after:
            os.kill(os.getpid(), signal.SIGKILL)


def saves_on(process: Process, notes: Notes) -> int:
    """Waits until it has saved twice more; the step."""
    before = len(notes.read("saved"))
    wait_for(lambda: len(notes.read("saved")) >= before + 2, process)
    return notes.read("saved")[-1][0]


def test_a_second_job_is_refused_and_the_first_goes_on(root: Path, home: Path) -> None:
    first, second = Notes(home / "first"), Notes(home / "second")
    alive = fork(train, home, str(root), first.path, HEADWAY_JOB="alpha")
    try:
        saves_on(alive, first)
        refused = fork(train, home, str(root), second.path, 0.5, HEADWAY_JOB="beta")
        refused.join()
        assert refused.exitcode == 0
        assert second.read("refused") == [(0, 0)]
        told = second.path.read_text()
        assert f"job alpha (process {alive.pid}) writes checkpoints to {root}" in told
        assert "Choose another folder" in told
        step = saves_on(alive, first)
    finally:
        alive.kill()
        alive.join()
    found = newest(root)
    assert found
    assert found.step is not None
    assert found.step >= step
    assert is_equal(loaded(root / found.name, **SMALL), state_at(found.step, **SMALL))


def test_after_a_kill_another_job_takes_over_at_once_and_hears_of_nothing(root: Path, home: Path) -> None:
    first, second = Notes(home / "first"), Notes(home / "second")
    killed = fork(train, home, str(root), first.path, 15.0, 2, HEADWAY_JOB="alpha")
    killed.join(trainers.PATIENCE_S)
    assert killed.exitcode == -signal.SIGKILL
    (home / "said").unlink()
    follows = fork(train, home, str(root), second.path, HEADWAY_JOB="beta")
    try:
        saves_on(follows, second)
    finally:
        follows.kill()
        follows.join()
    assert second.read("restored")[0][0] >= first.read("saved")[-1][0]
    assert second.read("refused") == []
    said = (home / "said").read_text().splitlines()
    assert all(line.startswith("headway: checkpoints (") for line in said), said


# --- who holds a root ------------------------------------------------------------------------------------------------


def test_a_run_on_another_machine_is_respected_until_it_is_silent_for_long(storage: Storage) -> None:
    claim(storage, owner("first"), lambda: 1000 * S)
    just_before = 1000 + STALE_S - 1
    with pytest.raises(Taken, match=r"job first on there \(process 1\) .* heard of 89 s ago: two jobs would mix"):
        claim(storage, owner("second"), lambda: int(just_before * S))
    assert holds(storage, "first")
    former = claim(storage, owner("second"), lambda: int((just_before + 2) * S))
    assert former
    assert former.session == "first"
    assert holds(storage, "second")
    assert not holds(storage, "first")


def test_a_sign_of_life_counts(storage: Storage) -> None:
    claim(storage, owner("first"), lambda: 1000 * S)
    lease.refresh(storage, owner("first"), lambda: 1080 * S)
    with pytest.raises(Taken):
        claim(storage, owner("second"), lambda: 1100 * S)


def test_the_same_job_takes_over_at_once(storage: Storage) -> None:
    claim(storage, owner("first", job="j"), lambda: 1000 * S)
    former = claim(storage, owner("second", job="j"), lambda: 1001 * S)
    assert former
    assert former.session == "first"


def test_jobs_without_a_name_are_not_the_same(storage: Storage) -> None:
    claim(storage, replace(owner("first"), job=""), lambda: 1000 * S)
    with pytest.raises(Taken):
        claim(storage, replace(owner("second"), job=""), lambda: 1001 * S)


def test_one_that_left_is_followed_at_once_and_is_no_failure(storage: Storage) -> None:
    claim(storage, owner("first"))
    release(storage, "first")
    assert claim(storage, owner("second")) is None
    release(storage, "first")
    assert holds(storage, "second")


def test_who_was_taken_over_from_does_not_go_on_when_the_other_has_left(storage: Storage) -> None:
    claim(storage, owner("first", job="j"))
    claim(storage, owner("second", job="j"))
    release(storage, "second")
    assert not holds(storage, "first")


def test_a_process_that_ended_is_dead_even_if_nobody_has_looked_at_it(storage: Storage) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        held = replace(owner("first", pid=process.pid), started=living_ticks(process.pid) or 0)
        claim(storage, held)
        assert not held.is_dead()
        with pytest.raises(Taken):
            claim(storage, owner("second", pid=os.getpid()))
        process.send_signal(signal.SIGKILL)
        wait_for(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        assert held.is_dead()
        assert claim(storage, owner("second", pid=os.getpid()))


def test_after_a_reboot_a_process_of_the_same_number_is_another(storage: Storage) -> None:
    held = owner("first", pid=os.getpid())
    assert not held.is_dead()
    assert replace(held, started=held.started - 1).is_dead()
    assert not replace(held, boot="before").is_dead(), "nothing is known of it: it may be on another machine"


@pytest.mark.needs("unshare")
def test_a_process_that_cannot_be_seen_from_another_container_is_not_dead(storage: Storage) -> None:
    claim(storage, owner("first", pid=os.getpid()))
    script = """
        import os, sys
        from headway.checkpoint.lease import Owner, claim
        from headway.storage import open_storage
        claim(open_storage(sys.argv[1]), Owner.this("second", "second", "here"))
    """
    inside = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", textwrap.dedent(script), storage.url]
    done = subprocess.run(inside, capture_output=True, text=True, timeout=120)
    if "unshare:" in done.stderr:
        pytest.skip(f"needs process namespaces, run as root: {done.stderr.strip()}")
    assert "Taken: job first on here" in done.stderr
    assert holds(storage, "first")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"session": 1}'])
def test_a_damaged_word_of_an_owner_is_nobodys(storage: Storage, text: bytes) -> None:
    storage.write(OWNER, text)
    assert holder(storage) is None
    claim(storage, owner("first"))
    assert holds(storage, "first")


# --- a whole checkpointer --------------------------------------------------------------------------------------------


def test_a_checkpointer_respects_another_machines_job_and_leaves_no_keeper(root: Path) -> None:
    claim(open_storage(root), owner("alpha"))
    with pytest.raises(Taken, match=f"job alpha on there .* writes checkpoints to {root}"):
        Checkpointer(root, model=Counting(**SMALL), interval=None)
    assert holds(open_storage(root), "alpha")
    wait_for(lambda: not keepers(root))


def test_a_job_that_was_taken_over_from_commits_no_more(root: Path) -> None:
    model, storage = Counting(**SMALL), open_storage(root)
    with Checkpointer(root, model=model, interval=None) as checkpointer:
        checkpointer.save(10, wait=True)
        said = json.loads(storage.read(OWNER))
        claim(storage, owner("beta"), lambda: int(said["seen_ns"] + (STALE_S + 1) * S))
        for step in (20, 30):
            with pytest.raises(SaveFailed, match="another job has begun to write"):
                checkpointer.save(step, wait=True)
            release(storage, "beta")  # and that does not change when the other one is done
        found = newest(root)
        assert found
        assert found.step == 10
        wait_for(lambda: LATEST in storage.names() and storage.read(LATEST) == b"step-00000010")
    told = holder(storage)
    assert told
    assert told.session == "beta"
    assert not (root / "step-00000020" / ".metadata").exists()


def test_what_cannot_be_written_at_all_is_refused_at_the_start(tmp_path: Path, root: Path) -> None:
    root.write_text("a file")
    with pytest.raises(InputError, match=f"checkpoints cannot be written to {root} "):
        Checkpointer(root, model=Counting(**SMALL), interval=None)
    wait_for(lambda: not keepers(root))


def test_the_lease_is_renewed_while_the_job_lives(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(root)
    (root.parent / "sitecustomize.py").write_text("import headway.checkpoint.lease as lease\nlease.REFRESH_S = 0.05\n")
    monkeypatch.setenv("PYTHONPATH", str(root.parent))
    with Checkpointer(root, model=Counting(**SMALL), interval=None):
        first = holder(storage)
        assert first
        began = time.time_ns()
        wait_for(lambda: (told := holder(storage)) and told.seen_ns > began)
