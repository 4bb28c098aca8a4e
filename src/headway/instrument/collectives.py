"""What ranks send each other, and which groups they make, before the first step: from where, how often, how long.

All that Python sends goes through the methods of one class, `ProcessGroup`, so these are listened to, and not the many
functions that call them: a method can be put back whole, whoever has imported what by then. What C++ sends by itself is
asked for by few functions of Python's, which are listened to as well. A group counts what it sends; if it has sent more
than was seen, torch's flight recorder tells what.

Once the first step is done, all of it is written down, summed by call site, and every hook is taken out.
"""

import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from time import monotonic_ns, time_ns
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from headway.events.vocabulary import Told
from headway.instrument.patches import Patch, around, looks_like

if TYPE_CHECKING:
    from headway.instrument.session import Session

LIBRARIES = frozenset(
    ("torch", "torchrec", "headway", "fbgemm_gpu", "contextlib", "functools", "threading", "concurrent")
)
"""Packages whose lines are nobody's own: a call site is the first line outside of them."""

LISTENS_TO = 100_000
"""So many operations are no start-up any more: a program that never steps is listened to no longer."""
RANKS_KEPT = 64
"""Of a larger group, the first ranks and the last are told."""

_METHODS = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource",
    "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
_BY_CPP = ("_broadcast_coalesced", "_verify_params_across_processes")
"""Functions of `torch.distributed` that have C++ send something to the group they are given first."""
_HELPER = ("group_size", "group_rank", "global_ranks_in_group")
_C10D = "torch.distributed.distributed_c10d"
_LOGGER = "torch.distributed.c10d_logger"
_PLUMBING = (
    _C10D, _LOGGER, "torch.utils.", "torch.nn.modules.", "torch.overrides", "contextlib", "functools", "threading",
    "headway.instrument.", "headway.launch.", "headway.run", "headway.startup.randomness", "headway.startup.runner",
)  # fmt: skip
_OF_A_STEP = ("_call_impl", "_engine_run_backward")
"""Functions of torch's that only a forward or a backward pass goes through."""


class _Sent:
    """What one call site has sent to one group."""

    __slots__ = ("bytes", "calls", "codes", "count", "first_ns", "lasti", "ns", "told")

    def __init__(self, told: dict[str, Any], codes: list[CodeType]) -> None:
        self.told = told
        self.codes = codes  # held, so that no other code gets the same identity
        self.count = self.calls = self.ns = self.bytes = 0
        self.lasti = sys.maxsize
        self.first_ns = monotonic_ns()


