"""Bad snapshots, bad anchors and bad recipes, from the command line: each is told, and `latest` stays where it was."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from publishing import LIMIT_S, Place
from saving_anchors import save_plainly
from torch import nn
from version_stores import s3_root, s3_server  # noqa: F401

from headway import Checkpointer
from headway.cli.publish import decider
from headway.errors import InputError
from headway.publish import publisher
from headway.publish.anchor import open_anchor
from headway.publish.request import Publish, Request, find_desk, open_desk
from headway.publish.supervisor import End, Retry, Stop, supervise
from headway.storage import open_storage

MODEL = """
import torch
from torch import nn

class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return self.last(self.first(x - self.mean).relu())

class Noisy(Tower):
    def forward(self, x):
        return super().forward(x) + torch.rand(x.shape[0], 2)

def served():
    import headway
    return headway.Served(Tower(), batches=[(torch.rand(3, 4),), (torch.rand(5, 4),)])

def noisy():
    import headway
    return headway.Served(Noisy(), batches=[(torch.rand(3, 4),), (torch.rand(5, 4),)])
"""
BEGINS = """
import ctypes, os, pathlib, subprocess, sys, time

def data(folder):
    (folder / "data").write_bytes(b"x" * 5000)

"""
EXPORT = ("--recipe", "export", "--model", "tower.py:served")


class Publishing(Place):
    """A place with a good version in it, to which others are to be published."""

    def __post_init__(self) -> None:
        super().__post_init__()
        (self.folder / "tower.py").write_text(MODEL)
        names: dict[str, Any] = {}
        exec(MODEL, names)  # the publisher finds it in the file
        self.tower: Callable[[], nn.Module] = names["Tower"]
        self.steps, self.anchor = 0, self.root

    def interrupted(self, name: str, anchor: Path) -> str:
        """A request that was begun and interrupted: what its recipe, `name.py`, will be is told later."""
        options = self.own(name, "def publish(anchor, out): os.kill(os.getppid(), 15); time.sleep(60)")
        code, told = self.result(str(anchor), "--to", str(self.to), *options)
        assert (code, told["phase"]) == (128 + signal.SIGTERM, "interrupted")
        return str(told["id"])

    def snapshot(self, change: Callable[[dict[str, Any]], Any] = lambda weights: None) -> Path:
        """One more checkpoint, by `dcp.save`, of weights in which something was changed."""
        self.steps += 10
        weights = dict(self.tower().state_dict())
        change(weights)
        return save_plainly(self.root / f"step-{self.steps:08d}", {"model": weights})

    def saved(self) -> Path:
        """One more checkpoint, by headway."""
        self.steps += 10
        model = self.tower()
        with Checkpointer(self.root, model=model, optimizer=torch.optim.SGD(model.parameters()), interval=None) as its:
            its.save(self.steps, wait=True)
        return self.root / f"step-{self.steps:08d}"

    def own(self, name: str, text: str) -> tuple[str, str]:
        """The options for a recipe of one's own."""
        (self.folder / f"{name}.py").write_text(f"{BEGINS}{text}\n")
        return "--recipe", f"{name}.py:publish"

    def result(self, *words: str) -> tuple[int, dict[str, Any]]:
        """Exit code of `headway publish run`, and what `status` tells of the newest request then."""
        done = self.run("run", *words)
        told = dict(json.loads(self.run("status", "--json").stdout)[0])
        return done.returncode, told | {"stderr": done.stderr}

    @property
    def latest(self) -> str:
        return self.versions.latest().name  # type: ignore[union-attr]

    def publishes(self, anchor: Path, *options: str) -> dict[str, Any]:
        code, told = self.result(str(anchor), "--to", str(self.to), *options)
        assert (code, told["phase"]) == (0, "published"), told
        assert self.latest == told["version"]
        return told

    def refuses(self, code: int, phase: str, problem: str, anchor: Path | str, *options: str) -> dict[str, Any]:
        """It ends like that, says so, and what is served has not changed. An anchor that is no path is a request."""
        before, there = self.latest, len(self.complete())
        where = ("--to", str(self.to)) if isinstance(anchor, Path) else ()
        found, told = self.result(str(anchor), *where, *options)
        assert problem in told["problem"], told
        assert problem in told["stderr"]
        assert (found, told["phase"]) == (code, phase), told
        assert (self.latest, len(self.complete())) == (before, there)
        return told


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Publishing:
    """Where safetensors are published."""
    place = Publishing(tmp_path_factory.mktemp("weights"))
    place.publishes(place.saved())
    return place


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Publishing:
    """Where a program is published."""
    place = Publishing(tmp_path_factory.mktemp("program"))
    place.publishes(place.snapshot(), *EXPORT)
    return place


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Publishing:
    """Where recipes of one's own publish, all from one checkpoint."""
    place = Publishing(tmp_path_factory.mktemp("files"))
    place.anchor = place.snapshot()
    place.publishes(place.anchor, *place.own("good", "def publish(anchor, out): out.step('data', data)"))
    return place


