"""Checkpoints that block for one copy in memory, survive the trainer, and are committed whole or not at all.

A training state comes in; a folder in torch's own distributed format comes out, which plain `dcp.load` reads. Memory
that a small process keeps (`keeper`) stands in between, and from there another one uploads (`uploader`). This room
knows nothing of restarts: it only finds, when it is asked to restore, the newest state that is whole.

Typical use::

    with headway.Checkpointer("checkpoints", model=model, optimizer=optimizer, loader=loader) as ckpt:
        ckpt.restore()
        for step, batch in run.steps(ckpt.loader, start=ckpt.step):
            train_step(batch)
            ckpt.after(step)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.checkpoint.ahead import Ahead, read_ahead
    from headway.checkpoint.checkpointer import Checkpointer, Restored
    from headway.checkpoint.reader import Reader
    from headway.checkpoint.retention import Retention
    from headway.checkpoint.source import BadCheckpoint
    from headway.checkpoint.stager import Save, SaveFailed
    from headway.checkpoint.writer import Writer

_HOMES = {
    "Ahead": "ahead", "BadCheckpoint": "source", "Checkpointer": "checkpointer", "Reader": "reader",
    "Restored": "checkpointer", "Retention": "retention", "Save": "stager", "SaveFailed": "stager", "Writer": "writer",
    "read_ahead": "ahead",
}  # fmt: skip

__all__ = [
    "Ahead", "BadCheckpoint", "Checkpointer", "Reader", "Restored", "Retention", "Save", "SaveFailed", "Writer",
    "read_ahead",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The keeper and the uploader import this package, and must not pay for torch."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
