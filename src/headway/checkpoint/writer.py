"""Torch's plug-in points: `Writer` is both the stager and the storage writer that `dcp.async_save` takes.

It copies the state into an arena, where it already has the form of the file, and hands it to the keeper, which has it
uploaded. The plan is torch's own planner's, made once, and again when shapes, placements or the number of ranks change.
"""

import atexit
import errno
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future as ConcurrentFuture
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from headway.checkpoint import catalog, image
from headway.checkpoint.arena import Arena, Shape, aligned, free_memory, slots_that_fit
from headway.checkpoint.image import Image, Piece
from headway.checkpoint.layout import generation_of, new_tag
from headway.checkpoint.lease import Owner, claim, holder, release
from headway.checkpoint.link import Link
from headway.checkpoint.ranks import Elsewhere, Ranks
from headway.checkpoint.retention import Retention
from headway.checkpoint.storage import open_storage
from headway.errors import HeadwayError, InputError, PlatformError

MODES = {"auto": None, "two-slot": 2, "one-slot": 1, "streaming": 0}
STREAM_PARTS = 4
STREAM_TRIES = 3
WORD_S = 10.0
DEADLINE_S = 900.0
"""How long the coordinator waits for the shards of other ranks."""

T = TypeVar("T")
State = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_NEVER = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT}
"""Errors that no waiting heals."""

_REUSED = (bool, int, float, str, bytes, type(None))


class SaveFailed(HeadwayError):
    """A checkpoint could not be made durable. The last one that was committed is still there."""


@dataclass(eq=False)
class Save:
    """One save on this rank."""

    tag: str
    step: int
    folder: str | None
    """Inside the root; None until `dcp` has said where to."""
    image: Image
    task: dict[str, Any]
    blocked_s: float = 0.0
    ended: threading.Event = field(default_factory=threading.Event)
    failure: str = ""
    told: dict[str, Any] = field(default_factory=dict)
    """How the upload went."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it is durable; on rank 0, until it is committed. False if that takes longer, an error if it
        cannot be."""
        if self.ended.wait(timeout_s) and self.failure:
            raise SaveFailed(f"the checkpoint of step {self.step} was not saved: {self.failure}.")
        return self.ended.is_set()


@dataclass
class _Look:
    """A state as it is found, before it is copied."""

    planner: SavePlanner
    signature: list[Any]
    values: list[bytes] | None
    """None: another plan is needed."""


