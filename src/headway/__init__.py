"""headway: see where a PyTorch job's time goes, and give more of it to training.

    import headway

    run = headway.current()                         # joins the job around it, or starts a local one
    with run.stage("train_module_creation"):
        model = build()
    for step, batch in run.steps(loader):
        train_step(model, batch)
        if step % 100 == 99:
            with run.span("checkpoint_blocking"):
                save(model)
            run.checkpoint_saved()
    run.finish()

Then `headway report` shows the job's Effective Training Time and what took the rest.
"""

TYPE_CHECKING = False  # as in `typing`, which takes its time to import, and a script that never calls headway none
if TYPE_CHECKING:
    from headway.checkpoint.ahead import read_ahead
    from headway.checkpoint.checkpointer import Checkpointer
    from headway.errors import HeadwayError, InputError, PlatformError, UnknownJob
    from headway.publish.ready import Served
    from headway.publish.request import Publish
    from headway.run import Activity, Run, compile_cache, current
    from headway.startup.fast import fast_batch
    from headway.startup.runner import StageError, Startup

__version__ = "0.1.0"

__all__ = [
    "Activity", "Checkpointer", "HeadwayError", "InputError", "PlatformError", "Publish", "Run", "Served", "StageError",
    "Startup", "UnknownJob", "__version__", "compile_cache", "current", "fast_batch", "read_ahead",
]  # fmt: skip

_HOME = dict.fromkeys(("HeadwayError", "InputError", "PlatformError", "UnknownJob"), "headway.errors")
_HOME |= dict.fromkeys(("Checkpointer", "read_ahead"), "headway.checkpoint")
_HOME |= {"Publish": "headway.publish.request", "Served": "headway.publish.ready"}
_HOME |= dict.fromkeys(("StageError", "Startup", "fast_batch"), "headway.startup")
_HOME |= dict.fromkeys(("Activity", "Run", "compile_cache", "current"), "headway.run")


def __getattr__(name: str) -> object:
    from importlib import import_module

    # Names are loaded when first used, so that a script that imports headway and never calls it pays nothing.
    if name not in _HOME:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
