"""One segment of the cache as a file: a zip whose manifest is believed before anything else in it is looked at.

Typical use::

    data = pack(members, {"torch": "2.13.0"}, keys.sign)
    segment = unpack(data, keys.believes)

Any unzip tool opens such a file. headway reads it from front to back instead: manifest and signature come first, are
bounded, and say what has to follow, so that a stranger's file meets a few lines of code and no decompression at all.
"""

import hashlib
import io
import json
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import xxhash

from headway.errors import HeadwayError

FORMAT = 1
MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
SOURCES = "sources.json"
"""The member that has the inputs whose sizes the next run is to take for dynamic."""
MOST_BYTES = 1 << 30
"""Of all members of one segment, unpacked; the zip stays far below what needs its 64-bit variant."""
MOST_MEMBERS = 60_000
MOST_MANIFEST_BYTES = 32 << 20
MOST_FILE_BYTES = MOST_BYTES + 3 * MOST_MANIFEST_BYTES
"""No segment is larger: whoever finds a larger file need not read it."""

_MOST_NAME_BYTES = 1024
_MOST_SIGNATURE_BYTES = 1024
_SAMPLE_BYTES = 1 << 16
_LOCAL = struct.Struct("<4s5H3L2H")
_SEAL_BYTES = 32

Sign = Callable[[bytes], str | None]
Believe = Callable[[bytes, str | None], str | None]
"""Given a manifest and its signature: who signed it. Raises `Refused` if it is not to be believed."""
Read = Callable[[int, int], bytes]
"""The bytes of a file from an offset on; fewer than asked for only at its end."""


class Refused(HeadwayError):
    """A segment, or something that was to become one, that headway will not touch."""


class Damaged(Refused):
    """A file that is not as it was written."""


@dataclass(frozen=True)
class Member:
    """One file of the cache."""

    data: bytes
    saved_ns: int

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


Members = dict[str, Member]


@dataclass(frozen=True)
class Listed:
    """What a manifest says of one member."""

    sha256: str
    bytes: int
    saved_ns: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a segment says of itself."""

    key: str
    """Where it belongs: a signed one that was put elsewhere is refused there."""
    about: dict[str, str]
    saved_ns: int
    members: dict[str, Listed]
    signer: str
    """The name by which its signer is trusted; empty if nobody signed."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A segment that was believed, and is whole."""

    key: str
    about: dict[str, str]
    saved_ns: int
    signer: str
    members: Members


def merge(*members: Members) -> Members:
    """All of them; of two of one name the newest. In whatever order they are given, the result is the same."""
    merged: Members = {}
    for each in members:
        for name, member in each.items():
            other = merged.get(name, member)
            merged[name] = max(other, member, key=lambda one: (one.saved_ns, one.data))
    return merged


def newest(members: Members) -> Members:
    """As many as one segment may hold; the oldest are left out."""
    kept, size = Members(), 0
    for name in sorted(members, key=lambda name: -members[name].saved_ns):
        size += len(members[name].data)
        if size > MOST_BYTES or len(kept) >= MOST_MEMBERS:
            break
        kept[name] = members[name]
    return kept


