"""The injected `sitecustomize` in real interpreters: headway is there, and nothing else is other than without it."""

import ast
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from running import SITE, python, run

SHOW_HEADWAY = "import sys; print('headway' in sys.modules)"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder to write modules of the job's to."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def copy_with(start: str, folder: Path) -> Path:
    """Another copy of headway that starts with this code; its folder for PYTHONPATH."""
    instrument = folder / "headway" / "instrument"
    shutil.copytree(SITE, instrument / "site", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SITE.parents[1] / "__init__.py", folder / "headway")
    (instrument / "__init__.py").write_text("")
    (instrument / "start.py").write_text(start)
    return instrument / "site"


def with_and_without(code: str, path: str = "") -> tuple[str, str]:
    """What an interpreter prints with the shim, and without."""
    plain = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True,
                           text=True, check=True)  # fmt: skip
    return python("-c", code, path=path), plain.stdout


# --- what is there ---------------------------------------------------------------------------------------------------


def test_a_job_needs_nothing_that_headway_depends_on(home: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    code = (
        "import importlib.util, headway, headway.run\n"
        "print(headway.__file__, *[importlib.util.find_spec(name) for name in ('click', 'rich', 'pytest')])"
    )
    done = run(str(tmp_path / "bare" / "bin" / "python"), "-c", code, check=True)
    assert done.stdout.split() == [str(SITE.parents[1] / "__init__.py"), "None", "None", "None"]


def test_it_goes_before_another_headway(elsewhere: Path) -> None:
    (elsewhere / "headway.py").write_text("raise Exception('not this one')")
    code = "import importlib, headway; importlib.reload(headway); print(headway.__file__)"
    assert python("-c", code, path=str(elsewhere)).strip() == str(SITE.parents[1] / "__init__.py")


def test_every_python_of_a_shell_script_is_in_the_same_job(home: Path) -> None:
    script = home / "job.sh"
    show = f'{sys.executable} -c \'import os, sys; print("headway" in sys.modules, os.environ["HEADWAY_JOB"])\''
    script.write_text(f"#!/bin/sh\n{show}\n{show}\n")
    script.chmod(0o755)
    first, second = run("./job.sh", cwd=home, check=True).stdout.splitlines()
    assert first == second
    assert first.startswith("True job-")


def test_spawned_children_have_it_too(elsewhere: Path) -> None:
    (elsewhere / "parent.py").write_text(
        "import multiprocessing, sys\n"
        "def show(): print('headway.instrument.start' in sys.modules)\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=show)\n"
        "    child.start(); child.join()\n"
    )
    assert python(str(elsewhere / "parent.py")) == "True\n"


# --- what is as it was -----------------------------------------------------------------------------------------------


def test_no_module_is_loaded_that_would_not_be_there_anyway() -> None:
    ours, plain = with_and_without("import sys; print(*sys.modules)")
    extra = set(ours.split()) - set(plain.split())
    assert {name.partition(".")[0] for name in extra} == {"headway", "sitecustomize"}


def test_the_path_is_as_it_was(elsewhere: Path) -> None:
    ours, plain = with_and_without("import sys; print(*sys.path, sep='\\n')", f"{elsewhere}:/no/such")
    assert ours == plain


def test_modules_of_the_job_that_are_named_like_pythons_own_are_its_own(elsewhere: Path) -> None:
    names = ["json", "typing", "struct", "threading", "re", "dataclasses", "socket", "headway_job"]
    for name in names:
        (elsewhere / f"{name}.py").write_text("mine = True\n")
    (elsewhere / "train.py").write_text("".join(f"import {name}; print({name}.mine)\n" for name in names))
    everywhere = {"path": str(elsewhere), "cwd": elsewhere}
    assert python("train.py", **everywhere) == "True\n" * len(names)  # type: ignore[arg-type]
    assert python("-c", "import json; print(json.mine)", cwd=elsewhere) == "True\n"


@pytest.mark.parametrize("option", ["-S", "-I", "-E"])
def test_a_python_that_reads_no_path_is_not_measured_and_works(home: Path, option: str) -> None:
    done = run(sys.executable, option, "-c", SHOW_HEADWAY, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_it_is_valid_for_the_oldest_python_around() -> None:
    source = (SITE / "sitecustomize.py").read_text()
    ast.parse(source, feature_version=(3, 6))
    assert "f'" not in source
    assert 'f"' not in source


# --- a sitecustomize of the job's own --------------------------------------------------------------------------------


def test_the_one_it_hides_is_run_and_is_the_one_that_others_see(elsewhere: Path) -> None:
    (elsewhere / "sitecustomize.py").write_text(
        "import sys\nprint('theirs', __name__)\nvalue = 5\nprint(sys.modules['sitecustomize'].value)\n"
    )
    code = "import sitecustomize, sys; print(sitecustomize.value, sitecustomize.__file__, 'headway' in sys.modules)"
    printed = python("-c", code, path=str(elsewhere)).splitlines()
    assert printed == ["theirs sitecustomize", "5", f"5 {elsewhere / 'sitecustomize.py'} True"]


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError('theirs')",
        "import no_such_module",
        "raise ImportError('x', name='sitecustomize')",
        "1 +",
        "import sys; sys.exit(3)",
        "import os; os.environ['HEADWAY_DISABLE'] = '1'",
    ],
)
def test_what_goes_wrong_in_it_goes_wrong_as_without_us(elsewhere: Path, body: str) -> None:
    (elsewhere / "sitecustomize.py").write_text(body)
    code = "import sys; print('sitecustomize' in sys.modules)"
    results = []
    for path in (str(elsewhere), f"{SITE}:{elsewhere}"):
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True)
        said = done.stderr.splitlines()[-1:] if "exit" in body else done.stderr  # a trace shows who imported it
        results.append((done.returncode, said, done.stdout if "ImportError" not in body else b""))
    assert results[0] == results[1]


