"""What every worker is doing at this moment: its collectives and its Python stacks, asked for from outside.

A worker that has called `answer` can be asked at any time, whatever its threads wait for. Standard library alone.

- Collectives: a thread that sleeps in `read` on a fifo writes down torch's Flight Recorder when asked. It needs the
  GIL, which a thread that waits in a collective has released.
- Stacks: py-spy reads them from outside, where it is installed and permitted. Else a signal makes faulthandler write
  them, from C, without the GIL. A process that is stopped, or that sleeps in the kernel, cannot: its state is told.
"""

import contextlib
import faulthandler
import json
import linecache
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headway import sessions

SIGNAL = signal.SIGRTMIN + 11
"""Asks for stacks. glibc keeps the two below SIGRTMIN for itself; torch, NCCL, CUDA and py-spy use no real-time signal.
Unhandled, it kills: it is sent only to a process that the kernel says handles it."""

LOOK_S = 0.02
"""How often the supervisor sees whether an answer is there."""

KEPT = 64
"""How many collectives of each group a rank tells: enough to see where ranks parted, few for a thousand ranks."""

_STATES = {"D": "waits in the kernel", "T": "is stopped", "t": "is held by a debugger", "Z": "is dead", "X": "is dead"}
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in ', re.MULTILINE)

Entry = dict[str, Any]
"""One collective, with torch's own keys, and `ranks`: the global ranks of its group, where they are known."""


@dataclass(frozen=True, kw_only=True)
class Dump:
    """What one rank was doing."""

    rank: int
    flight: list[Entry] | None = None
    """Its latest collectives, oldest first; None if it could not say (no torch.distributed, or the GIL is held)."""
    stacks: str = ""
    """Its threads' stacks, innermost call first and main thread last, with the source lines."""
    how: Literal["py-spy", "faulthandler", "none"] = "none"
    state: str = ""
    """What the kernel says of a process that cannot run, such as "is stopped"; else empty."""


# --- in the worker ---------------------------------------------------------------------------------------------------


def answer(folder: Path, rank: int) -> None:
    """Makes this process able to say what it is doing. To be called once, before the user's script."""
    stacks = os.open(_stacks_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(SIGNAL, file=stacks, all_threads=True)
    fifo = _fifo(folder, rank)
    with contextlib.suppress(FileExistsError):  # the rank was here before, in an earlier attempt
        os.mkfifo(fifo, 0o600)
    asked = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)  # for writing too: the end of the one who asks is not the fifo's
    # Blocked in `read`, it holds no lock, and so leaves none locked in a process that is forked meanwhile.
    threading.Thread(target=_answer_each, args=(asked, folder, rank), name="headway-dumps", daemon=True).start()


def _answer_each(asked: int, folder: Path, rank: int) -> None:
    with contextlib.suppress(OSError):  # the script has closed all files that it did not open
        while number := os.read(asked, 8):
            with contextlib.suppress(Exception):  # the trainer goes on, and whoever asked sees that nothing came
                text = json.dumps({"asked": int.from_bytes(number), "entries": collectives()})
                _replace(_flight_file(folder, rank), text)


def _replace(file: Path, text: str) -> None:
    """Writes a file that is never seen half written."""
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)


def collectives() -> list[Entry] | None:
    """This process's latest collectives as torch's Flight Recorder has them, oldest first; None if it has none.

    The one place that knows torch's private names. The calls' own stacks are left out: to name their lines, torch would
    import its compiler, here, and break the import of it that the main thread may be in.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of every backend; before there was that, of NCCL alone
    dump: Callable[..., bytes] | None = next((getattr(c10d, name) for name in names if hasattr(c10d, name)), None)
    if dump is None:
        return None
    trace = json.loads(dump(includeCollectives=True, onlyActive=False))
    members = {name: _ranks(group) for name, group in trace.get("pg_config", {}).items()} | _members()
    return [{**entry, "ranks": members.get(entry["process_group"][0])} for entry in _latest(trace.get("entries", []))]


def _latest(entries: list[Entry]) -> list[Entry]:
    """The latest of each group, oldest first."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry["process_group"][0]].append(entry)
    return sorted((it for group in groups.values() for it in group[-KEPT:]), key=lambda entry: int(entry["record_id"]))


