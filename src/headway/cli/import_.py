"""`headway import`: jobs that others have measured."""

import shlex
from pathlib import Path

import click

from headway.cli.source import home
from headway.instrument.importers.torchtitan import Imported, import_traces


@click.group("import")
def import_() -> None:
    """Make a job of what another tool has recorded."""


@import_.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--job", default="", metavar="NAME", help="Name of the new job; by default that of the dump folder.")
def torchtitan(traces: tuple[Path, ...], job: str) -> None:
    """Import torchtitan's structured TRACES: its dump folder, or files from structured_logs."""
    told = import_traces(traces, home(), job)
    if told.problem:
        click.echo(f"headway: {told.problem}", err=True)
    click.echo(_summary(told))


def _summary(told: Imported) -> str:
    counts = f"ranks: {len(told.ranks)}, processes: {told.processes}, steps: {told.steps}"
    if told.spans_left_out:
        counts += f", spans inside ordinary steps, not kept: {told.spans_left_out}"
    return f"imported {told.job} ({counts})\nheadway report {shlex.quote(told.job)}"
