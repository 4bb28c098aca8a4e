"""The demo: one DLRM trained twice under the same faults, as a good engineer does today and with headway.

Two ranks each, on this machine, one job after the other. A rank is killed, a read fails, and the job is told to leave
and started again. Then a table and a picture say where the time of both went, and whether they learned the same.
`QUICK=1` in the environment trains less, and only kills.
"""

import io
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.terminal_theme import MONOKAI
from rich.text import Text

from bench.drill import COLD, FAIR, PLAIN, Arm, Drill, Fault, Outcome, Stuck
from headway.accounting.rules import Bucket
from headway.observe.palette import COLOURS, GROUP_COLOURS, LABELS, group
from headway.observe.summary import summary
from headway.observe.terminal import duration, render

OUT = Path("out", "demo")
SAVE_EVERY, STEP_S = 48, 0.25
"""The plain one saves every 12 s, which is near its best for a fault every four minutes; faults come in between."""
FAULTS, STEPS = [Fault("kill", 72), Fault("exception", 120), Fault("notice", 168)], 240
QUICK_FAULTS, QUICK_STEPS, QUICK_SAVE_EVERY = [Fault("kill", 24)], 40, 16
WORDS = {"kill": "rank 1 is killed", "exception": "a read of rank 1 fails", "notice": "the job is told to leave"}
CELLS = 62
HOME = f"HEADWAY_HOME={OUT / 'headway' / 'machine' / 'home'}"
NEXT = {
    f"{HOME} .venv/bin/headway report": "where headway's time went, and what would give more of it back",
    f"{HOME} .venv/bin/headway publish status": "its model, which is being published meanwhile",
    "diff examples/dlrm/train_plain.py examples/dlrm/train_headway.py": "what it takes",
    ".venv/bin/headway exec python your_script.py": "the same report for a job of yours, unmodified",
}


