"""What can go wrong, whose fault it is, and what is done about it."""

from dataclasses import dataclass
from enum import StrEnum


class Klass(StrEnum):
    """Whose fault a failure is."""

    INFRA = "infra"
    LAUNCH = "launch"
    PREEMPTION = "preemption"
    SCHEDULER = "scheduler"
    RESOURCE = "resource"
    CHECKPOINT = "checkpoint"
    USER = "user"
    CASCADE = "cascade"
    UNKNOWN = "unknown"


class Action(StrEnum):
    """What is done after a failure."""

    RETRY_BACKOFF = "retry_backoff"
    RETRY_EXCLUDE_NODE = "retry_exclude_node"
    RETRY_ONCE = "retry_once_then_fail"
    RETRY_PREVIOUS_CHECKPOINT = "retry_previous_checkpoint"
    RETRY_WITHOUT_COMPILE = "retry_without_compile"
    LOOK_AT_OTHER_RANKS = "look_at_other_ranks_then_retry_backoff"
    USE_FLIGHT_RECORDER = "use_flight_recorder_then_retry_backoff"
    NEW_STORE = "new_store_then_retry_now"
    NEW_PORT = "new_port_then_retry_now"
    REQUEUE = "requeue_no_budget"
    FAIL_FAST = "fail_fast"


@dataclass(frozen=True)
class Category:
    """One kind of failure."""

    name: str
    klass: Klass
    action: Action
    meaning: str


UNKNOWN = Category("unknown", Klass.UNKNOWN, Action.RETRY_BACKOFF, "no rule knows this failure")
"""What a failure is that no rule matched. It may well be the machine's: it is retried, with a growing pause."""

_BY_FAULT: dict[tuple[Klass, Action], dict[str, str]] = {
    (Klass.INFRA, Action.RETRY_EXCLUDE_NODE): {
        "gpu_ecc_uncorrectable": "GPU memory has an error that ECC could not correct",
        "gpu_fell_off_bus": "the GPU no longer answers on the PCIe bus",
        "gpu_nvlink_error": "a link between GPUs failed",
        "gpu_gsp_timeout": "the GPU's own system processor no longer answers the driver",
        "gpu_driver_state": "driver and GPU are in a state in which nothing can start",
        "gpu_unavailable": "there is no GPU where one should be, or others hold it",
        "gpu_thermal_power": "the GPU is too hot, or lacks power",
        "silent_data_corruption": "the same computation gave different results",
        "net_ib_error": "InfiniBand or RoCE reported a broken link or transfer",
        "net_efa_error": "libfabric (EFA) reported a broken link or transfer",
        "node_failure": "the whole node went away",
    },
    (Klass.INFRA, Action.RETRY_BACKOFF): {
        "net_connect_failed": "a connection could not be made",
        "rendezvous_timeout": "not all ranks came together in time",
        "storage_io": "a file system failed",
        "remote_service_transient": "an object store or a web service did not serve, for now",
    },
    (Klass.INFRA, Action.REQUEUE): {"pod_evicted": "Kubernetes evicted the pod"},
    (Klass.CASCADE, Action.LOOK_AT_OTHER_RANKS): {
        "net_peer_lost": "another rank went away; the cause is there",
    },
    (Klass.UNKNOWN, Action.USE_FLIGHT_RECORDER): {
        "collective_timeout": "a collective operation did not end in time",
    },
    (Klass.USER, Action.FAIL_FAST): {
        "collective_desync": "ranks called different collectives, or hold different models",
        "cuda_device_assert": "an assertion in a GPU kernel failed, mostly an index out of range",
        "checkpoint_mismatch": "the checkpoint is of another model or layout",
        "ddp_unused_parameters": "parameters took no part in the loss, which DDP was not told",
        "duplicate_gpu": "two ranks use the same GPU",
        "import_error": "a module or library cannot be loaded",
        "python_error": "the program raised an exception",
    },
    (Klass.LAUNCH, Action.NEW_STORE): {
        "stale_store": "the store still holds what an earlier attempt left",
    },
    (Klass.LAUNCH, Action.NEW_PORT): {"port_in_use": "another process listens on the port"},
    (Klass.PREEMPTION, Action.REQUEUE): {
        "preempted": "the job had to make room",
        "sigterm": "somebody asked the process to end (SIGTERM)",
    },
    (Klass.SCHEDULER, Action.REQUEUE): {"time_limit": "the job reached its time limit"},
    (Klass.SCHEDULER, Action.FAIL_FAST): {"cancelled": "a person cancelled the job"},
    (Klass.RESOURCE, Action.RETRY_ONCE): {
        "host_oom": "the host, or the job's cgroup, ran out of memory",
        "sigbus": "mapped memory had nothing behind it (SIGBUS)",
    },
    (Klass.RESOURCE, Action.FAIL_FAST): {
        "shm_exhausted": "/dev/shm is full",
        "disk_full": "a disk is full",
        "quota_exceeded": "a disk quota is used up",
        "fd_limit": "too many open files",
    },
    (Klass.UNKNOWN, Action.RETRY_BACKOFF): {
        "sigkill_unexplained": "something killed the process (SIGKILL) and did not say why",
    },
    (Klass.UNKNOWN, Action.RETRY_ONCE): {
        "cuda_illegal_access": "a GPU kernel faulted",
        "segfault": "the process crashed (SIGSEGV)",
        "sigabrt": "the process aborted itself (SIGABRT)",
    },
    (Klass.USER, Action.RETRY_ONCE): {"cuda_oom": "GPU memory is used up"},
    (Klass.USER, Action.RETRY_PREVIOUS_CHECKPOINT): {
        "numeric_divergence": "the loss or a gradient became NaN or infinite",
    },
    (Klass.CHECKPOINT, Action.RETRY_PREVIOUS_CHECKPOINT): {
        "checkpoint_corrupt": "a checkpoint cannot be read",
    },
    (Klass.USER, Action.RETRY_WITHOUT_COMPILE): {
        "compile_error": "torch.compile, Triton or a C++/CUDA build failed",
    },
}

CATEGORIES: dict[str, Category] = {
    name: Category(name, klass, action, meaning)
    for (klass, action), meanings in _BY_FAULT.items()
    for name, meaning in meanings.items()
}
"""Every category a rule may name. `unknown` is none of them: no rule can conclude it."""
