"""The README of a version: what it is, how to load it without headway, where it comes from, and what was checked.

What a job brought in (its name, what its checks said) only ever becomes text, on one line: it ends no table, and is no
heading, image or HTML.
"""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_ENTITIES = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}

MOST_ROWS = 100
"""Of a signature that are shown."""

Told = Mapping[str, Any]


def card(manifest: Told, ledger: Told | None = None) -> str:
    """The card of a version as Markdown. `ledger` is the report of the job that made it, as `headway report --json`
    tells it."""
    files = manifest.get("files") or {}
    parts = [
        _title(manifest),
        _loading(files),
        _origin(manifest),
        _job(ledger),
        _checks(manifest.get("checks") or []),
        _signature(manifest.get("signature")),
        _facts(manifest.get("facts") or {}),
        _files(files),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


# --- parts ---------------------------------------------------------------------------------------------------------


def _title(manifest: Told) -> str:
    job, step = manifest.get("job"), manifest.get("step")
    name = manifest.get("name") or f"step {step}"
    of = f" of job {text(job)}" if job else ""
    when = _moment(manifest.get("published_ns"))
    made = f" by the recipe {text(manifest['recipe'])}" if manifest.get("recipe") else ""
    return f"# {text(name)}\n\nThe model after {text(step)} steps{of}, published{when and f' on {when}'}{made}."


def _loading(files: Told) -> str:
    """A few lines of code for each kind of file that there is; none of them needs headway."""
    names = [name for name in sorted(files) if not name.startswith("golden/")]
    weights = [name for name in names if name.endswith(".safetensors")]
    compiled = [name for name in names if name.endswith(".pt2")]
    packages = [name for name in compiled if "package" in name and not name.startswith("program/")]
    parts = [_weights(weights)] if weights else []
    parts += [_program(name) for name in compiled if name not in packages]
    parts += [_package(name) for name in packages]
    return "\n\n".join(["## How to load it", *parts]) if parts else ""


def _weights(names: list[str]) -> str:
    load = "from safetensors.torch import load_file\n\n"
    if len(names) == 1:
        load += f"weights = load_file({_quoted(names[0])})\n"
    else:
        folder = str(PurePosixPath(names[0]).parent)
        load = f"from pathlib import Path\n\n{load}weights = {{}}\n"
        load += f"for part in sorted(Path({_quoted(folder)}).glob('*.safetensors')):\n    weights |= load_file(part)\n"
    return "The weights, by name:\n\n" + _code(f"{load}model.load_state_dict(weights)", "python")


def _program(name: str) -> str:
    code = f"import torch\n\nmodel = torch.export.load({_quoted(name)}).module()\noutput = model(*inputs)"
    return "The program, which torch runs without the code that the model was written in:\n\n" + _code(code, "python")


def _package(name: str) -> str:
    code = f"import torch\n\nmodel = torch._inductor.aoti_load_package({_quoted(name)})\noutput = model(*inputs)"
    return "The package, compiled for the kind of machine that it was made on:\n\n" + _code(code, "python")


def _origin(manifest: Told) -> str:
    anchor = manifest.get("anchor") or {}
    commit = str(anchor.get("commit") or "")
    rows = {
        "job": anchor.get("job") or manifest.get("job"),
        "attempt": anchor.get("attempt"),
        "ranks": anchor.get("world_size"),
        "step": anchor.get("step", manifest.get("step")),
        "checkpoint": anchor.get("checkpoint"),
        "saved": _moment(anchor.get("saved_ns")),
        "position in the data": _listed(anchor.get("data") or {}),
        "commit of the code": commit
        and commit + (", with changes that were not committed" * bool(anchor.get("dirty"))),
        "torch": anchor.get("torch"),
        "recipe": manifest.get("recipe"),
    }
    known = [(name, value) for name, value in rows.items() if value not in (None, "")]
    return "## Where it comes from\n\n" + _table(("", ""), known)


def _job(ledger: Told | None) -> str:
    """What the job's time was spent on, in the report's own words."""
    head = "## What its training took"
    if not ledger:
        return f"{head}\n\nThe journal of the job was not there: what its time went into is not known."
    wall = _number(ledger.get("wall_s"))
    failures, attempts = len(ledger.get("failures") or ()), len(ledger.get("attempts") or ())
    percent = (f"{name} {_number(ledger.get(key)):.1f}%" for name, key in _PERCENT)
    line = (
        f"{', '.join(percent)}. Wall time {wall:,.1f} s, {_count(attempts, 'attempt')}, {_count(failures, 'failure')}"
    )
    rows = [
        (bucket, f"{_number(took):,.1f}", f"{100 * _number(took) / (wall or 1):.1f}%")
        for bucket, took in (ledger.get("ledger") or {}).items()
        if _number(took)
    ]
    return f"{head}\n\n{line}.\n\n{_table(('time by cause', 'seconds', 'share'), rows, 'lrr')}"


_PERCENT = (
    ("Effective training time (ETT)", "ett_percent"),
    ("idleness", "idleness_percent"),
    ("failure", "failure_percent"),
)


def _checks(checks: Iterable[Told]) -> str:
    rows = [
        (each.get("name"), "passed" if each.get("passed") else "FAILED", each.get("told"), _listed(each.get("figures")))
        for each in checks
    ]
    head = "## What was checked before it was published"
    return f"{head}\n\n{_table(('check', 'outcome', 'what', 'figures'), rows) if rows else 'Nothing.'}"


def _signature(signature: Told | None) -> str:
    """What goes in and what comes out; of many weights only the first."""
    parts = []
    for name, told in (signature or {}).items():
        if name == "call":  # how torch writes down a call is for comparing, not for reading
            continue
        rows = list(told.items()) if isinstance(told, Mapping) else [("", _shown(told))]
        more = f"\n\n{len(rows) - MOST_ROWS:,} more are in version.json." if len(rows) > MOST_ROWS else ""
        parts.append(_table((text(name), ""), rows[:MOST_ROWS]) + more)
    return "\n\n".join(["## Signature", *parts]) if parts else ""


def _facts(facts: Told) -> str:
    rows = [(name, _listed(value) if isinstance(value, Mapping) else _shown(value)) for name, value in facts.items()]
    return "## Facts\n\n" + _table(("", ""), rows) if rows else ""


def _files(files: Told) -> str:
    """All files but this one, which cannot tell its own hash."""
    rows = [(name, f"{told.get('bytes', 0):,}", told.get("xxh3", "")) for name, told in sorted(files.items())]
    whole = sum(told.get("bytes", 0) for told in files.values())
    line = f"{_count(len(rows), 'file')}, {whole:,} bytes. Hashes are XXH3, of 128 bits."
    return f"## Files\n\n{line}\n\n{_table(('file', 'bytes', 'xxh3'), rows, 'lrl')}"


# --- Markdown ------------------------------------------------------------------------------------------------------


def text(value: object) -> str:
    """A value as text on one line, in which nothing means anything to Markdown."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return _SPECIAL.sub(r"\\\g<0>", line).translate(_ENTITIES)


def _table(head: Iterable[str], rows: Iterable[Iterable[object]], align: str = "") -> str:
    head = list(head)
    rule = ["---:" if side == "r" else "---" for side in align.ljust(len(head), "l")]
    lines = [head, rule, *([text("" if cell is None else cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(code: str, language: str) -> str:
    """Inside a fence that is longer than any in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", code)), default=0))
    return f"{fence}{language}\n{code}\n{fence}"


def _quoted(name: str) -> str:
    return json.dumps(name)


def _listed(told: object) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in told.items()) if isinstance(told, Mapping) else ""


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, default=str) if isinstance(value, dict | list | tuple) else str(value)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _moment(ns: object) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if isinstance(ns, int) else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


__all__ = ["card"]
