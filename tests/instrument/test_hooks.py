"""Real PyTorch programs, unmodified, in real processes: what they do is seen, and nothing of it is disturbed."""

import json
import os
import signal
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from running import plain, run, train, witnessed

from headway.cli import main as cli
from headway.cli.source import open_job
from headway.events.job import JobReader
from headway.events.vocabulary import Mark, Process, Record, Restored, Saved, SpanBegin
from headway.observe.summary import summary
from headway.paths import JobPaths, jobs_in

HEAD = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 1)
    def forward(self, x):
        return self.two(torch.relu(self.one(x)))

def data(size=160, **options):
    return DataLoader(TensorDataset(torch.randn(size, 8)), batch_size=16, **options)

def train(model, optimizer, batch, pause=0.0):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(pause)

def queued_s():
    "How long this thread has waited for a core: so far apart may two looks at a clock be."
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
"""


class Done:
    """A program that has run under `headway exec`."""

    def __init__(self, home: Path, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        witnessed(home)
        self.job = jobs_in(home)[0]
        self.report: dict[str, Any] = summary(open_job(self.job).ledger())
        self.buckets, self.stages = self.report["ledger"], self.report["stages"]
        self.steps: float = self.report["steps"]["new"]
        self.records: list[Record] = [
            record for _, batch in JobReader(JobPaths(home, self.job)).poll() for record in batch.records
        ]

    @property
    def saved(self) -> list[Saved]:
        """The checkpoints that were stored."""
        return [record for record in self.of(Saved) if record.durable]

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    def marks(self, name: str) -> list[dict[str, Any]]:
        return [mark.attrs for mark in self.of(Mark) if mark.name == name]


def measured(
    home: Path, text: str, *words: str, code: int = 0, head: str = HEAD, job: str = "", cold: bool = False,
    **environ: str,
) -> Done:  # fmt: skip
    """Run a program under `headway exec`; `cold` in a Python that has yet to import torch."""
    path = home / "train.py"
    path.write_text(head + textwrap.dedent(text))
    options = ("--job", job) if job else ()
    settings = os.environ | {"OMP_NUM_THREADS": "1"} | environ
    if cold:
        done = run(sys.executable, str(path), *words, options=options, cwd=home, env=settings, timeout=500)
    else:
        done = train(str(path), *words, options=options, cwd=home, env=settings, timeout=500)
    assert done.returncode == code, done.stderr
    return Done(home, done.returncode, done.stdout, done.stderr)


# --- what is seen --------------------------------------------------------------------------------------------------


def test_every_phase_of_a_plain_program_is_seen(home: Path) -> None:
    done = measured(
        home,
        """
        import json
        from contextlib import contextmanager

        spent = {}

        @contextmanager
        def watch(what):
            began = time.monotonic()
            yield
            spent[what] = spent.get(what, 0) + time.monotonic() - began

        class Slow(Dataset):
            def __init__(self):
                with watch("dataset"):
                    time.sleep(0.2)
            def __len__(self):
                return 160
            def __getitem__(self, index):
                time.sleep(0.002)
                return torch.randn(8)

        class Deep(Net):
            def __init__(self):
                with watch("model"):
                    super().__init__()
                    time.sleep(0.3)

        model = Deep()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(Slow(), batch_size=16)
        for epoch in range(2):
            model.train()
            batches = iter(loader)
            for number in range(10):
                with watch("batches" if spent.get("steps") else "first batch"):
                    batch = next(batches)
                with watch("steps"):
                    train(model, optimizer, batch, 0.02)
            next(batches, None)
            model.eval()
            with watch("evaluation"), torch.no_grad():
                for batch in data(32):
                    model(batch[0])
                    time.sleep(0.1)
            with watch("save"):
                torch.save({"model": model.state_dict()}, "model.pt")
        print(json.dumps(spent | {"queued": queued_s()}))
        time.sleep(0.3)
        """,
    )
    assert done.steps == 20
    spent = json.loads(done.out)
    for found, what in (
        (done.stages["preproc_creation"], "dataset"),
        (done.stages["train_module_creation"], "model"),
        (done.stages["get_first_batch_data"], "first batch"),
        (done.buckets["training.effective"], "steps"),
        (done.buckets["waste.data_wait"], "batches"),
        (done.buckets["waste.evaluation"], "evaluation"),
        (done.buckets["waste.checkpoint_blocking"] + done.buckets["shutdown.final_checkpoint"], "save"),
    ):
        assert found == pytest.approx(spent[what], abs=max(0.25 * spent[what], 0.1) + spent["queued"]), what
    assert done.buckets["waste.checkpoint_blocking"] > 0
    assert done.buckets["shutdown.teardown"] > 0.3
    assert sum(done.buckets.values()) == pytest.approx(done.report["wall_s"], abs=1e-6)
    assert [record.step for record in done.saved] == [10, 20]


def test_slow_imports_are_named_and_so_is_the_one_that_an_optimizer_hides(home: Path) -> None:
    (home / "heavy.py").write_text("import time; time.sleep(0.3)")
    done = measured(
        home,
        """
        import heavy
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        for (batch,) in data():
            train(model, optimizer, batch)
        """,
        cold=True,
    )
    told = done.marks("imports")[0]["seconds"]
    assert told["heavy"] >= 0.3
    assert {"heavy", "torch", "torch._dynamo"} <= set(told)
    assert done.stages["imports"] >= told["heavy"] + told["torch"] + told["torch._dynamo"] - 0.05


def test_compilation_is_seen_with_reasons_to_do_it_again(home: Path) -> None:
    done = measured(
        home,
        """
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        compiled = torch.compile(model, backend="aot_eager")
        def steps(sizes):
            for size in sizes:
                batch = next(iter(DataLoader(TensorDataset(torch.randn(size, 8)), batch_size=size)))[0]
                train(compiled, optimizer, batch)
        steps([16] * 5 + [7] * 5)
        torch._dynamo.reset()
        steps([16] * 5)
        """,
        TORCHINDUCTOR_CACHE_DIR=str(home / "cache"),
    )
    told = done.marks("compiled")
    assert len(told) == 3, told  # the third one after a reset, which forgets all callbacks
    assert [bool(mark["reason"]) for mark in told] == [False, True, False]
    assert "size mismatch" in told[1]["reason"]
    assert done.buckets["start.pt2_compilation"] > 0
    assert done.buckets["waste.recompilation"] > 0


@pytest.mark.thorough
def test_a_backward_that_is_compiled_when_first_used_is_compilation_cold_and_warm(home: Path) -> None:
    text = """
        model = torch.compile(Net())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for (batch,) in data():
            began = time.monotonic()
            train(model, optimizer, batch)
            if not optimizer.state_dict().get("seen"):
                print(time.monotonic() - began, queued_s())
                optimizer.state_dict = lambda: {"seen": True}
        """
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(home / "cache")}
    for _ in ("an empty cache", "a full one"):
        done = measured(home, text, cold=True, **cache)
        first, queued_s = map(float, done.out.split()[:2])
        assert done.buckets["start.pt2_compilation"] > 0.8 * first - queued_s
        assert done.steps == 10


# --- the pitfalls --------------------------------------------------------------------------------------------------


STEPS = {
    "several optimizers": """
        one, two = Net(), Net()
        first, second = (torch.optim.Adam(m.parameters()) for m in (one, two))
        for (batch,) in data():
            train(one, first, batch)
            train(two, second, batch)
        """,
    "optimizer in backward": """
        model = Net()
        optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for (batch,) in data():
            model(batch).sum().backward()
        """,
    "gradient accumulation": """
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, (batch,) in enumerate(data(320)):
            model(batch).sum().backward()
            if number % 2:
                optimizer.step()
        """,
    "no loader": """
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(10):
            train(model, optimizer, torch.randn(16, 8))
        """,
    "an endless loader": """
        def for_ever(loader):
            while True:
                yield from loader
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = for_ever(data(48))
        for _ in range(10):
            train(model, optimizer, next(batches)[0])
        time.sleep(0.3)
        """,
    "workers by fork": """
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for (batch,) in data(num_workers=2, multiprocessing_context="fork"):
            train(model, optimizer, batch)
        """,
    "workers by spawn": """
        if __name__ == "__main__":
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for (batch,) in data(num_workers=1, multiprocessing_context="spawn"):
                train(model, optimizer, batch)
        """,
    "persistent workers": """
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = data(80, num_workers=1, persistent_workers=True)
        for _ in range(2):
            for (batch,) in loader:
                train(model, optimizer, batch)
        """,
    "an optimizer that compiles": """
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.step = torch.compile(optimizer.step, backend="eager")
        for (batch,) in data():
            train(model, optimizer, batch)
        """,
    "a closure": """
        model = Net()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        for (batch,) in data():
            def closure():
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss
            optimizer.step(closure)
        """,
}


SLOW_STEPS = ("workers by spawn", "persistent workers")


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.thorough if how in SLOW_STEPS else ()) for how in STEPS]
)
def test_ten_steps_are_ten_steps_with(home: Path, how: str) -> None:
    done = measured(home, STEPS[how])
    assert done.steps == 10
    assert len(done.report["attempts"]) == 1
    assert [process.role for process in done.of(Process) if process.role != "launcher"][-1] == "rank"
    assert len(done.report["ranks"]) == 1  # no worker, tracker or launcher is a rank
    assert not done.marks("hook_off")
    assert "headway" not in done.err


def test_a_skipping_gradient_scaler_loses_no_time(home: Path) -> None:
    done = measured(
        home,
        """
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for number, (batch,) in enumerate(data()):
            loss = model(batch).sum() * (float("inf") if number in (4, 5) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            time.sleep(0.05)
        """,
    )
    assert done.steps == 8
    assert done.buckets["training.effective"] > 0.5  # the time of all ten


def test_a_hook_that_raises_is_switched_off_journaled_and_said_once(home: Path) -> None:
    done = measured(
        home,
        """
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        import headway.instrument.loop as loop
        def broken(*args, **attrs):
            raise ValueError("broken on purpose")
        loop.Tracker.fetched = broken
        loop.own_steps = broken
        from torch._dynamo.callback import callback_handler
        compiled = torch.compile(model, backend="eager")
        import headway.instrument.session as session
        session.Session.begins = broken
        for (batch,) in data():
            train(compiled, optimizer, batch)
        torch.save(model.state_dict(), "model.pt")
        print("trained", os.path.exists("model.pt"))
        """,
    )
    assert done.out == "trained True\n"
    off = Counter(mark["hook"] for mark in done.marks("hook_off"))
    assert set(off.values()) == {1}
    assert {"torch.utils.data.dataloader._BaseDataLoaderIter.__next__", "torch.serialization.save"} <= set(off)
    for hook in off:
        assert done.err.count(f"the hook on {hook} is switched off (ValueError: broken on purpose") == 1


def test_the_callbacks_of_compilation_never_raise_into_it(home: Path) -> None:
    done = measured(
        home,
        """
        import headway.instrument.session as session
        import torch._dynamo
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        def broken(*args, **attrs):
            raise ValueError("broken on purpose")
        session.Session.begins = broken
        compiled = torch.compile(model, backend="eager")
        for (batch,) in data():
            train(compiled, optimizer, batch)
        """,
    )
    assert done.err.count("switched off") >= 1
    assert done.steps == 10


def test_weights_that_are_changed_by_hand_are_trained(home: Path) -> None:
    done = measured(
        home,
        """
        model = Net()
        for _ in range(20):
            model(torch.randn(16, 8)).sum().backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 0.01 * weight.grad
                    weight.grad = None
            time.sleep(0.05)
        """,
    )
    assert 15 <= done.steps <= 20
    assert done.buckets["training.effective"] > 0.7


def test_waits_for_a_thread_that_fetches_are_waits_for_data(home: Path) -> None:
    done = measured(
        home,
        """
        import queue, threading
        batches, asked = queue.Queue(maxsize=1), threading.Semaphore(0)
        def fetch():
            for (batch,) in data():
                asked.acquire()  # else it is done before it is asked, where training takes long
                time.sleep(0.1)
                batches.put(batch)
        threading.Thread(target=fetch).start()
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(10):
            asked.release()
            train(model, optimizer, batches.get())
        """,
    )
    assert done.steps == 10
    assert done.buckets["waste.data_wait"] > 0.5


def test_nested_saves_are_one(home: Path) -> None:
    done = measured(
        home,
        """
        import torch.distributed.checkpoint as dcp
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for (batch,) in data():
            train(model, optimizer, batch)
        dcp.save({"model": model.state_dict()}, checkpoint_id="saved", no_dist=True)
        dcp.load({"model": model.state_dict()}, checkpoint_id="saved", no_dist=True)
        """,
    )
    (saved,) = done.saved
    assert (saved.step, saved.path) == (10, str(home / "saved"))


def test_a_save_in_the_background_blocks_only_as_long_as_it_is_staged(home: Path) -> None:
    done = measured(
        home,
        """
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        class Slow(FileSystemWriter):
            def write_data(self, plan, planner):
                time.sleep(2)
                return super().write_data(plan, planner)
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        store = dist.TCPStore("127.0.0.1", 0, 1, True)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, (batch,) in enumerate(data()):
            train(model, optimizer, batch, 0.1)
            if number == 4:
                began = time.monotonic()
                future = dcp.async_save({"model": model.state_dict()}, storage_writer=Slow("saved"))
                print(time.monotonic() - began, queued_s())
        future.result()
        dist.destroy_process_group()
        """,
    )
    (saved,) = done.saved
    assert saved.step == 5
    blocked_s, queued_s = map(float, done.out.split())
    tolerance_s = max(0.25 * blocked_s, 0.1) + queued_s
    assert done.buckets["waste.checkpoint_blocking"] == pytest.approx(blocked_s, abs=tolerance_s)
    assert done.stages["process_group_init"] > 0


def test_a_process_that_the_loop_waits_for_evaluates_or_uploads_what_was_saved(home: Path) -> None:
    done = measured(
        home,
        """
        import json, subprocess
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        spent = dict(evaluation=0.0, checkpoint_blocking=0.0)
        for number, (batch,) in enumerate(data()):
            train(model, optimizer, batch, 0.1)
            began = time.monotonic()
            if number == 4:
                torch.save(model.state_dict(), "saved.pt")
            if number in (4, 6):
                subprocess.run(["sleep", "0.7"], check=True, capture_output=number == 6)
                spent["checkpoint_blocking" if number == 4 else "evaluation"] += time.monotonic() - began
        print(json.dumps(spent | {"queued": queued_s()}))
        """,
    )
    spent = json.loads(done.out)
    for what in ("evaluation", "checkpoint_blocking"):
        assert done.buckets[f"waste.{what}"] == pytest.approx(spent[what], abs=0.1 + spent["queued"]), what


def test_a_file_that_holds_no_model_is_no_checkpoint(home: Path) -> None:
    done = measured(
        home,
        """
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for (batch,) in data():
            train(model, optimizer, batch)
        torch.save([0.1] * 1000 + [torch.zeros(3)], "losses.pt")
        """,
    )
    assert not done.saved
    assert done.buckets["waste.unsaved_steps"] == 0


RESUMING = """
model = Net()
optimizer = torch.optim.{optimizer}(model.parameters(), 0.1)
first = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
for step in range(first, 30):
    train(model, optimizer, torch.randn(16, 8), 0.01)
    if (step + 1) % 10 == 0:
        torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}}, "new.pt")
        os.replace("new.pt", "last.pt")
    if step == 15 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), {signal})
