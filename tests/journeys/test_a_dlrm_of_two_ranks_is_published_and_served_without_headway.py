"""A DLRM is trained on two ranks, which end. Another process publishes it, and a third serves it with torch alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from published import headway, settled

import inductor

EXAMPLE = Path(__file__).parents[2] / "examples" / "publish_dlrm.py"

SERVER = """
import sys, torch
folder = sys.argv[1]
version = f"{folder}/{open(folder + '/latest').read()}"
model = torch._inductor.aoti_load_package(f"{version}/package/model.pt2")
golden = torch.load(f"{version}/golden/batches.pt", weights_only=True)
for batch, expected in zip(golden["batches"], golden["outputs"]):
    torch.testing.assert_close(model(*batch), expected, atol=1e-5, rtol=1e-4)
dense, sparse = golden["batches"][0]
assert model(dense.repeat(20, 1), sparse.repeat(20, 1)).shape == (20 * len(dense),)
assert not [name for name in sys.modules if name.startswith(("headway", "train_dlrm", "publish_dlrm"))]
print("served")
"""


@pytest.mark.thorough
@pytest.mark.needs("g++")
def test_a_dlrm_of_two_ranks_is_published_and_served_without_headway(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "headway", "run", "--job", "dlrm", "--nproc-per-node", "2", str(EXAMPLE)]
    command += ["--steps", "6", "--folder", str(folder)]
    environ = os.environ | inductor.environ()
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    state = settled(home)
    assert state["phase"] == "published", state

    served = subprocess.run(
        [sys.executable, "-c", SERVER, str(folder / "published")], capture_output=True, text=True, cwd=tmp_path
    )
    assert served.stdout == "served\n", served.stderr

    report = headway(home, "report", "dlrm")
    (told,) = report["publications"]
    assert (told["outcome"], told["version"]) == ("published", state["version"])
    assert told["saved_accelerator_s"] == pytest.approx(2 * told["seconds"])
    assert len(report["ranks"]) == 2
    assert report["ledger"]["shutdown.publish"] < told["seconds"]
    card = (folder / "published" / state["version"] / "README.md").read_text()
    assert "dlrm" in card
    assert "parity" in card
