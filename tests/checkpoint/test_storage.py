"""A file is there whole, or not at all: on disks, in an object store, whatever breaks."""

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from broken_line import Line
from file_systems import bound
from saving import image

from headway import storage as storage_module
from headway.errors import InputError
from headway.storage import CHUNK_BYTES, LocalFolder, ObjectStore, Storage, is_part, open_storage


def chunks(data: memoryview, size: int = 1 << 20) -> Iterator[memoryview]:
    for offset in range(0, len(data), size):
        yield data[offset : offset + size]


def everything_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# --- everywhere ------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(anywhere: Storage) -> None:
    anywhere.write("step-1/b", b"first")
    anywhere.write("step-1/b", b"second")
    anywhere.write("step-1/.a", b"")
    assert anywhere.read("step-1/b") == b"second"
    assert anywhere.read("step-1/.a") == b""
    assert anywhere.size("step-1/b") == 6
    assert anywhere.names("step-1") == [".a", "b"]
    assert anywhere.names() == ["step-1"]


def test_what_is_not_there_is_nothing_to_list_and_an_error_to_read(anywhere: Storage) -> None:
    assert anywhere.names() == anywhere.names("step-1") == []
    anywhere.write("latest", b"step-1")
    assert anywhere.names("latest") == []
    for read in (anywhere.read, anywhere.size, anywhere.digest):
        with pytest.raises(FileNotFoundError):
            read("step-1/b")
    anywhere.remove("step-1/b")
    anywhere.remove_folder("step-1")


@pytest.mark.parametrize("size", [0, 1, 4096, 3 * 4096 + 5, (1 << 20) + 4095])
def test_an_upload_comes_back_bit_by_bit_with_its_hash(anywhere: Storage, tmp_path: Path, size: int) -> None:
    data = image(size)
    wanted = xxhash.xxh3_128_hexdigest(data)
    assert anywhere.upload("step-1/shard", chunks(data, 8192), size) == wanted
    assert anywhere.read("step-1/shard") == data
    assert anywhere.digest("step-1/shard") == wanted
    assert anywhere.fetch("step-1/shard", tmp_path / "new" / "copy") == wanted
    assert (tmp_path / "new" / "copy").read_bytes() == data
    assert anywhere.names("step-1") == ["shard"]


def test_a_part_of_a_file_is_read_where_it_is_wanted(anywhere: Storage) -> None:
    anywhere.write("a", bytes(range(100)))
    into = bytearray(20)
    assert anywhere.read_into("a", 30, memoryview(into)) == 20
    assert into == bytes(range(30, 50))
    assert anywhere.read_into("a", 90, memoryview(into)) == 10
    assert into[:10] == bytes(range(90, 100))


def test_progress_adds_up_to_the_size(anywhere: Storage) -> None:
    data = image(CHUNK_BYTES + 4097)
    anywhere.upload("a", [data], len(data))
    told: list[int] = []
    anywhere.digest("a", told.append)
    assert sum(told) == len(data)
    assert len(told) == 2


def test_a_listing_is_never_an_old_one(anywhere: Storage) -> None:
    other = open_storage(anywhere.url)
    for number in range(3):
        other.write(f"step-1/{number}", b"")
        assert len(anywhere.names("step-1")) == number + 1
    other.remove_folder("step-1")
    assert anywhere.names("step-1") == []


@pytest.mark.filterwarnings("ignore:subprocess .* is still running")  # a keeper of an earlier test
@pytest.mark.filterwarnings("error")  # a file that is completed after all complains when it is collected
def test_an_upload_that_fails_leaves_what_was_there(anywhere: Storage) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what earlier tests have left may complain, too

    def broken() -> Iterator[memoryview]:
        yield image(8192)
        raise RuntimeError("the trainer is gone")

    anywhere.write("step-1/shard", b"old")
    with pytest.raises(RuntimeError, match="the trainer is gone"):
        anywhere.upload("step-1/shard", broken(), 16384)
    with pytest.raises(OSError, match="8192 bytes came instead of 16384"):
        anywhere.upload("step-1/shard", [image(8192)], 16384)
    assert anywhere.read("step-1/shard") == b"old"
    assert anywhere.names("step-1") == ["shard"]


