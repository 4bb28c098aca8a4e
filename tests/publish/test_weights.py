"""Safetensors that are written as they are read: what the format's own library finds in them is what was saved."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import saving_anchors
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saving_anchors import NAME, counted, is_same, odd_tensors, save_plainly, sealed

import warm
from headway.checkpoint import BadCheckpoint
from headway.errors import InputError
from headway.publish import stream as streaming
from headway.publish.weights import INDEX, nonfinite_values, write_safetensors


def written(model: dict[str, torch.Tensor], folder: Path, **options: Any) -> dict[str, Any]:
    """What is told of a model that was saved and then written to `folder/out`."""
    (folder / "out").mkdir()
    return write_safetensors(sealed(save_plainly(folder / NAME, {"model": model})), folder / "out", **options)


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, as the library reads them."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def are_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)


def test_the_library_reads_what_was_saved_of_every_type_and_form(tmp_path: Path) -> None:
    model = odd_tensors()
    threads = torch.get_num_threads()
    told = written(model, tmp_path)
    assert are_same(read(tmp_path / "out"), model)
    assert torch.get_num_threads() == threads
    assert told["tensors"] == len(model)
    assert told["bytes"] == sum(value.nbytes for value in model.values())
    assert told["parameters"] == sum(value.numel() for value in model.values())


def test_the_file_is_laid_out_as_the_library_would_have_done_it(tmp_path: Path) -> None:
    model = {name: value.contiguous() for name, value in odd_tensors().items()}
    written(model, tmp_path)
    save_file(model, tmp_path / "theirs", metadata={"format": "pt"})
    with safe_open(tmp_path / "out/model.safetensors", "pt") as ours, safe_open(tmp_path / "theirs", "pt") as theirs:
        assert ours.metadata() == theirs.metadata() == {"format": "pt"}
    data = (tmp_path / "out/model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    for name, its in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            assert its["data_offsets"][0] % model[name].dtype.itemsize == 0, f"{name} can be mapped"


@pytest.mark.parametrize("chunk", [None, 100, pytest.param(999, marks=pytest.mark.thorough)])
def test_what_two_ranks_share_is_whole(
    chunk: int | None, tmp_path: Path, two_ranks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk:
        monkeypatch.setattr(streaming, "CHUNK_BYTES", chunk)
    write_safetensors(sealed(two_ranks / "plain"), tmp_path)
    assert are_same(read(tmp_path), saving_anchors.divided())


@pytest.fixture(scope="session")
def two_ranks() -> Path:
    return saving_anchors.saved_on_two_ranks()


def test_more_than_a_file_may_hold_is_divided_and_has_an_index(tmp_path: Path) -> None:
    model = {f"layer.{number}": counted(100) + number for number in range(5)} | {
        "large": counted(1000),
        "b": counted(1),
    }
    told = written(model, tmp_path, max_bytes=900)
    names = [f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == names
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == told["bytes"] == sum(value.nbytes for value in model.values())
    for name, value in model.items():
        with safe_open(tmp_path / "out" / index["weight_map"][name], "pt") as file:
            assert is_same(file.get_tensor(name), value)


def test_one_file_has_no_index(tmp_path: Path) -> None:
    written({"a": counted(3)}, tmp_path)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", [each for each in saving_anchors.TYPES if each.is_floating_point or each.is_complex])
def test_values_that_are_not_finite_are_counted(dtype: torch.dtype) -> None:
    values = torch.ones(1000)
    assert nonfinite_values(values.to(dtype)) == 0
    values[[0, 500, 999]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    strange = values.to(dtype)
    wide = strange.float() if dtype.itemsize == 1 else strange
    assert nonfinite_values(strange) == int((~wide.isfinite()).sum()) > 0


def test_infinities_that_cancel_out_and_sums_that_overflow_are_told_apart() -> None:
    assert nonfinite_values(torch.tensor([float("inf"), -float("inf"), 1.0])) == 2
    assert nonfinite_values(torch.full((1000,), 60_000.0, dtype=torch.float16)) == 0
    assert nonfinite_values(torch.full((1000,), 3e38)) == 0


def test_tensors_with_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = {"good": counted(9), "bad": torch.tensor([1.0, float("nan"), float("inf")]), "whole": counted(3).long()}
    assert written(model, tmp_path)["nonfinite"] == {"bad": 2}


def test_a_type_that_the_format_does_not_have_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"wide \(torch\.complex128\)"):
        written({"a": counted(3), "wide": counted(3, dtype=torch.complex128)}, tmp_path)
    assert not list((tmp_path / "out").iterdir())


def test_damage_is_found_although_it_was_written_already(tmp_path: Path) -> None:
    shards = sealed(save_plainly(tmp_path / NAME, {"model": {"a": counted(3000)}}))
    [file] = (tmp_path / NAME).glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[6000] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadCheckpoint, match="its hash differs"):
        write_safetensors(shards, tmp_path)


def test_a_disk_without_room_for_all_of_it_is_found_before_anything_is_read(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from saving_anchors import sealed
from headway.publish.weights import write_safetensors
shards, read = sealed(Path(sys.argv[1])), []
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    write_safetensors(shards, Path(sys.argv[2]), read.append)
except OSError as error:
    print(error.errno, read)
"""
    save_plainly(tmp_path / NAME, {"model": {"a": counted(100_000)}})
    command = [sys.executable, "-c", script, str(tmp_path / NAME), str(tmp_path)]
    done = warm.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    assert done.stdout == "27 []\n", "EFBIG, and not a byte"


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from saving_anchors import sealed
from headway.publish.weights import write_safetensors
peaks = []
for name in sys.argv[1:]:
    folder = Path(name)
    write_safetensors(sealed(folder), folder.parent)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
print(peaks[1] - peaks[0])
"""
    save_plainly(tmp_path / "small", {"model": {"a": torch.ones(12 << 20)}})
    save_plainly(tmp_path / "large", {"model": {name: torch.ones(12 << 20) for name in "abcdef"}})
    command = [sys.executable, "-c", script, str(tmp_path / "small"), str(tmp_path / "large")]
    done = warm.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 30, "MB, for 240 MB more"
