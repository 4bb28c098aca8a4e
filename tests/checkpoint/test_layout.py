"""Names in a folder of checkpoints, and manifests, as texts alone."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoint import layout
from headway.checkpoint.layout import Manifest, Shard
from headway.errors import InputError

generations = st.integers(0, 2**32 - 1)
texts = st.text(max_size=20)
shards = st.builds(Shard, bytes=st.integers(0, 2**50), xxh3=texts, rank=st.integers(0, 9999))
manifests = st.builds(
    Manifest, tag=texts, step=st.integers(-1, 10**9), world_size=st.integers(1, 9999), saved_ns=st.integers(0, 2**63),
    job=texts, metric=st.none() | st.floats(allow_nan=False), files=st.dictionaries(texts, shards, max_size=3),
    metadata=shards,
)  # fmt: skip


@given(generations, generations)
def test_tags_sort_as_generations_do_and_are_all_as_long(one: int, other: int) -> None:
    tags = [layout.new_tag(one), layout.new_tag(other)]
    assert [len(tag) for tag in tags] == [layout.TAG_LENGTH] * 2
    assert [layout.generation_of(tag) for tag in tags] == [one, other]
    if one != other:
        assert (tags[0] < tags[1]) == (one < other)


def test_two_saves_of_one_generation_have_tags_of_their_own() -> None:
    assert len({layout.new_tag(7) for _ in range(20)}) > 1


@given(generations, st.integers(0, 9999))
def test_every_file_of_a_save_tells_its_tag(generation: int, rank: int) -> None:
    tag = layout.new_tag(generation)
    assert layout.tag_of(layout.manifest_name(tag)) == tag
    for name in (layout.shard_name(rank, tag), layout.manifest_name(tag), layout.marker_name(tag, rank)):
        assert layout.tag_in(name) == tag
    assert layout.tag_of(layout.marker_name(tag, rank)) is None
    assert layout.tag_of(layout.shard_name(rank, tag)) is None


@pytest.mark.parametrize(
    "name", [".metadata", "latest", "__0_0.distcp", "__3_12.distcp", "notes.json", "0123456789ab", "0123456789abc.json"]
)
def test_files_of_others_have_no_tag(name: str) -> None:
    assert layout.tag_in(name) is None
    assert layout.tag_of(name) is None


@pytest.mark.parametrize("step", [0, 7, 99_999_999, 123_456_789_012])
def test_a_folder_tells_its_step(step: int) -> None:
    assert layout.step_of(layout.step_folder(step)) == step
    assert layout.step_of(f"s3://bucket/job/{layout.step_folder(step)}") == step


@pytest.mark.parametrize("name", ["step-", "step-1x", "epoch-3", "latest", "", "my-step-3"])
def test_other_folders_tell_none(name: str) -> None:
    assert layout.step_of(name) is None


@given(manifests)
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.size == sum(shard.bytes for shard in manifest.files.values())


@given(manifests, st.data())
def test_a_manifest_with_a_changed_character_is_never_believed(manifest: Manifest, data: st.DataObject) -> None:
    text = manifest.to_json()
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.characters(codec="ascii").filter(lambda c: c != text[at])) + text[at + 1 :]
    try:
        assert Manifest.from_json(changed) == manifest  # a blank more between two values
    except InputError:
        pass


def test_a_manifest_that_was_cut_off_says_so() -> None:
    text = Manifest(tag="0" * 12, step=1, world_size=1, saved_ns=0, metadata=Shard(bytes=1, xxh3="", rank=0)).to_json()
    with pytest.raises(InputError, match="no manifest"):
        Manifest.from_json(text[: len(text) // 2])


def test_a_manifest_from_a_newer_headway_asks_for_that() -> None:
    told = json.loads(Manifest(tag="0" * 12, step=1, world_size=1, saved_ns=0, metadata=None).to_json())
    told |= {"version": layout.VERSION + 1}
    del told["crc32"]
    told["crc32"] = layout.checksum(told)
    with pytest.raises(InputError, match="newer headway"):
        Manifest.from_json(json.dumps(told))


@given(st.dictionaries(texts, shards, max_size=3))
def test_a_marker_comes_back_as_it_was(told: dict[str, Shard]) -> None:
    assert layout.read_marker(layout.marker(told)) == told
