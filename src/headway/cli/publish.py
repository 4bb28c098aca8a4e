"""`headway publish`: from a checkpoint to a version that is served, away from the accelerators that trained it."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from headway.checkpoint.source import BadCheckpoint
from headway.cli.source import home
from headway.cli.stored import Stored, progress
from headway.errors import InputError
from headway.observe.terminal import clock_time, plain
from headway.publish.anchor import checkpoint_at, unpin
from headway.publish.hand_over import ask, check_request, counted_from_here
from headway.publish.hand_over import submit as give
from headway.publish.request import ALLOWED, Desk, Publish, Request, all_desks, find_desk, request_id
from headway.publish.runners import queue_state
from headway.publish.supervisor import End, Retry, Stop, supervise
from headway.publish.versions import Version, Versions
from headway.recover import Evidence, classify
from headway.recover.policy import History, Situation, default
from headway.storage import open_storage

_STYLE = {
    "published": "green", "running": "cyan", "waiting": "cyan", "retrying": "yellow", "interrupted": "yellow",
    "rejected": "red", "failed": "red", "complete": "green", "partial": "yellow", "damaged": "red",
}  # fmt: skip


@click.group(cls=Stored)
def publish() -> None:
    """Publish models from checkpoints, on a machine that trains nothing.

    ANCHOR is a checkpoint, or the folder that holds them: then the newest. ID is a request, as `status` lists them, or
    how it begins. TO is the folder or URL of the versions.
    """


def _asking(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a new request is asked for with."""
    for option in reversed((
        click.argument("anchor", metavar="ANCHOR|ID"),
        click.option("--recipe", help="file.py:function, package.module:function, or ready ones, with commas between: "
                     "safetensors, export, aotinductor, card. Default: safetensors."),
        click.option("--model", help="Function that gives the Served for export and aotinductor, named likewise."),
        click.option("--to", help="Folder or URL of the versions. Default: published, beside the checkpoints."),
        click.option("--part", help="Part of the checkpoint that holds the weights. Default: model."),
        click.option("--check", "checks", multiple=True, help="Function that checks what is about to be published."),
        click.option("--allow", multiple=True, type=click.Choice(ALLOWED), help="What may differ from the last one."),
        click.option("--no-promote", is_flag=True, help="Publish, and leave `latest` where it is."),
    )):  # fmt: skip
        command = option(command)
    return command


@publish.command()
@_asking
@click.option("--runner", help="local, slurm, or package.module:function. Default: local.")
@click.option("--sbatch", help="Options for sbatch: '--partition=cpu --mem=64G'.")
def submit(anchor: str, **given: Any) -> None:
    """Have ANCHOR published in the background; or try the request ID again, with what the options change."""
    desk = _asked(anchor, given)
    click.echo(f"It is published by {give(desk)}. To see how far that is: headway publish status {desk.folder.name}")


@publish.command()
@_asking
@click.pass_context
def run(ctx: click.Context, /, anchor: str, **given: Any) -> None:
    """Publish ANCHOR, or go on with the request ID, here and now.

    The exit code is 0 if it is published, 3 if a check rejected it, 2 if it cannot be published as given, 1 if it
    failed.
    """
    try:
        desk = _asked(anchor, given)
    except (InputError, BadCheckpoint) as error:
        _say(str(error))
        ctx.exit(2)
    os.environ["HEADWAY_HOME"] = str(home())  # the publisher works in another folder
    os.environ["HEADWAY_DISABLE"] = "1"  # the publisher joins the job itself; what it starts is no part of it
    with _bar(desk):
        code = supervise(desk, [sys.executable, "-m", "headway.cli.publisher", str(desk.folder)], decider(), say=_say)
    state = desk.state()
    if code == 0:
        click.echo(f"{state.version} is in {plain(desk.request.to)}.")
        if state.problem:
            click.echo(plain(state.problem))
    ctx.exit(code)


