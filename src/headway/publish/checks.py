"""Checks before anything is served: is it finite, does it give what eager gives, does it fit what was there before.

Each gives a `Check` whose words say what was compared and, if it failed, what differs.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from headway.errors import PlatformError
from headway.publish.out import Check, Out

if TYPE_CHECKING:
    from torch import Tensor

    from headway.publish.layout import VersionManifest

GOLDEN = "golden/batches.pt"
"""Inputs, and what eager gives for them: `torch.load` reads it."""
CUDA = "-cuda"
"""How the name ends of a package that runs on a GPU."""
FACTOR = 2.0
"""So many times smaller, larger or slower than the version before is a mistake, if nobody has allowed it."""
SHOWN = 5
"""Of a list of differences, so many are told."""

_ROUNDS_LEAST, _ROUNDS, _ROUNDS_S = 5, 100, 2.0
_TRIES = 3
_PATIENCE_S = 600.0
"""So long both versions may take to be loaded and timed. What is not known by then of this one counts against it."""
_RUNS = "this version runs"
_OPERATORS = ("fbgemm_gpu", "torchrec", "torchvision")
"""Packages that bring operators with them: a program that uses these can be loaded only where they are imported."""

Batch = tuple[Any, ...] | Mapping[str, Any]


# --- what was made, as a server would call it -----------------------------------------------------------------------


def load_program(path: Path) -> Callable[..., Any]:
    """What `torch.export` has saved."""
    import torch

    return torch.export.load(path).module()


def load_package(path: Path) -> Callable[..., Any]:
    """What AOTInductor has compiled."""
    run: Callable[..., Any] = inductor().aoti_load_package(str(path))
    if not path.stem.endswith(CUDA):
        return run
    return lambda *args, **kwargs: _on(run(*_on(args, "cuda"), **_on(kwargs, "cuda")), "cpu")


def inductor() -> Any:
    """The module with AOTInductor's functions; torch may still move them."""
    import torch
    import torch._inductor as found

    if not all(hasattr(found, name) for name in ("aoti_compile_and_package", "aoti_load_package")):
        text = "has AOTInductor elsewhere, or not at all. Leave out `aotinductor`; `export` needs none of it."
        raise PlatformError(f"torch {torch.__version__} {text}")
    return found


def call(run: Callable[..., Any], batch: Batch) -> Any:
    """What comes out for a batch, whose tensors nobody else has: some models change, or remember things in, theirs."""
    import torch

    with torch.no_grad():
        return _called(run, own(batch))


def _called(run: Callable[..., Any], batch: Batch) -> Any:
    return run(**batch) if isinstance(batch, Mapping) else run(*batch)


def own(tree: Any) -> Any:
    """The same with tensors of its own, each no larger than what is seen of it."""
    return _mapped(lambda tensor: tensor.clone(), tree)


def _on(tree: Any, device: str) -> Any:
    return _mapped(lambda tensor: tensor.to(device), tree)


def _mapped(change: "Callable[[Tensor], Tensor]", tree: Any) -> Any:
    import torch
    from torch.utils import _pytree

    return _pytree.tree_map_only(torch.Tensor, change, tree)


def leaves(tree: Any, structure: Any = None) -> dict[str, Any]:
    """Everything in nested lists, tuples, dicts and what else torch knows to open, by where it is; of a flat list, by
    where it would be in a structure."""
    from torch.utils import _pytree

    whole = tree if structure is None else _pytree.tree_unflatten(tree, structure)
    found, _ = _pytree.tree_flatten_with_path(whole)
    return {_pytree.keystr(path) or "output": leaf for path, leaf in found}


# --- is it finite -----------------------------------------------------------------------------------------------------


def nonfinite(tensors: Mapping[str, Any]) -> dict[str, int]:
    """How many are NaN or Inf, of the tensors that have such."""
    import torch

    from headway.publish.weights import nonfinite_values

    found = {name: each.detach().flatten() for name, each in tensors.items() if isinstance(each, torch.Tensor)}
    return {name: count for name, each in found.items() if (count := nonfinite_values(each))}


def finite(what: str, found: Mapping[str, int]) -> Check:
    """Whether there is no NaN and no Inf, given how many each has."""
    name = f"{what} finite"
    if not found:
        return Check(name=name, passed=True, told=f"no NaN and no Inf in the {what}")
    shown = _listed([f"{each} has {count}" for each, count in found.items()])
    return Check(name=name, passed=False, told=f"there is NaN or Inf in the {what}: {shown}", figures=dict(found))


