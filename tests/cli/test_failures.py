"""`headway failures explain` on real files and pipes."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from headway.cli.failures import failures
from headway.errors import InputError

LOG = "step 1\nstep 2\n\x1b[31mOSError: [Errno 28] No space left on device\x1b[0m\n  exitcode  : -6 (pid: 3)\n"


def run(*words: str | Path, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(failures, ["explain", *map(str, words)], input=stdin)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "rank0.log"
    path.write_text(LOG)
    return path


def test_the_verdict_names_category_action_line_and_rule(log: Path) -> None:
    told = run(log)
    assert told.exit_code == 0
    for word in ("disk_full: a disk is full", "fail_fast", "line 3", "No space left on device", "disk_full.errno"):
        assert word in told.output
    assert "\x1b" not in told.output


def test_json_is_one_object_for_one_log_and_a_list_for_several(log: Path) -> None:
    told = json.loads(run(log, "--json").output)
    assert list(told)[:5] == ["category", "class", "action", "rule", "line"]
    assert told == {
        "category": "disk_full", "class": "resource", "action": "fail_fast", "rule": "disk_full.errno",
        "line": "OSError: [Errno 28] No space left on device", "line_number": 3, "log": str(log),
    }  # fmt: skip
    several = json.loads(run(log, "-", "--json", stdin="all fine\n").output)
    assert [row["category"] for row in several] == ["disk_full", "unknown"]


def test_several_logs_are_told_apart(log: Path) -> None:
    assert f"{log}:" in run(log, log).output


@pytest.mark.parametrize("words", [(), ("-",)])
def test_standard_input_is_read_where_no_log_is_named(words: tuple[str, ...]) -> None:
    assert "fd_limit" in run(*words, stdin=b"\xff\xfe\nOSError: [Errno 24] Too many open files\n").output


def test_a_log_without_a_failure_says_so_and_is_no_error() -> None:
    told = run(stdin="step 1\nstep 2\n")
    assert told.exit_code == 0
    assert "unknown: no rule knows this failure" in told.output


def test_rules_of_ones_own_are_asked_first(log: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nname="second_step"\ncategory="preempted"\npattern="^step 2"\n')
    assert "second_step" in run(log, "--rules", rules).output


@pytest.mark.parametrize(("name", "told"), [("nowhere.log", "cannot be read: No such file"), (".", "is a folder")])
def test_a_log_that_cannot_be_read_is_named(tmp_path: Path, name: str, told: str) -> None:
    error = run(tmp_path / name).exception
    assert isinstance(error, InputError)
    assert told in str(error)
    assert str(tmp_path) in str(error)


def test_line_numbers_count_lines_also_where_one_is_very_long(tmp_path: Path) -> None:
    path = tmp_path / "bar.log"
    path.write_text("10%|#  |\r" * 20_000 + "\nOSError: [Errno 24] Too many open files\n")
    assert json.loads(run(path, "--json").output)["line_number"] == 2


def test_evidence_anywhere_in_a_line_of_carriage_returns_counts(tmp_path: Path) -> None:
    path = tmp_path / "bar.log"
    path.write_text("10%|#  |\r" * 20_000 + "OSError: [Errno 24] Too many open files\r" + "20%|## |\r" * 20_000)
    assert json.loads(run(path, "--json").output)["category"] == "fd_limit"


def test_explain_is_a_command_of_the_group() -> None:
    assert isinstance(failures, click.Group)
    assert list(failures.commands) == ["explain"]
