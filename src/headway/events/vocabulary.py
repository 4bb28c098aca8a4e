"""Every word a journal can hold: the activities a span may name, and one class for each kind of record.

All times are nanoseconds on the writer's monotonic clock. Span and step records are packed, because they are written
inside training loops; every other kind is one JSON object. A reader fills fields an older writer did not know with
their defaults, ignores fields and skips kinds a newer writer added.
"""

import dataclasses
import json
import struct
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar

FORMAT = 1
"""Version of the framing and of the packed records. It changes only when an older reader would misread."""

WAITS_ANYWHERE = 1
"""Bit of `StepRun.flags`: the waits for data lie anywhere in the run, not at the begin of each step."""

NAME_LIMIT = 200
"""Longest text, in characters, kept of a name; the rest is cut off."""


class Activity(StrEnum):
    """Span names the ledger understands. A span of any other name is shown, and never counted."""

    # before the trainer
    SCHEDULING = "scheduling"
    HARDWARE_SETUP = "hardware_setup"
    LAUNCHER_INIT = "launcher_init"
    # between a failure and the next start, written by a supervisor
    DETECTION = "detection"
    TEARDOWN = "teardown"
    BACKOFF = "backoff"
    RENDEZVOUS = "rendezvous"
    # stages of trainer initialisation
    IMPORTS = "imports"
    DEVICE_INIT = "device_init"
    PROCESS_GROUP_INIT = "process_group_init"
    PREPROC_CREATION = "preproc_creation"
    TRAIN_MODULE_CREATION = "train_module_creation"
    INIT_PLUGINS = "init_plugins"
    PRE_TRAIN = "pre_train"
    GET_FIRST_BATCH_DATA = "get_first_batch_data"
    # anywhere
    PT2_COMPILATION = "pt2_compilation"
    CHECKPOINT_BLOCKING = "checkpoint_blocking"
    CHECKPOINT_RESTORE = "checkpoint_restore"
    DATA_WAIT = "data_wait"
    DATA_SKIP = "data_skip"
    EVALUATION = "evaluation"
    PUBLISH = "publish"
    LEFT_OUT = "left_out"
    UPLOAD = "upload"


class Told(StrEnum):
    """Names of the marks that headway makes itself, and what each tells."""

    IMPORTS = "imports"
    """`seconds`: how long packages took to import, each with all that it imported."""
    COMPILED = "compiled"
    """`id`, `function`, `seconds`, `reason`: a compilation; the reason if it was not the function's first. `limit`: it
    was one too many, and the function runs uncompiled from there on."""
    COMPILED_BACKWARD = "compiled_backward"
    """`id`, `seconds`: what the backward of that compilation took, when it was first used."""
    SOURCE_CHANGED = "source_changed"
    """`id`, `function`, `source`, `kind`, `dim`, `seen`, `now`: within that compilation, a size or a number that was
    another one before. `elsewhere`: in how many other functions something has the same name, and has not changed.
    `dims`: whether this torch can be told of one dimension alone."""
    GRAPH_BREAK = "graph_break"
    """`where`, `reason`: a function was compiled in parts."""
    GRAPH_CACHE = "graph_cache"
    """`id`, `cache`, `state`, `reason`: `hit`, `miss` or `bypass` in one of torch's caches, and why it was bypassed."""
    COMPILE_SETTINGS = "compile_settings"
    """`trace`, `sources`: where torch writes a trace of its own, and which sizes it was told change, if it was."""
    COMPILE_CACHE = "compile_cache"
    """`outcome`, `key`, `url`, `about`, `why`, `seconds`, `seconds_saved`: what became of the job's compile cache."""
    HOOK_OFF = "hook_off"
    """`hook`, `error`: a hook raised, and was taken out."""
    ASYNCHRONOUS_DEVICE = "asynchronous_device"
    """`device`, `looked`: steps run on it, and at how many waits for data it was looked at."""
    DECISION = "decision"
    """`why`, `do`, `category`, `rank`, `node`, `rule`, `line`, `wait_s`: what a supervisor did about a failure."""
    CHECKPOINT_RESTORED = "checkpoint_restored"
    """`step`, `tier`, `bytes`, `seconds`, `steps_lost`, `ahead_bytes`: where a state came from, and how much of it had
    been read ahead."""
    CHECKPOINT_BAD = "checkpoint_bad"
    """`step`, `tag`, `why`: it could not be restored, and the one before it was taken."""
    CHECKPOINT_FAILED = "checkpoint_failed"
    """`why`, `failures`: a save did not come about, and how many in a row."""
    CHECKPOINT_INTERVAL = "checkpoint_interval"
    """`memory_s`, `durable_s`, `steps`, `every`, `wasted_percent`, `why`: it was tuned."""
    STARTUP = "startup"
    """`stages`, `begin_ns`, `serial`: a graph of stages has run. Of each stage `name`, `activity`, `lane`, `needs`,
    `computes`, `begin_ns`, `end_ns`, `cpu_s` and `failed`."""
    COLLECTIVE = "collective"
    """`op`, `group`, `ranks`, `size`, `world`, `backend`, `lazy`, `site`, `through`, `step`, `calls`, `count`,
    `seconds`, `bytes`, `first_ns`: what was sent, and which groups were made, before the first step was done, by call
    site. `count` is the backend's operations in these calls; with `step` they were the first step's own."""
    FAST_BATCH = "fast_batch"
    """`outcome`, `why`, `compile_s`, `data_s`: what became of compiling on a batch that was made up."""
    FAST_START = "fast_start"
    """`item`, `on`, `why`: what is done to start faster without a word in the script. Of a rank's imports also
    `modules` (seconds and file of each) and `sources` (the program's own files)."""
    SHARDING_PLAN = "sharding_plan"
    """`outcome`, `why`, `seconds`, `key`: where the plan of a sharded model came from."""
    ANCHOR = "anchor"
    """`id`, `step`, `checkpoint`, `recipe`, `to`, `runner`, `submitted`, `why`, `seconds`: a trainer handed over a
    checkpoint to be published, whether somebody took it and if not why, and how long that took, its save included."""
    PUBLISHED = "published"
    """`id`, `outcome`, `version`, `why`, `seconds`, `steps`, `accelerators`, `device`, `step`, `recipe`: what became of
    it. A publisher says `running` as it begins, then `published`, `rejected` or `failed`; nothing if it is killed.
    `accelerators` and `device` are the trainer's."""


