"""Versions are timed in a process that has imported torch already, and in few rounds."""

import subprocess
from types import SimpleNamespace
from typing import Any

import forking
import pytest

import warm
from headway.publish import checks


@pytest.fixture
def warm_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the process in which `checks` times two versions."""
    stand_in = SimpleNamespace(run=_run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(checks, "subprocess", stand_in)


def _run(command: list[str], **settings: Any) -> Any:
    fewer = f"import {checks.__name__} as checks; checks._ROUNDS_S, checks._TRIES = 0.2, 2"
    return warm.run([*command[:2], f"{fewer}; {command[2]}", *command[3:]], imports=forking.IMPORTS, **settings)
