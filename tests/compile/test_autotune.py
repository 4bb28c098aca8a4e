"""The smallest set of configs, against all sets there are."""

import json
import math
import threading
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.compile import autotune
from headway.compile.autotune import (
    Benchmark,
    Tables,
    Timings,
    configs_in,
    regret_of,
    saved_share,
    smallest,
    timings_in,
)
from headway.errors import InputError

MS = st.one_of(st.just(math.inf), st.floats(0.01, 100), st.sampled_from([0.0, 1.0, 1.04, 1.06, 2.0]))
ROWS = st.dictionaries(st.sampled_from("wxyz"), st.dictionaries(st.sampled_from("ABCDEFG"), MS, max_size=7), max_size=4)
REGRETS = st.sampled_from([0.0, 0.05, 0.5, 3.0])


def table(**rows: dict[str, float]) -> Timings:
    return Timings(kernel="k-1", kind="triton", ms=rows)


def does(timings: Timings, chosen: tuple[str, ...], regret: float) -> bool:
    """Whether a set keeps to the regret, told from the definition."""
    for row in timings.ms.values():
        best = min(row.values(), default=math.inf)
        if best < math.inf and all(row.get(config, math.inf) > best * (1 + regret) * (1 + 1e-12) for config in chosen):
            return False
    return True


def fewest(timings: Timings, regret: float) -> int:
    """How many the smallest set has, by trying all."""
    configs = timings.configs
    sizes = range(len(configs) + 1)
    return next(size for size in sizes if any(does(timings, few, regret) for few in combinations(configs, size)))


@given(rows=ROWS, regret=REGRETS)
def test_no_smaller_set_keeps_to_the_regret(rows: dict[str, dict[str, float]], regret: float) -> None:
    timings = table(**rows)
    chosen = smallest(timings, regret)
    assert does(timings, tuple(chosen), regret)
    assert regret_of(timings, chosen) <= regret + 1e-9
    assert len(chosen) == fewest(timings, regret)


@given(rows=ROWS, regret=REGRETS)
def test_no_set_of_that_size_has_less_regret(rows: dict[str, dict[str, float]], regret: float) -> None:
    timings = table(**rows)
    chosen = smallest(timings, regret)
    others = [regret_of(timings, few) for few in combinations(timings.configs, len(chosen))]
    assert regret_of(timings, chosen) == min(others, default=0)


@given(rows=ROWS, regret=REGRETS)
def test_what_failed_everywhere_is_never_chosen(rows: dict[str, dict[str, float]], regret: float) -> None:
    for config in smallest(table(**rows), regret):
        assert any(row.get(config, math.inf) < math.inf for row in rows.values())


@given(rows=ROWS)
def test_a_looser_regret_never_needs_more(rows: dict[str, dict[str, float]]) -> None:
    sizes = [len(smallest(table(**rows), regret)) for regret in (0.0, 0.05, 0.5, 3.0)]
    assert sizes == sorted(sizes, reverse=True)


@given(rows=ROWS, regret=REGRETS)
def test_a_set_found_in_a_hurry_keeps_to_the_regret_too(rows: dict[str, dict[str, float]], regret: float) -> None:
    timings = table(**rows)
    patch = pytest.MonkeyPatch()
    with patch.context() as hurried:
        hurried.setattr(autotune, "NODES", 1)
        chosen = smallest(timings, regret)
    assert does(timings, tuple(chosen), regret)


def test_the_smallest_is_found_where_taking_the_best_each_time_would_not_find_it() -> None:
    good = {"wide": "abcd", "left": "abe", "right": "cdf"}
    rows = {key: {config: 1.0 if key in keys else 9.0 for config, keys in good.items()} for key in "abcdef"}
    assert smallest(table(**rows)) == ["left", "right"]


def test_of_sets_of_one_size_the_fastest_is_taken() -> None:
    assert smallest(table(x={"near": 1.04, "best": 1.0, "far": 2.0}), 0.05) == ["best"]


def test_a_config_that_fails_for_a_key_does_not_stand_for_it() -> None:
    timings = table(x={"A": 1.0, "B": 1.02}, y={"A": math.inf, "B": 1.0})
    assert smallest(timings) == ["B"]
    assert regret_of(timings, ["A"]) == math.inf
    assert regret_of(timings, ["B"]) == pytest.approx(0.02)


