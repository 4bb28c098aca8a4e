"""Where a file cannot be allocated or mapped, the journal is written plainly, with the same guarantees."""

import errno
import itertools
import mmap
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from journals import REFUSALS, apart, finished_steps, numbers, read, refuse, write_as

from headway.events.journal import PlainFile, Writer, is_being_written
from headway.events.recorder import Recorder
from headway.events.vocabulary import Mark, encode

MAPPED = {"with allocation by the C library"}


def write_much(path: Path, how: str) -> None:
    write_as(how)
    writer = Writer(path)
    recorder = Recorder(writer)
    for step, _ in recorder.steps(range(1000)):
        recorder.mark("m" * (step % 100), n=step)
    assert isinstance(writer._memory, mmap.mmap if how in MAPPED else PlainFile)
    recorder.close()


@pytest.mark.parametrize("how", REFUSALS)
def test_whatever_the_kernel_refuses_all_records_and_steps_are_there(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.hwj"
    assert apart(write_much, path, how) == 0
    batch = read(path)
    assert batch.problems == []
    assert numbers(batch.records) == list(range(1000))
    assert finished_steps(batch) == 1000
    assert path.stat().st_size == batch.offset + len(batch.raw)
    assert path.stat().st_mode & 0o777 == 0o600


def write_and_tell(path: Path, how: str, grown: "multiprocessing.synchronize.Event") -> None:
    write_as(how)
    writer = Writer(path)
    for n in itertools.count():
        writer.append(encode(Mark(t_ns=n, name="m", attrs={"n": n})))
        if n == 1000:
            grown.set()


@pytest.mark.parametrize("how", REFUSALS)
def test_its_process_is_seen_to_live_and_to_be_killed(tmp_path: Path, how: str) -> None:
    path, spawn = tmp_path / "a.hwj", multiprocessing.get_context("spawn")
    grown = spawn.Event()
    process = spawn.Process(target=write_and_tell, args=(path, how, grown), daemon=True)
    process.start()
    assert grown.wait(120)
    assert is_being_written(path)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not is_being_written(path)
    batch = read(path)
    assert batch.problems == []
    assert numbers(batch.records) == list(range(len(batch.records)))
    assert len(batch.records) > 1000


def step_on_after_the_end(path: Path) -> None:
    write_as("plain")
    recorder = Recorder(Writer(path))
    loop = recorder.steps(range(10))
    next(loop)
    recorder.close()
    precious = path.with_name("precious")
    with open(precious, "w+b") as file:  # gets the number of the descriptor that was just closed
        for _ in loop:
            recorder.mark("late")
        assert file.seek(0, os.SEEK_END) == 0


def test_a_closed_journal_never_writes_to_the_file_that_got_its_descriptor(tmp_path: Path) -> None:
    assert apart(step_on_after_the_end, tmp_path / "a.hwj") == 0
    assert (tmp_path / "precious").read_bytes() == b""


def interrupt_the_mapping(path: Path) -> None:
    """The kernel stops mapping halfway, while a signal handler writes too."""
    writer = Writer(path)
    told = itertools.count()

    def tell(*_: object) -> None:
        for _ in range(20):
            writer.append(encode(Mark(t_ns=0, name="handler", attrs={"n": next(told)})))
        signal.setitimer(signal.ITIMER_REAL, 0.0001)

    signal.signal(signal.SIGALRM, tell)
    signal.setitimer(signal.ITIMER_REAL, 0.0001)
    written = 0
    while written < 4000 or not isinstance(writer._memory, PlainFile):  # how much still fits depends on the handler
        if written == 2000:
            refuse("mremap", errno.ENOMEM)
        writer.append(encode(Mark(t_ns=0, name="main", attrs={"n": written})))
        written += 1
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    batch = read(path)
    assert batch.problems == []
    for name, count in (("main", written), ("handler", next(told))):
        assert numbers(record for record in batch.records if record.name == name) == list(range(count))


def test_a_file_that_stops_being_mapped_goes_on_plainly_even_under_signals(tmp_path: Path) -> None:
    assert apart(interrupt_the_mapping, tmp_path / "a.hwj") == 0
