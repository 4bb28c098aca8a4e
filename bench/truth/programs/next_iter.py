"""Takes each batch with next(iter(loader)), or from an iterator that it makes again when it is empty."""

import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

variant = sys.argv[1]
loader = DataLoader(Points(160, delay_s=0.001), batch_size=8, shuffle=True)
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
batches = iter(loader)
step = 0
while step < 90:
    with watch("data_wait"):
        if variant == "each":
            x, y = next(iter(loader))
        else:
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(loader)
                x, y = next(batches)
    with watch("effective"):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
