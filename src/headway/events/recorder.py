"""What a process says about itself: spans, marks and steps, written to its journal as they happen.

The calls a training loop makes cost a microsecond (a step) or three (a span) and never raise for the journal's sake: a
record that cannot be written is counted as lost, and the job goes on.
"""

import itertools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

from headway.events.clock import Clock
from headway.events.journal import CellWriter, Nowhere, Writer
from headway.events.vocabulary import (
    KNOWN_NAMES,
    OWN_NAMES,
    WAITS_ANYWHERE,
    LoopBegin,
    Mark,
    Name,
    Period,
    Record,
    SpanBegin,
    SpanEnd,
    StepRun,
    clean_text,
    encode,
)

T = TypeVar("T")

RUN_LIMIT = 256
"""Most steps in one run: bounds what is estimated when a run must be split at a step."""

UNLIKE_LIMIT = 16
"""This many unlike steps among `RUN_LIMIT` are not rare, and become the measure."""

FIRST_STEPS = 4
"""This many first steps are runs of their own: enough to tell a typical step from the warm-up before it."""

_BEGIN, _END = SpanBegin.KIND, SpanEnd.KIND
_pack_begin = SpanBegin.LAYOUT.pack
_pack_end = SpanEnd.LAYOUT.pack
_pack_run = StepRun.LAYOUT.pack
_thread = threading.get_ident


class Recorder:
    """Writes one process's journal."""

    def __init__(self, writer: Writer, clock: Clock | None = None) -> None:
        clock = clock or Clock()
        self.writer = writer
        self.now_ns = clock.now_ns
        self.steps_meter = StepMeter(self)
        self._names = dict(KNOWN_NAMES)
        self._texts: dict[int, str] = {}
        self._named = itertools.count()
        self._span = 0
        self._append = writer.append
        self.told: Callable[[], None] | None = None
        """Called when a script measures its steps itself: whoever guesses them from outside stands back."""
        _recorders.add(self)

    def record(self, record: Record) -> bool:
        """Writes any record; True once it cannot be lost by a kill."""
        try:
            payload = encode(record)
        except Exception as error:  # attributes are the caller's, and JSON has no words for some: the record says so
            if not isinstance(record, Mark | SpanBegin | Period) or is_from_signal_handler(error):
                raise
            payload = encode(replace(record, attrs={"unwritable": type(error).__name__}))
        return self._append(payload)

    def span(self, name: str, **attrs: Any) -> "Span":
        """A context manager that times an activity. Names of `Activity` count in the ledger, others are shown."""
        return Span(self, self._names.get(name) or self._number(name), attrs)

    def period(self, name: str, begin_ns: int, end_ns: int, **attrs: Any) -> None:
        """Notes an activity that was recognised only once it was over."""
        number = self._names.get(name) or self._number(name)
        self.record(Period(number, _thread() & 0xFFFFFFFF, begin_ns, end_ns, attrs or None))

    def mark(self, name: str, **attrs: Any) -> None:
        """Notes that something happened now."""
        self.record(Mark(t_ns=self.now_ns(), name=clean_text(name), attrs=attrs))

    def steps(
        self, batches: Iterable[T], first: int | None = None, batch_size: int | None = None
    ) -> Iterator[tuple[int, T]]:
        """Yields `(step, batch)`, measuring each step and its wait for data; `first` numbers the first one."""
        if self.told:
            self.told()
        meter = self.steps_meter
        step = meter.open(first, batch_size)
        try:
            for batch in batches:
                meter.begin()
                yield step, batch
                step += 1
                meter.end(step)
        except GeneratorExit:
            meter.leave(step + 1, sys._getframe().f_back)
            raise
        else:
            meter.close()

    def close(self, error: BaseException | None = None) -> None:
        """Ends the journal; `error` is the exception that ends the process, if one does."""
        self.steps_meter.finish(error)
        self.writer.close()

    def detach(self) -> None:
        """Silences this recorder in a forked child: the journal belongs to its parent."""
        self.writer = nowhere = Nowhere()
        self._append = nowhere.append
        self.steps_meter.write_to(nowhere.cell)

    def _number(self, name: str) -> int:
        text = clean_text(name)
        if number := self._names.get(text):
            return number
        number = OWN_NAMES + next(self._named) % (0x10000 - OWN_NAMES)
        if number in self._texts:  # with more names than numbers, the oldest gives up its own
            self._names.pop(self._texts[number], None)
        if self.record(Name(number, text)) or isinstance(self.writer, Nowhere):  # only then may other threads use it
            self._texts[number] = text
            self._names[text] = number
        return number


