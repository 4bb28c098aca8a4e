"""Data workers that start when their loader is made, in a script that knows nothing of it.

The iterator is given to the script when it first asks for one, if nobody can tell the difference: all that is drawn
comes from a generator of the loader's own, whose state is put back meanwhile, and what the workers were given has not
changed since. In every other case the script gets what torch would have made, and the journal tells why.
"""

import io
import os
import pickle
import random
import sys
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any
from zlib import crc32

from headway import run as runs
from headway.events.vocabulary import Told
from headway.instrument.origin import file_of, is_own
from headway.instrument.patches import around, looks_like

if TYPE_CHECKING:
    from headway.instrument.session import Session

LOADERS = 1
"""So many loaders have their workers started early: the first is the one to train with, and to end workers that nobody
asks for takes as long as they are at an item."""
LOOKED_AT = 4000
"""So many objects are compared, at most; a loader that can reach more is not started early."""
ENDS = 32
"""Of a longer list, so many items at each end are looked into; of the others it is seen which they are."""
SAMPLED = 4096
"""So many numbers of an array are compared."""
LONGEST = 500_000
"""Longer lists are not compared, and their loader is not started early: it would take too long."""

_DATA = "torch.utils.data"
_NUMPYS = ("Generator", "RandomState")
"""NumPy's sources of random numbers."""
_PYTHONS = ("builtins", "functools")
_PARTS = ("__func__", "__self__", "fget", "func", "args", "keywords")
"""What methods, properties and partial functions are made of."""


