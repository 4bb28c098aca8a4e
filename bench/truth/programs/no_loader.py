"""Loops without a DataLoader: data made on the fly, read from a mapped file, or batches from a list."""

import sys
import time

import numpy
import torch
from stopwatch import watch
from tiny import net
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

how, steps = sys.argv[1], 100
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
if how == "memmap":
    numpy.random.rand(4000, 8).astype(numpy.float32).tofile("train.bin")
    tokens = numpy.memmap("train.bin", dtype=numpy.float32, mode="r", shape=(4000, 8))


def get_batch():
    if how == "memmap":
        at = torch.randint(4000, (8,)).tolist()
        return torch.stack([torch.from_numpy(tokens[i].copy()) for i in at]), torch.randint(2, (8,))
    time.sleep(0.01)  # a simulator
    return torch.randn(8, 8), torch.randint(2, (8,))


while scheduler.last_epoch < steps - 1:
    with watch("effective"):
        x, y = get_batch()
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
