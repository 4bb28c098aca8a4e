"""What `torch.compile` does: when it compiles, which function, and why again.

torch calls back at the begin and the end of each outermost compilation: of a frame, and of a backward that was put off
until its first use. With a warm cache such a backward is loaded together with its forward and is not told of.

Which input changed is not in any of that. It is known where torch itself compares an input with what it was before, to
decide whether to compile for any size: that function is listened to.
"""

import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from headway.events.recorder import Recorder, Span
from headway.events.vocabulary import Activity, Told
from headway.instrument.patches import Patch, around, guarded, looks_like, parameters

if TYPE_CHECKING:
    from headway.instrument.session import Session

REASON_LIMIT = 160
"""Of a reason for compiling again, this much is kept."""
SEEN_LIMIT = 8
"""Of the sizes an input had before, so many are kept."""


def _callbacks(session: "Session", module: Any) -> None:
    handler = module.callback_handler
    patch = session.patch(handler, "clear")
    if patch is None:
        return
    spans: list[Span | None] = []
    compiled = _Compiled(session)

    def begins(args: Any) -> None:
        compiled.tell()
        trigger = args.callback_trigger.name.lower()
        spans.append(session.begins(Activity.PT2_COMPILATION, id=str(args.compile_id), trigger=trigger))
        if session.run is not None:
            session.run.before_compile()

    def ends(args: Any) -> None:
        if session.run is not None:
            session.run.after_compile()
        if spans:
            session.ends(spans.pop())

    start, end = guarded(patch, begins), guarded(patch, ends)

    def register() -> None:
        handler.register_start_callback(start)
        handler.register_end_callback(end)

    # `torch._dynamo.reset()` clears all callbacks, whoever put them there.
    patch.put(around(patch, lambda: None, lambda token, result, error: register()))
    register()
    session.on_leave.append(guarded(patch, compiled.tell))


# --- each compilation ------------------------------------------------------------------------------------------------


class _Compiled:
    """What torch says of finished compilations. It says so a little after each, so it is asked before the next."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._told_us = 0
        self._functions: dict[str, str] = {}
        self._breaks: set[tuple[str, str]] = set()
        self._has_begun = False

    def tell(self) -> None:
        """Writes down what is new."""
        utils, recorder = sys.modules.get("torch._dynamo.utils"), self._session.recorder
        if utils is None or recorder is None:
            return
        if not self._has_begun:
            self._has_begun = True
            self._tell_settings(recorder)
        for metrics in utils.get_compilation_metrics():
            if (metrics.start_time_us or 0) > self._told_us:
                self._told_us = metrics.start_time_us
                self._tell_of(metrics)
        for broken in getattr(utils, "graph_break_reasons", ()):
            where, why = _place(broken.user_stack), _gist(broken.reason)
            if (where, why) not in self._breaks:
                self._breaks.add((where, why))
                recorder.mark(Told.GRAPH_BREAK, where=where, reason=why)

    def _tell_settings(self, recorder: Recorder) -> None:
        trace, sources = (os.environ.get(f"TORCH_{name}", "") for name in ("TRACE", "COMPILE_DYNAMIC_SOURCES"))
        if trace or sources:
            recorder.mark(Told.COMPILE_SETTINGS, trace=os.path.abspath(trace) if trace else "", sources=sources)

    def _tell_of(self, metrics: Any) -> None:
        recorder, number = self._session.recorder, str(metrics.compile_id)
        assert recorder is not None
        frame, reason = number.partition("/")[0], _guard(metrics.recompile_reason or "")
        if metrics.co_name:
            where = f"{metrics.co_name} ({metrics.co_filename}:{metrics.co_firstlineno})"
            self._functions[frame] = where
            took = round(metrics.entire_frame_compile_time_s or 0.0, 3)
            recorder.mark(Told.COMPILED, id=number, function=where, seconds=took, reason=reason)
        elif "recompile limit" in (getattr(metrics, "fail_reason", None) or ""):
            where = self._functions.get(frame, "?")
            recorder.mark(Told.COMPILED, id=number, function=where, seconds=0.0, reason=reason, limit=True)
        elif getattr(metrics, "is_forward", None) is False:
            took = round((getattr(metrics, "duration_us", None) or 0) / 1e6, 3)
            recorder.mark(Told.COMPILED_BACKWARD, id=number, seconds=took)


def _guard(reason: str) -> str:
    """The guard that failed, without the number of the graph it belongs to, and the line of code torch adds to it."""
    first = reason.partition("\n")[0].partition("  #")[0].strip()
    graph, has_number, guard = first.partition(": ")
    return (guard if has_number and graph.replace("/", "").isdigit() else first)[:REASON_LIMIT]


def _gist(reason: str) -> str:
    """The first line of a reason, and what explains it."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["?"]
    why = [line.removeprefix("Explanation: ") for line in lines[1:] if line.startswith("Explanation: ")]
    return ": ".join([lines[0], *why[:1]])[: 2 * REASON_LIMIT]


def _place(stack: Any) -> str:
    return f"{stack[-1].name} ({stack[-1].filename}:{stack[-1].lineno})" if stack else "?"


# --- what changed ----------------------------------------------------------------------------------------------------


def _sources(session: "Session", module: Any) -> None:
    if patch := session.patch(module, "process_automatic_dynamic", ("tx", "name", "entry")):
        changes = _Changes(session, module)
        patch.put(_listened(patch, changes.compare, changes.keep))


