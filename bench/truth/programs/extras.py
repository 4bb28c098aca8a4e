"""A loop with something around it: the profiler, torch.compile, gradient checkpointing, or data that is read ahead."""

import sys
import time

import torch
from stopwatch import watch
from tiny import Points, net
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

what = sys.argv[1]
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)) if what == "compile" else net()
data = Points(640)
if what == "cache":
    with watch("other"):  # reads the whole dataset into memory first
        slow = DataLoader(Points(640, delay_s=0.004), batch_size=64)
        data = TensorDataset(*map(torch.cat, zip(*slow, strict=True)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
forward = torch.compile(model) if what == "compile" else model
planned = schedule(wait=5, warmup=2, active=3, repeat=2)
profiler = profile(activities=[ProfilerActivity.CPU], schedule=planned) if what == "profiler" else None
if profiler:
    profiler.start()
for x, y in watch.waits(DataLoader(data, batch_size=8, shuffle=True)):
    with watch("effective"):
        optimizer.zero_grad()
        output = checkpoint(model, x, use_reentrant=False) if what == "checkpoint" else forward(x)
        cross_entropy(output, y).backward()
        if what == "compile":
            time.sleep(0.03)
        optimizer.step()
        if profiler:
            profiler.step()
if profiler:
    profiler.stop()
