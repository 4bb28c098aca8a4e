"""Halves the batch when a step runs out of memory: every third forward is lost."""

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

model = net(0.05)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
tries = 0


def train_step(x, y):
    global tries
    tries += 1
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    if tries % 3 == 0:
        raise torch.OutOfMemoryError("out of memory")
    loss.backward()
    optimizer.step()


for x, y in watch.waits(DataLoader(Points(320), batch_size=8)):
    try:
        with watch("effective"):
            train_step(x, y)
    except torch.OutOfMemoryError:
        half = len(x) // 2
        for part in (slice(half), slice(half, None)):
            with watch("effective"):
                optimizer.zero_grad()
                cross_entropy(model(x[part]), y[part]).backward()
                optimizer.step()
