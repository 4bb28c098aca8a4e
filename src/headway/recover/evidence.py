"""What is known of one rank's failure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that one rank, its node and its scheduler said about its end."""

    rank: int
    node: str = ""
    at_ns: int = 0
    """When the failure was seen, in nanoseconds since 1970."""
    exit_code: int | None = None
    """As `subprocess` has it: -9 for a process that SIGKILL ended."""
    exception: str = ""
    """The uncaught exception, its traceback included, as the worker itself recorded it."""
    stderr: str = ""
    """The last lines."""
    stderr_steps: Sequence[Sequence[int]] = ()
    """Pairs `(lines, steps)`: all but the last so many lines came before the rank had trained more than these steps."""
    steps: int = 0
    """How many steps the rank had trained when it failed."""
    error_file: str = ""
    """Torch elastic's error file, which is JSON."""
    oom_kills: int = 0
    """By how much the cgroup's `oom_kill` counter rose during the attempt."""
    kernel: str = ""
    """Lines of the kernel's log that name the process or its devices."""
    scheduler: str = ""
    """What Slurm, Kubernetes or the cloud said: a state such as `PREEMPTED`, a notice, a reason."""
    silent_s: float | None = None
    """How long there had been no progress, if the rank was ended for that."""
    hang: str = ""
    """What the analysis of the hang found."""
