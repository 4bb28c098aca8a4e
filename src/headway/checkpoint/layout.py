"""The names in a folder of checkpoints, and what a manifest says. Neither torch nor a file system is needed to know.

::

    ROOT/
      latest                     the name of the newest checkpoint that is committed
      step-00000100/             a checkpoint in torch's own format: `dcp.load` reads it as it is
        .metadata                its commit marker: comes last, whole, and only when everything else is safe
        __0_<tag>.distcp         the shard of rank 0; every save has names of its own, so none overwrites another's
        <tag>.json               the manifest: files, sizes, hashes
        <tag>.rank-0.json        a rank's word that its shard is safe; gone once the manifest is there
      .headway/
        owner.json               which job writes here
        history.json             how often it has failed
        pins/step-00000100       this one is never pruned
        pins/step-00000100@<id>  nor this one, until it is published; the manifest of an anchor
"""

import json
import re
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headway.errors import InputError

METADATA = ".metadata"
LATEST = "latest"
OWNER = ".headway/owner.json"
HISTORY = ".headway/history.json"
PINS = ".headway/pins"
VERSION = 1

TAG_LENGTH = 12
_TAG = re.compile(r"[0-9a-f]{12}")
_STEP = re.compile(r"step-(\d+)")


def new_tag(generation: int, run: str = "") -> str:
    """What the files of one save have in their names. Tags sort as generations do; all have the same length. `run` has
    four digits that are a run's own."""
    return f"{generation:08x}{run or secrets.token_hex(2)}"


def generation_of(tag: str) -> int:
    return int(tag[:8], 16)


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """The step that a folder's name tells."""
    found = _STEP.fullmatch(folder.rpartition("/")[2])
    return int(found[1]) if found else None


def own_key(rank: int) -> str:
    """The name, within a checkpoint, of what a rank has for itself: its position in the data, its random numbers."""
    return f"headway.rank-{rank}"


def shard_name(rank: int, tag: str) -> str:
    return f"__{rank}_{tag}.distcp"


def manifest_name(tag: str) -> str:
    return f"{tag}.json"


def marker_name(tag: str, rank: int) -> str:
    return f"{tag}.rank-{rank}.json"


def tag_of(name: str) -> str | None:
    """The tag of a manifest's name; None if the file is something else."""
    stem, _, ending = name.rpartition(".")
    return stem if ending == "json" and _TAG.fullmatch(stem) else None


def tag_in(name: str) -> str | None:
    """The tag of any file that a save has written; None for those of others."""
    if name.startswith("__"):
        name = name.rpartition("_")[2]
    found = _TAG.match(name)
    return found[0] if found and name[TAG_LENGTH : TAG_LENGTH + 1] == "." else None


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file, as it must be."""

    bytes: int
    xxh3: str
    """Its 128 bit hash, in hexadecimal."""
    rank: int
    """Who saved it."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What belongs to one save."""

    tag: str
    step: int
    """Training goes on with this one."""
    world_size: int
    saved_ns: int
    """Wall clock."""
    job: str = ""
    metric: float | None = None
    """What it is judged by, where the best are kept."""
    files: dict[str, Shard] = field(default_factory=dict)
    metadata: Shard | None = None
    """`.metadata`: the manifest whose hash it has is the one that counts."""

    def to_json(self) -> str:
        told = {"version": VERSION} | asdict(self)
        return json.dumps(told | {"crc32": checksum(told)}, indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str | bytes) -> "Manifest":
        try:
            told: dict[str, Any] = json.loads(text)
            if told.pop("crc32") != checksum(told):
                raise InputError("this manifest of a checkpoint is damaged: it does not have its own checksum.")
            if told.pop("version") > VERSION:
                raise InputError("the manifest of this checkpoint is from a newer headway. Use that one to read it.")
            files = {name: Shard(**shard) for name, shard in told.pop("files").items()}
            metadata = Shard(**told.pop("metadata"))
            return Manifest(files=files, metadata=metadata, **told)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"this is no manifest of a checkpoint ({type(error).__name__}: {error}).") from error

    @property
    def size(self) -> int:
        """All its bytes."""
        return sum(shard.bytes for shard in self.files.values())


def checksum(told: Mapping[str, Any]) -> int:
    """What a manifest has as its `crc32`: of all else that it says."""
    return zlib.crc32(json.dumps(told, sort_keys=True).encode())


def marker(shards: Mapping[str, Shard]) -> str:
    """What a rank says when its shards are safe."""
    return json.dumps({name: asdict(shard) for name, shard in shards.items()})


def read_marker(text: str | bytes) -> dict[str, Shard]:
    return {name: Shard(**shard) for name, shard in json.loads(text).items()}
