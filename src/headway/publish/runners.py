"""Who publishes, after the trainer has gone: a process of this machine, a Slurm job, or a runner of one's own.

What a runner starts is `headway publish run ID`, which publishes in the foreground and is the same everywhere. None of
them makes the publisher a part of the trainer's job: it is no rank, holds none of the trainer's files or pipes, and is
not told what the trainer's launcher or allocation told the trainer.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headway.errors import HeadwayError, InputError, PlatformError, nearest
from headway.events.scheduler import scontrol, slurm_fields
from headway.publish.request import ENDED, Desk, Request

NICE = 10
"""The publisher's priority on the trainer's machine: low."""

LEAVES_S = 30
"""So long, at most, a publisher waits for the trainer to leave."""

SUBMIT_S, ASK_S = 60.0, 10.0
"""How long a scheduler's answer is waited for: when a job is given to it, and when it is asked for one."""

ALLOCATIONS = {
    "SLURM_JOB_ID": "Slurm job", "KUBERNETES_SERVICE_HOST": "a Kubernetes pod", "PBS_JOBID": "PBS job",
    "LSB_JOBID": "LSF job", "FLUX_JOB_ID": "Flux job", "RAY_JOB_ID": "Ray job", "TORCHX_JOB_ID": "TorchX job",
}  # fmt: skip
"""What ends when the trainer does, and takes all its processes along; by the variable that tells of it."""

_ELSEWHERE = "start `{run}` where it may last, or name a runner of your own (--runner package.module:function)"
_NEXT = {
    "SLURM_JOB_ID": "give it a job of its own: `headway publish submit {id} --runner slurm`",
    "KUBERNETES_SERVICE_HOST": "create a Kubernetes Job that runs `{run}` with the same image and volumes, or name a "
    "runner of your own that does (--runner package.module:function)",
}

_LAUNCHER = re.compile(
    r"(^|[\s/])(torchrun|torch\.distributed\.(run|launch)|headway (run|exec)|accelerate|deepspeed)\b"
)
_INITS = ("tini", "dumb-init", "docker-init", "catatonit")

_RANKS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|HEADWAY|SLURM|SBATCH|SRUN|OMPI|PMI|PMIX)_.*"
)
"""Variables that tell a process its place in the trainer's job."""
_KEPT = {
    "SLURM_CONF", "SBATCH_ACCOUNT", "HEADWAY_HOME", "HEADWAY_SPOOL", "HEADWAY_NODE", "HEADWAY_DISABLE",
    "HEADWAY_COMPILE_CACHE", "HEADWAY_FAILURE_RULES", "HEADWAY_POLICY",
}  # fmt: skip
"""Those among them that are the machine's or the user's, and not the job's."""


_DEVICES = {
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
}
"""Variables that name the accelerators of an allocation; another one has others, or none."""


class Runner(Protocol):
    """Who publishes."""

    def submit(self, request: Request, desk: Desk, command: Sequence[str]) -> str:
        """Has `command`, which publishes in the foreground, run somewhere, and returns at once: one line that says
        where. HeadwayError, with what to do, if it cannot."""
        ...


def runner_named(name: str) -> Runner:
    """The runner of that name: `local`, `slurm`, or the one that `package.module:function` names."""
    if ":" in name:
        return Other(name)
    if name not in _RUNNERS:
        hint = nearest(name, _RUNNERS)
        raise InputError(f"there is no runner {name!r}: {hint} One of your own is named as package.module:function.")
    return _RUNNERS[name]()


def environment(environ: Mapping[str, str], request: Request, desk: Desk) -> dict[str, str]:
    """What the publisher's processes are told: what the trainer was, without its place in its job. None of them is
    measured; the one that does the work joins the job by itself."""
    kept = {name: value for name, value in environ.items() if name in _KEPT or not _RANKS.fullmatch(name)}
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("OMP_NUM_THREADS") == "1":
        del kept["OMP_NUM_THREADS"]  # torchrun's, for want of a better number
    job = {"HEADWAY_JOB": request.job} if request.job else {}
    return kept | job | {"HEADWAY_HOME": str(desk.folder.absolute().parents[1]), "HEADWAY_DISABLE": "1"}


@contextmanager
def _handing_over(desk: Desk) -> Iterator[None]:
    """InputError if somebody publishes it already. If nobody can be found to do it, that is written down."""
    before = desk.state().phase
    with desk.held():
        desk.change(phase="waiting", doing="", problem="", category="", queued="")
    try:
        yield
    except HeadwayError as error:
        desk.change(phase=before if before in ENDED else "failed", problem=str(error))
        raise


