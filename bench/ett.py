"""What a DLRM loses to starts, to faults and in between, and what that makes of a job of thirty minutes.

    make bench-ett                                # within an hour, on an idle machine

Plain torchrun, torchrun with the best that stock torch has, nvidia's ft_launcher where it runs, headway on a machine
that never saw such a job, and headway on one that has: all train the example of `examples/dlrm` through the same three
faults, and take turns. From what each lost comes the effective training time of a job of thirty minutes. Then one such
job is run, with headway, and its last state compared with that of a job nothing ever happened to.
"""

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.__main__ import print_table
from bench.drill import BETTER, FAIR, NVIDIA, PLAIN, WARM, Arm, Drill, Fault, Outcome, arms, same_state
from bench.measure import Row, machine

OUT = Path("out", "ett").absolute()
STEP_S, SAVE_EVERY = 0.25, 48
"""The shortest a step may be, as with an accelerator that the host waits for; and after how many steps the plain arms
save: 12 s, near the best for what their saves cost and a fault every four minutes."""
KINDS = ("kill", "exception", "notice")
AFTER = (1 / 6, 1 / 2, 5 / 6)
"""How far into an interval of the plain arms the faults come: on average half of it is lost."""
STEPS = 4 * SAVE_EVERY + 8
JOB_S = 1800.0
EVERY_S = {"a fault every 4 minutes": 240.0, "a fault every minute": 60.0}


def faults(number: int) -> list[Fault]:
    """One of each kind; over three rounds, each kind at each place of an interval."""
    places = [round((interval + after) * SAVE_EVERY) for interval, after in enumerate(AFTER, 1)]
    return [Fault(KINDS[(at + number) % 3], place) for at, place in enumerate(places)]


# --- what arms lose --------------------------------------------------------------------------------------------------

BLOCKING = "waste.checkpoint_blocking"
STEADY = ("waste.data_wait", "waste.recompilation", "waste.evaluation", "waste.stall")


@dataclass
class Losses:
    """What an arm has lost, in seconds, in each of its jobs."""

    lose: tuple[str, ...]
    """The kinds of faults after which steps are trained again: after a notice not, if all is saved before."""
    finds_interval: bool
    """Whether it finds its interval between saves itself."""
    start: list[float]
    shutdown: list[float]
    recover: dict[str, list[float]]
    """Until it trained again, by kind of fault."""
    again: list[float]
    """Steps trained again, after each fault that loses any."""
    faults: list[float]
    """All that was lost to a fault, the mean of a job's."""
    blocking: list[float]
    """By checkpoints, in a second of training."""
    steady: list[float]
    """Otherwise, in a second of training."""
    step: list[float]
    """What a new step takes, with what is lost in between."""
    unattributed: list[float]
    """Percent."""

    def fault(self, kind: str, interval: float = 1.0) -> float:
        """Lost to one fault of this kind; with so many times the interval between saves that was measured."""
        return median(self.recover[kind]) + interval * self.repeated(kind)

    def repeated(self, kind: str) -> float:
        """Of that, steps trained again: of all faults that lose any, since where they come in an interval decides."""
        return mean(self.again) if kind in self.lose else 0.0

    def mean_fault(self, interval: float = 1.0) -> float:
        """Lost to one fault, if the kinds are as frequent as each other."""
        return mean(self.fault(kind, interval) for kind in KINDS)

    def ett_percent(self, every_s: float, job_s: float = JOB_S, interval: float = 1.0) -> float:
        """Of a job of so long with a fault of each kind in turn, one every so many seconds."""
        count = math.ceil(job_s / every_s) - 1
        lost = median(self.start) + median(self.shutdown) + count * self.mean_fault(interval)
        share = median(self.steady) + median(self.blocking) / interval
        return 100 * max(0.0, job_s - lost) / (1 + share) / job_s

    def best_percent(self, every_s: float) -> float:
        """The same with the fixed interval that is best for it, as if that had been known."""
        if self.finds_interval:
            return self.ett_percent(every_s)
        return max(self.ett_percent(every_s, interval=2 ** (power / 4)) for power in range(-10, 5))


