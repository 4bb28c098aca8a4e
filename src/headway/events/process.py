"""Who this process is: its job, its rank, its launcher, and how the three are found out without guessing."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from headway.events.clock import Clock, start_ticks
from headway.events.vocabulary import Process, clean_text

_SECRET_WORDS = frozenset(
    "token secret password passwd pwd passphrase key apikey credential credentials auth authorization bearer".split()  # noqa: SIM905
)
_ASSIGNED = re.compile(
    r"""((?:^|[?&;,{\s"'])["']?([\w.+-]+)["']?\s*[=:]\s*["']?(?:bearer\s+|basic\s+)?)[^\s&"',;}]+""", re.I
)
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_NR_PIDFD_OPEN = 434
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def describe(
    environ: Mapping[str, str], job: str, clock: Clock, *, node: str = "", attempt: str = "", role: str = "rank"
) -> Process:
    """The first record of this process's journal."""
    pid = os.getpid()
    now, wall = clock.now_ns(), clock.wall_ns()
    launcher, launched = _launcher(environ, clock)
    return Process(
        t_ns=now,
        wall_ns=wall,
        boot=clock.boot(),
        node=clean_text(node or os.uname().nodename),
        pid=pid,
        job=job,
        role=role,
        rank=_number(environ, *_RANKS),
        local_rank=_number(environ, "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
        world_size=max(1, _number(environ, "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")),
        started_ns=clock.process_started_ns(pid) or now,
        launcher=launcher,
        launcher_started_ns=launched,
        launch=_launch(environ, launcher),
        attempt=int(attempt) if attempt.isdecimal() else None,
        program=clean_text(_program()),
        command=command_line(sys.orig_argv),
    )


def is_ranked(environ: Mapping[str, str]) -> bool:
    """Whether a launcher gave this process a rank."""
    return any(environ.get(name, "").isdecimal() for name in _RANKS)


def process_name(process: Process, ticks: int | None = None) -> str:
    """A name no other process has, not even one that got the same pid later. `ticks` is when it started, in kernel
    ticks, where it may be gone by now."""
    return f"{process.node}-{process.boot[:8]}-{process.pid}-{ticks or start_ticks(process.pid) or process.t_ns}"


def job_name(environ: Mapping[str, str], given: str = "", script: str = "") -> str:
    """The job this process belongs to: the given name, else the scheduler's or the launcher's id, else a new one.

    `script` stands for the program that the last two are named after, where that is not the one that runs here.
    """
    if given:
        return given
    if slurm := environ.get("SLURM_JOB_ID"):
        if array := environ.get("SLURM_ARRAY_JOB_ID"):
            return f"slurm-{array}_{environ.get('SLURM_ARRAY_TASK_ID', '0')}"
        return f"slurm-{slurm}"
    script = Path(script or _script()).stem
    if run := environ.get("TORCHELASTIC_RUN_ID"):
        if run != "none":
            return f"{script}-{run[:8] if _UUID.fullmatch(run) else run}"
        # torchrun's default id is the same for every job: on one node its agent tells jobs apart, on several nothing.
        if environ.get("GROUP_WORLD_SIZE", "1") == "1":
            return f"{script}-{os.getppid()}-{start_ticks(os.getppid())}"
    return f"{script}-{os.urandom(4).hex()}"


def shares_no_id(environ: Mapping[str, str], given: str = "") -> bool:
    """Whether this job has several nodes, and nothing that would tell them they belong together."""
    named = given or environ.get("SLURM_JOB_ID") or environ.get("TORCHELASTIC_RUN_ID", "none") != "none"
    return not named and environ.get("GROUP_WORLD_SIZE", "1") != "1"


def command_line(argv: Sequence[str]) -> str:
    """The command, with what looks like a secret blanked."""
    words, blank_next = [], False
    for word in argv:
        if blank_next and not word.startswith("--"):
            words.append("***")
            blank_next = False
            continue
        blank_next = word.startswith("-") and "=" not in word and _is_secret(word)
        word = _ASSIGNED.sub(lambda match: match[1] + "***" if _is_secret(match[2]) else match[0], word)
        words.append(without_logins(word))
    return clean_text(" ".join(words))


def without_logins(text: str) -> str:
    """The text, with users and passwords in URLs blanked."""
    return _URL_LOGIN.sub("***@", text)


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; OSError if there is none, or none to be had."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    import ctypes  # Python was built where the kernel's headers were older than the kernel here, as conda's is

    fd: int = ctypes.CDLL(None, use_errno=True).syscall(_NR_PIDFD_OPEN, pid, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def _is_secret(name: str) -> bool:
    """Whether a name like `--api-key`, `wandbToken` or `DB_PASSWORD` promises a secret."""
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()
    return not _SECRET_WORDS.isdisjoint(re.split(r"[^a-z0-9]+", spaced))


def _script() -> str:
    return sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "python"


def _program() -> str:
    """The script's or module's name; where it lies may change from one attempt to the next."""
    path = Path(sys.argv[0] if sys.argv else "")
    return path.parent.name if path.name == "__main__.py" else path.name


def _launcher(environ: Mapping[str, str], clock: Clock) -> tuple[str, int | None]:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return "", None
    parent = os.getppid()
    return f"{parent}-{start_ticks(parent)}", clock.process_started_ns(parent)


def _launch(environ: Mapping[str, str], launcher: str) -> str:
    counts = [environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")]
    return "/".join([launcher, *counts]) if any((launcher, *counts)) else ""


def _number(environ: Mapping[str, str], *names: str) -> int:
    for name in names:
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return 0
