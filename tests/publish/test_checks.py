"""Checks find what differs, and say what."""

import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from small_models import Clicks, Line, Point, PointLine, anchored, clicks, clicks_batch
from timing import warm_timing  # noqa: F401

from headway.publish import checks
from headway.publish.checks import finite, nonfinite, parity, same_signature, similar_latency, similar_size, user_check
from headway.publish.out import Check, Out
from headway.publish.ready import Served, export

pytestmark = pytest.mark.filterwarnings("ignore")


def compared(want: Any, got: Any, atol: float = 1e-5, rtol: float = 1e-4) -> Check:
    return parity("program", lambda: got, [want], [()], atol=atol, rtol=rtol)


# --- parity -----------------------------------------------------------------------------------------------------------


def test_a_program_exported_before_the_weights_changed_fails(tmp_path: Path) -> None:
    model, batches = clicks().eval(), [clicks_batch(4), clicks_batch(4)]
    torch.export.save(torch.export.export(model, (), batches[0]), tmp_path / "old.pt2")
    with torch.no_grad():
        model.last.bias[1] += 0.5
    expected = [checks.call(model, batch) for batch in batches]
    found = parity("program", checks.load_program(tmp_path / "old.pt2"), expected, batches, atol=1e-5, rtol=1e-4)
    assert not found.passed
    assert found.told.startswith("golden batch 0: ['click'] at [")
    assert "; eager gives 0." in found.told
    assert found.told.endswith("(4 of 8 differ)")


def test_a_model_left_in_training_fails(tmp_path: Path) -> None:
    model, batch = clicks(), clicks_batch(16)
    expected = [checks.call(clicks().eval(), batch)]
    assert not parity("package", model.train(), expected, [batch], atol=1e-5, rtol=1e-4).passed


def test_the_furthest_number_is_told_with_what_is_allowed() -> None:
    want = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = compared({"p": want}, {"p": want + torch.tensor([[0, 0.001], [0, 0.5]])}, atol=0.01, rtol=0.01)
    assert found.told == "golden batch 0: ['p'] at [1, 1] is 4.5; eager gives 4, 0.05 apart is allowed (1 of 4 differ)"


def test_what_is_within_tolerance_passes_and_the_distance_is_told() -> None:
    found = compared(torch.ones(3), torch.ones(3) + 2**-14)
    assert found.passed
    assert found.figures["furthest"] == 2**-14


@pytest.mark.parametrize(
    ("want", "got", "told"),
    [
        (torch.ones(2), torch.ones(3), "output is float32[3]; eager gives float32[2]"),
        (torch.ones(2), torch.ones(2).double(), "output is float64[2]; eager gives float32[2]"),
        ((torch.ones(2), None), (torch.ones(2),), "it gives [0]; eager gives [0]; [1]"),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}, "it gives ['b']; eager gives ['a']"),
        (torch.ones(2), torch.tensor([1, torch.nan]), "output at [1] is nan; eager gives 1, 0.00011 apart is allowed"),
        (torch.tensor(10**6), torch.tensor(10**6 + 1), "output at [] is 1e+06; eager gives 1e+06, 0 apart is allowed"),
        (torch.ones(2, dtype=torch.bool), torch.tensor([True, False]), "output at [1] is 0; eager gives 1"),
        (("a", torch.ones(1)), ("b", torch.ones(1)), "[0] is 'b'; eager gives 'a'"),
        (4, torch.tensor(5), "output at [] is 5; eager gives 4"),
    ],
    ids=["shape", "dtype", "structure", "names", "nan", "whole numbers", "truth", "text", "number"],
)
def test_every_kind_of_difference_is_told(want: Any, got: Any, told: str) -> None:
    found = compared(want, got)
    assert not found.passed
    assert found.told.startswith(f"golden batch 0: {told}")


@pytest.mark.parametrize(
    "value",
    [torch.empty(0, 3), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64), 3, 2.5, None, "a"],
    ids=str,
)
def test_what_is_the_same_passes(value: Any) -> None:
    assert compared([value], [value]).passed


def test_a_number_may_come_out_as_a_tensor() -> None:
    assert compared({"rows": 4}, {"rows": torch.tensor(4)}).passed


def test_what_cannot_be_run_fails_with_its_reason() -> None:
    def run() -> None:
        raise RuntimeError("Guard failed: x.size()[0] == 4\nand so on")

    found = parity("program", run, [torch.ones(1)], [()], atol=0, rtol=0)
    assert not found.passed
    assert found.told == (
        "golden batch 0: the program cannot run it, and eager can: RuntimeError: Guard failed: x.size()[0] == 4"
    )


def test_a_model_that_changes_its_inputs_leaves_golden_batches_alone() -> None:
    batch = (torch.zeros(3),)
    checks.call(lambda x: x.add_(1), batch)
    assert batch[0].tolist() == [0, 0, 0]


# --- finite -----------------------------------------------------------------------------------------------------------


