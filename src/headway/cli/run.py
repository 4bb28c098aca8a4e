"""`headway run`: torchrun's command line, with a supervisor that restarts in a second and knows why a job failed."""

import os
import re
import select
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from headway.cli.exec import job_environment, option_of, script_of
from headway.config import FAST_START, Settings, items_in
from headway.errors import InputError, nearest
from headway.events.clock import Clock
from headway.events.journal import Follower, Nowhere, Writer
from headway.events.process import command_line, describe, process_name
from headway.events.recorder import Recorder
from headway.events.vocabulary import Mark, Process, ProcessGone, Told, clean_text
from headway.launch.crew import Crew
from headway.launch.prewarm import Prewarm
from headway.launch.zygote import PRELOAD
from headway.machine import cores
from headway.paths import JOURNAL, JobPaths, folder_name
from headway.run import ROLL_UP, open_somewhere, takes_the_spool

if TYPE_CHECKING:
    from headway.launch.agent import Standing, Surgery
    from headway.launch.peers import Dumps, Findings, Order
    from headway.launch.progress import Hang
    from headway.recover.classify import Classifier
    from headway.recover.evidence import Evidence
    from headway.recover.policy import Policy

_HELP = ("-h", "--help")
LINE_LIMIT = 120
"""Most characters of the line that decided, where that is quoted."""

FLAGS = frozenset(
    (
        "--standalone", "-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path",
        "--virtual-local-rank", "--virtual_local_rank", "--cold", "--fast-start", "-h", "--help",
    )
)  # fmt: skip
"""The options that take no value."""


@click.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def run(words: tuple[str, ...]) -> None:
    """Run a training script as torchrun does, and restart it in a second when it fails.

    Takes torchrun's options, and some of its own: `headway run --help` lists them all.
    """
    if not words:
        raise InputError("there is no script to run: name it, as in `headway run train.py`. For all options: --help.")
    if words[0] in _HELP:
        parser().print_help()
        return
    head = head_of(words)
    fast = FastStart(words)
    os.environ.update(fast.environ)
    preload, warm = _preload(option_of(head, "preload")), "--cold" not in head
    crew = Crew(words, _first_environment(words), preload, warm, prewarm=fast.prewarm, in_two=_has_cores(words))
    try:
        code = _supervise(words, crew, fast)
    finally:
        crew.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):
            stream.flush()
    os._exit(code)  # the job is over, and taking torch down would take its time


def _first_environment(words: Sequence[str]) -> dict[str, str]:
    """What workers will find when they import torch, as far as it is known before torchrun's options are read."""
    measured = os.environ.get("HEADWAY_DISABLE") != "1"
    store = option_of(head_of(words), "compile-cache")
    environ = job_environment(os.environ, None, words, store) if measured else dict(os.environ)
    if _workers(words) != "1":
        environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun has it
    return environ


def _workers(words: Sequence[str]) -> str:
    """How many there will be on this node, as torchrun is told."""
    return option_of(head_of(words), "nproc-per-node") or os.environ.get("PET_NPROC_PER_NODE", "1")


def _has_cores(words: Sequence[str]) -> bool:
    """Whether there is a core for each worker; as many as there are GPUs, or cores, have one."""
    workers = _workers(words)
    return not workers.isdecimal() or int(workers) <= cores()


def _preload(given: str) -> list[str]:
    return [*PRELOAD, *(name.strip() for name in given.split(",") if name.strip())]


def _supervise(words: Sequence[str], crew: Crew, fast: "FastStart") -> int:
    """Reads the options, and runs the job to its end. Returns the exit code."""
    args = parse(words)
    from headway.checkpoint.guard import Guard
    from headway.launch import elastic
    from headway.launch.agent import Agent

    if note := elastic.check_version():
        say(note)
    if os.environ.get("HEADWAY_DISABLE") != "1":
        os.environ.update(job_environment(os.environ, args.job, ["headway", "run", *words], args.compile_cache))
    with TemporaryDirectory(prefix="headway-run-", ignore_cleanup_errors=True) as scratch:
        config, command = elastic.launch_config(args, scratch)
        crew.size = config.nproc_per_node
        limited = option_of(head_of(words), "max-restarts") or "PET_MAX_RESTARTS" in os.environ
        judge = Judge(args.max_restarts if limited else None, config.min_nodes)
        with Journals(words) as journals, fast.told_in(journals, crew):
            handler = elastic.rendezvous(config, journals.next_attempt)
            agent = Agent(
                elastic.worker_spec(config, command, handler), config, command, crew, journals.recorder,
                journals.process, journals.places, judge.surgery(), say, scratch, args.hang_after,
            )  # fmt: skip
            with Guard(scratch, say):
                agent.run(config.role)
            journals.exit_code = agent.exit_code
            if agent.closes_rendezvous:
                handler.shutdown()
    return agent.exit_code


