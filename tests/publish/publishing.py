"""A small place to publish in: a checkpoint that needs no torch, recipes in files, and the command line."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forking
from click.testing import CliRunner
from saving import save

import warm
from headway.cli import main
from headway.publish.versions import Version, Versions
from headway.storage import open_storage

NAME = "step-00000100"
LIMIT_S = 500.0
"""How long a command may take on a busy machine."""

RECIPE = """
import os, pathlib, time

def publish(anchor, out):
    for number in range(4):
        out.step(f"part-{number}", make)
    (out / "labels.txt").write_text("click")

def make(folder):
    (folder / "data").write_bytes(b"x" * 300_000)
    time.sleep(0.02)
    with open(os.environ.get("MADE", os.devnull), "a") as file:
        file.write("made\\n")
"""


@dataclass
class Place:
    """Checkpoints, versions, a home and recipes below one folder."""

    folder: Path

    def __post_init__(self) -> None:
        self.root, self.to, self.home = self.folder / "checkpoints", self.folder / "published", self.folder / "home"
        self.made = self.folder / "made"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.recipe()

    def recipe(self, text: str = RECIPE) -> None:
        (self.folder / "a_recipe.py").write_text(text)

    def save(self, step: int = 100, generation: int = 1, job: str = "") -> str:
        save(open_storage(self.root), step, generation, job=job)
        return str(self.root / f"step-{step:08d}")

    @property
    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "SLURM_"))}
        return kept | {"HEADWAY_HOME": str(self.home), "MADE": str(self.made), "COLUMNS": "200"}

    def command(self, *words: str, **environ: str) -> dict[str, Any]:
        """The arguments that start `headway publish …` in a new interpreter."""
        return {
            "args": [sys.executable, "-m", "headway", "publish", *words], "cwd": self.folder,
            "env": self.environ | environ,
        }  # fmt: skip

    def start(self, *words: str, **settings: Any) -> "warm.Popen":
        """Start `headway publish …` in a process that has imported torch already, as its publisher then has."""
        environ = self.environ | settings.pop("environ", {})
        command = [*forking.PROGRAM, "publish", *words]
        return warm.Popen(command, imports=forking.IMPORTS, cwd=self.folder, env=environ, **settings)

    def run(self, *words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        """Run `headway publish …` to its end: what publishes in processes of its own, everything else in this one."""
        if words[0] not in ("run", "submit"):
            return self._run_here(*words, **environ)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.start(*words, environ=environ, text=True, **pipes) as process:
            try:
                out, err = process.communicate(timeout=LIMIT_S)
            finally:
                process.kill()
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def _run_here(self, *words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        outside = dict.fromkeys(os.environ.keys() - self.environ.keys())
        with contextlib.chdir(self.folder):
            done = CliRunner().invoke(main, ["publish", *words], env=outside | self.environ | environ)
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)

    def publish(self, *more: str, recipe: str = "a_recipe.py:publish") -> "subprocess.CompletedProcess[str]":
        return self.run("run", str(self.root), "--recipe", recipe, "--to", str(self.to), *more)

    def state(self) -> dict[str, Any]:
        """Of the only request."""
        done = self.run("status", "--json")
        assert done.returncode == 0, done.stderr
        (told,) = json.loads(done.stdout)
        return dict(told)

    @property
    def versions(self) -> Versions:
        return Versions(open_storage(self.to))

    def complete(self) -> list[Version]:
        """The versions that are there, each of which is whole."""
        found = [each for each in self.versions.all() if each.state == "complete"]
        assert [self.versions.verify(each.name) for each in found] == [[]] * len(found)
        return found
