"""What around a job will hurt it, and the fix for each: torch's own defects, Slurm's settings, the machine's limits.

Each check is a function from observed values to a `Finding`; `surroundings`, at the end, reads the values here.
"""

import getpass
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headway.events.scheduler import scontrol, slurm_fields
from headway.paths import is_network

GIB = 1 << 30
SAVE_S = 60
"""A save that a job should be able to finish between its warning and its end."""
OPEN_FILES = 65536
PROCESSES = 4096
IMPORT_S = 10.0
"""An `import torch` above this is slowed by where its files are: from a local disk it takes 2 to 5 s."""
REQUEUE_WAIT_S = 30
TIMEOUT_S = 5.0
"""How long one answer of Slurm's is waited for."""

_SHARE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_ASK = "Ask your administrator for"

Told = Mapping[str, str]
"""The fields of one of scontrol's answers."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing around a job."""

    name: str
    state: Literal["good", "hurts", "unknown"]
    what: str
    """As it was found."""
    why: str = ""
    """What it costs a job; empty where it is good."""
    fix: str = ""


def _found(name: str, good: bool, what: str, why: str, fix: str) -> Finding:
    return Finding(name, "good", what) if good else Finding(name, "hurts", what, why, fix)


# --- torch ---------------------------------------------------------------------------------------------------------


def torch_restarts(version: str, shares: bool, setting: str) -> Finding:
    """Whether a restart in place finds the rendezvous store of the attempt before, with its dead addresses.

    `shares`: this torch knows of the variable that turns sharing off. Measured with torch 2.13: its agent makes the
    store once and hands it to every attempt, and the workers' keys no longer have the attempt's number in front.
    """
    name = "torchrun restarts"
    if not shares or setting == "1":
        return Finding(name, "good", f"{_SHARE}=1" if shares else f"torch {version} does not share its store")
    measured = version.startswith("2.13.")
    how = "with torch 2.13 and gloo one restart did not cure 8 of 10 crashes, and with the variable all 10"
    why = f"A restarted worker may read the addresses of dead peers: {how}."
    what = f"torch {version} shares the launcher's store with all attempts, unless {_SHARE}=1"
    fix = f"`export {_SHARE}=1` before torchrun. `headway run` needs it not: each attempt has a store of its own."
    return Finding(name, "hurts" if measured else "unknown", what, why, fix)


def torch_import(seconds: float, folder: str, network: bool, error: str = "") -> Finding:
    """Whether torch is there, and how long its import keeps every start and every restart."""
    name = "import of torch"
    if error:
        fix = "Install it there, or name the Python that runs your jobs with --python."
        return Finding(name, "hurts", f"failed: {error}", "Nothing of torch can be checked.", fix)
    what = f"{seconds:.1f} s from {folder}" + (", a network file system" if network else "")
    why = "Every rank reads thousands of files at every start, and all nodes read them at once."
    fix = "Put the environment on a local disk: in the image, or copied or unpacked there at the job's start."
    return _found(name, not network and seconds <= IMPORT_S, what, why, fix)


def bytecode(is_written: bool, is_there: bool) -> Finding:
    """Whether Python compiles its modules once, or at every start. `is_there`: torch's own, after an import of it."""
    what = "never written: PYTHONDONTWRITEBYTECODE is set" if not is_written else "written once"
    what = what if is_there else f"{'cannot be written' if is_written else what}; torch has none"
    why = "Modules without a .pyc are compiled from source at every start of every rank and data worker."
    fix = "Run `python -m compileall` as the owner of site-packages, or point PYTHONPYCACHEPREFIX to a local folder."
    fix = fix if is_written else "Unset PYTHONDONTWRITEBYTECODE."
    return _found("bytecode", is_written and is_there, what, why, fix)


def accelerators(is_fitted: bool, devices: int, has_triton: bool) -> Finding | None:
    """Whether torch sees the GPUs of the machine, and can compile for them; None where there is none."""
    name = "GPU"
    if not is_fitted and not devices:
        return None
    if not devices:
        why = "The job trains on the CPU, or does not start."
        fix = "Install a torch built for your CUDA; see that `nvidia-smi` works and CUDA_VISIBLE_DEVICES is not empty."
        return Finding(name, "hurts", "the driver's devices are there, and torch sees none", why, fix)
    why = "torch.compile makes its GPU kernels with triton, and fails without it."
    fix = "Install the triton that your torch names as a requirement."
    return _found(name, has_triton, f"{devices}, {'with' if has_triton else 'without'} triton", why, fix)