class EarlyLoaders:
    """The iterators that were made before the script asked for them."""

    def __init__(self, session: "Session", module: Any) -> None:
        self._session, self._module = session, module
        self._pids: Any = getattr(module._utils, "signal_handling", None)
        self._early: dict[int, _Early] = {}
        """By the identity of their loaders."""
        self._tried = 0

    def install(self) -> None:
        """Listens to loaders being made, and to their first use."""
        made = self._session.patch(self._module.DataLoader, "__init__", ("self", "dataset"))
        asked = self._session.patch(self._module.DataLoader, "_get_iterator", ("self",))
        if made is None or asked is None or not hasattr(self._pids, "_remove_worker_pids"):
            return
        make, failed = asked.original, asked.failed
        self._make = make

        def _get_iterator(loader: Any) -> Any:
            if not self._early or asked.state != "on":
                return make(loader)
            try:
                iterator = self._handed_over(loader)
            except Exception as error:  # the script gets what torch makes, and that this is off is journaled
                failed(error)
                iterator = None
            return make(loader) if iterator is None else iterator

        looks_like(_get_iterator, make)
        made.put(around(made, lambda loader, *args, **kwargs: loader, self._made))
        asked.put(_get_iterator)
        # What comes later is none of the start-up.
        self._session.on_first_step += [made.undo, self.shut_down]
        self._session.on_leave.append(self.shut_down)

    def _made(self, loader: Any, result: Any, error: BaseException | None) -> None:
        session = self._session
        if error is not None or session.recorder is None or not loader.num_workers or runs.may_be_helper():
            return
        if session.tracker is not None and session.tracker.steps_done:
            return
        if why := self._why_not(loader):
            self._tell(False, why)
            return
        self._tried += 1
        generator = loader.generator
        early = _Early(loader, generator.get_state())
        try:
            with _start_method_left_open():
                early.iterator = self._make(loader)
        finally:
            early.drawn = generator.get_state()
            generator.set_state(early.state)
        # A worker that dies must not interrupt whatever the script is at: it is looked for when the script asks.
        self._pids._remove_worker_pids(id(early.iterator))
        early.iterator._worker_pids_set = False
        key = id(loader)
        early.gone = weakref.ref(loader, lambda ref: self._drop(key, ""))
        self._early[key] = early
        if session.imports is not None:
            session.imports.data_comes()

    def _why_not(self, loader: Any) -> str:
        """Why a loader's workers cannot start before the script asks for them; empty if they can."""
        data = sys.modules[_DATA]
        sampler = loader.sampler
        if type(loader) is not self._module.DataLoader or isinstance(loader.dataset, data.IterableDataset):
            return "its kind of loader, or of dataset, has a state of its own"
        if loader.generator is None:
            return "it has no generator of its own, so what it draws depends on when it is asked"
        if type(sampler) is data.RandomSampler and sampler.generator is not loader.generator:
            return "its sampler does not draw from the loader's generator"
        if type(sampler) not in (data.SequentialSampler, data.RandomSampler, data.distributed.DistributedSampler):
            return "its sampler is not one of torch's"
        if type(loader.batch_sampler) not in (data.BatchSampler, type(None)):
            return "its batches are sampled in a way of their own"
        if loader.persistent_workers or loader.pin_memory:
            return "its workers are persistent, or its memory is pinned"
        if threading.current_thread() is not threading.main_thread():
            return "it is made in a thread, and a fork beside others may hang"
        if _start_method(loader) != "fork":
            return "its workers are not forked"
        if self._tried >= LOADERS:
            return "another one was before it"
        try:
            return "" if _Seen(loader).is_whole else "it holds too much to see whether that changes"
        except Exception as error:  # whatever a dataset may hold
            return f"what it holds cannot be compared ({type(error).__name__}: {error})"

    def _handed_over(self, loader: Any) -> Any:
        """The iterator that was made for a loader, as if it were made now; None if it cannot be had."""
        early = self._taken(id(loader))
        if early is None or early.gone() is not loader:
            return None
        generator = loader.generator
        if generator is not early.generator or not _same(generator.get_state(), early.state):
            why = "its generator was used since"
        elif _Seen(loader).parts != early.seen.parts:
            why = "its sampler or its dataset has changed since"
        elif not all(process.is_alive() for process in early.iterator._workers):
            why = "one of its workers has died"
        else:
            generator.set_state(early.drawn)
            self._pids._set_worker_pids(id(early.iterator), tuple(each.pid for each in early.iterator._workers))
            early.iterator._worker_pids_set = True
            self._tell(True, "its workers were started when it was made")
            return early.iterator
        self._end(early, why)
        return None

    def _taken(self, key: int) -> "_Early | None":
        """What was made for a loader. In a forked child it stays where it is for ever: when an iterator goes, it ends
        its workers, and these are the parent's."""
        early = self._early.get(key)
        return self._early.pop(key) if early is not None and early.pid == os.getpid() else None

    def _drop(self, key: int, why: str) -> None:
        early = self._taken(key)
        if early is not None:
            self._end(early, why or "it was never asked")

    def _end(self, early: "_Early", why: str) -> None:
        self._tell(False, why)
        early.iterator._shutdown_workers()

    def shut_down(self) -> None:
        """Ends the workers that nobody has asked for."""
        for key in list(self._early):
            self._drop(key, "it was not asked before the first step, or not at all")

    def _tell(self, on: bool, why: str) -> None:
        if self._session.recorder is not None:
            self._session.recorder.mark(Told.FAST_START, item="loader", on=on, why=why)


def _start_method(loader: Any) -> str:
    """How a loader's workers would start, without settling it for the program, which may do so once only."""
    given = loader.multiprocessing_context
    context = given or sys.modules["multiprocessing.context"]._default_context
    method = context.get_start_method(allow_none=True)
    return str(method or context._default_context.get_start_method())


@contextmanager
def _start_method_left_open() -> Iterator[None]:
    """What is started in here does not settle how the program's processes start."""
    default = sys.modules["multiprocessing.context"]._default_context
    settled = default._actual_context
    try:
        yield
    finally:
        default._actual_context = settled


class _Early:
    """One iterator, and how everything was before it was made."""

    iterator: Any
    drawn: Any
    """The generator's state after that."""
    gone: Callable[[], Any]

    def __init__(self, loader: Any, state: Any) -> None:
        self.generator, self.state, self.seen = loader.generator, state, _Seen(loader)
        self.pid = os.getpid()


