"""Every category is recognised in logs of several systems."""

from pathlib import Path

import pytest

from headway.recover import CATEGORIES, UNKNOWN, Classifier
from headway.recover.known import RULES

explain = Classifier().explain

LOGS = {
    "gpu_ecc_uncorrectable": [
        "kernel: NVRM: Xid (PCI:0000:4e:00): 95, pid=8123, name=python, Uncontained memory error",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "[ 901.123456] amdgpu 0000:c1:00.0: 3 uncorrectable hardware errors detected in umc block",
        "amdgpu 0000:83:00.0: amdgpu: uncorrectable hardware error in block sdma",
    ],
    "gpu_fell_off_bus": [
        "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.",
        "Unable to determine the device handle for GPU0000:5D:00.0: Unknown Error",
        "pcieport 0000:40:01.1: AER: Uncorrected (Fatal) error received from 0000:41:00.0",
    ],
    "gpu_nvlink_error": [
        "NVRM: Xid (PCI:0000:86:00): 74, pid=77, name=python, NVLink: fatal error detected on link 4",
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Fatal, egress non-posted PRIV error",
        "nvidia-smi: Unable to retrieve NVLink information as all links are inActive",
    ],
    "gpu_gsp_timeout": [
        "NVRM: Xid (PCI:0000:9d:00): 119, pid=4, name=kworker, Timeout after 6s of waiting for RPC response "
        "from GPU3 GSP!",
        "NVRM: GPU5 GSP RM heartbeat timed out",
        "NVRM: _kgspIsHeartbeatTimedOut: diff 5400",
    ],
    "gpu_driver_state": [
        "Failed to initialize NVML: Driver/library version mismatch",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "nvmlDeviceGetMemoryInfo() failed with error #15",
        "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x62)",
    ],
    "gpu_unavailable": [
        "RuntimeError: No CUDA GPUs are available",
        "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "RuntimeError: CUDA error: invalid device ordinal",
        "[error] cuda:3 cannot be used, there are 0 visible CUDA devices",
        "CUDA_ERROR_DEVICE_UNAVAILABLE in cuCtxCreate",
    ],
    "gpu_thermal_power": [
        "NVRM: Xid (PCI:0000:3b:00): 54, Auxiliary power is not connected to the GPU board",
        "        HW Thermal Slowdown                   : Active",
        "health monitor: GPU 6 temperature 96C exceeds the limit, job stopped",
        "health: GPU 3 has thermal violations totaling 12 s",
        "node condition: DCGM_FR_CLOCK_THROTTLE_THERMAL on GPU 1",
    ],
    "silent_data_corruption": [
        "RuntimeError: silent data corruption suspected: step 812 gave another loss when replayed on rank 17",
        "AssertionError: parameter hash mismatch between data-parallel replicas: rank 3 differs",
    ],
    "net_ib_error": [
        "n7:41:97 [2] transport/net_ib.cc:812 NCCL WARN NET/IB : Got completion from peer 10.1.1.9<4411> with "
        "status=5 opcode=129",
        "n7:41:97 [2] misc/ibvwrap.cc:170 NCCL WARN Call to ibv_modify_qp failed with error No such device",
        "kernel: mlx5_core 0000:a3:00.0: health compromised - reached fatal assert",
    ],
    "net_efa_error": [
        "ip-10-0-0-7:99:120 [3] nccl_ofi_rdma.c:553 NCCL WARN NET/OFI Request 0x7f completed with error. RC: 107",
        "libfabric:99:171::efa:cq:efa_rdm_rxe_handle_error():201<warn> err: 107, message: peer gone",
        "cq error, err: Input/output error (5) prov_errno: Unknown error -15 (-15)",
    ],
    "node_failure": [
        "slurmstepd: error: *** STEP 81.0 ON n[1-8] CANCELLED AT 2026-02-03T04:05:06 DUE TO NODE FAILURE, SEE "
        "SLURMCTLD LOG ***",
        "Warning  NodeNotReady  2m  node-controller  Node is not ready",
        "The node with node id: 8ac and address: 10.2.0.5 has been marked dead because the detector has missed "
        "too many heartbeats",
        "This node manager was missing too many heartbeats, exiting",
        "node n12 is unresponsive, its jobs are requeued",
    ],
    "net_connect_failed": [
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error",
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        "socket.h:91 NCCL WARN Socket creation failed : Address family not supported by protocol",
    ],
    "rendezvous_timeout": [
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.",
        "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
        "RuntimeError: [2] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
        "key-value store by key '0', "
        "but store->get('0') got error: Socket Timeout",
    ],
    "storage_io": [
        "OSError: [Errno 116] Stale file handle: '/shared/run/metrics.json'",
        "LustreError: 11-0: scratch-OST0007: operation ost_read failed with -107",
        "OSError: [Errno 30] Read-only file system: '/data/ckpt'",
        "  Warning  FailedMount  9s (x3 over 4m)  kubelet  Unable to attach or mount volumes: timed out waiting",
        "df: /mnt/data: Transport endpoint is not conn",
    ],
    "remote_service_transient": [
        "botocore.exceptions.ClientError: An error occurred (503) when calling the PutObject operation: Please "
        "reduce your request rate",
        "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='hub.example', port=443): Read timed out. "
        "(read timeout=10)",
        "gcsfs.retry.HttpError: Service Unavailable, 503",
        'uploader: Read timeout on endpoint URL: "https://bucket.example"',
    ],
    "pod_evicted": [
        "Status: Failed\nReason: Evicted\nMessage: The node was low on resource: memory.",
        "Pod ephemeral local storage usage exceeds the total limit of containers 20Gi.",
        "Unable to find pod train-0 - The pod may be evicted by a node shutdown event",
    ],
    "net_peer_lost": [
        "RuntimeError: [gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.3]:2211",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "proxy.cc:7 NCCL WARN Socket recv failed while polling for opId=0x7f",
        "UNAVAILABLE: Task /job:w/task:3 heartbeat timeout. This indicates "
        "that the remote task has failed, got preempted, or crashed",
    ],
    "collective_timeout": [
        "[rank5]:[E1 ProcessGroupNCCL.cpp:607] [Rank 5] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=9, OpType=BROADCAST)",
        "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation to complete",
        "[PG 3 Rank 1] First PG on this rank that detected no heartbeat of its watchdog.",
    ],
    "collective_desync": [
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: BARRIER, "
        "but Rank 1 is running ALLREDUCE",
        "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 12 params, while rank 1 has "
        "inconsistent 10 params.",
        "net_socket.cc:9 NCCL WARN NET/Socket : message truncated : receiving 4096 bytes instead of 16",
        "Rank 5 has different values for lr: 0.1. Other ranks: 0.2",
    ],
    "cuda_device_assert": [
        "RuntimeError: CUDA error: device-side assert triggered",
        "Indexing.cu:1289: indexSelectLargeIndex: block: [4,0,0], thread: [31,0,0] Assertion `srcIndex < "
        "srcSelectDimSize` failed.",
    ],
    "checkpoint_mismatch": [
        "RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: \"head.bias\".",
        "ValueError: loaded state dict has a different number of parameter groups",
        "RuntimeError: Expected 3 entries in state dict, but got 5.",
        "AssertionError: req MetadataIndex(fqn='w', index=0) mismatch sizes torch.Size([4]) vs torch.Size([4, 8])",
    ],
    "ddp_unused_parameters": [
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
        "RuntimeError: Expected to mark a variable ready only once.",
        "Parameter at index 7 with name head.bias has been marked as ready twice.",
    ],
    "duplicate_gpu": [
        "init.cc:1001 NCCL WARN Duplicate GPU detected : rank 5 and rank 1 both on CUDA device 2b000",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    ],
    "import_error": [
        "ModuleNotFoundError: No module named 'apex'",
        "ImportError: ext.so: undefined symbol: _ZN2at4_ops5zeros4callE",
        "OSError: libnccl.so.2: cannot open shared object file: No such file or directory",
    ],
    "python_error": [
        "Traceback (most recent call last):\n  File \"train.py\", line 4, in <module>\n    run()\nKeyError: 'lr'",
        "[rank2]: ValueError: hidden size 100 is not divisible by 16 heads",
        "train.py: error: unrecognized arguments: --foo",
        "botocore.exceptions.ClientError: An error occurred (403) when calling the HeadObject operation: Forbidden",
        "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin'",
        "Runtime Error: stack expects each tensor to be equal size",
        '{"level": "error", "msg": "TypeError: step() got an unexpected keyword argument"}',
    ],
    "stale_store": [
        "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
        "RuntimeError: the store still holds keys of a previous run: stale rendezvous key default_pg/0",
    ],
    "port_in_use": [
        "OSError: [Errno 98] Address already in use",
        "torch.distributed.DistNetworkError: The server socket has failed to bind to [::]:29500 (errno: 98 - "
        "Address already in use).",
    ],
    "preempted": [
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***",
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***",
        "Warning  Preempted  5s  default-scheduler  Preempted by a pod on node n4",
        "agent: EC2 spot interruption notice received, two minutes left",
        "# (bert pid=92) I 05-04 00:52:46 controller.py:100] The cluster is preempted.",
    ],
    "sigterm": [
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 71 got signal: 15",
        "command terminated with exit code 143",
    ],
    "time_limit": [
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
        "Warning  DeadlineExceeded  1s  job-controller  Job was active longer than specified deadline",
        "=>> PBS: job killed: walltime 3610 exceeded limit 3600",
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LI",
    ],
    "cancelled": [
        "State: CANCELLED by 1017",
        "Traceback (most recent call last):\n  File \"t.py\", line 1, in <module>\n    step()\nKeyboardInterrupt",
        "Run 12 was stopped: cancelled by user",
        "Detected KeyboardInterrupt, stopping after this batch",
    ],
    "host_oom": [
        "Memory cgroup out of memory: Killed process 4411 (python) total-vm:9kB",
        "slurmstepd: error: Detected 2 oom_kill events in StepId=7.0. Some of the step tasks have been OOM Killed.",
        "RuntimeError: DataLoader worker (pid 51) is killed by signal: Killed.",
        "    Last State: Terminated\n      Reason: OOMKilled\n      Exit Code: 137",
        "(raylet) ray.memory_monitor.RayOutOfMemoryError: 96% of the memory on the node is used",
    ],
    "sigbus": ["Fatal Python error: Bus error", "  exitcode  : -7 (pid: 4)"],
    "shm_exhausted": [
        "RuntimeError: DataLoader worker (pid 51) is killed by signal: Bus error.",
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-a1b2 (size 9637888)",
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_71_9>: No space left on device (28)",
    ],
    "disk_full": [
        "OSError: [Errno 28] No space left on device: '/ckpt/step_100/model.pt'",
        "RuntimeError: PytorchStreamWriter failed writing file data/17: file write failed",
    ],
    "quota_exceeded": [
        "OSError: [Errno 122] Disk quota exceeded: '/home/u/run'",
        "tar: model.pt: Cannot write: Disk quota exceeded",
    ],
    "fd_limit": ["OSError: [Errno 24] Too many open files", "RuntimeError: received 0 items of ancdata"],
    "sigkill_unexplained": [
        "  exitcode  : -9 (pid: 8)\n  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID 8",
        "run.sh: line 3:  4711 Killed                  python train.py",
        "srun: error: n3: task 2: Killed",
        '"state": {"terminated": {"exitCode": 137}}',
        "learner_exit_code: 137",
    ],
    "cuda_illegal_access": [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "Memory access fault by GPU node-2 (Agent handle: 0x55) on address 0x7f. Reason: Page not present.",
        "NVRM: Xid (PCI:0000:1b:00): 31, pid=9, name=python, MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0",
    ],
    "segfault": [
        "Segmentation fault (core dumped)",
        "Caught signal 11 (Segmentation fault: address not mapped to object at address 0x8)",
    ],
    "sigabrt": ["double free or corruption (out)", "  exitcode  : -6 (pid: 21)"],
    "cuda_oom": [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12884901888 bytes.",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "INTERNAL: ran out of memory while trying to allocate 8589934592 bytes",
    ],
    "numeric_divergence": [
        "FloatingPointError: loss became NaN at step 71",
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        "Loss is inf, stopping training",
        "AssertionError: bad boxes tensor([[nan, nan, 0.1, nan]])",
    ],
    "checkpoint_corrupt": [
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "_pickle.UnpicklingError: pickle data was truncated",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
    ],
    "compile_error": [
        "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\nAssertionError: no kernel",
        "triton.compiler.errors.CompilationError: at 12:4:",
        "RuntimeError: Error building extension 'fused_kernels'",
        "RuntimeError: Internal Triton PTX codegen error",
    ],
}  # fmt: skip


