"""`subprocess` for Python programs that would spend most of their time on importing torch.

One server per test run has imported torch and headway. It forks a child for each program, which runs it as `python`
would: a script, `-c` or `-m`, with its own arguments, environment, folder and standard streams. What else the program
imports can be named: programs that name the same modules share a server.

Use it where the program itself is under test. Where its start, its imports or an injected `sitecustomize` is, use the
real `subprocess`.

Typical use::

    import warm

    done = warm.run([sys.executable, "train.py"], capture_output=True, text=True)
    done = warm.run([sys.executable, "train_dlrm.py"], imports=["torchrec"])
    with warm.Popen([sys.executable, "-m", "headway", "run", "train.py"]) as job:
        job.send_signal(signal.SIGTERM)
"""

import atexit
import contextlib
import gc
import hashlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import shared

MODULES = ("torch", "torch.distributed", "torch._dynamo", "torch.distributed.elastic.agent.server.api", "headway")
ENDED = struct.Struct("=id")
"""A program's wait status, and its CPU seconds."""

cpu_s = 0.0
"""What the programs have used that this process has waited for."""


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A program forked from the server. Takes what `subprocess.Popen` takes, except shells and functions."""

    def __init__(
        self, args: Sequence[str | os.PathLike[str]], *, first: Sequence[str] = (), imports: Sequence[str] = (),
        **settings: Any,
    ) -> None:  # fmt: skip
        """`first` names modules that the server imports before torch, `imports` those that it imports after."""
        self._address = _server((*first, *MODULES, *imports))
        super().__init__(args, **settings)

    def _execute_child(self, *given: Any) -> None:
        args, _, preexec_fn, _, pass_fds, cwd, env, _, _, shell, p2cread, _, _, c2pwrite, _, errwrite, *rest = given
        assert not any((preexec_fn, pass_fds, shell)), "not for programs forked from a server"
        start_new_session = rest[5]
        program = {"argv": [os.fspath(arg) for arg in args], "env": {**(os.environ if env is None else env)},
                   "cwd": os.path.abspath(cwd or "."), "session": start_new_session}  # fmt: skip
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(self._address)
        body = json.dumps(program).encode()
        streams = [own if theirs == -1 else theirs for own, theirs in enumerate((p2cread, c2pwrite, errwrite))]
        socket.send_fds(self._line, [len(body).to_bytes(4)], streams)
        self._line.sendall(body)
        self.pid = int.from_bytes(_receive(self._line, 4))
        self._child_created = True
        self._close_pipe_fds(*given[10:16])  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        self._line.setblocking(not wait_flags & os.WNOHANG)
        try:
            status, used_s = ENDED.unpack(_receive(self._line, ENDED.size))
        except BlockingIOError:
            return 0, 0
        global cpu_s
        cpu_s += used_s
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
        if pid:
            self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run(args: list[str], *, timeout: float = 120, check: bool = False, input: Any = None, **settings: Any) -> Any:
    """`subprocess.run` with a program forked from the server."""
    if settings.pop("capture_output", False):
        settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **({"stdin": subprocess.PIPE} if input is not None else {}), **settings) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _server(modules: tuple[str, ...]) -> str:
    """The address of the server that has imported these modules. It lives as long as the test run."""
    name = "warm-" + hashlib.sha256(" ".join(modules).encode()).hexdigest()[:12]
    return shared.once(name, lambda: _start_server(str(shared.folder() / f"{name}.socket"), modules))


def _start_server(address: str, modules: tuple[str, ...]) -> str:
    ready, theirs = os.pipe()
    ours = [path for path in sys.path if path.startswith(os.path.dirname(__file__))]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(ours)}
    command = [sys.executable, __file__, address, str(theirs), *modules]
    with open(os.devnull, "r+") as null:
        subprocess.Popen(command, env=environ, pass_fds=[theirs], stdin=null, stdout=null, start_new_session=True)
    os.close(theirs)
    assert os.read(ready, 1), f"the server of warm processes did not start: {' '.join(command)}"
    os.close(ready)
    return address


def _receive(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        assert part, "the server of warm processes has died"
        data += part
    return data


# --- in the server ---------------------------------------------------------------------------------------------------


def serve(address: str, ready: int) -> dict[str, Any]:
    """Fork a child for each program. Returns in the children only, with the program to run."""
    listener, selector, lines = socket.socket(socket.AF_UNIX), selectors.DefaultSelector(), {}
    listener.bind(address)
    listener.listen(64)
    os.write(ready, b"1")
    os.close(ready)
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                line = listener.accept()[0]
                head, streams, _, _ = socket.recv_fds(line, 4, 3)
                program = json.loads(_receive(line, int.from_bytes(head)))
                child = os.fork()
                if not child:
                    _let_go(selector, [listener, line, *lines.values()])
                    _take(program, streams)
                    return program
                for stream in streams:
                    os.close(stream)
                line.sendall(child.to_bytes(4))
                pidfd = os.pidfd_open(child)
                lines[pidfd] = line
                selector.register(pidfd, selectors.EVENT_READ, child)
            else:
                _, status, used = os.wait4(key.data, 0)
                selector.unregister(key.fd)
                os.close(key.fd)
                with lines.pop(key.fd) as line:
                    try:
                        line.sendall(ENDED.pack(status, used.ru_utime + used.ru_stime))
                    except BrokenPipeError:
                        pass  # the test has not waited for it


def _let_go(selector: selectors.BaseSelector, sockets: list[socket.socket]) -> None:
    for fd in [key.fd for key in selector.get_map().values() if key.data is not None]:
        os.close(fd)
    selector.close()
    for each in sockets:
        each.close()


def _take(program: dict[str, Any], streams: list[int]) -> None:
    if program["session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    os.environ.clear()
    os.environ.update(program["env"])
    os.chdir(program["cwd"])
    random.seed()
    through = bool(os.environ.get("PYTHONUNBUFFERED")) or "-u" in program["argv"]
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        line = open(number, mode, encoding="utf-8", closefd=False, errors="surrogateescape")
        if mode == "w":
            line.reconfigure(write_through=through, line_buffering=through or number == 2)
        setattr(sys, name, line)
        setattr(sys, f"__{name}__", line)


def execute(argv: list[str]) -> None:
    """Run what follows `python` in a command line."""
    words = argv[1:]
    safe = False
    while words[0] in ("-u", "-P"):
        safe |= words.pop(0) == "-P"
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.environ.get("PYTHONPATH") else []
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[:0] = [] if safe else [""]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    elif words[0] == "-m":
        sys.argv = words[1:]
        sys.path[:0] = [] if safe else [os.getcwd()]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[:0] = [] if safe else [os.path.dirname(os.path.abspath(words[0]))]
        runpy.run_path(words[0], run_name="__main__")


def run_and_exit(argv: list[str]) -> NoReturn:
    """Run a program and exit as `python` would, except that torch's objects are not destroyed: that takes a second."""
    code, interrupted = 0, False
    try:
        execute(argv)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    import importlib

    for module in sys.argv[3:]:
        importlib.import_module(module)
    sys.path[:] = [path for path in sys.path if not path.startswith(os.path.dirname(__file__))]
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page of torch's objects
    run_and_exit(serve(sys.argv[1], int(sys.argv[2]))["argv"])
