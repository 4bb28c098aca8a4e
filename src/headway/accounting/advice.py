"""What to do about it: fixes, ranked by the ETT points that each would give back at most."""

import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headway.accounting.ledger import Ledger, percent
from headway.accounting.rules import OTHER, Bucket
from headway.accounting.timeline import Timeline
from headway.accounting.waterfall import Waterfall
from headway.events.vocabulary import Activity, Saved, Told

LEAST_POINTS = 0.5
"""Fixes that would give back less are not worth reading."""

LONG_TEARDOWN_NS = 30 * 10**9
"""Processes take seconds to leave. One that takes longer after its last step still does something."""


@dataclass(frozen=True)
class Advice:
    """One fix."""

    title: str
    points: float
    """ETT points the job would have had more, had this cost nothing."""
    seconds: float
    fix: str
    """The command or line that applies it."""
    bucket: str


@dataclass(frozen=True)
class _Remedy:
    """A fix for all the time in some buckets, or in one stage of trainer initialisation."""

    title: str
    fix: str
    """With `JOB` where the job's name belongs."""
    buckets: tuple[Bucket, ...]
    stage: str = ""
    detail: Callable[[Ledger], str] = lambda ledger: ""
    """What exactly, where hooks found it out."""
    with_stages: str = ""
    """The fix for a job whose start-up is a graph of stages already."""


