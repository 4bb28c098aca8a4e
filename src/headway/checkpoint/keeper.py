"""The process that holds a node's checkpoints in memory while trainers come and go, and has them uploaded.

It listens at an address of its root, and of no folder that has the same name in another container. Trainers hand it
their arenas; after a crash the next ones get them back. A child of it uploads; should that die, it starts another and
has what was under way done again. It leaves when its last trainer has said goodbye, or when none came back for a while;
never before the uploads are done.
"""

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from headway.checkpoint import wire
from headway.checkpoint.arena import Shape
from headway.checkpoint.wire import Wire
from headway.events.process import open_pidfd

LINGER_S = 120.0
"""How long to hold memory for trainers that died, when no supervisor is there to start them again."""

FIRST_S = 30.0
"""How long to wait for the first trainer."""

TRIES = 3
"""How often an upload is begun, if the uploader dies of it."""

RESPAWN_S = 1.0
"""How often to start an uploader at most, if it is not for a task."""

_UPLOADER = "from headway.checkpoint.uploader import main; main()"


@dataclass
class Client:
    """A trainer, or a supervisor."""

    wire: Wire
    pidfd: int
    session: str = ""
    rank: int = -1
    greeted: bool = False
    """Else it only looks at what there is, and nothing is held for it."""
    left: bool = False


@dataclass
class Task:
    """An upload."""

    told: dict[str, Any]
    key: tuple[str, int]
    tries: int = 0
    is_uploaded: bool = False
    """Its memory is no longer needed; it may still wait for other ranks."""