# --- this machine ----------------------------------------------------------------------------------------------------


class Local:
    """A process of this machine that outlives the trainer, its launcher and its terminal."""

    def submit(self, request: Request, desk: Desk, command: Sequence[str]) -> str:
        """Refuses where nothing outlives the trainer."""
        with _handing_over(desk):
            refuse_if_torn_down(os.environ, request.id)
            pid = _detached(command, environment(os.environ, request, desk), request.folder or "/", desk.log)
        return f"process {pid} on {os.uname().nodename}"


def _detached(command: Sequence[str], environ: Mapping[str, str], folder: str, log: Path) -> int:
    """The number of a process that is nobody's child and has a session of its own. No file of this one is open in it,
    not even for a moment: whoever reads a trainer's pipe to its end would wait for it. It begins when this one has
    ended, which would else have to share its processors while it leaves."""
    waits = f"n=0; while [ -d /proc/{os.getpid()} ] && [ $n -lt {LEAVES_S * 10} ]; do sleep 0.1; n=$((n+1)); done"
    script = f'nice -n {NICE} /bin/sh -c \'{waits}; exec "$@"\' sh "$@" >>"$0" 2>&1 </dev/null & echo $!'
    try:
        with _on_processors_of(os.getppid()):
            done = subprocess.run(
                ["/bin/sh", "-c", script, str(log), *command], env=environ, cwd=folder, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, check=True, timeout=ASK_S,
            )  # fmt: skip
        return int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        told = f"a process that publishes cannot be started in {folder} ({error})."
        raise PlatformError(f"{told} When that is cured: {shlex.join(command)}") from error


@contextmanager
def _on_processors_of(launcher: int) -> Iterator[None]:
    """What this thread starts meanwhile runs where the launcher may: a rank is often bound to a few processors."""
    mine = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(launcher))
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def refuse_if_torn_down(environ: Mapping[str, str], id_: str) -> None:
    """InputError, with what to do instead, where all processes end together with the trainer."""
    if not (where := torn_down(environ)):
        return
    variable = next((name for name in ALLOCATIONS if environ.get(name)), "")
    how = _NEXT.get(variable, _ELSEWHERE).format(id=id_, run=f"headway publish run {id_}")
    raise InputError(
        f"a process that publishes would end with {where}, in which the trainer runs: {how}. Nothing is lost: the "
        f"checkpoint is kept until it is published."
    )


def torn_down(environ: Mapping[str, str]) -> str:
    """The allocation, or the container, that ends when the trainer does; empty if this machine stays.

    A container counts if its first process is this one, or is the launcher above it: the kernel ends all the others
    with it. One that a shell, an ssh daemon or a notebook server keeps open stays.
    """
    for name, what in ALLOCATIONS.items():
        if value := environ.get(name):
            return what if what.startswith("a ") else f"{what} {value}"
    return "this container" if is_launchers_container(_commands_above(os.getpid())) else ""


def is_launchers_container(commands: Sequence[str]) -> bool:
    """`commands`: the command lines of this process and of all above it, if the last is that of process 1."""
    if len(commands) > 1 and os.path.basename(commands[-1].partition(" ")[0]) in _INITS:
        commands = commands[:-1]
    return len(commands) == 1 or (len(commands) > 1 and _LAUNCHER.search(commands[-1]) is not None)


def _commands_above(pid: int) -> list[str]:
    """Empty if process 1 is not above this one, as in a container that was entered from outside."""
    found: list[str] = []
    while pid > 0:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            parent = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            return []
        found.append(command)
        if pid == 1:
            return found
        pid = parent
    return []


# --- Slurm -----------------------------------------------------------------------------------------------------------


_COMES = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED")