# --- snapshots -------------------------------------------------------------------------------------------------------


def nonfinite(weights: dict[str, Any]) -> None:
    weights["first.weight"][2, 3] = torch.nan
    weights["mean"][1] = -torch.inf


def different(weights: dict[str, Any]) -> None:
    weights["last.weight"] = torch.rand(2, 9)
    weights["first.bias"] = weights["first.bias"].bfloat16()
    del weights["last.bias"]
    weights["third.bias"] = torch.rand(2)


def test_weights_that_are_not_finite_are_rejected(weights: Publishing, program: Publishing) -> None:
    told = weights.refuses(3, "rejected", "there is NaN or Inf in the weights: ", weights.snapshot(nonfinite))
    assert "first.weight has 1" in told["problem"]
    assert "mean has 1" in told["problem"]
    problem = "there is NaN or Inf in the weights of the model: "
    told = program.refuses(3, "rejected", problem, program.snapshot(nonfinite), *EXPORT)
    assert "first.weight has 1" in told["problem"]
    assert "mean has 1" in told["problem"]
    assert "program" not in told["steps"]


def test_weights_of_other_names_shapes_and_types_than_before_are_rejected(weights: Publishing) -> None:
    told = weights.refuses(3, "rejected", "signature: ", weights.snapshot(different))
    for each in (
        "last.weight was float32[2, 8], is float32[2, 9]", "first.bias was float32[8], is bfloat16[8]",
        "last.bias is missing, was float32[2]", "third.bias is new, float32[2]", "If that is meant: --allow signature",
    ):  # fmt: skip
        assert each in told["problem"]


def test_weights_of_other_names_shapes_and_types_than_the_models_make_no_program(program: Publishing) -> None:
    problem = "the model is not the one that was saved: "
    told = program.refuses(2, "failed", problem, program.snapshot(different), *EXPORT)
    for each in (
        "last.weight has the shape [2, 8] instead of [2, 9]", "first.bias is torch.float32 instead of torch.bfloat16",
        "last.bias is not in the checkpoint", "third.bias is not in the model", "Build it as in training",
    ):  # fmt: skip
        assert each in told["problem"]
    assert told["steps"] == []


def test_a_program_that_does_not_give_what_eager_gives_is_rejected(program: Publishing) -> None:
    options = ("--recipe", "export", "--model", "tower.py:noisy")
    told = program.refuses(3, "rejected", "program parity: golden batch 0: output at [", program.snapshot(), *options)
    assert re.search(r"is [\d.-]+; eager gives [\d.-]+, .+ apart is allowed \(6 of 6 differ\)", told["problem"])


def test_after_all_that_was_rejected_what_is_right_is_published(weights: Publishing) -> None:
    weights.publishes(weights.saved())


# --- anchors ---------------------------------------------------------------------------------------------------------


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shortened(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flipped, " is not what was saved: its hash differs"),
        pytest.param(shortened, " bytes instead of ", marks=pytest.mark.thorough),
        pytest.param(Path.unlink, " is missing", marks=pytest.mark.thorough),
    ],
)
def test_an_anchor_with_a_damaged_shard_is_not_published_nor_tried_again(
    weights: Publishing, damage: Callable[[Path], None], problem: str
) -> None:
    anchor = weights.saved()
    (shard,) = anchor.glob("*.distcp")
    damage(shard)
    told = weights.refuses(2, "failed", problem, anchor)
    assert f"{anchor}: {shard.name}" in told["problem"]
    assert told["tries"] == 1