def _told(ledger: Ledger, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """What hooks found out, on the rank that mattered most in each attempt, with the number of the attempt."""
    for attempt in ledger.attempts:
        rank = attempt.critical_rank if name == Told.IMPORTS else attempt.slowest_rank
        if rank in attempt.views:
            timeline: Timeline = attempt.views[rank].member.timeline
            timeline = timeline.unroll() if timeline.unroll is not None else timeline
            yield from ((attempt.attempt.number, mark.attrs) for mark in timeline.marks if mark.name == name)


def _slow_imports(ledger: Ledger) -> str:
    took: dict[str, float] = {}
    for _, told in _told(ledger, Told.IMPORTS):
        for module, seconds in told.get("seconds", {}).items():
            if module.startswith("headway"):  # what it brings with it is torch's, and needed
                continue
            took[module] = max(took.get(module, 0.0), seconds)
    slowest = sorted(took, key=lambda module: -took[module])[:3]
    return ", ".join(f"{module} {took[module]:.1f} s" for module in slowest)


def _recompiled(ledger: Ledger) -> str:
    """The function that took longest to compile again, how often that was, and why the last time."""
    took: dict[str, float] = {}
    why: dict[str, list[str]] = {}
    for _, told in _told(ledger, Told.COMPILED):
        if told.get("reason"):
            function = str(told.get("function", "?"))
            took[function] = took.get(function, 0.0) + told.get("seconds", 0.0)
            why.setdefault(function, []).append(str(told["reason"]))
    if not took:
        return ""
    worst = max(took, key=lambda function: took[function])
    times = f"{len(why[worst])} times, the last" if len(why[worst]) > 1 else "once,"
    return f"{worst} {times} because {why[worst][-1]}"


def _cached(ledger: Ledger) -> str:
    """What became of the compile cache the last time, if there is one."""
    told = [each for _, each in _told(ledger, Told.COMPILE_CACHE) if each.get("outcome") in ("hit", "miss", "used")]
    if not told:
        return ""
    last = told[-1]
    if last["outcome"] == "miss":
        return f"its bundle was not used ({last.get('why', '')})"
    saved = f", and saved {last['seconds_saved']:.0f} s" if "seconds_saved" in last else ""
    return f"its bundle was used{saved}; this is what was left"


def _waited(ledger: Ledger) -> str:
    """How many ranks sat through it."""
    ranks = ledger.attempts[-1].attempt.world_size
    return f"{ranks} ranks waited" if ranks > 1 else ""


def _left_to_do(ledger: Ledger) -> str:
    """What a long end without a word may hold, and who else could do it."""
    unnamed = ledger.buckets[Bucket.SHUTDOWN_TEARDOWN] > LONG_TEARDOWN_NS and not ledger.publications
    return f"if it still exports, validates or uploads, hand that over with {_HAND_OVER}" if unnamed else ""


_INIT = (Bucket.START_TRAINER_INIT, Bucket.RECOVER_TRAINER_INIT)

_HAND_OVER = 'run.finish(publish="recipe.py:publish")'

_PUBLISH_ELSEWHERE = f"{_HAND_OVER}; or, from a checkpoint of any job, headway publish submit CHECKPOINT"

_SUPERVISE = "headway run, with torchrun's options, in place of torchrun"

_REMEDIES = (
    _Remedy(
        "take compiled code from a cache",
        "headway run, or headway exec, with --compile-cache URL",
        (Bucket.START_PT2_COMPILATION, Bucket.RECOVER_PT2_COMPILATION),
        detail=_cached,
    ),
    _Remedy(
        "stop recompiling when shapes change",
        "headway compile doctor JOB: it names each recompile, and what to tell torch",
        (Bucket.WASTE_RECOMPILATION,),
        detail=_recompiled,
    ),
    _Remedy(
        "load data ahead of the steps",
        "DataLoader(..., num_workers=4, prefetch_factor=4, persistent_workers=True)",
        (Bucket.WASTE_DATA_WAIT,),
    ),
    _Remedy(
        "save checkpoints in the background",
        "ckpt = headway.Checkpointer(folder, model=model, optimizer=optimizer); ckpt.after(step) in the loop",
        (Bucket.WASTE_CHECKPOINT_BLOCKING, Bucket.SHUTDOWN_FINAL_CHECKPOINT),
    ),
    _Remedy(
        "evaluate less often, or on another machine",
        "if step % 10_000 == 0: evaluate()",
        (Bucket.WASTE_EVALUATION,),
    ),
    _Remedy(
        "find the step that hangs",
        "py-spy dump --pid PID on the slowest rank; headway report --perfetto FILE shows when",
        (Bucket.WASTE_STALL,),
    ),
    _Remedy(
        "restart at once and in place",
        _SUPERVISE,
        (Bucket.RECOVER_DETECTION, Bucket.RECOVER_TEARDOWN, Bucket.RECOVER_BACKOFF, Bucket.RECOVER_RENDEZVOUS),
    ),
    _Remedy(
        "skip data without reading it",
        "headway.Checkpointer(folder, model=model, loader=loader), and iterate ckpt.loader",
        (Bucket.RECOVER_DATA_SKIP,),
    ),
    _Remedy(
        "restore from memory that outlives the trainer",
        "headway.Checkpointer(folder, model=model, optimizer=optimizer).restore()",
        (Bucket.RECOVER_CHECKPOINT_RESTORE,),
    ),
    _Remedy(
        "have imports done before they are needed",
        "headway run --fast-start imports ahead what the program imported the last time",
        _INIT,
        Activity.IMPORTS,
        _slow_imports,
    ),
    _Remedy(
        "make process groups when first used",
        "export TORCH_GLOO_LAZY_INIT=1, and pass no device_id for NCCL",
        _INIT,
        Activity.PROCESS_GROUP_INIT,
    ),
    _Remedy(
        "build the model without filling it twice",
        'with torch.device("meta"): model = Model(); then model.to_empty(device=...) and load',
        _INIT,
        Activity.TRAIN_MODULE_CREATION,
    ),
    _Remedy(
        "start the data workers before the model is built",
        "batches = iter(loader) first, then the model, then next(batches); headway.Startup overlaps them for you",
        _INIT,
        Activity.GET_FIRST_BATCH_DATA,
        with_stages='@setup.stage(lane="io") for the one that calls iter(loader)',
    ),
    _Remedy(
        "name what trainer initialisation does",
        'with run.stage("pre_train"): ... around what is not measured yet',
        _INIT,
        OTHER,
        with_stages='@setup.stage(activity="pre_train") says what a stage counts as',
    ),
    _Remedy(
        "keep the last steps",
        "save after the last step: headway.Checkpointer's ckpt.save(wait=True)",
        (Bucket.WASTE_UNSAVED_STEPS,),
    ),
    _Remedy(
        "publish off the accelerators, from the last checkpoint",
        _PUBLISH_ELSEWHERE,
        (Bucket.SHUTDOWN_PUBLISH,),
        detail=_waited,
    ),
    _Remedy(
        "leave as soon as the work is done",
        "torch.distributed.destroy_process_group(); run.finish()",
        (Bucket.SHUTDOWN_TEARDOWN,),
        detail=_left_to_do,
    ),
    _Remedy(
        "say what the job does between its loops",
        'with run.span("evaluation"): ... (or checkpoint_blocking, publish, ...)',
        (Bucket.UNATTRIBUTED,),
    ),
)


def advise(ledger: Ledger) -> list[Advice]:
    """Fixes for this job, the one that gives back most first."""
    members = (member for account in ledger.attempts for member in account.attempt.members.values())
    supervised = any(member.process.attempt is not None for member in members)
    has = {_SUPERVISE} if supervised else set()
    if any(publication.handover_s is not None for publication in ledger.publications):
        has.add(_PUBLISH_ELSEWHERE)
    found = [_bound(ledger, remedy) for remedy in _REMEDIES if remedy.fix not in has]
    found += [_checkpoint_interval(ledger), _hidden_import(ledger), _serial_start(ledger), _more_overlap(ledger)]
    worth = [advice for advice in found if advice is not None and advice.points >= LEAST_POINTS]
    return sorted(worth, key=lambda advice: -advice.points)


def points_back(ledger: Ledger, buckets: tuple[Bucket, ...], saved_ns: float) -> float:
    """ETT points gained if `saved_ns` of these buckets had not been lost: lost steps count as trained, other time as
    never spent."""
    ett = percent(ledger.buckets)[0]
    effective = ledger.buckets[Bucket.TRAINING_EFFECTIVE]
    if buckets == (Bucket.WASTE_UNSAVED_STEPS,):
        return 100 * (effective + saved_ns) / max(ledger.wall_ns, 1) - ett
    return 100 * effective / max(ledger.wall_ns - saved_ns, 1) - ett


def _bound(ledger: Ledger, remedy: _Remedy) -> Advice | None:
    lost = {
        (bucket, stage): ns
        for (bucket, stage), ns in ledger.sums.items()
        if ns and bucket in remedy.buckets and remedy.stage in ("", stage)
    }
    if not lost:
        return None
    saved = sum(lost.values())
    most = max(lost, key=lambda key: lost[key])
    title = ": ".join(filter(None, (remedy.title, remedy.detail(ledger))))
    fix = remedy.with_stages if remedy.with_stages and ledger.waterfalls else remedy.fix
    fix = fix.replace("JOB", shlex.quote(ledger.job))
    return Advice(title, points_back(ledger, remedy.buckets, saved), saved / 1e9, fix, str(most[0]))


def _hidden_import(ledger: Ledger) -> Advice | None:
    """The first optimizer, or DDP, imports `torch._dynamo`: nobody asked for it by name, and it takes its time."""
    took = [(number, told.get("seconds", {}).get("torch._dynamo", 0.0)) for number, told in _told(ledger, Told.IMPORTS)]
    seconds = sum(s for _, s in took)
    if not seconds:
        return None
    return Advice(
        f"import torch._dynamo while something else is waited for: the first optimizer imports it ({took[0][1]:.1f} s)",
        points_back(ledger, _INIT, seconds * 1e9),
        seconds,
        "headway run has it imported before a worker starts",
        str(_INIT[took[0][0] > 0]),
    )


def _serial_start(ledger: Ledger) -> Advice | None:
    """A start-up that was told to run one stage after another."""
    found = [each for each in ledger.slowest_starts if each.is_serial and each.could_save_ns]
    fix = "unset HEADWAY_SERIAL, which is there to debug and to measure"
    return _overlap(ledger, found, "let the stages of the start-up overlap", fix) if found else None


def _more_overlap(ledger: Ledger) -> Advice | None:
    """The stage to move, where start-ups held up one that needs nothing of what it waited for."""
    found = [each for each in ledger.slowest_starts if not each.is_serial and each.could_save_ns and each.move]
    move = max(found, key=lambda each: each.could_save_ns).move if found else None
    if move is None:
        return None
    change = 'lane="io"' if move.stage.lane == "main" else "computes=False"
    title = f"let stage {move.stage.name} wait beside {move.behind}: neither needs the other, and it computed for only "
    title += f"{move.cpu_s:.1f} of its {move.took_s:.1f} s"
    return _overlap(ledger, found, title, f"@setup.stage({change}) for {move.stage.name}")


def _overlap(ledger: Ledger, found: list[Waterfall], title: str, fix: str) -> Advice:
    saved = sum(each.could_save_ns for each in found)
    key = _INIT[min(each.attempt for each in found) > 0]
    return Advice(title, points_back(ledger, _INIT, saved), saved / 1e9, fix, str(key))


def _checkpoint_interval(ledger: Ledger) -> Advice | None:
    """The interval that loses least at the measured cost of a save and rate of failures: sqrt(2 * cost / rate)."""
    saves = _saves(ledger)
    buckets = ledger.buckets
    loop_ns = sum(ns for key, ns in buckets.items() if key.startswith(("training.", "waste.")))
    lost_ns = buckets[Bucket.WASTE_REPEATED_STEPS]
    blocked_ns = buckets[Bucket.WASTE_CHECKPOINT_BLOCKING]
    failures = len(ledger.failures)
    if not saves or not failures or not loop_ns or not blocked_ns:
        return None
    cost_s, rate = blocked_ns / saves / 1e9, failures / (loop_ns / 1e9)
    best_s = max(math.sqrt(2 * cost_s / rate), 1.0)
    expected_ns = loop_ns * (cost_s / best_s + rate * best_s / 2)
    saved = lost_ns + blocked_ns - expected_ns
    if saved <= 0:
        return None
    now_s = loop_ns / 1e9 / saves
    fix = f"save every {best_s:.0f} s instead of every {now_s:.0f} s ({cost_s:.1f} s a save, {failures} failures): "
    fix += 'headway.Checkpointer(folder, ..., interval="auto") keeps to it'
    key = (Bucket.WASTE_REPEATED_STEPS, Bucket.WASTE_CHECKPOINT_BLOCKING)
    return Advice("save at the interval that loses least", points_back(ledger, key, saved), saved / 1e9, fix, key[0])


def _saves(ledger: Ledger) -> int:
    """Checkpoints committed, as the rank that reported most of them tells."""
    counts: dict[int, int] = {}
    for attempt in ledger.attempts:
        for rank, view in attempt.views.items():
            counts[rank] = counts.get(rank, 0) + sum(isinstance(c, Saved) for _, c in view.member.timeline.checkpoints)
    return max(counts.values(), default=0)
