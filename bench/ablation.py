"""What each technique gives: the DLRM with headway, and again with one technique switched off, under the same faults.

    make bench-ablation                           # 35 minutes, on an idle machine

For each: the seconds that a start, a fault and the end take longer without it, and the points of effective training
time that a job of thirty minutes with a fault every four would lose.
"""

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench import ett
from bench.drill import EXAMPLE, WARM, Arm, headway_arm
from bench.ett import EVERY_S, Losses, losses_of, turns
from bench.measure import machine

EVERY = EVERY_S["a fault every 4 minutes"]
HERE = Path(__file__).parent


def ablated(technique: str, name: str) -> Arm:
    """The script, run by `ablated.py`."""
    return replace(
        WARM, name=f"without {name}", script=f"{HERE / 'ablated.py'}", before=(technique, str(EXAMPLE / WARM.script))
    )


ARMS = [
    headway_arm("without warm workers and imports ahead", "--cold"),
    ablated("memory-tier", "the memory tier"),
    ablated("auto-interval", "the auto interval"),
    headway_arm("without the compile bundle", "--without", "compile-cache"),
    ablated("fast-batch", "the fast batch"),
    headway_arm("without overlap", HEADWAY_SERIAL="1"),
    ablated("read-ahead", "reading ahead"),
    ablated("plan-cache", "the plan cache"),
    ablated("local-metadata", "local metadata"),
    ablated("publishing-elsewhere", "publishing elsewhere"),
]


SAVE_OTHERWISE = ("without the memory tier", "without the auto interval")
"""The arms in which it is saved at other times, or restored from elsewhere."""


def pooled(losses: dict[str, Losses]) -> dict[str, Losses]:
    """The same, but all arms that save alike have trained the same steps again, and lost the same inside the loop: what
    they did together. Where between two saves a fault comes is chance, and what they lack has no say in it."""
    alike = [lost for name, lost in losses.items() if name not in SAVE_OTHERWISE]
    parts = {
        part: [sample for lost in alike for sample in getattr(lost, part)] for part in ("again", "steady", "blocking")
    }
    return {name: lost if name in SAVE_OTHERWISE else replace(lost, **parts) for name, lost in losses.items()}


def gains(losses: dict[str, Losses]) -> dict[str, dict[str, float]]:
    """What is lost more without each technique."""
    whole, found = losses[WARM.name], {}
    for name, lost in losses.items():
        if name != WARM.name:
            found[name.removeprefix("without ")] = {
                "points": whole.ett_percent(EVERY) - lost.ett_percent(EVERY),
                "start_s": median(lost.start) - median(whole.start),
                "fault_s": lost.mean_fault() - whole.mean_fault(),
                "hour_s": 3600 * (_share(lost) - _share(whole)),
                "end_s": median(lost.shutdown) - median(whole.shutdown),
            }
    return dict(sorted(found.items(), key=lambda each: -each[1]["points"]))


def _share(lost: Losses) -> float:
    """Lost in a second of training."""
    return median(lost.steady) + median(lost.blocking)


def draw(found: dict[str, dict[str, float]], path: Path) -> None:
    """Points of effective training time, by technique."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(found) + 0.9), layout="constrained")
    names = list(found)
    drawn = axes.barh(range(len(names)), [found[name]["points"] for name in names], color="#12b886")
    axes.bar_label(drawn, fmt="%+.2f", fontsize=8, padding=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(0, color="#4f5763", linewidth=0.8)
    axes.margins(x=0.12)
    axes.set_xlabel("points of effective training time that it gives a 30-minute job with a fault every 4 minutes")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> int:
    """`python -m bench.ablation [--rounds N]`"""
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="jobs of each arm")
    asked = parser.parse_args()
    ett.OUT = out = ett.OUT.with_name("ablation")
    shutil.rmtree(out, ignore_errors=True)
    jobs = turns([WARM, *ARMS], asked.rounds)
    losses = {name: losses_of(outcomes) for name, outcomes in jobs.items()}
    found = gains(pooled(losses))
    print(f"\n{'what it gives':34}{'points':>9}{'a start':>10}{'a fault':>10}{'an hour':>10}{'the end':>10}")
    for name, gain in found.items():
        seconds = "".join(f"{gain[key]:+8.1f} s" for key in ("start_s", "fault_s", "hour_s", "end_s"))
        print(f"{name:34}{gain['points']:+9.2f}{seconds}")
    draw(found, out / "ablation.png")
    told = {
        "machine": machine(),
        "rounds": asked.rounds,
        "gains": found,
        "losses": {n: vars(v) for n, v in losses.items()},
    }
    (out / "ablation.json").write_text(json.dumps(told, indent=1))
    print(f"\n{out / 'ablation.json'}, ablation.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
