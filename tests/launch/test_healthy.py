"""Jobs that behave oddly and are healthy: the supervisor lets each of them end.

In a sweep they run at full length, with the patience that users get. Here all is forty times shorter.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from supervising import LONG_S, WARM_HEADWAY, environment, report

import warm

ODD = [
    "long step", "slow save", "evaluation by one rank", "upload by one rank", "compilation", "paused loader", "stopped",
    "slow start", "slow end", "growing steps",
]  # fmt: skip
SHORT = 40
"""How many times shorter pauses and patience are here."""
PAUSE_S = 180.0
PROGRAM = Path(__file__).parent / "healthy.py"


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_odd_but_healthy_jobs_are_never_killed(home: Path, record_property: Callable[[str, object], None]) -> None:
    scale = 1 if "SEED" in os.environ else SHORT
    impatient = home / "impatient.py"
    impatient.write_text(
        f"import runpy, sys\nfrom headway.launch import progress\nprogress.PATIENCE_S /= {scale}\n"
        f"sys.argv[0] = {WARM_HEADWAY[1]!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    jobs = {}
    for kind in ODD:
        (home / kind).mkdir()
        words = ["--nproc-per-node", "2", "--job", kind, str(PROGRAM), kind, str(PAUSE_S / scale)]
        with (home / kind / "out").open("w") as out:
            jobs[kind] = warm.Popen(
                [sys.executable, str(impatient), "run", *words], first=["hooked"], cwd=home / kind,
                env=environment(OMP_NUM_THREADS="1"), stdout=out, stderr=out,
            )  # fmt: skip
    minutes = 0.0
    for kind, job in jobs.items():
        assert job.wait(LONG_S + 3 * PAUSE_S) == 0, f"{kind}: {(home / kind / 'out').read_text()[-2000:]}"
        told = report(kind)
        assert (len(told["attempts"]), len([*(home / kind).glob("done-*")])) == (1, 2), kind
        minutes += told["wall_s"] / 60
    record_property("job_minutes", round(minutes))
