"""`headway exec` in real processes: the command is as it would be alone, and its witness tells how it ended."""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from running import HEADWAY, PATIENCE_S, SITE, TELLS_EXIT_CODES, begin, end_of, run, wait_for, witnessed

from headway.cli.exec import name_of, python_path, script_of
from headway.events.clock import start_ticks
from headway.events.job import JobReader
from headway.events.journal import Follower, is_being_written
from headway.events.process import process_name
from headway.events.vocabulary import Process, ProcessGone
from headway.paths import JobPaths, folder_name

ANSWERS_SIGNALS = """
import os, signal
awaited = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
print(os.getpid(), flush=True)
for _ in awaited:
    print(signal.sigwait(awaited).name, flush=True)
exit(5)
"""


# --- the command is as it would be alone -----------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_is_the_commands(home: Path, code: int) -> None:
    assert run("sh", "-c", f"exit {code}").returncode == code
    assert end_of(home).exit_code in ((code,) if TELLS_EXIT_CODES else (code, None))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_death_by_a_signal_is_seen_as_that(home: Path, number: signal.Signals) -> None:
    assert run("sh", "-c", f"kill -{int(number)} $$").returncode == -number
    if TELLS_EXIT_CODES:
        assert end_of(home).exit_code == -number


def test_signals_to_the_pid_reach_the_command(home: Path) -> None:
    job = begin(sys.executable, "-c", ANSWERS_SIGNALS)
    assert job.stdout is not None
    assert int(job.stdout.readline()) == job.pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(job.pid, number)
        assert job.stdout.readline().strip() == number.name
    assert job.wait(timeout=PATIENCE_S) == 5
    job.communicate()


def test_stdin_goes_through(home: Path) -> None:
    assert run("cat", input="one\ntwo\n").stdout == "one\ntwo\n"


def test_nothing_is_said_where_there_is_no_terminal(home: Path) -> None:
    done = run("sh", "-c", "echo out; echo err >&2")
    assert (done.stdout, done.stderr) == ("out\n", "err\n")


def test_signal_dispositions_are_those_given(home: Path) -> None:
    show = ["sh", "-c", "grep ^Sig /proc/self/status | grep -v SigQ"]
    assert run(*show).stdout == subprocess.run(show, capture_output=True, text=True).stdout


def test_the_command_has_no_child_it_did_not_start(home: Path) -> None:
    code = "import os\ntry: print(os.waitpid(-1, 0))\nexcept ChildProcessError: print('none')"
    assert run(sys.executable, "-c", code).stdout == "none\n"
    # A process that adopts orphans would adopt the witness.
    adopts = "import ctypes, os, sys; assert ctypes.CDLL(None).prctl(36, 1) == 0; os.execvp(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", adopts, *HEADWAY, "exec", sys.executable, "-c", code]
    assert subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S).stdout == "none\n"
    assert len(witnessed(home)) == 1


def test_descriptors_that_the_command_was_given_stay_open_in_it_alone(home: Path) -> None:
    reader, writer = os.pipe()
    code = f"import os; os.write({writer}, b'there'); os.close({writer}); input()"
    job = begin(sys.executable, "-c", code, pass_fds=(writer,))
    os.close(writer)
    with os.fdopen(reader) as told:
        assert told.read() == "there"  # to its end, while command and witness live
    assert job.poll() is None
    job.communicate("\n")


def test_output_ends_when_the_command_closes_it(home: Path) -> None:
    job = begin("sh", "-c", "exec >&-; read line")
    assert job.stdout is not None
    assert job.stdout.read() == ""
    assert job.poll() is None
    job.communicate("\n")


def test_closed_standard_streams_do_no_harm(home: Path) -> None:
    words = " ".join([*HEADWAY, "exec", "sh", "-c", "'exit 6'", "<&-", ">&-", "2>&-"])
    assert subprocess.run(["sh", "-c", words]).returncode == 6
    assert isinstance(end_of(home), ProcessGone)


# --- at a terminal ---------------------------------------------------------------------------------------------------


class Terminal:
    """A shell line at a terminal of its own."""

    def __init__(self, line: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvp("sh", ["sh", "-c", line])

    def read_until(self, text: bytes) -> bytes:
        seen, deadline = b"", time.monotonic() + PATIENCE_S
        while text not in seen:
            ready, _, _ = select.select([self.fd], [], [], max(deadline - time.monotonic(), 0))
            assert ready, seen
            seen += os.read(self.fd, 4096)
        return seen

    def type(self, text: bytes) -> None:
        os.write(self.fd, text)

    def close(self) -> None:
        os.close(self.fd)
        os.waitpid(self.pid, 0)


def shell(*words: str) -> str:
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in [*HEADWAY, "exec", *words])


