"""What a training script holds: everything comes back as it was, and whatever happens to a save is told."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import supervising
import torch
import torch.distributed as dist
from keeping import end_keepers, keeper, keepers
from supervising import HEADWAY, wait_for
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import fork, warm_up

import headway
import warm
from headway.checkpoint import BadCheckpoint, Retention, SaveFailed, catalog, interval
from headway.checkpoint.layout import step_folder
from headway.cli.source import open_job
from headway.errors import InputError
from headway.events.journal import Follower
from headway.events.vocabulary import Mark, Restored, Saved
from headway.observe.summary import summary
from headway.storage import open_storage

KILLED = -signal.SIGKILL


def in_a_process(do: Callable[..., None], folder: Path, *args: Any, code: int = 0, **settings: str) -> str:
    """Runs it in a process of its own, which must end with that code; what it said."""
    warm_up()
    process = fork(do, folder, *args, **{"HEADWAY_JOB": "j", **settings})
    process.join(120)
    said = (folder / "said").read_text()
    (folder / "said").unlink()
    try:
        assert process.exitcode == code, said
    finally:
        process.kill()
    return said


def committed(root: Path) -> list[int | None]:
    return [each.step for each in catalog.checkpoints(open_storage(root)) if each.state == "committed"]


class Average:
    """A part with a state of its own."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"mean": torch.zeros(3), "count": 0, "seen": []}

    def add(self, loss: float) -> None:
        self.values["mean"] += loss
        self.values["count"] += 1
        self.values["seen"].append(loss)

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


class Parts:
    """A model with dropout, and all that belongs to training it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        random.seed(1)
        self.model = nn.Sequential(nn.Linear(20, 30), nn.Dropout(0.3), nn.BatchNorm1d(30), nn.Linear(30, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.average = Average()
        data = TensorDataset(torch.randn(70, 20))
        self.loader = DataLoader(data, batch_size=10, shuffle=True)

    def saved_to(self, root: str, **settings: Any) -> headway.Checkpointer:
        return headway.Checkpointer(
            root, model=self.model, optimizer=self.optimizer, loader=self.loader, scheduler=self.scheduler,
            average=self.average, **settings,
        )  # fmt: skip

    def step(self, batch: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.model(batch).pow(2).mean() * random.random() + torch.rand(())
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average.add(float(loss))
        return float(loss)


def train(root: str, losses: str, settings: dict[str, Any], die_after: int = -1, steps: int = 40) -> None:
    """Trains up to a step, over epochs, and notes every loss to the last bit. Dies where told to, without goodbye."""
    parts = Parts()
    checkpointer = parts.saved_to(root, **{"interval": 4, **settings})
    restored = checkpointer.restore()
    print("restored", restored and (restored.step, restored.tier, restored.steps_lost), flush=True)
    step = checkpointer.step
    while step < steps:
        for (batch,) in checkpointer.loader:
            loss = parts.step(batch)
            with open(losses, "a") as file:
                file.write(f"{step} {loss.hex()} {parts.scheduler.get_last_lr()[0].hex()}\n")
            checkpointer.after(step)
            if step == die_after:
                checkpointer.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            step += 1
            if step == steps:
                break
    checkpointer.close()
    weights = {name: value.tolist() for name, value in parts.model.state_dict().items()}
    print("end", json.dumps([weights, parts.average.values["seen"], parts.average.values["mean"].tolist()]))


# --- everything comes back -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """The losses and the end of a run that is never interrupted, and saves nothing."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    settings = {"HEADWAY_HOME": str(folder)}
    said = in_a_process(train, folder, str(folder / "root"), str(folder / "losses"), {"interval": None}, **settings)
    return (folder / "losses").read_text().splitlines(), end(said)


