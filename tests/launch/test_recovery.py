"""`headway run` on real processes that fail in every way: what it does, says and writes down."""

import io
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from supervising import HEADWAY, LONG_S, TRAINER, WARM_HEADWAY, descendants, environment, report, trained, wait_for
from supervising import run as run_cold
from supervising import start as start_cold

import warm

TWO = ["--nproc-per-node", "2", "--job", "j"]
run, start = partial(run_cold, cold=False), partial(start_cold, cold=False)


PATIENT = """
import headway.launch.agent as agent, headway.launch.crew as crew
agent.GRACE_S, crew.SPEAK_NS = 100, 100 * 10**9
def policy(situation):
    return None
"""
"""A policy's module is imported by the supervisor. This one makes it wait for ranks that the machine holds up."""


def assert_accounted(job: str) -> dict:  # type: ignore[type-arg]
    found = report(job)
    assert sum(found["ledger"].values()) == pytest.approx(found["wall_s"], abs=1e-6)
    recovering = sum(seconds for key, seconds in found["ledger"].items() if key.startswith("recover."))
    assert sum(found["time_to_recover_s"]) == pytest.approx(recovering, abs=1e-6)
    return found


def test_a_job_that_fails_in_five_ways_recovers_from_each_at_once(home: Path) -> None:
    faults = "0:1@4=kill 1:0@7=raise 2:1@10=exit 3:0@13=segfault 4:1@16=abort"
    code, out, err = run([*TWO, str(TRAINER)], home, FAULTS=faults)
    assert code == 0, err
    assert out.count("is done") == 2
    found = assert_accounted("j")
    categories = [failure["category"] for failure in found["failures"]]
    assert categories[0] == "sigkill_unexplained"
    assert categories[1] == "python_error"
    assert categories[3:] == ["segfault", "sigabrt"]
    assert [failure["rank"] for failure in found["failures"]] == [1, 0, 1, 0, 1]
    assert all("Restarting: it had made progress" in failure["decision"] for failure in found["failures"])
    assert len(re.findall(r"^headway: rank \d on .* failed: ", err, re.M)) == 5
    # Every step was done, and those done twice are those that the report calls repeated.
    for rank in (0, 1):
        assert {step for _, step in trained(home, rank)} == set(range(21))
    assert found["steps"]["new"] == 21
    assert found["steps"]["repeated"] == len(trained(home)) - 21
    assert [attempt["outcome"] for attempt in found["attempts"]] == ["failed"] * 5 + ["ended"]


def test_the_same_failure_without_progress_stops_at_the_second_time(home: Path) -> None:
    code, _, err = run([*TWO, str(TRAINER)], home, FAULTS="*:1@7=raise")
    assert code == 1
    found = report("j")
    assert [failure["category"] for failure in found["failures"]] == ["python_error", "python_error"]
    assert "Not restarting: it would fail again." in err
    assert "ValueError: a bad batch" in err


def test_a_full_disk_is_not_retried_even_after_progress(home: Path) -> None:
    code, _, err = run([*TWO, str(TRAINER)], home, FAULTS="0:1@7=disk")
    assert code == 1
    assert "disk_full" in err
    assert "no retry can help" in err
    assert len(report("j")["attempts"]) == 1


