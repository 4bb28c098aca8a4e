"""A version is there whole, once, or not at all; `latest` always names a whole one, whoever dies or comes at once."""

import errno
import itertools
import json
import multiprocessing
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from file_systems import mounted
from version_stores import Dawdling, Refusing, made, publish, s3_root, s3_server, workplace  # noqa: F401

from headway.errors import InputError, PlatformError
from headway.publish.history import Serving, before, carried_out
from headway.publish.layout import BEGUN, CLAIMS, FORMAT, HISTORY, LATEST, MANIFEST, WORK, VersionManifest
from headway.publish.versions import Versions
from headway.storage import Storage, is_part, open_storage

KEY = "abcd1234"
SEED = int(os.environ.get("SEED", "8"))
KILLS = 25


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.thorough), "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty place in a folder, in S3, and in a store that knows no whole puts."""
    if request.param == "folder":
        return open_storage(tmp_path / "published")
    if request.param == "s3":
        return open_storage(request.getfixturevalue("s3_root"))
    return open_storage(f"memory://{secrets.token_hex(6)}/model")


@pytest.fixture
def local(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "published")


def served(storage: Storage) -> str:
    return storage.read(LATEST).decode()


def left_over(storage: Storage) -> list[str]:
    """What publishers have left behind."""
    work = storage.names(WORK) if storage.is_local else []
    return [name for name in [*storage.names(BEGUN), *storage.names(CLAIMS), *work] if not is_part(name)]


def assert_sound(storage: Storage) -> None:
    """Holds at every instant, whatever happened."""
    versions = Versions(storage)
    complete = [each for each in versions.all() if each.state == "complete"]
    assert len({(each.step, each.manifest.key) for each in complete if each.manifest}) == len(complete)
    assert [problem for each in complete for problem in versions.verify(each.name)] == []
    assert versions.problem() == ""
    if LATEST in storage.names():
        assert served(storage) in {each.name for each in complete}
        assert served(storage) in {each.version for each in versions.history()}


# --- what is published -----------------------------------------------------------------------------------------------


def test_a_version_is_what_its_folder_was(place: Storage, tmp_path: Path) -> None:
    folder = workplace(place, tmp_path, "work")
    manifest = made(
        folder, 500, anchor={"tag": "x"}, signature={"in": ["x"]}, checks=[{"name": "parity"}], facts={1: 2}
    )
    contents = {name: (folder / name).read_bytes() for name in manifest.files}
    version = Versions(place).add(folder, manifest)
    assert version.name.startswith("step-00000500-abcd1234-")
    assert (version.step, version.state, version.served) == (500, "complete", False)
    assert version.manifest
    assert version.manifest.size == 10_000
    assert version.manifest == replace(
        manifest, name=version.name, published_ns=version.manifest.published_ns, facts={"1": 2}
    )
    assert {name: place.read(f"{version.name}/{name}") for name in contents} == contents
    assert Versions(place).all() == [version] == [Versions(place).find("step-00000500")]
    assert Versions(place).verify(version.name) == []
    assert Versions(place).latest() is None
    assert left_over(place) == []


def test_latest_is_plain_text_that_a_server_can_follow(place: Storage, tmp_path: Path) -> None:
    version = publish(place, tmp_path, 500)
    assert place.read(LATEST) == version.name.encode()
    found = Versions(place).latest()
    assert found
    assert (found.name, found.served) == (version.name, True)
    assert_sound(place)


def test_the_same_anchor_and_recipe_twice_is_one_version(place: Storage, tmp_path: Path) -> None:
    versions = Versions(place)
    first = publish(place, tmp_path, 500)
    assert versions.with_key(500, KEY) == replace(first, served=True)
    again = workplace(place, tmp_path, "again")
    assert versions.add(again, made(again, 500)).name == first.name
    assert len(versions.all()) == 1
    assert (versions.with_key(500, "abcd"), versions.with_key(501, KEY)) == (None, None)
    publish(place, tmp_path, 500, "ffff0000")
    publish(place, tmp_path, 501)
    assert [(each.step, each.served) for each in versions.all()] == [(500, False), (500, False), (501, True)]
    assert_sound(place)