def losses_of(outcomes: list[Outcome]) -> Losses:
    """From the ledgers of an arm's jobs."""
    recover: dict[str, list[float]] = {kind: [] for kind in KINDS}
    again: list[float] = []
    lose = ("kill", "exception") if outcomes[0].arm.is_headway else KINDS
    for outcome in outcomes:
        for kind in KINDS:
            for until, repeated in outcome.lost_to(kind):
                recover[kind].append(until + (0.0 if kind in lose else repeated))
                again += [repeated] if kind in lose else []
    trained = [outcome.seconds("training.") for outcome in outcomes]
    between = [outcome.seconds(BLOCKING, *STEADY) for outcome in outcomes]
    steps = [outcome.report["steps"]["new"] for outcome in outcomes]
    return Losses(
        lose=lose,
        finds_interval=outcomes[0].arm.is_headway,
        start=[outcome.seconds("start.") for outcome in outcomes],
        shutdown=[outcome.seconds("shutdown.") for outcome in outcomes],
        recover=recover,
        again=again,
        faults=[mean(sum(lost) for kind in KINDS for lost in outcome.lost_to(kind)) for outcome in outcomes],
        blocking=[outcome.seconds(BLOCKING) / seconds for outcome, seconds in zip(outcomes, trained, strict=True)],
        steady=[outcome.seconds(*STEADY) / seconds for outcome, seconds in zip(outcomes, trained, strict=True)],
        step=[(lost + seconds) / count for lost, seconds, count in zip(between, trained, steps, strict=True)],
        unattributed=[100 * outcome.seconds("unattributed") / outcome.report["wall_s"] for outcome in outcomes],
    )


def turns(chosen: list[Arm], rounds: int) -> dict[str, list[Outcome]]:
    """Every arm's jobs. What a warm arm finds was left by a job of it that does not count."""
    found: dict[str, list[Outcome]] = {arm.name: [] for arm in chosen}
    for arm in chosen:
        if arm.is_warm:
            job(arm, "warming", 30, [])
    for number in range(rounds):
        for at in range(len(chosen)):
            arm = chosen[(number + at) % len(chosen)]
            outcome = job(arm, str(number), STEPS, faults(number))
            found[arm.name].append(outcome)
            lost = ", ".join(f"{kind} {sum(outcome.lost_to(kind)[0]):.1f}" for kind in KINDS)
            print(f"  {arm.name}: start {outcome.seconds('start.'):.1f} s, lost to {lost}", flush=True)
    return found


def job(
    arm: Arm, name: str, steps: int, due: list[Fault], step_s: float = STEP_S, save_every: int = SAVE_EVERY
) -> Outcome:
    """One job of an arm, and whatever it leaves running."""
    words = arm.name.replace(" ", "-").replace(",", "")
    place = OUT / f"{words}-machine" if arm.is_warm else OUT / f"{words}-{name}-machine"
    drill = Drill(arm, OUT / f"{words}-{name}", place, steps=steps, save_every=save_every, step_s=step_s)
    outcome = drill.run(due)
    drill.wait_for_publisher(patient=False)
    return outcome


# --- the real thing --------------------------------------------------------------------------------------------------


def thirty_minutes(losses: Losses, every_s: float, job_s: float) -> tuple[Outcome, Outcome]:
    """A job with headway and a fault every so many seconds, and one that nothing happens to, of the same steps."""
    a_step, count = median(losses.step), math.ceil(job_s / every_s) - 1
    between = round((every_s - losses.mean_fault()) / a_step)
    steps = round((job_s - median(losses.start) - count * losses.mean_fault()) / a_step)
    due = [Fault(KINDS[number % 3], (number + 1) * between) for number in range(count)]
    real = job(WARM, "real", steps, [fault for fault in due if fault.at < steps - 20])
    calm = job(PLAIN, "calm", steps, [], step_s=0.0, save_every=steps)
    return real, calm


