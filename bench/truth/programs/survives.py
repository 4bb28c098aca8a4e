"""Goes on after an exception in the loop: a bad batch is logged and left out. The time it took is lost."""

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

model = net(0.05)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for number, (x, y) in enumerate(watch.waits(DataLoader(Points(640), batch_size=8))):
    try:
        with watch("effective"):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            if number % 4 == 3:
                raise FloatingPointError("the loss is not a number")
            loss.backward()
            optimizer.step()
    except FloatingPointError as error:
        print(f"batch {number} is left out: {error}")
