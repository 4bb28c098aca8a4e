"""`headway run --fast-start`: each item is done, told, and can be switched off; what is imported ahead is what the
program would have imported itself, and nothing that a zygote cannot have."""

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from supervising import LONG_S, wait_for
from supervising import run as run_cold
from supervising import start as start_cold

from headway.cli.run import FastStart
from headway.config import FAST_START
from headway.errors import InputError
from headway.events.journal import Follower
from headway.events.vocabulary import Mark, Told
from headway.launch.channel import Channel
from headway.launch.crew import Zygote
from headway.launch.prewarm import Prewarm

run, start = partial(run_cold, cold=False), partial(start_cold, cold=False)
PACKAGES = {
    "slow": "import os, time\ntime.sleep(0.3)\nos.environ['SLOW_WAS_IMPORTED'] = 'yes'\npid = os.getpid()",
    "threaded": "import threading, time\ntime.sleep(0.1)\n"
    "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "choosy": "import os, time\ntime.sleep(0.1)\nos.environ['RANK']",
    "painter": "import time\ntime.sleep(0.1)\nimport colors",
    "colors": "",
}
"""What is installed: one package that is only slow, and three that cannot be imported ahead."""

PROGRAM = """
import os, sys, time
{first}
import own, slow, threaded, choosy, painter
import torch
names = ("SLOW_WAS_IMPORTED", "TORCH_GLOO_LAZY_INIT", "HEADWAY_COMPILE_CACHE", "HEADWAY_FAST_START")
told = {{name: os.environ.get(name) for name in names}}
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
told |= {{"attempt": attempt, "slow_here": slow.pid == os.getpid(), "colors": painter.colors.__file__}}
import json
print("told " + json.dumps(told), flush=True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
if attempt == "0" and len(sys.argv) > 1:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    raise ConnectionResetError("a peer has gone")
"""


@pytest.fixture
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in a folder, and packages that are installed."""
    for name, text in PACKAGES.items():
        place = home / "lib" / "site-packages" / name
        place.mkdir(parents=True)
        (place / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(home / "lib" / "site-packages"))
    (home / "train.py").write_text(PROGRAM.format(first=""))
    (home / "own.py").write_text("import time\ntime.sleep(0.1)\n")
    return home


def told(out: str) -> list[dict[str, Any]]:
    """What each attempt said of itself, of all jobs so far."""
    return [json.loads(line.removeprefix("told ")) for line in out.splitlines() if line.startswith("told ")]


def marks(home: Path, job: str, name: str = Told.FAST_START, who: str = "") -> list[dict[str, Any]]:
    """The attributes of a job's marks of that name."""
    found = [record for path in (home / "jobs" / job).rglob(f"{who}*.hwj") for record in Follower(path).poll().records]
    return [record.attrs for record in found if isinstance(record, Mark) and record.name == name]


def learned(home: Path) -> dict[str, Any]:
    (path,) = (home / "prewarm").glob("train.py-*.json")
    found: dict[str, Any] = json.loads(path.read_text())["packages"]
    return {
        name: package for name, package in found.items() if name == "torchrec" or package["file"].startswith(str(home))
    }


def test_packages_are_learned_and_the_next_job_imports_ahead_those_that_a_zygote_can_have(folder: Path) -> None:
    (folder / "colors.py").write_text("")  # of the same name as an installed one
    code, out, err = run(["--fast-start", "--job", "first", "train.py"], folder)
    assert code == 0, err
    (first,) = told(out)
    assert first["slow_here"]
    assert first["TORCH_GLOO_LAZY_INIT"] == "1"
    assert first["HEADWAY_COMPILE_CACHE"] == str(folder / "compile")
    assert "headway: fast start: imports, groups, compile-cache, loader." in err
    assert learned(folder).keys() == {"slow", "threaded", "choosy", "painter"}  # and not the program's own

    code, out, err = run(["--fast-start", "--job", "second", "train.py"], folder)
    assert code == 0, err
    second = told(out)[-1]
    assert not second["slow_here"]
    assert second["SLOW_WAS_IMPORTED"] == "yes"  # as if the worker had imported it
    assert second["colors"] == str(folder / "colors.py")
    assert "workers start fresh" not in err
    dropped = {name: package["why"] for name, package in learned(folder).items() if package["why"]}
    assert "1 threads were started" in dropped["threaded"]
    assert "KeyError" in dropped["choosy"]
    assert "a module of its own called colors" in dropped["painter"]
    assert dropped.keys() == {"threaded", "choosy", "painter"}
    assert "threaded is imported by the workers again" in err
    seconds = [mark["seconds"] for mark in marks(folder, "second", Told.IMPORTS)]
    assert "slow" not in {name for each in seconds for name in each}
    assert "choosy" in {name for each in seconds for name in each}
    of_supervisor = marks(folder, "second", who="supervisor")
    assert [(mark["item"], mark["on"]) for mark in of_supervisor[:4]] == [(item, True) for item in FAST_START]
    assert len([mark for mark in of_supervisor if mark["item"] == "imports" and not mark["on"]]) == 3