class _Seen:
    """All that a loader's workers can reach: attributes, items, and the globals that the program's own code names.

    Of two, the `parts` are equal if it is the same objects with the same contents, as far as those can be compared.
    """

    def __init__(self, loader: Any) -> None:
        torch = sys.modules["torch"]
        groups = torch.distributed.is_available() and torch.distributed.is_initialized()
        # Torch sets variables of its own when its first optimizer is made.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
        self.parts: list[Any] = [os.getcwd(), environ, groups, _start_method(loader)]
        self.parts += (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
        self.parts.append(torch.multiprocessing.get_sharing_strategy())
        self.is_whole = True
        self._known: dict[int, Any] = {}
        self._look(vars(loader))

    def _look(self, thing: Any) -> None:
        if thing is None or isinstance(thing, bool | int | float | str | bytes):
            self.parts.append(thing)
        elif len(self.parts) >= LOOKED_AT:
            self.is_whole = False
        elif id(thing) not in self._known:
            self._known[id(thing)] = thing  # held, so that nothing else gets its number
            self.parts.append(id(thing))
            self._look_into(thing, type(thing))

    def _look_into(self, thing: Any, kind: type) -> None:
        if hasattr(kind, "_version") and hasattr(kind, "data_ptr"):
            self.parts += (thing._version, thing.data_ptr())
        elif hasattr(kind, "__array_interface__") and kind.__name__ != "memmap":
            self.parts.append(crc32(thing.flat[:: max(1, thing.size // SAMPLED)].tobytes()))
        elif kind.__name__ == "Generator" and kind.__module__ == "torch._C":
            self.parts.append(crc32(thing.get_state().numpy()))
        elif issubclass(kind, random.Random) or kind.__name__ in _NUMPYS:
            self.parts.append(crc32(pickle.dumps(thing)))  # nothing else tells all that they hold
        elif issubclass(kind, bytearray | array):
            self.parts.append(crc32(thing))
        elif issubclass(kind, io.IOBase):
            if not thing.closed and thing.readable():  # workers move its position, which is everyone's
                raise TypeError("a file that is open")
        elif issubclass(kind, dict | list | tuple | set | frozenset | deque):
            if len(thing) > LONGEST:
                self.is_whole = False
            else:
                self._look_at_all([*thing, *dict.values(thing)] if issubclass(kind, dict) else [*thing])
        elif issubclass(kind, FunctionType):
            self._look_at_code(thing)
        elif issubclass(kind, type):
            if is_own(file_of(thing.__module__)):
                for base in thing.__mro__[:-1]:
                    self._look_at_all(list(vars(base).values()))
        elif not issubclass(kind, ModuleType):
            parts = [getattr(thing, name, None) for name in _PARTS] if kind.__module__ in _PYTHONS else []
            self._look_at_all([kind, *parts, *getattr(thing, "__dict__", {}).values(), *_slots(thing)])

    def _look_at_all(self, items: list[Any]) -> None:
        self.parts.append(len(items))
        if len(items) > 2 * ENDS:
            self.parts.append(hash(tuple(map(id, items))))
            items = [*items[:ENDS], *items[-ENDS:]]
        for item in items:
            self._look(item)

    def _look_at_code(self, function: FunctionType) -> None:
        """What a function of the program's own may use besides its arguments."""
        if not is_own(function.__code__.co_filename):
            return
        names, space = set(_names(function.__code__)), function.__globals__
        for name in sorted(names):
            found = space.get(name, _Seen)
            self.parts.append(name)
            self._look(found)
            if isinstance(found, ModuleType) and is_own(getattr(found, "__file__", None) or ""):
                self._look_at_all([vars(found)[each] for each in sorted(names & vars(found).keys())])
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is empty yet
                self._look(cell.cell_contents)
        self._look_at_all([function.__defaults__, function.__kwdefaults__])


def _names(code: CodeType) -> Iterable[str]:
    """The names that code uses, and the code within it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _slots(thing: Any) -> list[Any]:
    names = [name for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ())]
    return [getattr(thing, name, None) for name in names]


def _same(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and (one == other).all())
