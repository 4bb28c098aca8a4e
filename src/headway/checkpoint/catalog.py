"""What checkpoints a root holds, whether they are whole, and what becomes of them.

Typical use::

    storage = open_storage("s3://bucket/job")
    for checkpoint in checkpoints(storage):
        print(checkpoint.name, checkpoint.state, verify(storage, checkpoint))
    prune(storage, Retention(keep_last=3))
"""

import errno
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import xxhash

from headway.checkpoint.layout import (
    LATEST,
    METADATA,
    PINS,
    Manifest,
    Shard,
    generation_of,
    manifest_name,
    step_of,
    tag_in,
)
from headway.checkpoint.retention import Retention, to_prune
from headway.errors import InputError, PlatformError
from headway.storage import PART, Progress, Storage, is_part

State = Literal["committed", "partial", "foreign", "damaged"]
_AT_ONCE = 16
"""Folders looked into at the same time: each takes a store a few round trips."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One folder of a root."""

    name: str
    tag: str
    """Of the save that counts; in a partial one, of the newest that was begun; empty where none is known."""
    step: int | None
    state: State
    """committed: loads, and can be verified. foreign: plain `dcp.save`; loads, nothing tells whether it is right.
    damaged: its commit marker is none of those that were written. partial: never finished; does not load."""
    size: int | None = None
    """In bytes, where a manifest tells."""
    saved_ns: int | None = None
    world_size: int | None = None
    metric: float | None = None
    pinned: bool = False
    manifest: Manifest | None = None
    """A partial one has one if it was about to be committed, or has lost `.metadata` since."""


def checkpoints(storage: Storage) -> list[Checkpoint]:
    """All of a root, the oldest first. Reads commit markers and manifests, and no shard."""
    while True:
        names, pins = _folders(storage), storage.names(PINS)
        with ThreadPoolExecutor(_AT_ONCE, "headway-catalog") as threads:
            looked = threads.map(lambda name, pins=pins: _look(storage, name, _is_pinned(name, pins)), names)
            found = sorted(filter(None, looked), key=lambda each: (each.tag, each.step or 0, each.name))
        # A job that saves often may have replaced all that were listed before they were looked into.
        if any(each.state == "committed" for each in found) or names == _folders(storage):
            return found


def _folders(storage: Storage) -> list[str]:
    return [name for name in storage.names() if not name.startswith(".") and name != LATEST]


def newest(storage: Storage) -> Checkpoint | None:
    """The newest that is committed."""
    return next((each for each in reversed(checkpoints(storage)) if each.state == "committed"), None)


def find(storage: Storage, name: str) -> Checkpoint:
    """The one of that name; InputError if there is none."""
    found = _look(storage, name, _is_pinned(name, storage.names(PINS))) if name in storage.names() else None
    if found is None:
        raise InputError(
            f"there is no checkpoint {name} in {storage.url}. `headway checkpoint ls` lists those there are."
        )
    return found


def _is_pinned(name: str, pins: list[str]) -> bool:
    """Whether one is kept for good, or until it is published."""
    return any(pin == name or pin.startswith(f"{name}@") for pin in pins)


def _look(storage: Storage, name: str, pinned: bool) -> Checkpoint | None:
    """What a folder is; None if it is no checkpoint's."""
    files = storage.names(name)
    tags = sorted({tag for file in files if (tag := _tag(file))}, reverse=True)
    manifests = [tag for tag in tags if manifest_name(tag) in files]
    state: State = "partial"
    if METADATA in files:
        try:
            if fitting := _fitting_manifest(storage, name, manifests):
                return _committed(name, fitting, pinned)
            if storage.names(name) != files:  # a save, or a pruning, is under way
                return _look(storage, name, pinned)
            state = "damaged" if manifests or _is_ours(storage, name, tags) else "foreign"
        except FileNotFoundError:  # someone deletes it just now, and began with the commit marker
            pass
    elif not tags and step_of(name) is None:
        return None
    manifest = _manifest(storage, name, manifests[0]) if state == "partial" and manifests else None
    return Checkpoint(
        name=name, tag=max(tags, default=""), step=step_of(name), state=state, pinned=pinned, manifest=manifest
    )


def _is_ours(storage: Storage, name: str, tags: list[str]) -> bool:
    """Whether `.metadata` is that of a save which should have a manifest."""
    return bool(tags) and any(tag.encode() in storage.read(f"{name}/{METADATA}") for tag in tags)


