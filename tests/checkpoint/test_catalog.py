"""What a root holds is told rightly, whatever became of the files; nothing is deleted that may be needed."""

import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from broken_line import Line
from saving import save

from headway.checkpoint import catalog, layout
from headway.checkpoint.catalog import checkpoints, find, newest, verify
from headway.checkpoint.layout import METADATA, manifest_name, new_tag, shard_name, step_folder
from headway.checkpoint.retention import Retention
from headway.errors import InputError, PlatformError
from headway.storage import Storage, open_storage

LAST = Retention(keep_last=1)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "root")


def states(storage: Storage) -> dict[int | None, str]:
    return {each.step: each.state for each in checkpoints(storage)}


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# --- what there is ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_what_its_manifest_says(anywhere: Storage) -> None:
    tag = save(anywhere, 100, 1, metric=0.25)
    anywhere.write("latest", b"step-00000100")
    anywhere.write("logs/today", b"not a checkpoint")
    (found,) = checkpoints(anywhere)
    assert (found.name, found.tag, found.step, found.state) == ("step-00000100", tag, 100, "committed")
    assert (found.size, found.saved_ns, found.world_size, found.metric) == (10_001, 10**9, 2, 0.25)
    assert newest(anywhere) == found == find(anywhere, "step-00000100")
    assert verify(anywhere, found) == []


def test_age_goes_by_generation_and_not_by_step(anywhere: Storage) -> None:
    for generation, step in enumerate([500, 100, 300]):
        save(anywhere, step, generation)
    assert [each.step for each in checkpoints(anywhere)] == [500, 100, 300]
    last = newest(anywhere)
    assert last
    assert last.step == 300


@pytest.mark.parametrize("until", ["shards", "manifest"])
def test_what_has_no_commit_marker_is_partial(anywhere: Storage, until: str) -> None:
    save(anywhere, 100, 1)
    tag = save(anywhere, 200, 2, until=until)
    assert [(each.state, each.step, each.tag) for each in checkpoints(anywhere)][1] == ("partial", 200, tag)
    last = newest(anywhere)
    assert last
    assert last.step == 100
    assert verify(anywhere, find(anywhere, "step-00000200")) == ["was never committed: there is no .metadata"]


def test_an_empty_root_has_nothing(anywhere: Storage) -> None:
    assert checkpoints(anywhere) == []
    assert newest(anywhere) is None
    with pytest.raises(InputError, match="there is no checkpoint step-1 "):
        find(anywhere, "step-1")


def test_what_plain_dcp_saved_is_foreign(anywhere: Storage) -> None:
    anywhere.write("step-00000007/.metadata", b"a pickle")
    anywhere.write("step-00000007/__0_0.distcp", b"data")
    anywhere.write("other/.metadata", b"a pickle")
    assert {(each.name, each.state, each.step) for each in checkpoints(anywhere)} == {
        ("step-00000007", "foreign", 7),
        ("other", "foreign", None),
    }
    assert newest(anywhere) is None
    assert "cannot be verified" in verify(anywhere, find(anywhere, "other"))[0]


def test_a_step_saved_again_is_the_new_one_only_when_that_is_committed(storage: Storage) -> None:
    old = save(storage, 100, 1)
    for until in ("shards", "manifest"):
        save(storage, 100, 2, until=until)
        assert [(each.tag, each.state) for each in checkpoints(storage)] == [(old, "committed")]
        assert verify(storage, find(storage, "step-00000100")) == []
    new = save(storage, 100, 3)
    assert [(each.tag, each.state) for each in checkpoints(storage)] == [(new, "committed")]


def test_a_thousand_checkpoints_are_listed_without_reading_a_shard(storage: Storage) -> None:
    for step in range(1000):
        folder = Path(storage.url, step_folder(step))
        folder.mkdir(parents=True)
        tag = new_tag(step)
        if step == 0:
            save(storage, 0, 0, ranks=1)
            continue
        (folder / shard_name(0, tag)).write_bytes(b"")
        (folder / METADATA).write_bytes(b"")
    first = checkpoints(storage)[0]
    assert first.manifest
    os.truncate(Path(storage.url, first.name, next(iter(first.manifest.files))), 0)
    found = checkpoints(storage)
    assert len(found) == 1000
    assert [each.state for each in found if each.step == 0] == ["committed"]


