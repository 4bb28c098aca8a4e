"""Real programs that recompile, in real processes: each recompile is recorded with what changed."""

import json
import os
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from running import run, train

import inductor
from headway.compile.doctor import Cause, Diagnosis, Recompile, diagnose
from headway.events.job import JobReader
from headway.events.vocabulary import Mark, Told
from headway.instrument import compilation
from headway.instrument.imports import ImportWatch
from headway.instrument.session import Session
from headway.paths import JobPaths, jobs_in

HEAD = """
import torch
torch.set_num_threads(1)
ones = torch.ones
def case(function, *calls, **options):
    compiled = torch.compile(function, **{"backend": "eager"} | options)
    for call in calls:
        compiled(*call)
"""


class Done:
    """What a program printed, and what its journal says."""

    def __init__(self, home: Path, out: str, err: str) -> None:
        self.out, self.err = out, err
        paths = JobPaths(home, jobs_in(home)[0])
        self.marks = [
            [record for record in batch.records if isinstance(record, Mark)] for _, batch in JobReader(paths).poll()
        ]
        self.found: Diagnosis = diagnose(self.marks)

    def told(self, name: str) -> list[dict[str, Any]]:
        return [mark.attrs for marks in self.marks for mark in marks if mark.name == name]

    def by_function(self, name: str) -> list[Recompile]:
        return [each for each in self.found.recompiles if each.function.startswith(f"{name} (")]


def measured(home: Path, text: str, **environ: str) -> Done:
    """Run a program under `headway exec`: in a process that has imported torch already, unless torch's import is to
    read these variables."""
    home.mkdir(exist_ok=True)
    path = home / "train.py"
    path.write_text(HEAD + textwrap.dedent(text))
    settings: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 240, "cwd": home}
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(home / "cache"), "HEADWAY_HOME": str(home)}
    settings["env"] = os.environ | inductor.environ() | {"OMP_NUM_THREADS": "1"} | folders | environ
    if environ:
        done = run(sys.executable, str(path), **settings)
    else:
        done = train(str(path), imports=[inductor.__name__], **settings)
    assert done.returncode == 0, done.stderr
    return Done(home, done.stdout, done.stderr)


CAUSES = """
import torch.nn as nn
def size(a): return a + 1
case(size, [ones(4, 3)], [ones(7, 3)], [ones(9, 3)])
def one(a): return a + 1
case(one, [ones(4, 3)], [ones(7, 3)], [ones(1, 3)])
def number(a, n): return a * n
case(number, [ones(4), 2], [ones(4), 5], [ones(4), 6])
def rate(a, n): return a * n
case(rate, [ones(4), 2.5], [ones(4), 5.5])
def dtype(a): return a + 1
case(dtype, [ones(4)], [ones(4).double()])
def rank(a): return a + 1
case(rank, [ones(4)], [ones(4, 2)])
def mode(a): return a + 1
compiled = torch.compile(mode, backend="eager")
compiled(ones(4))
with torch.no_grad():
    compiled(ones(4))
def length(a): return sum(a)
case(length, [[ones(4)]], [[ones(4), ones(4)]])
def called(a, f): return f(a)
case(called, [ones(4), torch.relu], [ones(4), torch.tanh])
class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.inner = 3, nn.ModuleDict({"x": nn.Linear(3, 3)})
    def forward(self, a): return self.inner["x"](a) * self.k
class Sub(Base):
    def forward(self, a): return super().forward(a) + 1
model = Sub()
compiled = torch.compile(model, backend="eager")
compiled(ones(4, 3))
compiled(ones(5, 3))
model.k = 9
compiled(ones(5, 3))
def keyed(d): return d["user-id, b"] + d["c"]
case(keyed, [{"user-id, b": ones(4), "c": ones(1)}], [{"user-id, b": ones(5), "c": ones(1)}])
"""


