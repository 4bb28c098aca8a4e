"""Trials in one process: a hyperparameter search, or a function that trains, called twice. All steps are new work."""

import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

how = sys.argv[1]
data, held_out = Points(200), Points(40)


def train(lr):
    """Train a fresh model; return its loss on held-out data."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if how == "tensors":
        batches = [(data.points[at : at + 8], torch.arange(at, at + 8) % 2) for at in range(0, 200, 8)]
    else:
        batches = DataLoader(data, batch_size=8, shuffle=True)
    for x, y in watch.waits(batches):
        with watch("effective"):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    with watch("evaluation"):
        model.eval()
        with torch.no_grad():
            return sum(cross_entropy(model(x), y).item() for x, y in DataLoader(held_out, batch_size=8))


if how == "twice":
    print(train(0.1), train(0.01))
else:
    print(min((train(lr), lr) for lr in (0.3, 0.1, 0.03, 0.01)))
