"""The copy: states go into memory that outlives this process, where they already have the form of the file.

From there the keeper has them uploaded. The plan is torch's own planner's, made once, and again when shapes, placements
or the number of ranks change.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from headway.checkpoint import catalog, image
from headway.checkpoint.arena import Arena, Shape, aligned, slots_that_fit
from headway.checkpoint.image import Image
from headway.checkpoint.layout import generation_of, new_tag
from headway.checkpoint.lease import Owner, Taken, claim, holder, release
from headway.checkpoint.link import Link, telling
from headway.checkpoint.ranks import Elsewhere, Ranks, local_size
from headway.checkpoint.retention import Retention
from headway.errors import HeadwayError, InputError, PlatformError
from headway.machine import free_memory
from headway.storage import open_storage

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


@dataclass(frozen=True, kw_only=True)
class _There:
    """What the first rank finds at the root when a run begins."""

    former: Owner | None
    problem: str
    """Why nothing can be written now."""
    generation: int
    is_known: bool
    """Whether anybody had written here."""
    deleted: str
    """The tag of the first save that somebody has deleted; empty if nobody has."""


@dataclass
class _Look:
    """A state as it is found, before it is copied."""

    planner: SavePlanner
    signature: list[Any]
    values: list[bytes] | None
    """None: another plan is needed."""


class Stager:
    """Copies states into memory that outlives this process, and hands them to the keeper."""

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
        self._durable = self._has_others = self._closed = False
        self._complete: str | None = None
        """The newest save that is known to be in memory on all ranks."""
        self._last: str | None = None
        self._unfinished = False
        self.mode = ""
        self._listing: list[catalog.Checkpoint] | None = None
        self._unclaimed: dict[str, Any] | None = None
        self.former: Owner | None = None
        """Who wrote here before, and did not say goodbye."""
        self.revoked: set[int] = set()
        """Steps whose memory was dropped, because somebody has deleted their checkpoints."""
        self.problem = ""
        """Why nothing can be written now."""
        self._join()

    def _join(self) -> None:
        """Finds the keeper, makes this run the one that writes here, and looks at what there is: in this order, since a
        run before this one may still be leaving."""
        slow = f"waiting for {self.storage.url} to answer …" if self.ranks.is_first else ""
        with telling(slow):
            self.session, found = self.ranks.of_first(lambda: (os.urandom(6).hex(), holder(self.storage)))
        owner = Owner.this(self.session, self._job, self._node)
        lease = {"root": self.storage.url, "owner": asdict(owner)} if self.ranks.is_first else None
        self.link = Link(self.storage.url, self.session, self.ranks.rank, lease, self._take)
        try:
            self._found = self.link.arenas()
            with telling(slow):
                there = self.ranks.of_first(lambda: self._claim(owner, found))
        except BaseException:
            self.link.close()
            raise
        self.former, self.problem = there.former, there.problem
        held = [generation_of(held.tag) for arena, _ in self._found for held in arena.held()]
        self.generation = max([there.generation, *held])
        if not there.is_known:  # somebody has deleted the folder since: what memory holds of it is of the past, too
            self.link.keep_only("")
            _close_behind(self._found)
            self._found = self.link.arenas()
        self._revoke(there.deleted)

    def _claim(self, owner: Owner, found: Owner | None) -> "_There":
        """Makes this run the one that writes here: now, or with its first checkpoint if the place is full. Then lists
        what is stored. `found` is who wrote here when this run began."""
        last = holder(self.storage)
        if last is not None and last.job != owner.job and last.session != (found.session if found else ""):
            raise Taken(
                f"job {last.job} wrote checkpoints to {self.storage.url} while this one waited for its turn. Choose "
                f"another folder; or, to go on from that job's checkpoints, start again."
            )
        former, error = None, None
        try:
            former = claim(self.storage, owner)
        except OSError as problem:
            error, self._unclaimed = problem, asdict(owner)
        self._listing = catalog.checkpoints(self.storage)
        if error is not None and error.errno in _NEVER and not self._listing:
            raise InputError(
                f"checkpoints cannot be written to {self.storage.url} ({error}). Choose another place."
            ) from error
        return _There(
            former=former, problem=f"{type(error).__name__}: {error}" if error is not None else "",
            generation=max((generation_of(each.tag) for each in self._listing if each.tag), default=0),
            is_known=last is not None, deleted=catalog.deleted(self.link.committed, self._listing),
        )  # fmt: skip

    def _revoke(self, deleted: str) -> None:
        """Drops from memory a save that somebody has deleted from the storage, and all that came after it: they would
        bring back what was deleted for a reason. What is still being uploaded of them is not committed any more."""
        for arena, tags in self._found if deleted else ():
            for held in arena.held():
                if held.tag >= deleted:
                    arena.open(held.slot)
                    self.revoked.add(held.step)
            tags[:] = [tag for tag in tags if tag < deleted]

    def take_listing(self) -> list[catalog.Checkpoint] | None:
        """What was stored when this run began, once: what was committed since then is in memory, too."""
        listing, self._listing = self._listing, None
        return listing

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
                if (again := self._planner_again(found)) is not None:
                    return _Look(again, self._signature, self._values(again)), None
                planner = self._new_planner()
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
        wanted, ours = MODES[self._memory], local_size()
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
        return [image.tensor_at(where, piece) for piece in self._image.pieces]

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
            self.link.held(save.task)
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
        segments = list(image.segments(save.image, planner, values))
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
            image.fill(self._arena.image(slot), start, segments)
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
        return local_size() < self.ranks.size

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

    def close(self, for_good: bool = True) -> None:
        """Upload what memory alone has, wait for all uploads, and free the memory. If not for good, leave all of it to
        the keeper, for the next trainer."""
        if self._closed:
            return
        self._closed = True
        if for_good:
            self.link.save_held()
            self.wait(DEADLINE_S)
            if self.ranks.is_first:
                with suppress(OSError):  # the others see that this process is gone, or wait a little
                    release(self.storage, self.session)
        self.link.close(goodbye=for_good)
        self._views = []
        _close_behind(self._found)
        self._found = []
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _in_words(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


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