def test_every_cause_is_told_with_what_changed(home: Path) -> None:
    done = measured(home, CAUSES)
    seen = {
        name: [
            (each.cause, [(*change.what, change.values) for change in each.changes]) for each in done.by_function(name)
        ]
        for name in ("size", "number", "rate", "dtype", "mode", "length", "called", "rank", "keyed")
    }
    assert seen == {
        "size": [(Cause.SIZE, [("L['a']", "size", 0, (4, 7))])],
        "number": [(Cause.VALUE, [("L['n']", "int", None, ("2", "5"))])],
        "rate": [(Cause.VALUE, [("L['n']", "float", None, ("2.5", "5.5"))])],
        "dtype": [(Cause.IDENTITY, [])],
        "rank": [(Cause.IDENTITY, [("L['a']", "dims", None, (1, 2))])],
        "mode": [(Cause.GRAD_MODE, [])],
        "length": [(Cause.OTHER, [])],
        "called": [(Cause.IDENTITY, [])],
        "keyed": [(Cause.SIZE, [("L['d']['user-id, b']", "size", 0, (4, 5))])],
    }
    causes = {each.cause: each.changes[0].values for each in done.by_function("one")}
    assert causes == {Cause.SIZE: (4, 7), Cause.ZERO_ONE: (4, 7, 1)}
    sources = {each.changes[0].source for each in done.by_function("forward")}
    assert sources == {"L['a']", "L['self'].k"}
    assert "L['n']" in done.found.sources  # of `number`; the float of the same name adds none of its own
    assert any(line == "torch._dynamo.mark_dynamic(a, 0)" for line in done.found.mark_dynamic)


@pytest.mark.thorough
def test_with_the_value_only_what_no_value_helps_against_is_left(home: Path) -> None:
    value = ",".join(measured(home / "before", CAUSES).found.sources)
    done = measured(home / "after", CAUSES, TORCH_COMPILE_DYNAMIC_SOURCES=value)
    left = {each.cause for each in done.found.recompiles}
    assert left == {Cause.ZERO_ONE, Cause.IDENTITY, Cause.GRAD_MODE, Cause.OTHER, Cause.VALUE}
    assert [each.function.split()[0] for each in done.found.recompiles if each.cause is Cause.VALUE] == ["rate"]
    assert done.found.sources == []
    assert done.told(Told.COMPILE_SETTINGS)[0]["sources"] == value


@pytest.mark.thorough
def test_the_line_of_code_means_one_function_alone(home: Path) -> None:
    text = """
        def fixed(x): return x * 2
        def ragged(x): return x + 1
        case(fixed, [ones(8)])
        compiled = torch.compile(ragged, backend="eager")
        for size in (4, 5, 6):
            x = ones(size)
            # here
            compiled(x)
        """
    (line,) = measured(home / "before", text).found.mark_dynamic
    assert line == "torch._dynamo.mark_dynamic(x, 0)"
    done = measured(home / "after", text.replace("# here", line))
    assert (done.found.compilations, done.found.recompiles) == (2, [])


@pytest.mark.thorough
def test_a_function_that_is_given_up_is_told_with_its_name(home: Path) -> None:
    done = measured(
        home,
        """
        torch._dynamo.config.recompile_limit = 3
        def named(a, n): return a + 1 if n else a
        case(named, *([ones(4), str(n)] for n in range(6)))
        """,
    )
    (each,) = done.by_function("named")
    assert each.is_last
    assert each.times == 3
    assert done.found.compilations == 3


def test_graph_breaks_are_told_once_with_place_and_reason(home: Path) -> None:
    done = measured(
        home,
        """
        def broken(a):
            b = a * 2
            print("hello")
            return b + 1
        case(broken, [ones(4)], [ones(5)])
        torch._dynamo.reset()
        case(broken, [ones(4)])
        """,
    )
    line = (home / "train.py").read_text().splitlines().index('    print("hello")') + 1
    ((where, reason),) = done.found.graph_breaks
    assert where == f"broken ({home}/train.py:{line})"
    assert "`print`" in reason
    assert "L['b']:0" in done.found.sources  # of the rest of the function, which is compiled by itself
    assert done.out == "hello\n" * 3


@pytest.mark.thorough
def test_torchs_own_trace_is_told(home: Path) -> None:
    done = measured(home, "case(lambda a: a + 1, [ones(4)])", TORCH_TRACE="traces")
    assert done.found.traces == [f"{home}/traces"]
    assert list((home / "traces").iterdir())


