"""Start-ups whose truth is known to the second: who held them up, and what more could have run at once."""

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.accounting import rollup
from headway.accounting.advice import Advice, advise
from headway.accounting.attempts import Instant
from headway.accounting.ledger import JobAccounts, Ledger, by_bucket, by_stage
from headway.accounting.rollup import roll_up
from headway.accounting.waterfall import (
    BEFORE,
    BETWEEN,
    STOPPING,
    Startup,
    Waterfall,
    gather_waterfalls,
    restored,
    startup_of,
)
from headway.events.journal import Batch, Cell, Follower
from headway.events.vocabulary import Record, Told
from headway.observe.perfetto import trace
from headway.testing import Rank, Story

LANES = ("main", "comm", "io", "process")


def stage(name: str, begin: float, end: float, lane: str = "main", needs: str = "", **told: Any) -> dict[str, Any]:
    """One stage of a mark, in seconds of its start-up; in lane `main` it computes all the time, elsewhere it waits."""
    computes = told.pop("computes", lane == "main")
    cpu_s = told.pop("cpu", (end - begin) if computes else 0.0)
    times = {"begin_ns": round(begin * 1e9), "end_ns": round(end * 1e9), "cpu_s": cpu_s}
    asked = {"name": name, "activity": "", "lane": lane, "needs": needs.split(), "computes": computes, "failed": False}
    return asked | times | told


def mark(*stages: dict[str, Any], begin: float = 0.0, serial: bool = False) -> dict[str, Any]:
    """The attributes of a start-up's mark, `begin` seconds after the process's clock read 1 s."""
    zero = round((begin + 1) * 1e9)
    moved = [s | {key: s[key] + zero for key in ("begin_ns", "end_ns") if s[key] is not None} for s in stages]
    return {"serial": serial, "begin_ns": zero, "stages": moved}


def startup(*stages: dict[str, Any], begin: float = 0.0, serial: bool = False) -> Startup:
    told = startup_of(mark(*stages, begin=begin, serial=serial))
    assert told is not None
    return told


def waterfall(*ranks: Startup) -> Waterfall:
    (found,) = gather_waterfalls([(0, {rank: [told] for rank, told in enumerate(ranks)})])
    return found


def path(found: Waterfall) -> list[tuple[int, str, float]]:
    """The critical path, checked to have no hole and to be as long as the start-up."""
    legs = found.path
    assert sum(leg.took_ns for leg in legs) == found.wall_ns
    assert all(a.end_ns == b.begin_ns for a, b in pairwise(legs))
    return [(leg.rank, leg.stage or leg.gap, leg.took_ns / 1e9) for leg in legs]


def starts(rank: Rank, *stages: dict[str, Any], serial: bool = False) -> Rank:
    """A rank of a story runs a graph of stages and marks it."""
    zero = rank.clock.now_ns()
    told = [s | {key: s[key] + zero for key in ("begin_ns", "end_ns") if s[key] is not None} for s in stages]
    rank.wait(max(s["end_ns"] or 0 for s in stages) / 1e9)
    rank.recorder.mark(Told.STARTUP, serial=serial, begin_ns=zero, stages=told)
    return rank


# --- the critical path ---------------------------------------------------------------------------------------------


def test_the_path_follows_what_ended_last_of_what_a_stage_needs() -> None:
    found = waterfall(
        startup(
            stage("tokens", 0, 3, "io"),
            stage("weights", 0, 5, "io"),
            stage("model", 0, 2),
            stage("ready", 5.25, 6, needs="tokens weights model"),
        )
    )
    assert path(found) == [(0, "weights", 5), (0, BETWEEN, 0.25), (0, "ready", 0.75)]
    assert {row.stage.name: row.after for row in found.rows(0)} == {
        "tokens": "", "weights": "", "model": "", "ready": "weights"
    }  # fmt: skip


def test_stages_of_one_lane_and_stages_that_compute_wait_for_each_other() -> None:
    found = waterfall(
        startup(
            stage("model", 0, 2),
            stage("tables", 2, 3, "io", computes=True),
            stage("broadcast", 0, 2.5, "comm"),
            stage("gather", 3, 4, "comm", computes=True),
        )
    )
    assert path(found) == [(0, "model", 2), (0, "tables", 1), (0, "gather", 1)]