@pytest.mark.parametrize(
    ("memory", "tier"),
    [
        ("two-slot", "memory"),
        pytest.param("one-slot", "memory", marks=pytest.mark.thorough),
        pytest.param("two-slot", "disk", marks=pytest.mark.thorough),
        ("streaming", "disk"),
        pytest.param("two-slot", "local", marks=pytest.mark.thorough),
    ],
)
def test_a_run_that_is_interrupted_equals_one_that_is_not_bit_by_bit(
    root: Path, tmp_path: Path, memory: str, tier: str, uninterrupted: tuple[list[str], str]
) -> None:
    losses, said = tmp_path / "losses", ""
    settings = {"memory": memory, "local": tmp_path / "local" if tier == "local" else None}
    for die_after in (9, 21, -1):
        code = KILLED if die_after > 0 else 0
        said = in_a_process(train, tmp_path, str(root), str(losses), settings, die_after, code=code)
        if tier != "memory":
            end_keepers(root)
    assert f"restored (20, '{tier}', {2 if tier == 'memory' else None})" in said
    assert last_of_each_step(losses) == uninterrupted[0]
    assert end(said) == uninterrupted[1]


def last_of_each_step(path: Path) -> list[str]:
    """What was trained and not lost."""
    return list({line.split()[0]: line for line in path.read_text().splitlines()}.values())


def end(said: str) -> str:
    return next(line for line in said.splitlines() if line.startswith("end"))


def test_without_checkpoints_there_is_nothing_to_restore(root: Path, tmp_path: Path) -> None:
    in_a_process(restore_nothing, tmp_path, str(root))


def restore_nothing(root: str) -> None:
    checkpointer = headway.Checkpointer(root, model=nn.Linear(3, 3))
    assert checkpointer.restore() is None
    assert checkpointer.step == 0
    checkpointer.close()


def test_what_comes_from_an_object_store_is_the_same(s3_root: str, home: Path, tmp_path: Path) -> None:
    save_and_leave(tmp_path, s3_root, 3)
    wait_for(lambda: "step-00000003" in open_storage(s3_root).names())
    assert in_a_process(restore_one, tmp_path, s3_root).splitlines()[-1].split() == ["3", "remote", "3.0"]


def save_and_leave(folder: Path, root: str | Path, *steps: int) -> None:
    """Saves in a process of its own, and waits until nobody holds that in memory any more."""
    in_a_process(save_one, folder, str(root), *steps)
    wait_for(lambda: not keepers(root))


def save_one(root: str, *steps: int) -> None:
    """Saves a model that consists of the step, at each of these."""
    model = nn.Linear(30, 30)
    with headway.Checkpointer(root, model=model, interval=None, keep=10) as checkpointer:
        for step in steps:
            for parameter in model.parameters():
                nn.init.constant_(parameter, step)
            checkpointer.save(step, wait=True)


def restore_one(root: str) -> None:
    model = nn.Linear(30, 30)
    checkpointer = headway.Checkpointer(root, model=model, interval=None)
    found = checkpointer.restore()
    values = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    print(found.step if found else None, found.tier if found else None, *values, flush=True)
    checkpointer.close()


# --- which one is taken ----------------------------------------------------------------------------------------------


def damage(root: Path, step: int) -> None:
    [shard] = (root / step_folder(step)).glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def test_a_checkpoint_that_is_damaged_is_told_of_and_the_one_before_it_is_taken(root: Path, tmp_path: Path) -> None:
    save_and_leave(tmp_path, root, 1, 2, 3)
    damage(root, 3)
    said = in_a_process(restore_one, tmp_path, str(root))
    assert said.splitlines()[-1].split() == ["2", "disk", "2.0"]
    assert "the checkpoint of step 3 cannot be restored" in said
    assert "its hash differs" in said
    [bad] = marks(tmp_path, "checkpoint_bad")
    assert (bad["step"], "hash differs" in bad["why"]) == (3, True)


def test_if_all_are_damaged_nothing_is_trained_over_them(root: Path, tmp_path: Path) -> None:
    save_and_leave(tmp_path, root, 1, 2)
    damage(root, 1)
    damage(root, 2)
    in_a_process(refuse_to_restore, tmp_path, str(root), "none of the checkpoints.*headway checkpoint verify")


