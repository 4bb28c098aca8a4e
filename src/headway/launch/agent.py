"""The supervisor of one node: starts workers, watches them, and does about a failure what the policy says."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousGracefulExitError
from torch.distributed.launcher.api import LaunchConfig

from headway.errors import PlatformError
from headway.events.process import process_name
from headway.events.recorder import Recorder
from headway.events.vocabulary import Activity, Process, ProcessGone, Told, clean_text
from headway.launch import elastic, sessions, slurm
from headway.launch.autopsy import KernelLog, oom_kills, scheduler_says
from headway.launch.crew import Crew, Worker
from headway.launch.notice import EXIT_STOPPED, REPEAT_S, Board, Notice, Poller, source_of
from headway.launch.notice import SIGNALS as STOP_SIGNALS
from headway.launch.peers import Dumps, Findings, Order, Peers
from headway.launch.progress import Lineage, RankWatch
from headway.launch.streams import Kept, Tap
from headway.launch.worker import Assignment
from headway.paths import folder_name

GRACE_S = 1.0
"""What workers get between SIGTERM and SIGKILL before a restart: every second of it is lost to training."""

EXIT_S = 120.0
"""What a program that ended well gets to take down its interpreter."""

SETTLE_S = 1.0
"""How long to look for the root of a failure while only its effects on other ranks are known."""

VERDICT_S = 5.0
"""How long to wait for the node that has the root to decide."""

LENIENCE, MOST_LENIENCE = 10, 80
"""How many times as long a rank may take that is in no collective; and one that is at work besides."""

WORK_S = 1.0
"""How long to look whether ranks do anything, at least."""

DUMPS_S = 15.0
"""How long to wait for what the ranks of other nodes are doing."""

UNSEEN_S = 60.0
"""An attempt that lives longer than that without a step has some that cannot be seen."""

SOON_S, TICK_S = 0.2, 1.0
"""After which time to look around first, and how often then."""

STOP_S = 300.0
"""What ranks that listen get to come to a step edge and save, where nobody says how much time there is."""


class NotNeeded(Exception):
    """The job goes on, or ended, without this node."""


class Interrupted(BaseException):
    """A signal is to end the job. It may be raised in the middle of torch's own code, which must not catch it."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where the job stood when it failed."""

    attempt: int
    trained: bool
    """Whether this attempt trained a step."""
    reached: int
    """The first step that was never done."""
    best: int
    """The same, when this attempt began."""
    measured: bool
    """Whether steps could be seen at all."""
    nodes: int
    restarts: int


@dataclass(frozen=True, kw_only=True)
class Surgery:
    """What this room is told to do by others: callables, so that it need not know who they are."""

    judge: Callable[[Findings, Standing], Order]
    """Decides about a failure."""
    is_effect: Callable[[Findings], bool]
    """Whether all of these are effects of a failure elsewhere."""
    observe: Callable[[Order], None]
    """Takes notice of what was decided, here or elsewhere."""
    dump: Callable[[Mapping[int, int], Path], Dumps]
    """Finds out what these ranks are doing: `ranks`, by number, as JSON has it."""
    explain: Callable[[list[Dumps]], "Hang"]
    """Makes of that why nobody makes progress."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Why nobody makes progress."""

    stuck: dict[int, str]
    """What to say of each rank that holds the others up."""
    may_be_busy: bool
    """Whether they are outside of the collective that others wait in, and so may only take their time."""
    is_unclear: bool
    """Whether nobody waits for anybody: that may be work after the training."""


