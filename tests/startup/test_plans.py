"""A sharding plan is planned once, and read ever after, unless anything that it depends on is another."""

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torchrec_models import bags, on_ranks, rows

from headway.errors import HeadwayError, InputError
from headway.events.job import JobReader
from headway.events.vocabulary import Mark, Told
from headway.paths import JobPaths, jobs_in
from headway.startup import plans, ranks
from headway.startup.plans import sharding_plan

pytestmark = [pytest.mark.needs_package("torchrec"), pytest.mark.filterwarnings("ignore")]


class Model(nn.Module):
    """Tables of both kinds, and a dense layer."""

    def __init__(self, tables: int = 3, dense: int = 4, **settings: Any) -> None:
        super().__init__()
        self.bags, self.rows, self.dense = bags(tables, **settings), rows(2), nn.Linear(dense, 1)


def planner(ranks: int = 2, constraints: Any = None, **options: Any) -> Any:
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

    topology = Topology(world_size=ranks, compute_device="cpu", **options.pop("topology", {}))
    return EmbeddingShardingPlanner(topology=topology, debug=False, constraints=constraints, **options)


def sharders(**fused: Any) -> list[Any]:
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    return [EmbeddingBagCollectionSharder(fused_params=fused or None), EmbeddingCollectionSharder()]


def planned(cache: Path, planner: Any = None, model: Any = None, by: Any = None) -> Any:
    return sharding_plan(planner or globals()["planner"](), model or Model(), by or sharders(), cache=cache)


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.json"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each plan that TorchRec's planner makes."""
    from torchrec.distributed.planner import EmbeddingShardingPlanner

    own, plans = EmbeddingShardingPlanner.plan, list[Any]()

    def plan(self: Any, *args: Any) -> Any:
        plans.append(own(self, *args))
        return plans[-1]

    monkeypatch.setattr(EmbeddingShardingPlanner, "plan", plan)
    return plans


# --- what a plan depends on ------------------------------------------------------------------------------------------


def test_a_stored_plan_is_the_plan_that_would_be_made(home: Path, asked: list[Any]) -> None:
    first, second = planned(home / "plans"), planned(home / "plans")
    assert len(asked) == 1
    assert first == second == planner().plan(Model(), sharders())
    assert str(first) == str(second)


@pytest.mark.parametrize("reserves", ["Heuristical", "Inference", "FixedPercentage", "FixedAbsolute"])
def test_a_planner_that_was_used_before_finds_it_too(reserves: str, home: Path, asked: list[Any]) -> None:
    from torchrec.distributed.planner import storage_reservations

    much: dict[str, Any] = {"hbm_reserved_bytes": 9} if reserves == "FixedAbsolute" else {"percentage": 0.1}
    kind = getattr(storage_reservations, f"{reserves}StorageReservation")
    used = planner(storage_reservation=kind(**much))
    planned(home / "plans", used)
    planned(home / "plans", used)
    assert len(asked) == 1


def constraints(**settings: Any) -> dict[str, Any]:
    from torchrec.distributed.planner import ParameterConstraints

    return {"bag0": ParameterConstraints(**settings)}


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "ranks": lambda: {"planner": planner(4)},
    "memory of a device": lambda: {"planner": planner(topology={"ddr_cap": 10 << 30})},
    "bandwidth": lambda: {"planner": planner(topology={"inter_host_bw": 1.0})},
    "batch size": lambda: {"planner": planner(batch_size=64)},
    "a constraint": lambda: {"planner": planner(constraints=constraints(sharding_types=["table_wise"]))},
    "pooling": lambda: {"planner": planner(constraints=constraints(pooling_factors=[7.0]))},
    "one table more": lambda: {"model": Model(4)},
    "rows of a table": lambda: {"model": Model(rows=60)},
    "width of a table": lambda: {"model": Model(width=16)},
    "a dense layer": lambda: {"model": Model(dense=5)},
    "how a table is trained": lambda: {"by": sharders(learning_rate=0.5)},
    "fewer sharders": lambda: {"by": sharders()[:1]},
}


