"""What Slurm, Kubernetes, Ray and clouds say when they end a job."""

from headway.recover.known.fragments import Table

SCHEDULER: Table = {
    "node_failure": {
        "slurm": (
            r"due to node failure",
            r"(?:\b|cyclecloud_)node_fail\b",
            r"node failure on",
            r"nodes? .{0,80}(?:not responding|unexpectedly rebooted)",
        ),
        "ray": (
            r"node has (?:crashed|died)",
            r"node .{0,120}(?:(?<!can be )marked (?:as )?dead|has died|is dead|was terminated|crashed)",
            r"nodediederror",
            r"miss(?:ed|ing) too many heartbeats",
            r"raylet (?:has )?(?:died|crashed|exited)",
            r"node (?:died|crashed) unexpectedly",
        ),
        "kubernetes": (
            r"\bnode_?lost\b",
            r"\bnodenotready\b",
            r"node is not ready",
            r"node\.kubernetes\.io/(?:unreachable|not-ready|out-of-service)",
            r"node .{0,80}(?:is|became|went|status is now:?) ?(?:not ?ready|unreachable|unresponsive|offline|"
            r"unhealthy)",
            r"nodeshutdown",
            r"(?<!evicted by a )node (?:no longer exists|shutdown|was deleted)",
            r"kubelet stopped posting node status",
        ),
        "kernel": (
            r"kernel panic",
            r"machine check (?:exception|events?|error)",
            r"\[hardware error\]",
            r"soft lockup",
            r"hard lockup",
            r"uncorrected hardware memory error",
        ),
        "mpi": (
            r"lost communication with a remote daemon",
            r"daemon .{0,60}(?:failed|died) unexpectedly",
            r"lost connection to (?:the )?(?:node|host)",
            r"daemon on node .{0,80}fail",
        ),
        "cloud": (
            r"(?:host|hardware|underlying|instance|machine|vm)\b.{0,30}(?:hosterror|host error|hardware fail\w*|"
            r"crashed|degraded hardware|has failed)",
            r"compute\.instances\.hosterror",
            r"hosterror",
            r"node.{0,20}hardware fail\w*",
        ),
    },
    "time_limit": {
        "slurm": (
            r"\bdue to time\b",
            r"(?:state|reason)\s*[:=]\s*timeout\b",
            r"\btime ?limit (?:reached|exceeded|expired|exhausted|hit)",
            r"(?:reached|exceeded|hit|over)(?: (?:the|its|job|a|max(?:imum)?))* (?:time ?limit|wall-?(?:clock|"
            r"time)|run ?time limit|run ?time\b|execution time|run limit)",
        ),
        "kubernetes": (
            r"(?<!exceptions\.)(?<!\.)\b(?-i:DeadlineExceeded)\b(?!:? ?5\d\d)",
            r"active longer than specified deadline",
        ),
        "batch": (
            r"job killed: walltime",
            r"walltime.{0,60}exceed",
            r"term_runlimit",
            r"exceeded (?:hard |soft )?wall ?clock",
            r"job exceeded.{0,30}h_rt",
            r"max_?(?:imum_?)?(?:run|wait)_?time_?exceeded",
            r"maxruntime",
        ),
        "framework": (
            r"(?:time limit|max_?time|duration|wall.?time).{0,40}(?:reached|exceeded|elapsed|"
            r"expired)\b.{0,40}(?:stop|sav|exit|quit|signal|terminat)",
        ),
    },
    "pod_evicted": {
        "reason": (
            r"\breason\s*[:=]\s*\"?evicted",
            r"\bevicted\b\s+\d",
            r"\bwarning\s+evicted\b",
            r"(?:pod|container|workload).{0,100}\b(?:was |is |been |being )?(?-i:evicted|Evicted|evicting|"
            r"Evicting|eviction|Eviction)\b",
            r"\b(?:evicted|evicting) (?:the )?pods?\b",
            r"evictionbyevictionapi",
            r"\b0/1\s+evicted\b",
            r"status:?\s+evicted",
            r"^\s*evicted\s*$",
            r"taintmanagerevict\w*",
            r"deletionbytaint",
        ),
        "pressure": (
            r"the node was low on resource",
            r"node had condition: \[",
            r"eviction[- ]manager",
            r"(?:disk|memory|pid)pressure\b.{0,40}(?:evict|true)",
        ),
        "storage": (
            r"ephemeral[- ](?:local )?storage usage exceeds",
            r"exceeds? the (?:total )?limit of (?:ephemeral|emptydir)",
            r"usage of emptydir volume.{0,80}exceeds",
            r"exceeded its local ephemeral storage",
        ),
        "drain": (
            r"scaledown.{0,40}deleting pod",
            r"deleting pod.{0,40}scale.?down",
            r"terminationbykubelet",
            r"(?:drain|cordon)\w* node.{0,60}pod",
        ),
    },
    "preempted": {
        "slurm": (
            r"due to (?:preemption|job requeue)",
            r"\bstate\s*[:=]\s*preempted",
            r"\bpreempted\b.{0,40}\b(?:by|in favou?r|due)\b",
        ),
        "said": (
            r"\b(?:was|were|been|be|is|being|got|getting) preempted\b(?!,? or\b)",
            r"\bpreempted (?:by|due|to|at|while|during|and)\b",
            r"(?:job|pod|node|instance|worker|vm|container|workload|task).{0,60}\bpreempted\b(?!,? or\b)",
        ),
        "notice": (
            r"preempt(?:ion|ed)? (?:notice|signal|warning|event|request|imminent|detected)\b(?! ?handl)",
            r"(?:receiv|detect|got|caught)\w*.{0,30}\bpreempt(?:ion|ed|ing)?\b(?!,? or\b)",
            r"compute\.instances\.preempted",
            r"\bpreemption(?:byscheduler|bykubescheduler)",
            r"\breason\s*[:=]\s*\"?preempt\w*",
            r"\bpreempting\b.{0,60}(?:pod|job|victim)",
            r"eventtype\W{1,5}preempt",
            r"^\s*preempt(?:ed|ion)\s*$",
        ),
        "spot": (
            r"(?:instance|vm|node|machine).{0,30}(?:going to be|will be|about to be|being|"
            r"scheduled to be) (?:interrupted|reclaimed|preempted|terminated)",
            r"\bspot\b.{0,40}(?:interrupt\w*|terminat\w*|reclaim\w*|preempt\w*|evict\w*)",
            r"spot/(?:instance-action|termination-time)",
            r"instance-action\W",
            r"rebalance recommendation",
            r"(?:interruption|termination) (?:notice|warning).{0,40}(?:receiv|instance|spot|ec2)",
            r"(?:receiv|got)\w*.{0,30}(?:interruption|termination) (?:notice|warning)",
            r"low.?priority.{0,40}evict\w*",
            r"ec2.{0,40}reclaim",
            r"evicted.{0,40}(?:capacity|spot)",
            r"vm has been evicted",
        ),
    },
    "cancelled": {
        "slurm": (
            r"cancell?ed\+? by (?:uid[ =:]*)?\d+",
            r"\bscancel(?:l?ed|\b.{0,20}(?:by|called|sent))",
            r"cancell?ed at .{0,40} by\b",
            r"job_?cancell?ed\b",
        ),
        "user": (
            r"(?:cancell?ed|aborted|interrupted|stopped|killed|terminated|deleted|revoked) by (?:the )?(?:user|"
            r"owner|admin\w*|operator|request)",
            r"(?:user|owner|admin\w*) (?:requested|cancell?ed|aborted|interrupted|stopped)(?! to)",
            r"term_owner",
            r"cancell?ed (?:via|from|at) (?:the )?(?:user|ui|api|request|web)",
            r"user[- ]initiated",
            r"at (?:the )?user'?s? request",
        ),
        "job": (
            r"(?:job|run|workflow|training|experiment)\b.{0,60}\b(?:was|been|is|got) cancell?ed\b",
            r"the operation was cancell?ed",
            r"taskcancellederror",
            r"ray\.exceptions\.taskcancelled",
            r"\bjob (?:was )?(?:deleted|qdel)(?! at request of root)",
        ),
    },
}
