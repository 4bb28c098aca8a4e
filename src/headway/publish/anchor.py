"""The checkpoint that something is published from: pinned until that is done, with a word on where it comes from.

::

    ROOT/.headway/pins/step-00000500@<id>      the anchor's manifest; while it is there, nobody prunes the checkpoint
"""

import json
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from headway.checkpoint import catalog
from headway.checkpoint.layout import METADATA, PINS, Shard, checksum
from headway.checkpoint.source import BadCheckpoint
from headway.errors import InputError
from headway.storage import Progress, Storage, open_storage

if TYPE_CHECKING:
    from torch import nn

    from headway.publish.shards import Shards

VERSION = 1
PATIENCE_S = 600.0
"""So long a checkpoint that is still being uploaded is waited for."""
_LOOK_S = 1.0
_GIT_S = 1.0
_ORIGIN = ("job", "attempt", "world_size", "data", "commit", "dirty", "torch")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True, kw_only=True)
class AnchorManifest:
    """Where a checkpoint comes from, what it consists of, and what is to become of it."""

    id: str
    """Of the request to publish it."""
    checkpoint: str
    step: int
    tag: str = ""
    """Of the save; empty if plain `dcp.save` made it."""
    saved_ns: int | None = None
    job: str = ""
    attempt: int | None = None
    world_size: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    """How far the first rank's loader had got."""
    commit: str = ""
    """Of the code that trained it."""
    dirty: bool = False
    """Whether that code had changes which were not committed."""
    torch: str = ""
    recipe: str = ""
    files: dict[str, Shard] = field(default_factory=dict)
    """Bytes and hash of each file, `.metadata` among them."""

    @property
    def content(self) -> str:
        """A hash of all files' names and hashes: another one if the checkpoint was saved again with other values."""
        told = "".join(f"{name} {shard.xxh3}\n" for name, shard in sorted(self.files.items()))
        return xxhash.xxh3_128_hexdigest(told.encode())

    def to_json(self) -> str:
        told = {"version": VERSION} | asdict(self)
        return json.dumps(told | {"crc32": checksum(told)}, indent=1)

    @staticmethod
    def from_json(text: str | bytes) -> "AnchorManifest":
        try:
            told: dict[str, Any] = json.loads(text)
            if told.pop("crc32") != checksum(told):
                raise InputError("the manifest of this anchor is damaged: it does not have its own checksum.")
            if told.pop("version") > VERSION:
                raise InputError("the manifest of this anchor is from a newer headway. Use that one to publish it.")
            files = {name: Shard(**shard) for name, shard in told.pop("files").items()}
            return AnchorManifest(files=files, **told)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"this is no manifest of an anchor ({type(error).__name__}: {error}).") from error


class Anchor:
    """A checkpoint to publish from, as a recipe is given it."""

    def __init__(self, storage: Storage, manifest: AnchorManifest, part: str = "model") -> None:
        self.manifest, self._storage, self._part = manifest, storage, part
        self.step, self.job, self.data = manifest.step, manifest.job, manifest.data
        self.path = f"{storage.url}/{manifest.checkpoint}"
        """Folder or URL of the checkpoint: plain `dcp.load` reads it."""
        self.progress: Callable[[str, int, int], None] = lambda what, done, total: None
        """Hears what is read, how many bytes of it, and of how many."""

    @property
    def size(self) -> int:
        """All its bytes."""
        return sum(shard.bytes for shard in self.manifest.files.values())

    @cached_property
    def shards(self) -> "Shards":
        """Its tensors, as a stream."""
        from headway.publish.shards import Shards

        files = dict(self.manifest.files)
        return Shards(self._storage, self.manifest.checkpoint, files, files.pop(METADATA), part=self._part)

    def load(self, model: "nn.Module") -> "nn.Module":
        """The model, with its weights, each byte checked; InputError if it has others than were saved."""
        done, total = 0, self.shards.bytes_to_read()

        def count(size: int) -> None:
            nonlocal done
            done += size
            self.progress("loading the weights", done, total)

        self.shards.load(model, count)
        return model


