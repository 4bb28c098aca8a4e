"""What a training script holds: its place in a job, and the words to say where its time goes."""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headway.config import Settings
from headway.errors import HeadwayError, InputError, nearest
from headway.events.clock import Clock
from headway.events.journal import Nowhere, Writer
from headway.events.process import describe, is_ranked, job_name, process_name, shares_no_id
from headway.events.recorder import Recorder, Span
from headway.events.vocabulary import STAGES, Activity, Process, ProcessEnd, Restored, Saved, Told, clean_text
from headway.paths import JobPaths, folder_name, is_network, private_folder

if TYPE_CHECKING:
    from headway.compile.session import Session as CompileSession
    from headway.launch.notice import Listener, Notice
    from headway.publish.request import Publish

T = TypeVar("T")
W = TypeVar("W")

ROLL_UP = "headway.accounting.rollup:roll_up"
"""What sums up finished processes: named, since this side of headway does not import that."""

_lock = threading.Lock()
_current: "Run | None" = None


def current() -> "Run":
    """The run this process is part of: joined on the first call, the same one ever after.

    The job is the one named by `HEADWAY_JOB`, else the scheduler's or torchrun's, else a new one. Inside a data worker,
    or with `HEADWAY_DISABLE=1`, it is a run that records nothing.
    """
    global _current
    with _lock:
        if _current is None:
            run = _join()
            if _is_being_imported():  # a spawned child, which may yet turn out to be a trainer
                return run
            _current = run
        _current.becomes("rank")
        return _current


def join_unasked(began_ns: int, waited: bool = False) -> "Run":
    """The run of a process whose script has not asked for one: a rank if its environment says so, else a process that
    may turn out to train. `began_ns` is when it was first looked at; if it waited until then for something to do, it
    counts from there."""
    global _current
    with _lock:
        if _current is None:
            _current = _join(began_ns=began_ns, unasked=True, waited=waited)
        return _current


def join_as_publisher() -> "Run":
    """The run of a process that publishes what its job has trained."""
    global _current
    with _lock:
        if _current is None:
            _current = _join(role="publisher")
        _current.becomes("publisher")
        return _current


def compile_cache(url: str | os.PathLike[str] | None = None, *, model: Any = None, group: str = "") -> None:
    """Has this process take compiled code from a store, and keep there what it compiles itself. Call it early: all is
    fetched while the rest starts up, and is there when the first function is compiled.

    `url` is a folder or a URL; by default the one of `--compile-cache`, or a folder below headway's home. Jobs with the
    same `model` (its structure counts), or without one the same script, share a bundle. `group` names the ranks that
    compile the same, where not all do.
    """
    from headway.compile.caches import call_around

    if may_be_helper():  # a data worker that imports the script
        return
    run, program = current(), ""
    if model is not None:
        program = structure_of(model)
    session = begin_compile_cache(run, os.fspath(url or ""), program, group, anew=True)
    if session is not None and not run.watches_compiles:
        run.watches_compiles = True
        call_around(run.before_compile, run.after_compile)


def structure_of(model: Any) -> str:
    """Names a model by the names, sizes and types of its parameters and buffers."""
    from headway.compile.key import model_name

    named = [*model.named_parameters(), *model.named_buffers()]
    return model_name([(name, _size(value), str(value.dtype)) for name, value in named], type(model).__name__)


def _size(value: Any) -> tuple[int, ...]:
    """Of a tensor; none if it is yet to be known, as that of a lazy layer is."""
    try:
        return tuple(value.shape)
    except RuntimeError:
        return ()


def begin_compile_cache(
    run: "Run", url: str = "", program: str = "", group: str = "", anew: bool = False
) -> "CompileSession | None":
    """What a run does about its compile cache, from now on; None if there is none. A second call changes nothing,
    unless `anew`."""
    settings = _settings()
    url = url or settings.compile_cache or (str(settings.home_folder / "compile") if anew else "")
    if not url or settings.disable == "1" or (run.compiles is not None and not anew):
        return run.compiles
    try:
        from headway.compile import caches, key
        from headway.compile.session import Place, Session, Where

        if caches.is_disabled():
            return None
        process, number = run._process, run.compiles.number + 1 if run.compiles else 0
        parts = partial(key.parts, program or process.program, group or settings.compile_group or "all")
        place = Place(rank=run.rank, world_size=run.world_size, is_known=is_ranked(os.environ))
        where = Where(
            keys=settings.home_folder / "keys", mirror=settings.spool_folder / "compile",
            hashes=settings.home_folder / "hashes", number=number,
            began=(process.wall_ns - (process.t_ns - process.started_ns)) / 1e9,
        )  # fmt: skip
        session = Session(url, parts, place, where, partial(run.mark, Told.COMPILE_CACHE))
    except Exception as error:  # the job compiles as if there were none
        _say(f"no compile cache ({type(error).__name__}: {error}).")
        return None
    if run.compiles is not None:
        run.compiles.cancel()
        run.leaving.remove(run.compiles.close)
    run.compiles = session
    run.leaving.insert(0, session.close)
    return session


