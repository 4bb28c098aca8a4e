"""The docs say what is there: links lead somewhere, code runs, every option, setting, bucket and activity is named."""

import ast
import difflib
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import click
import pytest

from headway.accounting.rules import Bucket
from headway.cli import main
from headway.config import Settings
from headway.events.vocabulary import Activity
from headway.observe.summary import summary
from headway.testing import Story

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
REFERENCE = (ROOT / "docs" / "reference.md").read_text()


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, section = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name}: {target}"
        if section:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert section in map(anchor, titles), f"{page.name}: {target}"


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.S)


TRAINING = """
import headway, torch
run, model, loader = headway.current(), torch.nn.Linear(4, 4), [torch.ones(2, 4)] * 50
optimizer = torch.optim.AdamW(model.parameters())
def train_step(batch):
    model(batch).sum().backward()
    optimizer.step()
"""


def test_the_code_in_the_readme_runs(home: Path) -> None:
    saving, starting, saying = python_blocks((ROOT / "README.md").read_text())
    given = "build = dict\nloader = range(50)\ntrain_step = lambda model, batch: None\n"
    subprocess.run([sys.executable, "-c", given + saying], check=True, timeout=120)
    assert list(home.rglob("*.hwj"))
    subprocess.run([sys.executable, "-c", TRAINING + saving], check=True, timeout=120, cwd=home)
    assert (home / "checkpoints").is_dir()
    subprocess.run([sys.executable, "-c", "import headway\n" + starting], check=True, timeout=120)


def test_the_stages_in_the_guide_run(home: Path) -> None:
    stages = python_blocks((ROOT / "docs" / "start-fast.md").read_text())[0]
    said = subprocess.run([sys.executable, "-c", stages], check=True, timeout=120, capture_output=True, text=True)
    assert said.stdout == "torch.Size([4, 1])\n"


def test_the_code_in_the_reference_runs(home: Path, tmp_path: Path) -> None:
    script, story = python_blocks(REFERENCE)
    given = "loader = range(50)\n"
    subprocess.run([sys.executable, "-c", given + script], check=True, timeout=120)
    names: dict[str, object] = {}
    exec(story, names)
    names["test_my_dashboard_shows_a_failure"](tmp_path / "story")  # type: ignore[operator]


def test_the_two_scripts_of_the_comparison_differ_as_is_shown() -> None:
    names = ("train_plain.py", "train_headway.py")
    plain, ours = ((ROOT / "examples" / "dlrm" / name).read_text().splitlines() for name in names)
    differ = "\n".join(difflib.unified_diff(plain, ours, *names, n=0, lineterm=""))
    assert differ in (ROOT / "docs" / "proof.md").read_text(), f"the whole difference is now:\n{differ}"


def test_every_command_and_option_is_documented() -> None:
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None, name
        assert f"`headway {name}" in REFERENCE, name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert any(option in REFERENCE for option in parameter.opts), f"{name} {parameter.opts}"


def test_every_setting_is_documented() -> None:
    for field in fields(Settings):
        assert f"`HEADWAY_{field.name.upper()}`" in REFERENCE


def test_every_bucket_and_every_activity_is_documented() -> None:
    ledger = (ROOT / "docs" / "ledger.md").read_text()
    assert [key for key in Bucket if f"`{key}`" not in ledger] == []
    assert [name for name in Activity if f"`{name}`" not in REFERENCE] == []


def test_every_key_of_the_json_report_is_documented(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.rank().steps(10, each=1.0).handed_over("x", 10).crashed()
    report = summary(story.ledger())
    lists = ("attempts", "ranks", "advice", "failures", "publications")
    for part in (report, *(report[name][0] for name in lists)):
        assert [key for key in part if f"`{key}`" not in REFERENCE] == []


def test_the_changelog_names_this_version() -> None:
    from headway import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_each_promise_has_a_test_that_make_test_runs() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    for file, name in re.findall(r"`([\w/]+\.py)::(test_\w+)`", text):
        module = ast.parse((ROOT / "tests" / file).read_text())
        found = [each for each in module.body if isinstance(each, ast.FunctionDef) and each.name == name]
        assert found, f"tests/{file} has no {name}"
        marks = [ast.unparse(mark) for mark in found[0].decorator_list if "parametrize" not in ast.unparse(mark)]
        marks += [ast.unparse(each) for each in module.body if ast.unparse(each).startswith("pytestmark")]
        assert not [mark for mark in marks if "thorough" in mark], f"`make test` leaves out {name}"
