"""Turns the marks `needs` and `needs_package` into skips that say how to get it; in CI such a skip is a failure."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

GET = {
    "chromium": "apt-get install chromium",
    "ip": "apt-get install iproute2, and run as root",
    "bindfs": "apt-get install bindfs, and run as root",
    "mount": "run as root, where mounting a tmpfs is allowed",
    "g++": "apt-get install g++",
    "openssl": "apt-get install openssl",
    "py-spy": "pip install py-spy",
    "mkfs.btrfs": "apt-get install btrfs-progs, and run as root",
    "strace": "apt-get install strace, and run where tracing is allowed",
    **dict.fromkeys(
        ("scontrol", "slurmctld", "slurmd", "munged"), "apt-get install slurm-client slurmctld slurmd munge"
    ),
}
FRAMEWORKS = "pip install -c constraints.txt -e '.[frameworks]'"
GET_PACKAGE = {"torchrec": "pip install -c constraints.txt -e '.[rec]', then pip install --no-deps torchrec==1.8.0"}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for program in mark.args:
            if shutil.which(program) is None and shutil.which(program, path=os.path.dirname(sys.executable)) is None:
                pytest.skip(f"needs {program}: {GET.get(program, 'install it')}")
    for mark in item.iter_markers("needs_package"):
        for package in mark.args:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"needs {package}: {GET_PACKAGE.get(package, FRAMEWORKS)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    report = yield
    if report.skipped and os.environ.get("SKIP_IS_FAILURE") == "1" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which counts as a failure here: {report.longrepr}"
    return report


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty headway home, and no setting from outside."""
    for name in [name for name in os.environ if name.startswith(("HEADWAY_", "SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    return tmp_path
