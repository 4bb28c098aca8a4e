"""What a journal tells of compilations, and what follows from it."""

import re
from typing import Any

import pytest

from headway.compile.doctor import Cause, Change, Diagnosis, cause_of, diagnose, source_entry
from headway.events.vocabulary import Mark, Told

FORWARD = "forward (train.py:14)"


def mark(name: str, **attrs: Any) -> Mark:
    return Mark(t_ns=0, name=name, attrs=attrs)


def compiled(number: str, reason: str = "", seconds: float = 1.0, function: str = FORWARD, **attrs: Any) -> Mark:
    return mark(Told.COMPILED, id=number, function=function, seconds=seconds, reason=reason, **attrs)


def changed(number: str, source: str, seen: list[Any], now: Any, kind: str = "size", **attrs: Any) -> Mark:
    dim = 0 if kind == "size" else None
    told = {"function": FORWARD, "elsewhere": 0, "dims": True} | attrs
    return mark(Told.SOURCE_CHANGED, id=number, source=source, kind=kind, dim=dim, seen=seen, now=now, **told)


def ragged(now: int = 7, seconds: float = 2.0) -> list[Mark]:
    reason = f"tensor 'x' size mismatch at index 0. expected 4, actual {now}"
    return [compiled("0/0"), changed("0/1", "L['x']", [4], now), compiled("0/1", reason, seconds)]


@pytest.mark.parametrize(
    ("guard", "cause"),
    [
        ("tensor 'a' size mismatch at index 0. expected 4, actual 7", Cause.SIZE),
        ("2 <= a.size()[0]", Cause.SIZE),
        ("a.size()[0] == b.size()[0]", Cause.SIZE),
        ("n == 2", Cause.VALUE),
        ("G['G'] == -2.5", Cause.VALUE),
        ("n == True", Cause.VALUE),
        ("n == 'x'", Cause.VALUE),
        ("n is None", Cause.IDENTITY),
        ("tensor 'a' dtype mismatch. expected Float, actual Double", Cause.IDENTITY),
        ("tensor 'a' requires_grad mismatch. expected requires_grad=0", Cause.IDENTITY),
        ("tensor 'a' rank mismatch. expected 1, actual 2", Cause.IDENTITY),
        ("___check_obj_id(s.act, 140175818825840), type=<class 'builtin_function_or_method'>", Cause.IDENTITY),
        ("___check_type_id(L['self'], 94829)", Cause.IDENTITY),
        ("GLOBAL_STATE changed: grad_mode", Cause.GRAD_MODE),
        ("GLOBAL_STATE changed: autocast_state", Cause.OTHER),
        ("len(a) == 1", Cause.OTHER),
        ("list(dict.keys(a))[0] == 'a'", Cause.OTHER),
        ("tensor 'a' stride mismatch at index 0. expected 5, actual 1", Cause.OTHER),
        ("something that no torch says today", Cause.OTHER),
    ],
)
def test_a_guard_tells_the_cause(guard: str, cause: Cause) -> None:
    assert cause_of(guard, []) is cause


def test_where_the_guard_says_nothing_the_change_does() -> None:
    assert cause_of("?", [Change("L['x']", "size", 0, (4, 7))]) is Cause.SIZE
    assert cause_of("?", [Change("L['n']", "int", None, ("4", "7"))]) is Cause.VALUE


@pytest.mark.parametrize(
    ("values", "cause", "told"),
    [
        ((4, 7), Cause.SIZE, ["L['x']:0"]),
        ((4, 1), Cause.ZERO_ONE, []),
        ((0, 4), Cause.ZERO_ONE, []),
        ((4, 1, 7), Cause.SIZE, ["L['x']:0"]),
        ((4, 7, 1), Cause.ZERO_ONE, ["L['x']:0"]),
    ],
)
def test_sizes_of_0_and_1_are_compiled_for_alone_whatever_torch_is_told(
    values: tuple[int, ...], cause: Cause, told: list[str]
) -> None:
    *seen, now = values
    found = diagnose([[compiled("0/0"), changed("0/1", "L['x']", seen, now), compiled("0/1", "2 <= x.size()[0]")]])
    assert [each.cause for each in found.recompiles] == [cause]
    assert found.sources == told


def test_seconds_are_those_of_recompiles_with_their_backward() -> None:
    backward = [mark(Told.COMPILED_BACKWARD, id=number, seconds=10.0) for number in ("0/0", "0/1")]
    found = diagnose([[*ragged(seconds=2.0), *backward]])
    assert (found.compilations, found.compiling_s, found.lost_s) == (2, 23.0, 12.0)


def test_the_same_on_many_ranks_is_one_line_with_all_sizes() -> None:
    found = diagnose([ragged(5, 2.0), ragged(6, 3.0), ragged(9, 1.0)])
    (each,) = found.recompiles
    assert (each.processes, each.times, each.seconds, found.lost_s) == (3, 1, 3.0, 3.0)
    assert each.changes[0].values == (4, 5, 6, 9)


def test_a_change_without_a_recompile_is_none() -> None:
    after_reset = [changed("0/0", "L['x']", [4], 7), compiled("0/0")]
    found = diagnose([[compiled("0/0"), *after_reset]])
    assert (found.recompiles, found.sources) == ([], [])


