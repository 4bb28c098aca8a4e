"""From a request to a version: whole or not at all, and once, whoever is killed when."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from publishing import LIMIT_S, NAME, RECIPE, Place

import guard
from headway.checkpoint import catalog
from headway.storage import open_storage


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path / "place")
    made.save()
    return made


def words(place: Place) -> tuple[str, ...]:
    return ("run", str(place.root), "--recipe", "a_recipe.py:publish", "--to", str(place.to))


SEED = int(os.environ.get("SEED", "8"))


def test_a_checkpoint_becomes_a_version_that_is_served(place: Place) -> None:
    command = place.command(*words(place))  # the real start of all processes
    done = subprocess.run(**command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    (version,) = place.complete()
    assert (version.step, version.served) == (100, True)
    assert done.stdout == f"{version.name} is in {place.to}.\n"
    assert version.manifest
    assert {"README.md", "labels.txt", "part-0/data", "part-3/data"} <= version.manifest.files.keys()
    assert version.manifest.anchor["checkpoint"] == NAME
    assert version.manifest.recipe == "a_recipe.py:publish"
    assert (place.to / "latest").read_text() == version.name
    assert not list((place.to / ".headway" / "work").glob("*/*"))
    state = place.state()
    assert (state["phase"], state["version"], state["tries"]) == ("published", version.name, 1)


def test_an_anchor_is_kept_until_it_is_published(place: Place) -> None:
    place.recipe("def publish(anchor, out): raise SystemError('not yet')")
    assert place.publish().returncode == 1
    assert catalog.find(open_storage(place.root), NAME).pinned
    place.recipe()
    assert place.publish().returncode == 0
    assert not catalog.find(open_storage(place.root), NAME).pinned


def test_publishing_twice_is_publishing_once(place: Place) -> None:
    assert place.publish().returncode == 0
    (version,) = place.complete()
    again = place.publish()
    assert again.returncode == 0, again.stderr
    assert [each.name for each in place.complete()] == [version.name]
    assert place.made.read_text().count("made") == 4


def test_a_recipe_that_was_changed_is_another_one(place: Place) -> None:
    place.publish()
    place.recipe(RECIPE + "# changed\n")
    assert place.publish().returncode == 0
    first, second = place.complete()
    assert (first.served, second.served) == (False, True)
    assert place.run("rollback", str(place.to)).stdout == f"latest is {first.name}.\n"
    assert place.publish().returncode == 0, "what was rolled back is there already"
    assert (place.to / "latest").read_text() == first.name
    assert place.run("promote", str(place.to), second.name).stdout == f"latest is {second.name}.\n"


@pytest.mark.thorough
def test_a_recipe_whose_imported_code_was_changed_is_another_one(place: Place) -> None:
    beside, later = place.folder / "beside_it.py", place.folder / "imported_later.py"
    beside.write_text("")
    later.write_text("")
    place.recipe(
        "import beside_it\n" + RECIPE.replace("def make(folder):", "def make(folder):\n    import imported_later")
    )
    assert place.publish().returncode == 0
    later.write_text("# changed\n")
    assert place.publish().returncode == 0
    assert len(place.complete()) == 1, "what a step imports is no part of the recipe's name"
    beside.write_text("# changed\n")
    assert place.publish().returncode == 0
    assert len(place.complete()) == 2


def test_an_older_step_that_is_published_late_is_not_served(place: Place) -> None:
    place.save(100, 2, job="ads")
    place.save(200, 3, job="ads")
    assert place.publish().returncode == 0
    done = place.run("run", f"{place.root}/{NAME}", "--recipe", "a_recipe.py:publish", "--to", str(place.to))
    assert done.returncode == 0
    assert "stays served" in done.stdout
    assert {each.step: each.served for each in place.complete()} == {100: False, 200: True}


def test_without_promotion_latest_stays(place: Place) -> None:
    assert place.publish("--no-promote").returncode == 0
    (version,) = place.complete()
    assert not version.served
    assert not (place.to / "latest").exists()


def test_a_version_that_has_changed_since_it_was_published_is_not_served(place: Place) -> None:
    assert place.publish("--no-promote").returncode == 0
    (version,) = place.complete()
    data = place.to / version.name / "part-0" / "data"
    data.write_bytes(data.read_bytes()[:-1] + b"y")
    done = place.publish()
    assert done.returncode == 2
    assert f"{version.name} cannot be served: part-0/data has the hash" in done.stderr
    assert "Delete it and publish it again" in done.stderr
    assert not (place.to / "latest").exists()
    shutil.rmtree(data.parents[1])
    assert place.publish().returncode == 0
    assert place.complete()[0].served


def test_a_retry_goes_on_after_the_steps_that_are_done(place: Place) -> None:
    dies_once = "    if not os.path.exists('died'): open('died', 'w').close(); os.kill(os.getpid(), 9)\n"
    place.recipe(RECIPE.replace("    (out /", f"{dies_once}    (out /"))
    assert place.publish().returncode == 0
    assert place.made.read_text().count("made") == 4
    assert len(place.complete()) == 1
    assert place.state()["tries"] == 2


@pytest.mark.thorough
def test_what_is_published_stays_so_when_its_checkpoint_is_gone(place: Place) -> None:
    place.publish()
    shutil.rmtree(place.root / NAME)
    done = place.run("run", place.state()["id"])
    assert done.returncode == 0, done.stderr
    assert "it cannot be made again: there is no checkpoint" in done.stdout
    assert place.state()["phase"] == "published"


@pytest.mark.thorough
def test_a_published_request_that_is_submitted_again_publishes_what_has_changed(place: Place) -> None:
    assert place.publish().returncode == 0
    (first,) = place.complete()
    for changed in (lambda: None, lambda: place.recipe(RECIPE + "# changed\n"), lambda: place.save(generation=2)):
        changed()
        done = place.run("submit", place.state()["id"], "--allow", "size")
        assert done.returncode == 0, done.stderr
        assert "It is published by process" in done.stdout
        wait_until(lambda: place.state()["phase"] == "published")
        assert not catalog.find(open_storage(place.root), NAME).pinned
    assert len(place.complete()) == 3
    assert place.state()["version"] != first.name


@pytest.mark.thorough
def test_a_checkpoint_saved_again_and_gone_before_it_is_published_is_no_success(place: Place) -> None:
    place.publish()
    place.save(generation=2)
    place.recipe("def publish(anchor, out): raise ValueError")
    assert place.publish().returncode == 1
    shutil.rmtree(place.root / NAME)
    done = place.run("run", place.state()["id"])
    assert done.returncode == 2
    assert "there is no checkpoint" in done.stderr
    assert (place.state()["phase"], place.state()["version"]) == ("failed", "")


@pytest.mark.thorough
def test_a_publisher_that_died_after_it_had_published_leaves_nothing_behind(place: Place) -> None:
    dies = "def dies(*args, **more): add(*args, **more); os.kill(os.getpid(), 9)\nVersions.add = dies\n"
    place.recipe(f"{RECIPE}from headway.publish.versions import Versions\nadd = Versions.add\n{dies}")
    assert place.publish("--to", f"file://{place.to}").returncode == 0
    assert place.state()["tries"] == 2
    assert len(place.complete()) == 1
    assert not list((place.to / ".headway" / "work").iterdir())


@pytest.mark.thorough
def test_asking_again_keeps_the_checkpoint_for_that_alone(place: Place) -> None:
    place.recipe("def publish(anchor, out): raise ValueError")
    place.publish()
    id = place.state()["id"]
    place.recipe()
    (place.folder / "another.py").write_text(RECIPE)
    assert place.run("run", id, "--recipe", "another.py:publish", "--to", "elsewhere").returncode == 0
    assert not catalog.find(open_storage(place.root), NAME).pinned
    assert Path((place.folder / "elsewhere" / "latest").read_text()).name.startswith("step-00000100-")
    assert place.run("status", id).stdout.count("was asked for instead") == 1


# --- what is wrong ---------------------------------------------------------------------------------------------------


def test_a_recipe_that_raises_is_not_tried_again_and_says_why(place: Place) -> None:
    place.recipe("def publish(anchor, out): raise ValueError('no such table')")
    done = place.publish()
    assert done.returncode == 1
    assert "ValueError: no such table" in done.stderr
    state = place.state()
    assert (state["phase"], state["category"], state["tries"]) == ("failed", "python_error", 1)
    assert "ValueError: no such table" in state["problem"]
    assert "Traceback" in place.run("logs", state["id"]).stdout
    assert place.complete() == []


def test_a_recipe_that_fills_the_disk_fails_at_once_and_gives_the_room_back(place: Place) -> None:
    place.recipe(
        "import resource\n"
        "def publish(anchor, out):\n"
        "    out.step('big', lambda folder: (folder / 'data').write_bytes(b'x' * 50_000_000))\n"
        "    out.step('more', fill)\n"
        "def fill(folder):\n"
        "    (folder / 'half').write_bytes(b'x' * 50_000_000)\n"
        "    raise OSError(28, 'No space left on device')\n"
    )
    assert place.publish().returncode == 1
    state = place.state()
    assert (state["phase"], state["category"], state["tries"]) == ("failed", "disk_full", 1)
    assert not list(place.folder.rglob("half"))
    assert place.complete() == []


def test_a_recipe_that_makes_nothing_is_told(place: Place) -> None:
    place.recipe("def publish(anchor, out): pass")
    done = place.publish()
    assert done.returncode == 2
    assert "has made nothing" in done.stderr


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ("missing.py:publish", "there is no file"),
        ("a_recipe.py:missing", "there is no missing to be called"),
        ("safetensor", "did you mean safetensors"),
        pytest.param("aotinductor", "Give model=file.py:function", marks=pytest.mark.thorough),
    ],
)
def test_what_is_no_recipe_is_told(place: Place, recipe: str, told: str) -> None:
    done = place.publish(recipe=recipe)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert place.complete() == []
    assert recipe.startswith("a_recipe") == catalog.find(open_storage(place.root), NAME).pinned


@pytest.mark.parametrize(
    "to",
    [
        "checkpoints",
        pytest.param(f"checkpoints/{NAME}", marks=pytest.mark.thorough),
        pytest.param("checkpoints/.headway/versions", marks=pytest.mark.thorough),
    ],
)
def test_versions_are_not_put_where_the_checkpoints_have_files_of_their_own(place: Place, to: str) -> None:
    done = place.publish("--to", to)
    assert done.returncode == 2
    assert "Name another folder" in done.stderr
    assert not catalog.find(open_storage(place.root), NAME).pinned


@pytest.mark.thorough
def test_a_recipe_cannot_go_on_after_a_failed_check(place: Place) -> None:
    place.recipe(
        "from headway.publish.out import Check\n"
        "def publish(anchor, out):\n"
        "    (out / 'a').write_text('a')\n"
        "    try: out.add(Check(name='auc', passed=False, told='0.51'))\n"
        "    except Exception: pass\n"
    )
    done = place.publish()
    assert done.returncode == 3
    assert "auc: 0.51" in done.stderr


def test_a_request_that_cannot_be_read_does_not_hide_the_others(place: Place) -> None:
    place.publish()
    damaged = place.home / "publish" / "damaged"
    damaged.mkdir()
    (damaged / "request.json").write_text("{")
    assert place.state()["phase"] == "published"
    done = place.run("run", "damaged")
    assert done.returncode == 2
    assert "request.json cannot be used" in done.stderr


def test_an_anchor_that_is_missing_is_told(place: Place) -> None:
    done = place.run("run", f"{place.root}/step-00000999", "--recipe", "a_recipe.py:publish")
    assert done.returncode == 2
    assert "there is no checkpoint step-00000999" in done.stderr


def test_a_failed_check_publishes_nothing_and_is_not_tried_again(place: Place) -> None:
    (place.folder / "checks.py").write_text(
        "def good(folder): assert (folder / 'labels.txt').read_text() == 'click'\n"
        "def bad(folder): return 'the AUC is 0.51'\n"
    )
    done = place.publish("--check", "checks.py:good", "--check", "checks.py:bad")
    assert done.returncode == 3
    assert "the AUC is 0.51" in done.stderr
    assert place.state()["phase"] == "rejected"
    assert place.complete() == []
    assert not (place.to / "latest").exists()
    assert place.publish("--check", "checks.py:good").returncode == 0


def test_a_version_half_as_large_is_rejected_unless_that_is_meant(place: Place) -> None:
    place.publish()
    before = (place.to / "latest").read_text()
    place.save(200, 2)
    place.recipe(RECIPE.replace("300_000", "3_000"))
    done = place.publish()
    assert done.returncode == 3
    assert "size" in done.stderr
    assert (place.to / "latest").read_text() == before
    assert place.publish("--allow", "size").returncode == 0
    assert (place.to / "latest").read_text() != before


# --- kills, and two at once ------------------------------------------------------------------------------------------


def wait_until(is_true: Callable[[], object]) -> None:
    until = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_killed_at_random_instants_it_publishes_exactly_one_version(
    place: Place, record_property: Callable[[str, object], None]
) -> None:
    """The publisher, its supervisor or both are killed, twice in each of three places."""
    chance = random.Random(SEED)
    assert place.run("run", "--help").returncode == 0  # what all processes are forked from is there
    began = time.monotonic()
    assert place.run(*words(place)).returncode == 0
    whole_s, killed = time.monotonic() - began, 0
    for number in range(3):
        place = Place(place.folder.parent / f"place-{number}")
        place.save()
        for _ in range(2):
            killed += kill_a_publisher(place, chance, chance.uniform(0, whole_s))
        done = place.run(*words(place))
        assert done.returncode == 0, done.stderr
        assert len(place.complete()) == 1
        assert place.complete()[0].served
        assert len([each for each in place.to.iterdir() if each.name.startswith("step-")]) == 1
        assert place.state()["phase"] == "published"
    record_property("kills", killed)


def kill_a_publisher(place: Place, chance: random.Random, after_s: float) -> int:
    """Kill some of a publisher's processes after that time. Return how many were still there."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process, killed = place.start(*words(place), start_new_session=True, **quiet), 0
    time.sleep(after_s)
    victims = [process.pid, *guard.descendants(process.pid)]
    for pid in chance.sample(victims, chance.randint(1, len(victims))):
        try:
            os.kill(pid, signal.SIGKILL)
            killed += 1
        except ProcessLookupError:
            pass
    process.wait(LIMIT_S)
    found = place.complete()
    assert len(found) <= 1
    if (place.to / "latest").exists():
        assert (place.to / "latest").read_text() == found[0].name
    if process.returncode and list(place.home.glob("publish/*/request.json")):
        assert place.state()["phase"] in ("interrupted", "waiting", "published", "failed")
    return killed


