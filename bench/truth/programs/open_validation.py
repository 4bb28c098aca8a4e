"""Keeps an iterator over the validation set open and draws a few batches from it every 10 steps."""

import itertools
import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

spelling = sys.argv[1]
train_loader = DataLoader(Points(480), batch_size=8, shuffle=True)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def forever(loader):
    while True:
        yield from loader


def validate():
    if spelling == "eval":
        model.eval()
    with torch.no_grad():
        losses = [cross_entropy(model(x), y).item() for x, y in itertools.islice(held_out, 10)]
    model.train()
    return sum(losses) / len(losses)


held_out = forever(DataLoader(Points(96), batch_size=8))
for step, (x, y) in enumerate(watch.waits(train_loader), 1):
    with watch("effective"):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if step % 10 == 0:
        with watch("evaluation"):
            print(step, loss.item(), validate())