@publish.command()
@click.argument("id", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def status(id: str | None, as_json: bool) -> None:
    """Show how far each request is, the newest first; or all about the request ID."""
    desks = [find_desk(home(), id)] if id else list(filter(_is_readable, all_desks(home())))
    if as_json:
        click.echo(json.dumps([_told(desk) for desk in desks], indent=2))
    elif id:
        for key, value in _told(desks[0]).items():
            if value not in ("", None, 0, ()):
                click.echo(f"{key.removesuffix('_s'):<10} {plain(_in_words(key, value))}")
    elif not desks:
        click.echo(f"There is no request to publish in {home()}.")
    else:
        for told in map(_told, desks):
            line = Text.assemble(told["id"], "  ", (told["phase"], _STYLE[told["phase"]]), "  ", told["version"])
            Console().print(line, soft_wrap=True)
            if doing := _doing(told):
                Console().print(Text(f"  {plain(doing)}", "dim"), soft_wrap=True)


@publish.command("ls")
@click.argument("to")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_(to: str, as_json: bool) -> None:
    """List the versions in TO, the oldest first, and say which one is served."""
    found = _all(to)
    if as_json:
        click.echo(json.dumps([_row(each) for each in found], indent=2))
        return
    table = Table(
        Column("version", no_wrap=True), "step", "state", "size", "published", "job", "", box=None, header_style="dim"
    )
    for each in found:
        told = _row(each)
        table.add_row(
            Text(plain(each.name)), str(told["step"]), Text(each.state, _STYLE[each.state]),
            decimal(told["size"]) if told["size"] is not None else "",
            clock_time(told["published_ns"] / 1e9) if told["published_ns"] else "", Text(plain(told["job"] or "")),
            "latest" if each.served else "",
        )  # fmt: skip
    Console().print(table)


@publish.command()
@click.argument("id", required=False)
@click.option("--follow", "-f", is_flag=True, help="Go on until it has ended.")
def logs(id: str | None, follow: bool) -> None:
    """Print what the publisher of the request ID said, or that of the newest."""
    desk = find_desk(home(), id) if id else next(iter(all_desks(home())), None)
    if desk is None:
        raise InputError(f"there is no request to publish in {home()}.")
    for text in _followed(desk, follow):
        click.echo(text, nl=False)


@publish.command()
@click.argument("to")
@click.argument("version")
def promote(to: str, version: str) -> None:
    """Serve VERSION: `latest` moves to it, once each of its files was compared with its hash."""
    versions = Versions(open_storage(to))
    found = versions.find(version)
    manifest = found.manifest
    with progress(f"verifying {found.name}", manifest.size if manifest else 0) as done:
        versions.promote(found.name, progress=done)
    click.echo(f"latest is {found.name}.")


@publish.command()
@click.argument("to")
@click.argument("version", required=False)
def rollback(to: str, version: str | None) -> None:
    """Serve the version that was served before the present one; or VERSION."""
    versions = Versions(open_storage(to))
    found = versions.rollback(versions.find(version).name if version else None, say=_say)
    click.echo(f"latest is {found.name}.")


# --- asking ----------------------------------------------------------------------------------------------------------


def _asked(anchor: str, given: dict[str, Any]) -> Desk:
    """The request that is meant: one that is there, with what the options change, or a new one."""
    changes = {key: value for key, value in given.items() if value not in (None, (), False)}
    if changes.pop("no_promote", False):
        changes["promote"] = False
    if "/" not in anchor and not Path(anchor).exists():
        desk = find_desk(home(), anchor)
        if not changes:
            _ = desk.request  # said here and now, if it cannot be read
            return desk
        return _changed(desk, changes)
    root, checkpoint = checkpoint_at(anchor)
    return _new(
        Request(
            id="", what=counted_from_here(Publish(**changes)), root=root, checkpoint=checkpoint, folder=os.getcwd(),
            python=sys.executable, job=_job(root, checkpoint),
        )
    )  # fmt: skip


def _changed(desk: Desk, changes: dict[str, Any]) -> Desk:
    """The request with changes; if that makes it another one, the checkpoint is kept for that one alone."""
    request, phase = desk.request, desk.state().phase
    made = _new(replace(request, what=counted_from_here(replace(request.what, **changes))))
    if made.folder != desk.folder and phase not in ("running", "retrying", "published"):
        unpin(open_storage(request.root), request.checkpoint, request.id)
        desk.change(phase="failed", problem=f"{made.folder.name} was asked for instead.")
    return made


def _new(request: Request) -> Desk:
    """Nothing is kept for a request that cannot be carried out."""
    id = request_id(request.job, request.root, request.checkpoint, request.what)
    request = replace(request, id=id, asked_s=time.time())
    check_request(request)
    with progress("hashing", 0) as done:
        return ask(home(), request, {}, done)[0]


def _job(root: str, checkpoint: str) -> str:
    from headway.checkpoint import catalog

    manifest = catalog.find(open_storage(root), checkpoint).manifest
    return manifest.job if manifest else ""


# --- doing -----------------------------------------------------------------------------------------------------------


def decider() -> Callable[[End], Retry | Stop]:
    """What becomes of a publisher that failed, by what kind of failure it was: as for a trainer. A step more that is
    done is progress."""
    history, policy, hung = History(), default(), False

    def decide(end: End) -> Retry | Stop:
        nonlocal hung
        if end.exit_code == 0:  # and nothing published
            return Stop(why="it would do so again", category="python_error")
        if end.stalled_s is not None:
            hung, again = True, hung
            return Stop(why="it hung before", category="hang") if again else Retry(why="once more", category="hang")
        verdict = classify(Evidence(rank=0, exit_code=end.exit_code, stderr=end.last_lines, silent_s=end.stalled_s))
        progressed = end.steps_done > 0
        situation = Situation(
            category=verdict.category, klass=verdict.klass, action=verdict.action, line=verdict.line,
            trained=True, measured=True, progressed=progressed,
            repeats=history.repeats_of(verdict.category, progressed), spent=history.spent_on(verdict.klass, progressed),
            restarts=history.restarts,
        )  # fmt: skip
        decision = policy(situation)
        if decision is None or decision.do == "stop":
            return Stop(category=verdict.category, why=decision.why if decision else "")
        history.add(verdict.category, verdict.klass, progressed, decision.spends)
        return Retry(wait_s=decision.wait_s, category=verdict.category, why=decision.why)

    return decide


@contextmanager
def _bar(desk: Desk) -> Iterator[None]:
    """A bar on the terminal, if there is one: what is being done, and how far it is."""
    console, over = Console(stderr=True), threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())

    def show() -> None:
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            while not over.wait(0.2):
                state = desk.state()
                bar.update(task, description=plain(state.doing or state.phase), completed=state.done,
                           total=state.total or None)  # fmt: skip

    thread = threading.Thread(target=show, daemon=True)
    if console.is_terminal:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.is_alive():
            thread.join(2)