def test_only_numbers_that_can_be_nan_are_looked_at() -> None:
    bad = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]])
    tensors = {
        "good": torch.ones(3), "half": bad.bfloat16().T, "complex": torch.complex(bad, bad),
        "eight bits": bad.to(torch.float8_e5m2), "whole": torch.ones(3, dtype=torch.int64), "text": "a",
    }  # fmt: skip
    found = nonfinite(tensors)
    assert found == {"half": 2, "complex": 2, "eight bits": 2}
    assert finite("outputs", found).told == (
        "there is NaN or Inf in the outputs: half has 2; complex has 2; eight bits has 2"
    )
    assert finite("outputs", {}).passed


# --- signature and size -----------------------------------------------------------------------------------------------

BEFORE = {"inputs": {"x": "float32[*, 3]"}, "weights": {"a": "float32[3]", "b": "int64[]"}}


def test_the_same_signature_passes_and_so_does_what_is_told_for_the_first_time() -> None:
    assert same_signature(BEFORE | {"outputs": {"y": "float32[*]"}}, BEFORE).passed
    assert same_signature({"weights": ("a",)}, {"weights": ["a"]}).passed, "the one before has been JSON"


def test_each_difference_of_a_signature_is_told() -> None:
    now = {"weights": {"a": "float32[4]", "c": "float32[1]"}}
    found = same_signature(now, BEFORE)
    assert not found.passed
    assert found.told == (
        "this version has no inputs; weights a was float32[3], is float32[4]; weights b is missing, was int64[]; "
        'weights c is new, float32[1]. If that is meant: --allow signature, or allow=("signature",)'
    )


def test_a_size_that_is_fixed_now_is_a_difference() -> None:
    found = same_signature({"inputs": {"x": "float32[4, 3]"}}, {"inputs": {"x": "float32[*, 3]"}})
    assert "inputs x was float32[*, 3], is float32[4, 3]" in found.told


def test_of_many_differences_the_first_are_told() -> None:
    found = same_signature({"weights": {}}, {"weights": {f"w{i}": "float32[1]" for i in range(1000)}})
    assert "; and 995 more" in found.told
    assert len(found.told) < 400


def test_what_is_allowed_passes_and_is_told() -> None:
    found = same_signature({"weights": {}}, {"weights": {"a": "float32[3]"}}, allowed=True)
    assert found.passed
    assert found.told == "weights a is missing, was float32[3] (allowed)"


@pytest.mark.parametrize(("now", "passes"), [(49, False), (50, True), (100, True), (200, True), (201, False)])
def test_a_half_and_twice_the_size_are_the_limits(now: int, passes: bool) -> None:
    assert similar_size(now, 100).passed is passes
    assert similar_size(now, 100, allowed=True).passed


def test_sizes_are_told() -> None:
    assert (
        similar_size(300, 100).told
        == '300 bytes, 100 before: 3.00 times as many. If that is meant: --allow size, or allow=("size",)'
    )


# --- latency ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Out]:
    """Versions with a program each: one works once, the other 60 times. Their batches are of the user's type."""
    folder, outs = tmp_path_factory.mktemp("lines"), {}
    anchor = anchored(folder, Line())
    for name, times in (("fast", 1), ("slow", 60)):
        outs[name] = Out(folder / name)
        batches = [(Point(torch.rand(4, 3)),), (Point(torch.rand(5, 3)),)]
        export(anchor, outs[name], Served(PointLine(times), batches))
    return outs


@pytest.mark.usefixtures("warm_timing")
def test_a_version_that_has_become_slower_fails(lines: dict[str, Out]) -> None:
    found = similar_latency(lines["slow"], lines["fast"].folder)
    assert not found.passed
    assert found.told.startswith("program/model.pt2 takes ")
    assert found.told.endswith(' times as long. If that is meant: --allow latency, or allow=("latency",)')
    assert found.figures["seconds"] > 2 * found.figures["before"]


@pytest.mark.usefixtures("warm_timing")
def test_a_version_that_has_become_faster_passes(lines: dict[str, Out]) -> None:
    found = similar_latency(lines["fast"], lines["slow"].folder)
    assert found.passed
    assert found.figures["seconds"] < found.figures["before"]


@pytest.mark.usefixtures("warm_timing")
@pytest.mark.thorough
def test_a_slower_version_may_be_allowed(lines: dict[str, Out]) -> None:
    before: Any = SimpleNamespace(signature=lines["fast"].signature, size=0, facts={})
    found = list(checks.compare_with_previous(lines["slow"], before, lines["fast"].folder, ["latency"]))
    assert [each.passed for each in found] == [True, True, True]
    assert found[-1].told.endswith("times as long (allowed)")


@pytest.mark.usefixtures("warm_timing")
@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "the version before has no program/model.pt2"), (b"not a program", "the version before does not run here")],
)
def test_a_version_before_that_does_not_run_is_no_failure(
    lines: dict[str, Out], tmp_path: Path, content: bytes | None, told: str
) -> None:
    if content is not None:
        (tmp_path / "program").mkdir()
        (tmp_path / "program/model.pt2").write_bytes(content)
    found = similar_latency(lines["fast"], tmp_path)
    assert found.passed
    assert found.told.startswith(f"not compared: {told}")


