"""Crashes at step 50 of 80 and skips the batches it has trained on after the restart: reading takes 20 ms each.

The skipped batches are data_skip; steps 40 to 49 are trained twice.
"""

import os
import signal
from pathlib import Path

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
start = 0
if Path("last.pt").exists():
    with watch("restore"):
        state = torch.load("last.pt")
        model.load_state_dict(state["model"])
        start = state["step"]

batches = watch.waits(DataLoader(Points(640, delay_s=0.0025), batch_size=8), skipped=start)
for step, (x, y) in enumerate(batches):
    if step < start:
        continue
    with watch("effective", step):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    if step == 49 and not start:
        os.kill(os.getpid(), signal.SIGKILL)
    if step % 20 == 19:
        with watch("checkpoint_blocking"):
            torch.save({"model": model.state_dict(), "step": step + 1}, "last.pt")
        watch.saved()
