"""File systems of many kinds, and roots for checkpoints in a folder, in S3 and in memory."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_systems import bound, mounted, read_only, small_disk  # noqa: F401
from keeping import end_keepers

from headway.storage import Storage, open_storage
from object_store import fails_fast, line, s3_root, s3_server, unfinished_uploads  # noqa: F401

# --- file systems ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["disk", pytest.param("tmpfs", marks=pytest.mark.thorough), "fuse"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on each kind of file system that treats direct writes differently."""
    if request.param == "disk":
        (tmp_path / "disk").mkdir()
        yield tmp_path / "disk"
    elif request.param == "tmpfs":
        with mounted(tmp_path / "tmpfs", "size=64m,mode=700") as folder:
            yield folder
    else:
        (tmp_path / "below").mkdir()
        with bound(tmp_path / "below", tmp_path / "above") as folder:
            yield folder


# --- roots -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path, home: Path) -> Iterator[Path]:
    """A folder for checkpoints. Their keepers end with the test."""
    yield tmp_path / "checkpoints"
    end_keepers(tmp_path)


@pytest.fixture(params=["folder", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("s3", "memory"))])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty root in a folder, in S3, and in a store that cannot put a whole object at once."""
    if request.param == "folder":
        return open_storage(tmp_path / "root")
    if request.param == "s3":
        return open_storage(request.getfixturevalue("s3_root"))
    return open_storage(f"memory://{secrets.token_hex(6)}/job")
