"""What it costs to be measured without a change: a step, the start of an interpreter, the import of torch, a compile.

With and without take turns. The step is measured twice. First alone: the hooks are taken out and put back in one
process, around a loop that fetches from a real DataLoader and steps a real optimizer, and does nothing else. Then as
users feel it: two whole programs, with and without, whose steps do real work in between, so that the code of the hooks
has left the caches.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.measure import Row, take_turns

SITE = Path(__file__).parents[1] / "src" / "headway" / "instrument" / "site"
STEPS = 4000

LOOP = f"""
import json, sys
import torch
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter as Iterator
from bench.measure import cpu_us, take_turns

torch.set_num_threads(1)

class Nothing(torch.optim.Optimizer):
    def step(self):
        pass

weight = torch.zeros(1, requires_grad=True)
weight.grad = torch.zeros(1)  # else its steps would change nothing, and not count
nothing = Nothing([weight], {{}})
loader = DataLoader(range({STEPS}), batch_size=None)

def loop():
    for batch in loader:
        nothing.step()

loop()
places = [(Iterator, "__next__"), (DataLoader, "__iter__")]
hooked = [(owner, name, getattr(owner, name)) for owner, name in places]
hooks = dict(optimizers._global_optimizer_post_hooks)
assert hooks and all(hasattr(function, "__headway__") for *_, function in hooked)

def with_hooks(wanted):
    for owner, name, function in hooked:
        setattr(owner, name, function if wanted else function.__headway__.original)
    optimizers._global_optimizer_post_hooks.clear()
    optimizers._global_optimizer_post_hooks.update(hooks if wanted else {{}})
    return cpu_us(loop, {STEPS})

print(json.dumps(take_turns(int(sys.argv[1]), on=lambda: with_hooks(True), off=lambda: with_hooks(False))))
"""

TRAINING = """
import json, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
steps = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)

def train(steps):
    loader = DataLoader(TensorDataset(torch.randn(16 * steps, 16), torch.randn(16 * steps, 1)), batch_size=16)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

train(500)
began = time.process_time()
train(steps)
print(json.dumps(1e6 * (time.process_time() - began) / steps))
"""

COMPILE = """
import json, time
import torch
import torch._dynamo
from torch._dynamo.callback import callback_handler as handler

model = torch.nn.Sequential(*[torch.nn.Linear(32, 32), torch.nn.ReLU()] * 8)
hooks = compiling = 0.0
def clocked(callback):
    def call(args):
        global hooks
        began = time.perf_counter()
        callback(args)
        hooks += time.perf_counter() - began
    return call
assert handler.start_callbacks and handler.end_callbacks
handler.start_callbacks[:] = [clocked(callback) for callback in handler.start_callbacks]
handler.end_callbacks[:] = [clocked(callback) for callback in handler.end_callbacks]
began = time.perf_counter()
torch.compile(model)(torch.randn(8, 32)).sum().backward()
compiling = time.perf_counter() - began
print(json.dumps([hooks, compiling]))
"""


def run(quick: bool) -> list[Row]:
    """The rows on instrumentation."""
    with tempfile.TemporaryDirectory() as folder:
        loop = _python(folder, LOOP, "5" if quick else "25")
        step = [on - off for on, off in zip(loop["on"], loop["off"], strict=True)]
        rows = [Row("step of an unmodified loop", "µs", step, at_most=5.0, note=_share(loop["off"]))]
        steps = "3000" if quick else "30000"
        whole = take_turns(
            3 if quick else 7,
            off=lambda: _python(folder, TRAINING, steps, on=False),
            on=lambda: _python(folder, TRAINING, steps),
        )
        added = [on - off for on, off in zip(whole["on"], whole["off"], strict=True)]
        note = f"a step takes {min(whole['off']):.0f} µs without"
        rows.append(Row("… of a whole program: DataLoader, SGD, a small model", "µs", added, at_most=5.0, note=note))
        rounds = 5 if quick else 15
        for code, name, bar in (
            ("pass", "start of an interpreter", 30.0),
            ("import torch", "… that imports torch", 30.0),
        ):
            took = take_turns(
                rounds if code == "pass" else rounds // 2 + 1,
                off=lambda code=code: _cpu_ms(folder, code, False),
                on=lambda code=code: _cpu_ms(folder, code, True),
            )
            added = [on - off for on, off in zip(took["on"], took["off"], strict=True)]
            rows.append(Row(name, "ms", added, at_most=bar, note=f"without: {min(took['off']):.0f} ms at best"))
        shares = [_python(folder, COMPILE) for _ in range(1 if quick else 3)]
        percent = [100 * hooks / compiling for hooks, compiling in shares]
        return [*rows, Row("hooks' share of a compile", "%", percent, at_most=1.0)]


def _share(without: list[float]) -> str:
    return f"the bare loop of a DataLoader and an optimizer takes {min(without):.0f} µs a step"


def _environ(folder: str, on: bool) -> dict[str, str]:
    # As where headway is installed, its bytecode is kept: the first round, which does not count, writes it.
    unwanted = ("HEADWAY_", "PYTHONDONTWRITEBYTECODE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    environ |= {"HEADWAY_HOME": folder, "HEADWAY_JOB": "bench", "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "cache"))}
    return environ | {"PYTHONPATH": os.pathsep.join([*([str(SITE)] if on else []), str(Path.cwd())])}


def _python(folder: str, code: str, *words: str, on: bool = True) -> Any:
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=_environ(folder, on), check=False)
    if done.returncode:
        raise RuntimeError(f"the benchmark's own program failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _cpu_ms(folder: str, code: str, on: bool) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], env=_environ(folder, on), check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
