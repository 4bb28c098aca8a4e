"""What torch works out of its own sources, worked out once: later processes find what they would work out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headway.compile.hashes import state_of

pytest.importorskip("torch")

PRINT = "print(codecache.torch_key().hex(), codecache.triton_key())"
IMPORT = "from torch._inductor import codecache"
SPARED = "codecache.build_code_hash = None"  # whoever works it out after that fails


def printed(folder: Path, *lines: str) -> str:
    """What a process prints that keeps hashes in this folder."""
    begin = ["from pathlib import Path", "from headway.compile.hashes import SourceHashes"]
    begin += [f"hashes = SourceHashes(Path({str(folder)!r}))", "hashes.load()"]
    code = "\n".join([*begin, *lines, "hashes.keep()"])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where one process has kept them, and what it found."""
    folder = tmp_path_factory.mktemp("home") / "hashes"
    return folder, printed(folder, "hashes.give()", IMPORT, PRINT)


@pytest.mark.parametrize("order", [("hashes.give()", IMPORT), (IMPORT, "hashes.give()")], ids=["before", "after"])
def test_the_next_process_works_nothing_out(first: tuple[Path, str], order: tuple[str, str]) -> None:
    folder, found = first
    assert printed(folder, *order, SPARED, PRINT) == found
    assert len(list(folder.iterdir())) == 1


def test_what_torch_has_worked_out_by_then_stays(first: tuple[Path, str]) -> None:
    folder, found = first
    assert printed(folder, IMPORT, PRINT, "hashes.give()", SPARED, PRINT) == 2 * found


def test_a_torch_that_cannot_be_told_works_them_out_itself(first: tuple[Path, str], tmp_path: Path) -> None:
    other = "for key in (codecache.torch_key, codecache.triton_key):\n    del key.set"
    assert printed(first[0], IMPORT, other, "hashes.give()", PRINT) == first[1]
    assert printed(tmp_path / "hashes", IMPORT, other, PRINT) == first[1]
    assert not (tmp_path / "hashes").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"torch_key": "no", "triton_key": null}'])
def test_a_file_that_makes_no_sense_is_written_anew(first: tuple[Path, str], tmp_path: Path, text: str) -> None:
    (kept,) = first[0].iterdir()
    (tmp_path / kept.name).write_text(text)
    assert printed(tmp_path, "hashes.give()", IMPORT, PRINT) == first[1]
    assert json.loads((tmp_path / kept.name).read_text()) == json.loads(kept.read_text())


def test_a_file_that_others_could_have_written_is_not_believed(first: tuple[Path, str], tmp_path: Path) -> None:
    (kept,) = first[0].iterdir()
    (tmp_path / kept.name).write_text(kept.read_text().replace('"torch_key": "', '"torch_key": "00'))
    tmp_path.chmod(0o777)
    assert printed(tmp_path, "hashes.give()", IMPORT, PRINT) == first[1]


def test_a_process_that_compiles_nothing_imports_nothing(tmp_path: Path) -> None:
    assert printed(tmp_path / "hashes", "hashes.give()", "import sys", "print('torch' in sys.modules)") == "False\n"
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
