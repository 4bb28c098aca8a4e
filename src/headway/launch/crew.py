"""The workers of one node as their supervisor sees them: started warm or fresh, watched, and ended without a trace."""

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headway import sessions
from headway.events.clock import start_ticks
from headway.events.process import open_pidfd
from headway.launch import streams
from headway.launch.channel import Channel
from headway.launch.prewarm import Prewarm
from headway.launch.worker import Assignment, as_program, folder_modules, send_assignment
from headway.launch.zygote import AHEAD

SPEAK_NS = 2_000_000_000
"""How long a worker that raised may take to print it."""

TRIES = 3
"""How often a warm worker is asked for before one is started fresh."""

PATIENCE_S = 120.0
"""Longest wait for the zygote's imports; after that, workers are started without it."""

ALONE_S = 30.0
"""So long, at most, workers that have yet to import something are left alone with the cores."""

_BEGIN = "import sys; sys.flags.safe_path or sys.path.__setitem__(0, '/dev/null'); "
"""Modules of the folder that this was started in must not be found before the program's own place is known."""
_ZYGOTE = _BEGIN + "from headway.launch.entry import as_zygote; as_zygote()"
_WORKER = _BEGIN + "from headway.launch.entry import as_worker; as_worker()"

_READ_AT_IMPORT = (
    "TORCH",
    "PYTORCH",
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "OPENBLAS_",
    "LD_",
    "MALLOC_",
    "PYTHON",
    "TRITON",
)
"""Variables that libraries read when they are imported: a zygote that saw others would pass on the wrong behaviour."""
_READ_LATER = ("TORCHELASTIC_", "TORCH_DISABLE_SHARE_", "TORCH_NCCL_", "TORCH_DIST_", "TORCH_GLOO", "TORCH_FR_")
"""Of these, the ones that are read when a process group is made."""
_SET = re.compile(r"""environ(?:\[\s*|\.setdefault\(\s*)["'](\w+)["']\s*(?:\]\s*=(?!=)|,)""")
_NEVER_HIDDEN = {"headway", "__main__"}
_CAUGHT = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""What torchrun catches: in its workers these are never ignored, whatever it was itself started with."""


@dataclass(eq=False)
class Worker:
    """One process: a standby, until it is given an assignment."""

    channel: Channel
    pid: int = 0
    pidfd: int = -1
    ticks: int = 0
    """Its start in kernel ticks."""
    warm: bool = True
    exit_code: int | None = None
    """Negative for a signal, as `subprocess` has it."""
    gone_ns: int = 0
    """When it was seen to have ended; 0 while it lives."""
    said_code: int | None = None
    """The exit code it announced before its interpreter was taken down, and when."""
    said_ns: int = 0
    exception: str = ""
    exception_ns: int = 0
    mute: bool = False
    """It has closed its end: it is no Python, or closes what is not its own."""
    stopped: bool = False
    """It was told to end: how it did says nothing."""

    @property
    def failed_ns(self) -> int:
        """When it failed, as far as is known; 0 if it has not."""
        if self.exception_ns:
            return self.exception_ns
        if self.said_code:
            return self.said_ns
        return self.gone_ns if self.gone_ns and self.code != 0 else 0

    @property
    def code(self) -> int | None:
        """The exit code; the one it announced, if it has not ended yet or was ended. What crashes while its interpreter
        is taken down has done its work."""
        if self.said_code == 0 and self.exit_code is not None and self.exit_code < 0:
            return 0
        is_final = self.said_code is None or (self.gone_ns and not self.stopped)
        return self.exit_code if is_final else self.said_code

    @property
    def is_speaking(self) -> bool:
        """Whether it has raised, and may still be printing that: it is not to be disturbed, for a while."""
        said = self.said_code is not None or self.gone_ns
        return bool(self.exception_ns and not said) and time.monotonic_ns() - self.exception_ns < SPEAK_NS

    @property
    def is_over(self) -> bool:
        """Whether its program has ended, well or not."""
        return bool(self.gone_ns) or self.said_code is not None

    @property
    def is_done(self) -> bool:
        """Whether its program has ended well."""
        return self.code == 0 and (self.said_code == 0 or self.gone_ns > 0)

    def hear(self, now_ns: int) -> None:
        """Takes what it says, and notices its end."""
        self._take_messages()
        if self.pidfd >= 0 and _is_readable(self.pidfd):
            self._take_messages()  # its last words
            self._bury(now_ns)
        elif self.mute and not self.pid:
            self.gone_ns = now_ns  # it never came up

    def _take_messages(self) -> None:
        if self.mute:
            return
        messages, is_open = self.channel.arrived()
        self.mute = not is_open
        for message in messages:
            if "pid" in message:
                self._introduce(int(message["pid"]))
            elif "exception" in message:
                self.exception, self.exception_ns = message["exception"], message["at_ns"]
            elif "ends" in message:
                self.said_code, self.said_ns = message["ends"], message["at_ns"]

    def dismiss(self) -> None:
        """Lets go of a standby: it ends by itself when it sees that."""
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _introduce(self, pid: int) -> None:
        if not self.pid:
            self.pid, self.ticks = pid, start_ticks(pid) or 0
            self.pidfd = open_pidfd(pid)

    def _bury(self, now_ns: int) -> None:
        self.gone_ns = now_ns
        with suppress(ChildProcessError):
            # Not reaped yet: as long as it is a zombie, no other process gets the number that names its session.
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            assert info is not None
            self.exit_code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        self.dismiss()


@dataclass
class Zygote:
    """The process that forks warm workers, and what it said of itself."""

    pid: int
    pidfd: int
    control: Channel
    environ: Mapping[str, str]
    until: float
    """How long to wait for its imports."""
    left: list[str] = field(default_factory=list)
    """What it has not imported ahead, since the program does so later: that is for an heir of it."""
    heard: bool = False
    dead: bool = False
    unfit: str = ""
    """Why it cannot be forked."""
    failed: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    """The top-level modules it has imported, and the folder of each."""
    dropped: dict[str, str] = field(default_factory=dict)
    """What it was to import ahead, and could not."""
    importing: str = ""
    """What it began to import ahead last, and when that was heard."""
    since: float = 0.0

    def hear(self) -> None:
        """Takes what it says of itself."""
        if self.dead:
            return
        messages, is_open = self.control.arrived()
        for message in messages:
            if "pid" in message:
                with suppress(OSError):  # it is gone already, as will be seen
                    self.pidfd = open_pidfd(message["pid"])
                    self.pid = message["pid"]
            self.dropped |= message.get("dropped", {})
            if "importing" in message or "dropped" in message:
                self.importing, self.since = message.get("importing", ""), time.monotonic()
            if "unfit" in message:
                self.heard, self.unfit, self.failed = True, message["unfit"], message["failed"]
                self.modules = message["modules"]
        if not is_open:
            self.dead = True
            self.unfit = self.unfit or "it died"


class Crew:
    """All workers of this node, and the zygote and standbys behind them.

    Everything is called from the main thread: the kernel ends a worker when the *thread* that is its parent does.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], preload: Sequence[str], warm: bool = True,
        patience_s: float = PATIENCE_S, prewarm: Prewarm | None = None, in_two: bool = False,
    ) -> None:  # fmt: skip
        """With `in_two`, the first workers are forked before the zygote imports what the program imports later."""
        self.size = 0
        """How many standbys to have ready."""
        self.workers: list[Worker] = []
        self.note: Callable[[str], None] = lambda text: None
        """Called with what a user should know."""
        self._command, self._preload, self._warm = list(command), list(preload) if warm else [], warm
        self._patience_s, self._prewarm = patience_s, prewarm if warm else None
        self._given_up = ""
        """Why no zygote will be forked any more."""
        self._is_closed = self._forks = False
        self._began = 0.0
        """When workers were started last."""
        self._standbys: list[Worker] = []
        self._leaders: set[int] = set()
        self._next: Zygote | None = None
        """One that imports more than the present one, and is to take its place."""
        streams.fill_gaps()
        sessions.adopt_orphans()
        self._zygote = self._start_zygote(environ, in_two)

    # --- starting ---

    def start(self, assignments: Sequence[Assignment], outputs: Sequence[Sequence[int]]) -> None:
        """Starts one worker for each assignment, with these descriptors for its output."""
        self.size, self._began = len(assignments), time.monotonic()
        self._renew_zygote(assignments[0].environ)
        why = self.why_fresh(assignments[0])
        if shadowed := self._shadowed(assignments[0]):
            why = f"the program has modules of its own called {', '.join(shadowed)}"
            assignments = [as_program(assignment) for assignment in assignments]
        self._forks = not why
        if why:
            self._dismiss_standbys()
            self.note(f"workers start fresh: {why}.")
        self.workers = [
            self._start_one(assignment, list(fds), self._forks)
            for assignment, fds in zip(assignments, outputs, strict=True)
        ]
        self._leaders |= {worker.pid for worker in self.workers}
        self._guard()

    def get_ready(self) -> None:
        """Has standbys made for the next start; to be called when the workers are at work."""
        if self._zygote.dead and self._zygote.heard:  # one that died of an import would again
            modules = self._zygote.modules
            self._replace_zygote(self._zygote.environ)
            self._zygote.modules = modules  # of the standbys it has left
        if self._prewarm is not None and self._forks:
            self._look_ahead(self._prewarm)
        if self._forks and (not self._left() or self._is_underway):
            self._order(self.size - self._ready())
        self._reap_others()

    @property
    def _is_underway(self) -> bool:
        """Whether the workers have had all cores for long enough to start."""
        return time.monotonic() - self._began > ALONE_S

    def _ready(self) -> int:
        """How many standbys there are."""
        for worker in self._standbys:
            worker.hear(time.monotonic_ns())
            if worker.gone_ns:
                worker.dismiss()
        self._standbys = [worker for worker in self._standbys if not worker.gone_ns]
        return len(self._standbys)

    def why_fresh(self, assignment: Assignment) -> str:
        """Why this assignment cannot be given to a forked worker; empty if it can. Waits for the zygote's imports."""
        if not self._warm:
            return "warm workers are switched off"
        if assignment.kind == "program":
            return "the program is not run by this Python"
        if names := settings_of_script(assignment):
            return f"the script sets {', '.join(names)} itself, before it imports torch. Set it outside"
        is_staffed = self._ready() >= self.size and all(worker.pid for worker in self._standbys)
        return "" if is_staffed else self._why_unfit()

    def _shadowed(self, assignment: Assignment) -> list[str]:
        """The program's own modules that it would not get, because others of their name are imported before it runs."""
        if assignment.kind == "program":
            return []
        folder = _folder(assignment)
        ours = dict.fromkeys(sys.stdlib_module_names & sys.modules.keys(), "") | self._zygote.modules
        return sorted(name for name in folder_modules(folder) & ours.keys() - _NEVER_HIDDEN if ours[name] != folder)

    def _why_unfit(self) -> str:
        if not self._given_up:
            self._await_imports()
        unfit = self._zygote.unfit
        return self._given_up or (f"the zygote cannot be forked ({unfit})" if unfit else "")

    def _await_imports(self) -> None:
        zygote = self._zygote
        while not zygote.heard and not zygote.dead and (left := self._until(zygote) - time.monotonic()) > 0:
            _wait([zygote.control.fileno()], left)
            zygote.hear()
        self._take_dropped(zygote)
        for name, error in zygote.failed.items():
            self.note(f"{name} cannot be preloaded ({error}): the workers go on without it.")
        zygote.failed = {}
        if not zygote.heard and zygote.importing:
            self._blame(zygote)
            if not zygote.dead:
                self._prewarm = None  # one such wait is enough for a start
            self._replace_zygote(zygote.environ)
            self._await_imports()
        elif not zygote.heard:
            slow = f"the preloaded imports took more than {self._patience_s:g} s"
            self._given_up = "the zygote died of an import" if zygote.dead else slow
            self._preload = []  # one that imports nothing still ends what is left when the supervisor is gone
            self._replace_zygote(zygote.environ)

    def _until(self, zygote: Zygote) -> float:
        """How long a start waits for what a zygote is at: for what nobody asked it to import, not so long."""
        if self._prewarm is None or not zygote.importing:
            return zygote.until
        return min(zygote.until, zygote.since + self._prewarm.patience_s(zygote.importing))

    def _start_one(self, assignment: Assignment, fds: list[int], warm: bool) -> Worker:
        for _ in range(TRIES if warm else 0):
            if not self._standbys:
                self._order(1)
            worker = self._standbys.pop(0)
            if self._comes_up(worker) and send_assignment(worker.channel, assignment, fds):
                return worker
            worker.dismiss()
            self._zygote.hear()
            if not worker.gone_ns:
                self._zygote.unfit = self._zygote.unfit or "it does not answer"
            if self._zygote.unfit:
                self.note(f"a worker starts fresh: the zygote cannot be forked ({self._zygote.unfit}).")
                break
        worker = self._spawn(assignment)
        send_assignment(worker.channel, assignment, fds)
        return worker

    def _comes_up(self, worker: Worker) -> bool:
        until = time.monotonic() + self._patience_s
        while not worker.pid and not worker.gone_ns and (left := until - time.monotonic()) > 0:
            _wait([worker.channel.fileno()], left)
            worker.hear(time.monotonic_ns())
        return bool(worker.pid) and not worker.gone_ns

    def _spawn(self, assignment: Assignment) -> Worker:
        ours, theirs = Channel.pair()
        words = [str(theirs.fileno()), str(os.getpid()), *assignment.argv]
        pid = _spawn_python(_WORKER, words, assignment.environ, theirs)
        worker = Worker(ours, warm=False)
        worker._introduce(pid)
        return worker

    # --- the zygote ---

    def _start_zygote(self, environ: Mapping[str, str], in_two: bool = False) -> Zygote:
        ours, theirs = Channel.pair()
        known = self._prewarm if not self._given_up else None
        ahead = known.names() if known is not None else []
        left = [name for name in ahead if in_two and known is not None and known.packages[name].later]
        preload = ",".join([*self._preload, *(AHEAD + name for name in ahead if name not in left)])
        words = [str(theirs.fileno()), str(os.getpid()), preload, script_folder(self._command)]
        pid = _spawn_python(_ZYGOTE, [*words, *self._command], environ, theirs)
        return Zygote(pid, open_pidfd(pid), ours, dict(environ), time.monotonic() + self._patience_s, left)

    def _left(self) -> list[str]:
        """What the zygote has left for an heir, and can still be imported ahead."""
        good = self._prewarm.names() if self._prewarm is not None else []
        return [name for name in self._zygote.left if name in good]

    def _wants_heir(self, prewarm: Prewarm) -> bool:
        """Whether there is something left to import, and the workers no longer need all cores to start."""
        is_time = prewarm.has_heard_of(self.workers[0].pid) or self._is_underway
        return bool(self._left()) and not self._zygote.dead and is_time

    def _heir(self) -> Zygote:
        """One that is forked from the present zygote, and imports what that has left."""
        ours, theirs = Channel.pair()
        self._zygote.control.send({"heir": self._left()}, [theirs.fileno()])
        theirs.close()
        return Zygote(0, -1, ours, self._zygote.environ, time.monotonic() + self._patience_s)

    def _renew_zygote(self, environ: Mapping[str, str]) -> None:
        """Starts another one if this one imported its modules under settings that the workers are not to have."""
        differ = sorted(import_settings(environ).items() ^ import_settings(self._zygote.environ).items())
        if differ and self._warm and not self._given_up:
            self.note(f"the zygote starts again: {differ[0][0]} has changed.")
            self._dismiss_standbys()
            self._replace_zygote(environ)
            self._order(self.size)

    def _replace_zygote(self, environ: Mapping[str, str]) -> None:
        for zygote in self._zygotes():
            _bury(zygote)
        self._zygote, self._next = self._start_zygote(environ), None
        self._guard()

    def _zygotes(self) -> list[Zygote]:
        return [self._zygote, self._next] if self._next is not None else [self._zygote]

    def _look_ahead(self, prewarm: Prewarm) -> None:
        """Has a zygote made that imports what these workers did, once they have told; workers are then forked from
        that one."""
        new = self._next
        if new is None:
            if self.workers and prewarm.look(self.workers[0].pid, self.workers[0].ticks):
                self._next = self._start_zygote(self._zygote.environ)
            elif self.workers and self._wants_heir(prewarm):
                self._next = self._heir()
            return
        new.hear()
        self._take_dropped(new)
        if new.heard and not new.unfit:
            old, self._zygote, self._next = self._zygote, new, None
            self._guard()
            self._dismiss_standbys()
            _bury(old)
            prewarm.tell(f"workers are forked from where these are imported: {', '.join(prewarm.names())}", True)
        elif new.dead or new.unfit or time.monotonic() > new.until:
            self._blame(new)
            _bury(new)
            self._next = None

    def _blame(self, zygote: Zygote) -> None:
        """What was being imported ahead when a zygote died, or was given up, is not, from now on."""
        if zygote.importing and not zygote.heard and self._prewarm is not None:
            self._prewarm.drop([zygote.importing], "a zygote died of it" if zygote.dead else "a zygote got stuck in it")
        else:
            self.note(f"nothing more is imported ahead: {zygote.unfit or 'the zygote took too long'}.")
            self._prewarm = None

    def _take_dropped(self, zygote: Zygote) -> None:
        dropped, zygote.dropped = zygote.dropped, {}
        for name, why in dropped.items():
            if self._prewarm is not None:
                self._prewarm.drop([name], why)

    def _order(self, count: int) -> None:
        for _ in range(count if self._warm else 0):
            ours, theirs = Channel.pair()
            self._zygote.control.send({}, [theirs.fileno()])
            theirs.close()
            self._standbys.append(Worker(ours))

    def _guard(self) -> None:
        self._zygote.control.send({"guard": sorted(self._leaders)})

    def _dismiss_standbys(self) -> None:
        for worker in self._standbys:
            worker.dismiss()
        self._standbys.clear()

    # --- watching ---

    def look(self, timeout_s: float, wake_fds: Sequence[int] = ()) -> bool:
        """Waits until a worker says something or ends, or one of the other descriptors is readable; takes in what
        happened. False if nothing did."""
        living = [worker for worker in self.workers if not worker.gone_ns]
        fds = [worker.pidfd for worker in living] + [w.channel.fileno() for w in living if not w.mute]
        if not self._zygote.dead:
            fds.append(self._zygote.control.fileno())
        happened = _wait([*fds, *wake_fds], timeout_s)
        now_ns = time.monotonic_ns()
        for worker in self.workers:
            if not worker.gone_ns:
                worker.hear(now_ns)
        self._zygote.hear()
        return happened

    # --- ending ---

    def stop(
        self, number: int, grace_s: float, hurry: Callable[[], bool] = lambda: False, in_peace: bool = False,
        at_once: Collection[int] = (),
    ) -> list[int]:  # fmt: skip
        """Ends all workers and whatever they started: by this signal, and after a grace time, or in a hurry, by
        SIGKILL. In peace, those whose program has ended may leave by themselves; the local ranks in `at_once` get no
        grace. Returns the processes that the kernel will not let go."""
        leaders = {worker.pid for worker in self.workers} & self._leaders
        for local_rank, worker in enumerate(self.workers):
            if not worker.gone_ns and not (in_peace and worker.is_over):
                worker.stopped = True
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL if local_rank in at_once else number)
        until = time.monotonic() + grace_s
        while any(not worker.gone_ns for worker in self.workers) and (left := until - time.monotonic()) > 0:
            if hurry():
                break
            self.look(min(left, 0.2))
        stuck = sessions.end(leaders)
        for worker in self.workers:
            if not worker.gone_ns and worker.pid not in stuck:
                _wait([worker.pidfd], 1.0)
                worker.hear(time.monotonic_ns())
            if worker.gone_ns:
                with suppress(ChildProcessError):
                    os.waitpid(worker.pid, os.WNOHANG)
        self._reap_others()
        self._leaders -= leaders - set(stuck)
        self._guard()
        return stuck

    def _reap_others(self) -> None:
        self._ready()  # their names may have come just now, and that of an heir
        if self._next is not None:
            self._next.hear()
        ours = {worker.pid for worker in (*self.workers, *self._standbys)}
        sessions.reap_others(ours | {zygote.pid for zygote in self._zygotes()})

    def close(self) -> None:
        """Ends everything there is."""
        if self._is_closed:
            return
        self._is_closed = True
        self.stop(signal.SIGKILL, 0)
        self._dismiss_standbys()
        for zygote in self._zygotes():
            _bury(zygote)