class Collectives:
    """All that one process has sent so far."""

    def __init__(self, session: "Session", torch_distributed: Any) -> None:
        self._session, self._c10d, self._torch = session, torch_distributed.distributed_c10d, torch_distributed
        self._sent: dict[Any, _Sent] = {}
        self._works: dict[int, _Sent] = {}
        self._seen: dict[str, set[int]] = {}
        """By group, the numbers that it gave to what was seen."""
        self._groups: dict[str, weakref.ref[Any]] = {}
        """Not held: a group that is destroyed has to go."""
        self._patches: list[Patch] = []
        self._count = 0

    # --- listening ---

    def listen(self) -> None:
        """Puts the hooks in, and sees to it that they go."""
        group = self._c10d.ProcessGroup
        hooks: list[tuple[Any, str, Callable[[Any], Any], Callable[..., None]]]
        hooks = [(group, name, _number, partial(self._has_sent, name)) for name in _METHODS if hasattr(group, name)]
        hooks += [(self._c10d.Work, "wait", _nothing, self._has_waited)]
        hooks += [(group, "split_group", _nothing, self._has_split)] if hasattr(group, "split_group") else []
        for owner, name, before, after in hooks:
            if patch := self._session.patch(owner, name):
                self._put(patch, self._listening(patch, before, after))
        for name in _BY_CPP:
            if patch := self._session.patch(self._torch, name):
                self._put(patch, around(patch, _sends, partial(self._has_had_sent, name)))
        if patch := self._session.patch(self._c10d, "_new_process_group_helper", _HELPER):
            self._put(patch, around(patch, _asks, self._got))
        self._session.on_first_step.append(self.tell)
        self._session.on_leave.append(self.tell)

    def _put(self, patch: Patch, hook: Any) -> None:
        patch.put(hook)
        self._patches.append(patch)

    def _listening(self, patch: Patch, before: Callable[[Any], Any], after: Callable[..., None]) -> Any:
        """The original, with `before(self)` ahead of it and `after(self, args, result, token, took_ns)` behind. Its
        first argument has a name, and it has the original's: by that, pybind tells a method that calls the one which it
        overrides from one that it is to call itself."""
        original, session = patch.original, self._session

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if patch.state != "on" or session.recorder is None:
                return original(self, *args, **kwargs)
            token, began_ns = before(self), monotonic_ns()
            result = original(self, *args, **kwargs)
            took_ns = monotonic_ns() - began_ns
            try:
                after(self, args, result, token, took_ns)
            except Exception as error:  # measuring must not stop the job: the hook is switched off, and told of
                patch.failed(error)
            return result

        looks_like(call, original)
        call.__code__ = call.__code__.replace(co_name=original.__name__)
        call.__headway__ = patch  # type: ignore[attr-defined]
        call._torchdynamo_disable = True  # type: ignore[attr-defined]
        return call

    def _has_sent(self, name: str, group: Any, args: Any, result: Any, before: int | None, took_ns: int) -> None:
        sent = self._place(name, group.group_name, group)
        count = 1
        if before is not None and (after := _number(group)) is not None and after > before:
            count = after - before
            self._seen.setdefault(group.group_name, set()).update(range(before + 1, after + 1))
        sent.count += count
        sent.ns += took_ns
        sent.bytes += max(map(_bytes, args), default=0)
        if result is not None:
            if len(self._works) > 4096:  # works that nobody waits for
                self._works.clear()
            self._works[id(result)] = sent
        self._count += count
        if self._count >= LISTENS_TO:
            self.tell()

    def _has_had_sent(self, name: str, token: tuple[Any, ...], result: Any, error: BaseException | None) -> None:
        group, args, before, began_ns = token
        if error is None and self._session.recorder is not None:
            self._has_sent(name, group, args, None, before, monotonic_ns() - began_ns)

    def _has_waited(self, work: Any, args: Any, result: Any, token: None, took_ns: int) -> None:
        sent = self._works.pop(id(work), None)
        if sent is not None:
            sent.ns += took_ns

    def _has_split(self, parent: Any, args: Any, group: Any, token: None, took_ns: int) -> None:
        known = list(self._c10d._world.pg_group_ranks.get(parent, ()))
        self._has_made(group, [known[rank] for rank in args[0]] if args else [], took_ns)

    def _got(self, token: tuple[int, list[int]], result: Any, error: BaseException | None) -> None:
        if error is None and self._session.recorder is not None:
            self._has_made(result[0], token[1], monotonic_ns() - token[0])

    def _has_made(self, group: Any, ranks: list[int], took_ns: int) -> None:
        is_member = isinstance(group, self._c10d.ProcessGroup)
        # Groups that a rank is not in are all the same to it.
        sent = self._place("new_group", group.group_name if is_member else "", group if is_member else None)
        if is_member and ranks:  # torch has not noted them yet
            sent.told |= _members(sorted(ranks))
        sent.count += 1
        sent.ns += took_ns

    # --- where ---

    def _place(self, name: str, group_name: str, group: Any) -> _Sent:
        """The entry of the call that is going on."""
        frame: FrameType | None = sys._getframe(2)
        key: list[Any] = [name, group_name]
        lasti, is_below = -1, True
        while frame is not None:
            module = frame.f_globals.get("__name__") or ""
            if is_below and module == _C10D:
                lasti = frame.f_lasti
            elif is_below and not module.startswith((_LOGGER, "headway.")):
                is_below = False
            key.append(id(frame.f_code))
            if module.partition(".")[0] not in LIBRARIES:
                key.append(frame.f_lasti)
                break
            frame = frame.f_back
        where = tuple(key)
        sent = self._sent.get(where)
        if sent is None:
            sent = self._sent[where] = self._new(name, group_name, group, list(_frames(sys._getframe(2))))
        # What one function sends in several parts is one call, as long as it goes on in the function.
        sent.calls += lasti <= sent.lasti
        sent.lasti = lasti
        return sent

    def _new(self, name: str, group_name: str, group: Any, frames: list[FrameType]) -> _Sent:
        below = [frame for frame in frames if _module(frame).partition(".")[0] in LIBRARIES]
        at = next((n for n, frame in enumerate(frames) if frame not in below), len(frames))
        site = frames[at] if at < len(frames) else None
        codes = [frame.f_code for frame in frames[: at + 1]]
        told = {
            "op": _operation(name, frames[:at]),
            "group": group_name,
            **self._told_of(group_name, group),
            "site": f"{site.f_code.co_filename}:{site.f_lineno} {site.f_code.co_name}" if site else "",
            "through": _entries(frames[:at]),
            "step": any(code.co_name in _OF_A_STEP for code in (frame.f_code for frame in below)),
        }
        return _Sent(told, codes)

    def _told_of(self, group_name: str, group: Any) -> dict[str, Any]:
        world = self._c10d._world
        backend = world.pg_map.get(group, ("",))[0] if group is not None else ""
        if group is not None:
            self._groups[group_name] = weakref.ref(group)
        default = world.default_pg
        size = default.size() if default is not None else group.size() if group is not None else 0
        ranks = list(world.pg_group_ranks.get(group) or (range(group.size()) if group is not None else ()))
        told_so = os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in _TRUE
        lazy = told_so if backend == "gloo" else getattr(group, "bound_device_id", None) is None
        return {"world": size, **_members(ranks), "backend": str(backend), "lazy": lazy}

    # --- telling ---

    def tell(self) -> None:
        """Writes down what was sent, once, and listens no longer."""
        patches, self._patches = self._patches, []
        for patch in patches:
            patch.undo()
        recorder = self._session.recorder
        if recorder is None or not patches:
            return
        try:
            self._find_unseen()
        except Exception as error:  # what was seen is told all the same
            self._session.tell(Patch("torch's flight recorder", self._c10d, "", self._session.tell), error)
        for told in self._sums():
            recorder.mark(Told.COLLECTIVE, **told)
        for sums in (self._sent, self._works, self._seen, self._groups):
            sums.clear()

    def _sums(self) -> list[dict[str, Any]]:
        """What was sent, by operation, group and call site."""
        sums: dict[Any, dict[str, Any]] = {}
        for sent in list(self._sent.values()):  # another thread may still be sending
            told = sent.told
            key = tuple(told[name] for name in ("op", "group", "site", "through", "step"))
            empty = {"count": 0, "calls": 0, "seconds": 0.0, "bytes": 0, "first_ns": sent.first_ns}
            total = sums.setdefault(key, told | empty)
            total["count"] += sent.count
            total["calls"] += sent.calls
            total["seconds"] = round(total["seconds"] + sent.ns / 1e9, 6)
            total["bytes"] += sent.bytes
            total["first_ns"] = min(total["first_ns"], sent.first_ns)
        return sorted(sums.values(), key=lambda told: told["first_ns"])

    def _find_unseen(self) -> None:
        """What a group has sent, by its own count, and nobody saw: sent by C++ for itself. Its time is not known."""
        missing: dict[tuple[str, int], Any] = {}
        for name, ref in list(self._groups.items()):
            if (group := ref()) is not None and (last := _number(group)):
                numbers = set(range(1, last + 1)) - self._seen.get(name, set())
                missing |= {(name, number): group for number in numbers}
        if not missing:
            return
        recorded = {(each["process_group"][0], each["collective_seq_id"]): each for each in self._flight()}
        libraries = _library_files()
        for (name, number), group in missing.items():
            each = recorded.get((name, number), {})
            sent = self._unseen(each, name, group, libraries)
            sent.count += 1
            sent.calls += 1
            sent.bytes += max(_recorded_bytes(each, "input"), _recorded_bytes(each, "output"))

    def _flight(self) -> list[Any]:
        """What torch's flight recorder has kept: the last 2000 of gloo's, by default."""
        dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace", None)
        return pickle.loads(dump(True, True, False)).get("entries", []) if dump is not None else []

    def _unseen(self, each: dict[str, Any], group_name: str, group: Any, libraries: tuple[str, ...]) -> _Sent:
        op = str(each.get("profiling_name") or "unseen").rpartition(":")[2]
        frames = each.get("frames", [])
        at = next((n for n, frame in enumerate(frames) if not frame["filename"].startswith(libraries)), None)
        site = "{filename}:{line} {name}".format(**frames[at]) if at is not None else ""
        step = not frames or any(frame["name"] in _OF_A_STEP for frame in frames)
        through = frames[at - 1]["name"] if at else "C++"
        key = (op, group_name, site, through, step)
        if key not in self._sent:
            where = {"op": op, "group": group_name, "site": site, "through": through, "step": step}
            sent = self._sent[key] = _Sent(where | self._told_of(group_name, group), [])
            if "time_created_ns" in each:
                sent.first_ns += each["time_created_ns"] - time_ns()
        return self._sent[key]


