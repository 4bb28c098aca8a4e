"""A program on several ranks, each forked from a server of warm processes.

The ranks have the environment that torchrun gives them, and its store in this process. Use it where the program is
under test. Where the launcher is, use the real torchrun.

Typical use::

    done = ranks.run(2, ["train.py", "--steps", "8"], env=os.environ | {"HEADWAY_HOME": str(home)})
    assert done.returncode == 0, done.stderr
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

import warm

PATIENCE_S = 500.0
IMPORTS = ("pytest", "inductor", *(["torchrec"] if find_spec("torchrec") else []))
"""What programs on ranks need beside torch. Those that name it share a server."""


def run(count: int, words: Sequence[str | os.PathLike[str]], *, env: Mapping[str, str] | None = None, **settings: Any
        ) -> "subprocess.CompletedProcess[str]":  # fmt: skip
    """Run `python words…` on each rank, and return what all of them printed. If one fails, the others are killed, and
    its exit code is returned. `settings` go to `warm.Popen`."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {**(os.environ if env is None else env), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    environ |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    command = [sys.executable, *words]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        started = [
            warm.Popen(command, env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=out, stderr=err,
                       **settings)
            for rank in range(count)
        ]  # fmt: skip
        try:
            code = _wait(started)
        finally:
            for process in started:
                process.kill()
                process.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def _wait(started: Sequence["subprocess.Popen[str]"]) -> int:
    """The exit code of the first process to fail; 0 if all have ended well."""
    until = time.monotonic() + PATIENCE_S
    while True:
        codes = [process.poll() for process in started]
        if any(codes):
            return next(code for code in codes if code)
        if None not in codes:
            return 0
        assert time.monotonic() < until, "the ranks do not end"
        time.sleep(0.02)
