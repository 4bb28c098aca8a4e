"""What is made of the marks that ranks leave: what was sent, what of it is needless, what it costs at more ranks."""

from typing import Any

import pytest

from headway.events.vocabulary import Mark, Told
from headway.startup.audit import (
    PAIR,
    REDUCE,
    RING,
    STORE,
    TREE,
    Audit,
    Finding,
    Fit,
    Shape,
    Traffic,
    audit,
    fit,
    seconds_at,
)


def sent(op: str, seconds: float = 0.01, **attrs: Any) -> Mark:
    """Two ranks' world, unless told otherwise."""
    told = {
        "op": op, "group": "0", "ranks": [0, 1], "size": 2, "world": 2, "backend": "gloo", "lazy": True,
        "site": "t.py:1 f", "through": "", "step": False, "count": 1, "calls": 1, "seconds": seconds, "bytes": 8,
    }  # fmt: skip
    return Mark(t_ns=0, name=Told.COLLECTIVE, attrs=told | attrs)


def found(*marks: Mark) -> Audit:
    """Both ranks tell the same."""
    return audit([list(marks), list(marks)])


def only(*marks: Mark) -> Finding:
    (finding,) = found(*marks).findings
    return finding


# --- what was sent ---------------------------------------------------------------------------------------------------


def test_each_site_is_one_row_over_all_ranks() -> None:
    told = found(sent("broadcast", count=3, calls=3, bytes=30), sent("broadcast", site="t.py:2 f"))
    assert [(row.site, row.count, row.total, row.ranks, row.bytes) for row in told.rows] == [
        ("t.py:1 f", 3, 6, 2, 30),
        ("t.py:2 f", 1, 2, 2, 8),
    ]
    assert (told.ranks, told.world) == (2, 2)


def test_a_rank_that_waits_for_another_does_not_make_an_operation_expensive() -> None:
    told = audit([[sent("broadcast", 5.0)], [sent("broadcast", 0.01)]])
    assert (told.rows[0].seconds, told.rows[0].least_s) == (5.0, 0.01)
    assert told.seconds_at[8] == pytest.approx(0.03)


def test_what_the_first_step_sends_is_told_apart() -> None:
    told = found(sent("all_reduce", step=True), sent("broadcast"))
    assert [row.op for row in told.rows] == ["broadcast"]
    assert [row.op for row in told.first_step] == ["all_reduce"]


def test_other_marks_and_ranks_that_told_nothing_are_passed_over() -> None:
    told = audit([[Mark(t_ns=0, name=Told.IMPORTS, attrs={"seconds": {}})], []])
    assert (told.ranks, told.rows, told.findings) == (0, (), ())


def test_a_mark_without_some_attributes_is_still_read() -> None:
    told = audit([[Mark(t_ns=0, name=Told.COLLECTIVE, attrs={"op": "broadcast", "count": 2})]])
    assert [(row.op, row.count, row.seconds) for row in told.rows] == [("broadcast", 2, 0)]


# --- what is needless ------------------------------------------------------------------------------------------------


EC = "DistributedModelParallel.__init__ > ShardedEmbeddingCollection.__init__ > ShardedTensor._init_from_local_shards"


@pytest.mark.parametrize(
    ("mark", "remedy"),
    [
        (sent("all_gather_object", through=EC, count=52, calls=26), "local_shard_metadata()"),
        (sent("all_gather_object", through="ShardedTensor._init_from_local_shards"), "sharded_tensor("),
        (sent("all_gather_object", through="DTensor.from_local > check_tensor_meta"), "run_check=False"),
        (sent("scatter", through="parallelize_module > distribute_module > distribute_tensor"), "src_data_rank=None"),
        (sent("scatter", through="distribute_tensor > mesh_scatter"), "src_data_rank=None"),
        (sent("_broadcast_coalesced", through="DistributedDataParallel.__init__"), "init_sync=False"),
        (sent("_broadcast_coalesced", through="FullyShardedDataParallel.__init__"), "sync_module_states=False"),
        (sent("broadcast_object_list", through="EmbeddingShardingPlanner.collective_plan"), "cache of sharding plans"),
        (sent("new_group", lazy=False), "TORCH_GLOO_LAZY_INIT=1"),
        (sent("new_group", lazy=False, backend="nccl"), "leave out device_id"),
        (sent("new_group", size=1, ranks=[0]), "process_group(ranks)"),
    ],
)
def test_each_known_waste_has_its_remedy(mark: Mark, remedy: str) -> None:
    finding = only(mark)
    assert remedy in finding.fix
    assert finding.count == mark.attrs["count"]
    assert 0 < finding.saves <= 0.01


@pytest.mark.parametrize(
    "mark",
    [
        sent("broadcast"),
        sent("barrier"),
        sent("all_gather", count=100, calls=100, bytes=100 * (1 << 20)),
        sent("new_group"),
        sent("new_group", size=0, ranks=[], backend="", lazy=False),
        sent("init_process_group", size=1, world=1, ranks=[0], lazy=False),
        sent("broadcast", through="ShardedEmbeddingBagCollection.__init__"),
    ],
)
def test_what_is_needed_is_let_be(mark: Mark) -> None:
    assert found(mark).findings == ()


def test_only_the_later_of_two_groups_with_the_same_ranks_is_needless() -> None:
    first, second = sent("init_process_group", 0.5), sent("new_group", 0.25, group="1")
    other = sent("new_group", 0.125, group="2", world=4)
    finding = only(first, second)
    assert (finding.title, finding.count, finding.saves) == ("groups with the same ranks as another", 1, 0.25)
    assert found(first, sent("new_group", ranks=[0, 2], world=4), sent("new_group", backend="nccl")).findings == ()
    assert found(other).findings == ()


