"""Reading back: nothing is believed that is not what was saved."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from keeping import end_keepers
from torch.distributed.checkpoint.api import CheckpointException

from headway.checkpoint import BadCheckpoint, Reader, Writer
from headway.checkpoint.reader import Source, stored
from headway.errors import InputError
from headway.storage import open_storage

WEIGHT = torch.arange(5000, dtype=torch.float32)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one checkpoint, and with a copy of it that a node would keep."""
    folder = tmp_path_factory.mktemp("original")
    writer = Writer(folder / "root", local=folder / "local")
    save = writer.save({"w": WEIGHT, "small": torch.ones(3), "name": "value"}, folder="step-7", step=7)
    assert save is not None
    save.wait(120)
    writer.close()
    end_keepers(folder)
    return folder


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(original, tmp_path / "copy")
    return tmp_path / "copy/root"


def load(reader: Reader, **more: Any) -> dict[str, Any]:
    state = {"w": torch.zeros(5000), "small": torch.zeros(3), "name": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, no_dist=True, **more)
    return state


def is_whole(state: dict[str, Any]) -> bool:
    return torch.equal(state["w"], WEIGHT) and state["small"].tolist() == [1, 1, 1] and state["name"] == "value"


def shard(root: Path) -> Path:
    [found] = (root / "step-7").glob("*.distcp")
    return found


def flip_a_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_it_loads_what_was_saved(root: Path) -> None:
    assert is_whole(load(Reader(root / "step-7")))
    assert is_whole(load(Reader(), checkpoint_id=root / "step-7")), "as dcp says where from"


def test_it_loads_from_an_object_store(root: Path, s3_root: str) -> None:
    source, target = open_storage(root), open_storage(s3_root)
    for name in source.names("step-7"):
        data = source.read(f"step-7/{name}")
        target.upload(f"step-7/{name}", [memoryview(data)], len(data))
    reader = Reader(f"{s3_root}/step-7")
    assert is_whole(load(reader))
    assert list(reader.source.used) == ["remote"]


def test_a_part_of_it_may_be_loaded(root: Path) -> None:
    state = {"small": torch.zeros(3)}
    dcp.load(state, storage_reader=Reader(root / "step-7"), no_dist=True)
    assert state["small"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99999])
def test_a_flipped_bit_anywhere_in_a_shard_is_found_before_anything_is_loaded(root: Path, share: float) -> None:
    path = shard(root)
    flip_a_bit(path, int(share * path.stat().st_size))
    state = {"w": torch.zeros(5000)}
    with pytest.raises(CheckpointException, match=f"{path.name} is not what was saved: its hash differs"):
        dcp.load(state, storage_reader=Reader(root / "step-7"), no_dist=True)
    assert not state["w"].any()


def test_a_shard_that_was_cut_off_says_how_much_there_is(root: Path) -> None:
    path = shard(root)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.truncate(size - 10)
    with pytest.raises(BadCheckpoint, match=f"has {size - 10:,} bytes instead of {size:,}"):
        stored(str(root / "step-7")).open(path.name)


def test_a_shard_that_is_missing_is_named(root: Path) -> None:
    path = shard(root)
    path.unlink()
    with pytest.raises(BadCheckpoint, match=f"{path.name} cannot be read"):
        stored(str(root / "step-7")).open(path.name)


def test_a_flipped_bit_in_the_metadata_is_found(root: Path) -> None:
    flip_a_bit(root / "step-7/.metadata", 200)
    with pytest.raises((BadCheckpoint, InputError)):
        Reader(root / "step-7").read_metadata()


def test_a_flipped_bit_in_the_manifest_is_found(root: Path) -> None:
    [manifest] = (root / "step-7").glob("*.json")
    flip_a_bit(manifest, 30)
    with pytest.raises((BadCheckpoint, InputError)):
        Reader(root / "step-7").read_metadata()


def test_what_plain_dcp_saved_cannot_be_checked_and_says_so(tmp_path: Path) -> None:
    dcp.save({"w": WEIGHT}, checkpoint_id=tmp_path / "plain", no_dist=True)
    with pytest.raises(BadCheckpoint, match=r"no manifest, so nothing can be checked\. Plain dcp\.load may read it"):
        Reader(tmp_path / "plain").read_metadata()


def test_a_checkpoint_that_is_not_there_is_the_users_mistake(root: Path) -> None:
    with pytest.raises(InputError):
        Reader(root / "step-8").read_metadata()


# --- nearest first ---------------------------------------------------------------------------------------------------


def ladder(root: Path) -> Source:
    source = stored(str(root / "step-7"))
    source.local = str(root.parent / "local")
    return source


def test_the_copy_of_this_node_is_taken_before_what_is_stored(root: Path) -> None:
    shard(root).unlink()
    source = ladder(root)
    assert is_whole(load(Reader(source=source)))
    assert list(source.used) == ["local"]


@pytest.mark.parametrize("damage", ["flipped", "cut off", "gone", "no marker"])
def test_a_copy_of_this_node_that_is_not_whole_is_passed_over(root: Path, damage: str) -> None:
    copy = root.parent / "local/step-7" / shard(root).name
    if damage == "flipped":
        flip_a_bit(copy, 5000)
    elif damage == "cut off":
        copy.write_bytes(copy.read_bytes()[:-1])
    elif damage == "gone":
        copy.unlink()
    else:
        for marker in copy.parent.glob("*.rank-*.json"):
            marker.unlink()
    source = ladder(root)
    assert is_whole(load(Reader(source=source)))
    assert list(source.used) == ["disk"]


def test_what_is_nowhere_is_named(root: Path) -> None:
    source = stored(str(root / "step-7"))
    with pytest.raises(BadCheckpoint, match=r"__9_x\.distcp is neither in memory nor stored"):
        source.open("__9_x.distcp")
