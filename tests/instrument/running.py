"""Commands under `headway exec`, in real processes, and what their witness wrote."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import warm
from headway.events.journal import Follower, is_being_written
from headway.events.vocabulary import Process, ProcessGone, Record

HEADWAY = [sys.executable, "-P", "-m", "headway"]
PATIENCE_S = 400.0
WARM_HEADWAY = Path(__file__).parents[1] / "launch" / "warm_headway.py"
SITE = Path(sys.modules["headway"].__file__ or "").parent / "instrument" / "site"

KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
TELLS_EXIT_CODES = KERNEL >= (6, 15)
"""Before that, a witness that comes second to the command's parent cannot learn the exit code."""


def run(*command: str, options: tuple[str, ...] = (), **settings: Any) -> "subprocess.CompletedProcess[str]":
    """A command under `headway exec`, to its end."""
    settings = {"capture_output": True, "text": True, "timeout": PATIENCE_S} | settings
    return subprocess.run([*HEADWAY, "exec", *options, *command], **settings)


def train(
    *words: str, options: tuple[str, ...] = (), fast: bool = False, **settings: Any
) -> "subprocess.CompletedProcess[str]":
    """Run `headway exec python` with a script and its arguments, in a process that has imported torch already; `fast`
    with the hooks of a fast start."""
    first = ["hooked_fast" if fast else "hooked"]
    settings = {"capture_output": True, "text": True, "timeout": PATIENCE_S} | settings
    done: subprocess.CompletedProcess[str] = warm.run(_command(words, options), first=first, **settings)
    return done


def begin_train(*words: str, options: tuple[str, ...] = (), **settings: Any) -> "subprocess.Popen[str]":
    """Like `train`, for a process that the caller ends."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | settings
    return warm.Popen(_command(words, options), first=["hooked"], **settings)


def _command(words: Sequence[str], options: Sequence[str]) -> list[str]:
    return [sys.executable, str(WARM_HEADWAY), "exec", *options, sys.executable, *words]


def plain(*words: str, **settings: Any) -> "subprocess.CompletedProcess[str]":
    """Run a script without headway, in a process that has imported torch already."""
    settings = {"capture_output": True, "text": True, "timeout": PATIENCE_S} | settings
    done: subprocess.CompletedProcess[str] = warm.run([sys.executable, *words], **settings)
    return done


def begin(*command: str, **settings: Any) -> "subprocess.Popen[str]":
    """A command under `headway exec`, which the caller ends."""
    settings = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True} | settings
    return subprocess.Popen([*HEADWAY, "exec", *command], **settings)


def python(*words: str, path: str = "", environ: Mapping[str, str] | None = None, **settings: Any) -> str:
    """What a Python prints that was started with the shim."""
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(SITE), path])), **(environ or {})}
    settings = {"capture_output": True, "text": True, "timeout": PATIENCE_S, "check": True} | settings
    return subprocess.run([sys.executable, *words], env=given, **settings).stdout


def witnessed(home: Path) -> list[tuple[Process, list[Record]]]:
    """Each launcher of a home's jobs and what follows in its journal, when no witness is at work any more."""
    wait_for(lambda: (paths := list(home.rglob("launcher-*.hwj"))) and all(map(_is_complete, paths)))
    found = []
    for path in sorted(home.rglob("launcher-*.hwj")):
        first, *others = Follower(path).poll().records
        assert isinstance(first, Process)
        found.append((first, others))
    return found


def _is_complete(launcher: Path) -> bool:
    """Whether the command's end is told. A journal is there before its witness has locked it: the lock does not say."""
    records = Follower(launcher).poll().records
    is_told = bool(records) and isinstance(records[-1], ProcessGone) and not records[-1].name
    return is_told and not is_being_written(launcher)


def end_of(home: Path) -> ProcessGone:
    """How the one command of this home ended."""
    ((_, others),) = witnessed(home)
    (gone,) = others
    assert isinstance(gone, ProcessGone)
    return gone


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
