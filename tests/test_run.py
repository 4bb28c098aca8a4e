"""`headway.current()` in real scripts: it joins the right job, measures it, and never gets in its way."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import warm
from headway import run as run_module
from headway.cli.source import open_job
from headway.events.clock import Clock
from headway.events.process import describe
from headway.observe.summary import summary

LOOP = """
import headway
run = headway.current()
for step, batch in run.steps(range(20)):
    pass
run.checkpoint_saved()
run.finish()
print("done", run.job)
"""


def script(home: Path, text: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    path = home / "train.py"
    path.write_text(text)
    run = warm.run if "torch" in text else subprocess.run
    done = run([sys.executable, str(path)], capture_output=True, text=True, env=os.environ | environ, timeout=120)
    assert done.returncode == code, done.stderr
    return done


def told(job: str | None = None) -> dict[str, Any]:
    return summary(open_job(job).ledger())


def journals(home: Path) -> list[Path]:
    return list(home.rglob("*.hwj"))


def test_a_script_on_its_own_is_a_job_of_its_own(home: Path) -> None:
    assert "done train-" in script(home, LOOP).stdout
    report = told()
    assert report["state"] == "ended"
    assert report["steps"]["new"] == 20
    assert report["stages"]["imports"] > 0


def test_ranks_with_one_job_name_are_one_job(home: Path) -> None:
    for rank in ("0", "1"):
        script(home, LOOP, HEADWAY_JOB="both", RANK=rank, WORLD_SIZE="2")
    assert [rank["rank"] for rank in told("both")["ranks"]] == [0, 1]


def test_the_same_script_again_under_the_same_name_is_a_second_attempt(home: Path) -> None:
    script(home, LOOP.replace("run.finish()", "raise ValueError('no')"), code=1, HEADWAY_JOB="again")
    script(home, LOOP, HEADWAY_JOB="again")
    report = told("again")
    assert [attempt["outcome"] for attempt in report["attempts"]] == ["failed", "ended"]
    assert report["attempts"][0]["error"] == "ValueError: no"


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.thorough)])
def test_data_workers_write_no_journal_and_do_not_spoil_their_parents(home: Path, method: str) -> None:
    script(
        home,
        f"""
import multiprocessing, headway
run = headway.current()
def work(n):
    headway.current().mark("from a worker")
    with headway.current().span("evaluation"): pass
    return [step for step, _ in headway.current().steps(range(5))]
if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        print(pool.map(work, [1, 2]))
    for step, batch in run.steps(range(20)): pass
    run.finish()
""",
    )
    assert len(journals(home)) == 1
    assert told()["steps"]["new"] == 20


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_trainers_started_by_multiprocessing_are_ranks(home: Path, method: str) -> None:
    script(
        home,
        f"""
import os, headway, torch.multiprocessing as mp
def train(rank):
    os.environ |= {{"RANK": str(rank), "WORLD_SIZE": "2"}}
    run = headway.current()
    for step, batch in run.steps(range(20)): pass
    run.finish()
if __name__ == "__main__":
    mp.start_processes(train, nprocs=2, start_method={method!r})
""",
        HEADWAY_JOB="spawned",
    )
    report = told("spawned")
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert len(report["attempts"]) == 1
    assert report["steps"]["new"] == 20


def test_loader_workers_of_torch_are_not_ranks(home: Path) -> None:
    script(
        home,
        """
import headway, torch
from torch.utils.data import DataLoader
run = headway.current()
loader = DataLoader(range(64), batch_size=8, num_workers=2)
for epoch in range(2):
    for step, batch in run.steps(loader): pass
