"""Any text is classified, in time that grows with its size and memory that does not."""

import time
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.recover import CATEGORIES, Classifier, Evidence, classify
from headway.recover.known import RULES

explain = Classifier().explain

FRAGMENTS = st.sampled_from(
    [word for rule in RULES for message in rule.messages[::5] for word in message.words]
    + [
        "Traceback (most recent call last):\n",
        "\nDuring handling of the above exception, another exception occurred:\n",
    ]
    + ["\r", "\n", "\x1b[31m", "[rank3]: ", "ValueError: x", '  File "a.py", line 3\n', "\x00", "\ud800", "(", "[", "]"]
)
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=20)), max_size=30).map("".join)


@given(TEXTS)
def test_any_text_has_a_verdict(text: str) -> None:
    verdict = explain(text)
    assert verdict.category in CATEGORIES or (verdict.category, verdict.line) == ("unknown", "")
    assert explain(text) == verdict


@given(TEXTS, TEXTS, st.integers(-64, 255))
def test_any_evidence_has_a_verdict(exception: str, kernel: str, exit_code: int) -> None:
    evidence = Evidence(rank=0, exception=exception, kernel=kernel, error_file=kernel, exit_code=exit_code)
    verdict = classify(evidence)
    assert verdict.category in CATEGORIES or verdict.category == "unknown"
    assert classify(evidence) == verdict


def test_bytes_that_are_no_text_do_not_matter() -> None:
    log = (b"\xff\xfe\x80 noise \xc3\n" * 5 + b"OSError: [Errno 24] Too many open files\xff\n").decode(errors="replace")
    assert explain(log).category == "fd_limit"


def seconds_for(text: str) -> float:
    """CPU seconds, which other work on the machine hardly changes."""

    def once() -> float:
        begin = time.thread_time()
        explain(text)
        return time.thread_time() - begin

    return min(once() for _ in range(3))


@pytest.mark.parametrize(
    "unit",
    ["error ", "loss nan ", "node ", "connection ", "a", " ", "(", "checkpoint ", "rank 3 ", "timed out ", "\x1b["],
)
def test_a_line_of_a_megabyte_takes_no_longer_than_one_that_is_cut(unit: str) -> None:
    short, long = unit * (8_000 // len(unit)), unit * (1_000_000 // len(unit))
    assert seconds_for(long) < 50 * seconds_for(short) + 0.5  # quadratic would be 15,000


def test_twice_the_log_takes_about_twice_the_time() -> None:
    lines = [
        f"[rank{n % 8}]: item{n} of shard {n * 7919} failed its check, error kept in bucket-{n}\n" for n in range(8_000)
    ]
    half, whole = "".join(lines[:4_000]), "".join(lines)
    assert seconds_for(whole) < 6 * seconds_for(half)


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_log() -> None:
    def lines(count: int) -> Iterator[str]:
        for number in range(count):
            yield f"step {number} loss {1 / (number + 1):.6f} host n{number % 977} took {number % 613} ms\n"
        yield "OSError: [Errno 28] No space left on device\n"

    def peak(count: int) -> int:
        tracemalloc.start()
        try:
            assert explain(lines(count)).line_number == count + 1
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    explain("")
    assert peak(60_000) < 2 * peak(30_000) + 1_000_000
