"""The report on one screen of a terminal."""

import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from headway.accounting.rules import Bucket
from headway.observe.palette import COLOURS, GROUP_COLOURS, LABELS, group, who_failed

BAR_CELLS = 78
MOST_ATTEMPTS = 4
MOST_ADVICE = 3
MOST_FAILURES = 2
MOST_NOTES = 3
MOST_PUBLICATIONS = 3
MOST_STAGES = 16
MOST_LEGS = 12
STAGE_CELLS = 34
"""The width of a waterfall."""
_PUBLICATION = {"published": "green", "running": "cyan", "waiting": "dim"}
_STATE = {"running": "green", "ended": "cyan", "stopped": "yellow", "failed": "red"}


def render(report: dict[str, Any]) -> RenderableType:
    """A report (`summary.summary`) as something rich can print."""
    parts: list[RenderableType] = [
        _title(report),
        _bar(report),
        _headline(report),
        _level_1(report),
        Text(),
        _groups(report),
    ]
    if report["publications"]:
        parts += [Text(), *_publications(report["publications"])]
    if report["startups"]:
        parts += [Text(), _waterfall(max(report["startups"], key=lambda startup: startup["wall_s"]))]
    parts += [Text(), _attempts(report)]
    if report["advice"]:
        parts += [Text(), _advice(report)]
    if report["notes"]:
        parts += [Text(), _notes(report["notes"])]
    return Group(*parts)


def render_comparison(a: dict[str, Any], b: dict[str, Any]) -> RenderableType:
    """Two reports side by side, the largest change first."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column()
    for name in (plain(a["job"]), plain(b["job"]), "change"):
        table.add_column(Text(name), justify="right")
    points = b["ett_percent"] - a["ett_percent"]
    ett = [f"{report['ett_percent']:.1f}%" for report in (a, b)]
    table.add_row(Text("ETT", "bold"), *ett, Text(f"{points:+.1f} points", "green" if points >= 0 else "red"))
    rows = [("wall", a["wall_s"], b["wall_s"]), ("time to start", a["time_to_start_s"], b["time_to_start_s"])]
    rows.append(("time to recover", sum(a["time_to_recover_s"]), sum(b["time_to_recover_s"])))
    keys = [key for key in a["ledger"] if a["ledger"][key] or b["ledger"][key]]
    keys.sort(key=lambda key: -abs(_share(b, key) - _share(a, key)))
    for name, x, y in rows:
        table.add_row(name, duration(x), duration(y), f"{y - x:+.1f} s")
    table.add_row("failures", str(len(a["failures"])), str(len(b["failures"])), "")
    table.add_row()
    for key in keys:
        change = _share(b, key) - _share(a, key)
        better = change >= 0 if key == Bucket.TRAINING_EFFECTIVE else change <= 0
        label = Text.assemble(("■ ", COLOURS[Bucket(key)]), key)
        cells = [f"{duration(r['ledger'][key])} {_share(r, key):5.1f}%" for r in (a, b)]
        table.add_row(label, *cells, Text(f"{change:+.1f} points", "green" if better else "red"))
    return table


# --- parts ---------------------------------------------------------------------------------------------------------


def _title(report: dict[str, Any]) -> Text:
    ranks, attempts, failures = (len(report[key]) for key in ("ranks", "attempts", "failures"))
    facts = [
        _count(ranks, "rank"),
        _count(attempts, "attempt"),
        _count(failures, "failure"),
        duration(report["wall_s"]),
    ]
    state = report["state"]
    return Text.assemble((plain(report["job"]), "bold"), "  ", (state, _STATE[state]), "  ", (" · ".join(facts), "dim"))


def _headline(report: dict[str, Any]) -> Text:
    return Text.assemble(
        ("ETT ", "bold"), (f"{report['ett_percent']:.1f}%", f"bold {COLOURS[Bucket.TRAINING_EFFECTIVE]}"),
        f"   idleness {report['idleness_percent']:.1f}%   failure {report['failure_percent']:.1f}%",
    )  # fmt: skip


def _level_1(report: dict[str, Any]) -> "Flow":
    recoveries, steps = report["time_to_recover_s"], report["steps"]
    facts = [("time to start", duration(report["time_to_start_s"]))]
    if recoveries:
        average = duration(sum(recoveries) / len(recoveries))
        facts.append(("time to recover", average + (" on average" if len(recoveries) > 1 else "")))
    facts.append(("failures", str(len(report["failures"]))))
    facts += [(f"{key} steps", f"{steps[key]:.0f}") for key in ("new", "repeated", "unsaved") if steps[key]]
    return Flow((Text.assemble((name, "dim"), " ", value) for name, value in facts), gap="   ")


def _bar(report: dict[str, Any]) -> Text:
    """The job's time by cause; a cause that took any time that rounds to a cell is seen."""
    bar, whole, seen, drawn = Text(), report["wall_s"] or 1.0, 0.0, 0
    for key, took in report["ledger"].items():
        seen += took
        until = round(BAR_CELLS * seen / whole)
        bar.append("█" * (until - drawn), COLOURS[Bucket(key)])
        drawn = max(drawn, until)
    return bar


