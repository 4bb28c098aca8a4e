"""Semi-supervised: a small labelled loader that starts over, and a large unlabelled one that is slow."""

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

labelled = DataLoader(Points(80), batch_size=8, shuffle=True)
unlabelled = DataLoader(Points(320, delay_s=0.005), batch_size=8, shuffle=True)
model = net(0.015)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
some = iter(labelled)
for _ in range(2):
    for more, _ in watch.waits(unlabelled):
        with watch("data_wait"):
            try:
                x, y = next(some)
            except StopIteration:
                some = iter(labelled)
                x, y = next(some)
        with watch("effective"):
            with torch.no_grad():
                guesses = model(more).argmax(1)
            optimizer.zero_grad()
            (cross_entropy(model(x), y) + cross_entropy(model(more), guesses)).backward()
            optimizer.step()