def test_a_folder_of_the_place_is_moved_and_any_other_is_copied(local: Storage, tmp_path: Path) -> None:
    inside = workplace(local, tmp_path, "inside")
    manifest = made(inside, 1)
    number = (inside / "weights/model.safetensors").stat().st_ino
    moved = Versions(local).add(inside, manifest)
    assert Path(local.url, moved.name, "weights/model.safetensors").stat().st_ino == number
    assert not inside.exists()
    outside = tmp_path / "outside"
    told: list[int] = []
    copied = Versions(local).add(outside, made(outside, 2), told.append)
    assert (outside / "README.md").exists()
    assert sum(told) == 10_000
    assert Versions(local).verify(copied.name) == []
    assert left_over(local) == []


def test_what_the_manifest_does_not_know_is_not_published(place: Storage, tmp_path: Path) -> None:
    folder = workplace(place, tmp_path, "work")
    manifest = made(folder, 1)
    made(folder / ".headway", 1)
    (folder / "link").symlink_to(tmp_path)
    version = Versions(place).add(folder, manifest)
    assert place.names(version.name) == ["README.md", MANIFEST, "weights"]


def test_names_may_have_odd_characters(place: Storage, tmp_path: Path) -> None:
    names = ["a b.bin", "ü/日本.txt", "50%25+x#1.bin", "tab\there", 'it\'s "so"', ".hidden", "deep/er/and/deeper"]
    folder = workplace(place, tmp_path, "work")
    version = Versions(place).add(folder, made(folder, 1, names=names))
    assert version.manifest
    assert set(names) < set(version.manifest.files)
    assert Versions(place).promote(version.name).served
    assert_sound(place)


@pytest.mark.parametrize("name", ["../escape", "/etc/hostname", "weights/../../escape"])
def test_a_file_outside_of_the_folder_is_refused(local: Storage, tmp_path: Path, name: str) -> None:
    folder = workplace(local, tmp_path, "work")
    manifest = made(folder, 1)
    manifest = replace(manifest, files={name: manifest.files["README.md"]})
    with pytest.raises(InputError, match="leads out of"):
        Versions(local).add(folder, manifest)
    assert Versions(local).all() == []


def test_a_link_is_refused(local: Storage, tmp_path: Path) -> None:
    folder = workplace(local, tmp_path, "work")
    manifest = made(folder, 1)
    os.rename(folder / "README.md", tmp_path / "README.md")
    (folder / "README.md").symlink_to(tmp_path / "README.md")
    with pytest.raises(InputError, match=r"'README\.md' is a link"):
        Versions(local).add(folder, manifest)


@pytest.mark.parametrize("key", ["", "a-b", "../x", "a b"])
def test_a_key_that_makes_no_name_is_refused(local: Storage, tmp_path: Path, key: str) -> None:
    with pytest.raises(InputError, match="make no name"):
        Versions(local).add(tmp_path, VersionManifest(step=1, key=key))


def test_facts_that_are_no_json_are_refused_before_anything_is_written(local: Storage, tmp_path: Path) -> None:
    folder = workplace(local, tmp_path, "work")
    for facts in ({"loss": float("nan")}, {"when": {1, 2}}):
        with pytest.raises(InputError, match="has to be JSON"):
            Versions(local).add(folder, made(folder, 1, facts=facts))
    assert local.names(BEGUN) == []


def test_a_file_that_changed_since_it_was_checked_is_not_published(place: Storage, tmp_path: Path) -> None:
    folder = tmp_path / "outside"
    manifest = made(folder, 1)
    (folder / "README.md").write_bytes(bytes(5000))
    with pytest.raises(PlatformError, match=r"README\.md is not what was checked"):
        Versions(place).add(folder, manifest)
    assert Versions(place).all() == []
    assert left_over(place) == []


def test_a_file_that_was_shortened_in_the_folder_is_not_published(local: Storage, tmp_path: Path) -> None:
    folder = workplace(local, tmp_path, "work")
    manifest = made(folder, 1)
    os.truncate(folder / "README.md", 10)
    with pytest.raises(PlatformError, match=r"README\.md has 10 bytes instead of 5000"):
        Versions(local).add(folder, manifest)
    assert Versions(local).all() == []


