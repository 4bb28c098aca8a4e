"""Notices that a job must soon stop: where they come from, and the step edge at which all its ranks obey one.

A `Notice` comes by signal, by a supervisor's `Board`, or from a source that a `Poller` asks. The `Listener` of each
rank brings it to a step edge that is the same on all ranks: one that stopped a step before the others would leave them
in a collective for ever. They agree without a collective. The first to know writes an edge some seconds ahead into the
process group's store, and whoever has no notice looks there once a second, at a step edge.
"""

import math
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from headway.errors import HeadwayError, InputError, PlatformError
from headway.meeting import met

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

EXIT_STOPPED = 75
"""The exit code after a stop where headway does not see to the restart: EX_TEMPFAIL, try again later."""

LOOK_S = 1.0
"""How often a rank looks whether others have a notice."""

AHEAD_S = 3.0
"""How far ahead ranks agree to stop: every one of them must have looked by then, even if steps become faster."""

AHEAD_STEPS = 2
"""And at least so many steps, for ranks that are not all at the same one."""

REPEAT_S = 5.0
"""A SIGTERM that comes so long after the first is a new one: launchers and Slurm may each pass on the same."""

PATIENCE_S = 120.0
"""How long a rank that has saved waits for the others to."""

_KEY = "headway/stop"
_now_s = time.monotonic


@dataclass(frozen=True, slots=True)
class Notice:
    """The job must stop, and why."""

    reason: str
    """`preempted`, `time_limit`, `cancelled`; `sigterm` or `sigusr1` where no more is known; or a source's own word."""
    deadline_ns: int = 0
    """From here on the job may be killed, on this machine's monotonic clock; 0 if that is not known."""

    @property
    def seconds_left(self) -> float | None:
        """Until the job may be killed; None if that is not known."""
        return (self.deadline_ns - time.monotonic_ns()) / 1e9 if self.deadline_ns else None


# --- from the supervisor -------------------------------------------------------------------------------------------

_HEAD = struct.Struct("<4sI")
_NOTICE = struct.Struct("<q112s")
_MAGIC, _POSTED, _NOTICE_AT, _RANKS_AT = b"HWB2", _HEAD.size, 16, 16 + _NOTICE.size
_LISTENS, _STOPPED, _LISTENS_ALONE = 1, 2, 3
_EMPTY = bytes(_RANKS_AT)


