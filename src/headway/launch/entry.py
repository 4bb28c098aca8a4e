"""What the supervisor has Python execute in the processes it starts: the zygote, and workers that come without one.

Both are started by a line of code rather than as verbs: nothing but what a worker needs may be imported there.
"""

import sys
from pathlib import Path

from headway.launch import dumps, worker, zygote
from headway.launch.channel import Channel


def as_zygote() -> None:
    """To be called with `fd supervisor preload,preload folder …` as arguments."""
    if start := sys.modules.get("headway.instrument.start"):
        start.lie_in_wait()
    fd, supervisor, preload, folder = sys.argv[1:5]
    names = [name for name in preload.split(",") if name]
    zygote.serve(Channel.from_fd(int(fd)), int(supervisor), names, folder, _hooks())


def as_worker() -> None:
    """To be called with `fd supervisor …` as arguments."""
    worker.work(Channel.from_fd(int(sys.argv[1])), int(sys.argv[2]), _hooks())


def _hooks() -> worker.Hooks:
    """Whether a program is measured is not this room's to know: what measures it is there already, or not."""
    return worker.Hooks(begins=_begins, fails=_fails, has_finished=_has_finished)


def _begins(assignment: worker.Assignment) -> None:
    dumps.answer(Path(assignment.folder), assignment.rank)
    if start := sys.modules.get("headway.instrument.start"):
        start.begin_anew()


def _fails() -> None:
    if (runs := sys.modules.get("headway.run")) and (run := runs._current):
        run._leave()


def _has_finished() -> bool:
    run = getattr(sys.modules.get("headway.run"), "_current", None)
    return run is not None and run.has_finished
