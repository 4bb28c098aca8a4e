"""What will hurt a job: each check on values, and the reading of them on this machine."""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from headway.launch import surroundings as around
from headway.launch.surroundings import GIB, Finding

UNLIMITED = resource.RLIM_INFINITY
SEEN = {
    "error": "", "torch": "2.13.0", "import_s": 1.0, "folder": os.path.dirname(os.__file__), "shares_store": True,
    "has_bytecode": True, "writes_bytecode": True, "devices": 0, "has_triton": False, "bin": "/nowhere",
    "header": "/nowhere/Python.h",
}  # fmt: skip
"""What a Python could say of itself."""

PREEMPTS = {"PreemptType": "preempt/partition_prio", "KillWait": "30 sec"}
TELLS = PREEMPTS | {"SlurmctldParameters": "preempt_send_user_signal"}
NIGHT = {"PartitionName": "night", "PreemptMode": "REQUEUE", "GraceTime": "120"}
BATCH = {"JobId": "7", "TimeLimit": "08:00:00", "BatchFlag": "1"}


def find(name: str, findings: list[Finding]) -> Finding:
    (found,) = (finding for finding in findings if finding.name == name)
    return found


def states(check: Any, *cases: tuple[Any, ...]) -> list[str]:
    return [check(*case).state for case in cases]


def test_what_is_not_good_says_why_it_hurts_and_what_to_do() -> None:
    for finding in around.surroundings(os.environ | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, SEEN):
        assert finding.what
        assert bool(finding.why) == bool(finding.fix) == (finding.state != "good"), finding


# --- torch ---------------------------------------------------------------------------------------------------------


def test_restarts_are_safe_where_the_store_is_not_shared_and_unknown_where_nobody_measured() -> None:
    cases = (("2.13.0+cpu", True, ""), ("2.13.1", True, "1"), ("2.3.1", False, ""), ("2.9.0", True, "0"))
    assert states(around.torch_restarts, *cases) == ["hurts", "good", "good", "unknown"]
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in around.torch_restarts("2.13.0", True, "").fix


def test_the_variable_does_in_this_torch_what_the_check_says() -> None:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    shares = DynamicRendezvousHandler.use_agent_store.fget  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
        assert shares(None)
        patch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        assert not shares(None)


def test_an_import_is_slow_by_its_seconds_or_by_its_file_system() -> None:
    cases = (
        (2.0, "/usr", False),
        (30.0, "/usr", False),
        (2.0, "/nfs", True),
        (0.0, "", False, "ImportError: no torch"),
    )
    assert states(around.torch_import, *cases) == ["good", "hurts", "hurts", "hurts"]
    assert "ImportError: no torch" in around.torch_import(*cases[3]).what


def test_bytecode_that_is_never_written_hurts() -> None:
    cases = ((True, True), (False, True), (True, False), (False, False))
    assert states(around.bytecode, *cases) == ["good", "hurts", "hurts", "hurts"]
    assert around.bytecode(False, True).fix == "Unset PYTHONDONTWRITEBYTECODE."
    assert "compileall" in around.bytecode(True, False).fix


def test_a_gpu_that_torch_does_not_see_hurts_and_no_gpu_is_nothing_to_tell() -> None:
    assert around.accelerators(False, 0, False) is None
    assert states(around.accelerators, (True, 0, True), (True, 8, False), (True, 8, True)) == ["hurts", "hurts", "good"]


def test_compiling_needs_a_compiler_and_headers() -> None:
    header = "/usr/include/Python.h"
    cases = (("g++", True, header, True), ("g++", False, header, True), ("g++", True, header, False))
    assert states(around.compiler, *cases) == ["good", "hurts", "hurts"]
    assert around.compiler("clang++", False, header, False).what == f"no clang++ and no {header}"


def test_a_compile_cache_is_local_and_writable() -> None:
    cases = (("/tmp/c", False, True), ("/nfs/c", True, True), ("/c", False, False))
    assert states(around.compile_cache, *cases) == ["good", "hurts", "hurts"]