def test_where_ranks_meet_the_path_goes_over_to_the_one_that_came_last() -> None:
    quick = startup(
        stage("data", 0, 1, "io"), stage("group", 1, 5, "comm", "data"), stage("model", 5, 8, needs="group")
    )
    slow = startup(
        stage("data", 0, 4.5, "io"), stage("group", 4.5, 5, "comm", "data"), stage("model", 5, 6, needs="group")
    )
    found = waterfall(quick, slow)
    assert path(found) == [(1, "data", 4.5), (1, "group", 0.5), (0, "model", 3)]
    assert found.rank == 1
    assert {row.stage.name: row.last_rank for row in found.rows(0)} == {"data": None, "group": 1, "model": None}


def test_a_rank_that_began_late_is_named_with_the_time_before_its_start_up() -> None:
    early = startup(stage("group", 0, 3.5, "comm"))
    late = startup(stage("group", 0.5, 1.5, "comm"), begin=2)
    found = waterfall(early, late)
    assert path(found) == [(1, BEFORE, 2), (1, BETWEEN, 0.5), (1, "group", 1)]


def test_one_stage_after_another_is_a_path_through_all_of_them() -> None:
    found = waterfall(startup(stage("a", 0, 1, "io"), stage("b", 1, 3, "io"), stage("c", 3, 4), serial=True))
    assert path(found) == [(0, "a", 1), (0, "b", 2), (0, "c", 1)]


# --- what overlap gives --------------------------------------------------------------------------------------------


def test_what_a_serial_run_took_tells_what_overlap_saves_and_could_save(tmp_path: Path) -> None:
    story = Story(tmp_path)
    undisturbed = (stage("model", 0, 4), stage("data", 4, 7, "io"), stage("join", 7, 8, needs="model data"))
    starts(story.rank(), *undisturbed, serial=True).steps(5, each=1).saved(5).killed()
    # Beside each other both are slower, and `data` began late.
    disturbed = (stage("model", 0, 5), stage("data", 1, 6, "io"), stage("join", 6, 7, needs="model data"))
    starts(story.rank(start=20), *disturbed).restored(5).steps(5, each=1, first=5).finished()
    alone, together = story.ledger().waterfalls
    assert alone.is_serial
    assert alone.uncontended is None
    assert alone.could_save_ns == 3e9  # 4 s of the model and 1 s of joining remain
    assert together.uncontended is alone
    assert (together.serial_ns, together.saved_ns, together.could_save_ns) == (8e9, 1e9, 2e9)


def test_what_needs_each_other_computes_or_communicates_cannot_overlap() -> None:
    chain = waterfall(startup(stage("a", 0, 2, "io"), stage("b", 2, 5, "io", "a")))
    assert chain.could_save_ns == 0
    computing = waterfall(startup(stage("a", 0, 2), stage("b", 2, 5)))
    assert computing.could_save_ns == 0
    meeting = waterfall(startup(stage("a", 0, 2, "comm"), stage("b", 2, 5, "comm")))
    assert meeting.could_save_ns == 0
    waiting = waterfall(startup(stage("a", 0, 2), stage("b", 2, 5, cpu=0.5)))
    assert waiting.could_save_ns == 2e9


def test_waiting_for_another_rank_is_not_work() -> None:
    slow = (stage("data", 0, 6), stage("group", 6, 7, "comm", "data"))
    quick = (stage("data", 0, 1), stage("group", 1, 7, "comm", "data"))
    found = waterfall(startup(*slow), startup(*quick))
    assert found.serial_ns == found.wall_ns == 7e9
    assert found.could_save_ns == 0


@st.composite
def scheduled(draw: st.DrawFn) -> list[Startup]:
    """Ranks that ran one graph as a runner would: each stage as soon as what it needs, and its lane, allow it."""
    count, ranks = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    lanes = [draw(st.sampled_from(LANES)) for _ in range(count)]
    computes = [lane == "main" or draw(st.booleans()) for lane in lanes]
    needs = [[n for n in range(at) if draw(st.booleans())] for at in range(count)]
    begins = [draw(st.integers(0, 5)) for _ in range(ranks)]
    chance = random.Random(draw(st.integers(0, 1000)))
    ends: dict[tuple[int, int], int] = {}
    told: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    for at in range(count):
        ready = []
        for rank in range(ranks):
            after = [n for n in range(at) if n in needs[at] or (computes[n] and computes[at])]
            after += [n for n in range(at) if lanes[n] == lanes[at] and lanes[at] in ("main", "comm")]
            ready.append(max([begins[rank], *(ends[rank, n] for n in after)]) + chance.choice((0, 0, 1)))
        met = max(ready) if lanes[at] == "comm" else 0
        for rank in range(ranks):
            end = ends[rank, at] = max(ready[rank], met) + chance.randrange(6)
            names = " ".join(f"s{n}" for n in needs[at])
            times = (ready[rank] - begins[rank], end - begins[rank])
            told[rank].append(stage(f"s{at}", *times, lanes[at], names, computes=computes[at]))
    return [startup(*stages, begin=begin) for stages, begin in zip(told, begins, strict=True)]


