"""Listens to Triton's autotuner and inductor's choice of algorithms, and keeps them to the configs that are worth it.

Typical use::

    tables = Tables()
    tuning = Tuning(tables.hear, say)
    tuning.imported("triton.runtime.autotuner")  # as soon as it is: nothing is imported from here
    tuning.apply({"matmul-1f2e3d4c": ["triton.Config({'BLOCK': 64}, num_warps=4, num_stages=3)"]})

Neither library is touched elsewhere in headway. Where one is not as it is known here, or a hook raises, that hook is
switched off, which is said once, and the library tunes as it would without.
"""

import functools
import hashlib
import inspect
import math
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from headway.compile.autotune import Benchmark

TRITON, INDUCTOR = "triton.runtime.autotuner", "torch._inductor.select_algorithm"
MODULES = (TRITON, INDUCTOR)
"""Those that `Tuning.imported` wants to hear of."""

Heard = Callable[[Benchmark], None]
Said = Callable[[str], None]


class Tuning:
    """What headway does to the tuners of this process. Any thread may call it, and be in its hooks."""

    def __init__(self, heard: Heard, said: Said) -> None:
        """`heard` is called after each benchmark; `said` with a line on what is switched off."""
        self._heard, self._said = heard, said
        self._configs: dict[str, frozenset[str]] = {}
        self._imported: set[str] = set()
        self._hooks: dict[str, Callable[[], None]] = {}
        """Those that were put in, by name, and what takes each out again."""
        self._off: set[str] = set()
        self._lock = threading.RLock()

    def imported(self, name: str) -> None:
        """One of `MODULES` has been imported."""
        with self._lock:
            self._imported.add(name)
            self._install()

    def apply(self, configs: Mapping[str, Sequence[str]]) -> None:
        """From now on each kernel named is tuned over these of its configs. A kernel that has none of them, because its
        source or its configs have changed, keeps all that it has."""
        with self._lock:
            self._configs = {kernel: frozenset(few) for kernel, few in configs.items() if few}
            self._install()

    def undo(self) -> None:
        """Leaves both libraries as they were found."""
        with self._lock:
            for name in list(self._hooks):
                self._take_out(name)

    # --- putting hooks in ---

    def _install(self) -> None:
        for name, module, put in (
            ("timings of Triton kernels", TRITON, self._watch_triton),
            ("pruned configs of Triton kernels", TRITON, self._prune_triton),
            ("timings of inductor's choices", INDUCTOR, self._watch_inductor),
            ("pruned choices of inductor", INDUCTOR, self._prune_inductor),
        ):
            is_wanted = bool(self._configs) or name.startswith("timings")
            if module in self._imported and is_wanted and name not in self._hooks:
                with self._guard(name):
                    self._hooks[name] = put(name, sys.modules[module])

    @contextmanager
    def _guard(self, name: str) -> Iterator[None]:
        """Whatever goes wrong within is no concern of the job's: the hook is switched off, and that is said once."""
        try:
            yield
        except Exception as error:
            with self._lock:
                is_new = name not in self._off
                self._off.add(name)
                self._take_out(name)
                self._hooks[name] = lambda: None  # and does not come back
            if is_new:
                self._said(
                    f"{name} are off in this process ({type(error).__name__}: {error}); tuning goes on as usual."
                )

    def _take_out(self, name: str) -> None:
        self._hooks.pop(name, lambda: None)()

    def _is_on(self, name: str) -> bool:
        return name in self._hooks and name not in self._off

    # --- Triton ---

    def _watch_triton(self, name: str, module: Any) -> Callable[[], None]:
        original = module.Autotuner._bench
        _expect(original, "self", "args", "config", "meta")

        @functools.wraps(original)
        def _bench(tuner: Any, *args: Any, config: Any, **meta: Any) -> Any:
            began = time.perf_counter()
            found = original(tuner, *args, config=config, **meta)
            seconds = time.perf_counter() - began
            if self._is_on(name):
                with self._guard(name):
                    ms = float(found[0] if isinstance(found, list | tuple) else found)
                    key = _triton_key(tuner, meta)
                    self._heard(Benchmark(triton_name(tuner), "triton", key, triton_config(config), ms, seconds))
            return found

        return _replaced(module.Autotuner, "_bench", _bench)

    def _prune_triton(self, name: str, module: Any) -> Callable[[], None]:
        prune_configs, run = module.Autotuner.prune_configs, module.Autotuner.run
        _expect(prune_configs, "self", "kwargs")
        _expect(run, "self", "args", "kwargs")
        pruned: weakref.WeakSet[Any] = weakref.WeakSet()
        failed: weakref.WeakSet[Any] = weakref.WeakSet()

        @functools.wraps(prune_configs)
        def fewer(tuner: Any, kwargs: Any) -> Any:
            found = prune_configs(tuner, kwargs)
            if self._is_on(name) and tuner not in failed:
                with self._guard(name):
                    few = self._configs.get(triton_name(tuner), frozenset())
                    kept = [config for config in found if triton_config(config) in few]
                    if kept:
                        pruned.add(tuner)
                        return kept
            return found

        @functools.wraps(run)
        def run_anyhow(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            # The configs kept may all be too large for a key that was not seen before: then all are tried after all.
            # Such a kernel is refused before it has run.
            try:
                return run(tuner, *args, **kwargs)
            except refusals:
                if tuner not in pruned or tuner in failed:
                    raise
            failed.add(tuner)
            tuner.cache.clear()
            return run(tuner, *args, **kwargs)

        refusals = tuple(getattr(module, error) for error in ("OutOfResources", "PTXASError") if hasattr(module, error))
        return _both(
            _replaced(module.Autotuner, "prune_configs", fewer), _replaced(module.Autotuner, "run", run_anyhow)
        )

    # --- inductor ---

    def _watch_inductor(self, name: str, module: Any) -> Callable[[], None]:
        spent = _Spent(sys.modules["torch._dynamo.utils"].compilation_time_metrics)
        cache = module.get_algorithm_selector_cache()

        def tell(timings: Mapping[Any, float], op: str, nodes: Sequence[Any], *more: Any) -> None:
            with self._guard(name):
                seconds = spent.on(op)
                if seconds is None:  # torch had the times from an earlier run
                    return
                kernel, key = inductor_name(op, nodes), repr([cache.key_of(node) for node in nodes])
                best: dict[str, float] = {}
                for choice, ms in timings.items():
                    config = inductor_config(choice)
                    best[config] = min(ms, best.get(config, math.inf))
                for config, ms in best.items():
                    self._heard(Benchmark(kernel, "inductor", key, config, ms, seconds / len(best)))

        cache.add_feedback_saver(tell)
        return lambda: _without(cache.feedback_saver_fns, tell)

    def _prune_inductor(self, name: str, module: Any) -> Callable[[], None]:
        cache, asked = module.get_algorithm_selector_cache(), threading.local()
        original = type(cache).__call__
        _expect(original, "self", "name", "choices", "input_nodes")

        @functools.wraps(original)
        def select(selector: Any, name: Any, choices: Any, input_nodes: Any, *args: Any, **kwargs: Any) -> Any:
            # What filters choices is not told what they are for. Those that ranks time together have to be the same on
            # all of them, and are left alone.
            asked.of = None if kwargs.get("is_collective") else (name, input_nodes)
            return original(selector, name, choices, input_nodes, *args, **kwargs)

        def fewer(choices: list[Any]) -> list[Any]:
            of = getattr(asked, "of", None)
            if of is not None:
                with self._guard(name):
                    few = self._configs.get(inductor_name(*of), frozenset())
                    kept = [choice for choice in choices if inductor_config(choice) in few]
                    # Off the CPU a template may turn out to need more than the device has: ATen's kernel never does.
                    is_safe = of[1][0].get_device().type == "cpu"
                    if kept:
                        spare = () if is_safe else (module.ExternKernelCaller,)
                        return [each for each in choices if each in kept or isinstance(each, spare)]
            return choices

        cache.add_preprocessing_fn(fewer)
        undo = _replaced(type(cache), "__call__", select)
        return _both(undo, lambda: _without(cache.preprocessing_fns, fewer))


# --- names that are the same in every run ----------------------------------------------------------------------------


def triton_name(tuner: Any) -> str:
    """The function's name and a hash of its source, decorators and configs included."""
    return _named(tuner.base_fn)


@functools.lru_cache(maxsize=256)
def _named(function: Any) -> str:
    try:
        source = inspect.getsource(function).encode()
    except (OSError, TypeError):  # it was not written in a file
        source = function.__code__.co_code + repr(function.__code__.co_names).encode()
    return f"{function.__name__}-{hashlib.sha256(source).hexdigest()[:8]}"


def triton_config(config: Any) -> str:
    """The config, as one would write it into a program."""
    options = ", ".join(f"{name!r}: {value!r}" for name, value in sorted(config.kwargs.items()))
    parts = [f"{{{options}}}", f"num_warps={config.num_warps}", f"num_stages={config.num_stages}"]
    for name, usual in (("num_ctas", 1), ("maxnreg", None), ("ir_override", None)):
        value = getattr(config, name, usual)
        if value not in (usual, None):
            parts.append(f"{name}={value!r}")
    if hook := getattr(config, "pre_hook", None):
        parts.append(f"pre_hook={getattr(hook, '__name__', 'hook')}")
    return f"triton.Config({', '.join(parts)})"


def _triton_key(tuner: Any, meta: Mapping[str, Any]) -> str:
    """What the autotuner tells calls apart by: the arguments that it was told to, and the types of all tensors."""
    given = {name: value for name, value in {**tuner.nargs, **meta}.items() if name in tuner.arg_names}
    key = [f"{name}={given[name]!r}" for name in tuner.keys if name in given]
    types = [str(value.dtype).removeprefix("torch.") for value in given.values() if hasattr(value, "dtype")]
    return ", ".join(key + types)


def inductor_name(op: str, nodes: Sequence[Any]) -> str:
    """The operator, the device and the types: what fits one type may be too large, or not made, for another."""
    types = dict.fromkeys(str(node.get_dtype()).removeprefix("torch.") for node in nodes)
    return re.sub(r"[^\w.-]", "_", f"inductor.{op}.{nodes[0].get_device().type}.{'-'.join(types)}")


def inductor_config(choice: Any) -> str:
    """The choice, without the number that it has in this process, and without what follows from sizes."""
    if hasattr(choice, "choice"):  # ATen's, or a library's
        options = "".join(f" {name}={value!r}" for name, value in sorted(choice.kwargs.items()))
        return f"{choice.name}{options}"
    details = re.sub(r"\bEVEN_K=\w+(, )?", "", choice.description).strip(", ")
    return f"{re.sub(r'_[0-9]+$', '', choice.name)} {details}".strip()


class _Spent:
    """How long torch says that it has timed and compiled the choices for an operator."""

    def __init__(self, metrics: Mapping[str, list[float]]) -> None:
        self._metrics = metrics
        self._seen: dict[str, tuple[list[float], int]] = {}

    def on(self, op: str) -> float | None:
        """Seconds since it was last asked; None if nothing was timed."""
        compiled, timed = (self._new(f"{op}_template_{work}") for work in ("precompiling", "autotuning"))
        return sum(compiled) + sum(timed) if timed else None

    def _new(self, name: str) -> list[float]:
        now = self._metrics.get(name, [])
        before, count = self._seen.get(name, (now, 0))
        self._seen[name] = now, len(now)
        return now[count if before is now else 0 :]  # after a reset of dynamo there is another list


# --- changing a library ----------------------------------------------------------------------------------------------


def _expect(function: Any, *names: str) -> None:
    """Raises if a function does not begin with these parameters."""
    found = tuple(inspect.signature(function).parameters)
    if found[: len(names)] != names:
        raise TypeError(f"{function.__qualname__} takes {', '.join(found)} in this version")


def _replaced(owner: Any, attribute: str, replacement: Any) -> Callable[[], None]:
    """Replaces an attribute of a class; what puts the original back, unless somebody else has replaced it since."""
    original = vars(owner)[attribute]
    setattr(owner, attribute, replacement)

    def undo() -> None:
        if vars(owner)[attribute] is replacement:
            setattr(owner, attribute, original)

    return undo


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def undo() -> None:
        first()
        second()

    return undo


def _without(hooks: list[Any], hook: Any) -> None:
    if hook in hooks:
        hooks.remove(hook)
