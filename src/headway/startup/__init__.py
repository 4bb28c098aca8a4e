"""Starting a trainer: stages that overlap, compiling before the data has come, and no needless communication.

What comes in: stages, as functions that need one another; a batch as it looked the last time; a plan, groups and
parameters to agree on. What goes out: their results, and a mark in the journal of how long each took and what it waited
for. This room knows nothing of the supervisor, of checkpoints, or of how a report looks.

Typical use::

    setup = headway.Startup()

    @setup.stage(lane="comm")
    def process_group_init(): ...

    @setup.stage
    def model(): ...

    @setup.stage(lane="io")
    def batches(): ...

    parts = setup.run()
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headway.startup.runner import Parts, StageError, Startup

_HOME = dict.fromkeys(("Parts", "StageError", "Startup"), "headway.startup.runner")

__all__ = ["Parts", "StageError", "Startup"]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module 'headway.startup' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