def test_the_command_has_the_terminal_and_its_job_is_named(home: Path) -> None:
    code = "import os; print([os.isatty(n) for n in range(3)], os.tcgetpgrp(0) == os.getpgrp(), flush=True)"
    terminal = Terminal("exec " + shell("--job", "mine", sys.executable, "-c", code))
    seen = terminal.read_until(b"[True, True, True] True")
    assert b"headway: job mine\r\n" in seen
    terminal.close()


def test_ctrl_c_reaches_the_command_and_not_the_witness(home: Path) -> None:
    code = "import time\ntry: print('ready', flush=True); time.sleep(600)\nexcept KeyboardInterrupt: exit(9)"
    terminal = Terminal("exec " + shell(sys.executable, "-c", code))
    terminal.read_until(b"ready")
    terminal.type(b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) == 9
    os.close(terminal.fd)
    assert end_of(home).exit_code in ((9,) if TELLS_EXIT_CODES else (9, None))


def test_the_end_of_each_measured_process_is_seen(home: Path) -> None:
    job = begin("cat")
    wait_for(lambda: any(Follower(path).poll().records for path in home.rglob("launcher-*.hwj")))
    [path] = home.rglob("launcher-*.hwj")
    command = Follower(path).poll().records[0]
    assert isinstance(command, Process)
    with subprocess.Popen(["sleep", "600"]) as other:
        name = folder_name(process_name(replace(command, pid=other.pid)))
        path.with_name(f"{name}.hwj").touch()  # as a measured process does when it begins
        (pid,) = witnesses(home)
        witness = Path(f"/proc/{pid}")
        wait_for(lambda: pidfds(witness) == 2)
        other.kill()
        wait_for(lambda: pidfds(witness) == 1)
    job.communicate()
    ((_, (gone, last)),) = witnessed(home)
    assert isinstance(gone, ProcessGone)
    assert (gone.name, gone.exit_code) == (name, -signal.SIGKILL)
    assert isinstance(last, ProcessGone)
    assert last.name == ""


def pidfds(process: Path) -> int:
    return sum("pidfd" in name for name in opened_by(process))


def opened_by(process: Path) -> list[str]:
    found = []
    with suppress(OSError):  # it has ended
        for fd in (process / "fd").iterdir():
            with suppress(OSError):  # it has closed this one meanwhile: the others count
                found.append(os.readlink(fd))
    return found


def test_a_shell_can_stop_and_continue_it(home: Path) -> None:
    code = "print('ready', flush=True); print('got', input(), flush=True); exit(5)"
    terminal = Terminal("set -m; " + shell(sys.executable, "-c", code) + "; echo code=$?; fg; echo code=$?; read x")
    terminal.read_until(b"ready")
    terminal.type(b"\x1a")
    terminal.read_until(b"code=148")  # 128 + SIGTSTP
    terminal.type(b"line\n")
    assert b"got line" in terminal.read_until(b"code=5")
    terminal.type(b"\n")
    terminal.close()


# --- its environment -------------------------------------------------------------------------------------------------


def environment_of(*command: str, environ: dict[str, str]) -> dict[str, str]:
    done = run(*command, "env", "-0", env=environ, check=True)
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


@pytest.fixture
def bare(home: Path) -> dict[str, str]:
    """As little environment as there can be: not even a locale."""
    return {"HEADWAY_HOME": str(home), "PATH": os.environ["PATH"]}


def test_only_what_measuring_needs_is_added(bare: dict[str, str]) -> None:
    seen = environment_of(environ=bare | {"HEADWAY_JOB": "mine"})
    assert seen == bare | {"HEADWAY_JOB": "mine", "PYTHONPATH": str(SITE)}


def test_disabled_it_adds_nothing_and_leaves_no_witness(home: Path, bare: dict[str, str]) -> None:
    given = bare | {"HEADWAY_DISABLE": "1", "PYTHONPATH": "/x::/y"}
    assert environment_of(environ=given) == given
    assert not list(home.rglob("*.hwj"))


def test_a_python_path_that_was_there_is_kept_and_ours_is_there_once() -> None:
    assert python_path("") == str(SITE)
    assert python_path("/x:/y") == f"{SITE}:/x:/y"
    assert python_path(":/y") == f"{SITE}::/y"
    assert python_path(f"/x:{SITE}:/y") == f"{SITE}:/x:/y"
    assert python_path(str(SITE)) == str(SITE)


