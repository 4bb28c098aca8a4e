"""The DLRM of the examples learns the same, bit for bit, undisturbed and through a kill, a failed read and a notice.

Undisturbed it is plain torch, and through the faults it runs with headway, which accounts for every second.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from published import settled

import inductor
import ranks as warm_ranks

sys.path.append(str(Path(__file__).parents[2]))

from bench import drill
from bench.drill import COLD, PLAIN, Arm, Drill, Fault, Outcome, same_state

STEPS, SAVE_EVERY = 140, 20
SIZES = {
    "= 26, 32, 13, 1024, 3": "= 6, 8, 13, 64, 3",
    "ROWS = 20_000 if HAS_TORCHREC else 500": "ROWS = 200 if HAS_TORCHREC else 50",
}
UNPACKAGED = "import serve; serve.package = lambda *given: None; import train_plain; train_plain.main()"
"""The plain program without the package that it makes at its end."""


EAGER = {"whole.towers.compile()": 'whole.towers.compile(backend="eager")'}
"""Each attempt of each rank would compile for seconds."""


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example with fewer and smaller tables, compiled at a low price."""
    folder = tmp_path / "example"
    folder.mkdir()
    for source in drill.EXAMPLE.glob("*.py"):
        (folder / source.name).write_text(source.read_text())
    text = (folder / "dlrm.py").read_text()
    for large, small in (SIZES | getattr(request, "param", {})).items():
        assert large in text
        text = text.replace(large, small)
    (folder / "dlrm.py").write_text(text)
    monkeypatch.setattr(drill, "EXAMPLE", folder)
    for name, value in inductor.environ().items():
        monkeypatch.setenv(name, value)
    return folder


def trained(arm: Arm, folder: Path, faults: list[Fault]) -> tuple[Outcome, Drill]:
    machine = folder.with_name(f"{folder.name}-machine")
    job = Drill(arm, folder, machine, steps=STEPS, save_every=SAVE_EVERY, step_s=0.05)
    return job.run(faults), job


def undisturbed(example: Path, folder: Path) -> tuple[dict[int, str], Path]:
    """Return the losses and the last checkpoint of the plain program."""
    environ = os.environ | {"PYTHONPATH": str(example), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    words = ["-c", UNPACKAGED, "--steps", str(STEPS), "--folder", str(folder), "--save-every", str(SAVE_EVERY)]
    done = warm_ranks.run(2, words, env=environ, imports=warm_ranks.IMPORTS)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = dict(line.split() for line in (folder / "losses.txt").read_text().splitlines())
    return {int(step): loss for step, loss in losses.items()}, folder / "checkpoints" / f"{STEPS:08}"


def assert_accounted(outcome: Outcome) -> None:
    assert outcome.report["steps"]["new"] == STEPS
    assert sum(outcome.report["ledger"].values()) == pytest.approx(outcome.report["wall_s"], abs=1e-6)
    assert outcome.report["unattributed_s"] < 0.01 * outcome.report["wall_s"]


@pytest.mark.thorough
@pytest.mark.parametrize("example", [EAGER], indirect=True, ids=["eager"])
@pytest.mark.timeout(900)
@pytest.mark.needs("g++")
@pytest.mark.needs_package("torchrec")
def test_sharded_by_torchrec_and_published_elsewhere(home: Path, example: Path) -> None:
    losses, checkpoint = undisturbed(example, home / "plain")
    faults = [Fault("kill", 15), Fault("exception", 35), Fault("notice", 55)]
    ours, job = trained(COLD, home / "headway", faults)
    assert len(losses) == STEPS
    assert ours.losses == losses
    assert same_state(ours.checkpoint, checkpoint) == []
    assert_accounted(ours)
    assert [attempt["outcome"] for attempt in ours.report["attempts"]] == ["failed", "failed", "stopped", "ended"]
    assert ours.report["attempts"][3]["first_step"] == ours.report["attempts"][2]["next_step"], "a notice loses nothing"
    published = settled(job.machine / "home")
    assert published["phase"] == "published", published["problem"]
    package = Path(published["to"], published["version"], "package", "model.pt2")
    serve = f"import sys; sys.path.insert(0, {str(example)!r}); import torch; from serve import golden\n"
    serve += f"print(torch._inductor.aoti_load_package({str(package)!r})(*golden()[2]).shape)\n"
    serve += "assert 'headway' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", serve], capture_output=True, text=True, check=False)
    assert "torch.Size([64])" in done.stdout, done.stderr


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.needs("g++")
def test_with_plain_tables_under_torchrun(home: Path, example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIN_TABLES", "1")
    plain, _ = trained(PLAIN, home / "plain", [Fault("kill", 50)])
    ours, job = trained(COLD, home / "headway", [Fault("kill", 40)])
    assert len(plain.losses) == STEPS
    assert ours.losses == plain.losses
    assert same_state(ours.checkpoint, plain.checkpoint) == []
    assert_accounted(plain)
    assert_accounted(ours)
    job.wait_for_publisher(patient=False)
