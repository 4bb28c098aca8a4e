"""`headway doctor`: what around a job will hurt it, and what would be seen of it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.cli.exec import python_path
from headway.cli.source import home
from headway.errors import InputError
from headway.launch.surroundings import Finding, surroundings
from headway.observe.terminal import plain
from headway.paths import is_network

_CODE = "from headway.instrument.checkup import main; main()"
_GOOD = ("on", "off", "not installed")
"""A hook that is off is there, and put in when it is needed."""


@click.command()
@click.option("--python", default=sys.executable, show_default="this one", help="The Python that runs your jobs.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(python: str, as_json: bool) -> None:
    """Say what here will hurt a job, each with its fix; then every hook into torch, and whether it takes.

    Run it where the job runs: on its node, in its allocation, in its container. Ends with exit code 1 if a hook does
    not take, or there is no torch: less would be measured. What hurts a job does not change the exit code.
    """
    found = examine(python) | {"home": str(home()), "network": is_network(home())}
    checks = surroundings(os.environ, found.pop("seen"))
    amiss = {hook: state for hook, state in found["hooks"].items() if state not in _GOOD}
    if as_json:
        click.echo(json.dumps(found | {"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _show(found, checks)
    raise SystemExit(1 if amiss or not found["hooks"] else 0)


def examine(python: str) -> dict[str, Any]:
    """What that Python finds when it imports everything that headway looks into."""
    with tempfile.TemporaryDirectory() as folder:
        unset = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
        environ = unset | {"PYTHONPATH": python_path(os.environ.get("PYTHONPATH", "")), "HEADWAY_HOME": folder}
        try:
            done = subprocess.run([python, "-c", _CODE], env=environ, capture_output=True, text=True, check=False)
        except OSError as error:
            raise InputError(f"{python} cannot be run ({error.strerror}): name a Python with --python.") from error
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise InputError(
            f"{python} cannot be examined: {last[0]}. It needs to be Python 3.11 or newer: name the one "
            f"that runs your jobs with --python."
        ) from error
    return found


def _show(found: dict[str, Any], checks: Sequence[Finding]) -> None:
    console = Console()
    where = "on a network file system: journals go through a spool" if found["network"] else "local"
    torch = f"torch {found['torch']}" if found["torch"] else "no torch"
    console.print(Text(plain(f"Python {found['python']}, {torch}. Jobs in {found['home']} ({where}).")))
    _show_checks(console, checks)
    if not found["hooks"]:
        return
    table = Table("hook", "state", box=None, header_style="dim")
    for hook, state in found["hooks"].items():
        style = {"on": "green", "off": "green", "not installed": "dim"}.get(state, "red")
        table.add_row(Text(hook), Text("on, when needed" if state == "off" else plain(state), style))
    console.print(table)


def _show_checks(console: Console, checks: Sequence[Finding]) -> None:
    """What hurts and what cannot be known, each with its fix; then what is good, in one line."""
    table = Table.grid(padding=(0, 2))
    for state, style in (("hurts", "red"), ("unknown", "yellow")):
        for check in (check for check in checks if check.state == state):
            head = (plain(f"{check.name}: {check.what}"), "bold")
            table.add_row(
                Text(state, style), Text.assemble(head, "\n", plain(check.why), "\n", plain(f"Fix: {check.fix}"))
            )
    good = ", ".join(check.name for check in checks if check.state == "good")
    table.add_row(Text("good", "green"), Text(plain(good)))
    console.print(table, Text())
