"""What ranks do in the benchmark of start-up: `startup.py` has them do it, and reads what they have measured.

`on_ranks` runs one of these functions on so many gloo ranks. All are forked from one process that has imported what
they need: a rank has nothing to wait for but what is measured.
"""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE_S = 600.0
Found = dict[str, Any]


def on_ranks(ranks: int, function: str, *args: Any, **environ: str) -> list[Found]:
    """What a function of this file returns on each of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "bench.starting", function, str(ranks), folder, json.dumps(args)]
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "TORCH_"))}
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HEADWAY_HOME": folder, "HEADWAY_JOB": "bench"}
        done = subprocess.run(
            words, env=outside | own | environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{function}{args} on {ranks} ranks failed:\n{done.stderr[-5000:]}")
        return [json.loads(Path(folder, f"found-{rank}").read_text()) for rank in range(ranks)]


def main() -> None:
    """Forks the ranks, and waits for them."""
    import torch._dynamo  # what the first process group would import
    import torch.distributed  # noqa: F401

    import headway.startup.runner  # noqa: F401

    name, ranks, folder, args = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    if name in NEED_TORCHREC:
        import bench.dlrm  # noqa: F401
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=_rank, args=(name, rank, ranks, folder, args)) for rank in range(ranks)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in started))


def _rank(name: str, rank: int, ranks: int, folder: str, args: list[Any]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    Path(folder, f"found-{rank}").write_text(json.dumps(globals()[name](*args)))


def join() -> None:
    """Meets the other ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo")


class Stopwatch:
    """When each thing began and ended, in seconds since this was made."""

    def __init__(self) -> None:
        self._begin_s, self.times = time.monotonic(), dict[str, tuple[float, float]]()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Times a block."""
        begin_s = time.monotonic() - self._begin_s
        yield
        self.times[name] = (begin_s, time.monotonic() - self._begin_s)


# --- stages ----------------------------------------------------------------------------------------------------------

LATENCIES = {
    "device_init": ("main", (), 0.2),
    "process_group_init": ("comm", (), 0.5),
    "preproc_creation": ("io", (), 0.7),
    "checkpoint_read": ("io", (), 1.2),
    "train_module_creation": ("main", ("device_init",), 0.6),
    "shards": ("comm", ("train_module_creation",), 0.3),
    "restore": ("main", ("shards", "checkpoint_read"), 0.3),
    "init_plugins": ("io", ("device_init",), 0.4),
    "get_first_batch_data": ("io", ("preproc_creation",), 0.6),
    "pre_train": ("main", ("restore", "init_plugins", "get_first_batch_data"), 0.2),
}
"""Stages that only wait, for so many seconds: their lanes, and what they need. The longest path takes 1.7 s."""


def latency_bound() -> Found:
    """All of `LATENCIES` by the runner."""
    import headway

    setup = headway.Startup()
    for name, (lane, needs, seconds) in LATENCIES.items():
        setup.stage(name=name, lane=lane, needs=needs, computes=False)(lambda seconds=seconds: time.sleep(seconds))
    headway.current()
    begin_s = time.monotonic()
    setup.run()
    return {"wall_s": time.monotonic() - begin_s}


MIXED = {
    "process_group_init": ("comm", ()),
    "preproc_creation": ("io", ()),
    "checkpoint_read": ("io", ()),
    "init_plugins": ("io", ()),
    "train_module_creation": ("main", ()),
    "get_first_batch_data": ("io", ("preproc_creation",)),
    "restore": ("main", ("train_module_creation", "checkpoint_read")),
    "compared": ("comm", ("process_group_init", "restore")),
    "pre_train": ("main", ("restore",)),
}
"""The stages of `mixed`, their lanes and needs, in the order they are declared in."""


def mixed() -> Found:
    """A start-up that computes in lane `main` and awaits far-off machines in the others: those waits are sleeps.

    One after another with HEADWAY_SERIAL=1. Returns when each stage began and ended by a stopwatch of our own.
    """
    import torch
    from torch import nn

    import headway
    from headway.startup.sync import same_parameters

    setup, watch = headway.Startup(seed=1), Stopwatch()
    path = Path(os.environ["HEADWAY_HOME"], f"state-{os.environ['RANK']}.pt")
    torch.save(nn.Sequential(*[nn.Linear(512, 512) for _ in range(40)]).state_dict(), path)

    def stage(name: str, work: Callable[..., Any]) -> None:
        lane, needs = MIXED[name]

        def timed(results: dict[str, Any] = results) -> None:
            with watch.of(name):
                results[name] = work(results)

        setup.stage(name=name, lane=lane, needs=needs)(timed)

    results: dict[str, Any] = {}
    for name, work in {
        "process_group_init": lambda _: (time.sleep(0.4), join()),
        "preproc_creation": lambda _: time.sleep(0.9),
        "checkpoint_read": lambda _: (time.sleep(0.6), torch.load(path))[1],
        "init_plugins": lambda _: time.sleep(0.5),
        "train_module_creation": lambda _: _build(),
        "get_first_batch_data": lambda _: time.sleep(0.5),
        "restore": lambda of: of["train_module_creation"].load_state_dict(of["checkpoint_read"]),
        "compared": lambda of: same_parameters(of["train_module_creation"]),
        "pre_train": lambda of: (torch.optim.AdamW(of["train_module_creation"].parameters()), _spin(0.2)),
    }.items():
        stage(name, work)
    headway.current()
    begin_s = time.monotonic()
    setup.run()
    return {"wall_s": time.monotonic() - begin_s, "times": watch.times}


def _build() -> Any:
    from torch import nn

    _spin(0.8)
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(40)])


def _spin(seconds: float) -> None:
    """So much CPU time of Python, as a planner takes."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(1000))