_SIZES = {"Byte": 1, "Char": 1, "Bool": 1, "Half": 2, "BFloat16": 2, "Short": 2, "Long": 8, "Double": 8}
"""By the flight recorder's names; the others have 4 bytes."""
_TRUE = ("1", "true", "yes", "on", "y", "t")


def _number(group: Any) -> int | None:
    """How much a group has sent so far, as it counts itself; None if its backend does not."""
    try:
        number: int = group._get_sequence_number_for_group()
    except Exception:  # each backend says so in its own way
        return None
    return number


def _nothing(owner: Any) -> None:
    pass


def _sends(group: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return group, args, _number(group), monotonic_ns()


def _asks(
    group_size: int, group_rank: int | None, global_ranks_in_group: list[int], *args: Any, **kwargs: Any
) -> tuple[int, list[int]]:
    return monotonic_ns(), global_ranks_in_group


def _bytes(value: Any) -> int:
    """The size of a tensor, or of all in a list."""
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


def _recorded_bytes(each: dict[str, Any], side: str) -> int:
    shapes, types = each.get(f"{side}_sizes", ()), each.get(f"{side}_dtypes", ())
    return sum(prod(shape) * _SIZES.get(kind, 4) for shape, kind in zip(shapes, types, strict=False))


def _members(ranks: list[int]) -> dict[str, Any]:
    kept = ranks if len(ranks) <= RANKS_KEPT else [*ranks[: RANKS_KEPT - 1], ranks[-1]]
    return {"ranks": kept, "size": len(ranks)}


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _library_files() -> tuple[str, ...]:
    """How the files of libraries begin."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in LIBRARIES)
    return tuple(os.path.dirname(file) + os.sep if file.endswith("__init__.py") else file for file in files if file)


def _operation(name: str, frames: list[FrameType]) -> str:
    """What was called in the end: the outermost of torch's functions for sending, or the group's own method."""
    found = name
    for frame in frames:
        module = _module(frame)
        if module == _C10D and not frame.f_code.co_name.startswith(("_", "<")):
            found = frame.f_code.co_name
        elif module != _C10D and not module.startswith((_LOGGER, "headway.")):
            break
    return found


def _entries(frames: list[FrameType]) -> str:
    """The way through libraries, outermost first: of each class or public function, where it was entered."""
    entered: dict[str, str] = {}
    for frame in reversed(frames):
        name = frame.f_code.co_qualname
        is_closure = "<" in name  # of a decorator, most often
        if not is_closure and not name.startswith("_") and not _module(frame).startswith(_PLUMBING):
            entered.setdefault(name.partition(".")[0], name)
    return " > ".join(entered.values())


# --- modules ---------------------------------------------------------------------------------------------------------


def _groups(session: "Session", module: Any) -> None:
    if hasattr(module, "ProcessGroup"):  # torch may be built without
        Collectives(session, module).listen()


MODULES = {"torch.distributed": _groups}
"""What to do with which module once it is imported."""