FURTHER = {"memory of a device", "bandwidth", "pooling", "one table more", "width of a table"}
"""Changes of the same kind as others."""


@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=pytest.mark.thorough if name in FURTHER else ()) for name in CHANGES]
)
def test_a_plan_for_something_else_is_not_taken(change: str, home: Path, asked: list[Any]) -> None:
    planned(home / "plans")
    planned(home / "plans", **CHANGES[change]())
    assert len(asked) == len(files(home / "plans")) == 2


def test_a_plan_of_another_version_is_not_taken(home: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    planned(home / "plans")
    monkeypatch.setattr("headway.startup.plans.version", lambda package: "9.9")
    planned(home / "plans")
    assert len(asked) == 2


def test_what_cannot_be_understood_is_planned_each_time(
    home: Path, asked: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        plan = planned(home / "plans", planner(callbacks=[lambda options: options]))
        assert plan == asked[-1]
    assert len(asked) == 2
    assert not files(home / "plans")
    assert capfd.readouterr().err.count("it is not stored, since planner._callbacks[0] is builtins.function") == 1


def test_a_planner_of_ones_own_is_asked_each_time(home: Path, asked: list[Any]) -> None:
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

    class Own(EmbeddingShardingPlanner):
        """Its plans may depend on anything."""

    for _ in range(2):
        planned(home / "plans", Own(topology=Topology(world_size=2, compute_device="cpu"), debug=False))
    assert len(asked) == 2
    assert not files(home / "plans")


def test_a_plan_that_a_planner_had_no_time_for_is_not_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Any]
) -> None:
    hurried = planner(timeout_seconds=1)
    own = type(hurried).plan
    monkeypatch.setattr(type(hurried), "plan", lambda *args: (time.sleep(1.1), own(*args))[1])
    planned(home / "plans", hurried)
    assert not files(home / "plans")


def test_a_plan_is_kept_in_an_object_store_as_well(home: Path, asked: list[Any]) -> None:
    for _ in range(2):
        sharding_plan(planner(), Model(), sharders(), cache=f"memory://{home.name}/plans")
    assert len(asked) == 1


def test_without_a_place_it_is_kept_below_the_home(home: Path, asked: list[Any]) -> None:
    for _ in range(2):
        sharding_plan(planner(), Model(), sharders())
    assert len(asked) == 1
    assert len(files(home / "plans")) == 1


# --- what must not be used -------------------------------------------------------------------------------------------


def sealed(stored: dict[str, Any]) -> bytes:
    """A file whose hash is right, whatever is in it."""
    from headway.startup.plans import _hash

    return json.dumps(stored | {"hash": _hash({"key": stored["key"], "plan": stored["plan"]})}).encode()


def first_sharding(stored: dict[str, Any]) -> dict[str, Any]:
    found = next(each for each in stored["plan"]["bags"].values() if "shards" in each)
    assert isinstance(found, dict)
    return found