def digest(members: Members) -> str:
    """The same for the same contents under the same names, whenever they were saved; empty if there are none."""
    lines = [f"{member.sha256} {name}\n" for name, member in sorted(members.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""


def check_name(name: str) -> str:
    """The name; `Refused` if it could lead out of a folder, or be taken for something else."""
    parts = name.split("/")
    if name in (MANIFEST, SIGNATURE) or "\\" in name or "\0" in name or {"", ".", ".."} & set(parts):
        raise Refused(f"{name[:60]!r} is no name for a member: it has to be a plain relative path.")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise Refused(f"{name[:60]!r} is no name for a member: it is not UTF-8.") from None
    if size > _MOST_NAME_BYTES:
        raise Refused(f"{name[:40]!r}… is no name for a member: it is longer than {_MOST_NAME_BYTES} bytes.")
    return name


# --- writing ---------------------------------------------------------------------------------------------------------


def pack(members: Members, about: Mapping[str, str], sign: Sign | None = None, *, key: str = "") -> bytes:
    """The segment as bytes; signed, if `sign` gives a signature."""
    manifest = _manifest(members, about, key)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", allowZip64=False) as archive:
        _add(archive, MANIFEST, manifest)
        if sign and (signature := sign(manifest)):
            _add(archive, SIGNATURE, signature.encode())
        for name, member in sorted(members.items()):
            _add(archive, name, member.data, shrink=_shrinks(member.data))
    return _sealed(buffer.getvalue())


def _manifest(members: Members, about: Mapping[str, str], key: str) -> bytes:
    total = sum(len(member.data) for member in members.values())
    if total > MOST_BYTES or len(members) > MOST_MEMBERS:
        raise Refused(
            f"{len(members)} members of {total} bytes do not fit into one segment, which may hold {MOST_MEMBERS} "
            f"of {MOST_BYTES} bytes. Nothing was saved."
        )
    told = {
        check_name(name): {"sha256": member.sha256, "bytes": len(member.data), "saved_ns": member.saved_ns}
        for name, member in sorted(members.items())
    }
    whole = {"format": FORMAT, "key": key, "saved_ns": time.time_ns(), "about": dict(about), "members": told}
    manifest = json.dumps(whole).encode()
    if len(manifest) > MOST_MANIFEST_BYTES:
        raise Refused(f"the names of {len(members)} members are too long for one segment. Nothing was saved.")
    return manifest


def _add(archive: zipfile.ZipFile, name: str, data: bytes, shrink: bool = False) -> None:
    method = zipfile.ZIP_DEFLATED if shrink else zipfile.ZIP_STORED
    archive.writestr(zipfile.ZipInfo(name), data, method, compresslevel=1)


def _shrinks(data: bytes) -> bool:
    """Whether deflate pays, by the beginning: compiled code halves, what is compressed already only costs time."""
    sample = data[:_SAMPLE_BYTES]
    return len(zlib.compress(sample, 1)) < 0.9 * len(sample)


def _sealed(archive: bytes) -> bytes:
    """With a checksum of the whole as the zip's comment: damage is told from malice, and found before parsing."""
    body = archive[:-2] + struct.pack("<H", _SEAL_BYTES)
    return body + xxhash.xxh3_128_hexdigest(body).encode()


# --- reading ---------------------------------------------------------------------------------------------------------


def unpack(data: bytes, believe: Believe) -> Segment:
    """The segment; `Refused` unless its manifest is believed and everything is as the manifest says."""
    if xxhash.xxh3_128_hexdigest(memoryview(data)[:-_SEAL_BYTES]).encode() != data[-_SEAL_BYTES:]:
        raise Damaged(f"is damaged: its {len(data)} bytes are not those that were written.")
    read: Read = lambda at, size: data[at : at + size]  # noqa: E731
    manifest, at = _heading(read, believe)
    members: Members = {}
    for name, listed in manifest.members.items():
        slack = 64 + listed.bytes // 1000  # deflate lets random bytes grow a little
        method, packed, at = _entry(read, at, name, listed.bytes + slack)
        members[name] = _member(name, method, packed, listed)
    told = {"key": manifest.key, "about": manifest.about, "saved_ns": manifest.saved_ns, "signer": manifest.signer}
    return Segment(**told, members=members)  # type: ignore[arg-type]


def peek(read: Read, believe: Believe) -> Manifest:
    """What a segment says of itself, from the beginning of its file alone."""
    return _heading(read, believe)[0]


def _heading(read: Read, believe: Believe) -> tuple[Manifest, int]:
    """The manifest, which is believed, and where the first member begins."""
    _, raw, at = _entry(read, 0, MANIFEST, MOST_MANIFEST_BYTES)
    signature = None
    if read(at + _LOCAL.size, len(SIGNATURE)) == SIGNATURE.encode():
        _, text, at = _entry(read, at, SIGNATURE, _MOST_SIGNATURE_BYTES)
        signature = text.decode("ascii", "replace")
    signer = believe(raw, signature) or ""
    return _parsed(raw, signer), at


def _entry(read: Read, at: int, name: str, most: int) -> tuple[int, bytes, int]:
    """Method, packed bytes and end of the entry that begins there, which has to be the one of that name."""
    header = read(at, _LOCAL.size)
    if len(header) < _LOCAL.size or header[:4] != b"PK\3\4":
        raise Refused(f"has no {name!r} where it should be.")
    _, _, _, method, _, _, _, size, _, name_bytes, extra_bytes = _LOCAL.unpack(header)
    at += _LOCAL.size
    if extra_bytes or name_bytes != len(name.encode()) or read(at, name_bytes) != name.encode():
        raise Refused(f"has something else where {name!r} should be.")
    if size > most:
        raise Refused(f"has {size} bytes in {name!r}, where at most {most} are allowed.")
    packed = read(at + name_bytes, size)
    if len(packed) < size:
        raise Refused(f"ends within {name!r}.")
    return method, packed, at + name_bytes + size


def _member(name: str, method: int, packed: bytes, listed: Listed) -> Member:
    data = packed
    if method == zipfile.ZIP_DEFLATED:
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            data = inflate.decompress(packed, listed.bytes + 1)  # and never more, whatever is in there
        except zlib.error as error:
            raise Refused(f"has a {name!r} that cannot be unpacked: {error}.") from error
    member = Member(data, listed.saved_ns)
    if len(data) != listed.bytes or member.sha256 != listed.sha256:
        raise Refused(f"has a {name!r} that is not what its manifest says.")
    return member


def _parsed(raw: bytes, signer: str) -> Manifest:
    try:
        told = json.loads(raw)
        version = told["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(f"has no readable manifest: {type(error).__name__}: {error}.") from error
    if version != FORMAT:
        other = str(version)[:40]
        raise Refused(f"has the format {other!r}, and this headway reads {FORMAT}: another version has written it.")
    try:
        key, about, members = _text(told["key"]), told["about"], told["members"]
        return Manifest(
            key=key,
            about={_text(name): _text(value) for name, value in about.items()},
            saved_ns=_number(told["saved_ns"]),
            members=_listed(members),
            signer=signer,
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Refused(f"has a manifest with something missing or wrong: {error}.") from error


def _listed(members: dict[str, Any]) -> dict[str, Listed]:
    found = {
        check_name(name): Listed(_text(each["sha256"]), _number(each["bytes"]), _number(each["saved_ns"]))
        for name, each in sorted(members.items())
    }
    if len(found) > MOST_MEMBERS or sum(each.bytes for each in found.values()) > MOST_BYTES:
        raise Refused(f"says it holds more than {MOST_MEMBERS} members or {MOST_BYTES} bytes.")
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{str(value)[:40]!r} is no count")
    return value
