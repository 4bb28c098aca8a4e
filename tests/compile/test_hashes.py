"""Hashes of torch's own sources are computed once: later processes find what they would compute themselves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import shared
import warm
from headway.compile.hashes import state_of

pytest.importorskip("torch")

PRINT = "print(codecache.torch_key().hex(), codecache.triton_key())"
IMPORT = "from torch._inductor import codecache"
SPARED = "codecache.build_code_hash = None"  # from here on, computing them fails


def program(folder: Path, *lines: str) -> str:
    """A program that keeps hashes in this folder."""
    begin = ["from pathlib import Path", "from headway.compile.hashes import SourceHashes"]
    begin += [f"hashes = SourceHashes(Path({str(folder)!r}))", "hashes.load()"]
    return "\n".join([*begin, *lines, "hashes.keep()"])


def printed(folder: Path, *lines: str) -> str:
    """What such a program prints."""
    code = program(folder, *lines)
    done = warm.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture
def first() -> tuple[Path, str]:
    """A folder in which one process has kept its hashes, and what it found."""
    folder = shared.folder() / "kept-hashes"
    return folder, shared.once("hashes", lambda: printed(folder, "hashes.give()", IMPORT, PRINT))


ORDERS = [
    pytest.param(["hashes.give()", IMPORT], id="before"),
    pytest.param([IMPORT, "hashes.give()"], id="after", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize("order", ORDERS)
def test_the_next_process_computes_nothing(first: tuple[Path, str], order: list[str]) -> None:
    folder, found = first
    assert printed(folder, *order, SPARED, PRINT) == found
    assert len(list(folder.iterdir())) == 1


@pytest.mark.thorough
def test_hashes_that_torch_has_computed_by_then_stay(first: tuple[Path, str]) -> None:
    folder, found = first
    assert printed(folder, IMPORT, PRINT, "hashes.give()", SPARED, PRINT) == 2 * found


@pytest.mark.thorough
def test_a_torch_that_cannot_be_told_computes_them_itself(first: tuple[Path, str], tmp_path: Path) -> None:
    other = "for key in (codecache.torch_key, codecache.triton_key):\n    del key.set"
    again = f"hashes = SourceHashes(Path({str(tmp_path / 'hashes')!r}))\nhashes.load()"
    assert printed(first[0], IMPORT, other, "hashes.give()", PRINT, again, PRINT) == 2 * first[1]
    assert not (tmp_path / "hashes").exists()


@pytest.mark.thorough
def test_a_file_that_makes_no_sense_is_replaced(first: tuple[Path, str], tmp_path: Path) -> None:
    (kept,) = first[0].iterdir()
    folders = [tmp_path / str(number) for number in range(4)]
    for folder, text in zip(folders, ["", "[]", "{}", '{"torch_key": "no", "triton_key": null}'], strict=True):
        folder.mkdir()
        (folder / kept.name).write_text(text)
    each = "\n".join([f"for folder in {list(map(str, folders))!r}:", "    hashes = SourceHashes(Path(folder))",
                      "    hashes.load()", "    hashes.give()", f"    {PRINT}", "    hashes.keep()"])  # fmt: skip
    assert printed(tmp_path / "other", IMPORT, each) == 4 * first[1]
    for folder in folders:
        assert json.loads((folder / kept.name).read_text()) == json.loads(kept.read_text())


def test_a_file_that_others_could_have_written_is_not_believed(first: tuple[Path, str], tmp_path: Path) -> None:
    (kept,) = first[0].iterdir()
    (tmp_path / kept.name).write_text(kept.read_text().replace('"torch_key": "', '"torch_key": "00'))
    tmp_path.chmod(0o777)
    assert printed(tmp_path, "hashes.give()", IMPORT, PRINT) == first[1]


def test_a_process_that_compiles_nothing_imports_nothing(tmp_path: Path) -> None:
    code = program(tmp_path / "hashes", "hashes.give()", "import sys", "print('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"False\n"
    assert not (tmp_path / "hashes").exists()


def test_whatever_happens_to_a_source_file_makes_another_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pack" / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/one.py", "inner/readme.txt"):
        (tmp_path / "pack" / name).write_text("one")
    states = [state_of(("pack", "not_installed"))]
    (tmp_path / "pack" / "inner" / "readme.txt").write_text("another")
    assert state_of(("pack", "not_installed")) == states[0]
    for text in ("two", "three"):  # of the same size, and of another
        (tmp_path / "pack" / "inner" / "one.py").write_text(text)
        states.append(state_of(("pack", "not_installed")))
    (tmp_path / "pack" / "inner" / "new.py").write_text("")
    states.append(state_of(("pack", "not_installed")))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "pack" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(tmp_path / "pack")
    (tmp_path / "elsewhere" / "far.py").write_text("")
    states.append(state_of(("pack", "not_installed")))
    assert len(set(states)) == 5
