"""What a process may use of its machine, as the kernel's files tell."""

import os
from pathlib import Path

import pytest

from headway.machine import answer_of, cores, free_memory, memory_file, ranks_here

GB = 1 << 30


def a_machine(
    folder: Path, available: int, cgroup: str = "0::/\n", limits: dict[str, tuple[int | str, int, int]] | None = None,
    version: int = 2,
) -> Path:  # fmt: skip
    """The files in which a kernel tells of memory. `limits`: each cgroup's limit, its use, what of that is cache."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(
        f"MemTotal: {available // 512} kB\nMemAvailable:    {available // 1024} kB\nHugePages_Total:       0\n"
    )
    (folder / "proc/self/cgroup").write_text(cgroup)
    base = folder / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    limit, usage = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    for path, (most, used, cache) in (limits or {}).items():
        group = base / path
        group.mkdir(parents=True, exist_ok=True)
        (group / limit).write_text(f"{most}\n")
        (group / usage).write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    return folder


def test_without_a_limit_the_machine_says_what_is_free(tmp_path: Path) -> None:
    assert free_memory(a_machine(tmp_path, 8 * GB)) == 8 * GB


def test_a_cgroup_that_allows_less_than_the_machine_has_counts(tmp_path: Path) -> None:
    machine = a_machine(tmp_path, 64 * GB, "0::/job\n", {"job": (8 * GB, 5 * GB, 0)})
    assert free_memory(machine) == 3 * GB


def test_the_limit_of_a_cgroup_further_up_counts_too(tmp_path: Path) -> None:
    limits: dict[str, tuple[int | str, int, int]] = {
        "pod": (4 * GB, 3 * GB, 0),
        "pod/job": ("max", 1 * GB, 0),
        "pod/job/step": (32 * GB, 1 * GB, 0),
    }
    assert free_memory(a_machine(tmp_path, 64 * GB, "0::/pod/job/step\n", limits)) == 1 * GB


def test_the_cache_of_files_counts_as_free_for_the_kernel_gives_it_back(tmp_path: Path) -> None:
    machine = a_machine(tmp_path, 64 * GB, "0::/job\n", {"job": (8 * GB, 7 * GB, 5 * GB)})
    assert free_memory(machine) == 6 * GB


def test_the_older_kind_of_cgroups_is_understood(tmp_path: Path) -> None:
    lines = "5:cpu,cpuacct:/other\n3:memory:/slurm/job_1\n0::/init\n"
    limits: dict[str, tuple[int | str, int, int]] = {"slurm/job_1": (6 * GB, 2 * GB, 0), "slurm": (2**63 - 4096, 0, 0)}
    assert free_memory(a_machine(tmp_path, 64 * GB, lines, limits, version=1)) == 4 * GB


def test_a_container_that_sees_its_own_cgroup_as_the_root_is_limited_by_it(tmp_path: Path) -> None:
    assert free_memory(a_machine(tmp_path, 64 * GB, "0::/\n", {"": (8 * GB, 6 * GB, 0)})) == 2 * GB


def test_a_cgroup_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    assert free_memory(a_machine(tmp_path, 64 * GB, "0::/job\n", {"job": (8 * GB, 9 * GB, 0)})) == 0


def test_this_machine_has_some_memory_free() -> None:
    assert 0 < free_memory() < 1 << 50


# --- cores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/job\n", {}, None),
        ("0::/job\n", {"job/cpu.max": "max 100000"}, None),
        ("0::/job\n", {"job/cpu.max": "50000 100000"}, 0.5),
        ("0::/pod/job\n", {"pod/cpu.max": "25000 100000", "pod/job/cpu.max": "50000 100000"}, 0.25),
        ("0::/\n", {"cpu.max": "10000 100000"}, 0.1),
        (
            "4:cpu,cpuacct:/job\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "20000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"},
            0.2,
        ),
        ("4:cpu:/job\n", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cores_are_what_every_cgroup_around_the_process_allows(
    cgroup: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert cores(tmp_path) == (len(os.sched_getaffinity(0)) if quota is None else quota)


@pytest.mark.parametrize(("told", "ranks"), [("", 1), ("4", 4), ("0", 1), ("many", 1)])
def test_the_launcher_says_how_many_ranks_share_a_node(told: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    assert ranks_here() == ranks
    assert ranks_here(8) == (ranks if told == "4" else 8)


def test_a_command_is_asked_without_a_pipe_that_a_forked_data_worker_could_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_pipe() -> None:
        raise AssertionError("a process that is forked now would hold its end")

    monkeypatch.setattr(os, "pipe", no_pipe)
    answer = answer_of(["sh", "-c", "echo $WORD; echo no >&2; exit 3"], 120, {**os.environ, "WORD": "yes"})
    assert answer is not None
    assert (answer.stdout, answer.stderr, answer.returncode) == ("yes\n", "no\n", 3)


def test_a_command_that_is_not_there_or_does_not_answer_is_none() -> None:
    assert answer_of(["no-such-command"], 10) is None
    assert answer_of(["sleep", "60"], 0.1) is None


def test_memory_can_be_had_where_python_does_not_know_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    fd = memory_file("some")
    try:
        assert os.write(fd, b"kept") == 4
        assert os.pread(fd, 9, 0) == b"kept"
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
    answer = answer_of(["echo", "yes"], 120)
    assert answer is not None
    assert answer.stdout == "yes\n"
