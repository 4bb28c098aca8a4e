"""A DLRM is trained on two ranks, which leave; a process of its own publishes it; a third serves it by torch alone."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def headway(home: Path, *words: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, "-m", "headway", *words], env=kept | {"HEADWAY_HOME": str(home)}, cwd=home,
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++: apt install g++")
def test_a_dlrm_of_two_ranks_is_published_and_served_without_headway(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    headway(
        tmp_path, "run", "--job", "dlrm", "--nproc-per-node", "2", str(EXAMPLE), "--steps", "6", "--folder", str(folder)
    )
    until, state = time.monotonic() + 250, {"phase": ""}
    while state["phase"] not in ("published", "failed", "rejected"):
        assert time.monotonic() < until, state
        time.sleep(1)
        (state,) = json.loads(headway(tmp_path, "publish", "status", "--json"))
    assert state["phase"] == "published", state

    served = subprocess.run(
        [sys.executable, "-c", SERVER, str(folder / "published")], capture_output=True, text=True, cwd=tmp_path
    )
    assert served.stdout == "served\n", served.stderr

    report = json.loads(headway(tmp_path, "report", "dlrm", "--json"))
    (told,) = report["publications"]
    assert (told["outcome"], told["version"]) == ("published", state["version"])
    assert told["saved_accelerator_s"] == pytest.approx(2 * told["seconds"])
    assert len(report["ranks"]) == 2
    assert report["ledger"]["shutdown.publish"] < told["seconds"]
    card = (folder / "published" / state["version"] / "README.md").read_text()
    assert "dlrm" in card
    assert "parity" in card
