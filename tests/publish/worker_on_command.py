"""A publisher that does what it is told, one thing a try: `worker_on_command.py DESK step=a+kill sleep publish`.

With `supervise` before that, it is run under a supervisor, as `headway publish run` does. The variable `GRACE_S` sets
the supervisor's time of grace.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from headway.publish import supervisor as supervising
from headway.publish.request import Desk
from headway.publish.supervisor import End, Retry, Stop, supervise


class Worker:
    """What can be commanded; each takes what follows its `=`."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    def published(self, version: str) -> None:
        self.desk.change(phase="published", version=version or "v1")

    def publish(self, version: str) -> None:
        self.published(version)
        sys.exit(0)

    def input(self, problem: str) -> None:
        self.desk.change(phase="failed", problem=problem)
        sys.exit(2)

    def reject(self, problem: str) -> None:
        self.desk.change(phase="rejected", problem=problem)
        sys.exit(3)

    def step(self, name: str) -> None:
        self.desk.change(steps=(*self.desk.state().steps, name))

    def say(self, text: str) -> None:
        print(text)

    def flood(self, megabytes: str) -> None:
        for number in range(int(megabytes) * 1024):
            sys.stderr.write(f"{number:>8} {'x' * 1014}\n")

    def fail(self, text: str) -> None:
        raise ValueError(text)

    def exit(self, code: str) -> None:
        sys.exit(int(code))

    def kill(self, _: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def burn(self, seconds: str) -> None:
        until_s = time.monotonic() + float(seconds)
        while time.monotonic() < until_s:
            pass

    def sleep(self, seconds: str) -> None:
        time.sleep(float(seconds or 600))

    def tick(self, seconds: str) -> None:
        for number in range(int(seconds) * 5):
            self.desk.change(doing=f"waiting, {number}")
            time.sleep(0.2)

    def deaf(self, _: str) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def stacks(self, _: str) -> None:
        faulthandler.register(signal.SIGUSR1)

    def child(self, place: str) -> None:
        """One that lasts, in a process group of its own; its number is written to a file."""
        Path(place).write_text(str(subprocess.Popen(["sleep", "600"], process_group=0).pid))

    def pid(self, place: str) -> None:
        part = Path(f"{place}.part")
        part.write_text(str(os.getpid()))
        part.replace(place)

    def until(self, place: str) -> None:
        while not Path(place).exists():
            time.sleep(0.02)

    def fill(self, place: str) -> None:
        with open(place, "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 65536)


def work(desk: Desk, plans: list[str]) -> None:
    """Does what is planned for this try; the last plan is also that of all later tries."""
    worker: Any = Worker(desk)
    plan = plans[min(desk.state().tries, len(plans)) - 1]
    for word in plan.split("+"):
        name, _, value = word.partition("=")
        getattr(worker, name)(value)


def decide(end: End) -> Retry | Stop:
    """Again after a signal or a hang; not after an exception."""
    if end.exit_code < 0 or end.stalled_s is not None:
        return Retry(why="it may pass", category="signal", wait_s=0.1)
    return Stop(why="it would fail again", category="exception")


def command(desk: Desk, *plans: str) -> list[str]:
    """The worker's command line."""
    return [sys.executable, __file__, str(desk.folder), *plans]


def supervisor(desk: Desk, *plans: str) -> list[str]:
    """The command line of a supervisor and its worker."""
    return [sys.executable, __file__, "supervise", str(desk.folder), *plans]


if __name__ == "__main__":
    if sys.argv[1] == "supervise":
        supervising.GRACE_S = float(os.environ.get("GRACE_S", supervising.GRACE_S))
        told = Desk(Path(sys.argv[2]))
        sys.exit(supervise(told, command(told, *sys.argv[3:]), decide, say=lambda text: print(text, file=sys.stderr)))
    work(Desk(Path(sys.argv[1])), sys.argv[2:])
