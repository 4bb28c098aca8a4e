"""What is installed from a built wheel, with nothing around it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headway.testing import Story

ROOT = Path(__file__).parent.parent


@pytest.mark.thorough
def test_a_wheel_in_an_empty_environment_reports_a_job_without_torch(tmp_path: Path) -> None:
    tree = tmp_path / "tree"  # a build leaves its traces in the tree
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(tree)], check=True)
    [wheel] = tmp_path.glob("headway-*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "empty")], check=True)
    python = str(tmp_path / "empty" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "-q", "install", str(wheel)], check=True)

    story = Story(tmp_path / "home")
    story.rank().span("train_module_creation", 5).steps(100, each=1.0).finished()
    environ = os.environ | {"HEADWAY_HOME": str(tmp_path / "home")}
    headway = str(tmp_path / "empty" / "bin" / "headway")
    done = subprocess.run([headway, "report", "--json"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"]["new"] == 100
    page = tmp_path / "report.html"
    subprocess.run([headway, "report", "--html", str(page)], env=environ, check=True)
    assert "<html" in page.read_text(), "what is not Python is in the wheel, too"
    assert subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode
