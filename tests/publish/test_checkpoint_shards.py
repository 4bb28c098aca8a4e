"""Reading a checkpoint as a stream: every value arrives where it belongs, and nothing that is not what was saved."""

import pickle
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import saving_anchors
import torch
from saving_anchors import NAME, counted, hashes, is_same, network, odd_tensors, save_plainly, sealed
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from headway.checkpoint import BadCheckpoint, catalog
from headway.checkpoint.layout import METADATA
from headway.errors import InputError
from headway.publish import stream as streaming
from headway.publish.shards import Shards
from headway.storage import LocalFolder, open_storage


def gathered(shards: Shards) -> dict[str, torch.Tensor]:
    """All weights, put together from their blocks."""
    found = {name: torch.empty(weight.shape, dtype=weight.dtype) for name, weight in shards.tensors.items()}
    for block in shards.blocks():
        block.copy_to(found[block.weight.name])
    return found


def are_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)


def plain(folder: Path) -> Shards:
    return Shards(open_storage(folder.parent), folder.name, {}, None)


@pytest.fixture(scope="session")
def two_ranks() -> Path:
    """Where two real ranks have saved."""
    return saving_anchors.saved_on_two_ranks()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two files, of which a test may damage one."""
    model = {"table": counted(300, 8), "bias": counted(5), "count": torch.tensor(7)}
    return save_plainly(tmp_path / NAME, {"model": model, "optimizer": {"sum": counted(300, 8)}, "lr": 0.1})


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in so small pieces that everything stretches over several."""
    monkeypatch.setattr(streaming, "CHUNK_BYTES", 1000)


# --- what arrives ----------------------------------------------------------------------------------------------------


def test_tensors_of_every_type_and_form_arrive_as_they_were(tmp_path: Path) -> None:
    model = odd_tensors()
    shards = sealed(save_plainly(tmp_path / NAME, {"model": model, "step": 7}))
    assert are_same(gathered(shards), model)
    assert {name: weight.nbytes for name, weight in shards.tensors.items()} == {n: t.nbytes for n, t in model.items()}


def test_values_that_lie_across_two_chunks_arrive_as_they_were(tmp_path: Path, small_chunks: None) -> None:
    model = odd_tensors() | {"large": counted(40, 30, 3), "large.t": counted(70, 11).t(), "deep": counted(2, 3, 50, 7)}
    assert are_same(gathered(sealed(save_plainly(tmp_path / NAME, {"model": model}))), model)


def test_tensors_that_two_ranks_share_in_every_way_are_whole(two_ranks: Path) -> None:
    shards = sealed(two_ranks / "plain")
    assert are_same(gathered(shards), saving_anchors.divided())
    assert len(shards.tensors["columns"].pieces) == 2
    assert len(shards.tensors["replicated"].pieces) == 1, "is read once"


def test_shared_tensors_are_whole_even_if_chunks_end_anywhere(two_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (64, 100, 999):
        monkeypatch.setattr(streaming, "CHUNK_BYTES", size)
        assert are_same(gathered(sealed(two_ranks / "plain")), saving_anchors.divided())


def test_what_headway_saved_of_an_fsdp_model_loads_into_a_plain_one(two_ranks: Path) -> None:
    storage = open_storage(two_ranks / "headway")
    manifest = catalog.find(storage, NAME).manifest
    assert manifest
    shards = Shards(storage, NAME, manifest.files, manifest.metadata)
    model = nn.Sequential(nn.Linear(17, 13), nn.LayerNorm(13), nn.Linear(13, 7, bias=False), nn.BatchNorm1d(7))
    read: list[int] = []
    shards.load(model, read.append)
    assert are_same(model.state_dict(), torch.load(two_ranks / "whole-0.pt"))
    assert sum(read) == shards.bytes_to_read() == manifest.size


def test_a_checkpoint_in_an_object_store_is_read_in_ranges(saved: Path) -> None:
    source, target = open_storage(saved.parent), open_storage(f"memory://{saved.parent.name}")
    for name in source.names(NAME):
        target.write(f"{NAME}/{name}", source.read(f"{NAME}/{name}"))
    files = hashes(target, NAME)
    assert are_same(gathered(Shards(target, NAME, files, files.pop(METADATA))), gathered(sealed(saved)))


def test_a_plain_checkpoint_without_hashes_is_read_all_the_same(saved: Path) -> None:
    expected = {"table": torch.zeros(300, 8), "bias": torch.zeros(5), "count": torch.tensor(0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load({"model": expected}, checkpoint_id=saved, no_dist=True)
    assert are_same(gathered(plain(saved)), expected)


def test_each_file_is_read_once_and_those_without_weights_not_at_all(tmp_path: Path) -> None:
    class Counted(LocalFolder):
        reads: list[tuple[str, int]] = []

        def read_into(self, name: str, offset: int, into: memoryview) -> int:
            self.reads.append((name, offset))
            return super().read_into(name, offset, into)

    save_plainly(tmp_path / NAME, {"model": {"a": counted(5)}, "optimizer": {"b": counted(9000)}}, thread_count=2)
    files = hashes(storage := Counted(tmp_path), NAME)
    storage.reads.clear()
    gathered(shards := Shards(storage, NAME, files, files.pop(METADATA)))
    assert len(files) == 2
    assert storage.reads == [(f"{NAME}/{shards.tensors['a'].pieces[0].file}", 0)]


# --- which tensors, by which names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [{"w": counted(3)}, {"model.w": counted(3), "head": counted(2)}])
def test_a_state_dict_that_was_saved_as_it_is_is_the_model(tmp_path: Path, state: dict[str, Any]) -> None:
    assert are_same(gathered(sealed(save_plainly(tmp_path / NAME, state))), state)


def test_another_part_is_found_by_its_name(tmp_path: Path) -> None:
    folder = save_plainly(tmp_path / NAME, {"ema": {"inner": {"w": counted(3)}}, "model": {"w": counted(4)}})
    assert are_same(gathered(sealed(folder, part="ema")), {"inner.w": counted(3)})


def test_a_part_that_is_not_there_is_not_taken_for_all_the_rest(tmp_path: Path) -> None:
    folder = save_plainly(tmp_path / NAME, {"net": {"w": counted(3)}, "optimizer": {"w": counted(3)}})
    with pytest.raises(InputError, match=r"no part 'model' with tensors.*: net, optimizer"):
        _ = sealed(folder).tensors


def test_a_checkpoint_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tensors"):
        _ = sealed(save_plainly(tmp_path / NAME, {"step": 7})).tensors


def test_names_of_wrappers_are_left_out_of_what_others_have_saved(tmp_path: Path) -> None:
    wrapped = {"module._orig_mod.a": counted(3), "module.b": counted(2)}
    assert set(sealed(save_plainly(tmp_path / "1", {"model": wrapped})).tensors) == {"a", "b"}
    partly = {"module.a": counted(3), "b": counted(2)}
    assert set(sealed(save_plainly(tmp_path / "2", {"model": partly})).tensors) == set(partly)


# --- into a model ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def test_a_model_gets_its_weights_in_place(tmp_path: Path) -> None:
    folder = save_plainly(tmp_path / NAME, {"model": network().state_dict()})
    model = network()
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.state_dict().values():
            value.fill_(-1)
    sealed(folder).load(model)
    assert are_same(model.state_dict(), network().state_dict())
    assert before == {name: value.data_ptr() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("lost", [None, "head.weight", "table.weight"])
def test_tied_parameters_are_loaded_whichever_of_their_names_were_saved(tmp_path: Path, lost: str | None) -> None:
    state = {name: counted(6, 4) for name in ("table.weight", "head.weight") if name != lost}
    model = Tied()
    sealed(save_plainly(tmp_path / NAME, {"model": state})).load(model)
    assert is_same(model.head.weight, counted(6, 4))
    assert model.head.weight is model.table.weight


def test_a_parameter_that_does_not_lie_in_rows_is_loaded(tmp_path: Path, small_chunks: None) -> None:
    model = nn.Conv2d(3, 20, 5).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    expected = counted(20, 3, 5, 5)
    sealed(save_plainly(tmp_path / NAME, {"model": {"weight": expected, "bias": counted(20)}})).load(model)
    assert is_same(model.weight, expected)
    assert not model.weight.is_contiguous()


def test_a_compiled_model_is_loaded_by_the_names_it_had(tmp_path: Path) -> None:
    folder = save_plainly(tmp_path / NAME, {"model": network().state_dict()})
    model = nn.Sequential(nn.Linear(17, 13), nn.LayerNorm(13), nn.Linear(13, 7, bias=False), nn.BatchNorm1d(7))
    compiled = torch.compile(model)
    assert isinstance(compiled, nn.Module)
    sealed(folder).load(compiled)
    assert are_same(model.state_dict(), network().state_dict())


def test_all_that_differs_from_the_model_is_told_at_once_and_nothing_is_loaded(tmp_path: Path) -> None:
    state = {"0.weight": counted(3, 2).double(), "0.bias": counted(4), "1.weight": counted(2), "gone": counted(1)}
    folder = save_plainly(tmp_path / NAME, {"model": state})
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError) as caught:
        sealed(folder).load(model)
    for told in (
        "0.weight is torch.float32 instead of torch.float64",
        "0.bias has the shape [3] instead of [4]",
        "1.bias is not in the checkpoint",
        "gone is not in the model",
    ):
        assert told in str(caught.value)
    assert "1.weight" not in str(caught.value)
    assert are_same(model.state_dict(), before)


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    folder = save_plainly(tmp_path / NAME, {"model": nn.Linear(2, 3).state_dict()})
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    with pytest.raises(InputError, match="to_empty"):
        sealed(folder).load(model)


def test_a_model_whose_state_is_a_copy_is_refused_because_loading_it_would_change_nothing(tmp_path: Path) -> None:
    class Packed(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}

    folder = save_plainly(tmp_path / NAME, {"model": nn.Linear(2, 3).state_dict()})
    with pytest.raises(InputError, match="weight is a copy"):
        sealed(folder).load(Packed(2, 3))


def test_extra_state_is_refused_because_it_is_no_tensor(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 2}

        def set_extra_state(self, state: Any) -> None: ...

    folder = save_plainly(tmp_path / NAME, {"model": Extra(2, 3).state_dict()})
    with pytest.raises(InputError, match="_extra_state is no tensor"):
        sealed(folder).load(Extra(2, 3))


# --- what is not what was saved --------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_in_a_file_is_found(saved: Path, small_chunks: None) -> None:
    shards, [file] = sealed(saved), list(saved.glob("*.distcp"))
    right = file.read_bytes()
    assert gathered(shards)
    for at in [*range(0, len(right), 211), *range(0, 1200, 7), len(right) - 1]:
        file.write_bytes(right[:at] + bytes([right[at] ^ 4]) + right[at + 1 :])
        with pytest.raises(BadCheckpoint, match=rf"^{file.name} is not what was saved: its hash differs$"):
            gathered(shards)


def test_damage_that_is_found_late_is_told_before_the_model_is_used(saved: Path) -> None:
    shards, [file] = sealed(saved), list(saved.glob("*.distcp"))
    right = file.read_bytes()
    file.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    model = nn.Module()
    for name, value in gathered(plain(saved)).items():
        model.register_buffer(name, torch.zeros_like(value))
    with pytest.raises(BadCheckpoint, match="hash differs"):
        shards.load(model)


def test_a_flipped_bit_in_the_metadata_is_found_before_it_is_unpickled(saved: Path) -> None:
    files = hashes(open_storage(saved.parent), NAME)
    (saved / METADATA).write_bytes(b"c" + (saved / METADATA).read_bytes()[1:])
    with pytest.raises(BadCheckpoint, match=r"\.metadata is not what was saved"):
        _ = Shards(open_storage(saved.parent), NAME, files, files.pop(METADATA)).metadata


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-10]), r"__0_0\.distcp has [\d,]+ bytes instead of [\d,]+"),
        (lambda file: file.unlink(), r"__0_0\.distcp is missing"),
        (lambda file: file.with_name(METADATA).unlink(), "never committed"),
    ],
)
def test_a_file_that_is_cut_off_or_missing_is_named(saved: Path, damage: Callable[[Path], Any], told: str) -> None:
    storage = open_storage(saved.parent)
    files = hashes(storage, NAME)
    damage(saved / "__0_0.distcp")
    with pytest.raises(BadCheckpoint, match=told):
        gathered(Shards(storage, NAME, files, files.pop(METADATA)))