@pytest.mark.parametrize("damage", [flipped, shortened])
def test_an_anchor_with_damaged_metadata_is_not_asked_for(weights: Publishing, damage: Callable[[Path], None]) -> None:
    anchor, before = weights.saved(), weights.latest
    damage(anchor / ".metadata")
    done = weights.run("run", str(anchor), "--to", str(weights.to))
    assert done.returncode == 2
    assert f"{anchor} " in done.stderr
    assert ".metadata" in done.stderr
    assert weights.latest == before


@pytest.mark.thorough
def test_a_plain_checkpoint_that_changes_once_it_is_asked_for_is_not_published(weights: Publishing) -> None:
    anchor = weights.snapshot()
    request = weights.interrupted("reads", anchor)
    weights.own("reads", "def publish(anchor, out):\n    for _ in anchor.shards.blocks(): pass")
    flipped(anchor / "__0_0.distcp")
    weights.refuses(2, "failed", "__0_0.distcp is not what was saved: its hash differs", request)


def test_an_anchor_that_was_saved_again_since_is_not_published(weights: Publishing) -> None:
    anchor = weights.saved()
    request = weights.interrupted("again", anchor)
    weights.steps -= 10
    weights.saved()
    weights.refuses(2, "failed", f"{anchor} is not the one that was handed over: it was saved again since", request)


def test_an_anchor_that_is_still_being_uploaded_is_waited_for(files: Publishing) -> None:
    anchor, held = files.snapshot(), files.folder / "held"
    (anchor / ".metadata").rename(held)
    words = (str(anchor), "--to", str(files.to), *files.own("late", "def publish(anchor, out): out.step('data', data)"))
    process = files.start("run", *words, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + LIMIT_S
        while "waiting for the anchor" not in files.run("status").stdout and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.02)
        held.rename(anchor / ".metadata")
        assert process.wait(LIMIT_S) == 0, process.communicate()[1]
    finally:
        process.kill()
    assert files.versions.latest().step == files.steps  # type: ignore[union-attr]


def test_an_anchor_that_is_never_committed_is_given_up(files: Publishing, monkeypatch: pytest.MonkeyPatch) -> None:
    anchor, before = files.snapshot(), files.latest
    (anchor / ".metadata").unlink()
    monkeypatch.setattr(publisher, "open_anchor", partial(open_anchor, patience_s=0.1))
    request = Request(
        id="never", what=Publish("card", to=str(files.to)), root=str(anchor.parent), checkpoint=anchor.name
    )
    desk = open_desk(files.folder / "another_home", request)
    with pytest.raises(
        InputError, match=r"never committed.* Waited 0 s for it\. Publish another one, or save it again"
    ):
        publisher.Publisher(desk).publish()
    assert desk.state().doing.startswith(f"waiting for the anchor: {anchor} was never committed")
    assert files.latest == before


# --- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "code", "problem"),
    [
        ("exits", "sys.exit(0)", 2, "has called sys.exit(0)"),
        ("leaves", "os._exit(0)", 1, "has published nothing: does the recipe call exit?"),
        ("talks", "sys.stderr.write('x' * 10_000_000); raise ValueError('after it')", 1, "ValueError: after it"),
        ("links", "out.step('data', data); os.symlink('/etc/hostname', out / 'host')", 2, "host is a link"),
        ("declares", "out.step('data', data); (out / 'version.json').write_text('{}')", 2, "has made a version.json"),
        ("rests", "(out / 'a' / 'b').mkdir(parents=True)", 2, "has made nothing"),
    ],
    ids=["exits", "leaves", "talks", "links", "declares", "rests"],
)
def test_a_recipe_whose_result_cannot_be_published_is_told_and_not_tried_again(
    files: Publishing, name: str, text: str, code: int, problem: str
) -> None:
    told = files.refuses(code, "failed", problem, files.anchor, *files.own(name, f"def publish(anchor, out): {text}"))
    assert told["tries"] == 1


def test_a_card_of_the_recipes_own_is_kept(files: Publishing) -> None:
    text = "def publish(anchor, out): out.step('data', data); (out / 'README.md').write_text('mine')"
    _, told = files.result(str(files.anchor), "--to", str(files.to), *files.own("describes", text))
    assert (files.to / told["version"] / "README.md").read_text() == "mine"


@pytest.mark.thorough
def test_a_recipe_that_crashes_is_tried_once_more(files: Publishing) -> None:
    recipe = files.own("crashes", "def publish(anchor, out): ctypes.string_at(0)")
    told = files.refuses(1, "failed", "it was ended by SIGSEGV", files.anchor, *recipe)
    assert (told["category"], told["tries"]) == ("segfault", 2)


