"""The strongest evidence decides; echoes, warnings and a program's own text do not."""

import json
from json import dumps

import pytest

from headway.recover import Classifier, Evidence, Verdict, classify

explain, root_of = Classifier().explain, Classifier().root_of

USER_TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 12, in <module>
    loss = model(batch["x"])
KeyError: 'x'
"""
PEER_LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.3]:2211\n"
WATCHDOG = (
    "[rank0]:[E1 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)\n"
)
STEP_CANCELLED = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n"
SUMMARY = "  exitcode  : -6 (pid: 21)\n  error_file: <N/A>\n  traceback : Signal 6 (SIGABRT) received by PID 21\n"
NO_SPACE = "OSError: [Errno 28] No space left on device"
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"


@pytest.mark.parametrize(
    ("log", "category"),
    [
        (WATCHDOG + ECC + SUMMARY, "gpu_ecc_uncorrectable"),
        (WATCHDOG + SUMMARY, "collective_timeout"),
        (USER_TRACEBACK + PEER_LOST + SUMMARY, "python_error"),
        (USER_TRACEBACK + STEP_CANCELLED, "python_error"),
        (
            "Received SIGTERM: 15\nslurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO "
            "TIME LIMIT ***\n"
            + SUMMARY,
            "time_limit",
        ),
        ("terminate called after throwing 'c10::Error'\n  what():  CUDA error: out of memory\n", "cuda_oom"),
        ("Killed\nslurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\n", "host_oom"),
        ("ncclSystemError: call failed.\nLast error:\nConnection closed by remote peer n1<2>\n", "net_peer_lost"),
        (
            "DistBackendError: NCCL error in: x.cpp:5, unhandled system error\nNCCL WARN Call to ibv_reg_mr "
            "failed with error Bad address\n",
            "net_ib_error",
        ),
    ],
)  # fmt: skip
def test_the_strongest_line_decides_wherever_it_stands(log: str, category: str) -> None:
    assert explain(log).category == category


def test_an_exception_after_its_own_rank_was_cut_off_is_an_echo_and_one_of_another_rank_is_not() -> None:
    cut_off = "[rank0]: RuntimeError: NCCL communicator was aborted on rank 0.\n"
    assert explain(cut_off + "[rank0]: ValueError: epoch failed\n").category == "net_peer_lost"
    assert explain(cut_off + "[rank3]: ValueError: bad label\n").category == "python_error"


def test_a_chained_traceback_is_decided_by_its_root() -> None:
    chain = USER_TRACEBACK + "\nDuring handling of the above exception, another exception occurred:\n\n"
    chain += 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nRuntimeError: worker failed\n'
    assert explain(chain).line == "KeyError: 'x'"
    network = "Traceback (most recent call last):\nConnectionResetError: [Errno 104] Connection reset by peer\n\n"
    network += "During handling of the above exception, another exception occurred:\n\n"
    network += "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104))\n"
    assert explain(network).category == "remote_service_transient"


@pytest.mark.parametrize(
    "wrapper",
    [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \ntrain.py FAILED",
        "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.",
        "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 0 terminated with the following error:",
    ],
)
def test_a_wrapper_that_only_passes_on_a_failure_is_none(wrapper: str) -> None:
    assert explain(wrapper).category == "unknown"


HEALTHY = [
    "W1116 05:24:30.123000 71 torch/distributed/run.py:792] Setting OMP_NUM_THREADS environment variable for "
    "each process to be 1",
    "n1:71:71 [0] NCCL INFO NET/IB : No device found.",
    "n1:71:71 [0] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin_v8 symbol.",
    "n1:71:71 [0] NCCL WARN NET/OFI No eligible providers were found",
    "FutureWarning: `timeout` is deprecated; a connection that timed out will raise ConnectionError",
    "/venv/lib/torch/nn/parallel/distributed.py:9: UserWarning: find_unused_parameters=True was specified in "
    "DDP constructor, "
    "but did not find any unused parameters in the forward pass.",
    "[W socket.cpp:663] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 99 - "
    "Cannot assign requested address).",
    "WARNING: HTTP 503 from the store, retrying in 2 s",
    "headway: the hook on torch.x is switched off (TypeError: f() missing 3 arguments). The job goes on.",
    "Killed 4 zombies in the simulation",
    "  --on-full TEXT   What to do when there is no space left on device. [default: fail]",
    "the cat was killed by a dog, said the sample; signal to noise 9.5",
    "step 500 loss 2.31 grad_norm 0.7 lr 3.0e-4 time/step 0.41 mem 61.2 GiB",
    "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
    "    HW Thermal Slowdown                   : Not Active",
    "    SRAM Uncorrectable                : 0",
    "INFO preemption handler installed, SIGTERM will save a checkpoint",
    "INFO: registered SIGTERM handler",
    "checkpoint saved to s3://b/step-500 in 3.2 s (retries: 0, errors: 0)",
    "Loading checkpoint shards: 100%|##########| 4/4 [00:03<00:00]",
    "0 oom events, 0 errors, 0 failed steps",
    "dataset: 503 files, 429 shards, 504 workers",
    "validation: nan-safe mean 0.93",
    "the job will be requeued if it is preempted",
    "Signal handler for SIGUSR1 and SIGTERM installed",
    "Rank 0: Completed store-based barrier for key:store_based_barrier_key:1 with 8 nodes.",
    "_IncompatibleKeys(missing_keys=[], unexpected_keys=['head.weight'])",
    "No GPU/TPU found, falling back to CPU.",
    "wandb: Network error (ConnectionError), entering retry loop.",
    "data_loss: 0.13 reg_loss: 0.4, slowdown 1.02, evaluation error: 0.25",
    "previous run stored at /data/runs/7, 3 tasks cancelled, no checkpoint found",
    "ignoring corrupt checkpoint step_100, using step_90",
    "timeout=1800 s, backend=nccl, init_method=env://",
    "epoch 3 finished, best loss so far 1.98",
    "W allocator ran out of memory trying to allocate 2.1GiB. The caller indicates that this is not a failure",
    "select_algorithm.py:88] No valid triton configs. OutOfResources: out of resource: shared memory",
    "wandb: Network error resolved after 0:00:41, resuming normal operation.",
    "[9, W 14 20] Last heartbeat was 7000 ms ago. If it keeps lagging, this node can be marked as dead by mistake.",
    "kernel: nvidia 0000:07:00.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer",
    "ProcessGroupNCCL initialization options: NCCL_ASYNC_ERROR_HANDLING: 1, NCCL_BLOCKING_WAIT: 0",
    "NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: 4.0",
]
STEPS = [f"step {number} loss {2.0 / number:.3f}" for number in range(501, 540)]


@pytest.mark.parametrize("line", HEALTHY)
def test_a_harmless_line_of_a_healthy_log_is_no_failure(line: str) -> None:
    assert explain("\n".join([line, *STEPS])).category == "unknown"


def test_what_headway_says_itself_is_no_evidence_even_at_the_end() -> None:
    said = "headway: the hook on torch.x is switched off (TypeError: f() missing 3 arguments). The job goes on."
    assert explain("\n".join([*STEPS, said])).category == "unknown"


LOGGED = f"2026-01-01 00:00:00 ERROR train: save failed: {NO_SPACE}"
RAISED = f'Traceback (most recent call last):\n  File "train.py", line 3, in save\n    write()\n{NO_SPACE}'


@pytest.mark.parametrize(
    "said", [LOGGED, RAISED, f"headway: a checkpoint was not saved ({NO_SPACE}). Training goes on."]
)
def test_what_was_said_long_before_the_end_is_no_reason(said: str) -> None:
    assert explain("\n".join([*STEPS[:5], said, *STEPS[5:], "Killed"])).category == "sigkill_unexplained"
    evidence = Evidence(rank=0, exit_code=1, stderr=f"{said}\nbye\n", stderr_steps=[[1, 60]], steps=300)
    assert classify(evidence).category == "unknown"


@pytest.mark.parametrize("said", [LOGGED, RAISED])
def test_what_was_said_last_is_a_reason(said: str) -> None:
    assert explain("\n".join([*STEPS, said, "rank 0 ends"])).category == "disk_full"
    evidence = Evidence(rank=0, exit_code=1, stderr=f"hello\n{said}\n", stderr_steps=[[5, 60]], steps=300)
    assert classify(evidence).category == "disk_full"


def test_an_exception_is_the_reason_however_much_is_printed_after_it() -> None:
    assert explain("\n".join([*STEPS, RAISED, *["cleaning up"] * 50])).category == "disk_full"
    assert explain("\n".join([*STEPS, LOGGED, *["cleaning up"] * 50])).category == "unknown"


def test_who_was_killed_did_not_end_for_want_of_room() -> None:
    assert classify(Evidence(rank=0, exit_code=-9, stderr=RAISED)).category == "sigkill_unexplained"
    assert classify(Evidence(rank=0, exit_code=-6, stderr=RAISED)).category == "disk_full"


def test_a_notice_counts_although_training_went_on_for_a_while() -> None:
    notice = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***"
    assert explain("\n".join([*STEPS[:5], notice, *STEPS[5:]])).category == "preempted"


def test_advice_for_the_case_of_an_error_is_no_error() -> None:
    advice = "If you see NaN losses, lower the learning rate.\n"
    assert explain(f"{advice}SyntaxError: invalid syntax\n").category == "python_error"


def test_a_warning_counts_if_the_log_ends_with_it() -> None:
    assert explain("\n".join([*STEPS, HEALTHY[7]])).category == "remote_service_transient"


def test_code_in_a_traceback_is_not_evidence() -> None:
    log = 'Traceback (most recent call last):\n  File "a.py", line 3, in save\n'
    log += '    raise OSError("No space left on device")\n'
    assert explain(log + "TypeError: 'int' object is not callable\n").category == "python_error"


@pytest.mark.parametrize(
    "prefix",
    [
        "[rank3]: ", "[1,2]<stderr>:", "[default0]:", "(TrainWorker pid=412, ip=10.0.0.7) ", "3: ", "gpu004: ",
        "2026-11-16T05:24:30.123456Z stderr F ", "Nov 16 05:24:30 n1 train[412]: ", "[2026-11-16 05:24:30,123] ",
        "\x1b[31m", "step 9:  40%|####      | 4/10\r", "ERROR: ", "worker-3: ", "E0312 08:11:02.12 140 launch.py:55] ",
        "2026-03-12 08:11:02.123 | ERROR    | __main__:main:88 - ", "[Rank 3] ", "stderr: ", "> ", "│ ", "`",
        '{"log": "', "  Warning  Failed  3m2s (x4 over 9m)  kubelet  Error: ",
    ],
)  # fmt: skip
def test_launchers_and_log_shippers_prefixes_do_not_hide_an_exception(prefix: str) -> None:
    verdict = explain(f"{prefix}ValueError: bad shape\x1b[0m\n")
    assert verdict.category == "python_error"
    assert "\x1b" not in verdict.line


def test_a_traceback_that_a_json_log_holds_in_one_line_is_read_as_its_lines() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in save',
        '    raise OSError("No space left on device")',
    ]
    told = explain(json.dumps({"level": "error", "msg": "\n".join([*lines, "IndexError: list index out of range"])}))
    assert told.category == "python_error"


def test_a_verdict_names_rule_line_and_number() -> None:
    verdict = explain("starting\n\nOSError: [Errno 24] Too many open files\nbye\n")
    assert (verdict.rule, verdict.line, verdict.line_number, verdict.source) == (
        "fd_limit.open", "OSError: [Errno 24] Too many open files", 3, "log",
    )  # fmt: skip


# --- evidence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "category", "source"),
    [
        (Evidence(rank=0, exit_code=-9), "sigkill_unexplained", "exit_code"),
        (Evidence(rank=0, exit_code=137), "sigkill_unexplained", "exit_code"),
        (Evidence(rank=0, exit_code=-9, oom_kills=1), "host_oom", "oom_kills"),
        (Evidence(rank=0, exit_code=-11), "segfault", "exit_code"),
        (Evidence(rank=0, exit_code=1), "unknown", ""),
        (Evidence(rank=0, exit_code=1, exception=USER_TRACEBACK), "python_error", "exception"),
        (Evidence(rank=0, exit_code=-15, scheduler="PREEMPTED"), "preempted", "scheduler"),
        (Evidence(rank=0, exit_code=-15, scheduler="TIMEOUT"), "time_limit", "scheduler"),
        (Evidence(rank=0, exit_code=1, exception=ECC, stderr=WATCHDOG), "gpu_ecc_uncorrectable", "exception"),
        (Evidence(rank=0, exit_code=-6, stderr=WATCHDOG, kernel="NVRM: Xid (0): 79"), "gpu_fell_off_bus", "kernel"),
        (Evidence(rank=0, exit_code=-9, silent_s=900.0), "collective_timeout", "silent_s"),
        (
            Evidence(rank=0, exit_code=-9, silent_s=900.0, hang="Detected mismatch between collectives on ranks"),
            "collective_desync",
            "hang",
        ),
        (
            Evidence(rank=2, exit_code=-9, silent_s=900.0, hang="rank 2 is missing. rank 0 has left."),
            "collective_timeout",
            "silent_s",
        ),
        (
            Evidence(rank=0, error_file=dumps({"message": {"message": NO_SPACE, "extraInfo": {"py_callstack": ""}}})),
            "disk_full",
            "error_file",
        ),
    ],
)  # fmt: skip
def test_each_part_of_the_evidence_is_weighed(evidence: Evidence, category: str, source: str) -> None:
    verdict = classify(evidence)
    assert (verdict.category, verdict.source) == (category, source)


def test_a_word_that_is_a_reason_from_a_scheduler_is_none_in_a_log() -> None:
    assert explain("TIMEOUT").category == "unknown"


# --- several ranks ---------------------------------------------------------------------------------------------------


def root(*evidences: Evidence) -> tuple[int, str]:
    evidence, verdict = root_of(evidences)
    return evidence.rank, verdict.category


def test_an_echo_is_never_the_root_while_another_rank_has_one() -> None:
    echo = Evidence(rank=0, at_ns=1, exit_code=1, stderr=PEER_LOST)
    culprit = Evidence(rank=5, at_ns=9, exit_code=1, exception=USER_TRACEBACK)
    assert root(echo, culprit) == (5, "python_error")


def test_among_roots_the_earliest_is_the_root() -> None:
    first = Evidence(rank=2, at_ns=3, stderr="OSError: [Errno 28] No space left on device")
    second = Evidence(rank=1, at_ns=4, stderr=USER_TRACEBACK)
    assert root(second, first) == (2, "disk_full")


def test_among_echoes_the_earliest_is_the_root_and_signals_of_the_supervisor_come_later() -> None:
    stuck = Evidence(rank=1, at_ns=2, exit_code=-6, stderr=WATCHDOG)
    ended = [Evidence(rank=rank, at_ns=5, exit_code=-15) for rank in (0, 2, 3)]
    assert root(*ended, stuck) == (1, "collective_timeout")
    killed = Evidence(rank=3, at_ns=1, exit_code=-9)
    assert root(stuck, killed) == (3, "sigkill_unexplained")


def test_lost_peers_and_watchdogs_are_effects_and_an_analysed_hang_is_none() -> None:
    is_effect = Classifier().is_effect
    assert is_effect(Evidence(rank=0, exit_code=1, stderr=PEER_LOST))
    assert is_effect(Evidence(rank=0, exit_code=-6, stderr=WATCHDOG))
    assert not is_effect(Evidence(rank=0, exit_code=-9))
    assert not is_effect(Evidence(rank=0, exit_code=1, exception=USER_TRACEBACK))
    assert not is_effect(Evidence(rank=0, silent_s=70.0))


def test_a_verdict_is_a_value() -> None:
    assert explain("x") == Verdict("unknown", "unknown", "retry_backoff")
