"""Disks that are full, read-only, gone or wrong, and stores that fail: training goes on, nothing half-done counts."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trainers
from broken_line import Line
from file_systems import mounted
from keeping import end_keepers
from trainers import Counting, Notes, fork, is_equal, loaded, newest, state_at, wait_for

from headway import Checkpointer
from headway import run as run_module
from headway.checkpoint import BadCheckpoint, SaveFailed, catalog, lease
from headway.checkpoint.layout import LATEST, METADATA, OWNER
from headway.errors import PlatformError
from headway.events.clock import pid_space
from headway.events.journal import Follower
from headway.events.vocabulary import Mark
from headway.run import Run
from headway.storage import open_storage

SIZE: dict[str, Any] = {"length": 1 << 13, "tensors": 4}
"""An eighth of a megabyte."""


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """This process's part in a job of its own."""
    monkeypatch.setattr("headway.checkpoint.link.SLOW_S", trainers.PATIENCE_S)  # a slow machine is nothing to tell of
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    run = run_module._join({"HEADWAY_HOME": str(home), "HEADWAY_JOB": "j"})
    yield run
    run._leave()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def marks(home: Path, name: str) -> list[dict[str, Any]]:
    """What the journal says of that name."""
    # Not `rglob`, which fails if a folder is deleted under its hands.
    [journal] = [Path(folder, name) for folder, _, names in os.walk(home) for name in names if name.endswith(".hwj")]
    records = Follower(journal).poll().records
    return [record.attrs for record in records if isinstance(record, Mark) and record.name == name]


class Job:
    """Saves after every step."""

    def __init__(self, root: str | Path, run: Run, **settings: Any) -> None:
        self.model = Counting(**SIZE)
        self.checkpointer = Checkpointer(root, model=self.model, interval=1, run=run, **settings)

    def step(self) -> None:
        """One step, at whose end it is known what became of its save."""
        self.model.train_step()
        self.checkpointer.after(self.checkpointer.step)
        self.checkpointer.wait()


@contextmanager
def job(root: str | Path, run: Run, **settings: Any) -> Iterator[Job]:
    job = Job(root, run, **settings)
    try:
        yield job
    finally:
        job.checkpointer.close()


def is_right(root: Path, step: int) -> bool:
    """Whether the newest is of that step, and has its values."""
    found = newest(root)
    if found is None or found.step != step:
        return False
    return is_equal(loaded(root / found.name, **SIZE), state_at(step, **SIZE))


# --- disks that cannot be written ------------------------------------------------------------------------------------

Fault = Callable[[], AbstractContextManager[object]]


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """No room is left."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    yield
    ballast.unlink()


@contextmanager
def remounted(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", folder], check=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Not even root may add to it."""
    if subprocess.run(["chattr", "+i", folder], capture_output=True).returncode:
        pytest.skip("needs a file system with immutable files, and root")
    yield
    subprocess.run(["chattr", "-i", folder], check=True)


@contextmanager
def replaced(folder: Path) -> Iterator[None]:
    """Somebody moves it away, and a file comes in its place."""
    folder.rename(folder.with_name("moved"))
    folder.write_text("")
    yield
    folder.unlink()
    folder.with_name("moved").rename(folder)


