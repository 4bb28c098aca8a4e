"""A word to the user: once, on standard error by the first rank, and in every rank's journal."""

import sys

from headway.events.vocabulary import Told
from headway.run import current

_said: set[str] = set()


def say_once(text: str, hook: str = "") -> None:
    """Says it, unless it was said. `hook` names what is not done as it was meant to be."""
    if text in _said:
        return
    _said.add(text)
    run = current()
    if hook:
        run.mark(Told.HOOK_OFF, hook=hook, error=text)
    if run.rank == 0:
        print(f"headway: {text}", file=sys.stderr, flush=True)
