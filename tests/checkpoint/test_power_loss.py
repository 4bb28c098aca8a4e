"""The power may fail after any system call of a save: what was committed loads, bit by bit, and nothing torn ever does.

Real saves of two ranks are recorded with strace. Prefixes of the record are played onto a disk that keeps only what was
made safe; of what was not, it keeps all, nothing, or any part. One run checks every fifth prefix: the environment
variable SEED says which, so that SEED=0 to SEED=4 check all of them.
"""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from keeping import end_keepers
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from headway.checkpoint import catalog
from headway.checkpoint.layout import LATEST, METADATA, generation_of
from headway.storage import open_storage

SEED = int(os.environ.get("SEED", "0"))
EVERY = 5
"""One in so many prefixes is checked in one run."""
SEEDS = 2
SHAPES = [(40, 30), (40,), (17, 50), (3,)]
STEPS = [10, 20, 20, 30, 40, 30, 50]
"""One is saved again at once, and one after those that followed it; older ones are pruned."""
WAITED = (0, 1, 4, 6)
"""The others are still being uploaded when the next one begins."""

TRAIN = f"""
import os, sys, warnings
import torch, torch.distributed as dist
import headway
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{{sys.argv[2]}}", rank=rank, world_size=2)
model = torch.nn.ParameterList([torch.empty(shape) for shape in {SHAPES}])
checkpointer = headway.Checkpointer(sys.argv[1], model=model, interval=None, keep=2)
for number, step in enumerate({STEPS}):
    with torch.no_grad():
        for parameter in model:
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + 10_000 * number)
    save = checkpointer.save(step, wait=number in {WAITED})
    if rank == 0:
        print(save.tag, number, flush=True)
checkpointer.close()
dist.barrier()
os._exit(0) if rank else os.wait()
"""

Content = Callable[["File"], bytes]
Keeps = Callable[["Change"], bool]


# --- what was called -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A system call that succeeded, in the order of their ends."""

    name: str
    paths: tuple[str, ...]
    data: bytes = b""
    number: int = 0
    """An offset, a length, or for a synchronisation how many calls had ended when it began."""


CALLS = "openat,mkdir,rename,unlink,unlinkat,rmdir,write,pwrite64,fsync,fdatasync,fallocate,ftruncate,sendmsg"
HEX = re.compile(r"(?:\\x[0-9a-f]{2})+")
LINE = re.compile(r"(\d+) +(?:<\.\.\. \w+ resumed>)?(.*)$")
WHOLE = re.compile(r"(\w+)\((.*)\) += (-?\d+)", re.DOTALL)


def calls(trace: Path, below: Path) -> Iterator[Call]:
    begun: dict[str, tuple[str, int]] = {}
    count = 0
    for line in trace.read_text().splitlines():
        found = LINE.match(line)
        assert found, line
        thread, text = found.groups()
        if text.endswith("<unfinished ...>"):
            begun[thread] = text.removesuffix(" <unfinished ...>"), count
            continue
        head, since = begun.pop(thread, ("", count)) if "resumed>" in line else ("", count)
        whole = WHOLE.match(head + text)
        if whole and not whole[3].startswith("-") and (call := parsed(whole[1], whole[2], since, below)):
            yield call
            count += 1


def in_order(found: list[Call], below: Path) -> list[Call]:
    """As the calls must have come to pass: a thread that has made a folder may be interrupted before strace hears of
    it, while another one puts something in there."""
    order, there, at = list(found), {below}, 0
    while at < len(order):
        name, paths = order[at].name, [Path(path) for path in order[at].paths]
        if missing := [str(path.parent) for path in paths if path != below and path.parent not in there]:
            late = next(
                i for i, call in enumerate(order) if i > at and call.name == "mkdir" and missing[0] in call.paths
            )
            order.insert(at, order.pop(late))
            for i, call in enumerate(order[at + 1 : late + 1], at + 1):
                if call.name == "sync" and call.number > at:  # the folder was in use by then, and so it was made
                    order[i] = replace(call, number=call.number + 1)
            continue
        there |= {*paths} if name == "mkdir" else set()
        there -= {*paths} if name == "rmdir" else set()
        at += 1
    return order


