"""Who a process is: its job's name, its command without secrets, and whether it lives."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from journals import apart, numbers, read

from headway.events.clock import Clock, start_ticks
from headway.events.journal import Writer, is_being_written
from headway.events.process import command_line, describe, job_name, process_name
from headway.events.recorder import Recorder
from headway.events.vocabulary import NAME_LIMIT
from headway.testing import FakeClock

# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("train.py --lr 0.1", "train.py --lr 0.1"),
        ("train.py --token S3CR3T --lr 0.1", "train.py --token *** --lr 0.1"),
        ("train.py --token=S3CR3T --lr=0.1", "train.py --token=*** --lr=0.1"),
        ("train.py --hf_token S3CR3T", "train.py --hf_token ***"),
        ("train.py --HF-TOKEN=S3CR3T", "train.py --HF-TOKEN=***"),
        ("train.py -token S3CR3T", "train.py -token ***"),
        ("env API_KEY=S3CR3T train.py", "env API_KEY=*** train.py"),
        ("env WANDB_API_KEY=S3CR3T=S3CR3T train.py", "env WANDB_API_KEY=*** train.py"),
        ("env AWS_SECRET_ACCESS_KEY=S3CR3T train.py", "env AWS_SECRET_ACCESS_KEY=*** train.py"),
        ("train.py --wandb-api-key S3CR3T", "train.py --wandb-api-key ***"),
        ("train.py --apikey=S3CR3T", "train.py --apikey=***"),
        ("train.py --password S3CR3T", "train.py --password ***"),
        ("train.py --passwd=S3CR3T", "train.py --passwd=***"),
        ("train.py --client-secret S3CR3T", "train.py --client-secret ***"),
        ("train.py --credentials S3CR3T", "train.py --credentials ***"),
        ("train.py --auth S3CR3T", "train.py --auth ***"),
        ("train.py +logger.api_key=S3CR3T model=large", "train.py +logger.api_key=*** model=large"),
        ("train.py --data https://user:S3CR3T@host/x", "train.py --data https://***@host/x"),
        ("train.py --data=https://user:S3CR3T@host/x", "train.py --data=https://***@host/x"),
        ("train.py s3://S3CR3T@bucket postgresql://u:S3CR3T@h/db", "train.py s3://***@bucket postgresql://***@h/db"),
        ("train.py https://host/path@v2", "train.py https://host/path@v2"),
        ("train.py --token https://u:S3CR3T@host", "train.py --token ***"),
        ("train.py --token --lr 0.1", "train.py --token --lr 0.1"),
        ("train.py --token", "train.py --token"),
        ("train.py --token -S3CR3T", "train.py --token ***"),
        ("train.py --passphrase S3CR3T --pwd=S3CR3T", "train.py --passphrase *** --pwd=***"),
        ("train.py --private-key S3CR3T --wandbToken=S3CR3T", "train.py --private-key *** --wandbToken=***"),
        ("train.py https://host/x?a=1&token=S3CR3T&b=2", "train.py https://host/x?a=1&token=***&b=2"),
        (
            "train.py --tokenizer gpt2 --max-tokens 512 --author me",
            "train.py --tokenizer gpt2 --max-tokens 512 --author me",
        ),
        ("train.py -p X", "train.py -p X"),
        ("", ""),
    ],
)
def test_secrets_in_a_command_line_are_blanked(words: str, shown: str) -> None:
    assert command_line(words.split(" ")) == shown


def test_secrets_inside_one_word_are_blanked() -> None:
    shown = command_line(["curl", "-H", "Authorization: Bearer S3CR3T", '{"api_key": "S3CR3T", "b": 2}'])
    assert shown == 'curl -H Authorization: Bearer *** {"api_key": "***", "b": 2}'


def test_a_command_is_kept_short_and_printable() -> None:
    shown = command_line(["train.py", "\x1b[31m", "a\0b\nc", "--token", "S3CR3T\n" * 100, "x" * 1000])
    assert shown.isprintable()
    assert len(shown) <= NAME_LIMIT
    assert "S3CR3T" not in shown


# --- the job ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", "--lr", "0.1"])


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "GROUP_WORLD_SIZE": "1"}
UUID = "0123abcd-89ab-4def-8123-456789abcdef"


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("environ", "given", "name"),
    [
        ({}, "mine", "mine"),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "r"}, "mine", "mine"),
        ({"SLURM_JOB_ID": "7"}, "", "slurm-7"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "", "slurm-7"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "", "slurm-7_2"),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "none"}, "", "slurm-7"),
        ({"TORCHELASTIC_RUN_ID": "night"}, "", "train-night"),
        ({"TORCHELASTIC_RUN_ID": "night", "GROUP_WORLD_SIZE": "4"}, "", "train-night"),
        ({"TORCHELASTIC_RUN_ID": UUID}, "", "train-0123abcd"),
        (TORCHRUN, "", f"train-{os.getppid()}-{start_ticks(os.getppid())}"),
    ],
)
def test_a_job_is_named_as_given_else_by_scheduler_or_launcher(environ: dict[str, str], given: str, name: str) -> None:
    assert job_name(environ, given) == name


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("environ", [{}, TORCHRUN | {"GROUP_WORLD_SIZE": "2"}], ids=["nothing", "several nodes"])
def test_a_job_that_nobody_names_gets_a_new_name_each_time(environ: dict[str, str]) -> None:
    names = {job_name(environ) for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith("train-") for name in names)


@pytest.mark.parametrize(
    ("argv", "prefix"), [(["-c"], "python-"), ([""], "python-"), ([], "python-"), (["/a/b.py"], "b-")]
)
def test_a_new_job_is_named_after_its_script(monkeypatch: pytest.MonkeyPatch, argv: list[str], prefix: str) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert job_name({}).startswith(prefix)


# --- the process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "rank", "local_rank", "world_size"),
    [
        ({}, 0, 0, 1),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "SLURM_PROCID": "2"}, 5, 1, 8),
        ({"SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_STEP_NUM_TASKS": "4"}, 2, 2, 4),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, 3, 1, 4),
        ({"RANK": "", "LOCAL_RANK": "one", "WORLD_SIZE": "-3"}, 0, 0, 1),
    ],
)
def test_ranks_are_taken_from_whoever_launched(
    environ: dict[str, str], rank: int, local_rank: int, world_size: int
) -> None:
    process = describe(environ, "j", FakeClock())
    assert (process.rank, process.local_rank, process.world_size) == (rank, local_rank, world_size)


def test_a_process_knows_when_it_started_and_shares_its_name_with_no_other() -> None:
    clock = Clock()
    process = describe({}, "j", clock)
    assert 0 < process.started_ns <= process.t_ns <= clock.now_ns()
    assert process_name(process) == f"{process.node}-{process.boot[:8]}-{os.getpid()}-{start_ticks(os.getpid())}"
    assert clock.process_started_ns(2**22 + 1) is None


# --- the file and the sign of life -----------------------------------------------------------------------------------


def make_without_umask(path: Path) -> None:
    os.umask(0)
    Writer(path).close()


def test_a_journal_is_readable_by_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    assert apart(make_without_umask, tmp_path / "a.hwj") == 0
    assert (tmp_path / "a.hwj").stat().st_mode & 0o7777 == 0o600


def test_a_journal_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "a.hwj").write_text("precious")
    (tmp_path / "b.hwj").symlink_to(tmp_path / "elsewhere")
    for name in ("a.hwj", "b.hwj"):
        with pytest.raises(FileExistsError):
            Writer(tmp_path / name)
    assert (tmp_path / "a.hwj").read_text() == "precious"
    assert not (tmp_path / "elsewhere").exists()


def live(path: Path, ready: "multiprocessing.connection.Connection", with_children: bool) -> None:
    recorder = Recorder(Writer(path))
    children = []
    for n in range(2000):
        recorder.mark("m", n=n)
        if with_children and n in (0, 1999):
            child = os.fork()
            if not child:
                time.sleep(600)
                os._exit(0)
            children.append(child)
    ready.send(children)
    time.sleep(600)


@pytest.mark.parametrize("with_children", [False, True], ids=["alone", "with children that live on"])
def test_a_journal_is_being_written_exactly_while_its_process_lives(tmp_path: Path, with_children: bool) -> None:
    path, spawn = tmp_path / "a.hwj", multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=live, args=(path, theirs, with_children), daemon=True)
    process.start()
    children: list[int] = ours.recv()
    try:
        for _ in range(3):
            assert is_being_written(path)
            assert numbers(read(path).records) == list(range(2000))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        for child in children:
            os.kill(child, 0)
        assert not is_being_written(path)
        assert numbers(read(path).records) == list(range(2000))
    finally:
        process.kill()
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_journal_that_is_closed_or_missing_is_not_being_written(tmp_path: Path) -> None:
    assert not is_being_written(tmp_path / "missing.hwj")
    assert apart(make_without_umask, tmp_path / "a.hwj") == 0
    assert not is_being_written(tmp_path / "a.hwj")