@given(scheduled())
def test_of_any_graph_the_path_is_the_wall_time_and_no_gain_is_made_up(ranks: list[Startup]) -> None:
    found = waterfall(*ranks)
    path(found)
    assert 0 <= found._least_ns <= found.wall_ns
    assert 0 <= found.could_save_ns <= found.wall_ns
    assert found.serial_ns >= found._least_ns
    assert found.rank in found.runs
    found.move, found.notes()


# --- what goes wrong -----------------------------------------------------------------------------------------------


def test_a_stage_that_failed_is_named_and_nothing_is_claimed_of_the_rest() -> None:
    """The other rank was still in its stage, and neither came to the last one: their marks say nothing of it."""
    failing = startup(stage("data", 0, 1, "io"), stage("model", 0, 2, failed=True))
    other = startup(
        stage("model", 0, 2.5, failed=True, end_ns=None), stage("data", 0, 3, "io"), stage("late", 3, 4, "io")
    )
    found = waterfall(failing, other)
    assert found.failed[0] == (0, "model")
    assert found.notes() == [
        "start-up of attempt 0: stage model failed on rank 0, and one on each of 1 other ranks after it"
    ]
    assert (found.saved_ns, found.could_save_ns) == (0, 0)
    assert [row.stage.name for row in found.rows(0)] == ["data", "model"]
    assert path(found) == [(0, "model", 2), (0, STOPPING, 2)]


def test_a_rank_that_declared_other_stages_is_left_out_and_that_is_said() -> None:
    same = startup(stage("model", 0, 2), stage("data", 0, 1, "io"))
    found = waterfall(same, same, startup(stage("model", 0, 9, "io"), stage("data", 0, 1, "io")))
    assert list(found.runs) == [0, 1]
    assert found.notes() == ["start-up of attempt 0: 1 ranks declared other stages than the rest, and are left out"]


def test_a_stage_that_computes_beside_another_without_saying_so_is_named() -> None:
    model, loud = stage("model", 0, 4), stage("tokens", 0, 3, "io", cpu=2.5)
    (note,) = waterfall(startup(model, loud)).notes()
    assert "stage tokens computed 2.5 s of its 3.0 s beside model" in note
    for quiet in (loud | {"cpu_s": 0.2}, loud | {"computes": True}, loud | {"lane": "process"}):
        assert waterfall(startup(model, quiet)).notes() == []
    assert waterfall(startup(model, stage("tokens", 4, 7, "io", cpu=2.5))).notes() == [], "they did not meet"


@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"begin_ns": 1, "stages": 7},
        {"begin_ns": 1, "stages": ["model"]},
        {"begin_ns": "x", "stages": []},
        {"begin_ns": 1, "stages": [{"name": "model", "begin_ns": "soon", "end_ns": 2}]},
        {"begin_ns": 1, "stages": [{"name": "model", "begin_ns": 1, "end_ns": float("inf")}]},
        {"begin_ns": 1, "stages": [{"name": "model", "begin_ns": 1, "end_ns": 2, "cpu_s": float("nan")}]},
        {"begin_ns": 1, "stages": [{"name": "model", "begin_ns": 1, "end_ns": 2}] * 2},
        {"unwritable": "TypeError"},
    ],
)
def test_a_mark_that_is_not_one_of_ours_stays_a_mark(tmp_path: Path, attrs: dict[str, Any]) -> None:
    story = Story(tmp_path)
    rank = story.rank()
    rank.recorder.mark(Told.STARTUP, **attrs)
    rank.steps(5, each=1).finished()
    ledger = story.ledger()
    assert ledger.waterfalls == []
    assert [mark.name for mark in ledger.attempts[0].views[0].member.timeline.marks] == ["startup"]


def test_names_cannot_move_the_cursor() -> None:
    found = waterfall(startup(stage("\x1b[2Jmodel\n", 0, 1, "io\r", "\x1b[1A")))
    assert found.graph[0].name == "\N{REPLACEMENT CHARACTER}[2Jmodel\N{REPLACEMENT CHARACTER}"
    assert found.graph[0].lane == "io\N{REPLACEMENT CHARACTER}"