def parsed(name: str, text: str, since: int, below: Path) -> Call | None:
    """None if it changes nothing there, and tells nobody of it."""
    if name == "sendmsg":
        told = next((plain(each) for each in re.findall(r'iov_base="([^"]*)"', text)), b"")
        return Call("told", (), told) if b'"event": "committed"' in told else None
    words = text.split(", ")
    if name in ("unlinkat", "openat") and words[0].startswith("AT_FDCWD"):
        words = words[1:]
    paths = [path for word in words if (path := path_in(word))]
    if name == "unlinkat" and len(paths) == 2:
        paths = ["/".join(paths)]
        name = "rmdir" if "AT_REMOVEDIR" in words[-1] else "unlink"
    if not paths or not Path(paths[0]).is_relative_to(below):
        return None
    if name == "openat":
        assert "O_TRUNC" not in text, "nothing here is written twice"
        return Call("create", (paths[0],)) if "O_CREAT" in text else None
    if name in ("write", "pwrite64"):
        assert not words[1].endswith("..."), "strace cut it off"
        return Call("write", (paths[0],), plain(words[1]), int(words[3]) if name == "pwrite64" else -1)
    if name in ("fallocate", "ftruncate"):
        return Call("grow", (paths[0],), number=int(words[1]) if name == "ftruncate" else int(words[2]) + int(words[3]))
    return Call("sync" if name in ("fsync", "fdatasync") else name, tuple(paths), number=since)


def plain(word: str) -> bytes:
    found = HEX.search(word)
    return bytes.fromhex(found[0].replace("\\x", "")) if found else b""


def path_in(word: str) -> str | None:
    """The path of a string, or of a file descriptor that is written out."""
    found = re.search(r'[<"]((?:\\x[0-9a-f]{2})+)[>"]$', word)
    return plain(found[1]).decode("utf-8", "replace") if found else None


# --- what survives ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class File:
    now: bytearray = field(default_factory=bytearray)
    safe: bytes | None = None


@dataclass(eq=False)
class Change:
    """Of a folder's names: what they stand for afterwards, or that they are gone."""

    at: int
    names: dict[str, "File | Folder | None"]


@dataclass(eq=False)
class Folder:
    now: dict[str, "File | Folder"] = field(default_factory=dict)
    safe: dict[str, "File | Folder"] = field(default_factory=dict)
    unsafe: list[Change] = field(default_factory=list)

    def change(self, at: int, names: dict[str, "File | Folder | None"]) -> None:
        apply(self.now, names)
        self.unsafe.append(Change(at, names))

    def sync(self, before: int) -> None:
        """Makes safe what was changed before that."""
        for change in [each for each in self.unsafe if each.at < before]:
            apply(self.safe, change.names)
            self.unsafe.remove(change)


