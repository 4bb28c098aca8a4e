"""What a rank says when another one failed, when a signal ended it, or when nothing may have happened."""

from headway.recover.known.fragments import SHELL, Table, exited

CASCADE: Table = {
    "sigkill_unexplained": {
        "ray": (
            r"worker (?:unexpectedly )?exits? (?:unexpectedly|with a connection error)",
            r"worker died or was killed while executing",
        ),
    },
    "collective_timeout": {
        "watchdog": (
            r"watchdog caught collective operation timeout",
            r"collective operation timeout",
            r"ran for \d+ milliseconds before timing out",
            r"operations have failed or timed out",
            r"timeout at nccl work",
            r"watchdog got stuck",
            r"detected no heartbeat",
            r"nccl (?:watchdog )?(?:timeout|timed out)",
            r"worknccl.{0,200}(?:timeout|timed out)",
            r"heartbeat ?monitor.{0,80}(?:stuck|terminat|abort)",
            r"ncclwatchdog.{0,60}time",
            r"watchdog.{0,40}hang",
            r"detected by watchdog",
            r"last enqueued nccl work.{0,40}time",
            r"taking the entire process down",
            r"(?:collective|allreduce|all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier|all_?to_?all|"
            r"send|recv)\b.{0,60}\b(?:timed out|timeout exceeded|hang detected|hung|stuck)\b",
            r"dump(?:ing)? (?:debug info|flight recorder|nccl trace).{0,60}(?:timeout|timed out)",
        ),
        "gloo": (
            r"timed out waiting \d+ ?ms for (?:send|recv)",
            r"application timeout caused pair closure",
            r"monitoredbarrier",
            r"monitored_barrier",
            r"timed out waiting.{0,40}(?:recv|send|operation to complete)",
            r"gloo.{0,80}timed? ?out",
        ),
        "hang": (
            r"(?:training|job|rank \d+|process|worker)\b.{0,60}(?:hang(?:ing)? detected|is hung|hung for|"
            r"no progress (?:for|in|since)|stalled for)",
            r"hang detected",
            r"no (?:step|heartbeat|progress).{0,30}(?:for|in|within) [\d.]+ ?(?:s|sec|min|h)",
            r"heartbeat timeout(?!.{0,40}remote task)",
            r"(?:work|section) timeout",
            r"stalled ops",
            r"one or more tensors were submitted",
            r"did not receive heartbeat",
        ),
    },
    "net_peer_lost": {
        "nccl": (
            r"ncclremoteerror",
            r"remote process exited",
            r"remote process (?:has )?(?:exited|crash|terminat)",
            r"connection closed by (?:remote )?peer",
            r"communicator was aborted",
            r"nccl communicator.{0,40}abort",
            r"net/socket.{0,80}(?:closed|reset|unexpected)",
            r"socket (?:recv|send)\w* failed",
            r"socketprogress\w*:.{0,80}(?:reset|closed|broken)",
            r"peer .{0,60}(?:closed|disconnected|is gone|has exited|died|lost)",
            r"ncclcomm.{0,20}abort",
        ),
        "socket": (
            r"connection reset(?: by peer)?",
            r"broken pipe",
            r"connection was reset",
            r"econnreset",
            r"epipe\b",
            r"errno[ =:]*(?:32|104)\b",
            r"os error (?:32|104)\b",
            r"socket closed",
            r"socket is closed",
            r"connection (?:was )?closed(?: by| unexpectedly|$| \[)",
            r"connectionreseterror",
            r"connectionabortederror",
            r"brokenpipeerror",
            r"connection lost",
            r"lost connection",
            r"^eoferror$",
            r"end of file\b",
            r"connection to .{0,60}(?:lost|closed)",
        ),
        "store": (
            r"recvvalue\w* failed",
            r"recvvector failed",
            r"recvbytes",
            r"sendbytes",
            r"failed to recv,? got 0",
            r"failed to (?:recv|send)\b",
            r"store (?:server|daemon).{0,40}(?:shut|closed|gone|died)",
            r"failed to check the \"should dump\" flag",
            r"tcpstore.{0,80}(?:shut ?down|broken|reset|closed)",
            r"got error: (?:connection|broken|failed)",
            r"application crash on rank",
            r"failed to shut ?down the rendezvous",
            r"connection was likely closed",
        ),
        "ray": (
            r"the actor (?:died|is dead)",
            r"actordiederror",
            r"rayactorerror",
            r"workercrashederror",
            r"owner (?:has )?died",
            r"ownerdiederror",
            r"objectlosterror",
            r"remote (?:task|worker|host) has failed",
            r"peer (?:node|worker|process|rank).{0,60}(?:fail|exit|crash|lost|dead|died)",
            r"rank \d+.{0,60}(?:has )?(?:exited|died|crashed|disconnected|left)\b(?! on signal)",
            r"mpi_abort was invoked",
            r"some other rank",
            r"other ranks? (?:has |have )?(?:failed|exited|died|crashed)",
            r"detected.{0,30}(?:peer|rank|worker) (?:failure|loss|failed)",
        ),
        "horovod": (
            r"horovodinternalerror",
            r"horovod (?:has been )?shut ?down",
            r"one of the ranks.{0,40}(?:exited|fail|crash)",
            r"this was caused by an exception on one of the ranks",
        ),
    },
}


