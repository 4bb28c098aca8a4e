"""The supervisor of one node: starts workers, watches them, and does about a failure what the policy says."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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

from headway import sessions
from headway.errors import PlatformError
from headway.events.process import process_name
from headway.events.recorder import Recorder
from headway.events.vocabulary import Activity, Process, ProcessGone, Told, clean_text
from headway.launch import elastic, slurm
from headway.launch.autopsy import KernelLog, oom_kills, scheduler_says
from headway.launch.crew import Crew, Worker
from headway.launch.notice import EXIT_STOPPED, Board
from headway.launch.peers import Dumps, Findings, Order, Peers
from headway.launch.progress import Hang, Progress
from headway.launch.signals import Interrupted, Signals
from headway.launch.streams import Kept, Tap
from headway.launch.worker import Assignment
from headway.paths import folder_name

GRACE_S = 1.0
"""What workers get between SIGTERM and SIGKILL before a restart: every second of it is lost to training."""

EXIT_S = 120.0
"""What a program that ended well gets to take down its interpreter."""

SETTLE_S, GLANCE_S = 1.0, 0.01
"""How long to look for the root of a failure while only its effects on other ranks are known; and while no rank here is
ending, either: one that raised has said so before the others could notice."""

VERDICT_S = 5.0
"""How long to wait for the node that has the root to decide."""

WORK_S = 1.0
"""How long to look whether ranks do anything, at least."""

DUMPS_S = 15.0
"""How long to wait for what the ranks of other nodes are doing."""

SOON_S, TICK_S = 0.2, 1.0
"""After which time to look around first, and how often then."""


class NotNeeded(Exception):
    """The job goes on, or ended, without this node."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where the job stood when it failed."""

    trained: bool
    """Whether this attempt trained a step."""
    reached: int
    """The first step that was never done."""
    best: int
    """The same, when this attempt began."""
    measured: bool
    """Whether steps could be seen at all."""
    nodes: int


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
    explain: Callable[[list[Dumps]], Hang]
    """Makes of that why nobody makes progress."""


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
        self._progress = Progress(hang_after_s)
        assert isinstance(spec.rdzv_handler, elastic.FreshStore)
        self._rendezvous_handler = spec.rdzv_handler
        self._logs = elastic.Logs(config, spec)
        self._tap = Tap()
        self._kernel = KernelLog()
        self._folder = folder
        self._extra: dict[str, str] = {}
        self._kept: dict[int, Kept] = {}
        self._ooms: int | None = None
        self._restarts = 0
        self._peers = Peers(_NO_STORE, 0, 0, 1)
        self.exit_code = 0
        """What to leave with."""
        self.closes_rendezvous = True
        """Whether nobody is to join after this node has left."""
        self._noted: set[str] = set()
        self._signals = Signals(config.signals_to_handle, self._note)
        crew.note = self._note

    # --- the loop ---

    def run(self, role: str = "") -> RunResult:
        """Runs the job to its end. The result's state tells which; `exit_code` with what to leave."""
        with self._signals.caught():
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
            self._crew.look(patience_s, [self._signals.wake])
            patience_s = self._tick()
            self._signals.heed(self._living)
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
        self._progress.poll()
        for local_rank, steps in enumerate(self._progress.steps):
            self._kept[local_rank].note(steps)
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
        with self._recorder.span(Activity.RENDEZVOUS), self._signals.interrupting():
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
        self._signals.board = Board.create(Path(board), len(group.workers))
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
        self._ooms = oom_kills()
        self._progress.begin([self._places(self._name(worker)) for worker in self._crew.workers])
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
        findings, began_s = self._findings(), time.monotonic()
        while self._surgery.is_effect(findings) and self._root_may_come(time.monotonic() - began_s):
            if (order := self._told_elsewhere()) is not None:
                return order
            self._crew.look(0.02)
            findings = self._findings()
        return self._decide(findings)

    def _root_may_come(self, waited_s: float) -> bool:
        """Whether the root may be with a rank of another node, or with one here that has not been heard yet."""
        unheard = [worker.pid for worker in self._crew.workers if not worker.is_over and not worker.failed_ns]
        is_near = self._peers.count > 1 or any(map(sessions.is_ending, unheard))
        return (is_near or bool(unheard)) and waited_s < (SETTLE_S if is_near else GLANCE_S)

    def _decide(self, findings: Findings) -> Order:
        """What to do: as the node says that has the root, where that is another one; else as this one proposes."""
        everywhere = findings
        try:
            if self._peers.count > 1:
                self._peers.report(findings)
                if (order := self._awaited_order(findings)) is not None:
                    return order
                everywhere = [*findings, *(found for found in self._peers.findings() if found not in findings)]
            return self._peers.decide(self._surgery.judge(everywhere, self._standing()))
        except DistError as error:
            self._lost_store(error)
            return self._surgery.judge(everywhere, self._standing())

    def _awaited_order(self, findings: Findings) -> Order | None:
        until = time.monotonic() + VERDICT_S
        while self._surgery.is_effect(findings) and time.monotonic() < until:
            if (order := self._peers.decided()) is not None:
                return order
            time.sleep(0.02)
        return None

    def _told_elsewhere(self) -> Order | None:
        try:
            return self._peers.decided()
        except DistError as error:
            self._lost_store(error)
            return None

    def _standing(self) -> Standing:
        self._progress.poll()
        return Standing(
            trained=self._progress.trained,
            reached=self._progress.lineage.reached,
            best=self._progress.best,
            measured=self._progress.is_measured,
            nodes=self._peers.count,
        )

    def _findings(self) -> Findings:
        self._progress.poll()
        everyone = zip(self._worker_group.workers, self._crew.workers, self._progress.steps, strict=True)
        failed = [(rank, worker, steps) for rank, worker, steps in everyone if worker.failed_ns]
        kernel = self._kernel.about({worker.pid for _, worker, _ in failed})
        ooms = oom_kills()
        killed = (ooms or 0) - (self._ooms or 0) if ooms is not None else 0
        return [
            {
                "rank": rank.global_rank,
                "node": self._process.node,
                "at_ns": _wall_ns(worker.failed_ns),
                "exit_code": worker.code,
                "exception": worker.exception,
                "steps": steps,
                **self._kept[rank.local_rank].told(),
                "error_file": _read(self._error_files.get(rank.local_rank, "")),
                "oom_kills": killed,
                "kernel": kernel.get(worker.pid, ""),
                "scheduler": scheduler_says(os.environ),
            }
            for rank, worker, steps in failed
        ]

    def _about_hang(self, is_asked: bool) -> Order | None:
        now = time.monotonic_ns()
        since = self._progress.still_since_ns([worker.is_over for worker in self._crew.workers], now, is_asked)
        if since is None:
            return None
        seconds = (now - since) / 1e9
        self._say(f"no step for {seconds:.0f} s: looking for what hangs …")
        everywhere = self._peers.exchange_dumps(self._dump(), DUMPS_S)
        hang = self._surgery.explain(everywhere)
        active = {rank for told in everywhere for rank in told["active"]}
        if self._progress.gives_time(hang, active.issuperset(hang.stuck)):
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

    def _dump(self) -> Dumps:
        """What the ranks of this node are doing, and which of them do anything."""
        pids = self._pids()
        before, began_s = sessions.work_done(pids.values()), time.monotonic()
        told = self._surgery.dump(pids, Path(self._folder))
        time.sleep(max(0.0, began_s + WORK_S - time.monotonic()))
        after = sessions.work_done(pids.values())
        active = [rank for rank, pid in pids.items() if _is_active(before[pid], after[pid], time.monotonic() - began_s)]
        pairs = zip(self._worker_group.workers, self._crew.workers, strict=True)
        left = [rank.global_rank for rank, worker in pairs if worker.is_done]
        return told | {"node": self._process.node, "active": active, "left": left}

    def _living(self) -> list[int]:
        return [worker.pid for worker in self._crew.workers if not worker.gone_ns]

    def _pids(self) -> dict[int, int]:
        pairs = zip(self._worker_group.workers, self._crew.workers, strict=True)
        return {rank.global_rank: worker.pid for rank, worker in pairs if not worker.gone_ns and not worker.is_done}

    def _lost_store(self, error: Exception) -> None:
        """Without it this node can go on as it is, but neither ask the others nor meet them again."""
        self._note(f"the node that hosts the rendezvous does not answer ({error}).")
        self._config = replace(self._config, max_nodes=1, min_nodes=1)
        self._peers = Peers(_NO_STORE, self._peers.attempt, self._peers.me, 1)

    # --- carrying out ---

    def _carry_out(self, order: Order) -> bool:
        """Ends the attempt as ordered. True if the next one is to begin."""
        if self._signals.was_told and order.do in ("restart", "leave"):
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
            reason = order.category or self._signals.reason or "sigterm"
            self.exit_code = self._back_in_queue(reason) if order.do == "requeue" else 1
            self.closes_rendezvous = order.do != "leave"
            return False
        self._rendezvous_handler.members_change |= order.joins or order.do == "leave"
        if order.seen.get("progressed"):
            self._extra.pop("HEADWAY_SKIP_CHECKPOINTS", None)  # the one it went back to proved good
        self._extra.update(order.environ)
        self._restarts += 1
        self._remaining_restarts = max(0, self._worker_group.spec.max_restarts - self._restarts)
        if order.wait_s:
            with self._recorder.span(Activity.BACKOFF), self._signals.interrupting():
                time.sleep(order.wait_s)
        return True

    def _tear_down(self, grace_s: float, in_peace: bool) -> None:
        board, hurry = self._signals.board, lambda: bool(self._signals.pending)
        at_once = board.deaf if board is not None and not in_peace else set[int]()
        stuck = self._crew.stop(signal.SIGTERM, grace_s, hurry=hurry, in_peace=in_peace, at_once=at_once)
        self._signals.board = None  # whom it told is gone
        if stuck:
            self._say(f"processes {', '.join(map(str, stuck))} cannot be killed: the kernel holds them.")
        self._logs.close()

    def _gone_all(self, order: Order | None) -> None:
        """Writes down how each worker ended."""
        self._progress.poll()
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
            self._crew.look(0.5, [self._signals.wake])
            self._signals.heed(self._living)
        if any((worker.exit_code or 0) > 0 for worker in self._crew.workers):  # one changed its mind at exit
            return self._about_failure()
        for worker in self._crew.workers:
            if (worker.exit_code or 0) < 0:
                name = sessions.signal_name(-(worker.exit_code or 0))
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
                self._crew.look(self._tick(), [self._signals.wake])
                self._signals.heed(self._living)
            self.closes_rendezvous = all_done
        if self._signals.board is not None and self._signals.board.stopped:
            return Order(do="requeue", why="the ranks have saved and stopped, as they were told.", spends=False)
        return None

    # --- signals ---

    def _back_in_queue(self, reason: str) -> int:
        """Sees to it that a job which stopped early comes back. Returns the exit code that tells whether it does."""
        if not slurm.is_slurm(os.environ):
            return EXIT_STOPPED
        if self._peers.me != 0:  # one node asks for all
            return 0
        requeue = slurm.requeue(os.environ, reason, say=self._note)
        if requeue.text:
            self._note(requeue.text)
        return 0 if requeue.done else EXIT_STOPPED

    def _end_by_signal(self, number: int) -> RunResult:
        name, grace_s = sessions.signal_name(number), self._config.shutdown_timeout
        self._say(f"{name} received: the workers get it too, and {grace_s} s.")
        with self._recorder.span(Activity.TEARDOWN):
            self._crew.stop(
                number, float(self._config.shutdown_timeout or 0), hurry=lambda: bool(self._signals.pending)
            )
        self._gone_all(None)
        self.exit_code = 128 + number
        if slurm.is_slurm(os.environ) and slurm.why_signalled(os.environ, name.lower()).reason in slurm.COMES_BACK:
            self.exit_code = self._back_in_queue(name.lower())
        self.closes_rendezvous = False  # others may go on, and this node come back
        return RunResult(state=WorkerState.FAILED)

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