# --- groups ----------------------------------------------------------------------------------------------------------


def made_groups(count: int) -> Found:
    """What it takes to make a group of all ranks, and to use it for the first time, in seconds: torch's and ours."""
    import torch
    import torch.distributed as dist

    from headway.startup.groups import process_group

    join()
    found: Found = {f"{who} {what}": [] for who in ("stock", "ours") for what in ("made", "used")}
    for number in range(count + 1):
        for who in ("stock", "ours"):
            another = timedelta(seconds=600 + number)  # so that none is there that would do
            dist.barrier()
            begin_s = time.perf_counter()
            group = dist.new_group(timeout=another) if who == "stock" else process_group(timeout=2 * another)
            made_s = time.perf_counter()
            dist.all_reduce(torch.ones(1), group=group)
            if number:  # the first one imports, and fills caches
                found[f"{who} made"].append(made_s - begin_s)
                found[f"{who} used"].append(time.perf_counter() - begin_s)
    return found


# --- TorchRec --------------------------------------------------------------------------------------------------------


def planned(tables: int, ranks: int, hits: int) -> Found:
    """What a plan takes by TorchRec's planner, and from the cache, in seconds. One process, for ranks made up."""
    from bench.dlrm import timed_plan
    from headway.startup.plans import sharding_plan

    model, planner, sharders = timed_plan(tables, ranks)
    begin_s = time.perf_counter()
    made = planner.plan(model, sharders)
    found: Found = {"planned": time.perf_counter() - begin_s, "hits": []}
    for number in range(hits + 1):
        model, planner, sharders = timed_plan(tables, ranks)
        begin_s = time.perf_counter()
        plan = sharding_plan(planner, model, sharders, cache=os.environ["HEADWAY_HOME"])
        if number:  # the first one plans
            found["hits"].append(time.perf_counter() - begin_s)
        if plan != made:
            raise RuntimeError("a plan from the cache is another one")
    return found


def collectives(who: str, tables: int) -> Found:
    """How many collectives it takes to shard a DLRM, and a loss of it: TorchRec's way, or ours."""
    import torch
    import torch.distributed as dist

    from bench import dlrm

    join()
    model, world = dlrm.built(tables), dist.group.WORLD
    before = world._get_sequence_number_for_group()  # type: ignore[union-attr]
    sharded = dlrm.stock(model) if who == "stock" else dlrm.remedied(model, os.environ["HEADWAY_HOME"])
    sent = world._get_sequence_number_for_group() - before  # type: ignore[union-attr]
    with torch.no_grad():
        for name, parameter in sharded.named_parameters():
            if "dense" not in name:  # tables begin at random
                parameter.fill_(0.01)
    return {"sent": sent, "loss": sharded(*dlrm.batch(tables, dist.get_rank())).square().mean().item().hex()}


def shard_metadata(tables: int, count: int) -> Found:
    """What it takes to shard an EmbeddingCollection by row, in seconds: TorchRec's way and ours in turn."""
    from contextlib import nullcontext

    import torch.distributed as dist
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import get_default_sharders

    from bench.dlrm import row_wise_rows
    from headway.startup.shards import local_shard_metadata

    join()
    found: Found = {"stock": [], "ours": []}
    for number in range(count + 1):
        for who, way in (("stock", nullcontext), ("ours", local_shard_metadata)):
            model, plan = row_wise_rows(tables)
            dist.barrier()
            begin_s = time.perf_counter()
            with way():
                DistributedModelParallel(model, plan=plan, sharders=get_default_sharders())
            if number:
                found[who].append(time.perf_counter() - begin_s)
    return found


# --- fast batch ------------------------------------------------------------------------------------------------------


def first_step(way: str, wait_s: float) -> Found:
    """From the loader's start to its first batch, and to the end of the first step, which compiles, in seconds. The
    loader waits for far-off storage. `fast` compiles meanwhile, `stock` when the batch has come."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    import headway
    from headway.startup.fast import fast_batch

    layers = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model = nn.Sequential(*layers)
    compiled, optimizer = torch.compile(model), torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = compiled(batch).square().mean()
        return loss

    loader = DataLoader(_FarOff(wait_s), batch_size=None, num_workers=1)
    headway.current()
    begin_s = time.monotonic()
    for batch in fast_batch(loader, loss_of, model=model) if way == "fast" else loader:
        data_s = time.monotonic() - begin_s
        loss_of(batch).backward()
        optimizer.step()
        return {"data_s": data_s, "step_s": time.monotonic() - begin_s}
    raise RuntimeError("there was no batch")


class _FarOff:
    """A data set whose first sample takes its time."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> Any:
        import torch

        time.sleep(self._wait_s if at == 0 else 0.0)
        return torch.randn(32, 64)


NEED_TORCHREC = frozenset(["planned", "collectives", "shard_metadata"])

if __name__ == "__main__":
    main()