def test_threads_fit_the_cores() -> None:
    cases = (("", 8), ("2", 8), ("8", 8), ("9", 8), ("4,2", 8), ("many", 8), ("0", 8))
    assert states(around.threads, *cases) == ["unknown", "good", "good", "hurts", "good", "hurts", "hurts"]
    assert "$((8 / R))" in around.threads("", 8).fix


# --- Slurm ---------------------------------------------------------------------------------------------------------


def test_the_jobs_own_requeue_counts_before_the_clusters() -> None:
    own, cluster = {"JobId": "7", "Requeue": "1"}, {"JobRequeue": "0"}
    assert states(around.slurm_requeue, (cluster, {}), (cluster, own), ({}, {})) == ["hurts", "good", "good"]
    assert "scontrol update JobId=7 Requeue=1" in around.slurm_requeue({}, own | {"Requeue": "0"}).fix


def test_a_requeued_job_waits_as_long_as_its_credential_lives() -> None:
    cases = ({"AuthInfo": "socket=/run/munge,cred_expire=5"}, {"AuthInfo": "(null)"}, {"AuthInfo": "cred_expire=300"})
    found = [around.slurm_requeue_wait(config) for config in cases]
    assert [finding.state for finding in found] == ["good", "hurts", "hurts"]
    assert [finding.what.split(",")[0] for finding in found] == ["6 s", "121 s", "301 s"]


def test_a_preempted_job_comes_back_and_has_time_to_save() -> None:
    short, cancelled, suspended = (
        NIGHT | {"GraceTime": "0"},
        NIGHT | {"PreemptMode": "CANCEL"},
        {"PreemptMode": "SUSPEND"},
    )
    spared, by_qos = NIGHT | {"PreemptMode": "OFF"}, {"PreemptType": "preempt/qos"}
    assert states(around.slurm_preemption, ({"PreemptType": "preempt/none"}, short), (PREEMPTS, spared)) == ["good"] * 2
    assert states(around.slurm_preemption, (PREEMPTS, NIGHT), (PREEMPTS, short)) == ["good", "hurts"]
    assert states(around.slurm_preemption, (PREEMPTS, cancelled), (PREEMPTS, suspended)) == ["hurts", "unknown"]
    assert states(around.slurm_preemption, (by_qos, NIGHT), (by_qos, spared)) == ["unknown"] * 2


def test_a_batch_process_is_told_only_by_a_signal_that_is_meant_for_it() -> None:
    cases = ((TELLS, BATCH, NIGHT, "B:USR1@120"), (PREEMPTS, BATCH, NIGHT, "B:USR1@120"), (TELLS, BATCH, NIGHT, "USR1"))
    assert states(around.slurm_warning, *cases) == ["good", "hurts", "unknown"]
    assert "preempt_send_user_signal" in around.slurm_warning(*cases[1]).fix


def test_a_batch_process_needs_no_warning_where_nothing_ends_it() -> None:
    free = BATCH | {"TimeLimit": "UNLIMITED"}
    assert states(around.slurm_warning, ({}, free, NIGHT, ""), ({}, BATCH, NIGHT, "")) == ["good", "unknown"]
    told = around.slurm_warning(PREEMPTS, free, NIGHT, "")
    assert told.state == "unknown"
    assert "30 s before SIGKILL" in told.why