ROLLOUT = "rollout"
"""A span in which the trained model collects experience to train on: part of its steps, and shown apart."""

KNOWN_NAMES = {activity.value: number for number, activity in enumerate(Activity, 1)}
"""Numbers that need no `Name` record. They are part of the format: new activities go to the end of `Activity`."""

OWN_NAMES = 256
"""Numbers from here on are given out by `Name` records."""

STAGES = (
    Activity.IMPORTS,
    Activity.DEVICE_INIT,
    Activity.PROCESS_GROUP_INIT,
    Activity.PREPROC_CREATION,
    Activity.TRAIN_MODULE_CREATION,
    Activity.INIT_PLUGINS,
    Activity.PRE_TRAIN,
    Activity.GET_FIRST_BATCH_DATA,
)
"""The stages of trainer initialisation (level 3 of the report), in their usual order."""


# Records are not frozen: a frozen dataclass takes seven times as long to make, and readers make millions.
# --- packed records ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Name:
    """Gives a text a number, so that each span carries two bytes of it."""

    KIND: ClassVar[int] = 1
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<BxH")
    number: int
    text: str


@dataclass(slots=True)
class SpanBegin:
    """An activity began. Its end may never be written: the process can die inside it."""

    KIND: ClassVar[int] = 2
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<BxHIIq")
    name: int
    span: int
    thread: int
    t_ns: int
    attrs: dict[str, Any] | None = None


@dataclass(slots=True)
class SpanEnd:
    """The activity that began as `span` ended; `failed` if by an exception."""

    KIND: ClassVar[int] = 3
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<BxHIq")
    failed: int
    span: int
    t_ns: int


@dataclass(slots=True)
class StepRun:
    """Consecutive steps of like duration, from `first` up to and without `next`; a stalled step is a run of its own.

    Each step begins where the one before it ended, with the wait for its data unless `flags` say otherwise: `data_ns`
    is the sum of those waits.
    """

    KIND: ClassVar[int] = 4
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<BxHIqqqqq")
    flags: int
    """`WAITS_ANYWHERE`, or 0; room for later."""
    count: int
    """Steps measured; fewer than `next - first` where the loop counts several as one."""
    first: int
    next: int
    begin_ns: int
    end_ns: int
    data_ns: int