def torch_version() -> str:
    """torch's, without importing it; empty if there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def checkpoint_at(path: str) -> tuple[str, str]:
    """Root and name of the checkpoint that a path or URL means: itself, or of a folder of checkpoints the newest."""
    storage = open_storage(path)
    if METADATA not in storage.names() and (found := catalog.checkpoints(storage)):
        if committed := [each.name for each in found if each.state == "committed"]:
            return storage.url, committed[-1]
        names = ", ".join(each.name for each in found)
        raise InputError(f"nothing tells which checkpoint of {path} is the newest. Give one of them: {names}.")
    root, _, name = storage.url.rpartition("/")
    if not name or root.endswith(":/"):
        raise InputError(f"{path} is no checkpoint, and there is none in it. Give a checkpoint's folder.")
    return root or "/", name


def pin(
    storage: Storage, name: str, id: str, recipe: str, told: Mapping[str, Any], progress: Progress | None = None
) -> AnchorManifest:
    """Has a checkpoint kept until it is published. `told` is what else is known of where it comes from. One that plain
    `dcp.save` made is read once, for its hashes."""
    found = _loadable(storage, name)
    manifest = found.manifest
    if manifest is not None and manifest.metadata is not None:
        files = {**manifest.files, METADATA: manifest.metadata}
    else:
        files = {
            file: Shard(bytes=storage.size(f"{name}/{file}"), xxh3=storage.digest(f"{name}/{file}", progress), rank=0)
            for file in storage.names(name)
        }
    known: dict[str, Any] = {"job": manifest.job, "world_size": manifest.world_size} if manifest else {}
    step = _number_in(name) if found.step is None else found.step
    made = AnchorManifest(
        id=id, checkpoint=name, step=step, tag=found.tag, saved_ns=found.saved_ns, recipe=recipe, files=files,
        **known | _origin(storage, name, found.tag) | dict(told),
    )  # fmt: skip
    storage.write(_pin_name(name, id), made.to_json().encode())
    return made


def _number_in(name: str) -> int:
    """The step of a checkpoint that others have named: the last number in it."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else 0


def _origin(storage: Storage, name: str, tag: str) -> dict[str, Any]:
    """What a trainer told of where it comes from, when it had it pinned: whoever asks again does not know."""
    for pin in storage.names(PINS):
        if pin.startswith(f"{name}@"):
            with suppress(InputError, FileNotFoundError):
                found = AnchorManifest.from_json(storage.read(f"{PINS}/{pin}"))
                if found.tag == tag and found.attempt is not None:
                    return {key: getattr(found, key) for key in _ORIGIN}
    return {}


def _loadable(storage: Storage, name: str) -> catalog.Checkpoint:
    """The checkpoint of that name; an error that says why, if it cannot be loaded."""
    found = catalog.find(storage, name)
    if found.state not in ("committed", "foreign"):
        kind = NotCommitted if found.state == "partial" else BadCheckpoint
        raise kind(f"{storage.url}/{name} {catalog.verify(storage, found)[0]}.")
    return found


def unpin(storage: Storage, name: str, id: str) -> None:
    """It is published: it may be pruned, unless something else keeps it."""
    storage.remove(_pin_name(name, id))


class NotCommitted(InputError):
    """A checkpoint is still being uploaded, or was never finished."""


def open_anchor(
    storage: Storage,
    name: str,
    id: str,
    recipe: str,
    part: str,
    waiting: Callable[[str], None],
    patience_s: float = PATIENCE_S,
) -> Anchor:
    """The anchor of a request. One that is still being uploaded is waited for; `waiting` hears why."""
    until = time.monotonic() + patience_s
    while True:
        try:
            manifest = pinned(storage, name, id) or pin(storage, name, id, recipe, {})
            break
        except NotCommitted as error:
            if time.monotonic() > until:
                text = f"{error} Waited {patience_s:.0f} s for it. Publish another one, or save it again."
                raise InputError(text) from error
            waiting(str(error))
            time.sleep(_LOOK_S)
    if _loadable(storage, name).tag != manifest.tag:
        raise BadCheckpoint(f"{storage.url}/{name} is not the one that was handed over: it was saved again since")
    return Anchor(storage, manifest, part)


def pinned(storage: Storage, name: str, id: str) -> AnchorManifest | None:
    """What was pinned for a request; None if nothing is, as before it was asked for and after it is published."""
    try:
        return AnchorManifest.from_json(storage.read(_pin_name(name, id)))
    except FileNotFoundError:
        return None


def _pin_name(name: str, id: str) -> str:
    return f"{PINS}/{name}@{id}"


class Code:
    """What is checked out in a folder: git is asked at once, and answers while something else is done."""

    def __init__(self, folder: Path) -> None:
        self._commit = self._ask(folder, "rev-parse", "HEAD")
        self._changed = self._ask(folder, "status", "--porcelain", "-uno")

    @staticmethod
    def _ask(folder: Path, *words: str) -> "subprocess.Popen[bytes] | None":
        with suppress(OSError):  # there is no git
            return subprocess.Popen(
                ["git", "--no-optional-locks", *words], cwd=folder, start_new_session=True,  # it may be killed
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        return None

    def told(self) -> dict[str, Any]:
        """The commit, and whether something was changed since; nothing without git, or if that takes too long."""
        commit, changed = self._answer(self._commit).decode("ascii", "replace"), self._answer(self._changed)
        return {"commit": commit, "dirty": bool(changed)} if _COMMIT.fullmatch(commit) else {}

    @staticmethod
    def _answer(asked: "subprocess.Popen[bytes] | None") -> bytes:
        if asked is None:
            return b""
        try:
            return asked.communicate(timeout=_GIT_S)[0].strip()
        except subprocess.TimeoutExpired:
            asked.kill()
            asked.communicate()
            return b""
