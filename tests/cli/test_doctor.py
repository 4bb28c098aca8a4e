"""`headway doctor` as a user types it: real Pythons, examined in real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEADWAY = [sys.executable, "-m", "headway"]


def doctor(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    around = os.environ | {"NO_COLOR": "1", "COLUMNS": "200"} | environ
    return subprocess.run([*HEADWAY, "doctor", *words], capture_output=True, text=True, env=around, timeout=500)


def checks(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def torch_of_our_own(folder: Path, text: str) -> str:
    """A folder for PYTHONPATH, in which torch is just this."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(text)
    return str(folder)


@pytest.mark.thorough
def test_this_torch_is_examined_together_with_what_is_around_it(home: Path) -> None:
    done = doctor("--json", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0", OMP_NUM_THREADS="4096", CXX="no-such-compiler")
    assert done.returncode == 0, "what hurts does not change the exit code: " + done.stderr
    told = json.loads(done.stdout)
    assert list(told) == ["python", "torch", "hooks", "home", "network", "checks"]
    found = checks(done)
    assert all(list(check) == ["name", "state", "what", "why", "fix"] for check in found.values())
    assert found["torchrun restarts"]["state"] == ("hurts" if told["torch"].startswith("2.13.") else "unknown")
    assert found["OMP_NUM_THREADS"]["state"] == "hurts"
    assert found["compiler"]["what"].startswith("no no-such-compiler")
    assert {"import of torch", "bytecode", "compile cache", "/dev/shm", "open files", "memory"} <= found.keys()


def test_what_hurts_comes_first_with_its_fix_then_what_is_good_then_the_hooks(home: Path) -> None:
    environ = {"PYTHONPATH": torch_of_our_own(home, "__version__ = '9.9'\n"), "OMP_NUM_THREADS": "4096"}
    lines = doctor(PYTHONDONTWRITEBYTECODE="1", **environ).stdout.splitlines()
    assert lines[0].startswith("Python 3.")
    assert "torch 9.9" in lines[0]
    begins = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert begins == sorted(begins, key=["Python", "hurts", "unknown", "good"].index)
    told = "\n".join(lines)
    assert told.index("\ngood") < told.index("\n hook")
    assert "bytecode: never written: PYTHONDONTWRITEBYTECODE is set; torch has none" in told
    assert "Fix: Unset PYTHONDONTWRITEBYTECODE." in told
    (good,) = (line for line in lines if line.startswith("good"))
    assert "torchrun restarts" in good, "this torch does not know of a shared store"


@pytest.mark.thorough
def test_bytecode_is_looked_for_after_the_import(home: Path) -> None:
    folder = torch_of_our_own(home, "__version__ = '9.9'\n")
    assert checks(doctor("--json", PYTHONPATH=folder, PYTHONDONTWRITEBYTECODE=""))["bytecode"]["state"] == "good"


def test_a_python_without_a_torch_that_works_is_told_all_the_rest(home: Path) -> None:
    folder = torch_of_our_own(home, "raise ImportError('libcudart.so.13 is not there')\n")
    done = doctor("--json", PYTHONPATH=folder)
    assert done.returncode == 1
    told, found = json.loads(done.stdout), checks(done)
    assert (told["torch"], told["hooks"]) == ("", {})
    assert "libcudart.so.13 is not there" in found["import of torch"]["what"]
    assert found["open files"]["what"]
    assert "no torch" in doctor(PYTHONPATH=folder).stdout


def test_a_program_that_is_no_python_cannot_be_examined(home: Path) -> None:
    done = doctor("--python", "/bin/true")
    assert done.returncode == 1
    assert "name the one that runs your jobs with --python" in done.stderr
