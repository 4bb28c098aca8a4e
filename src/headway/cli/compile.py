"""`headway compile`: what compiling costs a job, and how to have less of it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

import click

from headway.cli.exec import script_of
from headway.cli.source import compile_cache_of, home, marks_of, open_job, open_store
from headway.compile.doctor import REMEDIES, VARIABLE, Cause, Change, Diagnosis, Recompile, diagnose
from headway.errors import InputError, PlatformError, nearest
from headway.events.job import JobReader
from headway.events.vocabulary import Mark
from headway.observe.terminal import plain
from headway.paths import jobs_in

_SHOWN = 20
"""Rows of one kind; all of them are in the JSON."""


class Compile(click.Group):
    """A group that loads `autotune` when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands."""
        return ["doctor", "autotune"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; None if there is none."""
        if cmd_name == "autotune":
            command: click.Command = import_module("headway.cli.compile_autotune").autotune
            return command
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command and its arguments."""
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            ctx.fail(f"there is no command {args[0]!r}: {nearest(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


class JobOrCommand(click.Command):
    """A command that takes another one behind `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Sets the other one aside, unlooked at."""
        if "--" in args:
            at = args.index("--")
            args, ctx.meta["command"] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)


@click.group("compile", cls=Compile)
def compile_() -> None:
    """What compiling costs a job, and how to have less of it."""


@compile_.command(cls=JobOrCommand)
@click.argument("job", required=False, metavar="[JOB | -- COMMAND ...]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option(
    "--apply", is_flag=True, help="Store the value with the job's compile cache: the next run starts with it."
)
@click.pass_context
def doctor(ctx: click.Context, job: str | None, as_json: bool, apply: bool) -> None:
    """Name what JOB compiled again, why, and what to tell torch so that it does not.

    With COMMAND, runs and measures it first, as a job of its own; its exit code is passed on.
    """
    job, code = measured(ctx, job, as_json, measure)
    reader = open_job(job).reader
    marks = marks_of(reader)
    found = diagnose(marks.values())
    if as_json:
        click.echo(json.dumps(_summary(reader, found), indent=2))
    else:
        click.echo(plain_lines(_text(reader.paths.job, found)))
    if apply:
        click.echo(_apply(found, [mark for each in marks.values() for mark in each]), err=as_json)
    ctx.exit(code)


# --- a command -------------------------------------------------------------------------------------------------------


def measured(
    ctx: click.Context, job: str | None, as_json: bool, run: Callable[[list[str], str, int | None], int]
) -> tuple[str | None, int]:
    """The job that a `JobOrCommand` is about, and the exit code of the command that `run` ran as one, if it was given
    one; its output is no part of the JSON."""
    command: list[str] | None = ctx.meta.get("command")
    if command is None:
        return job, 0
    if job or not command:
        raise InputError("give a job or, behind --, a command to run: one of the two. `headway jobs` lists the jobs.")
    job = f"{os.path.splitext(script_of(command))[0]}-{os.urandom(4).hex()}"
    code = run(command, job, sys.stderr.fileno() if as_json else None)
    if code and job not in jobs_in(home()):  # it never began, and has said why
        ctx.exit(code)
    return job, code


def measure(command: Sequence[str], job: str, stdout: int | None = None) -> int:
    """Runs a command as `headway exec` does, to its end; its exit code, as a shell has it."""
    words = [sys.executable, "-P", "-m", "headway", "exec", "--job", job, "--", *command]
    with subprocess.Popen(words, stdout=stdout) as child:
        # The terminal sends ^C to the command as well: it ends, and what it did until then is told.
        old = signal.signal(signal.SIGINT, lambda *_: None)
        ended = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        try:
            code = child.wait()
        finally:
            signal.signal(signal.SIGINT, old)
            signal.signal(signal.SIGTERM, ended)
    return code if code >= 0 else 128 - code


# --- the next run ----------------------------------------------------------------------------------------------------


def _apply(found: Diagnosis, marks: Iterable[Mark]) -> str:
    """Adds the sources to the bundle that the job used; says so."""
    from headway.compile.bundle import SOURCES, Member

    if not found.sources:
        return "Nothing to apply: no recompile was one that torch could be spared by a value."
    used = compile_cache_of(marks)
    if used is None:
        raise InputError(
            "the job has no compile cache to store this with. Run it with --compile-cache URL and apply then, or set "
            f"the variable where it is started:\n  {_export(found)}"
        )
    key, url = used["key"], used["url"]
    store = open_store(url)
    loaded = store.load(key)
    if loaded.problems and not loaded.members:
        raise PlatformError(f"nothing was stored: {'; '.join(loaded.problems)}. Apply again once this is mended.")
    known = loaded.members.get(SOURCES)
    before = set(json.loads(known.data)["sources"]) if known else set()
    sources = sorted(before | set(found.sources))
    data = json.dumps({"sources": sources}, indent=2).encode()
    tag = f"doctor_{os.urandom(4).hex()}"
    try:
        store.save(key, {SOURCES: Member(data=data, saved_ns=time.time_ns())}, used["about"], tag)
    except OSError as error:
        raise PlatformError(
            f"nothing was stored in {url}: {error.strerror or error}. Apply again once it is there."
        ) from error
    return f"Stored {len(sources)} sources with {key[:12]} in {plain(url)}: the next run starts with them."


# --- saying ----------------------------------------------------------------------------------------------------------


def plain_lines(lines: Iterable[str]) -> str:
    """Lines that cannot change the terminal."""
    return "\n".join(plain(line) for line in lines)


def _export(found: Diagnosis) -> str:
    value = ",".join(found.sources)
    quoted = shlex.quote(value) if set(value) & set('"$`\\!') else f'"{value}"'  # names are full of single quotes
    return f"export {VARIABLE}={quoted}"


