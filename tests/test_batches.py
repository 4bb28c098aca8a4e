"""What a batch looks like, so that another one can be made up."""

import json
import subprocess
import sys
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest

from headway import batches

torch = pytest.importorskip("torch")

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Example:
    x: Any
    label: Any = None


def again(batch: Any, seed: int = 0) -> Any:
    """What is made up from the batch's spec, as it comes out of a file."""
    return batches.build(json.loads(batches.as_bytes(batch)), seed)


def test_a_tensor_is_told_by_size_strides_type_and_device() -> None:
    assert batches.spec(torch.zeros(3, 4).t()) == {
        "tensor": [4, 3], "strides": [1, 4], "dtype": "torch.float32", "device": "cpu",
    }  # fmt: skip


def test_of_integers_the_range_is_told_since_they_may_be_indices() -> None:
    assert batches.spec(torch.tensor([3, 9, 5]))["range"] == [3, 9]
    assert "range" not in batches.spec(torch.tensor([], dtype=torch.int64))


def test_the_structure_is_kept_and_nothing_of_what_is_in_it() -> None:
    told = batches.as_bytes(OrderedDict(x=[torch.full((2,), 123.5)], n=7, y=(None, "train")))
    assert b"123.5" not in told
    found = json.loads(told)
    assert found["type"] == "collections.OrderedDict"
    assert [name for name, _ in found["mapping"]] == ["x", "n", "y"]
    assert found["mapping"][1][1] == {"value": 7}


@pytest.mark.parametrize("strange", [object(), {"x": object()}, "a" * 5000, {object(): 1}])
def test_what_cannot_be_made_up_is_refused(strange: Any) -> None:
    with pytest.raises(TypeError, match="cannot be made up"):
        batches.spec(strange)


class Strange(dict):  # type: ignore[type-arg]
    pass


def test_a_mapping_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="Strange cannot be made up"):
        batches.spec(Strange(x=1))


# --- made up ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, 4),
        torch.rand(3, 4).t(),
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.rand(1, 4).expand(5, 4),
        torch.rand(4, 8)[:, ::2],
        torch.rand(3, dtype=torch.bfloat16),
        torch.rand(3, dtype=torch.complex64),
        torch.rand(3, requires_grad=True),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.tensor([-3, 12], dtype=torch.int8),
        torch.tensor([250], dtype=torch.uint8),
        torch.tensor([2**63 - 1, -(2**63)]),
        torch.empty(0, 3),
        torch.empty(0, dtype=torch.int64),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_a_made_up_tensor_is_of_the_same_size_strides_and_type(tensor: Any) -> None:
    made = again(tensor)
    assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert made.requires_grad == tensor.requires_grad
    assert batches.differences(batches.spec(tensor), batches.spec(made)) == []
    assert bool(torch.isfinite(made.detach().to(torch.complex64)).all())


def test_made_up_integers_lie_in_the_range_that_was_seen() -> None:
    made = again(torch.tensor([3] * 500 + [9]))
    assert (int(made.min()), int(made.max())) == (3, 9)
    assert again(torch.ones(5, dtype=torch.bool)).all()


def test_the_structure_is_made_up_with_its_own_classes() -> None:
    real = OrderedDict(
        a=Pair(torch.rand(2), [1, "text", None]), b=Example(torch.rand(3)), c=(UserDict(x=torch.rand(1)),), d=0.5
    )
    made = again(real)
    assert list(made) == list(real)
    assert isinstance(made, OrderedDict)
    assert isinstance(made["a"], Pair)
    assert isinstance(made["b"], Example)
    assert isinstance(made["c"][0], UserDict)
    assert (made["a"].right, made["d"]) == ([1, "text", None], 0.5)


def test_making_one_up_draws_from_no_generator_but_its_own() -> None:
    state = torch.get_rng_state()
    one, two, other = again(torch.rand(4), 0), again(torch.rand(4), 0), again(torch.rand(4), 1)
    torch.set_rng_state(state)
    expected = torch.rand(1)
    torch.set_rng_state(state)
    again(torch.empty(4))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    "spec",
    [
        {"fields": [["args", {"value": "x"}]], "type": "subprocess.Popen"},
        {"fields": [["x", {"value": 1}]], "type": "not_imported_anywhere.Example"},
        {"fields": [["x", {"value": 1}]], "type": f"{__name__}.Example"},
        {"mapping": [], "type": f"{__name__}.Strange"},
        {"sequence": [], "type": "builtins.exec"},
        {"tensor": [2], "strides": [1], "dtype": "torch.load", "device": "cpu"},
        {"tensor": [2], "strides": [1, 2], "dtype": "torch.float32", "device": "cpu"},
        {"tensor": [-2], "strides": [1], "dtype": "torch.float32", "device": "cpu"},
        {"tensor": "no", "strides": [1], "dtype": "torch.float32", "device": "cpu"},
        {"value": {"deep": 1}},
        {},
        7,
    ],
    ids=str,
)
def test_a_spec_that_names_something_else_is_refused(spec: Any) -> None:
    with pytest.raises(ValueError, match="no batch can be made up"):
        batches.build(spec)


