"""The examples that start by stages train to the same losses, bit for bit, whether their stages overlap or not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(example: str, ranks: int, folder: Path, *options: str, serial: bool) -> list[str]:
    """The lines with a loss that an example prints."""
    environ = os.environ | {"HEADWAY_HOME": str(folder / "home"), "HEADWAY_SERIAL": "1" if serial else "0"}
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        str(EXAMPLES / example), *options,
    ]  # fmt: skip
    done = subprocess.run(words, env=environ, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if "loss" in line]


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp2(ranks: int, tmp_path: Path) -> None:
    found = []
    for serial in (False, True):
        options = ["--steps", "8", "--folder", str(tmp_path / f"serial-{serial}")]
        found.append(losses("train_fsdp2.py", ranks, tmp_path, *options, serial=serial))
    assert len(found[0]) == 1
    assert found[0] == found[1]