def test_what_a_killed_publisher_left_of_the_manifest_is_no_file_of_the_version(local: Storage, tmp_path: Path) -> None:
    folder = workplace(local, tmp_path, "work")
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(VersionManifest(step=1, key=KEY, name="never completed").to_json())
    (folder / f".{MANIFEST}.part-0a1b2c3d").write_text("{")
    version = Versions(local).add(folder, made(folder, 1, names=["version.json.txt"]))
    assert version.manifest
    assert set(version.manifest.files) == {"README.md", "version.json.txt", "weights/model.safetensors"}
    assert local.names(version.name) == ["README.md", MANIFEST, "version.json.txt", "weights"]


def test_a_recipe_may_not_make_the_manifest(local: Storage, tmp_path: Path) -> None:
    folder = workplace(local, tmp_path, "work")
    with pytest.raises(InputError, match="the manifest has that name"):
        Versions(local).add(folder, made(folder, 1, names=[MANIFEST]))
    (folder / MANIFEST).write_text(VersionManifest(step=2, key=KEY, name="other").to_json())
    with pytest.raises(InputError, match="holds another version, other"):
        Versions(local).add(folder, made(folder, 1))


# --- what there is ---------------------------------------------------------------------------------------------------


def test_an_empty_place_has_nothing(place: Storage) -> None:
    versions = Versions(place)
    assert (versions.all(), versions.latest(), versions.problem(), versions.history()) == ([], None, "", [])
    with pytest.raises(InputError, match=r"there is no version 'x' in .*: there is none yet"):
        versions.find("x")
    with pytest.raises(InputError, match="no version was served"):
        versions.rollback()


def test_foreign_files_are_no_versions(place: Storage, tmp_path: Path) -> None:
    version = publish(place, tmp_path, 1)
    for name in ("notes.txt", "step-1/x", "step-00000001/.metadata", "step-00000002-k-zz/a", f"x{version.name}/a"):
        place.write(name, b"foreign")
    place.write("step-00000003-abcd1234-ffff", b"a file")
    place.write(f"{version.name}/core.1234", b"foreign")
    place.write(f"{BEGUN}/readme", b"foreign")
    found = [each.name for each in Versions(place).all() if each.state == "complete"]
    assert found == [version.name]
    publish(place, tmp_path, 2)
    assert_sound(place)


def test_a_version_is_found_by_the_beginning_of_its_name(local: Storage, tmp_path: Path) -> None:
    names = [publish(local, tmp_path, step).name for step in (500, 501)]
    versions = Versions(local)
    assert versions.find("step-00000501").name == names[1]
    with pytest.raises(InputError, match="several versions in"):
        versions.find("step-0000050")
    with pytest.raises(InputError, match=f"did you mean {names[0]}"):
        versions.find(names[0].replace("500", "5OO"))
    for odd in ("", "../published", "*", "\0"):
        with pytest.raises(InputError, match="there is no version"):
            versions.find(odd)


