"""A trainer saves, hands over, and leaves; somebody else publishes what it has trained."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from handing_over import SIZE, Model
from publishing import LIMIT_S, NAME, Place
from safetensors.torch import load_file

import ranks
from headway.checkpoint import catalog
from headway.cli import main
from headway.publish.hand_over import hand_over
from headway.publish.request import Publish, all_desks
from headway.storage import open_storage

TRAINER = Path(__file__).with_name("handing_over.py")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "place")


def trained(place: Place, how: str = "", count: int = 1, **environ: str) -> "subprocess.CompletedProcess[str]":
    """The end of a trainer that hands over to a process of its own."""
    given = place.environ | {"HEADWAY_JOB": "ads"} | environ
    return ranks.run(count, [TRAINER, str(place.root), how], cwd=place.folder, env=given)


LATER = "def later(request, desk, command): return 'somebody, later'\n"


def trained_and_published(place: Place, how: str = "", **environ: str) -> None:
    """A trainer hands over, and the publisher is then run here, in processes that have imported torch already."""
    (place.folder / "a_runner.py").write_text(LATER)
    done = trained(place, how, RUNNER="a_runner:later", **environ)
    assert done.returncode == 0, done.stderr
    assert "not published yet" not in done.stderr
    done = place.run("run", json.loads(place.run("status", "--json").stdout)[0]["id"])
    assert done.returncode == 0, done.stderr
    assert place.state()["phase"] == "published"


def published(place: Place) -> dict[str, Any]:
    """The state of the request, when it has ended."""
    until = time.monotonic() + LIMIT_S
    while (state := place.state())["phase"] not in ("published", "failed", "rejected"):
        assert time.monotonic() < until, state
        time.sleep(0.1)
    return state


def test_what_two_ranks_trained_is_published_by_a_process_of_its_own(place: Place) -> None:
    done = trained(place, count=2)
    assert done.returncode == 0, done.stderr
    state = published(place)
    assert state["phase"] == "published", state
    (version,) = place.complete()
    assert version.served
    assert version.manifest
    anchor = version.manifest.anchor
    assert (anchor["job"], anchor["step"], anchor["world_size"], anchor["recipe"]) == ("ads", 10, 2, "safetensors")
    assert (anchor["data"]["batches"], anchor["torch"]) == (10, torch.__version__.partition("+")[0]) or anchor["torch"]
    weights = load_file(place.to / version.name / "weights" / "model.safetensors")
    model = Model()
    assert {name: value.shape for name, value in weights.items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    assert not any(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert not catalog.find(open_storage(place.root), "step-00000010").pinned
    while (report := report_of(place))["publications"][0]["outcome"] == "running":  # it says so after its request does
        time.sleep(0.05)
    (told,) = report["publications"]
    assert (told["outcome"], told["version"]) == ("published", version.name)
    assert report["attempts"][-1]["world_size"] == 2
    assert len(report["attempts"]) == 1
    assert "ads" in (place.to / version.name / "README.md").read_text()


def report_of(place: Place) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["report", "ads", "--json"], env=place.environ)
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


@pytest.mark.thorough
def test_a_closed_checkpointer_has_been_saved_already(place: Place) -> None:
    trained_and_published(place, "closed")
    assert [each.step for each in catalog.checkpoints(open_storage(place.root))] == [10]


def test_a_state_that_was_not_saved_is_an_error_of_the_trainers(place: Place) -> None:
    done = trained(place, "never saved")
    assert done.returncode != 0
    assert "there is nothing to publish" in done.stderr
    assert not (place.home / "publish").exists()


def test_what_an_earlier_run_left_as_the_same_step_is_not_published(place: Place) -> None:
    trained_and_published(place, SEED="1")
    trained_and_published(place, "anew", SEED="2")
    first, second = weights_published(place)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def weights_published(place: Place) -> list[dict[str, torch.Tensor]]:
    return [load_file(place.to / each.name / "weights" / "model.safetensors") for each in place.complete()]


@pytest.mark.thorough
def test_who_only_saves_has_the_last_step_published(place: Place) -> None:
    trained_and_published(place, "only saves")
    (version,) = place.complete()
    assert version.step == 10
    assert sorted(each.step for each in catalog.checkpoints(open_storage(place.root))) == [5, 10]


def test_finishing_twice_is_finishing_once_and_a_job_that_is_not_measured_publishes_too(place: Place) -> None:
    trained_and_published(place, "twice", HEADWAY_DISABLE="1")
    assert len(place.complete()) == 1
    assert not (place.home / "jobs").exists()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("one fails", "'NoneType' object is not callable"),
        pytest.param("destroyed", "Finish first", marks=pytest.mark.thorough),
    ],
)
def test_what_cannot_be_saved_ends_all_ranks_with_the_reason(place: Place, how: str, told: str) -> None:
    done = trained(place, how, count=2)
    assert done.returncode != 0
    assert told in done.stderr
    assert not (place.home / "publish").exists()


def test_without_a_checkpointer_it_says_what_to_do(place: Place) -> None:
    done = trained(place, "without a checkpointer")
    assert done.returncode != 0
    assert "headway publish submit FOLDER --recipe RECIPE" in done.stderr


@pytest.mark.parametrize(
    ("how", "environ", "told"),
    [
        ("no such recipe", {}, "there is no file"),
        ("", {"SLURM_JOB_ID": "77"}, "--runner slurm"),
        pytest.param("", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes", marks=pytest.mark.thorough),
    ],
)
def test_a_refusal_is_no_failure_of_the_training_and_the_anchor_is_kept(
    place: Place, how: str, environ: dict[str, str], told: str
) -> None:
    done = trained(place, how, **environ)
    assert done.returncode == 0, done.stderr
    assert told in done.stderr
    assert "the model is not published yet" in done.stderr
    assert catalog.find(open_storage(place.root), "step-00000010").pinned
    state = place.state()
    assert state["phase"] in ("waiting", "failed")
    report = report_of(place)
    assert report["publications"][0]["outcome"] == "waiting"
    if not how:
        assert place.run("run", state["id"]).returncode == 0
        assert len(place.complete()) == 1


def handed_over(place: Place, what: Publish, root: str = "", checkpoint: str = NAME) -> dict[str, Any]:
    """What a trainer is told that has just saved."""
    process: Any = SimpleNamespace(job="ads", attempt=1, world_size=1)
    return hand_over(what, process, place.home, None, root=root or str(place.root), checkpoint=checkpoint, data={})


def test_a_checkpoint_that_could_not_be_pinned_is_not_said_to_be_kept(place: Place) -> None:
    place.save()
    (place.root / NAME / ".metadata").write_bytes(b"")
    told = handed_over(place, Publish(to="elsewhere", checks=("a.py:f",), allow=("size",), promote=False))
    assert not told["submitted"]
    assert "is not pinned for it, and may be pruned" in told["why"]
    to = Path("elsewhere").absolute()
    assert told["why"].endswith(
        f"Then: headway publish submit {place.root}/{NAME} --to {to} --check a.py:f --allow size --no-promote"
    )


def test_a_misspelt_runner_fails_the_request_and_names_the_right_one(place: Place) -> None:
    place.save()
    told = handed_over(place, Publish(runner="slrum"))
    assert "did you mean slurm?" in told["why"]
    assert told["why"].endswith(f"{place.root}/{NAME} is kept for it. Then: headway publish submit {told['id']}")
    (desk,) = all_desks(place.home)
    assert (desk.state().phase, "did you mean slurm?" in desk.state().problem) == ("failed", True)


def test_a_login_in_a_url_is_not_told(place: Place) -> None:
    place.save()
    told = handed_over(place, Publish(to="memory://user:secret@host/models", runner="slrum"))
    assert (told["to"], "secret" in str(told)) == ("memory://***@host/models", False)
    told = handed_over(place, Publish(), root="memory://user:secret@host/checkpoints")
    assert "memory://***@host/checkpoints" in told["why"]
    assert "secret" not in str(told)


def test_the_program_is_served_by_a_process_that_knows_neither_headway_nor_the_model(place: Place) -> None:
    trained_and_published(place, "export")
    program = f"""
import sys, torch
folder = sys.argv[1]
version = open(folder + "/latest").read()
model = torch.export.load(f"{{folder}}/{{version}}/program/model.pt2").module()
assert model(torch.ones(4, {SIZE})).shape == (4, 1)
assert "headway" not in sys.modules and "handing_over" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, str(place.to)], check=True, cwd="/", timeout=LIMIT_S)