@pytest.mark.usefixtures("warm_timing")
@pytest.mark.thorough
def test_a_version_before_with_other_inputs_is_no_failure(lines: dict[str, Out], tmp_path: Path) -> None:
    before = Out(tmp_path / "before")
    export(anchored(tmp_path, clicks()), before, Served(Clicks(), [clicks_batch(4)]))
    found = similar_latency(lines["fast"], before.folder)
    assert found.passed
    assert "does not run here" in found.told


@pytest.mark.usefixtures("warm_timing")
def test_a_version_that_runs_only_in_its_publisher_is_told(
    lines: dict[str, Out], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Out(tmp_path)
    (now / "program").mkdir()
    (now / "program/model.pt2").write_bytes((lines["fast"] / "program/model.pt2").read_bytes())
    (now / "golden").mkdir()
    nowhere: Any = ModuleType("nowhere")
    exec("class Here: ...", vars(nowhere))
    monkeypatch.setitem(sys.modules, "nowhere", nowhere)
    torch.save({"batches": [(nowhere.Here(),)]}, now / checks.GOLDEN)
    found = similar_latency(now, lines["fast"].folder)
    assert found.passed
    assert found.told == (
        "not compared: this version, in a process of its own, does not run here (ModuleNotFoundError: No module named "
        "'nowhere')"
    )


class Deadly:
    """Ends whoever loads it."""

    def __reduce__(self) -> Any:
        return signal.raise_signal, (signal.SIGKILL,)


@pytest.mark.usefixtures("warm_timing")
def test_a_version_that_dies_in_a_fresh_process_fails(lines: dict[str, Out], tmp_path: Path) -> None:
    now = Out(tmp_path)
    (now / "program").mkdir()
    (now / "program/model.pt2").write_bytes((lines["fast"] / "program/model.pt2").read_bytes())
    (now / "golden").mkdir()
    torch.save({"batches": [(Deadly(),)]}, now / checks.GOLDEN)
    found = similar_latency(now, lines["fast"].folder)
    assert not found.passed
    assert found.told.startswith("this version, in a process of its own, dies by signal 9")


def test_a_version_that_does_not_run_within_the_time_limit_fails_unless_that_is_allowed(
    lines: dict[str, Out], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_PATIENCE_S", 0.05)
    found = similar_latency(lines["fast"], lines["fast"].folder)
    assert not found.passed
    assert found.told.startswith("this version, in a process of its own, has not run one golden batch within 0 s")
    assert similar_latency(lines["fast"], lines["fast"].folder, allowed=True).passed


def test_what_was_timed_before_the_time_was_up_is_compared() -> None:
    assert checks._told_in_time([checks._RUNS, "[60.0, 0.1]"]) == (60.0, 0.1)
    with pytest.raises(checks._NotCompared, match="the version before was not timed"):
        checks._told_in_time([checks._RUNS])


def test_a_package_before_for_other_cpus_is_not_run(tmp_path: Path) -> None:
    now, before = Out(tmp_path / "now"), tmp_path / "before"
    now.facts["cpu"] = "AVX2"
    for folder in (now.folder, before):
        for name in ("package/model.pt2", checks.GOLDEN):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"")
    found = similar_latency(now, before, "AVX512")
    assert found.passed
    assert found.told == "not compared: the version before is for CPUs with AVX512"


def test_weights_alone_are_not_timed(tmp_path: Path) -> None:
    assert similar_latency(Out(tmp_path), tmp_path).told == "not compared: there is nothing to be timed"


def test_runs_take_turns() -> None:
    seen: list[str] = []
    taken = checks.interleaved([lambda: seen.append("a"), lambda: seen.append("b")], [()])
    assert seen[:4] == ["a", "b", "a", "b"]
    assert len(taken) == 2


# --- the user's -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", [None, True, numpy.float32(0.8) > 0.7, "", [], ()])
def test_a_check_of_the_user_that_finds_nothing_passes(tmp_path: Path, result: Any) -> None:
    assert user_check("mine.py:check", lambda folder: result, tmp_path).passed


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (False, "it gave False"),
        (numpy.float32(0.6) > 0.7, "it gave np.False_"),
        (0, "it gave 0"),
        ("accuracy fell", "accuracy fell"),
        (["a", "b"], "a; b"),
        ({"auc": 0.4}, "it gave {'auc': 0.4}"),
        (torch.ones(2), "it gave tensor([1., 1.])"),
    ],
    ids=str,
)
def test_a_check_of_the_user_fails_with_what_it_returns(tmp_path: Path, result: Any, told: str) -> None:
    found = user_check("mine.py:check", lambda folder: result, tmp_path)
    assert not found.passed
    assert found.told == told


def test_a_check_of_the_user_fails_with_what_it_raises(tmp_path: Path) -> None:
    def check(folder: Path) -> None:
        raise AssertionError(f"{folder.name} has no labels")

    found = user_check("mine.py:check", check, tmp_path)
    assert not found.passed
    assert found.told == f"AssertionError: {tmp_path.name} has no labels"