def _bury(zygote: Zygote) -> None:
    zygote.hear()  # an heir may have said just now who it is
    zygote.control.send({"guard": []})
    zygote.control.close()
    if not zygote.pid:
        return  # it is gone, or was never there, or ends when it sees that nobody listens
    with suppress(ProcessLookupError):
        os.kill(zygote.pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(zygote.pid, 0)
    os.close(zygote.pidfd)


def settings_of_script(assignment: Assignment) -> list[str]:
    """The variables that a script sets for libraries it is about to import: in a warm worker they come too late."""
    path = Path(assignment.argv[0].replace(".", "/") + ".py" if assignment.kind == "module" else assignment.argv[0])
    try:
        text = path.read_text(errors="replace") if path.is_file() else ""
    except OSError:
        return []
    before_torch = re.split(r"^\s*(?:import|from) torch\b", text, maxsplit=1, flags=re.M)
    names = dict.fromkeys(_SET.findall(before_torch[0]), "") if len(before_torch) > 1 else {}
    return sorted(import_settings(names))


def import_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that libraries read when they are imported."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_IMPORT) and not name.startswith(_READ_LATER)
    }


def script_folder(command: Sequence[str]) -> str:
    """Where the modules beside the script of this command line are; without a script, the working directory."""
    scripts = (word for word in command if word.endswith(".py") and os.path.isfile(word))
    return os.path.dirname(os.path.realpath(next(scripts, "x")))


def _folder(assignment: Assignment) -> str:
    """What will be first on the program's path."""
    if assignment.kind == "module":
        return os.getcwd()
    path = os.path.realpath(assignment.argv[0])
    return path if os.path.isdir(path) else os.path.dirname(path)


def _spawn_python(code: str, words: Sequence[str], environ: Mapping[str, str], channel: Channel) -> int:
    """Starts this Python with a line of code, in a session of its own, holding a channel and nothing else of ours."""
    others = [fd for fd in _open_fds() if fd > 2 and os.get_inheritable(fd)]
    os.set_inheritable(channel.fileno(), True)
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-u", "-c", code, *words],
            dict(environ),
            file_actions=[(os.POSIX_SPAWN_CLOSE, fd) for fd in others],
            setsid=True,
            setsigmask=[],
            setsigdef=_CAUGHT,
        )
    finally:
        channel.close()


def _open_fds() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was that of the listing itself
            os.fstat(int(name))
            found.append(int(name))
    return found


def _wait(fds: Sequence[int], timeout_s: float) -> bool:
    poller = select.poll()
    for fd in fds:
        if fd >= 0:
            poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))


def _is_readable(fd: int) -> bool:
    return _wait([fd], 0)
