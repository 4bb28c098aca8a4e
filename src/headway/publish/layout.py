"""The names in a place of versions, and what a version's manifest says. No file system is needed to know.

::

    TO/
      latest                              name of the version that is served, as plain text; moves last
      step-00000500-3f9a2c41-a1b2c3/      a version: its step, the key of its anchor and recipe, a token of its own
        weights/model.safetensors ...     what the recipe made
        version.json                      its manifest; comes last: a folder without it is no version
      .headway/
        history.json                      which version was served since when
        begun/<name>                      somebody is making that version: who, and since when
        claims/<name>                     somebody is about to complete it
        work/                             where TO is a folder: what is no version yet
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from headway.checkpoint.layout import checksum
from headway.errors import InputError

LATEST, MANIFEST = "latest", "version.json"
HISTORY, BEGUN, CLAIMS, WORK = ".headway/history.json", ".headway/begun", ".headway/claims", ".headway/work"
FORMAT = 1

_NAME = re.compile(r"step-(\d{8,})-([0-9A-Za-z]+)-([0-9a-f]+)")


def prefix(step: int, key: str) -> str:
    """How the names of all versions of one anchor and recipe begin."""
    return f"step-{step:08d}-{key}-"


def step_of(name: str) -> int | None:
    """The step that a version's name tells; None if it is no such name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True, kw_only=True)
class FileTold:
    """One file, as it must be."""

    bytes: int
    xxh3: str
    """Its 128 bit hash, in hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class VersionManifest:
    """What a version consists of, and what it was made of."""

    version: int = FORMAT
    """Of the manifest's format."""
    name: str = ""
    """Given when it is added."""
    step: int
    key: str
    """The same for the same anchor and recipe."""
    job: str = ""
    published_ns: int = 0
    """Wall clock."""
    anchor: dict[str, Any] = field(default_factory=dict)
    """The manifest of the checkpoint."""
    recipe: str = ""
    signature: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    """What was checked before it was published."""
    facts: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileTold] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """All its bytes."""
        return sum(told.bytes for told in self.files.values())

    @property
    def prefix(self) -> str:
        """How its name begins."""
        return prefix(self.step, self.key)

    def with_files(self, files: Mapping[str, Mapping[str, Any]]) -> "VersionManifest":
        """The same, of these files: their bytes and hashes by name."""
        return replace(
            self, files={name: FileTold(bytes=told["bytes"], xxh3=told["xxh3"]) for name, told in files.items()}
        )

    def to_json(self) -> str:
        try:
            told = json.loads(json.dumps(asdict(self), allow_nan=False))  # its keys are text now, and sort as text does
        except (ValueError, TypeError) as error:
            raise InputError(f"what is told of a version has to be JSON: {error}. Look at its facts.") from error
        return json.dumps(told | {"crc32": checksum(told)}, indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str | bytes) -> "VersionManifest":
        try:
            told: dict[str, Any] = json.loads(text)
            if told.pop("crc32") != checksum(told):
                raise InputError("this manifest of a version is damaged: it does not have its own checksum.")
            if told["version"] > FORMAT:
                raise InputError("the manifest of this version is from a newer headway. Use that one to read it.")
            files = told.pop("files")
            return VersionManifest(**told).with_files(files)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"this is no manifest of a version ({type(error).__name__}: {error}).") from error
