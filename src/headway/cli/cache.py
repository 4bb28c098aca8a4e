"""`headway cache`: what compiled code is stored, for which jobs, and whose is believed."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from headway.cli.source import compile_cache_of, home, marks_of, open_job, open_store
from headway.cli.stored import Stored, progress
from headway.compile.store import Entry, Store
from headway.compile.trust import Keys
from headway.errors import InputError
from headway.observe.terminal import clock_time, plain
from headway.paths import jobs_in

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_SHORTEST_PREFIX = 4


def _in_bytes(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """A size as people write it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?i?)b?", value.lower())
    if not found or found[2] not in _UNITS:
        raise click.BadParameter(f"{value!r} is no size. Give one such as 500MB, 10GB or 1.5GiB.", ctx, param)
    return int(float(found[1]) * _UNITS[found[2]])


_store = click.option(
    "--store", metavar="URL", help="Where the cache is: a folder or a URL. Default: $HEADWAY_HOME/compile."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


@click.group(cls=Stored)
def cache() -> None:
    """What compiled code is stored, for which jobs, and whose is believed.

    KEY is one of `headway cache ls`, or its first letters.
    """


# --- what there is ---------------------------------------------------------------------------------------------------


@cache.command("ls")
@_store
@_json
def list_(store: str | None, as_json: bool) -> None:
    """List the keys, the one that was used last first."""
    place = open_store(store)
    entries = place.entries()
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in entries], indent=2))
    elif not entries:
        click.echo(f"Nothing is stored in {plain(place.url)}.")
    else:
        table = Table("key", "size", "members", "segments", "saved", "used", "program", box=None, header_style="dim")
        for each in entries:
            cells = [decimal(each.bytes), str(each.members), str(each.segments), _when(each.saved_ns)]
            table.add_row(each.key[:12], *cells, _when(each.used_ns), Text(plain(each.about.get("program", ""))))
        Console().print(table)


@cache.command()
@click.argument("key")
@_store
@_json
def info(key: str, store: str | None, as_json: bool) -> None:
    """Say what KEY was made from, what is stored under it, and who has signed it."""
    place = open_store(store)
    entry = _one(place, key)
    manifests = place.manifests(entry.key)
    kinds: Counter[str] = Counter()
    for name, listed in {name: each for one in manifests.values() for name, each in one.members.items()}.items():
        kinds[_kind(name)] += listed.bytes
    signers = {name: manifest.signer for name, manifest in manifests.items()}
    if as_json:
        click.echo(json.dumps(asdict(entry) | {"kinds": kinds, "signers": signers}, indent=2))
        return
    head = (
        f"{entry.key}\n{_count(entry.members, 'member')} in {_count(entry.segments, 'segment')}, {decimal(entry.bytes)}"
    )
    click.echo(f"{head}, saved {_when(entry.saved_ns) or 'never'}, used {_when(entry.used_ns) or 'never'}")
    _print_rows(entry.about.items())
    _print_rows((kind, f"{decimal(size)} unpacked") for kind, size in kinds.most_common())
    _print_rows((name, signer or "not signed") for name, signer in signers.items())
    if left := entry.segments - len(signers):
        click.echo(f"Not believed: {_count(left, 'segment')}. `headway cache verify {entry.key[:12]}` says why.")


@cache.command("key")
@click.argument("a", required=False)
@click.argument("b", required=False)
@_store
@_json
def key_(a: str | None, b: str | None, store: str | None, as_json: bool) -> None:
    """Say which parts make up the key A, or in which parts A and B differ.

    A and B are keys, or jobs that ran with a compile cache. Without either, the key that a job would have here and now.
    """
    from headway.compile import key

    found = [_parts(open_store(store), each) for each in (a, b) if each]
    if not found:
        here = key.parts()
        found = [(key.digest(here), here)]
    (name, parts), *others = found
    if not others:
        if as_json:
            click.echo(json.dumps({"key": name, "parts": parts}, indent=2))
        else:
            click.echo(name)
            _print_rows(parts.items())
        return
    differences = key.differences(parts, others[0][1])
    if as_json:
        click.echo(json.dumps([dict(zip(("part", "a", "b"), each, strict=True)) for each in differences], indent=2))
        return
    for part, *values in differences:
        click.echo("\n  ".join([plain(part), *(plain(value) or "(nothing)" for value in values)]))
    if not differences:
        click.echo("The two keys are made of the same parts.")


@cache.command()
@click.argument("key", required=False)
@_store
@_json
@click.pass_context
def verify(ctx: click.Context, key: str | None, store: str | None, as_json: bool) -> None:
    """Read every byte stored under KEY, or under all, and compare hashes and signatures.

    The exit code is 1 if something would not be loaded.
    """
    place = open_store(store)
    chosen = [_one(place, key)] if key else place.entries()
    with progress("verifying", sum(each.bytes for each in chosen)) as done:
        problems = {each.key: place.verify(each.key, done) for each in chosen}
    if as_json:
        click.echo(json.dumps(problems, indent=2))
    else:
        for each in chosen:
            click.echo("\n  ".join([f"{each.key[:12]}  {'bad' if problems[each.key] else 'good'}"] + [
                plain(problem) for problem in problems[each.key]
            ]))  # fmt: skip
    if any(problems.values()):
        ctx.exit(1)


# --- moving it -------------------------------------------------------------------------------------------------------


