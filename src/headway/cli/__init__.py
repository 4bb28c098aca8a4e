"""The command `headway`: one small module a verb. With `run.py`, the only place that wires rooms together."""

from headway.cli.main import main

__all__ = ["main"]
