"""Which stage comes when, and what is wrong with a graph, before anything runs."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from headway.errors import InputError
from headway.startup.graph import Graph, stage_of


def graph(*stages: tuple[Callable[..., Any], str, list[str]]) -> Graph:
    made = Graph()
    for function, lane, needs in stages:
        made.add(stage_of(function, "", lane, needs, None, ""))
    return made


def order(made: Graph) -> list[str]:
    return [stage.name for stage in made.order()]


def a() -> None: ...
def b() -> None: ...
def c() -> None: ...
def of_a(a: Any) -> None: ...
def of_b(b: Any) -> None: ...


def test_stages_come_in_the_order_they_are_declared_in_unless_they_need_another() -> None:
    assert order(graph((of_b, "main", []), (a, "main", []), (b, "main", []), (c, "main", []))) == [
        "a",
        "b",
        "of_b",
        "c",
    ]


def test_a_stage_needs_those_that_its_arguments_name_and_those_it_says() -> None:
    stage = stage_of(of_a, "", "main", ["b", "a"], None, "")
    assert (stage.needs, stage.arguments) == (("a", "b"), ("a",))


def test_arguments_with_a_default_are_no_stages() -> None:
    def work(a: Any, size: int = 3) -> None: ...

    assert stage_of(work, "", "main", [], None, "").needs == ("a",)


@pytest.mark.parametrize("lane", ["main", "comm", "io", "process"])
def test_only_the_main_lane_computes_unless_it_is_said(lane: str) -> None:
    assert stage_of(a, "", lane, [], None, "").computes == (lane == "main")
    assert stage_of(a, "", lane, [], True, "").computes


def test_a_stage_called_like_one_of_the_report_counts_as_that() -> None:
    assert stage_of(a, "pre_train", "main", [], None, "").activity == "pre_train"
    assert stage_of(a, "", "main", [], None, "train_module_creation").activity == "train_module_creation"
    assert stage_of(a, "", "main", [], None, "").activity == ""


def test_collectives_keep_their_order_even_if_a_later_one_could_begin() -> None:
    made = graph((of_b, "comm", []), (a, "comm", []), (b, "io", []))
    assert order(made) == ["b", "of_b", "a"]
    assert made.before(made.stages["a"]) == {"of_b"}


def test_stages_that_wait_for_each_other_are_shown_as_a_circle() -> None:
    made = graph((a, "main", ["c"]), (b, "main", ["a"]), (c, "main", ["b"]))
    with pytest.raises(InputError, match=r"wait for each other: a → c → b → a\."):
        made.order()


def test_a_collective_that_needs_a_later_one_is_told_why_it_cannot() -> None:
    made = graph((of_b, "comm", []), (b, "comm", []))
    with pytest.raises(InputError, match="in the order they are declared in"):
        made.order()


def test_a_stage_that_needs_itself_waits_for_ever() -> None:
    with pytest.raises(InputError, match="a → a"):
        graph((a, "main", ["a"])).order()


def test_an_unknown_need_is_answered_with_the_nearest_name() -> None:
    def loader(modle: Any) -> None: ...
    def model() -> None: ...

    with pytest.raises(InputError, match="did you mean model"):
        graph((model, "main", []), (loader, "main", [])).order()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lane": "comms"}, "did you mean comm"),
        ({"activity": "device_int"}, "did you mean device_init"),
        ({"name": "two words"}, "its name is how others ask for it"),
        ({"needs": "a"}, r"needs=\['a'\]"),
    ],
)
def test_what_cannot_be_declared_is_refused_with_what_to_do(change: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"name": "", "lane": "main", "needs": [], "computes": None, "activity": ""}
    with pytest.raises(InputError, match=text):
        stage_of(a, **(given | change))


def test_a_function_that_takes_anything_is_asked_to_name_what() -> None:
    with pytest.raises(InputError, match=r"\*parts"):
        stage_of(lambda *parts: None, "all", "main", [], None, "")


async def later() -> None: ...


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (partial(print, "x"), "Give it one: name="),
        (later, "call asyncio.run inside"),
        (time.time, "call it in a function of yours"),
    ],
)
def test_what_is_no_plain_function_is_refused_with_what_to_do(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        stage_of(function, "", "io", [], None, "")


def test_two_stages_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="two stages called a"):
        graph((a, "main", []), (a, "io", []))


def test_graphs_that_differ_in_anything_the_ranks_must_share_look_different() -> None:
    texts = {str(graph(*stages)) for stages in (
        [(a, "main", []), (b, "main", [])], [(b, "main", []), (a, "main", [])], [(a, "main", []), (b, "main", ["a"])],
        [(a, "comm", []), (b, "main", [])], [(a, "main", [])],
    )}  # fmt: skip
    assert len(texts) == 5