@cache.command()
@click.argument("key")
@click.option("--to", required=True, metavar="URL", help="The store that is to have it too.")
@_store
@click.pass_context
def push(ctx: click.Context, key: str, to: str, store: str | None) -> None:
    """Copy what is stored under KEY to another store, signed."""
    _copy(ctx, open_store(store), open_store(to), key)


@cache.command()
@click.argument("key")
@click.option("--from", "source", required=True, metavar="URL", help="The store that has it.")
@_store
@click.pass_context
def pull(ctx: click.Context, key: str, source: str, store: str | None) -> None:
    """Copy what another store has under KEY, as far as you trust its signers."""
    _copy(ctx, open_store(source), open_store(store), key)


@cache.command()
@click.option("--max-size", required=True, callback=_in_bytes, help="How much may stay: 500MB, 10GB, 1.5GiB.")
@_store
def prune(max_size: int, store: str | None) -> None:
    """Delete the keys that were not used for longest, until the rest is no larger than that."""
    for entry in (gone := open_store(store).prune(max_size)):
        click.echo(f"deleted {entry.key[:12]}  {decimal(entry.bytes)}  used {_when(entry.used_ns) or 'never'}")
    if not gone:
        click.echo("Nothing to delete.")


# --- trust -----------------------------------------------------------------------------------------------------------


@cache.command()
@click.argument("name", required=False)
def keygen(name: str | None) -> None:
    """Make your signing key, and print its public half for others to trust."""
    keys = _keys()
    keys.generate(name or "")
    own, public = keys.own() or ("", "")
    click.echo(f"{public}\nWhoever is to load what you save says: headway cache trust {public} {shlex.quote(own)}")


@cache.command()
@click.argument("public", required=False)
@click.argument("name", required=False)
@click.option("--remove", metavar="NAME", help="Trust this one no longer.")
@_json
def trust(public: str | None, name: str | None, remove: str | None, as_json: bool) -> None:
    """Load from now on what the key PUBLIC has signed, and call it NAME; without either, list who is trusted.

    What is loaded is run: trust only those whom you would let run programs in your name.
    """
    keys = _keys()
    if bool(public) != bool(name) or (remove and public):
        raise InputError("give a public key and a name for it, or --remove with a name, or nothing to list them.")
    if public and name:
        keys.trust(public, name)
        click.echo(f"What {name} has signed is loaded from now on.")
    elif remove:
        keys.distrust(remove)
        click.echo(f"What {remove} has signed is no longer loaded.")
    elif as_json:
        click.echo(json.dumps(keys.trusted(), indent=2))
    else:
        own = keys.own()
        rows = [(each, key + ("  (your own)" if own == (each, key) else "")) for each, key in keys.trusted().items()]
        _print_rows(rows)
        if not rows:
            click.echo("Nobody is trusted, and you have no key: `headway cache keygen` makes one.")


# --- looking ---------------------------------------------------------------------------------------------------------


def _keys() -> Keys:
    return Keys.at(home() / "keys")


def _one(place: Store, prefix: str) -> Entry:
    """The key that begins so; InputError if none does, or several do."""
    if len(prefix) < _SHORTEST_PREFIX:
        raise InputError(f"{prefix!r} is too short for a key: give its first {_SHORTEST_PREFIX} letters, or more.")
    found = [key for key in place.stored() if key.startswith(prefix)]
    if not found:
        raise InputError(f"no key in {place.url} begins with {prefix!r}. `headway cache ls` lists them.")
    if len(found) > 1:
        raise InputError(f"{len(found)} keys in {place.url} begin with {prefix!r}: give more letters.")
    return place.entry(found[0])


def _parts(place: Store, prefix: str) -> tuple[str, dict[str, str]]:
    """A stored key, or that of a job, and what it was made from."""
    if prefix in jobs_in(home()):
        used = compile_cache_of(mark for each in marks_of(open_job(prefix).reader).values() for mark in each)
        if used is None:
            raise InputError(f"job {prefix!r} used no compile cache: run it with --compile-cache URL.")
        return used["key"], used["about"]
    entry = _one(place, prefix)
    if not entry.about:
        raise InputError(f"nothing under {entry.key} is believed: `headway cache verify {entry.key[:12]}` says why.")
    return entry.key, entry.about


def _copy(ctx: click.Context, source: Store, target: Store, prefix: str) -> None:
    entry = _one(source, prefix)
    with progress(f"copying {entry.key[:12]}", entry.bytes) as done:
        problems = source.copy(entry.key, target, done)
    for problem in problems:
        click.echo(f"left out: {plain(problem)}", err=True)
    if len(problems) >= entry.segments:
        raise InputError(f"nothing was copied: none of the segments in {source.url} is believed.")
    click.echo(f"{entry.key[:12]} is in {plain(target.url)}.")
    ctx.exit(1 if problems else 0)


# --- saying ----------------------------------------------------------------------------------------------------------


def _print_rows(rows: Iterable[tuple[str, str]]) -> None:
    told = [(plain(name), plain(value)) for name, value in rows]
    width = max((len(name) for name, _ in told), default=0)
    for name, value in told:
        click.echo(f"  {name:{width}}  {value}".rstrip())


def _kind(name: str) -> str:
    """`file/ab/cd.so` is a `.so` file."""
    first, slash, rest = name.partition("/")
    last = rest.rpartition("/")[2]
    return f"{first} .{last.rpartition('.')[2]}" if slash and "." in last else first


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _when(ns: int) -> str:
    return clock_time(ns / 1e9) if ns else ""
