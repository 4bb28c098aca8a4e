"""Requests to publish: what was asked for, and how far it is, whoever dies."""

import errno
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.errors import InputError, PlatformError
from headway.events.clock import pid_space
from headway.publish.request import Desk, Publish, Request, State, all_desks, find_desk, open_desk, request_id


def a_request(checkpoint: str = "step-00000500", **what: object) -> Request:
    publish = Publish(**what)  # type: ignore[arg-type]
    id = request_id("ads", "/ckpt", checkpoint, publish)
    return Request(id=id, what=publish, root="/ckpt", checkpoint=checkpoint, job="ads", asked_s=1.0)


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    request = a_request(recipe="a.py:f", checks=("b.py:g",), allow=("size",), sbatch="--partition=cpu")
    assert open_desk(tmp_path, request).request == request
    assert find_desk(tmp_path, request.id).request == request
    assert request.to == "/ckpt/published"


def test_asking_twice_is_asking_once_and_another_recipe_is_another_request() -> None:
    assert a_request().id == a_request().id == a_request(runner="slurm").id == a_request(promote=False).id
    assert len({a_request().id, a_request(recipe="export").id, a_request("step-1").id, a_request(to="/x").id}) == 4


def test_a_request_is_found_by_how_it_begins(tmp_path: Path) -> None:
    first, second = a_request(), a_request("step-00000600")
    for each in (first, second):
        open_desk(tmp_path, each)
    assert find_desk(tmp_path, "ads-step-00000600").request == second
    with pytest.raises(InputError, match="several requests begin with"):
        find_desk(tmp_path, "ads")
    with pytest.raises(InputError, match="did you mean"):
        find_desk(tmp_path, "adz-step-00000600")
    with pytest.raises(InputError, match="there is none yet"):
        find_desk(tmp_path / "empty", "ads")
    assert {desk.request.id for desk in all_desks(tmp_path)} == {first.id, second.id}


def test_what_cannot_be_allowed_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean latency"):
        Publish(allow=("latancy",))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"recipe": print}, "recipe is <built-in function print>, which is no text"),
        ({"model": None}, "model is None"),
        ({"checks": "a.py:f"}, r"checks=\('a.py:f',\)"),
        ({"allow": "size"}, r"allow=\('size',\)"),
    ],
)
def test_what_is_no_name_is_told_at_once(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Publish(**given)


def test_a_path_may_be_published_to() -> None:
    assert Publish(to=Path("/models")).to == "/models"  # type: ignore[arg-type]


def test_after_a_power_failure_nobody_is_at_work(tmp_path: Path) -> None:
    desk = open_desk(tmp_path, a_request())
    boot = desk.begin(1).boot
    desk.change(boot=f"00000000-{boot[9:]}")
    assert desk.state().phase == "interrupted"


@pytest.mark.parametrize(
    "elsewhere",
    [{"node": "another", "boot": "its own"}, {"boot": f"{pid_space().split()[0]} another"}],
    ids=["machine", "container"],
)
def test_whoever_published_on_another_machine_is_at_it_as_long_as_it_holds_the_lock(
    tmp_path: Path, elsewhere: dict[str, str]
) -> None:
    desk = open_desk(tmp_path, a_request())
    desk.begin(1)
    desk.change(**elsewhere)
    with desk.held():
        assert Desk(desk.folder).state().phase == "running"
    assert desk.state().phase == "interrupted"
    assert f"headway publish run {desk.folder.name}" in desk.state().problem


def test_who_only_looks_keeps_nobody_from_publishing(tmp_path: Path) -> None:
    desk, other, refused = open_desk(tmp_path, a_request()), threading.Event(), threading.Event()

    def look() -> None:
        with Desk(desk.folder).held(patience_s=0.0):
            other.set()
            assert refused.wait(120)
            time.sleep(0.1)  # so that the other one begins to wait

    with ThreadPoolExecutor() as threads:
        looked = threads.submit(look)
        assert other.wait(120)
        try:
            with pytest.raises(InputError, match="is being published already"), desk.held(patience_s=0.0):
                pass
        finally:
            refused.set()
        with desk.held(patience_s=120.0):
            looked.result(120)


def test_a_state_changes_in_part_and_is_there_for_others(tmp_path: Path) -> None:
    desk = open_desk(tmp_path, a_request())
    assert desk.state() == State()
    desk.begin(1)
    desk.change(doing="weights", done=5, total=10)
    assert (desk.state().phase, desk.state().doing, desk.state().done) == ("running", "weights", 5)
    assert Desk(desk.folder).state() == desk.state()


def test_whoever_published_and_is_gone_was_interrupted(tmp_path: Path) -> None:
    desk = open_desk(tmp_path, a_request())
    program = (
        f"from headway.publish.request import Desk; import pathlib; Desk(pathlib.Path({str(desk.folder)!r})).begin(1)"
    )
    subprocess.run([sys.executable, "-c", program, desk.folder], check=True)
    assert desk.state().phase == "interrupted"
    assert f"headway publish run {desk.folder.name}" in desk.state().problem


def test_if_nobody_begins_somebody_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = open_desk(tmp_path, a_request())
    desk.change(phase="waiting")
    monkeypatch.setattr("headway.publish.request.BEGINS_S", -1.0)
    assert desk.state().phase == "interrupted"
    assert "has not begun" in desk.state().problem
    with desk.held():
        assert desk.state().phase == "waiting"
    open_desk(tmp_path, a_request(runner="slurm"))  # a queue takes its time
    assert desk.state().phase == "waiting"


def test_one_process_at_a_time_publishes_a_request(tmp_path: Path) -> None:
    desk = open_desk(tmp_path, a_request())
    desk.begin(1)
    with desk.held(), pytest.raises(InputError, match="is being published already"), Desk(desk.folder).held():
        pass
    with desk.held():
        pass


def test_a_folder_without_locks_is_told_and_not_taken_for_one_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = open_desk(tmp_path, a_request())

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(PlatformError, match=rf"{desk.folder} cannot be locked \(No locks available\).*HEADWAY_HOME"):
        desk.held().__enter__()
    desk.begin(1)
    desk.change(node="another machine", boot="another boot")
    assert desk.state().phase == "running", "nothing tells that it is not"


def test_a_damaged_request_is_told(tmp_path: Path) -> None:
    desk = open_desk(tmp_path, a_request())
    (desk.folder / "request.json").write_text("{")
    with pytest.raises(InputError, match=r"request.json cannot be used: this is no request to publish"):
        _ = desk.request


def test_a_request_of_another_version_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    request = a_request()
    assert Request.from_json(json.dumps(json.loads(request.to_json()) | {"attempt": 2})) == request


def test_a_damaged_state_is_none(tmp_path: Path) -> None:
    desk = open_desk(tmp_path, a_request())
    (desk.folder / "state.json").write_text('{"phase": "running", "of": "a newer headway"')
    assert desk.state() == State()
    (desk.folder / "state.json").write_text('{"phase": "failed", "from_a_newer_headway": 1}')
    assert desk.state() == replace(State(), phase="failed")