@pytest.mark.thorough
def test_a_restart_finds_what_the_first_attempt_imported(folder: Path) -> None:
    process = start(["--fast-start", "--job", "one", "train.py", "go"], folder)
    try:
        wait_for(lambda: any("forked from where" in mark["why"] for mark in marks(folder, "one")), process)
        (folder / "go").touch()
        assert process.wait(LONG_S) == 0, (folder / "stderr").read_text()
    finally:
        process.kill()
    first, second = told((folder / "stdout").read_text())
    assert (first["attempt"], first["slow_here"]) == ("0", True)
    assert (second["attempt"], second["slow_here"]) == ("1", False)


LATE = """
import os, sys, time, json, torch
from torch.utils.data import DataLoader
batches = iter(DataLoader(range(8), num_workers=1))
import slow, choosy
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("told " + json.dumps({"attempt": attempt, "slow_here": slow.pid == os.getpid()}), flush=True)
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    (weight * next(batches)).sum().backward()
    optimizer.step()
if attempt == "0" and len(sys.argv) > 1:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    raise ConnectionResetError("a peer has gone")
"""
"""Imports packages when its data is on the way."""


@pytest.mark.parametrize(
    ("choosy", "why"),
    [
        ("", ""),
        pytest.param(
            "if 'RANK' not in os.environ:\n    os._exit(3)", "a zygote died of it", marks=pytest.mark.thorough
        ),
        pytest.param("os.environ['RANK']", "KeyError", marks=pytest.mark.thorough),
    ],
    ids=["good", "deadly", "choosy"],
)
def test_what_a_program_imports_while_its_data_comes_is_there_at_a_restart(folder: Path, choosy: str, why: str) -> None:
    place = folder / "lib" / "site-packages" / "choosy" / "__init__.py"
    place.write_text(f"import os, time\ntime.sleep(0.1)\n{choosy}\n")
    (folder / "train.py").write_text(LATE)
    code, _, err = run(["--fast-start", "--job", "first", "train.py"], folder)
    assert code == 0, err
    assert {name: package["later"] for name, package in learned(folder).items()} == {"slow": True, "choosy": True}
    process = start(["--fast-start", "--job", "second", "train.py", "go"], folder)
    try:
        wait_for(lambda: any("forked from where" in mark["why"] for mark in marks(folder, "second")), process)
        (folder / "go").touch()
        assert process.wait(LONG_S) == 0, (folder / "stderr").read_text()
    finally:
        process.kill()
    first, second = told((folder / "stdout").read_text())[-2:]
    assert (first["attempt"], first["slow_here"]) == ("0", True)  # it did not have to wait for that
    assert (second["attempt"], second["slow_here"]) == ("1", False)
    assert why in learned(folder)["choosy"]["why"]
    assert bool(learned(folder)["choosy"]["why"]) == bool(why)
    assert "workers start fresh" not in (folder / "stderr").read_text()


@pytest.mark.thorough
def test_workers_that_share_cores_find_all_of_it_at_once(folder: Path) -> None:
    (folder / "lib" / "site-packages" / "choosy" / "__init__.py").write_text("")
    (folder / "train.py").write_text(LATE)
    ranks = str(len(os.sched_getaffinity(0)) + 1)
    for job in ("first", "second"):
        code, out, err = run(["--fast-start", "--nproc-per-node", ranks, "--job", job, "train.py"], folder)
        assert code == 0, err
    here = [each["slow_here"] for each in told(out)]
    assert here == int(ranks) * [True] + int(ranks) * [False]


