"""`headway jobs`: what there is."""

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.accounting.ledger import percent
from headway.cli.source import home, open_job
from headway.errors import UnknownJob
from headway.observe.terminal import clock_time, duration, plain
from headway.paths import jobs_in


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--limit", default=20, show_default=True, help="Show at most this many, the last active first.")
def jobs(as_json: bool, limit: int) -> None:
    """List jobs, the one that was active last first."""
    names = jobs_in(home())
    rows = [_row(name) for name in names[:limit]]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table("job", "state", "began", "wall", "attempts", "ranks", "ETT%", box=None, header_style="dim")
    for row in rows:
        cells = [row["state"]]
        if "begin" in row:
            cells += [clock_time(row["begin"]), duration(row["wall_s"]), str(row["attempts"]), str(row["ranks"])]
            cells.append(f"{row['ett_percent']:.1f}")
        table.add_row(Text(plain(row["job"])), *cells)
    console = Console()
    console.print(table if rows else Text(f"No jobs in {plain(str(home()))} yet."))
    if len(names) > limit:
        console.print(Text(f"and {len(names) - limit} more: --limit {len(names)} shows all", "dim"))


def _row(name: str) -> dict[str, Any]:
    try:
        ledger = open_job(name).ledger()
    except UnknownJob:
        return {"job": name, "state": "unreadable"}
    return {
        "job": name,
        "state": ledger.state,
        "begin": ledger.begin_ns / 1e9,
        "wall_s": ledger.wall_ns / 1e9,
        "attempts": len(ledger.attempts),
        "ranks": len(ledger.ranks),
        "ett_percent": percent(ledger.buckets)[0],
    }
