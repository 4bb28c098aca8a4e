"""`headway checkpoint`: what checkpoints there are, whether they are whole, and which of them stay."""

import json
from typing import Any, Literal

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from headway.checkpoint import catalog
from headway.checkpoint.catalog import Checkpoint
from headway.checkpoint.layout import METADATA
from headway.checkpoint.retention import Retention
from headway.cli.checkpoint_interval import interval
from headway.cli.stored import Stored, progress
from headway.errors import InputError
from headway.observe.terminal import clock_time, plain
from headway.storage import Storage, open_storage

_STYLE = {"committed": "green", "partial": "yellow", "foreign": "cyan", "damaged": "red"}


@click.group(cls=Stored)
def checkpoint() -> None:
    """What checkpoints there are, whether they are whole, and how often to save.

    ROOT is the folder that holds them, or a URL such as s3://bucket/job. NAME is one of them: step-00000100.
    """


@checkpoint.command("ls")
@click.argument("root")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_(root: str, as_json: bool) -> None:
    """List the checkpoints of ROOT, the oldest first."""
    found = _all(open_storage(root))
    if as_json:
        click.echo(json.dumps([_row(each) for each in found], indent=2))
        return
    table = Table("checkpoint", "step", "state", "size", "saved", "ranks", "metric", "", box=None, header_style="dim")
    for each in found:
        state = Text(each.state, _STYLE[each.state])
        cells = [_size(each.size), _when(each.saved_ns), _known(each.world_size), _known(each.metric)]
        table.add_row(Text(plain(each.name)), _known(each.step), state, *cells, "pinned" if each.pinned else "")
    Console().print(table)


@checkpoint.command()
@click.argument("root")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.pass_context
def verify(ctx: click.Context, root: str, name: str | None, as_json: bool) -> None:
    """Read every byte of the checkpoint NAME, or of all, and compare hashes.

    The exit code is 1 if something is wrong. Without NAME, what was never finished, and what others have saved, is no
    reason for that.
    """
    place = open_storage(root)
    chosen = [_one(place, name)] if name else _all(place)
    with progress("verifying", sum(each.size or 0 for each in chosen)) as done:
        problems = {each.name: catalog.verify(place, each, done) for each in chosen}
    if as_json:
        rows = [{"name": each.name, "state": each.state, "problems": problems[each.name]} for each in chosen]
        click.echo(json.dumps(rows, indent=2))
    else:
        for each in chosen:
            click.echo(_verdict(each, problems[each.name]))
    counted = {each.name for each in catalog.once_committed(place, chosen)}
    if any(problems[each.name] for each in chosen if name or each.name in counted):
        ctx.exit(1)


@checkpoint.command()
@click.argument("root")
@click.argument("name")
@click.option("--remove", is_flag=True, help="Let it be pruned again.")
def pin(root: str, name: str, remove: bool) -> None:
    """Keep the checkpoint NAME for good: it is never pruned."""
    place = open_storage(root)
    found = _one(place, name)
    (catalog.unpin if remove else catalog.pin)(place, found.name)
    click.echo(f"{plain(found.name)} is {'no longer' if remove else 'now'} pinned.")


@checkpoint.command()
@click.argument("root")
@click.option("--keep-last", type=int, required=True, help="Keep so many of the newest.")
@click.option("--keep-every", type=int, help="Keep the first at or after each multiple of so many steps.")
@click.option("--keep-best", type=int, help="Keep so many with the best metric.")
@click.option(
    "--best", type=click.Choice(["min", "max"]), default="min", show_default=True, help="Which metric is best."
)
@click.option("--dry-run", is_flag=True, help="Say what would go, and delete nothing.")
def prune(
    root: str,
    keep_last: int,
    keep_every: int | None,
    keep_best: int | None,
    best: Literal["min", "max"],
    dry_run: bool,
) -> None:
    """Delete the checkpoints of ROOT that no option keeps, and what saves that died have left behind.

    The newest and those that are pinned always stay, and so does whatever a job may be writing now.
    """
    place = open_storage(root)
    retention = Retention(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, best=best)
    _all(place)
    for each in (gone := catalog.prune(place, retention, dry_run=dry_run)):
        click.echo(f"{'would delete' if dry_run else 'deleted'} {plain(each.name)}  {each.state}  {_size(each.size)}")
    if not gone:
        click.echo("Nothing to delete.")


@checkpoint.command()
@click.argument("root")
@click.argument("target")
@click.argument("name", required=False)
def copy(root: str, target: str, name: str | None) -> None:
    """Copy the checkpoint NAME, or the newest, to the root TARGET, and compare hashes on the way."""
    place, other = open_storage(root), open_storage(target)
    chosen = _one(place, name) if name else catalog.newest(place)
    if chosen is None:
        raise InputError(f"no checkpoint in {place.url} is committed. Name one that others have saved, or save one.")
    with progress(f"copying {chosen.name}", chosen.size or 0) as done:
        catalog.copy(place, chosen, other, done)
    click.echo(f"{plain(chosen.name)} is in {plain(other.url)}.")


checkpoint.add_command(interval)


# --- looking ---------------------------------------------------------------------------------------------------------


def _all(place: Storage) -> list[Checkpoint]:
    """The checkpoints of a root; InputError if it is none."""
    found = catalog.checkpoints(place)
    if not found and METADATA in place.names():
        raise InputError(f"{place.url} is a checkpoint itself. Give the folder it is in.")
    if not found:
        raise InputError(f"there are no checkpoints in {place.url}. Give the folder that the job saves to.")
    return found


def _one(place: Storage, name: str) -> Checkpoint:
    return catalog.find(place, name.rstrip("/").rpartition("/")[2])


# --- saying ----------------------------------------------------------------------------------------------------------


def _row(each: Checkpoint) -> dict[str, Any]:
    keys = ("name", "step", "state", "size", "saved_ns", "world_size", "metric", "pinned", "tag")
    told = {key: getattr(each, key) for key in keys}
    return told | {"job": each.manifest.job if each.manifest else None}


def _verdict(each: Checkpoint, problems: list[str]) -> str:
    head = f"{plain(each.name)}  {each.state}  "
    if not problems:
        return f"{head}good"
    return "\n".join([head.rstrip(), *(f"  {plain(problem)}" for problem in problems)])


def _known(value: float | None) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _size(size: int | None) -> str:
    return "" if size is None else decimal(size)


def _when(saved_ns: int | None) -> str:
    return "" if saved_ns is None else clock_time(saved_ns / 1e9)
