"""What is saved is loaded by those who may, whatever else is in the store, and whatever happens to it."""

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from broken_line import Line

import warm
from headway import storage as storage_module
from headway.compile.bundle import Member, Members, pack
from headway.compile.store import MOST_SEGMENTS, Store
from headway.compile.trust import Keys
from headway.errors import InputError

KEY, OTHER_KEY = "0123456789abcdef", "fedcba9876543210"
ABOUT = {"torch": "2.13.0"}


def some(*names: str, size: int = 500) -> Members:
    return {name: Member(name.encode() * (size // len(name)), time.time_ns()) for name in names}


def data_of(members: Members) -> dict[str, bytes]:
    return {name: member.data for name, member in members.items()}


def segments(root: Path, key: str = KEY) -> list[Path]:
    return sorted((root / key).glob("*.bundle"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def keys_of(folder: Path, name: str) -> Keys:
    keys = Keys.at(folder / name)
    keys.generate(name)
    return keys


@pytest.fixture
def mine(tmp_path: Path) -> Keys:
    return keys_of(tmp_path, "mine")


@pytest.fixture
def stranger(tmp_path: Path) -> Keys:
    return keys_of(tmp_path, "stranger")


# --- what is saved ---------------------------------------------------------------------------------------------------


def test_what_one_job_saves_the_next_one_loads(root: Path) -> None:
    assert Store(str(root)).load(KEY).digest == ""
    size = Store(str(root)).save(KEY, some("a", "b/c"), ABOUT, "job1")
    loaded = Store(str(root)).load(KEY)
    assert data_of(loaded.members) == data_of(some("a", "b/c"))
    assert (loaded.about, loaded.problems, loaded.segments) == (ABOUT, [], 1)
    assert loaded.digest == Store(str(root)).load(KEY).digest != ""
    assert [path.stat().st_size for path in segments(root)] == [size]


def test_a_job_replaces_its_own_segment_and_no_other(root: Path) -> None:
    job, other = Store(str(root)), Store(str(root))
    job.save(KEY, some("a"), ABOUT, "job1")
    other.save(KEY, some("x"), ABOUT, "job2")
    job.save(KEY, some("a", "b"), ABOUT, "job1")
    job.save(KEY, some("a", "b", "c"), ABOUT, "job1")
    assert len(segments(root)) == 2
    again = Store(str(root))  # the job's next attempt, which may have compiled less
    again.save(KEY, some("d"), ABOUT, "job1")
    assert set(again.load(KEY).members) == {"a", "b", "c", "d", "x"}


def test_of_two_members_of_a_name_the_newest_is_loaded(root: Path) -> None:
    Store(str(root)).save(KEY, {"a": Member(b"new", 2)}, ABOUT, "job1")
    Store(str(root)).save(KEY, {"a": Member(b"old", 1)}, ABOUT, "job2")
    assert Store(str(root)).load(KEY).members["a"].data == b"new"


def test_many_segments_become_one(root: Path) -> None:
    for number in range(MOST_SEGMENTS):
        Store(str(root)).save(KEY, some(f"m{number}"), ABOUT, f"job{number}")
    assert len(segments(root)) == MOST_SEGMENTS
    job = Store(str(root))
    before = job.load(KEY)
    job.save(KEY, some("last"), ABOUT, "job99")
    assert len(segments(root)) == 1
    after = job.load(KEY)
    assert data_of(after.members) == data_of(before.members | some("last"))
    job.save(KEY, some("last", "later"), ABOUT, "job99")  # and what is merged is not the job's to replace
    assert set(job.load(KEY).members) == {*after.members, "later"}


def test_merging_leaves_alone_what_is_not_believed(root: Path) -> None:
    for number in range(MOST_SEGMENTS):
        Store(str(root)).save(KEY, some(f"m{number}"), ABOUT, f"job{number}")
    bad = segments(root)[0]
    body = bytearray(bad.read_bytes())
    body[-100] ^= 1  # its manifest is good still
    bad.write_bytes(body)
    (root / KEY / "rubbish.bundle").write_bytes(b"rubbish")
    Store(str(root)).save(KEY, some("last"), ABOUT, "job99")
    assert {path.name for path in segments(root)} >= {bad.name, "rubbish.bundle"}
    assert len(segments(root)) == 3
    assert len(Store(str(root)).load(KEY).members) == MOST_SEGMENTS


def test_merging_signs_nothing_in_the_name_of_another(tmp_path: Path, mine: Keys, stranger: Keys) -> None:
    url = f"memory://{os.urandom(6).hex()}/store"
    theirs, ours = stranger.own(), mine.own()
    assert theirs
    assert ours
    mine.trust(theirs[1], "friend")
    Store(url, keys=stranger).save(KEY, some("friendly"), ABOUT, "friend")
    for number in range(MOST_SEGMENTS + 1):
        Store(url, keys=mine).save(KEY, some(f"m{number}"), ABOUT, f"job{number}")
    assert {each.signer for each in Store(url, keys=mine).manifests(KEY).values()} == {"friend", "mine"}
    reader = Keys.at(tmp_path / "reader")
    reader.trust(ours[1], "them")
    assert set(Store(url, keys=reader).load(KEY).members) == {f"m{number}" for number in range(MOST_SEGMENTS + 1)}


def test_a_segment_that_goes_while_it_is_loaded_is_found_in_the_one_it_was_merged_into(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MOST_SEGMENTS):
        Store(str(root)).save(KEY, some(f"m{number}"), ABOUT, f"job{number}")
    read, merged = storage_module.LocalFolder.read_into, threading.Event()

    def read_late(self: storage_module.LocalFolder, name: str, offset: int, into: memoryview) -> int:
        if not merged.is_set():
            merged.set()
            Store(str(root)).save(KEY, some("last"), ABOUT, "job99")
        return read(self, name, offset, into)

    monkeypatch.setattr(storage_module.LocalFolder, "read_into", read_late)
    loaded = Store(str(root)).load(KEY)
    assert merged.is_set()
    assert set(loaded.members) == {"last", *(f"m{number}" for number in range(MOST_SEGMENTS))}
    assert loaded.problems == []


@pytest.mark.parametrize("key", ["", "abc", "../../etc", "0123456789ABCDEF", "0123/4567890", "x" * 32])
def test_what_is_no_key_is_refused(root: Path, key: str) -> None:
    store = Store(str(root))
    (problem,) = store.load(key).problems
    assert "is no key" in problem
    for call in (store.entry, store.remove, store.touch, store.verify, lambda key: store.save(key, {}, {}, "job")):
        with pytest.raises(InputError, match="is no key"):
            call(key)
    with pytest.raises(InputError, match="cannot name a segment"):
        store.save(KEY, {}, {}, "../x")
    assert not root.exists()


# --- what is not believed --------------------------------------------------------------------------------------------


def damaged(data: bytes, how: str) -> bytes:
    pick = random.Random(3)
    if how == "cut":
        return data[: len(data) // 2]
    if how == "flipped":
        at = pick.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
    return {"empty": b"", "rubbish": pick.randbytes(5000), "zeros": bytes(5000)}[how]


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "rubbish", "zeros"])
def test_a_bad_segment_is_told_and_the_others_are_loaded(root: Path, how: str) -> None:
    Store(str(root)).save(KEY, some("good"), ABOUT, "good")
    Store(str(root)).save(KEY, some("bad"), ABOUT, "bad")
    (bad,) = (path for path in segments(root) if path.name.startswith("bad"))
    bad.write_bytes(damaged(bad.read_bytes(), how))
    loaded = Store(str(root)).load(KEY)
    assert set(loaded.members) == {"good"}
    (problem,) = loaded.problems
    assert problem.startswith(f"{bad.name} is damaged")
    assert Store(str(root)).verify(KEY) == [problem]


def test_a_segment_cut_anywhere_never_raises(root: Path) -> None:
    store = Store(str(root))
    store.save(KEY, some("a", "b"), ABOUT, "job")
    (path,) = segments(root)
    data = path.read_bytes()
    for size in range(0, len(data), 64):
        path.write_bytes(data[:size])
        loaded = store.load(KEY)
        assert (loaded.members, loaded.segments, len(loaded.problems)) == ({}, 0, 1)
        assert store.entry(KEY).bytes == size


@pytest.mark.parametrize("mode", [0o777, 0o770])
@pytest.mark.parametrize("which", ["file", "key", "root", "above"])
def test_unsigned_segments_are_not_believed_where_others_can_write(root: Path, which: str, mode: int) -> None:
    store = Store(str(root))
    store.save(KEY, some("a"), ABOUT, "job")
    assert store.load(KEY).problems == []
    path = {"file": segments(root)[0], "key": root / KEY, "root": root, "above": root.parent}[which]
    before = path.stat().st_mode
    path.chmod(mode)
    try:
        loaded = store.load(KEY)
        assert loaded.members == {}
        (problem,) = loaded.problems
        assert "is not signed, and is not believed without: others can write" in problem
        assert f"chmod go-w {path}" in problem
    finally:
        path.chmod(before)


def test_a_umask_that_lets_the_group_write_does_not_make_a_folder_shared(root: Path) -> None:
    before = os.umask(0o002)
    try:
        Store(str(root / "deep")).save(KEY, some("a"), ABOUT, "job")
    finally:
        os.umask(before)
    assert Store(str(root / "deep")).load(KEY).problems == []


def test_in_a_shared_folder_one_saves_with_a_key_and_others_can_add(root: Path, mine: Keys) -> None:
    root.mkdir()
    root.chmod(0o1777)
    Store(str(root)).save(KEY, some("a"), ABOUT, "job")  # sticky: what is one's own is nobody else's
    root.chmod(0o777)
    with pytest.raises(InputError, match=r"without a signature. Run headway cache keygen. .others can write"):
        Store(str(root)).save(OTHER_KEY, some("a"), ABOUT, "job")
    Store(str(root), keys=mine).save(OTHER_KEY, some("a"), ABOUT, "job")
    assert (root / OTHER_KEY).stat().st_mode & 0o777 == 0o777
    assert segments(root, OTHER_KEY)[0].stat().st_mode & 0o022 == 0
    assert set(Store(str(root), keys=mine).load(OTHER_KEY).members) == {"a"}
    assert "no list of keys to trust" in Store(str(root)).load(OTHER_KEY).problems[0]


def test_a_stranger_is_not_believed_in_any_store(root: Path, mine: Keys, stranger: Keys) -> None:
    for url in (str(root), f"memory://{os.urandom(6).hex()}/store"):
        Store(url, keys=stranger).save(KEY, some("evil"), ABOUT, "evil")
        Store(url, keys=mine).save(KEY, some("good"), ABOUT, "good")
        loaded = Store(url, keys=mine).load(KEY)
        assert set(loaded.members) == {"good"}
        assert "whom you do not trust" in loaded.problems[0]


def test_an_object_store_is_always_shared(mine: Keys) -> None:
    store = Store(f"memory://{os.urandom(6).hex()}/store")
    with pytest.raises(InputError, match="without a signature"):
        store.save(KEY, some("a"), ABOUT, "job")
    store._storage.write(f"{KEY}/job-0.bundle", pack(some("a"), ABOUT, key=KEY))
    assert store.load(KEY).members == {}
    assert "is not signed" in store.load(KEY).problems[0]


def test_a_signed_segment_that_was_put_under_another_key_is_refused(root: Path, mine: Keys) -> None:
    store = Store(str(root), keys=mine)
    store.save(KEY, some("a"), ABOUT, "job")
    shutil.copytree(root / KEY, root / OTHER_KEY)
    assert store.load(OTHER_KEY).members == {}
    assert "somebody has put it here" in store.load(OTHER_KEY).problems[0]
    assert store.entry(OTHER_KEY).members == 0


class Writes:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def test_a_pickle_is_carried_and_never_loaded(root: Path, tmp_path: Path) -> None:
    payload = pickle.dumps(Writes(str(tmp_path / "ran")))
    Store(str(root)).save(KEY, {"artifact/aot_autograd/x": Member(payload, 0)}, ABOUT, "job")
    store = Store(str(root))
    assert data_of(store.load(KEY).members) == {"artifact/aot_autograd/x": payload}
    assert store.verify(KEY) == []
    store.copy(KEY, Store(str(tmp_path / "copy")))
    assert len(store.entries()) == 1
    assert not (tmp_path / "ran").exists()


def test_names_in_a_store_that_are_no_segments_are_passed_over(root: Path) -> None:
    store = Store(str(root))
    store.save(KEY, some("a"), ABOUT, "job")
    for name in ("..bundle", ".x.bundle.part-1", "a b.bundle", "notes.txt"):
        (root / KEY / name).write_bytes(b"?")
    (root / "notes").mkdir()
    (root / OTHER_KEY).mkdir()
    assert store.load(KEY).problems == []
    assert store.stored() == [KEY]


@pytest.mark.parametrize("what", ["pipe", "endless", "folder", "link to nothing", "link to itself", "huge"])
def test_a_segment_that_is_no_file_neither_hangs_nor_fills_the_memory(root: Path, what: str) -> None:
    store = Store(str(root))
    store.save(KEY, some("a"), ABOUT, "job")
    for name in ("zzz.bundle", "aaa.bundle", "used"):
        path = root / KEY / name
        if what == "pipe":
            os.mkfifo(path, 0o600)
        elif what == "folder":
            path.mkdir(mode=0o700)
        elif what == "huge":
            path.touch(0o600)
            os.truncate(path, 1 << 40)
        else:
            path.symlink_to({"endless": "/dev/zero", "link to nothing": "nowhere", "link to itself": path}[what])
    loaded = store.load(KEY)
    assert set(loaded.members) == {"a"}
    assert len(loaded.problems) == (0 if what == "link to nothing" else 2)
    assert store.entry(KEY).members == 1
    assert len(store.verify(KEY)) == 2


# --- several at once, and killed -------------------------------------------------------------------------------------

SAVING = """
    import sys, time
    from headway.compile.bundle import Member
    from headway.compile.store import Store
    url, key, tag, count, size = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    store, members = Store(url), {}
    print("begun", flush=True)
    for number in range(count):
        members[f"{tag}/{number}"] = Member(f"{tag}{number} ".encode() * size, time.time_ns())
        store.save(key, members, {"torch": "2"}, tag)
        print(number, flush=True)
"""


def saving(root: Path, tag: str, count: int, size: int = 100) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", textwrap.dedent(SAVING), str(root), KEY, tag, str(count), str(size)]
    return warm.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_jobs_that_save_at_once_lose_nothing(root: Path) -> None:
    for number in range(MOST_SEGMENTS - 1):  # so that they merge, too
        Store(str(root)).save(KEY, some(f"m{number}"), ABOUT, f"before{number}")
    processes = [saving(root, tag, 25) for tag in ("left", "right")]
    while any(process.poll() is None for process in processes):
        time.sleep(0.01)
        loaded = Store(str(root)).load(KEY)
        assert loaded.problems == []
        assert len(loaded.members) >= MOST_SEGMENTS - 1
    assert [process.wait() for process in processes] == [0, 0]
    loaded = Store(str(root)).load(KEY)
    wanted = {f"{tag}/{number}" for tag in ("left", "right") for number in range(25)}
    assert set(loaded.members) == wanted | {f"m{number}" for number in range(MOST_SEGMENTS - 1)}
    assert loaded.problems == []


def test_a_job_killed_while_it_saves_leaves_what_was_there(root: Path) -> None:
    pick = random.Random(int(os.environ.get("SEED", "11")))
    Store(str(root)).save(KEY, some("before"), ABOUT, "before")
    known = {"before"}
    for round_ in range(4):
        tag = f"job{round_}"
        with saving(root, tag, 10_000, size=3000) as process:
            assert process.stdout
            for _ in range(pick.randrange(1, 12)):
                line = process.stdout.readline()
            time.sleep(pick.random() * 0.02)
            process.send_signal(signal.SIGKILL)
        known |= {f"{tag}/{number}" for number in range(int(line) + 1)} if line != "begun\n" else set()
        loaded = Store(str(root)).load(KEY)
        assert loaded.problems == []
        assert set(loaded.members) >= known


KILLED = """
    import os, signal, sys
    left = int(sys.argv.pop())
    def end(event, _):
        global left
        if event in ("os.rename", "os.remove", "os.chmod"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(end)
"""


def test_a_job_killed_before_any_change_of_a_merge_loses_nothing(root: Path, tmp_path: Path) -> None:
    known = [f"m{number}" for number in range(MOST_SEGMENTS)]
    for name in known:
        Store(str(root)).save(KEY, some(name), ABOUT, f"fill{name}")
    script = textwrap.dedent(KILLED) + textwrap.dedent(SAVING)
    for change in range(1, 100):
        copy = shutil.copytree(root, tmp_path / f"copy{change}")
        command = [sys.executable, "-c", script, str(copy), KEY, "job", "1", "100", str(change)]
        ended = warm.run(command, stdout=subprocess.DEVNULL).returncode
        loaded = Store(str(copy)).load(KEY)
        assert loaded.problems == []
        assert set(loaded.members) >= set(known)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert len(segments(copy)) == 1
    assert change > MOST_SEGMENTS


def test_parts_that_killed_jobs_left_are_swept_once_they_are_old(root: Path) -> None:
    store = Store(str(root))
    store.save(KEY, some("a"), ABOUT, "job")
    old, new = root / KEY / ".a.bundle.part-1", root / KEY / ".a.bundle.part-2"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (0, 0))
    store.save(KEY, some("b"), ABOUT, "job")
    assert not old.exists()
    assert new.exists()


# --- stores that do not work -----------------------------------------------------------------------------------------


def test_a_full_disk_loses_nothing(small_disk: Path) -> None:
    store = Store(str(small_disk / "store"))
    store.save(KEY, some("a"), ABOUT, "job")
    with pytest.raises(OSError, match="No space left"):
        store.save(KEY, {"big": Member(os.urandom(2 << 20), 0)}, ABOUT, "job")
    loaded = Store(str(small_disk / "store")).load(KEY)
    assert (set(loaded.members), loaded.problems) == ({"a"}, [])
    assert len(list((small_disk / "store" / KEY).iterdir())) == 1


def test_a_read_only_home_is_loaded_from(tmp_path: Path, root: Path, read_only: Path) -> None:
    with pytest.raises(OSError, match="Read-only file system"):
        Store(str(read_only / "store")).save(KEY, some("a"), ABOUT, "job")
    subprocess.run(["mount", "-o", "remount,rw", read_only], check=True)
    Store(str(read_only / "store")).save(KEY, some("a"), ABOUT, "job")
    subprocess.run(["mount", "-o", "remount,ro", read_only], check=True)
    store = Store(str(read_only / "store"))
    assert set(store.load(KEY).members) == {"a"}
    assert store.verify(KEY) == []
    with pytest.raises(OSError, match="Read-only file system"):
        store.touch(KEY)


def test_a_file_where_the_store_should_be_is_said_to_be_one(root: Path) -> None:
    root.write_text("?")
    with pytest.raises(InputError, match="is no folder"):
        Store(str(root))


def patient(url: str, keys: Keys, mirror: Path | None, patience_s: float) -> Store:
    """A store that does not wait as long as a job would."""
    store = Store(url, keys=keys, mirror=mirror)
    store._storage = storage_module.ObjectStore(url, patience_s=patience_s)
    return store


@pytest.mark.thorough
@pytest.mark.parametrize("mirror", ["mirror", ""])
def test_a_store_that_is_down_is_a_problem_and_no_error(
    line: Line, s3_root: str, mine: Keys, tmp_path: Path, mirror: str
) -> None:
    line.fault = lambda method, path: "500"
    loaded = Store(s3_root, keys=mine, mirror=tmp_path / mirror if mirror else None).load(KEY)
    assert loaded.members == {}
    (problem,) = loaded.problems
    assert "internal error" in problem
    with pytest.raises(OSError, match="internal error"):
        Store(s3_root, keys=mine).save(KEY, some("a"), ABOUT, "job")


def test_a_store_that_is_silent_is_a_problem_and_no_error(line: Line, s3_root: str, mine: Keys, tmp_path: Path) -> None:
    Store(s3_root, keys=mine).save(KEY, some("a"), ABOUT, "job")
    for what in ("", ".bundle"):
        line.fault = lambda method, path, what=what: "silence" if what in path else None  # type: ignore[misc]
        for mirror in (None, tmp_path / f"mirror{what}"):
            loaded = patient(s3_root, mine, mirror, 1).load(KEY)
            assert loaded.members == {}
            assert "no answer within" in loaded.problems[0]


def test_a_slow_store_is_waited_for(line: Line, s3_root: str, mine: Keys, tmp_path: Path) -> None:
    Store(s3_root, keys=mine).save(KEY, some("a"), ABOUT, "job")
    line.fault = lambda method, path: "slow"
    loaded = Store(s3_root, keys=mine, mirror=tmp_path / "mirror").load(KEY)
    assert (set(loaded.members), loaded.problems) == ({"a"}, [])


@pytest.mark.parametrize("where", ["folder", "memory", pytest.param("s3", marks=pytest.mark.thorough)])
def test_every_kind_of_store_does_all_of_it(
    request: pytest.FixtureRequest, tmp_path: Path, mine: Keys, where: str
) -> None:
    if where == "s3":
        url = request.getfixturevalue("s3_root")
    else:
        url = str(tmp_path / "a") if where == "folder" else f"memory://{os.urandom(6).hex()}/store"
    for number in range(MOST_SEGMENTS + 2):
        Store(url, keys=mine).save(KEY, some(f"m{number}"), ABOUT, f"job{number}")
    store = Store(url, keys=mine)
    store.save(OTHER_KEY, {"big": Member(os.urandom(200_000), 1)}, {str(each): "x" * 5000 for each in range(20)}, "job")
    assert (len(store.load(KEY).members), store.load(KEY).segments) == (MOST_SEGMENTS + 2, 2)
    assert store.verify(KEY) == store.verify(OTHER_KEY) == []
    store.touch(KEY)
    first, second = store.entries()
    assert (first.key, first.members, first.about) == (KEY, MOST_SEGMENTS + 2, ABOUT)
    assert (second.key, len(second.about)) == (OTHER_KEY, 20)
    assert store.copy(OTHER_KEY, Store(str(tmp_path / "copy"), keys=mine)) == []
    assert Store(str(tmp_path / "copy"), keys=mine).load(OTHER_KEY).digest == store.load(OTHER_KEY).digest
    assert [entry.key for entry in store.prune(first.bytes)] == [OTHER_KEY]
    store.remove(KEY)
    assert store.stored() == []


# --- a store on another machine --------------------------------------------------------------------------------------

LOADING = """
    import json, sys
    from pathlib import Path
    from headway.compile.store import Store
    from headway.compile.trust import Keys
    url, key, keys, mirror = sys.argv[1:]
    store = Store(url, keys=Keys.at(Path(keys)), mirror=Path(mirror))
    print("ready", flush=True)
    sys.stdin.readline()
    loaded = store.load(key)
    print(json.dumps([sorted(loaded.members), loaded.digest, loaded.problems]))
"""


def loading(url: str, keys: Keys, mirror: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", textwrap.dedent(LOADING), url, KEY, str(keys.folder), str(mirror)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def downloads(line: Line) -> list[str]:
    return [each for each in line.seen if each.startswith("GET ") and each.partition("?")[0].endswith(".bundle")]


def test_processes_of_a_node_make_one_download(line: Line, s3_root: str, mine: Keys, tmp_path: Path) -> None:
    for name in ("a", "b"):
        Store(s3_root, keys=mine).save(KEY, some(name), ABOUT, name)
    line.fault = lambda method, path: "slow" if method == "GET" else None
    line.seen.clear()
    processes = [loading(s3_root, mine, tmp_path / "mirror") for _ in range(2)]
    for process in processes:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    told = []
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        told.append(json.loads(process.communicate(timeout=120)[0]))
    assert told == [told[0]] * 2
    assert (told[0][0], told[0][2]) == (["a", "b"], [])
    assert len(downloads(line)) == 2  # of two segments
    Store(s3_root, keys=mine).save(KEY, some("c"), ABOUT, "c")
    line.seen.clear()
    assert set(Store(s3_root, keys=mine, mirror=tmp_path / "mirror").load(KEY).members) == {"a", "b", "c"}
    assert len(downloads(line)) == 1


def test_a_process_killed_while_it_downloads_leaves_nothing_half(
    line: Line, s3_root: str, mine: Keys, tmp_path: Path
) -> None:
    Store(s3_root, keys=mine).save(KEY, some("a"), ABOUT, "job")
    line.fault = lambda method, path: "silence" if method == "GET" and ".bundle" in path else None
    line.seen.clear()
    with loading(s3_root, mine, tmp_path / "mirror") as process:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
        while not downloads(line):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    line.fault = lambda method, path: None
    (folder,) = [path for path in (tmp_path / "mirror").iterdir() if path.is_dir()]
    assert segments(folder) == []
    (folder / KEY).mkdir(exist_ok=True)
    part = folder / KEY / ".job.bundle.part-1"
    part.write_bytes(b"half")
    loaded = Store(s3_root, keys=mine, mirror=tmp_path / "mirror").load(KEY)
    assert (set(loaded.members), loaded.problems) == ({"a"}, [])
    assert not part.exists()


def test_a_node_has_what_it_had_when_the_store_is_down(line: Line, s3_root: str, mine: Keys, tmp_path: Path) -> None:
    store = Store(s3_root, keys=mine, mirror=tmp_path / "mirror")
    store.save(KEY, some("a"), ABOUT, "job")
    store.load(KEY)
    line.fault = lambda method, path: "500"
    loaded = store.load(KEY)
    assert set(loaded.members) == {"a"}
    assert "internal error" in loaded.problems[0]


def test_a_mirror_holds_what_the_store_holds_and_nothing_else(mine: Keys, tmp_path: Path) -> None:
    url = f"memory://{os.urandom(6).hex()}/store"
    store = Store(url, keys=mine, mirror=tmp_path / "mirror")
    for number in range(MOST_SEGMENTS + 1):
        Store(url, keys=mine).save(KEY, some(f"m{number}"), ABOUT, f"job{number}")
        loaded = store.load(KEY)
        assert len(loaded.members) == number + 1
    (folder,) = (tmp_path / "mirror").iterdir()
    assert [path.name for path in segments(folder)] == store._names(KEY)
    assert len(segments(folder)) == 1


def test_a_mirror_is_believed_no_more_than_the_store(mine: Keys, stranger: Keys, tmp_path: Path) -> None:
    url = f"memory://{os.urandom(6).hex()}/store"
    store = Store(url, keys=mine, mirror=tmp_path / "mirror")
    store.save(KEY, some("a"), ABOUT, "job")
    store.load(KEY)
    (folder,) = (tmp_path / "mirror").iterdir()
    (path,) = segments(folder)
    whole = path.read_bytes()
    path.write_bytes(pack(some("evil"), ABOUT, key=KEY))
    assert "is not signed" in store.load(KEY).problems[0]
    path.write_bytes(whole[:-1])
    assert "is damaged" in store.load(KEY).problems[0]
    assert set(store.load(KEY).members) == {"a"}  # it was fetched again


def test_where_there_can_be_no_mirror_each_process_fetches_for_itself(
    mine: Keys, tmp_path: Path, small_disk: Path, read_only: Path
) -> None:
    url = f"memory://{os.urandom(6).hex()}/store"
    Store(url, keys=mine).save(KEY, {"a": Member(os.urandom(2 << 20), 0)}, ABOUT, "job")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for mirror, why in (
        (shared, "can be written by others"),
        (small_disk / "m", "No space"),
        (read_only / "m", "Read"),
    ):
        loaded = Store(url, keys=mine, mirror=mirror).load(KEY)
        assert set(loaded.members) == {"a"}
        (problem,) = loaded.problems
        assert why in problem


def test_a_mirror_whose_disk_became_read_only_is_read(mine: Keys, small_disk: Path) -> None:
    url = f"memory://{os.urandom(6).hex()}/store"
    store = Store(url, keys=mine, mirror=small_disk / "mirror")
    Store(url, keys=mine).save(KEY, some("a"), ABOUT, "job1")
    assert store.load(KEY).problems == []
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    Store(url, keys=mine).save(KEY, some("b"), ABOUT, "job2")
    loaded = store.load(KEY)
    assert set(loaded.members) == {"a", "b"}
    (problem,) = loaded.problems
    assert problem == "not kept on this node: Read-only file system"


# --- room ------------------------------------------------------------------------------------------------------------


def filled(root: Path, count: int, bound_bytes: int = 1 << 40) -> list[str]:
    keys = [f"{number:016x}" for number in range(count)]
    for number, key in enumerate(keys):
        members = {"a": Member(os.urandom(1000), number)}
        Store(str(root), bound_bytes=bound_bytes).save(key, members, {"number": str(number)}, "job")
    return keys


def test_entries_say_what_there_is(root: Path) -> None:
    keys = filled(root, 3)
    store = Store(str(root))
    store.touch(keys[0])
    newest, middle, oldest = store.entries()
    assert [entry.key for entry in (newest, middle, oldest)] == [keys[0], keys[2], keys[1]]
    assert (middle.about, middle.members, middle.segments) == ({"number": "2"}, 1, 1)
    assert middle.bytes == segments(root, keys[2])[0].stat().st_size
    assert newest.used_ns > newest.saved_ns
    assert middle.used_ns == middle.saved_ns
    store.remove(keys[0])
    store.touch(keys[0])
    assert store.stored() == keys[1:]
    assert not (root / keys[0]).exists()


def test_what_was_not_used_for_longest_goes_first(root: Path) -> None:
    keys = filled(root, 4)
    store = Store(str(root))
    store.touch(keys[0])
    each = store.entry(keys[0]).bytes
    assert store.prune(4 * each + 100) == []
    assert [entry.key for entry in store.prune(2 * each + 100)] == [keys[1], keys[2]]
    assert store.stored() == [keys[0], keys[3]]
    assert [entry.key for entry in store.prune(0)] == [keys[3], keys[0]]
    assert store.entries() == []


def test_a_local_folder_keeps_itself_within_its_bound(root: Path) -> None:
    keys = filled(root, 6, bound_bytes=5000)
    assert Store(str(root)).stored() == keys[3:]
    big = {"a": Member(os.urandom(10_000), 0)}
    Store(str(root), bound_bytes=5000).save(keys[0], big, {}, "job")  # what was just saved stays, whatever its size
    assert Store(str(root)).stored() == [keys[0]]


def test_an_object_store_is_pruned_when_asked_only(mine: Keys) -> None:
    store = Store(f"memory://{os.urandom(6).hex()}/store", keys=mine, bound_bytes=100)
    for key in (KEY, OTHER_KEY):
        store.save(key, some("a"), ABOUT, "job")
    assert len(store.entries()) == 2
    assert len(store.prune(100)) == 2


def test_what_cannot_be_believed_is_listed_and_goes_first(root: Path) -> None:
    keys = filled(root, 3)
    (segment,) = segments(root, keys[2])
    segment.write_bytes(b"rubbish")
    store = Store(str(root))
    assert (store.entry(keys[2]).members, store.entry(keys[2]).used_ns) == (0, 0)
    assert [entry.key for entry in store.prune(2 * store.entry(keys[0]).bytes)] == [keys[2]]


def test_a_marker_of_use_that_is_none_does_no_harm(root: Path) -> None:
    (key,) = filled(root, 1)
    for text in (b"", b"x" * 100_000, b"9" * 19):
        (root / key / "used").write_bytes(text)
        assert Store(str(root)).entry(key).used_ns <= time.time_ns()


# --- copies ----------------------------------------------------------------------------------------------------------


def test_a_copy_is_signed_on_its_way_to_others(root: Path, mine: Keys, stranger: Keys) -> None:
    url = f"memory://{os.urandom(6).hex()}/store"
    Store(str(root)).save(KEY, some("a"), ABOUT, "job")
    with pytest.raises(InputError, match="without a signature"):
        Store(str(root)).copy(KEY, Store(url))
    seen: list[int] = []
    assert Store(str(root)).copy(KEY, Store(url, keys=mine), seen.append) == []
    assert len(seen) == 1
    loaded = Store(url, keys=mine).load(KEY)
    assert (data_of(loaded.members), loaded.about) == (data_of(some("a")), ABOUT)
    assert Store(url, keys=stranger).load(KEY).members == {}


def test_a_copy_keeps_the_signature_it_had(tmp_path: Path, mine: Keys, stranger: Keys) -> None:
    one, other = (f"memory://{os.urandom(6).hex()}/store" for _ in range(2))
    own = stranger.own()
    assert own
    mine.trust(own[1], "friend")
    Store(one, keys=stranger).save(KEY, some("a"), ABOUT, "job")
    Store(one, keys=mine).copy(KEY, Store(other, keys=mine))
    Store(one, keys=mine).copy(KEY, Store(other, keys=mine))  # and a second time is the same file
    assert [each.signer for each in Store(other, keys=mine).manifests(KEY).values()] == ["friend"]
    mine.distrust("friend")
    (problem,) = Store(other, keys=mine).copy(KEY, Store(str(tmp_path / "local"), keys=mine))
    assert "whom you do not trust" in problem
    assert Store(str(tmp_path / "local")).stored() == []