def _fitting_manifest(storage: Storage, name: str, tags: list[str]) -> Manifest | None:
    """The manifest that was committed: the one that knows the hash of `.metadata`."""
    try:
        digest = xxhash.xxh3_128_hexdigest(storage.read(f"{name}/{METADATA}"))
    except OSError as error:
        if storage.is_local and error.errno == errno.EIO:  # a bad sector: the others are there all the same
            return None
        raise
    manifests = (_manifest(storage, name, tag) for tag in tags)
    return next((each for each in manifests if each and each.metadata and each.metadata.xxh3 == digest), None)


def _committed(name: str, manifest: Manifest, pinned: bool) -> Checkpoint:
    return Checkpoint(
        name=name,
        tag=manifest.tag,
        step=manifest.step,
        state="committed",
        size=manifest.size,
        saved_ns=manifest.saved_ns,
        world_size=manifest.world_size,
        metric=manifest.metric,
        pinned=pinned,
        manifest=manifest,
    )


def _manifest(storage: Storage, name: str, tag: str) -> Manifest | None:
    try:
        manifest = Manifest.from_json(storage.read(f"{name}/{manifest_name(tag)}"))
    except (InputError, FileNotFoundError):
        return None
    return manifest if manifest.tag == tag else None


def _tag(name: str) -> str | None:
    """The tag of a save's file, finished or not."""
    return tag_in(name[1:].partition(PART)[0]) if is_part(name) else tag_in(name)


# --- is it whole? ----------------------------------------------------------------------------------------------------


def verify(storage: Storage, checkpoint: Checkpoint, progress: Progress | None = None) -> list[str]:
    """What is wrong with it; nothing, if every file is there, with the size and the hash that it was saved with."""
    manifest = checkpoint.manifest
    if checkpoint.state == "partial" or manifest is None or manifest.metadata is None:
        return [_WITHOUT_MANIFEST[checkpoint.state]]
    problems = []
    if (step := step_of(checkpoint.name)) not in (None, manifest.step):
        problems.append(f"the folder is named after step {step}, its manifest says {manifest.step}")
    for file, shard in {**manifest.files, METADATA: manifest.metadata}.items():
        if problem := _problem(storage, f"{checkpoint.name}/{file}", shard, progress):
            problems.append(f"{file} {problem}")
    return problems


_WITHOUT_MANIFEST = {
    "partial": "was never committed: there is no .metadata",
    "foreign": "cannot be verified: no manifest came with it (a plain dcp.save?)",
    "damaged": ".metadata fits none of the manifests: one of them is damaged, or the manifest is missing",
}


def _problem(storage: Storage, name: str, shard: Shard, progress: Progress | None) -> str | None:
    try:
        if (size := storage.size(name)) != shard.bytes:
            return f"has {size} bytes instead of {shard.bytes}"
        if (digest := storage.digest(name, progress)) != shard.xxh3:
            return f"has the hash {digest} instead of {shard.xxh3}: its content changed"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def once_committed(storage: Storage, listing: list[Checkpoint] | None = None) -> list[Checkpoint]:
    """Those that are committed or were, the oldest first: `latest` names none that was not. Of a listing, if there is
    one."""
    named = latest(storage)
    found = checkpoints(storage) if listing is None else listing
    return [each for each in found if each.state in ("committed", "damaged") or each.name == named]


def latest(storage: Storage) -> str:
    """Return the name of the checkpoint that `latest` points to, or an empty string."""
    with suppress(FileNotFoundError):
        return storage.read(LATEST).decode(errors="replace")
    return ""


def deleted(committed: Iterable[str], found: Iterable[Checkpoint]) -> str:
    """The tag of the first save that somebody has deleted, of those that are known to have been committed; empty if
    nobody has. Pruning deletes none that is newer than all that are stored."""
    newest = max((each.tag for each in found if each.state != "partial"), default="")
    return min((tag for tag in committed if tag > newest), default="")


# --- what becomes of them --------------------------------------------------------------------------------------------


def set_latest(storage: Storage, name: str) -> None:
    """Tells readers which checkpoint is the newest. It must be committed."""
    storage.write(LATEST, name.encode())


def pin(storage: Storage, name: str) -> None:
    """From now on it is never pruned."""
    storage.write(f"{PINS}/{find(storage, name).name}", b"")


def unpin(storage: Storage, name: str) -> None:
    """It may be pruned again, also if it was to be published."""
    others = {*storage.names()} - {name}  # one that is called name@something has a pin of its own
    for pin in storage.names(PINS):
        if _is_pinned(name, [pin]) and pin not in others:
            storage.remove(f"{PINS}/{pin}")


