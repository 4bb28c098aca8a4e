"""Torch's plug-in points: `Writer` is both the stager and the storage writer that `dcp.async_save` takes."""

import atexit
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future as ConcurrentFuture
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from headway.checkpoint import image
from headway.checkpoint.stager import Save, Stager
from headway.errors import InputError
from headway.storage import open_storage


class Writer(Stager, StorageWriter, AsyncStager):
    """Saves that block for one copy in memory.

    ::

        writer = Writer("checkpoints")
        dcp.async_save(state, storage_writer=writer, async_stager=writer, checkpoint_id="checkpoints/step-100")
    """

    _synchronize_after_execute = False

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        """`root` is the folder, or the URL, that checkpoints go below. The options are those of `Stager`."""
        super().__init__(root, **options)
        self._staged: list[tuple[Save, weakref.ref[torch.Tensor] | None]] = []
        self._target = threading.local()
        self._leaves_in_order = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Where the next save of this thread goes. Torch calls it in the thread that waits for the upload; call it
        before `async_save`, too, and the save is in safe hands when that returns."""
        self._target.folder = self._below_root(checkpoint_id) if checkpoint_id else ""

    def _below_root(self, path: str | os.PathLike[str]) -> str:
        found, root = open_storage(path).url, self.storage.url
        if found != root and not found.startswith(root.rstrip("/") + "/"):
            raise InputError(f"{found} is not below {root}, where this writer puts its checkpoints.")
        return found[len(root) :].strip("/")

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | ConcurrentFuture[dict[str, Any]]:
        """Copies the state. Returns what torch needs to plan the same again: it has no values, so that no other writer
        saves live ones."""
        folder, self._target.folder = getattr(self._target, "folder", None), None
        save = self.save(state_dict, folder=folder, step=_step_in(folder))
        assert save is not None
        skeleton: dict[str, Any] = _without_values(state_dict)
        leaf = next(_tensors(skeleton), None)
        # When torch has given up on it, before it came to writing, nobody is left who holds the skeleton.
        mine = weakref.ref(leaf, lambda _: self._abandon(save)) if leaf is not None else None
        self._staged = [(one, ref) for one, ref in self._staged if ref is None or ref() is not None] + [(save, mine)]
        return skeleton

    def _abandon(self, save: Save) -> None:
        """It is of no use to anybody: its memory is free again."""
        if save.folder is None:
            with self._free:
                self._uploading.discard(save.tag)
                self._free.notify_all()
            self._saves.pop(save.tag, None)

    def synchronize_staging(self) -> None:
        """`stage` returns when all is copied."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not self._leaves_in_order:  # with torch's functions alone, nobody else sees to it
            self._leaves_in_order = True
            atexit.register(_leave, weakref.ref(self))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        folder, self._target.folder = getattr(self._target, "folder", None) or "", None
        save = self._staged_for(planner) or self.save({}, folder=folder, step=_step_in(folder), planner=planner)
        assert save is not None
        if {piece.index for piece in save.image.pieces} != {item.index for item in plan.items}:
            self._abandon(save)
            raise InputError("this planner divides the state otherwise than the writer's. Give it to `Writer`, too.")
        if save.folder not in (None, folder):
            raise InputError(
                f"it goes to {save.folder}, as `reset` has said before it was copied, and not to {folder}."
            )
        if save.folder is None:
            save.folder = save.task["folder"] = folder
            save.task["step"] = save.step = _step_in(folder)
            self.link.save(save.task)
        save.wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(image.results(save.image, self.ranks.rank, save.tag))
        return future

    def _staged_for(self, planner: SavePlanner) -> Save | None:
        """What `stage` has copied of the state that torch now plans for, in a thread of its own."""
        leaves = {id(tensor) for tensor in _tensors(planner.state_dict)}  # type: ignore[attr-defined]
        for number, (save, leaf) in enumerate(self._staged):
            if leaf is None or id(leaf()) in leaves:
                del self._staged[number]
                return save
        return None

    def __reduce__(self) -> Any:
        raise InputError("this writer works outside of the trainer already: save with the default, a thread.")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """`.metadata` is in its place already: the upload does not end without it."""

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _step_in(folder: str | None) -> int:
    """The number at the end of a folder's name, where it has one."""
    digits = re.search(r"(\d+)$", folder or "")
    return int(digits[1]) if digits else -1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _leave(writer: "weakref.ref[Writer]") -> None:
    """The program ends: well, and nobody will come back for the memory; or not, and then somebody may."""
    if (found := writer()) is not None and getattr(sys, "last_value", None) is None:
        found.close()


def _without_values(value: Any) -> Any:
    if isinstance(value, DTensor):
        local = value.to_local().to("meta")
        return DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, Mapping):
        return {key: _without_values(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_values(part) for part in value) if type(value) in (list, tuple) else value
    return value
