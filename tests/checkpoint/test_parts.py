"""Whatever a part's state holds comes back as it was, or is refused by name before anything is saved."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headway
from headway.errors import InputError


class Part:
    """Anything with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Wrapped(torch.Tensor):
    """A wrapper subclass: its own memory holds nothing, and only its own kind can be copied to it."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __reduce_ex__(self, protocol: int) -> Any:
        return Wrapped, (self.inner,)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapped(args[0].inner)
        raise NotImplementedError(f"{func} is not for this kind")


def restored(root: Path, state: Any, into: Any) -> Any:
    """What another run gets that has `into` when it begins."""
    with headway.Checkpointer(root, model=nn.Linear(2, 2), interval=None, part=Part(state)) as ckpt:
        ckpt.save(1, wait=True)
    part = Part(into)
    with headway.Checkpointer(root, model=nn.Linear(2, 2), interval=None, part=part) as ckpt:
        assert ckpt.restore() is not None
    return part.state


def plain_tensors() -> dict[str, torch.Tensor]:
    """One of each type of numbers that torch can make, and of each form that memory can have."""
    made = {}
    for name, dtype in sorted(vars(torch).items()):
        if isinstance(dtype, torch.dtype) and not dtype.is_complex:
            try:
                made[name] = torch.arange(6).to(torch.float32).to(dtype)
            except (RuntimeError, NotImplementedError):
                pass  # none that torch itself can fill: of fewer bits than eight, or quantized
    base = torch.arange(12.0).view(3, 4)
    forms = {
        "complex": torch.complex(base, -base), "conjugate": torch.complex(base, base).conj(),
        "negative": torch.complex(base, base).conj().imag, "empty": torch.empty(0, 3), "scalar": torch.tensor(3.0),
        "transposed": base.t(), "expanded": torch.ones(1, 4).expand(3, 4), "strided": base[:, ::2],
        "parameter": nn.Parameter(base.clone()), "needs a gradient": base.clone().requires_grad_(),
    }  # fmt: skip
    return made | forms


def other_tensors() -> dict[str, torch.Tensor]:
    """Those that are more than their bytes."""
    base = torch.arange(12.0).view(3, 4)
    return {
        "coo": base.to_sparse(), "csr": base.to_sparse_csr(), "csc": base.to_sparse_csc(),
        "bsr": torch.arange(16.0).view(4, 4).to_sparse_bsr((2, 2)), "wrapped": Wrapped(base),
        "quantized": torch.quantize_per_tensor(base, 0.1, 3, torch.qint8),
        "by channel": torch.quantize_per_channel(base, torch.ones(3), torch.zeros(3), 0, torch.qint8),
        "jagged": torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged),
    }  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Wrapped):
        return isinstance(other, Wrapped) and torch.equal(one.inner, other.inner)
    if isinstance(one, torch.Tensor) and one.is_nested:
        return other.is_nested and all(map(torch.equal, one.unbind(), other.unbind()))
    if isinstance(one, torch.Tensor) and one.layout != torch.strided:
        return one.layout == other.layout and torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, torch.Tensor) and one.is_quantized:
        return other.is_quantized and torch.equal(one.int_repr(), other.int_repr()) and one.dtype == other.dtype
    as_bytes = [each.detach().resolve_conj().resolve_neg().contiguous().view(-1) for each in (one, other)]
    return (
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(*(b.view(torch.uint8) for b in as_bytes))
    )


@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_tensor_comes_back(root: Path, home: Path) -> None:
    state = plain_tensors() | other_tensors()
    assert len(state) > 25
    into = {name: torch.zeros_like(each) for name, each in plain_tensors().items() if each.numel()}
    found = restored(root, state, into)
    assert found.keys() == state.keys()
    assert [name for name, value in state.items() if not same(value, found[name])] == []


@pytest.mark.parametrize("is_reversed", [False, True])
def test_names_that_are_the_same_once_they_are_joined_are_kept_apart(root: Path, home: Path, is_reversed: bool) -> None:
    def state(first: float) -> dict[Any, Any]:
        values = [torch.full((2,), first + number) for number in range(6)]
        return {
            "a.b": values[0],
            "a": {"b": values[1], "c": [values[2]]},
            "a.c.0": values[3],
            1: values[4],
            "1": values[5],
        }

    into = state(-10)
    found = restored(root, state(1), dict(reversed(into.items())) if is_reversed else into)
    values = (found["a.b"], found["a"]["b"], found["a"]["c"][0], found["a.c.0"], found[1], found["1"])
    assert [float(value[0]) for value in values] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("word", ["headway.tensor", "headway.literal"])
def test_words_of_headways_own_are_a_users_as_well(root: Path, home: Path, word: str) -> None:
    state = {"x": torch.ones(2), word: "mine", "inner": {word: {word: torch.zeros(1)}}, "plain": {word: "a"}}
    found = restored(root, state, {})
    assert found[word] == "mine"
    assert found["plain"] == {word: "a"}
    assert torch.equal(found["inner"][word][word], torch.zeros(1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("history", [3, 9])
def test_an_optimizer_with_a_history_goes_on_where_it_was(root: Path, home: Path, history: int) -> None:
    def trained(steps: range, history: int, restores: bool) -> list[float]:
        torch.manual_seed(0)
        model, data = nn.Linear(4, 1), torch.randn(16, 4)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=history)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(data) - data.sin().sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        with headway.Checkpointer(root, model=model, optimizer=optimizer, interval=None) as ckpt:
            assert (ckpt.restore() is not None) == restores
            losses = [float(optimizer.step(closure)) for _ in steps]
            ckpt.save(steps.stop, wait=True)
        return losses

    trained(range(5), 3, restores=False)
    later = trained(range(5, 8), history, restores=True)
    shutil.rmtree(root)
    if history == 3:
        assert trained(range(8), 3, restores=False)[5:] == later


def test_what_torch_cannot_read_back_is_refused_by_name_at_the_first_save(root: Path, home: Path) -> None:
    part = Part({"a": [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]})
    checkpointer = headway.Checkpointer(root, model=nn.Linear(2, 2), interval=None, part=part)
    with checkpointer as ckpt, pytest.raises(InputError, match=r"a\.0 is a nested tensor of the strided layout"):
        ckpt.save(1)


@pytest.mark.parametrize("name", ["headway", "a.b"])
def test_a_part_whose_name_could_be_anothers_is_refused(root: Path, home: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"{name!r} is no name for a part"):
        headway.Checkpointer(root, model=nn.Linear(2, 2), **{name: Part({})})
    assert not root.exists()