def test_an_heir_that_is_gone_before_it_is_heard_leaves_word_of_what_it_died_of() -> None:
    ours, theirs = Channel.pair()
    process = subprocess.Popen(["true"])
    process.wait()
    for message in ({"pid": process.pid}, {"importing": "choosy"}):
        theirs.send(message)
    theirs.close()
    heir = Zygote(0, -1, ours, {}, 0.0)
    heir.hear()
    assert (heir.dead, heir.pid, heir.importing) == (True, 0, "choosy")
    ours.close()


def test_every_item_can_be_switched_off(folder: Path) -> None:
    words = ["--fast-start", "--without", "imports,groups,compile-cache,loader", "--job", "off", "train.py"]
    code, out, err = run(words, folder)
    assert code == 0, err
    (only,) = told(out)
    assert only["slow_here"]
    assert (only["TORCH_GLOO_LAZY_INIT"], only["HEADWAY_COMPILE_CACHE"], only["HEADWAY_FAST_START"]) == (None, None, "")
    assert not (folder / "prewarm").exists()
    assert "fast start: nothing." in err
    assert [(mark["item"], mark["on"]) for mark in marks(folder, "off")] == [(item, False) for item in FAST_START]


def test_packages_that_may_read_what_the_program_sets_are_not_imported_ahead(folder: Path) -> None:
    (folder / "train.py").write_text(PROGRAM.format(first="import slow\nos.environ['PAINT'] = 'red'"))
    code, _, err = run(["--fast-start", "--job", "sets", "train.py"], folder)
    assert code == 0, err
    assert learned(folder).keys() == {"slow"}
    assert "the program sets PAINT before it imports" in err


@pytest.mark.thorough
def test_what_torch_sets_for_its_own_modules_is_not_the_programs_doing(folder: Path) -> None:
    first = "from torch._inductor.runtime import cache_dir_utils\ncache_dir_utils.cache_dir()"
    (folder / "train.py").write_text(PROGRAM.format(first=first))
    code, _, err = run(["--fast-start", "--job", "torch-sets", "train.py"], folder)
    assert code == 0, err
    assert "slow" in learned(folder)
    assert "the program sets" not in err


@pytest.mark.thorough
def test_taking_a_variable_away_is_setting_it_and_nobody_listens_after_the_first_step(folder: Path) -> None:
    first = "import slow\nlistened = os.putenv\ndel os.environ['HOME']"
    last = "\nassert os.putenv is not listened and type(os.putenv) is type(os.getpid)"
    (folder / "train.py").write_text(PROGRAM.format(first=first) + last)
    code, _, err = run(["--fast-start", "--job", "takes", "train.py"], folder)
    assert code == 0, err
    assert learned(folder).keys() == {"slow"}
    assert "the program sets HOME before it imports" in err


@pytest.mark.thorough
def test_a_package_that_hangs_in_a_zygote_holds_up_one_start_for_a_while(folder: Path) -> None:
    stuck = "import os, time\ntime.sleep(0.1 if 'RANK' in os.environ else 600)"
    (folder / "lib" / "site-packages" / "choosy" / "__init__.py").write_text(stuck)
    (folder / "train.py").write_text("import choosy, torch\nprint('worked')")
    for job in ("first", "second"):
        code, out, err = run(["--fast-start", "--job", job, "train.py"], folder)
        assert code == 0, err
        assert "worked" in out
    assert learned(folder)["choosy"]["why"] == "a zygote got stuck in it"
    assert "workers start fresh" not in err


@pytest.mark.thorough
def test_a_package_that_imports_what_is_not_installed_is_left_to_the_workers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "plugin.py").write_text("")
    (folder / "lib" / "site-packages" / "choosy" / "__init__.py").write_text("import time, plugin\ntime.sleep(0.1)")
    (folder / "train.py").write_text("import choosy, slow, torch\nprint('worked')")
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}:{folder / 'elsewhere'}")
    for job in ("first", "second"):
        code, _, err = run(["--fast-start", "--job", job, "train.py"], folder)
        assert code == 0, err
    assert {name: package["why"] for name, package in learned(folder).items()} == {
        "slow": "", "choosy": "it imports plugin, which is not installed and may change"
    }  # fmt: skip