def apply(entries: dict[str, File | Folder], names: dict[str, "File | Folder | None"]) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """A folder that a power failure may strike after any call."""

    def __init__(self, base: Path) -> None:
        self._base, self._top, self._count = base, Folder(), 0

    def play(self, call: Call) -> None:
        self._count += 1
        if call.name != "told":
            getattr(self, f"_{call.name}")(call, *map(self._find, call.paths))

    def survivors(self, keeps: Keeps, content: Content) -> dict[str, bytes]:
        """The files that are there after a power failure, if of what is not safe this is kept."""
        return dict(_files(self._top, "", keeps, content))

    def _find(self, path: str) -> tuple[Folder, str]:
        """The folder that a path is in, and its name there; the top is in a folder of its own."""
        above, at = Folder({"": self._top}), ""
        for part in Path(path).relative_to(self._base).parts:
            inner = above.now[at]
            assert isinstance(inner, Folder)
            above, at = inner, part
        return above, at

    def _create(self, call: Call, place: tuple[Folder, str]) -> None:
        if place[1] not in place[0].now:
            place[0].change(self._count, {place[1]: File()})

    def _mkdir(self, call: Call, place: tuple[Folder, str]) -> None:
        place[0].change(self._count, {place[1]: Folder()})

    def _unlink(self, call: Call, place: tuple[Folder, str]) -> None:
        place[0].change(self._count, {place[1]: None})

    _rmdir = _unlink

    def _rename(self, call: Call, old: tuple[Folder, str], new: tuple[Folder, str]) -> None:
        assert old[0] is new[0], "a name moves within its folder, which is one change"
        old[0].change(self._count, {old[1]: None, new[1]: old[0].now[old[1]]})

    def _write(self, call: Call, place: tuple[Folder, str]) -> None:
        file = place[0].now[place[1]]
        assert isinstance(file, File)
        at = len(file.now) if call.number < 0 else call.number
        file.now[at : at + len(call.data)] = call.data

    def _grow(self, call: Call, place: tuple[Folder, str]) -> None:
        file = place[0].now[place[1]]
        assert isinstance(file, File)
        file.now.extend(bytes(max(0, call.number - len(file.now))))

    def _sync(self, call: Call, place: tuple[Folder, str]) -> None:
        node = place[0].now[place[1]]
        if isinstance(node, File):
            node.safe = bytes(node.now)
        else:
            node.sync(call.number + 1)


def _files(folder: Folder, path: str, keeps: Keeps, content: Content) -> Iterator[tuple[str, bytes]]:
    entries = dict(folder.safe)
    for change in folder.unsafe:
        if keeps(change):
            apply(entries, change.names)
    for name, node in entries.items():
        if isinstance(node, Folder):
            yield from _files(node, f"{path}{name}/", keeps, content)
        else:
            yield f"{path}{name}", content(node)


def lost(file: File) -> bytes:
    return file.safe if file.safe is not None else b""


def blank(file: File) -> bytes:
    """Its length was kept, and not its bytes."""
    return file.safe if file.safe is not None else bytes(len(file.now))


def kept(file: File) -> bytes:
    return bytes(file.now)


def torn(chance: random.Random) -> Content:
    def content(file: File) -> bytes:
        end = chance.randrange(len(file.now) + 1)
        return chance.choice([kept(file), lost(file), blank(file), bytes(file.now[:end])])

    return lambda file: kept(file) if file.safe == kept(file) else content(file)


def failures(disk: Disk, number: int) -> Iterator[dict[str, bytes]]:
    """What may be left if the power fails now."""
    for content in (kept, lost, blank):
        yield disk.survivors(lambda change: True, content)
        yield disk.survivors(lambda change: False, content)
    for seed in range(SEEDS):
        chance = random.Random(f"{SEED // EVERY} {number} {seed}")
        yield disk.survivors(lambda change: chance.random() < 0.5, torn(chance))  # noqa: B023


# --- what must be there ----------------------------------------------------------------------------------------------