# --- does it give what eager gives ------------------------------------------------------------------------------------


def parity(
    what: str, run: Callable[..., Any], expected: Sequence[Any], batches: Sequence[Batch], *, atol: float, rtol: float
) -> Check:
    """Whether it gives, for all golden batches, what eager gives: the same structure, types and sizes, and numbers that
    are at most `atol + rtol * |eager|` apart."""
    name, furthest = f"{what} parity", 0.0
    for number, (batch, want) in enumerate(zip(batches, expected, strict=True)):
        try:
            got = call(run, batch)
        except Exception as error:  # whatever it is, a server would meet it too
            problem = f"the {what} cannot run it, and eager can: {_gist(error)}"
        else:
            problem, far = _compared(want, got, atol, rtol)
            furthest = max(furthest, far)
        if problem:
            return Check(name=name, passed=False, told=f"golden batch {number}: {problem}", figures={"batch": number})
    told = f"{len(batches)} golden batches give what eager gives, within {atol:g} + {rtol:g} × |eager|"
    return Check(name=name, passed=True, told=f"{told}; at most {furthest:.2g} apart", figures={"furthest": furthest})


def _compared(want: Any, got: Any, atol: float, rtol: float) -> tuple[str, float]:
    """What differs, if anything does, and how far the furthest numbers are apart."""
    wanted, given, furthest = leaves(want), leaves(got), 0.0
    if list(wanted) != list(given):
        return f"it gives {_listed(list(given))}; eager gives {_listed(list(wanted))}", 0.0
    for name, value in wanted.items():
        problem, far = _leaf_compared(name, value, given[name], atol, rtol)
        furthest = max(furthest, far)
        if problem:
            return problem, furthest
    return "", furthest


def _leaf_compared(name: str, want: Any, got: Any, atol: float, rtol: float) -> tuple[str, float]:
    import torch

    if isinstance(want, int | float | complex):  # a compiled package has tensors for numbers, too
        want = torch.as_tensor(want)
        got = torch.as_tensor(got).to(want.dtype) if isinstance(got, int | float | complex | torch.Tensor) else got
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return ("" if type(want) is type(got) and want == got else f"{name} is {got!r}; eager gives {want!r}"), 0.0
    if (told := described(got)) != (eager := described(want)):
        return f"{name} is {told}; eager gives {eager}", 0.0
    return _numbers_compared(name, want, got, atol, rtol)


def _numbers_compared(name: str, want: "Tensor", got: "Tensor", atol: float, rtol: float) -> tuple[str, float]:
    import torch

    if not want.numel():
        return "", 0.0
    if want.is_floating_point() or want.is_complex():
        wide = torch.complex128 if want.is_complex() else torch.float64
        want, got = want.to(wide), got.to(wide)
        apart, allowed = (got - want).abs(), atol + rtol * want.abs()
    else:
        apart, allowed = (got != want).double(), torch.zeros(want.shape, dtype=torch.float64)
    excess = (apart - allowed).nan_to_num(nan=torch.inf)
    if (count := int((excess > 0).sum())) == 0:
        return "", float(apart.max())
    at = int(excess.argmax())
    index = [int(each) for each in torch.unravel_index(torch.tensor(at), want.shape)]
    ours, theirs = got.flatten()[at].item(), want.flatten()[at].item()
    text = f"{name} at {index} is {ours:g}; eager gives {theirs:g}, {float(allowed.flatten()[at]):.2g} apart is allowed"
    return f"{text} ({count} of {want.numel()} differ)", float(apart.nan_to_num(nan=torch.inf).max())


