"""How far a loader has got, and where the random numbers stand: a resumed job trains on what it would have trained on.

What decides the order of an epoch is drawn when the epoch begins. The state of the random numbers at that moment is
part of the position: there they are drawn again, and then put back to where the job was.
"""

import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

State = dict[str, Any]


class Resumable:
    """A loader that knows how far it has got: after `load_state_dict`, it goes on from there.

    Everything but the iteration is the wrapped loader's. Batches count when they are given out: whoever asks ahead
    moves the position ahead. Of several iterations at a time the newest counts.
    """

    def __init__(
        self, loader: Iterable[Any], skipping: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """`skipping()` is entered while batches are loaded only to be thrown away."""
        self._loader, self._skipping = loader, skipping
        self._parts = _parts(loader)
        self._epoch = self._batches = 0
        self._begin: State | None = None
        """What decided the order of the epoch under way; None between epochs."""
        self._going_on = False
        self._newest = object()
        self._early: _Early | None = None
        self._before: State | None = None
        self.ahead = b""
        """What its position was taken from ahead of a restore."""
        self.note = ""
        """After `load_state_dict`: in which way the position cannot be exact; empty if it is."""

    @property
    def epoch(self) -> int:
        """How many times it was iterated to the end."""
        return self._epoch

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)  # not `self._loader`: a copy has none at first

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        # Workers are sent off now. Without them a loader draws part of its order at the first batch: it begins there.
        return self._given(self._begun_early() or self._begun() if _has_workers(self._loader) else None)

    def _given(self, begun: tuple[Iterator[Any], object] | None) -> Iterator[Any]:
        batches, this = begun or self._begun()
        for batch in batches:
            if self._newest is this:
                self._batches += 1
            yield batch
        if self._newest is this:
            self._epoch, self._batches, self._begin = self._epoch + 1, 0, None

    def begin(self, rng: State | None = None) -> None:
        """Sends the workers off now: the next iteration takes what they load. They draw as they would after a restore
        to `rng`, if that is given; and then no random number is used up here."""
        if not _has_workers(self._loader):
            return
        if rng is None:
            before = None if self._going_on else _order(self._parts)
            self._early = _Early(self._begun(), before, None)
            return
        present = _host_rng_state()
        try:
            _set_host_rng_state(rng)
            before = None if self._going_on else _order(self._parts)
            self._early = _Early(self._begun(), before, _host_rng_state())
        finally:
            _set_host_rng_state(present)

    def _begun_early(self) -> tuple[Iterator[Any], object] | None:
        """What `begin` began, if it would be the same now; the random numbers then stand as after it."""
        early, self._early = self._early, None
        if early is None or early.before is None:  # the order of an epoch under way was decided when that began
            return early and early.begun
        now, then = _order(self._parts), early.before
        if now["epochs"] == then["epochs"] and (early.after is None or _is_same_rng(now["rng"], then["rng"])):
            if early.after is not None:
                _set_host_rng_state(early.after)
            return early.begun
        _set_generators(self._parts, then["generators"])
        return None

    def _begun(self) -> tuple[Iterator[Any], object]:
        """The batches of a new epoch, or the rest of one; and what tells this iteration from others."""
        this = self._newest = object()
        now = _order(self._parts)
        if not self._going_on:
            self._batches, self._begin = 0, now
            return _iterator(self._loader), this
        try:
            _set_order(self._parts, self._begin or now)
            rest = self._rest()
        finally:
            _set_order(self._parts, now)
        self._going_on = False
        return rest, this

    def _rest(self) -> Iterator[Any]:
        loader: Any = self._loader
        if _looks_up_samples(loader):
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            order = _Rest(getattr(loader, name), self._batches)
            rest = copy(loader)
            vars(rest).update({name: order, "persistent_workers": False})  # as attributes they may not be set
            batches: Iterator[Any] = iter(rest)
            order.skip()
            return batches
        batches = _iterator(loader)
        with self._skipping():
            for _ in islice(batches, self._batches):
                pass
        return batches

    # --- state ---

    def state_dict(self) -> State:
        """The position of this rank, in plain values and tensors."""
        return {
            "epoch": self._epoch,
            "batches": self._batches,
            "batch_size": self._batch_size,
            "world_size": self._world_size,
            "begin": self._begin,
            "generators": _generators(self._parts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on after the last batch that was given out before `state_dict`.

        With another number of ranks, or of samples a batch, it goes on a little earlier rather than leave samples out.
        """
        before, after = (state["world_size"], state["batch_size"]), (self._world_size, self._batch_size)
        self._batches, again = divmod(state["batches"] * before[0] * before[1], after[0] * after[1])
        self._epoch, self._begin, self._newest = state["epoch"], state["begin"], object()
        self._going_on = self._begin is not None
        self._early = None  # its workers end with it
        _set_generators(self._parts, state["generators"])
        self.note = ""
        if self._going_on and before != after:
            self.note = (
                f"the data position was saved on {before[0]} ranks with batches of {before[1]}, and is restored on "
                f"{after[0]} with batches of {after[1]}: {again} samples of this epoch come again. None is left out "
                "provided that all ranks share one order, as with DistributedSampler."
            )

    def mark_ahead(self, told: bytes) -> None:
        """The position that comes next is from here, and may be taken back."""
        self.ahead, self._before = told, self.state_dict()

    def take_back(self) -> None:
        """As it was before the position that was taken ahead."""
        if self._before is not None:
            self.load_state_dict(self._before)
        self.ahead, self._before = b"", None

    @property
    def _batch_size(self) -> int:
        """Samples a batch; 1 where batches are of no one size."""
        sizes = (getattr(part, "batch_size", None) for part in self._parts)
        return next((size for size in sizes if isinstance(size, int) and size > 0), 1)

    @property
    def _world_size(self) -> int:
        """Among how many ranks the samples are divided."""
        told = (getattr(part, "num_replicas", None) for part in self._parts)
        known = next((ranks for ranks in told if isinstance(ranks, int)), None)
        if known is None and dist.is_available() and dist.is_initialized():
            return dist.get_world_size()
        launched = os.environ.get("WORLD_SIZE", "")  # what is read ahead may be there before they have met
        return known or (int(launched) if launched.isdecimal() else 0) or 1


class Undisturbing:
    """A loader that keeps its own position, and disturbs no random numbers when it goes on from there: the epoch had
    drawn what it needs when it began."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._going_on = loader, False
        self._state: Any = None
        self._early: tuple[Iterator[Any], list[Any]] | None = None
        self._before: Any = None
        self.ahead = b""
        """What its position was taken from ahead of a restore."""

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)

    def __len__(self) -> int:
        return len(self._loader)

    def begin(self, rng: State | None = None) -> None:
        """Sends the workers off now: the next iteration takes what they load."""
        if _has_workers(self._loader):
            self._early = iter(self), _epochs(_parts(self._loader))

    def __iter__(self) -> Iterator[Any]:
        early, self._early = self._early, None
        if early is not None and early[1] == _epochs(_parts(self._loader)):
            return early[0]
        if early is not None and self._state is not None:
            self.load_state_dict(self._state)
        before = _host_rng_state() if self._going_on else None
        batches: Iterator[Any] = iter(self._loader)
        if before is not None:
            _set_host_rng_state(before)
        self._going_on = False
        return batches

    def load_state_dict(self, state: Any) -> None:
        self._loader.load_state_dict(state)
        self._going_on, self._state, self._early = True, state, None

    def mark_ahead(self, told: bytes) -> None:
        """The position that comes next is from here, and may be taken back."""
        self.ahead, self._before = told, copy(self._loader)

    def take_back(self) -> None:
        """As it was before the position that was taken ahead."""
        if self._before is not None:
            self._loader, self._going_on, self._state, self._early = self._before, False, None, None
        self.ahead, self._before = b"", None


class _Early(NamedTuple):
    """An iteration that was begun before anybody asked for it."""

    begun: tuple[Iterator[Any], object]
    before: State | None
    """What decided its order, if it is a new epoch's."""
    after: State | None
    """Where the random numbers stood after it had drawn from a saved state."""


def resumable(loader: Any, skipping: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Any:
    """The loader with a position; itself, if it was given one already, or is none."""
    if loader is None or isinstance(loader, Resumable | Undisturbing):
        return loader
    has_position = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return Undisturbing(loader) if has_position else Resumable(loader, skipping)


def set_position(loader: Any, state: Any, saved_ranks: int, ranks: int) -> str:
    """Has the loader go on where it was saved; what is to be said about that."""
    if saved_ranks != ranks and not isinstance(loader, Resumable):
        return f"the loader's position was that of {saved_ranks} ranks, not {ranks}: its data begins anew."
    loader.load_state_dict(state)
    return getattr(loader, "note", "")


def set_position_ahead(loader: Any, told: bytes, known: bool, saved_ranks: int, ranks: int) -> None:
    """Has the loader go on where it was when a rank `told` what it has for itself, and sends its workers off. The rank
    was another one if this one is not `known`."""
    own = pickle.loads(told)
    if own["loader"] is not None:
        loader.mark_ahead(told)
        set_position(loader, own["loader"], saved_ranks, ranks)
    if threading.current_thread() is threading.main_thread():  # else the random numbers may be in use meanwhile
        loader.begin(own["rng"] if known else None)


class _Rest:
    """The order of a loader without its beginning, none of whose samples is loaded."""

    def __init__(self, order: Iterable[Any], skipped: int) -> None:
        self._order, self._skipped = order, skipped

    def __iter__(self) -> "_Rest":
        self._left, self._items = self._skipped, iter(self._order)
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self._items)

    def skip(self) -> None:
        for _ in islice(self._items, self._left):
            pass
        self._left = 0


def _looks_up_samples(loader: Any) -> bool:
    """Whether a loader asks its dataset for samples in the order of a sampler, and does nothing else to them."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
    )


def _iterator(loader: Iterable[Any]) -> Iterator[Any]:
    """Begins an epoch. With workers that stay, only the first draws a seed for them: the others draw as well here, so
    that a job that was restarted draws as one that was not."""
    if isinstance(loader, DataLoader) and getattr(loader, "_iterator", None) is not None:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    return iter(loader)


# --- what decides the order ------------------------------------------------------------------------------------------


def _parts(loader: Any) -> list[Any]:
    """The loader, its samplers, theirs, and the dataset: all that may have random numbers or epochs of its own."""
    parts = [loader]
    for part in parts:  # grows meanwhile
        inner = (getattr(part, name, None) for name in ("batch_sampler", "sampler"))
        parts += [each for each in inner if each is not None and not any(each is known for known in parts)]
    return [*parts, getattr(loader, "dataset", None)]


def _has_workers(loader: Any) -> bool:
    return bool(getattr(loader, "num_workers", 0))


def _order(parts: list[Any]) -> State:
    return {"rng": _host_rng_state(), "generators": _generators(parts), "epochs": _epochs(parts)}


def _epochs(parts: list[Any]) -> list[Any]:
    return [part.epoch if hasattr(part, "set_epoch") and hasattr(part, "epoch") else None for part in parts]


def _set_order(parts: list[Any], order: State) -> None:
    _set_host_rng_state(order["rng"])
    _set_generators(parts, order["generators"])
    for part, epoch in zip(parts, order["epochs"], strict=False):
        if epoch is not None and hasattr(part, "set_epoch") and part.epoch != epoch:
            part.set_epoch(epoch)


def _generators(parts: list[Any]) -> list[torch.Tensor | None]:
    found = (getattr(part, "generator", None) for part in parts)
    return [each.get_state() if isinstance(each, torch.Generator) else None for each in found]


def _set_generators(parts: list[Any], states: list[torch.Tensor | None]) -> None:
    for part, state in zip(parts, states, strict=False):
        if state is not None and isinstance(generator := getattr(part, "generator", None), torch.Generator):
            generator.set_state(state)


# --- random numbers --------------------------------------------------------------------------------------------------


def rng_state() -> State:
    """Where this process's random numbers stand: torch's, on the host and on its accelerator, NumPy's and Python's."""
    state, (kind, device) = _host_rng_state(), _accelerator()
    # Asking a device that was never used would take memory on it.
    if device is not None and getattr(device, "is_initialized", lambda: True)():
        state[kind] = device.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Random numbers go on as they did after `rng_state`, on what this process has of the same kind."""
    _set_host_rng_state(state)
    kind, device = _accelerator()
    if device is not None and kind in state:
        device.set_rng_state(state[kind])


def _host_rng_state() -> State:
    """As plain values and tensors: they can be loaded with `weights_only`."""
    state: State = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        told = numpy.random.get_state(legacy=False)
        numbers = {name: each.tolist() if hasattr(each, "tolist") else each for name, each in told["state"].items()}
        state["numpy"] = {**told, "state": numbers}
    return state


def _is_same_rng(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    pythons = [(version, tuple(numbers), gauss) for version, numbers, gauss in (one["python"], other["python"])]
    same = torch.equal(one["torch"], other["torch"]) and pythons[0] == pythons[1]
    return same and bool(one.get("numpy") == other.get("numpy"))


def _set_host_rng_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])


def _accelerator() -> tuple[str, Any]:
    """The kind of device this process computes on, and torch's module for it, such as `torch.cuda`; None if none."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("", None) if device is None else (device.type, torch.get_device_module(device))


__all__ = ["Resumable", "Undisturbing", "resumable", "rng_state", "set_position", "set_position_ahead", "set_rng_state"]