@dataclass
class Keeper:
    """All that the process knows."""

    root: str
    place: str
    """What tells the root from others of the same name."""
    server: socket.socket
    clients: dict[int, Client] = field(default_factory=dict)
    arenas: dict[tuple[str, int], tuple[Shape, int]] = field(default_factory=dict)
    tasks: dict[tuple[str, int], Task] = field(default_factory=dict)
    held: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """Saves that memory alone has, as the tasks that would make them durable."""
    done: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=256))
    lease: dict[str, Any] | None = None
    uploader: Wire | None = None
    uploader_pid: int = 0
    uploader_since: float = -RESPAWN_S
    empty_since: float = field(default_factory=time.monotonic)
    linger_s: float = FIRST_S
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def run(self) -> None:
        self.selector.register(self.server, selectors.EVENT_READ, self._accept)
        while not self._may_leave():
            for key, _ in self.selector.select(timeout=RESPAWN_S):
                key.data()
            if self.lease and time.monotonic() - self.uploader_since >= RESPAWN_S:
                self._start_uploader()

    def _may_leave(self) -> bool:
        if self.clients or self.tasks:
            self.empty_since = time.monotonic()
            return False
        if time.monotonic() - self.empty_since < self.linger_s:
            return False
        self._upload_last()
        return not self.tasks

    # --- clients ---

    def _accept(self) -> None:
        end, _ = self.server.accept()
        wire = Wire(end)
        pid, user = wire.peer()
        try:
            client = Client(wire, open_pidfd(pid))
        except OSError:  # it is gone already
            user = -1
        if user != os.getuid():
            wire.close()
            return
        self.clients[client.pidfd] = client
        self.selector.register(wire, selectors.EVENT_READ, lambda: self._hear(client))
        # Data workers that were forked from a trainer hold its connection: its death must show all the same.
        self.selector.register(client.pidfd, selectors.EVENT_READ, lambda: self._ended(client))

    def _hear(self, client: Client) -> None:
        if client.pidfd not in self.clients:
            return
        received = client.wire.receive()
        if received is None:
            self._lost(client)
            return
        message, fds = received
        getattr(self, f"_do_{message['do']}")(client, message, *fds)

    def _ended(self, client: Client) -> None:
        """A trainer has died: what it handed over before counts."""
        while client.pidfd in self.clients and client.wire.has_message():
            self._hear(client)
        self._lost(client)

    def _lost(self, client: Client) -> None:
        if self.clients.pop(client.pidfd, None) is None:  # both its ends were seen at once
            return
        self.selector.unregister(client.wire)
        self.selector.unregister(client.pidfd)
        client.wire.close()
        os.close(client.pidfd)
        if client.greeted and not client.left:
            self.linger_s = LINGER_S
            self._tell_uploader({"gone": client.rank})
        if not any(other.session for other in self.clients.values()):
            self._set_lease(None)

    def _do_hello(self, client: Client, message: dict[str, Any]) -> None:
        if message["place"] != self.place:
            client.wire.send({"refused": f"the keeper of another folder than {self.root} answers"})
            return
        others = {other.session for other in self.clients.values() if other.session} - {message["session"]}
        if message["session"] and others:
            owner = (self.lease or {}).get("owner", {})
            whose = f"job {owner['job']} (process {owner['pid']})" if owner else f"another run ({others.pop()})"
            client.wire.send({"refused": f"{whose} writes checkpoints to {self.root}", "pid": owner.get("pid")})
            return
        client.session, client.rank, self.linger_s = message["session"], message["rank"], LINGER_S
        client.greeted = True
        for task in self.held.values():  # what an earlier run left in memory is this one's now
            task["session"] = message["session"] or task["session"]
        if message.get("lease"):
            self._set_lease(message["lease"])
        client.wire.send({"hello": os.getpid()})

    def _do_bye(self, client: Client, message: dict[str, Any]) -> None:
        """A client leaves for good: with the last one goes what was held for it."""
        client.left = True
        self._forget_held(client.rank, "~")
        if not any(not other.left for other in self.clients.values()):
            self.linger_s = 0.0
        client.wire.send({"bye": True})

    def _do_arena(self, client: Client, message: dict[str, Any], fd: int) -> None:
        shape = Shape(**message["shape"])
        self._let_go((shape.plan, shape.rank))
        self.arenas[shape.plan, shape.rank] = shape, fd

    def _do_keep(self, client: Client, message: dict[str, Any]) -> None:
        """Only the arenas of this plan are still of use, and those that are being uploaded."""
        in_use = {(task.told["plan"], task.told["rank"]) for task in self.tasks.values()}
        for key in [key for key in self.arenas if key[0] != message["plan"] and key not in in_use]:
            self._let_go(key)

    def _do_arenas(self, client: Client, message: dict[str, Any]) -> None:
        ask = message.get("ask")
        for (plan, rank), (shape, fd) in self.arenas.items():
            tasks = [task.told for task in self.tasks.values() if not task.is_uploaded]
            pending = [told for told in tasks if (told["plan"], told["rank"]) == (plan, rank)]
            client.wire.send({"ask": ask, "arena": asdict(shape), "pending": pending}, fd)
        committed = [tag for tag, rank in self.done if rank == 0]
        client.wire.send({"ask": ask, "arenas": len(self.arenas), "committed": committed})

    def _do_held(self, client: Client, message: dict[str, Any]) -> None:
        """A save is in memory, and stays there unless the memory has to go."""
        task = message["task"]
        mine = sorted(tag for tag, rank in self.held if rank == task["rank"])
        self._forget_held(task["rank"], mine[-1] if mine else "")  # two slots hold this one and the one before it
        self.held[task["tag"], task["rank"]] = task

    def _forget_held(self, rank: int, before: str) -> None:
        for key in [key for key in self.held if key[1] == rank and key[0] < before]:
            del self.held[key]

    def _do_flush(self, client: Client, message: dict[str, Any]) -> None:
        """A supervisor ends: no trainer will come back for what memory alone has."""
        if not any(other.session for other in self.clients.values()):
            self._upload_last()

    def _do_busy(self, client: Client, message: dict[str, Any]) -> None:
        client.wire.send({"busy": len(self.tasks)})

    def _do_save(self, client: Client, message: dict[str, Any]) -> None:
        task = message["task"]
        key = (task["tag"], task["rank"])
        self._forget_held(task["rank"], task["tag"])
        if key in self.done:  # who asks has taken it over from a trainer that died, and did not hear of it
            self._tell(task["rank"], {"event": "done", "tag": task["tag"], "rank": task["rank"]})
        elif key not in self.tasks:
            self.tasks[key] = Task(task, key)
            self._upload(self.tasks[key])

    def _let_go(self, key: tuple[str, int]) -> None:
        if key in self.arenas:
            os.close(self.arenas.pop(key)[1])

    def _tell(self, rank: int, message: dict[str, Any]) -> None:
        for client in self.clients.values():
            if client.rank == rank:
                client.wire.send(message)

    def _upload_last(self) -> None:
        """Makes the newest save durable that memory alone has, of all ranks of this node. It was acknowledged."""
        ranks = {rank for _, rank in self.arenas}
        whole = [tag for tag, _ in self.held if all((tag, rank) in self.held for rank in ranks)]
        committed = max((tag for tag, rank in self.done if rank == 0), default="")
        for rank in sorted(ranks) if whole else ():
            task = Task(self.held[max(whole), rank] | {"after": committed}, (max(whole), rank))
            self.tasks[task.key] = task
            self._upload(task)
        self.held.clear()

    # --- the uploader ---

    def _upload(self, task: Task) -> None:
        task.tries += 1
        arena = self.arenas.get((task.told["plan"], task.told["rank"]))
        if arena is None or task.tries > TRIES:
            why = "its memory is not held here" if arena is None else f"the uploader died of it {TRIES} times"
            self._over(task, {"event": "failed", "error": why})
            return
        self._start_uploader()
        told = task.told | {"stored": task.is_uploaded}  # its memory may hold another one by now
        self._tell_uploader({"task": told, "shape": asdict(arena[0])}, arena[1])

    def _over(self, task: Task, message: dict[str, Any]) -> None:
        self.tasks.pop(task.key, None)
        if message["event"] == "done":
            self.done.append(task.key)
        self._tell(task.told["rank"], {**message, "tag": task.told["tag"], "rank": task.told["rank"]})

    def _start_uploader(self) -> None:
        if self.uploader is not None:
            return
        self.uploader_since = time.monotonic()
        self.uploader, theirs = wire.pair()
        os.set_inheritable(theirs.fileno(), True)
        self.uploader_pid = os.posix_spawn(
            sys.executable, [sys.executable, "-c", _UPLOADER, str(theirs.fileno()), str(os.getpid())], os.environ
        )
        theirs.close()
        self.selector.register(self.uploader, selectors.EVENT_READ, self._hear_uploader)
        if self.lease:
            self._tell_uploader({"lease": self.lease})

    def _tell_uploader(self, message: dict[str, Any], *fds: int) -> None:
        if self.uploader is not None:
            self.uploader.send(message, *fds)

    def _set_lease(self, lease: dict[str, Any] | None) -> None:
        self.lease = lease
        self._tell_uploader({"lease": lease})

    def _hear_uploader(self) -> None:
        assert self.uploader is not None
        received = self.uploader.receive()
        if received is None:
            self._bury_uploader()
            return
        message = received[0]
        task = self.tasks.get((message["tag"], message["rank"]))
        if task is not None and message["event"] in ("failed", "done"):
            self._over(task, message)
        else:
            if task is not None and message["event"] == "uploaded":
                task.is_uploaded = True
            self._tell(message["rank"], message)

    def _bury_uploader(self) -> None:
        assert self.uploader is not None
        self.selector.unregister(self.uploader)
        self.uploader.close()
        self.uploader = None
        with suppress(ProcessLookupError):
            os.kill(self.uploader_pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.uploader_pid, 0)
        for task in list(self.tasks.values()):
            if task.told["streams"] and not task.is_uploaded:  # what it had read of it is gone
                self._over(task, {"event": "failed", "error": "the uploader died", "died": True})
            else:
                self._upload(task)


def main() -> None:
    """The process: `keeper [ROOT, PLACE]`, as JSON."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its trainers have; they get these too
    root, place = json.loads(sys.argv[1])
    server = wire.listen(place)
    if server is not None:
        Keeper(root, place, server).run()