def described(value: Any) -> str:
    """Type and sizes, as in float32[*, 13]; * is a size that may differ from batch to batch."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "dtype"):
        return "int" if type(value).__name__ == "SymInt" else repr(value)[:80]
    sizes = ", ".join(str(size) if isinstance(size, int) else "*" for size in shape)
    return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"


# --- does it fit what was there before --------------------------------------------------------------------------------


def compare_with_previous(
    out: Out, previous: "VersionManifest", folder: Path | None, allow: Sequence[str] = ()
) -> Iterator[Check]:
    """What differs from the version before, whose files are in `folder`, as far as they could be had."""
    yield same_signature(out.signature, previous.signature, allowed="signature" in allow)
    size = sum(path.stat().st_size for path in out.files().values())
    yield similar_size(size, previous.size, allowed="size" in allow)
    yield similar_latency(out, folder, previous.facts.get("cpu"), allowed="latency" in allow)


def same_signature(now: Mapping[str, Any], before: Mapping[str, Any], *, allowed: bool = False) -> Check:
    """Whether all that was there before is there, and is what it was. What was not told of before is no difference."""
    now, before = json.loads(json.dumps(now)), json.loads(json.dumps(before))
    found = [line for part in before for line in _part_compared(part, now.get(part), before[part])]
    told = f"{', '.join(before) or 'nothing'} compared with the version before"
    return _judged("signature", _listed(found), told, allowed)


def _part_compared(part: str, now: Any, before: Any) -> Iterator[str]:
    if now is None:
        yield f"this version has no {part}"
    elif not isinstance(now, dict) or not isinstance(before, dict):
        if now != before:
            yield f"{part} was {before}, is {now}"
    else:
        for name in [*before, *(name for name in now if name not in before)]:
            if name not in now:
                yield f"{part} {name} is missing, was {before[name]}"
            elif name not in before:
                yield f"{part} {name} is new, {now[name]}"
            elif now[name] != before[name]:
                yield f"{part} {name} was {before[name]}, is {now[name]}"


def similar_size(now: int, before: int, *, allowed: bool = False) -> Check:
    """Whether it is neither a half nor twice as large."""
    told = f"{now} bytes, {before} before"
    problem = f"{told}: {now / before:.2f} times as many" if before and _is_far(now / before) else ""
    return _judged("size", problem, told, allowed, {"bytes": now, "before": before})


def _is_far(ratio: float) -> bool:
    return not 1 / FACTOR <= ratio <= FACTOR


def similar_latency(out: Out, folder: Path | None, cpu: str | None = None, *, allowed: bool = False) -> Check:
    """Whether golden batches take at most twice as long as with the version before, which was compiled for `cpu`."""
    try:
        name = _timed_file(out, folder, cpu)
        now_s, before_s = _timed_apart(out / name, Path(folder or "", name), out / GOLDEN)
    except _NotCompared as why:  # whatever is wrong with the version before is no fault of this one
        return Check(name="latency", passed=True, told=f"not compared: {why}")
    except _DoesNotRun as why:
        return _judged("latency", f"this version, in a process of its own, {why}", "", allowed)
    told = f"{name} takes {now_s * 1e3:.3g} ms for the golden batches, {before_s * 1e3:.3g} ms before"
    problem = f"{told}: {now_s / before_s:.2f} times as long" if now_s > FACTOR * before_s else ""
    return _judged("latency", problem, told, allowed, {"seconds": now_s, "before": before_s})


class _NotCompared(Exception):
    """Why one version is not timed against the other."""


class _DoesNotRun(Exception):
    """What this version does instead, where a server would run it."""


def timed_name(out: Out) -> str | None:
    """The file that is timed: a package, or else a program; None if there is neither."""
    files = [name for name in out.files() if name.endswith(".pt2") and CUDA not in name]
    return next((each for kind in ("package/", "program/") for each in files if each.startswith(kind)), None)


def _timed_file(out: Out, folder: Path | None, cpu: str | None) -> str:
    """What there is of both versions."""
    name = timed_name(out)
    if name is None or not (out / GOLDEN).is_file():
        raise _NotCompared("there is nothing to be timed")
    if folder is None or not (folder / name).is_file():
        raise _NotCompared(f"the version before has no {name}")
    if name.startswith("package/") and cpu is not None and cpu != out.facts.get("cpu"):
        raise _NotCompared(f"the version before is for CPUs with {cpu}")
    return name


def _timed_apart(now: Path, before: Path, golden: Path) -> tuple[float, float]:
    """Seconds for all batches of this version and of the one before, in a process of its own: what was compiled for
    another machine may end it."""
    modules = [name for name in _OPERATORS if name in sys.modules]
    words = [*map(str, (now, before, golden)), *modules]
    code = f"import sys; from {__name__} import _print_times; _print_times(*sys.argv[1:])"
    path = os.pathsep.join(filter(None, sys.path))  # batches may be of the user's types
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code, *words],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
    except subprocess.TimeoutExpired as error:
        return _told_in_time((error.stdout or b"").decode(errors="replace").splitlines())
    said = [line for line in ended.stderr.splitlines() if line.strip()]
    if ended.returncode:
        why = f"signal {-ended.returncode}" if ended.returncode < 0 else said[-1][:300] if said else "no word"
        runs = _RUNS in ended.stdout.splitlines()
        if ended.returncode < 0 and not runs:
            raise _DoesNotRun(f"dies by {why}")
        which = "the version before" if runs else "this version, in a process of its own,"
        raise _NotCompared(f"{which} does not run here ({why})")
    now_s, before_s = json.loads(ended.stdout.splitlines()[-1])
    return now_s, before_s


def _told_in_time(lines: Sequence[str]) -> tuple[float, float]:
    """The last figures that were printed before the time was up."""
    if _RUNS not in lines:
        raise _DoesNotRun(f"has not run one golden batch within {_PATIENCE_S:.0f} s")
    if lines[-1] == _RUNS:
        raise _NotCompared(f"the version before was not timed within {_PATIENCE_S:.0f} s")
    now_s, before_s = json.loads(lines[-1])
    return now_s, before_s


def _print_times(now: str, before: str, golden: str, *modules: str) -> None:
    for name in modules:
        __import__(name)
    batches = read_golden(Path(golden))["batches"]
    load = load_package if Path(now).parent.name == "package" else load_program
    runs = [load(Path(now))]
    call(runs[0], batches[0])
    print(_RUNS, flush=True)
    runs.append(load(Path(before)))
    call(runs[1], batches[0])
    print(json.dumps(_turn(runs, batches)), flush=True)  # all there is time for, if one of them is very slow
    for _ in range(_TRIES):  # the machine may have been busy with something else
        now_s, before_s = interleaved(runs, batches)
        if now_s <= FACTOR * before_s:
            break
    print(json.dumps([now_s, before_s]))


def interleaved(runs: Sequence[Callable[..., Any]], batches: Sequence[Batch]) -> list[float]:
    """Median seconds that each takes for all batches; they take turns, so that what disturbs one disturbs all."""
    turns: list[list[float]] = []
    until = time.monotonic() + _ROUNDS_S
    while len(turns) < _ROUNDS_LEAST or (len(turns) < _ROUNDS and time.monotonic() < until):
        turns.append(_turn(runs, batches))
    return [median(times) for times in zip(*turns[1:], strict=True)]  # the first warms up


def _turn(runs: Sequence[Callable[..., Any]], batches: Sequence[Batch]) -> list[float]:
    """Seconds that each takes for all batches, once."""
    import torch

    taken = []
    for run in runs:
        began = time.perf_counter()
        with torch.no_grad():
            for batch in batches:
                _called(run, batch)
        taken.append(time.perf_counter() - began)
    return taken


def read_golden(path: Path) -> dict[str, Any]:
    """Golden batches and eager's outputs. They are this publisher's own: whatever types they have may be loaded."""
    import torch

    told: dict[str, Any] = torch.load(path, weights_only=False)
    return told


# --- what the user checks ---------------------------------------------------------------------------------------------


def user_check(name: str, function: Callable[[Path], Any], folder: Path) -> Check:
    """What a function of the user finds wrong with a folder: it raises, or returns False or what is wrong."""
    try:
        found = function(folder)
    except Exception as error:  # that is how it says no
        return Check(name=name, passed=False, told=f"{type(error).__name__}: {error}")
    is_bool = type(found).__name__ in ("bool", "bool_")  # a comparison of numpy's numbers gives one of its own
    if found is None or (found if is_bool else isinstance(found, str | list | tuple) and not found):
        return Check(name=name, passed=True, told="nothing wrong")
    lines = [found] if isinstance(found, str) else found if isinstance(found, list | tuple) else [f"it gave {found!r}"]
    return Check(name=name, passed=False, told=_listed([str(line) for line in lines]))


def _judged(name: str, problem: str, told: str, allowed: bool, figures: dict[str, Any] | None = None) -> Check:
    if problem and allowed:
        told, problem = f"{problem} (allowed)", ""
    elif problem:
        problem += f'. If that is meant: --allow {name}, or allow=("{name}",)'
    return Check(name=name, passed=not problem, told=problem or told, figures=figures or {})


def _listed(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more


def _gist(error: BaseException) -> str:
    """Kind and first line of an error."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:400] if first else type(error).__name__