@dataclass(slots=True)
class Period:
    """An activity that was recognised only once it was over, from `begin_ns` up to `end_ns`."""

    KIND: ClassVar[int] = 5
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<BxHIqq")
    name: int
    thread: int
    begin_ns: int
    end_ns: int
    attrs: dict[str, Any] | None = None


# --- JSON records --------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Process:
    """Who writes this journal. Always its first record. Written again, it tells anew what the process turned out to be:
    `role`, `rank`, `local_rank` and `world_size` count from the later one, all else from the first."""

    KIND: ClassVar[int] = 32
    t_ns: int
    wall_ns: int
    """Wall time at `t_ns`: places the whole boot's monotonic axis in the world."""
    boot: str
    node: str
    pid: int
    job: str
    role: str = "rank"
    """`rank` trains; `process` may turn out to; `launcher` is the command that the job was started with; `supervisor`
    and `publisher` do neither."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    started_ns: int
    """When the operating system started this process."""
    launcher: str = ""
    """Names the process that launched this one; empty if nothing but a shell did."""
    launcher_started_ns: int | None = None
    launch: str = ""
    """Changes each time the launcher starts its workers anew."""
    attempt: int | None = None
    """Set by a supervisor that numbers attempts itself."""
    program: str = ""
    """The script or module that runs: steps of one program never repeat those of another."""
    command: str = ""
    """The command line, secrets blanked."""
    headway: str = ""


@dataclass(slots=True, kw_only=True)
class ProcessEnd:
    """The process is about to exit. A journal without one ended by a kill, or has not ended."""

    KIND: ClassVar[int] = 33
    t_ns: int
    error: str | None = None
    """Type and text of the exception that ended it; None after a clean run."""
    category: str | None = None
    done: bool = False
    """Whether the program said that its work is done: then it does not matter how the process ends."""


@dataclass(slots=True, kw_only=True)
class ProcessGone:
    """Somebody else saw the process end at `t_ns`: a collector, a supervisor or a witness. The last two may know the
    exit code."""

    KIND: ClassVar[int] = 34
    t_ns: int
    exit_code: int | None = None
    category: str | None = None
    """Why it failed, if it was the first of its attempt to do so."""
    name: str = ""
    """Which process, in a supervisor's or a witness's journal; empty for the one whose journal this is."""
    stopped: bool = False
    """It was ended, and started again, for a reason that is no failure: nodes that joined."""


@dataclass(slots=True, kw_only=True)
class Scheduled:
    """What the platform says of this attempt's wait for hardware, in wall time."""

    KIND: ClassVar[int] = 35
    t_ns: int
    eligible_wall_ns: int
    """From here on the job could have run."""
    allocated_wall_ns: int
    """From here on it had its hardware."""
    source: str


@dataclass(slots=True, kw_only=True)
class LoopBegin:
    """A training loop begins; its step runs follow."""

    KIND: ClassVar[int] = 36
    t_ns: int
    first: int
    """Counted from the process's own start where it cannot know at which step it resumed."""
    batch_size: int | None = None
    """Samples a step takes on this rank, where known."""
    after_warm_up: bool = False
    """Whether all that came before only warmed up: then the start-up lasts until the first step of this loop."""


@dataclass(slots=True, kw_only=True)
class Saved:
    """A checkpoint is committed: every step before `step` survives a failure from now on."""

    KIND: ClassVar[int] = 37
    t_ns: int
    step: int
    path: str = ""
    file: str = ""
    """Names the file itself, whatever path leads to it; readers only compare it."""
    content: str = ""
    """Names the state itself, however it was stored; readers only compare it."""
    durable: bool = True
    """False for a state that was only copied: training may go on from it, but nothing says that it survives."""


@dataclass(slots=True, kw_only=True)
class Restored:
    """Training goes on from a checkpoint: the next step to train is `step`."""

    KIND: ClassVar[int] = 38
    t_ns: int
    step: int | None
    """None where something was loaded, and only what was saved as `content`, to `path` or as `file` can tell which step
    it holds."""
    path: str = ""
    file: str = ""
    content: str = ""


@dataclass(slots=True, kw_only=True)
class Mark:
    """Something happened; shown, and never counted."""

    KIND: ClassVar[int] = 39
    t_ns: int
    name: str
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Dropped:
    """`count` records could not be written before this one: the disk was full."""

    KIND: ClassVar[int] = 40
    t_ns: int
    count: int


