"""The demo: trains a small DLRM on two ranks, kills one of them, and reports where the time went.

Runs `torchrun examples/train_dlrm.py` with one real SIGKILL, shows the report live while it trains, and again at the
end. Everything but the job's journal goes to out/demo.
"""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.terminal_theme import MONOKAI

from headway.accounting.ledger import Ledger
from headway.cli.source import Source, open_job
from headway.errors import UnknownJob
from headway.observe.summary import summary
from headway.observe.terminal import render

KILL_AT = 250
HERE = Path(__file__).parent
OUT = HERE.parent / "out" / "demo"


def start(job: str) -> subprocess.Popen[bytes]:
    """Starts training; what it prints goes to a log."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        # Stock torchrun may not come back after a failure without it: restarted ranks read the old ones' addresses.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # A cache of its own, so that every demo shows a cold start first and a warm one after the failure.
        "TORCHINDUCTOR_CACHE_DIR": str(OUT / "compile-cache"),
    }
    command = [sys.executable, "-m", "headway", "exec", "--job", job]
    command += [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "--monitor-interval", "0.1", str(HERE / "train_dlrm.py"), "--folder", str(OUT)]
    with open(OUT / "log.txt", "wb") as log:
        return subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)


def look(source: Source | None, job: str) -> tuple[Source | None, Ledger | None]:
    """The job so far; nothing before the first process has begun."""
    try:
        source = source or open_job(job)
        return source, source.ledger()
    except UnknownJob:
        return None, None


def kill(ledger: Ledger) -> bool:
    """Kills rank 1, if it has trained far enough: a real SIGKILL, from outside."""
    if sum(ledger.steps.values()) < KILL_AT or 1 not in ledger.attempts[-1].attempt.members:
        return False
    os.kill(ledger.attempts[-1].attempt.members[1].process.pid, signal.SIGKILL)
    return True


def _doing(ledger: Ledger | None) -> str:
    return f"attempt {len(ledger.attempts) - 1}, {sum(ledger.steps.values()):.0f} steps" if ledger else "starting"


def follow(training: subprocess.Popen[bytes], job: str, console: Console) -> None:
    """Shows the report while the job runs: live on a terminal, else a line now and then."""
    source, began, told, killed = None, time.monotonic(), 0.0, False
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while training.poll() is None:
            source, ledger = look(source, job)
            passed = time.monotonic() - began
            killed = killed or (ledger is not None and kill(ledger))
            if ledger is not None and console.is_terminal:
                live.update(render(summary(ledger)), refresh=True)
            elif passed - told > 10:
                told = passed
                console.print(f"{passed:4.0f} s  {_doing(ledger)}")
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
    console.print("headway exec torchrun … train_dlrm.py: plain torch, 2 ranks, a checkpoint every 100 steps.")
    console.print(f"After step {KILL_AT} rank 1 is killed, and torchrun restarts both. About two minutes.\n")
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
    console.print("      [cyan].venv/bin/headway exec python your_script.py[/cyan] for a job of yours.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