def _groups(report: dict[str, Any]) -> Table:
    """Levels 1 and 2, and of trainer initialisation level 3."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for name in GROUP_COLOURS:
        parts = {Bucket(key): s for key, s in report["ledger"].items() if group(Bucket(key)) == name}
        total = sum(parts.values())
        if total:
            share = f"{100 * total / (report['wall_s'] or 1):.1f}%"
            detail = _parts((bucket, s) for bucket, s in parts.items() if s)
            table.add_row(Text(name, "bold"), duration(total), share, detail)
    if report["rollout_s"]:
        share = f"{100 * report['rollout_s'] / (report['wall_s'] or 1):.1f}%"
        table.add_row(Text("rollouts", "bold"), duration(report["rollout_s"]), share, Text("part of the steps", "dim"))
    stages = sorted(((name, s) for name, s in report["stages"].items() if s >= 0.0005), key=lambda item: -item[1])
    if stages:
        detail = Flow(_item(name, s) for name, s in stages)
        table.add_row(Text("trainer init", "bold"), duration(sum(s for _, s in stages)), "", detail)
    return table


def _parts(parts: Iterable[tuple[Bucket, float]]) -> "Flow":
    ordered = sorted(parts, key=lambda item: -item[1])
    return Flow(Text.assemble(("■ ", COLOURS[bucket]), _item(LABELS[bucket], s)) for bucket, s in ordered)


def _item(name: str, seconds: float) -> Text:
    return Text.assemble(name, " ", (duration(seconds), "dim"))


class Flow:
    """Items one after another, none torn apart at the end of a line."""

    def __init__(self, items: Iterable[Text], gap: str = "  ") -> None:
        self._items, self._gap = list(items), gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for item in self._items:
            if line and line.cell_len + len(self._gap) + item.cell_len > options.max_width:
                yield line
                line = Text()
            line = Text.assemble(line, self._gap if line else "", item)
        yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = sum(item.cell_len + len(self._gap) for item in self._items)
        return Measurement(max((item.cell_len for item in self._items), default=0), min(widest, options.max_width))


def _attempts(report: dict[str, Any]) -> Group:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("attempt", "outcome", "began", "wall", "steps", "waited for", "slowest"):
        table.add_column(name, no_wrap=True)
    attempts = report["attempts"]
    shown = attempts if len(attempts) <= MOST_ATTEMPTS else [attempts[0], *attempts[1 - MOST_ATTEMPTS :]]
    for attempt in shown:
        if attempt is not attempts[0] and attempt is shown[1] and len(shown) < len(attempts):
            table.add_row(Text(f"… {len(attempts) - len(shown)} more", "dim"))
        steps = "" if attempt["first_step"] is None else f"{attempt['first_step']}–{attempt['next_step']}"
        table.add_row(
            str(attempt["attempt"]), Text(attempt["outcome"], _STATE[attempt["outcome"]]),
            f"+{duration(attempt['begin_s'])}", duration(attempt["wall_s"]), steps, _rank(attempt["critical_rank"]),
            _rank(attempt["slowest_rank"]),
        )  # fmt: skip
    return Group(table, *_failures(report))


def _waterfall(startup: dict[str, Any]) -> Group:
    """The stages of the start-up that took longest, when each ran, and which of them it took its time for."""
    many = startup["ranks"] > 1
    title = Text.assemble(
        ("start-up", "bold"), f" of attempt {startup['attempt']}  {duration(startup['wall_s'])}",
        (f"  the stages of rank {startup['rank']}" if many else "", "dim"),
    )  # fmt: skip
    table = Table.grid(padding=(0, 1))
    for justify in ("left", "left", "left", "left", "right"):
        table.add_column(justify=justify, no_wrap=True, overflow="ellipsis")
    stages = startup["stages"]
    by_length = sorted(stages, key=lambda stage: (stage["failed"], stage["end_s"] - stage["begin_s"]))
    folded = by_length[: max(len(stages) - MOST_STAGES, 0)]
    for stage in stages:
        if stage not in folded:
            table.add_row(*_stage_cells(stage, startup["wall_s"] or 1.0))
    if folded:
        longest = folded[-1]["end_s"] - folded[-1]["begin_s"]
        table.add_row("", Text(f"{len(folded)} more", "dim"), "", Text(f"each at most {duration(longest)}", "dim"))
    return Group(title, table, _path(startup["critical_path"], startup["wall_s"], many), overlap(startup))


def _stage_cells(stage: dict[str, Any], wall_s: float) -> tuple[Text, ...]:
    begin, end = (round(STAGE_CELLS * stage[key] / wall_s) for key in ("begin_s", "end_s"))
    begin = min(begin, STAGE_CELLS - 1)
    colour = "red" if stage["failed"] else COLOURS[Bucket.START_TRAINER_INIT] if stage["critical"] else "dim"
    sign = ("✗", "red") if stage["failed"] else ("▸" if stage["critical"] else " ", colour)
    bar = Text(" " * begin + ("█" if stage["critical"] else "▒") * max(end - begin, 1), colour)
    took = duration(stage["end_s"] - stage["begin_s"])
    return Text(*sign), Text(plain(stage["name"])[:24]), Text(plain(stage["lane"]), "dim"), bar, Text(took)


def _path(legs: list[dict[str, Any]], wall_s: float, many: bool) -> "Flow":
    """What the start-up took its time for, in a line; gaps that nobody would miss are left out, and of a long path the
    shortest stages."""
    legs = [leg for leg in legs if leg["stage"] or leg["seconds"] > wall_s / 100]
    shown = sorted(sorted(range(len(legs)), key=lambda at: -legs[at]["seconds"])[:MOST_LEGS])
    items = []
    for at, before in zip(shown, [-1, *shown], strict=False):
        if at > before + 1:
            items.append(Text("…", "dim"))
        leg, previous = legs[at], legs[before] if before >= 0 else None
        where = f" (rank {leg['rank']})" if many and (not previous or previous["rank"] != leg["rank"]) else ""
        if leg["stage"]:
            items.append(Text(plain(leg["stage"]) + where))
        else:
            items.append(Text(f"{duration(leg['seconds'])} {leg['gap']}{where}", "dim"))
    arrows = [Text.assemble(item, (" →", "dim")) for item in items[:-1]]
    return Flow([Text("critical path:", "dim"), *arrows, *items[-1:]], gap=" ")


def overlap(startup: dict[str, Any]) -> Text:
    """What running stages at the same time gives, and could give."""
    more = f"at most {duration(startup['could_save_s'])}"
    if startup["failed"]:
        first = startup["failed"][0]
        return Text(f"stage {plain(first['stage'])} failed on rank {first['rank']}", "red")
    if startup["serial"]:
        return Text(f"one stage after another, as asked: overlap could save {more}")
    saved = duration(startup["saved_s"]) if startup["uncontended"] else f"up to {duration(startup['saved_s'])}"
    line = Text(f"overlap saves {saved} of {duration(startup['serial_s'])}; {more} more could be had")
    if not startup["uncontended"]:
        line.append(" (HEADWAY_SERIAL=1 tells exactly)", "dim")
    return line


def _publications(told: list[dict[str, Any]]) -> list[Text]:
    """The last publications, each in a line."""
    shown = told[-MOST_PUBLICATIONS:]
    lines = [Text(publication_line(each), _PUBLICATION.get(each["outcome"], "red")) for each in shown]
    if len(shown) < len(told):
        lines.insert(0, Text(f"{len(told) - len(shown)} earlier publications in --json and --html", "dim"))
    return lines


def publication_line(told: dict[str, Any]) -> str:
    """What became of a publication, and what it spared the trainer."""
    what = "publishing" if told["step"] is None else f"publishing step {told['step']}"
    took, why = duration(told["seconds"]), f": {plain(' '.join(told['why'].split()))}" if told["why"] else ""
    tries = f", {told['tries']} tries" if told["tries"] > 1 else ""
    match told["outcome"]:
        case "published":
            ranks = told["device"] == "cpu"
            off, unit = ("trainer", "rank") if ranks else ("accelerators", "accelerator")
            saved = f"{_unit_time(told['saved_accelerator_s'], unit)} saved ({told['accelerators']} × {took})"
            return f"published {plain(told['version'])} off the {off} in {took}{tries}: {saved}"
        case "running":
            return f"{what}: under way for {took}{tries}"
        case "waiting" if told["submitted"]:
            return f"{what}: handed over to {plain(told['runner']) or 'a runner'}, and not begun yet"
        case "waiting":
            return f"{what}: not submitted{why}"
        case "interrupted":
            return f"{what} was interrupted after {took}{tries}: headway publish run {plain(told['id'])} goes on"
    return f"{what}: {told['outcome']} after {took}{tries}{why}"


def _unit_time(seconds: float, unit: str) -> str:
    return f"{seconds / 3600:.2f} {unit}-hours" if seconds >= 360 else f"{seconds:.0f} {unit}-seconds"


def _failures(report: dict[str, Any]) -> list[Text]:
    """The last failures, each in a line."""
    lines = []
    for failure in report["failures"][-MOST_FAILURES:]:
        error = report["attempts"][failure["attempt"]]["error"]
        why = failure["category"] or error or "it died without a word"
        who = who_failed(failure["rank"], failure["unseen_ranks"])
        told = f": {failure['decision']}" if failure["decision"] else f" failed on {who}: {why}"
        line = Text(f"attempt {failure['attempt']}{plain(told)}", "red")
        line.no_wrap, line.overflow = True, "ellipsis"
        lines.append(line)
    return lines


def _advice(report: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for advice in report["advice"][:MOST_ADVICE]:
        gain = Text(f"+{advice['points']:.1f} points", COLOURS[Bucket.TRAINING_EFFECTIVE])
        what = Text.assemble(advice["title"], (f"  up to {duration(advice['seconds'])}", "dim"))
        table.add_row(gain, what)
        table.add_row("", Text(advice["fix"], "cyan"))
    more = len(report["advice"]) - MOST_ADVICE
    if more > 0:
        table.add_row("", Text(f"{more} more in --json and --html", "dim"))
    return table


def _notes(notes: list[str]) -> Text:
    shown = [f"! {plain(note)}" for note in notes[:MOST_NOTES]]
    if len(notes) > MOST_NOTES:
        shown.append(f"! {len(notes) - MOST_NOTES} more in --json")
    return Text("\n".join(shown), "yellow")


# --- words ---------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """A time as people say it: 0.42 s, 12.3 s, 4m07s, 3h02m, 2d05h."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def clock_time(wall_s: float) -> str:
    """A moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s))


def plain(text: str) -> str:
    """Text that cannot move the cursor or change the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _rank(rank: int | None) -> str:
    return "" if rank is None else f"rank {rank}"


def _share(report: dict[str, Any], key: str) -> float:
    return float(100 * report["ledger"][key] / (report["wall_s"] or 1))
