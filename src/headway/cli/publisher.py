"""The process that publishes: `python -m headway.cli.publisher FOLDER`. Whoever supervises it tries again."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.checkpoint.source import BadCheckpoint
from headway.config import Settings
from headway.errors import InputError
from headway.events.process import without_logins
from headway.events.vocabulary import Told, clean_text
from headway.paths import JobPaths
from headway.publish.out import Rejected
from headway.publish.publisher import EXIT_INPUT, EXIT_REJECTED, Publisher
from headway.publish.request import Desk, Phase, Request, State
from headway.run import Run, join_as_publisher


def main(folder: str) -> int:
    """Publishes. Returns 0; 3 if it was rejected, 2 if it cannot be as it was asked for, 1 after any other failure. All
    but the last are in the state, too, and final; after that one, whoever supervises decides."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it hangs, if it does
    desk = Desk(Path(folder).absolute())
    os.environ["HEADWAY_DISABLE"] = "1"
    with suppress(OSError):  # the trainer's folder may be on another machine
        os.chdir(desk.request.folder)
    tried = _Try(desk.request, _joined(desk.request.job))
    try:
        version = (publisher := Publisher(desk, span=tried.run.span, ledger=report_of)).publish()
    except (Rejected, InputError, BadCheckpoint) as error:
        rejected, problem = isinstance(error, Rejected), str(error)
        if isinstance(error, BadCheckpoint):
            problem = f"{desk.request.root}/{desk.request.checkpoint}: {problem}. Publish another checkpoint."
        phase: Phase = "rejected" if rejected else "failed"
        tried.ended(phase, desk.change(phase=phase, problem=problem, doing=""))
        return EXIT_REJECTED if rejected else EXIT_INPUT
    except BaseException as error:
        traceback.print_exc()
        tried.ended("failed", replace(desk.state(), problem=f"{type(error).__name__}: {error}"))
        return 1
    tried.ended("published", desk.state(), step=version.step, steps=publisher.steps)
    tried.run.finish()
    return 0


def _joined(job: str) -> Run:
    """This process's part in the job whose model it publishes; if that is not known here, it records nothing. What it
    starts itself has no part in the job."""
    if job and JobPaths(Settings.from_environment().home_folder, job).folder.is_dir():
        os.environ["HEADWAY_JOB"] = job
        del os.environ["HEADWAY_DISABLE"]
    run = join_as_publisher()
    os.environ["HEADWAY_DISABLE"] = "1"
    return run


class _Try:
    """What is told, in the job's journal, of one process that publishes."""

    def __init__(self, request: Request, run: Run) -> None:
        self.run, self._request, self._began = run, request, time.monotonic()
        self._mark("running")

    def ended(self, outcome: str, state: State, **more: Any) -> None:
        told = {
            "version": state.version,
            "why": clean_text(without_logins(state.problem)),
            "seconds": time.monotonic() - self._began,
        }
        self._mark(outcome, **told, **more)

    def _mark(self, outcome: str, **told: Any) -> None:
        request = self._request
        whose = {"id": request.id, "recipe": request.what.recipe, "device": request.device}
        self.run.mark(Told.PUBLISHED, outcome=outcome, accelerators=request.accelerators, **whose, **told)


def report_of(job: str) -> Mapping[str, Any] | None:
    """Return the report of a job; None if it has none here.

    It is made in a process of its own. This one writes to one of the job's journals, and would lose its lock on it by
    closing the file that it has read: then everybody else would take this process for a dead one.
    """
    words = [sys.executable, "-P", "-m", "headway", "report", "--json", "--", job]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:  # a model is worth more than the report on its card
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        print(f"headway: the card has no report of {job} ({said[-1]}).", file=sys.stderr)
        return None
    return dict(json.loads(done.stdout))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
