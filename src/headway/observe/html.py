"""The report as one HTML file that needs nothing else: no network, no server, no other file.

Everything is in the page: numbers as HTML, the ranks' time as JSON that a script draws. What a job brought in (names
of jobs, nodes and errors) only ever becomes text, and a content security policy lets no script run but the page's own.

Typical use::

    Path("report.html").write_text(page(ledger, summary(ledger)), encoding="utf-8")
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

from headway.accounting.ledger import Ledger
from headway.accounting.rules import Bucket, Key
from headway.observe.palette import COLOURS, GROUP_COLOURS, LABELS, PUBLISHING, group, who_failed
from headway.observe.perfetto import Stretch, attempt_title, moments, rank_stretches
from headway.observe.terminal import duration, overlap, publication_line

Report = dict[str, Any]
Drawn = tuple[int, int, tuple[str, str]]
"""Begin and end of a piece, and its bucket and stage; of what is published, no bucket and the step."""

_PAGE, _CSS, _JS = (
    files("headway.observe").joinpath("page", f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
)

MOST_PIECES = 200_000
"""Stretches of time the page holds; beyond, short ones are drawn as part of their neighbours."""
MOST_RANKS = 8192
MOST_MARKS = 2000
MOST_STARTUPS = 8
MOST_PUBLISHERS = 8
MOST_LINES = 200
"""Attempts and notes that are listed."""


def page(ledger: Ledger, report: Report) -> str:
    """The whole report (`summary.summary`) with the timeline of all ranks, as the text of one file."""
    digest = base64.b64encode(hashlib.sha256(_JS.encode()).digest()).decode()
    drawn, cut = timeline(ledger)
    parts = {
        "csp": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "css": _CSS,
        "js": _JS,
        "data": _json(drawn | _ranks(report)),
        "job": escape(report["job"]),
        "state": _pill(report["state"]),
        "about": _about(ledger, report),
        **{key: f"{report[f'{key}_percent']:.1f}%" for key in ("ett", "failure", "idleness")},
        "facts": _facts(report),
        "bar": _bar(report["ledger"], report["wall_s"], focusable=True),
        "groups": _groups(report),
        "publications": _publications(report["publications"]),
        "cut": _note(cut) if cut else "",
        "advice": _advice(report["advice"]),
        "stages": _stages(report["stages"]),
        "startups": _startups(report["startups"]),
        "attempts": _attempts(report),
        "notes": _notes(report["notes"]),
    }
    # In one pass: a job whose name looks like a placeholder stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _PAGE)


# --- what the script draws -----------------------------------------------------------------------------------------


def timeline(ledger: Ledger, most_pieces: int = MOST_PIECES) -> tuple[dict[str, Any], str]:
    """Every rank's time for drawing, in microseconds of job time, and what had to be left out, if anything."""
    ranks, finest = ledger.ranks[:MOST_RANKS], 0
    rows = {rank: _merged(rank_stretches(ledger, rank), 0) for rank in ranks}
    while sum(map(len, rows.values())) > most_pieces and finest < ledger.wall_ns:
        finest = max(2 * finest, ledger.wall_ns * len(ranks) // most_pieces // 2, 1)
        rows = {rank: _merged(stretches, finest) for rank, stretches in rows.items()}
    left_out = [f"stretches shorter than {duration(finest / 1e9)} are drawn as part of their neighbours"] * bool(finest)
    if len(ranks) < len(ledger.ranks):
        left_out.append(f"only the first {len(ranks)} of {len(ledger.ranks)} ranks are drawn and listed")
    found = moments(ledger)
    marks = found[:: len(found) // MOST_MARKS + 1]
    if len(marks) < len(found):
        left_out.append(f"{len(marks)} of {len(found)} checkpoints and failures are marked")
    keys: dict[tuple[str, str], int] = {}

    def us(t_ns: int) -> int:
        return round((t_ns - ledger.begin_ns) / 1000)

    def flat(pieces: Iterable[Drawn]) -> list[int]:
        """Durations and kinds in turn; kind 0 is time the rank was no part of."""
        at, line = 0, []
        for begin_ns, end_ns, key in pieces:
            begin, end = us(begin_ns), us(end_ns)
            line += [begin - at, 0] if begin > at else []
            line += [end - begin, keys.setdefault(key, len(keys) + 1)]
            at = end
        return line

    drawn: list[list[Any]] = [[rank, flat(stretch[1:] for stretch in row)] for rank, row in rows.items()]
    axis_ns, publishers, later = _publishers(ledger)
    drawn += [["publish", flat(pieces), about] for about, pieces in publishers]
    data = {
        "wall": us(ledger.begin_ns + axis_ns),
        "rows": drawn,
        "keys": [["", "", "", ""], *([_label(key), key, about, _colour(key)] for key, about in keys)],
        "attempts": [
            [us(a.attempt.begin_ns), us(a.attempt.end_ns), attempt_title(a), a.outcome] for a in ledger.attempts
        ],
        "marks": [[us(moment.t_ns), moment.what, moment.text] for moment in marks],
    }
    small = f"To keep this file small, {'; '.join(left_out)}. All numbers are exact." if left_out else ""
    return data, " ".join(filter(None, (small, later)))


def _publishers(ledger: Ledger) -> tuple[int, list[tuple[str, list[Drawn]]], str]:
    """How long the axis has to be for all that was published, and of each its pieces; at most twice the job's time,
    which would be a speck otherwise, and then what to say of the rest."""
    begun = [each for each in ledger.publications if each.tries][-MOST_PUBLISHERS:]
    axis_ns = max([ledger.wall_ns, *((each.end_ns or 0) - ledger.begin_ns for each in begun)])
    end_ns = ledger.begin_ns + min(axis_ns, 2 * ledger.wall_ns)
    rows = []
    for each in begun:
        pieces: list[Drawn] = [
            (max(begin, ledger.begin_ns), min(end, end_ns), ("", name))
            for begin, end, name in each.pieces()
            if begin < end_ns and end > ledger.begin_ns
        ]
        rows.append((f"on {each.tries[-1].node}, no part of the job's time", pieces))
    later = "What was published later than the timeline reaches is told above, and not drawn."
    return end_ns - ledger.begin_ns, rows, later if axis_ns > 2 * ledger.wall_ns else ""


def _label(key: str) -> str:
    return LABELS[Bucket(key)] if key else "publishing"


def _colour(key: str) -> str:
    return COLOURS[Bucket(key)] if key else PUBLISHING


def _merged(stretches: list[Stretch], finest_ns: int) -> list[Stretch]:
    """Neighbours of one kind as one; those shorter than `finest_ns` together, as the kind that most of them is."""
    merged: list[Stretch] = []
    took: dict[Key, int] = {}
    for stretch in stretches:
        last, length = merged[-1] if merged else None, stretch.end_ns - stretch.begin_ns
        if last and (last.attempt, last.end_ns) == (stretch.attempt, stretch.begin_ns):
            short = max(length, last.end_ns - last.begin_ns) < finest_ns
            if short or last.key == stretch.key:
                took[stretch.key] = took.get(stretch.key, 0) + length
                merged[-1] = last._replace(end_ns=stretch.end_ns, key=max(took, key=lambda key: took[key]))
                continue
        took = {stretch.key: length}
        merged.append(stretch)
    return merged


def _ranks(report: Report) -> dict[str, Any]:
    """The table of ranks; node names, of which there are fewer than ranks, once each."""
    ranks = [rank | {"node": rank["node"] or "no journal"} for rank in report["ranks"][:MOST_RANKS]]
    shown = [bucket for bucket in Bucket if any(rank["ledger"].get(bucket) for rank in ranks)]
    nodes = {node: at for at, node in enumerate(dict.fromkeys(rank["node"] for rank in ranks))}
    rows = []
    for rank in ranks:
        row = [rank["rank"], nodes[rank["node"]], round(rank["wall_s"], 3), round(rank["ett_percent"], 2)]
        rows.append(row + [round(rank["ledger"].get(bucket, 0), 4) for bucket in shown])
    return {"columns": [[LABELS[b], b, COLOURS[b]] for b in shown], "nodes": list(nodes), "ranks": rows}


def _json(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


# --- what is plain HTML --------------------------------------------------------------------------------------------


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _pill(outcome: str) -> str:
    return f'<span class="pill {outcome}">{outcome}</span>'


def _share(seconds: float, whole: float) -> str:
    percent = 100 * seconds / (whole or 1)
    return f"{percent:.1f}%" if percent >= 0.05 or not seconds else "&lt;0.1%"


def _about(ledger: Ledger, report: Report) -> str:
    counts = [(len(report[key]), key.removesuffix("s")) for key in ("ranks", "attempts", "failures")]
    facts = [f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts]
    wall = duration(report["wall_s"]) + (" so far" if report["state"] == "running" else "")
    began = datetime.fromtimestamp(ledger.begin_ns / 1e9, UTC).strftime("began %Y-%m-%d %H:%M:%S UTC")
    return " · ".join([wall, *facts, began])


def _facts(report: Report) -> str:
    recoveries, steps = report["time_to_recover_s"], report["steps"]
    facts = [("time to start", duration(report["time_to_start_s"]))]
    if recoveries:
        of = f" <small>mean of {len(recoveries)}</small>" if len(recoveries) > 1 else ""
        facts.append(("time to recover", duration(sum(recoveries) / len(recoveries)) + of))
    facts += [(f"{key} steps", f"{steps[key]:,.0f}") for key in ("new", "repeated", "unsaved") if steps[key]]
    if report["slowest_rank"] is not None and len(report["ranks"]) > 1:
        facts.append(("slowest rank", str(report["slowest_rank"])))
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)


def _bar(ledger: dict[str, float], whole: float, focusable: bool = False) -> str:
    """Time by bucket as segments of a bar, in the order of a job's life."""
    segments = []
    for bucket, took in ((bucket, ledger.get(bucket, 0.0)) for bucket in Bucket):
        if took:
            told = f"{duration(took)}, {_share(took, whole)}"
            reach = f' tabindex="0" role="img" aria-label="{LABELS[bucket]}: {told}"' if focusable else ""
            segments.append(
                f'<i style="--c:{COLOURS[bucket]};flex-grow:{100 * took / (whole or 1):.4f}" data-key="{bucket}" '
                f'data-title="{LABELS[bucket]}" data-text="{told}"{reach}></i>'
            )
    return "".join(segments)


def _groups(report: Report) -> str:
    """Level 1, and under each group its buckets: the bar's legend."""
    columns, whole = [], report["wall_s"]
    for name, colour in GROUP_COLOURS.items():
        parts = [(b, report["ledger"].get(b, 0.0)) for b in Bucket if group(b) == name]
        total = sum(took for _, took in parts)
        rows = (
            f'<li data-key="{b}" style="--c:{COLOURS[b]}"><b>{LABELS[b]}</b><span>{duration(took)}</span>'
            f"<span>{_share(took, whole)}</span></li>"
            for b, took in sorted(parts, key=lambda part: -part[1])
            if took
        )
        columns.append(
            f'<section class="group{"" if total else " none"}" style="--c:{colour}"><h3>{name}</h3>'
            f"<p><strong>{_share(total, whole)}</strong> {duration(total)}</p><ul>{''.join(rows)}</ul></section>"
        )
    return "".join(columns)


def _publications(told: list[dict[str, Any]]) -> str:
    """What became of each publication, and what it spared the trainer."""
    items = [f'<li class="{each["outcome"]}">{escape(publication_line(each))}</li>' for each in told[-MOST_LINES:]]
    return f'<ul class="publications" style="--c:{PUBLISHING}">{"".join(items)}</ul>' if items else ""


def _advice(advice: list[dict[str, Any]]) -> str:
    items = [
        f'<li style="--c:{COLOURS[Bucket(a["bucket"])]}" data-key="{escape(a["bucket"])}">'
        f'<span class="gain">+{a["points"]:.1f}<small>points</small></span><div><h3>{escape(a["title"])} '
        f"<small>up to {duration(a['seconds'])}</small></h3><code>{escape(a['fix'])}</code></div></li>"
        for a in sorted(advice, key=lambda a: -a["points"])
    ]
    return f"<ol>{''.join(items)}</ol>" if items else _note("No single fix would give back half a point.")


def _stages(stages: dict[str, float]) -> str:
    whole, longest = sum(stages.values()), max(stages.values(), default=0.0)
    rows = [
        f'<tr><th scope="row">{escape(stage.replace("_", " "))}</th><td class="meter"><i style="width:'
        f'{100 * took / longest:.2f}%"></i></td><td>{duration(took)}</td><td>{_share(took, whole)}</td></tr>'
        for stage, took in sorted(stages.items(), key=lambda item: -item[1])
        if took
    ]
    return f"<table>{''.join(rows)}</table>" if rows else _note("No time went into trainer initialisation.")


def _startups(startups: list[dict[str, Any]]) -> str:
    """A waterfall for each start-up: the first, and the last of all others."""
    shown = startups[:1] + startups[1:][1 - MOST_STARTUPS :]
    cards = [_startup(startup) for startup in shown]
    if len(shown) < len(startups):
        cards.append(_note(f"{len(startups) - len(shown)} more start-ups are in the JSON report."))
    return f'<section class="card"><h2>Start-up</h2>{"".join(cards)}</section>' if cards else ""


def _startup(startup: dict[str, Any]) -> str:
    wall = startup["wall_s"] or 1.0
    rows = []
    for stage in startup["stages"]:
        took = stage["end_s"] - stage["begin_s"]
        kind = "failed" if stage["failed"] else "critical" if stage["critical"] else ""
        waited = f"after {stage['after']}, " if stage["after"] else ""
        if stage["last_rank"] not in (None, startup["rank"]):
            waited += f"rank {stage['last_rank']} came to it last, "
        rows.append(
            f'<tr class="{kind}"><th scope="row">{escape(stage["name"])}</th>'
            f'<td class="left">{escape(stage["lane"])}</td><td class="lane"><i style="'
            f'margin-left:{100 * stage["begin_s"] / wall:.2f}%;width:{100 * took / wall:.2f}%">'
            f"</i></td><td>{duration(took)}</td><td>{escape(waited)}{duration(stage['cpu_s'])} CPU</td></tr>"
        )
    legs = [
        f"{escape(leg['stage'] or leg['gap'])} <small>rank {leg['rank']}, {duration(leg['seconds'])}</small>"
        for leg in startup["critical_path"]
        if leg["stage"] or leg["seconds"] > wall / 100
    ]
    return (
        f'<div class="waterfall"><h3>Attempt {startup["attempt"]}, {duration(startup["wall_s"])} '
        f"<small>the stages of rank {startup['rank']}; {escape(overlap(startup).plain)}</small></h3>"
        f'<div class="scroll"><table>{"".join(rows)}</table></div>'
        f'<p class="note">Critical path: {" &rarr; ".join(legs)}</p></div>'
    )


def _attempts(report: Report) -> str:
    longest = max(attempt["wall_s"] for attempt in report["attempts"]) or 1
    failures = {failure["attempt"]: failure for failure in report["failures"]}
    more = len(report["attempts"]) - MOST_LINES
    rows = [f'<tr><td colspan="8">{more} earlier attempts are in the JSON report</td></tr>'] if more > 0 else []
    for attempt in report["attempts"][-MOST_LINES:]:
        outcome, failure = _pill(attempt["outcome"]), failures.get(attempt["attempt"])
        if failure:
            why = failure["category"] or attempt.get("error") or "died without a word"
            who = who_failed(failure["rank"], failure["unseen_ranks"])
            outcome += f" <small>{who}: {escape(str(why)[:300])}</small>"
        cells = [duration(attempt["begin_s"]), duration(attempt["wall_s"]), attempt["world_size"]]
        cells += ["" if attempt[key] is None else attempt[key] for key in ("critical_rank", "slowest_rank")]
        bar, width = _bar(attempt["ledger"], attempt["wall_s"]), 100 * attempt["wall_s"] / longest
        rows.append(
            f'<tr><th scope="row">{attempt["attempt"]}</th><td class="left">{outcome}</td>'
            f"{''.join(f'<td>{cell}</td>' for cell in cells)}"
            f'<td class="wide"><div class="bar small" style="width:{width:.2f}%">{bar}</div></td></tr>'
        )
    return "".join(rows)


def _notes(notes: list[str]) -> str:
    items = [f"<li>{escape(note)}</li>" for note in notes[:MOST_LINES]]
    if len(notes) > MOST_LINES:
        items.append(f"<li>{len(notes) - MOST_LINES} more are in the JSON report</li>")
    return f'<section class="card notes"><h2>Notes</h2><ul>{"".join(items)}</ul></section>' if items else ""