# --- many ranks ----------------------------------------------------------------------------------------------------


def test_a_rolled_up_start_up_is_the_same_and_small(tmp_path: Path) -> None:
    story, rolled = Story(tmp_path), JobAccounts()
    names = [f"stage_number_{at}" for at in range(10)]
    for number in range(3):
        rank = story.rank(number, 3, start=number / 7)
        stages = [stage(n, at + number / 3, at + 1.123456789, "io", names[at - 1]) for at, n in enumerate(names)]
        starts(rank, *stages).steps(5, each=1).finished()
    ledger = story.ledger()
    sizes, asked = list[int](), list[str]()
    for file in sorted(story.paths.folder.rglob("*.hwj")):
        batch = Follower(file).poll()
        data = roll_up(batch.records, batch.cell)
        sizes.append(
            len(data) - len(roll_up([r for r in batch.records if getattr(r, "name", "") != "startup"], batch.cell))
        )

        def load(batch: Batch = batch) -> tuple[list[Record], Cell | None]:
            asked.append("again")
            return batch.records, batch.cell

        rolled.add_finished(file.stem, data, load)
    again = rolled.ledger(Instant("boot-0", 0, 0))
    assert again is not None
    asked.clear()
    assert [w.runs for w in again.waterfalls] == [w.runs for w in ledger.waterfalls]
    assert asked == []
    assert max(sizes) < 1200
    graphs = {id(run.graph) for run in again.waterfalls[0].runs.values()}
    assert len(graphs) == 1, "one graph is kept for all ranks"


def test_any_name_survives_a_roll_up() -> None:
    odd = stage("a,b;c %2C\N{SNOWMAN} '\"", 0, 1, "io", "x;y ,", cpu=0.123)
    ran = startup(odd, stage("never", 0, 0, begin_ns=None, end_ns=None, failed=True), stage("bad", 1, 2, failed=True))
    assert restored(json.loads(json.dumps(ran.rolled_up()))) == ran
    assert ran.failed == (2,), "what never ran has not failed"
    nothing = startup()
    assert restored(nothing.rolled_up()) == nothing