def prune(storage: Storage, retention: Retention, *, dry_run: bool = False) -> list[Checkpoint]:
    """Deletes what need not be kept, and what dead saves have left behind; the checkpoints that went.

    Whatever belongs to a save newer than the newest committed one may still be written, and stays.
    """
    found = checkpoints(storage)
    committed = [each for each in found if each.state == "committed"]
    if not committed:
        return []
    generation = generation_of(committed[-1].tag)
    going = to_prune(found, retention)
    partial = [each for each in found if each.state == "partial" and not each.pinned]
    going += [each for each in partial if _is_dead(each.tag, generation)]
    empty = [each for each in partial if not each.tag and not storage.names(each.name)]
    if not dry_run:
        empty = [each for each in empty if storage.remove_if_empty(each.name)]
        for checkpoint in going:
            _remove(storage, checkpoint, generation)
        for checkpoint in committed:
            if checkpoint not in going:
                _sweep(storage, checkpoint, generation)
    return going + empty


def sweep(storage: Storage, name: str) -> None:
    """Deletes what earlier saves have left in a committed folder."""
    found = find(storage, name)
    if found.state == "committed":
        _sweep(storage, found, generation_of(found.tag))


def _remove(storage: Storage, checkpoint: Checkpoint, newest_generation: int) -> None:
    """Deletes a folder. If a newer save has begun there meanwhile, only what a dead one has left: what is committed
    goes when that save is."""
    tags = {file: _tag(file) for file in storage.names(checkpoint.name)}
    if not any(tag and generation_of(tag) > newest_generation for tag in tags.values()):
        storage.remove_folder(checkpoint.name, METADATA)
        return
    for file, tag in tags.items():
        if checkpoint.state == "partial" and tag and generation_of(tag) <= newest_generation:
            storage.remove(f"{checkpoint.name}/{file}")


def _is_dead(tag: str, newest_generation: int) -> bool:
    """Whether nobody writes that save any more."""
    return bool(tag) and generation_of(tag) < newest_generation


def _sweep(storage: Storage, checkpoint: Checkpoint, newest_generation: int) -> None:
    """Deletes what other saves left in a committed folder: markers, superseded files, files never finished."""
    tags = {file: _tag(file) for file in storage.names(checkpoint.name)}
    in_use = any(tag and generation_of(tag) > newest_generation for tag in tags.values())
    for file, tag in tags.items():
        if tag is None:
            left = is_part(file) and not in_use  # an unfinished `.metadata`: nothing tells of which save
        elif tag == checkpoint.tag:
            left = is_part(file) or file.startswith(f"{tag}.rank-")
        else:
            left = generation_of(tag) <= newest_generation
        if left:
            storage.remove(f"{checkpoint.name}/{file}")


def copy(source: Storage, checkpoint: Checkpoint, target: Storage, progress: Progress | None = None) -> None:
    """Puts a checkpoint into another root, checked against its hashes; it is committed there last.

    What the target has already, and right, is not copied again.
    """
    if checkpoint.state not in ("committed", "foreign"):
        raise InputError(f"{checkpoint.name} cannot be copied: {_WITHOUT_MANIFEST[checkpoint.state]}.")
    name, manifest = checkpoint.name, checkpoint.manifest
    metadata = source.read(f"{name}/{METADATA}")
    if manifest and manifest.metadata:
        _check(f"{source.url}/{name}/{METADATA}", xxhash.xxh3_128_hexdigest(metadata), manifest.metadata)
    shards: dict[str, Shard | None] = dict(manifest.files) if manifest else dict.fromkeys(source.names(name))
    for file, shard in shards.items():
        if file != METADATA:
            _copy_file(source, f"{name}/{file}", target, shard, progress)
    if lost := set(shards) - {METADATA, *target.names(name)}:
        raise PlatformError(f"{target.url}/{name} lost {', '.join(lost)} while it was copied: someone prunes there.")
    if manifest:
        target.write(f"{name}/{manifest_name(manifest.tag)}", manifest.to_json().encode())
    target.write(f"{name}/{METADATA}", metadata)
    if (last := newest(target)) and last.name == name:
        set_latest(target, name)


def _copy_file(source: Storage, path: str, target: Storage, shard: Shard | None, progress: Progress | None) -> None:
    if shard and _problem(target, path, shard, None) is None:
        if progress:
            progress(shard.bytes)
        return
    digest = target.upload(path, source.chunks(path, progress), source.size(path))
    if shard and digest != shard.xxh3:
        target.remove(path)
        _check(f"{source.url}/{path}", digest, shard)


def _check(path: str, digest: str, shard: Shard) -> None:
    if digest != shard.xxh3:
        raise PlatformError(
            f"{path} is not as it was saved: its hash is {digest}, not {shard.xxh3}. The checkpoint was not copied. "
            "Take an older one, or this one from another place."
        )