run.finish()
""",
    )
    assert len(journals(home)) == 1
    report = told()
    assert report["steps"]["new"] == 16
    assert report["failures"] == []


def test_a_process_that_is_dated_back_keeps_its_clocks_together(home: Path) -> None:
    process = describe({}, "j", Clock())
    seen = run_module._seen_from_outside(process, {}, process.t_ns - 1000)
    assert seen.t_ns == process.t_ns - 1000
    assert seen.wall_ns == process.wall_ns - 1000


def test_disabled_nothing_is_written(home: Path) -> None:
    script(home, LOOP, HEADWAY_DISABLE="1")
    assert journals(home) == []


def test_a_home_that_cannot_be_written_costs_one_line_and_nothing_is_lost(home: Path) -> None:
    (home / "file").write_text("in the way")
    done = script(home, LOOP, HEADWAY_HOME=str(home / "file" / "home"), TMPDIR=str(home))
    assert done.stderr.count("headway:") == 1
    assert "Journals go to" in done.stderr
    assert len(journals(home)) == 1


def test_with_nowhere_to_write_the_job_goes_on_unmeasured(home: Path) -> None:
    (home / "file").write_text("in the way")
    blocked = str(home / "file")
    done = script(home, LOOP, HEADWAY_HOME=blocked, TMPDIR=blocked)
    assert "done" in done.stdout
    assert "This job is not measured" in done.stderr


def test_a_spool_that_others_can_write_to_is_not_trusted(home: Path) -> None:
    (home / "file").write_text("in the way")
    spool = home / f"headway-{os.getuid()}"
    spool.mkdir(mode=0o777)
    spool.chmod(0o777)
    done = script(home, LOOP, HEADWAY_HOME=str(home / "file"), TMPDIR=str(home))
    assert "can be written by others" in done.stderr
    assert journals(home) == []


def test_a_misspelt_setting_is_named_and_does_not_stop_the_job(home: Path) -> None:
    done = script(home, LOOP, HEADWAY_JBO="x")
    assert "did you mean HEADWAY_JOB?" in done.stderr
    assert told()["steps"]["new"] == 20


def test_a_stage_that_does_not_exist_names_the_nearest(home: Path) -> None:
    text = "import headway\nheadway.current().stage('train_modul_creation')"
    assert "did you mean train_module_creation?" in script(home, text, code=1).stderr


def test_the_journal_of_a_spooled_job_reaches_its_home(home: Path) -> None:
    script(home, LOOP, HEADWAY_JOB="spooled", HEADWAY_SPOOL=str(home / "spool"), HEADWAY_NODE="n1")
    import time

    deadline = time.monotonic() + 120
    while not list((home / "jobs").rglob("*.hwn")) or told("spooled")["state"] != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    report = told("spooled")
    assert report["steps"]["new"] == 20
    assert report["ranks"][0]["node"] == "n1"


def test_a_kill_in_the_middle_of_a_step_leaves_every_finished_step(home: Path) -> None:
    text = LOOP.replace("    pass", "    if step == 13: import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    script(home, text, code=-9)
    report = told()
    assert report["state"] == "failed"
    assert report["attempts"][0]["next_step"] == 13


def test_checkpoints_without_a_number_mean_up_to_here(home: Path) -> None:
    text = LOOP.replace("run.checkpoint_saved()\n", "").replace("    pass", "    if step == 9: run.checkpoint_saved()")
    script(home, text)
    assert told()["steps"] == {"new": 10, "repeated": 0, "unsaved": 10}


def test_the_json_report_is_json(home: Path) -> None:
    script(home, LOOP)
    json.dumps(told(), allow_nan=False)


def test_a_kill_inside_a_phase_happens_once_and_is_seen_in_that_phase(home: Path) -> None:
    text = """
import headway, time
from pathlib import Path
from headway.testing import kill_in
run = headway.current()
kill_in(run, "train_module_creation", marker=Path("MARKER"))
with run.stage("train_module_creation"):
    pass
for step, batch in run.steps(range(20)): pass
run.finish()
""".replace("MARKER", str(home / "killed"))
    script(home, text, code=-9, HEADWAY_JOB="phase")
    script(home, text, HEADWAY_JOB="phase")
    report = told("phase")
    assert [attempt["outcome"] for attempt in report["attempts"]] == ["failed", "ended"]
    assert report["stages"]["train_module_creation"] > 0
