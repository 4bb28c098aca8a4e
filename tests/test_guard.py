"""Ctrl-C, SIGTERM and a plain end leave nothing running that pytest has started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

SLEEPERS = """
import os, signal, subprocess, sys, time
from pathlib import Path

HERE = Path(__file__).parent
DAEMON = '''
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
if child := os.fork():
    while not os.path.exists(f"{HERE}/daemon-{child}"):  # else pytest could end before the daemon is there
        time.sleep(0.01)
    os._exit(0)
os.setsid()
open(f"{HERE}/daemon-{os.getpid()}", "w").close()
time.sleep(600)
'''

def test_sleeps(tmp_path):
    try:
        subprocess.run([sys.executable, "-c", f"HERE = {str(HERE)!r}\\n" + DAEMON], check=True)
        if os.environ["SLEEPS"]:
            time.sleep(600)
    finally:
        (HERE / "torn-down").touch()

def test_signals_are_not_ignored():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
"""


def start(folder: Path, workers: str, sleeps: str = "", *before: str) -> subprocess.Popen[bytes]:
    (folder / "test_sleepers.py").write_text(SLEEPERS)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-n", workers, "."]
    environ = {**os.environ, "PYTHONPATH": str(TESTS), "SLEEPS": sleeps, "TESTS_GRACE_S": "60"}
    for name in [name for name in environ if name.startswith("PYTEST_")]:
        del environ[name]
    return subprocess.Popen([*before, *command], cwd=folder, env=environ, stdout=subprocess.DEVNULL)


def daemon_of(folder: Path) -> int:
    return int(eventually(lambda: list(folder.glob("daemon-*")))[0].name.removeprefix("daemon-"))


def eventually(what: Callable[[], list[Path]]) -> list[Path]:
    deadline = time.monotonic() + 120
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGINT, "0"),
        (signal.SIGTERM, "2"),
        pytest.param(signal.SIGHUP, "2", marks=pytest.mark.thorough),
    ],
)
def test_a_signal_ends_pytest_and_all_it_started(tmp_path: Path, number: signal.Signals, workers: str) -> None:
    with start(tmp_path, workers, sleeps="1") as pytest_run:
        daemon = daemon_of(tmp_path)
        pytest_run.send_signal(number)
        assert pytest_run.wait(200) == 128 + number
    assert not Path(f"/proc/{daemon}").exists()
    assert (tmp_path / "torn-down").exists()


def test_a_run_in_the_background_tests_signals_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with start(tmp_path, "2", "", "nohup", "sh", "-c", 'trap "" INT; exec "$@"', "sh") as pytest_run:
        assert pytest_run.wait(200) == 0
    assert not Path(f"/proc/{daemon_of(tmp_path)}").exists()