def _forget() -> None:
    """In a forked child: its parent's run is not its own."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


class Run:
    """One process's part in a job. Whatever becomes of the journal, nothing here stops the training; only a stage that
    does not exist is an error."""

    def __init__(self, recorder: Recorder, process: Process) -> None:
        self.job, self.rank, self.world_size = process.job, process.rank, process.world_size
        self.recorder = recorder
        self.leaving: list[Callable[[], None]] = []
        """Called before the journal ends."""
        self._process = process
        self.has_finished = self._left = False
        self.status: int | None = None
        """The exit status, where that is known before the end."""
        self._listener: Listener | None = None
        self._stop: Notice | None = None
        self._at_stop: list[Callable[[int], object]] = []
        self._obeyed = False
        self.anchors: Callable[[], dict[str, Any] | None] | None = None
        """Saves what is to be published, on all ranks; the first one learns where it is."""
        self.compiles: CompileSession | None = None
        """What this process does about its compile cache."""
        self.watches_compiles = False
        """Whether something calls that before and after each compilation."""

    @property
    def program(self) -> str:
        """The script or module that runs."""
        return self._process.program

    def span(self, name: str, **attrs: Any) -> Span:
        """Times a `with` block. The names in `Activity` count in the ledger; any other is shown beside it."""
        return self.recorder.span(name, **attrs)

    def stage(self, name: str) -> Span:
        """Times a stage of trainer initialisation, such as `train_module_creation`."""
        if name not in STAGES:
            hint = nearest(name, STAGES)
            raise InputError(f"there is no stage {name!r} in trainer initialisation, use a span or a stage: {hint}")
        return self.recorder.span(name)

    def mark(self, name: str, **attrs: Any) -> None:
        """Notes that something happened now."""
        self.recorder.mark(name, **attrs)

    def steps(
        self, batches: Iterable[T], start: int | None = None, *, batch_size: int | None = None
    ) -> Iterator[tuple[int, T]]:
        """Yields `(step, batch)` and measures each step and its wait for data.

        `start` numbers the first step: after a restore, the step training goes on with. By default numbering goes on
        from the last loop, so that epochs follow one another. `batch_size` is in samples on this rank; a loader that
        has one is asked.
        """
        if batch_size is None:
            found = getattr(batches, "batch_size", None)
            batch_size = found if isinstance(found, int) and found > 0 else None
        if self._at_stop:
            batches = self._until_stop(batches)
        return self.recorder.steps(batches, start, batch_size)

    def checkpoint_saved(self, step: int | None = None, path: str | os.PathLike[str] = "") -> None:
        """A checkpoint is safely stored. `step` is where training would go on; by default, after the current step."""
        step = self.recorder.steps_meter.upcoming if step is None else int(step)
        self.recorder.record(Saved(t_ns=self.recorder.now_ns(), step=step, path=clean_text(os.fspath(path))))

    def checkpoint_restored(self, step: int, path: str | os.PathLike[str] = "") -> None:
        """A checkpoint is loaded, and training goes on with step `step`."""
        self.recorder.record(Restored(t_ns=self.recorder.now_ns(), step=int(step), path=clean_text(os.fspath(path))))

    def finish(self, publish: "str | Publish | None" = None) -> None:
        """The work is done: what this process still does is shutting down.

        With `publish`, a recipe or a `headway.Publish`, the state of this run's `Checkpointer` (the last one made) is
        saved and kept, and somebody else publishes it: call it on all ranks.

        After a stop on notice it is not done. Then this waits for the other ranks to save and, under Slurm, puts the
        job back into the queue; where nobody does that, it leaves the process with exit code 75.
        """
        self.recorder.steps_meter.settle()
        if publish is not None and self.stop is None:
            self._hand_over(publish)
        self.has_finished = True
        self.recorder.record(ProcessEnd(t_ns=self.recorder.now_ns(), category=self._stopped_by(), done=True))
        if code := self._obey():
            raise SystemExit(code)

    def _hand_over(self, publish: "str | Publish") -> None:
        """Has the model published by somebody else. The checkpoint is safe before anything is asked of them."""
        from headway.publish.anchor import Code
        from headway.publish.hand_over import hand_over
        from headway.publish.request import Publish

        began = time.perf_counter()
        what = publish if isinstance(publish, Publish) else Publish(publish)
        if self.anchors is None:
            raise InputError(
                "there is nothing to publish: this run has no headway.Checkpointer. Make one, or save by yourself and "
                "call `headway publish submit FOLDER --recipe RECIPE`."
            )
        code = Code(Path(sys.argv[0]).absolute().parent) if self.rank == 0 else None
        anchor = self.anchors()
        if anchor is None:  # not the first rank
            return
        with self.span(Activity.PUBLISH):
            told = hand_over(what, self._process, _settings().home_folder, code, **anchor)
        where = told.pop("where", "")
        _say(
            told["why"]
            or f"{told['checkpoint']} is published by {where}. To see how far that is: headway publish status"
        )
        self.mark(Told.ANCHOR, **told, seconds=time.perf_counter() - began)

    @property
    def skip_checkpoints(self) -> int:
        """How many of the newest checkpoints not to restore from: a supervisor found the last ones to be bad."""
        given = os.environ.get("HEADWAY_SKIP_CHECKPOINTS", "")
        return int(given) if given.isdecimal() else 0

    # --- stopping on notice ---

    @property
    def should_stop(self) -> bool:
        """Whether to save and leave the loop now: the job has to stop, and this is the step edge where all ranks do.

        Ask at every step edge, on every rank alike. From the first question on, SIGTERM and SIGUSR1 are such notices.
        """
        return (self._listener or self._listen()).is_due()

    @property
    def stop(self) -> "Notice | None":
        """Why training has stopped here, and how many seconds are left where that is known; None if it has not.

        Under Slurm, rank 0 asks for both.
        """
        listener = self._listener
        if self._stop is None and listener is not None and listener.stopped and listener.notice is not None:
            from headway.launch import slurm

            self._stop = listener.notice
            if self.rank == 0 and slurm.is_slurm(os.environ) and self._stop.reason in ("sigterm", "sigusr1"):
                self._stop = slurm.why_signalled(os.environ, self._stop.reason)
        return self._stop

    def on_stop(self, save: Callable[[int], object]) -> Callable[[], None]:
        """Has `save` called when the job has to stop, once, between two steps of the next `run.steps`, which then ends.

        It is given the step that training will go on with. Returns what takes this back.
        """
        self._listener or self._listen()
        self._at_stop.append(save)
        return lambda: self._at_stop.remove(save) if save in self._at_stop else None

    def _listen(self) -> "Listener":
        from headway.launch.notice import Listener, listen

        steps = self.recorder.steps_meter
        if _is_helper():  # it ends when told to, as ever
            self._listener = Listener(lambda: steps.steps_done)
        else:
            self._listener = listen(os.environ, lambda: steps.steps_done, self._process.local_rank)
        return self._listener

    def _until_stop(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches up to the stop. None is fetched that would not be trained on."""
        iterator: Iterator[T] | None = None
        while not self.should_stop:
            iterator = iter(batches) if iterator is None else iterator
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch
        saves, self._at_stop = self._at_stop, [_done]  # another loop must end at once, and call nothing
        with self.span(Activity.CHECKPOINT_BLOCKING):
            for save in saves:
                save(self.recorder.steps_meter.steps_done)

    def _stopped_by(self) -> str | None:
        return self.stop.reason if self.stop else None

    def _obey(self) -> int:
        """After a stop: lets the others save, and sees to the restart. Returns the exit code, the first time."""
        listener, stop = self._listener, self.stop
        if listener is None or stop is None or self._obeyed:
            return 0
        from headway.launch import slurm
        from headway.launch.notice import EXIT_STOPPED

        self._obeyed = True
        listener.wait_for_others(self._process.local_rank)
        if listener.is_supervised or (slurm.is_slurm(os.environ) and self.rank):  # others see to it
            return 0
        if not slurm.is_slurm(os.environ):
            return EXIT_STOPPED
        requeue = slurm.requeue(os.environ, stop.reason, listener.former.values(), say=_say)
        if requeue.text:
            _say(requeue.text)
        return 0 if requeue.done else EXIT_STOPPED

    def becomes(self, role: str, rank: int | None = None, world_size: int | None = None) -> None:
        """This process turns out to be something else than it seemed, or to have another rank."""
        old = self._process
        if old.role == "publisher":  # whatever a recipe imports and calls
            return
        rank = old.rank if rank is None else rank
        new = replace(old, role=role, rank=rank, world_size=max(world_size or old.world_size, rank + 1))
        if new != old:
            self._process, self.rank, self.world_size = new, new.rank, new.world_size
            self.recorder.record(new)

    def before_compile(self) -> None:
        """Torch is about to compile something: what others have compiled is in place from here on."""
        if self.compiles is not None:
            self.compiles.before_compile()

    def after_compile(self) -> None:
        """It has."""
        if self.compiles is not None:
            self.compiles.after_compile()

    def leave(self, status: int) -> None:
        """The process ends at once, with this status."""
        self.status = status
        self._leave()

    def _leave(self) -> None:
        if self._left or os.getpid() != self._process.pid:
            return
        self._left = True
        for call in self.leaving:
            try:
                call()
            except Exception as problem:  # the end is told whatever becomes of the rest
                self.recorder.mark("leaving", problem=clean_text(f"{type(problem).__name__}: {problem}"))
                _say(f"the last records could not be written ({type(problem).__name__}: {problem}).")
        error, stopped_by = getattr(sys, "last_value", None), self._stopped_by()
        if error is not None or self.has_finished or self.status is not None or not is_child():
            text = clean_text(f"{type(error).__name__}: {error}") if error is not None else None
            text = text or (f"exit status {self.status}" if self.status and not stopped_by else None)
            ended_ns, done = self.recorder.now_ns(), self.has_finished
            self.recorder.record(ProcessEnd(t_ns=ended_ns, error=text, category=stopped_by, done=done))
        # else multiprocessing hides how it ended: only `finish` could have said that it went well
        self.recorder.close(error)
        self._obey()


