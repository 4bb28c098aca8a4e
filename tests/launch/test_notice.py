"""Notices: what brings them, what a supervisor and its ranks see of each other, and what Slurm's records mean."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headway.errors import InputError, PlatformError
from headway.events.scheduler import slurm_fields
from headway.launch.notice import Board, Listener, Notice, Poller, source_of
from headway.launch.slurm import job_id, reason_of, requeue, requeuing_framework

# --- the board -----------------------------------------------------------------------------------------------------


def test_ranks_see_what_the_supervisor_posts_and_it_sees_who_listens_and_who_stopped(tmp_path: Path) -> None:
    theirs = Board.create(tmp_path / "board", 3)
    mine = Board.open(tmp_path / "board")
    assert mine.notice is None
    assert (theirs.listeners, theirs.stopped) == (set(), set())
    mine.listen(0)
    mine.listen(2, alone=True)
    assert theirs.deaf == {2}
    assert (theirs.listeners, theirs.stopped) == ({0, 2}, set())
    theirs.post("preempted", 99)
    assert mine.notice == Notice("preempted", 99)
    mine.has_stopped(2)
    assert (theirs.listeners, theirs.stopped) == ({0, 2}, {2})


def test_what_is_posted_stays(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 1)
    board.post("preempted", 5)
    board.post("time_limit", 6)
    assert board.notice == Notice("preempted", 5)


def test_a_rank_that_the_board_has_no_place_for_does_no_harm(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 2)
    for rank in (-1, 2, 99):
        board.listen(rank)
    assert board.listeners == set()


def test_only_this_user_can_read_a_board(tmp_path: Path) -> None:
    Board.create(tmp_path / "board", 1)
    assert (tmp_path / "board").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [None, b"", b"something else" * 100])
def test_what_is_no_board_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "board").write_bytes(content)
    with pytest.raises(PlatformError):
        Board.open(tmp_path / "board")


def test_what_a_board_tells_is_due_at_the_next_edge_of_a_rank_that_is_alone(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 1)
    listener = Listener(lambda: 10, board)
    assert not listener.is_due()
    board.post("preempted", 12)
    assert listener.is_due()
    assert listener.notice == Notice("preempted", 12)


def test_seconds_are_left_until_the_deadline() -> None:
    assert Notice("preempted").seconds_left is None
    left_s = Notice("preempted", deadline_ns=time.monotonic_ns() + 60 * 10**9).seconds_left
    assert left_s is not None
    assert 0 < left_s <= 60


# --- sources -------------------------------------------------------------------------------------------------------


def test_a_file_is_a_notice_once_it_is_there(tmp_path: Path) -> None:
    source = source_of(f"file:{tmp_path}/stop: now")
    assert source() is None
    (tmp_path / "stop: now").touch()
    assert source() == Notice("preempted")


def test_a_function_of_ones_own_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_notices.py").write_text(
        "from headway.launch.notice import Notice\ndef maintenance():\n    return Notice('maintenance')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert source_of("my_notices:maintenance")() == Notice("maintenance")


@pytest.mark.parametrize("text", ["file:", "azure", "my_notices", "os:nothing", "no_such_package:function", ":"])
def test_what_names_no_source_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="names no source"):
        source_of(text)


def test_a_poller_asks_until_there_is_a_notice_whatever_the_source_raises(capfd: pytest.CaptureFixture[str]) -> None:
    answers = iter([None, OSError("no route"), OSError("no route"), None, Notice("preempted")])
    heard: list[Notice] = []

    def source() -> Notice | None:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    poller = Poller(source, heard.append, every_s=0.001)
    poller.start()
    poller.join(120)
    assert heard == [Notice("preempted")]
    assert capfd.readouterr().err.count("no route") == 1


def test_a_poller_that_nobody_needs_any_more_ends() -> None:
    poller = Poller(lambda: None, lambda notice: None, every_s=3600)
    poller.start()
    poller.stop()
    poller.join(120)
    assert not poller.is_alive()


class Metadata(BaseHTTPRequestHandler):
    """The parts of two clouds' metadata servers that tell of a preemption. It insists on their headers."""

    interrupted_at = ""
    preempted = "FALSE"

    def do_PUT(self) -> None:
        wanted = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200 if wanted else 400, "a token")

    def do_GET(self) -> None:
        match self.path:
            case "/latest/meta-data/spot/instance-action" if self.headers["X-aws-ec2-metadata-token"] == "a token":
                body = f'{{"action": "terminate", "time": "{self.interrupted_at}"}}'
                self._answer(200 if self.interrupted_at else 404, body)
            case "/computeMetadata/v1/instance/preempted" if self.headers["Metadata-Flavor"] == "Google":
                self._answer(200, self.preempted)
            case _:
                self._answer(403, "")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def metadata(**told: str) -> Iterator[str]:
    """The address of a metadata server that tells this."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Told", (Metadata,), told))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_aws_spot_instance_tells_of_its_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the way to the world outside is no way to here
    with metadata() as url:
        assert source_of(f"aws:{url}")() is None
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
    with metadata(interrupted_at=at) as url:
        notice = source_of(f"aws:{url}")()
    assert notice is not None
    assert notice.reason == "preempted"
    assert notice.seconds_left is not None
    assert 0 < notice.seconds_left <= 120


def test_a_gcp_spot_machine_tells_of_its_preemption() -> None:
    with metadata() as url:
        assert source_of(f"gcp:{url}")() is None
    with metadata(preempted="TRUE") as url:
        notice = source_of(f"gcp:{url}")()
    assert notice is not None
    assert notice.reason == "preempted"


# --- Slurm ---------------------------------------------------------------------------------------------------------

PREEMPTED = "JobId=1 JobName=a JobState=RUNNING Reason=None Requeue=1 Restarts=0 EndTime=Unknown PreemptTime=1794806743"
PREEMPTED_AND_OVER = "JobId=1 JobName=a JobState=COMPLETING Reason=None Requeue=1 Restarts=1 EndTime=Unknown"
CANCELLED = "JobId=3 JobName=a JobState=COMPLETING Reason=None Restarts=0 EndTime=1794806767 PreemptTime=None"
OVER_TIME = "JobId=8 JobName=a JobState=COMPLETING Reason=TimeLimit Restarts=0 EndTime=1794807024 PreemptTime=None"
RUNNING = "JobId=6 JobName=a JobState=RUNNING Reason=None Restarts=0 EndTime=1794806888 PreemptTime=None"
UNLIMITED = "JobId=6 JobName=a JobState=RUNNING Reason=None Restarts=0 EndTime=Unknown PreemptTime=None"
CANCELLED_IN_GRACE = CANCELLED.replace("PreemptTime=None", "PreemptTime=1794806743")


@pytest.mark.parametrize(
    ("record", "told", "reason"),
    [
        (PREEMPTED, "sigterm", "preempted"),
        (PREEMPTED, "sigusr1", "preempted"),
        (PREEMPTED_AND_OVER, "sigterm", "preempted"),
        (CANCELLED, "sigterm", "cancelled"),
        (CANCELLED_IN_GRACE, "sigterm", "cancelled"),
        (CANCELLED, "sigusr1", "cancelled"),
        (OVER_TIME, "sigterm", "time_limit"),
        (RUNNING, "sigusr1", "time_limit"),
        (RUNNING, "sigterm", "sigterm"),
        (UNLIMITED, "sigusr1", "sigusr1"),
        ("", "sigterm", "sigterm"),
    ],
)
def test_slurms_record_of_a_job_tells_why_it_was_signalled(record: str, told: str, reason: str) -> None:
    assert reason_of(slurm_fields(record), 0, told) == reason


def test_a_restart_of_earlier_is_no_preemption_of_now() -> None:
    record = CANCELLED.replace("Restarts=0", "Restarts=2")
    assert reason_of(slurm_fields(record), 2, "sigterm") == "cancelled"
    assert reason_of(slurm_fields(record), 1, "sigterm") == "preempted"


def test_a_task_of_an_array_is_known_by_its_place_in_it() -> None:
    assert job_id({"SLURM_JOB_ID": "12"}) == "12"
    assert job_id({"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "2"}) == "10_2"


def test_where_slurm_does_not_answer_the_user_is_told_what_to_do(tmp_path: Path) -> None:
    outcome = requeue({"SLURM_JOB_ID": "12", "PATH": str(tmp_path)}, "preempted")
    assert not outcome.done
    assert "scontrol requeue 12" in outcome.text


class SignalHandler:
    """What submitit installs for its signal, whichever that is: known by the method's name."""

    def checkpoint_and_try_requeue(self, number: int, frame: object) -> None:
        raise AssertionError