def change(stored: dict[str, Any], what: str) -> bytes:
    stored, sharding = copy.deepcopy(stored), None
    sharding = first_sharding(stored)
    if what == "rank":
        sharding["shards"][0][2] = "rank:7/cpu"
    elif what == "size":
        sharding["shards"][0][1][0] -= 1
    elif what == "type":
        sharding["sharding_type"] = "os.system"
    elif what == "table":
        stored["plan"]["bags"].pop("bag1")
    elif what == "module":
        stored["plan"]["attic"] = stored["plan"].pop("bags")
    elif what == "field":
        sharding.pop("compute_kernel")
    return sealed(stored)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "it is damaged"),
    "cut off": (lambda data: data[:-100], "it is damaged"),
    "no JSON": (lambda data: b"\x80\x04cos\nsystem\n", "it is damaged"),
    "of another kind": (lambda data: b"[1, 2]", "it is damaged"),
    "one digit": (lambda data: data.replace(b"50", b"51", 1), "its hash is another one"),
    "a rank that is not": (lambda data: change(json.loads(data), "rank"), "there are 2"),
    "a row too few": (lambda data: change(json.loads(data), "size"), "it does not fit table bags.bag"),
    "an unknown sharding": (lambda data: change(json.loads(data), "type"), "'os.system' is not a valid ShardingType"),
    "a table too few": (lambda data: change(json.loads(data), "table"), "other tables than the model"),
    "another module": (lambda data: change(json.loads(data), "module"), "other tables than the model"),
    "a field too few": (lambda data: change(json.loads(data), "field"), "it is damaged: KeyError"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_plan_is_replaced(
    damage: str, home: Path, asked: list[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.startup.words._said", set())
    wise = constraints(sharding_types=["table_wise"])
    right = planned(home / "plans", planner(constraints=wise))
    (file,) = files(home / "plans")
    whole, (spoil, why) = file.read_bytes(), DAMAGES[damage]
    file.write_bytes(spoil(whole))
    assert file.read_bytes() != whole
    assert planned(home / "plans", planner(constraints=wise)) == right
    assert len(asked) == 2
    assert why in capfd.readouterr().err
    assert file.read_bytes() == whole


def test_a_plan_of_another_topology_is_refused_whatever_it_is_called(
    home: Path, asked: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    planned(home / "plans", planner(2))
    (two,) = files(home / "plans")
    planned(home / "plans", planner(4))
    (four,) = {*files(home / "plans")} - {two}
    two.write_bytes(four.read_bytes())
    assert planned(home / "plans", planner(2)) == asked[0]
    assert f"it is the plan of another model or planner, with the key {four.stem}" in capfd.readouterr().err


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_plan(
    home: Path, asked: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    (home / "plans").touch()
    for _ in range(2):
        assert planned(home / "plans") == asked[-1]
    assert len(asked) == 2
    assert "it is not stored (" in capfd.readouterr().err


# --- several ranks ---------------------------------------------------------------------------------------------------


def plan_together(cache: str, group: list[int] | None = None) -> dict[str, Any]:
    """What each rank is told; every rank but the first has a place that cannot be read."""
    mine = dist.new_group(group) if group else None
    members = group or list(range(dist.get_world_size()))
    if dist.get_rank() not in members:
        return {}
    place = cache if dist.get_rank() == members[0] else "/proc/no-such-place"
    before = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    plans = [sharding_plan(planner(len(members)), Model(), sharders(), mine, place) for _ in range(2)]
    sent = dist.group.WORLD._get_sequence_number_for_group() - before  # type: ignore[union-attr]
    return {"plans": [str(plan) for plan in plans], "sent": sent}


def outcomes(home: Path) -> list[tuple[str, str]]:
    """What the ranks' journals say of their plans."""
    (job,) = jobs_in(home)
    marks = [
        (record.attrs["outcome"], record.attrs["why"])
        for _, batch in JobReader(JobPaths(home, job)).poll()
        for record in batch.records
        if isinstance(record, Mark) and record.name == Told.SHARDING_PLAN
    ]
    return sorted(marks)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_all_ranks_have_the_first_ones_plan_and_nothing_is_sent(ranks: int, tmp_path: Path) -> None:
    found = on_ranks(ranks, "test_plans:plan_together", tmp_path, str(tmp_path / "plans"))
    assert {plan for each in found for plan in each["plans"]} == {str(planner(ranks).plan(Model(), sharders()))}
    assert [each["sent"] for each in found] == [0] * ranks
    assert outcomes(tmp_path / "home") == [("hit", "")] * ranks + [("planned", "")] * ranks


def test_ranks_of_a_group_plan_for_themselves(tmp_path: Path) -> None:
    found = on_ranks(4, "test_plans:plan_together", tmp_path, str(tmp_path / "plans"), [1, 2])
    assert [len(each) for each in found] == [0, 2, 2, 0]
    assert {plan for each in found[1:3] for plan in each["plans"]} == {str(planner(2).plan(Model(), sharders()))}


def plan_apart(cache: str) -> list[str]:
    """Ranks whose models differ, each in another way."""
    told = []
    for models in ((Model(), Model(rows=60)), (Model(), Model(4)), (Model(dense=4), Model(dense=5))):
        with pytest.raises(InputError) as raised:
            sharding_plan(planner(), models[dist.get_rank()], sharders(), cache=cache)
        told.append(str(raised.value))
    return told


def test_ranks_with_different_models_are_told_the_difference(tmp_path: Path) -> None:
    for size, table, dense in on_ranks(2, "test_plans:plan_apart", tmp_path, str(tmp_path / "plans")):
        assert "ranks 0 and 1 have different models" in size
        assert "num_embeddings is 50 on rank 0 and 60 on rank 1" in size
        assert "bags._embedding_bag_configs.[3] is missing on rank 0" in table
        assert "tensors.dense.weight is [1, 4] torch.float32 on rank 0 and [1, 5] torch.float32 on rank 1" in dense
    assert not files(tmp_path / "plans")


def fail_to_plan(cache: str) -> str:
    from torchrec.distributed.planner.types import PlannerError

    own, heard = plans._Group.hear, Path(f"{cache}-heard")

    def hear_late(self: Any) -> Any:
        time.sleep(0.5)
        told = own(self)
        heard.touch()
        return told

    plans._Group.hear = hear_late  # type: ignore[method-assign]
    ranks._LINGER_S = 100.0  # the other rank may not have run for more than five seconds
    impossible = planner(topology={"ddr_cap": 1, "hbm_cap": 1})
    with pytest.raises((HeadwayError, PlannerError)) as raised:
        sharding_plan(impossible, Model(), sharders(), cache=cache)
    assert isinstance(raised.value, HeadwayError) == (dist.get_rank() != 0)
    assert heard.exists(), "the first rank, which may have the store, stays until then"
    return str(raised.value)


def test_ranks_do_not_wait_for_a_plan_that_there_is_none_of(tmp_path: Path) -> None:
    first, second = on_ranks(2, "test_plans:fail_to_plan", tmp_path, str(tmp_path / "plans"))
    assert second.startswith("there is no sharding plan, since rank 0 could not make one: PlannerError")
    assert first[:60] in second


def plan_beyond_json(cache: str) -> tuple[str, str]:
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.types import KeyValueParams

    own = EmbeddingShardingPlanner.plan

    def plan(self: Any, *args: Any) -> Any:
        made = own(self, *args)
        made.plan["bags"]["bag0"].key_value_params = KeyValueParams(l2_cache_size=3)
        return made

    EmbeddingShardingPlanner.plan = plan
    found: Any = sharding_plan(planner(), Model(), sharders(), cache=cache)
    return str(found), str(found.plan["bags"]["bag0"].key_value_params.l2_cache_size)


def test_a_plan_with_more_than_a_file_can_hold_is_sent_and_not_stored(tmp_path: Path) -> None:
    first, second = on_ranks(2, "test_plans:plan_beyond_json", tmp_path, str(tmp_path / "plans"))
    assert first == second
    assert first[1] == "3"
    assert not files(tmp_path / "plans")
    assert "it is not stored (something in it has no place in a file)" in (tmp_path / "said").read_text()


def plan_without_a_store(cache: str) -> str:
    del dist.distributed_c10d._get_default_store
    return str(sharding_plan(planner(), Model(), sharders(), cache=cache))


def test_where_torch_hides_its_store_the_planner_broadcasts(tmp_path: Path) -> None:
    found = on_ranks(2, "test_plans:plan_without_a_store", tmp_path, str(tmp_path / "plans"))
    assert set(found) == {str(planner().plan(Model(), sharders()))}
    assert "torch does not show its store" in (tmp_path / "said").read_text()
