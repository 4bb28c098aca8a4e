"""`headway inject` on real virtual environments: one file, which measures and does no harm."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from running import HEADWAY, SITE

SHOW = "import sys; print(sum(getattr(f, '__name__', '') == 'HeadwayFinder' for f in sys.meta_path))"


@pytest.fixture
def target(home: Path, tmp_path: Path) -> Path:
    """A Python of its own, with nothing in it."""
    venv.create(tmp_path / "target", with_pip=False)
    return tmp_path / "target" / "bin" / "python"


def packages_of(target: Path) -> Path:
    (folder,) = target.parents[1].glob("lib/python*/site-packages")
    return folder


def inject(*words: object, code: int = 0, headway: Path | None = None) -> str:
    environ = os.environ | ({"PYTHONPATH": str(headway)} if headway else {})
    command = [*HEADWAY, "inject", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def finders(python: Path, *options: str, **environ: str) -> int:
    """How often headway has started in that Python, which says nothing of its own."""
    command = [str(python), *options, "-c", SHOW]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environ)
    assert done.stderr == ""
    return int(done.stdout)


def test_every_program_of_that_python_is_measured_until_it_is_removed(target: Path) -> None:
    said = inject("--python", target)
    assert str(packages_of(target) / "headway-inject.pth") in said
    assert f"headway inject --python {target} --remove" in said
    assert [path.name for path in packages_of(target).iterdir()] == ["headway-inject.pth"]
    assert finders(target) == finders(target, "-I") == finders(target, "-E") == 1
    assert finders(target, "-S") == finders(target, HEADWAY_DISABLE="1") == 0
    assert "removed" in inject("--python", target, "--remove")
    assert finders(target) == 0
    assert not list(packages_of(target).iterdir())


def test_twice_and_with_exec_it_starts_once(target: Path) -> None:
    inject("--python", target)
    inject("--python", target)
    assert finders(target, PYTHONPATH=str(SITE)) == 1


def test_no_module_is_loaded_that_would_not_be_there_anyway(target: Path) -> None:
    def modules() -> set[str]:
        command = [str(target), "-c", "import sys; print(*sys.modules)"]
        return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())

    plain = modules()
    inject("--python", target)
    assert {name.partition(".")[0] for name in modules() - plain} == {"headway"}


def test_a_sitecustomize_is_run_as_ever(target: Path) -> None:
    inject("--python", target)
    (packages_of(target) / "sitecustomize.py").write_text("print('theirs')\n")
    done = subprocess.run([str(target), "-c", "pass"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("theirs\n", "")


def test_once_headway_is_gone_nothing_happens(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a "folder" für headway'
    shutil.copytree(SITE.parents[1], folder / "headway", ignore=shutil.ignore_patterns("__pycache__"))
    inject("--python", target, headway=folder)
    assert finders(target) == 1
    (folder / "headway" / "instrument" / "start.py").write_text("raise Exception")
    done = subprocess.run([str(target), "-c", "pass"], capture_output=True, text=True, check=True)
    assert done.stderr.count("\n") == 1
    (folder / "headway" / "instrument" / "site" / "sitecustomize.py").write_text("damaged (")
    assert finders(target) == 0
    shutil.rmtree(folder)
    assert finders(target) == 0


def test_what_was_not_injected_cannot_be_removed(target: Path) -> None:
    assert "was not injected" in inject("--python", target, "--remove", code=1)


def test_where_nothing_can_be_written_it_says_what_to_do(target: Path) -> None:
    packages_of(target).rmdir()
    assert "`headway exec`" in inject("--python", target, code=1)


def test_what_is_no_python_or_too_old_a_one_is_an_error(target: Path, tmp_path: Path) -> None:
    assert "is not a Python" in inject("--python", "/no/such/python", code=1)
    assert "is not a Python" in inject("--python", "/bin/true", code=1)
    old = tmp_path / "old"
    old.write_text(f"#!/bin/sh\necho 3 9\necho {tmp_path}\n")
    old.chmod(0o755)
    assert "is Python 3.9" in inject("--python", old, code=1)
    assert "was not injected" in inject("--python", old, "--remove", code=1)


def test_the_python_that_runs_headway_is_the_default(target: Path) -> None:
    environ = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))}  # with what it needs
    subprocess.run([str(target), "-P", "-m", "headway", "inject"], env=environ, check=True, capture_output=True)
    assert finders(target) == 1
