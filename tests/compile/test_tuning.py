"""What the hooks hear and do: in Triton's interpreter, in inductor on the CPU, and where a library has changed."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import inductor
import shared
import warm
from headway.compile.autotune import Benchmark, Timings, regret_of, smallest, timings_in
from headway.compile.tuning import INDUCTOR, TRITON, Tuning, triton_config

HEAD = """
import json, sys
from headway.compile.autotune import Tables
from headway.compile.tuning import Tuning
tables, said, told = Tables(), [], {"benchmarks": {}}
tuning = Tuning(tables.hear, said.append)
asked = json.loads(sys.argv[1])
def tell(**more):
    members = {name: data.decode() for name, data in tables.members({}).items()}
    print(json.dumps(told | {"said": said, "members": members} | more))
"""

KERNELS = '''
import time, torch, triton
import triton.language as tl
tuning.imported("triton.runtime.autotuner")
tuning.apply(asked)

def timed(name):
    """A benchmarker that also counts, so that what headway counts can be compared."""
    def do_bench(call, quantiles):
        told["benchmarks"][name] = told["benchmarks"].get(name, 0) + 1
        took = []
        for _ in range(2):
            began = time.perf_counter()
            call()
            took.append(1000 * (time.perf_counter() - began))
        return [min(took), *took]
    return do_bench

def too_large(given):
    if given["n"] > 3000 and given["BLOCK"] == 1024:
        raise triton.runtime.errors.OutOfResources(given["BLOCK"], 512, "shared memory")

BLOCKS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (32, 256, 1024) for warps in (2, 4)]

@triton.autotune(configs=BLOCKS, key=["n"], do_bench=timed("add"))
@triton.jit
def add(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)

@triton.autotune(configs=[triton.Config({"BLOCK": block}, pre_hook=too_large) for block in (128, 1024)], key=["n"],
                 do_bench=timed("twice"))
@triton.jit
def twice(x, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

def small_only(configs, named, **more):
    return [config for config in configs if config.kwargs["BLOCK"] < 1024]

@triton.autotune(configs=BLOCKS, key=["n"], do_bench=timed("negate"),
                 prune_configs_by={"early_config_prune": small_only})
@triton.jit
def negate(x, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + at, -tl.load(x + at, mask=at < n), mask=at < n)

def results(n):
    torch.manual_seed(n)
    x, y = torch.randn(n), torch.randn(n)
    a, b, c = torch.empty(n), torch.empty(n), torch.empty(n)
    grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)
    add[grid](x, y, a, n)
    twice[grid](x, b, n)
    negate[grid](x, c, n)
    return [torch.equal(a, x + y), torch.equal(b, x * 2), torch.equal(c, -x)]

told["right"] = [results(n) for n in (900, 2500)]
'''

CHOICES = """
import torch, torch._inductor.config as config
from torch._dynamo.utils import counters
from torch._inductor import select_algorithm
from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning
torch.set_num_threads(1)
config.max_autotune, config.max_autotune_gemm_backends, config.fx_graph_cache = True, "CPP,ATEN", False
tuning.imported("torch._inductor.select_algorithm")
tuning.apply(asked)

def counted(timings, name, *more):
    told["benchmarks"].setdefault(name, []).append(len(timings))

select_algorithm.add_feedback_saver(counted)

@torch.library.custom_op("headway_test::rows", mutates_args=())
def rows(x: torch.Tensor, w: torch.Tensor, times: int = 1) -> torch.Tensor:
    return x + w.sum(0)

@rows.register_fake
def _(x, w, times=1):
    return torch.empty_like(x)

def again(x, w, times=1):
    for _ in range(times):
        total = w.cumsum(0)[-1]
    return x + total

register_custom_op_autotuning(rows, configs=[CustomOpConfig(again, times=times) for times in (1, 3, 9)])

def both(a, b, x, w):
    return torch.bmm(a, b), rows(x, w)

def run(n):
    torch._dynamo.reset()
    torch.manual_seed(n)
    given = torch.randn(2, n, 16), torch.randn(2, 16, 32), torch.randn(n, 32), torch.randn(64, 32)
    with torch.no_grad():
        product, sums = torch.compile(both)(*given)
    expected = torch.bmm(*given[:2]), given[2] + given[3].sum(0)
    return torch.allclose(product, expected[0], atol=1e-4) and torch.allclose(sums, expected[1], atol=1e-4)