def test_a_damaged_manifest_is_told_and_never_served(place: Storage, tmp_path: Path) -> None:
    good, bad = publish(place, tmp_path, 1), publish(place, tmp_path, 2)
    text = bytearray(place.read(f"{bad.name}/{MANIFEST}"))
    text[len(text) // 2] ^= 1
    place.write(f"{bad.name}/{MANIFEST}", bytes(text))
    versions = Versions(place)
    assert {each.name: each.state for each in versions.all()} == {good.name: "complete", bad.name: "damaged"}
    assert versions.latest() is None
    assert f"names '{bad.name}', which has a version.json that cannot be used" in versions.problem()
    with pytest.raises(InputError, match=r"cannot be served: has a version\.json that cannot be used"):
        versions.promote(bad.name)
    assert versions.with_key(2, KEY) is None
    assert versions.rollback().name == good.name == served(place)
    assert_sound(place)


def test_a_manifest_of_a_newer_headway_or_another_folder_or_none_is_told(local: Storage, tmp_path: Path) -> None:
    version = publish(local, tmp_path, 1)
    assert version.manifest
    path, versions = f"{version.name}/{MANIFEST}", Versions(local)
    for text, told in {
        replace(version.manifest, version=FORMAT + 1).to_json(): "from a newer headway",
        replace(version.manifest, name="other").to_json(): "of another one: other",
        "{}": "no manifest of a version",
        "[]": "no manifest of a version",
        "": "no manifest of a version",
    }.items():
        local.write(path, text.encode())
        [problem] = versions.verify(version.name)
        assert told in problem
    local.remove(path)
    assert versions.verify(version.name) == ["was never completed: there is no version.json"]
    assert [each.state for each in versions.all()] == ["partial"]


def test_missing_short_and_changed_files_are_found(place: Storage, tmp_path: Path) -> None:
    folder = workplace(place, tmp_path, "work")
    version = Versions(place).add(folder, made(folder, 1, names=["labels"]))
    place.remove(f"{version.name}/labels")
    data = bytearray(place.read(f"{version.name}/README.md"))
    data[7] ^= 16
    place.write(f"{version.name}/README.md", bytes(data))
    place.write(f"{version.name}/weights/model.safetensors", bytes(4999))
    changed, missing, short = Versions(place).verify(version.name)
    assert "README.md has the hash" in changed
    assert (missing, short) == ("labels is missing", "weights/model.safetensors has 4999 bytes instead of 5000")
    with pytest.raises(InputError, match=r"cannot be served: README\.md has the hash"):
        Versions(place).promote(version.name)
    assert LATEST not in place.names()


def test_a_version_that_lost_a_file_is_published_anew(place: Storage, tmp_path: Path) -> None:
    first = publish(place, tmp_path, 1)
    place.remove(f"{first.name}/README.md")
    second = publish(place, tmp_path, 1)
    assert second.name != first.name
    assert Versions(place).verify(second.name) == []


@pytest.mark.parametrize(
    "name",
    [
        "step-00000009-abcd1234-ffff",
        "../..",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("", "\n", "nothing", "a\0b")),
    ],
)
def test_a_pointer_that_names_nothing_serves_nothing_and_the_next_version_mends_it(
    place: Storage, tmp_path: Path, name: str
) -> None:
    place.write(LATEST, name.encode())
    versions = Versions(place)
    assert versions.latest() is None
    assert ("is not there" in versions.problem()) == bool(name.strip())
    publish(place, tmp_path, 1)
    assert_sound(place)


def test_a_read_only_place_can_be_read_and_nothing_else(tmp_path: Path) -> None:
    with mounted(tmp_path / "read-only", "size=4m,mode=700") as folder:
        storage = open_storage(folder)
        first, second = publish(storage, tmp_path, 1), publish(storage, tmp_path, 2)
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        versions, outside = Versions(storage), tmp_path / "outside"
        manifest = made(outside, 3)
        for change in (
            lambda: versions.add(outside, manifest),
            lambda: versions.promote(first.name),
            versions.rollback,
        ):
            with pytest.raises(OSError, match="Read-only") as caught:
                change()
            assert caught.value.errno == errno.EROFS
        assert versions.add(outside, made(outside, 2)).name == second.name
        assert versions.promote(second.name).served
        assert_sound(storage)


def test_a_place_needs_neither_torch_nor_fsspec() -> None:
    code = "import sys, headway.publish.versions; print({'torch', 'fsspec', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- what is served --------------------------------------------------------------------------------------------------


def test_rolling_back_twice_goes_two_versions_back(place: Storage, tmp_path: Path) -> None:
    names = [publish(place, tmp_path, step).name for step in (1, 2, 3)]
    versions = Versions(place)
    assert [versions.rollback().name, versions.rollback().name] == [names[1], names[0]]
    with pytest.raises(InputError, match=r"no version was served .* before"):
        versions.rollback()
    assert served(place) == names[0]
    assert [(each.version, each.why) for each in versions.history()] == [
        *((name, "publish") for name in names), (names[1], "rollback"), (names[0], "rollback")
    ]  # fmt: skip
    assert_sound(place)


def test_rolling_back_passes_over_what_is_gone_or_damaged(place: Storage, tmp_path: Path) -> None:
    names = [publish(place, tmp_path, step).name for step in (1, 2, 3, 4)]
    place.remove_folder(names[1])
    place.write(f"{names[2]}/README.md", bytes(5000))
    said: list[str] = []
    assert Versions(place).rollback(say=said.append).name == names[0]
    assert [line.partition(" ")[0] for line in said] == [names[2], names[1]]
    assert "its content changed" in said[0]
    assert "is gone" in said[1]


