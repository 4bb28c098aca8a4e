"""Accumulates gradients over four batches for each step of the optimizer; optionally under autocast, with a scaler."""

import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

scaled = sys.argv[1] == "scaler"
every = 1 if scaled else 4
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**16)
for number, (x, y) in enumerate(watch.waits(DataLoader(Points(800), batch_size=8)), 1):
    with watch("effective"):
        with torch.autocast("cpu", torch.bfloat16, enabled=scaled):
            loss = cross_entropy(model(x), y) / every
        if scaled and number % 20 == 0:
            loss = loss * torch.inf  # the scaler skips this step
        scaler.scale(loss).backward()
        if number % every == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