def _trace(folder: str) -> dict[str, str]:
    return {"folder": folder, "command": f"tlparse {shlex.quote(folder)} --latest -o tl_out"}


def _summary(reader: JobReader, found: Diagnosis) -> dict[str, Any]:
    told = asdict(found)
    told["graph_breaks"] = [{"where": where, "reason": reason} for where, reason in found.graph_breaks]
    told["traces"] = [_trace(folder) for folder in found.traces]
    advice = {"variable": VARIABLE, "value": ",".join(found.sources)}
    return {"job": reader.paths.job, **told, "sources": found.sources, **advice, "mark_dynamic": found.mark_dynamic}


def _text(job: str, found: Diagnosis) -> Iterator[str]:
    if not found.compilations:
        yield f"job {job} compiled nothing, or was not measured while it did: headway exec and headway run measure."
        return
    again = sum(each.times for each in found.recompiles) - sum(each.is_last for each in found.recompiles)
    lost = f"{again} of them again: {found.lost_s:.1f} s lost" if again else "none of it again"
    count = "1 compilation" if found.compilations == 1 else f"{found.compilations} compilations"
    yield f"job {job}: {count} in {found.compiling_s:.1f} s, {lost}."
    for cause in Cause:
        if rows := [each for each in found.recompiles if each.cause is cause]:
            yield from ("", f"{cause}: {sum(each.seconds for each in rows):.1f} s. {REMEDIES[cause]}")
            yield from _some(rows, _recompile)
    if found.sources:
        yield from ("", "Tell torch before it compiles, by setting where the job starts:", f"  {_export(found)}")
    if found.mark_dynamic:
        yield from (
            "",
            "Other functions have inputs of these names, too. To mean these tensors alone, before the call:",
        )
        yield from (f"  {line}" for line in found.mark_dynamic)
    if found.graph_breaks:
        yield from ("", "graph breaks:")
        yield from _some(found.graph_breaks, lambda broken: [f"  {broken[0]}", f"      {broken[1]}"])
    if found.caches or found.cache_hits:
        yield from ("", f"torch's caches: hit {found.cache_hits}x")
        yield from _some(
            found.caches, lambda use: [f"  {use.cache} {use.state} {use.count}x  {use.function}  {use.reason}"]
        )
    for trace in map(_trace, found.traces):
        yield from ("", f"torch's own trace is in {trace['folder']}. To read it: {trace['command']}")


def _some(rows: Sequence[Any], lines: Any) -> Iterator[str]:
    for row in rows[:_SHOWN]:
        yield from lines(row)
    if len(rows) > _SHOWN:
        yield f"  and {len(rows) - _SHOWN} more: --json has all."


def _recompile(each: Recompile) -> Iterator[str]:
    times = f", {each.times} times" if each.times > 1 else ""
    ranks = f", on {each.processes} processes" if each.processes > 1 else ""
    yield f"  {each.seconds:6.2f} s  {each.function}{times}{ranks}"
    for change in each.changes:
        yield f"            {_change(change)}"
    if not each.changes:
        yield f"            {each.guard or '?'}"
    if each.is_last:
        yield "            That was one too many: it ran uncompiled from there on."


def _change(change: Change) -> str:
    where = {"size": f" size {change.dim}", "dims": " dimensions"}.get(change.kind, "")
    more = ["…"] if len(change.values) > _SHOWN else []
    return f"{change.source}{where}: {', '.join([*map(str, change.values[:_SHOWN]), *more])}"
