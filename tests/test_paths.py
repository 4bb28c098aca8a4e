"""Where files lie: any name is safe, network file systems are known, and journals never lie on them."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.cli.source import open_job
from headway.paths import JobPaths, folder_name, is_network, jobs_in, private_folder

MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / /home rw - nfs4 server:/home rw
31 30 8:2 / /home/me/scratch rw - xfs /dev/sdb1 rw
32 22 0:41 / /mnt/with\\040space rw - lustre mgs:/fs rw
33 22 0:42 / /mnt/s3 rw - fuse.s3fs s3fs rw
34 22 0:43 / /dev/shm rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/tmp/x", False),
        ("/home/me/.headway", True),
        ("/home/me/scratch/x", False),
        ("/homework", False),
        ("/mnt/with space/x", True),
        ("/mnt/s3", True),
        ("/dev/shm/x", False),
    ],
)
def test_the_innermost_mount_tells_whether_a_folder_is_on_the_network(folder: str, expected: bool) -> None:
    assert is_network(Path(folder), MOUNTS) is expected


@pytest.mark.needs("bindfs", "umount")
def test_a_home_on_a_file_system_that_cannot_be_mapped_safely_goes_through_the_spool(home: Path) -> None:
    real, seen = home / "real", home / "seen"
    real.mkdir()
    seen.mkdir()
    if subprocess.run(["bindfs", str(real), str(seen)]).returncode:
        pytest.skip("needs bindfs to mount: run as root, where FUSE is allowed")
    try:
        code = "import headway; run = headway.current()\nfor _ in run.steps(range(20)): pass\nrun.finish()"
        environ = {"HEADWAY_HOME": str(seen), "HEADWAY_JOB": "far", "TMPDIR": str(home), "PATH": "/usr/bin:/bin"}
        subprocess.run([sys.executable, "-c", code], check=True, env=environ, timeout=120)
        wait_for_steps(real, 20)
        assert not list(real.rglob("*.hwj")), "no journal was mapped there"
    finally:
        unmount(seen)


def wait_for_steps(home: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_HOME", str(home))
        while "far" not in jobs_in(home) or open_job("far").ledger().steps[_new()] != steps:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _new() -> object:
    from headway.accounting.rules import Bucket

    return Bucket.TRAINING_EFFECTIVE


def unmount(folder: Path) -> None:
    """Once its collector has let go of it."""
    deadline = time.monotonic() + 120
    while subprocess.run(["umount", str(folder)], capture_output=True).returncode:
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize(
    "name", ["../../etc", "/etc/passwd", ".", "..", "a/b", "a\0b", "x" * 500, "\ud800", "naïve job", ".hid"]
)
def test_any_job_name_is_a_folder_of_its_own_below_the_home(tmp_path: Path, name: str) -> None:
    paths = JobPaths(tmp_path, name).make()
    assert paths.folder.resolve().parent == (tmp_path / "jobs").resolve()
    assert paths.folder.stat().st_mode & 0o077 == 0
    assert len(jobs_in(tmp_path)) == 1


def test_long_names_that_begin_alike_stay_apart() -> None:
    assert folder_name("x" * 300 + "a") != folder_name("x" * 300 + "b")


def test_a_folder_that_is_a_link_is_not_private(tmp_path: Path) -> None:
    from headway.errors import PlatformError

    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PlatformError, match="could be forged"):
        private_folder(tmp_path / "link")