def test_a_store_that_fails_is_an_error_and_no_empty_root(line: Line, s3_root: str, fails_fast: None) -> None:
    storage = open_storage(s3_root)
    save(storage, 100, 1)
    line.fault = lambda method, path: "500" if path.endswith(METADATA) else None
    with pytest.raises(OSError, match=r"(?i)internal"):
        checkpoints(storage)


# --- is it whole? ----------------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_found_in_every_file(storage: Storage) -> None:
    tag = save(storage, 100, 1)
    folder, chance = Path(storage.url, "step-00000100"), random.Random(5)
    for name in (METADATA, manifest_name(tag), shard_name(0, tag), shard_name(1, tag)):
        path = folder / name
        good = path.read_bytes()
        for bit in chance.sample(range(len(good) * 8), min(60, len(good) * 8)):
            flip(path, bit)
            if path.suffix != ".json" or differs(path.read_bytes(), good):
                problems = verify(storage, find(storage, "step-00000100"))
                assert len(problems) == 1, (name, bit)
                assert path.suffix == ".json" or name in problems[0]
            path.write_bytes(good)
    assert verify(storage, find(storage, "step-00000100")) == []


def differs(manifest: bytes, good: bytes) -> bool:
    """Whether a manifest says something else, or nothing: white space alone does not count."""
    try:
        return layout.Manifest.from_json(manifest) != layout.Manifest.from_json(good)
    except InputError:
        return True


def test_a_damaged_commit_marker_is_not_taken_for_someone_elses(storage: Storage) -> None:
    save(storage, 100, 1)
    save(storage, 200, 2)
    flip(Path(storage.url, "step-00000200", METADATA), 9)
    assert states(storage) == {100: "committed", 200: "damaged"}
    last = newest(storage)
    assert last
    assert last.step == 100


def test_what_is_missing_or_short_is_named(anywhere: Storage) -> None:
    tag = save(anywhere, 100, 1, ranks=3)
    anywhere.remove(f"step-00000100/{shard_name(0, tag)}")
    anywhere.write(f"step-00000100/{shard_name(2, tag)}", b"short")
    assert verify(anywhere, find(anywhere, "step-00000100")) == [
        f"{shard_name(0, tag)} is missing",
        f"{shard_name(2, tag)} has 5 bytes instead of 5002",
    ]


def test_a_folder_that_was_renamed_is_a_problem(storage: Storage) -> None:
    save(storage, 100, 1)
    Path(storage.url, "step-00000100").rename(Path(storage.url, "step-00000900"))
    assert verify(storage, find(storage, "step-00000900")) == [
        "the folder is named after step 900, its manifest says 100"
    ]


# --- pruning ---------------------------------------------------------------------------------------------------------


def test_pruning_keeps_what_retention_keeps(anywhere: Storage) -> None:
    for generation, step in enumerate([100, 200, 300, 400]):
        save(anywhere, step, generation)
    catalog.pin(anywhere, "step-00000100")
    gone = catalog.prune(anywhere, Retention(keep_last=2), dry_run=True)
    assert [each.step for each in gone] == [200]
    assert len(checkpoints(anywhere)) == 4
    assert catalog.prune(anywhere, Retention(keep_last=2)) == gone
    assert [each.step for each in checkpoints(anywhere)] == [100, 300, 400]
    catalog.unpin(anywhere, "step-00000100")
    assert [each.step for each in catalog.prune(anywhere, LAST)] == [100, 300]


def test_nothing_is_pruned_before_something_is_committed(storage: Storage) -> None:
    for generation in range(3):
        save(storage, generation, generation, until="manifest")
    assert catalog.prune(storage, LAST) == []
    assert len(checkpoints(storage)) == 3


def test_dead_saves_go_and_those_that_may_live_stay(anywhere: Storage) -> None:
    save(anywhere, 100, 1, until="shards")
    save(anywhere, 200, 2)
    save(anywhere, 300, 3, until="manifest")
    save(anywhere, 150, 4, until="shards")
    assert [each.step for each in catalog.prune(anywhere, LAST)] == [100]
    assert states(anywhere) == {200: "committed", 300: "partial", 150: "partial"}


def test_an_empty_folder_goes_and_one_with_a_strangers_file_stays(storage: Storage, tmp_path: Path) -> None:
    save(storage, 200, 2)
    for step in (100, 150):
        (tmp_path / "root" / step_folder(step)).mkdir()
    (tmp_path / "root" / "step-00000150" / "notes.txt").touch()
    assert [each.step for each in catalog.prune(storage, LAST, dry_run=True)] == [100]
    assert catalog.prune(storage, LAST) == [], "somebody may be about to write there"
    for step in (100, 150):
        os.utime(tmp_path / "root" / step_folder(step), (0, 0))
    assert [each.step for each in catalog.prune(storage, LAST)] == [100]
    assert states(storage) == {150: "partial", 200: "committed"}