def test_a_rank_that_says_it_was_cut_off_is_not_waited_for_while_no_other_ends(home: Path) -> None:
    patient = home / "patient.py"
    patient.write_text(
        "import runpy, sys\nfrom headway.launch import agent\nagent.SETTLE_S = 1000\n"
        f"sys.argv[0] = {WARM_HEADWAY[1]!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    words = [sys.executable, str(patient), "run", *TWO, str(TRAINER)]
    environ = environment(FAULTS="0:1@4=cut_off 0:0@4=hang")
    done = warm.run(words, first=["hooked"], cwd=home, env=environ, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
    assert [failure["rank"] for failure in report("j")["failures"]] == [1]


def test_what_was_printed_long_before_a_rank_is_killed_does_not_stop_the_job(home: Path) -> None:
    faults = "0:0@2=complain 0:1@2=complain 0:1@100=kill"
    code, _, err = run([*TWO, str(TRAINER)], home, FAULTS=faults, STEP_S="0.05", STEPS="105")
    assert code == 0, err
    assert [(failure["rank"], failure["category"]) for failure in report("j")["failures"]] == [
        (1, "sigkill_unexplained")
    ]


def test_max_restarts_is_the_most_there_will_be(home: Path) -> None:
    code, _, err = run([*TWO, "--max-restarts", "1", str(TRAINER)], home, FAULTS="0:1@4=kill 1:1@8=kill")
    assert code == 1
    assert "--max-restarts 1 is reached" in err


def test_a_script_that_fails_at_import_is_stopped_at_once_and_told_why(home: Path) -> None:
    (home / "broken.py").write_text("import no_such_package\n")
    code, _, err = run(["--job", "j", "broken.py"], home)
    assert code == 1
    assert "import_error (ModuleNotFoundError: No module named 'no_such_package')" in err
    assert "Not restarting: it failed before its first step" in err
    assert err.count("Traceback") == 1
    assert "headway/launch" not in err


def test_a_hang_is_noticed_explained_and_ended(home: Path) -> None:
    words = [*TWO, "--hang-after", "15", str(TRAINER)]
    code, _, err = run(words, home, FAULTS="0:1@8=hang", STEPS="12")
    assert code == 0, err
    assert re.search(r"rank 1 is missing from all_reduce", err), err
    assert re.search(r"trainer\.py:\d+ in fail: time\.sleep\(1000\)", err), err
    found = assert_accounted("j")
    (failure,) = found["failures"]
    assert (failure["rank"], failure["category"]) == (1, "collective_timeout")
    assert found["ledger"]["recover.detection"] > 4


LEAVES_EARLY = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, pair = dist.get_rank(), dist.new_group([1, 2])
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], 0.1)
for step in range(10 if rank == 0 else 20):
    if (rank, step, os.environ["HEADWAY_ATTEMPT"]) == (2, 10, "0"):
        time.sleep(1000)
    weight.grad = torch.ones(4)
    if rank:
        dist.all_reduce(weight.grad, group=pair)
    optimizer.step()
"""


def test_a_rank_that_ended_well_is_not_blamed_for_the_hang_of_another(home: Path) -> None:
    (home / "train.py").write_text(LEAVES_EARLY)
    code, _, err = run(["--nproc-per-node", "3", "--job", "j", "--hang-after", "15", "train.py"], home)
    assert code == 0, err
    assert "rank 2 is missing from all_reduce" in err
    assert "rank 0 has left, with exit code 0" in err
    assert [(failure["rank"], failure["category"]) for failure in report("j")["failures"]] == [
        (2, "collective_timeout")
    ]


def test_the_weights_are_those_of_an_undisturbed_run(home: Path) -> None:
    states = []
    for name, faults in (("calm", ""), ("stormy", "0:1@5=kill 1:0@8=raise")):
        folder = home / name
        folder.mkdir()
        code, _, err = run(["--nproc-per-node", "2", "--job", name, str(TRAINER)], folder, FAULTS=faults, STEPS="12")
        assert code == 0, err
        states.append((folder / "saved.pt").read_bytes())
    calm, stormy = (torch.load(io.BytesIO(state)) for state in states)
    assert calm["step"] == stormy["step"] == 12
    for key, value in calm["model"].items():
        assert torch.equal(value, stormy["model"][key])


def test_sigterm_ends_workers_that_do_not_listen_and_says_so_in_the_exit_code(home: Path) -> None:
    process = start([*TWO, str(TRAINER)], home, STEPS="100000")
    wait_for(lambda: trained(home), process)
    ranks = list(descendants(process.pid))
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG_S) == 128 + signal.SIGTERM
    wait_for(lambda: not [pid for pid in ranks if Path(f"/proc/{pid}").exists()])


POLITE = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import headway

run = headway.current()
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
saved = Path(f"at-{run.rank}")
start = int(saved.read_text()) if saved.exists() else 0
run.on_stop(lambda step: saved.write_text(str(step)))
for step, _ in run.steps(range(start, int(os.environ["STEPS"])), start=start):
    optimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward(); optimizer.step()
    with open(f"trained-{run.rank}", "a") as file:
        file.write(f"{os.environ['HEADWAY_ATTEMPT']} {step}\\n")
    time.sleep(0.03)
run.finish()
"""


