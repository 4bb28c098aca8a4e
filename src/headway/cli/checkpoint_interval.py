"""`headway checkpoint interval`: how often to save, and what other intervals would waste."""

import json
import math
from importlib import import_module
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.accounting.rules import Bucket
from headway.checkpoint.interval import DAY_S, Costs, Interval, curve, optimum, waste
from headway.errors import InputError
from headway.observe.palette import COLOURS
from headway.observe.terminal import duration

ROUND_S = (1, 5, 15, 60, 120, 300, 900, 1800, 3600, 2 * 3600, 6 * 3600, 24 * 3600)
"""Intervals as people set them."""

ROWS = 12
HARDLY = 50.0
"""Percent wasted above which the formula is far off."""

SAVING, LOST = COLOURS[Bucket.WASTE_CHECKPOINT_BLOCKING], COLOURS[Bucket.WASTE_REPEATED_STEPS]
BEST = COLOURS[Bucket.TRAINING_EFFECTIVE]


@click.command()
@click.option("--blocking", type=float, required=True, metavar="S", help="Seconds that one save blocks training.")
@click.option("--failures-per-day", type=float, required=True, metavar="N", help="How often the job fails.")
@click.option("--inflation", type=float, default=0.0, metavar="S",
              help="Seconds lost to slower steps while one save is uploaded.")  # fmt: skip
@click.option("--upload", type=float, default=0.0, metavar="S", help="Seconds from a save until it is durable.")
@click.option("--json", "as_json", is_flag=True, help="Print the interval, its neighbours and the curve as JSON.")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw the curve into FILE.")
def interval(
    blocking: float, failures_per_day: float, inflation: float, upload: float, as_json: bool, png: Path | None
) -> None:
    """Show how often to save so that the least time is wasted.

    Saving often costs the time that saves take; saving rarely, the work that failures take.
    """
    costs, per_s = _checked(blocking, inflation, upload, failures_per_day)
    console = Console()
    best, points = optimum(costs, per_s), curve(costs, per_s, max(11, min(61, console.width - 10)))
    neighbours = _neighbours(costs, per_s, best, points)
    if png is not None:
        _draw(png, costs, failures_per_day, best, points)
    if as_json:
        lists = {"neighbours": list(map(_row, neighbours)), "curve": list(map(_row, points))}
        click.echo(json.dumps(_row(best) | lists, indent=2))
        return
    console.print(
        _headline(best, costs), Text(), _chart(points, best), Text(), _table(neighbours, best, costs), sep="\n"
    )


def _checked(blocking: float, inflation: float, upload: float, per_day: float) -> tuple[Costs, float]:
    given = {"--blocking": blocking, "--inflation": inflation, "--upload": upload, "--failures-per-day": per_day}
    for option, value in given.items():
        positive = option in ("--blocking", "--failures-per-day")
        if not 0 <= value < math.inf or (positive and value == 0):
            why = ": what costs nothing or never fails has no best interval" if value == 0 else ""
            raise InputError(f"{option} is {value:g}{why}. Give a number {'above 0' if positive else 'of 0 or more'}.")
    return Costs(blocking_s=blocking, inflation_s=inflation, upload_s=upload), per_day / DAY_S


def _neighbours(costs: Costs, per_s: float, best: Interval, points: list[Interval]) -> list[Interval]:
    """The best, half and double of it, and what people would set; the shortest first."""
    half, double = best.interval_s / 2, best.interval_s * 2
    usual = [s for s in ROUND_S if points[0].interval_s <= s <= points[-1].interval_s]
    others = {
        half,
        double,
        *(s for s in usual if all(abs(s / own - 1) > 0.02 for own in (half, best.interval_s, double))),
    }
    return sorted([best, *(waste(costs, per_s, s) for s in others)], key=lambda point: point.interval_s)


def _row(point: Interval) -> dict[str, float]:
    """Four digits of a time and three of a share: more were never measured."""
    shares = {name: getattr(point, name) for name in ("wasted_percent", "blocking_percent", "lost_percent")}
    return {"interval_s": float(f"{point.interval_s:.4g}")} | {k: float(f"{v:.3g}") for k, v in shares.items()}


# --- in the terminal -------------------------------------------------------------------------------------------------