@pytest.mark.parametrize(("until", "left"), [("shards", {3}), ("committed", {1, 3})])
def test_a_save_that_begins_where_one_is_being_pruned_loses_nothing(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, until: str, left: set[int]
) -> None:
    save(storage, 100, 1, until=until)
    save(storage, 200, 2)
    decide = catalog.to_prune

    def decided(*words: Any) -> Any:
        save(storage, 100, 3, until="shards")
        return decide(*words)

    monkeypatch.setattr(catalog, "to_prune", decided)
    catalog.prune(storage, LAST)
    tags = [layout.tag_in(name) for name in storage.names("step-00000100") if name.endswith(".distcp")]
    assert {layout.generation_of(tag) for tag in tags if tag} == left
    assert len(tags) == 2 * len(left)


def test_a_pin_keeps_even_a_dead_save(storage: Storage) -> None:
    save(storage, 100, 1, until="shards")
    save(storage, 200, 2)
    catalog.pin(storage, "step-00000100")
    assert catalog.prune(storage, LAST) == []
    assert states(storage) == {100: "partial", 200: "committed"}


def test_what_others_left_in_a_committed_folder_is_swept(storage: Storage) -> None:
    old, dead = save(storage, 100, 1), save(storage, 100, 2, until="manifest")
    tag = save(storage, 100, 3)
    folder = Path(storage.url, "step-00000100")
    (folder / f".{shard_name(5, dead)}.part-0011").write_bytes(b"half")
    (folder / "..metadata.part-0022").write_bytes(b"half")
    (folder / layout.marker_name(tag, 0)).write_bytes(b"{}")
    (folder / "notes.txt").write_bytes(b"mine")
    good = {METADATA, manifest_name(tag), shard_name(0, tag), shard_name(1, tag), "notes.txt"}
    assert manifest_name(old) in storage.names("step-00000100")
    assert catalog.prune(storage, LAST) == []
    assert set(storage.names("step-00000100")) == good
    assert verify(storage, find(storage, "step-00000100")) == []


def test_a_save_under_way_in_a_committed_folder_is_left_alone(storage: Storage) -> None:
    save(storage, 100, 1)
    save(storage, 200, 2)
    save(storage, 100, 3, until="manifest")
    (Path(storage.url) / "step-00000100" / "..metadata.part-0022").write_bytes(b"half")
    before = storage.names("step-00000100")
    assert catalog.prune(storage, Retention(keep_last=2)) == []
    assert storage.names("step-00000100") == before


def test_foreign_and_damaged_ones_are_nobodys_to_delete(storage: Storage) -> None:
    storage.write("step-00000001/.metadata", b"a pickle")
    save(storage, 100, 1)
    flip(Path(storage.url, "step-00000100", METADATA), 9)
    save(storage, 200, 2)
    assert catalog.prune(storage, LAST) == []
    assert states(storage) == {1: "foreign", 100: "damaged", 200: "committed"}


def test_only_what_is_there_can_be_pinned(storage: Storage) -> None:
    save(storage, 100, 1)
    with pytest.raises(InputError, match="there is no checkpoint step-00000101"):
        catalog.pin(storage, "step-00000101")
    catalog.pin(storage, "step-00000100")
    assert find(storage, "step-00000100").pinned


def test_a_list_made_while_others_prune_holds_no_lie(storage: Storage) -> None:
    for generation in range(30):
        save(storage, generation, generation, ranks=1)
    pruning = threading.Thread(target=catalog.prune, args=(storage, LAST))
    pruning.start()
    while pruning.is_alive():
        assert {each.state for each in checkpoints(storage)} <= {"committed", "partial"}
    assert states(storage) == {29: "committed"}


