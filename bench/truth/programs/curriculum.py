"""Three stages with ever harder data: a new loader for each, the same model. Preparing a stage takes half a second."""

import time

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for batch_size in (4, 8, 16):
    with watch("other"):
        time.sleep(0.5)  # filters the data for this stage
        loader = DataLoader(Points(batch_size * 30), batch_size=batch_size, shuffle=True)
    for x, y in watch.waits(loader):
        with watch("effective"):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