def test_one_can_go_to_a_version_by_name_and_back_again(local: Storage, tmp_path: Path) -> None:
    names = [publish(local, tmp_path, step).name for step in (1, 2, 3)]
    versions = Versions(local)
    assert versions.rollback(names[0][:13]).name == names[0]
    assert versions.promote(names[2]).name == names[2]
    assert versions.rollback().name == names[0]


def test_what_is_served_already_changes_nothing(local: Storage, tmp_path: Path) -> None:
    version, versions = publish(local, tmp_path, 1), Versions(local)
    was = local.read(HISTORY)
    assert versions.promote(version.name).name == versions.rollback(version.name).name == version.name
    assert local.read(HISTORY) == was


def test_publishing_again_does_not_undo_a_rollback(place: Storage, tmp_path: Path) -> None:
    first, second = publish(place, tmp_path, 1), publish(place, tmp_path, 2)
    versions = Versions(place)
    versions.rollback()
    assert publish(place, tmp_path, 2).name == second.name
    assert served(place) == first.name
    should, why = versions.should_promote(second)
    assert not should
    assert f"`headway publish promote {second.name}` moves it back" in why
    third = publish(place, tmp_path, 3)
    assert served(place) == third.name


def test_an_older_anchor_that_comes_late_is_not_served(local: Storage, tmp_path: Path) -> None:
    newer, late = publish(local, tmp_path, 200), publish(local, tmp_path, 100)
    assert served(local) == newer.name
    assert "of a later step of the same job" in Versions(local).should_promote(late)[1]
    other = publish(local, tmp_path, 50, job="another job")
    assert served(local) == other.name


def test_versions_without_a_job_are_not_of_the_same_one(local: Storage, tmp_path: Path) -> None:
    publish(local, tmp_path, 200, job="")
    older = publish(local, tmp_path, 100, job="")
    assert served(local) == older.name


def test_who_completed_a_version_knows_and_who_found_it_does_not(local: Storage, tmp_path: Path) -> None:
    first, second = Versions(local), Versions(local)
    version = first.add(tmp_path / "a", made(tmp_path / "a", 1))
    assert second.add(tmp_path / "b", made(tmp_path / "b", 1)).name == version.name
    assert (first.added, second.added) == ({version.name}, set())


def test_a_publisher_that_died_before_the_pointer_moved_is_made_up_for(local: Storage, tmp_path: Path) -> None:
    first, versions = publish(local, tmp_path, 1), Versions(local)
    folder = workplace(local, tmp_path, "work")
    second = versions.add(folder, made(folder, 2))
    assert versions.should_promote(second) == (True, "")  # never in history
    versions.promote(second.name)
    local.write(LATEST, first.name.encode())
    assert versions.should_promote(second) == (True, "")  # in history, and not carried out
    third = publish(local, tmp_path, 3)
    assert [each.version for each in versions.history()] == [first.name, third.name]
    assert versions.rollback().name == first.name


def test_a_rollback_that_died_before_the_pointer_moved_goes_to_the_same_version(local: Storage, tmp_path: Path) -> None:
    names = [publish(local, tmp_path, step).name for step in (1, 2, 3)]
    versions = Versions(local)
    versions.rollback()
    local.write(LATEST, names[2].encode())
    assert versions.rollback().name == names[1]
    assert versions.rollback().name == names[0]


def test_a_damaged_history_stops_nobody_from_serving_what_he_names(local: Storage, tmp_path: Path) -> None:
    publish(local, tmp_path, 1)
    folder, versions = workplace(local, tmp_path, "work"), Versions(local)
    second = versions.add(folder, made(folder, 2))
    for text in (b"[{", b"[1]", b"{}x", b'[{"version": "x"}]'):
        local.write(HISTORY, text)
        with pytest.raises(InputError, match="is damaged"):
            versions.rollback()
        should, why = versions.should_promote(second)
        assert not should
        assert "is damaged" in why
    versions.promote(second.name)
    assert [each.version for each in versions.history()] == [second.name]
    assert_sound(local)


def test_going_back_never_goes_round_in_circles() -> None:
    chance = random.Random(5)
    for _ in range(300):
        history: list[Serving] = []
        for _ in range(12):
            history.append(Serving(version=chance.choice("abcd"), at_s=0, why=chance.choice(["publish", "rollback"])))
        seen = [history[-1].version]
        while found := before(history, seen[-1]):
            history.append(Serving(version=found[0], at_s=0, why="rollback"))
            seen.append(found[0])
            assert len(seen) < 20
        assert carried_out(history, seen[-1]) == history


