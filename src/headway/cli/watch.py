"""`headway watch`: the report of a job while it runs."""

import time

import click
from rich.console import Console
from rich.live import Live

from headway.cli.source import open_job
from headway.observe.summary import summary
from headway.observe.terminal import render


@click.command()
@click.argument("job", required=False)
@click.option("--interval", default=1.0, show_default=True, help="Seconds between two looks.")
def watch(job: str | None, interval: float) -> None:
    """Follow JOB live, until it ends well or you press Ctrl-C."""
    source = open_job(job)
    console = Console()
    with Live(console=console, auto_refresh=False, screen=False, vertical_overflow="crop") as live:
        try:
            while True:
                told = summary(source.ledger(), rank_ledgers=False)
                live.update(render(told), refresh=True)
                if told["state"] == "ended":
                    return
                time.sleep(max(interval, 0.1))
        except KeyboardInterrupt:
            return