class Span:
    """One timed activity. Begin and end are separate records: a kill in between leaves the begin."""

    __slots__ = ("_attrs", "_name", "_recorder", "_span")

    def __init__(self, recorder: Recorder, name: int, attrs: dict[str, Any]) -> None:
        self._recorder = recorder
        self._name = name
        self._attrs = attrs

    def __enter__(self) -> "Span":
        recorder = self._recorder
        span = self._span = recorder._span = recorder._span + 1 & 0xFFFFFFFF
        thread = _thread() & 0xFFFFFFFF
        if self._attrs:
            recorder.record(SpanBegin(self._name, span, thread, recorder.now_ns(), self._attrs))
        else:
            recorder._append(_pack_begin(_BEGIN, self._name, span, thread, recorder.now_ns()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        recorder._append(_pack_end(_END, kind is not None, self._span, recorder.now_ns()))

    def end(self, at_ns: int) -> None:
        """End it at a moment that may have passed."""
        self._recorder._append(_pack_end(_END, False, self._span, at_ns))


class StepMeter:
    """Turns the two instants of every step (data arrived, step done) into the step cell and runs of like steps.

    A step that takes longer than `_limit` is unlike the run and gets one of its own. The limit follows the runs; when
    unlike steps are no longer rare, it follows them.
    """

    __slots__ = ("_begin", "_cell", "_count", "_data", "_end", "_first", "_flags", "_left", "_limit", "_mark", "_next",
                 "_now", "_open", "_recorder", "_since", "_spans", "_undo", "_unlike", "waits")  # fmt: skip

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self.write_to(recorder.writer.cell)
        self._now = recorder.now_ns
        self._open = False
        self._first = self._next = self._mark = 0
        self._begin = self._end = self._since = self._data = self._count = 0
        self._limit = self._flags = 0
        self._unlike: list[int] = []
        self._left: tuple[CodeType, int] | None = None
        self._undo = (0, 0, 0, 0)
        self._spans = 0

    def write_to(self, cell: CellWriter) -> None:
        """Keep the steps in this cell from now on."""
        self._cell = cell
        self.waits = cell.touch
        """Called with 0 when the step under way waits for data, and with the time when it has it."""

    def open(
        self, first: int | None = None, batch_size: int | None = None, at_ns: int | None = None,
        after_warm_up: bool = False,
    ) -> int:  # fmt: skip
        """A loop begins, at step `first` (by default after the last one). Returns the number of its first step.

        `at_ns` is for loops that are recognised only some time after they began; their steps are told by `step`.
        `after_warm_up`: what came before was no training.
        """
        self.close()
        now = self._now() if at_ns is None else at_ns
        self._flags = 0 if at_ns is None else WAITS_ANYWHERE
        first = self._next if first is None else int(first)  # JSON has no words for an array library's integers
        batch_size = None if batch_size is None else int(batch_size)
        self._recorder.record(LoopBegin(t_ns=now, first=first, batch_size=batch_size, after_warm_up=after_warm_up))
        if not self._count or first != self._next:  # else the last run found no space, and goes on
            self._first = first
            self._begin = self._end = now
            self._count = self._data = 0
        self._next = self._mark = first
        self._open = True
        self._store(0)
        return first

    def begin(self) -> None:
        """The step's data has arrived."""
        self._since = since = self._now()
        if self._recorder._span != self._spans:
            self._spans = -1  # a span began in the wait: its place matters, so the step is a run of its own
        self._cell.write(self._first, self._next, self._begin, self._end, self._data, self._count, since)

    def end(self, next: int) -> None:
        """The step is done; the next one has number `next` and now waits for its data."""
        now = self._now()
        unlike = now - self._end > self._limit
        alone = self._spans < 0
        self._spans = self._recorder._span
        if (unlike or alone) and self._count:
            self._write_run()
        self._data += self._since - self._end
        self._count = count = self._count + 1
        self._end = now
        self._next = next
        if unlike or count >= RUN_LIMIT:
            self._adapt(now - self._begin, unlike)
            self._write_run()
        elif alone:
            self._write_run()
        self._cell.write(self._first, next, self._begin, now, self._data, self._count, 0)

    def step(self, now_ns: int, waited_ns: int, since_ns: int) -> None:
        """A step is done at `now_ns`, and waited for data somewhere in it; the next begins here. `since_ns` as in the
        cell: now if the next is under way at once, -1 if the loop may be over."""
        count = self._count + 1
        if now_ns - self._end > self._limit or count >= RUN_LIMIT:
            self._step_apart(now_ns, waited_ns)
        else:
            self._data += waited_ns
            self._count, self._end = count, now_ns
            self._next += 1
        self._cell.write(self._first, self._next, self._begin, now_ns, self._data, self._count, since_ns)

    def _step_apart(self, now_ns: int, waited_ns: int) -> None:
        """A step that ends its run: it is unlike the others, or there are enough of them."""
        unlike = now_ns - self._end > self._limit
        if unlike and self._count:
            self._write_run()
        self._data += waited_ns
        self._count, self._end = self._count + 1, now_ns
        self._next += 1
        self._adapt(now_ns - self._begin, unlike)
        self._write_run()

    def pause(self, at_ns: int | None = None) -> None:
        """The loop is over for now. `at_ns`: the last step's own work went on until then."""
        if at_ns is not None and at_ns > self._end:
            self._end = at_ns
            self._write_run()  # of no steps, if all are written: then this is the last one's time
        else:
            self.flush()
        self._store(-1)

    def resume(self, at_ns: int) -> None:
        """The loop goes on at `at_ns`: what came since the pause is none of its time."""
        if not self._count:  # else the last run found no space, and goes on
            self._begin = self._end = max(at_ns, self._end)
        self._store(0)

    @property
    def ended_ns(self) -> int:
        """When the last step ended, or the loop began."""
        return self._end

    @property
    def typical_ns(self) -> int:
        """How long the last steps took, on average."""
        return (self._end - self._begin) // self._count if self._count else self._limit // 3

    @property
    def steps_done(self) -> int:
        """The number of the step under way, or of the next one: all before it are done."""
        return self._next

    @property
    def upcoming(self) -> int:
        """The step that comes after the one under way."""
        return self._next + (self._open and self._since > self._end)

    def flush(self) -> bool:
        """Moves the run so far into a record; the cell goes on telling of the step under way."""
        return not self._count or self._write_run()

    def close(self) -> None:
        """The loop is over."""
        self._open, self._left = False, None
        self.flush()  # without space for it, the cell goes on holding the run
        self._store(-1)

    def leave(self, next: int, frame: FrameType | None) -> None:
        """The loop was left inside a step: by `break`, and the step is done; or by an exception, and it is not.

        Which of the two cannot be told here. The step is taken as done, but stays in the cell until it is clear.
        """
        if not self._open and self._since <= self._end:  # another loop has begun and ended since
            self.close()
            return
        self.flush()
        self._open, self._left = False, (frame.f_code, frame.f_lineno) if frame else None
        self._undo = (self._next, self._end, self._count, self._data)
        self._data += self._since - self._end
        self._count, self._end, self._next = self._count + 1, self._now(), next
        self._store(-1)

    def settle(self) -> None:
        """The loop is over, unless it was left inside a step that may yet prove undone."""
        if not self._left:
            self.close()

    def finish(self, error: BaseException | None) -> None:
        """The process ends. If by an exception that left the loop, the step it was in was not done."""
        trace = error.__traceback__ if error else None
        while self._left and trace is not None:
            if (trace.tb_frame.f_code, trace.tb_lineno) == self._left:
                self._left, self._open = None, True
                self._next, self._end, self._count, self._data = self._undo
                self._store(self._since)
            else:
                trace = trace.tb_next
        if self._open:
            self.flush()
            self._open = False
        else:
            self.close()

    def _write_run(self) -> bool:
        run = (self._count, self._first, self._next, self._begin, self._end, self._data)
        written = self._recorder._append(_pack_run(StepRun.KIND, self._flags, *run), 0)
        if written:
            self._first, self._begin = self._next, self._end
            self._count = self._data = 0
        return written

    def _adapt(self, took_ns: int, unlike: bool) -> None:
        if unlike:
            self._unlike.append(took_ns)
            if len(self._unlike) < (UNLIKE_LIMIT if self._limit else FIRST_STEPS):
                return
            if self._next - self._mark <= RUN_LIMIT:
                self._limit = _limit(sorted(self._unlike)[len(self._unlike) // 2])
        else:
            self._limit = _limit(took_ns // self._count)
        self._mark = self._next
        self._unlike.clear()

    def _store(self, since: int) -> None:
        self._cell.write(self._first, self._next, self._begin, self._end, self._data, self._count, since)


def _limit(typical_ns: int) -> int:
    return max(3 * typical_ns, typical_ns + 100_000_000)


def is_from_signal_handler(error: BaseException) -> bool:
    """Whether a handler of the program's own raised it, in the middle of whatever was running: it is the program's."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


_recorders: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


def _detach_all() -> None:
    for recorder in list(_recorders):
        recorder.detach()


os.register_at_fork(after_in_child=_detach_all)
