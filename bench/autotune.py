"""How many benchmarks a pruned set of configs saves, and how much slower its kernels are.

A first process tunes over all configs and records. A second tunes over the sets made of that. Two more time all configs
again: by the lesser of their times, which nobody has chosen by, the regret is told. Triton runs in its interpreter,
whose times are those of NumPy, and inductor on the CPU: that few configs are enough there shows what the method does,
not what a GPU would gain by it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.measure import Row
from headway.compile.autotune import REGRET, Timings, regret_of, smallest, timings_in

HEAD = """
import json, sys, time
from headway.compile.autotune import Tables
from headway.compile.tuning import Tuning
asked, keys = json.loads(sys.argv[1])
tables, count = Tables(), 0
tuning = Tuning(tables.hear, lambda line: sys.exit(line))

def tell():
    members = {name: data.decode() for name, data in tables.members({}).items()}
    print(json.dumps({"benchmarks": count, "members": members}))
"""

TRITON = """
import torch, triton
import triton.language as tl
tuning.imported("triton.runtime.autotuner")
tuning.apply(asked)

def do_bench(call, quantiles):
    global count
    count += 1
    took = []
    for _ in range(5):
        began = time.process_time()  # the interpreter is nothing but CPU work, and the machine may be busy
        call()
        took.append(1000 * (time.process_time() - began))
    return [min(took)] * 3

SIZES = [(m, n, k) for m in (16, 64) for n in (16, 32, 128) for k in (16, 64)]
CONFIGS = [triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}) for m, n, k in SIZES]