def _ranks(group: Mapping[str, str]) -> list[int] | None:
    return json.loads(group["ranks"]) or None


def _members() -> dict[str, list[int]]:
    """The groups' global ranks as Python's side of torch knows them: gloo gives the recorder none."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names, ranks = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    return {names[group]: sorted(members) for group, members in list(ranks.items()) if group in names}


# --- in the supervisor -----------------------------------------------------------------------------------------------


def collect(workers: Mapping[int, int], folder: Path, timeout_s: float) -> dict[int, Dump]:
    """What every worker (rank → process id) is doing. All are asked at once; what is not there in time is left out."""
    now = time.monotonic()
    flights = _flights(workers, folder, now + timeout_s / 3)
    states = {rank: _state(pid) for rank, pid in workers.items()}
    seen = _seen_from_outside(workers, now + timeout_s * 2 / 3)
    told = _told_by_signal({rank: pid for rank, pid in workers.items() if rank not in seen}, folder, now + timeout_s)
    dumps = {}
    for rank in workers:
        how: Literal["py-spy", "faulthandler", "none"] = "py-spy" if rank in seen else "faulthandler"
        stacks = with_source(seen.get(rank) or told.get(rank, ""))
        how = how if stacks else "none"
        dumps[rank] = Dump(rank=rank, flight=flights.get(rank), stacks=stacks, how=how, state=states[rank])
    return dumps


def _flights(workers: Mapping[int, int], folder: Path, deadline: float) -> dict[int, list[Entry] | None]:
    number = time.monotonic_ns()
    waiting = {rank for rank in workers if _ask(_fifo(folder, rank), number)}
    flights: dict[int, list[Entry] | None] = {}
    for _ in _looks_until(deadline):
        for rank in waiting - flights.keys():
            with contextlib.suppress(OSError):  # not there yet
                told = json.loads(_flight_file(folder, rank).read_text())
                if told["asked"] == number:
                    flights[rank] = told["entries"]
        if waiting == flights.keys():
            break
    return flights


def _ask(fifo: Path, number: int) -> bool:
    """Whether a worker listens at the fifo, and was asked."""
    try:
        asked = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # ENOENT: it never could answer; ENXIO: it is gone
        return False
    try:
        return stat.S_ISFIFO(os.fstat(asked).st_mode) and os.write(asked, number.to_bytes(8)) == 8
    except BlockingIOError:  # it was asked thousands of times and never answered
        return False
    finally:
        os.close(asked)


def _looks_until(deadline: float) -> Iterator[None]:
    """Yields now and then, the last time at the deadline."""
    yield
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(LOOK_S, left))
        yield


# --- stacks: py-spy --------------------------------------------------------------------------------------------------


def _seen_from_outside(workers: Mapping[int, int], deadline: float) -> dict[int, str]:
    """The stacks of the workers that py-spy can read: none where it is not installed or not permitted."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if program is None:
        return {}
    running = {
        rank: subprocess.Popen(
            [program, "dump", "--pid", str(pid), "--nonblocking", "--json"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for rank, pid in workers.items()
    }  # fmt: skip
    outputs = {rank: _output(process, deadline) for rank, process in running.items()}
    return {rank: text for rank, output in outputs.items() if (text := stacks_of_py_spy(output))}


def _output(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    try:
        return process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: it may itself wait in the kernel, for the process that it reads
        return b""


def stacks_of_py_spy(output: bytes) -> str:
    """py-spy's JSON as faulthandler would have written it, main thread last; empty if it is not to be read.

    Unpaused processes change while they are read: a torn reading is no JSON, or has no frames.
    """
    try:
        threads = json.loads(output)
        threads.sort(key=lambda thread: thread["os_thread_id"] == thread["pid"])
        frames = any(thread["frames"] for thread in threads)
        return "\n".join(map(_stack_of_py_spy, threads)) if frames else ""
    except (ValueError, KeyError, TypeError):
        return ""


def _stack_of_py_spy(thread: Mapping[str, Any]) -> str:
    frames = [f'  File "{it["filename"]}", line {it["line"]} in {it["name"]}' for it in thread["frames"]]
    return "\n".join([f"Thread 0x{thread['thread_id']:016x} (most recent call first):", *frames])


# --- stacks: faulthandler --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    pid: int
    file: Path
    size: int

    def text(self) -> str:
        with self.file.open("rb") as file:
            file.seek(self.size)
            return file.read().decode("utf-8", "replace").strip()


def _told_by_signal(workers: Mapping[int, int], folder: Path, deadline: float) -> dict[int, str]:
    """The stacks that workers wrote themselves, each from the moment it was asked."""
    asked = {}
    for rank, pid in workers.items():
        file = _stacks_file(folder, rank)
        # One that has replaced itself by `exec` handles the signal no more, and would be killed by it.
        if sessions.handles(pid, SIGNAL) and _has_open(pid, file):
            asked[rank] = _Asked(pid, file, file.stat().st_size)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)
    for _ in _looks_until(deadline):
        if all(map(_has_told, asked.values())):
            break
    return {rank: one.text() for rank, one in asked.items()}


def _has_open(pid: int, file: Path) -> bool:
    """Whether a worker still has the file to write to: had it closed all, the stacks could go to one of the user's."""
    try:
        folder = f"/proc/{pid}/fd"
        return any(
            os.path.samefile(f"{folder}/{fd}", file) for fd in os.listdir(folder) if os.path.exists(f"{folder}/{fd}")
        )
    except OSError:
        return False


def _has_told(asked: _Asked) -> bool:
    """Whether a worker has written all: the kernel blocks a signal while the main thread handles it, and only then."""
    signals = _signals(asked.pid)
    open_yet = signals.get("ShdPnd", 0) | signals.get("SigPnd", 0) | signals.get("SigBlk", 0)
    is_over = not open_yet >> (SIGNAL - 1) & 1
    return not signals or (is_over and asked.file.stat().st_size > asked.size)


def _signals(pid: int) -> dict[str, int]:
    """The kernel's masks of a process's main thread, by name; nothing of a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line[:6]: int(line[7:], 16) for line in lines if line[:6] in ("SigPnd", "ShdPnd", "SigBlk")}


def _state(pid: int) -> str:
    """What keeps a process from running, in a few words; empty if nothing does."""
    letter = _read(f"/proc/{pid}/stat").rpartition(")")[2].strip()[:1] or "X"
    if letter != "D":
        return _STATES.get(letter, "")
    # Where in the kernel tells disk from network file system. The call's number is there if that is hidden.
    where, call = _read(f"/proc/{pid}/wchan"), _read(f"/proc/{pid}/syscall").partition(" ")[0]
    return f"{_STATES[letter]}: {where}" if where not in ("", "0") else f"{_STATES[letter]}: system call {call}"


def _read(file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError:
        return ""


def with_source(stacks: str) -> str:
    """Stacks with each frame's line of source under it, where that can be read: it tells a sleep from a lock."""
    linecache.checkcache()
    return "\n".join(_lines_with_source(stacks.splitlines()))


def _lines_with_source(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield line
        if (frame := _FRAME.match(line)) and (source := linecache.getline(frame["file"], int(frame["line"])).strip()):
            yield f"    {source}"


# --- names of files --------------------------------------------------------------------------------------------------


def _stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}"


def _flight_file(folder: Path, rank: int) -> Path:
    return folder / f"flight-{rank}"


def _fifo(folder: Path, rank: int) -> Path:
    return folder / f"ask-{rank}"
