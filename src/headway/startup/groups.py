"""Process groups that are made once, by their members alone, and connect when they are first used.

Stock `new_group` makes another group for the same ranks each time, connects every pair of ranks at once (gloo: 2N+1
store operations a rank), and keeps ranks outside in step by counting the groups of the whole job. Here a group that is
there is used again, whoever made it; its name comes from its ranks, so that ranks outside have nothing to do and
nothing to count; gloo connects two ranks when they first talk; and a group of one rank talks to nobody.

`use_local_synchronization=True` of torch, which is meant for that, is not used: it names a group by how many groups the
calling rank has. Two members that have unlike numbers of them wait for each other until the timeout.
"""

import hashlib
import inspect
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.errors import InputError
from headway.startup.words import say_once

LAZY = "TORCH_GLOO_LAZY_INIT"
"""What torch looks at each time it makes a gloo group."""

_NEEDED = {"group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name", "timeout"}
_lock = threading.Lock()


@dataclass(frozen=True)
class Wanted:
    """A group as it was asked for. Two that are equal are one group."""

    ranks: tuple[int, ...]
    backend: str
    timeout: timedelta | None

    def fits(self, group: Any, ranks: Iterable[int]) -> bool:
        """Whether a group of these ranks is what was asked for."""
        alike = tuple(ranks) == self.ranks and dist.get_backend_config(group) == self.backend
        return alike and self.timeout in (None, _timeout(group))

    @property
    def name(self) -> str:
        """The same on every member, whatever other groups it has."""
        told = f"{self.ranks} {self.backend} {self.timeout}"
        return f"headway-{hashlib.sha1(told.encode(), usedforsecurity=False).hexdigest()[:16]}"


@dataclass
class _Made:
    """What was made below one default group; the next one begins anew, as torch's own numbering does."""

    world: Callable[[], Any] = lambda: None
    """Weak, as all else would keep the threads and sockets of a default group that was destroyed."""
    times: Counter[str] = field(default_factory=Counter)
    together: dict[Wanted, Any] = field(default_factory=dict)
    """Groups that all ranks had to make together, on ranks outside as well."""


_made = _Made()


def process_group(
    ranks: Iterable[int] | None = None, backend: str | None = None, *, timeout: timedelta | None = None
) -> Any:
    """The group of these ranks, by default of all: the one there is, else a new one that connects on first use.

    Call it on every rank, in the same order. A rank that is no member gets `GroupMember.NON_GROUP_MEMBER`, with which
    torch's collectives do nothing. `backend` is that of the default group unless given. A group with any `timeout` will
    do, unless one is given. Two groups of the same ranks, to overlap what they send, are for `dist.new_group`.
    """
    global _made
    world = _default_group()
    wanted = Wanted(_checked(ranks), _config(backend), timeout)
    with _lock:
        if _made.world() is not world:
            _made = _Made(weakref.ref(world))
        if (c10d := _internals(world)) is None:
            return _made_together(world, wanted, backend)
        if dist.get_rank() not in wanted.ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return _found(c10d, wanted) or _made_by_members(c10d, wanted, backend)


def device_mesh(device_type: str, shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """As `init_device_mesh`, from groups that are there or connect on first use: each rank makes only its own.

    Unlike that, it leaves the current CUDA device alone: set it before.
    """
    if len(shape) != len(mesh_dim_names) or len(set(mesh_dim_names)) != len(mesh_dim_names):
        raise InputError(
            f"a mesh of shape {tuple(shape)} needs {len(shape)} different names, not {tuple(mesh_dim_names)}."
        )
    world, size = _default_group(), dist.get_world_size()
    if int(torch.tensor(tuple(shape)).prod()) != size:
        raise InputError(
            f"a mesh of shape {tuple(shape)} has no place for each of {size} ranks. Give it {size} places."
        )
    if _internals(world) is None:
        return init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(mesh_dim_names))
    mesh = torch.arange(size, dtype=torch.int).view(tuple(shape))
    place = (mesh == dist.get_rank()).nonzero()[0].tolist()
    lines = [mesh[(*place[:dim], slice(None), *place[dim + 1 :])].tolist() for dim in range(len(place))]
    groups = [process_group(line) for line in lines]
    return DeviceMesh.from_group(groups, device_type, mesh, mesh_dim_names=tuple(mesh_dim_names))


def lazy_groups() -> bool:
    """Has every gloo group of this process, made by whatever code, connect on first use. Call it on every rank, before
    `init_process_group`. Whether it is so: a user who has set TORCH_GLOO_LAZY_INIT=0 is left alone."""
    return os.environ.setdefault(LAZY, "1") not in ("0", "N", "NO", "FALSE", "OFF")


# --- what was asked for ----------------------------------------------------------------------------------------------


def _default_group() -> Any:
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError("there is no default process group yet. Call torch.distributed.init_process_group before.")
    return dist.group.WORLD