@pytest.mark.parametrize(("script", "in_a_job"), [("exit 1", True), ("sleep 60", True), ("exit 1", False)])
def test_a_slurm_that_does_not_answer_is_unknown_to_its_jobs_and_nothing_to_others(
    script: str, in_a_job: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\nexec {script}\n")
    scontrol.chmod(0o755)
    monkeypatch.setattr(around, "TIMEOUT_S", 0.2)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | ({"SLURM_JOB_ID": "7"} if in_a_job else {})
    assert [finding.state for finding in around.read_slurm(environ)] == (["unknown"] if in_a_job else [])


def test_no_slurm_is_nothing_to_tell(tmp_path: Path) -> None:
    assert around.read_slurm({"PATH": str(tmp_path)}) == []


# --- the machine ---------------------------------------------------------------------------------------------------


def test_shared_memory_is_memory_and_enough() -> None:
    cases = (("tmpfs", 8 * GIB, 64 * GIB), ("tmpfs", GIB // 2, GIB), ("tmpfs", 2 * GIB, 64 * GIB), ("", 99 * GIB, GIB))
    assert states(around.shared_memory, *((*case, False) for case in cases)) == ["good", "hurts", "hurts", "hurts"]
    pod = around.shared_memory("tmpfs", 64 << 20, 64 * GIB, in_pod=True)
    assert pod.what == "tmpfs, 64 MiB free"
    assert "emptyDir" in pod.fix
    assert "emptyDir" not in around.shared_memory("tmpfs", 64 << 20, 64 * GIB, in_pod=False).fix


def test_limits_that_can_be_raised_say_how() -> None:
    cases = ((UNLIMITED, UNLIMITED), (1 << 20, 1 << 20), (1024, 1 << 20), (1024, 4096))
    assert states(around.open_files, *cases) == ["good", "good", "hurts", "hurts"]
    assert "ulimit -n 65536" in around.open_files(1024, UNLIMITED).fix
    assert "LimitNOFILE=65536" in around.open_files(1024, 4096).fix
    assert states(around.processes, (UNLIMITED, UNLIMITED), (512, UNLIMITED)) == ["good", "hurts"]
    assert states(around.locked_memory, (UNLIMITED, UNLIMITED), (64 << 10, UNLIMITED)) == ["good", "hurts"]


def test_memory_is_short_when_the_limit_is_near_or_pages_are_swapped_out() -> None:
    cases = ((0, 0, 0), (100 * GIB, 50 * GIB, 0), (100 * GIB, 95 * GIB, 0), (0, 0, 2 * GIB))
    assert states(around.memory, *cases) == ["good", "good", "hurts", "hurts"]


def test_a_hang_can_be_looked_into_with_py_spy_and_the_right_to() -> None:
    cases = ((True, 0, False), (True, 1, False), (True, 1, True), (True, 3, True), (False, 0, True))
    assert states(around.stacks, *cases) == ["good", "hurts", "good", "hurts", "hurts"]
    assert states(around.kernel_log, (True,), (False,)) == ["good", "hurts"]


def test_a_pod_is_told_what_it_cannot_see() -> None:
    told = around.read_machine({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert find("pod's grace period", told).state == "unknown"
    assert "pod's grace period" not in [finding.name for finding in around.read_machine({})]


def test_the_limits_are_those_of_the_process() -> None:
    code = "from headway.launch.surroundings import read_machine; print(*read_machine({}), sep='\\n')"
    command = ["sh", "-c", f'ulimit -n 256 && exec "{sys.executable}" -c "$0"', code]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in told.splitlines() if "'open files'" in line)
    assert "state='hurts', what='256'" in line


def test_the_machine_is_read_as_the_kernel_tells_it() -> None:
    shm = find("/dev/shm", around.read_machine({}))
    mounted = [
        line.split()[2] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1] == "/dev/shm"
    ]
    assert shm.what.startswith(mounted[-1] if mounted else "no file system of its own")


def test_a_python_without_torch_is_told_what_can_be_told() -> None:
    told = around.read_python({}, SEEN | {"error": "ModuleNotFoundError: No module named 'torch'", "folder": ""})
    assert [(finding.name, finding.state) for finding in told] == [
        ("import of torch", "hurts"), ("OMP_NUM_THREADS", "unknown"),
    ]  # fmt: skip


def test_the_compiler_and_the_cache_are_looked_for_where_torch_looks(tmp_path: Path) -> None:
    told = around.read_python({"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "a" / "b")}, SEEN)
    assert find("compiler", told).what == "no no-such-compiler and no /nowhere/Python.h"
    assert find("compile cache", told) == Finding("compile cache", "good", str(tmp_path / "a" / "b"))
    told = around.read_python({"TORCHINDUCTOR_CACHE_DIR": "/dev/null/cache"}, SEEN)
    assert find("compile cache", told).what == "/dev/null/cache, not writable"


def test_the_default_cache_is_the_one_that_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert find("compile cache", around.read_python({}, SEEN)).what.split(",")[0] == default_cache_dir()
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1_234_567_890)  # of whom no name is known
    told = find("compile cache", around.read_python({}, SEEN)).what
    assert told.split(",")[0] == default_cache_dir() == f"{tempfile.gettempdir()}/torchinductor_uid_1234567890"