# --- telling ---------------------------------------------------------------------------------------------------------


def told(losses: dict[str, Losses]) -> str:
    """A table of what each arm loses: medians, and the least and most of all rounds."""
    lines = [["", "a start", *(f"a {kind}" for kind in KINDS), "of that again", "an hour", "the end", *EVERY_S]]
    for name, lost in losses.items():
        hour = [3600 * (one + other) for one, other in zip(lost.steady, lost.blocking, strict=True)]
        cells = [spread(lost.start), *(f"{lost.fault(kind):.1f} s" for kind in KINDS), spread(lost.again, mean)]
        cells += [spread(hour), spread(lost.shutdown)]
        lines.append([name, *cells, *(f"{lost.best_percent(every_s):.1f}%" for every_s in EVERY_S.values())])
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    return "\n".join(
        "  ".join(c.rjust(w) if at else c.ljust(w) for at, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def spread(seconds: list[float], middle: Callable[[list[float]], float] = median) -> str:
    """A figure, and between which it lies."""
    return f"{middle(seconds):.1f} s ({min(seconds):.1f}…{max(seconds):.1f})"


def bars(losses: dict[str, Losses], found: dict[str, list[Outcome]]) -> list[Row]:
    """What has to hold of what is lost."""
    ours, plain = losses[WARM.name], losses[PLAIN.name]
    peers = {name: lost for name, lost in losses.items() if not name.startswith("headway")}
    best = min(peers, key=lambda name: median(peers[name].faults))
    note = ", ".join(f"{kind} {plain.fault(kind) / ours.fault(kind):.1f}×" for kind in KINDS)
    steps = {name: {json.dumps(sorted(each.losses.items())) for each in many} for name, many in found.items()}
    same = len(set().union(*steps.values())) - 1
    unattributed = [percent for lost in losses.values() for percent in lost.unattributed]
    return [
        Row("lost to a fault, all kinds", "s", ours.faults, plain.faults, "torchrun", times=5, note=note),
        Row("…", "s", ours.faults, peers[best].faults, f"the best peer: {best}", times=2),
        Row("lost to a warm start", "s", ours.start, plain.start, "torchrun", times=2),
        Row("not attributed, most of all jobs", "%", [max(unattributed)], at_most=1),
        Row("jobs whose losses differ, of all arms", "jobs", [float(same)], at_most=0),
    ]


def real_bars(real: Outcome, calm: Outcome, predicted: float) -> list[Row]:
    """What has to hold of the real job."""
    report, different = real.report, same_state(real.checkpoint, calm.checkpoint)
    ett, apart = report["ett_percent"], sum(real.losses[step] != loss for step, loss in calm.losses.items())
    wall, count = report["wall_s"], len(real.faults)
    name = f"not training in a real job of {wall / 60:.1f} minutes with {count} faults"
    return [
        Row(name, "%", [100 - ett], at_most=3, note=f"ETT {ett:.2f}%, predicted {predicted:.2f}%"),
        Row("… off what was predicted", "points", [abs(ett - predicted)], at_most=1),
        Row("… not attributed", "%", [100 * report["unattributed_s"] / wall], at_most=1),
        Row("… losses that differ from an undisturbed job's", "steps", [float(apart)], at_most=0),
        Row(
            "… tensors of the last state that do",
            "tensors",
            [float(len(different))],
            at_most=0,
            note=", ".join(different[:3]),
        ),
    ]


def draw(losses: dict[str, Losses], path: Path) -> None:
    """What each arm loses to a start and to each kind of fault, and what that makes of thirty minutes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 3.6), layout="constrained", width_ratios=(3, 2))
    names, height = list(losses), 0.2
    parts = {"a start": "#3f7fe0", "a kill": "#e0671c", "an exception": "#b8382e", "a notice": "#e3a412"}
    for at, (part, colour) in enumerate(parts.items()):
        seconds = [median(lost.start) if part == "a start" else lost.fault(part.split()[1]) for lost in losses.values()]
        places = [-row + (1.5 - at) * height for row in range(len(names))]
        samples = [lost.start if part == "a start" else lost.recover[part.split()[1]] for lost in losses.values()]
        ranges = [[median(each) - min(each) for each in samples], [max(each) - median(each) for each in samples]]
        drawn = left.barh(places, seconds, height, color=colour, label=part, xerr=ranges, error_kw={"linewidth": 0.8})
        left.bar_label(drawn, fmt="%.1f", fontsize=7, padding=2)
    left.set_yticks([-row for row in range(len(names))], names)
    left.set_xlabel("seconds lost to")
    left.legend(frameon=False, fontsize=8)
    for at, (what, every_s) in enumerate(EVERY_S.items()):
        places = [-row + (0.5 - at) * 2 * height for row in range(len(names))]
        shares = [lost.best_percent(every_s) for lost in losses.values()]
        drawn = right.barh(places, shares, 2 * height, color=("#12b886", "#0c7c5c")[at], label=what)
        right.bar_label(drawn, fmt="%.1f%%", fontsize=8, padding=2)
    right.set_yticks([])
    right.set_xlim(0, 112)
    right.set_xlabel("effective training time of a 30-minute job")
    right.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def as_json(losses: dict[str, Losses], rows: Iterable[Row], real: Outcome | None) -> dict[str, Any]:
    """Everything, samples included."""
    kept = real and {
        "ledger": real.report["ledger"], "ett_percent": real.report["ett_percent"], "steps": real.report["steps"],
        "faults": {kind: real.lost_to(kind) for kind in KINDS},
    }  # fmt: skip
    return {
        "machine": machine(), "fair": FAIR, "best_settings": BETTER, "step_s": STEP_S, "save_every": SAVE_EVERY,
        "arms": {
            name: vars(lost) | {
                "fault_s": {kind: lost.fault(kind) for kind in KINDS},
                "ett_percent": {what: lost.best_percent(every_s) for what, every_s in EVERY_S.items()},
            }
            for name, lost in losses.items()
        },
        "real": kept, "bars": [row.as_json() for row in rows],
    }  # fmt: skip


def tell(losses: dict[str, Losses], rows: list[Row], real: Outcome | None = None) -> None:
    """Prints and writes all that is known so far."""
    print(f"\nSeconds lost to\n{told(losses)}\n")
    print_table(rows)
    draw(losses, OUT / "ett.png")
    (OUT / "ett.json").write_text(json.dumps(as_json(losses, rows, real), indent=1))


def main() -> int:
    """`python -m bench.ett [--rounds N] [--minutes M]`"""
    parser = argparse.ArgumentParser(prog="python -m bench.ett", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="jobs of each arm")
    parser.add_argument("--minutes", type=float, default=30.0, help="of the real job; 0: none")
    asked = parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    began, every_s, job_s = time.monotonic(), EVERY_S["a fault every 4 minutes"], 60 * asked.minutes
    print(f"The plain arms are given: {FAIR}. The best settings add {BETTER}.")
    if NVIDIA not in arms():
        print("ft_launcher is left out: it cannot be run here.")
    found = turns(arms(), asked.rounds)
    losses = {name: losses_of(outcomes) for name, outcomes in found.items()}
    rows = bars(losses, found)
    tell(losses, rows)
    if asked.minutes:
        real, calm = thirty_minutes(losses[WARM.name], every_s, job_s)
        rows += real_bars(real, calm, losses[WARM.name].ett_percent(every_s, job_s))
        tell(losses, rows, real)
    missed = [row.name for row in rows if row.met is False]
    print(f"\n{OUT / 'ett.json'}, ett.png: {(time.monotonic() - began) / 60:.0f} minutes.", end=" ")
    print(f"Missed: {'; '.join(missed)}." if missed else "Every bar is met.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
