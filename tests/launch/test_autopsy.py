"""What the machine knows about a worker's end."""

import os
from pathlib import Path

from headway.launch.autopsy import KernelLog, oom_kills, scheduler_says


def test_kills_for_memory_are_counted_by_either_version_of_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "job" / "step" / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert oom_kills(tmp_path, own) == 2
    own.write_text("9:name=systemd:/\n4:memory:/job\n0::/\n")
    (tmp_path / "memory" / "job").mkdir(parents=True)
    (tmp_path / "memory" / "job" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert oom_kills(tmp_path, own) == 5


def test_a_machine_that_does_not_count_says_nothing(tmp_path: Path) -> None:
    assert oom_kills(tmp_path, tmp_path / "none") is None


def test_the_kernels_lines_of_an_attempt_are_kept_and_those_before_are_not(tmp_path: Path) -> None:
    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    log = KernelLog(str(pipe))

    def say(*lines: str) -> None:
        for line in lines:
            os.write(writer, f"6,1,2,-;{line}\n".encode())
            log._read()  # one record at a time, as the kernel gives them

    say("Out of memory: Killed process 41 (python)")
    log.begin()
    say("NVRM: Xid (PCI:0000:3b:00): 79, pid=7", "python[42]: segfault at 0")
    say("Out of memory: Killed process 43 (python)")
    for _ in range(2):
        told = log.about({42, 43, 44})
        assert "segfault" in told[42]
        assert "Xid" in told[42]
        assert "Killed process 43" in told[43]
        assert "Killed process" not in told[44]
        assert "41" not in told[43]


def test_a_log_that_may_not_be_read_is_empty() -> None:
    assert KernelLog("/no/such/log").about({1}) == {1: ""}


def test_the_platforms_own_variables_are_told() -> None:
    told = scheduler_says({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "HOME": "/x"})
    assert told == "SLURM_JOB_ID=7 SLURM_RESTART_COUNT=2"
    assert scheduler_says({}) == ""


def test_the_real_log_is_read_where_it_may_be() -> None:
    log = KernelLog()
    log.begin()
    assert set(log.about({os.getpid()})) == {os.getpid()}