Packed = Name | SpanBegin | SpanEnd | StepRun | Period
Record = Packed | Process | ProcessEnd | ProcessGone | Scheduled | LoopBegin | Saved | Restored | Mark | Dropped

_JSON_KINDS: dict[int, type] = {
    kind.KIND: kind for kind in (Process, ProcessEnd, ProcessGone, Scheduled, LoopBegin, Saved, Restored, Mark, Dropped)
}


@cache
def _field_types(cls: type) -> dict[str, tuple[type, ...]]:
    hints = typing.get_type_hints(cls)
    options = {f.name: typing.get_args(hints[f.name]) or (hints[f.name],) for f in dataclasses.fields(cls)}
    return options | {name: (dict,) for name in options if name == "attrs"}


def clean_text(text: str) -> str:
    """The text as a journal keeps it: valid Unicode, no control characters, at most `NAME_LIMIT` long."""
    text = text[:NAME_LIMIT].encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def encode(record: Record) -> bytes:
    """The payload of one frame."""
    match record:
        case Name():
            return Name.LAYOUT.pack(Name.KIND, record.number) + record.text.encode()
        case SpanBegin():
            head = SpanBegin.LAYOUT.pack(SpanBegin.KIND, record.name, record.span, record.thread, record.t_ns)
            return head + _json(record.attrs) if record.attrs else head
        case SpanEnd():
            return SpanEnd.LAYOUT.pack(SpanEnd.KIND, record.failed, record.span, record.t_ns)
        case StepRun():
            return StepRun.LAYOUT.pack(StepRun.KIND, *dataclasses.astuple(record))
        case Period():
            head = Period.LAYOUT.pack(Period.KIND, record.name, record.thread, record.begin_ns, record.end_ns)
            return head + _json(record.attrs) if record.attrs else head
    body = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return bytes([record.KIND]) + _json(body)


def decode(payload: bytes) -> Record | None:
    """The record in a frame; None for a kind this version does not know. ValueError if the payload is not one."""
    try:
        kind = payload[0]
        if kind == StepRun.KIND:
            return StepRun(*_unpack_run(payload))
        if kind == SpanEnd.KIND:
            return SpanEnd(*_unpack_end(payload))
        if kind == SpanBegin.KIND:
            name, span, thread, t_ns = _unpack_begin(payload)
            trailer = payload[_BEGIN_BYTES:]
            return SpanBegin(name, span, thread, t_ns, _attrs(trailer) if trailer else None)
        if kind == Period.KIND:
            name, thread, begin_ns, end_ns = _unpack_period(payload)
            trailer = payload[Period.LAYOUT.size :]
            return Period(name, thread, begin_ns, end_ns, _attrs(trailer) if trailer else None)
        if kind == Name.KIND:
            return Name(_unpack_name(payload)[0], payload[Name.LAYOUT.size :].decode())
        return _decode_json(kind, payload)
    except (struct.error, AttributeError, IndexError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a journal record: {error}") from error


def _attrs(trailer: bytes) -> dict[str, Any]:
    """The attributes behind a packed record."""
    attrs: dict[str, Any] = _parse(trailer.decode())[0]
    return attrs


def _decode_json(kind: int, payload: bytes) -> Record | None:
    cls = _JSON_KINDS.get(kind)
    if cls is None:
        return None
    types = _field_types(cls)
    body: dict[str, Any] = _parse(payload[1:].decode())[0]
    for key, value in body.items():
        if key not in types:  # a newer writer's: begin again without
            known = {key: value for key, value in body.items() if key in types}
            return _decode_json(kind, payload[:1] + _json(known))
        if not isinstance(value, types[key]):
            raise TypeError(f"{cls.__name__}.{key} is {value!r:.40}")
    record: Record = cls(**body)
    return record


def _reader(layout: struct.Struct) -> Callable[[bytes], tuple[Any, ...]]:
    """Unpacks all but the kind."""
    return struct.Struct(layout.format.replace("B", "x")).unpack_from


_unpack_run, _unpack_end = _reader(StepRun.LAYOUT), _reader(SpanEnd.LAYOUT)
_unpack_begin, _unpack_name = _reader(SpanBegin.LAYOUT), _reader(Name.LAYOUT)
_unpack_period = _reader(Period.LAYOUT)
_BEGIN_BYTES = SpanBegin.LAYOUT.size
_parse = json.JSONDecoder().raw_decode


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=str).encode()