def test_on_notice_all_ranks_save_at_the_same_step_and_the_next_run_goes_on_there(home: Path) -> None:
    (home / "polite.py").write_text(POLITE)
    process = start([*TWO, "polite.py"], home, STEPS="100000")
    wait_for(lambda: len(trained(home)) > 5, process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(LONG_S) == 75, (home / "stderr").read_text()
    [stopped] = {(home / f"at-{rank}").read_text() for rank in (0, 1)}
    steps = int(stopped) + 20
    code, _, err = run([*TWO, "polite.py"], home, STEPS=str(steps))
    assert code == 0, err
    assert [step for _, step in trained(home)] == list(range(steps))
    found = assert_accounted("j")
    assert len(found["attempts"]) == 2
    assert found["steps"] == {"new": steps, "repeated": 0, "unsaved": 0}


OWN_HANDLER = """
import os, signal, sys, time
from pathlib import Path
import headway

run = headway.current()
if len(sys.argv) > 1:
    signal.signal(signal.SIGTERM, lambda *_: Path("handled").touch())
run.on_stop(lambda step: Path("stopped").touch())
is_first = os.environ["HEADWAY_ATTEMPT"] == "0"
for step, _ in run.steps(range(1000 if is_first else 40)):  # no rank may be done when the other one fails
    Path(f"trains-{run.rank}").touch()
    if step == 20 and run.rank == 1 and is_first:
        while not Path("trains-0").exists():
            time.sleep(0.01)
        os._exit(1)
    time.sleep(0.02)
run.finish()
"""


@pytest.mark.parametrize("has_handler", [True, False])
def test_before_a_restart_sigterm_is_for_handlers_of_the_programs_own(home: Path, has_handler: bool) -> None:
    (home / "script.py").write_text(OWN_HANDLER)
    (home / "mine.py").write_text(PATIENT)
    words = [*TWO, "script.py", *(["own"] if has_handler else [])]
    code, _, err = run(words, home, HEADWAY_POLICY="mine:policy")
    assert code == 0, err
    assert ((home / "handled").exists(), (home / "stopped").exists()) == (has_handler, has_handler)


def test_a_notice_may_come_from_elsewhere(home: Path) -> None:
    (home / "polite.py").write_text(POLITE)
    process = start([*TWO, "polite.py"], home, HEADWAY_NOTICE=f"file:{home}/go", STEPS="2000")
    wait_for(lambda: len(trained(home)) > 5, process)
    (home / "go").touch()
    assert process.wait(LONG_S) == 75
    assert {(home / f"at-{rank}").read_text() for rank in (0, 1)} == {str(len(trained(home)))}


def test_a_killed_supervisor_leaves_nobody_and_the_same_name_continues_the_job(home: Path) -> None:
    process = start([*TWO, str(TRAINER)], home, STEPS="42")
    wait_for(lambda: len(trained(home)) > 6, process)
    everybody = descendants(process.pid)
    assert len(everybody) >= 3
    process.kill()
    process.wait()
    wait_for(lambda: not [pid for pid in everybody if Path(f"/proc/{pid}").exists()])
    before = len(trained(home))
    code, _, err = run([*TWO, str(TRAINER)], home, STEPS="42")
    assert code == 0, err
    found = assert_accounted("j")
    assert [attempt["attempt"] for attempt in found["attempts"]] == [0, 1]
    assert {attempt for attempt, _ in trained(home)} == {0, 1}
    assert found["steps"]["new"] == 42
    # A rank may have been killed after a step, and before it wrote that down.
    assert found["steps"]["repeated"] - (len(trained(home)) - 42) in (0, 1)
    assert len(trained(home)) > before


@pytest.mark.needs("mount")
def test_a_full_disk_costs_the_journal_and_not_the_job(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, disk = tmp_path_factory.mktemp("job"), tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "headway-test", disk], check=True)
    try:
        (disk / "filler").write_bytes(bytes(64 * 1024))  # what is left is not enough for all journals
        code, out, err = run(
            ["--nproc-per-node", "2", "--job", "j", str(TRAINER)], folder, FAULTS="0:1@4=kill", STEPS="10",
            HEADWAY_HOME=str(disk), HEADWAY_SPOOL=str(disk / "spool"),
        )  # fmt: skip
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert out.count("is done") == 2, err
    assert code == 0


