"""What `torch.compile` does: when it compiles, which function, and why again.

torch calls back at the begin and the end of each outermost compilation: of a frame, and of a backward that was put off
until its first use. With a warm cache such a backward is loaded together with its forward and is not told of.
"""

import sys
from typing import TYPE_CHECKING, Any

from headway.events.recorder import Span
from headway.events.vocabulary import Activity, Told
from headway.instrument.patches import around, guarded

if TYPE_CHECKING:
    from headway.instrument.session import Session

REASON_LIMIT = 160
"""Of a reason for compiling again, this much is kept."""


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

    def ends(args: Any) -> None:
        if spans:
            session.ends(spans.pop())

    start, end = guarded(patch, begins), guarded(patch, ends)

    def register() -> None:
        handler.register_start_callback(start)
        handler.register_end_callback(end)

    # `torch._dynamo.reset()` clears all callbacks, whoever put them there.
    patch.put(around(patch, lambda: None, lambda token, result, error: register()))
    register()
    session.on_leave.append(compiled.tell)


class _Compiled:
    """What torch says of finished compilations. It says so a little after each, so it is asked before the next."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._told_us = 0

    def tell(self) -> None:
        """Writes down what is new."""
        utils, recorder = sys.modules.get("torch._dynamo.utils"), self._session.recorder
        if utils is None or recorder is None:
            return
        for metrics in utils.get_compilation_metrics():
            if metrics.co_name and (metrics.start_time_us or 0) > self._told_us:
                self._told_us = metrics.start_time_us
                where = f"{metrics.co_name} ({metrics.co_filename}:{metrics.co_firstlineno})"
                reason = (metrics.recompile_reason or "")[:REASON_LIMIT]
                took = round(metrics.entire_frame_compile_time_s or 0.0, 3)
                recorder.mark(Told.COMPILED, id=str(metrics.compile_id), function=where, seconds=took, reason=reason)


MODULES = {"torch._dynamo.callback": _callbacks}
"""What to do with which module once it is imported."""
