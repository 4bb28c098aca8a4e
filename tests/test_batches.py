"""What a batch looks like, so that another one can be made up."""

import json
from collections import OrderedDict
from typing import Any

import pytest

from headway.compile import batch

torch = pytest.importorskip("torch")


def test_a_tensor_is_told_by_size_strides_type_and_device() -> None:
    assert batch.spec(torch.zeros(3, 4).t()) == {
        "tensor": [4, 3], "strides": [1, 4], "dtype": "torch.float32", "device": "cpu",
    }  # fmt: skip


def test_of_integers_the_range_is_told_since_they_may_be_indices() -> None:
    assert batch.spec(torch.tensor([3, 9, 5]))["range"] == [3, 9]
    assert "range" not in batch.spec(torch.tensor([], dtype=torch.int64))


def test_the_structure_is_kept_and_nothing_of_what_is_in_it() -> None:
    told = batch.as_bytes(OrderedDict(x=[torch.full((2,), 123.5)], n=7, y=(None, "train")))
    assert b"123.5" not in told
    found = json.loads(told)
    assert found["type"] == "collections.OrderedDict"
    assert [name for name, _ in found["mapping"]] == ["x", "n", "y"]
    assert found["mapping"][1][1] == {"value": 7}


@pytest.mark.parametrize("strange", [object(), {"x": object()}, "a" * 5000, {object(): 1}])
def test_what_cannot_be_made_up_is_refused(strange: Any) -> None:
    with pytest.raises(TypeError, match="cannot be made up"):
        batch.spec(strange)
