"""Averages weights with swa_utils and updates the batch norm from the training loader, after each epoch or at the end.

The pass of `update_bn` runs without gradients and trains nothing: it is evaluation.
"""

import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader

when = sys.argv[1]
loader = DataLoader(Points(160), batch_size=8, shuffle=True)
model = net(norm=True)
averaged = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scheduler = SWALR(optimizer, swa_lr=0.01)

for epoch in range(4):
    for x, y in watch.waits(loader):
        with watch("effective"):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    with watch("other"):
        averaged.update_parameters(model)
        scheduler.step()
    if when == "each" or epoch == 3:
        with watch("evaluation"):
            update_bn(loader, averaged)
