"""The checkpoint that something is published from: kept until it is, and never mistaken for another."""

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from saving import save

from headway.checkpoint import catalog
from headway.checkpoint.layout import METADATA, PINS
from headway.checkpoint.retention import Retention
from headway.checkpoint.source import BadCheckpoint
from headway.errors import InputError
from headway.publish.anchor import AnchorManifest, Code, NotCommitted, checkpoint_at, open_anchor, pin, unpin
from headway.storage import Storage, open_storage

NAME, ID = "step-00000100", "ads-step-00000100-0a1b2c3d"


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "root")


def opened(storage: Storage, patience_s: float = 0.0) -> AnchorManifest:
    return open_anchor(storage, NAME, ID, "safetensors", "model", lambda why: None, patience_s).manifest


def test_an_anchor_is_not_pruned_until_it_is_published(storage: Storage) -> None:
    for generation, step in enumerate((100, 200, 300)):
        save(storage, step, generation)
    pin(storage, NAME, ID, "safetensors", {})
    pin(storage, NAME, "another", "export", {})
    assert [each.name for each in catalog.prune(storage, Retention(keep_last=1))] == ["step-00000200"]
    unpin(storage, NAME, ID)
    assert catalog.find(storage, NAME).pinned
    unpin(storage, NAME, "another")
    assert [each.name for each in catalog.prune(storage, Retention(keep_last=1))] == [NAME]


def test_what_a_user_has_pinned_stays_pinned_when_it_is_published(storage: Storage) -> None:
    save(storage, 100, 1)
    catalog.pin(storage, NAME)
    pin(storage, NAME, ID, "safetensors", {})
    unpin(storage, NAME, ID)
    assert catalog.find(storage, NAME).pinned
    pin(storage, NAME, ID, "safetensors", {})
    catalog.unpin(storage, NAME)  # a user gives up on both
    assert not catalog.find(storage, NAME).pinned


def test_names_with_an_at_sign_are_not_mixed_up(storage: Storage) -> None:
    for name in ("mine", "mine@home"):
        storage.write(f"{name}/.metadata", b"metadata")
    catalog.pin(storage, "mine@home")
    assert catalog.find(storage, "mine@home").pinned
    pin(storage, "mine", "ads@x", "safetensors", {})
    catalog.unpin(storage, "mine")
    assert storage.names(PINS) == ["mine@home"]
    pin(storage, "mine@home", "ads@x", "safetensors", {})
    catalog.unpin(storage, "mine@home")
    assert storage.names(PINS) == []


def test_asking_again_forgets_nothing_of_where_it_comes_from(storage: Storage) -> None:
    save(storage, 100, 1)
    told = {"job": "ads", "attempt": 2, "data": {"epoch": 1}, "commit": "c" * 40, "dirty": True, "torch": "2.13.0"}
    pin(storage, NAME, ID, "safetensors", told)
    for id in (ID, "another"):
        again = pin(storage, NAME, id, "export", {})
        assert {key: getattr(again, key) for key in told} == told
    save(storage, 100, 2)
    assert pin(storage, NAME, ID, "safetensors", {}).commit == "", "it is another one"


def test_the_manifest_tells_where_it_comes_from_and_what_it_consists_of(storage: Storage) -> None:
    tag = save(storage, 100, 1)
    told = {"job": "ads", "attempt": 2, "data": {"epoch": 1, "batches": 7}, "commit": "c" * 40, "torch": "2.13.0"}
    pin(storage, NAME, ID, "a.py:f", told)
    found = opened(storage)
    assert (found.id, found.checkpoint, found.step, found.tag, found.recipe) == (ID, NAME, 100, tag, "a.py:f")
    assert {key: getattr(found, key) for key in told} == told
    for name, shard in found.files.items():
        assert storage.digest(f"{NAME}/{name}") == shard.xxh3
    assert METADATA in found.files
    assert len(found.files) == 3


def test_one_that_plain_torch_saved_gets_its_hashes_when_it_is_pinned(storage: Storage) -> None:
    storage.write("mine/.metadata", b"metadata")
    storage.write("mine/__0_0.distcp", b"tensors")
    found = pin(storage, "mine", ID, "safetensors", {})
    assert found.files.keys() == {METADATA, "__0_0.distcp"}
    assert found.tag == ""
    assert open_anchor(storage, "mine", ID, "", "model", lambda why: None).manifest == found


def test_an_anchor_that_is_not_there_is_told(storage: Storage) -> None:
    with pytest.raises(InputError, match="there is no checkpoint step-00000100"):
        opened(storage)


