"""What is written is what torch would write: any part of it, read by `torch.load`, and all of it, by `dcp.load`."""

import io
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import end_keepers
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from headway.checkpoint import Reader, Save, Writer
from headway.checkpoint.image import draw, signature
from headway.checkpoint.layout import shard_name

PLAIN = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all: what a test saves gets a folder of its own."""
    folder = tmp_path_factory.mktemp("images")
    yield folder
    end_keepers(folder)


@pytest.fixture(scope="module", params=["two-slot", pytest.param("streaming", marks=pytest.mark.thorough)])
def writer(request: pytest.FixtureRequest, root: Path) -> Iterator[Writer]:
    made = Writer(root, memory=request.param, stream_bytes=64 << 10)
    yield made
    made.close()


def saved(writer: Writer, state: dict[str, Any], folder: str = "one") -> Save:
    save = writer.save(state, folder=folder, step=1)
    assert save is not None
    save.wait(120)
    return save


def random_tensor(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all; those of truth values are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def bits_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert bits_of(found) == bits_of(wanted)
    else:
        assert found == wanted


shapes = st.lists(st.integers(0, 7), max_size=3) | st.just([70, 31]) | st.just([3000])
tensors = st.builds(random_tensor, shapes, st.sampled_from(PLAIN), st.integers(0, 99))
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9) | st.binary()
states = st.dictionaries(
    st.text("abcxyz_0", min_size=1, max_size=5),
    tensors | values | st.lists(values, max_size=3) | st.dictionaries(st.text("ab", min_size=1), tensors, max_size=2),
    min_size=1, max_size=6,
)  # fmt: skip


def like(state: Any) -> Any:
    """The same structure with other values."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: like(value) for key, value in state.items()}
    return [like(value) for value in state] if isinstance(state, list) else "to be replaced"


def flat(state: Any, name: str = "") -> dict[str, Any]:
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else None
    if parts is None:
        return {name: state}
    return {key: value for part, inner in parts for key, value in flat(inner, f"{name}/{part}").items()}


@settings(max_examples=25, deadline=None)
@given(state=states)
def test_plain_dcp_and_our_reader_load_what_was_saved(writer: Writer, root: Path, state: dict[str, Any]) -> None:
    folder = f"{random.getrandbits(64):x}"
    saved(writer, state, folder)
    for reader in (dcp.FileSystemReader(root / folder), Reader(root / folder)):
        found = like(state)
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert flat(found).keys() == flat(state).keys()
        for name, value in flat(state).items():
            assert_same(flat(found)[name], value)


def test_torch_load_reads_every_piece_of_the_file_by_itself(root: Path, writer: Writer) -> None:
    sizes = {"large": [65, 97], "small": [3], "one": [], "none": [0, 4]}
    state: dict[str, Any] = {
        f"{size} {dtype}": random_tensor(sizes[size], dtype, seed) for dtype in PLAIN for seed, size in enumerate(sizes)
    } | {"word": "text"}
    save = saved(writer, state)
    data = (root / "one" / shard_name(0, save.tag)).read_bytes()
    assert len(save.image.pieces) == len(state)
    for piece in save.image.pieces:
        found = torch.load(io.BytesIO(data[piece.offset : piece.offset + piece.length]), weights_only=True)
        assert_same(found, state[piece.index.fqn])


def test_views_and_odd_layouts_are_saved_by_their_values(writer: Writer, root: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": base.t(), "slice": base[1:3, ::2], "expanded": torch.ones(1).expand(5),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }  # fmt: skip
    saved(writer, state)
    found = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in state.items()}
    dcp.load(found, checkpoint_id=root / "one", no_dist=True)
    for name, value in state.items():
        assert torch.equal(found[name], value.detach()), name


def test_tensors_that_are_no_plain_bytes_are_pickled(writer: Writer, root: Path) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,)).coalesce()
    saved(writer, {"inside": (sparse, {1: "a"}), "dense": torch.ones(3)})
    found: dict[str, Any] = {"inside": None, "dense": torch.zeros(3)}
    dcp.load(found, checkpoint_id=root / "one", no_dist=True)
    assert torch.equal(found["inside"][0].to_dense(), sparse.to_dense())
    assert found["inside"][1] == {1: "a"}