def _headline(best: Interval, costs: Costs) -> Text:
    digits = 1 if best.interval_s >= 10 else 3
    text = Text.assemble(
        ("Save every ", "bold"), (f"{best.interval_s:,.{digits}f} s", f"bold {BEST}"),
        f" ({duration(best.interval_s)}): ", (f"{best.wasted_percent:.3g}%", "bold"), " of the time is wasted\n",
        ("█ ", LOST), f"work lost to failures {best.lost_percent:.3g}%   ",
        ("▒ ", SAVING), f"saving {best.blocking_percent:.3g}%",
    )  # fmt: skip
    if best.wasted_percent > HARDLY:
        text.append("\n! such a job hardly makes progress, and the share is rough: make saves cheaper", "yellow")
    if best.interval_s == costs.end_to_end_s:
        text.append("\n! a save takes as long from end to end: more often, saves would queue", "yellow")
    return text


def _chart(points: list[Interval], best: Interval) -> Text:
    """Wasted time against the interval, a column for each point, by cause."""
    most = max(point.wasted_percent for point in points)
    nearest = min(range(len(points)), key=lambda at: abs(math.log(points[at].interval_s / best.interval_s)))
    chart = Text()
    for row in range(ROWS, 0, -1):
        label = f"{most * row / ROWS:.{0 if most >= 100 else 1}f}%" if row % 4 == 0 else ""
        chart.append(f"{label:>6.6} ┤" if label else "       │", "dim")
        for point in points:
            chart.append(*_cell(point, row - 0.5, most / ROWS))
        chart.append("\n")
    chart.append("       └" + "─" * nearest + "▲" + "─" * (len(points) - nearest - 1) + "\n", "dim")
    return chart.append(" " * 8 + _ticks(points), "dim")


def _cell(point: Interval, row: float, percent: float) -> tuple[str, str]:
    """What stands in a column at a height, with so many percent a row."""
    if point.lost_percent >= row * percent:
        return "█", LOST
    return ("▒", SAVING) if point.wasted_percent >= row * percent else (" ", "")


def _ticks(points: list[Interval]) -> str:
    """The axis: round intervals, each beginning below its column, where there is room."""
    line = ""
    for interval_s in ROUND_S:
        at = sum(point.interval_s < interval_s * 0.99 for point in points)
        if at < len(points) and points[0].interval_s <= interval_s * 1.01 and at >= len(line):
            line = line.ljust(at) + duration(interval_s) + "  "
    return line.rstrip()


def _table(neighbours: list[Interval], best: Interval, costs: Costs) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("save every", "wasted", "saving", "lost", ""):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for point in neighbours:
        shares = (f"{value:.2f}%" for value in (point.wasted_percent, point.blocking_percent, point.lost_percent))
        note = "the best" if point is best else f"{point.wasted_percent / best.wasted_percent:.2f}×"
        if point.interval_s < costs.end_to_end_s:
            note = "saves would queue"
        table.add_row(duration(point.interval_s), *shares, note, style="bold" if point is best else "")
    return table


# --- as a picture ----------------------------------------------------------------------------------------------------


def _draw(path: Path, costs: Costs, per_day: float, best: Interval, points: list[Interval]) -> None:
    try:
        pictures = import_module("matplotlib.figure")
    except ImportError as error:
        raise InputError(
            "--png needs matplotlib, which is not installed: pip install matplotlib."
            " Without it, the curve is drawn here, and --json has its points."
        ) from error
    figure = pictures.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    unit, unit_s = ("minutes", 60) if best.interval_s >= 120 else ("seconds", 1)
    at, least = [point.interval_s / unit_s for point in points], (best.interval_s / unit_s, best.wasted_percent)
    axes.plot(at, [point.wasted_percent for point in points], color="black", label="wasted")
    axes.plot(at, [point.blocking_percent for point in points], "--", color=SAVING, label="saving")
    axes.plot(at, [point.lost_percent for point in points], "--", color=LOST, label="work lost to failures")
    axes.plot(*least, "o", color=BEST)
    axes.annotate(f"{duration(best.interval_s)}: {best.wasted_percent:.3g}%", least, xytext=(10, 24),
                  textcoords="offset points", ha="center")  # fmt: skip
    axes.set(title=f"{costs.blocking_s:g} s blocked by a save, {per_day:g} failures a day",
             xlabel=f"interval between saves ({unit})", ylabel="wasted time (%)", ylim=(0, None))  # fmt: skip
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}): name a file in a folder that is there."
        ) from error
    click.echo(f"wrote {path}", err=True)
