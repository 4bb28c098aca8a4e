"""`headway jobs`: what there is."""

import json

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.accounting.ledger import percent
from headway.cli.source import home, open_job
from headway.errors import UnknownJob
from headway.observe.terminal import clock_time, duration
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
        if row["state"] == "unreadable":
            table.add_row(escape(row["job"]), "unreadable")
            continue
        ett = f"{row['ett_percent']:.1f}"
        cells = (clock_time(row["begin"]), duration(row["wall_s"]), str(row["attempts"]), str(row["ranks"]), ett)
        table.add_row(escape(row["job"]), row["state"], *cells)
    console = Console()
    console.print(table if rows else f"No jobs in {escape(str(home()))} yet.")
    if len(names) > limit:
        console.print(f"[dim]and {len(names) - limit} more: --limit {len(names)} shows all[/dim]")


def _row(name: str) -> dict[str, object]:
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
