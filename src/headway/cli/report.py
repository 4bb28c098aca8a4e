"""`headway report`: where one job's time went."""

import json
from pathlib import Path

import click
from rich.console import Console

from headway.accounting.ledger import Ledger
from headway.cli.source import open_job
from headway.errors import InputError
from headway.observe.summary import summary
from headway.observe.terminal import render


@click.command()
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a self-contained page to FILE.")
@click.option("--perfetto", type=click.Path(path_type=Path, dir_okay=False),
              help="Write a trace for ui.perfetto.dev to FILE.")  # fmt: skip
@click.option("--attempt", type=int, help="Only this attempt, counted from 0.")
@click.option("--rank", type=int, help="Only this rank.")
def report(
    job: str | None, as_json: bool, html: Path | None, perfetto: Path | None, attempt: int | None, rank: int | None
) -> None:
    """Show where JOB's time went, and which fixes would give most of it back."""
    ledger = open_job(job).ledger()
    _check(ledger, attempt, rank)
    told = summary(ledger, attempt, rank, rank_ledgers=as_json or html is not None)
    if html is not None:
        from headway.observe.html import page

        _write(html, page(ledger, told))
    if perfetto is not None:
        from headway.observe.perfetto import trace

        _write(perfetto, json.dumps(trace(ledger)))
    if as_json:
        click.echo(json.dumps(told, indent=2))
    elif html is None and perfetto is None:
        Console().print(render(told))


def _check(ledger: Ledger, attempt: int | None, rank: int | None) -> None:
    if attempt is not None and not 0 <= attempt < len(ledger.attempts):
        raise InputError(f"job {ledger.job!r} has no attempt {attempt}: it has 0 to {len(ledger.attempts) - 1}.")
    if rank is not None and rank not in ledger.ranks:
        raise InputError(f"job {ledger.job!r} has no rank {rank}: it has 0 to {max(ledger.ranks)}.")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}): name a file in a folder that is there."
        ) from error
    click.echo(f"wrote {path} ({len(text) / 1e6:.1f} MB)", err=True)
