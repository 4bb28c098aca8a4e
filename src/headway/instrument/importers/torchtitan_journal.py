"""One process of a torchtitan job, told as its journal while its lines go by.

Spans that count take headway's names. What a step waited for its batches goes into the step; other spans inside a step
are held until it ends, for most are the same in every step: those that do not count are written for the first steps and
for slow ones only.
"""

from dataclasses import dataclass, field
from zlib import crc32

from headway.errors import PlatformError
from headway.events.clock import Clock
from headway.events.journal import Writer
from headway.events.recorder import Recorder
from headway.events.vocabulary import (
    KNOWN_NAMES,
    OWN_NAMES,
    Activity,
    Mark,
    Name,
    Process,
    ProcessEnd,
    Record,
    Restored,
    Saved,
    SpanBegin,
    SpanEnd,
    clean_text,
)
from headway.instrument.importers.torchtitan_trace import Axis, Line
from headway.paths import JobPaths

STEP = "step"
TEARDOWN = "torch_distributed_teardown"
"""The last span of a process that ends well."""

ACTIVITIES = {
    "torch_distributed_init": Activity.PROCESS_GROUP_INIT,
    "model_parallelism_init": Activity.TRAIN_MODULE_CREATION,
    "build_model": Activity.TRAIN_MODULE_CREATION,
    "build_learner": Activity.TRAIN_MODULE_CREATION,
    "optimizer_init": Activity.TRAIN_MODULE_CREATION,
    "tokenizer_init": Activity.PREPROC_CREATION,
    "data_iterator_init": Activity.PREPROC_CREATION,
    "checkpoint_init": Activity.INIT_PLUGINS,
    "checkpoint_load": Activity.CHECKPOINT_RESTORE,
    "checkpoint_save": Activity.CHECKPOINT_BLOCKING,
    "checkpoint": Activity.CHECKPOINT_BLOCKING,
    "fetching_batch": Activity.DATA_WAIT,
    "eval": Activity.EVALUATION,
    "validate": Activity.EVALUATION,
}
"""Spans of torchtitan that count. `KIND.Config.build` goes by its kind; all others are shown by their own names."""

_BUILDS: tuple[tuple[str, Activity | None], ...] = (
    ("trainer", None),  # around all others: what none of them explains is `other`
    ("loader", Activity.PREPROC_CREATION),
    ("dataset", Activity.PREPROC_CREATION),
    ("tokenizer", Activity.PREPROC_CREATION),
    ("manager", Activity.INIT_PLUGINS),
    ("metrics", Activity.INIT_PLUGINS),
    ("profiler", Activity.INIT_PLUGINS),
    ("validator", Activity.INIT_PLUGINS),
    ("", Activity.TRAIN_MODULE_CREATION),
)

SAVED_TAG = "checkpoint_save"
"""torchtitan enters the span of this name in every step; the tag says that it did save."""

DETAILED_STEPS = 8
"""Of so many first steps, every span is written …"""
SLOW = 2.0
"""… and of later ones that took so many times the mean …"""
DETAIL_LIMIT = 20_000
"""… as long as a journal has no more spans that do not count than this."""

IDLE_SAVE_NS = 1_000_000
"""An untagged `checkpoint_save` that took less did nothing."""

GAP_NS = 100_000_000
"""Two steps further apart are not one after the other: what came between is no step's time."""


def activity_of(name: str) -> Activity | None:
    """What headway calls a span of torchtitan's; None if it does not count."""
    if name.endswith(".build"):
        kind = name.removesuffix(".build").lower()
        return next(activity for word, activity in _BUILDS if word in kind)
    return ACTIVITIES.get(name)


class Told(Clock):
    """A clock that shows when what is being told happened."""

    def __init__(self) -> None:
        self.at_ns = 0

    def now_ns(self) -> int:
        """The moment that is being told."""
        return self.at_ns

    def wall_ns(self) -> int:
        """The same: an imported journal's axis is the wall clock."""
        return self.at_ns