@pytest.mark.thorough
def test_a_recipe_that_hangs_is_ended_and_the_log_tells_where_it_was(files: Publishing) -> None:
    request, before = files.interrupted("hangs", files.anchor), files.latest
    files.own("hangs", "def publish(anchor, out): out.step('data', wait)\ndef wait(folder): time.sleep(600)")
    desk = find_desk(files.home, request)
    worker = [sys.executable, "-m", "headway.cli.publisher", str(desk.folder)]
    ends: list[End] = []

    def decide(end: End) -> Retry | Stop:
        ends.append(end)
        decision = decider()(end)
        return decision if len(ends) < 2 else Stop(why="that was enough", category=decision.category)

    assert supervise(desk, worker, decide, stall_s=3.0, say=lambda text: None) == 1
    assert [end.stalled_s is not None for end in ends] == [True, True]
    state, log = desk.state(), desk.log.read_text()
    assert (state.phase, state.steps) == ("failed", ())
    assert "and was ended; the log tells where it was: that was enough" in state.problem
    assert re.search(r'hangs.py", line \d+ in wait', log)
    assert files.latest == before


ODD = """
NAMES = "a b", "ü", "-x", "%41?#", "latest", ".hidden", "a.part", "...", "version.json.bak", "x" * 200

def publish(anchor, out):
    print("x" * 10_000_000)
    os.chdir("/")
    for name in NAMES:
        (out / name).write_text(name)
    (out / "empty").touch()
    (out / "a/b/c").mkdir(parents=True)
    (out / "a/b/c/version.json").write_text("{}")
    (out / "nothing in it").mkdir()
    out.step("data", data)
    stays = subprocess.Popen(["sleep", "300"])
    pathlib.Path(__file__).with_name("stays").write_text(str(stays.pid))
"""


@pytest.mark.parametrize("store", ["folder", pytest.param("s3", marks=pytest.mark.thorough)])
def test_whatever_a_recipe_does_meanwhile_all_its_files_are_published(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = Publishing(tmp_path)
    if store == "s3":
        place.to = request.getfixturevalue("s3_root")
    (place.folder / "checks.py").write_text("def nothing(folder): pass")
    told = place.publishes(place.snapshot(), *place.own("odd", ODD), "--check", "checks.py:nothing")
    (version,) = place.complete()
    assert version.manifest
    assert {
        "a b", "ü", "-x", "%41?#", "latest", ".hidden", "a.part", "...", "version.json.bak", "x" * 200,
        "empty", "a/b/c/version.json", "data/data", "README.md",
    } == version.manifest.files.keys()  # fmt: skip
    assert not is_alive(int((place.folder / "stays").read_text()))
    assert os.path.getsize(told["log"]) > 10_000_000


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- an object store -------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_versions_in_an_object_store_are_compared_served_and_rolled_back(s3_root: str, tmp_path: Path) -> None:  # noqa: F811
    place = Publishing(tmp_path)
    place.to = s3_root  # type: ignore[assignment]
    first = place.publishes(place.snapshot(), *EXPORT)["version"]
    second = place.publishes(place.snapshot(), *EXPORT)["version"]
    latency = next(each for each in place.versions.latest().manifest.checks if each["name"] == "latency")  # type: ignore[union-attr]
    assert latency["told"].startswith("program/model.pt2 takes ")
    assert latency["figures"].keys() == {"seconds", "before"}
    raises = place.own("raises", "def publish(anchor, out): raise ValueError('no such table')")
    place.refuses(1, "failed", "ValueError: no such table", place.snapshot(), *raises)
    listed = json.loads(place.run("ls", s3_root, "--json").stdout)
    assert [(each["name"], each["state"], each["served"]) for each in listed] == [
        (first, "complete", False),
        (second, "complete", True),
    ]
    assert place.run("rollback", s3_root).stdout == f"latest is {first}.\n"
    assert open_storage(s3_root).read("latest").decode() == first
    assert place.run("promote", s3_root, second).stdout == f"latest is {second}.\n"
    open_storage(s3_root).remove(f"{second}/program/model.pt2")
    place.publishes(place.snapshot(), *EXPORT)
    latency = next(each for each in place.versions.latest().manifest.checks if each["name"] == "latency")  # type: ignore[union-attr]
    assert latency["told"] == "not compared: the version before has no program/model.pt2"