def compiler(cxx: str, is_there: bool, header: str, has_header: bool) -> Finding:
    """Whether torch.compile can build what it writes: C++ for the CPU, and launchers against Python's headers."""
    lacks = [] if is_there else [f"no {cxx}"]
    lacks += [] if has_header else [f"no {header}"]
    fix = "Install g++ and Python's headers (Debian: `apt-get install g++ python3-dev`), or name a compiler in CXX."
    why = "torch.compile fails when it first has to build something, which may be long after the start."
    return _found("compiler", not lacks, " and ".join(lacks) or f"{cxx} and Python.h", why, fix)


def compile_cache(folder: str, network: bool, writable: bool) -> Finding:
    """Whether what torch.compile made is kept, and is quick to find."""
    what = folder + (", a network file system" if network else "") + ("" if writable else ", not writable")
    why = "Compiled code is many small files and locks." if writable else "Nothing compiled is kept for a restart."
    fix = "Set TORCHINDUCTOR_CACHE_DIR to a local folder."
    return _found("compile cache", writable and not network, what, why, fix)


def threads(setting: str, cores: int) -> Finding:
    """Whether the ranks of a node have as many threads as it has cores."""
    name = "OMP_NUM_THREADS"
    first = setting.partition(",")[0].strip()  # a list names nested levels
    fix = f"`export {name}=$(({cores} / R))` for R ranks on this node."
    if not setting:
        why = "torchrun with several ranks a node sets it to 1, and CPU work such as collation and CPU layers is slow."
        return Finding(name, "unknown", f"unset, with {cores} cores", why, fix)
    good = first.isdecimal() and 0 < int(first) <= cores
    why = "More threads than cores wait for each other." if first.isdecimal() else "It is not a number, and is ignored."
    return _found(name, good, f"{setting}, with {cores} cores", why, fix)


# --- Slurm ---------------------------------------------------------------------------------------------------------


def slurm_requeue(config: Told, job: Told) -> Finding:
    """Whether Slurm starts the job again after a preemption or the loss of a node."""
    key, value = ("Requeue", job["Requeue"]) if "Requeue" in job else ("JobRequeue", config.get("JobRequeue", "1"))
    why = "After a preemption or the loss of a node the job is not started again."
    fix = "Submit with `#SBATCH --requeue`, and `--open-mode=append` to keep the output."
    if "JobId" in job:
        fix += f" This job: `scontrol update JobId={job['JobId']} Requeue=1`."
    return _found("Slurm requeue", value != "0", f"{key}={value}", why, fix)


def slurm_requeue_wait(config: Told) -> Finding:
    """How long a requeued job is held back: as long as its old credential could be valid."""
    told = re.search(r"\bcred_expire=(\d+)", config.get("AuthInfo", ""))
    expire_s = int(told[1]) if told else 120
    what = f"{expire_s + 1} s, from cred_expire={expire_s}" + ("" if told else ", the default")
    fix = f"{_ASK} AuthInfo=cred_expire=5 (about 6 s), or restart in place, inside the allocation: `headway run`."
    why = "A requeued job cannot start before, even on free nodes."
    return _found("Slurm requeue wait", expire_s <= REQUEUE_WAIT_S, what, why, fix)


def slurm_preemption(config: Told, partition: Told) -> Finding:
    """What becomes of a job whose nodes another one takes, and how long it has to save."""
    name, mode, place = "Slurm preemption", partition.get("PreemptMode", "OFF"), partition.get("PartitionName", "")
    if not _is_preempted(config, partition):
        return Finding(name, "good", f"none in partition {place}")
    grace = partition.get("GraceTime", "0")
    what = f"partition {place}: PreemptMode={mode}, GraceTime={grace}"
    if "qos" in config["PreemptType"] or mode not in ("CANCEL", "REQUEUE"):
        why = "A QOS may say otherwise, and a suspended job is not told at all."
        fix = "See `sacctmgr show qos format=name,preemptmode,gracetime`: REQUEUE, and more than a minute, are good."
        return Finding(name, "unknown", what, why, fix)
    if mode == "CANCEL":
        fix = f"{_ASK} PreemptMode=REQUEUE, or submit the job again yourself when it was preempted."
        return Finding(name, "hurts", what, "A preempted job is killed, and never started again.", fix)
    why = f"A save of {SAVE_S} s does not end in time, and the steps since the last one are lost."
    fix = f"{_ASK} GraceTime={2 * SAVE_S} in this partition; until then, save often."
    return _found(name, grace.isdecimal() and int(grace) >= SAVE_S, what, why, fix)