# --- options ---------------------------------------------------------------------------------------------------------


def parser() -> ArgumentParser:
    """torchrun's options, and headway's own."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog, parser.allow_abbrev = "headway run", False
    parser.description = "torchrun, with a supervisor that restarts in a second and knows why a job failed."
    own = parser.add_argument_group("headway's own")
    own.add_argument("--job", help="Name of the job. Default: the scheduler's id, or a new name after the script.")
    own.add_argument(
        "--preload", default="", metavar="MODULES",
        help="Modules that workers find imported, besides torch; separated by commas. Not what you edit meanwhile.",
    )  # fmt: skip
    own.add_argument(
        "--compile-cache", metavar="URL", help="Folder or URL to keep compiled code in, and to take it from."
    )
    own.add_argument("--fast-start", action="store_true", help=f"Start faster: {'; '.join(FAST_START.values())}.")
    own.add_argument(
        "--without", default="", metavar="ITEMS", help=f"What not to do of that: any of {', '.join(FAST_START)}."
    )
    own.add_argument("--cold", action="store_true", help="Start each worker as a fresh process.")
    own.add_argument(
        "--hang-after", type=float, metavar="SECONDS",
        help="A rank hangs when it makes no step for this long. Default: by its own pace. 0: never.",
    )  # fmt: skip
    return parser


def head_of(words: Sequence[str]) -> list[str]:
    """The options before the script, with their values. Known without torch, which takes a second to import."""
    return list(words[: sum(size for _, size in _options(words))])


def _options(words: Sequence[str]) -> list[tuple[str, int]]:
    """The name of each option before the script, and of how many words it is."""
    found, at = [], 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        is_glued = "=" in words[at] or (not words[at].startswith("--") and len(words[at]) > 2)
        size = 1 if is_glued or words[at] in FLAGS else 2
        found.append((words[at].partition("=")[0] if words[at].startswith("--") else words[at][:2], size))
        at += size
    return found


def parse(words: Sequence[str]) -> Namespace:
    """The options; InputError for one that is unknown, with the nearest that is, and for a script that is not there."""
    options = parser()
    known = options._option_string_actions
    for name, _ in _options(words):
        if name not in known:
            raise InputError(f"there is no option {name}: {nearest(name, [key for key in known if len(key) > 2])}")
    if len(head_of(words)) >= len(words):
        raise InputError("there is no script to run: name it after the options, as in `headway run train.py`.")
    args = options.parse_args(list(words))
    if args.hang_after is not None and args.hang_after < 0:
        raise InputError(f"--hang-after {args.hang_after:g} is no time: give seconds, or 0 to switch it off.")
    if not args.module and not args.no_python and not os.path.exists(args.training_script):
        raise InputError(
            f"there is no script {args.training_script} in {os.getcwd()}. For a module use -m, for a program of "
            "another kind --no-python."
        )
    return args


# --- a fast start ----------------------------------------------------------------------------------------------------


class FastStart:
    """What is done to start faster without a word in the script, and why what is left is not."""

    def __init__(self, words: Sequence[str]) -> None:
        head, settings = head_of(words), Settings.from_environment()
        without = items_in(option_of(head, "without"), "--without")
        asked = list(FAST_START) if "--fast-start" in head else settings.fast_start_items
        if without and not asked:
            raise InputError("--without takes items out of --fast-start, which is not there: add it.")
        self.prewarm: Prewarm | None = None
        self._why = {item: self._hindrance(item, head, settings) for item in asked if item not in without}
        self.items = [item for item, why in self._why.items() if not why]
        self._why |= dict.fromkeys((item for item in asked if item in without), "it is switched off")
        self.environ = {"HEADWAY_FAST_START": ",".join(self.items)} if asked else {}
        if "groups" in self.items:
            self.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        if "compile-cache" in self.items:
            self.environ["HEADWAY_COMPILE_CACHE"] = str(settings.home_folder / "compile")
        if "imports" in self.items:
            self.prewarm = Prewarm(settings.home_folder, _program(words))

    @staticmethod
    def _hindrance(item: str, head: Sequence[str], settings: Settings) -> str:
        """Why this cannot be done here, or need not be; empty if it is done."""
        unmeasured = "nothing is measured, with HEADWAY_DISABLE=1" if settings.disable == "1" else ""
        if item == "groups" and "TORCH_GLOO_LAZY_INIT" in os.environ:
            return f"TORCH_GLOO_LAZY_INIT is set to {os.environ['TORCH_GLOO_LAZY_INIT']}"
        if item == "compile-cache" and (url := option_of(head, "compile-cache") or settings.compile_cache):
            return f"it is on already, at {url}"
        if item == "imports" and {"--cold", "--no-python", "--no_python"} & set(head):
            return "workers start as fresh processes"
        return "" if item == "groups" else unmeasured

    @contextmanager
    def told_in(self, journals: "Journals", crew: Crew) -> Iterator[None]:
        """Tells the journal, and the user, what is on; at the end, takes what the workers have told last."""
        said: set[str] = set()

        def tell(item: str, on: bool, why: str) -> None:
            journals.recorder.mark(Told.FAST_START, item=item, on=on, why=clean_text(why))

        def learned(why: str, on: bool) -> None:
            tell("imports", on, why)
            if not on and why not in said:
                said.add(why)
                say(f"{why}.")

        ahead = self.prewarm.names() if self.prewarm is not None else []
        for item, why in self._why.items():
            tell(item, not why, why or (", ".join(ahead) if item == "imports" else ""))
        if self._why:
            imports = f" Imported ahead: {', '.join(ahead)}." if ahead else ""
            say(f"fast start: {', '.join(self.items) or 'nothing'}.{imports} Switch items off with --without.")
        if self.prewarm is not None:
            self.prewarm.tell, self.prewarm.read = learned, journals.imports_told
        try:
            yield
        finally:
            if self.prewarm is not None and crew.workers:
                self.prewarm.look(crew.workers[0].pid, crew.workers[0].ticks)


def _program(words: Sequence[str]) -> str:
    """What a program is known by from one job to the next: its script, or its module and the folder it is run in."""
    head = head_of(words)
    name = words[len(head)] if len(head) < len(words) else ""
    return f"{os.getcwd()} -m {name}" if {"-m", "--module"} & set(head) else os.path.realpath(name)


# --- journals --------------------------------------------------------------------------------------------------------


class Journals:
    """The supervisor's own journals: what it did, and as a launcher when it began and how it ended."""

    def __init__(self, words: Sequence[str]) -> None:
        self.settings = Settings.from_environment()
        self.exit_code = 1
        measured = self.settings.disable != "1"
        clock = Clock()
        job = self.settings.job or "none"
        process = describe(os.environ, job, clock, node=self.settings.node, role="supervisor")
        program = clean_text(script_of(words))
        self.process = replace(process, program=program, command=command_line(["headway", "run", *words]))
        self.recorder = self._open(self.process, measured)
        self._launcher = self._open(replace(self.process, role="launcher"), measured)
        self._paths = JobPaths(self.settings.home_folder, job)
        self._attempt = -1
        self._followers: dict[Path, Follower] = {}

    def _open(self, process: Process, measured: bool) -> Recorder:
        def create(folder: Path) -> Writer:
            try:
                return Writer(JobPaths(folder, process.job).make().journal(f"{process.role}-{process_name(process)}"))
            except FileExistsError:  # by `headway exec`, which became this process, and watches it
                return Nowhere()

        writer, note = open_somewhere(self.settings, create) if measured else (None, "")
        if note:
            say(note)
        recorder = Recorder(writer or Nowhere())
        recorder.record(process)
        return recorder

    def __enter__(self) -> "Journals":
        if self.settings.disable != "1" and takes_the_spool(self.settings):
            from headway.collect import ensure_collector

            spool, home = self.settings.spool_folder, self.settings.home_folder
            if problem := ensure_collector(spool, home, self.process.job, ROLL_UP):
                say(f"no collector could be started ({problem}). Journals stay in {spool}.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.recorder.close()
        self._launcher.record(ProcessGone(t_ns=time.monotonic_ns(), exit_code=self.exit_code))
        self._launcher.close()
        if self.settings.disable != "1" and takes_the_spool(self.settings) and 1 in (os.getpid(), os.getppid()):
            self._deliver_all()

    def _deliver_all(self) -> None:
        """Where a container ends with this process, the kernel ends the collector too: what is left to bring, it
        brings."""
        from headway.collect import deliver_once

        home = self.settings.home_folder
        for journal in JobPaths(self.settings.spool_folder, self.process.job).journals.glob(f"*{JOURNAL}"):
            if problem := deliver_once(journal, home, self.process.job):
                say(f"the last records did not reach {home} ({problem}). They are in {journal}.")
                return

    def places(self, name: str) -> list[Path]:
        """Where the journal of a process of this node may lie."""
        folders = [self.settings.home_folder, self.settings.spool_folder]
        if takes_the_spool(self.settings):
            folders.reverse()
        return [JobPaths(folder, self.process.job).journal(name) for folder in folders]

    def imports_told(self, pid: int, ticks: int) -> Mapping[str, Any] | None:
        """What one of the workers told of its imports; None if it has not yet."""
        name = folder_name(process_name(replace(self.process, pid=pid), ticks))
        for place in self.places(name):
            for record in self._followers.setdefault(place, Follower(place)).poll().records:
                if isinstance(record, Mark) and record.name == Told.FAST_START and "modules" in record.attrs:
                    return record.attrs
        return None

    def next_attempt(self, last: int) -> int:
        """The number of the attempt that begins now: one more than the last, and than any supervisor of this job has
        given out."""
        self._attempt = max(self._attempt, last)
        try:
            self._attempt = max(self._attempt, int(self._paths.attempts.read_text()))
        except (OSError, ValueError):
            pass  # this is the first, or what others counted is lost
        self._attempt = number = self._attempt + 1
        with suppress(OSError):  # then the next supervisor begins at 0 again, and attempts are told apart by time
            fresh = self._paths.attempts.with_suffix(f".{os.getpid()}")
            fresh.write_text(str(number))
            fresh.replace(self._paths.attempts)
        return number


# --- judgement -------------------------------------------------------------------------------------------------------


class Judge:
    """Wires the supervisor to those who know about failures: evidence → verdict → decision → order."""

    def __init__(self, max_restarts: int | None, min_nodes: int) -> None:
        from headway.recover.policy import History, default, first_of

        settings = Settings.from_environment()
        self._classifier = _classifier(settings.failure_rules)
        mine = [_checked(settings.policy)] if settings.policy else []
        self._policy = first_of(*mine, default(max_restarts))
        self._history = History()
        self._min_nodes = min_nodes

    def surgery(self) -> "Surgery":
        """What the agent asks."""
        from headway.launch.agent import Surgery

        return Surgery(
            judge=self.judge, is_effect=self.is_effect, observe=self.observe, dump=self.dump, explain=self.explain
        )

    def judge(self, findings: "Findings", standing: "Standing") -> "Order":
        """What to do about these failures."""
        from headway.launch.peers import Order
        from headway.recover.evidence import Evidence
        from headway.recover.policy import Situation

        if not findings:
            return Order(do="restart", why="another node failed, and did not say why. Restarting.", spends=False)
        if "BrokenPipeError" in findings[0].get("exception", "") and _nobody_reads(1):
            why = "nobody reads the output any more. Not restarting: no retry can help."
            return Order(do="stop", why=why, category="cancelled", seen={"klass": "scheduler", "progressed": False})
        root, verdict = self._classifier.root_of([Evidence(**finding) for finding in findings])
        progressed = standing.reached > standing.best
        history = self._history
        situation = Situation(
            category=verdict.category, klass=verdict.klass, action=verdict.action, rank=root.rank, node=root.node,
            line=verdict.line, trained=standing.trained, progressed=progressed,
            repeats=history.repeats_of(verdict.category, progressed), spent=history.spent_on(verdict.klass, progressed),
            restarts=history.restarts, can_exclude=standing.nodes > max(self._min_nodes, 1),
            measured=standing.measured, can_requeue="SLURM_JOB_ID" in os.environ,
        )  # fmt: skip
        decision = self._policy(situation)
        assert decision is not None
        line = _quoted(verdict.line, root)
        done = {"restart": "Restarting", "stop": "Not restarting", "requeue": "Requeueing", "leave": "Restarting"}
        why = f"rank {root.rank} on {root.node} failed: {verdict.category}{f' ({line})' if line else ''}. "
        return Order(
            do=decision.do, why=f"{why}{done[decision.do]}: {decision.why}.", rank=root.rank, node=root.node,
            category=verdict.category, rule=verdict.rule, line=line, wait_s=decision.wait_s,
            environ=dict(decision.environ), spends=decision.spends,
            seen={"klass": str(verdict.klass), "progressed": progressed},
        )  # fmt: skip

    def is_effect(self, findings: "Findings") -> bool:
        """Whether all of these are effects of a failure elsewhere."""
        from headway.recover.evidence import Evidence

        return all(self._classifier.is_effect(Evidence(**finding)) for finding in findings)

    def observe(self, order: "Order") -> None:
        """Takes notice of what was decided, here or on another node."""
        if order.category:
            self._history.add(order.category, order.seen["klass"], order.seen["progressed"], order.spends)

    def dump(self, pids: Mapping[int, int], folder: Path) -> "Dumps":
        """What these ranks are doing, as JSON has it."""
        from headway.launch import dumps
        from headway.launch.peers import VALUE_LIMIT

        found = dumps.collect(pids, folder, 10.0)
        for rank, dump in found.items():  # the main thread stands last, as do the latest collectives
            found[rank] = replace(dump, stacks=dump.stacks[-VALUE_LIMIT:], flight=(dump.flight or [])[-256:] or None)
        return {"ranks": {str(rank): asdict(dump) for rank, dump in found.items()}}

    def explain(self, everywhere: "list[Dumps]") -> "Hang":
        """What each stuck rank hangs in."""
        from headway.launch.dumps import Dump
        from headway.launch.progress import Hang
        from headway.recover import hang

        found = {int(rank): Dump(**told) for node in everywhere for rank, told in node["ranks"].items()}
        finding = hang.explain(found, {rank for node in everywhere for rank in node["left"]})
        say(finding.text)
        stuck = dict.fromkeys(finding.stuck_ranks or sorted(found)[:1], finding.text)
        kind = finding.kind
        return Hang(stuck=stuck, may_be_busy=kind == "missing_rank", is_unclear=kind == "not_in_collective")


def _quoted(line: str, root: "Evidence") -> str:
    """The line that decided, without the rank's prefix; with the next one, if it only says that something follows."""
    texts = (root.exception, root.stderr)
    if line.rstrip().endswith(":") and (text := next((text for text in texts if line in text), "")):
        after = text[text.rindex(line) + len(line) :].split("\n")
        line += " " + next((words.strip() for words in after if words.strip()), "")
    line = re.sub(r"^\[\w*\d+\]:\s*", "", line.strip())
    line = clean_text(line or ("" if root.exit_code is None else f"exit code {root.exit_code}"))
    return line if len(line) <= LINE_LIMIT else f"{line[: LINE_LIMIT - 1]}…"


def _nobody_reads(fd: int) -> bool:
    """Whether this is a pipe whose other end is closed."""
    poller = select.poll()
    poller.register(fd, 0)
    return any(events & select.POLLERR for _, events in poller.poll(0))


def _classifier(given: str) -> "Classifier":
    """The rules for telling failures apart, and what the user has put before them."""
    from headway.recover.classify import Classifier
    from headway.recover.rules import load_rules

    if given and not os.path.exists(given) and ":" in given:
        return Classifier(ask=_named(given, "HEADWAY_FAILURE_RULES"))
    return Classifier(load_rules(given) if given else ())


def _checked(name: str) -> "Policy":
    """A user's policy; what it says counts if it can be done."""
    from headway.recover.policy import DOINGS, Decision

    policy = _named(name, "HEADWAY_POLICY")

    def decide(situation: Any) -> Any:
        decision = policy(situation)
        if decision is None or (isinstance(decision, Decision) and decision.do in DOINGS):
            return decision
        say(f"HEADWAY_POLICY={name} returned {decision!r:.80}, which is no Decision. headway decides by itself.")
        return None

    return decide


def _named(name: str, setting: str) -> Any:
    """The function that a setting names."""
    from headway.recover.classify import load_callable

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where a user's own module most likely is
    try:
        function = load_callable(name)
    except InputError as error:
        raise InputError(f"{setting}: {error}") from error

    def ask(subject: Any) -> Any:
        try:
            return function(subject)
        except Exception as error:  # a job must not end by a mistake in what was to save it
            say(f"{setting}={name} raised {type(error).__name__}: {error}. headway decides by itself.")
            return None

    return ask


def say(text: str) -> None:
    """One line on stderr, if anybody reads it."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"headway: {text}", file=sys.stderr, flush=True)