def test_the_share_saved_is_that_of_benchmarks() -> None:
    timings = table(x=dict.fromkeys("ABCD", 1.0), y=dict.fromkeys("AB", 1.0))
    assert saved_share(timings, ["A"]) == pytest.approx(4 / 6)
    assert saved_share(timings, ["A", "D"]) == pytest.approx(3 / 6)
    assert saved_share(table(), []) == 0.0


@pytest.mark.timeout(120)
def test_many_configs_and_keys_end_in_time() -> None:
    rows = {f"k{key}": {f"c{c}": 1 + (key * 7919 + c * 104729) % 97 / 97 for c in range(120)} for key in range(60)}
    chosen = smallest(table(**rows), 0.05)
    assert 1 < len(chosen) < 60
    assert regret_of(table(**rows), chosen) <= 0.05 + 1e-9


@given(rows=ROWS)
def test_a_table_survives_being_stored(rows: dict[str, dict[str, float]]) -> None:
    timings = Timings(kernel="k-1", kind="inductor", ms=rows, benchmarks=3, seconds=0.5)
    data = timings.as_bytes()
    assert Timings.from_bytes(data) == timings
    json.loads(data, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"ms": {"x": 3}}',
        b'{"ms": {"x": {"A": "fast"}}}',
        b'{"ms": {}, "kernel": "k-1", "kind": "triton", "benchmarks": 1, "seconds": 1e999}',
        b"\xff",
        b"[" * 99999,
    ],
)
def test_what_is_no_table_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Timings.from_bytes(data)
    found, (problem,) = timings_in(
        {"timings/k-1.json": data, "file/x": b"", "timings/ok.json": Timings(kernel="ok", kind="triton").as_bytes()}
    )
    assert [each.kernel for each in found] == ["ok"]
    assert problem.startswith("timings/k-1.json: ")


def test_a_table_under_another_kernels_name_is_not_taken() -> None:
    found, problems = timings_in({"timings/other.json": table().as_bytes()})
    assert not found
    assert "'k-1'" in problems[0]


def test_tables_that_cost_most_come_first() -> None:
    tables = [Timings(kernel=name, kind="triton", seconds=s) for name, s in (("a", 1.0), ("b", 3.0), ("c", 2.0))]
    found, _ = timings_in({each.member: each.as_bytes() for each in tables})
    assert [each.kernel for each in found] == ["b", "c", "a"]


def test_stored_sets_are_read_and_empty_ones_left_out() -> None:
    assert configs_in(b'{"k": ["A"], "none": []}') == {"k": ["A"]}
    for data in (b"", b"[1]", b'{"k": 1}'):
        with pytest.raises(InputError, match="--apply"):
            configs_in(data)


def test_runs_are_merged_and_the_times_of_a_key_stay_together() -> None:
    first = Timings(kernel="k", kind="triton", ms={"x": {"A": 1, "B": 2}, "y": {"A": 1}}, benchmarks=3, seconds=1)
    later = Timings(
        kernel="k", kind="triton", ms={"x": {"A": 9}, "y": {"A": 2}, "z": {"A": 3}}, benchmarks=3, seconds=2
    )
    both = first.merged(later)
    assert both.ms == {"x": {"A": 1, "B": 2}, "y": {"A": 2}, "z": {"A": 3}}
    assert (both.benchmarks, both.seconds) == (6, 3)


def test_threads_lose_nothing_and_what_the_bundle_had_is_kept() -> None:
    tables, count = Tables(), 500

    def hear(thread: int) -> None:
        for number in range(count):
            tables.hear(Benchmark("k", "triton", f"key {number}", f"config {thread}", 1.0, 0.001))
            if not number % 100:
                tables.members({})

    threads = [threading.Thread(target=hear, args=(each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = Timings(kernel="k", kind="triton", ms={"old": {"A": 1.0}}, benchmarks=1, seconds=1.0)
    (data,) = tables.members({before.member: before.as_bytes(), "timings/x.json": b"?"}).values()
    told = Timings.from_bytes(data)
    assert told.benchmarks == 4 * count + 1
    assert len(told.ms) == count + 1
    assert all(len(row) == 4 for key, row in told.ms.items() if key != "old")


def test_no_sense_in_a_time_counts_as_a_failure() -> None:
    timings = table()
    for config, ms in (("nan", math.nan), ("negative", -1.0), ("fine", 1.0)):
        timings.add(Benchmark("k-1", "triton", "x", config, ms, 0.1))
    assert timings.ms["x"] == {"nan": math.inf, "negative": math.inf, "fine": 1.0}
    assert smallest(timings) == ["fine"]
