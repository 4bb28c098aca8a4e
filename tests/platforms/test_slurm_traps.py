"""What a job in a real Slurm finds out about how Slurm will treat it."""

import json
import shlex
import sys

import pytest
from slurm import Slurm

pytestmark = pytest.mark.needs("scontrol", "slurmctld", "slurmd", "munged")

CODE = """
import json, os
from headway.launch import surroundings
from headway.launch.surroundings import read_slurm
surroundings.TIMEOUT_S = 100.0
print(json.dumps({finding.name: [finding.state, finding.what] for finding in read_slurm(os.environ)}))
"""
LOOK = f"exec {sys.executable} -c {shlex.quote(CODE)}"


def told(slurm: Slurm, script: str, *options: str) -> dict[str, list[str]]:
    job = slurm.submit(script, *options)
    slurm.wait_for(job, "COMPLETED")
    found: dict[str, list[str]] = json.loads(slurm.output(job))
    return found


def test_a_job_finds_what_it_was_submitted_with(slurm: Slurm) -> None:
    found = told(slurm, LOOK, "--no-requeue", "--time=10")
    assert found["Slurm requeue"] == ["hurts", "Requeue=0"]
    assert found["Slurm requeue wait"] == ["good", "6 s, from cred_expire=5"]
    assert found["Slurm preemption"] == ["good", "none in partition main"]
    assert found["Slurm early signal"][0] == "unknown"


@pytest.mark.thorough
def test_a_job_finds_the_signal_that_its_script_asks_for(slurm: Slurm) -> None:
    found = told(slurm, f"#SBATCH --time=10 --signal=B:USR1@60\n{LOOK}", "--requeue")
    assert found["Slurm early signal"] == ["good", "--signal=B:USR1@60"]
    assert found["Slurm requeue"] == ["good", "Requeue=1"]


@pytest.mark.thorough
def test_what_srun_starts_needs_no_signal_of_its_own(slurm: Slurm) -> None:
    found = told(slurm, LOOK.replace("exec", "srun --quiet", 1), "--time=10")
    assert "Slurm early signal" not in found
    assert "Slurm requeue" in found


def test_outside_of_a_job_the_clusters_settings_are_told(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.launch import surroundings
    from headway.launch.surroundings import read_slurm

    monkeypatch.setattr(surroundings, "TIMEOUT_S", 100.0)
    found = {finding.name: finding.what for finding in read_slurm(slurm.environ)}
    assert found["Slurm requeue"] == "JobRequeue=1"
    assert found["Slurm preemption"] == "none in partition main"
