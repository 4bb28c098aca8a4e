"""Ends in one of many ways: hangs, fails, is interrupted, or is told to stop and saves. It saves every 20 steps.

A hang is no training: the step that hung never ended.
"""

import signal
import sys
import time
from pathlib import Path

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

how, steps = sys.argv[1], int(sys.argv[2])
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
stop = False


def on_signal(*_):
    global stop
    stop = True


def save(step):
    with watch("checkpoint_blocking"):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "last.pt")
    watch.saved()


if how == "sigterm":
    signal.signal(signal.SIGTERM, on_signal)
first = 0
if Path("last.pt").exists():
    with watch("restore"):
        state = torch.load("last.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
step = first
try:
    for x, y in watch.waits(DataLoader(Points(8 * (steps - first)), batch_size=8)):
        with watch("effective", step):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if how == "hang" and step == 70:
                time.sleep(3600)
            optimizer.step()
            step += 1
        if how in ("fail", "lose") and step == 50 and not first:
            raise RuntimeError("the data is corrupt")
        if (step % 20 == 0 and how != "lose") or stop:
            save(step)
        if stop:
            break
except KeyboardInterrupt:
    print("interrupted")
    save(step)