def test_where_submitit_requeues_the_job_headway_does_not() -> None:
    assert requeuing_framework() == ""
    former = signal.signal(signal.SIGUSR2, SignalHandler().checkpoint_and_try_requeue)
    try:
        assert requeuing_framework() == "submitit"
        assert requeue({"SLURM_JOB_ID": "1", "PATH": ""}, "preempted").done
    finally:
        signal.signal(signal.SIGUSR2, former)


LIGHTNING = """
import os, sys
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from headway.launch.slurm import requeue, requeuing_framework
from headway.launch.notice import Listener

def show(auto):
    environment = SLURMEnvironment(auto_requeue=auto)
    trainer = Trainer(plugins=environment, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer._signal_connector.register_signal_handlers()
    found = [requeuing_framework()]
    listener = Listener(lambda: 0)
    listener.take_signals()
    found.append(requeuing_framework(listener.former.values()))
    found.append(requeue({"SLURM_JOB_ID": "1", "PATH": ""}, "preempted", listener.former.values()).done)
    print(found, flush=True)

if not os.fork():  # signal handlers stay: each case in a process of its own
    show(True)
    os._exit(0)
os.wait()
show(False)
"""


@pytest.mark.thorough
@pytest.mark.needs_package("lightning")
def test_where_lightning_requeues_the_job_headway_does_not() -> None:
    slurm = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    done = subprocess.run([sys.executable, "-c", LIGHTNING], env=slurm, capture_output=True, text=True, timeout=500)
    assert done.stdout.splitlines() == ["['Lightning', 'Lightning', True]", "['', '', False]"], done.stderr
