"""Threads, signal handlers and forked children around one journal: nothing is torn, nothing is lost, nobody waits."""

import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from journals import HOW_TO_WRITE, apart, finished_steps, named_spans, numbers, read, write_as

from headway.events.journal import Follower, Writer
from headway.events.recorder import Recorder
from headway.events.vocabulary import Mark, SpanEnd, encode

# --- threads ---------------------------------------------------------------------------------------------------------


def span_from_threads(path: Path, how: str) -> None:
    write_as(how)
    sys.setswitchinterval(1e-6)
    recorder = Recorder(Writer(path))
    together = threading.Barrier(8)

    def work(thread: int) -> None:
        for n in range(800):
            if n % 20 == 0:
                together.wait()
            for name in (f"all do {n}", f"thread {thread} does {n // 2}"):
                with recorder.span(name, said=name):
                    pass

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()


@pytest.mark.parametrize("how", HOW_TO_WRITE)
def test_spans_of_eight_threads_are_all_there_under_their_own_names(tmp_path: Path, how: str) -> None:
    assert apart(span_from_threads, tmp_path / "a.hwj", how) == 0
    batch = read(tmp_path / "a.hwj")
    assert batch.problems == []
    spans = named_spans(batch.records)
    assert len({begin.span for _, begin in spans}) == len(spans) == 8 * 800 * 2
    ends = [record.span for record in batch.records if isinstance(record, SpanEnd)]
    assert sorted(ends) == sorted(begin.span for _, begin in spans)
    assert all(begin.attrs == {"said": name} for name, begin in spans)


# --- signal handlers -------------------------------------------------------------------------------------------------


def record_from_a_handler(path: Path, how: str) -> None:
    write_as(how)
    recorder = Recorder(Writer(path))
    told = itertools.count()

    def tell(*_: object) -> None:
        with recorder.span("handler", n=next(told)):
            pass
        signal.setitimer(signal.ITIMER_REAL, 0.00003)

    signal.signal(signal.SIGALRM, tell)
    signal.setitimer(signal.ITIMER_REAL, 0.00003)
    for step, _ in recorder.steps(range(20_000)):
        recorder.mark("main", n=step)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    recorder.close()
    batch = read(path)
    assert batch.problems == []
    assert numbers(batch.records) == list(range(20_000))
    assert finished_steps(batch) == 20_000
    spans = named_spans(batch.records)
    assert len(spans) > 10, "the signals did not arrive"
    assert [(name, begin.attrs) for name, begin in spans] == [("handler", {"n": n}) for n in range(next(told))]


@pytest.mark.parametrize("how", ["mapped", pytest.param("plain", marks=pytest.mark.thorough)])
def test_a_signal_handler_may_record_while_a_record_is_being_written(tmp_path: Path, how: str) -> None:
    assert apart(record_from_a_handler, tmp_path / "a.hwj", how) == 0


def raise_from_a_handler(path: Path, how: str) -> None:
    write_as(how)
    writer = Writer(path)
    chance, written, interrupted = random.Random(3), [], 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    n = 0
    while interrupted < 2000 or n < 20_000:
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.00002, 0.0001))
            while True:
                n += 1
                if writer.append(encode(Mark(t_ns=0, name="m", attrs={"n": n}))):
                    written.append(n)
        except KeyboardInterrupt:
            interrupted += 1
    last = threading.Thread(target=writer.append, args=(encode(Mark(t_ns=0, name="m", attrs={"n": -1})),), daemon=True)
    last.start()
    last.join(100)
    assert not last.is_alive(), "an interrupted append left the lock behind"
    batch = read(path)
    assert batch.problems == []
    there = numbers(batch.records)
    assert there[-1] == -1
    assert set(written) <= set(there)
    assert len(there) == len(set(there))


@pytest.mark.parametrize("how", HOW_TO_WRITE)
def test_an_exception_out_of_a_signal_handler_hides_nothing_that_is_written_later(tmp_path: Path, how: str) -> None:
    assert apart(raise_from_a_handler, tmp_path / "a.hwj", how) == 0


def end_in_a_handler(path: Path) -> None:
    recorder = Recorder(Writer(path))

    def leave(*_: object) -> None:
        recorder.mark("leaving", n=-1)
        os._exit(7)

    signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    for n in itertools.count():
        recorder.mark("main", n=n)


def end_many_in_a_handler(folder: Path) -> None:
    for attempt in range(50):
        assert by_os_fork(lambda path=folder / f"{attempt}.hwj": end_in_a_handler(path)) == 7


def test_what_a_handler_records_before_it_ends_the_process_is_there(tmp_path: Path) -> None:
    assert apart(end_many_in_a_handler, tmp_path) == 0
    for path in tmp_path.iterdir():
        batch = read(path)
        assert batch.problems == []
        assert numbers(batch.records)[-1] == -1


# --- forks -----------------------------------------------------------------------------------------------------------


def by_os_fork(child: Callable[[], None]) -> int:
    pid = os.fork()
    if not pid:
        try:
            child()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def by_multiprocessing(child: Callable[[], None]) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode


FORKS = {"os.fork": by_os_fork, "multiprocessing": by_multiprocessing}


def fork_inside_a_loop(path: Path, how: str, fork: str) -> None:
    write_as(how)
    recorder = Recorder(Writer(path))
    loop = recorder.steps(range(1000))

    def child() -> None:
        with recorder.span("child"):
            recorder.mark("child", n=-1)
        for _ in loop:
            recorder.mark("child", n=-1)
        for _ in recorder.steps(range(1000)):
            pass
        recorder.close()

    for step, _ in loop:
        recorder.mark("parent", n=step)
        if step == 500:
            with recorder.span("around the fork"):
                assert FORKS[fork](child) == 0
    for n in range(1000, 3000):  # far into the pages that a child's close would have cut off
        recorder.mark("parent", n=n)
    recorder.close()
    batch = read(path)
    assert batch.problems == []
    assert numbers(batch.records) == list(range(3000))
    assert finished_steps(batch) == 1000
    assert [name for name, _ in named_spans(batch.records)] == ["around the fork"]


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("how", HOW_TO_WRITE)
def test_a_forked_child_writes_nothing_to_its_parents_journal(tmp_path: Path, how: str, fork: str) -> None:
    assert apart(fork_inside_a_loop, tmp_path / "a.hwj", how, fork) == 0


def fork_while_others_write(path: Path) -> None:
    sys.setswitchinterval(1e-6)
    recorder = Recorder(Writer(path))
    stop = threading.Event()

    def work() -> None:
        for n in itertools.count():
            recorder.mark("thread", n=n)
            if stop.is_set():
                return

    def child() -> None:
        with recorder.span("child"):
            recorder.mark("child")
        recorder.close()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        signal.alarm(100)
        assert by_os_fork(child) == 0
    stop.set()
    for thread in threads:
        thread.join()
    follower = Follower(path)
    assert {record.name for record in follower.poll().records if isinstance(record, Mark)} == {"thread"}


def test_a_child_forked_while_other_threads_write_does_not_wait_for_them(tmp_path: Path) -> None:
    assert apart(fork_while_others_write, tmp_path / "a.hwj") == 0