# --- kills -----------------------------------------------------------------------------------------------------------


def publish_for_ever(root: Path) -> None:
    storage = open_storage(root)
    for step in itertools.count(len({each.step for each in Versions(storage).all()}) or 1):
        publish(storage, root, step)


def test_publishers_killed_at_random_instants_leave_whole_versions_alone(
    local: Storage, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    chance, context = random.Random(SEED), multiprocessing.get_context("fork")
    began = time.monotonic()
    steps = [publish(local, tmp_path, step).step for step in range(1, 5)]
    pace_s = 3 * (time.monotonic() - began) / 4
    for _ in range(KILLS):
        publisher = context.Process(target=publish_for_ever, args=(Path(local.url),))
        publisher.start()
        time.sleep(chance.random() * pace_s)
        assert publisher.is_alive()
        os.kill(publisher.pid or 0, signal.SIGKILL)
        publisher.join()
        assert_sound(local)
        found = Versions(local).all()
        assert {each.state for each in found} <= {"complete"}  # a folder gets its name when it is whole
        complete, latest = [each.step for each in found], Versions(local).latest()
        assert complete == list(range(1, len(complete) + 1))  # none is lost, none is there twice
        assert len(complete) >= steps[-1]
        assert len(complete) - (latest.step if latest else 0) in (0, 1)
        pace_s *= 1.1 if len(complete) == steps[-1] else 0.9  # a busy machine takes longer than it did alone
        steps.append(len(complete))
    record_property("kills", KILLS)
    last = publish(local, tmp_path, steps[-1] + 1)
    assert served(local) == last.name
    assert [name for name in left_over(local) if not name.startswith("work-")] == []


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("folder", "not done"),
        ("memory", "no answer"),
        ("folder", "down"),
        pytest.param("memory", "not done", marks=pytest.mark.thorough),
        pytest.param("folder", "no answer", marks=pytest.mark.thorough),
        pytest.param("memory", "down", marks=pytest.mark.thorough),
    ],
)
def test_whichever_call_of_a_store_fails_trying_again_leaves_one_version(kind: str, how: str, tmp_path: Path) -> None:
    for nth in itertools.count(1):
        storage = open_storage(tmp_path / f"{nth}" if kind == "folder" else f"memory://{tmp_path.name}-{how[0]}{nth}/m")
        first = publish(storage, tmp_path / "a", 1)
        refusing = Refusing(storage, nth, how)  # type: ignore[arg-type]
        try:
            publish(refusing, tmp_path / "b", 2)
        except OSError as error:
            assert error.errno in (errno.EIO, errno.ETIMEDOUT)  # noqa: PT017
        assert_sound(storage)
        second = publish(storage, tmp_path / "b", 2)
        assert [each.name for each in Versions(storage).all()] == [first.name, second.name]
        assert served(storage) == second.name
        assert [each.version for each in Versions(storage).history()] == [first.name, second.name]
        publish(storage, tmp_path / "c", 3)
        assert storage.names(BEGUN) == []
        assert_sound(storage)
        if refusing.calls < nth:
            break
    assert nth > 25


def test_what_a_dead_publisher_left_goes_after_a_day_and_a_living_ones_stays(place: Storage, tmp_path: Path) -> None:
    now = time.time()
    told = {"dead": ("other", now - 90_000), "alive": ("other", now - 80_000), "own": ("publisher", now)}
    for number, (publisher, at_s) in enumerate(told.values()):
        name = f"step-0000000{number}-{KEY}-aaaa"
        place.write(f"{BEGUN}/{name}", json.dumps({"publisher": publisher, "at_s": at_s}).encode())
        place.write(f"{name}/weights/model.safetensors", b"a part of it")
        place.write(f"{CLAIMS}/{name}", b"")
    publish(place, tmp_path, 9)
    assert [each.step for each in Versions(place).all() if each.state == "partial"] == [1]
    assert place.names(BEGUN) == place.names(CLAIMS) == [f"step-00000001-{KEY}-aaaa"]