def test_a_folder_is_removed_with_all_that_is_in_it(anywhere: Storage) -> None:
    for name in ("step-1/.metadata", "step-1/a", "step-10/.metadata"):
        anywhere.write(name, b"x")
    anywhere.remove_folder("step-1")
    assert anywhere.names() == ["step-10"]
    assert anywhere.names("step-10") == [".metadata"]


def test_a_url_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert open_storage("a/../b/").url == open_storage(f"file://{tmp_path}/b").url == str(tmp_path / "b")
    assert open_storage("~/b").url == "/home/me/b"
    assert open_storage(tmp_path).is_local
    assert open_storage("memory://x/y/").url == "memory://x/y"
    assert not open_storage("memory://x/y").is_local


@pytest.mark.parametrize("url", ["", "nosuch://x/y"])
def test_a_place_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InputError):
        open_storage(url)


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 4095, 4096, CHUNK_BYTES - 1, CHUNK_BYTES + 4096, CHUNK_BYTES + 4097])
@pytest.mark.parametrize("whole", [True, False])
def test_every_kind_of_file_system_takes_every_size(folder: Path, size: int, whole: bool) -> None:
    data = image(size)
    digest = open_storage(folder).upload("a/b", [data] if whole else chunks(data), size)
    assert (folder / "a" / "b").read_bytes() == data
    assert digest == xxhash.xxh3_128_hexdigest(data)


def test_chunks_off_the_page_boundaries_are_written_too(folder: Path) -> None:
    data = image(1 << 20)
    open_storage(folder).upload("b", [data[:4096], data[4096:5000], data[5000:99_999], data[99_999:]], len(data))
    assert (folder / "b").read_bytes() == data