def _checked(ranks: Iterable[int] | None) -> tuple[int, ...]:
    size = dist.get_world_size()
    given = list(range(size)) if ranks is None else list(ranks)
    if not given:
        raise InputError("a process group without ranks was asked for. Name at least one, or None for all.")
    if wrong := [rank for rank in given if isinstance(rank, bool) or not isinstance(rank, int)]:
        raise InputError(f"ranks are whole numbers, and {wrong[0]!r} is none: {given}.")
    if outside := [rank for rank in given if not 0 <= rank < size]:
        raise InputError(f"there is no rank {outside[0]} among {size}: give ranks from 0 to {size - 1}, not {given}.")
    if twice := [rank for rank, count in Counter(given).items() if count > 1]:
        raise InputError(f"rank {twice[0]} is named more than once in {given}: name each once.")
    return tuple(sorted(given))


def _config(backend: str | None) -> str:
    """The backend for each kind of device, in torch's words: equal for equal backends, however they were spelt."""
    if backend is None:
        return dist.get_backend_config()
    try:
        config = dist.BackendConfig(dist.Backend(backend))
        lacking: list[str] = [
            name for name in config.get_device_backend_map().values() if not dist.is_backend_available(name)
        ]
    except (KeyError, ValueError, RuntimeError):
        lacking = [backend]
    if lacking:
        raise InputError(f"torch has no backend {lacking[0]!r} here. Leave it out for that of the job.")
    return str(config)


# --- how it is had ---------------------------------------------------------------------------------------------------


def _internals(world: Any) -> Any:
    """Torch's own bookkeeping of groups, which is private; None where all ranks have to make groups together: NCCL
    communicators bound to a device are split from the default group's by all of its ranks."""
    c10d = dist.distributed_c10d
    if world.bound_device_id is not None or hasattr(world, "new_group") or _torchcomms(c10d):
        return None
    registry = getattr(c10d, "_world", None)
    if _is_known(c10d) and hasattr(registry, "pg_map") and hasattr(registry, "pg_group_ranks"):
        return c10d
    said = f"torch {torch.__version__} keeps its process groups in another way: they are made as by new_group."
    say_once(said, "process groups")
    return None


@cache
def _is_known(c10d: Any) -> bool:
    make = getattr(c10d, "_new_process_group_helper", None)
    return make is not None and inspect.signature(make).parameters.keys() >= _NEEDED


def _torchcomms(c10d: Any) -> bool:
    asked = getattr(c10d, "_use_torchcomms_enabled", None)
    return bool(asked and asked())


def _found(c10d: Any, wanted: Wanted) -> Any:
    """The oldest group that is alive and fits: the oldest, since all members made it before the others."""
    ranks = c10d._world.pg_group_ranks
    return next((group for group in c10d._world.pg_map if wanted.fits(group, ranks.get(group, ()))), None)


def _timeout(group: Any) -> timedelta | None:
    """None if torch does not say."""
    try:
        found = group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return None
    return found if isinstance(found, timedelta) else None


def _made_by_members(c10d: Any, wanted: Wanted, backend: str | None) -> Any:
    """A new group, of which ranks outside know nothing. What `new_group` does, under another name."""
    number, size = _made.times[wanted.name], len(wanted.ranks)
    _made.times[wanted.name] += 1  # after a destroy, what the store still holds of the old one is not read
    default_backend, store = c10d._world.pg_map[dist.group.WORLD]
    chosen = dist.Backend(backend or default_backend)
    with _lazily():
        group, _ = c10d._new_process_group_helper(
            group_size=size,
            group_rank=wanted.ranks.index(dist.get_rank()),
            global_ranks_in_group=list(wanted.ranks),
            backend=chosen,
            store=store if size > 1 else HashStore(),
            group_name=f"{wanted.name}-{number}",
            timeout=wanted.timeout or _default_timeout(c10d, chosen),
        )
    c10d._world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(wanted.ranks)}
    return group


def _default_timeout(c10d: Any, backend: str) -> timedelta:
    asked = getattr(c10d, "_get_default_timeout", None)
    return asked(backend) if asked else timedelta(minutes=30)


def _made_together(world: Any, wanted: Wanted, backend: str | None) -> Any:
    """Torch's own `new_group`, called once by every rank. Groups that others made are not looked for: ranks outside
    could not know, and would wait in the split. Not run on NCCL where headway is developed."""
    if wanted.fits(world, range(dist.get_world_size())):
        return world
    if wanted not in _made.together:
        with _lazily():
            _made.together[wanted] = dist.new_group(list(wanted.ranks), wanted.timeout, backend)
    group = _made.together[wanted]
    if group != dist.GroupMember.NON_GROUP_MEMBER and not _is_alive(group):
        raise InputError(
            f"the group of ranks {list(wanted.ranks)} was destroyed. Ranks outside take part in making it anew, and "
            f"cannot know that. Call torch.distributed.new_group on every rank."
        )
    return group


def _is_alive(group: Any) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True


@contextmanager
def _lazily() -> Iterator[None]:
    """Gloo groups made within connect on first use, unless the user has said otherwise."""
    if LAZY in os.environ:
        yield
        return
    os.environ[LAZY] = "1"
    try:
        yield
    finally:
        os.environ.pop(LAZY, None)