def test_a_copy_that_was_interrupted_goes_when_its_publisher_tries_again(local: Storage, tmp_path: Path) -> None:
    folder = tmp_path / "outside"
    manifest = made(folder, 1)
    with pytest.raises(OSError, match="refused"):
        Versions(Refusing(local, 9, "down")).add(folder, manifest, publisher="me")
    assert len(local.names(WORK)) == 1
    Versions(local).add(folder, manifest, publisher="me")
    assert left_over(local) == []


# --- several at once -------------------------------------------------------------------------------------------------


def publish_together(root: str, number: int, rounds: int, together: Barrier) -> None:
    storage = open_storage(root)
    for step in range(rounds):
        folder = workplace(storage, Path(root), f"publisher-{number}")
        manifest = made(folder, step)
        together.wait(120)
        version = Versions(storage).add(folder, manifest)
        Path(root, "told").mkdir(exist_ok=True)
        Path(root, "told", f"{step}-{number}").write_text(version.name)
        together.wait(120)
        shutil.rmtree(folder, ignore_errors=True)


def test_of_two_processes_that_publish_the_same_at_once_one_does(local: Storage) -> None:
    context, rounds = multiprocessing.get_context("fork"), 8
    together = context.Barrier(2)
    processes = [
        context.Process(target=publish_together, args=(local.url, number, rounds, together)) for number in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
        assert process.exitcode == 0
    names = [each.name for each in Versions(local).all()]
    assert len(names) == rounds
    for step, name in enumerate(names):
        assert {Path(local.url, "told", f"{step}-{number}").read_text() for number in range(2)} == {name}
    assert left_over(local) == []
    assert_sound(local)


def add_at_once(stores: list[Storage], folders: Iterator[Path], step: int) -> set[str]:
    """The names that several publishers of the same have been told."""
    told: set[str] = set()

    def add(storage: Storage, folder: Path) -> None:
        told.add(Versions(storage).add(folder, made(folder, step)).name)

    threads = [threading.Thread(target=add, args=(storage, next(folders))) for storage in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    return told


@pytest.mark.parametrize(
    ("kind", "rounds", "longest_s"),
    [("folder", 10, 0.004), pytest.param("s3", 3, 0.02, marks=pytest.mark.thorough)],
)
def test_of_three_that_publish_the_same_one_does_in_whatever_order_their_calls_come(
    kind: str, rounds: int, longest_s: float, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    root = str(tmp_path / "published") if kind == "folder" else request.getfixturevalue("s3_root")
    folders = (tmp_path / f"work-{number}" for number in itertools.count())
    for step in range(rounds):
        stores: list[Storage] = [Dawdling(open_storage(root), 3 * step + number, longest_s) for number in range(3)]
        told = add_at_once(stores, folders, step)
        assert [each.name for each in Versions(open_storage(root)).all() if each.step == step] == sorted(told)
        assert len(told) == 1
    assert left_over(open_storage(root)) == []
    assert_sound(open_storage(root))


@pytest.mark.parametrize("token", ["000000", "ffffff0"])
def test_a_dead_publishers_claim_is_waited_for_only_so_long(local: Storage, tmp_path: Path, token: str) -> None:
    local.write(f"{CLAIMS}/step-00000001-{KEY}-{token}", b"")
    folder = workplace(local, tmp_path, "work")
    began = time.monotonic()
    version = Versions(local, patience_s=0.3).add(folder, made(folder, 1))
    assert time.monotonic() - began > 0.3
    assert [each.name for each in Versions(local).all()] == [version.name]


def test_whoever_waits_takes_what_the_other_completes(local: Storage, tmp_path: Path) -> None:
    claim = f"step-00000001-{KEY}-000000"
    local.write(f"{CLAIMS}/{claim}", b"")
    folders = iter([workplace(local, tmp_path, "waits")])
    told: list[set[str]] = []
    thread = threading.Thread(target=lambda: told.append(add_at_once([local], folders, 1)))
    thread.start()
    time.sleep(0.3)  # it claims, sees that it is not the first, takes its claim back, and waits
    work = workplace(local, tmp_path, "other")
    manifest = replace(made(work, 1), name=claim)
    local.write(f"{WORK}/other/{MANIFEST}", manifest.to_json().encode())
    os.rename(work, Path(local.url, claim))
    local.remove(f"{CLAIMS}/{claim}")
    thread.join(200)
    assert told == [{claim}]
    assert local.names(BEGUN) == local.names(CLAIMS) == []
