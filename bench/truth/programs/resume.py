"""Crashes at step 50 of 90 and goes on from the checkpoint of step 40, kept in one of many ways.

Steps 40 to 49 are trained twice and count once.
"""

import argparse
import os
import signal

import torch
from stopwatch import watch
from stores import load, save
from tiny import Lion, Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("store", choices=["file", "memory", "copy", "cloud", "pickle", "numpy", "dcp"])
parser.add_argument("optimizer", choices=["SGD", "Adam", "fused", "Adagrad", "Lion"])
parser.add_argument("--crash", choices=["kill", "raise", "exit"], default="kill")
args = parser.parse_args()

model = net()
kind = {"fused": torch.optim.Adam, "Lion": Lion}.get(args.optimizer) or getattr(torch.optim, args.optimizer)
optimizer = kind(model.parameters(), lr=1e-3, **({"fused": True} if args.optimizer == "fused" else {}))
start = 0
with watch("restore"):
    state = load(args.store, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0})
    if state:
        start = state["step"]
        model.load_state_dict(state["model"])
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])

for step, (x, y) in enumerate(watch.waits(DataLoader(Points(720 - 8 * start), batch_size=8)), start):
    with watch("effective", step):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    if step == 49 and not start:
        if args.crash == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if args.crash == "exit":
            raise SystemExit(1)
        raise RuntimeError("the data is corrupt")
    if step % 20 == 19 or step == 89:
        with watch("checkpoint_blocking"):
            save(args.store, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
        watch.saved()