def test_inside_another_exec_job_and_path_stay_as_they_are(home: Path, bare: dict[str, str]) -> None:
    seen = environment_of("sh", "-c", '"$@"', "sh", *HEADWAY, "exec", environ=bare | {"PYTHONPATH": "/x"})
    assert seen["PYTHONPATH"] == f"{SITE}:/x"
    assert {process.job for process, _ in witnessed(home)} == {seen["HEADWAY_JOB"]}
    named = environment_of("sh", "-c", '"$@"', "sh", *HEADWAY, "exec", "--job", "inner", environ=bare)
    assert named["HEADWAY_JOB"] == "inner"


def test_right_before_another_exec_there_is_one_witness(home: Path, bare: dict[str, str]) -> None:
    environment_of(*HEADWAY, "exec", environ=bare)
    assert len(witnessed(home)) == 1


def test_a_relative_home_stays_where_it_is_when_the_command_moves(home: Path) -> None:
    done = run("sh", "-c", "cd /; echo $HEADWAY_HOME $HEADWAY_SPOOL", cwd=home, env=os.environ | {"HEADWAY_HOME": "h"})
    assert done.stdout.split() == [str(home / "h")]
    assert len(witnessed(home / "h")) == 1


def test_a_misspelt_setting_stops_it_before_anything_runs(home: Path, bare: dict[str, str]) -> None:
    done = run("touch", str(home / "ran"), env=bare | {"HEADWAY_JBO": "x"})
    assert done.returncode == 1
    assert "did you mean HEADWAY_JOB?" in done.stderr
    assert not (home / "ran").exists()


# --- the job's name --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python train.py", "train.py"),
        ("python /a/b/train.py eval.py", "train.py"),
        ("torchrun --nproc-per-node 2 train.py --lr 3", "train.py"),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", "train.py"),
        ("python -m torch.distributed.run -m pkg.train config.py", "train"),
        ("accelerate launch --config_file c.yaml train.py", "train.py"),
        ("python -m pkg.train --lr 3", "train"),
        ("srun -n 8 bash launch.sh", "launch.sh"),
        ("bash launch.sh train.py", "train.py"),
        ("./launch", "launch"),
        ("/usr/bin/true", "true"),
    ],
)
def test_a_job_is_named_after_the_script_in_its_command(command: str, script: str) -> None:
    assert script_of(command.split()) == script
    name, _, random = name_of(command.split(), {}).rpartition("-")
    assert name == Path(script).stem
    assert len(random) == 8


def test_the_script_inside_a_shell_line_is_found() -> None:
    assert script_of(["sh", "-c", "cd /x && torchrun train.py --lr 3"]) == "train.py"


@pytest.mark.parametrize("option", ["--rdzv-id 77", "--rdzv_id 77", "--rdzv-id=77", "--rdzv_id=77"])
def test_every_node_of_a_torchrun_with_an_id_gives_the_job_the_same_name(option: str) -> None:
    assert name_of(f"torchrun --nnodes 2 {option} train.py".split(), {}) == "train-77"


def test_nodes_without_an_id_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("torchrun --nnodes 1 train.py", "torchrun --nnodes=1:1 train.py", "torchrun train.py"):
        name_of(command.split(), {})
    assert capsys.readouterr().err == ""
    name_of(["torchrun", "--nnodes=1:2", "train.py"], {})
    assert "no id they share" in capsys.readouterr().err


def test_the_schedulers_id_is_the_jobs_name(home: Path) -> None:
    slurm = os.environ | {"SLURM_JOB_ID": "12"}
    assert run("sh", "-c", "echo $HEADWAY_JOB", env=slurm).stdout == "slurm-12\n"
    assert run("sh", "-c", "echo $HEADWAY_JOB", options=("--job", "mine"), env=slurm).stdout == "mine\n"


def test_words_after_the_command_are_the_commands(home: Path) -> None:
    done = run(sys.executable, "-c", "import sys; print(sys.argv[1:])", "--job", "3", "--help", "--", "-h")
    assert done.stdout == "['--job', '3', '--help', '--', '-h']\n"
    assert run("echo", "--job", options=("--",)).stdout == "--job\n"


# --- what cannot be run ----------------------------------------------------------------------------------------------