class Board:
    """A small file, mapped by a supervisor and its ranks: it posts a notice, they tell who listens and who has stopped.

    It serves one attempt on one node.
    """

    def __init__(self, cells: mmap.mmap) -> None:
        self.cells = cells
        self._ranks = _HEAD.unpack_from(cells)[1]

    @classmethod
    def create(cls, path: Path, ranks: int) -> "Board":
        """An empty board for the local ranks from 0 up to `ranks`. The path must be on a local file system."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, _RANKS_AT + ranks)  # a mapped file with holes on a full disk is a SIGBUS
            cells = mmap.mmap(file, _RANKS_AT + ranks)
        finally:
            os.close(file)
        _HEAD.pack_into(cells, 0, _MAGIC, ranks)
        return cls(cells)

    @classmethod
    def open(cls, path: Path) -> "Board":
        """The board that a supervisor created; PlatformError if there is none."""
        try:
            with open(path, "r+b") as file:
                cells = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise PlatformError(f"the supervisor's board {path} cannot be opened ({error}).") from error
        if len(cells) < _RANKS_AT or cells[:4] != _MAGIC:
            raise PlatformError(f"{path} is not a supervisor's board. Unset HEADWAY_BOARD, or start by `headway run`.")
        return cls(cells)

    def post(self, reason: str, deadline_ns: int = 0) -> None:
        """Tells all ranks, once: what is posted stays."""
        if not self.cells[_POSTED]:
            _NOTICE.pack_into(self.cells, _NOTICE_AT, deadline_ns, reason.encode()[:112])
            self.cells[_POSTED] = 1

    @property
    def notice(self) -> Notice | None:
        """What was posted."""
        if not self.cells[_POSTED]:
            return None
        deadline_ns, reason = _NOTICE.unpack_from(self.cells, _NOTICE_AT)
        return Notice(reason.rstrip(b"\0").decode("utf-8", "replace"), deadline_ns)

    def listen(self, local_rank: int, alone: bool = False) -> None:
        """This rank will stop when told. `alone`: it does nothing else about SIGTERM."""
        self._set(local_rank, _LISTENS_ALONE if alone else _LISTENS)

    def has_stopped(self, local_rank: int) -> None:
        """This rank has come to the edge and saved."""
        self._set(local_rank, _STOPPED)

    @property
    def listeners(self) -> set[int]:
        """The local ranks that will stop when told, or have."""
        return {rank for rank in range(self._ranks) if self.cells[_RANKS_AT + rank]}

    @property
    def deaf(self) -> set[int]:
        """The local ranks to which SIGTERM is a notice, and nothing more: it ends none that is stuck."""
        return {rank for rank in range(self._ranks) if self.cells[_RANKS_AT + rank] == _LISTENS_ALONE}

    @property
    def stopped(self) -> set[int]:
        """The local ranks that have come to the edge and saved."""
        return {rank for rank in range(self._ranks) if self.cells[_RANKS_AT + rank] == _STOPPED}

    def _set(self, local_rank: int, state: int) -> None:
        if 0 <= local_rank < self._ranks:
            self.cells[_RANKS_AT + local_rank] = state


# --- from elsewhere ------------------------------------------------------------------------------------------------

Source = Callable[[], Notice | None]


def source_of(text: str) -> Source:
    """What `HEADWAY_NOTICE` names: `file:PATH`, `aws`, `gcp` or `package.module:function`. InputError if it is none.

    `aws:URL` and `gcp:URL` ask another metadata server than the machine's own.
    """
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return lambda: Notice("preempted") if os.path.exists(rest) else None
    if kind in _METADATA:
        return lambda: _METADATA[kind](rest or "http://169.254.169.254")
    if kind and rest:
        from importlib import import_module

        with suppress(ImportError):
            found = getattr(import_module(kind), rest, None)
            if callable(found):
                return found  # type: ignore[no-any-return]
    raise InputError(
        f"HEADWAY_NOTICE={text} names no source of notices: it is none of file:PATH, aws, gcp, and there is no such "
        f"function. Write a function that returns a Notice or None as package.module:function."
    )


class Poller(threading.Thread):
    """Asks a source every few seconds; `heard` is called once, with the first notice."""

    def __init__(self, source: Source, heard: Callable[[Notice], None], every_s: float = 2.0) -> None:
        super().__init__(name="headway-notice", daemon=True)
        self._source, self._heard, self._every_s = source, heard, every_s
        self._over = threading.Event()

    def run(self) -> None:
        """Until there is a notice, or nobody wants one any more."""
        said = False
        while not self._over.is_set():
            try:
                notice = self._source()
            except Exception as error:  # the source is another's, and may do better next time
                notice = None
                if not said:
                    _say(f"the source of notices failed ({type(error).__name__}: {error}). It is asked again.")
                said = True
            if notice is not None:
                self._heard(notice)
                return
            self._over.wait(self._every_s)

    def stop(self) -> None:
        """Nobody wants a notice any more."""
        self._over.set()


def _aws(url: str) -> Notice | None:
    """The interruption of a spot instance: two minutes before."""
    import json
    from datetime import datetime

    token = _fetch(f"{url}/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    headers = {"X-aws-ec2-metadata-token": token or ""}
    told = _fetch(f"{url}/latest/meta-data/spot/instance-action", "GET", headers)
    if told is None:
        return None
    left_s = datetime.fromisoformat(json.loads(told)["time"]).timestamp() - time.time()
    return Notice("preempted", deadline_ns=time.monotonic_ns() + int(left_s * 1e9))


def _gcp(url: str) -> Notice | None:
    """The preemption of a spot machine: thirty seconds before."""
    told = _fetch(f"{url}/computeMetadata/v1/instance/preempted", "GET", {"Metadata-Flavor": "Google"})
    return Notice("preempted", deadline_ns=time.monotonic_ns() + 30_000_000_000) if told == "TRUE" else None


_METADATA: dict[str, Callable[[str], Notice | None]] = {"aws": _aws, "gcp": _gcp}


def _fetch(url: str, method: str, headers: dict[str, str]) -> str | None:
    """What a metadata server answers; None if there is nothing of that name."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, method=method, headers=headers)
    try:  # no proxy: the address is the machine's own
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


