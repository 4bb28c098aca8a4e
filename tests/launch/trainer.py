"""Trains a small model on all ranks, and fails where FAULTS says: `attempt:rank@step=kind`, separated by blanks.

It saves every third step, resumes from that, and writes down every step it does. A step takes STEP_S until there is a
file called `fast`.
"""

import ctypes
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def fail(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "segfault":
        ctypes.string_at(0)
    elif kind == "abort":
        os.abort()
    elif kind == "exit":
        sys.exit(3)
    elif kind == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)
    elif kind == "leave":
        os._exit(9)
    elif kind == "bus":
        os.kill(os.getpid(), signal.SIGBUS)
    elif kind == "hang":
        time.sleep(1000)
    elif kind == "busy":
        until = time.monotonic() + 100
        while "it gets more" not in Path("stderr").read_text() and time.monotonic() < until:
            pass
    elif kind == "disk":
        raise OSError(28, "No space left on device")
    elif kind == "cut_off":
        raise RuntimeError("[Errno 104] Connection reset by peer")
    elif kind == "complain":
        try:
            fail("disk")
        except OSError:
            traceback.print_exc()
    else:
        raise ValueError("a bad batch")


def wait_for_all(attempt: str, step: int) -> None:
    """Until every rank has written down that step: the failure could end one that has done it, and not said so."""
    for rank in range(dist.get_world_size()):
        path = Path(f"trained-{rank}")
        while not path.exists() or f"{attempt} {step}" not in path.read_text().splitlines():
            time.sleep(0.005)


def main() -> None:
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), os.environ.get("HEADWAY_ATTEMPT", "0")
    Path(f"pid-{rank}").write_text(str(os.getpid()))
    faults = dict(fault.split("=") for fault in os.environ.get("FAULTS", "").split())
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    saved = Path("saved.pt")
    start = 0
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    for step in range(start, int(os.environ.get("STEPS", "21"))):
        kind = faults.get(f"{attempt}:{rank}@{step}") or faults.get(f"*:{rank}@{step}")
        if kind:
            if step > start:
                wait_for_all(attempt, step - 1)
            fail(kind)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with Path(f"trained-{rank}").open("a") as file:
            file.write(f"{attempt} {step}\n")
        time.sleep(0 if Path("fast").exists() else float(os.environ.get("STEP_S", "0.02")))
        if step % 3 == 2 and rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, "saving.pt")
            os.replace("saving.pt", saved)
    print(f"rank {rank} of {dist.get_world_size()} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