def test_what_it_sets_counts_for_headway(elsewhere: Path) -> None:
    (elsewhere / "sitecustomize.py").write_text("import os; os.environ['HEADWAY_DISABLE'] = '1'")
    assert python("-c", SHOW_HEADWAY, path=str(elsewhere)) == "False\n"


# --- when it does not start ------------------------------------------------------------------------------------------


def test_disabled_it_only_makes_way(elsewhere: Path) -> None:
    (elsewhere / "sitecustomize.py").write_text("print('theirs')")
    assert python("-c", SHOW_HEADWAY, path=str(elsewhere), environ={"HEADWAY_DISABLE": "1"}) == "theirs\nFalse\n"


@pytest.mark.parametrize(
    ("start", "why"),
    [
        ("def start(): raise ValueError('broken')", "ValueError: broken"),
        ("raise RuntimeError('broken')", "RuntimeError: broken"),
        ("1 +", "SyntaxError: invalid syntax"),
        ("", "ImportError: cannot import name 'start'"),
    ],
)
def test_whatever_fails_in_it_the_job_runs_and_one_line_says_so(tmp_path: Path, start: str, why: str) -> None:
    site = copy_with(start, tmp_path)
    environ = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", "print('ran')"], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert done.stderr.startswith(f"headway: this process is not measured ({why}")
    assert done.stderr.count("\n") == 1
    closed = subprocess.run(["sh", "-c", f"{sys.executable} -c 'print(1)' 2>&-"], env=environ, capture_output=True)
    assert (closed.returncode, closed.stdout) == (0, b"1\n")


def test_two_headways_on_the_path_start_once(tmp_path: Path) -> None:
    sites = [copy_with(f"def start(): print({name!r})", tmp_path / name) for name in ("outer", "inner")]
    environ = os.environ | {"PYTHONPATH": ":".join(map(str, sites))}
    done = subprocess.run([sys.executable, "-c", "pass"], env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) in [("outer\n", ""), ("inner\n", "")]
