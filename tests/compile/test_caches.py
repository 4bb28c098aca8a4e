"""What torch's caches hold, and how it gets back there: the one place where they are touched."""

import os
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
        caches.put({name: b"x"}, root, "job", None)
    assert not (tmp_path / "evil").exists()


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab/one.so").write_bytes(b"mine")
    assert caches.put({"ab/one.so": b"theirs", "ab/two.so": b"new"}, tmp_path, "job", None) == 1
    assert (tmp_path / "ab/one.so").read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path / "ab")) == ["one.so", "two.so"]


def test_every_rank_finds_the_shapes_that_the_first_has_seen(tmp_path: Path) -> None:
    caches.put({caches.shapes_file("job"): b"shapes"}, tmp_path, "job", 3)
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
    def gone() -> Any:
        raise AttributeError("_seen_artifacts")

    monkeypatch.setattr(caches, "_recorded", gone)
    for name in ("old", "new"):
        path = tmp_path / "fxgraph" / "ab" / name / "graph"
        path.parent.mkdir(parents=True)
        path.write_bytes(name.encode())
    os.utime(tmp_path / "fxgraph/ab/old/graph", (1, 1))
    assert caches.made(tmp_path, time.time() - 60, "job") == {"fxgraph/ab/new/graph": b"new"}


def test_libraries_built_since_the_start_are_taken_and_older_ones_are_not(tmp_path: Path) -> None:
    for name in ("old.so", "new.so", "new.cpp"):
        (tmp_path / "ab").mkdir(exist_ok=True)
        (tmp_path / "ab" / name).write_bytes(b"x")
    os.utime(tmp_path / "ab/old.so", (1, 1))
    assert set(caches.made(tmp_path, time.time() - 60, "job")) == {"ab/new.so"}


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
