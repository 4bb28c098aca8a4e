"""Runs a script of the example without one of headway's techniques: `ablated.py TECHNIQUE SCRIPT ARGUMENTS`."""

import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import headway
import headway.startup


def without_memory_tier() -> None:
    """Saves are staged in memory as ever, and restores read the last one that reached the disk; it counts as lost what
    did not."""
    from headway.checkpoint import newest, stager

    newest._arenas = lambda root: []
    stager.Stager.arenas = lambda self: []  # type: ignore[method-assign]
    whole = headway.Checkpointer

    def checkpointer(*words: Any, **parts: Any) -> Any:
        made = whole(*words, **parts)
        made._schedule.without_memory()
        return made

    headway.Checkpointer = checkpointer  # type: ignore[misc,assignment]


def without_auto_interval() -> None:
    """Saves after as many steps as the plain arms do."""
    headway.Checkpointer = partial(headway.Checkpointer, interval=48)  # type: ignore[misc,assignment]


def without_fast_batch() -> None:
    """The first real batch compiles."""
    headway.fast_batch = lambda loader, *_, **__: loader  # type: ignore[assignment]


def without_read_ahead() -> None:
    """The checkpoint is read, and the loader's workers start, when the model is there."""

    class Nothing:
        def loader(self, loader: Any) -> Any:
            return loader

    plain = headway.Checkpointer
    headway.read_ahead = lambda *_, **__: Nothing()  # type: ignore[assignment,misc,return-value]
    headway.Checkpointer = lambda *words, ahead, **parts: plain(*words, **parts)  # type: ignore[assignment,misc]


def without_plan_cache() -> None:
    """The first rank plans the shards, each time."""
    import torch.distributed as dist

    headway.startup.sharding_plan = lambda planner, module, sharders: planner.collective_plan(  # type: ignore[assignment]
        module, sharders, dist.group.WORLD
    )


def without_local_metadata() -> None:
    """Ranks ask each other for the metadata of their shards, as far as TorchRec does: of bags it has not for long."""
    headway.startup.local_shard_metadata = nullcontext  # type: ignore[assignment]


def without_publishing_elsewhere() -> None:
    """The trainer packages its model itself, on the first rank."""
    from headway.run import Run

    finish = Run.finish

    def here(run: Run, publish: Any = None) -> None:
        if publish is None or run.stop is not None:
            finish(run, publish)
            return
        assert run.anchors is not None
        anchor = run.anchors()
        if anchor is not None:
            from serve import package  # beside the script

            with run.span("publish"):
                package(
                    Path(anchor["root"].removeprefix("file://"), anchor["checkpoint"]), Path(anchor["root"], "here")
                )
        finish(run)

    Run.finish = here  # type: ignore[method-assign]


WITHOUT: dict[str, Callable[[], None]] = {
    "memory-tier": without_memory_tier,
    "auto-interval": without_auto_interval,
    "fast-batch": without_fast_batch,
    "read-ahead": without_read_ahead,
    "plan-cache": without_plan_cache,
    "local-metadata": without_local_metadata,
    "publishing-elsewhere": without_publishing_elsewhere,
}

if __name__ == "__main__":
    technique, script = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).parent)
    WITHOUT[technique]()
    runpy.run_path(script, run_name="__main__")
