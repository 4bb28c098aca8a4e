"""Stays with a publisher until it has published, or nothing more can be done: it looks whether the publisher gets on,
asks for a decision when it fails, and leaves nothing of it behind.

The publisher, called worker here, leads a session of its own, and ends with whoever supervises it, however that ends.
Its steps that are done are kept, so it can be killed at any instant. It writes how it ended into the state; a worker
that ends without a word there has failed, whatever its exit code.
"""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from headway import sessions
from headway.publish.request import STATE, Desk, State

KEPT_BYTES = 64 * 1024
"""What is kept of a worker's stderr, to tell why it failed: its end."""

MARK = "PUBLISHES"
"""Variable of the workers' environment that names the desk: a number of a process alone may be another's by now."""

BUSY = 0.01
"""Share of one processor's time from which a worker counts as busy."""

BUSY_BYTES_PER_S = 1000
"""Bytes read and written from which it counts as busy."""

GRACE_S = 1.0
"""What a worker gets to end by itself: little, since a scheduler that ends the supervisor waits as little."""

_WORKER = "worker"
"""File with the session that worked last; it may have outlived a supervisor that was killed."""

_CODES = {"published": 0, "rejected": 3, "failed": 2}
"""What the command line ends with, by what the worker said. What did not let it say anything is 1."""

_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TICK_S, _LONGEST_LOOK_S, _DUMP_S, _KILL_S = 0.1, 10.0, 1.0, 5.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WRITE_AGAIN_S = (0.2, 2.0)


@dataclass(frozen=True, kw_only=True)
class End:
    """How a worker ended that did not say so itself."""

    exit_code: int
    """As `subprocess` has it: -9 for a process that SIGKILL ended."""
    last_lines: str = ""
    """The end of its stderr."""
    stalled_s: float | None = None
    """How long it had done nothing, if it was ended for that."""
    steps_done: int = 0
    """Steps that it did, and that were not done before."""

    @property
    def signal(self) -> str | None:
        """The signal that ended it."""
        return sessions.signal_name(-self.exit_code) if self.exit_code < 0 else None

    @property
    def told(self) -> str:
        """That, in one line."""
        if self.stalled_s is not None:
            return f"it did nothing for {self.stalled_s:.0f} s and was ended; the log tells where it was"
        if self.signal:
            return f"it was ended by {self.signal}"
        if self.exit_code == 0:
            return "it ended as if all were well, and has published nothing: does the recipe call exit?"
        last = next((line.strip() for line in reversed(self.last_lines.splitlines()) if line.strip()), "")
        return f"{last[:500]} (exit code {self.exit_code})" if last else f"exit code {self.exit_code}"


@dataclass(frozen=True, kw_only=True)
class Retry:
    """The worker is to be started again."""

    why: str
    category: str = ""
    """What kind of failure it was."""
    wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Stop:
    """It is not worth another try."""

    why: str
    category: str = ""


Decide = Callable[[End], Retry | Stop | None]
"""What to do about a failure. None: stop."""


def supervise(
    desk: Desk, command: Sequence[str], decide: Decide, *, stall_s: float = 900.0, say: Callable[[str], None]
) -> int:
    """Runs the worker, as often as `decide` says, and returns the exit code for a command line: 0 published, 1 failed,
    2 cannot be published as it is asked for, 3 rejected by a check, 128 and more: interrupted by a signal.

    A worker that has used no processor, read and written nothing, and changed nothing in its state for `stall_s` hangs:
    it gets SIGUSR1, upon which it should print its stacks (`faulthandler.register`), and is killed. InputError if
    somebody else is at it. To be called in the main thread, which must last: the worker ends with it.
    """
    with desk.held(), _told_to_end() as told:
        _end_what_was_left(desk)
        supervisor = _Supervisor(desk, command, decide, stall_s, say, told)
        try:
            return supervisor.run()
        except _Interrupted:
            return supervisor.interrupted(told[0])
        finally:
            supervisor.close()


class _Interrupted(Exception):
    """A signal came."""


