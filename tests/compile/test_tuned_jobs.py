"""A job is tuned, its sets are pruned and stored, and the next job tunes over them. The program does not change."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headway.cli import main

pytest.importorskip("torch")

TRITON = """
import json, time, torch, triton, triton.language as tl
from headway.compile import session

session.EXIT_S = 100.0  # a busy machine takes longer to save
counted = 0
bench = triton.runtime.autotuner.Autotuner._bench

def counting(*args, **kwargs):
    global counted
    counted += 1
    return bench(*args, **kwargs)

triton.runtime.autotuner.Autotuner._bench = counting

def do_bench(call, quantiles):  # Triton's own needs a GPU
    began = time.perf_counter()
    call()
    return [1000 * (time.perf_counter() - began)] * 3

@triton.autotune([triton.Config({"BLOCK": 2 ** n}) for n in range(4, 10)], key=["n"], do_bench=do_bench)
@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

x = torch.arange(3000.0)
y = torch.empty_like(x)
double[lambda meta: (triton.cdiv(3000, meta["BLOCK"]),)](x, y, 3000)
assert torch.equal(y, 2 * x)
print(json.dumps({"benchmarks": counted}))
"""


def run(folder: Path, job: str) -> dict[str, Any]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "TORCHIND"))}
    environ |= {
        "HEADWAY_HOME": str(folder / "home"), "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }  # fmt: skip
    command = [sys.executable, "-m", "headway", "exec", "--job", job, "--compile-cache", str(folder / "store")]
    command += [sys.executable, str(folder / "tuned.py")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.needs_package("triton")
def test_the_next_job_tunes_a_triton_kernel_over_the_configs_that_were_kept(tmp_path: Path) -> None:
    (tmp_path / "tuned.py").write_text(TRITON)
    assert run(tmp_path, "one")["benchmarks"] == 6
    environ = {"HEADWAY_HOME": str(tmp_path / "home")}
    told = CliRunner().invoke(main, ["compile", "autotune", "one", "--regret", "1000", "--apply"], env=environ)
    assert told.exit_code == 0, told.output
    assert run(tmp_path, "two")["benchmarks"] < 6
