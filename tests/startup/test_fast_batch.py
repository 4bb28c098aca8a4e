"""Compiling on a made-up batch leaves the losses bit-identical, and nothing is compiled when the real batch comes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset, DistributedSampler  # noqa: E402

import inductor  # noqa: E402
import ranks as warm_ranks  # noqa: E402
import warm  # noqa: E402
from headway.startup import unchanged  # noqa: E402
from headway.startup.fast import FastBatches, competition, fast_batch  # noqa: E402

PROGRAM = Path(__file__).parent / "warming.py"


def started(folder: Path, kinds: list[str], ranks: int = 1, **told: Any) -> "subprocess.CompletedProcess[str]":
    """Train each kind of model in processes of its own, and wait for the end."""
    environ = {**os.environ, **inductor.environ(), "HEADWAY_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    (folder / "found").mkdir(parents=True)
    words = json.dumps({"kinds": kinds, "where": str(folder / "where"), "found": str(folder / "found"), **told})
    command, settings = [str(PROGRAM), words], {"env": environ, "imports": warm_ranks.IMPORTS}
    if ranks > 1:
        return warm_ranks.run(ranks, command, **settings)
    done: subprocess.CompletedProcess[str] = warm.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=500, **settings
    )
    return done


def trained(folder: Path, kinds: list[str], ranks: int = 1, **told: Any) -> dict[tuple[str, int], Any]:
    """Return what each kind of model did on each rank."""
    done = started(folder, kinds, ranks, **told)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(path.read_text()) for path in (folder / "found").iterdir()]
    assert len(found) == len(kinds) * ranks
    return {(each["kind"], each["rank"]): each for each in found}


def assert_no_trace(each: Any) -> None:
    stock, recorded, used = each["runs"]
    for name in ("losses", "random", "state"):
        assert stock[name] == recorded[name] == used[name], f"{each['kind']}: {name} differ"


def assert_used(each: Any) -> None:
    """It left no trace, and the first real step had nothing to compile."""
    assert_no_trace(each)
    _, recorded, used = each["runs"]
    assert [mark["outcome"] for mark in each["marks"]] == ["recorded", "used"]
    assert used["compiled"] == 0
    assert used["ahead"] == recorded["ahead"] + recorded["compiled"]


@pytest.mark.parametrize(
    "kinds",
    [["plain", "in_backward", "accumulated"], pytest.param(["counting", "autocast"], marks=pytest.mark.thorough)],
    ids=" ".join,
)
def test_losses_state_and_random_numbers_are_those_of_a_run_without_it(kinds: list[str], tmp_path: Path) -> None:
    found = trained(tmp_path, kinds)
    for each in found.values():
        assert_used(each)
    assert len({each["runs"][0]["losses"][-1] for each in found.values()}) == len(kinds)


@pytest.mark.parametrize(
    "kinds", [["ddp", "fsdp"], pytest.param(["ddp_static", "ddp_unused"], marks=pytest.mark.thorough)], ids=" ".join
)
def test_with_ddp_and_fully_shard_it_leaves_no_trace_on_two_ranks(kinds: list[str], tmp_path: Path) -> None:
    for each in trained(tmp_path, kinds, ranks=2).values():
        assert_used(each)


@pytest.mark.thorough
def test_all_ranks_compile_ahead_or_none_does(tmp_path: Path) -> None:
    found = trained(tmp_path, ["ddp_apart", "ddp_fails"], ranks=2)
    for each in found.values():
        assert_no_trace(each)
    for rank in range(2):
        apart, fails = found["ddp_apart", rank], found["ddp_fails", rank]
        assert apart["runs"][2]["forwards"] == 0
        assert apart["marks"][1]["outcome"] == ("not done", "recorded")[rank]
        assert fails["marks"][1]["outcome"] == ("used", "failed")[rank]
    assert found["ddp_fails", 1]["marks"][1]["why"] == "ValueError: made up to fail"


def test_a_rank_that_others_wait_for_ends_with_its_error_and_mixes_no_two_batches(tmp_path: Path) -> None:
    done = started(tmp_path, ["fsdp_fails"], ranks=2, settle_s=2.0, runs=[True, True])
    assert done.returncode
    assert "ValueError: made up to fail" in done.stderr


@pytest.mark.needs_package("torchrec")
@pytest.mark.parametrize("kind", ["pooled", pytest.param("sequence", marks=pytest.mark.thorough)])
def test_tables_that_update_themselves_in_the_backward_are_as_they_were(kind: str, tmp_path: Path) -> None:
    for each in trained(tmp_path, [kind], ranks=2).values():
        assert_used(each)


@pytest.mark.thorough
@pytest.mark.needs("g++")
@pytest.mark.needs_package("cryptography")
def test_what_a_batch_looks_like_comes_with_the_compiled_code(tmp_path: Path) -> None:
    told = {"store": str(tmp_path / "store"), "backend": "inductor", "runs": [True]}
    first = trained(tmp_path / "one", ["tiny"], **told)["tiny", 0]
    second = trained(tmp_path / "two", ["tiny"], **told)["tiny", 0]
    told_of = [[mark["outcome"] for mark in each["marks"] if "data_s" in mark] for each in (first, second)]
    assert told_of == [["recorded"], ["used"]]
    assert first["runs"][0]["losses"] == second["runs"][0]["losses"]


# --- one process, uncompiled: what is done when -----------------------------------------------------------------------


class Rows(Dataset[Any]):
    def __init__(self, size: int = 3, on_first: Callable[[], object] = lambda: None) -> None:
        self.size, self.on_first = size, on_first

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> Any:
        if at == 0:
            self.on_first()
        return torch.full((self.size,), float(at))


class Model(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.layer, self.drop = nn.BatchNorm1d(3), nn.Linear(3, width), nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.layer(self.drop(self.norm(x[:, :3])))


class Job:
    """A model, and how often its forward was called ahead."""

    def __init__(self, where: Path, width: int = 4, fails: bool = False) -> None:
        self.where, self.model, self.calls, self.fails = where, Model(width), 0, fails

    def forward(self, batch: Any) -> Any:
        self.calls += 1
        loss = self.model(batch).square().mean()
        if self.fails:
            raise ValueError("this forward fails")
        return loss

    def batches(self, data: Any = None, workers: int = 1, **options: Any) -> FastBatches:
        loader = DataLoader(data or Rows(), batch_size=4, num_workers=workers)
        return fast_batch(loader, self.forward, model=self.model, where=self.where, **options)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.where.rglob("*.json"))]


@pytest.fixture
def job(home: Path, tmp_path: Path) -> Callable[..., Job]:
    """Makes jobs that an earlier one has recorded for."""
    list(Job(tmp_path / "where").batches())
    return lambda **options: Job(tmp_path / "where", **options)


def test_the_first_run_records_and_computes_nothing_ahead(home: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "where")
    assert [batch.shape for batch in job.batches()] == [(4, 3), (4, 3)]
    assert job.calls == 0
    (record,) = job.records()
    assert record["spec"]["tensor"] == [4, 3]


def test_the_next_one_computes_ahead_and_gives_every_batch_in_every_pass(job: Callable[..., Job]) -> None:
    one = job()
    batches = one.batches()
    assert one.calls == 1
    for _ in range(2):
        assert [int(batch[0, 0]) for batch in batches] == [0, 4]
    assert one.calls == 1
    assert len(batches) == 2
    assert batches.batch_size == 4
    assert not hasattr(batches, "no_such_attribute")


def test_a_batch_that_looks_different_is_told_and_the_next_run_knows(job: Callable[..., Job], capfd: Any) -> None:
    one, two = job(), job()
    list(one.batches(Rows(5)))
    said = capfd.readouterr().err
    assert "misfit: the batch was float32 [4, 3] on cpu, and is float32 [4, 5] on cpu" in said
    assert said.count("headway: fast batch") == 1
    assert two.records()[0]["spec"]["tensor"] == [4, 5]
    list(two.batches(Rows(5)))
    assert two.calls == 1
    assert "fast batch" not in capfd.readouterr().err


def test_what_another_model_recorded_is_not_taken(job: Callable[..., Job]) -> None:
    other = job(width=7)
    list(other.batches())
    assert other.calls == 0
    for path in other.where.rglob("*.json"):  # as if it had been put in the wrong place
        path.write_text(json.dumps({**json.loads(path.read_text()), "model": "another"}))
    one = job()
    list(one.batches())
    assert one.calls == 0


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 7}', ""])
def test_a_record_that_cannot_be_read_is_replaced(job: Callable[..., Job], content: str) -> None:
    one = job()
    (path,) = one.where.rglob("*.json")
    path.write_text(content)
    assert len(list(one.batches())) == 2
    assert one.calls == 0
    assert one.records()[0]["spec"]["tensor"] == [4, 3]


def test_a_record_that_no_batch_can_be_made_of_is_replaced(job: Callable[..., Job], capfd: Any) -> None:
    one = job()
    (path,) = one.where.rglob("*.json")
    path.write_text(json.dumps({**one.records()[0], "spec": {"fields": [["a", {"value": 1}]], "type": "os.Nothing"}}))
    assert len(list(one.batches())) == 2
    assert one.calls == 0
    assert "misfit: the batch was os.Nothing of ['a']" in capfd.readouterr().err
    assert one.records()[0]["spec"]["tensor"] == [4, 3]


def test_a_forward_that_fails_leaves_all_as_it_was_and_training_goes_on(job: Callable[..., Job], capfd: Any) -> None:
    one = job(fails=True)
    torch.manual_seed(3)
    one.model(torch.rand(4, 3)).sum().backward()
    kept = {name: value.clone() for name, value in one.model.state_dict().items()}
    gradients = [tensor.grad for tensor in one.model.parameters()]
    values = [gradient.clone() for gradient in gradients if gradient is not None]
    loader = DataLoader(Rows(), batch_size=4, num_workers=1)
    torch.manual_seed(4)
    iter(loader)
    expected = torch.rand(1)
    torch.manual_seed(4)
    batches = fast_batch(loader, one.forward, model=one.model, where=one.where)
    assert one.calls == 1
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(value, kept[name]) for name, value in one.model.state_dict().items())
    assert all(tensor.grad is gradient for tensor, gradient in zip(one.model.parameters(), gradients, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, values, strict=True))
    assert len(list(batches)) == 2
    assert "failed on rank 0: ValueError: this forward fails" in capfd.readouterr().err


def test_a_loader_without_workers_is_not_overlapped(job: Callable[..., Job], capfd: Any) -> None:
    one = job()
    assert len(list(one.batches(workers=0))) == 2
    assert one.calls == 0
    assert "not overlapped: the loader has no workers" in capfd.readouterr().err


def test_a_loader_that_needs_the_cores_is_not_overlapped(job: Callable[..., Job], capfd: Any) -> None:
    one = job()
    (path,) = one.where.rglob("*.json")
    path.write_text(json.dumps({**one.records()[0], "busy": 10_000.0}))
    assert len(list(one.batches())) == 2
    assert one.calls == 0
    assert "not overlapped: its workers keep 10000.0 of" in capfd.readouterr().err


def _compute() -> None:
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass


def test_how_many_cores_the_workers_keep_busy_is_measured(home: Path, tmp_path: Path) -> None:
    waits, computes = Job(tmp_path / "waits"), Job(tmp_path / "computes")
    list(waits.batches(Rows(on_first=lambda: time.sleep(1.0))))
    list(computes.batches(Rows(on_first=_compute)))
    assert waits.records()[0]["busy"] < computes.records()[0]["busy"]


def test_compiling_competes_where_less_than_a_core_is_left() -> None:
    assert not competition(0.02, 1.0)
    assert not competition(1.0, 2.0)
    assert competition(1.9, 2.0)
    assert competition(0.9, 1.0)


def test_a_worker_that_dies_meanwhile_is_the_loaders_own_error_at_the_first_batch(job: Callable[..., Job]) -> None:
    one = job()
    told, tell = os.pipe()  # it dies while `forward` runs, and not before or after

    def forward(batch: Any) -> Any:
        os.write(tell, b"x")
        time.sleep(100)  # torch's handler of its death ends this

    one.forward = forward  # type: ignore[method-assign]
    batches = one.batches(Rows(on_first=lambda: (os.read(told, 1), os._exit(3))))
    for each in (told, tell):
        os.close(each)
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly"):
        next(iter(batches))


def test_an_iterator_that_was_started_earlier_is_taken(job: Callable[..., Job]) -> None:
    one = job()
    loader = DataLoader(Rows(), batch_size=4, num_workers=1)
    batches = fast_batch(loader, one.forward, model=one.model, where=one.where, started=iter(loader))
    assert one.calls == 1
    assert [int(batch[0, 0]) for batch in batches] == [0, 4]


def test_an_epoch_that_is_set_late_still_counts(job: Callable[..., Job], capfd: Any) -> None:
    def order(fast: bool) -> list[Any]:
        one, data = job(), Rows()
        sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, seed=1)
        loader: Any = DataLoader(data, batch_size=4, num_workers=1, sampler=sampler)
        torch.manual_seed(0)
        source = fast_batch(loader, one.forward, model=one.model, where=one.where) if fast else loader
        source.sampler.set_epoch(5)
        return [batch[:, 0].tolist() for batch in source] + [torch.rand(1).item()]

    assert order(fast=True) == order(fast=False)
    assert "set_epoch was called after fast_batch" in capfd.readouterr().err


def test_a_batch_of_an_unknown_kind_trains_and_is_told(home: Path, tmp_path: Path, capfd: Any) -> None:
    one = Job(tmp_path / "where")
    loader = [object()]
    batches = fast_batch(loader, one.forward, model=one.model, where=one.where)
    assert list(batches) == loader
    assert "not recorded: TypeError: builtins.object cannot be made up" in capfd.readouterr().err


# --- what can be undone -----------------------------------------------------------------------------------------------


def test_a_model_whose_first_batch_makes_its_parameters_is_left_alone() -> None:
    with pytest.raises(unchanged.CannotUndo, match="the first batch decides"):
        unchanged.Unchanged([nn.LazyLinear(3)])


def test_a_state_that_cannot_be_kept_twice_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "SHARE", 0.0)
    with pytest.raises(unchanged.CannotUndo, match="its buffers are larger"):
        unchanged.Unchanged([nn.BatchNorm1d(3)])
    kept = unchanged.Unchanged([nn.Linear(3, 3)])  # its gradients are taken, and its parameters stay out of that
    assert (kept.keeps_all, kept.backward) == (False, True)


class Centred(nn.Module):
    """Takes its bias from the first batch."""

    def __init__(self, is_replaced: bool) -> None:
        super().__init__()
        self.bias, self.is_ready, self.is_replaced = nn.Parameter(torch.zeros(3)), False, is_replaced

    def forward(self, x: Any) -> Any:
        if not self.is_ready:
            mean = x.detach().mean(0)
            self.bias.data = mean if self.is_replaced else self.bias.data.copy_(mean)
            self.is_ready = True
        return x - self.bias


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_a_model_takes_from_its_first_batch_it_takes_from_the_real_one(is_replaced: bool) -> None:
    model = Centred(is_replaced)
    unchanged.Unchanged([model]).compute(lambda: model(torch.ones(4, 3)).sum())
    assert not model.is_ready
    assert torch.equal(model(torch.full((4, 3), 2.0)), torch.zeros(4, 3))


@pytest.mark.needs_package("fbgemm_gpu")
def test_of_tables_that_cannot_be_kept_twice_only_the_forward_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(50_000, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=EmbOptimType.EXACT_SGD, learning_rate=1.0
    )
    one = torch.tensor([0, 1, 2])
    weights, counted = table.weights_host.clone(), table.step
    for share, keeps in ((1e6 / unchanged.free_bytes(torch.device("cpu")), False), (0.25, True)):
        monkeypatch.setattr(unchanged, "SHARE", share)
        kept, calls = unchanged.Unchanged([table]), []
        assert (kept.keeps_all, kept.backward) == (keeps, keeps)
        kept.compute(lambda calls=calls: (calls.append(1), table(one, torch.tensor([0, 1, 3])).sum())[1])
        assert calls == [1]
        assert torch.equal(table.weights_host, weights)
        assert table.step == counted
    table(one, torch.tensor([0, 1, 3])).sum().backward()
    assert not torch.equal(table.weights_host, weights), "it would have updated itself"


def test_a_forward_that_returns_no_loss_is_told() -> None:
    with pytest.raises(TypeError, match="must return the loss as a tensor, and returned tuple"):
        unchanged.Unchanged([nn.Linear(2, 2)]).compute(lambda: (1, 2))  # type: ignore[arg-type, return-value]


def test_what_lies_in_lists_and_shares_memory_is_put_back_too() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.Linear(2, 2)]
            self.total = torch.zeros(4)
            self.half = self.total[:2]
            self.seen, self.ratio = 0, 0.5

        def forward(self, x: Any) -> Any:
            self.half += 1
            self.seen, self.ratio = self.seen + 1, self.ratio / 2
            with torch.no_grad():
                self.hidden[0].weight.mul_(2)
            return self.hidden[0](x).sum()

    model = Odd()
    weight = model.hidden[0].weight.clone()
    unchanged.Unchanged([model]).compute(lambda: model(torch.rand(3, 2)))
    assert (model.seen, model.ratio) == (0, 0.5)
    assert model.total.tolist() == [0.0] * 4
    assert torch.equal(model.hidden[0].weight, weight)
    assert model.hidden[0].weight.grad is None