def test_a_file_that_the_manifest_does_not_know_is_named(saved: Path) -> None:
    files = hashes(open_storage(saved.parent), NAME)
    others = {"__1_0.distcp": files.pop("__0_0.distcp")}
    with pytest.raises(BadCheckpoint, match=r"__0_0\.distcp is not in the manifest"):
        _ = Shards(open_storage(saved.parent), NAME, others, files[METADATA]).tensors


@pytest.mark.parametrize("damage", [b"", b"nothing", pickle.dumps({"a": 1})])
def test_metadata_of_something_else_is_refused(saved: Path, damage: bytes) -> None:
    (saved / METADATA).write_bytes(damage)
    with pytest.raises(BadCheckpoint, match=r"\.metadata"):
        _ = plain(saved).tensors


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
def test_a_plain_checkpoint_that_is_cut_off_names_the_tensor_that_is_not_whole(saved: Path, share: float) -> None:
    [file] = saved.glob("*.distcp")
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(BadCheckpoint, match=r"__0_0\.distcp, where \w+ should be"):
        gathered(plain(saved))


def changed(folder: Path, to: Path, change: Callable[[Any], None]) -> Shards:
    """Shards of a checkpoint whose metadata says something else."""
    shutil.copytree(folder, to)
    metadata = plain(folder).metadata
    change(metadata)
    (to / METADATA).write_bytes(pickle.dumps(metadata))
    return sealed(to)