@dataclass
class Checks:
    """Looks at what a power failure left, as a restart would."""

    folder: Path
    numbers: dict[str, int]
    """Which state each save was of."""
    seen: set[tuple[str, str]] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    looks: int = 0

    def check(self, files: dict[str, bytes], reported: str) -> None:
        files = {name: data for name, data in files.items() if not name.startswith("root/.headway/")}
        digest = digest_of(files)
        if (digest, reported) not in self.seen:
            self.seen.add((digest, reported))
            self.looks += 1
            self._look(self._laid_out(digest, files), reported)

    def _laid_out(self, digest: str, files: dict[str, bytes]) -> Path:
        for name, data in files.items():
            path = self.folder / digest / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return self.folder / digest / "root"

    def _look(self, root: Path, reported: str) -> None:
        storage = open_storage(root)
        committed = [each for each in catalog.checkpoints(storage) if each.state == "committed"]
        newest = catalog.newest(storage)
        if reported:
            assert newest, f"{reported} was reported as committed, and nothing is"
            assert generation_of(newest.tag) >= generation_of(reported)
        for checkpoint in committed:
            self._load(root / checkpoint.name, checkpoint.tag)
        if LATEST in storage.names():
            assert storage.read(LATEST).decode() in {each.name for each in committed}
        loadable = {path.parent.name for path in root.glob(f"*/{METADATA}")}
        assert loadable == {each.name for each in committed}, "plain dcp.load would read something that is torn"

    def _load(self, folder: Path, tag: str) -> None:
        digest = digest_of({path.name: path.read_bytes() for path in folder.iterdir()})
        if digest not in self.loaded:
            wanted = state(self.numbers[tag])
            found = {"model": {key: torch.zeros_like(value) for key, value in wanted.items()}}
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    load(found, checkpoint_id=folder)
            except CheckpointException as error:
                raise AssertionError(f"{folder.name} is torn: {error}") from error
            assert all(torch.equal(found["model"][key], value) for key, value in wanted.items())
            self.loaded.add(digest)


def state(number: int) -> dict[str, torch.Tensor]:
    tensors = (torch.arange(float(torch.Size(shape).numel())).view(shape) for shape in SHAPES)
    return {str(key): tensor + 10_000 * number for key, tensor in enumerate(tensors)}


def digest_of(files: dict[str, bytes]) -> str:
    told = [(name, hashlib.blake2b(data, digest_size=16).hexdigest()) for name, data in sorted(files.items())]
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Recording:
    base: Path
    calls: list[Call]
    numbers: dict[str, int]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Every call of trainers, keeper and uploader that changes something in the folder of a real job."""
    place, base = tmp_path_factory.mktemp("traced"), tmp_path_factory.mktemp("disk")
    trace, script = place / "trace", place / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    command = ["strace", "-f", "--seccomp-bpf", "-y", "-xx", "-s", "1048576", "-e", f"trace={CALLS}", "-o", str(trace)]
    environment = {**os.environ, "HEADWAY_HOME": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, sys.executable, script, base / "root", place / "store"],
        env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    end_keepers(base)
    assert done.returncode == 0, done.stderr
    saves = dict(line.split() for line in done.stdout.splitlines())
    return Recording(
        base, in_order(list(calls(trace, base)), base), {tag: int(number) for tag, number in saves.items()}
    )


def strike(recording: Recording, folder: Path, every: int = 1) -> Checks:
    """Has the power fail after each call, or after one in `every`."""
    disk, checks, reported = Disk(recording.base), Checks(folder, recording.numbers), ""
    for number, call in enumerate(recording.calls):
        disk.play(call)
        if call.name == "told":
            reported = max(reported, json.loads(call.data)["tag"])
        for files in failures(disk, number) if number % every == SEED % every else ():
            checks.check(files, reported)
    return checks


@pytest.mark.needs("strace")
def test_the_power_may_fail_after_any_system_call(
    recording: Recording, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = strike(recording, tmp_path, EVERY)
    record_property("prefixes", len(recording.calls[SEED % EVERY :: EVERY]))
    told = {json.loads(call.data)["tag"] for call in recording.calls if call.name == "told"}
    assert {tag for tag, number in recording.numbers.items() if number in WAITED} <= told <= recording.numbers.keys()
    assert any(call.name == "rmdir" for call in recording.calls), "something was pruned"
    assert len(found.loaded) >= len(told)
    assert found.looks > len(recording.calls) / EVERY


def test_a_folder_is_made_before_it_is_used_whatever_strace_hears_first() -> None:
    made, used = Call("mkdir", ("/disk/root",)), Call("create", ("/disk/root/file",))
    before, after, late = (Call("sync", ("/disk",), number=number) for number in (1, 2, 5))
    gone, other = Call("rmdir", ("/disk/root",)), Call("mkdir", ("/disk/other",))
    heard = [other, used, before, after, made, late, gone, made, used]
    right = [other, made, used, before, replace(after, number=3), late, gone, made, used]
    assert in_order(heard, Path("/disk")) == right
    assert in_order(right, Path("/disk")) == right


UPLOAD_TWICE = """
    import sys
    from headway.checkpoint import wire
    from headway.checkpoint.arena import Arena, Shape
    from headway.checkpoint.uploader import Uploader

    tag, metadata = "000000010000", b"the metadata of 000000010000"
    shape = Shape(
        plan="p", rank=0, world_size=1, image_bytes=5000, metadata_bytes=len(metadata), slots=1, placeholder=tag
    )
    arena = Arena.create(shape, metadata)
    arena.seal(0, tag, 1, 1)
    task = dict(
        tag=tag, rank=0, plan="p", root=sys.argv[1], local=None, folder="step-00000001", step=1, metric=None,
        saved_ns=1, world_size=1, coordinator=True, job="j", session="s", unclaimed=None, retention=None,
        deadline_s=10.0, image_bytes=5000, streams=False, slot=0,
    )
    ours, theirs = wire.pair()
    uploader = Uploader(theirs)
    for _ in range(2):
        uploader._active.add((tag, 0))
        uploader._do(task, arena)
