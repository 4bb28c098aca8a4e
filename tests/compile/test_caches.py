"""What torch's caches hold, and how it gets back there: the one place where they are touched."""

import ctypes
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headway.compile import caches
from headway.errors import PlatformError

torch = pytest.importorskip("torch")


@pytest.fixture
def codecache(monkeypatch: pytest.MonkeyPatch) -> Any:
    import torch._inductor.codecache as module

    monkeypatch.setattr(module, "_precompile_header", lambda header, line, **command: f"{header}.gch")
    return module


def put(files: dict[str, bytes], root: Path, rank: int | None = None) -> int:
    with caches.Staged(root) as staged:
        staged.add(files, "job", rank)
        return staged.commit()


def test_the_folder_is_the_one_that_torch_uses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert str(caches.folder()) == default_cache_dir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert caches.folder() == tmp_path


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil"])
def test_no_file_goes_outside_the_folder(tmp_path: Path, name: str) -> None:
    root = tmp_path / "cache"
    with pytest.raises(PlatformError, match="outside"):
        put({name: b"x"}, root)
    assert not (tmp_path / "evil").exists()


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab/one.so").write_bytes(b"mine")
    assert put({"ab/one.so": b"theirs", "ab/two.so": b"new"}, tmp_path) == 1
    assert (tmp_path / "ab/one.so").read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path / "ab")) == ["one.so", "two.so"]


def test_every_rank_finds_the_shapes_that_the_first_has_seen(tmp_path: Path) -> None:
    put({caches.shapes_file("job"): b"shapes"}, tmp_path, rank=3)
    found = sorted(path.name for path in (tmp_path / "dynamo").iterdir())
    assert found == ["code_state_job_3_.pkl", "code_state_job_None_.pkl"]


def test_torch_looks_for_shapes_under_that_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._dynamo import pgo

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch.compiler.config.patch(job_id="job"):
        key = pgo.get_cache_key()
        assert key is not None
        assert pgo.code_state_path(key) == str(tmp_path / caches.shapes_file("job"))


def test_where_torch_no_longer_tells_of_its_graphs_all_new_ones_are_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch.compiler._cache import CacheArtifactManager

    monkeypatch.delattr(CacheArtifactManager, "_seen_artifacts")
    for name in ("old", "new"):
        path = tmp_path / "fxgraph" / "ab" / name / "graph"
        path.parent.mkdir(parents=True)
        path.write_bytes(name.encode())
    os.utime(tmp_path / "fxgraph/ab/old/graph", (1, 1))
    assert caches.made(tmp_path, time.time() - 60, "job") == {"fxgraph/ab/new/graph": b"new"}


def test_only_libraries_that_this_process_has_loaded_are_taken(tmp_path: Path) -> None:
    found = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".so")]
    small = min(set(found), key=lambda path: os.stat(path).st_size)
    (tmp_path / "real" / "ab").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("used.so", "idle.so"):
        shutil.copy(small, tmp_path / "real" / "ab" / name)
    ctypes.CDLL(str(tmp_path / "link" / "ab" / "used.so"))
    assert set(caches.made(tmp_path / "link", 0.0, "job")) == {"ab/used.so"}


def test_what_another_user_has_put_there_is_not_passed_on(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root, to give a file away")
    path = tmp_path / "fxgraph" / "ab" / "graph"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    assert caches._is_own(path)
    os.chown(path, 65534, 65534)
    assert not caches._is_own(path)


def test_nothing_is_seen_before_all_is_there(tmp_path: Path) -> None:
    with caches.Staged(tmp_path / "cache") as staged:
        staged.add({"ab/one.so": b"1", "ab/two.so": b"2"}, "job", None)
        assert not list((tmp_path / "cache").rglob("*.so"))
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file() or path.name.startswith(".")] == []


def test_a_library_that_cannot_be_loaded_here_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "bad.so").write_bytes(b"no library")
    [problem] = caches.unfit(["bad.so", "gone.so"], tmp_path)
    assert "bad.so cannot be loaded here" in problem
    assert not (tmp_path / "bad.so").exists()


def test_a_folder_that_the_script_has_moved_gets_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "old" / "ab").mkdir(parents=True)
    (tmp_path / "old" / "ab" / "one.so").write_bytes(b"1")
    caches.move(["ab/one.so", "ab/gone.so"], tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new" / "ab" / "one.so").read_bytes() == b"1"


def test_a_thread_that_compiles_for_ever_does_not_hold_up_a_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._dynamo import convert_frame

    monkeypatch.setattr(caches, "_LOCK_S", 0.1)
    taken, over = threading.Event(), threading.Event()

    def compile_for_ever() -> None:
        with convert_frame.compile_lock:
            taken.set()
            over.wait()

    thread = threading.Thread(target=compile_for_ever)
    thread.start()
    try:
        taken.wait()
        with pytest.raises(TimeoutError, match="another thread"):
            caches.made(tmp_path, 0.0, "job")
    finally:
        over.set()
        thread.join()


def test_headers_are_precompiled_only_if_there_is_something_to_build(codecache: Any, tmp_path: Path) -> None:
    undo = caches.skip_headers()
    main_path = str(tmp_path / "kernel.main.cpp")  # torch's own name for it, in the function that asks
    assert codecache._precompile_header("prefix.h", "g++") == "prefix.h.gch"
    (tmp_path / "kernel.main.so").touch()
    assert codecache._precompile_header("prefix.h", "g++") == ""
    undo()
    assert codecache._precompile_header("prefix.h", "g++") == "prefix.h.gch"
    assert main_path


def test_a_torch_that_precompiles_no_headers_is_left_alone(codecache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(codecache, "_precompile_header")
    caches.skip_headers()()
    assert not hasattr(codecache, "_precompile_header")


def test_vector_units_that_are_known_to_work_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cpu_vec_isa import VecAVX2, VecISA

    tried: list[str] = []
    monkeypatch.setattr(VecISA, "check_build", lambda self, code: bool(tried.append(str(self))))
    undo = caches.believe_vector_units(["avx2"])
    assert VecAVX2().check_build("code")
    assert tried == []
    undo()
    assert not VecAVX2().check_build("code")
    assert tried == ["avx2"]


def test_the_scripts_own_name_for_its_shapes_stays() -> None:
    with torch.compiler.config.patch(job_id=None):
        caches.remember_shapes("ours")
        assert torch.compiler.config.job_id == "ours"
        caches.remember_shapes("another")
        assert torch.compiler.config.job_id == "ours"


def test_dynamic_sources_are_added_to_those_that_were_given() -> None:
    with torch.compiler.config.patch(dynamic_sources="L['a']"):
        caches.make_dynamic(["L['b']", "L['a']"])
        assert torch.compiler.config.dynamic_sources == "L['a'],L['b']"