def slurm_warning(config: Told, job: Told, partition: Told, signal: str) -> Finding:
    """Whether the batch script, or what it became by `exec`, is told before its end. `signal`: that of --signal.

    Measured with Slurm 22.05: only `B:` reaches the batch process itself; without it, srun's steps are told alone. At a
    preemption either comes only with preempt_send_user_signal. Without, the first that a batch process hears is the
    SIGTERM at the end, KillWait before SIGKILL.
    """
    name, preempted = "Slurm early signal", _is_preempted(config, partition)
    if not preempted and job.get("TimeLimit") == "UNLIMITED":
        return Finding(name, "good", "none needed: no preemption, no time limit")
    wait = config.get("KillWait", "30 sec").replace("sec", "s")
    why = f"A batch script, or what it became by `exec`, hears only the SIGTERM at the end, {wait} before SIGKILL."
    fix = (
        f"`#SBATCH --signal=B:USR1@{2 * SAVE_S}` (without `B:` where srun starts the training); when saved, "
        f"`scontrol requeue $SLURM_JOB_ID`: a job that just exits counts as completed."
    )
    if not signal:
        what = "no --signal in the script; if sbatch was given one on its command line, Slurm does not tell"
        return Finding(name, "unknown", what, why, fix)
    if preempted and "preempt_send_user_signal" not in config.get("SlurmctldParameters", ""):
        fix = f"{_ASK} SlurmctldParameters=preempt_send_user_signal, or start the training with srun, which is told."
        return Finding(name, "hurts", f"--signal={signal}, before the time limit, not at a preemption", why, fix)
    if not signal.startswith("B:"):
        return Finding(name, "unknown", f"--signal={signal} reaches what srun starts, not the batch process", why, fix)
    return Finding(name, "good", f"--signal={signal}")


def _is_preempted(config: Told, partition: Told) -> bool:
    kind = config.get("PreemptType", "preempt/none")
    return "qos" in kind or (kind != "preempt/none" and partition.get("PreemptMode", "OFF") != "OFF")


# --- the machine ---------------------------------------------------------------------------------------------------