def test_two_publishers_at_once_publish_one_version(place: Place) -> None:
    pair = [place.start(*words(place), stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=LIMIT_S)[1] for process in pair]
    assert sorted(process.returncode for process in pair) in ([0, 0], [0, 1])
    if any(process.returncode for process in pair):
        assert any("is being published already" in text for text in told)
    assert len(place.complete()) == 1


def test_two_publishers_with_homes_of_their_own_publish_one_version(place: Place) -> None:
    homes = [{"HEADWAY_HOME": str(place.folder / f"home-{number}")} for number in range(2)]
    pair = [place.start(*words(place), environ=home, stdout=subprocess.DEVNULL) for home in homes]
    assert [process.wait(LIMIT_S) for process in pair] == [0, 0]
    assert len(place.complete()) == 1


@pytest.mark.thorough
def test_a_store_that_is_down_is_tried_again_and_said_so(place: Place) -> None:
    pytest.importorskip("s3fs", reason="needs s3fs: pip install s3fs")
    environ = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    to_s3 = ("run", str(place.root), "--recipe", "a_recipe.py:publish", "--to", "s3://bucket/model")
    process = place.start(*to_s3, environ=environ, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: bool(list(place.home.glob("publish/*/state.json"))))
        told: list[dict[str, Any]] = []
        wait_until(lambda: told.append(place.state()) or told[-1]["phase"] == "retrying")
        assert "127.0.0.1:9" in told[-1]["problem"]
    finally:
        process.terminate()
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert place.state()["phase"] == "interrupted"