def test_one_that_is_still_uploading_is_waited_for(storage: Storage) -> None:
    save(storage, 100, 1, until="manifest")
    told: list[str] = []
    found: list[AnchorManifest] = []
    thread = threading.Thread(
        target=lambda: found.append(open_anchor(storage, NAME, ID, "", "model", told.append, 200).manifest)
    )
    thread.start()
    while not told:
        time.sleep(0.01)
    save(storage, 100, 2)
    thread.join(120)
    assert "was never committed" in told[0]
    assert found[0].step == 100


def test_one_that_never_comes_is_told_after_a_while(storage: Storage) -> None:
    save(storage, 100, 1, until="shards")
    with pytest.raises(NotCommitted):
        pin(storage, NAME, ID, "", {})
    with pytest.raises(InputError, match=r"was never committed.*Waited 0 s"):
        opened(storage)


def test_one_that_was_saved_again_is_another(storage: Storage) -> None:
    save(storage, 100, 1)
    pin(storage, NAME, ID, "", {})
    save(storage, 100, 2)
    with pytest.raises(BadCheckpoint, match="it was saved again since"):
        opened(storage)


def test_a_damaged_one_is_told(storage: Storage) -> None:
    save(storage, 100, 1)
    pin(storage, NAME, ID, "", {})
    storage.write(f"{NAME}/{METADATA}", b"something else")
    with pytest.raises(BadCheckpoint, match="fits none of the manifests"):
        opened(storage)
    unpin(storage, NAME, ID)
    with pytest.raises(BadCheckpoint, match="fits none of the manifests"):
        opened(storage, patience_s=60)  # it is not still being uploaded


def test_a_damaged_manifest_is_told(storage: Storage) -> None:
    save(storage, 100, 1)
    pin(storage, NAME, ID, "", {})
    where = f"{PINS}/{NAME}@{ID}"
    text = storage.read(where).decode()
    storage.write(where, text.replace('"step": 100', '"step": 101').encode())
    with pytest.raises(InputError, match="does not have its own checksum"):
        opened(storage)
    storage.write(where, b"{}")
    with pytest.raises(InputError, match="this is no manifest of an anchor"):
        opened(storage)


def test_a_path_means_a_checkpoint_or_the_newest_in_it(storage: Storage, tmp_path: Path) -> None:
    save(storage, 100, 1)
    save(storage, 200, 2)
    assert checkpoint_at(storage.url) == (storage.url, "step-00000200")
    assert checkpoint_at(f"{storage.url}/{NAME}/") == (storage.url, NAME)
    assert checkpoint_at(f"{storage.url}/nothing") == (storage.url, "nothing")
    assert checkpoint_at("/nothing-here") == ("/", "nothing-here")
    with pytest.raises(InputError, match="is no checkpoint"):
        checkpoint_at("memory://nothing")


def test_git_is_asked_in_a_session_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the trainer's terminal does not reach it."""
    git = tmp_path / "git"
    git.write_text(f"#!/bin/sh\ncut -d' ' -f6 /proc/$$/stat >> {tmp_path}/sessions\n")
    git.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Code(tmp_path).told() == {}
    sessions = (tmp_path / "sessions").read_text().split()
    assert len(sessions) == 2
    assert str(os.getsid(0)) not in sessions


def test_the_commit_is_known_and_whether_something_was_changed_since(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        names = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        return subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    assert Code(tmp_path / "nowhere").told() == {}
    git("init", "-q")
    assert Code(tmp_path).told() == {}
    (tmp_path / "train.py").write_text("1")
    git("add", "train.py")
    git("commit", "-q", "-m", "x")
    told = {"commit": git("rev-parse", "HEAD").strip(), "dirty": False}
    assert Code(tmp_path).told() == told
    (tmp_path / "train.py").write_text("2")
    assert Code(tmp_path).told() == told | {"dirty": True}
    git("config", "core.quotepath", "false")
    (tmp_path / os.fsdecode(b"\xff.py")).write_text("1")
    git("add", ".")
    assert Code(tmp_path).told() == told | {"dirty": True}
    index = tmp_path / ".git" / "index"
    git("commit", "-q", "-m", "y")
    os.utime(tmp_path / "train.py", (0, 0))
    before = index.stat().st_mtime_ns
    Code(tmp_path).told()
    assert index.stat().st_mtime_ns == before, "it may be killed: it must not lock what is others'"
