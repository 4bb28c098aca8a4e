"""Runs the benchmarks, prints one table, and writes all samples to out/bench.json."""

import argparse
import json
from pathlib import Path
from types import ModuleType

from bench import (
    autotune,
    checkpoint,
    compile,
    imports,
    instrument,
    interval,
    programs,
    publish,
    recover,
    report,
    scale,
    size,
    span,
    startup,
    steps,
    truth,
    waste,
)
from bench.measure import Row, machine

TOPICS: dict[str, ModuleType] = {
    "span": span, "steps": steps, "report": report, "scale": scale, "size": size, "import": imports,
    "instrument": instrument,
    "programs": programs,
    "truth": truth,
    "recover": recover,
    "interval": interval,
    "checkpoint": checkpoint,
    "waste": waste,
    "autotune": autotune,
    "compile": compile,
    "startup": startup,
    "publish": publish,
}  # fmt: skip


def main() -> None:
    """`python -m bench [name …] [--quick]`, or `python -m bench truth [case …]`"""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"any of {', '.join(TOPICS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller jobs: to see that it runs")
    asked = parser.parse_args()
    cases: list[str] = []
    if asked.name[:1] == ["truth"]:
        asked.name, cases = asked.name[:1], asked.name[1:]
    unknown = set(asked.name) - set(TOPICS)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(TOPICS)}")
    told = {"machine": machine(), "quick": asked.quick, "rows": []}
    rows: list[Row] = []
    for name in asked.name or TOPICS:
        print(f"{name} …", flush=True)
        found = truth.run(asked.quick, cases) if name == "truth" else TOPICS[name].run(asked.quick)
        rows += found
        told["rows"] += [{"topic": name} | row.as_json() for row in found]
        out = Path("out", "bench.json")
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(told, indent=1))
    print_table(rows)
    missed = [row.name for row in rows if row.met is False]
    verdict = f"Missed: {'; '.join(missed)}." if missed else "Every bar is met." if rows else "Nothing was measured."
    print(f"\n{out}: all samples. {verdict}")


def print_table(rows: list[Row]) -> None:
    """Name, measured (median and range), peer or floor, ratio, bar, met."""
    lines = [["", "headway (range)", "peer or floor", "ratio", "bar", "met"], *(row.cells() for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(6)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for row in rows:
        if row.note:
            print(f"  {row.name}: {row.note}")


if __name__ == "__main__":
    main()
