"""What workers print on stderr goes to the console as ever, and its end is kept."""

import os
import pty
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervising import WARM_HEADWAY

import warm
from headway.launch.streams import KEPT_BYTES, Kept, Tap

BIN = Path(sys.executable).parent
PATIENCE_S = 120


@pytest.fixture
def console() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe that stands for the console: what is read, what is written."""
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        os.close(fd)


def print_from(tap: Tap, program: str) -> str:
    """Runs a program with its stderr at the tap. Returns what was kept."""
    fd, kept = tap.open()
    process = subprocess.Popen([sys.executable, "-c", program], stderr=fd)
    os.close(fd)
    assert process.wait(PATIENCE_S) == 0
    tap.settle(PATIENCE_S)  # `told` waits for a moment only
    return str(kept.told()["stderr"])


def read_until(terminal: int, end: bytes) -> bytes:
    """What is on a terminal up to these words: the kernel passes it on in pieces."""
    said = b""
    while not said.endswith(end):
        said += os.read(terminal, 1)
    return said


@pytest.mark.parametrize("kind", ["tap", "file"])
def test_the_step_at_which_each_line_came_is_kept(kind: str, tmp_path: Path) -> None:
    tap = Tap(os.open(os.devnull, os.O_WRONLY))
    fd, kept = tap.open()
    if kind == "file":
        os.close(fd)
        fd, kept = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), Kept.of_file(str(tmp_path / "log"))
    for text, steps in (
        (b"one\n", 10),
        (b"", 15),
        (b"two\nthree\n", 20),
        (b"x" * KEPT_BYTES + b"\n", 30),
        (b"end\n", 40),
    ):
        os.write(fd, text)
        tap.settle(PATIENCE_S)
        kept.note(steps)
    assert kept.told()["stderr_steps"] == [[1, 30], [0, 40]], "what is no longer kept has no step, either"
    os.close(fd)


def test_stderr_is_passed_on_and_kept(console: tuple[int, int]) -> None:
    tap = Tap(console[1])
    for text in ("one", "two"):
        said = "headway: b\u00e4d\n" + text
        assert print_from(tap, f"import os; os.write(2, {said.encode()!r})") == said
        assert os.read(console[0], 99) == said.encode()
    tap.close()


def test_lines_of_workers_that_print_at_once_are_kept_apart(console: tuple[int, int]) -> None:
    tap = Tap(console[1])
    opened = [tap.open() for _ in range(3)]
    for round_ in range(5):
        for number, (fd, _) in enumerate(opened):
            os.write(fd, f"{number}:{round_}\n".encode())
    tap.settle(PATIENCE_S)
    for number, (fd, kept) in enumerate(opened):
        os.close(fd)
        assert kept.told()["stderr"] == "".join(f"{number}:{round_}\n" for round_ in range(5))
    tap.close()


def test_a_terminal_stays_one_with_its_size_and_nothing_else_is_changed_on_the_way() -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (33, 77))
    tap = Tap(theirs)
    program = "import os, sys; print(os.isatty(2), *os.get_terminal_size(2), '\\x1b[1mbold\\r50%', file=sys.stderr)"
    kept = print_from(tap, program)
    tap.close()
    assert kept == "True 77 33 \x1b[1mbold\r50%\n"
    assert read_until(ours, b"\n") == kept.replace("\n", "\r\n").encode()  # as the one real terminal does it
    os.close(ours)
    os.close(theirs)


def test_where_there_is_no_terminal_there_is_none(console: tuple[int, int]) -> None:
    tap = Tap(console[1])
    assert print_from(tap, "import os, sys; print(os.isatty(2), file=sys.stderr)") == "False\n"
    tap.close()


@pytest.mark.thorough
def test_two_hundred_megabytes_pass_and_only_their_end_is_kept(console: tuple[int, int]) -> None:
    passed = 0

    def drain() -> None:
        nonlocal passed
        while passed < 200_000_000 and (data := os.read(console[0], 1 << 20)):
            passed += len(data)

    reader = threading.Thread(target=drain)
    reader.start()
    tap = Tap(console[1])
    before = resident_bytes()
    kept = print_from(tap, FLOOD)
    grown = resident_bytes() - before
    reader.join(PATIENCE_S)
    tap.close()
    assert passed == 200_000_000
    assert len(kept) == KEPT_BYTES
    assert kept.endswith("      199\n")
    assert grown < 50_000_000


FLOOD = """
import os
for number in range(200):
    left = b"%9d\\n" % number * 100_000
    while left:
        left = left[os.write(2, left):]
"""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_workers_go_on_when_nobody_reads_the_console() -> None:
    read, write = os.pipe()
    os.close(read)
    tap = Tap(write)
    kept = print_from(tap, "import sys\nfor n in range(50_000): print(n, file=sys.stderr)")
    tap.close()
    os.close(write)
    assert kept.endswith("49999\n")


def test_a_descriptor_that_a_daemon_holds_on_to_does_not_keep_the_tap_open(console: tuple[int, int]) -> None:
    tap = Tap(console[1])
    fd, kept = tap.open()
    os.write(fd, b"said")
    tap.settle(PATIENCE_S)
    assert kept.told()["stderr"] == "said"
    tap.close()
    tap._thread.join(PATIENCE_S)
    assert not tap._thread.is_alive()
    os.close(fd)


def test_every_descriptor_is_given_back(console: tuple[int, int]) -> None:
    tap = Tap(console[1])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        fd, kept = tap.open()
        os.close(fd)
        kept.told()["stderr"]
    tap.settle(PATIENCE_S)
    assert len(os.listdir("/proc/self/fd")) == before
    tap.close()


SCRIPT = """
import os, sys
with open("ran", "a") as file:
    print(*(os.isatty(fd) for fd in (0, 1, 2)), file=file)
print("text")
print("text", file=sys.stderr)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), 9)
"""


def run(home: Path, streams: str) -> list[str]:
    """Which streams were terminals, in each attempt of a job whose first one fails."""
    (home / "train.py").write_text(SCRIPT)
    command = f"set -o pipefail; {BIN / 'headway'} run --job j train.py {streams}"
    ended = subprocess.run(["bash", "-c", command], cwd=home, timeout=PATIENCE_S, check=False, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0
    return (home / "ran").read_text().splitlines()


@pytest.mark.thorough
@pytest.mark.parametrize("streams", ["2>&1 >&- | true", "<&- >&- 2>&-"])
def test_a_supervisor_without_a_console_runs_the_job_to_its_end(home: Path, streams: str) -> None:
    assert run(home, streams) == ["False False False"] * 2


def test_a_supervisor_at_a_terminal_gives_its_workers_one(home: Path) -> None:
    (home / "train.py").write_text(SCRIPT)
    ours, theirs = pty.openpty()
    with (home / "out").open("w") as out:
        command = [*WARM_HEADWAY, "run", "--job", "j", "train.py"]
        ended = warm.run(command, first=["hooked"], cwd=home, stdin=theirs, stdout=out, stderr=theirs)
    assert ended.returncode == 0
    assert (home / "ran").read_text().splitlines() == ["True False True"] * 2
    assert (home / "out").read_text() == "text\ntext\n"
    read_until(ours, b"text\r\n")
    os.close(ours)
    os.close(theirs)
