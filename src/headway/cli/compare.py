"""`headway compare`: two jobs side by side."""

import json

import click
from rich.console import Console

from headway.cli.source import open_job
from headway.observe.summary import summary
from headway.observe.terminal import render_comparison


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="Print both reports and their difference as JSON.")
def compare(a: str, b: str, as_json: bool) -> None:
    """Show where job B spent more or less of its time than job A."""
    first, second = (summary(open_job(name).ledger(), rank_ledgers=as_json) for name in (a, b))
    if not as_json:
        Console().print(render_comparison(first, second))
        return
    change = {key: second["ledger"][key] - first["ledger"][key] for key in first["ledger"]}
    points = second["ett_percent"] - first["ett_percent"]
    click.echo(json.dumps({"a": first, "b": second, "ett_points": points, "ledger_change": change}, indent=2))