@dataclass(slots=True, eq=False)
class _Span:
    name: str
    activity: Activity | None
    thread: int
    begin_ns: int
    end_ns: int | None = None
    error: str = ""
    tagged: bool = False
    number: int = 0
    """Its number in the journal, once its begin is written."""


@dataclass(slots=True)
class _Step:
    number: int
    span: _Span
    data_ns: int = 0
    out_of_data: bool = False
    events: list[tuple[_Span, bool]] = field(default_factory=list)
    """The spans in it in the order in which they began (True) and ended."""


class JournalTeller:
    """Writes one process's journal from its lines."""

    def __init__(self, paths: JobPaths, first: Line, role: str, world_size: int) -> None:
        self.steps = self.left_out = 0
        self._trains = role == "rank"
        self._axis, self._clock = Axis(), Told()
        self._clock.at_ns = self._began_ns = self._axis.place(first)
        name = f"{first.host}-{first.source}-{first.rank}-{first.pid}-{self._began_ns}"
        writer = Writer(paths.journal(name), self._clock.now_ns)
        self._recorder = Recorder(writer, self._clock)
        self._meter = self._recorder.steps_meter
        self._main = first.tid
        self._stacks: dict[tuple[int, str], list[_Span]] = {}
        self._names = dict(KNOWN_NAMES)
        self._spans = self._details = 0
        self._step: _Step | None = None
        self._looping = False
        self._next = 1
        self._loop_ns = 0
        """Where in time the loop has come to: the end of its last step."""
        self._mean_ns = 0.0
        self._error = ""
        self._torn_down = False
        host = clean_text(first.host)
        self._write(
            Process(
                t_ns=self._began_ns, wall_ns=self._began_ns, started_ns=self._began_ns, boot=f"torchtitan on {host}",
                node=host, pid=first.pid, job=paths.job, role=role, rank=first.rank, local_rank=first.local_rank,
                world_size=world_size, program=clean_text(f"torchtitan {first.source}"),
            )
        )  # fmt: skip

    def take(self, line: Line) -> None:
        """Tells what the line says."""
        now = self._axis.place(line)
        name, _, kind = line.name.rpartition("_")
        if line.is_moment or kind not in ("start", "end", "error"):
            if line.name != "metric_value" and self._has_room():
                self._write(Mark(t_ns=now, name=clean_text(line.name)))
        elif kind == "start":
            self._begins(name, line, now)
        elif kind == "end":
            self._ends(name, line, now)
        else:
            self._fails(name, line)

    def close(self) -> None:
        """The file has no more lines of this process: tells how it ended, as far as they show it."""
        now = self._axis.now_ns
        ending = self._ending(now)
        if self._step is not None:
            self._leave_step(self._step, now)
        elif self._looping or (ending is not None and ending.error is None):
            self._meter.close()
        self._write(Mark(t_ns=now, name="trace ends"))
        if ending is not None:
            self._write(ending)
        if not self._meter.flush() or self._recorder.writer.lost:
            raise _disk_is_full(self._recorder.writer)
        self._recorder.close()

    def drop(self) -> None:
        """Lets go of the file, whether or not all was told."""
        self._recorder.writer.close()

    def _ending(self, now: int) -> ProcessEnd | None:
        if self._error:
            return ProcessEnd(t_ns=now, error=clean_text(self._error))
        is_inside = any(stack for (tid, _), stack in self._stacks.items() if tid == self._main)
        is_done = self._torn_down or bool(self.steps) or not self._trains
        return ProcessEnd(t_ns=now) if is_done and not is_inside else None

    # --- spans ---

    def _begins(self, name: str, line: Line, now: int) -> None:
        key = (line.tid, line.task)
        is_step = self._is_step(name, line)
        stack = self._stacks.setdefault(key, [])
        if is_step or (name == TEARDOWN and line.tid == self._main):
            self._end_what_counts(stack, now)
        if not stack and line.tid == self._main:
            self._error = ""  # whatever failed before, the process went on
        span = _Span(name, self._activity(name, line, stack), _thread(line), now)
        stack.append(span)
        if is_step:
            self._begin_step(span, line)
        else:
            self._note(span, begins=True)

    def _is_step(self, name: str, line: Line) -> bool:
        return name == STEP and self._trains and line.tid == self._main

    def _end_what_counts(self, stack: list[_Span], now: int) -> None:
        """A step or the end begins: of a step or what counts that is still under way, the line that ended it is
        missing."""
        step = self._step
        ended = [span for span in stack if span.activity or (step is not None and span is step.span)]
        at = stack.index(ended[0]) if ended else len(stack)
        while len(stack) > at:
            span = stack.pop()
            span.end_ns = now
            if step is None or span is not step.span:
                self._note(span, begins=False)
        if step is not None:
            self._end_step(step, now, step.number + 1)

    def _activity(self, name: str, line: Line, around: list[_Span]) -> Activity | None:
        """What the span counts as: nothing on a thread beside the training, and only once where it nests."""
        if line.tid != self._main:
            return None
        activity = activity_of(name)
        return None if any(span.activity is activity for span in around) else activity

    def _ends(self, name: str, line: Line, now: int) -> None:
        key = (line.tid, line.task)
        stack = self._stacks.get(key, [])
        if not any(span.name == name for span in stack):
            stack = self._stacks[key] = [*stack, self._missed(name, line, stack, now)]
        while True:
            span = stack.pop()
            span.end_ns = now
            if span.name == name:
                break
            self._note(span, begins=False)  # the line that ended it is missing
        if not stack:
            del self._stacks[key]
        self._finish(span, line, stack, now)

    def _missed(self, name: str, line: Line, around: list[_Span], now: int) -> _Span:
        """A span whose first line is missing, as its last one tells of it."""
        since = max(now - round((line.took_ms or 0.0) * 1e6), self._loop_ns, self._began_ns)
        span = _Span(name, self._activity(name, line, around), _thread(line), since)
        if self._is_step(name, line) and self._step is None:
            self._begin_step(span, line)
        else:
            self._note(span, begins=True)
        return span

    def _finish(self, span: _Span, line: Line, around: list[_Span], now: int) -> None:
        step = self._step
        if not around and line.tid == self._main and span.error:
            self._error = span.error
        self._torn_down |= span.name == TEARDOWN and not span.error
        if step is not None and span is step.span:
            if span.error:
                self._leave_step(step, now)
            else:
                self._end_step(step, now, max(step.number, line.step or 0) + 1)
            return
        if span.activity is Activity.CHECKPOINT_BLOCKING and SAVED_TAG in line.tags:
            span.tagged = True
            if not span.error:
                self._write(Saved(t_ns=now, step=(line.step or 0) + 1))
        if step is not None and span.activity is Activity.DATA_WAIT:
            if not any(outer.activity for outer in around):
                step.data_ns += now - span.begin_ns
            step.out_of_data |= bool(span.error)
        self._note(span, begins=False)

    def _fails(self, name: str, line: Line) -> None:
        stack = self._stacks.get((line.tid, line.task), [])
        for span in reversed(stack):
            if span.name == name:
                span.error = line.message.partition(f"{name}_error: ")[2] or f"{name} failed"
                return

    # --- steps ---

    def _begin_step(self, span: _Span, line: Line) -> None:
        now, number = span.begin_ns, self._next if line.step is None else line.step
        if not self._looping or number != self._next or now - self._loop_ns > GAP_NS:
            loaded = 0 if line.relative_step is None else number - line.relative_step
            if loaded > 0 and (not self.steps or number < self._next):
                self._write(Restored(t_ns=now, step=number))
            self._clock.at_ns = self._loop_ns = now
            self._meter.open(number)
            self._looping = True
        self._step = _Step(number, span)

    def _end_step(self, step: _Step, now: int, following: int) -> None:
        """The step is done, unless there was no data for it."""
        self._step = None
        if step.out_of_data:
            self._tell_spans(step, True)
            self._meter.close()
            self._looping = False
            return
        took = now - self._loop_ns
        self._data_arrives(step, now)
        self._tell_spans(step, self.steps < DETAILED_STEPS or took > SLOW * self._mean_ns)
        self._clock.at_ns = self._loop_ns = now
        self._meter.end(following)
        self.steps += following - step.number
        self._mean_ns += (took - self._mean_ns) / min(max(self.steps - DETAILED_STEPS, 1), 256)
        self._next = following

    def _leave_step(self, step: _Step, now: int) -> None:
        """The process failed or was killed in the step: it stays under way in the journal."""
        self._step, self._looping = None, False
        if not any(span.activity is Activity.DATA_WAIT and span.end_ns is None for span, _ in step.events):
            self._data_arrives(step, now)
        self._tell_spans(step, True)

    def _data_arrives(self, step: _Step, now: int) -> None:
        self._clock.at_ns = min(self._loop_ns + step.data_ns, now)
        self._meter.begin()

    # --- writing ---

    def _note(self, span: _Span, begins: bool) -> None:
        """A span begins or ends: written at once, or inside a step when that is over."""
        if self._step is not None:
            self._step.events.append((span, begins))
        elif not begins:
            self._write_end(span)
        elif span.activity or self._has_room():
            self._write_begin(span)

    def _tell_spans(self, step: _Step, detailed: bool) -> None:
        for span, begins in step.events:
            if not begins:
                self._write_end(span)
            elif self._is_told(span, detailed):
                self._write_begin(span)

    def _is_told(self, span: _Span, detailed: bool) -> bool:
        if span.activity is Activity.DATA_WAIT:
            return False  # the step itself tells of it
        if span.activity is Activity.CHECKPOINT_BLOCKING and span.end_ns is not None and not span.tagged:
            return span.end_ns - span.begin_ns >= IDLE_SAVE_NS
        if span.activity or detailed:
            return bool(span.activity) or self._has_room()
        self.left_out += 1
        return False

    def _has_room(self) -> bool:
        self._details += 1
        if self._details > DETAIL_LIMIT:
            self.left_out += 1
        return self._details <= DETAIL_LIMIT

    def _write_begin(self, span: _Span) -> None:
        self._spans += 1
        span.number = self._spans & 0xFFFFFFFF
        attrs = {"torchtitan": span.name} if span.activity else None
        name = self._number(str(span.activity or span.name))
        self._write(SpanBegin(name, span.number, span.thread, span.begin_ns, attrs))

    def _write_end(self, span: _Span) -> None:
        if span.number and span.end_ns is not None:
            self._write(SpanEnd(int(bool(span.error)), span.number, span.end_ns))

    def _number(self, name: str) -> int:
        text = clean_text(name)
        if text not in self._names:
            self._names[text] = OWN_NAMES + len(self._names) - len(KNOWN_NAMES)  # `DETAIL_LIMIT` leaves room for all
            self._write(Name(self._names[text], text))
        return self._names[text]

    def _write(self, record: Record) -> None:
        if not self._recorder.record(record):
            raise _disk_is_full(self._recorder.writer)


def _thread(line: Line) -> int:
    """Spans of one asyncio task nest, those of two may cross: each task is drawn as a thread."""
    return (crc32(line.task.encode("utf-8", "replace"), line.tid) if line.task else line.tid) & 0xFFFFFFFF


def _disk_is_full(writer: Writer) -> PlatformError:
    return PlatformError(f"no space left to write {writer.path.parent}: nothing was imported. Free some and try again.")