def _caches(session: "Session", module: Any) -> None:
    logger = getattr(module, "CompileEventLogger", None)
    patch = session.patch(logger, "try_add_pt2_compile", ("event_name",)) if logger is not None else None
    if patch is None:
        return
    names = {"backend_compile": "AOT autograd", "inductor_compile": "FX graph"}

    def asked(event_name: str, **told: Any) -> None:
        if "cache_state" in told and event_name in names and session.recorder is not None:
            why = " ".join(str(told.get("cache_bypass_reason") or "").split())[:REASON_LIMIT]
            state = str(told["cache_state"])
            session.recorder.mark(Told.GRAPH_CACHE, id=_id(), cache=names[event_name], state=state, reason=why)

    patch.put(_listened(patch, asked, lambda token, result: None))


def _listened(patch: Patch, before: Callable[..., Any], after: Callable[[Any, Any], None]) -> Any:
    """The original, with `before(*args)` ahead of it and `after(token, result)` behind: while compiling, where `around`
    keeps silent."""
    static = isinstance(patch.original, staticmethod)
    original = patch.original.__func__ if static else patch.original
    before, after = guarded(patch, before), guarded(patch, after)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        token = before(*args, **kwargs)
        result = original(*args, **kwargs)
        after(token, result)
        return result

    looks_like(wrapper, original)
    return staticmethod(wrapper) if static else wrapper


def _id() -> str:
    """Which compilation is going on."""
    return str(sys.modules["torch._guards"].CompileContext.current_compile_id())


class _Input:
    """One input of a function: what torch remembers of it, and the sizes it had."""

    def __init__(self) -> None:
        self.entry: Any = None
        self.seen: list[Any] = []


class _Changes:
    """Every input of every compiled function, and what it was when the function was compiled before."""

    def __init__(self, session: "Session", builder: Any) -> None:
        self._session = session
        self._inputs: dict[str, dict[str, _Input]] = {}
        self._is_dynamic: Any = getattr(builder, "is_dynamic_source", None)
        self._takes_dim = "dim" in parameters(self._is_dynamic)

    def compare(self, tx: Any, name: str, entry: Any, **_: Any) -> _Input:
        """Tells how an input differs from what it was."""
        code = (tx.output.root_tx or tx).f_code  # of an inlined function, the names are those of its caller
        function = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        same_name = self._inputs.setdefault(name, {})
        known = same_name.setdefault(function, _Input())
        recorder = self._session.recorder
        if known.entry is not None and recorder is not None:
            for change in _differences(known, entry):
                if not self._is_expected(name, **change):
                    others = sum(len(each.seen) < 2 for where, each in same_name.items() if where != function)
                    said = {"function": function, "source": name, "elsewhere": others, "dims": self._takes_dim}
                    recorder.mark(Told.SOURCE_CHANGED, id=_id(), **said, **change)
        if (value := _value(entry)) not in known.seen and len(known.seen) < SEEN_LIMIT:
            known.seen.append(value)
        return known

    def keep(self, known: _Input | None, result: Any) -> None:
        """torch goes on changing its entry, and the next time it is as torch left it."""
        if known is not None:
            known.entry = result

    def _is_expected(self, name: str, kind: str, dim: int | None, now: Any, **_: Any) -> bool:
        """Whether the user has told torch so: then another size is no news, unless it is one that torch sets apart."""
        if self._is_dynamic is None or kind not in ("size", "int") or (kind == "size" and now in (0, 1)):
            return False
        return bool(self._is_dynamic(name, dim) if self._takes_dim else self._is_dynamic(name))


def _value(entry: Any) -> Any:
    return entry.scalar if isinstance(entry.scalar, int | float) else entry.size


def _differences(known: _Input, entry: Any) -> Iterator[dict[str, Any]]:
    old, new = known.entry, entry
    if isinstance(new.scalar, int | float):
        if isinstance(old.scalar, int | float) and old.scalar != new.scalar:
            kind = type(new.scalar).__name__
            yield {"kind": kind, "dim": None, "seen": list(map(repr, known.seen)), "now": repr(new.scalar)}
    elif isinstance(new.size, tuple) and isinstance(old.size, tuple):
        if len(old.size) != len(new.size):
            yield {"kind": "dims", "dim": None, "seen": [len(old.size)], "now": len(new.size)}
            return
        for dim, (before, now) in enumerate(zip(old.size, new.size, strict=True)):
            # Where torch compiles for any size, it still compiles for 0 and for 1 alone.
            if isinstance(now, int) and before != now and (isinstance(before, int) or now in (0, 1)):
                sizes = [size[dim] for size in known.seen if isinstance(size, tuple) and len(size) > dim]
                seen = list(dict.fromkeys(size for size in sizes if isinstance(size, int)))
                yield {"kind": "size", "dim": dim, "seen": seen, "now": now}


def _tuner(session: "Session", module: Any) -> None:
    """Of kernels: the compile cache listens to it before it tunes anything."""
    if session.run is not None and session.run.compiles is not None:
        session.run.compiles.imported(module.__name__)


MODULES = {
    "torch._dynamo.callback": _callbacks,
    "torch._dynamo.utils": _caches,
    "torch._dynamo.variables.builder": _sources,
    "torch._inductor.select_algorithm": _tuner,
    "triton.runtime.autotuner": _tuner,
}
"""What to do with which module once it is imported."""
