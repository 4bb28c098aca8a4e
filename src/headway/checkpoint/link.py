"""A trainer's line to the keeper of its node: hands over memory and saves, hears what became of them."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from headway.checkpoint import wire
from headway.checkpoint.arena import Arena, Shape
from headway.checkpoint.guard import announce
from headway.checkpoint.lease import Taken
from headway.checkpoint.wire import Wire
from headway.errors import PlatformError

UP_S = 60.0
"""How long a keeper may take to come up on a busy machine."""

SLOW_S = 5.0
"""After so long it is said what is waited for."""

HANDOVER_S = 15.0
"""How long the trainers of an earlier attempt may take to be gone."""

_KEEPER = "from headway.checkpoint.keeper import main; main()"

_OVER = ("done", "failed")


@contextmanager
def telling(text: str) -> Iterator[None]:
    """Says what is waited for, once that takes long; nothing, if the text is empty."""
    timer = threading.Timer(SLOW_S, lambda: print(f"headway: {text}", file=sys.stderr, flush=True))
    timer.daemon = True
    if text:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Link:
    """Stays up: if the keeper dies, the next one gets everything again."""

    def __init__(
        self, root: str, session: str, rank: int, lease: dict[str, Any] | None, hear: Callable[[dict[str, Any]], None]
    ) -> None:
        self._root, self._hear = root, hear
        if "://" not in root:
            with suppress(OSError):  # the first write to it reports the reason
                os.makedirs(root, exist_ok=True)
        self._place = wire.place(root)
        self._hello = {"do": "hello", "place": self._place, "session": session, "rank": rank, "lease": lease}
        self._arenas: dict[str, Arena] = {}
        self._pending: dict[str, dict[str, Any]] = {}
        self._inherited: dict[str, dict[str, Any]] = {}
        self._held: dict[str, Any] | None = None
        self.committed: list[str] = []
        """Tags of saves that were committed, as far as the keeper knew when it was last asked for its arenas."""
        self._changed = threading.Condition()
        self._answers: queue.SimpleQueue[tuple[dict[str, Any], list[int]] | None] = queue.SimpleQueue()
        self._asked = 0
        self._leaving = False
        self._over = ""
        """Why there is no keeper, and will be none."""
        self._child: subprocess.Popen[bytes] | None = None
        self._wire = self._open()
        announce(root, self._place, os.environ.get("HEADWAY_BOARD"))
        self._thread = threading.Thread(target=self._listen, name="headway-keeper-link", daemon=True)
        self._thread.start()

    # --- coming up ---

    def _open(self) -> Wire:
        until, refused = time.monotonic() + UP_S, None
        while time.monotonic() < until:
            link = wire.connect(self._place)
            if link is None:
                self._start_keeper()
                time.sleep(0.01)
                continue
            if link.peer()[1] != os.getuid():
                raise PlatformError(
                    f"another user listens where the keeper of {self._root} should. Choose another folder."
                )
            answer = self._answer(link, until) if link.send(self._hello) else None
            if answer is not None and "refused" not in answer[0]:
                return link
            link.close()
            time.sleep(0.01)
            if answer is not None:
                refused = refused or time.monotonic()
                if time.monotonic() - refused > HANDOVER_S or answer[0].get("pid") == os.getpid():
                    raise Taken(_refused(answer[0]))
                time.sleep(0.1)
        raise PlatformError(f"no keeper for the checkpoints in {self._root} came up within {UP_S:.0f} s.")

    def _answer(self, link: Wire, until: float) -> tuple[dict[str, Any], list[int]] | None:
        """What the keeper says to a greeting; PlatformError if it says nothing."""
        pid = link.peer()[0]
        with telling(f"waiting for the keeper of {self._root} (process {pid}) to answer …"):
            if not link.has_message(max(0.0, until - time.monotonic())):
                link.close()
                raise PlatformError(
                    f"the keeper of the checkpoints in {self._root} (process {pid}) has not answered for {UP_S:.0f} s. "
                    f"Is it stopped? `kill -CONT {pid}` lets it go on; `kill -9 {pid}` ends it, and what is committed "
                    f"stays."
                )
        return link.receive()

    def _start_keeper(self) -> None:
        if self._child is not None and self._child.poll() is None:
            return
        self._child = subprocess.Popen(
            [sys.executable, "-c", _KEEPER, json.dumps([self._root, self._place])],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, cwd="/", env={**os.environ, "HEADWAY_DISABLE": "1"},
        )  # fmt: skip

    def _reopen(self) -> None:
        opened = self._open()
        with self._changed:
            self._wire.close()
            self._wire = opened
            for arena in self._arenas.values():
                self._wire.send({"do": "arena", "shape": asdict(arena.shape)}, arena.fd)
            for task in self._pending.values():
                self._wire.send({"do": "save", "task": task})
            if self._held is not None:
                self._wire.send({"do": "held", "task": self._held})

    # --- talking ---

    def arenas(self) -> list[tuple[Arena, list[str]]]:
        """What the node's memory holds, of all ranks, and the tags of what is still being uploaded from it."""
        while True:
            if self._over:
                raise PlatformError(f"what is held in memory cannot be had: {self._over}")
            self._asked += 1
            self._send({"do": "arenas", "ask": self._asked})
            found: list[tuple[Arena, list[str]]] = []
            while (answer := self._next_answer()) is not None:
                message, fds = answer
                if message.get("ask") != self._asked:  # of a keeper that was asked again meanwhile
                    for fd in fds:
                        os.close(fd)
                elif "arenas" in message:
                    self.committed = message["committed"]
                    return found
                else:
                    self._inherited |= {task["tag"]: task for task in message["pending"]}
                    tags = [task["tag"] for task in message["pending"]]
                    found.append((Arena(Shape(**message["arena"]), fds[0]), tags))
            for arena, _ in found:  # the keeper has died meanwhile: the next one is asked
                arena.close()

    def _next_answer(self) -> tuple[dict[str, Any], list[int]] | None:
        try:
            with telling(f"waiting for the keeper of {self._root} to answer …"):
                return self._answers.get(timeout=UP_S)
        except queue.Empty:
            raise PlatformError(
                f"the keeper of the checkpoints in {self._root} has not answered for {UP_S:.0f} s. Is it stopped?"
            ) from None

    def hold(self, arena: Arena) -> None:
        """The keeper keeps this memory from now on."""
        with self._changed:
            self._arenas[arena.shape.plan] = arena
        self._send({"do": "arena", "shape": asdict(arena.shape)}, arena.fd)

    def keep_only(self, plan: str) -> None:
        with self._changed:
            self._arenas = {name: arena for name, arena in self._arenas.items() if name == plan}
        self._send({"do": "keep", "plan": plan})

    def save(self, task: dict[str, Any]) -> None:
        """Has a save uploaded. It is in safe hands from here on, whatever becomes of this process."""
        with self._changed:
            self._pending[task["tag"]], self._held = task, None
            self._wire.send({"do": "save", "task": task})
        if self._over:
            self._give_up(self._over)

    def held(self, task: dict[str, Any]) -> None:
        """Tell the keeper of a save that memory alone has: it is uploaded if the memory has to go."""
        self._held = task
        self._send({"do": "held", "task": task})

    def save_held(self) -> None:
        """Upload the save that memory alone has, if there is one: the memory is about to go."""
        with self._changed:
            if self._held is not None:
                self.save(self._held)

    def take_over(self, tag: str) -> None:
        """A save that `arenas` told of, whose trainer has died, is now this one's: should the keeper die, the next one
        gets it, too."""
        self.save(self._inherited[tag])

    def wait(self, tag: str | None = None, timeout_s: float | None = None) -> bool:
        """Waits until a save, or every one, has come to its end. False if it takes longer."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._pending if tag is None else tag not in self._pending, timeout_s
            )

    def close(self, goodbye: bool = True) -> None:
        """Leaves. After a goodbye nobody will come back for the memory."""
        with self._changed:
            self._leaving = True
            if goodbye:
                self._wire.send({"do": "bye"})
        if not goodbye:
            self._wire.shut()
        self._thread.join(5.0)
        self._wire.shut()
        self._wire.close()

    def _send(self, message: dict[str, Any], *fds: int) -> None:
        with self._changed:
            self._wire.send(message, *fds)

    def _listen(self) -> None:
        while True:
            received = self._wire.receive()
            if received is None:
                if self._leaving:
                    return
                try:
                    self._reopen()
                except Exception as error:
                    self._give_up(str(error))
                    return
                finally:
                    self._answers.put(None)
            elif "event" in received[0]:
                self._take(received[0])
            elif "bye" in received[0]:
                return
            else:
                self._answers.put(received)

    def _take(self, event: dict[str, Any]) -> None:
        self._hear(event)
        if event["event"] in _OVER:
            with self._changed:
                self._pending.pop(event["tag"], None)
                self._changed.notify_all()

    def _give_up(self, why: str) -> None:
        self._over = why
        for tag, task in list(self._pending.items()):
            self._take({"event": "failed", "tag": tag, "rank": task["rank"], "error": why})


def _refused(answer: dict[str, Any]) -> str:
    if answer.get("pid") == os.getpid():
        return "this process has another Checkpointer on that folder: `close` it first, or choose another folder."
    return f"{answer['refused']}: two would mix theirs. Choose another folder, or stop it."