@pytest.mark.needs("fincore")
@pytest.mark.parametrize("aligned", [True, False])
def test_an_upload_leaves_little_in_the_page_cache(
    tmp_path: Path, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subprocess.run(["stat", "-fc", "%T", tmp_path], capture_output=True, text=True).stdout.strip() == "tmpfs":
        pytest.skip("needs a temporary folder on a disk: a tmpfs is page cache")
    if not aligned:
        monkeypatch.setattr(storage_module, "_DIRTY_BYTES", 1 << 20)
    data = image((8 << 20) + 100)[0 if aligned else 1 :]
    open_storage(tmp_path).upload("a", chunks(data), len(data))
    told = subprocess.run(["fincore", "-nb", "-o", "PAGES", tmp_path / "a"], capture_output=True, text=True, check=True)
    assert int(told.stdout) <= (1 if aligned else 260)


def test_a_full_disk_is_found_out_before_the_first_byte(small_disk: Path) -> None:
    storage, asked = open_storage(small_disk), []

    def data() -> Iterator[memoryview]:
        asked.append(1)
        yield image(2 << 20)

    storage.write("step-1/shard", b"old")
    with pytest.raises(OSError, match="No space left") as caught:
        storage.upload("step-1/shard", data(), 2 << 20)
    assert caught.value.errno == errno.ENOSPC
    assert not asked
    (small_disk / "ballast").write_bytes(bytes((1 << 20) - (small_disk / "step-1").stat().st_size - 4096 * 8))
    with pytest.raises(OSError, match="No space left"):
        storage.write("step-1/shard", bytes(1 << 20))
    assert storage.read("step-1/shard") == b"old"
    assert storage.names("step-1") == ["shard"]
    (small_disk / "ballast").unlink()
    storage.upload("step-1/shard", [image(1 << 19)], 1 << 19)


@pytest.mark.needs("bindfs")
def test_a_disk_that_is_full_behind_fuse_is_an_error_too(small_disk: Path, tmp_path: Path) -> None:
    below = small_disk / "below"
    below.mkdir()
    with bound(below, tmp_path / "above") as folder:
        storage = open_storage(folder)
        with pytest.raises(OSError, match="No space left") as caught:
            storage.upload("step-1/shard", chunks(image(2 << 20), 1 << 16), 2 << 20)
        assert caught.value.errno == errno.ENOSPC
        assert storage.names("step-1") == []


def test_a_limit_on_file_sizes_is_an_error_and_nothing_else(tmp_path: Path) -> None:
    storage, before = open_storage(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            storage.upload("a", [image(2 << 20)], 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert storage.names() == []


def test_a_read_only_folder_says_so(read_only: Path) -> None:
    storage = open_storage(read_only)
    for write in (lambda: storage.write("a", b""), lambda: storage.upload("b/a", [image(4096)], 4096)):
        with pytest.raises(OSError, match="Read-only file system") as caught:
            write()
        assert caught.value.errno == errno.EROFS


def test_names_that_lead_out_of_the_root_are_refused(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "root")
    for name in ("../secret", "a/../../secret", "/etc/passwd"):
        with pytest.raises(InputError, match="leads out of it"):
            storage.read(name)
        with pytest.raises(InputError, match="leads out of it"):
            storage.write(name, b"")


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    storage, over = open_storage(tmp_path), threading.Event()
    storage.write("latest", b"a" * 10_000)

    def rewrite() -> None:
        while not over.is_set():
            for letter in (b"a", b"b"):
                storage.write("latest", letter * 10_000)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        seen = {storage.read("latest") for _ in range(2000)}
    finally:
        over.set()
        writer.join()
    assert seen <= {b"a" * 10_000, b"b" * 10_000}


def test_a_folder_that_is_pruned_before_its_first_file_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, make = LocalFolder(tmp_path), LocalFolder._make

    def make_and_lose(self: LocalFolder, folder: Path) -> None:
        make(self, folder)
        monkeypatch.undo()
        os.utime(folder, (0, 0))
        assert storage.remove_if_empty("step-1")

    monkeypatch.setattr(LocalFolder, "_make", make_and_lose)
    storage.write("step-1/shard", b"x")
    assert storage.read("step-1/shard") == b"x"
    assert not storage.remove_if_empty("step-1")


def test_a_killed_upload_leaves_a_name_that_tells(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        from headway.storage import open_storage
        def chunks():
            yield memoryview(bytes(1 << 20))
            print("begun", flush=True)
            time.sleep(600)
        open_storage(sys.argv[1]).upload("step-1/shard", chunks(), 2 << 20)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGKILL)
    (left,) = open_storage(tmp_path).names("step-1")
    assert is_part(left)
    assert left.startswith(".shard.part-")


def calls_of(call: str, root: Path) -> list[str]:
    """The system calls about files below a root's parent that a call on its storage makes in a process of its own."""
    script = f"import sys; from headway.storage import open_storage; open_storage(sys.argv[1]).{call}"
    trace = root.parent.parent / "trace"
    command = ["strace", "-f", "-y", "-e", "trace=mkdir,fsync,rename,pwrite64,unlink,unlinkat", "-o", str(trace)]
    subprocess.run([*command, sys.executable, "-c", script, str(root)], check=True)
    lines = (line.split(maxsplit=1)[1] for line in trace.read_text().splitlines() if str(root.parent.parent) in line)
    return [line for line in lines if "= -1" not in line]


def place(calls: list[str], name: str, about: str) -> int:
    return next(index for index, call in enumerate(calls) if call.startswith(f"{name}(") and about in call)


@pytest.mark.needs("strace")
@pytest.mark.parametrize("is_there", [False, True])
def test_bytes_then_names_then_folders_are_made_safe(tmp_path: Path, is_there: bool) -> None:
    root = tmp_path / "new" / "root"
    if is_there:  # and whoever created it may have died before it was safe
        (root / "step-1").mkdir(parents=True)
    calls = calls_of("upload('step-1/shard', [memoryview(bytes(5000))], 5000)", root)
    written = max(index for index, call in enumerate(calls) if call.startswith("pwrite64("))
    renamed = place(calls, "rename", "shard")
    assert written < place(calls, "fsync", ".part-") < renamed
    assert calls[renamed + 1].startswith("fsync(")
    assert f"{root}/step-1>" in calls[renamed + 1]
    for folder in (root / "step-1", root, *([] if is_there else [root.parent])):
        made = -1 if is_there else place(calls, "mkdir", f'"{folder}"')
        assert made < place(calls, "fsync", f"{folder.parent}>") < renamed


@pytest.mark.needs("strace")
def test_a_checkpoint_is_deleted_from_its_commit_marker_on(tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    for name in (".metadata", *map(str, range(20))):
        open_storage(root).write(f"step-1/{name}", b"x")
    first, second, *others = calls_of("remove_folder('step-1', '.metadata')", root)
    assert first.startswith("unlink(")
    assert ".metadata" in first
    assert second.startswith("fsync(")
    assert f"{root}/step-1>" in second
    assert len(others) == 20
    assert open_storage(root).names() == []


@pytest.mark.needs("chattr")
def test_a_checkpoint_that_cannot_be_deleted_whole_does_not_load_any_more(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    for name in ("step-1/.metadata", "step-1/a", "step-1/b"):
        storage.write(name, b"x")
    if subprocess.run(["chattr", "+i", tmp_path / "step-1" / "a"], capture_output=True).returncode:
        pytest.skip("needs a file system with immutable files, and root")
    try:
        with pytest.raises(PermissionError):
            storage.remove_folder("step-1", ".metadata")
    finally:
        subprocess.run(["chattr", "-i", tmp_path / "step-1" / "a"], check=True)
    assert ".metadata" not in storage.names("step-1")
    assert "a" in storage.names("step-1")


# --- an object store whose line breaks -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest that S3 takes, so that a few megabytes are several requests."""
    monkeypatch.setattr(storage_module, "PART_BYTES", 5 << 20)


def is_part_of_upload(method: str, path: str) -> bool:
    return method == "PUT" and "partNumber=" in path


@pytest.mark.parametrize(
    "size", [5 << 20, *(pytest.param(size, marks=pytest.mark.thorough) for size in ((5 << 20) - 1, 10 << 20))]
)
def test_parts_end_where_they_end(s3_root: str, unfinished_uploads: Callable[[], int], size: int) -> None:
    storage, data = open_storage(s3_root), image(size)
    assert storage.upload("a", [data], size) == xxhash.xxh3_128_hexdigest(data) == storage.digest("a")
    assert unfinished_uploads() == 0


def test_a_large_file_goes_up_in_parts(line: Line, s3_root: str, unfinished_uploads: Callable[[], int]) -> None:
    data = image((11 << 20) + 5)
    digest = open_storage(s3_root).upload("step-1/shard", chunks(data), len(data))
    assert digest == xxhash.xxh3_128_hexdigest(data)
    assert open_storage(s3_root).digest("step-1/shard") == digest
    assert sum(is_part_of_upload(*request.split(" ", 1)) for request in line.seen) == 3
    assert unfinished_uploads() == 0


def test_an_upload_in_parts_that_fails_is_aborted(s3_root: str, unfinished_uploads: Callable[[], int]) -> None:
    def broken() -> Iterator[memoryview]:
        yield from chunks(image(6 << 20))
        assert unfinished_uploads() == 1
        raise RuntimeError("the trainer is gone")

    storage = open_storage(s3_root)
    with pytest.raises(RuntimeError, match="the trainer is gone"):
        storage.upload("step-1/shard", broken(), 12 << 20)
    assert storage.names("step-1") == []
    assert unfinished_uploads() == 0


def test_a_server_that_fails_twice_is_asked_again(line: Line, s3_root: str) -> None:
    left = {"PUT": 2, "GET": 2, "POST": 2, "HEAD": 2, "DELETE": 2}

    def fault(method: str, path: str) -> str | None:
        left[method] = left.get(method, 0) - 1
        return "500" if left[method] >= 0 else None

    line.fault = fault
    storage, data = open_storage(s3_root), image(6 << 20)
    storage.upload("step-1/shard", chunks(data), len(data))
    assert storage.read("step-1/shard") == data
    assert storage.size("step-1/shard") == len(data)
    storage.remove("step-1/shard")
    assert storage.names("step-1") == []
    assert all(count < 0 for count in left.values())


def test_a_server_that_only_fails_is_an_error_that_says_so(
    line: Line, s3_root: str, unfinished_uploads: Callable[[], int], fails_fast: None
) -> None:
    line.fault = lambda method, path: "500" if is_part_of_upload(method, path) or path.endswith("/latest") else None
    storage, data = open_storage(s3_root), image(6 << 20)
    for write in (lambda: storage.upload("a/shard", [data], len(data)), lambda: storage.write("latest", b"x")):
        with pytest.raises(OSError, match="internal error") as caught:
            write()
        assert str(caught.value.filename).startswith(s3_root)
    assert storage.names() == []
    assert unfinished_uploads() == 0


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["silence", "stall"])
def test_a_line_that_goes_dead_in_an_upload_ends_it(
    line: Line, s3_root: str, unfinished_uploads: Callable[[], int], how: str
) -> None:
    line.fault = lambda method, path: how if is_part_of_upload(method, path) and "partNumber=2" in path else None
    storage, data = ObjectStore(s3_root, patience_s=10), image(11 << 20)
    with pytest.raises(TimeoutError, match="no answer within") as caught:
        storage.upload("step-1/shard", chunks(data), len(data))
    assert caught.value.errno == errno.ETIMEDOUT
    assert open_storage(s3_root).names() == []
    assert unfinished_uploads() == 0


def test_a_half_open_connection_ends_every_call(line: Line, s3_root: str) -> None:
    line.fault = lambda method, path: "silence"
    storage = ObjectStore(s3_root, patience_s=0.5)
    for call in (
        lambda: storage.names(),
        lambda: storage.read("a"),
        lambda: storage.size("a"),
        lambda: storage.write("a", b"x"),
        lambda: storage.remove("a"),
        lambda: storage.remove_folder("a"),
        lambda: storage.upload("a", [image(100)], 100),
    ):
        with pytest.raises(TimeoutError, match="no answer within"):
            call()


def test_a_process_whose_store_is_silent_can_still_end(line: Line, s3_root: str) -> None:
    line.fault = lambda method, path: "silence"
    script = "import sys; from headway.storage import ObjectStore; ObjectStore(sys.argv[1], 0.5).names()"
    done = subprocess.run([sys.executable, "-c", script, s3_root], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "TimeoutError: [Errno 110] no answer within" in done.stderr


def test_a_slow_server_is_waited_for(line: Line, s3_root: str) -> None:
    line.fault = lambda method, path: "slow"
    storage, data = open_storage(s3_root), image(6 << 20)
    storage.upload("step-1/shard", chunks(data), len(data))
    assert storage.read("step-1/shard") == data


def test_nobody_at_the_other_end_is_an_error(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(OSError, match=r"127\.0\.0\.1:9|no answer"):
        ObjectStore(s3_root, patience_s=5).write("a", b"x")


def test_a_bucket_that_is_not_there_is_an_error_to_write_to(s3_root: str) -> None:
    with pytest.raises(FileNotFoundError, match="bucket does not exist"):
        open_storage("s3://no-such-bucket/job").write("a", b"x")


def test_fsspecs_own_configuration_wins(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 7}})
    storage = open_storage(s3_root)
    assert isinstance(storage, ObjectStore)
    assert storage._fs.config_kwargs["read_timeout"] == 7
    assert storage._fs.config_kwargs["connect_timeout"] == 10