@pytest.mark.thorough
def test_a_package_that_ends_the_zygote_is_not_imported_ahead_again(folder: Path) -> None:
    deadly = "import os, time\ntime.sleep(0.1)\nif 'RANK' not in os.environ:\n    os._exit(3)"
    (folder / "lib" / "site-packages" / "choosy" / "__init__.py").write_text(deadly)
    (folder / "train.py").write_text("import slow, choosy, torch\nprint('worked')")
    for job in ("first", "second"):
        code, out, err = run(["--fast-start", "--job", job, "train.py"], folder)
        assert code == 0, err
    assert out.count("worked") == 2
    assert {name: package["why"] for name, package in learned(folder).items()} == {
        "slow": "", "choosy": "a zygote died of it"
    }  # fmt: skip
    assert "workers start fresh" not in err


@pytest.mark.thorough
@pytest.mark.needs_package("torchrec")
def test_torchrec_is_imported_ahead_and_trains_as_ever(home: Path) -> None:
    (home / "train.py").write_text("""
import os, sys
ahead = "torchrec" in sys.modules
import torch, torchrec
torch.manual_seed(0)
tables = [torchrec.EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=50, feature_names=["f"])]
model = torchrec.EmbeddingBagCollection(tables=tables)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    values, lengths = torch.arange(step, step + 12), torch.full((4,), 3)
    features = torchrec.KeyedJaggedTensor(keys=["f"], values=values, lengths=lengths)
    optimizer.zero_grad()
    loss = (model(features).values() ** 2).sum()
    loss.backward()
    optimizer.step()
print("told", ahead, loss.item().hex(), flush=True)
""")
    for job in ("first", "second"):
        code, out, err = run(["--fast-start", "--job", job, "train.py"], home)
        assert code == 0, err
    first, second = [line.split() for line in out.splitlines() if line.startswith("told")]
    assert (first[1], second[1]) == ("False", "True")
    assert first[2] == second[2]
    assert learned(home)["torchrec"]["why"] == ""
    assert "workers start fresh" not in err


# --- what was asked for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", FAST_START)
def test_one_item_less_is_all_the_others(item: str, home: Path) -> None:
    fast = FastStart(["--fast-start", "--without", item, "train.py"])
    assert fast.items == [other for other in FAST_START if other != item]
    assert ("TORCH_GLOO_LAZY_INIT" in fast.environ) == (item != "groups")
    assert ("HEADWAY_COMPILE_CACHE" in fast.environ) == (item != "compile-cache")
    assert (fast.prewarm is not None) == (item != "imports")


def test_items_may_come_from_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert FastStart(["train.py"]).environ == {}
    monkeypatch.setenv("HEADWAY_FAST_START", "loader, groups")
    assert FastStart(["train.py"]).items == ["groups", "loader"]
    monkeypatch.setenv("HEADWAY_FAST_START", "all")
    assert FastStart(["--without=groups", "train.py"]).items == ["imports", "compile-cache", "loader"]


def test_what_the_user_chose_is_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    assert FastStart(["--fast-start", "--compile-cache", "s3://x", "--cold", "train.py"]).items == ["loader"]
    assert "TORCH_GLOO_LAZY_INIT" not in FastStart(["--fast-start", "train.py"]).environ


def test_an_unknown_item_is_told_with_the_nearest_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--without: a fast start has no item loaders: did you mean loader"):
        FastStart(["--fast-start", "--without", "loaders", "train.py"])
    with pytest.raises(InputError, match="--without takes items out of --fast-start"):
        FastStart(["--without", "loader", "train.py"])
    monkeypatch.setenv("HEADWAY_FAST_START", "import")
    with pytest.raises(InputError, match=r"HEADWAY_FAST_START: .* did you mean imports"):
        FastStart(["train.py"])


# --- what was learned ------------------------------------------------------------------------------------------------