told["right"] = [run(16)]
if not asked:
    told["right"].append(run(16))
tell()
"""


def ran(
    folder: Path, program: str, configs: dict[str, list[str]], imports: tuple[str, ...] = (), **environ: str
) -> dict[str, Any]:
    """What a program tells that tunes under these sets."""
    path = folder / "program.py"
    path.write_text(HEAD + program)
    done = warm.run(
        [sys.executable, str(path), json.dumps(configs)], imports=imports,
        capture_output=True, text=True, timeout=500, cwd=folder, env={**os.environ, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def tables(told: dict[str, Any]) -> dict[str, Timings]:
    """By the kernel's name, without its hash."""
    found, problems = timings_in({name: data.encode() for name, data in told["members"].items()})
    assert not problems
    return {each.kernel.rsplit("-", 1)[0]: each for each in found}


# --- Triton ----------------------------------------------------------------------------------------------------------


def kernels(folder: Path, configs: dict[str, list[str]], program: str = KERNELS + "tell()\n") -> dict[str, Any]:
    return ran(folder, program, configs, TRITON_INTERPRET="1")


@pytest.fixture
def first(tmp_path: Path) -> dict[str, Any]:
    """What a program told that tuned without sets. It runs once per test run."""
    pytest.importorskip("triton")
    told: dict[str, Any] = json.loads(shared.once("tuned", lambda: json.dumps(kernels(tmp_path, {}))))
    return told


pytestmark = [pytest.mark.timeout(300), pytest.mark.needs("g++")]


def test_every_benchmark_of_a_triton_kernel_is_heard(first: dict[str, Any]) -> None:
    found = tables(first)
    assert first["said"] == []
    assert {name: table.benchmarks for name, table in found.items()} == first["benchmarks"]
    assert first["benchmarks"] == {"add": 12, "twice": 4, "negate": 8}
    add = found["add"]
    assert list(add.ms) == ["n=900, float32, float32, float32", "n=2500, float32, float32, float32"]
    assert add.configs[0] == "triton.Config({'BLOCK': 32}, num_warps=2, num_stages=3)"
    assert add.kind == "triton"
    assert add.seconds > sum(map(sum, (row.values() for row in add.ms.values()))) / 1000


def test_the_next_run_benchmarks_fewer_and_computes_the_same(first: dict[str, Any], tmp_path: Path) -> None:
    found = tables(first)
    kept = {table.kernel: table.configs[2:4] for table in (found["add"], found["negate"])}
    told = kernels(tmp_path, kept)
    assert told["right"] == first["right"] == [[True] * 3] * 2
    assert told["benchmarks"] == {"add": 4, "twice": 4, "negate": 4}
    assert tables(told)["add"].configs == kept[found["add"].kernel]


def test_a_set_of_one_is_not_benchmarked_at_all(first: dict[str, Any], tmp_path: Path) -> None:
    add = tables(first)["add"]
    few = smallest(add, 0.9)
    assert "'BLOCK': 32}" not in str(few)
    assert regret_of(add, few) <= 0.9
    told = kernels(tmp_path, {add.kernel: few[:1]})
    assert told["right"] == first["right"]
    assert "add" not in told["benchmarks"]


@pytest.mark.thorough
def test_sets_that_no_longer_fit_are_left_alone(first: dict[str, Any], tmp_path: Path) -> None:
    found = tables(first)
    large = "triton.Config({'BLOCK': 1024}, num_warps=2, num_stages=3)"
    gone = {
        found["add"].kernel: ["triton.Config({'BLOCK': 7}, num_warps=2, num_stages=3)"],
        found["negate"].kernel: [large],
    }
    assert kernels(tmp_path, gone)["benchmarks"] == first["benchmarks"]


@pytest.mark.thorough
def test_a_kernel_whose_source_has_changed_is_tuned_again(first: dict[str, Any], tmp_path: Path) -> None:
    found = tables(first)
    kept = {table.kernel: table.configs[:1] for table in (found["add"], found["twice"])}
    changed = KERNELS.replace("tl.load(x + at, mask=at < n) + tl.load", "tl.load(x + at, mask=at < n) + 1 * tl.load")
    told = kernels(tmp_path, kept, changed + "tell()\n")
    assert told["right"] == first["right"]
    assert told["benchmarks"] == {"add": 12, "negate": 8}
    assert tables(told)["add"].kernel != found["add"].kernel


