"""What headway raises, by whose fault it is.

HeadwayError
├── InputError            the caller's: a name, a flag, a file that cannot be used as given
│   ├── UnknownJob        no job of that name in this home
│   ├── Taken             checkpoint: another job writes to this folder
│   └── NotCommitted      publish: the checkpoint is not whole, or not yet
├── PlatformError         the machine's: a folder that cannot be written, a tool that does not answer
├── StageError            startup: a stage failed; what it raised is the cause
├── SaveFailed            checkpoint: it could not be made durable
├── BadCheckpoint         checkpoint: it is not what was saved
├── Elsewhere             checkpoint: another rank could not do its part
└── Refused               compile: a segment of the cache that is not touched
    └── Damaged           … because it is not as it was written

What measures raises nothing into a training loop: it degrades, and says so once. A save that fails does the same, until
too many in a row have.
"""

from collections.abc import Iterable


class HeadwayError(Exception):
    """Base of every error headway raises; its text says what happened, why, and what to do."""


class InputError(HeadwayError):
    """Something the caller gave cannot be used."""


class UnknownJob(InputError):
    """No job of that name has a journal here."""


class PlatformError(HeadwayError):
    """The machine refused something headway needs."""


def nearest(given: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the known one it resembles, or all of them."""
    import difflib  # slow to import, and only ever needed here

    choices = sorted(map(str, known))
    near = difflib.get_close_matches(given, choices, 1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(choices)}."