def test_a_spec_imports_nothing() -> None:
    code = (
        "import sys; from headway import batches\n"
        "try: batches.build({'fields': [['a', {'value': 1}]], 'type': 'sqlite3.dbapi2.Row'})\n"
        "except ValueError as error: print(error, 'sqlite3' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("is no class that a batch can be made of) False")


# --- compared --------------------------------------------------------------------------------------------------------


def test_other_values_are_no_misfit_and_other_sizes_types_and_names_are() -> None:
    old = batches.spec({"x": torch.rand(4, 3), "y": torch.tensor([1, 2]), "n": 7})
    assert batches.differences(old, batches.spec({"x": torch.rand(4, 3), "y": torch.tensor([8, 900]), "n": 8})) == []
    new = batches.spec({"x": torch.rand(3, 4).t(), "y": torch.tensor([1.0, 2.0]), "n": "seven"})
    assert batches.differences(old, new) == [
        "the batch['x'] was float32 [4, 3] on cpu, and is float32 [4, 3] on cpu, strides [1, 4]",
        "the batch['y'] was int64 [2] on cpu, and is float32 [2] on cpu",
        "the batch['n'] was int, and is str",
    ]
    assert batches.differences(old, batches.spec({"x": torch.rand(4, 3)})) == [
        "the batch was builtins.dict of ['x', 'y', 'n'], and is builtins.dict of ['x']"
    ]
    assert batches.differences(batches.spec([1]), batches.spec([1, 2])) != []
    assert batches.differences({"tensor": 7}, old) == ["what was told of the batch cannot be read"]


# --- jagged ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def jagged() -> Any:
    return pytest.importorskip("torchrec.sparse.jagged_tensor")


@pytest.mark.parametrize("given", ["lengths", "offsets", "both"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_keyed_jagged_tensor_is_made_up_with_as_many_values_for_each_key(
    jagged: Any, given: str, weighted: bool
) -> None:
    lengths = torch.tensor([2, 0, 1, 1, 1, 3], dtype=torch.int32)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    told = {name: value for name, value in (("lengths", lengths), ("offsets", offsets)) if given in (name, "both")}
    values = torch.tensor([3, 4, 5, 90, 91, 92, 93, 94])
    weights = torch.rand(8) if weighted else None
    real = jagged.KeyedJaggedTensor(keys=["a", "b"], values=values, weights=weights, **told)
    kept = dict(vars(real))
    made = again(real, seed=5)
    assert all(vars(real)[name] is value for name, value in kept.items()), "looking at a batch has changed it"
    for name in ("_lengths", "_offsets", "_weights", "_stride"):
        assert (getattr(made, name) is None) == (getattr(real, name) is None)
    assert batches.differences(batches.spec(real), batches.spec(made)) == []
    assert (made.keys(), made.stride(), made.length_per_key()) == (["a", "b"], 3, [3, 5])
    assert made.lengths().dtype == real.lengths().dtype
    for key, lowest, highest, longest in (("a", 3, 5, 2), ("b", 90, 94, 3)):
        part = made[key]
        assert lowest <= int(part.values().min()) <= int(part.values().max()) <= highest
        assert int(part.lengths().max()) == longest


def test_a_jagged_tensor_of_rows_is_made_up(jagged: Any) -> None:
    real = jagged.JaggedTensor(values=torch.rand(5, 3), lengths=torch.tensor([2, 3]))
    made = again(real)
    assert made.values().shape == (5, 3)
    assert sorted(made.lengths().tolist()) == [2, 3]


def test_other_keys_are_a_misfit_and_more_values_are_none(jagged: Any) -> None:
    def of(keys: list[str], lengths: list[int]) -> Any:
        tensor = torch.tensor(lengths)
        return batches.spec(jagged.KeyedJaggedTensor(keys=keys, values=torch.arange(sum(lengths)), lengths=tensor))

    assert batches.differences(of(["a"], [1, 2]), of(["a"], [5, 2])) == []
    assert batches.differences(of(["a"], [1, 2]), of(["b"], [1, 2])) == [
        "the keys of the batch were ['a'], and are ['b']"
    ]


def test_a_batch_size_for_each_key_is_refused(jagged: Any) -> None:
    real = jagged.KeyedJaggedTensor(
        keys=["a", "b"], values=torch.arange(3), lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [2]],
    )  # fmt: skip
    with pytest.raises(TypeError, match="cannot be made up"):
        batches.spec(real)
