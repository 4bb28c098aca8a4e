"""What the tests of the journal share: reading it back, code in processes of its own, and a kernel that says no."""

import ctypes
import errno
import itertools
import json
import multiprocessing
import os
import platform
import random
import signal
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headway.accounting.attempts import Instant
from headway.accounting.ledger import JobAccounts, Ledger
from headway.events.clock import Clock
from headway.events.journal import Batch, Follower, Writer
from headway.events.recorder import Recorder
from headway.events.vocabulary import KNOWN_NAMES, Mark, Name, Process, Record, Saved, SpanBegin, SpanEnd, StepRun

HOW_TO_WRITE = ("mapped", "plain")
"""Memory that the file is mapped to, and plain writes where the kernel refuses to map it."""

REFUSALS = {
    "plain": ("mmap", errno.ENODEV),
    "without allocation": ("fallocate", errno.ENOSYS),
    "with allocation by the C library": ("fallocate", errno.EOPNOTSUPP),
    "mapped, then plain": ("mremap", errno.ENOMEM),
}
"""What file systems and limits are known to refuse, as ways to write."""

ACK = struct.Struct("<q")


def read(path: Path) -> Batch:
    """All there is in a journal."""
    return Follower(path).poll()


def numbers(records: Iterable[Record]) -> list[int]:
    """The attribute `n` of each mark."""
    return [record.attrs["n"] for record in records if isinstance(record, Mark)]


def named_spans(records: Iterable[Record]) -> list[tuple[str, SpanBegin]]:
    """Each span's name, as it was last given to its number, and its begin."""
    names = {number: name for name, number in KNOWN_NAMES.items()}
    spans = []
    for record in records:
        if isinstance(record, Name):
            names[record.number] = record.text
        elif isinstance(record, SpanBegin):
            spans.append((names[record.name], record))
    return spans


def finished_steps(batch: Batch) -> int:
    """The steps that runs and cell account for; the runs must follow one another."""
    done = 0
    for run in (record for record in batch.records if isinstance(record, StepRun)):
        assert (run.first, run.count) == (done, run.next - run.first)
        done = run.next
    if batch.cell:
        assert batch.cell.count == batch.cell.next - batch.cell.first
    return max(done, batch.cell.next if batch.cell else 0)


def ledger_of(*batches: Batch) -> Ledger | None:
    """The ledger of processes that are all gone; whatever they wrote, its parts add up and none is negative."""
    accounts = JobAccounts()
    for number, batch in enumerate(batches):
        accounts.add(str(number), batch.records, batch.cell, batch.problems)
    ledger = accounts.ledger(Instant("boot-0", 0, 0))
    if ledger is not None:
        for sums in (ledger.sums, *map(ledger.rank_sums, ledger.ranks)):
            assert sum(sums.values()) == ledger.wall_ns
            assert min(sums.values(), default=0) >= 0
    return ledger


def some_process(clock: Clock) -> Process:
    """The first record of a journal."""
    now = clock.now_ns()
    return Process(t_ns=now, wall_ns=now, boot="boot-0", node="n", pid=os.getpid(), job="j", started_ns=now)


def apart(function: Callable[..., object], *args: Any) -> int:
    """Runs a function in a process of its own; returns its exit code, which is negative if a signal ended it."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"{function.__name__} did not come to an end")
    return process.exitcode


# --- a kernel that says no -------------------------------------------------------------------------------------------

_CALLS = {
    "x86_64": {"mmap": 9, "mremap": 25, "fallocate": 285},
    "aarch64": {"mmap": 222, "mremap": 216, "fallocate": 47},
}


def refuse(call: str, error: int) -> None:
    """From here on the kernel refuses this process a system call, as some file systems do; `mmap` only if shared."""
    load, equal, has_bits, result, allow = 0x20, 0x15, 0x45, 0x06, 0x7FFF0000
    program = [(load, 0, 0, 0), (equal, 0, 3, _CALLS[platform.machine()][call]), (load, 0, 0, 16 + 3 * 8),
               (has_bits, 0, 1, 1) if call == "mmap" else (has_bits, 0, 0, 0),
               (result, 0, 0, 0x00050000 | error), (result, 0, 0, allow)]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in program))
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filter_, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no system call filter")


def write_as(how: str) -> None:
    """Makes every journal of this process be written in one of these ways."""
    if how in REFUSALS:
        refuse(*REFUSALS[how])


# --- kills -----------------------------------------------------------------------------------------------------------


class RestlessClock(Clock):
    """Jumps ahead now and then, so that some steps are unlike the others."""

    def __init__(self) -> None:
        self._reads = itertools.count(1)

    def now_ns(self) -> int:
        """The monotonic clock, and 0.3 s for every 97 times it was read."""
        return time.monotonic_ns() + next(self._reads) // 97 * 300_000_000


def write_until_killed(path: Path, pipe: int) -> None:
    """Writes all kinds of records, and tells the number of each step once its records are written."""
    clock = RestlessClock()
    recorder = Recorder(Writer(path), clock)
    recorder.record(some_process(clock))
    for step, _ in recorder.steps(itertools.count()):
        recorder.mark("mark", n=step)
        recorder.record(Saved(t_ns=clock.now_ns(), step=step, path="x" * (step % 50)))
        with recorder.span("evaluation", n=step):
            pass
        os.write(pipe, ACK.pack(step))


def kill_many(folder: Path, count: int, seed: int, how: str) -> None:
    """Forks writers and kills each at a random instant; leaves their journals and what each had acknowledged."""
    write_as(how)
    chance = random.Random(seed)
    acknowledged = {}
    for number in range(count):
        path = folder / f"{seed}-{number}.hwj"
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            try:
                write_until_killed(path, theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        # One in ten lives until its journal has grown, however busy the machine is.
        steps = 400 if number % 10 == 9 else int(chance.random() < 0.8)
        acks = b""
        while len(acks) < steps * ACK.size:
            acks += os.read(ours, 1 << 16)
        time.sleep(chance.random() ** 2 * 0.006)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        while part := os.read(ours, 1 << 16):
            acks += part
        os.close(ours)
        acknowledged[path.name] = ACK.unpack(acks[-ACK.size :])[0] if acks else -1
    (folder / f"{seed}.json").write_text(json.dumps(acknowledged))


def check_killed(batch: Batch, acknowledged: int) -> None:
    """Every acknowledged record is there and whole; every acknowledged step is counted, and at most one beyond."""
    assert batch.problems == []
    told = [record for record in batch.records if isinstance(record, Mark | Saved | SpanBegin | SpanEnd)]
    assert [type(record) for record in told] == list(
        itertools.islice(itertools.cycle((Mark, Saved, SpanBegin, SpanEnd)), len(told))
    )
    assert len(told) >= 4 * (acknowledged + 1)
    for number, record in enumerate(told):
        match record:
            case Mark() | SpanBegin():
                assert record.attrs == {"n": number // 4}
            case Saved():
                assert (record.step, len(record.path)) == (number // 4, number // 4 % 50)
    assert max(acknowledged, 0) <= finished_steps(batch) <= acknowledged + 1
