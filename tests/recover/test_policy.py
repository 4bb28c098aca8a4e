"""What is done about a failure, and when a policy gives up."""

from dataclasses import replace

import pytest

from headway.recover.categories import CATEGORIES
from headway.recover.policy import (
    ACTIONS,
    BUDGETS,
    MOST_REPEATS,
    Decision,
    History,
    Situation,
    at_most,
    default,
    first_of,
    within,
)

decide = default()


def situation(category: str, **known: object) -> Situation:
    kind = CATEGORIES[category]
    return Situation(category=category, klass=kind.klass, action=kind.action, **known)  # type: ignore[arg-type]


def decided(category: str, **known: object) -> Decision:
    decision = decide(situation(category, **known))
    assert decision is not None
    return decision


def test_every_action_and_every_class_of_the_categories_is_known() -> None:
    assert {kind.action for kind in CATEGORIES.values()} <= set(ACTIONS)
    assert {kind.klass for kind in CATEGORIES.values()} <= set(BUDGETS)


@pytest.mark.parametrize("category", sorted(CATEGORIES))
def test_a_failure_after_progress_restarts_at_once_unless_no_retry_can_help(category: str) -> None:
    decision = decided(category, trained=True, progressed=True)
    assert decision.do == ("stop" if category in ("cancelled", "disk_full", "quota_exceeded") else "restart")
    assert not decision.wait_s


@pytest.mark.parametrize("category", sorted(CATEGORIES))
def test_no_failure_without_progress_is_retried_for_ever(category: str) -> None:
    history = History()
    for restarts in range(100):
        known = situation(
            category, repeats=history.repeats_of(category, False), restarts=restarts,
            spent=history.spent_on(CATEGORIES[category].klass, False),
        )  # fmt: skip
        decision = decide(known)
        assert decision is not None
        if decision.do == "stop":
            break
        history.add(category, CATEGORIES[category].klass, False, decision.spends)
    assert decision.do == "stop", f"{category} goes on after {restarts} restarts"
    assert restarts <= MOST_REPEATS


def test_two_failures_that_alternate_are_not_retried_for_ever_either() -> None:
    history = History()
    for number in range(100):
        category = ("segfault", "host_oom")[number % 2]
        kind = CATEGORIES[category]
        decision = decide(
            situation(category, repeats=history.repeats_of(category, False), spent=history.spent_on(kind.klass, False))
        )
        assert decision is not None
        if decision.do == "stop":
            return
        history.add(category, kind.klass, False, decision.spends)
    raise AssertionError("it goes on")


def test_the_programs_own_faults_stop_at_once_before_the_first_step() -> None:
    for category in ("python_error", "import_error", "collective_desync", "checkpoint_mismatch", "fd_limit"):
        decision = decided(category)
        assert (decision.do, decision.why) == ("stop", "it failed before its first step, and would again")


def test_infrastructure_is_retried_after_waits_that_double() -> None:
    waits = [decided("net_connect_failed", spent=spent).wait_s for spent in range(10)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert decided("net_connect_failed", spent=10).do == "stop"


def test_a_bad_node_leaves_where_there_is_room_for_that() -> None:
    assert decided("gpu_ecc_uncorrectable", node="n3", can_exclude=True).do == "leave"
    alone = decided("gpu_ecc_uncorrectable", node="n3")
    assert alone.do == "restart"
    assert "n3 is suspect" in alone.why


def test_what_is_not_the_jobs_fault_does_not_count() -> None:
    assert decided("preempted", can_requeue=True).do == "requeue"
    assert not decided("pod_evicted").spends
    limited = default(max_restarts=0)
    decision = limited(situation("pod_evicted", restarts=7))
    assert decision is not None
    assert decision.do == "restart"


def test_checkpoints_and_compile_are_gone_without() -> None:
    assert decided("checkpoint_corrupt").environ == {"HEADWAY_SKIP_CHECKPOINTS": "1"}
    assert decided("checkpoint_corrupt", repeats=1, spent=1).environ == {"HEADWAY_SKIP_CHECKPOINTS": "2"}
    assert decided("compile_error").environ == {"TORCH_COMPILE_DISABLE": "1"}
    assert decided("compile_error", repeats=1, spent=1).do == "stop"


def test_what_nobody_understands_gets_one_more_try_before_the_first_step_and_more_after() -> None:
    unknown = Situation(category="unknown", klass="unknown", action="retry_backoff")
    again = replace(unknown, repeats=1, spent=1)
    assert [decide(each).do for each in (unknown, again, replace(again, trained=True))] == [  # type: ignore[union-attr]
        "restart", "stop", "restart",
    ]  # fmt: skip


def test_policies_compose_and_the_first_word_counts() -> None:
    mine = first_of(
        lambda s: Decision(do="stop", why="mine") if s.rank == 3 else None, at_most(2), within({"user": 0}), decide
    )
    assert mine(situation("sigbus", rank=3)).why == "mine"  # type: ignore[union-attr]
    assert "--max-restarts 2" in mine(situation("sigbus", restarts=2)).why  # type: ignore[union-attr]
    assert mine(situation("cuda_oom")).why.startswith("0 restarts")  # type: ignore[union-attr]
    assert mine(situation("sigbus")).do == "restart"  # type: ignore[union-attr]


def test_progress_fills_the_budget_again() -> None:
    history = History()
    for _ in range(3):
        history.add("storage_io", "infra", False, True)
    assert history.spent_on("infra", False) == 3
    assert history.repeats_of("storage_io", False) == 3
    assert history.spent_on("infra", True) == 0
    history.add("storage_io", "infra", True, True)
    assert (history.spent_on("infra", False), history.repeats, history.restarts) == (0, 0, 4)


def test_after_the_free_restart_the_action_begins_at_its_begin() -> None:
    history = History()
    history.add("checkpoint_corrupt", "checkpoint", True, True)
    known = {"repeats": history.repeats_of("checkpoint_corrupt", False), "spent": history.spent_on("checkpoint", False)}
    assert decided("checkpoint_corrupt", **known).environ == {"HEADWAY_SKIP_CHECKPOINTS": "1"}
    assert decided("net_connect_failed", **known).wait_s == 1
    assert decided("segfault", **known).do == "restart"
    assert decided("python_error", trained=True, **known).do == "stop"
