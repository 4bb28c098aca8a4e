"""`headway failures`: what a log's failure was, and why headway thinks so."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

import click

from headway.errors import InputError
from headway.observe.terminal import plain
from headway.recover import CATEGORIES, UNKNOWN, Classifier, Verdict, load_rules

_LINE_BYTES = 1 << 16
"""A line may have no end: it is read in parts of this size."""


@click.group()
def failures() -> None:
    """What failures are, and what is done about them."""


@failures.command()
@click.argument("log", nargs=-1, type=click.Path(path_type=Path, allow_dash=True))
@click.option("--json", "as_json", is_flag=True, help="Print JSON: an object, or a list for several logs.")
@click.option("--rules", type=click.Path(path_type=Path), help="TOML file with rules of your own, asked first.")
def explain(log: tuple[Path, ...], as_json: bool, rules: Path | None) -> None:
    """Say what the failure in each LOG was, by which line and which rule.

    Without LOG, or with -, standard input is read.
    """
    classifier = Classifier(load_rules(rules)) if rules else Classifier()
    told = [(path, classifier.explain(_lines(path))) for path in log or (Path("-"),)]
    if as_json:
        rows = [_row(path, verdict) for path, verdict in told]
        click.echo(json.dumps(rows if len(rows) > 1 else rows[0], indent=2))
        return
    click.echo("\n\n".join(_text(path, verdict, named=len(told) > 1) for path, verdict in told))


def _lines(path: Path) -> Iterator[str]:
    """A log's lines as they are read: a log may be larger than memory."""
    if str(path) == "-":
        yield from _parts(TextIOWrapper(sys.stdin.buffer, "utf-8", errors="replace", newline="\n"))
        return
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            yield from _parts(file)
    except IsADirectoryError as error:
        raise InputError(f"{path} is a folder. Name the log file in it.") from error
    except OSError as error:
        raise InputError(f"the log {path} cannot be read: {error.strerror}.") from error


def _parts(file: IO[str]) -> Iterator[str]:
    while part := file.readline(_LINE_BYTES):
        yield part


def _row(path: Path, verdict: Verdict) -> dict[str, Any]:
    told = asdict(verdict)
    first = {"category": told["category"], "class": told["klass"], "action": told["action"]}
    return first | {key: told[key] for key in ("rule", "line", "line_number")} | {"log": str(path)}


def _text(path: Path, verdict: Verdict, named: bool) -> str:
    category = CATEGORIES.get(verdict.category)
    meaning = category.meaning if category else UNKNOWN.meaning if verdict.category == UNKNOWN.name else ""
    lines = [f"{plain(str(path))}:"] if named else []
    lines += [f"category  {verdict.category}" + (f": {meaning}" if meaning else "")]
    lines += [f"class     {verdict.klass}", f"action    {verdict.action}"]
    if verdict.rule:
        lines += [f"line {verdict.line_number:<4} {plain(verdict.line)}", f"rule      {verdict.rule}"]
    return "\n".join(lines)