def shared_memory(kind: str, free_bytes: int, ram_bytes: int, in_pod: bool) -> Finding:
    """Whether data workers can hand over their batches. `kind`: the file system mounted at /dev/shm; empty if none."""
    what = f"{kind or 'no file system of its own'}, {_size(free_bytes)} free"
    why = "Data workers hand batches over through /dev/shm, and die of a bus error when it is full."
    if kind != "tmpfs":
        why = "Data workers hand batches over through /dev/shm: what is not memory makes each batch wait for a disk."
    pod = "mount an emptyDir with `medium: Memory` at /dev/shm (Kubernetes gives 64 MiB without)"
    machine = "`mount -o remount,size=50% /dev/shm`; in a container, `docker run --shm-size=16g` or `--ipc=host`"
    enough = kind == "tmpfs" and free_bytes >= max(GIB, ram_bytes // 10)
    return _found("/dev/shm", enough, what, why, f"Make it larger: {pod if in_pod else machine}.")


def open_files(soft: int, hard: int) -> Finding:
    """Whether data workers and shards run out of file descriptors."""
    why = "Each tensor that a data worker hands over, each shard and each connection holds one: `Too many open files`."
    above = f"`LimitNOFILE={OPEN_FILES}` in the systemd unit (of slurmd too), or `nofile` in limits.conf."
    below = f"`ulimit -n {OPEN_FILES}` in the job's script; Slurm hands on the limit of the shell that submits."
    fix = below if _fits(hard, OPEN_FILES) else above
    return _found("open files", _fits(soft, OPEN_FILES), _limit(soft, hard), why, fix)


def processes(soft: int, hard: int) -> Finding:
    """Whether ranks, data workers and their threads are too many for this user."""
    why = "Every thread of every data worker of all your jobs here counts: `Resource temporarily unavailable`."
    fix = f"`ulimit -u {PROCESSES}` in the job's script, or `LimitNPROC=` in the systemd unit where that is refused."
    return _found("processes", _fits(soft, PROCESSES), _limit(soft, hard), why, fix)


def locked_memory(soft: int, hard: int) -> Finding:
    """Whether an InfiniBand card can pin the memory that it reads."""
    why = "InfiniBand pins its buffers: NCCL fails at its first connection, or falls back to TCP."
    fix = "`LimitMEMLOCK=infinity` in the systemd unit of slurmd or the container; then `ulimit -l unlimited`."
    return _found("locked memory", soft == resource.RLIM_INFINITY, _limit(soft, hard), why, fix)


def memory(limit_bytes: int, used_bytes: int, swapped_bytes: int) -> Finding:
    """Whether memory is short before the job begins. `limit_bytes`: of the cgroup; 0 if there is none. `used_bytes`:
    without what the kernel would drop."""
    limit = f"{_size(used_bytes)} of {_size(limit_bytes)} used" if limit_bytes else "no limit by a cgroup"
    full, swaps = 0 < 0.9 * limit_bytes < used_bytes, swapped_bytes > GIB
    why = "The kernel kills a process when the limit is reached." if full else "What was swapped out waits for a disk."
    fix = "Ask for more (`--mem`, the pod's memory limit)" if full else "`swapoff -a`"
    what = limit + (f", {_size(swapped_bytes)} swapped out" if swaps else "")
    return _found("memory", not full and not swaps, what, why, f"{fix}, or end what else runs here.")


def kernel_log(readable: bool) -> Finding:
    """Whether it can be told that the kernel killed a process, and why."""
    why = "A rank that the kernel kills for its memory, or a GPU's Xid error, cannot be told from any other SIGKILL."
    fix = "`sysctl kernel.dmesg_restrict=0`, or add CAP_SYSLOG; in a container, mount /dev/kmsg as well."
    return _found("kernel log", readable, "readable" if readable else "not readable", why, fix)


def stacks(py_spy: bool, ptrace_scope: int, may_trace: bool) -> Finding:
    """Whether a hanging rank can be asked where it hangs. `may_trace`: this process has CAP_SYS_PTRACE."""
    allowed = ptrace_scope == 0 or (may_trace and ptrace_scope < 3)
    what = f"py-spy {'is there' if py_spy else 'is missing'}" + ("" if allowed else f", ptrace_scope={ptrace_scope}")
    why = "Nobody can see where a hanging rank hangs without killing it."
    fix = "`pip install py-spy`. " if not py_spy else ""
    fix += "" if allowed else "`sysctl kernel.yama.ptrace_scope=0`, or add CAP_SYS_PTRACE to the container."
    return _found("stacks of hangs", py_spy and allowed, what, why, fix.strip())


def grace_period() -> Finding:
    """What a pod cannot see of itself."""
    why = "An evicted pod is killed 30 s after SIGTERM by default: a longer save is lost."
    fix = f"Set `terminationGracePeriodSeconds: {2 * SAVE_S}`, or twice your longest save."
    return Finding("pod's grace period", "unknown", "cannot be seen from inside", why, fix)


def _fits(limit: int, least: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= least


def _limit(soft: int, hard: int) -> str:
    said = ["unlimited" if value == resource.RLIM_INFINITY else str(value) for value in (soft, hard)]
    return said[0] if said[0] == said[1] else f"{said[0]}, can be raised to {said[1]}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes >> 20} MiB"


# --- reading -------------------------------------------------------------------------------------------------------


def surroundings(environ: Mapping[str, str], seen: Mapping[str, Any]) -> list[Finding]:
    """Everything found around a job that would start here. `seen`: what the Python in question says of itself
    (`instrument/checkup.py`)."""
    found = [*read_python(environ, seen), *read_slurm(environ), *read_machine(environ)]
    has_py_spy = shutil.which("py-spy") or Path(seen["bin"], "py-spy").exists()
    return [*found, stacks(bool(has_py_spy), _number("/proc/sys/kernel/yama/ptrace_scope"), _may_trace())]


def read_python(environ: Mapping[str, str], seen: Mapping[str, Any]) -> list[Finding]:
    """How torch will start, restart and compile."""
    folder, cxx = seen["folder"], environ.get("CXX", "g++")
    network = bool(folder) and is_network(Path(folder))
    found: list[Finding | None] = [torch_import(seen["import_s"], folder, network, seen["error"])]
    if not seen["error"]:
        found += [
            torch_restarts(seen["torch"], seen["shares_store"], environ.get(_SHARE, "")),
            bytecode(seen["writes_bytecode"], seen["has_bytecode"]),
            accelerators(any(Path("/dev").glob("nvidia[0-9]*")), seen["devices"], seen["has_triton"]),
            compiler(cxx, shutil.which(cxx) is not None, seen["header"], os.path.exists(seen["header"])),
            _compile_cache(environ),
        ]
    found.append(threads(environ.get("OMP_NUM_THREADS", ""), len(os.sched_getaffinity(0))))
    return [finding for finding in found if finding]


def _compile_cache(environ: Mapping[str, str]) -> Finding:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name: torch takes the number
        user = f"uid_{os.getuid()}"
    folder = environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{user}"
    path = Path(folder).absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    return compile_cache(folder, is_network(path), os.access(there, os.W_OK | os.X_OK))


def read_machine(environ: Mapping[str, str]) -> list[Finding]:
    """What the kernel, or the container, grants."""
    in_pod, meminfo = "KUBERNETES_SERVICE_HOST" in environ, _meminfo()
    limit, used = _cgroup_memory()
    ram, mounts = meminfo.get("MemTotal", 0), Path("/proc/self/mountinfo").read_text()
    kinds = re.findall(r"(?m)^(?:\S+ ){4}/dev/shm .*? - (\S+)", mounts)
    found = [grace_period()] if in_pod else []
    with suppress(OSError):
        shm = os.statvfs("/dev/shm")
        found.append(shared_memory("".join(kinds[-1:]), shm.f_bavail * shm.f_frsize, min(ram, limit or ram), in_pod))
    found.append(open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)))
    found.append(processes(*resource.getrlimit(resource.RLIMIT_NPROC)))
    if any(Path("/sys/class/infiniband").glob("*")):
        found.append(locked_memory(*resource.getrlimit(resource.RLIMIT_MEMLOCK)))
    swapped = meminfo.get("SwapTotal", 0) - meminfo.get("SwapFree", 0)
    return [*found, memory(limit, used, swapped), kernel_log(_can_read_kernel_log())]


