"""What to do about a failure: small policies that look at one situation, composed into one.

A policy is any callable from a `Situation` to a `Decision`, or to None if it has nothing to say about it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headway.recover.categories import Action, Klass

HOPELESS = ("cancelled", "disk_full", "quota_exceeded")
"""No retry can help: somebody wants the job to end, or must make room first."""

BUDGETS: dict[str, int | None] = {
    Klass.INFRA: 10, Klass.CASCADE: 10, Klass.LAUNCH: 10, Klass.UNKNOWN: 5, Klass.CHECKPOINT: 3, Klass.RESOURCE: 2,
    Klass.USER: 2, Klass.PREEMPTION: None, Klass.SCHEDULER: None,
}  # fmt: skip
"""Restarts without progress that a class of failures is worth; None for any number."""

MOST_REPEATS = 20
"""How often in a row what is not the job's fault may come, without a step in between."""

DOINGS = ("restart", "stop", "requeue", "leave")
"""All that can be decided."""

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""What a back-off waits first, and at most; it doubles in between."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One failure, and what went before it."""

    category: str
    klass: str
    action: str
    rank: int = 0
    node: str = ""
    line: str = ""
    trained: bool = False
    """Whether the attempt trained a step."""
    measured: bool = True
    """Whether steps could be seen at all."""
    progressed: bool = False
    """Whether it went beyond what earlier attempts had reached."""
    repeats: int = 0
    """How often in a row the same failure was met before this one, each time without progress."""
    spent: int = 0
    """Restarts that failures of this class cost since the last progress."""
    restarts: int = 0
    """Restarts in all that count against the user's own limit."""
    can_exclude: bool = False
    """Whether the job may go on with a node less."""
    can_requeue: bool = False
    """Whether there is a scheduler to hand the job back to."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do, and why, in words for a user."""

    do: str
    """`restart`, `stop`, `requeue` or `leave`."""
    why: str
    wait_s: float = 0.0
    environ: Mapping[str, str] = field(default_factory=dict)
    """What the next attempt is told."""
    spends: bool = True


Policy = Callable[[Situation], Decision | None]


def first_of(*policies: Policy) -> Policy:
    """The first of these that has something to say."""

    def decide(situation: Situation) -> Decision | None:
        return next((decision for policy in policies if (decision := policy(situation)) is not None), None)

    return decide


def stop_when_hopeless(situation: Situation) -> Decision | None:
    """No restart after a failure that no retry can help."""
    if situation.category in HOPELESS:
        return Decision(do="stop", why="no retry can help")
    return None


def restart_after_progress(situation: Situation) -> Decision | None:
    """A first failure after progress: restart at once, whatever it was."""
    if situation.progressed:
        return Decision(do="restart", why="it had made progress", spends=_spends(situation))
    return None


def at_most(restarts: int | None) -> Policy:
    """No more restarts than a user allows; None for no such limit."""

    def decide(situation: Situation) -> Decision | None:
        if restarts is not None and situation.restarts >= restarts and _spends(situation):
            return Decision(do="stop", why=f"--max-restarts {restarts} is reached")
        return None

    return decide


def as_allowed(restarts: int | None) -> Policy:
    """Where no step can be seen, a user's own limit decides, as with torchrun."""

    def decide(situation: Situation) -> Decision | None:
        if restarts is not None and not situation.measured:
            return Decision(do="restart", why=f"--max-restarts allows {restarts}", spends=_spends(situation))
        return None

    return decide


def within(budgets: Mapping[str, int | None]) -> Policy:
    """No more restarts without progress than a class of failures is worth."""

    def decide(situation: Situation) -> Decision | None:
        budget = budgets.get(situation.klass)
        if budget is not None and situation.spent >= budget:
            return Decision(do="stop", why=f"{_times(situation.spent)} without progress were enough")
        return None

    return decide


def act_by_category(situation: Situation) -> Decision | None:
    """The category's own action."""
    act = ACTIONS.get(situation.action)
    return act(situation) if act else None


def doubt_the_unknown(situation: Situation) -> Decision | None:
    """What nobody understands and came before the first step is most likely the program's own doing: one more try."""
    return retry_once(situation) if situation.category == "unknown" and not situation.trained else None


def default(max_restarts: int | None = None) -> Policy:
    """The policy of `headway run`. A policy of your own goes before it: `first_of(mine, default())`."""
    return first_of(
        stop_when_hopeless, at_most(max_restarts), as_allowed(max_restarts),
        restart_after_progress, within(BUDGETS), doubt_the_unknown,
        act_by_category,        lambda situation: Decision(do="stop", why="nobody knows what else to do"),
    )  # fmt: skip


# --- the actions -----------------------------------------------------------------------------------------------------


def fail_fast(situation: Situation) -> Decision:
    """Trying again would fail again."""
    if situation.trained:
        return Decision(do="stop", why="it would fail again")
    return Decision(do="stop", why="it failed before its first step, and would again")


def retry_once(situation: Situation) -> Decision:
    """A second chance, and no third."""
    if situation.repeats:
        return Decision(do="stop", why="it failed the same way again")
    return Decision(do="restart", why="it may not come again")


def back_off(situation: Situation) -> Decision:
    """Tries again after a wait that doubles."""
    wait_s = min(FIRST_WAIT_S * 2.0**situation.spent, LONGEST_WAIT_S)
    return Decision(do="restart", why=f"it may pass: waiting {wait_s:g} s", wait_s=wait_s)


def exclude_node(situation: Situation) -> Decision:
    """The node is bad: the job goes on without it where it may, else in the hope that it recovers."""
    if situation.can_exclude:
        return Decision(do="leave", why=f"node {situation.node} leaves the job")
    decision = back_off(situation)
    return Decision(
        do="restart",
        why=f"node {situation.node} is suspect, and --nnodes has no room to leave it out: {decision.why}",
        wait_s=decision.wait_s,
    )


def requeue(situation: Situation) -> Decision:
    """Not the job's fault: it does not count."""
    if situation.can_requeue and situation.category != "sigterm":
        return Decision(do="requeue", why="the scheduler gets it back", spends=False)
    if situation.repeats >= MOST_REPEATS:
        return Decision(do="stop", why=f"{situation.repeats} times in a row, without a step in between")
    wait_s = min(FIRST_WAIT_S * (2.0**situation.repeats - 1), LONGEST_WAIT_S)
    why = "it is not the job's fault, and does not count" + (f": waiting {wait_s:g} s" if wait_s else "")
    return Decision(do="restart", why=why, wait_s=wait_s, spends=False)


def previous_checkpoint(situation: Situation) -> Decision:
    """Goes further back each time; who restores asks `run.skip_checkpoints`."""
    back = situation.repeats + 1
    which = "the checkpoint before the last" if back == 1 else f"{back} checkpoints back"
    return Decision(do="restart", why=f"from {which}", environ={"HEADWAY_SKIP_CHECKPOINTS": str(back)})


def without_compile(situation: Situation) -> Decision:
    """Eager once; if that fails too, it was not the compiler."""
    if situation.repeats:
        return Decision(do="stop", why="it failed the same way again")
    return Decision(do="restart", why="without torch.compile", environ={"TORCH_COMPILE_DISABLE": "1"})


def retry_now(situation: Situation) -> Decision:
    """Every attempt has a store and a port of its own: that is the remedy."""
    return Decision(do="restart", why="with a new store and port")


ACTIONS: dict[str, Callable[[Situation], Decision]] = {
    Action.FAIL_FAST: fail_fast,
    Action.RETRY_ONCE: retry_once,
    Action.RETRY_BACKOFF: back_off,
    Action.LOOK_AT_OTHER_RANKS: back_off,
    Action.USE_FLIGHT_RECORDER: back_off,
    Action.RETRY_EXCLUDE_NODE: exclude_node,
    Action.REQUEUE: requeue,
    Action.RETRY_PREVIOUS_CHECKPOINT: previous_checkpoint,
    Action.RETRY_WITHOUT_COMPILE: without_compile,
    Action.NEW_STORE: retry_now,
    Action.NEW_PORT: retry_now,
}
"""What each action of a category is."""


def _spends(situation: Situation) -> bool:
    return situation.action != Action.REQUEUE


def _times(count: int) -> str:
    return "one restart" if count == 1 else f"{count} restarts"


# --- what went before ------------------------------------------------------------------------------------------------


@dataclass
class History:
    """The failures so far, as far as later decisions depend on them."""

    restarts: int = 0
    spent: dict[str, int] = field(default_factory=dict)
    last: str = ""
    repeats: int = 0

    def repeats_of(self, category: str, progressed: bool) -> int:
        """How often in a row the same failure was met before, each time without progress."""
        return self.repeats if category == self.last and not progressed else 0

    def spent_on(self, klass: str, progressed: bool) -> int:
        """Restarts since the last progress that failures of this class cost."""
        return 0 if progressed else self.spent.get(klass, 0)

    def add(self, category: str, klass: str, progressed: bool, spends: bool) -> None:
        """One more failure, about which something was done. The restart after progress is for free: only what comes
        after it without progress counts as a repeat, and against the budget."""
        self.restarts += spends
        if progressed:
            self.spent, self.last, self.repeats = {}, category, 0
            return
        self.repeats = self.repeats + 1 if category == self.last else 1
        self.last = category
        self.spent[klass] = self.spent.get(klass, 0) + spends
