"""`headway checkpoint` on real folders."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from saving import save

from headway.checkpoint.catalog import checkpoints
from headway.checkpoint.layout import METADATA
from headway.cli import main
from headway.storage import open_storage


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, words)], env={"COLUMNS": "120"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 100, 200 and 300 are committed, 400 is not."""
    storage = open_storage(tmp_path / "root")
    for generation, step in enumerate([100, 200, 300]):
        save(storage, step, generation, metric=step / 1000)
    save(storage, 400, 3, until="shards")
    return tmp_path / "root"


def steps(root: Path) -> list[int | None]:
    return [each.step for each in checkpoints(open_storage(root))]


def damage(root: Path) -> str:
    """Flips a bit in a shard of step 200; the shard's name."""
    (shard,) = (root / "step-00000200").glob("__1_*.distcp")
    data = bytearray(shard.read_bytes())
    data[100] ^= 4
    shard.write_bytes(data)
    return shard.name


def test_ls_shows_what_there_is(root: Path) -> None:
    run("pin", root, "step-00000100")
    told = run("ls", root)
    assert told.exit_code == 0
    header, *lines = told.output.splitlines()
    assert header.split() == ["checkpoint", "step", "state", "size", "saved", "ranks", "metric"]
    assert re.fullmatch(
        r" step-00000100 +100 +committed +10.0 kB +\d{4}-\d\d-\d\d [\d:]{8} +2 +0.1 +pinned *", lines[0]
    )
    assert lines[3].split() == ["step-00000400", "400", "partial"]


def test_ls_as_json_has_all_of_it(root: Path) -> None:
    first, *_, last = json.loads(run("ls", root, "--json").output)
    assert list(first) == [
        "name", "step", "state", "size", "saved_ns", "world_size", "metric", "pinned", "tag", "job",
    ]  # fmt: skip
    assert (first["name"], first["state"], first["metric"]) == ("step-00000100", "committed", 0.1)
    assert (last["name"], last["state"], last["size"]) == ("step-00000400", "partial", None)


def test_verify_is_quiet_about_what_is_good(root: Path) -> None:
    told = run("verify", root)
    assert told.exit_code == 0
    assert told.output.count("good") == 3
    assert "never committed" in told.output


def test_verify_fails_if_latest_has_lost_its_commit_marker(root: Path) -> None:
    (root / "latest").write_text("step-00000200")
    (root / "step-00000200" / ".metadata").unlink()
    told = run("verify", root)
    assert told.exit_code == 1
    assert "was never committed: there is no .metadata" in told.output


def test_verify_names_the_file_that_is_not(root: Path) -> None:
    shard = damage(root)
    told = run("verify", root)
    assert told.exit_code == 1
    assert f"step-00000200  committed\n  {shard} has the hash " in told.output
    assert run("verify", root, "step-00000100").exit_code == 0
    assert run("verify", root, f"{root}/step-00000200/").exit_code == 1
    rows = json.loads(run("verify", root, "--json").output)
    assert [len(row["problems"]) for row in rows] == [0, 1, 0, 1]


def test_a_partial_one_that_is_named_is_a_problem(root: Path) -> None:
    assert run("verify", root, "step-00000400").exit_code == 1


def test_pinned_ones_survive_pruning(root: Path) -> None:
    assert run("pin", root, "step-00000100").output == "step-00000100 is now pinned.\n"
    told = run("prune", root, "--keep-last", "1", "--dry-run")
    assert told.output == "would delete step-00000200  committed  10.0 kB\n"
    assert steps(root) == [100, 200, 300, 400]
    assert run("prune", root, "--keep-last", "1").output == "deleted step-00000200  committed  10.0 kB\n"
    assert steps(root) == [100, 300, 400]
    assert run("prune", root, "--keep-last", "1").output == "Nothing to delete.\n"
    run("pin", root, "step-00000100", "--remove")
    run("prune", root, "--keep-last", "1")
    assert steps(root) == [300, 400]


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--keep-every", "200"], [200, 300, 400]),
        (["--keep-best", "1"], [100, 300, 400]),
        (["--keep-best", "1", "--best", "max"], [300, 400]),
    ],
)
def test_prune_takes_all_of_retention(root: Path, words: list[str], left: list[int]) -> None:
    assert run("prune", root, "--keep-last", "1", *words).exit_code == 0
    assert steps(root) == left