class Agent(SimpleElasticAgent):
    """A torchelastic agent with warm workers, evidence and a policy."""

    def __init__(
        self, spec: WorkerSpec, config: LaunchConfig, command: Sequence[str], crew: Crew, recorder: Recorder,
        process: Process, places: Callable[[str], list[Path]], surgery: Surgery, say: Callable[[str], None],
        folder: str, hang_after_s: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(spec)
        self._config, self._command, self._crew, self._surgery = config, list(command), crew, surgery
        self._tell_user = say
        self._recorder, self._process, self._places = recorder, process, places
        self._hang_after_s = hang_after_s
        assert isinstance(spec.rdzv_handler, elastic.FreshStore)
        self._rendezvous_handler = spec.rdzv_handler
        self._logs = elastic.Logs(config, spec)
        self._tap = Tap()
        self._lineage = Lineage()
        self._kernel = KernelLog()
        self._folder = folder
        self._extra: dict[str, str] = {}
        self._kept: dict[int, Kept] = {}
        self._watches: list[RankWatch] = []
        self._ooms: int | None = None
        self._best = self._restarts = 0
        self._lenience = 1
        self._started_s = 0.0
        self._peers = Peers(_NO_STORE, 0, 0, 1)
        self._board: Board | None = None
        self._stop_by_s, self._told_s = math.inf, 0.0
        self._signals: list[int] = []
        self._waits_for_others = False
        self._noted: set[str] = set()
        crew.note = self._note

    # --- the loop ---

    def run(self, role: str = "") -> RunResult:
        """Runs the job to its end. The result's state tells which; `exit_code` with what to leave."""
        with self._signals_caught(), self._notices_polled():
            try:
                return self._run()
            except Interrupted as error:
                return self._end_by_signal(int(error.args[0]))
            except NotNeeded:
                self._say("the job has all the nodes it needs, or is over: this one is not needed.")
                self.closes_rendezvous = False
                return RunResult(state=WorkerState.SUCCEEDED)
            finally:
                self._shutdown()

    exit_code = 0
    closes_rendezvous = True
    """Whether nobody is to join after this node has left."""

    def _run(self) -> RunResult:
        group = self._worker_group
        while True:
            self._initialize_workers(group)
            order = self._watch()
            if order is None:
                self._gone_all(None)
                return RunResult(state=WorkerState.SUCCEEDED)
            if not self._carry_out(order):
                group.state = WorkerState.FAILED
                return RunResult(state=WorkerState.FAILED)

    def _watch(self) -> Order | None:
        """Watches until the attempt is over: None if all went well, else what to do."""
        looked, patience_s = 0.0, SOON_S
        while True:
            self._crew.look(patience_s, [self._wake])
            patience_s = self._tick()
            self._heed_signals()
            failed = [worker for worker in self._crew.workers if worker.failed_ns]
            if any(worker.is_speaking for worker in failed):
                patience_s = SOON_S
            elif failed:
                return self._about_failure()
            if all(worker.is_done for worker in self._crew.workers):
                return self._about_end()
            if time.monotonic() - looked >= self._tick():
                looked = time.monotonic()
                if (order := self._look_around()) is not None:
                    return order

    def _tick(self) -> float:
        return float(self._config.monitor_interval) if self._peers.count > 1 or self._is_elastic else TICK_S

    @property
    def _is_elastic(self) -> bool:
        return self._config.max_nodes > 1

    def _look_around(self) -> Order | None:
        """What is going on with the other nodes, and whether anything moves here."""
        self._crew.get_ready()
        try:
            is_alarmed = self._peers.is_alarmed()
            if is_alarmed and (order := self._peers.decided()) is not None:
                return order
            if is_alarmed and self._peers.has_failed():
                return self._about_failure()
            if self._is_elastic and self._rendezvous_handler.num_nodes_waiting() > 0:
                why = "nodes want to join: the workers restart with them."
                return self._peers.decide(Order(do="restart", why=why, joins=True, spends=False))
            return self._about_hang(is_alarmed and self._peers.is_asked_for_dumps())
        except (DistError, RendezvousError) as error:
            self._lost_store(error)
            return None

    # --- starting ---

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with self._recorder.span(Activity.RENDEZVOUS), self._interruptible():
            try:
                super()._rendezvous(worker_group)
            except RendezvousGracefulExitError as error:
                raise NotNeeded(str(error)) from error
            except (DistError, RendezvousError) as error:
                where = self._config.rdzv_endpoint
                raise PlatformError(
                    f"the nodes do not find each other at {where}: {error}. Is the address right, the port free, and "
                    f"the node that hosts it up? To go on with the job, start it again under the same name."
                ) from error
        attempt = self._rendezvous_handler.attempt
        count, me = worker_group.group_world_size, worker_group.group_rank
        assert worker_group.store is not None
        assert count is not None
        assert me is not None
        self._peers = Peers(worker_group.store, attempt, me, count)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._recorder.span(Activity.LAUNCHER_INIT):
            return self._start(worker_group)

    def _start(self, group: WorkerGroup) -> dict[int, Any]:
        environments = elastic.worker_environments(group, group.spec, self._restarts)
        dest = self._logs.open(environments, group)
        assignments, streams = [], []
        board = f"{self._folder}/board-{self._peers.attempt}"
        self._board = Board.create(Path(board), len(group.workers))
        for worker in group.workers:
            environ = {**os.environ, **environments[worker.local_rank], **self._extra}
            environ["HEADWAY_ATTEMPT"] = str(self._peers.attempt)
            environ["HEADWAY_BOARD"] = board
            assignments.append(self._assignment(worker.local_rank, worker.global_rank, environ))
            streams.append(self._open_streams(worker.local_rank, dest))
        self._crew.start(assignments, streams)
        for fds in streams:
            for fd in fds:
                os.close(fd)
        self._logs.start()
        self._error_files = dest.error_files
        self._kernel.begin()
        self._started_s = time.monotonic()
        self._ooms, self._best, self._lenience = oom_kills(), self._lineage.reached, 1
        self._watches = [RankWatch(self._places(self._name(worker)), self._lineage) for worker in self._crew.workers]
        return {number: worker.pid for number, worker in enumerate(self._crew.workers)}

    def _assignment(self, local_rank: int, rank: int, environ: dict[str, str]) -> Assignment:
        program, *words = elastic.with_local_rank(self._command, local_rank)
        kind = "program"
        if program == sys.executable and words[:1] == ["-u"]:
            kind, words = ("module", words[2:]) if words[1:2] == ["-m"] else ("script", words[1:])
        numa = self._config.numa_options.affinity_mode.value if self._config.numa_options else ""
        argv = [program, *words] if kind == "program" else words
        return Assignment(kind=kind, argv=argv, environ=environ, folder=self._folder, rank=rank, numa=numa)

    def _open_streams(self, local_rank: int, dest: Any) -> list[int]:
        out, err = dest.stdouts.get(local_rank, ""), dest.stderrs.get(local_rank, "")
        stdout = _open_log(out) if out else os.dup(1)
        if err:
            self._kept[local_rank] = Kept.of_file(err)
            return [stdout, _open_log(err)]
        stderr, self._kept[local_rank] = self._tap.open()
        return [stdout, stderr]

    # --- failures ---

    def _about_failure(self) -> Order:
        findings = self._findings()
        until = time.monotonic() + (SETTLE_S if self._has_company() else 0.0)
        while self._surgery.is_effect(findings) and time.monotonic() < until:
            if (order := self._told_elsewhere(findings)) is not None:
                return order
            self._crew.look(0.02)
            findings = self._findings()
        return self._decide(findings)

    def _has_company(self) -> bool:
        """Whether the root may be with a rank that has not been heard yet."""
        return self._peers.count > 1 or any(not worker.failed_ns for worker in self._crew.workers)

    def _decide(self, findings: Findings) -> Order:
        if self._peers.count > 1:
            with suppress(DistError, RuntimeError):
                self._peers.report(findings)
                until = time.monotonic() + VERDICT_S
                while self._surgery.is_effect(findings) and time.monotonic() < until:
                    if (order := self._peers.decided()) is not None:
                        return order
                    time.sleep(0.02)
                findings = [*findings, *(f for f in self._peers.findings() if f not in findings)]
                return self._peers.decide(self._surgery.judge(findings, self._standing()))
        return self._surgery.judge(findings, self._standing())

    def _told_elsewhere(self, findings: Findings) -> Order | None:
        try:
            return self._peers.decided()
        except (DistError, RuntimeError):
            return None

    def _standing(self) -> Standing:
        self._poll_watches()
        return Standing(
            attempt=self._peers.attempt,
            trained=any(watch.steps for watch in self._watches),
            reached=self._lineage.reached,
            best=self._best,
            measured=self._is_measured(),
            nodes=self._peers.count,
            restarts=self._restarts,
        )

    def _is_measured(self) -> bool:
        """Whether steps would be seen if there were any: one was, or there was hardly time for one."""
        lived_s = time.monotonic() - self._started_s
        return self._lineage.has_steps or (any(watch.has_begun for watch in self._watches) and lived_s < UNSEEN_S)

    def _findings(self) -> Findings:
        failed = [
            (rank, worker)
            for rank, worker in zip(self._worker_group.workers, self._crew.workers, strict=True)
            if worker.failed_ns
        ]
        kernel = self._kernel.about({worker.pid for _, worker in failed})
        ooms = oom_kills()
        killed = (ooms or 0) - (self._ooms or 0) if ooms is not None else 0
        return [
            {
                "rank": rank.global_rank,
                "node": self._process.node,
                "at_ns": _wall_ns(worker.failed_ns),
                "exit_code": worker.code,
                "exception": worker.exception,
                "stderr": self._kept[rank.local_rank].text(),
                "error_file": _read(self._error_files.get(rank.local_rank, "")),
                "oom_kills": killed,
                "kernel": kernel.get(worker.pid, ""),
                "scheduler": scheduler_says(os.environ),
            }
            for rank, worker in failed
        ]

    def _about_hang(self, is_asked: bool) -> Order | None:
        if self._hang_after_s == 0:
            return None
        self._poll_watches()
        now = time.monotonic_ns()
        pairs = zip(self._crew.workers, self._watches, strict=True)
        trained = [
            watch for worker, watch in pairs if not worker.is_over and watch.steps > 1 and not watch.has_finished
        ]
        if not is_asked and not any(self._is_too_long(watch, now) for watch in trained):
            return None
        since = min((watch.last_ns for watch in trained), default=now)
        seconds = (now - since) / 1e9
        self._say(f"no step for {seconds:.0f} s: looking for what hangs …")
        everywhere = self._peers.exchange_dumps(self._dump(), DUMPS_S)
        hang = self._surgery.explain(everywhere)
        active = {rank for told in everywhere for rank in told["active"]}
        if self._hang_after_s is None and self._gets_time(hang, active.issuperset(hang.stuck)):
            self._note("whoever holds the others up may only take its time: it gets more.")
            return None
        nodes = {int(rank): told["node"] for told in everywhere for rank in told["ranks"]}
        for place, worker in zip(self._worker_group.workers, self._crew.workers, strict=True):
            if place.global_rank in hang.stuck:
                worker.said_code, worker.said_ns = -signal.SIGKILL, since
        findings = [
            {"rank": rank, "node": nodes[rank], "at_ns": _wall_ns(since), "silent_s": seconds, "hang": told}
            for rank, told in hang.stuck.items()
        ]
        return self._decide(findings)

    def _gets_time(self, hang: Hang, is_active: bool) -> bool:
        """Where nobody waits for anybody, always. What others wait for may be a long save: it gets ten times as long,
        and longer while it works."""
        if hang.is_unclear:
            self._lenience *= LENIENCE
        elif hang.may_be_busy and self._lenience < LENIENCE:
            self._lenience = LENIENCE
        elif hang.may_be_busy and is_active and self._lenience < MOST_LENIENCE:
            self._lenience *= 2
        else:
            return False
        return True

    def _dump(self) -> Dumps:
        """What the ranks of this node are doing, and which of them do anything."""
        pids = self._pids()
        before, began_s = sessions.work_done(pids.values()), time.monotonic()
        told = self._surgery.dump(pids, Path(self._folder))
        time.sleep(max(0.0, began_s + WORK_S - time.monotonic()))
        after = sessions.work_done(pids.values())
        active = [rank for rank, pid in pids.items() if _is_active(before[pid], after[pid], time.monotonic() - began_s)]
        return told | {"node": self._process.node, "active": active}

    def _is_too_long(self, watch: RankWatch, now_ns: int) -> bool:
        if self._hang_after_s is not None:
            return now_ns - watch.last_ns > self._hang_after_s * 1e9
        return now_ns - watch.last_ns > watch.patience_ns() * self._lenience

    def _poll_watches(self) -> None:
        for watch in self._watches:
            watch.poll()

    def _pids(self) -> dict[int, int]:
        pairs = zip(self._worker_group.workers, self._crew.workers, strict=True)
        return {rank.global_rank: worker.pid for rank, worker in pairs if not worker.gone_ns}

    def _lost_store(self, error: Exception) -> None:
        """Without it this node can go on as it is, but neither ask the others nor meet them again."""
        self._note(f"the node that hosts the rendezvous does not answer ({error}).")
        self._config = replace(self._config, max_nodes=1, min_nodes=1)
        self._peers = Peers(_NO_STORE, self._peers.attempt, self._peers.me, 1)

    # --- carrying out ---

    def _carry_out(self, order: Order) -> bool:
        """Ends the attempt as ordered. True if the next one is to begin."""
        if self._told_s and order.do in ("restart", "leave"):
            order = replace(order, do="requeue", why=f"{order.why} But it was told to stop, and stays so.")
        detected_ns = time.monotonic_ns()
        failed_ns = min((worker.failed_ns for worker in self._crew.workers if worker.failed_ns), default=detected_ns)
        self._recorder.period(Activity.DETECTION, failed_ns, detected_ns)
        self._surgery.observe(order)
        told = {key: value for key, value in asdict(order).items() if value and key != "seen"}
        self._recorder.mark(Told.DECISION, attempt=self._peers.attempt, **told)
        self._say(order.why)
        is_ours = order.rank in {worker.global_rank for worker in self._worker_group.workers}
        restarts = order.do == "restart" or (order.do == "leave" and not is_ours)
        with self._recorder.span(Activity.TEARDOWN):
            self._tear_down(GRACE_S if restarts else float(self._config.shutdown_timeout or 0), in_peace=not restarts)
        self._gone_all(order)
        if not restarts:
            self.exit_code = self._back_in_queue("sigterm") if order.do == "requeue" else 1
            self.closes_rendezvous = order.do != "leave"
            return False
        self._rendezvous_handler.members_change |= order.joins or order.do == "leave"
        if order.seen.get("progressed"):
            self._extra.pop("HEADWAY_SKIP_CHECKPOINTS", None)  # the one it went back to proved good
        self._extra.update(order.environ)
        self._restarts += 1
        self._remaining_restarts = max(0, self._worker_group.spec.max_restarts - self._restarts)
        if order.wait_s:
            with self._recorder.span(Activity.BACKOFF), self._interruptible():
                time.sleep(order.wait_s)
        return True

    def _tear_down(self, grace_s: float, in_peace: bool) -> None:
        stuck = self._crew.stop(signal.SIGTERM, grace_s, hurry=lambda: bool(self._signals), in_peace=in_peace)
        self._board = None  # whom it told is gone
        if stuck:
            self._say(f"processes {', '.join(map(str, stuck))} cannot be killed: the kernel holds them.")
        self._logs.close()

    def _gone_all(self, order: Order | None) -> None:
        """Writes down how each worker ended."""
        self._poll_watches()
        for rank, worker in zip(self._worker_group.workers, self._crew.workers, strict=True):
            is_root = order is not None and rank.global_rank == order.rank and bool(order.category)
            self._recorder.record(
                ProcessGone(
                    t_ns=worker.failed_ns or worker.gone_ns or time.monotonic_ns(),
                    exit_code=worker.code,
                    category=order.category if order is not None and is_root else None,
                    name=self._name(worker),
                    stopped=order is not None and order.joins,
                )
            )

    def _about_end(self) -> Order | None:
        """All workers here are done: waits until they are gone, and the others are done as well."""
        until = time.monotonic() + EXIT_S
        while not all(worker.gone_ns for worker in self._crew.workers) and time.monotonic() < until:
            self._crew.look(0.5, [self._wake])
            self._heed_signals()
        if any((worker.exit_code or 0) > 0 for worker in self._crew.workers):  # one changed its mind at exit
            return self._about_failure()
        for worker in self._crew.workers:
            if (worker.exit_code or 0) < 0:
                name = _name_of(-(worker.exit_code or 0))
                self._note(f"a worker crashed ({name}) at exit, when its program had ended well: so it counts as done.")
        if hung := [worker for worker in self._crew.workers if not worker.gone_ns]:
            self._note(f"{len(hung)} workers were done and did not leave in {EXIT_S:g} s: they are killed.")
        until = time.monotonic() + self._exit_barrier_timeout
        self.closes_rendezvous = False  # as long as another node may need it
        with suppress(DistError):  # whoever served the store is done, then
            self._peers.finish()
            while not (all_done := self._peers.all_finished()) and time.monotonic() < until:
                if (order := self._peers.decided()) is not None:
                    return order
                if self._peers.has_failed():
                    return self._about_failure()
                self._crew.look(self._tick(), [self._wake])
                self._heed_signals()
            self.closes_rendezvous = all_done
        if self._board is not None and self._board.stopped:
            return Order(do="requeue", why="the ranks have saved and stopped, as they were told.", spends=False)
        return None

    # --- signals ---

    def _heed_signals(self) -> None:
        """Has ranks that listen stop at a step edge. Where none does, a signal to end ends the job at once."""
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        if time.monotonic() > self._stop_by_s:
            raise Interrupted(signal.SIGTERM)
        while self._signals:
            number = self._signals.pop(0)
            if number in STOP_SIGNALS and self._tell_to_stop(Notice(signal.Signals(number).name.lower())):
                continue
            if number != signal.SIGUSR1:
                raise Interrupted(number)
            for worker in self._crew.workers:
                if not worker.gone_ns and sessions.handles(worker.pid, number):
                    os.kill(worker.pid, number)

    def _tell_to_stop(self, notice: Notice) -> bool:
        """Posts a notice, if anybody reads it. False if nobody does, or if this is an impatient second one."""
        board, now_s = self._board, time.monotonic()
        if board is None or not board.listeners:
            return False
        if board.notice is not None:
            return now_s - self._told_s < REPEAT_S
        board.post(notice.reason, deadline_ns=notice.deadline_ns)
        left_s, self._told_s = notice.seconds_left, now_s
        self._stop_by_s = now_s + (STOP_S if left_s is None else left_s)
        self._note(f"{notice.reason}: the ranks save at a step edge, and stop.")
        return True

    @contextmanager
    def _notices_polled(self) -> Iterator[None]:
        text = os.environ.get("HEADWAY_NOTICE", "")
        poller = Poller(source_of(text), self._tell_or_end) if text else None
        if poller is not None:
            poller.start()
        try:
            yield
        finally:
            if poller is not None:
                poller.stop()

    def _tell_or_end(self, notice: Notice) -> None:
        """In the poller's thread: what nobody listens to is as if somebody had sent SIGTERM."""
        if not self._tell_to_stop(notice):
            os.kill(os.getpid(), signal.SIGTERM)

    def _back_in_queue(self, reason: str) -> int:
        """Sees to it that a job which stopped early comes back. Returns the exit code that tells whether it does."""
        if not slurm.is_slurm(os.environ):
            return EXIT_STOPPED
        if self._peers.me != 0:  # one node asks for all
            return 0
        requeue = slurm.requeue(os.environ, reason)
        self._note(requeue.text)
        return 0 if requeue.done else EXIT_STOPPED

    def _end_by_signal(self, number: int) -> RunResult:
        name, grace_s = _name_of(number), self._config.shutdown_timeout
        self._say(f"{name} received: the workers get it too, and {grace_s} s.")
        with self._recorder.span(Activity.TEARDOWN):
            self._crew.stop(number, float(self._config.shutdown_timeout or 0), hurry=lambda: bool(self._signals))
        self._gone_all(None)
        self.exit_code = 128 + number
        if slurm.is_slurm(os.environ) and slurm.why_signalled(os.environ, name.lower()).reason in slurm.COMES_BACK:
            self.exit_code = self._back_in_queue(name.lower())
        self.closes_rendezvous = False  # others may go on, and this node come back
        return RunResult(state=WorkerState.FAILED)

    @contextmanager
    def _signals_caught(self) -> Iterator[None]:
        names = [name.strip() for name in self._config.signals_to_handle.split(",") if name.strip()]
        numbers = {*(getattr(signal, name) for name in names), *STOP_SIGNALS}
        numbers = {number for number in numbers if signal.getsignal(number) != signal.SIG_IGN}  # as by `nohup`
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._caught) for number in numbers}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            os.close(self._wake)
            os.close(wake)

    def _caught(self, number: int, frame: Any) -> None:
        if self._waits_for_others and number != signal.SIGUSR1:
            raise Interrupted(number)
        self._signals.append(number)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        self._waits_for_others = True
        try:
            self._heed_signals()
            yield
        finally:
            self._waits_for_others = False

    # --- what the base class wants ---

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._crew.stop(signal.SIGTERM, GRACE_S)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        failed = any(worker.failed_ns for worker in self._crew.workers)
        done = all(worker.is_done for worker in self._crew.workers)
        state = WorkerState.FAILED if failed else WorkerState.SUCCEEDED if done else WorkerState.HEALTHY
        return RunResult(state=state)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._crew.close()
        self._logs.close()
        self._tap.close()

    # --- words ---

    def _name(self, worker: Worker) -> str:
        """What its journal is called."""
        return folder_name(process_name(replace(self._process, pid=worker.pid), worker.ticks))

    def _note(self, text: str) -> None:
        """Tells the journal each time, and the user once."""
        self._recorder.mark("note", text=clean_text(text))
        if text not in self._noted:
            self._noted.add(text)
            self._say(text)

    def _say(self, text: str) -> None:
        """Tells the user, on a line of its own: the workers' last one may be a progress bar."""
        self._tap.end_line()
        self._tell_user(text)


class _NoStore:
    """Stands for the store before there is one."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes:
        raise RuntimeError("there is no store yet")

    def check(self, keys: list[str]) -> bool:
        return False

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise RuntimeError("there is no store yet")


_NO_STORE = _NoStore()


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"


def _is_active(before: tuple[int, int], after: tuple[int, int], seconds: float) -> bool:
    """Whether a session used a tenth of a processor or moved a megabyte a second."""
    ticks, moved = after[0] - before[0], after[1] - before[1]
    return ticks > 10 * seconds or moved > (1 << 20) * seconds


def _open_log(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace") if path else ""
    except OSError:
        return ""


def _wall_ns(monotonic_ns: int) -> int:
    return time.time_ns() - time.monotonic_ns() + monotonic_ns