VAGUE: Table = {
    "net_connect_failed": {
        "vague": (
            r"distnetworkerror",
            r"ncclsystemerror",
            r"unhandled system error",
        ),
    },
    "cuda_illegal_access": {
        "vague": (
            r"ncclunhandledcudaerror",
            r"unhandled cuda error",
            r"call to cuda function failed",
        ),
    },
    "duplicate_gpu": {
        "vague": (
            r"ncclinvalidusage",
            r"invalid usage",
        ),
    },
    "net_peer_lost": {
        "vague": (
            r"nccl error",
            r"nccl failure",
            r"ncclinternalerror",
            r"distbackenderror",
            r"process ?group.{0,40}(?<!_)(?:error|exception|abort)",
            r"unable to (?:complete|finish) (?:all_?reduce|collective)",
        ),
    },
    "collective_timeout": {
        "vague": (
            r"diststoreerror",
            r"disterror\b",
        ),
    },
}


SIGNAL: Table = {
    "segfault": {
        "told": (
            r"segmentation fault",
            r"\bsigsegv\b",
            exited(139),
            r"got signal: 11\b",
            r"signal[ :=]+11\b",
            r"code -11\b",
        ),
    },
    "sigbus": {
        "told": (
            r"(?<!pcie )\bbus error\b",
            r"\bsigbus\b",
            exited(135),
            r"signal[ :=]+7\b",
            r"code -7\b",
        ),
    },
    "sigabrt": {
        "told": (
            r"\bsigabrt\b",
            r"fatal python error: abort\w*",
            r"\baborted \(core dumped\)",
            SHELL + r"abort(?:ed)?\b(?:\s*$|\s+\(|\s+python)",
            exited(134),
            r"signal[ :=]+6\b",
            r"code -6\b",
            r"terminate called",
            r"caught signal 6",
            r"signal: abort\w*",
            r"check failed: ",
            r": assertion .{0,200} failed\.?$",
            r"core dumped",
        ),
    },
    "sigkill_unexplained": {
        "told": (
            SHELL + r"killed\b(?:\s*$|\s+\(|\s+python|\s{2,})",
            r"^\s*killed\s*$",
            r"\bsigkill\b",
            exited(137),
            r"(?:exited|terminated|died|killed|ended|fail\w*)[^.]{0,30} signal[ :=]+9\b",
            r"signal[ :=]+9\b",
            r"signal: killed",
            r"got signal: 9\b",
            r"code -9\b",
            r"killed by (?:the )?(?:system|os|kernel|signal)",
            r"\(killed\)",
        ),
        "worker": (
            r"dataloader worker \(pid.{0,40}exited unexpectedly",
            r"a (?:process|worker) in the process pool was terminated abruptly",
            r"brokenprocesspool",
            r"processexitedexception",
        ),
    },
    "sigterm": {
        "told": (
            r"signalexception: process \d+ got signal: (?:15|1)\b",
            r"got signal: 15\b",
            r"(?:receiv|caught|got)\w*.{0,30}(?:\bsigterm\b|signal[ :=]*15\b|sighup\b)",
            r"\bsigterm\b.{0,30}(?:receiv|caught|detected|from)",
            SHELL + r"terminated\b(?:\s*$|\s+\(|\s+python)",
            exited(143),
            r"signal[ :=]+15\b",
            r"signal: terminated",
            r"terminat\w+ (?:by|with|due to) (?:signal )?sigterm",
            r"signals\.sigterm",
            r"sigtermexception",
            r"received (?:1|15) death signal",
        ),
    },
    "preempted": {
        "step": (
            r"job step aborted: waiting",
            r"\*\*\* (?:step|job) .{0,120}cancelled at",
            r"slurmstepd: error: \*\*\*.{0,120}cancelled",
        ),
    },
}


SUMMARY: Table = {
    "segfault": {
        "torchrun": (
            r"exitcode\s{0,4}: ?-11\b",
            r"signal 11 \(sigsegv\)",
        ),
    },
    "sigbus": {
        "torchrun": (
            r"exitcode\s{0,4}: ?-7\b",
            r"signal 7 \(sigbus\)",
        ),
    },
    "sigabrt": {
        "torchrun": (
            r"exitcode\s{0,4}: ?-6\b",
            r"signal 6 \(sigabrt\)",
        ),
    },
    "sigkill_unexplained": {
        "torchrun": (
            r"exitcode\s{0,4}: ?-9\b",
            r"signal 9 \(sigkill\)",
        ),
    },
    "cancelled": {
        "torchrun": (
            r"exitcode\s{0,4}: ?-2\b",
            r"signal 2 \(sigint\)",
        ),
    },
}


SENT: Table = {
    "sigterm": {
        "torchrun": (
            r"exitcode\s{0,4}: ?-15\b",
            r"signal 15 \(sigterm\)",
            r"sending process \d+ closing signal",
            r"killing subprocess \d+",
        ),
    },
}


SOFT: Table = {
    "numeric_divergence": {
        "metric": (
            r"\bloss\w*\W{1,5}(?:nan|inf)\b",
            r"\bgrad_?norm\W{1,5}(?:nan|inf)\b",
            r"nan or inf found in input tensor",
        ),
    },
}