# --- to the step edge ----------------------------------------------------------------------------------------------


def listen(environ: Mapping[str, str], steps: Callable[[], int], local_rank: int) -> "Listener":
    """Begins to listen to all that may tell this rank to stop. What cannot be listened to is said, and does no harm."""
    board, path, source = None, environ.get("HEADWAY_BOARD"), environ.get("HEADWAY_NOTICE")
    try:
        if path:
            board = Board.open(Path(path))
        ask = source_of(source) if source and board is None and local_rank == 0 else None
    except HeadwayError as error:
        _say(f"{error} Going on without it.")
        ask = None
    listener = Listener(steps, board)
    if ask is not None:  # a supervisor would ask it
        Poller(ask, listener.tell).start()
    if problem := listener.take_signals():
        _say(problem)
    if board is not None:
        board.listen(local_rank, alone=listener.former.get(signal.SIGTERM) is signal.SIG_DFL)
    return listener


class Edge(NamedTuple):
    """Where all ranks stop: at the first edge with so many steps done, or with so many questions asked."""

    unit: str
    at: int


class Listener:
    """What one rank knows of a stop: asked at every step edge, it says at which one to stop.

    `steps` tells how many steps are done, where they are counted; else the questions are.
    """

    def __init__(self, steps: Callable[[], int], board: Board | None = None) -> None:
        self.notice: Notice | None = None
        self.stopped = False
        """Whether this rank has come to the edge."""
        self.former: dict[int, Any] = {}
        """The handlers that were there before."""
        self._steps, self._board = steps, board
        self._cells: mmap.mmap | bytes = board.cells if board else _EMPTY
        self._asked = 0
        self._quiet_until_s = 0.0
        self._edge: Edge | None = None
        self._pace = _Pace()
        self._group: tuple[Any, int] | None = None
        self._signalled_s = 0.0

    def is_due(self) -> bool:
        """Whether this is the edge to stop at. To be asked at every step edge, by every rank alike."""
        self._asked += 1
        if _now_s() < self._quiet_until_s and not self._cells[_POSTED]:
            return False
        return self.stopped or self._look()

    @property
    def is_supervised(self) -> bool:
        """Whether a supervisor sees to what comes after the stop."""
        return self._board is not None

    def tell(self, notice: Notice) -> None:
        """The job must stop. May be called in a signal handler or in another thread."""
        self.notice = self.notice or notice
        self._quiet_until_s = 0.0

    def _look(self) -> bool:
        now_s = _now_s()
        self._quiet_until_s = now_s + LOOK_S  # before anything is looked at: a notice that comes meanwhile resets it
        self._pace.note(now_s, *self._position())
        if self._edge is None:
            self._edge = self._agreed()
        if self._edge is None:
            return False
        self._quiet_until_s = 0.0
        self.stopped = self._position(self._edge.unit)[1] >= self._edge.at
        return self.stopped

    def _agreed(self) -> Edge | None:
        """The edge that all ranks stop at; None as long as there is none."""
        notice = self.notice or (self._board.notice if self._board else None)
        group = process_group()
        if notice is not None:
            self.notice = notice
        if group is None:
            return None if notice is None else Edge("question", 0)
        try:
            if not group[0].check([_KEY]):  # this rank would be the first
                if notice is None:
                    return None
                if self._pace.ahead is None:
                    self._quiet_until_s = 0.0  # how many steps take some seconds will be known in a second
                    return None
            return self._settled(group, notice)
        except RuntimeError as error:  # as torch's stores raise when their host is gone
            if notice is None:
                return None
            _say(f"the ranks could not agree where to stop ({error}). This one stops here.")
            return Edge("question", 0)

    def _settled(self, group: tuple[Any, int], notice: Notice | None) -> Edge:
        """The edge in the store: this rank's own if it is the first to write one."""
        unit, position = self._position()
        mine = Edge(unit, position + (self._pace.ahead or AHEAD_STEPS))
        reason = notice.reason if notice else "unknown"
        unit, at, reason = group[0].compare_set(_KEY, "", f"{mine.unit} {mine.at} {reason}").decode().split(" ", 2)
        edge = Edge(unit, int(at))
        self._group, self.notice = group, notice or Notice(reason)
        if (late := self._position(unit)[1] - edge.at) > 0:
            _say(
                f"this rank heard of the stop {late} {unit}s too late: it is ahead of the others, as is what it saves."
            )
        return edge

    def _position(self, unit: str = "") -> tuple[str, int]:
        steps = self._steps()
        return ("step", steps) if unit == "step" or (steps and not unit) else ("question", self._asked)

    def wait_for_others(self, local_rank: int = 0) -> None:
        """Returns when all ranks have saved, or after two minutes: whoever leaves first may take the others along."""
        if self._board:
            self._board.has_stopped(local_rank)
        group, self._group = self._group, None
        if group is None or self._edge is None:
            return
        (store, world_size), key = group, f"{_KEY}/saved/{self._edge.at}"
        deadline_s = _now_s() + PATIENCE_S
        with suppress(RuntimeError):  # the store's host is gone: it had waited for all
            saved = store.add(key, 1)
            if saved == world_size:  # everyone knows the edge: whoever is given the same store again must not
                store.delete_key(_KEY)
            while saved < world_size and _now_s() < deadline_s:
                time.sleep(0.05)
                saved = store.add(key, 0)

    # --- signals ---

    def take_signals(self) -> str:
        """Listens for SIGTERM and SIGUSR1 from now on. Returns what the user should know: mostly nothing."""
        global _taker
        if threading.current_thread() is not threading.main_thread():
            return (
                "asked for should_stop outside of the main thread, where Python takes no signals: SIGTERM and SIGUSR1 "
                "are not seen. Ask once in the main thread, before."
            )
        for number in SIGNALS:
            former = signal.getsignal(number)
            if former is not None:  # else it is not Python's, and could be neither called nor put back
                self.former[number] = former
                signal.signal(number, self._signalled)
        _taker = self
        return ""

    def give_signals_back(self) -> None:
        """The former handlers are back, where nobody else has taken the signal since."""
        for number, former in self.former.items():
            if signal.getsignal(number) == self._signalled:
                signal.signal(number, former)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        now_s = _now_s()
        again = self._signalled_s and now_s - self._signalled_s > REPEAT_S
        if number == signal.SIGTERM and again and not self.stopped:  # it does not get to the edge: let it end
            self.give_signals_back()
            os.kill(os.getpid(), number)
            return
        self._signalled_s = self._signalled_s or now_s
        self.tell(Notice(signal.Signals(number).name.lower()))
        former = self.former.get(number)
        if callable(former):
            former(number, frame)