@pytest.mark.thorough
def test_a_key_for_which_all_kept_configs_are_too_large_gets_the_others(first: dict[str, Any], tmp_path: Path) -> None:
    twice = tables(first)["twice"]
    assert "pre_hook=too_large" in twice.configs[1]
    again = (
        "told['right'].append(results(5000))\nassert list(twice.cache.values())[0].kwargs == {'BLOCK': 128}\ntell()\n"
    )
    told = kernels(tmp_path, {twice.kernel: twice.configs[1:]}, KERNELS + again)
    assert told["right"] == [[True] * 3] * 3
    assert told["benchmarks"]["twice"] == 2


def test_undo_leaves_triton_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = """
import triton.runtime.autotuner as module
names = ("_bench", "prune_configs", "run")
before = [vars(module.Autotuner)[name] for name in names]
tuning.apply({"k": ["c"]})
tuning.imported("triton.runtime.autotuner")
put = [vars(module.Autotuner)[name] is not was for name, was in zip(names, before)]
tuning.undo()
tell(put=put, back=[vars(module.Autotuner)[name] is was for name, was in zip(names, before)])
"""
    told = kernels(tmp_path, {}, program)
    assert told["put"] == told["back"] == [True] * 3


# --- inductor --------------------------------------------------------------------------------------------------------


def choices(folder: Path, configs: dict[str, list[str]], cache: str) -> dict[str, Any]:
    environ = inductor.environ() | {"TORCHINDUCTOR_CACHE_DIR": str(folder / cache)}
    return ran(folder, CHOICES, configs, (inductor.__name__,), **environ)


@pytest.mark.thorough
def test_inductors_choices_are_heard_and_the_next_run_benchmarks_fewer(tmp_path: Path) -> None:
    told = choices(tmp_path, {}, "first")
    assert told["said"] == []
    op = "headway_test::rows_autotuned"
    assert told["benchmarks"] == {"bmm": [2, 2], op: [4, 4]}  # the second had its times from torch's cache
    found = tables(told)
    bmm, rows = found["inductor.bmm.cpu.float32"], found["inductor.headway_test__rows_autotuned.cpu.float32"]
    assert (bmm.kind, bmm.benchmarks, len(bmm.ms)) == ("inductor", 2, 1)
    assert (rows.kind, rows.benchmarks, len(rows.ms)) == ("inductor", 4, 1)
    assert all(len(row) == 4 for row in rows.ms.values())
    assert bmm.seconds > 0
    kept = {bmm.kernel: smallest(bmm, 1e9), rows.kernel: rows.configs[:2]}
    assert len(kept[bmm.kernel]) == 1
    again = choices(tmp_path, kept, "second")
    assert again["said"] == []
    assert told["right"] == [True] * 2
    assert again["right"] == [True]
    assert again["benchmarks"] == {op: [2]}
    assert tables(again)["inductor.headway_test__rows_autotuned.cpu.float32"].configs == rows.configs[:2]


# --- where a library is not as it is known ---------------------------------------------------------------------------


class Autotuner:
    """As much of Triton's as the hooks look at."""

    def __init__(self, function: Any, sizes: list[int]) -> None:
        self.base_fn, self.keys, self.arg_names, self.cache = function, ["n"], ["n"], {}
        self.configs = [SimpleNamespace(kwargs={"BLOCK": size}, num_warps=4, num_stages=3) for size in sizes]
        self.nargs: dict[str, Any] = {}

    def _bench(self, *args: Any, config: Any, **meta: Any) -> list[float]:
        return [float(config.kwargs["BLOCK"])]

    def prune_configs(self, kwargs: dict[str, Any]) -> list[Any]:
        return self.configs

    def run(self, *args: Any, **kwargs: Any) -> int:
        self.nargs = {"n": args[0]}
        took = {config.kwargs["BLOCK"]: self._bench(*args, config=config) for config in self.prune_configs(kwargs)}
        return int(min(took, key=lambda block: took[block]))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that stands where Triton's does, with a class that a test may change."""
    own = {name: value for name, value in vars(Autotuner).items() if name not in ("__dict__", "__weakref__")}
    module = SimpleNamespace(Autotuner=type("Autotuner", (), own))
    monkeypatch.setitem(sys.modules, TRITON, module)
    return module