def test_tensors_begin_on_pages_where_that_is_worth_it_and_never_overlap() -> None:
    state = {f"t{size}": torch.zeros(size) for size in (1, 5, 100, 2000, 5000)} | {"v": "x" * 500, "w": 3}
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), None, True)
    drawn = draw(planner.create_local_plan(), planner)
    places = sorted((piece.offset, piece.length) for piece in drawn.pieces)
    assert all(a + length <= b for (a, length), (b, _) in pairwise(places))
    assert sum(places[-1]) <= drawn.size
    for piece in drawn.pieces:
        assert piece.data % 64 == 0, "as torch.save aligns it"


# --- values that grow ------------------------------------------------------------------------------------------------


def counted(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every plan that torch's planner is asked for."""
    made, original = [], DefaultSavePlanner.create_local_plan

    def counting(self: DefaultSavePlanner) -> Any:
        made.append("plan")
        return original(self)

    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", counting)
    return made


def loaded(root: Path, folder: str, **state: Any) -> dict[str, Any]:
    dcp.load(state, checkpoint_id=root / folder, no_dist=True)
    return state


def test_the_plan_is_made_once_for_states_of_the_same_shape(
    writer: Writer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = counted(writer, monkeypatch)
    for step in range(4):
        saved(writer, {"w": torch.full((500,), float(step)), "step": step, "name": "abc" * step}, f"f{step}")
    assert plans == ["plan"]
    for step in range(4):
        found = loaded(root, f"f{step}", w=torch.zeros(500), step=-1, name="")
        assert (found["w"][0], found["step"], found["name"]) == (step, step, "abc" * step)


def test_a_value_may_shrink_and_what_was_behind_it_is_not_read(writer: Writer, root: Path) -> None:
    saved(writer, {"log": "x" * 5000}, "long")
    saved(writer, {"log": "short"}, "short")
    assert loaded(root, "short", log="")["log"] == "short"
    assert loaded(root, "long", log="")["log"] == "x" * 5000


def test_a_value_that_outgrows_its_place_gets_a_new_plan_and_what_was_saved_before_stays(
    writer: Writer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = counted(writer, monkeypatch)
    words = ["a", "b" * 100_000, "c" * 150_000]
    for number, word in enumerate(words):
        saved(writer, {"w": torch.full((10,), float(number)), "log": word}, f"f{number}")
    assert len(plans) == 2, "the second plan leaves room to grow"
    for number, word in enumerate(words):
        found = loaded(root, f"f{number}", w=torch.zeros(10), log="")
        assert (found["w"][0], found["log"]) == (number, word)


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.ones(9), "step": 1},
        {"w": torch.ones(8, dtype=torch.float64), "step": 1},
        {"w": torch.ones(2, 4), "step": 1},
        {"w": torch.ones(8), "step": 1, "more": torch.ones(2)},
        {"w": torch.ones(8), "step": 1, "more": 5},
        {"w": torch.ones(8)},
        {"w": 3.0, "step": 1},
        {"w": torch.ones(8), "step": torch.ones(1)},
    ],
    ids=["longer", "another type", "another shape", "a new tensor", "a new value", "a value less", "no tensor",
         "a tensor instead"],
)  # fmt: skip
def test_a_state_of_another_shape_gets_a_new_plan(
    writer: Writer, root: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    plans = counted(writer, monkeypatch)
    saved(writer, {"w": torch.zeros(8), "step": 0}, "before")
    saved(writer, other, "after")
    assert len(plans) == 2
    found = loaded(root, "after", **like(other))
    for name, value in other.items():
        assert_same(found[name], value)
    assert torch.equal(loaded(root, "before", w=torch.ones(8))["w"], torch.zeros(8))


def test_a_signature_tells_only_what_a_plan_depends_on() -> None:
    one = signature({"w": torch.zeros(3), "v": 1})
    assert one == signature({"w": torch.ones(3), "v": "anything"})
    assert one != signature({"v": 1, "w": torch.zeros(3)}), "their order decides where they go"
