"""Being told to stop: signals and notices, and who is told in turn."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from headway import sessions
from headway.launch.notice import REPEAT_S, Board, Notice, Poller, source_of
from headway.launch.notice import SIGNALS as STOP_SIGNALS

STOP_S = 300.0
"""What ranks that listen get to come to a step edge and save, where nobody says how much time there is."""


class Interrupted(BaseException):
    """A signal is to end the job. It may be raised in the middle of torch's own code, which must not catch it."""


class Signals:
    """What the supervisor was told. Ranks that listen are told to stop at a step edge; where none does, or a second one
    comes, the job ends at once."""

    def __init__(self, names: str, note: Callable[[str], None]) -> None:
        named = [getattr(signal, name.strip()) for name in names.split(",") if name.strip()]
        numbers = {*named, *STOP_SIGNALS}
        self._numbers = {number for number in numbers if signal.getsignal(number) != signal.SIG_IGN}  # as by `nohup`
        self._note = note
        self._stop_by_s, self._told_s = math.inf, 0.0
        self._interrupts = False
        self.reason = ""
        """Why ranks were told to stop."""
        self.pending: list[int] = []
        """Signals that came and were not heeded yet."""
        self.board: Board | None = None
        """Through which the ranks of this attempt listen."""
        self.wake = -1
        """Readable when a signal came."""

    @property
    def was_told(self) -> bool:
        """Whether ranks were told to stop."""
        return self._told_s > 0

    def heed(self, pids: Callable[[], list[int]]) -> None:
        """Does what signals ask for, as far as that is not to end the job: that is raised. `pids` are the workers'."""
        with suppress(BlockingIOError):
            os.read(self.wake, 4096)
        if time.monotonic() > self._stop_by_s:
            raise Interrupted(signal.SIGTERM)
        while self.pending:
            number = self.pending.pop(0)
            if number in STOP_SIGNALS and self._tell(Notice(signal.Signals(number).name.lower())):
                continue
            if number != signal.SIGUSR1:
                raise Interrupted(number)
            for pid in pids():
                if sessions.handles(pid, number):
                    os.kill(pid, number)

    def _tell(self, notice: Notice) -> bool:
        """Posts a notice, if anybody reads it. False if nobody does, or if this is an impatient second one."""
        board, now_s = self.board, time.monotonic()
        if board is None or not board.listeners:
            return False
        if board.notice is not None:
            return now_s - self._told_s < REPEAT_S
        board.post(notice.reason, deadline_ns=notice.deadline_ns)
        left_s, self._told_s, self.reason = notice.seconds_left, now_s, notice.reason
        self._stop_by_s = now_s + (STOP_S if left_s is None else left_s)
        self._note(f"{notice.reason}: the ranks save at a step edge, and stop.")
        return True

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Takes signals, and polls for the notices that `HEADWAY_NOTICE` names."""
        text = os.environ.get("HEADWAY_NOTICE", "")
        poller = Poller(source_of(text), self._tell_or_end) if text else None
        self.wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._caught) for number in self._numbers}
        if poller is not None:
            poller.start()
        try:
            yield
        finally:
            if poller is not None:
                poller.stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            os.close(self.wake)
            os.close(wake)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """A wait, which a signal to end ends."""
        self._interrupts = True
        try:
            self.heed(list)
            yield
        finally:
            self._interrupts = False

    def _caught(self, number: int, frame: Any) -> None:
        if self._interrupts and number != signal.SIGUSR1:
            raise Interrupted(number)
        self.pending.append(number)

    def _tell_or_end(self, notice: Notice) -> None:
        """In the poller's thread: what nobody listens to is as if somebody had sent SIGTERM."""
        if not self._tell(notice):
            os.kill(os.getpid(), signal.SIGTERM)