def test_every_category_has_two_logs_and_a_rule() -> None:
    assert set(LOGS) == set(CATEGORIES) == {rule.category.name for rule in RULES}
    assert len(CATEGORIES) == 45
    assert all(len(logs) > 1 for logs in LOGS.values())


@pytest.mark.parametrize(("category", "log"), [(name, log) for name, logs in LOGS.items() for log in logs])
def test_a_log_of_a_category_is_recognised_as_such(category: str, log: str) -> None:
    verdict = explain(log)
    assert (verdict.category, verdict.action) == (category, CATEGORIES[category].action), verdict
    assert verdict.line in log
    assert verdict.rule.startswith(category)


def test_no_rule_misses_a_line_for_want_of_its_words() -> None:
    for logs in LOGS.values():
        for line in "\n".join(logs).split("\n"):
            matching = [message for rule in RULES for message in rule.messages if message.regex.search(line)]
            assert all(any(word in line.lower() for word in message.words) for message in matching)


def test_rule_names_are_unique_and_every_rule_has_words_to_look_for() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert [rule.name for rule in RULES for message in rule.messages if not message.words] == []


def test_the_documented_table_is_the_one_that_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
    rows = [line for line in text.split("\n") if line.startswith("| `")]
    kinds = [*CATEGORIES.values(), UNKNOWN]
    assert rows == [f"| `{kind.name}` | {kind.meaning} | {kind.klass} | `{kind.action}` |" for kind in kinds]