"""


@pytest.mark.needs("strace")
def test_an_uploader_that_finds_a_save_committed_makes_it_safe_before_it_says_so(tmp_path: Path) -> None:
    """Whoever committed it may have died before the name of the commit marker was safe."""
    trace, root = tmp_path / "trace", tmp_path / "root"
    command = ["strace", "-f", "-y", "-xx", "-s", "1048576", "-e", f"trace={CALLS}", "-o", str(trace)]
    subprocess.run([*command, sys.executable, "-c", textwrap.dedent(UPLOAD_TWICE), str(root)], check=True, timeout=120)
    found = list(calls(trace, tmp_path))
    first, second = (at for at, call in enumerate(found) if call.name == "told")
    assert Call("sync", (f"{root}/step-00000001",)) in [replace(call, number=0) for call in found[first:second]]


@pytest.mark.needs("strace")
def test_the_disk_of_this_test_ends_up_as_the_real_one(recording: Recording) -> None:
    disk = Disk(recording.base)
    for call in recording.calls:
        disk.play(call)
    real = {str(path.relative_to(recording.base)): path for path in recording.base.rglob("*") if path.is_file()}
    assert disk.survivors(lambda change: True, kept) == {name: path.read_bytes() for name, path in real.items()}


@pytest.mark.needs("strace")
@pytest.mark.parametrize("of", ["files", "folders"])
def test_without_its_fsyncs_the_same_job_would_lose_checkpoints(recording: Recording, tmp_path: Path, of: str) -> None:
    def is_dropped(call: Call) -> bool:
        return call.name == "sync" and (".part-" in call.paths[0]) == (of == "files")

    nothing = Call("told", (), b'{"tag": ""}')
    unsafe = [nothing if is_dropped(call) else call for call in recording.calls]
    with pytest.raises(AssertionError, match=r"torn|was reported as committed"):
        strike(replace(recording, calls=unsafe), tmp_path)


@pytest.mark.needs("strace")
def test_a_commit_marker_that_comes_too_early_would_be_found(recording: Recording, tmp_path: Path) -> None:
    recorded = recording.calls
    marker = next(call.paths[0] for call in recorded if call.paths and f".{METADATA}.part-" in call.paths[0])
    own = [call for call in recorded if marker in call.paths]
    first = next(at for at, call in enumerate(recorded) if call.name == "create" and ".distcp" in call.paths[0])
    early = [*recorded[:first], *own, *(call for call in recorded[first:] if call not in own)]
    with pytest.raises(AssertionError, match="torn"):
        strike(replace(recording, calls=early), tmp_path)