# --- joining -------------------------------------------------------------------------------------------------------


def _join(
    environ: Mapping[str, str] = os.environ, began_ns: int | None = None, unasked: bool = False, waited: bool = False,
    role: str = "rank",
) -> Run:  # fmt: skip
    clock, settings = Clock(), _settings(environ)
    job = job_name(environ, settings.job)
    if shares_no_id(environ, settings.job):
        _say("several nodes, and no id they share: each process is a job of its own. Set HEADWAY_JOB, or --rdzv-id.")
    process = describe(environ, job, clock, node=settings.node, attempt=settings.attempt, role=role)
    if unasked:
        process = _seen_from_outside(process, environ, began_ns or process.t_ns)
        if waited:
            process = replace(process, started_ns=process.t_ns)
    if settings.disable == "1" or (_is_helper() and not unasked):
        return Run(Recorder(Nowhere(), clock), process)
    writer = _open_journal(settings, process)
    if writer.path.stem != folder_name(process_name(process)):  # it replaced itself by `exec`: this program begins now
        process = replace(process, started_ns=process.t_ns)
    run = Run(Recorder(writer, clock), process)
    run.recorder.record(process)
    atexit.register(run._leave)
    if process.rank == 0 and role == "rank":
        _ask_platform(run, settings, environ)
    return run


