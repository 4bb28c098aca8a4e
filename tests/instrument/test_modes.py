"""Whether a model in evaluation mode evaluates or plays: by the names of the functions that switch it."""

import sys
import threading
from typing import Any

import pytest

from headway.instrument.modes import _tells_of_play


def told(code: str, **names: Any) -> bool:
    """What is told at the place where a program calls `here()`. It runs in a thread, so that pytest's own functions,
    whose names tell as well, are not among its callers."""
    found: list[bool] = []
    names |= {"here": lambda: found.append(_tells_of_play(sys._getframe(1))), "__name__": "program"}
    thread = threading.Thread(target=exec, args=(code, names))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    ("code", "plays"),
    [
        ("def rollout():\n    here()\nrollout()", True),
        ("def collect_data():\n    here()\ncollect_data()", True),
        ("def evaluate():\n    here()\nevaluate()", False),
        ("def estimate_loss():\n    here()\nestimate_loss()", False),
        ("def rollout():\n    here()\ndef evaluate():\n    rollout()\nevaluate()", True),
        ("def validate():\n    here()\ndef play():\n    validate()\nplay()", False),
        ("def run():\n    here()\nrun()", False),
        ("def run(env):\n    env.reset() if env else here()\nrun(None)", True),
        ("def run(env):\n    here()\nrun({'PATH': ''})", False),
        ("here()", False),
    ],
)
def test_the_nearest_name_that_tells_decides(code: str, plays: bool) -> None:
    assert told(code) is plays


def test_a_global_that_can_be_reset_and_stepped_is_an_environment() -> None:
    class Maze:
        def reset(self) -> None: ...
        def step(self, action: int) -> None: ...

    assert told("def run():\n    here()\nrun()", maze=Maze()) is True
