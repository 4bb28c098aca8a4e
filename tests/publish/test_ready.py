"""Ready recipes, on real checkpoints, with the real exporter and compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import Clicks, Line, anchored, clicks, clicks_batch
from timing import warm_timing  # noqa: F401
from torch import nn

from headway.errors import InputError
from headway.publish import checks
from headway.publish.out import Out, Rejected
from headway.publish.ready import Served, aotinductor, export, ready, safetensors

pytestmark = pytest.mark.filterwarnings("ignore")

SERVE = """
import json, sys
import torch
torch.manual_seed(0)
golden = torch.load(sys.argv[2], weights_only=True)
run = torch._inductor.aoti_load_package(sys.argv[1])
apart = [
    float((run(**batch)["click"] - expected["click"]).abs().max())
    for batch, expected in zip(golden["batches"], golden["outputs"])
]
other = run(dense=torch.rand(7, 3), ids=torch.arange(7))
print(json.dumps({"apart": apart, "rows": list(other["click"].shape), "headway": "headway" in sys.modules}))
"""


def names(out: Out) -> list[str]:
    return [check.name for check in out.checks]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Everything there is, of a model that was trained; the first try died while it compiled."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(1)
    batches = [clicks_batch(1), clicks_batch(4), clicks_batch(6)]
    anchor, trained = anchored(folder, clicks()), clicks()
    before = Out(folder / "out")
    with pytest.raises(AttributeError, match="no_such_option"):
        aotinductor(anchor, before, Served(clicks(seed=9), batches, options={"no_such_option": True}))
    steps = before.steps
    out = Out(folder / "out")
    # What is random in the user's function was drawn again; the batches are still those of the first try.
    others = [clicks_batch(2), clicks_batch(3)]
    ready("safetensors,aotinductor", lambda: Served(clicks(seed=9), others))(anchor, out)
    return SimpleNamespace(anchor=anchor, steps=steps, out=out, batches=batches, trained=trained)


# --- all of it --------------------------------------------------------------------------------------------------------


def test_weights_program_package_and_golden_batches_are_made(published: Any) -> None:
    assert set(published.out.files()) == {
        "golden/batches.pt", "package/model.pt2", "program/model.pt2", "weights/model.safetensors",
    }  # fmt: skip


def test_all_that_was_made_is_checked_against_eager(published: Any) -> None:
    assert all(check.passed for check in published.out.checks)
    assert names(published.out) == [
        "weights finite", "weights of the model finite", "outputs of the model finite", "program parity",
        "package parity",
    ]  # fmt: skip
    assert "3 golden batches give what eager gives, within 1e-05 + 0.0001 × |eager|" in published.out.checks[-1].told


def test_golden_outputs_are_those_of_the_trained_weights_in_evaluation(published: Any) -> None:
    golden = torch.load(published.out / checks.GOLDEN, weights_only=True)
    model = published.trained.eval()
    for batch, told, given in zip(golden["batches"], golden["outputs"], published.batches, strict=True):
        torch.testing.assert_close(batch, given, rtol=0, atol=0)
        torch.testing.assert_close(told["click"], model(**given)["click"], rtol=0, atol=0)


def test_a_try_after_a_crash_in_the_compiler_exports_nothing_again(published: Any) -> None:
    assert set(published.steps) == {"golden", "program"}
    assert {name: published.out.steps[name] for name in published.steps} == published.steps, "to the nanosecond"
    assert set(published.out.steps) == {"golden", "program", "package", "weights"}


def test_signature_and_facts_say_what_goes_in_and_what_it_runs_on(published: Any) -> None:
    signature, facts = published.out.signature, published.out.facts
    assert signature["inputs"] == {"dense": "float32[*, 3]", "ids": "int64[*]"}
    assert signature["outputs"] == {"['click']": "float32[*, 2]", "['rows']": "int"}
    assert signature["weights"]["table.weight"] == "float32[50, 8]"
    assert signature["weights"]["norm.num_batches_tracked"] == "int64[]"
    assert facts["cpu"] == torch.backends.cpu.get_cpu_capability()
    assert facts["sizes"] == "any for * in dense: float32[*, 3], ids: int64[*]"
    assert (facts["atol"], facts["rtol"]) == (1e-5, 1e-4)
    assert facts["weights"]["tensors"] == 10
    json.dumps([signature, facts], allow_nan=False)


def test_the_package_is_served_by_a_process_that_knows_only_torch(published: Any) -> None:
    words = [str(published.out / "package/model.pt2"), str(published.out / checks.GOLDEN)]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HEADWAY", "PYTHON"))}
    ended = subprocess.run([sys.executable, "-c", SERVE, *words], env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert max(told["apart"]) < 1e-5
    assert told["rows"] == [7, 2], "no golden batch has that size"
    assert told["headway"] is False


def test_small_tensors_of_the_package_can_be_replaced(published: Any) -> None:
    package = torch._inductor.aoti_load_package(str(published.out / "package/model.pt2"))
    known = {name.replace(".", "_") for name in package.get_constant_fqns()}
    assert "last_bias" in known, "a bias of two numbers is compiled in, unless that is forbidden"


@pytest.mark.usefixtures("warm_timing")
def test_a_version_compared_with_itself_passes(published: Any) -> None:
    out = published.out
    size = sum(path.stat().st_size for path in out.files().values())
    previous: Any = SimpleNamespace(signature=json.loads(json.dumps(out.signature)), size=size, facts=out.facts)
    found = {each.name: each for each in checks.compare_with_previous(out, previous, out.folder)}
    assert list(found) == ["signature", "size", "latency"]
    assert all(each.passed for each in found.values())
    assert found["latency"].figures["before"] > 0
    assert "package/model.pt2 takes" in found["latency"].told


@pytest.mark.thorough
@pytest.mark.usefixtures("warm_timing")
@pytest.mark.needs("g++")
def test_a_package_before_that_kills_its_process_is_told_and_no_failure(published: Any, tmp_path: Path) -> None:
    import shutil
    import zipfile

    source, library = tmp_path / "dies.cpp", tmp_path / "dies.so"
    source.write_text("#include <csignal>\n__attribute__((constructor)) static void dies() { raise(SIGILL); }\n")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True, timeout=120)
    before = tmp_path / "before" / "package" / "model.pt2"
    before.parent.mkdir(parents=True)
    with zipfile.ZipFile(published.out / "package/model.pt2") as good, zipfile.ZipFile(before, "w") as bad:
        for entry in good.infolist():
            with good.open(entry) as read, bad.open(entry.filename, "w") as write:
                shutil.copyfileobj(open(library, "rb") if entry.filename.endswith("wrapper.so") else read, write)
    found = checks.similar_latency(published.out, tmp_path / "before", published.out.facts["cpu"])
    assert found.passed
    assert found.told == "not compared: the version before does not run here (signal 4)"


# --- parts of it ------------------------------------------------------------------------------------------------------


def test_with_one_golden_batch_sizes_are_fixed_and_the_facts_say_so(tmp_path: Path) -> None:
    out = Out(tmp_path / "out")
    export(anchored(tmp_path, Line()), out, Served(Line(), [(torch.rand(4, 3),)]))
    assert out.signature["inputs"] == {"x": "float32[4, 3]"}
    assert out.signature["outputs"] == {"output": "float32[4, 3]"}
    assert out.facts["sizes"] == "those of the golden batches, which have one size, and no other"


def test_sizes_the_user_declares_are_those_of_the_program(tmp_path: Path) -> None:
    out = Out(tmp_path / "out")
    shapes = {"x": {0: torch.export.Dim("rows", max=64)}}
    export(anchored(tmp_path, Line()), out, Served(Line(), [(torch.rand(4, 3),)], dynamic_shapes=shapes, name="line"))
    run = checks.load_program(out / "program/line.pt2")
    assert run(torch.rand(9, 3)).shape == (9, 3)
    with pytest.raises(RuntimeError, match="<= 64"):
        run(torch.rand(65, 3))


def test_what_torch_cannot_export_says_what_to_do(tmp_path: Path) -> None:
    class Branches(Line):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(Exception, match=r"data-dependent|Could not guard") as caught:
        export(anchored(tmp_path, Line()), Out(tmp_path / "out"), Served(Branches(), [(torch.rand(4, 3),)]))
    assert any("torch.export has made no program of model" in note for note in caught.value.__notes__)


def test_golden_batches_take_no_more_room_than_is_seen_of_them(tmp_path: Path) -> None:
    out, dataset = Out(tmp_path / "out"), torch.rand(1_000_000, 3)
    export(anchored(tmp_path, Line()), out, Served(Line(), [(dataset[:4],), (dataset[4:10],)]))
    assert (out / checks.GOLDEN).stat().st_size < 100_000


def test_the_program_holds_no_batch_of_the_user(tmp_path: Path) -> None:
    out = Out(tmp_path / "out")
    export(anchored(tmp_path, Line()), out, Served(Line(), [(torch.rand(4, 3),)]))
    assert torch.export.load(out / "program/model.pt2").example_inputs is None


def test_a_recipe_of_the_user_may_call_several_and_checks_are_made_once(tmp_path: Path) -> None:
    anchor, out = anchored(tmp_path, Line()), Out(tmp_path / "out")
    safetensors(anchor, out)
    export(anchor, out, Served(Line(), [(torch.rand(4, 3),)]))
    assert len(names(out)) == len(set(names(out))) == 4


@pytest.mark.parametrize("recipe", [export, aotinductor])
def test_a_second_model_in_one_version_is_refused(tmp_path: Path, recipe: Any) -> None:
    anchor, out, batches = anchored(tmp_path, Line()), Out(tmp_path / "out"), [(torch.rand(4, 3),)]
    export(anchor, out, Served(Line(), batches, name="user"))
    with pytest.raises(InputError, match="item is not what program was made of in this version"):
        recipe(anchor, out, Served(Line(), batches, name="item"))


@pytest.mark.thorough  # the journey of a DLRM publishes one, too
@pytest.mark.needs_package("torchrec")
def test_a_model_of_keyed_jagged_tensors_is_exported_for_any_size(tmp_path: Path) -> None:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    class Rec(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tables = [
                EmbeddingBagConfig(name=f"t{i}", embedding_dim=4, num_embeddings=10, feature_names=[f"f{i}"])
                for i in range(2)
            ]
            self.bags, self.over = EmbeddingBagCollection(tables=tables), nn.Linear(11, 1)

        def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
            return self.over(torch.cat([dense, self.bags(sparse).values()], 1))  # type: ignore[no-any-return]

    def batch(rows: int) -> tuple[torch.Tensor, KeyedJaggedTensor]:
        lengths = torch.arange(2 * rows) % 3
        values = torch.randint(0, 10, (int(lengths.sum()),))
        return torch.rand(rows, 3), KeyedJaggedTensor(keys=["f0", "f1"], values=values, lengths=lengths)

    torch.manual_seed(0)
    trained, out = Rec(), Out(tmp_path / "out")
    rows, ids = torch.export.Dim("rows", min=2), torch.export.Dim("ids")
    shapes = {"dense": {0: rows}, "sparse": [{0: ids}, None, {0: 2 * rows}, None, None, None]}
    export(anchored(tmp_path, trained), out, Served(Rec(), [batch(4), batch(6)], dynamic_shapes=shapes))
    assert out.signature["inputs"]["sparse__lengths"] == "int64[*]"
    assert out.signature["inputs"]["sparse__offsets"] == "None", "eager remembers offsets in its batch: not in ours"
    assert "KeyedJaggedTensor, ['f0', 'f1']" in out.signature["call"], "of renamed features all else is the same"
    other = batch(9)
    run = checks.load_program(out / "program/model.pt2")
    torch.testing.assert_close(run(*checks.own(other)), trained.eval()(*other))


# --- what is corrupt --------------------------------------------------------------------------------------------------


def broken(**changed: Any) -> dict[str, Any]:
    """The state of a trained model, with changes; None leaves a tensor out."""
    state = dict(clicks().state_dict()) | {name.replace("__", "."): value for name, value in changed.items()}
    return {name: value for name, value in state.items() if value is not None}


def with_nan() -> torch.Tensor:
    weight = torch.rand(16, 11)
    weight[3, 4], weight[5, 6] = torch.nan, torch.inf
    return weight


def test_nan_in_a_weight_is_rejected_by_safetensors(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"NaN or Inf in the weights: first\.weight has 2"):
        safetensors(anchored(tmp_path, broken(first__weight=with_nan())), Out(tmp_path / "out"))


def test_nan_in_a_weight_is_rejected_before_anything_is_exported(tmp_path: Path) -> None:
    anchor = anchored(tmp_path, broken(first__weight=with_nan()))
    for _ in range(2):  # what one try has found, the next one finds
        out = Out(tmp_path / "out")
        with pytest.raises(Rejected, match=r"weights of the model: first\.weight has 2"):
            export(anchor, out, Served(Clicks(), [clicks_batch(4)]))
        assert set(out.steps) == {"golden"}


def test_nan_that_comes_only_out_is_rejected(tmp_path: Path) -> None:
    class Log(Line):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).log()

    trained = Log()
    nn.init.zeros_(trained.linear.weight)
    nn.init.constant_(trained.linear.bias, -1.0)
    batches = [(torch.empty(0, 3),), (torch.rand(4, 3),)]
    with pytest.raises(Rejected, match="NaN or Inf in the outputs of the model: batch 1, output has 12"):
        export(anchored(tmp_path, trained), Out(tmp_path / "out"), Served(Log(), batches))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"last__weight": torch.rand(2, 17)}, r"last\.weight .*\[2, 16\].*\[2, 17\]"),
        ({"last__weight": torch.rand(2, 16, dtype=torch.float64)}, r"last\.weight .*float32.*float64"),
        ({"last__weight": None}, r"last\.weight"),
    ],
    ids=["shape", "dtype", "missing"],
)
def test_a_checkpoint_that_does_not_fit_the_model_is_refused(tmp_path: Path, changed: Any, told: str) -> None:
    out = Out(tmp_path / "out")
    with pytest.raises(InputError, match=told):
        export(anchored(tmp_path, broken(**changed)), out, Served(Clicks(), [clicks_batch(4)]))
    assert out.files() == {}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"last__weight": torch.rand(2, 17)}, "weights last.weight was float32[2, 16], is float32[2, 17]"),
        ({"last__weight": torch.rand(2, 16).double()}, "weights last.weight was float32[2, 16], is float64[2, 16]"),
        ({"last__weight": None}, "weights last.weight is missing, was float32[2, 16]"),
    ],
    ids=["shape", "dtype", "missing"],
)
def test_weights_that_differ_from_the_version_before_are_found(tmp_path: Path, changed: Any, told: str) -> None:
    before, now = Out(tmp_path / "before"), Out(tmp_path / "now")
    safetensors(anchored(tmp_path / "a", clicks()), before)
    safetensors(anchored(tmp_path / "b", broken(**changed)), now)
    found = checks.same_signature(now.signature, before.signature)
    assert not found.passed
    assert found.told == f'{told}. If that is meant: --allow signature, or allow=("signature",)'


# --- what is given ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"batches": []}, "Served has no golden batch"),
        ({"batches": (torch.rand(4, 3), torch.rand(4, 3))}, "Served has a Tensor as a golden batch"),
        ({"model": clicks}, "Served has a function as its model"),
        ({"name": "a/b"}, "'a/b' cannot be the name of files"),
    ],
)
def test_served_says_what_is_wrong_with_it(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Served(**{"model": Line(), "batches": [(torch.rand(4, 3),)]} | given)


def test_an_unknown_recipe_stops_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no ready recipe 'safetensor': did you mean safetensors\?"):
        ready("card,safetensor")


@pytest.mark.parametrize("recipe", ["export", "safetensors, aotinductor"])
def test_a_recipe_that_needs_the_model_says_how_to_give_it(recipe: str) -> None:
    with pytest.raises(InputError, match=r"needs the model, .* Give model=file\.py:function"):
        ready(recipe)


def test_a_function_that_gives_no_served_is_named(tmp_path: Path) -> None:
    anchor: Any = None
    with pytest.raises(InputError, match=r"a Line was given to be served"):
        ready("export", lambda: Line())(anchor, Out(tmp_path))  # type: ignore[arg-type, return-value]