def sample(n: int) -> int:
    return n


def test_another_signature_switches_that_hook_off_and_says_so_once(library: Any) -> None:
    library.Autotuner._bench = lambda self, args, config: [1.0]
    said: list[str] = []
    heard: list[Benchmark] = []
    tuning = Tuning(heard.append, said.append)
    tuning.imported(TRITON)
    tuning.imported(TRITON)
    tuning.apply({"k": ["c"]})
    assert len(said) == 1
    assert said[0].startswith("timings of Triton kernels are off in this process (TypeError: ")
    assert library.Autotuner._bench(None, 1, 2) == [1.0]


def test_a_missing_part_switches_pruning_off_and_not_the_timings(library: Any) -> None:
    del library.Autotuner.prune_configs
    said: list[str] = []
    heard: list[Benchmark] = []
    tuning = Tuning(heard.append, said.append)
    tuning.apply({"k": ["c"]})
    tuning.imported(TRITON)
    assert [line.partition(" are off")[0] for line in said] == ["pruned configs of Triton kernels"]
    tuner = library.Autotuner(sample, [8])
    tuner.nargs = {"n": 1}
    assert tuner._bench(config=tuner.configs[0]) == [8.0]
    assert [each.ms for each in heard] == [8.0]


def test_a_listener_that_raises_is_not_the_jobs_problem(library: Any) -> None:
    said: list[str] = []
    calls: list[Benchmark] = []

    def broken(heard: Benchmark) -> None:
        calls.append(heard)
        raise OSError("the disk is full")

    tuning = Tuning(broken, said.append)
    tuning.imported(TRITON)
    assert library.Autotuner(sample, [8, 4]).run(1) == 4
    assert library.Autotuner(sample, [8, 4]).run(2) == 4
    assert len(calls) == 1
    assert said == [
        "timings of Triton kernels are off in this process (OSError: the disk is full); tuning goes on as usual."
    ]


def test_sets_may_come_before_or_after_the_library_and_change(library: Any) -> None:
    heard: list[Benchmark] = []
    tuning = Tuning(heard.append, print)
    tuning.imported(TRITON)
    tuner = library.Autotuner(sample, [8, 4, 2])
    assert tuner.run(1) == 2
    name, configs = heard[0].kernel, [triton_config(config) for config in tuner.configs]
    tuning.apply({name: configs[:2]})
    assert tuner.run(1) == 4
    tuning.apply({name: configs[:1]})
    assert tuner.run(1) == 8
    tuning.apply({})
    assert tuner.run(1) == 2
    tuning.undo()
    heard.clear()
    assert tuner.run(1) == 2
    assert heard == []


def test_threads_tune_at_once(library: Any) -> None:
    heard: list[Benchmark] = []
    tuning = Tuning(heard.append, print)
    tuning.imported(TRITON)
    kept = triton_config(library.Autotuner(sample, [4]).configs[0])
    results: list[int] = []

    def tune(number: int) -> None:
        for n in range(50):
            if number == 0:
                tuning.apply({heard[0].kernel: [kept]} if heard and n % 2 else {})
            results.append(library.Autotuner(sample, [8, 4]).run(n))

    threads = [threading.Thread(target=tune, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [4] * 200
    assert 200 <= len(heard) <= 400


def test_neither_library_is_imported_for_it() -> None:
    program = (
        "import sys, headway.compile.tuning as t; t.Tuning(print, print).apply({'k': ['c']});"
        "print({'torch', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()\n", done.stderr


def test_inductor_of_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Selector:
        def __call__(self, request: object) -> object:
            return request

    selector, said = Selector(), []
    monkeypatch.setitem(sys.modules, INDUCTOR, SimpleNamespace(get_algorithm_selector_cache=lambda: selector))
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace())
    tuning = Tuning(print, said.append)
    tuning.apply({"k": ["c"]})
    tuning.imported(INDUCTOR)
    assert selector(3) == 3
    assert [line.partition(" are off")[0] for line in said] == [
        "timings of inductor's choices",
        "pruned choices of inductor",
    ]
