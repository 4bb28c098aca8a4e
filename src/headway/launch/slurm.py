"""Slurm's side of a stop: why it signalled the job, and how the job gets back into the queue.

A job that saves and leaves politely in its grace time is COMPLETED for Slurm, and never comes back unless it requeues
itself. But `scontrol requeue` also brings back a job that a person has cancelled, so the reason is asked for first.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from subprocess import CompletedProcess
from typing import Any

from headway.events.scheduler import scontrol, slurm_fields
from headway.launch.notice import Notice

TIMEOUT_S = 10.0
"""How long one answer of Slurm's is waited for."""

COMES_BACK = ("preempted", "time_limit")

_REQUEUE_OF = {"_slurm_sigusr_handler_fn": "Lightning", "checkpoint_and_try_requeue": "submitit"}
"""Signal handlers that requeue the job themselves, by name."""

Told = Mapping[str, str]
"""The fields of one of scontrol's answers."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """What became of the job's return to the queue."""

    done: bool
    """Whether it comes back, whoever saw to it."""
    text: str
    """What to tell the user, if it was not said already."""


def is_slurm(environ: Mapping[str, str]) -> bool:
    """Whether this process runs in a Slurm job."""
    return "SLURM_JOB_ID" in environ


def job_id(environ: Mapping[str, str]) -> str:
    """The job as Slurm's commands know it; for a task of an array that is not its SLURM_JOB_ID."""
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    return environ["SLURM_JOB_ID"]


# --- why -----------------------------------------------------------------------------------------------------------


def why_signalled(environ: Mapping[str, str], told: str) -> Notice:
    """The notice behind a signal: `told` is its name, and stays the reason where Slurm knows of no other."""
    job = _show("job", job_id(environ), environ)
    reason = reason_of(job, restarts(environ), told)
    deadline_s = 0
    if reason == "preempted" and _seconds(job, "PreemptTime"):
        partition = _show("partition", job.get("Partition", ""), environ)
        deadline_s = _seconds(job, "PreemptTime") + _seconds(partition, "GraceTime")
    elif reason == "time_limit" and job.get("JobState") == "RUNNING":
        deadline_s = _seconds(job, "EndTime")
    left_ns = int((deadline_s - time.time()) * 1e9)
    return Notice(reason, deadline_ns=time.monotonic_ns() + left_ns if deadline_s else 0)


def reason_of(job: Told, restarts: int, told: str) -> str:
    """`preempted`, `time_limit` or `cancelled`, as Slurm's record of the job tells; else `told`, the signal's name.

    A preempted job runs on through its grace time, and has a time of preemption. A cancelled one is completing at once,
    as is one at its time limit, which is given as the reason. `restarts` is how often this job was requeued when it
    started: if that has grown, Slurm is done with its preemption, and has requeued it.
    """
    state = job.get("JobState", "")
    if not state:
        return told
    if int(job.get("Restarts", "0")) > restarts or state == "PREEMPTED":
        return "preempted"
    if job.get("Reason") == "TimeLimit" or state == "TIMEOUT":
        return "time_limit"
    if state != "RUNNING":
        return "cancelled"
    if _seconds(job, "PreemptTime"):
        return "preempted"
    # What `--signal=USR1@N` asks for. By itself Slurm sends no SIGUSR1, and a person's says the same by convention.
    return "time_limit" if told == "sigusr1" and _seconds(job, "EndTime") else told


def restarts(environ: Mapping[str, str]) -> int:
    """How often the job had been requeued when this run of it began."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


# --- back into the queue -------------------------------------------------------------------------------------------


def requeue(
    environ: Mapping[str, str], reason: str, handlers: Iterable[Any] = (), *, say: Callable[[str], None] = print
) -> Requeue:
    """Put the job back into the queue, unless it is there already, was cancelled, or a framework sees to it.

    Call it once all ranks have saved: Slurm ends the job at once. `reason` is that of the stop, `handlers` are signal
    handlers besides the ones installed now. `say` is told just before Slurm is asked: afterwards it may be too late. Of
    several calls in one run of the job, one counts: Slurm refuses others until the job runs again, and by then their
    callers are gone.
    """
    name = job_id(environ)
    if framework := requeuing_framework(handlers):
        return Requeue(True, f"{framework} requeues Slurm job {name}, so headway does not.")
    job = _show("job", name, environ)
    if not job:
        return Requeue(False, f"Slurm job {name} was not requeued: scontrol does not answer here. {_by_hand(name)}")
    if int(job.get("Restarts", "0")) > restarts(environ):
        return Requeue(True, f"Slurm job {name} is in the queue again already.")
    reason = reason_of(job, restarts(environ), reason)
    if reason == "cancelled":
        return Requeue(False, f"Slurm job {name} was cancelled, and is not requeued.")
    if reason not in COMES_BACK and reason != "sigusr1":
        return Requeue(
            False, f"Slurm job {name} got a {reason.upper()} and is neither preempted nor at its time limit: it is not "
            f"requeued. {_by_hand(name)}"
        )  # fmt: skip
    if job.get("BatchFlag") == "0":
        return Requeue(False, f"Slurm job {name} is interactive, and only batch jobs can be requeued.")
    if job.get("Requeue") == "0":
        return Requeue(
            False, f"Slurm job {name} may not be requeued (Requeue=0): its work is saved, and nobody starts it again. "
            f"Submit it again, next time with --requeue."
        )  # fmt: skip
    say(f"Slurm job {name} goes back into the queue.")
    return _requeue(name, environ)


def _requeue(name: str, environ: Mapping[str, str]) -> Requeue:
    done = _ask(environ, "requeue", name)
    if done is not None and done.returncode == 0:
        return Requeue(True, "")
    said = (done.stderr.strip() if done else "") or "scontrol does not answer"
    if "pending execution" in said:  # somebody was faster
        return Requeue(True, f"Slurm job {name} is in the queue again already.")
    return Requeue(False, f"Slurm job {name} could not be requeued ({said}). {_by_hand(name)}")


def requeuing_framework(handlers: Iterable[Any] = ()) -> str:
    """The framework that requeues the job when signalled, known by its signal handler; empty if there is none."""
    installed = [signal.getsignal(number) for number in signal.valid_signals()]
    for handler in (*installed, *handlers):
        for part in getattr(handler, "signal_handlers", [handler]):  # Lightning keeps several in one
            if framework := _REQUEUE_OF.get(getattr(part, "__name__", "")):
                return framework
    return ""


def _by_hand(name: str) -> str:
    return f"To run it again: scontrol requeue {name}"


# --- asking --------------------------------------------------------------------------------------------------------


def _show(what: str, name: str, environ: Mapping[str, str]) -> Told:
    """One record of Slurm's; empty if it does not tell."""
    done = _ask(environ, "--oneliner", "show", what, name)
    return slurm_fields(done.stdout) if done is not None and done.returncode == 0 else {}


def _seconds(told: Told, key: str) -> int:
    """A time in seconds since 1970, or a duration; 0 if it is `None`, `Unknown` or not there."""
    value = told.get(key, "")
    return int(value) if value.isdecimal() else 0


def _ask(environ: Mapping[str, str], *words: str) -> CompletedProcess[str] | None:
    env = {**environ, "TZ": "UTC", "SLURM_TIME_FORMAT": "%s", "PATH": environ.get("PATH", os.defpath)}
    return scontrol(env, TIMEOUT_S, *words)