class _Supervisor:
    def __init__(
        self, desk: Desk, command: Sequence[str], decide: Decide, stall_s: float, say: Callable[[str], None],
        told: list[int],
    ) -> None:  # fmt: skip
        self._desk, self._command, self._decide, self._stall_s, self._told = desk, command, decide, stall_s, told
        self._log, self._tell = _Log(desk.log), say
        self._streams = selectors.DefaultSelector()
        self._kept = bytearray()
        self._worker: subprocess.Popen[bytes] | None = None
        self._before = State()

    def run(self) -> int:
        """Until it is published, or nothing more can be done."""
        tries = self._desk.state().tries
        while True:
            tries += 1
            self._write(partial(self._desk.begin, tries))
            self._before = self._desk.state()
            end, stuck = self._try()
            if (code := self._verdict()) is not None:
                return code
            # Who ends a whole job tells the supervisor, too, and maybe later.
            self._wait(GRACE_S if -end.exit_code in _TO_END else 0.0)
            decision = self._decision(end, stuck)
            problem = " ".join(f"{end.told}: {decision.why}".split()).removesuffix(":")
            if isinstance(decision, Stop):
                self._change(phase="failed", doing="", problem=problem, category=decision.category)
                self._say(f"not published. {problem}")
                return 1
            self._change(phase="retrying", doing="", problem=problem, category=decision.category)
            self._say(f"try {tries} failed. {problem}")
            self._wait(decision.wait_s)

    def interrupted(self, number: int) -> int:
        """A signal is to end it: so it ends the worker, and says who goes on."""
        self._end_worker(polite=True)
        if (code := self._verdict()) is not None:
            return code  # it had just finished
        slurm = os.environ.get("SLURM_JOB_ID")
        where = f" in Slurm job {slurm}, which may start it again" if slurm else ""
        goes_on = f"What is done is kept: `headway publish run {self._desk.folder.name}` goes on."
        problem = f"interrupted by {sessions.signal_name(number)}{where}. {goes_on}"
        self._change(phase="interrupted", doing="", problem=problem)
        self._say(problem)
        return 128 + number

    def close(self) -> None:
        self._end_worker()
        self._log.close()
        self._streams.close()

    # --- one try ---

    def _try(self) -> tuple[End, list[int]]:
        """How the worker ended; and which of its processes cannot be ended."""
        stalled_s = None
        self._kept.clear()
        try:
            worker = self._start()
        except (OSError, subprocess.SubprocessError) as error:
            return End(exit_code=127, last_lines=f"{self._command[0]} cannot be started: {error}"), []
        stillness, look_s = Stillness(self._stall_s), min(_LONGEST_LOOK_S, self._stall_s / 10)
        looked_s = time.monotonic()
        while not _has_ended(worker.pid) and stalled_s is None:
            self._wait(_TICK_S)
            if time.monotonic() - looked_s >= look_s:
                looked_s = time.monotonic()
                ticks, moved = sessions.work_done([worker.pid])[worker.pid]
                still_s = stillness.look(looked_s, 2 * look_s, ticks / _TICKS_PER_S, moved, self._changed())
                stalled_s = still_s if still_s >= self._stall_s else None
        if stalled_s is not None:
            self._ask_for_stacks(worker)
        stuck = self._end_worker()
        end = End(
            exit_code=-signal.SIGKILL if worker.pid in stuck else worker.wait(),
            last_lines=self._kept.decode("utf-8", "replace"),
            stalled_s=stalled_s,
            steps_done=self._steps_done(),
        )
        return end, stuck

    def _start(self) -> subprocess.Popen[bytes]:
        environ = os.environ | {MARK: str(self._desk.folder), "PYTHONUNBUFFERED": "1"}
        worker = subprocess.Popen(
            self._command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, preexec_fn=partial(sessions.die_with_parent, os.getpid()),
        )  # fmt: skip
        self._worker = worker
        with suppress(OSError):  # a full disk: then a supervisor after this one may meet what this one left
            (self._desk.folder / _WORKER).write_text(str(worker.pid))
        self._streams.register(worker.stdout, selectors.EVENT_READ, bytearray())  # type: ignore[arg-type]
        self._streams.register(worker.stderr, selectors.EVENT_READ, self._kept)  # type: ignore[arg-type]
        return worker

    def _ask_for_stacks(self, worker: subprocess.Popen[bytes]) -> None:
        """In its own handler of SIGUSR1, which may work where Python does not. If it has none, it ends here."""
        self._log.line(f"the worker, process {worker.pid}, does nothing. It is asked where it is, and ended.")
        os.kill(worker.pid, signal.SIGUSR1)
        self._take_in(_DUMP_S)

    def _end_worker(self, polite: bool = False) -> list[int]:
        """Ends the worker and all that is in its session. Returns what cannot be ended."""
        worker, self._worker = self._worker, None
        if worker is None:
            return []
        if polite:
            os.kill(worker.pid, signal.SIGTERM)
            until_s = time.monotonic() + GRACE_S
            while not _has_ended(worker.pid) and time.monotonic() < until_s:
                self._take_in(_TICK_S / 10)
        # The worker is not waited for before: until then nobody else can get its number.
        stuck = sessions.end([worker.pid], _KILL_S)
        self._take_in(0.0)
        for key in list(self._streams.get_map().values()):
            self._close(key)
        if worker.pid not in stuck:
            worker.wait()
        return stuck

    def _steps_done(self) -> int:
        return len(set(self._desk.state().steps) - set(self._before.steps))

    def _changed(self) -> int:
        try:
            return os.stat(self._desk.folder / STATE).st_mtime_ns
        except OSError:
            return 0

    # --- what becomes of it ---

    def _verdict(self) -> int | None:
        """The exit code of what the worker wrote into the state, if it did."""
        state = self._desk.state()
        if state == self._before or state.phase not in _CODES:
            return None
        self._say(f"published as {state.version}" if state.phase == "published" else f"{state.phase}: {state.problem}")
        return _CODES[state.phase]

    def _decision(self, end: End, stuck: list[int]) -> Retry | Stop:
        if stuck:
            return Stop(why=f"the kernel holds process {stuck[0]} in a call and does not let it end", category="hang")
        try:
            return self._decide(end) or Stop(why="")
        except Exception as error:  # a user's own policy: without one, nothing can be decided but to stop
            return Stop(why=f"what decides about failures failed itself ({type(error).__name__}: {error})")

    def _change(self, **changes: Any) -> None:
        self._write(partial(self._desk.change, **changes))

    def _write(self, change: Callable[[], State]) -> None:
        """A full disk may have room again soon: what the worker was writing goes with it."""
        for wait_s in (*_WRITE_AGAIN_S, None):
            try:
                change()
                return
            except OSError as error:
                if wait_s is None:
                    self._say(f"how far it is cannot be written to {self._desk.folder} ({error.strerror})")
                else:
                    time.sleep(wait_s)

    # --- hearing and saying ---

    def _wait(self, seconds: float) -> None:
        """Takes in what the worker says meanwhile. Raises if a signal came."""
        until_s = time.monotonic() + seconds
        while not self._told:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or (self._worker is not None and self._read(left_s)):
                return
            if self._worker is None:
                time.sleep(min(left_s, _TICK_S))
        raise _Interrupted

    def _take_in(self, seconds: float) -> None:
        """What the worker has said, and says within that time."""
        until_s = time.monotonic() + seconds
        last_s = until_s + 1.0  # something that left the session may hold its end, and say on
        while (self._read(max(0.0, until_s - time.monotonic())) or until_s > time.monotonic()) and (
            time.monotonic() < last_s
        ):
            pass

    def _read(self, timeout_s: float) -> bool:
        ready = self._streams.select(timeout_s)
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._close(key)
            self._log.write(data)
            key.data.extend(data)
            del key.data[:-KEPT_BYTES]
        return bool(ready)

    def _close(self, key: selectors.SelectorKey) -> None:
        self._streams.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]

    def _say(self, text: str) -> None:
        if not self._log.is_stderr:
            self._log.line(text)
        with suppress(OSError):  # the terminal is gone
            self._tell(text)


