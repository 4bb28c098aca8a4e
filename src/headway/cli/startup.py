"""`headway startup`: what a job does before its first step, and what of it can be left out."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from headway.cli.compile import JobOrCommand, measured
from headway.cli.source import home, open_job
from headway.events.clock import Clock
from headway.events.job import JobReader
from headway.events.journal import Batch
from headway.events.vocabulary import Mark, Process, Told
from headway.instrument.patches import say
from headway.observe.terminal import plain
from headway.paths import JobPaths
from headway.startup.audit import Audit, Finding, Traffic, audit

GRACE_S = 30.0
"""So long a command has to end when it is told to."""
_LOOK_S = 0.2
_SHOWN = 20
"""Rows of a table; all of them are in the JSON."""


class Ranks(click.ParamType[tuple[int, ...]]):
    """Numbers of ranks, with commas between them."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers."""
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
            self.fail(f"{value!r} is no list of numbers of ranks. Give some such as 8,64,512.", param, ctx)
        return tuple(sorted({int(word) for word in words}))


@click.group()
def startup() -> None:
    """What a job does before its first step, and what of it can be left out."""


@startup.command("audit", cls=JobOrCommand)
@click.argument("job", required=False, metavar="[JOB | -- COMMAND ...]")
@click.option("--ranks", type=Ranks(), default="8,64,512", show_default=True, help="Say what it costs with so many.")
@click.option("--to-the-end", is_flag=True, help="Let COMMAND run on after its first step.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.pass_context
def audit_(ctx: click.Context, job: str | None, ranks: tuple[int, ...], to_the_end: bool, as_json: bool) -> None:
    """Name every collective and process group of JOB before its first step, and which are needless.

    With COMMAND, runs and measures it first, as a job of its own, and ends it once all ranks have made their first
    step. If it ends before that, its exit code is passed on.
    """
    job, code = measured(ctx, job, as_json, partial(_measure, to_the_end))
    heard = Heard(open_job(job).reader)
    heard.listen()
    found = audit(heard.marks(), ranks)
    if as_json:
        click.echo(json.dumps(_summary(heard.reader.paths.job, found), indent=2))
    else:
        _show(heard.reader.paths.job, found)
    ctx.exit(code)


# --- a command -------------------------------------------------------------------------------------------------------


@dataclass
class _Told:
    """What one process has told so far."""

    process: Process | None = None
    marks: list[Mark] = field(default_factory=list)
    steps: int = 0


class Heard:
    """What the processes of a job have told so far."""

    def __init__(self, reader: JobReader) -> None:
        self.reader = reader
        self._told: dict[str, _Told] = {}

    def listen(self) -> None:
        """Reads what is new."""
        for name, batch in self.reader.poll():
            self._take(self._told.setdefault(name, _Told()), batch)

    def _take(self, told: _Told, batch: Batch) -> None:
        records, cell = batch.load() if batch.load else (batch.records, batch.cell)
        for record in records:
            if isinstance(record, Process):
                told.process = record
            elif isinstance(record, Mark) and record.name == Told.COLLECTIVE:
                told.marks.append(record)
        told.steps = max(told.steps, cell.count if cell is not None else 0)

    def _ranks(self) -> dict[int, _Told]:
        """Each rank's last process, of as many ranks as the last of them knew of."""
        told = [each for each in self._told.values() if each.process is not None and each.process.role == "rank"]
        told.sort(key=lambda each: each.process.wall_ns if each.process else 0)
        last = {each.process.rank: each for each in told if each.process}
        world = told[-1].process.world_size if told and told[-1].process else 0
        return {rank: each for rank, each in last.items() if rank < world}

    def marks(self) -> list[list[Mark]]:
        """What each rank has told."""
        ranks = self._ranks()
        return [ranks[rank].marks for rank in sorted(ranks)]

    def have_stepped(self) -> bool:
        """Whether all ranks have made their first step, and told what they sent before."""
        ranks = self._ranks()
        world = max((each.process.world_size for each in ranks.values() if each.process), default=0)
        # One that sent nothing has nothing to tell, which shows once it has made one more step; one that ends without
        # a step tells, too.
        return 0 < world == len(ranks) and all(each.steps > (0 if each.marks else 1) for each in ranks.values())

    def kill(self) -> None:
        """Ends the processes that live here: a launcher that was killed may have left them."""
        here = Clock().boot()
        for name in self.reader.alive():
            process = self._told[name].process if name in self._told else None
            if process is not None and process.boot == here and process.role == "rank":
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


def _measure(to_the_end: bool, command: Sequence[str], job: str, stdout: int | None) -> int:
    """Runs a command as `headway exec` does, until all ranks have made their first step; its exit code, as a shell has
    it, and 0 if it was ended here."""
    words = [sys.executable, "-P", "-m", "headway", "exec", "--job", job, "--", *command]
    given = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None  # only one group has the terminal
    heard = Heard(JobReader(JobPaths(home(), job)))
    with subprocess.Popen(words, stdin=given, stdout=stdout, process_group=0) as child:
        passed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        old = {number: signal.signal(number, lambda number, _: _signal(child, number)) for number in passed_on}
        try:
            while child.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_LOOK_S)
                heard.listen()
                if child.poll() is None and not to_the_end and heard.have_stepped():
                    time.sleep(_LOOK_S)  # the last rank may still be telling
                    say("all ranks have made their first step: the command is ended. --to-the-end lets it run on.")
                    _end(child, heard)
                    return 0
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end(child: "subprocess.Popen[bytes]", heard: Heard) -> None:
    _signal(child, signal.SIGTERM)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        _signal(child, signal.SIGKILL)
        heard.listen()
        heard.kill()