def main() -> int:
    """Runs both, and says what came of it. 1 if they did not end with the same losses."""
    quick, console = bool(os.environ.get("QUICK")), Console()
    faults, steps = (QUICK_FAULTS, QUICK_STEPS) if quick else (FAULTS, STEPS)
    shutil.rmtree(OUT, ignore_errors=True)
    told = ", ".join(f"at step {fault.at} {WORDS[fault.kind]}" for fault in faults)
    console.print(f"A DLRM, {steps} steps on two ranks, twice: {told}.")
    console.print(f"Plain torch is given its best: {FAIR}.", style="dim")
    outcomes: list[Outcome] = []
    try:
        for arm in (PLAIN, COLD):
            outcomes.append(run(arm, faults, steps, outcomes, console, QUICK_SAVE_EVERY if quick else SAVE_EVERY))
    except Stuck as problem:
        console.print(str(problem), markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    plain, ours = (outcome.report for outcome in outcomes)
    console.print(Group(Text(), timelines([plain, ours]), Text(), table(plain, ours), Text()))
    draw([plain, ours], OUT / "comparison.png")
    draw_report(ours, OUT / "report.svg")
    same = outcomes[0].losses == outcomes[1].losses
    verdict = f"All {steps} losses are the same in both, bit for bit." if same else "THE LOSSES DIFFER."
    console.print(verdict, style="green" if same else "red")
    console.print(f"The picture: {OUT / 'comparison.png'}\n\nNext:")
    for command, what in NEXT.items():
        console.print(Text.assemble("  ", (command, "cyan"), f"\n      {what}"), soft_wrap=True)
    return 0 if same else 1


# --- running ---------------------------------------------------------------------------------------------------------


def run(arm: Arm, faults: list[Fault], steps: int, before: list[Outcome], console: Console, save_every: int) -> Outcome:
    """One job, shown while it runs: live on a terminal, else a line now and then."""
    folder = OUT / ("headway" if arm.is_headway else "plain")
    drill = Drill(
        arm, folder.absolute(), folder.absolute() / "machine", steps=steps, save_every=save_every, step_s=STEP_S
    )
    began, shown = time.monotonic(), 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(drill: Drill) -> None:
            nonlocal shown
            passed = time.monotonic() - began
            if passed - shown < (0.5 if console.is_terminal else 15):
                return
            shown = passed
            text = doing(drill, passed)
            if console.is_terminal:
                bars = [outcome.report for outcome in before] + [report_so_far(drill)]
                live.update(Group(timelines([bar for bar in bars if bar]), text), refresh=True)
            else:
                console.print(text)

        return drill.run(faults, show)


def report_so_far(drill: Drill) -> dict[str, Any]:
    """Empty before anything has begun."""
    ledger = drill.known()
    return summary(ledger, rank_ledgers=False) if ledger else {}


def doing(drill: Drill, passed: float) -> Text:
    """One line."""
    ledger = drill.known()
    attempts = len(ledger.attempts) if ledger else 0
    return Text(f"{passed:4.0f} s  {drill.arm.name}: step {drill.step + 1} of {drill.steps}, attempt {attempts}", "dim")


# --- what came of it -------------------------------------------------------------------------------------------------

LIFE = [
    *(bucket for bucket in Bucket if bucket.startswith(("start.", "recover."))), Bucket.WASTE_REPEATED_STEPS,
    Bucket.TRAINING_EFFECTIVE, Bucket.WASTE_UNSAVED_STEPS,
    *(bucket for bucket in Bucket if bucket.startswith("waste.") and bucket not in (
        Bucket.WASTE_REPEATED_STEPS, Bucket.WASTE_UNSAVED_STEPS)),
    *(bucket for bucket in Bucket if bucket.startswith(("shutdown.", "unattributed"))),
]  # fmt: skip
"""In the order in which an attempt spends its time, more or less: what is spread over the loop is drawn behind it."""


def stretches(report: dict[str, Any]) -> Iterator[tuple[float, float, Bucket]]:
    """When each stretch of a job began, how long it took, and what it was."""
    for attempt in report["attempts"]:
        at = attempt["begin_s"]
        for bucket in LIFE:
            seconds = attempt["ledger"].get(str(bucket), 0.0)
            if seconds:
                yield at, seconds, bucket
                at += seconds


def timelines(reports: list[dict[str, Any]]) -> RenderableType:
    """Jobs on one time axis."""
    longest = max((report["wall_s"] for report in reports), default=1.0)
    lines: list[RenderableType] = []
    for report, name in zip(reports, ("plain", "headway"), strict=False):
        cells = [Text(" ")] * CELLS
        for begin, seconds, bucket in stretches(report):
            first, last = (int(CELLS * at / longest) for at in (begin, begin + seconds))
            for cell in range(first, min(max(last, first + 1), CELLS)):
                cells[cell] = Text("█", COLOURS[bucket])
        line = Text.assemble(f"{name:8}", *cells, f" {report['wall_s']:.0f} s")
        lines += [line]
    legend = Text("        ")
    for name, colour in GROUP_COLOURS.items():
        if any(group(bucket) == name for report in reports for _, _, bucket in stretches(report)):
            legend.append("■ ", colour).append(f"{name}  ", "dim")
    return Group(*lines, legend)


def rows(report: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """What is compared: the figure, and how it is written."""
    ledger, recoveries = report["ledger"], report["time_to_recover_s"]
    shut = sum(seconds for key, seconds in ledger.items() if key.startswith("shutdown."))
    mean = sum(recoveries) / len(recoveries) if recoveries else 0.0
    times = {
        "wall time": report["wall_s"],
        "time to start": report["time_to_start_s"],
        "time to recover, a fault": mean,
        "repeated steps": ledger["waste.repeated_steps"] + ledger["waste.unsaved_steps"],
        "blocked by checkpoints": ledger["waste.checkpoint_blocking"],
        "waiting for data": ledger["waste.data_wait"],
        "shutdown": shut,
        "unattributed": report["unattributed_s"],
    }
    ett = (report["ett_percent"], f"{report['ett_percent']:.1f}%")
    repeated = report["steps"]["repeated"] + report["steps"]["unsaved"]
    told = {"effective training time": ett} | {name: (seconds, duration(seconds)) for name, seconds in times.items()}
    told["repeated steps"] = (times["repeated steps"], f"{duration(times['repeated steps'])} ({repeated:.0f})")
    return told


def table(plain: dict[str, Any], ours: dict[str, Any]) -> Table:
    """Both, side by side."""
    found = Table(box=None, header_style="dim", pad_edge=False)
    found.add_column()
    for name in ("plain torch", "headway"):
        found.add_column(name, justify="right")
    found.add_column("plain / headway", justify="right")
    for name, (theirs, text) in rows(plain).items():
        mine, mine_text = rows(ours)[name]
        ratio = f"{theirs / mine:.1f}×" if mine > 0.001 and "effective" not in name and theirs > 0.01 else ""
        found.add_row(name, text, Text(mine_text, "bold"), ratio)
    return found


def draw(reports: list[dict[str, Any]], path: Path) -> None:
    """Both jobs on one time axis, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 2.9), layout="constrained")
    seen: dict[Bucket, float] = {}
    for at, report in enumerate(reports):
        for begin, seconds, bucket in stretches(report):
            axes.barh(-at, seconds, left=begin, height=0.62, color=COLOURS[bucket])
            seen[bucket] = max(seen.get(bucket, 0.0), seconds)
        told = f" ETT {report['ett_percent']:.0f}%, {report['wall_s']:.0f} s"
        axes.text(report["wall_s"], -at, told, va="center", fontsize=10, weight="bold")
    axes.set_yticks([0, -1], ["plain torch", "headway"], fontsize=11)
    axes.set_xlim(0, 1.17 * max(report["wall_s"] for report in reports))
    axes.set_xlabel("seconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    shown = [bucket for bucket in LIFE if seen.get(bucket, 0.0) > 0.006 * reports[0]["wall_s"]]
    patches = [matplotlib.patches.Patch(color=COLOURS[bucket], label=LABELS[bucket]) for bucket in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_report(report: dict[str, Any], path: Path) -> None:
    """`headway report` as a picture."""
    paper = Console(record=True, width=112, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    paper.print(render(report))
    picture = paper.export_svg(title="headway report", theme=MONOKAI)
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.S)  # a picture loads nothing from elsewhere
    path.write_text(picture.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas"), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