@pytest.mark.parametrize("told", [[], ["a"], ["a,b", "0 1;;;"], ["", "0;;;"], ["", "0 x;;;"]])
def test_a_roll_up_with_a_broken_start_up_is_done_without(told: list[str], tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.rank().steps(5, each=1).finished()
    batch = Follower(story.paths.journal("p1001")).poll()
    data = json.loads(roll_up(batch.records, batch.cell))
    broken = json.dumps(data | {"startups": [told]}).encode()
    assert rollup.restore(json.dumps(data).encode(), lambda: ([], None)) is not None
    assert rollup.restore(broken, lambda: ([], None)) is None


# --- advice --------------------------------------------------------------------------------------------------------


def advised(ledger: Ledger, words: str) -> Advice:
    (found,) = (advice for advice in advise(ledger) if words in advice.title)
    return found


def titles(ledger: Ledger) -> str:
    return " ".join(advice.title for advice in advise(ledger))


def told(story: Story, *stages: dict[str, Any], serial: bool = False) -> Ledger:
    starts(story.rank(), *stages, serial=serial).steps(10, each=1).finished()
    return story.ledger()


def test_the_longest_stage_that_waited_for_nothing_it_needs_is_the_one_to_move(tmp_path: Path) -> None:
    stages = (stage("model", 0, 4), stage("data", 4, 7, cpu=0.1), stage("logs", 7, 8, cpu=0.1))
    ledger = told(Story(tmp_path), *stages)
    advice = advised(ledger, "let stage")
    assert "let stage data wait beside" in advice.title
    assert advice.fix == '@setup.stage(lane="io") for data'
    assert advice.bucket == "start.trainer_init"
    assert advice.seconds == pytest.approx(8 - 4.2)  # what the three computed is left
    assert advice.points == pytest.approx(100 * 10 / (18 - 3.8) - 100 * 10 / 18)


def test_nothing_is_advised_where_nothing_could_overlap(tmp_path: Path) -> None:
    needed = (stage("model", 0, 4), stage("data", 4, 7, needs="model", cpu=0.1))
    assert "let stage" not in titles(told(Story(tmp_path / "a"), *needed))
    computing = (stage("model", 0, 4), stage("data", 4, 7))
    assert "let stage" not in titles(told(Story(tmp_path / "b"), *computing))


def test_a_stage_that_only_waits_but_says_it_computes_is_told_so(tmp_path: Path) -> None:
    ledger = told(Story(tmp_path), stage("model", 0, 4), stage("data", 4, 7, "io", computes=True, cpu=0.1))
    assert advised(ledger, "let stage data").fix == "@setup.stage(computes=False) for data"


def test_a_job_that_starts_one_stage_after_another_is_told_what_overlap_would_give(tmp_path: Path) -> None:
    ledger = told(Story(tmp_path), stage("model", 0, 4), stage("data", 4, 7, "io"), serial=True)
    advice = advised(ledger, "let the stages")
    assert advice.fix.startswith("unset HEADWAY_SERIAL")
    assert advice.seconds == 3


def test_a_start_without_stages_is_told_of_them_and_one_with_them_is_not(tmp_path: Path) -> None:
    plain = Story(tmp_path / "a")
    plain.rank().span("get_first_batch_data", 5).steps(10, each=1).finished()
    assert "headway.Startup" in advised(plain.ledger(), "start the data workers").fix
    staged = Story(tmp_path / "b")
    rank = staged.rank()
    with rank.during("get_first_batch_data"):
        starts(rank, stage("get_first_batch_data", 0, 5, "io"))
    rank.steps(10, each=1).finished()
    assert "headway.Startup" not in advised(staged.ledger(), "start the data workers").fix


# --- every second in one bucket ------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Any:
    pools = [ThreadPoolExecutor(1) for _ in range(2)]
    yield [lambda act, pool=pool: pool.submit(act).result() for pool in pools]
    for pool in pools:
        pool.shutdown()


def overlapped(rank: Rank, threads: list[Callable[[Any], Any]]) -> Rank:
    """Ten seconds of stages in three threads: each is told of at the second it begins or ends."""
    comm, io = threads
    span = rank.recorder.span
    module, group, restore = span("train_module_creation"), span("process_group_init"), span("checkpoint_restore")
    first, compiling = span("get_first_batch_data"), span("pt2_compilation")
    module.__enter__()
    rank.wait(1)
    comm(group.__enter__)
    rank.wait(1)
    io(restore.__enter__)
    rank.wait(1)
    comm(lambda: group.__exit__(None, None, None))
    rank.wait(2)
    io(lambda: restore.__exit__(None, None, None))
    rank.wait(1)
    module.__exit__(None, None, None)
    io(first.__enter__)
    rank.wait(1)
    compiling.__enter__()
    rank.wait(2)
    compiling.__exit__(None, None, None)
    rank.wait(1)
    io(lambda: first.__exit__(None, None, None))
    return rank


def test_overlapped_stages_of_three_threads_are_counted_once(tmp_path: Path, threads: Any) -> None:
    story = Story(tmp_path)
    overlapped(story.rank(), threads).steps(10, each=1).saved(10).killed(seen=True)
    overlapped(story.rank(start=30), threads).restored(10).steps(10, each=1, first=10).saved(20).finished()
    ledger = story.ledger()
    assert sum(ledger.sums.values()) == ledger.wall_ns == 50e9
    assert {str(key): ns / 1e9 for key, ns in by_bucket(ledger.sums).items() if ns} == {
        "start.trainer_init": 8,
        "start.pt2_compilation": 2,
        "recover.detection": 10,
        "recover.trainer_init": 5,
        "recover.checkpoint_restore": 3,
        "recover.pt2_compilation": 2,
        "training.effective": 20,
    }
    first, again = ({k: ns / 1e9 for k, ns in by_stage(a.sums).items() if ns} for a in ledger.attempts)
    shared = {"process_group_init": 1, "train_module_creation": 2, "get_first_batch_data": 2}
    assert first == shared | {"pre_train": 3}
    assert again == shared


def test_stages_of_three_threads_have_a_track_each_in_a_trace(tmp_path: Path, threads: Any) -> None:
    story = Story(tmp_path)
    overlapped(story.rank(), threads).steps(10, each=1).finished()
    events = trace(story.ledger())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    tracks: dict[str, list[str]] = {}
    for event in events:
        if event["ph"] == "X" and names[event["tid"]].startswith("spans"):
            tracks.setdefault(names[event["tid"]], []).append(event["name"])
    assert list(tracks.values()) == [
        ["train_module_creation", "pt2_compilation"],
        ["process_group_init"],
        ["checkpoint_restore", "get_first_batch_data"],
    ]