def test_one_barrier_is_kept() -> None:
    finding = only(sent("barrier", 0.2, count=3, calls=3), sent("barrier", 0.2, site="t.py:2 f"))
    assert finding.saves == pytest.approx(0.3)


def test_many_small_messages_from_one_line_become_one() -> None:
    finding = only(sent("all_gather_object", 1.0, count=20, calls=10, bytes=1000))
    assert "one list" in finding.fix
    assert finding.saves == pytest.approx(0.9)
    assert found(sent("all_gather_object", 1.0, count=6, calls=3)).findings == ()


def test_data_parallel_tables_become_one_broadcast() -> None:
    finding = only(sent("broadcast", 1.0, count=4, calls=4, through="ShardedEmbeddingBagCollection.__init__"))
    assert "broadcast_parameters" in finding.fix
    assert finding.saves == pytest.approx(0.75)


def test_nothing_is_saved_twice_and_the_most_comes_first() -> None:
    marks = [sent("all_gather_object", 1.0, through=EC, count=52, calls=26), sent("new_group", 2.0, lazy=False)]
    told = found(*marks)
    assert [finding.saves for finding in told.findings] == [pytest.approx(2.0 * 4 / 5), pytest.approx(1.0)]
    assert sum(finding.saves_at[64] for finding in told.findings) <= told.seconds_at[64]


# --- at more ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [TREE, REDUCE, RING, PAIR])
def test_latency_and_bandwidth_are_recovered(shape: Shape) -> None:
    true = Fit(shape, 50e-6, 0.8e-9)
    points = [(1, 1e3, 2), (10, 1e6, 4), (3, 5e7, 8)]
    fitted = fit(shape, [(*point, true.seconds(*point)) for point in points])
    assert fitted.latency_s == pytest.approx(true.latency_s)
    assert fitted.s_per_byte == pytest.approx(true.s_per_byte)


def test_noise_on_small_messages_is_not_taken_for_bandwidth() -> None:
    fitted = fit(RING, [(1, 10, 2, 100e-6), (1, 5000, 2, 300e-6)])
    assert fitted.s_per_byte == 0
    assert 100e-6 <= fitted.latency_s <= 300e-6


def test_large_messages_that_take_no_latency_are_all_bandwidth() -> None:
    fitted = fit(TREE, [(100, 1e8, 2, 0.1), (1, 1e8, 2, 0.1001)])
    assert fitted.latency_s == 0 or fitted.latency_s < 1e-6
    assert fitted.s_per_byte == pytest.approx(1e-9, rel=0.01)


def test_one_large_message_alone_is_all_bandwidth_and_a_small_one_all_latency() -> None:
    assert fit(TREE, [(1, 1e8, 2, 0.1)]) == Fit(TREE, 0.0, pytest.approx(1e-9))
    assert fit(TREE, [(1, 8, 2, 0.1)]) == Fit(TREE, pytest.approx(0.1), 0.0)


def test_no_measurement_is_no_cost() -> None:
    assert fit(TREE, []).seconds(5, 1e6, 64) == 0
    assert fit(TREE, [(1, 8, 2, 0.0)]).seconds(5, 1e6, 64) == 0


@pytest.mark.parametrize(
    ("op", "growth"),
    [("broadcast", 9), ("all_reduce", 511), ("all_gather", 511), ("send", 1), ("new_group", 512 * 1025 / 10)],
)
def test_each_kind_grows_by_its_own_law(op: str, growth: float) -> None:
    (row,) = found(sent(op, 1.0, lazy=False)).rows
    assert seconds_at(row, 512, fit(row.shape, [(1, 8, 2, 1.0)])) == pytest.approx(growth, rel=1e-6)


def test_what_is_gathered_grows_with_the_ranks_it_is_gathered_from() -> None:
    large = 200 << 20
    assert found(sent("all_gather", 1.0, bytes=large)).seconds_at[8] == pytest.approx(4.0)
    assert found(sent("broadcast", 1.0, bytes=large)).seconds_at[8] == pytest.approx(3.0)
    assert found(sent("all_reduce", 1.0, bytes=large)).seconds_at[8] == pytest.approx(1.0)


def test_a_lazy_group_grows_with_its_ranks_only() -> None:
    (row,) = found(sent("new_group", 1.0)).rows
    assert row.shape is not STORE
    assert found(sent("new_group", 1.0)).seconds_at[512] == pytest.approx(256)


def test_a_group_that_is_not_the_whole_world_stays_as_it_is() -> None:
    told = found(sent("all_gather", 1.0, world=4))
    assert told.seconds_at == {8: 1.0, 64: 1.0, 512: 1.0}


def test_any_numbers_of_ranks_can_be_asked_for() -> None:
    told = audit([[sent("broadcast", 1.0)]], at=(2, 4))
    assert told.seconds_at == {2: pytest.approx(1.0), 4: pytest.approx(2.0)}


def test_a_row_whose_time_is_not_known_costs_what_others_of_its_kind_do() -> None:
    unseen = sent("all_gather", 0.0, site="t.py:9 g")
    known: Traffic = found(sent("all_gather", 1.0), unseen).rows[0]
    told = found(sent("all_gather", 1.0), unseen)
    assert known.least_s == 1.0
    assert told.seconds_at[8] == pytest.approx(7.0 + 6.0)