class _Pace:
    """How fast the edges go by."""

    def __init__(self) -> None:
        self.ahead: int | None = None
        """How many steps are `AHEAD_S`; None before that is known."""
        self._unit, self._mark, self._since_s = "", 0, 0.0

    def note(self, now_s: float, unit: str, position: int) -> None:
        """Takes its time from a look to the next, if that is long enough to be told by."""
        if unit != self._unit:
            self._unit, self._mark, self._since_s, self.ahead = unit, position, now_s, None
        elapsed_s = now_s - self._since_s
        if elapsed_s >= LOOK_S and position > self._mark:
            steps = (position - self._mark) * AHEAD_S / elapsed_s
            self.ahead = max(AHEAD_STEPS, math.ceil(steps))
            self._mark, self._since_s = position, now_s


def process_group() -> tuple[Any, int] | None:
    """The default process group's store, and how many ranks it has; None if there is no group of several ranks.

    Where torch hides that store, each rank stops as soon as it knows.
    """
    found = met()
    if found is None or found.size < 2:
        return None
    if found.store is None:
        _say_once("this version of torch hides its store: ranks cannot agree where to stop. They may deadlock there.")
        return None
    return found.store, found.size


_taker: Listener | None = None
_held = threading.local()


def _hold_signals() -> None:
    # One that comes to a child before it has its former handlers back would be lost, and must end a data worker.
    if _taker is not None:
        _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release_signals() -> None:
    if _taker is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _give_back_in_child() -> None:
    global _taker
    if _taker is not None:
        _taker.give_signals_back()
        _release_signals()
        _taker = None


os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_give_back_in_child)


@cache
def _say_once(text: str) -> None:
    _say(text)


def _say(text: str) -> None:
    print(f"headway: {text}", file=sys.stderr, flush=True)