def _meminfo() -> dict[str, int]:
    lines = re.findall(r"(?m)^(\w+):\s+(\d+) kB", _text("/proc/meminfo"))
    return {name: int(value) * 1024 for name, value in lines}


def _cgroup_memory() -> tuple[int, int]:
    """The limit that is nearest for this process, and what is used of it; (0, 0) if there is none."""
    found = []
    for root, key, names in (
        ("/sys/fs/cgroup", "0::", ("memory.max", "memory.current", "inactive_file")),
        ("/sys/fs/cgroup/memory", r"\d+:memory:", _VERSION_1),
    ):
        own = re.search(rf"(?m)^{key}/(.*)$", _text("/proc/self/cgroup"))
        place = Path(root, own[1] if own else "")
        for folder in (each for each in (place, *place.parents) if each.is_relative_to(root)):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if 0 < limit < 1 << 60:  # above: version 1's way to say that there is none
                dropped = re.search(rf"(?m)^{names[2]} (\d+)", _text(folder / "memory.stat"))
                found.append((limit, used - int(dropped[1] if dropped else 0)))
    return min(found, key=lambda pair: pair[0] - pair[1], default=(0, 0))


def _can_read_kernel_log() -> bool:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _may_trace() -> bool:
    has = re.search(r"(?m)^CapEff:\s*(\w+)", _text("/proc/self/status"))
    return has is not None and bool(int(has[1], 16) >> 19 & 1)


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _number(path: str | Path) -> int:
    """The number in a file of the kernel's; 0 if there is none."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else 0


def read_slurm(environ: Mapping[str, str]) -> list[Finding]:
    """What Slurm's own commands tell; nothing where there is no Slurm."""
    job_id = environ.get("SLURM_JOB_ID", "")
    config = dict(re.findall(r"(?m)^(\w+) *= (.*?) *$", _ask(environ, "show", "config")))
    if not config:
        fix = "See that `scontrol show config` answers here."
        unknown = Finding("Slurm", "unknown", "scontrol does not answer", "What it does to this job is not known.", fix)
        return [unknown] if job_id else []
    told = _ask(environ, "--oneliner", "show", "job", job_id) if job_id else ""
    job = slurm_fields(told)
    partitions = [slurm_fields(line) for line in _ask(environ, "--oneliner", "show", "partition").splitlines() if line]
    own = [each for each in partitions if each.get("PartitionName") == job.get("Partition")]
    default = [each for each in partitions if each.get("Default") == "YES"]
    partition = (own or default or [{}])[0]
    found = [slurm_requeue(config, job), slurm_requeue_wait(config), slurm_preemption(config, partition)]
    if job.get("BatchFlag") == "1" and "SLURM_STEP_ID" not in environ:
        script = _ask(environ, "write", "batch_script", job_id, "-")
        given = re.search(r"(?m)(?:^#SBATCH.*| SubmitLine=.*?)\s--signal[= ](\S+)", f"{told}\n{script}")
        found.append(slurm_warning(config, job, partition, given[1] if given else ""))
    return found


def _ask(environ: Mapping[str, str], *words: str) -> str:
    """What scontrol prints; empty if it is missing, fails, or does not answer in time."""
    done = scontrol(environ, TIMEOUT_S, *words)
    return done.stdout if done is not None and done.returncode == 0 else ""