def _signal(child: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


# --- saying ----------------------------------------------------------------------------------------------------------


def _summary(job: str, found: Audit) -> dict[str, Any]:
    models = [
        {"operations": fit.shape.name, "formula": fit.shape.formula, "a_s": fit.latency_s, "b_s": fit.s_per_byte}
        for fit in found.models.values()
    ]
    findings = [
        {key: value for key, value in asdict(each).items() if key != "rows"} | {"sites": _sites(each)}
        for each in found.findings
    ]
    rows = {name: [asdict(row) for row in getattr(found, name)] for name in ("rows", "first_step")}
    told = {"job": job, "ranks": found.ranks, "world": found.world, "seconds_at": dict(found.seconds_at)}
    return {**told, "findings": findings, **rows, "models": models}


def _sites(finding: Finding) -> list[str]:
    return sorted({row.site for row in finding.rows})


def _show(job: str, found: Audit) -> None:
    console = Console()
    if not found.rows:
        why = "" if found.first_step else " If it has several ranks, was it run by headway exec or headway run?"
        console.print(Text(f"job {plain(job)} made no collectives and no groups before its first step.{why}"))
        return
    count, seconds = sum(row.count for row in found.rows), sum(row.seconds for row in found.rows)
    least = sum(row.least_s for row in found.rows)
    console.print(
        Text(
            f"job {plain(job)}, {found.ranks} of {found.world} ranks heard. Before the first step, each sent or made "
            f"{count}, in {_time(seconds)}, of which {_time(seconds - least)} at most was waiting for other ranks."
        )
    )
    console.print(_traffic(found.rows))
    if len(found.rows) > _SHOWN:
        console.print(Text(f"and {len(found.rows) - _SHOWN} more: --json has all.", "dim"))
    if found.first_step:
        sent = sum(row.count for row in found.first_step)
        console.print(Text(f"The first step itself sent {sent} more: that is training.", "dim"))
    console.print()
    if not found.findings:
        console.print(Text("Nothing of it is known to be needless."))
    console.print(_findings(found))
    for line in _model(found):
        console.print(Text(line, "dim"))


def _traffic(rows: Sequence[Traffic]) -> Table:
    table = Table(box=None, header_style="dim")
    table.add_column("operation, and where from", overflow="fold")
    for name in ("group", "calls", "sent", "time", "waits", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows[:_SHOWN]:
        what = Text(plain(row.op))
        what.append(f"\n  {plain(_short(row.site))}", "dim")
        if row.through:
            what.append(f"\n  {plain(_way(row.through))}", "dim")
        waits, size = _time(row.seconds - row.least_s), decimal(row.bytes) if row.bytes else ""
        table.add_row(what, str(row.size or "outside"), str(row.calls), str(row.count), _time(row.seconds), waits, size)
    return table


def _way(through: str) -> str:
    """Its two ends."""
    first, *others = through.split(" > ")
    return " > ".join([first, *(["…"] if len(others) > 1 else []), *others[-1:]])


def _findings(found: Audit) -> Table:
    table = Table(box=None, header_style="dim")
    table.add_column("needless" if found.findings else "", overflow="fold")
    for name in ("sent", f"at {found.world}", *(f"at {n}" for n in found.at)):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found.findings:
        what = Text(each.title, "bold")
        what.append(f"\n{each.fix}", "not bold")
        what.append(f"\n{', '.join(plain(_short(site)) for site in _sites(each)[:3])}", "not bold dim")
        table.add_row(what, str(each.count), _time(each.saves), *map(_time, each.saves_at.values()))
    if found.findings:
        total = {n: sum(each.saves_at[n] for each in found.findings) for n in found.at}
        saves = sum(each.saves for each in found.findings)
        table.add_row("all of these", "", _time(saves), *map(_time, total.values()))
    least = sum(row.least_s for row in found.rows)
    table.add_row("all that was sent", "", _time(least), *map(_time, found.seconds_at.values()))
    return table


def _model(found: Audit) -> Iterator[str]:
    yield (
        f"Seconds at other sizes than {found.world} are extrapolated, not measured: what the rank took that waited "
        "least, and what a formula adds that was fitted to it. Groups of all ranks, n, grow with the job; smaller "
        "ones, and the number of calls, stay as they are. Whatever else kept the machine busy is in it: it tells an "
        "order of magnitude, and on a machine that is busy not even that."
    )
    for fit in found.models.values():
        values = [f"a = {fit.latency_s * 1e6:.1f} µs"] if fit.latency_s else []
        values += [f"b = {fit.s_per_byte * 1e9:.2f} ns/byte"] if fit.s_per_byte else []
        yield f"  {fit.shape.name}: {fit.shape.formula}   {', '.join(values) or 'too fast to tell'}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _short(site: str) -> str:
    """A site, its file as seen from here."""
    file, colon, rest = site.rpartition(":")
    return f"{_nearer(file)}{colon}{rest}" if colon else site or "?"


def _nearer(file: str) -> str:
    with suppress(ValueError, OSError):
        return min(file, os.path.relpath(file), key=len)
    return file