class Stillness:
    """For how long a session has done nothing to speak of."""

    def __init__(self, stall_s: float) -> None:
        self._least_s, self._least_bytes = BUSY * stall_s, BUSY_BYTES_PER_S * stall_s
        self._since: tuple[float, int, int] | None = None
        self._looked_s = self._still_s = 0.0

    def look(self, now_s: float, most_s: float, used_s: float, moved: int, changed: int) -> float:
        """Seconds. `used_s`, `moved`: processor time, and bytes read and written, so far; `changed`: when the state
        was. A look counts for `most_s` at most: if the machine was suspended, the worker was, too."""
        self._still_s += min(now_s - self._looked_s, most_s)
        self._looked_s = now_s
        used, bytes_, last = self._since or (0.0, 0, -1)
        is_still = 0 <= used_s - used < self._least_s and 0 <= moved - bytes_ < self._least_bytes
        if not is_still or changed != last:  # less than before: some process of it has ended
            self._since, self._still_s = (used_s, moved, changed), 0.0
        return self._still_s


class _Log:
    """The file of all that was said. What cannot be written is dropped: nothing fails for that."""

    def __init__(self, path: Path) -> None:
        self._file = -1
        self.is_stderr = False
        """Whether what this process says goes there anyhow."""
        with suppress(OSError):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self.is_stderr = os.path.samestat(os.fstat(self._file), os.fstat(2))

    def write(self, data: bytes) -> None:
        with suppress(OSError):
            while data:
                data = data[os.write(self._file, data) :]

    def line(self, text: str) -> None:
        self.write(f"headway: {text}\n".encode())

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._file)


# --- processes -----------------------------------------------------------------------------------------------------


@contextmanager
def _told_to_end() -> Iterator[list[int]]:
    """The signals that came so far and ask this process to end, except those it was started to ignore, as by nohup."""
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)

    former = {each: signal.signal(each, note) for each in _TO_END if signal.getsignal(each) != signal.SIG_IGN}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_END)  # a trainer's mask is its children's
    try:
        yield told
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in former.items():
            signal.signal(number, handler)


def _has_ended(pid: int) -> bool:
    """Whether a child has; it stays to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_what_was_left(desk: Desk) -> None:
    """Ends what the last worker had started, if its supervisor could not: it would go on beside the next one."""
    mark = os.fsencode(f"{MARK}={desk.folder}")
    with suppress(OSError, ValueError):  # nothing was started yet
        session = int((desk.folder / _WORKER).read_text())
        sessions.end([session], _KILL_S, lambda pid: mark in _environ(pid))


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return []
