"""`headway publish` in processes that have imported torch already, down to the publisher that does the work.

A warm server imports this module, and runs `main`: the real command line. Every Python that it starts by `subprocess`
is forked from it, with its own session, pipes, signals and exit code. Only the start of an interpreter and its imports
are left out, and what the kernel remembers of them: `/proc/PID/cmdline` and `/proc/PID/environ` are the server's.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NoReturn

import warm

PROGRAM = [sys.executable, "-c", "import forking; forking.main()"]
IMPORTS = (
    "forking", "safetensors", "torch.distributed.checkpoint", "torch.export._trace", "torch.export.pt2_archive",
    "torch._inductor.ir", "torch.testing", "headway.cli.publish", "headway.observe.summary", "headway.publish.checks",
    "headway.publish.publisher", "headway.publish.ready", "headway.publish.shards", "headway.publish.weights",
    "headway.run",
    *(name for name in ("s3fs", "aiobotocore.session") if find_spec(name.partition(".")[0])),
)  # fmt: skip
"""`headway`, to be run by `warm`, and what the server imports for it."""


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Forks this process for `[sys.executable, …]`, and starts everything else as usual."""

    def _execute_child(self, *given: Any) -> None:
        args, _, preexec_fn, _, _, cwd, env, _, _, _, p2cread, _, _, c2pwrite, _, errwrite, *rest = given
        if args[0] != sys.executable:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        streams = [os.dup(own if theirs == -1 else theirs) for own, theirs in enumerate((p2cread, c2pwrite, errwrite))]
        program = {"argv": list(args), "env": {**(os.environ if env is None else env)}, "cwd": cwd or ".",
                   "session": rest[5]}  # fmt: skip
        self.pid = os.fork()
        if self.pid == 0:
            _run(program, streams, preexec_fn)
        self._child_created = True
        for stream in streams:
            os.close(stream)
        self._close_pipe_fds(*given[10:16])  # type: ignore[attr-defined]


def _run(program: dict[str, Any], streams: list[int], preexec_fn: Any) -> NoReturn:
    """Run a program as a new interpreter would."""
    try:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        warm._take(program, streams)
        _let_go_of_files()
        if preexec_fn:
            preexec_fn()
        warm.run_and_exit(program["argv"])
    finally:
        os._exit(1)


def _let_go_of_files() -> None:
    """Close what a new interpreter would not have, such as locks. The numbers stay taken: objects still have them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with suppress(OSError):  # the listing's own
                os.fstat(number)
                os.dup2(nothing, number)


def main() -> None:
    """Run `headway` with the words of the command line."""
    from headway.cli import main as headway_main

    subprocess.Popen = Popen  # type: ignore[misc]
    headway_main(prog_name="headway")