def _settings(environ: Mapping[str, str] = os.environ) -> Settings:
    try:
        return Settings.from_environment(environ)
    except InputError as error:
        _say(f"{error} Going on without it.")
        return Settings.from_environment({name: environ[name] for name in environ if name in Settings.variables()})


def _seen_from_outside(process: Process, environ: Mapping[str, str], began_ns: int) -> Process:
    """As far as is known now: it may still launch others, or train; and which rank a child is, its parent numbered."""
    began_ns = max(min(began_ns, process.t_ns), process.started_ns)
    process = replace(process, t_ns=began_ns, wall_ns=process.wall_ns - (process.t_ns - began_ns))
    if is_ranked(environ):
        return process
    if is_child():
        number = sys.modules["multiprocessing.process"].current_process().name.rpartition("-")[2]
        return replace(process, rank=max(int(number) - 1, 0) if number.isdecimal() else 0)
    return replace(process, role="process")


def is_child() -> bool:
    """Whether multiprocessing started this process."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def may_be_helper() -> bool:
    """Whether multiprocessing started this process: it may be a data worker as well as a trainer."""
    return _is_being_imported() or is_child()


def _is_helper() -> bool:
    """Whether this is a data worker or the like: multiprocessing makes those daemons, and trainers not."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and (_is_being_imported() or module.current_process().daemon)