def test_a_process_that_was_killed_while_compiling_again_is_not_forgotten() -> None:
    found = diagnose([ragged()[:2]])
    assert [(each.function, each.cause) for each in found.recompiles] == [(FORWARD, Cause.SIZE)]
    assert found.sources == ["L['x']:0"]


def test_what_torch_compares_twice_is_one_change() -> None:
    first, *others = ragged()
    (each,) = diagnose([[first, others[0], changed("0/1", "L['x']", [4, 7], 7), others[1]]]).recompiles
    assert [change.values for change in each.changes] == [(4, 7)]


def test_integers_are_told_and_floats_cannot_be() -> None:
    marks = [compiled("0/0"), changed("0/1", "L['n']", ["3"], "4", "int"), compiled("0/1", "n == 3")]
    marks += [changed("0/2", "L['rate']", ["0.5"], "0.25", "float"), compiled("0/2", "rate == 0.5")]
    found = diagnose([marks])
    assert {each.cause for each in found.recompiles} == {Cause.VALUE}
    assert found.sources == ["L['n']"]


def test_what_torch_had_been_told_stays_in_the_value() -> None:
    given = mark(Told.COMPILE_SETTINGS, trace="", sources="L['old']:1, L['k']")
    assert diagnose([[given, *ragged()]]).sources == ["L['k']", "L['old']:1", "L['x']:0"]
    assert diagnose([[given, compiled("0/0")]]).sources == []


def test_an_older_torch_is_told_the_name_alone() -> None:
    marks = ragged()
    marks[1].attrs["dims"] = False
    assert diagnose([marks]).sources == ["L['x']"]


@pytest.mark.parametrize(
    ("source", "elsewhere", "line"),
    [
        ("L['batch']['a']", 1, "torch._dynamo.mark_dynamic(batch['a'], 0)"),
        ("L['args'][0]", 2, "torch._dynamo.mark_dynamic(args[0], 0)"),
        ("L['___stack0']", 0, "torch._dynamo.mark_dynamic(tensor, 0)"),
        ("L['x']", 0, None),
    ],
)
def test_where_a_name_says_too_much_a_line_of_code_is_better(source: str, elsewhere: int, line: str | None) -> None:
    change = changed("0/1", source, [4], 7, elsewhere=elsewhere)
    found = diagnose([[compiled("0/0"), change, compiled("0/1", "size mismatch")]])
    assert found.mark_dynamic == ([line] if line else [])
    assert found.sources == [f"{source}:0"]


def test_the_limit_is_no_compilation_and_is_told() -> None:
    found = diagnose([[compiled("0/0"), compiled("0/1", "n == '1'"), compiled("0/2", "n == '2'", 0.0, limit=True)]])
    assert found.compilations == 2
    (each,) = found.recompiles
    assert (each.times, each.is_last) == (2, True)


def test_caches_are_told_by_function_and_hits_are_counted() -> None:
    asked = {"id": "0/0", "cache": "FX graph", "reason": ""}
    marks = [mark(Told.GRAPH_CACHE, **asked, state=state) for state in ("miss", "hit", "hit")]
    marks += [mark(Told.GRAPH_CACHE, id="0/0", cache="AOT autograd", state="bypass", reason="cond"), compiled("0/0")]
    found = diagnose([[*marks, mark(Told.GRAPH_CACHE, **asked, state="miss")]])  # the last one of the backward
    assert found.cache_hits == 2
    told = [(use.function, use.cache, use.state, use.reason, use.count) for use in found.caches]
    assert told == [(FORWARD, "FX graph", "miss", "", 2), (FORWARD, "AOT autograd", "bypass", "cond", 1)]


def test_marks_with_nothing_in_them_are_no_reason_to_fail() -> None:
    found = diagnose([[mark(name) for name in Told]])
    assert isinstance(found, Diagnosis)
    assert found.sources == []


NAMES = [
    "L['idx'][0]",
    "L['self']._modules['x'].n",
    "L['self']._modules['layers']._modules['0'].k",
    "L['batch']['a']",
    "L['batch']['user-id']",
    "L['batch']['z-a, b: 3']",
    "L['batch'][\"it's\"]",
    "L['batch']['a+b(c)*[d]{2}|$^?\\\\x']",
    "L['batch']['größe']",
    "list(dict.values(L['d']))[0]",
    "G['SIZE']",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [None, 1])
def test_torch_takes_an_entry_for_this_name_and_no_other(name: str, dim: int | None) -> None:
    config = pytest.importorskip("torch.compiler.config")
    is_dynamic_source = pytest.importorskip("torch._dynamo.variables.builder").is_dynamic_source
    others = [other for other in [*NAMES, f"{name}.more", f"{name}[0]", name[:-1]] if other != name]
    before, after = source_entry(others[0]), source_entry(others[1])
    with config.patch(dynamic_sources=f" {source_entry(name, dim)} "):
        assert is_dynamic_source(name, 1)
        assert is_dynamic_source(name, 0) is (dim is None)
        assert [other for other in others if is_dynamic_source(other)] == []
    with config.patch(dynamic_sources=",".join([before, source_entry(name, dim), after])):
        assert is_dynamic_source(name, 1)


@pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")  # not what earlier tests left open
@pytest.mark.parametrize("name", NAMES)
def test_an_entry_is_a_regular_expression_that_compiles(name: str) -> None:
    re.purge()
    re.compile(source_entry(name))
