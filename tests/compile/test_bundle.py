"""A segment comes back as it was packed, or not at all."""

import io
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headway.compile import bundle
from headway.compile.bundle import Damaged, Member, Members, Refused, digest, merge, pack, unpack

ABOUT = {"torch": "2.13.0", "cpu": "x86_64"}


def anyone(manifest: bytes, signature: str | None) -> str:
    return ""


@pytest.fixture
def members() -> Members:
    return {
        "artifact/inductor/fabc": Member(b"text " * 300, 5),
        "file/ab/kernel.so": Member(os.urandom(700), 6),
        "file/é ü": Member(b"", 7),
        "sources.json": Member(b'{"sources": []}', 8),
    }


def forged(manifest: object, entries: dict[str, bytes], *, deflate: bool = False) -> bytes:
    """A segment with a good seal, whose manifest and contents are anything at all."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        raw = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
        archive.writestr(zipfile.ZipInfo("manifest.json"), raw)
        for name, data in entries.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED)
    body = buffer.getvalue()[:-2] + struct.pack("<H", 32)
    return body + xxhash.xxh3_128_hexdigest(body).encode()


def told(**members: dict[str, object]) -> dict[str, object]:
    """A manifest that lists those."""
    return {"format": 1, "key": "", "saved_ns": 1, "about": {}, "members": members}


def test_of_more_than_fits_the_oldest_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MOST_BYTES", 25)
    members = {f"m{age}": Member(bytes(10), 100 - age) for age in range(5)}
    assert set(bundle.newest(members)) == {"m0", "m1"}


def test_what_was_packed_comes_back(members: Members) -> None:
    segment = unpack(pack(members, ABOUT, key="abc"), anyone)
    assert segment.members == members
    assert (segment.about, segment.key, segment.signer) == (ABOUT, "abc", "")
    assert unpack(pack({}, {}), anyone).members == {}


def test_compressible_members_shrink_and_others_are_not_tried() -> None:
    text, noise = Member(b"int main() {}\n" * 10_000, 0), Member(os.urandom(100_000), 0)
    assert len(pack({"a": text}, {})) < 10_000
    assert 100_000 < len(pack({"a": noise}, {})) < 101_000
    both = Member(text.data + os.urandom(30 << 20), 0)  # deflate makes the second half grow
    assert unpack(pack({"a": both}, {}), anyone).members == {"a": both}


def test_any_unzip_tool_opens_it(members: Members, tmp_path: Path) -> None:
    (tmp_path / "a.bundle").write_bytes(pack(members, ABOUT, lambda data: "signature"))
    subprocess.run([sys.executable, "-m", "zipfile", "-e", "a.bundle", "out"], cwd=tmp_path, check=True)
    assert (tmp_path / "out" / "file/ab/kernel.so").read_bytes() == members["file/ab/kernel.so"].data
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["about"] == ABOUT


def test_the_manifest_is_believed_before_anything_is_parsed(members: Members) -> None:
    seen: list[tuple[bytes, str | None]] = []

    def nobody(manifest: bytes, signature: str | None) -> str:
        seen.append((manifest, signature))
        raise Refused("no")

    with pytest.raises(Refused, match=r"^no$"):
        unpack(pack(members, ABOUT, lambda data: f"signed {len(data)}"), nobody)
    with pytest.raises(Refused, match=r"^no$"):
        unpack(forged(b"this is not even JSON", {"a": b"x"}), nobody)
    (first, signature), second = seen
    assert json.loads(first)["about"] == ABOUT
    assert signature == f"signed {len(first)}"
    assert second == (b"this is not even JSON", None)


def test_a_segment_that_was_cut_short_is_refused(members: Members) -> None:
    data = pack(members, ABOUT, lambda data: "signature")
    for size in {*range(0, len(data), 61), *range(len(data) - 70, len(data))}:
        with pytest.raises(Damaged, match="is damaged"):
            unpack(data[:size], anyone)


def test_a_segment_with_a_flipped_bit_is_refused(members: Members) -> None:
    data, pick = pack(members, ABOUT, lambda data: "signature"), random.Random(7)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << pick.randrange(8)
        with pytest.raises(Damaged, match="is damaged"):
            unpack(bytes(flipped), anyone)


def test_a_flipped_bit_under_a_new_seal_changes_nothing_that_is_loaded(members: Members) -> None:
    """Whoever flips it on purpose renews the checksum as well; the manifest is not theirs to change."""
    data, pick = pack(members, ABOUT, lambda data: "signature"), random.Random(8)
    whole = unpack(data, anyone)
    signed: list[tuple[bytes, str | None]] = []
    unpack(data, lambda *what: signed.append(what))  # type: ignore[func-returns-value]

    def believe(manifest: bytes, signature: str | None) -> str:
        if (manifest, signature) != signed[0]:
            raise Refused("is not signed like that.")
        return ""

    refused = 0
    for at in range(len(data) - 32):
        body = bytearray(data[:-32])
        body[at] ^= 1 << pick.randrange(8)
        try:
            assert unpack(bytes(body) + xxhash.xxh3_128_hexdigest(bytes(body)).encode(), believe) == whole
        except Refused:
            refused += 1
    assert refused > len(data) / 2


def test_another_format_is_refused_by_its_number() -> None:
    for version in (0, 2, "1", None, [1] * 1000):
        with pytest.raises(Refused, match=r"has the format .* and this headway reads 1: another version"):
            unpack(forged(told() | {"format": version}, {}), anyone)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../x", "a//b", "", ".", "a/.", "a/", "a\\b", "a\0b", "manifest.json", "x" * 2000]
)
def test_names_that_lead_elsewhere_are_refused_on_both_ways(name: str) -> None:
    with pytest.raises(Refused, match="is no name for a member"):
        pack({name: Member(b"x", 0)}, {})
    listed = {"sha256": Member(b"x", 0).sha256, "bytes": 1, "saved_ns": 0}
    with pytest.raises(Refused, match="is no name for a member"):
        unpack(forged(told() | {"members": {name: listed}}, {name.replace("\0", "") or "x": b"x"}), anyone)


def test_entries_that_the_manifest_does_not_name_are_never_looked_at() -> None:
    good = {"sha256": Member(b"x", 0).sha256, "bytes": 1, "saved_ns": 0}
    segment = unpack(forged(told(a=good), {"a": b"x", "../../evil": b"evil", "/etc/evil": b"evil"}), anyone)
    assert set(segment.members) == {"a"}
    with pytest.raises(Refused, match="something else where 'a' should be"):
        unpack(forged(told(a=good), {"../a": b"x"}), anyone)
    with pytest.raises(Refused, match="no 'a' where it should be"):
        unpack(forged(told(a=good), {}), anyone)


@pytest.mark.parametrize("deflate", [False, True])
@pytest.mark.parametrize("lie", [{"bytes": 999}, {"bytes": 1001}, {"bytes": 0}, {"sha256": "0" * 64}])
def test_a_manifest_that_lies_is_found_out(lie: dict[str, object], deflate: bool) -> None:
    data = bytes(range(250)) * 4
    honest = {"sha256": Member(data, 0).sha256, "bytes": 1000, "saved_ns": 0}
    assert unpack(forged(told(a=honest), {"a": data}, deflate=deflate), anyone).members["a"].data == data
    with pytest.raises(Refused, match=r"not what its manifest says|at most"):
        unpack(forged(told(a=honest | lie), {"a": data}, deflate=deflate), anyone)


def test_a_zip_bomb_does_not_fill_the_memory() -> None:
    bomb = {"a": bytes(200 << 20)}
    small = forged(told(a={"sha256": "0" * 64, "bytes": 1 << 20, "saved_ns": 0}), bomb, deflate=True)
    assert len(small) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match="not what its manifest says"):
            unpack(small, anyone)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(Refused, match="says it holds more than"):
        unpack(forged(told(a={"sha256": "", "bytes": bundle.MOST_BYTES + 1, "saved_ns": 0}), {}), anyone)
    huge = bytearray(forged(told(), {}))
    huge[18:22] = struct.pack("<L", bundle.MOST_MANIFEST_BYTES + 1)
    with pytest.raises(Refused, match="where at most"):
        bundle.peek(lambda at, size: bytes(huge[at : at + size]), anyone)


@pytest.mark.parametrize(
    "manifest",
    [
        b"", b"\xff\xfe", b"[]", b"{}", b"1", b"[" * 100_000, b'{"format": 1}',
        told() | {"about": []}, told() | {"about": {"a": 1}}, told() | {"members": []}, told() | {"saved_ns": "now"},
        told() | {"key": 5}, told() | {"members": {"a": None}}, told() | {"members": {"a": {}}},
        told(a={"sha256": "", "bytes": -1, "saved_ns": 0}), told(a={"sha256": "", "bytes": True, "saved_ns": 0}),
        told(a={"sha256": "", "bytes": 1e3, "saved_ns": 0}), told() | {"members": {"\ud800": {}}},
    ],
)  # fmt: skip
def test_a_manifest_that_is_none_is_refused(manifest: object) -> None:
    with pytest.raises(Refused):
        unpack(forged(manifest, {"a": b"x"}), anyone)


def test_deflated_rubbish_is_refused() -> None:
    data = forged(told(a={"sha256": "0" * 64, "bytes": 10, "saved_ns": 0}), {"a": b"\xff" * 8})
    at = data.index(b"PK\3\4", 4)
    rubbish = bytearray(data[:-32])
    rubbish[at + 8 : at + 10] = struct.pack("<H", zipfile.ZIP_DEFLATED)
    with pytest.raises(Refused, match="cannot be unpacked"):
        unpack(bytes(rubbish) + xxhash.xxh3_128_hexdigest(bytes(rubbish)).encode(), anyone)
    with pytest.raises(zlib.error):
        zlib.decompress(b"\xff" * 8, -15)


class Writes:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def test_a_pickle_among_the_members_is_bytes_and_nothing_else(tmp_path: Path) -> None:
    payload = pickle.dumps(Writes(str(tmp_path / "ran")))
    segment = unpack(pack({"artifact/inductor/a": Member(payload, 0)}, {}), anyone)
    assert segment.members["artifact/inductor/a"].data == payload
    assert not (tmp_path / "ran").exists()
    pickle.loads(payload).close()
    assert (tmp_path / "ran").exists()


def test_more_than_fits_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MOST_BYTES", 1000)
    pack({"a": Member(bytes(1000), 0)}, {})
    with pytest.raises(Refused, match="2 members of 1001 bytes do not fit"):
        pack({"a": Member(bytes(1000), 0), "b": Member(b"x", 0)}, {})


def test_peek_reads_no_more_than_the_beginning(members: Members) -> None:
    data = pack(members | {"big": Member(os.urandom(1 << 20), 1)}, ABOUT, lambda data: "signature")
    furthest = 0

    def read(at: int, size: int) -> bytes:
        nonlocal furthest
        furthest = max(furthest, at + size)
        return data[at : at + size]

    manifest = bundle.peek(read, lambda manifest, signature: f"by {signature}")
    assert manifest.signer == "by signature"
    assert manifest.members["big"].bytes == 1 << 20
    assert furthest < 4096


some_members = st.dictionaries(
    st.sampled_from("abcd"), st.builds(Member, st.binary(max_size=3), st.integers(0, 3)), max_size=4
)


@given(st.lists(some_members, max_size=4), st.randoms())
def test_merging_keeps_every_name_and_the_newest_in_any_order(several: list[Members], pick: random.Random) -> None:
    merged = merge(*several)
    assert set(merged) == {name for each in several for name in each}
    for name, member in merged.items():
        assert member.saved_ns == max(each[name].saved_ns for each in several if name in each)
    shuffled = pick.sample(several, len(several))
    assert merge(*shuffled) == merged == merge(merge(*several[:2]), merge(*several[2:])) == merge(merged, merged)


def test_the_digest_tells_contents_and_names_apart_and_nothing_else() -> None:
    one = {"a": Member(b"1", 1), "b": Member(b"2", 2)}
    assert digest(one) == digest({"b": Member(b"2", 9), "a": Member(b"1", 9)})
    assert len({digest(one), digest({"a": one["a"]}), digest({"a": one["b"], "b": one["a"]}), digest({})}) == 4
    assert digest({}) == ""