@triton.autotune(configs=CONFIGS, key=["M", "N", "K"], do_bench=do_bench)
@triton.jit
def matmul(a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = tl.load(a + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        right = tl.load(b + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        total += tl.dot(left, right)
    tl.store(c + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))

for M, N, K in keys:
    torch.manual_seed(0)
    a, b, c = torch.randn(M, K), torch.randn(K, N), torch.empty(M, N)
    matmul[lambda meta: (triton.cdiv(M, meta["BLOCK_M"]), triton.cdiv(N, meta["BLOCK_N"]))](a, b, c, M, N, K)
    assert torch.allclose(c, a @ b, atol=1e-3)
tell()
"""

INDUCTOR = """
import torch, torch._inductor.config as config
from torch._inductor import select_algorithm
from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning
torch.set_num_threads(1)
config.max_autotune, config.max_autotune_gemm_backends, config.fx_graph_cache = True, "ATEN", False
tuning.imported("torch._inductor.select_algorithm")
tuning.apply(asked)

def counted(timings, *more):
    global count
    count += len(timings)

select_algorithm.add_feedback_saver(counted)

def orders(first, last):
    # all ways to set brackets in a product
    if first == last:
        return [first]
    splits = range(first, last)
    return [(left, right) for at in splits for left in orders(first, at) for right in orders(at + 1, last)]

ORDERS = orders(0, 4)

def multiplied(matrices, order):
    return matrices[order] if isinstance(order, int) else torch.mm(*(multiplied(matrices, part) for part in order))

def chain(a, b, c, d, e, order=0):
    return multiplied((a, b, c, d, e), ORDERS[order])

@torch.library.custom_op("bench::product", mutates_args=())
def product(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, e: torch.Tensor, order: int = 0
) -> torch.Tensor:
    return chain(a, b, c, d, e, order)

@product.register_fake
def _(a, b, c, d, e, order=0):
    return a.new_empty(a.shape[0], e.shape[1])

register_custom_op_autotuning(product, configs=[CustomOpConfig(chain, order=at) for at in range(1, len(ORDERS))])
for sizes in keys:
    torch._dynamo.reset()
    torch.manual_seed(0)
    given = [torch.randn(*pair) / pair[0] ** 0.5 for pair in zip(sizes, sizes[1:])]
    with torch.no_grad():
        found = torch.compile(lambda *matrices: product(*matrices))(*given)
    assert torch.allclose(found, chain(*given), atol=1e-2)
tell()
"""

TRITON_KEYS = [(16, 16, 64), (16, 128, 64), (64, 64, 64), (128, 32, 128), (40, 200, 48), (128, 128, 32)]
INDUCTOR_KEYS = [
    (512, 384, 256, 128, 64, 8), (32, 64, 128, 256, 384, 512), (400, 300, 16, 300, 400, 64),
    (256, 256, 256, 256, 256, 4), (384, 256, 200, 100, 50, 16), (16, 100, 200, 300, 300, 400),
    (500, 400, 20, 200, 300, 100), (8, 256, 256, 256, 256, 256),
]  # fmt: skip
"""The sizes of five matrices whose product is taken: which brackets are best depends on nothing else."""


def run(quick: bool) -> list[Row]:
    """The rows on pruned autotuning."""
    count = 4 if quick else 8
    return [
        *_rows("Triton in the interpreter", TRITON, TRITON_KEYS[:count], 1 if quick else 2),
        *_rows("inductor on the CPU", INDUCTOR, INDUCTOR_KEYS[:count], 1 if quick else 2),
    ]


def _rows(name: str, program: str, keys: list[tuple[int, ...]], rounds: int) -> list[Row]:
    shares, regrets, notes = [], [], []
    for _ in range(rounds):
        first, second, *others = _runs(program, keys)
        table, fresh = _table(first), _least(*map(_table, others))
        few = smallest(table, REGRET)
        shares.append(100 * second["benchmarks"] / first["benchmarks"])
        regrets.append(100 * regret_of(fresh, few))
        unseen = [100 * regret_of(_only(table, key), smallest(_without(table, key), REGRET)) for key in table.ms]
        notes.append(
            f"{len(table.configs)} configs, {len(keys)} keys: {len(few)} kept, {first['benchmarks']} →"
            f" {second['benchmarks']} benchmarks, {table.seconds:.1f} → {_seconds(second):.1f} s; on a key that was"
            f" left out, by the recorded times, {median(unseen):.1f}% slower (median), {max(unseen):.1f}% at worst"
        )
    return [
        Row(f"autotune, {name}: benchmarks", "% of all", shares, at_most=40, note=notes[-1]),
        Row(f"autotune, {name}: regret at worst, measured afresh", "%", regrets, at_most=10),
    ]


def _runs(program: str, keys: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    """What a run over all configs, one over the pruned sets, and two more over all tell."""
    with tempfile.TemporaryDirectory() as folder:
        first = _ran(folder, program, {}, keys)
        table = _table(first)
        sets = ({table.kernel: smallest(table, REGRET)}, {}, {})
        return [first, *(_ran(folder, program, configs, keys) for configs in sets)]


def _ran(folder: str, program: str, configs: dict[str, list[str]], keys: list[tuple[int, ...]]) -> dict[str, Any]:
    path = Path(folder, "program.py")
    path.write_text(HEAD + program)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environ = {**os.environ, **one_thread, "TRITON_INTERPRET": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        words = [sys.executable, str(path), json.dumps([configs, keys])]
        done = subprocess.run(words, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise RuntimeError(f"a program that tunes failed:\n{done.stderr}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def _tables(told: dict[str, Any]) -> list[Timings]:
    return timings_in({name: data.encode() for name, data in told["members"].items()})[0]


def _table(told: dict[str, Any]) -> Timings:
    (table,) = _tables(told)
    return table


def _least(one: Timings, other: Timings) -> Timings:
    """Of each time the lesser one: whatever else the machine does only adds to it."""
    rows = {key: {config: min(ms, other.ms[key][config]) for config, ms in row.items()} for key, row in one.ms.items()}
    return Timings(kernel=one.kernel, kind=one.kind, ms=rows)


def _seconds(told: dict[str, Any]) -> float:
    return sum(table.seconds for table in _tables(told))  # none, if one config was left and nothing to time


def _only(table: Timings, key: str) -> Timings:
    return Timings(kernel=table.kernel, kind=table.kind, ms={key: table.ms[key]})


def _without(table: Timings, key: str) -> Timings:
    rows = {other: row for other, row in table.ms.items() if other != key}
    return Timings(kernel=table.kernel, kind=table.kind, ms=rows)
