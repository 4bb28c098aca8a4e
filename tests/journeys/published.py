"""Waits for what a job has handed over to be published."""

import json
import time
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from headway.cli import main

PATIENCE_S = 500.0


def headway(home: Path, *words: str) -> Any:
    """Return what a command prints as JSON. It runs in this process."""
    done = CliRunner().invoke(main, [*words, "--json"], env={"HEADWAY_HOME": str(home)}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def settled(home: Path) -> dict[str, Any]:
    """Return the only request to publish once it is published, has failed or was rejected."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        (state,) = headway(home, "publish", "status")
        if state["phase"] in ("published", "failed", "rejected"):
            assert isinstance(state, dict)
            return state
        time.sleep(0.2)
    raise AssertionError(f"it is not published: {state}")
