"""The first thing that runs in an instrumented interpreter: it waits for torch, and does nothing until then."""

import os
import sys
from time import monotonic_ns

from headway.instrument.imports import ImportWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headway.instrument.session import Session

watch: "ImportWatch | None" = None
session: "Session | None" = None
"""Set when torch is imported."""
waiting = False
"""Whether this process is none of the job's, and its children will be."""


def start() -> None:
    """Watches this interpreter's imports; from the import of torch on, the process is measured."""
    global watch
    if watch is None and os.environ.get("HEADWAY_DISABLE") != "1":
        watch = ImportWatch("torch", _torch_is_asked_for)
        sys.meta_path.insert(0, watch)
        os.register_at_fork(after_in_child=watch.forked)


def lie_in_wait() -> None:
    """This process only imports, and forks others: hooks go in, and nothing is recorded before `begin_anew`."""
    global waiting
    waiting = True


def begin_anew() -> None:
    """In a forked process that is to be measured: it began now, and imported nothing yet."""
    global waiting
    waiting = False
    if watch is not None:
        watch.began_ns = monotonic_ns()
        watch.early.clear()
        watch.took_ns.clear()
    if session is not None:
        session.waited = True
        session.join()


def _torch_is_asked_for(watch: ImportWatch) -> None:
    global session
    asked_ns = monotonic_ns()
    try:
        from headway.instrument.session import Session

        session = Session(watch)
        session.begin(asked_ns, joins=not waiting)
    except Exception as error:  # a job that cannot be measured is still a job
        print(f"headway: this process is not measured ({type(error).__name__}: {error})", file=sys.stderr, flush=True)