def test_prune_wants_to_be_told_how_many_to_keep(root: Path) -> None:
    assert "--keep-last" in run("prune", root).output
    told = run("prune", root, "--keep-last", "0")
    assert told.exit_code == 1
    assert "keep_last is 0" in told.output
    assert steps(root) == [100, 200, 300, 400]


def test_copy_takes_the_newest_or_the_one_named(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert run("copy", root, target).output == f"step-00000300 is in {target}.\n"
    assert run("copy", root, target, "step-00000100").exit_code == 0
    assert steps(target) == [100, 300]
    assert (target / "latest").read_text() == "step-00000300"
    damage(root)
    told = run("copy", root, target, "step-00000200")
    assert told.exit_code == 1
    assert "is not as it was saved" in told.output


@pytest.mark.parametrize("words", [["ls"], ["verify"], ["prune", "--keep-last", "1"]])
def test_a_root_that_is_none_is_said_to_be_none(root: Path, tmp_path: Path, words: list[str]) -> None:
    told = run(*words, tmp_path / "nowhere")
    assert told.exit_code == 1
    assert (
        f"Error: there are no checkpoints in {tmp_path / 'nowhere'}. Give the folder that the job saves to."
        in told.output
    )
    assert "is a checkpoint itself. Give the folder it is in." in run(*words, root / "step-00000100").output


def test_a_name_that_is_none_is_said_to_be_none(root: Path, tmp_path: Path) -> None:
    for words in (["verify", root], ["pin", root], ["copy", root, tmp_path / "target"]):
        told = run(*words, "step-7")
        assert told.exit_code == 1
        assert f"Error: there is no checkpoint step-7 in {root}." in told.output


def test_a_place_that_refuses_is_an_error_without_a_trace(root: Path) -> None:
    told = run("copy", root, "/proc/nowhere")
    assert told.exit_code == 1
    assert re.search(r"Error: /proc/nowhere.*: No such file or directory\.", told.output)
    assert "nosuch" in run("ls", "nosuch://x").output


def on_a_terminal(*words: str | Path) -> str:
    """What a command prints to a terminal."""
    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "headway", "checkpoint", *map(str, words)]
    with subprocess.Popen(
        command, stdin=inner, stdout=inner, stderr=inner, env={**os.environ, "TERM": "xterm"}
    ) as child:
        os.close(inner)
        said = b""
        try:
            while part := os.read(outer, 1 << 16):
                said += part
        except OSError:  # the terminal is closed
            pass
        assert child.wait() == 0
    os.close(outer)
    return said.decode()


def test_long_work_shows_a_bar_on_a_terminal_and_none_elsewhere(root: Path) -> None:
    said = on_a_terminal("verify", root)
    assert "verifying" in said
    assert "100%" in said or "━" in said
    piped = subprocess.run(
        [sys.executable, "-m", "headway", "checkpoint", "verify", root], capture_output=True, text=True, check=True
    )
    assert piped.stderr == ""
    assert "verifying" not in piped.stdout


def test_a_damaged_commit_marker_counts_without_being_named(root: Path) -> None:
    (root / "step-00000300" / METADATA).write_bytes(b"something else")
    told = run("verify", root)
    assert told.exit_code == 1
    assert "step-00000300  damaged\n  .metadata fits none of the manifests" in told.output
    assert run("copy", root, root.parent / "target").output.startswith("step-00000200 ")


def test_no_torch_is_needed(root: Path) -> None:
    script = "import sys; sys.modules['torch'] = None; from headway.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script, "checkpoint", "ls", root], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
