"""Validates with a loader of its own: before the first step, in the middle of an epoch, or when all is done.

With `upload`, it saves every 25 steps instead, and waits until the file is uploaded: checkpoint_blocking.
"""

import shutil
import sys
import time

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

when = sys.argv[1]
loader = DataLoader(Points(800), batch_size=8, shuffle=True)
held_out = DataLoader(Points(120), batch_size=8)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def validate():
    model.eval()
    with torch.no_grad():
        loss = sum(cross_entropy(model(x), y).item() for x, y in held_out)
    model.train()
    return loss


def upload():
    torch.save(model.state_dict(), "last.pt")
    shutil.copy("last.pt", "uploaded.pt")
    time.sleep(0.3)  # the network


if when == "first":
    with watch("evaluation"):
        print("before training", validate())
for step, (x, y) in enumerate(watch.waits(loader), 1):
    with watch("effective"):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    if step % 25 == 0 and when == "middle":
        with watch("evaluation"):
            print(step, validate())
    if step % 25 == 0 and when == "upload":
        with watch("checkpoint_blocking"):
            upload()
        watch.saved()
if when == "last":
    with watch("evaluation"):
        print("test", validate())