def _is_being_imported() -> bool:
    """Whether this child of spawn or forkserver still imports its parent's script, before it does its own work."""
    spawned = any(word.startswith("from multiprocessing.") for word in sys.orig_argv)
    return spawned and not is_child()


def takes_the_spool(settings: Settings) -> bool:
    """Whether journals go through the spool: somebody wants it, or the home is no place for mapped files."""
    return settings.spool is not None or is_network(settings.home_folder)


def open_somewhere(settings: Settings, create: Callable[[Path], W]) -> tuple[W | None, str]:
    """What `create` makes in the home if that is local, else in the spool; and what there is to say about it. None if
    neither can be written to."""
    home, spool = settings.home_folder, settings.spool_folder
    try:
        return create(private_folder(spool) if takes_the_spool(settings) else home), ""
    except (OSError, HeadwayError) as error:
        try:
            made = create(private_folder(spool))
            return (
                made,
                f"cannot write to {home} ({error}). Journals go to {spool}: read them with HEADWAY_HOME={spool}.",
            )
        except (OSError, HeadwayError) as second:
            return None, f"cannot write to {home} ({error}) nor to {spool} ({second}). This job is not measured."


def _open_journal(settings: Settings, process: Process) -> Writer:
    """This process's journal; where there can be none, a writer to nowhere."""
    writer, note = open_somewhere(settings, lambda folder: _create(folder, process))
    if note:
        _say(note)
    elif writer is not None and takes_the_spool(settings):
        _have_collected(settings, writer, process)
    return writer or Nowhere()


def _have_collected(settings: Settings, writer: Writer, process: Process) -> None:
    from headway.collect import ensure_collector

    spool, home = settings.spool_folder, settings.home_folder
    problem = ensure_collector(spool, home, process.job, ROLL_UP)
    if problem:
        _say(f"no collector could be started ({problem}). Journals stay in {spool}.")
    # Registered before the run's own leave, and so called after it.
    atexit.register(_deliver_last, os.getpid(), writer.path, home, process)


def _deliver_last(pid: int, journal: Path, home: Path, process: Process) -> None:
    """Where a container ends with this process, the kernel ends the collector too: what is left to bring, it brings."""
    from headway.collect import deliver_once

    # A launcher takes its time to leave. A shell or a small init as first process does not.
    ends_all = pid == 1 or (os.getppid() == 1 and not process.launcher)
    if ends_all and os.getpid() == pid and (problem := deliver_once(journal, home, process.job)):
        _say(f"the last records did not reach {home} ({problem}). They are in {journal}.")


def _create(home: Path, process: Process) -> Writer:
    paths, name, number = JobPaths(home, process.job).make(), process_name(process), 1
    while True:
        try:
            return Writer(paths.journal(name if number == 1 else f"{name}-{number}"))
        except FileExistsError:  # this process wrote it, before it replaced itself by `exec`
            number += 1


def _ask_platform(run: Run, settings: Settings, environ: Mapping[str, str]) -> None:
    from headway.events import scheduler

    def ask() -> None:
        try:
            told = scheduler.scheduled(environ, settings.eligible, settings.allocated, run.recorder.now_ns())
            if told is not None:
                run.recorder.record(told)
        except ValueError as error:
            _say(f"HEADWAY_ELIGIBLE or HEADWAY_ALLOCATED cannot be read: {error}. Scheduling stays unknown.")

    if settings.eligible or settings.allocated:
        ask()
    elif scheduler.is_askable(environ):
        threading.Thread(target=ask, name="headway-scheduler", daemon=True).start()


def _done(step: int) -> None:
    """Stands for what was called already."""


def _say(text: str) -> None:
    print(f"headway: {text}", file=sys.stderr, flush=True)


__all__ = ["Activity", "Run", "compile_cache", "current"]
