"""The DLRM of the examples, plain and with headway: through a kill, a failed read and a notice it learns what an
undisturbed plain one learns, bit for bit, and every second of it is accounted for."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from bench.drill import COLD, EXAMPLE, PLAIN, Drill, Fault, Outcome, same_state

STEPS = 170


def trained(arm_name: str, folder: Path, faults: list[Fault]) -> tuple[Outcome, Drill]:
    arm = {"plain": PLAIN, "headway": COLD}[arm_name]
    drill = Drill(arm, folder / arm_name, folder / f"{arm_name}-machine", steps=STEPS, save_every=20, step_s=0.05)
    return drill.run(faults), drill


def assert_alike(plain: Outcome, ours: Outcome) -> None:
    assert len(plain.losses) == STEPS
    assert ours.losses == plain.losses
    assert same_state(ours.checkpoint, plain.checkpoint) == []
    for outcome in (plain, ours):
        assert outcome.report["steps"]["new"] == STEPS
        assert sum(outcome.report["ledger"].values()) == pytest.approx(outcome.report["wall_s"], abs=1e-6)
        assert outcome.report["unattributed_s"] < 0.01 * outcome.report["wall_s"]


@pytest.mark.timeout(900)
@pytest.mark.needs("g++")
@pytest.mark.needs_package("torchrec")
def test_sharded_by_torchrec_and_published_elsewhere(home: Path) -> None:
    plain, _ = trained("plain", home, [Fault("kill", 50)])
    ours, drill = trained("headway", home, [Fault("kill", 25), Fault("exception", 45), Fault("notice", 70)])
    assert_alike(plain, ours)
    assert [attempt["outcome"] for attempt in ours.report["attempts"]] == ["failed", "failed", "stopped", "ended"]
    assert ours.report["attempts"][3]["first_step"] == ours.report["attempts"][2]["next_step"], "a notice loses nothing"
    published = drill.wait_for_publisher()
    assert published is not None
    assert published["phase"] == "published", published["problem"]
    package = Path(published["to"], published["version"], "package", "model.pt2")
    serve = f"import sys; sys.path.insert(0, {str(EXAMPLE)!r}); import torch; from serve import golden\n"
    serve += f"print(torch._inductor.aoti_load_package({str(package)!r})(*golden()[2]).shape)\n"
    serve += "assert 'headway' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", serve], capture_output=True, text=True, check=False)
    assert "torch.Size([64])" in done.stdout, done.stderr


@pytest.mark.timeout(600)
@pytest.mark.needs("g++")
def test_with_plain_tables(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIN_TABLES", "1")
    plain, _ = trained("plain", home, [])
    ours, drill = trained("headway", home, [Fault("kill", 40)])
    assert_alike(plain, ours)
    drill.wait_for_publisher()