"""


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_a_resume_is_known_by_its_file_or_by_the_optimizer(home: Path, optimizer: str) -> None:
    text = RESUMING.format(optimizer=optimizer, signal=int(signal.SIGKILL))
    measured(home, text, job="resumed", code=-signal.SIGKILL)
    done = measured(home, text, job="resumed")
    assert len(done.report["attempts"]) == 2
    assert len(done.report["failures"]) == 1
    assert done.steps == 30
    assert done.report["steps"]["repeated"] == 6  # steps 10 to 15, which were trained and not saved
    assert done.report["steps"]["unsaved"] == 0
    assert any(record.path.endswith("last.pt") for record in done.of(Restored))


def test_leaving_by_os_exit_is_seen(home: Path) -> None:
    text = "model = Net()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
    text += "for (batch,) in data(): train(model, optimizer, batch)\nos._exit(int(sys.argv[1]))\n"
    assert measured(home, text, "0", job="well").report["state"] == "ended"
    assert measured(home, text, "3", job="badly", code=3).report["state"] == "failed"


def test_a_crash_at_import_is_seen(home: Path) -> None:
    (home / "broken.py").write_text("raise RuntimeError('broken module')")
    done = measured(home, "import broken\n", code=1, cold=True)
    assert done.report["state"] == "failed"
    assert "broken module" in done.report["attempts"][0]["error"]
    assert "headway" not in done.err  # not even in the traceback
    assert "broken.py" in done.err


# --- processes -----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_ranks_started_by_multiprocessing_are_ranks(home: Path) -> None:
    done = measured(
        home,
        """
        import torch.distributed as dist
        import torch.multiprocessing as mp

        def work(rank):
            dist.init_process_group("gloo", f"file://{os.getcwd()}/meeting", rank=rank, world_size=2)
            model = nn.parallel.DistributedDataParallel(Net())
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for (batch,) in data():
                train(model, optimizer, batch)
            dist.barrier()  # torch may abort in a rank whose peer has left first
            dist.destroy_process_group()

        if __name__ == "__main__":
            mp.spawn(work, (), 2)
        """,
    )
    assert [rank["rank"] for rank in done.report["ranks"]] == [0, 1]
    assert len(done.report["attempts"]) == 1
    assert done.steps == 10
    assert done.stages["process_group_init"] > 0
    assert done.report["state"] == "ended"


def test_trainers_that_are_forked_are_ranks(home: Path) -> None:
    done = measured(
        home,
        """
        import multiprocessing as mp

        def meet(number, where):  # both live at the same time, however late one is
            open(f"{where}-{number}", "w").close()
            while not os.path.exists(f"{where}-{1 - number}"):
                time.sleep(0.01)

        def work(number):
            meet(number, "begin")
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for (batch,) in data():
                train(model, optimizer, batch, 0.05)
            meet(number, "end")

        if __name__ == "__main__":
            workers = [mp.get_context("fork").Process(target=work, args=(number,)) for number in range(2)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        """,
    )
    assert [rank["rank"] for rank in done.report["ranks"]] == [0, 1]
    assert done.report["state"] == "ended"


@pytest.mark.thorough
def test_torchrun_s_agent_is_no_rank_and_tells_of_its_restarts(home: Path) -> None:
    path = home / "train.py"
    path.write_text(
        HEAD
        + textwrap.dedent(
            """
            import torch.distributed as dist
            dist.init_process_group("gloo")
            model = nn.parallel.DistributedDataParallel(Net())
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for number, (batch,) in enumerate(data()):
                train(model, optimizer, batch, 0.02)
                if number == 5:
                    dist.barrier()  # both have made this step, before torchrun ends the other one
                if number == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
                    os.kill(os.getpid(), 9)
            dist.barrier()  # torch may abort in a rank whose peer has left first
            dist.destroy_process_group()
            """
        )
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = run(*torchrun, "--max-restarts", "1", "--monitor-interval", "0.1", str(path), env=environ, timeout=500)
    assert done.returncode == 0, done.stderr
    seen = Done(home, done.returncode, done.stdout, done.stderr)
    assert [rank["rank"] for rank in seen.report["ranks"]] == [0, 1]
    assert len(seen.report["attempts"]) == 2
    assert [(failure["rank"], failure["unseen_ranks"]) for failure in seen.report["failures"]] == [(1, [])]
    assert seen.buckets["recover.rendezvous"] > 0
    assert seen.buckets["start.launcher_init"] > 0.3
    assert seen.report["steps"]["repeated"] == 6
    assert seen.buckets["unattributed"] < 0.01 * seen.report["wall_s"]


@pytest.mark.thorough
def test_a_program_that_replaces_itself_goes_on_as_the_same_job(home: Path) -> None:
    done = measured(
        home,
        """
        if len(sys.argv) == 1:
            os.execv(sys.executable, [sys.executable, __file__, "again"])
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for (batch,) in data():
            train(model, optimizer, batch)
        """,
    )
    assert done.steps == 10
    assert done.report["state"] == "ended"


def test_a_program_without_torch_has_its_process_told(home: Path) -> None:
    done = measured(home, "import time\ntime.sleep(0.3)\n", head="", cold=True)
    assert done.report["state"] == "ended"
    assert done.report["wall_s"] > 0.3
    assert done.buckets["unattributed"] == pytest.approx(done.report["wall_s"])
    assert any("no PyTorch training was seen" in note for note in done.report["notes"])


# --- nothing changes -----------------------------------------------------------------------------------------------

SAME = {
    "plain": """
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            for (batch,) in data(shuffle=True, num_workers=1):
                train(model, optimizer, batch)
            model.eval()
            with torch.no_grad():
                for (batch,) in data(32):
                    model(batch)
            model.train()
        """,
    "compiled": """
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        compiled = torch.compile(model, backend="aot_eager", dynamic=True)
        for size in (16, 7, 3, 16):
            for (batch,) in DataLoader(TensorDataset(torch.randn(size * 4, 8)), batch_size=size, shuffle=True):
                train(compiled, optimizer, nn.functional.dropout(batch, 0.1))
        """,
    "checkpointed": """
        import torch.distributed.checkpoint as dcp
        model = nn.Sequential(Net(), nn.Sigmoid())
        optimizer = torch.optim.AdamW(model.parameters())
        for number, (batch,) in enumerate(data(shuffle=True)):
            train(model, optimizer, batch + torch.rand(()))
            if number == 5:
                dcp.save({"model": model.state_dict()}, checkpoint_id="saved", no_dist=True)
                torch.save(optimizer.state_dict(), "optimizer.pt")
                optimizer.load_state_dict(torch.load("optimizer.pt"))
        """,
}

PRINT = """
import hashlib, random
everything = [*model.state_dict().values(), torch.get_rng_state()]
everything += [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
print(hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in everything)).hexdigest(), random.random())
"""


@pytest.mark.parametrize("program", SAME)
def test_results_are_bit_identical_with_and_without(home: Path, program: str) -> None:
    text = "import random; random.seed(1)\n" + textwrap.dedent(SAME[program]) + PRINT
    done = measured(home, text)
    without = plain(str(home / "train.py"), env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=home, check=True)
    assert done.out == without.stdout


def test_nothing_is_imported_that_the_program_would_not_have_imported_and_disabled_means_disabled(home: Path) -> None:
    path = home / "imports.py"
    path.write_text("import torch\nimport sys\nprint(*sys.modules)\n")
    without = set(run(sys.executable, str(path), env=os.environ | {"HEADWAY_DISABLE": "1"}).stdout.split())
    assert "torch" in without
    assert not any("headway" in name for name in without)
    assert not jobs_in(home)
    seen = {name for name in run(sys.executable, str(path)).stdout.split() if name.partition(".")[0] != "headway"}
    assert seen - without <= {"sitecustomize"}
    assert jobs_in(home)


def test_the_report_of_a_program_can_be_had_as_json_by_name(home: Path) -> None:
    measured(home, STEPS["no loader"], job="by-name")
    done = CliRunner().invoke(cli, ["report", "by-name", "--json"])
    assert json.loads(done.stdout)["steps"]["new"] == 10


def test_what_is_loaded_or_copied_in_a_loop_is_no_recovery(home: Path) -> None:
    done = measured(
        home,
        """
        model, target = Net(), Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.save(torch.randn(100_000), "shard.pt")
        for (batch,) in data():
            train(model, optimizer, batch)
            target.load_state_dict(model.state_dict())
            began = time.monotonic()
            shard = torch.load("shard.pt")
            waited = time.monotonic() - began
        """,
    )
    assert done.steps == 10
    assert done.buckets["recover.checkpoint_restore"] == 0
    assert done.buckets["waste.data_wait"] > 0
    assert not done.of(Restored)


def test_going_back_to_a_checkpoint_in_the_same_process_repeats_steps(home: Path) -> None:
    done = measured(
        home,
        """
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        loader = data()
        for round in range(2):
            for number, (batch,) in enumerate(loader):
                train(model, optimizer, batch)
                if round == 0 and number == 4:
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "good.pt")
            if round == 0:
                state = torch.load("good.pt")
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "good.pt")
        """,
    )
    assert done.report["steps"]["repeated"] == 5
    assert done.steps == 15
    assert done.buckets["recover.checkpoint_restore"] > 0


@pytest.mark.needs_package("torchdata")
def test_a_stateful_loader_is_a_loader(home: Path) -> None:
    done = measured(
        home,
        """
        from torchdata.stateful_dataloader import StatefulDataLoader
        class Slow(Dataset):
            def __len__(self):
                return 160
            def __getitem__(self, index):
                time.sleep(0.002)
                return torch.randn(8)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in StatefulDataLoader(Slow(), batch_size=16):
            train(model, optimizer, batch)
        """,
    )
    assert done.steps == 10
    assert done.buckets["waste.data_wait"] >= 9 * 0.032


def test_a_group_made_in_the_middle_of_training_is_told_of(home: Path) -> None:
    done = measured(
        home,
        """
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, (batch,) in enumerate(data()):
            train(model, optimizer, batch)
            if number == 5:
                dist.new_group([0])
        dist.destroy_process_group()
        """,
    )
    told = [record.attrs["what"] for record in done.of(SpanBegin) if record.attrs and "group" in str(record.attrs)]
    assert told == ["init_process_group", "new_group"]


def test_the_end_is_told_even_if_the_last_words_fail(home: Path) -> None:
    done = measured(
        home,
        """
        from headway.instrument import loop
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for (batch,) in data():
            train(model, optimizer, batch)
        def broken(self):
            raise ValueError("broken on purpose")
        loop.Tracker.finish = broken
        """,
    )
    assert done.report["state"] == "ended"
    assert done.err.count("the last records could not be written (ValueError: broken on purpose)") == 1
