"""What a recipe fills: steps are done once, whatever becomes of the process that does them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.errors import InputError
from headway.publish.out import Check, Out, Rejected


def writes(name: str, text: str = "x") -> "callable[[Path], str]":
    def make(folder: Path) -> str:
        (folder / name).write_text(text)
        return f"wrote {name}"

    return make


def fails(folder: Path) -> None:
    (folder / "half").write_text("x" * 1000)
    raise OSError(28, "No space left on device")


def never(folder: Path) -> None:
    raise AssertionError("it is done again")


def test_a_step_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    place = Out(tmp_path).step("weights", writes("a", "abc"))
    again = Out(tmp_path)
    assert again.step("weights", never) == place == tmp_path / "out" / "weights"
    assert (place / "a").read_text() == "abc"
    assert again.told("weights") == "wrote a"
    assert list(again.steps) == ["weights"]


def test_a_step_that_failed_leaves_nothing_and_is_done_again(tmp_path: Path) -> None:
    out = Out(tmp_path)
    with pytest.raises(OSError, match="No space"):
        out.step("weights", fails)
    assert out.files() == {}
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    out.step("weights", writes("a"))
    assert list(out.files()) == ["weights/a"]


def test_a_step_whose_files_are_gone_is_done_again(tmp_path: Path) -> None:
    out = Out(tmp_path)
    out.step("weights", writes("a", "abc"))
    (out / "weights" / "a").write_text("")
    out.step("weights", writes("a", "abc"))
    assert (out / "weights" / "a").read_text() == "abc"


def test_a_step_killed_in_the_middle_is_done_again_and_those_before_it_are_not(tmp_path: Path) -> None:
    program = f"""
import os, pathlib, signal
from headway.publish.out import Out
out = Out(pathlib.Path({str(tmp_path)!r}))
out.step("one", lambda folder: (folder / "a").write_text("abc"))
def dies(folder):
    (folder / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
out.step("two", dies)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    out = Out(tmp_path)
    out.step("one", never)
    out.step("two", writes("b"))
    assert list(out.files()) == ["one/a", "two/b"]


def test_files_beside_steps_are_published_too_and_all_have_hashes(tmp_path: Path) -> None:
    out = Out(tmp_path)
    out.step("weights", writes("a", "abc"))
    Path(out, "labels.txt").write_text("click")
    (out / "more").mkdir()
    (out / "more" / "labels").write_text("abc")
    hashes = out.hashes()
    assert list(hashes) == ["labels.txt", "more/labels", "weights/a"]
    assert hashes["more/labels"] == hashes["weights/a"]
    assert hashes["labels.txt"]["bytes"] == 5


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b"])
def test_a_step_has_the_name_of_a_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="is no name of a step"):
        Out(tmp_path).step(name, writes("a"))
    assert sorted(os.listdir(tmp_path)) == ["out", "steps"]


@pytest.mark.parametrize("target", ["/etc/hostname", "/etc", "nowhere"], ids=["file", "folder", "dangling"])
def test_links_are_no_part_of_a_version(tmp_path: Path, target: str) -> None:
    out = Out(tmp_path)
    with pytest.raises(InputError, match="is a link"):
        out.step("weights", lambda folder: (folder / "a").symlink_to(target))
    (out / "beside").symlink_to(target)
    with pytest.raises(InputError, match="beside is a link"):
        out.files()


def test_a_step_may_return_what_is_no_json(tmp_path: Path) -> None:
    out = Out(tmp_path)
    out.step("weights", lambda folder: (folder / "a").write_text("abc") and folder)
    assert out.told("weights") is None
    assert Out(tmp_path).step("weights", never) == out / "weights"


def test_a_step_without_files_is_done_once_too(tmp_path: Path) -> None:
    place = Out(tmp_path).step("evaluation", lambda folder: {"auc": 0.8})
    assert Out(tmp_path).step("evaluation", never) == place
    place.rmdir()  # a power failure came before the folder's name was safe
    assert Out(tmp_path).step("evaluation", lambda folder: None).is_dir()


def test_a_file_of_a_step_that_was_changed_later_has_the_hash_of_what_it_is(tmp_path: Path) -> None:
    out = Out(tmp_path)
    out.step("weights", writes("a", "abc"))
    before = out.hashes()["weights/a"]
    time.sleep(0.02)
    (out / "weights" / "a").write_text("abd")
    assert out.hashes()["weights/a"] != before
    Out(tmp_path).step("weights", writes("a", "abc"))
    assert out.hashes()["weights/a"] == before


def test_what_a_try_that_died_left_beside_the_steps_is_not_published(tmp_path: Path) -> None:
    out = Out(tmp_path)
    out.step("weights", writes("a"))
    (out / "of-10:31").write_text("x")
    (out / "more").mkdir()
    (out / "more" / "x").write_text("x")
    assert list(Out(tmp_path).files()) == ["weights/a"]


def test_a_failed_check_ends_it_and_is_remembered(tmp_path: Path) -> None:
    out = Out(tmp_path)
    out.add(Check(name="size", passed=True))
    with pytest.raises(Rejected, match="parity: output 0 differs by 3"):
        out.add(Check(name="parity", passed=False, told="output 0 differs by 3"))
    assert [each.passed for each in out.checks] == [True, False]