def _say(text: str) -> None:
    click.echo(f"headway: {text}", err=True)


# --- saying ----------------------------------------------------------------------------------------------------------


def _is_readable(desk: Desk) -> bool:
    """Says so, if not: the others are to be seen all the same."""
    try:
        return bool(desk.request)
    except InputError as error:
        _say(str(error))
        return False


def _told(desk: Desk) -> dict[str, Any]:
    request, state = desk.request, desk.state()
    queued = queue_state(state.queued) if state.queued and state.phase == "waiting" else ""
    told = asdict(state)
    keys = ("phase", "doing", "done", "total", "steps", "tries", "problem", "category", "version", "began_s",
            "changed_s", "node", "pid", "queued")  # fmt: skip
    return {
        "id": request.id, "job": request.job, "anchor": f"{request.root}/{request.checkpoint}",
        "recipe": request.what.recipe, "to": request.to, "runner": request.what.runner, "asked_s": request.asked_s,
    } | {key: told[key] for key in keys} | {"queue": queued, "log": str(desk.log)}  # fmt: skip


def _in_words(key: str, value: Any) -> str:
    if key.endswith("_s"):
        return clock_time(value)
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _doing(told: dict[str, Any]) -> str:
    if told["phase"] in ("failed", "rejected", "retrying", "interrupted"):
        return str(told["problem"])
    done = f" {100 * told['done'] // told['total']}%" if told["total"] else ""
    return told["queue"] or f"{told['doing']}{done}"


def _all(to: str) -> list[Version]:
    found = Versions(open_storage(to)).all()
    if not found:
        raise InputError(f"there are no versions in {to}. Give the folder that was published to.")
    return found


def _row(each: Version) -> dict[str, Any]:
    manifest = each.manifest
    told = {"name": each.name, "step": each.step, "state": each.state, "served": each.served}
    return told | {
        "size": manifest.size if manifest else None, "published_ns": manifest.published_ns if manifest else None,
        "job": manifest.job if manifest else None, "recipe": manifest.recipe if manifest else None,
    }  # fmt: skip


def _followed(desk: Desk, follow: bool) -> Iterator[str]:
    at = 0
    while True:
        ended = desk.state().phase not in ("waiting", "running", "retrying")
        with suppress(FileNotFoundError), open(desk.log, errors="replace") as file:
            file.seek(at)
            yield from file
            at = file.tell()
        if not follow or ended:
            return
        time.sleep(0.3)