@contextmanager
def limited(place: Path) -> Iterator[Path]:
    """A folder with a quota of two megabytes, on a disk that has room."""
    image, mount = place / "image", place / "btrfs"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(120 << 20)
    subprocess.run(["mkfs.btrfs", "-q", image], check=True, capture_output=True)
    done = subprocess.run(["mount", "-o", "loop", image, mount], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs btrfs on a loop device, and root: {done.stderr.strip()}")
    try:
        subprocess.run(["btrfs", "quota", "enable", mount], check=True)
        subprocess.run(["btrfs", "subvolume", "create", mount / "job"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["btrfs", "qgroup", "limit", "2M", mount / "job"], check=True)
        yield mount / "job"
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)


@contextmanager
def a_place(kind: str, tmp_path: Path) -> Iterator[tuple[Path, Fault]]:
    """A root, and what can happen to it."""
    if kind == "quota":
        with limited(tmp_path) as folder:
            yield folder / "root", lambda: filled(folder)
    elif kind in ("full", "read-only"):
        with mounted(tmp_path / "small", "size=2m,mode=700") as folder:
            yield folder / "root", lambda: (filled if kind == "full" else remounted)(folder)
    else:
        yield tmp_path / "root", lambda: (locked if kind == "locked" else replaced)(tmp_path / "root")


FAULTS = [
    ("full", "No space left on device"),
    ("read-only", "Read-only file system"),
    pytest.param("locked", "Operation not permitted", marks=pytest.mark.thorough),
    pytest.param("replaced", "Not a directory|File exists", marks=pytest.mark.thorough),
    pytest.param("quota", "Disk quota exceeded", marks=[pytest.mark.needs("mkfs.btrfs"), pytest.mark.thorough]),
]


@pytest.mark.parametrize(("kind", "text"), FAULTS)
def test_training_goes_on_says_why_it_does_not_save_and_saves_again_when_it_can(
    kind: str, text: str, home: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with a_place(kind, tmp_path) as (root, fault), job(root, run, keep=2) as trained:
        for _ in range(2):
            trained.step()
        assert is_right(root, 2)
        capsys.readouterr()
        with fault():
            for failures in (1, 2):
                trained.step()
                told = marks(home, "checkpoint_failed")[-1]
                assert told["failures"] == failures
                assert re.search(text, told["why"])
                [line] = capsys.readouterr().err.splitlines()
                assert f"was not saved ({told['why']}). Training goes on" in line
        assert is_right(root, 2)
        trained.step()
        assert is_right(root, 5)
        assert len(marks(home, "checkpoint_failed")) == 2
        assert not list(root.glob("*.part-*")) + list(root.glob("step-*/*.part-*"))  # the lease is renewed at any time


def test_after_too_many_failures_the_job_stops_and_says_why(home: Path, run: Run, tmp_path: Path) -> None:
    with a_place("full", tmp_path) as (root, fault), job(root, run, failures=3) as trained:
        trained.step()
        with fault():
            trained.step()
            trained.step()
            trained.step()
            with pytest.raises(SaveFailed, match=r"3 saves in a row have failed, the last one because .*No space left"):
                trained.step()
        assert [told["failures"] for told in marks(home, "checkpoint_failed")] == [1, 2, 3]
        assert is_right(root, 1)


def test_only_failures_in_a_row_count(run: Run, tmp_path: Path) -> None:
    with a_place("full", tmp_path) as (root, fault), job(root, run, failures=2, keep=1) as trained:
        for step in range(1, 5):
            with fault():
                trained.step()
            trained.step()
            assert is_right(root, 2 * step)


def test_a_disk_that_is_full_from_the_start_is_no_reason_not_to_begin(
    home: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even if the job before has left without a word: its name stays in the way until there is room."""
    with a_place("full", tmp_path) as (root, fault):
        dead = lease.Owner(session="dead", job="another", node="here", boot=pid_space(), pid=1 << 22, started=1)
        lease.claim(open_storage(root), dead)
        with contextlib.ExitStack() as stack:
            with fault():
                trained = stack.enter_context(job(root, run))
                trained.step()
            assert [told["failures"] for told in marks(home, "checkpoint_failed")] == [1, 2]
            assert capsys.readouterr().err.count("No space left on device") == 2
            trained.step()
            assert is_right(root, 2)
            found = lease.holder(open_storage(root))
            assert found
            assert found.job == "j"


def test_a_folder_that_somebody_deletes_is_made_again(run: Run, root: Path) -> None:
    with job(root, run) as trained:
        trained.step()
        # The lease may be renewed under its hands.
        wait_for(lambda: shutil.rmtree(root, ignore_errors=True) or not root.exists())
        trained.step()
        assert is_right(root, 2)
        assert not marks(root.parent, "checkpoint_failed")


def test_where_direct_writes_are_unknown_it_saves_all_the_same(folder: Path, run: Run) -> None:
    with job(folder / "root", run) as trained:
        trained.step()
        assert is_right(folder / "root", 1)
    end_keepers(folder)
    with job(folder / "root", run) as trained:
        restored = trained.checkpointer.restore()
        assert restored
        assert (restored.step, restored.tier) == (1, "disk")
        assert is_equal(trained.model.state_dict(), state_at(1, **SIZE))


# --- files that are not what was saved -------------------------------------------------------------------------------


@pytest.fixture
def two_checkpoints(root: Path, run: Run) -> Path:
    with job(root, run) as trained:
        trained.step()
        trained.step()
    end_keepers(root)
    return root


def wounds(folder: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """For each file of a checkpoint what can happen to it."""
    chance = random.Random(1)
    for path in sorted(folder.iterdir()):
        yield path.name, lambda path: path.unlink()
        yield path.name, lambda path: os.truncate(path, path.stat().st_size - 1)
        for _ in range(5):
            bit = chance.randrange(8 * path.stat().st_size)
            yield path.name, lambda path, bit=bit: flip(path, bit)  # type: ignore[misc]


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_whatever_is_wrong_with_a_file_it_is_named_and_the_checkpoint_before_is_taken(
    two_checkpoints: Path, home: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, whole = two_checkpoints / "step-00000002", home / "whole"
    shutil.copytree(newest, whole)
    with job(two_checkpoints, run) as trained:
        for count, (name, wound) in enumerate(wounds(newest), 1):
            wound(newest / name)
            capsys.readouterr()
            restored = trained.checkpointer.restore()
            assert restored, name
            assert restored.step == 1, name
            assert is_equal(trained.model.state_dict(), state_at(1, **SIZE))
            told = marks(home, "checkpoint_bad")
            assert len(told) == count
            assert told[-1]["step"] == 2
            [line] = capsys.readouterr().err.splitlines()
            assert (name if name.endswith(".distcp") else ".metadata") in told[-1]["why"], told[-1]
            assert told[-1]["why"] in line
            shutil.rmtree(newest)
            shutil.copytree(whole, newest)
        restored = trained.checkpointer.restore()
        assert restored
        assert restored.step == 2
        assert is_equal(trained.model.state_dict(), state_at(2, **SIZE))


@pytest.mark.parametrize(
    "name", [METADATA, *(pytest.param(name, marks=pytest.mark.thorough) for name in ("*.json", "*.distcp"))]
)
def test_if_no_checkpoint_is_right_nothing_is_trained_over_them(two_checkpoints: Path, run: Run, name: str) -> None:
    for path in two_checkpoints.glob(f"step-*/{name}"):
        flip(path, 1000)
    with job(two_checkpoints, run) as trained, pytest.raises(BadCheckpoint, match=r"none of the checkpoints .*step 2"):
        trained.checkpointer.restore()


@pytest.mark.parametrize("name", [LATEST, OWNER, pytest.param(".headway/history.json", marks=pytest.mark.thorough)])
def test_a_flipped_bit_in_what_lies_beside_the_checkpoints_does_no_harm(
    two_checkpoints: Path, run: Run, name: str
) -> None:
    path = two_checkpoints / name
    whole = path.read_bytes()
    for bit in range(7, 8 * len(whole), 40):
        flip(path, bit)
        assert catalog.newest(open_storage(two_checkpoints))
        with contextlib.suppress(lease.Taken):
            lease.claim(open_storage(two_checkpoints), lease.Owner.this("other", "j", "here"))
        path.write_bytes(whole)
    flip(path, 7)
    with job(two_checkpoints, run) as trained:
        restored = trained.checkpointer.restore()
        assert restored
        assert restored.step == 2
        trained.step()
        assert is_right(two_checkpoints, 3)


# --- an object store -------------------------------------------------------------------------------------------------


@pytest.fixture
def store(s3_root: str, fails_fast: None) -> Iterator[str]:
    """A root in S3."""
    yield s3_root
    end_keepers(s3_root)


def names(root: str) -> list[str]:
    return [each.name for each in catalog.checkpoints(open_storage(root)) if each.state == "committed"]


def test_checkpoints_in_a_store_are_saved_pruned_and_restored(store: str, run: Run) -> None:
    with job(store, run, keep=2) as trained:
        for _ in range(4):
            trained.step()
        assert names(store) == ["step-00000003", "step-00000004"]
        assert open_storage(store).read(LATEST) == b"step-00000004"
    end_keepers(store)
    with job(store, run) as trained:
        restored = trained.checkpointer.restore()
        assert restored
        assert (restored.step, restored.tier) == (4, "remote")
        assert is_equal(trained.model.state_dict(), state_at(4, **SIZE))


def is_upload(method: str, path: str, ending: str = "") -> bool:
    return method in ("PUT", "POST") and ending in path and ".headway" not in path


def test_a_store_that_fails_is_reported_and_nothing_is_half_committed(
    store: str, line: Line, home: Path, run: Run
) -> None:
    with job(store, run) as trained:
        trained.step()
        for failed, file in enumerate((".distcp", ".rank-0.json", METADATA), 1):
            line.fault = lambda method, path, file=file: "500" if is_upload(method, path, file) else None  # type: ignore[misc]
            trained.step()
            assert len(told := marks(home, "checkpoint_failed")) == failed
            assert "internal error" in told[-1]["why"]
            assert names(store) == ["step-00000001"]
        line.fault = lambda method, path: None
        trained.step()
        assert names(store) == ["step-00000001", "step-00000005"]


def test_a_store_that_cannot_be_read_is_no_reason_to_take_an_older_checkpoint(store: str, line: Line, run: Run) -> None:
    with job(store, run) as trained:
        trained.step()
        trained.step()
    end_keepers(store)
    line.fault = lambda method, path: "500" if method == "GET" and "step-00000002/__0" in path else None
    with (
        job(store, run) as trained,
        pytest.raises(PlatformError, match=r"step 2 could not be read .*SKIP_CHECKPOINTS=1"),
    ):
        trained.checkpointer.restore()
    line.fault = lambda method, path: None
    with job(store, run) as trained:
        restored = trained.checkpointer.restore()
        assert restored
        assert restored.step == 2


@pytest.mark.parametrize("how", ["silence", pytest.param("slow", marks=pytest.mark.thorough)])
def test_training_does_not_wait_for_a_store_that_does_not_answer(
    store: str, line: Line, home: Path, run: Run, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves that fall due meanwhile are skipped."""
    impatient = {"read_timeout": 1, "retries": {"mode": "standard", "max_attempts": 1}}  # the uploader's client
    monkeypatch.setenv("FSSPEC_S3", json.dumps({"config_kwargs": impatient}))
    hung: list[str] = []

    def fault(method: str, path: str) -> str | None:
        if not is_upload(method, path, ".distcp"):
            return None
        hung.append(path)
        return how

    with Checkpointer(store, model=(model := Counting(**SIZE)), interval="0.001s", run=run) as checkpointer:
        line.fault = fault
        wait_for(lambda: train(checkpointer, model) and hung)
        begun = checkpointer.step
        while not checkpointer.wait(0) and checkpointer.step < begun + 20:  # far sooner than the client gives up
            train(checkpointer, model)
        if how == "silence":
            assert checkpointer.step == begun + 20
            wait_for(lambda: train(checkpointer, model) and marks(home, "checkpoint_failed"))
            assert names(store) == []
        line.fault = lambda method, path: None
        line.over.set()
        checkpointer.save(wait=True)
        assert names(store)[-1] == f"step-{checkpointer.step:08d}"


def train(checkpointer: Checkpointer, model: Counting) -> bool:
    time.sleep(0.01)
    model.train_step()
    checkpointer.after(checkpointer.step)
    return True


# --- the ladder ------------------------------------------------------------------------------------------------------


def save_twice(root: str, local: str, notes: Path) -> None:
    """And is killed."""
    model = Counting(**SIZE)
    checkpointer = Checkpointer(root, model=model, interval=None, local=local)
    for step in (1, 2):
        model.train_step()
        checkpointer.save(step, wait=True)
    Notes(notes).add("saved", 2)
    os.kill(os.getpid(), signal.SIGKILL)


def restore_once(root: str, local: str, notes: Path) -> None:
    """And is killed, too: whoever keeps its memory still does."""
    model = Counting(**SIZE)
    restored = Checkpointer(root, model=model, interval=None, local=local).restore()
    assert restored
    assert is_equal(model.state_dict(), state_at(restored.step, **SIZE))
    Notes(notes).add(restored.tier, restored.step)
    os.kill(os.getpid(), signal.SIGKILL)


def test_memory_then_the_local_disk_then_the_store(store: str, home: Path) -> None:
    trainers.warm_up()
    local, notes = home / "local", Notes(home / "notes")

    def tier() -> str:
        fork(restore_once, home, store, str(local), notes.path).join()
        lines = notes.path.read_text().splitlines()
        assert len(lines) == len(tiers) + 2, (home / "said").read_text()
        assert lines[-1].split()[1] == "2"
        return lines[-1].split()[0]

    tiers: list[str] = []
    fork(save_twice, home, store, str(local), notes.path).join()
    tiers.append(tier())
    end_keepers(store)
    tiers.append(tier())
    end_keepers(store)
    [copy] = local.glob("step-00000002/*.distcp")
    flip(copy, 1000)
    tiers.append(tier())
    end_keepers(store)
    shutil.rmtree(local)
    tiers.append(tier())
    assert tiers == ["memory", "local", "remote", "remote"]


def test_local_copies_do_not_pile_up(root: Path, home: Path, run: Run) -> None:
    with job(root, run, local=home / "local") as trained:
        for _ in range(6):
            trained.step()
        assert len(list((home / "local").glob("step-*"))) <= 3


def test_a_local_disk_without_room_costs_only_the_copy(
    home: Path, run: Run, tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with a_place("full", tmp_path) as (local, fault), job(root, run, local=local) as trained, fault():
        trained.step()
        trained.step()
        assert is_right(root, 2)
        assert not marks(home, "checkpoint_failed")
        assert capsys.readouterr().err.count("no local copy") == 1