@pytest.mark.thorough
def test_inductors_caches_are_told_cold_and_warm_and_the_backward_is_counted(home: Path) -> None:
    text = """
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, a): return a * 2
            @staticmethod
            def backward(ctx, grad): return grad * 2
        def cached(a): return (a * 3).sum()
        def bypassed(a): return Twice.apply(a).sum()
        for function in (cached, bypassed):
            torch.compile(function)(ones(4, requires_grad=True)).backward()
        """
    cold = measured(home, text)
    states = {(use.function.split()[0], use.cache, use.state): use.reason for use in cold.found.caches}
    assert {("cached", "AOT autograd", "miss"), ("cached", "FX graph", "miss")} <= states.keys()
    assert "autograd_function_apply" in states["bypassed", "AOT autograd", "bypass"]
    assert cold.found.cache_hits == 0
    forward = sum(mark["seconds"] for mark in cold.told(Told.COMPILED))
    backward = sum(mark["seconds"] for mark in cold.told(Told.COMPILED_BACKWARD))
    assert backward > 0
    assert cold.found.compiling_s == pytest.approx(forward + backward)
    again = measured(home, text)
    assert again.found.cache_hits > 0
    assert not [use for use in again.found.caches if use.state == "miss"]


@pytest.mark.thorough
def test_the_hooks_take_less_than_a_hundredth_of_the_compilations(home: Path) -> None:
    done = measured(
        home,
        """
        import json, time
        from headway.instrument import compilation
        spent = 0.0
        def timed(cls, name):
            original = getattr(cls, name)
            def wrapper(*args, **kwargs):
                global spent
                began = time.thread_time()
                try:
                    return original(*args, **kwargs)
                finally:
                    spent += time.thread_time() - began
            setattr(cls, name, wrapper)
        timed(compilation._Changes, "compare")
        timed(compilation._Changes, "keep")
        timed(compilation._Compiled, "tell")
        def wide(**features): return sum(feature.sum() for feature in features.values())
        compiled = torch.compile(wide, backend="aot_eager")
        began = time.thread_time()
        for step in range(6):
            compiled(**{f"f{n}": ones(10 + n + (step if n < step else 0)) for n in range(50)})
        print(json.dumps([spent, time.thread_time() - began]))
        """,
    )
    hooks_s, compiling_s = json.loads(done.out)
    assert len(done.told(Told.SOURCE_CHANGED)) >= 5
    assert hooks_s < 0.01 * compiling_s, (hooks_s, compiling_s)


def test_a_hook_that_fails_is_off_and_the_job_goes_on(home: Path) -> None:
    done = measured(
        home,
        """
        from headway.instrument import compilation
        def broken(*args): raise ValueError("broken on purpose")
        compilation._differences = broken
        case(lambda a: print(a.sum().item()), [ones(4)], [ones(5)], [ones(6)])
        """,
    )
    assert done.out == "4.0\n5.0\n6.0\n"
    assert [mark["hook"] for mark in done.told(Told.HOOK_OFF)] == [
        "torch._dynamo.variables.builder.process_automatic_dynamic"
    ]


def test_a_torch_that_compares_otherwise_is_left_alone() -> None:
    def process_automatic_dynamic(frame: Any, name: str) -> str:
        return name

    builder = ModuleType("builder")
    builder.process_automatic_dynamic = process_automatic_dynamic  # type: ignore[attr-defined]
    session = Session(ImportWatch("never", lambda watch: None))
    compilation._sources(session, builder)
    compilation._caches(session, ModuleType("utils"))
    assert builder.process_automatic_dynamic is process_automatic_dynamic
    assert [patch.state for patch in session.patches] == ["skipped: it takes frame, name"]


def test_the_hooks_can_be_taken_out_again() -> None:
    def process_automatic_dynamic(tx: Any, name: str, entry: Any, *, is_unspecialized_nn_module: bool = False) -> str:
        return name

    builder = ModuleType("builder")
    builder.process_automatic_dynamic = process_automatic_dynamic  # type: ignore[attr-defined]
    session = Session(ImportWatch("never", lambda watch: None))
    compilation._sources(session, builder)
    assert builder.process_automatic_dynamic is not process_automatic_dynamic
    session.undo()
    assert builder.process_automatic_dynamic is process_automatic_dynamic