class Slurm:
    """A batch job of its own, without GPUs unless `--sbatch` asks for some; requeued if it is preempted.

    The job gets the environment of whoever submits it (its PATH, its virtual environment) without what Slurm told that
    one of its own job: `sbatch` would take that for options, and `srun` in the new job for its size.
    """

    def submit(self, request: Request, desk: Desk, command: Sequence[str]) -> str:
        """A job that waits in the queue already is not submitted again."""
        queued = desk.state().queued
        if queued and (state := queue_state(queued)).startswith(_COMES):
            return f"{_words(queued)} is there already, {state}. To have another one, `scancel` it first."
        with _handing_over(desk):
            queued = self._sbatch(request, desk, command)
        desk.change(queued=queued)  # of the state as it is by now: the job may have begun
        return f"{_words(queued)}, {queue_state(queued)}"

    def _sbatch(self, request: Request, desk: Desk, command: Sequence[str]) -> str:
        # A % in a name would be one of sbatch's patterns; the id of a request has some where a job's name has a slash.
        log = str(desk.log.absolute()).replace("%", "%%")
        options = [
            "--parsable", f"--job-name=publish-{request.id}", f"--output={log}", "--open-mode=append", "--requeue",
            "--nodes=1", "--ntasks=1", "--export=ALL", f"--chdir={request.folder or '/'}",
        ]  # fmt: skip
        again = f"headway publish submit {request.id} --runner slurm"
        try:
            told = ["sbatch", *options, *shlex.split(request.what.sbatch)]
        except ValueError as error:
            raise InputError(f"--sbatch {request.what.sbatch!r} cannot be read ({error}). Then: {again}") from error
        script = f"#!/bin/sh\nexec {shlex.join(command)}\n"
        environ = environment(os.environ, request, desk)
        environ = {name: value for name, value in environ.items() if name not in _DEVICES}
        done = _ask(told, environ, SUBMIT_S, script)
        if done is None:
            raise PlatformError(
                f"sbatch does not answer on {os.uname().nodename}: is Slurm installed here? Nothing is lost. On a "
                f"machine where it does: {again}"
            )
        if done.returncode != 0:
            said = " ".join(re.sub(r"(?m)^sbatch: (error: )?", "", done.stderr).split())
            kind = (
                PlatformError if re.search(r"contact|timed out|configuration (file|source)", said, re.I) else InputError
            )
            raise kind(
                f"sbatch refused it: {said} Nothing is lost. Options for it are given as --sbatch='--partition=cpu "
                f"--mem=64G'. Then: {again}"
            )
        return f"slurm:{done.stdout.strip()}"


def queue_state(queued: str) -> str:
    """What a scheduler says of the job that `State.queued` names: `PENDING (Resources)`, `RUNNING on n1`, `COMPLETED`,
    or `gone`, if it knows it no more; empty if there is no scheduler to ask, or it does not answer."""
    kind, _, name = queued.partition(":")
    if kind != "slurm" or not name:
        return ""
    job, _, cluster = name.partition(";")
    of = [f"--cluster={cluster}"] if cluster else []
    done = scontrol(os.environ, ASK_S, *of, "--oneliner", "show", "job", job)
    if done is None or done.returncode != 0:
        return "gone" if done is not None and "Invalid job id" in done.stderr else ""
    fields = slurm_fields(done.stdout)
    state = fields.get("JobState", "")
    if state == "PENDING":
        return f"PENDING ({fields.get('Reason', 'None')})"
    return f"RUNNING on {fields.get('NodeList', '?')}" if state == "RUNNING" else state


def _ask(
    command: Sequence[str], environ: Mapping[str, str], timeout_s: float, stdin: str
) -> subprocess.CompletedProcess[str] | None:
    """None if there is no such program, or it does not answer."""
    try:
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=environ
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _words(queued: str) -> str:
    return f"Slurm job {queued.partition(':')[2].partition(';')[0]}"


# --- one's own -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Other:
    """A function that is called as `submit` would be, or a class or an object that has one; by name."""

    name: str

    def submit(self, request: Request, desk: Desk, command: Sequence[str]) -> str:
        """What it returns, if that is text."""
        with _handing_over(desk):
            try:
                told = self._loaded(request.folder or ".")(request, desk, command)
            except HeadwayError:
                raise
            except Exception as error:  # whatever a user's own code raises: the request stays, and this is told of it
                raise PlatformError(
                    f"the runner {self.name} failed ({type(error).__name__}: {error}). Nothing is lost. When it is "
                    f"cured: headway publish submit {request.id} --runner {self.name}"
                ) from error
        return told if isinstance(told, str) and told else f"handed to {self.name}"

    def _loaded(self, folder: str) -> Callable[..., Any]:
        from headway.publish.named import function_named

        found: Any = function_named(self.name, folder)
        made = found() if isinstance(found, type) else found
        submit: Callable[..., Any] | None = getattr(made, "submit", made if callable(made) else None)
        if submit is None:
            raise InputError(f"{self.name} has no method submit(request, desk, command).")
        return submit


_RUNNERS: dict[str, Callable[[], Runner]] = {"local": Local, "slurm": Slurm}
