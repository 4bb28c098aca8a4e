"""A stopwatch that stands beside a program: `python stopwatch.py SCRIPT ARGUMENT …`, described by STOPWATCH.

It runs the script as it is, in this process, and notes when what it calls begins and ends: its own functions, the
classes it builds, the loaders it goes through, and a few entry points of its libraries. It knows nothing of headway and
uses none of its hooks. The script's top level runs in a namespace that sees every assignment, so functions and classes
can be timed from their definition on, and the loop of a script that has no functions by the names it assigns. Nothing
traces or profiles: what is not named costs nothing.

STOPWATCH is a JSON object: `out`, the file the times go to, and what `bench.programs.programs.Watch` describes.
"""

import builtins
import functools
import importlib
import inspect
import json
import os
import sys
import threading
import time
import types

_told = json.loads(os.environ["STOPWATCH"])
_now = time.monotonic_ns


class _Notes:
    """A file of lines: what, begin, end. Written at once, so that nothing is lost however a process ends."""

    def __init__(self, path):
        self.pid = os.getpid()
        self.file = os.open(f"{path}.{self.pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def take(self, what, begin_ns, end_ns):
        if os.getpid() == self.pid:  # not what forked helpers do
            os.write(self.file, f"{what}\t{begin_ns}\t{end_ns}\n".encode())


def _born_ns():
    """When this process was started, by the kernel's count of ticks."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    since_boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - _now()
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK") - since_boot


_notes = _Notes(_told["out"])
_notes.take("begin", _born_ns(), _now())


def _timed(function, what):
    @functools.wraps(function)
    def call(*args, **kwargs):
        begin = _now()
        try:
            return function(*args, **kwargs)
        finally:
            _notes.take(what, begin, _now())

    return call


def _given_loader(function, parameter):
    """The function, with a loader that is timed in place of the one it is called with."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.arguments[parameter] = _Loader(bound.arguments[parameter])
        return function(*bound.args, **bound.kwargs)

    return call


class _Loader:
    """Goes through a loader, and notes each wait for a batch, and each time until the next is asked for."""

    def __init__(self, loader):
        self._loader = loader

    def __iter__(self):
        asked = _now()
        batches = iter(self._loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                _notes.take("wait", asked, _now())
                return
            came = _now()
            _notes.take("wait", asked, came)
            try:
                yield batch
            finally:
                asked = _now()
                _notes.take("step", came, asked)

    def __len__(self):
        return len(self._loader)

    def __getattr__(self, name):
        return getattr(self._loader, name)


class _Init:
    """A class's `__init__`, timed. It keeps the code of the original: whoever asks what a class is built by is told."""

    def __init__(self, original, what):
        self._original, self._what, self.__code__ = original, what, original.__code__

    def __get__(self, instance, owner=None):
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args, **kwargs):
        begin = _now()
        try:
            return self._original(*args, **kwargs)
        finally:
            _notes.take(self._what, begin, _now())


class _TopLevel(dict):
    """The local names of the script's top level: all of them are kept in the global ones, and pass by here first."""

    def __init__(self, names):
        super().__init__()
        self._names = names

    def __setitem__(self, name, value):
        now = _now()
        if name in _told["marks"]:
            _notes.take(f"mark {name}", now, now)
        if isinstance(value, types.FunctionType):
            if name in _told["loaders"]:
                value = _given_loader(value, _told["loaders"][name])
            if name in _told["functions"]:
                value = _timed(value, _told["functions"][name])
        elif isinstance(value, type) and name in _told["classes"]:
            value.__init__ = _Init(value.__init__, _told["classes"][name])
        elif name in _told["loaders"]:
            value = _Loader(value)
        self._names[name] = value
        if name == _told["last_import"] and not _times_entries:
            _time_entries()

    def __delitem__(self, name):
        del self._names[name]


class _Imports:
    """Python's own import, noted where it took a millisecond and was not part of another."""

    def __init__(self):
        self._original, self._inside = builtins.__import__, set()

    def __call__(self, *args, **kwargs):
        thread = threading.get_ident()
        if thread in self._inside:
            return self._original(*args, **kwargs)
        self._inside.add(thread)
        begin = _now()
        try:
            return self._original(*args, **kwargs)
        finally:
            self._inside.discard(thread)
            if _now() - begin > 1_000_000:
                _notes.take("imports", begin, _now())


_times_entries = []


def _time_entries():
    """Times functions and constructors of libraries, where the script will look them up."""
    for path, what in _told["entries"].items():
        module, _, name = path.rpartition(".")
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError:  # an attribute of a class
            module, _, middle = module.rpartition(".")
            owner = getattr(importlib.import_module(module), middle)
        setattr(owner, name, _timed(getattr(owner, name), what))
        _times_entries.append(path)


def _compilations():
    """What torch itself says of when it compiled, on its wall clock."""
    utils = sys.modules.get("torch._dynamo.utils")
    ahead = time.time_ns() - _now()
    for metrics in utils.get_compilation_metrics() if utils else ():
        if metrics.start_time_us and metrics.end_time_us:
            _notes.take("compile", metrics.start_time_us * 1000 - ahead, metrics.end_time_us * 1000 - ahead)


def _run():
    script = os.path.abspath(_told["script"])
    if __name__ == "__main__":
        sys.argv = [_told["script"], *sys.argv[2:]]
        sys.path[0] = os.path.dirname(script)
    builtins.__import__ = _Imports()
    names = globals()
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    try:
        exec(code, names, _TopLevel(names))
    finally:
        _compilations()
        _notes.take("end", _now(), _now())


_run()