def test_no_command_is_a_usage_error(home: Path) -> None:
    done = run()
    assert done.returncode == 2
    assert "Usage: " in done.stderr
    assert "--job is empty" in run("true", options=("--job", "")).stderr


def test_a_command_that_is_not_there_ends_with_127(home: Path) -> None:
    for name in ("no-such-program", "./no-such-program"):
        done = run(name, cwd=home)
        assert done.returncode == 127
        assert f"cannot run {name}" in done.stderr
    assert not list(home.rglob("*.hwj"))


def test_a_file_that_is_no_program_ends_with_126_and_a_hint(home: Path) -> None:
    script = home / "train.py"
    script.write_text("print('trained')\n")
    done = run("./train.py", cwd=home)
    assert done.returncode == 126
    assert "headway exec python ./train.py" in done.stderr
    assert "headway exec python train.py" in run("train.py", cwd=home).stderr
    script.chmod(0o755)
    done = run("./train.py", cwd=home)
    assert (done.returncode, done.stdout) == (126, "")
    assert "headway exec python ./train.py" in done.stderr
    assert run(str(home)).returncode == 126


def test_a_script_that_names_no_shell_is_run_by_one_as_ever(home: Path) -> None:
    script = home / "job"
    script.write_text('echo "$0 $1"; exit 4\n')
    script.chmod(0o755)
    done = run("./job", "x", cwd=home)
    assert (done.returncode, done.stdout) == (4, "./job x\n")
    script.write_text("#!/no/such/shell\n")
    assert run("./job", cwd=home).returncode == 126


# --- the witness -----------------------------------------------------------------------------------------------------


def test_a_program_that_is_not_python_has_a_begin_an_end_and_an_exit_code(home: Path) -> None:
    before = time.monotonic_ns()
    run("sh", "-c", "sleep 0.3; exit 7", "--token", "S3CR3T")
    ((process, (gone,)),) = witnessed(home)
    after = time.monotonic_ns()
    assert (process.role, process.program) == ("launcher", "sh")
    assert process.command == "sh -c sleep 0.3; exit 7 --token ***"
    assert before - 20_000_000 <= process.started_ns <= process.t_ns  # the kernel tells it to 10 ms
    assert isinstance(gone, ProcessGone)
    assert process.t_ns < gone.t_ns <= after
    assert gone.t_ns - process.started_ns >= 300_000_000
    if TELLS_EXIT_CODES:
        assert gone.exit_code == 7


def test_the_journal_shows_life_while_the_command_lives(home: Path) -> None:
    job = begin("sh", "-c", "read line")
    wait_for(lambda: any(map(is_being_written, home.rglob("launcher-*.hwj"))))  # it is made first, and then locked
    job.communicate("\n")
    assert isinstance(end_of(home), ProcessGone)


def test_it_survives_what_ends_the_whole_process_group(home: Path) -> None:
    job = begin("sh", "-c", "echo ready; sleep 600", start_new_session=True)
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    os.killpg(job.pid, signal.SIGKILL)
    assert job.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    job.communicate()
    if TELLS_EXIT_CODES:
        assert end_of(home).exit_code == -signal.SIGKILL


def test_it_stays_when_a_scheduler_warns_all_processes_of_the_job(home: Path) -> None:
    job = begin("sh", "-c", "read line; exit 3")
    wait_for(lambda: len(witnesses(home)) == 1)
    (witness,) = witnesses(home)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        os.kill(witness, number)
    job.communicate("\n")
    assert end_of(home).exit_code in ((3,) if TELLS_EXIT_CODES else (3, None))


def test_it_holds_nothing_of_the_commands(home: Path) -> None:
    with open(home / "locked", "w") as file:
        job = begin("sh", "-c", "read line", pass_fds=(file.fileno(),), cwd=home)
        wait_for(lambda: len(witnesses(home)) == 1)
        (witness,) = witnesses(home)
        assert Path(f"/proc/{witness}/comm").read_text() == "headway-witness\n"
        (journal,) = map(str, home.rglob("launcher-*.hwj"))
        # It closes its pipe to the command after it has made the journal, and opens folders to list them.
        expected = {os.devnull, "anon_inode:[pidfd]", journal}
        wait_for(lambda: {*opened_by(Path(f"/proc/{witness}"))} == expected)
        assert os.readlink(f"/proc/{witness}/cwd") == "/"
        assert os.getsid(witness) not in (os.getsid(0), os.getsid(job.pid))
        job.communicate("\n")