def refuse_to_restore(root: str, why: str, **parts: Any) -> None:
    checkpointer = headway.Checkpointer(root, model=nn.Linear(30, 30), interval=None, **parts)
    with pytest.raises(BadCheckpoint, match=why):
        checkpointer.restore()


def test_a_part_that_was_not_saved_is_named(root: Path, tmp_path: Path) -> None:
    in_a_process(save_one, tmp_path, str(root), 1)
    in_a_process(refuse_to_restore_an_average, tmp_path, str(root))


def refuse_to_restore_an_average(root: str) -> None:
    refuse_to_restore(root, "it has no average", average=Average())


def test_a_supervisor_may_have_the_newest_ones_left_out(root: Path, tmp_path: Path) -> None:
    save_and_leave(tmp_path, root, 1, 2, 3)
    for skip, taken in (("0", "3"), ("1", "2"), ("2", "1")):
        said = in_a_process(restore_one, tmp_path, str(root), HEADWAY_SKIP_CHECKPOINTS=skip)
        assert said.splitlines()[-1].split()[0] == taken


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_the_best_are_kept_and_what_is_pinned(root: Path, tmp_path: Path) -> None:
    in_a_process(save_with_metrics, tmp_path, str(root))
    assert committed(root) == [1, 3, 5, 6]


def save_with_metrics(root: str) -> None:
    keep = Retention(keep_last=1, keep_best=2)
    with headway.Checkpointer(root, model=nn.Linear(3, 3), interval=None, keep=keep) as checkpointer:
        for step, loss in enumerate([9.0, 4.0, 1.0, 5.0, 2.0, 8.0], start=1):
            checkpointer.save(step, metric=loss, wait=True)
            if step == 1:
                catalog.pin(open_storage(root), step_folder(1))


def test_a_metric_is_also_taken_after_a_step(root: Path, tmp_path: Path) -> None:
    in_a_process(train_with_metric, tmp_path, str(root))
    assert [each.metric for each in catalog.checkpoints(open_storage(root))] == [1.0, 3.0]


def train_with_metric(root: str) -> None:
    with headway.Checkpointer(root, model=nn.Linear(3, 3), interval=2) as checkpointer:
        for step in range(4):
            checkpointer.after(step, metric=float(step))
            checkpointer.wait()


def test_steps_are_numbered_by_where_training_goes_on(root: Path, tmp_path: Path) -> None:
    in_a_process(number_steps, tmp_path, str(root))
    assert committed(root) == [3, 7]


def number_steps(root: str) -> None:
    checkpointer = headway.Checkpointer(root, model=nn.Linear(3, 3), interval=None)
    for step in range(3):
        checkpointer.after(step)
    assert checkpointer.step == 3
    checkpointer.wait()
    assert committed(Path(root)) == [], "nobody said to save"
    assert checkpointer.save(wait=True).step == 3
    assert checkpointer.save(7, wait=True).folder == step_folder(7)
    checkpointer.close()
    checkpointer.close()