def test_a_list_is_made_again_if_all_it_named_were_replaced_meanwhile(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(storage, 100, 1)
    look = catalog._look

    def replaced(*words: Any) -> Any:
        monkeypatch.undo()
        save(storage, 200, 2)
        storage.remove_folder("step-00000100", METADATA)
        return look(*words)

    monkeypatch.setattr(catalog, "_look", replaced)
    assert states(storage) == {200: "committed"}


def test_a_list_made_while_others_save_holds_no_lie(storage: Storage) -> None:
    save(storage, 100, 0)
    saving = threading.Thread(target=lambda: [save(storage, 100, generation) for generation in range(1, 40)])
    saving.start()
    while saving.is_alive():
        assert states(storage) == {100: "committed"}


# --- copies ----------------------------------------------------------------------------------------------------------


def test_a_copy_is_whole_and_the_latest(storage: Storage, anywhere: Storage, tmp_path: Path) -> None:
    target = open_storage(tmp_path / "target") if anywhere.is_local else anywhere
    save(storage, 100, 1)
    told: list[int] = []
    catalog.copy(storage, find(storage, "step-00000100"), target, told.append)
    assert sum(told) == 10_001
    assert find(target, "step-00000100") == find(storage, "step-00000100")
    assert verify(target, find(target, "step-00000100")) == []
    assert target.read("latest") == b"step-00000100"


def test_an_older_copy_does_not_become_the_latest(storage: Storage, tmp_path: Path) -> None:
    target = open_storage(tmp_path / "target")
    for generation, step in enumerate([100, 200]):
        save(storage, step, generation)
    for name in ("step-00000200", "step-00000100"):
        catalog.copy(storage, find(storage, name), target)
    assert target.read("latest") == b"step-00000200"


def test_a_damaged_shard_is_not_copied(storage: Storage, tmp_path: Path) -> None:
    target = open_storage(tmp_path / "target")
    tag = save(storage, 100, 1)
    flip(Path(storage.url, "step-00000100", shard_name(1, tag)), 77)
    with pytest.raises(PlatformError, match=f"{shard_name(1, tag)} is not as it was saved"):
        catalog.copy(storage, find(storage, "step-00000100"), target)
    assert states(target) == {100: "partial"}
    assert shard_name(1, tag) not in target.names("step-00000100")


def test_a_bad_source_does_not_spoil_a_good_copy(storage: Storage, tmp_path: Path) -> None:
    target = open_storage(tmp_path / "target")
    tag = save(storage, 100, 1)
    chosen = find(storage, "step-00000100")
    catalog.copy(storage, chosen, target)
    flip(Path(storage.url, "step-00000100", shard_name(1, tag)), 77)
    catalog.copy(storage, chosen, target)
    assert verify(target, find(target, "step-00000100")) == []


def test_copying_again_mends_what_is_broken(storage: Storage, tmp_path: Path) -> None:
    target = open_storage(tmp_path / "target")
    tag = save(storage, 100, 1)
    chosen = find(storage, "step-00000100")
    catalog.copy(storage, chosen, target)
    flip(Path(target.url, "step-00000100", shard_name(1, tag)), 77)
    assert verify(target, chosen) != []
    catalog.copy(storage, chosen, target)
    assert verify(target, chosen) == []


def test_a_copy_that_others_prune_on_the_way_is_not_committed(storage: Storage, tmp_path: Path) -> None:
    target = open_storage(tmp_path / "target")
    tag = save(storage, 100, 1)
    first = f"step-00000100/{shard_name(0, tag)}"
    with pytest.raises(PlatformError, match=f"lost {shard_name(0, tag)} while it was copied"):
        catalog.copy(storage, find(storage, "step-00000100"), target, lambda _: target.remove(first))
    assert newest(target) is None


def test_a_copy_that_runs_out_of_room_does_not_load(storage: Storage, small_disk: Path) -> None:
    save(storage, 100, 1)
    (small_disk / "ballast").write_bytes(bytes((1 << 20) - 5 * 4096))
    target = open_storage(small_disk / "target")
    with pytest.raises(OSError, match="No space left"):
        catalog.copy(storage, find(storage, "step-00000100"), target)
    assert newest(target) is None


def test_a_foreign_checkpoint_is_copied_and_a_partial_one_is_not(storage: Storage, tmp_path: Path) -> None:
    target = open_storage(tmp_path / "target")
    storage.write("theirs/.metadata", b"a pickle")
    storage.write("theirs/__0_0.distcp", b"data")
    catalog.copy(storage, find(storage, "theirs"), target)
    assert target.read("theirs/__0_0.distcp") == b"data"
    assert find(target, "theirs").state == "foreign"
    save(storage, 100, 1, until="shards")
    with pytest.raises(InputError, match="was never committed"):
        catalog.copy(storage, find(storage, "step-00000100"), target)
