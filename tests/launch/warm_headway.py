"""The real `headway`, for a process that has imported torch already and has headway's hooks in place (see `hooked`).

- `exec python script …` runs the script in this process instead of executing a new Python.
- `run …` forks its first zygote from this process instead of starting a new Python. All other processes are real ones.

Typical use::

    warm.run([sys.executable, "warm_headway.py", "exec", "python", "train.py"], first=["hooked"])
"""

import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

SITE = os.path.join("instrument", "site")


def become(program: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run the script of `python script …`, measured."""
    from headway.instrument import start

    _take(environ)
    start.begin_anew()
    sys.argv = list(command[1:])
    sys.path[0] = os.path.dirname(os.path.abspath(command[1]))
    runpy.run_path(command[1], run_name="__main__")


class Embryo:
    """A child of the supervisor that becomes its first zygote. It is forked before the supervisor does anything."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            self._line.close()
            self._wait(theirs)
        theirs.close()

    def spawn_python(self, code: str, words: Sequence[str], environ: Mapping[str, str], channel: Any) -> int:
        """Stand in for `crew._spawn_python`, once."""
        from headway.launch import crew

        crew._spawn_python = spawn_python
        request = repr((code, [str(word) for word in words], dict(environ))).encode()
        with self._line as line:
            socket.send_fds(line, [len(request).to_bytes(8)], [channel.fileno()])
            line.sendall(request)
        channel.close()
        return self.pid

    def _wait(self, line: socket.socket) -> None:
        os.setsid()
        head, fds, _, _ = socket.recv_fds(line, 8, 1)
        if not fds:
            os._exit(0)
        with line, line.makefile("rb") as file:
            code, words, environ = eval(file.read(int.from_bytes(head)))
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != fds[0]:
                with suppress(OSError):
                    os.close(int(name))
        words[0] = str(fds[0])
        for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        _take(environ)
        sys.argv[:] = ["-c", *words]
        sys.orig_argv[:] = [sys.executable, "-u", "-c", code, *words]
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__})


def _take(environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    given = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    new = [folder for folder in given if not folder.endswith(SITE) and folder not in sys.path]
    sys.path[1:] = new + [folder for folder in sys.path[1:] if not folder.endswith(SITE)]


if __name__ == "__main__":
    tempfile.tempdir = None  # another folder than the server's, if TMPDIR says so
    if sys.argv[1] == "run":
        embryo = Embryo()
        from headway.launch import crew

        spawn_python, crew._spawn_python = crew._spawn_python, embryo.spawn_python
    else:
        from headway.cli import exec as execution

        execution._become = become  # type: ignore[assignment]
    from headway.cli import main

    sys.argv[0] = "headway"
    main()
