"""What `headway exec` puts into every Python of a job, and `headway inject` into every start of one Python.

Python runs it before any line of the program. It imports nothing that is not loaded already, so that no module of the
job's finds its name taken, and it is valid for every Python that a job may start on the side: on one that headway does
not support, it only makes way for the `sitecustomize` that it hides.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(HERE))
SELF = sys.modules.get(__name__)  # held: an old Python empties a module that nobody holds


class HeadwayFinder(object):  # noqa: UP004
    """Finds this copy of headway, whatever is or is not installed, and nothing else that lies beside it."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: (str, object, object) -> object
        """Where `headway` is; None for every other name."""
        if name != "headway":
            return None
        from _frozen_importlib_external import spec_from_file_location

        init = os.path.join(PACKAGE, "__init__.py")
        return spec_from_file_location(name, init, submodule_search_locations=[PACKAGE])


def make_way():  # type: () -> None
    """Runs the `sitecustomize` that Python would have found without us. What it raises, Python handles as ever."""
    del sys.modules["sitecustomize"]
    sys.path[:] = [entry for entry in sys.path if entry != HERE]
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", "") != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = SELF  # type: ignore[assignment]


def start():  # type: () -> None
    """Begins to measure this process, once; if that fails, the program runs all the same."""
    if sys.version_info < (3, 11) or os.environ.get("HEADWAY_DISABLE") == "1":
        return
    # First came `headway inject`, which Python runs twice in a virtual environment, or another headway's `exec`.
    if any(getattr(finder, "__name__", "") == HeadwayFinder.__name__ for finder in sys.meta_path):
        return
    try:
        sys.meta_path.insert(0, HeadwayFinder)  # type: ignore[arg-type]
        from headway.instrument.start import start as start_measuring

        start_measuring()
    except Exception as error:
        say("this process is not measured ({}: {})".format(type(error).__name__, error))  # noqa: UP032


def say(text):  # type: (str) -> None
    """One line on stderr, if there is one."""
    try:
        sys.stderr.write("headway: " + text + "\n")
        sys.stderr.flush()
    except Exception:  # closed, or none: nobody would read it
        pass


if __name__ == "sitecustomize":
    try:
        make_way()
    finally:
        start()
else:
    start()
