"""The demo: trains a small DLRM on two ranks, kills one of them, and reports where the time went.

Runs `torchrun examples/train_dlrm.py` with one real SIGKILL, shows the report live while it trains, and again at the
end. Everything but the job's journal goes to out/demo.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.terminal_theme import MONOKAI

from headway.cli.source import Source, open_job
from headway.errors import UnknownJob
from headway.observe.summary import summary
from headway.observe.terminal import render

HERE = Path(__file__).parent
OUT = HERE.parent / "out" / "demo"


def start(job: str) -> subprocess.Popen[bytes]:
    """Starts training; what it prints goes to a log."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    environ = os.environ | {
        "HEADWAY_JOB": job,
        "OMP_NUM_THREADS": "1",
        # Stock torchrun may not come back after a failure without it: restarted ranks read the old ones' addresses.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # A cache of its own, so that every demo shows a cold start first and a warm one after the failure.
        "TORCHINDUCTOR_CACHE_DIR": str(OUT / "compile-cache"),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "--monitor-interval", "0.1", str(HERE / "train_dlrm.py")]
    command += ["--kill-at", "250", "--folder", str(OUT)]
    with open(OUT / "log.txt", "wb") as log:
        return subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)


def look(source: Source | None, job: str) -> tuple[Source | None, dict[str, Any] | None]:
    """The report so far; nothing before the first rank has begun."""
    try:
        source = source or open_job(job)
        return source, summary(source.ledger())
    except UnknownJob:
        return None, None


def _doing(report: dict[str, Any] | None) -> str:
    return f"attempt {len(report['attempts']) - 1}, {report['steps']['new']:.0f} steps" if report else "starting"


def follow(training: subprocess.Popen[bytes], job: str, console: Console) -> None:
    """Shows the report while the job runs: live on a terminal, else a line now and then."""
    source, began, told = None, time.monotonic(), 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while training.poll() is None:
            source, report = look(source, job)
            passed = time.monotonic() - began
            if report is not None and console.is_terminal:
                live.update(render(report), refresh=True)
            elif passed - told > 10:
                told = passed
                console.print(f"{passed:4.0f} s  {_doing(report)}")
            time.sleep(0.5)


def draw(report: RenderableType, path: Path) -> None:
    """The report as a picture: what README shows was made here."""
    paper = Console(record=True, width=112, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    paper.print(report)
    picture = paper.export_svg(title="headway report", theme=MONOKAI)
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.S)  # a picture loads nothing from elsewhere
    path.write_text(picture.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas"), encoding="utf-8")


def main() -> int:
    console = Console()
    job = f"demo-{time.strftime('%H%M%S')}"
    console.print("Training a small DLRM: 2 ranks, torch.compile, a checkpoint every 100 steps.")
    console.print("Rank 1 kills itself at step 250, torchrun restarts both. About two minutes.\n")
    training = start(job)
    try:
        follow(training, job, console)
    except KeyboardInterrupt:
        training.terminate()
        training.wait()
        return 130
    if training.returncode != 0:
        console.print(f"Training failed with exit code {training.returncode}. The end of {OUT / 'log.txt'}:")
        console.print((OUT / "log.txt").read_text()[-2000:], markup=False)
        return 1
    report = render(summary(open_job(job).ledger()))
    console.print(report)
    draw(report, OUT / "report.svg")
    console.print("\nNext: [cyan].venv/bin/headway report --html out/demo/report.html[/cyan] for the page,")
    console.print("      [cyan].venv/bin/headway report --perfetto out/demo/trace.json[/cyan] for ui.perfetto.dev,")
    console.print("      and examples/train_dlrm.py for the lines that a training script needs.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
