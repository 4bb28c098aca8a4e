"""Two ranks under torchrun. One crashes at step 30 of 60; torchrun starts both again from the checkpoint of step 20.

Steps 20 to 29 are trained twice. With `uneven`, no rank crashes, and one has fewer batches: DDP's join covers for it.
"""

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

how = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
start = 0
if Path("last.pt").exists():
    with watch("restore"):
        state = torch.load("last.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]

steps = (50 if rank else 60) if how == "uneven" else 60
loader = DataLoader(Points(8 * (steps - start)), batch_size=8)
with model.join() if how == "uneven" else nullcontext():
    for step, (x, y) in enumerate(watch.waits(loader), start):
        with watch("effective", step):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        if how != "uneven" and step % 20 == 19:
            if rank == 0:
                with watch("checkpoint_blocking"):
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, "last.pt")
            dist.barrier()
            if rank == 0:
                watch.saved()
        if how != "uneven" and step == 29 and rank == 1 and not start:
            os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