def test_a_home_that_cannot_be_written_costs_the_journal_and_not_the_job(
    home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("job")
    code, out, err = run(
        ["--nproc-per-node", "2", "--job", "j", str(TRAINER)], folder, FAULTS="0:1@4=kill", STEPS="10",
        HEADWAY_HOME="/dev/full/home", HEADWAY_SPOOL="/dev/full/spool",
    )  # fmt: skip
    assert out.count("is done") == 2, err
    assert code == 0
    assert "not measured" in err


def test_what_a_user_decides_comes_before_what_headway_would(home: Path) -> None:
    (home / "mine.py").write_text(
        "from headway.recover.policy import Decision\n"
        "def policy(situation):\n"
        "    if situation.category == 'no_bad_batches':\n"
        "        return Decision(do='stop', why='we said so')\n"
    )
    (home / "rules.toml").write_text(
        '[[rule]]\nname = "ours"\ncategory = "no_bad_batches"\npattern = "a bad batch"\n'
        'class = "user"\naction = "fail_fast"\n'
    )
    settings = {"HEADWAY_POLICY": "mine:policy", "HEADWAY_FAILURE_RULES": "rules.toml"}
    code, _, err = run([*TWO, str(TRAINER)], home, FAULTS="0:1@7=raise", **settings)
    assert code == 1
    assert "no_bad_batches (ValueError: a bad batch). Not restarting: we said so." in err


def test_a_policy_that_raises_is_told_of_and_passed_over(home: Path) -> None:
    (home / "mine.py").write_text("def policy(situation):\n    return situation.no_such_field\n")
    code, _, err = run([*TWO, str(TRAINER)], home, FAULTS="0:1@7=raise", STEPS="10", HEADWAY_POLICY="mine:policy")
    assert code == 0
    assert "HEADWAY_POLICY=mine:policy raised AttributeError" in err


def test_a_rank_that_is_at_work_is_given_time(home: Path) -> None:
    """Without --hang-after. The policy's module is imported by the supervisor, and shortens its patience."""
    (home / "mine.py").write_text(
        "import headway.launch.progress as progress\nprogress.PATIENCE_S, progress.BUSY_FACTOR = 5.0, 1\n"
        "def policy(situation):\n    return None\n"
    )
    code, _, err = run([*TWO, str(TRAINER)], home, FAULTS="0:1@8=busy", STEPS="12", HEADWAY_POLICY="mine:policy")
    assert code == 0, err
    assert "may only take its time: it gets more" in err
    assert "failed" not in err
    assert len(report("j")["attempts"]) == 1


def test_the_rank_that_failed_always_has_its_say(home: Path) -> None:
    """Its traceback is printed whole before it is ended, also when its excepthook takes its time."""
    (home / "slow.py").write_text(
        "import os, sys, time, torch\n"
        "def hook(*error):\n    time.sleep(0.5)\n    print('told at last', file=sys.stderr)\n"
        "sys.excepthook = hook\n"
        "if os.environ['RANK'] == '1': raise ValueError('mine')\n"
        "time.sleep(1000)\n"
    )
    (home / "mine.py").write_text(PATIENT)
    code, _, err = run([*TWO, "slow.py"], home, HEADWAY_POLICY="mine:policy")
    assert code == 1
    assert "told at last" in err
    assert "python_error (ValueError: mine)" in err


def test_output_that_nobody_reads_ends_the_job(home: Path) -> None:
    (home / "chatty.py").write_text("import time\nwhile True: print('x' * 1000); time.sleep(0.001)\n")
    with (home / "err").open("w") as err:
        command = [*WARM_HEADWAY, "run", "--job", "j", "chatty.py"]
        process = warm.Popen(command, first=["hooked"], cwd=home, stdout=subprocess.PIPE, stderr=err)
    assert process.stdout.readline().startswith(b"x")
    process.stdout.close()
    process.wait(LONG_S)
    assert "nobody reads the output any more" in (home / "err").read_text()


@pytest.mark.thorough
def test_inside_headway_exec_there_is_one_launcher_and_no_complaint(home: Path) -> None:
    command = [*HEADWAY, "exec", "--job", "j", *HEADWAY, "run", "--nproc-per-node", "2", str(TRAINER)]
    done = subprocess.run(
        command,
        cwd=home,
        env=environment(FAULTS="0:1@4=kill", STEPS="9"),
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot write" not in done.stderr
    wait_for(lambda: report("j")["state"] != "running")  # the launcher's witness ends last
    found = assert_accounted("j")
    assert [attempt["outcome"] for attempt in found["attempts"]] == ["failed", "ended"]


def test_a_job_that_cannot_be_measured_is_restarted_as_often_as_allowed(home: Path) -> None:
    words = ["--nproc-per-node", "2", "--max-restarts", "2", str(TRAINER)]
    code, out, err = run(words, home, FAULTS="0:1@4=raise 1:1@5=raise", STEPS="9", HEADWAY_DISABLE="1")
    assert code == 0, err
    assert out.count("is done") == 2
    assert "--max-restarts allows 2" in err


def test_a_policy_that_returns_no_decision_is_told_of_and_passed_over(home: Path) -> None:
    (home / "mine.py").write_text("def policy(situation):\n    return 'restart'\n")
    code, _, err = run([*TWO, str(TRAINER)], home, FAULTS="0:1@7=raise", STEPS="9", HEADWAY_POLICY="mine:policy")
    assert code == 0, err
    assert "returned 'restart', which is no Decision" in err


def test_without_a_restart_whoever_failed_leaves_in_peace(home: Path) -> None:
    (home / "thread.py").write_text(
        "import atexit, os, threading, time, torch\n"
        "def upload():\n    time.sleep(1)\n    print('uploaded', os.environ['RANK'], flush=True)\n"
        "atexit.register(lambda: print('left', os.environ['RANK'], flush=True))\n"
        "if os.environ['RANK'] == '1':\n    threading.Thread(target=upload).start()\n    raise ValueError('mine')\n"
        "time.sleep(1000)\n"
    )
    code, out, err = run([*TWO, "thread.py"], home)
    assert code == 1
    assert "uploaded 1" in out, err
    assert "left 1" in out


def test_resuming_by_dcp_or_by_skipping_batches_counts_the_steps_that_were_trained(home: Path) -> None:
    """torch makes an optimizer's state by a step that changes nothing; batches that are skipped are no accumulation."""
    (home / "resume.py").write_text(
        "import os, torch\n"
        "from torch.distributed.checkpoint.state_dict import get_state_dict\n"
        "model = torch.nn.Linear(2, 2); optimizer = torch.optim.Adam(model.parameters())\n"
        "get_state_dict(model, optimizer)\n"
        "first = 0\n"
        "if os.path.exists('saved.pt'):\n"
        "    state = torch.load('saved.pt'); model.load_state_dict(state['m']); optimizer.load_state_dict(state['o'])\n"
        "    first = state['step']\n"
        "for step, batch in enumerate(torch.utils.data.DataLoader(torch.randn(120, 2), batch_size=4)):\n"
        "    if step < first: continue\n"
        "    model(batch).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "    if step in (19, 29):\n"
        "        torch.save({'m': model.state_dict(), 'o': optimizer.state_dict(), 'step': step + 1}, 'saved.pt')\n"
        "    if step == 24 and os.environ['HEADWAY_ATTEMPT'] == '0': raise ValueError('x')\n"
    )
    code, _, err = run(["--job", "j", "resume.py"], home)
    assert code == 0, err
    assert report("j")["steps"] == {"new": 30, "repeated": 5, "unsaved": 0}


def test_a_script_that_only_makes_state_has_made_no_progress(home: Path) -> None:
    (home / "init.py").write_text(
        "import torch\nfrom torch.distributed.checkpoint.state_dict import get_state_dict\n"
        "model = torch.nn.Linear(2, 2)\nget_state_dict(model, torch.optim.Adam(model.parameters()))\n"
        "raise ValueError('cannot resume')\n"
    )
    code, _, err = run(["--job", "j", "init.py"], home)
    assert code == 1
    assert "Not restarting: it failed before its first step" in err