def test_one_that_replaces_itself_is_one_command(home: Path) -> None:
    assert run("sh", "-c", "exec sh -c 'exec sh -c \"exit 9\"'").returncode == 9
    assert end_of(home).exit_code in ((9,) if TELLS_EXIT_CODES else (9, None))


def test_a_daemon_left_behind_is_not_waited_for(home: Path) -> None:
    done = run("sh", "-c", "sleep 1000 </dev/null >/dev/null 2>&1 & echo $!; exit 4")
    assert done.returncode == 4
    assert isinstance(end_of(home), ProcessGone)
    os.kill(int(done.stdout), signal.SIGKILL)


def test_the_end_is_told_while_a_daemon_still_holds_the_output(home: Path) -> None:
    job = begin("sh", "-c", "(until [ -e go ]; do sleep 0.05; done; echo late) & exit 4", cwd=home)
    assert isinstance(end_of(home), ProcessGone)
    (home / "go").touch()
    assert job.communicate()[0] == "late\n"


def test_an_end_that_nobody_asks_about_is_told_all_the_same(home: Path) -> None:
    job = begin("sh", "-c", "exit 7")
    assert end_of(home).exit_code == 7  # on every kernel: it is a zombie until `communicate`
    job.communicate()


def test_a_python_built_for_older_kernels_has_a_witness_too(home: Path) -> None:
    code = "import os; del os.pidfd_open; from headway.cli import main; main()"
    words = [sys.executable, "-P", "-c", code, "exec", "sh", "-c", "exit 7"]
    assert subprocess.run(words, timeout=PATIENCE_S).returncode == 7
    assert end_of(home).exit_code in ((7,) if TELLS_EXIT_CODES else (7, None))


def test_it_leaves_when_its_journal_is_deleted(home: Path) -> None:
    job = begin("sh", "-c", "read line")
    wait_for(lambda: len(witnesses(home)) == 1)
    (witness,) = witnesses(home)
    ticks = start_ticks(witness)
    shutil.rmtree(home / "jobs")
    wait_for(lambda: start_ticks(witness) != ticks or state(witness) == "Z")
    assert job.poll() is None
    job.communicate("\n")


def test_where_nothing_can_be_written_the_command_runs_all_the_same(home: Path) -> None:
    environ = os.environ | {"HEADWAY_HOME": "/dev/null/home", "TMPDIR": str(home)}
    # What is said comes from the witness, for which a command waits only two seconds.
    code = "from headway.instrument import witness; witness.PATIENCE_S = 100; from headway.cli import main; main()"
    words = [sys.executable, "-P", "-c", code, "exec", "sh", "-c", "exit 4"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 4
    assert done.stderr.startswith("headway: cannot write to /dev/null/home")
    assert len(witnessed(home / f"headway-{os.getuid()}")) == 1
    environ |= {"TMPDIR": "/dev/null"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 4
    assert done.stderr.startswith("headway: cannot write to /dev/null/home")
    assert done.stderr.count("\n") == 1


def test_through_a_spool_it_reaches_the_home(home: Path) -> None:
    run("sh", "-c", "sleep 0.3; exit 7", options=("--job", "job"), env=os.environ | {"HEADWAY_SPOOL": str(home / "s")})
    try:
        wait_for(lambda: any(isinstance(record, ProcessGone) for record in delivered(home)))
        first, gone, *_ = delivered(home)
        assert isinstance(first, Process)
        assert first.role == "launcher"
        assert isinstance(gone, ProcessGone)
        assert gone.exit_code in ((7,) if TELLS_EXIT_CODES else (7, None))
    finally:
        wait_for(lambda: end_collectors(home / "s") == 0)


def delivered(home: Path) -> list[object]:
    """All records of the job in this home, those of processes that were rolled up too."""
    batches = [batch for _, batch in JobReader(JobPaths(home, "job")).poll()]
    return [record for batch in batches for record in (batch.load()[0] if batch.load else batch.records)]


def end_collectors(spool: Path) -> int:
    """Tells every collector of a spool to end; how many there were."""
    found = [pid for pid in processes() if f"--spool={spool}".encode() in command_of(pid)]
    for pid in found:
        with suppress(ProcessLookupError):  # it has ended by itself meanwhile
            os.kill(pid, signal.SIGKILL)
    return len(found)


def witnesses(home: Path) -> list[int]:
    """The processes that hold a launcher's journal of this home open."""
    return [
        pid
        for pid in processes()
        if any("/launcher-" in file and str(home) in file for file in opened_by(Path(f"/proc/{pid}")))
    ]


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def command_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
