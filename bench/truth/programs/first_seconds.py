"""Steps an optimizer without gradients before seconds of preparation, as some do to create its state.

That step trains nothing: the job starts until its first real step. A stall early in the loop is no training either.
"""

import sys
import time

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

variant = sys.argv[1]
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
with watch("other"):
    if variant == "dummy-zero":
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
    if variant.startswith("dummy"):
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(3 if variant.startswith("dummy") else 0)
for step, (x, y) in enumerate(watch.waits(DataLoader(Points(400), batch_size=8))):
    with watch("effective"):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if variant == "stall" and step == 7:
            with watch("stall"):
                time.sleep(3)