class Writer(StorageWriter, AsyncStager):
    """Saves that block for one copy in memory.

    ::

        writer = Writer("checkpoints")
        dcp.async_save(state, storage_writer=writer, async_stager=writer, checkpoint_id="checkpoints/step-100")
    """

    _synchronize_after_execute = False

    def __init__(
        self, root: str | os.PathLike[str], *, memory: str = "auto", stream_bytes: int = 256 << 20,
        retention: Retention | None = None, local: str | os.PathLike[str] | None = None, process_group: Any = None,
        planner: Callable[[], DefaultSavePlanner] = DefaultSavePlanner, job: str = "", node: str = "",
        hear: Callable[[str, Save | None, dict[str, Any]], None] = lambda event, save, told: None,
    ) -> None:  # fmt: skip
        """`root` is the folder, or the URL, that checkpoints go below. `memory` chooses how they are held until they
        are there: `two-slot`, `one-slot`, `streaming` through `stream_bytes`, or by what is free. `hear` is told what
        becomes of saves, from another thread."""
        if memory not in MODES:
            raise InputError(f"memory={memory!r} is none of {', '.join(MODES)}.")
        self.ranks = Ranks(process_group)
        self.storage = open_storage(root)
        self.local = os.path.abspath(local) if local else None
        if self.local == self.storage.url:
            raise InputError(
                f"local={self.local} is the root itself. Leave it out: the root is on a local disk already."
            )
        self._memory, self._stream_bytes, self._retention = memory, stream_bytes, retention
        self._new_planner, self._hear, self._job = planner, hear, job
        self._node = node or os.uname().nodename
        self._image: Image | None = None
        self._signature: list[Any] = []
        self._planner: DefaultSavePlanner | None = None
        self._arena: Arena | None = None
        self._views: list[list[torch.Tensor | None]] = []
        self._cache: dict[int, tuple[Any, bytes]] = {}
        self._saves: dict[str, Save] = {}
        self._uploading: set[str] = set()
        self._over: set[str] = set()
        """Saves of an earlier process that have come to their end since this one began."""
        self._raised: set[str] = set()
        """Saves whose failure the caller knows of already."""
        self._free = threading.Condition()
        self._staged: list[tuple[Save, weakref.ref[torch.Tensor] | None]] = []
        self._target = threading.local()
        self._durable = self._has_others = self._leaves_in_order = self._closed = False
        self._complete: str | None = None
        """The newest save that is known to be in memory on all ranks."""
        self._last: str | None = None
        self._unfinished = False
        self.mode = ""
        self._listing: list[catalog.Checkpoint] | None = None
        self.session, self.generation, is_known = self.ranks.of_first(self._begin)
        session = self.session
        owner = Owner.this(session, job, self._node)
        lease = {"root": self.storage.url, "owner": asdict(owner)} if self.ranks.is_first else None
        self.link = Link(self.storage.url, session, self.ranks.rank, lease, self._take)
        self._unclaimed: dict[str, Any] | None = None
        try:
            self.former, self.problem = self.ranks.of_first(lambda: self._claim(owner))
        except BaseException:
            self.link.close()
            raise
        """Who wrote here before, and did not say goodbye; and why nothing can be written now."""
        if not is_known:  # somebody has deleted the folder since: what memory holds of it is of the past, too
            self.link.keep_only("")
        self._found = self.link.arenas()
        held = [generation_of(held.tag) for arena, _ in self._found for held in arena.held()]
        self.generation = max([self.generation, *held])

    def _begin(self) -> tuple[str, int, bool]:
        self._listing = catalog.checkpoints(self.storage)
        known = [generation_of(found.tag) for found in self._listing if found.tag]
        return f"{os.urandom(6).hex()}", max(known, default=0), holder(self.storage) is not None

    def take_listing(self) -> list[catalog.Checkpoint] | None:
        """What was stored when this run began, once: what was committed since then is in memory, too."""
        listing, self._listing = self._listing, None
        return listing

    def _claim(self, owner: Owner) -> tuple[Owner | None, str]:
        """Makes this run the one that writes here: now, or with its first checkpoint if the place is full."""
        try:
            return claim(self.storage, owner), ""
        except OSError as error:
            if error.errno in _NEVER:
                raise InputError(
                    f"checkpoints cannot be written to {self.storage.url} ({error}). Choose another place."
                ) from error
            self._unclaimed = asdict(owner)
            return None, f"{type(error).__name__}: {error}"

    # --- saving ---

    def save(
        self, state: State, *, folder: str | None, step: int, metric: float | None = None,
        durable: bool = True, may_skip: bool = False, planner: SavePlanner | None = None,
    ) -> Save | None:  # fmt: skip
        """Copies the state, and returns: from here on it may change, and this process may die. None if the memory is
        still in use by an earlier upload, and this one may be skipped; it waits for that otherwise."""
        with torch.no_grad():
            return self._save(state, folder, step, metric, durable, may_skip, planner)

    def _save(
        self, state: State, folder: str | None, step: int, metric: float | None, durable: bool, may_skip: bool,
        planner: SavePlanner | None,
    ) -> Save | None:  # fmt: skip
        began = time.perf_counter()
        busy = int(may_skip and self._image is not None and self._is_busy(self._next_slot()))
        look, error = (None, None) if busy else self._look_at(state, planner)
        stale, busy, self.generation, unfinished, failed = self.ranks.highest(
            int(look is None or look.values is None), busy, self.generation + 1, int(self._unfinished),
            int(error is not None),
        )  # fmt: skip
        if failed:
            raise error or Elsewhere("the state of another rank could not be had; it says why")
        if busy:
            return None
        if not unfinished:
            self._complete = self._last
            self._give_back()
        assert look is not None
        self._unfinished, self._listing = True, None
        if stale:
            self._plan(look.planner)
            look.values = self._values(look.planner)
            self._remember(look)
        assert self._image is not None
        assert look.values is not None
        tag = new_tag(self.generation, self.session[:4])
        save = Save(tag, step, folder, self._image, self._task(tag, folder, step, metric))
        try:
            (self._stage if self.mode != "streaming" else self._stream)(save, look.planner, look.values, durable)
        except Exception as error:  # the others have saved theirs, and need not wait for this one's
            self._raised.add(save.tag)
            self.link.save(save.task | {"error": f"{type(error).__name__}: {error}"})
            raise
        self._last, self._unfinished, self._durable = tag, False, durable
        save.blocked_s = time.perf_counter() - began
        return save

    def prepare(self, state: State) -> None:
        """Makes the plan and has the memory laid in, in the background, so that the first save is as fast as any."""
        look, error = self._look_at(state, None)
        stale, failed = self.ranks.highest(int(look is None or look.values is None), int(error is not None))
        if failed:
            raise error or Elsewhere("the state of another rank could not be had; it says why")
        if stale and look is not None:
            self._plan(look.planner)
            self._remember(look)

    def _remember(self, look: "_Look") -> None:
        self._signature = look.signature
        self._planner = look.planner if type(look.planner) is DefaultSavePlanner else None

    def _look_at(self, state: State, planner: SavePlanner | None) -> tuple["_Look | None", Exception | None]:
        try:
            if planner is None:
                found = dict(state() if callable(state) else state)
                planner = self._planner_again(found) or self._new_planner()
                if planner is not self._planner:
                    planner.set_up_planner(found, None, self.ranks.is_first)
            signature = image.signature(planner.state_dict)  # type: ignore[attr-defined]
            values = self._values(planner) if signature == self._signature else None
            if values is None:
                image.check(planner.state_dict)  # type: ignore[attr-defined]
            return _Look(planner, signature, values), None
        except Exception as error:  # told to the others first, which would wait for this rank
            return None, error

    def _planner_again(self, state: dict[str, Any]) -> DefaultSavePlanner | None:
        """The planner of the present plan, if the state is like the one that it has planned for."""
        flat = image.flattened(state) if self._planner is not None else {}
        if self._planner is None or image.signature(flat) != self._signature:
            return None
        self._planner.state_dict = flat
        return self._planner

    def _values(self, planner: SavePlanner) -> list[bytes] | None:
        """What is no tensor, pickled; None if it no longer fits."""
        if self._image is None:
            return None
        found = []
        for number, piece in enumerate(self._image.pieces):
            if piece.shape is None:
                found.append(self._pickled(number, planner.lookup_object(piece.index)))  # type: ignore[attr-defined]
                if len(found[-1]) > piece.length:
                    return None
        return found

    def _pickled(self, number: int, value: Any) -> bytes:
        known = self._cache.get(number)
        if known is not None and isinstance(value, _REUSED) and type(known[0]) is type(value) and known[0] == value:
            return known[1]
        data = image.pickled_value(value)
        self._cache[number] = (value, data)
        return data

    def _task(self, tag: str, folder: str | None, step: int, metric: float | None) -> dict[str, Any]:
        assert self._arena is not None
        assert self._image is not None
        return {
            "tag": tag, "rank": self.ranks.rank, "plan": self._arena.shape.plan, "root": self.storage.url,
            "local": self.local, "folder": folder, "step": step, "metric": metric, "saved_ns": time.time_ns(),
            "world_size": self.ranks.size, "coordinator": self.ranks.is_first, "job": self._job,
            "session": self.session, "unclaimed": self._unclaimed,
            "retention": asdict(self._retention) if self._retention else None,
            "deadline_s": DEADLINE_S, "image_bytes": self._image.size, "streams": self.mode == "streaming", "slot": 0,
        }  # fmt: skip

    # --- plans ---

    def _plan(self, planner: SavePlanner) -> None:
        placeholder = self.ranks.of_first(image.new_placeholder)
        known: list[Metadata] = []

        def divide(plans: list[SavePlan]) -> list[SavePlan]:
            made, metadata = planner.create_global_plan(plans)
            known.append(metadata)
            return made

        mine = planner.finish_plan(self.ranks.planned(planner.create_local_plan, divide))
        drawn, problem = _attempted(lambda: image.draw(mine, planner))  # a value that cannot be pickled is one rank's
        parts = self.ranks.all(image.results(drawn, self.ranks.rank, placeholder) if drawn else [])
        if self.ranks.highest(int(problem is not None))[0] or drawn is None:
            raise problem or Elsewhere("another rank cannot lay out its part of the checkpoint; it says why")
        metadata = self.ranks.of_first(lambda: image.metadata_template(known[0], parts))
        # Raised on all ranks: one that has no memory cannot save alone.
        _, problem = _attempted(lambda: self._lay_out(drawn, metadata, placeholder))
        if self.ranks.highest(int(problem is not None))[0]:
            self._image, self._signature, self._planner, self._arena = None, [], None, None
            raise problem or Elsewhere("another rank has no memory for its part of the checkpoint; it says why")

    def _lay_out(self, drawn: Image, metadata: bytes, placeholder: str) -> None:
        plan = image.plan_name(metadata, placeholder, self.ranks.size)
        old, self._image, self._cache = self._arena, drawn, {}
        slots = self._slots(drawn.size)
        self.mode = next(mode for mode, count in MODES.items() if count == slots)
        room, count = (drawn.size, slots) if slots else (aligned(self._stream_bytes // STREAM_PARTS), STREAM_PARTS)
        shape = Shape(
            plan=f"{plan}-{slots}", rank=self.ranks.rank, world_size=self.ranks.size, image_bytes=room, slots=count,
            metadata_bytes=len(metadata), placeholder=placeholder,
        )  # fmt: skip
        self._wait_for_uploads()
        if old is not None and self._durable:  # it would only take up memory: what it holds is safe elsewhere
            self.link.keep_only(shape.plan)
            self._last = None
        self._views = []
        adopted, inherited = self._adopted(shape) if slots else (None, [])
        self._arena = adopted or Arena.create(shape, metadata)
        self._views = [self._view(slot, new=adopted is None) for slot in range(slots)]
        self.link.hold(self._arena)
        self._take_over(inherited)
        self._arena.prefault(_pin)
        self._has_others = True
        if old is not None:
            old.close()

    def _give_back(self) -> None:
        """Lets go of the memory of earlier plans, once all ranks have a save under this one."""
        if self._has_others and self._arena is not None and self._last in {held.tag for held in self._arena.held()}:
            self.link.keep_only(self._arena.shape.plan)
            self._has_others = False

    def _slots(self, size: int) -> int:
        """How many images the memory holds: what was asked for, or what fits on every rank."""
        wanted, ours = MODES[self._memory], int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
        # Memory that was laid in earlier is used again, or given back.
        spare = self._arena.shape.total if self._arena is not None else self._held_bytes()
        free = free_memory() // ours + spare
        if wanted is None:
            wanted = slots_that_fit(size, free)
        fewest = -self.ranks.highest(-wanted if wanted * size <= free else 1)[0]
        if fewest < 0:
            raise PlatformError(
                f"{wanted} copies of {_in_words(size)} do not fit into the {_in_words(free)} that are free to each "
                f'rank here, or on another node: the kernel would kill the job. Use memory="streaming", or "auto".'
            )
        return fewest

    def _held_bytes(self) -> int:
        return sum(arena.shape.total for arena, _ in self._found if arena.shape.rank == self.ranks.rank)

    def arenas(self) -> list[Arena]:
        """What the memory of this node holds, of all ranks."""
        if self._arena is not None:  # then it was looked at long ago
            _close_behind(self._found)
            self._found = self.link.arenas()
        return [arena for arena, _ in self._found]

    def _adopted(self, shape: Shape) -> tuple[Arena | None, list[str]]:
        """The memory that an earlier process of this rank has left, if its plan was the same; and the tags of what is
        still being uploaded from there."""
        like = [found for found in self._found if _is_like(found[0].shape, shape)]
        _close_behind([found for found in self._found if found not in like[:1]])
        self._found = []
        return like[0] if like else (None, [])

    def _take_over(self, tags: list[str]) -> None:
        with self._free:  # the link's thread may have heard of their end already
            for tag in set(tags) - self._over:
                self._uploading.add(tag)
                self.link.take_over(tag)

    def _view(self, slot: int, new: bool) -> list[torch.Tensor | None]:
        """The tensors of one slot."""
        assert self._arena is not None
        assert self._image is not None
        where = self._arena.image(slot)
        for offset, data in self._image.constant if new else ():
            where[offset : offset + len(data)] = data
        return [_tensor_at(where, piece) for piece in self._image.pieces]

    # --- staging ---

    def _next_slot(self) -> int:
        """The slot to write to: never the one with the newest save that all ranks have."""
        assert self._arena is not None
        held = {found.slot: found.tag for found in self._arena.held()}
        keep = self._complete if self._unfinished else self._last
        free = [slot for slot in range(self._arena.shape.slots) if keep is None or held.get(slot) != keep]
        return min(free or [0], key=lambda slot: held.get(slot, ""))

    def _is_busy(self, slot: int) -> bool:
        if self.mode == "streaming":
            return bool(self._uploading)
        assert self._arena is not None
        return any(held.slot == slot and held.tag in self._uploading for held in self._arena.held())

    def _stage(self, save: Save, planner: SavePlanner, values: list[bytes], durable: bool) -> None:
        assert self._arena is not None
        slot = self._next_slot()
        self._await(lambda: not self._is_busy(slot))
        save.task["slot"] = slot
        self._arena.open(slot)
        left = iter(values)
        where, on_device = self._arena.image(slot), False
        for piece, view in zip(save.image.pieces, self._views[slot], strict=True):
            if view is None:
                data = next(left)
                where[piece.offset : piece.offset + len(data)] = data
            else:
                source = planner.lookup_object(piece.index)  # type: ignore[attr-defined]
                on_device |= source.device.type != "cpu"
                view.copy_(source.detach(), non_blocking=True)
        if on_device:
            torch.accelerator.synchronize()
        self._arena.seal(slot, save.tag, save.step, save.task["saved_ns"])
        self._hand_over(save, durable)

    def _hand_over(self, save: Save, durable: bool) -> None:
        if not durable:
            save.ended.set()
            return
        self._saves[save.tag] = save
        self._uploading.add(save.tag)
        if save.folder is not None:
            self.link.save(save.task)

    def _stream(self, save: Save, planner: SavePlanner, values: list[bytes], durable: bool) -> None:
        """Copies part after part into a memory smaller than the state. Nothing remains in it."""
        assert self._arena is not None
        if save.folder is None:
            raise InputError("streaming saves must know where to before they begin: give `Writer` the path itself.")
        self._wait_for_uploads()
        segments = list(_segments(save.image, planner, values))
        self._pour(save, segments)
        for _ in range(STREAM_TRIES - 1):
            self._wait_for_uploads()  # parts that were not read yet go with an uploader that dies
            if not save.told.get("died"):
                return
            self.link.wait(save.tag)
            save.ended.clear()
            save.told = {}
            self._pour(save, segments)

    def _pour(self, save: Save, segments: list[tuple[int, int, bytes | torch.Tensor]]) -> None:
        assert self._arena is not None
        room, slots = self._arena.shape.image_bytes, self._arena.shape.slots
        for slot in range(slots):
            self._arena.open(slot)
        self._hand_over(save, True)
        for number, start in enumerate(range(0, save.image.size, room)):
            slot = number % slots
            self._await_room(save, slot)
            if save.ended.is_set():
                return  # it failed, and said why
            _fill(self._arena.image(slot), start, segments)
            self._arena.seal(slot, save.tag, number, save.task["saved_ns"])

    def _await_room(self, save: Save, slot: int) -> None:
        assert self._arena is not None
        while any(held.slot == slot for held in self._arena.held()) and not save.ended.is_set():
            time.sleep(0.0005)

    def _wait_for_uploads(self) -> None:
        self._await(lambda: not self._uploading)

    def _await(self, is_free: Callable[[], bool]) -> None:
        """Waits for memory that is being uploaded, and says so if that takes long."""
        began = time.monotonic()
        with self._free:
            while not self._free.wait_for(is_free, WORD_S):
                self._hear("waiting", None, {"seconds": time.monotonic() - began})

    # --- what becomes of it ---

    def _take(self, event: dict[str, Any]) -> None:
        """Called by the link's thread."""
        save, kind = self._saves.get(event["tag"]), event["event"]
        if kind in ("uploaded", "failed", "done", "committed"):
            with self._free:
                self._uploading.discard(event["tag"])
                if save is None:
                    self._over.add(event["tag"])
                self._free.notify_all()
        if event["tag"] not in self._raised:
            self._hear(kind, save, event)
        if save is not None and kind in ("failed", "done", "committed"):
            save.failure, save.told = event.get("error", "") if kind == "failed" else "", save.told | event
            if kind != "committed":  # the coordinator tidies up after it
                self._saves.pop(event["tag"], None)
            else:
                self._unclaimed = None
            save.ended.set()

    def reached(self, step: int) -> bool:
        """Notes how far training has come, for whoever restores. True if there is no plan yet to note it in."""
        if self._arena is not None:
            self._arena.reached = step
        return self._arena is None

    @property
    def has_several_nodes(self) -> bool:
        """Then what the ranks share is divided between nodes, and no node's memory has all of a save."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "") or self.ranks.size) < self.ranks.size

    def mode_text(self) -> str:
        """How saves are held, in the user's words."""
        assert self._arena is not None
        assert self._image is not None
        state, memory = _in_words(self._image.size), _in_words(self._arena.shape.total)
        if self.mode == "streaming":
            return f"checkpoints ({state} a rank) stream through {memory}: saves block until they are written."
        copies = "two copies" if self.mode == "two-slot" else "one copy"
        return f"checkpoints ({state} a rank) are held in memory, {copies}: {memory}."

    def begin_from(self, tag: str | None) -> None:
        """Training goes on from this save: it stays in memory until there is another one."""
        self._complete = self._last = tag

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until all saves are durable. False if that takes longer."""
        return self.link.wait(timeout_s=timeout_s)

    def close(self) -> None:
        """Waits for the uploads, and gives the memory back."""
        if self._closed:
            return
        self._closed = True
        self.wait(DEADLINE_S)
        if self.ranks.is_first:
            with suppress(OSError):  # the others see that this process is gone, or wait a little
                release(self.storage, self.session)
        self.link.close()
        self._views = []
        _close_behind(self._found)
        self._found = []
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    # --- torch's StorageWriter and AsyncStager ---

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


def _in_words(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


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


def _pin(address: int, size: int) -> None:
    """Lets a GPU copy to this memory by itself, as long as the process lives: an arena does as long as its plan."""
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostRegister(address, size, 0)  # type: ignore[no-untyped-call]


def _attempted(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return do(), None
    except Exception as error:
        return None, error


def _close_behind(arenas: Sequence[tuple[Arena, list[str]]]) -> None:
    """Lets go of memory that nobody looks at: to unmap gigabytes takes a while."""

    def close() -> None:
        for arena, _ in arenas:
            arena.close()

    if arenas:
        threading.Thread(target=close, daemon=True).start()


def _is_like(one: Shape, other: Shape) -> bool:
    """Whether images of both have everything at the same places."""

    def places(shape: Shape) -> tuple[Any, ...]:
        return shape.plan, shape.rank, shape.world_size, shape.image_bytes, shape.slots, shape.metadata_bytes

    return places(one) == places(other)


def _tensor_at(where: memoryview, piece: Piece) -> torch.Tensor | None:
    if piece.shape is None or piece.dtype is None:
        return None
    size = piece.shape.numel() * piece.dtype.itemsize
    if not size:
        return torch.empty(piece.shape, dtype=piece.dtype)
    return torch.frombuffer(where, dtype=torch.uint8, count=size, offset=piece.data).view(piece.dtype).view(piece.shape)


def _segments(
    drawn: Image, planner: SavePlanner, values: list[bytes]
) -> Iterator[tuple[int, int, bytes | torch.Tensor]]:
    """What is where in the file: offset, length, source."""
    left = iter(values)
    for offset, data in drawn.constant:
        yield offset, len(data), data
    for piece in drawn.pieces:
        if piece.shape is None:
            data = next(left)
            yield piece.offset, len(data), data
        elif piece.shape.numel():
            source = planner.lookup_object(piece.index).detach()  # type: ignore[attr-defined]
            yield piece.data, source.nbytes, source


def _fill(room: memoryview, start: int, segments: list[tuple[int, int, bytes | torch.Tensor]]) -> None:
    """Copies what the file has from `start` on."""
    target, end = torch.frombuffer(room, dtype=torch.uint8), start + len(room)
    for offset, length, source in segments:
        first, last = max(offset, start), min(offset + length, end)
        if first < last:
            if isinstance(source, torch.Tensor):
                target[first - start : last - start].copy_(_bytes_of(source)[first - offset : last - offset])
            else:
                room[first - start : last - start] = source[first - offset : last - offset]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy only if they are not in order already: it must not outlive the part it is made for."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


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