def test_a_part_that_no_rank_has_saved_is_named(two_ranks: Path, tmp_path: Path) -> None:
    def lose_chunk(metadata: Any) -> None:
        del metadata.state_dict_metadata["model.columns"].chunks[1]

    with pytest.raises(BadCheckpoint, match=r"model\.columns is not whole: .* \[0, 5\], of \[9, 10\]"):
        _ = changed(two_ranks / "plain", tmp_path / "1", lose_chunk).tensors

    def lose_place(metadata: Any) -> None:
        [lost] = [index for index in metadata.storage_data if index.fqn == "model.rows" and index.offset[0]]
        del metadata.storage_data[lost]

    with pytest.raises(BadCheckpoint, match=r"model\.rows is not whole: .* \[4, 0\]"):
        _ = changed(two_ranks / "plain", tmp_path / "2", lose_place).tensors

    def reach_out(metadata: Any) -> None:
        metadata.state_dict_metadata["model.rows"].size = torch.Size([6, 6])

    with pytest.raises(BadCheckpoint, match=r"model\.rows is \[6, 6\], and has a part at \[4, 0\] of \[3, 6\]"):
        _ = changed(two_ranks / "plain", tmp_path / "3", reach_out).tensors


def test_a_part_that_two_ranks_have_saved_is_read_once(two_ranks: Path, tmp_path: Path) -> None:
    def repeat(metadata: Any) -> None:
        metadata.state_dict_metadata["model.rows"].chunks *= 2

    shards = changed(two_ranks / "plain", tmp_path / "1", repeat)
    assert len(shards.tensors["rows"].pieces) == 2
    assert are_same(gathered(shards), saving_anchors.divided())


def test_metadata_that_points_elsewhere_is_not_believed(saved: Path, tmp_path: Path) -> None:
    def swap(metadata: Any) -> None:
        places = {index.fqn: index for index in metadata.storage_data}
        one, other = places["model.bias"], places["model.table"]
        metadata.storage_data[one] = metadata.storage_data[other]

    with pytest.raises(BadCheckpoint, match=r"where (bias|table) should be"):
        gathered(changed(saved, tmp_path / "1", swap))

    def compress(metadata: Any) -> None:
        for index, place in metadata.storage_data.items():
            metadata.storage_data[index] = replace(place, transform_descriptors=["zstd"])

    with pytest.raises(InputError, match="is compressed"):
        _ = changed(saved, tmp_path / "2", compress).tensors


def test_two_tensors_that_claim_the_same_bytes_are_not_believed(tmp_path: Path) -> None:
    def share(metadata: Any) -> None:
        one, other = metadata.storage_data
        metadata.storage_data[one] = metadata.storage_data[other]

    saved = save_plainly(tmp_path / NAME, {"model": {"a": counted(4), "b": counted(4)}})
    with pytest.raises(BadCheckpoint, match=r"where . should be: two tensors have the same bytes"):
        gathered(changed(saved, tmp_path / "1", share))


def test_a_tensor_that_is_not_its_bytes_is_refused_by_name(tmp_path: Path) -> None:
    conjugate = torch.tensor([1 + 2j]).conj()
    with pytest.raises(InputError, match="w was saved as a view"):
        gathered(sealed(save_plainly(tmp_path / "1", {"model": {"w": conjugate}})))