@pytest.fixture
def prewarm(home: Path) -> Prewarm:
    """One that has learned two packages of a program with two files."""
    for name in ("a.py", "b.py", "own.py", "train.py"):
        (home / name).write_text("")
    found = Prewarm(home, "train.py")
    found.read = lambda pid, ticks: {
        "modules": {"b": (0.5, str(home / "b.py")), "a": (1.5, str(home / "a.py"))},
        "later": [],
        "sources": [str(home / "train.py"), str(home / "own.py")],
    }
    assert found.look(1, 1)
    assert not found.look(1, 1)
    return found


def later(path: Path, text: str = "") -> None:
    path.write_text(text)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def test_the_slowest_packages_come_first(prewarm: Prewarm, home: Path) -> None:
    assert Prewarm(home, "train.py").names() == prewarm.names() == ["a", "b"]
    assert Prewarm(home, "other.py").names() == []


def test_what_the_program_imports_later_comes_last(prewarm: Prewarm, home: Path) -> None:
    packages = {"c": (9.0, str(home / "own.py")), "d": (0.3, str(home / "own.py"))}
    prewarm.read = lambda pid, ticks: {"modules": packages, "later": ["c"], "sources": []}
    assert not prewarm.has_heard_of(2)
    assert prewarm.look(2, 2)
    assert prewarm.has_heard_of(2)
    assert Prewarm(home, "train.py").names() == ["a", "b", "d", "c"]
    prewarm.read = lambda pid, ticks: {"modules": packages, "later": ["d"], "sources": []}
    assert not prewarm.look(3, 3)
    assert Prewarm(home, "train.py").names() == ["c", "a", "b", "d"], "the program was changed"
    prewarm.read = lambda pid, ticks: {"modules": packages, "later": None, "sources": []}
    assert not prewarm.look(4, 4)
    assert Prewarm(home, "train.py").names() == ["c", "a", "b", "d"], "it had no data workers, for once"


def test_little_that_is_new_waits_for_the_next_job(prewarm: Prewarm, home: Path) -> None:
    prewarm.read = lambda pid, ticks: {"modules": {"c": (0.05, str(home / "own.py"))}, "later": [], "sources": []}
    assert not prewarm.look(2, 2), "not worth another zygote beside the training"
    assert Prewarm(home, "train.py").names() == ["a", "b", "c"]


def test_a_package_that_was_installed_anew_is_learned_anew_even_if_it_was_dropped(prewarm: Prewarm, home: Path) -> None:
    prewarm.drop(["b"], "it starts a thread")
    assert Prewarm(home, "train.py").names() == ["a"]
    later(home / "b.py")
    again = Prewarm(home, "train.py")
    again.read = prewarm.read
    assert again.look(2, 2)
    assert again.names() == ["a", "b"]


def test_a_program_that_has_changed_counts_as_before_unless_it_may_set_something(prewarm: Prewarm, home: Path) -> None:
    later(home / "own.py", "print('other')")
    assert Prewarm(home, "train.py").names() == ["a", "b"]
    later(home / "own.py", "import os\nos.environ['X'] = '1'")
    assert Prewarm(home, "train.py").names() == []
    (home / "own.py").unlink()  # generated code is, with the folder of a compile cache
    assert Prewarm(home, "train.py").names() == ["a", "b"]


def test_a_file_that_makes_no_sense_is_as_good_as_none(prewarm: Prewarm, home: Path) -> None:
    written = (home / "a.py").stat().st_mtime_ns
    wrong = {"a": {"seconds": None, "file": str(home / "a.py"), "stamp": written, "later": False}}
    unspeakable = {"a\0b,c": {"seconds": 1.0, "file": str(home / "a.py"), "stamp": written, "later": False}}
    damaged = [json.dumps({"packages": packages, "sources": {}}) for packages in (wrong, unspeakable)]
    for text in ("", "[]", '{"packages": {"a": 1}, "sources": {}}', '{"packages": {}}', *damaged):
        prewarm.path.write_text(text)
        assert Prewarm(home, "train.py").names() == []


def test_a_home_that_cannot_be_written_to_is_told_and_no_more(prewarm: Prewarm, home: Path) -> None:
    heard: list[str] = []
    prewarm.tell = lambda why, on: heard.append(why)
    prewarm.path = home / "train.py" / "x.json"  # below a file
    prewarm.save()
    assert "what was learned is lost with this job" in heard[0]
