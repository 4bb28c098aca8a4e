"""`headway compile autotune`: which kernels cost most tuning time, and how few of their configs would do."""

import json
import math
import os
import time
from dataclasses import dataclass

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.cli.source import compile_cache_of, marks_of, open_job, open_store
from headway.compile import autotune as tables
from headway.compile.autotune import CONFIGS, Timings, configs_in
from headway.compile.bundle import Member, Members
from headway.compile.store import Store
from headway.errors import InputError, PlatformError
from headway.events.job import JobReader
from headway.observe.terminal import plain


@dataclass(frozen=True)
class Pruned:
    """A kernel, and the configs of it that are enough."""

    timings: Timings
    few: list[str]

    @property
    def is_fewer(self) -> bool:
        """Whether any config can go."""
        return 0 < len(self.few) < len(self.timings.configs)

    @property
    def saved(self) -> float:
        """The share of benchmarks that the next run need not make."""
        return tables.saved_share(self.timings, self.few)

    @property
    def regret(self) -> float:
        """How much slower a key may be, at worst."""
        return tables.regret_of(self.timings, self.few)


@click.command()
@click.argument("job", required=False)
@click.option("--regret", type=float, default=100 * tables.REGRET, show_default=True, metavar="PERCENT",
              help="How much slower than its best config a kernel may be.")  # fmt: skip
@click.option("--apply", is_flag=True, help="Store the sets with the bundle: the next run tunes over nothing else.")
@click.option("--export", is_flag=True, help="Print the sets as configs=[...], to paste into a program.")
@click.option("--store", "url", metavar="URL", help="The store of the compile cache, in place of a job's.")
@click.option("--key", metavar="KEY", help="With --store: which bundle, as `headway cache ls` has it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def autotune(
    job: str | None, regret: float, apply: bool, export: bool, url: str | None, key: str | None, as_json: bool
) -> None:
    """Name the kernels that JOB spent most time tuning, and the fewest configs that would do.

    A set will do if, for every key seen, its best config is within the regret of the best of all. Times are those
    that Triton and inductor have measured in the runs that used the job's compile cache.
    """
    if not 0 <= regret < math.inf:
        raise InputError(f"--regret is {regret:g}. Give a number of percent, 0 or more.")
    if bool(url) != bool(key) or (url and job):
        raise InputError("give a job, or both --store URL and --key KEY. `headway cache ls` lists keys.")
    store, key, about = _given(url, key) if url and key else _of_job(open_job(job).reader)
    loaded = store.load(key)
    found, problems = tables.timings_in({name: member.data for name, member in loaded.members.items()})
    for problem in (*loaded.problems, *problems):
        click.echo(f"! {plain(problem)}", err=True)
    if not found:
        raise InputError(
            f"the bundle {key[:12]} in {store.url} has no autotune timings. They are written by a run with"
            f" --compile-cache that tunes: @triton.autotune kernels, or torch.compile with max_autotune."
        )
    pruned = [Pruned(each, tables.smallest(each, regret / 100)) for each in found]
    if export:
        click.echo("\n".join(map(_exported, pruned)))
    elif as_json:
        click.echo(json.dumps([_row(each) for each in pruned], indent=2))
    else:
        Console().print(_table(pruned))
    if apply:
        click.echo(_apply(store, key, loaded.about or about, loaded.members, pruned), err=as_json or export)


# --- which bundle ----------------------------------------------------------------------------------------------------


def _given(url: str, key: str) -> tuple[Store, str, dict[str, str]]:
    store = open_store(url)
    matches = [each for each in store.stored() if each.startswith(key)]
    if len(matches) != 1:
        raise InputError(
            f"{len(matches) or 'no'} keys in {store.url} begin with {key!r}. `headway cache ls` lists them."
        )
    return store, matches[0], {}


def _of_job(reader: JobReader) -> tuple[Store, str, dict[str, str]]:
    """The bundle that a job has used last, as its journal tells."""
    used = compile_cache_of(mark for each in marks_of(reader).values() for mark in each)
    if used is None:
        raise InputError(
            f"job {reader.paths.job!r} used no compile cache, and timings are stored there. Run it with"
            f" --compile-cache URL, or name a bundle with --store and --key."
        )
    return open_store(used["url"]), used["key"], used["about"]


# --- the next run ----------------------------------------------------------------------------------------------------


def _apply(store: Store, key: str, about: dict[str, str], members: Members, pruned: list[Pruned]) -> str:
    """Stores the sets, in place of those that these kernels had; says so."""
    old = members.get(CONFIGS)
    try:
        before = configs_in(old.data) if old else {}
    except InputError:
        before = {}  # it is written anew
    kernels = {each.timings.kernel for each in pruned}
    now = {each.timings.kernel: each.few for each in pruned if each.is_fewer}
    configs = {kernel: few for kernel, few in before.items() if kernel not in kernels} | now
    if configs == before:
        return "Nothing to store: these are the sets that the bundle has." if before else "Nothing to store."
    newer_ns = max(time.time_ns(), old.saved_ns + 1 if old else 0)
    member = Member(data=json.dumps(configs, indent=1).encode(), saved_ns=newer_ns)
    try:
        store.save(key, {CONFIGS: member}, about, f"autotune_{os.urandom(4).hex()}")
    except OSError as error:
        raise PlatformError(f"{error.filename or store.url}: {error.strerror or error}. Nothing was stored.") from error
    return f"Stored sets for {len(now)} kernels with {key[:12]} in {plain(store.url)}: the next run tunes over them."


# --- saying ----------------------------------------------------------------------------------------------------------


def _row(each: Pruned) -> dict[str, object]:
    timings = each.timings
    return {
        "kernel": timings.kernel, "kind": timings.kind, "seconds": round(timings.seconds, 3), "keys": len(timings.ms),
        "benchmarks": timings.benchmarks, "configs": len(timings.configs), "kept": each.few,
        "saved_percent": round(100 * each.saved, 1), "regret_percent": round(100 * each.regret, 2),
    }  # fmt: skip


def _table(pruned: list[Pruned]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("kernel", overflow="fold")
    for name in ("tuning", "benchmarks", "keys", "configs", "enough", "saved", "slower by"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in pruned:
        timings = each.timings
        counts = (timings.benchmarks, len(timings.ms), len(timings.configs), len(each.few))
        shares = (f"{100 * each.saved:.0f}%", f"≤ {100 * each.regret:.1f}%")
        table.add_row(Text(plain(timings.kernel)), f"{timings.seconds:.2f} s", *map(str, counts), *shares)
    return table


def _exported(each: Pruned) -> str:
    timings = each.timings
    told = f"{len(each.few)} of {len(timings.configs)} configs, at most {100 * each.regret:.1f}% slower"
    head = f"# {plain(timings.kernel)}: {told}"
    if timings.kind != "triton":
        return f"{head}; inductor makes its own list, so that only --apply can prune it."
    return "\n".join([head, "configs=[", *(f"    {plain(config)}," for config in each.few), "],"])