def test_what_cannot_be_saved_is_refused_at_once(root: Path, home: Path) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(InputError, match="give `model`, too"):
        headway.Checkpointer(root, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(InputError, match="counter cannot be saved: it has no state_dict"):
        headway.Checkpointer(root, model=model, counter=3)


def test_importing_headway_does_not_import_torch() -> None:
    code = "import sys, headway, headway.checkpoint; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- saves that fail -------------------------------------------------------------------------------------------------


def test_a_job_goes_on_when_saves_fail_and_stops_with_the_reason_when_too_many_do(root: Path, tmp_path: Path) -> None:
    said = in_a_process(fail_to_save, tmp_path, str(root))
    assert said.count("a checkpoint was not saved") == 4
    assert [mark["failures"] for mark in marks(tmp_path, "checkpoint_failed")] == [1, 1, 2, 3]
    assert committed(root)[:2] == [1, 3]


def fail_to_save(root: str) -> None:
    """Where the folders of steps 2, 4, 5 and 6 should go are files."""
    checkpointer = headway.Checkpointer(root, model=nn.Linear(3, 3), interval=1, failures=3)
    for step in (2, 4, 5, 6):
        Path(root, step_folder(step)).write_text("in the way")

    def train() -> None:
        for step in range(20):
            checkpointer.after(step)
            checkpointer.wait()

    with pytest.raises(SaveFailed, match=r"3 saves in a row have failed, the last one because .*step-00000006"):
        train()
    assert checkpointer.step >= 6
    checkpointer.close()


def test_a_part_whose_state_cannot_be_had_costs_the_save_and_not_the_job(root: Path, tmp_path: Path) -> None:
    said = in_a_process(train_a_part_that_fails, tmp_path, str(root))
    assert "ValueError: not now" in said
    assert committed(root) == [1, 3]


def test_a_copy_that_fails_is_one_failure(root: Path, tmp_path: Path) -> None:
    in_a_process(train_what_cannot_be_copied, tmp_path, str(root))
    [told] = marks(tmp_path, "checkpoint_failed")
    assert (told["failures"], "the device is gone" in told["why"]) == (1, True)
    assert committed(root) == [1, 3]


class Torn(torch.Tensor):
    """A tensor that can be planned for, and not be copied."""

    def detach(self) -> "Torn":
        raise RuntimeError("the device is gone")


def train_what_cannot_be_copied(root: str) -> None:
    part = Average()
    with headway.Checkpointer(root, model=nn.Linear(3, 3), interval=1, part=part) as checkpointer:
        for step in range(3):
            part.values["mean"] = torch.ones(3).as_subclass(Torn) if step == 1 else torch.ones(3)
            checkpointer.after(step)
            checkpointer.wait()


class Moody(Average):
    """A part that cannot always be saved."""

    fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise ValueError("not now")
        return super().state_dict()


def train_a_part_that_fails(root: str) -> None:
    part = Moody()
    with headway.Checkpointer(root, model=nn.Linear(3, 3), interval=1, part=part) as checkpointer:
        for step in range(3):
            part.fails = step == 1
            checkpointer.after(step)
            checkpointer.wait()


def test_a_state_that_fails_on_one_rank_does_not_hang_the_others(root: Path, tmp_path: Path) -> None:
    warm_up()
    ranks = [
        fork(fail_on_one_rank, tmp_path, rank, str(root), str(tmp_path / "meeting"), GLOO_SOCKET_IFNAME="lo")
        for rank in range(2)
    ]
    for rank in ranks:
        rank.join(120)
        rank.kill()
    said = (tmp_path / "said").read_text()
    assert [rank.exitcode for rank in ranks] == [0, 0], said
    assert "ValueError: not now" in said
    assert "the state of another rank could not be had" in said
    assert committed(root) == [1, 3]


def fail_on_one_rank(rank: int, root: str, meeting: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", HEADWAY_JOB="j")
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    part = Moody()
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    with headway.Checkpointer(root, model=model, interval=1, part=part) as checkpointer:
        for step in range(3):
            part.fails = step == 1 and rank == 1
            checkpointer.after(step)
            checkpointer.wait()
            dist.barrier()
    dist.destroy_process_group()


# --- the journal -----------------------------------------------------------------------------------------------------


def records(home: Path) -> list[Any]:
    # Not `rglob`, which fails if a folder is deleted under its hands.
    found = [Path(folder, name) for folder, _, names in os.walk(home) for name in names if name.endswith(".hwj")]
    return [record for path in sorted(found) for record in Follower(path).poll().records]


def marks(home: Path, name: str) -> list[dict[str, Any]]:
    """What marks of a name say."""
    return [record.attrs for record in records(home) if isinstance(record, Mark) and record.name == name]


SCRIPT = """
import os, signal, sys, time
import torch, headway
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(1)
root, steps, die = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
run = headway.current()
model = nn.Linear(50, 50)
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = headway.Checkpointer(root, model=model, optimizer=optimizer, interval=eval(sys.argv[4]))
checkpointer.restore()
print("from", checkpointer.step, flush=True)
for step, _ in run.steps(range(checkpointer.step, steps), start=checkpointer.step):
    if step == die:
        checkpointer.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.randn(4, 50)).sum().backward()
    optimizer.step()
    time.sleep(0.005)
    checkpointer.after(step)
print("left at", checkpointer.step, flush=True)
checkpointer.close()
run.finish()
"""


@pytest.fixture
def script(home: Path) -> Path:
    (home / "train.py").write_text(SCRIPT)
    return home / "train.py"


def runs(command: list[str], code: int = 0) -> str:
    run = subprocess.run if "headway" in command else warm.run
    done = run(command, capture_output=True, text=True, timeout=500, env=os.environ | {"HEADWAY_JOB": "j"})
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout + done.stderr


def check_story(home: Path, root: Path) -> dict[str, Any]:
    """Of a job that saved every tenth step, was killed before step 25, resumed at 20 and trained up to 40."""
    restored = [record for record in records(home) if isinstance(record, Restored)]
    # The hooks may find by the optimizer's own count, too, where it goes on.
    assert {record.step for record in restored} == {20}
    assert [Path(record.path).name for record in restored if record.path] == [step_folder(20)]
    saved = [record for record in records(home) if isinstance(record, Saved) and record.durable]
    names = sorted((record.step, Path(record.path).name) for record in saved)  # two uploads may overtake each other
    assert names == [(step, step_folder(step)) for step in (10, 20, 30, 40)]
    [told] = marks(home, "checkpoint_restored")
    assert (told["step"], told["tier"], told["steps_lost"]) == (20, "memory", 5)
    assert told["bytes"] > 3 * 50 * 50 * 4, "the weights, and two moments for each"
    assert told["seconds"] > 0
    report = summary(open_job("j").ledger())
    assert (report["steps"]["new"], report["steps"]["repeated"], report["steps"]["unsaved"]) == (40, 5, 0)
    ledger = report["ledger"]
    assert ledger["waste.checkpoint_blocking"] > 0
    assert ledger["recover.checkpoint_restore"] > 0
    assert ledger["waste.repeated_steps"] > 0
    assert sum(ledger.values()) == pytest.approx(report["wall_s"], abs=1e-6)
    assert committed(root) == [20, 30, 40]
    return report


def test_the_journal_tells_of_saves_and_of_the_restore(root: Path, home: Path, script: Path) -> None:
    python = [sys.executable, str(script), str(root)]
    assert "from 0" in runs([*python, "40", "25", "10"], KILLED)
    assert "from 20" in runs([*python, "40", "-1", "10"])
    check_story(home, root)


MEASURED = "for step, _ in run.steps(range(checkpointer.step, steps), start=checkpointer.step):"
OWN_LOOP = "for step in range(checkpointer.step, steps):"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "loop", [pytest.param(MEASURED, id="measured"), pytest.param(OWN_LOOP, id="a loop of its own")]
)
def test_hooks_into_torch_do_not_count_again_what_it_tells_itself(
    root: Path, home: Path, script: Path, loop: str
) -> None:
    """`headway exec` hooks `dcp.load`, the optimizer and `torch.save`, all of which are used inside."""
    script.write_text(SCRIPT.replace(MEASURED, loop))
    python = [*HEADWAY, "exec", "--job", "j", sys.executable, str(script), str(root)]
    assert "from 0" in runs([*python, "40", "25", "10"], KILLED)
    assert "from 20" in runs([*python, "40", "-1", "10"])
    check_story(home, root)


def test_under_a_supervisor_a_killed_trainer_restores_once(root: Path, home: Path, script: Path) -> None:
    text = SCRIPT.replace("int(sys.argv[3])", "int(sys.argv[3]) if os.environ['HEADWAY_ATTEMPT'] == '0' else -1")
    script.write_text(text)
    words = ["--job", "j", "--nproc-per-node", "1", str(script), str(root), "40", "25", "10"]
    code, out, err = supervising.run(words, home)
    assert code == 0, err
    assert "from 20" in out
    check_story(home, root)


def test_a_notice_saves_at_the_step_where_training_goes_on(root: Path, home: Path, script: Path) -> None:
    after = "    checkpointer.after(step)\n"
    script.write_text(SCRIPT.replace(after, f"{after}    if step == 3:\n        print('under way', flush=True)\n"))
    words = [sys.executable, str(script), str(root), "100000", "-1", "None"]
    with warm.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "from 0\n"
            assert process.stdout.readline() == "under way\n"
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 75, err
    [step] = [int(line.split()[-1]) for line in out.splitlines() if line.startswith("left at")]
    assert step > 0
    assert committed(root) == [step]
    assert f"from {step}" in runs([sys.executable, str(script), str(root), str(step + 3), "-1", "None"])


def test_the_interval_that_was_chosen_is_told(root: Path, tmp_path: Path) -> None:
    in_a_process(train_until_an_interval_is_chosen, tmp_path, str(root), str(tmp_path))
    told = marks(tmp_path, "checkpoint_interval")
    assert set(told[0]) == {"memory_s", "durable_s", "steps", "every", "wasted_percent", "why"}
    assert all(mark["steps"] >= 1 for mark in told)


def test_how_memory_is_used_is_said_once(root: Path, tmp_path: Path) -> None:
    said = in_a_process(train_at_interval, tmp_path, str(root), 5)
    [text] = [mark["text"] for mark in marks(tmp_path, "note")]
    assert "held in memory, two copies" in text
    assert said.count(f"headway: {text}") == 1


def train_at_interval(root: str, interval: int) -> None:
    with headway.Checkpointer(root, model=nn.Linear(3, 3), interval=interval) as checkpointer:
        for step in range(30):
            checkpointer.after(step)


def train_until_an_interval_is_chosen(root: str, home: str) -> None:
    """Trains until it is known how long saves take, which is found out sooner than usual."""
    interval.FIRST_S = 0.05
    with headway.Checkpointer(root, model=nn.Linear(3, 3), interval="auto") as checkpointer:
        for step in range(10_000):
            time.sleep(0.02)
            checkpointer.after(step)
            if marks(Path(home), "checkpoint_interval"):
                break


def test_a_script_that_forgets_to_close_has_all_its_saves_committed_and_leaves_no_keeper(
    root: Path, home: Path, script: Path
) -> None:
    script.write_text(SCRIPT.replace("checkpointer.close()\n", ""))
    runs([sys.executable, str(script), str(root), "20", "-1", "10"])
    assert committed(root) == [10, 20]
    wait_for(lambda: not keepers(root))


def test_a_script_that_raises_leaves_its_memory_for_the_next_one(root: Path, home: Path, script: Path) -> None:
    script.write_text(SCRIPT.replace("os.kill(os.getpid(), signal.SIGKILL)", "raise RuntimeError('a bad batch')"))
    python = [sys.executable, str(script), str(root), "40"]
    assert "a bad batch" in runs([*python, "25", "10"], 1)
    keeper(root)
    assert "from 20" in runs([*python, "-1", "10"])
    [told] = marks(home, "checkpoint_restored")
    assert (told["tier"], told["steps_lost"]) == ("memory", 5)
    assert open_job("j").ledger().attempts[0].attempt.failed


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    optimizer.zero_grad()


def saved_and_left(root: Path, **parts: Any) -> None:
    with headway.Checkpointer(root, interval=None, **parts) as checkpointer:
        checkpointer.save(1, wait=True)


def test_an_optimizer_with_its_parameters_in_another_order_gets_each_ones_own_state(root: Path, home: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    saved_and_left(root, model=model, optimizer=optimizer)
    again = torch.optim.AdamW(list(model.parameters())[::-1])
    with headway.Checkpointer(root, model=model, optimizer=again, interval=None) as checkpointer:
        checkpointer.restore()
    for parameter in model.parameters():
        assert torch.equal(again.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_groups_that_changed_places_keep_their_own_settings(root: Path, home: Path) -> None:
    model = nn.Linear(3, 3)
    groups = [{"params": [model.weight], "weight_decay": 0.5}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    trained(model, optimizer)
    saved_and_left(root, model=model, optimizer=optimizer)
    again = torch.optim.AdamW([{"params": [model.bias]}, {"params": [model.weight]}])
    with headway.Checkpointer(root, model=model, optimizer=again, interval=None) as checkpointer:
        checkpointer.restore()
    assert [group["weight_decay"] for group in again.param_groups] == [0.0, 0.5]
    assert torch.equal(again.state[model.bias]["exp_avg"], optimizer.state[model.bias]["exp_avg"])


def test_a_part_whose_tensors_come_later_is_restored_with_all_of_them(root: Path, home: Path) -> None:
    other = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(other.parameters())
    trained(other, optimizer)
    saved_and_left(root, discriminator=optimizer)
    fresh = torch.optim.AdamW(other.parameters())
    with headway.Checkpointer(root, discriminator=fresh, interval=None) as checkpointer:
        checkpointer.restore()
    assert fresh.state_dict()["state"].keys() == {0, 1}, "numbers stay numbers"
    assert torch.equal(fresh.state[other.weight]["exp_avg_sq"], optimizer.state[other.weight]["exp_avg_sq"])


def test_a_model_of_another_size_is_refused(root: Path, home: Path) -> None:
    saved_and_left(root, model=nn.Linear(4, 8))
    checkpointer = headway.Checkpointer(root, model=nn.Linear(4, 4), interval=None)
    with pytest.raises(BadCheckpoint, match="Size mismatch"):
        checkpointer.restore()
    checkpointer.close()


def test_close_saves_what_is_left_and_then_it_is_over(root: Path, home: Path) -> None:
    checkpointer = headway.Checkpointer(root, model=nn.Linear(2, 2), interval=100)
    for step in range(7):
        checkpointer.after(step)
    checkpointer.close()
    assert [each.step for each in catalog.checkpoints(open_storage(root))] == [7]
    with pytest.raises(InputError, match="closed"):
        checkpointer.save(8)
    with pytest.raises(InputError, match="closed"):
        checkpointer.after(8)


def dropped_out(root: Path, until: int) -> list[float]:
    """Goes through data from where it was left, up to a step; what dropout has made of each batch."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(0)
    loader = StatefulDataLoader(TensorDataset(torch.arange(40.0)), batch_size=4, shuffle=True)
    found = []
    with headway.Checkpointer(root, model=nn.Linear(2, 2), loader=loader, interval=None) as checkpointer:
        checkpointer.restore()
        for step, (batch,) in enumerate(checkpointer.loader, checkpointer.step):
            found.append(float(nn.functional.dropout(batch).sum()))
            if step + 1 == until:
                checkpointer.save(until, wait=True)
                break
    return found


@pytest.mark.needs_package("torchdata")
def test_a_loader_with_a_position_of_its_own_goes_on_and_disturbs_no_dropout(root: Path, home: Path) -> None:
    whole = dropped_out(root / "whole", 10)
    assert dropped_out(root / "parts", 4) + dropped_out(root / "parts", 10) == whole
    end_keepers(root)


def test_after_an_exception_the_memory_is_held_for_whoever_comes_next(root: Path, home: Path) -> None:
    def failing() -> None:
        with headway.Checkpointer(root, model=nn.Linear(2, 2), interval=None) as checkpointer:
            checkpointer.save(3, wait=True)
            raise ValueError("a bad batch")

    def failing_otherwise() -> None:
        checkpointer = headway.Checkpointer(root, model=nn.Linear(2, 2), interval=100)
        try:
            checkpointer.restore()
            checkpointer.after(8)
            raise ValueError("another")
        finally:
            checkpointer.close()

    for fail in (failing, failing_otherwise):
        with pytest.raises(ValueError, match=r"bad|another"):
            fail()
    with headway.Checkpointer(root, model=nn.Linear(2, 2), interval=None) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    assert (restored.step, restored.tier) == (3, "memory"), "what failed has saved nothing, and taken nothing away"
