"""One colour and one short label for each bucket and each group of buckets, the same on every screen.

Hue tells the group: green is training, blue the start, red and orange whatever a failure cost, amber and purple the
time lost inside the loop, grey the end. Green leans to blue and red to orange, so that the two that matter most stay
apart under red-green blindness; every colour stands out from white and from black.
"""

from collections.abc import Sequence

from headway.accounting.rules import Bucket

COLOURS: dict[Bucket, str] = {
    Bucket.START_SCHEDULING: "#8fb0fb",
    Bucket.START_HARDWARE_SETUP: "#6f8fd6",
    Bucket.START_LAUNCHER_INIT: "#3f7fe0",
    Bucket.START_TRAINER_INIT: "#2563c4",
    Bucket.START_PT2_COMPILATION: "#5a48d8",
    Bucket.RECOVER_DETECTION: "#9c1f1f",
    Bucket.RECOVER_TEARDOWN: "#b8382e",
    Bucket.RECOVER_BACKOFF: "#8a4a22",
    Bucket.RECOVER_SCHEDULING: "#c05f55",
    Bucket.RECOVER_RENDEZVOUS: "#e0452f",
    Bucket.RECOVER_LAUNCHER_INIT: "#b3611a",
    Bucket.RECOVER_TRAINER_INIT: "#e0671c",
    Bucket.RECOVER_CHECKPOINT_RESTORE: "#f28c28",
    Bucket.RECOVER_DATA_SKIP: "#cf7a4a",
    Bucket.RECOVER_PT2_COMPILATION: "#bf430c",
    Bucket.TRAINING_EFFECTIVE: "#12b886",
    Bucket.WASTE_REPEATED_STEPS: "#cc2f70",
    Bucket.WASTE_UNSAVED_STEPS: "#8e1e58",
    Bucket.WASTE_CHECKPOINT_BLOCKING: "#8b4fe0",
    Bucket.WASTE_DATA_WAIT: "#e3a412",
    Bucket.WASTE_RECOMPILATION: "#a986dd",
    Bucket.WASTE_EVALUATION: "#a07a10",
    Bucket.WASTE_STALL: "#b24bb0",
    Bucket.SHUTDOWN_FINAL_CHECKPOINT: "#838e9e",
    Bucket.SHUTDOWN_PUBLISH: "#a7b0bd",
    Bucket.SHUTDOWN_TEARDOWN: "#6a7483",
    Bucket.UNATTRIBUTED: "#4f5763",
}

LABELS: dict[Bucket, str] = {
    Bucket.START_SCHEDULING: "scheduling",
    Bucket.START_HARDWARE_SETUP: "hardware setup",
    Bucket.START_LAUNCHER_INIT: "launcher start",
    Bucket.START_TRAINER_INIT: "trainer start",
    Bucket.START_PT2_COMPILATION: "compilation",
    Bucket.RECOVER_DETECTION: "failure detection",
    Bucket.RECOVER_TEARDOWN: "teardown after failure",
    Bucket.RECOVER_BACKOFF: "retry backoff",
    Bucket.RECOVER_SCHEDULING: "rescheduling",
    Bucket.RECOVER_RENDEZVOUS: "rendezvous",
    Bucket.RECOVER_LAUNCHER_INIT: "launcher restart",
    Bucket.RECOVER_TRAINER_INIT: "trainer restart",
    Bucket.RECOVER_CHECKPOINT_RESTORE: "checkpoint restore",
    Bucket.RECOVER_DATA_SKIP: "data skip",
    Bucket.RECOVER_PT2_COMPILATION: "compilation on restart",
    Bucket.TRAINING_EFFECTIVE: "effective training",
    Bucket.WASTE_REPEATED_STEPS: "repeated steps",
    Bucket.WASTE_UNSAVED_STEPS: "unsaved steps",
    Bucket.WASTE_CHECKPOINT_BLOCKING: "checkpoint blocking",
    Bucket.WASTE_DATA_WAIT: "data wait",
    Bucket.WASTE_RECOMPILATION: "recompilation",
    Bucket.WASTE_EVALUATION: "evaluation",
    Bucket.WASTE_STALL: "stall",
    Bucket.SHUTDOWN_FINAL_CHECKPOINT: "final checkpoint",
    Bucket.SHUTDOWN_PUBLISH: "publishing",
    Bucket.SHUTDOWN_TEARDOWN: "shutdown",
    Bucket.UNATTRIBUTED: "unattributed",
}

GROUP_COLOURS: dict[str, str] = {
    "start": "#3f7fe0",
    "recover": "#e0671c",
    "training": "#12b886",
    "waste": "#e3a412",
    "shutdown": "#838e9e",
    "unattributed": "#4f5763",
}
"""By level-1 group, in the order of a job's life."""


PUBLISHING = "#0c7c94"
"""What others publish, beside the job: in no bucket of its."""


def group(bucket: Bucket) -> str:
    """The level-1 group of a bucket: what stands before the dot."""
    return bucket.partition(".")[0]


def who_failed(rank: int | None, unseen_ranks: Sequence[int] = ()) -> str:
    """The rank that failed first, as far as that was seen; the launcher, where all ranks ended well."""
    if rank is None:
        return "the launcher"
    if not unseen_ranks:
        return f"rank {rank}"
    others = f"rank {unseen_ranks[0]}" if len(unseen_ranks) == 1 else f"one of {len(unseen_ranks)} ranks"
    return f"rank {rank} (or {others}, whose end was not seen)"
