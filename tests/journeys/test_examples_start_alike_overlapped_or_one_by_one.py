"""The examples that start by stages train to the same losses, bit for bit, whether their stages overlap or not."""

import os
from pathlib import Path

import pytest

import ranks as warm_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(example: str, ranks: int, folder: Path, *options: str, serial: bool) -> list[str]:
    """Return the lines with a loss that an example prints."""
    environ = os.environ | {"HEADWAY_HOME": str(folder / "home"), "HEADWAY_SERIAL": "1" if serial else "0"}
    done = warm_ranks.run(ranks, [EXAMPLES / example, *options], env=environ, cwd=folder, imports=warm_ranks.IMPORTS)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if "loss" in line]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_fsdp2(ranks: int, tmp_path: Path) -> None:
    found = []
    for serial in (False, True):
        options = ["--steps", "8", "--folder", str(tmp_path / f"serial-{serial}")]
        found.append(losses("train_fsdp2.py", ranks, tmp_path, *options, serial=serial))
    assert len(found[0]) == 1
    assert found[0] == found[1]
