"""Runs 30 steps to find a learning rate, restores the model from memory, and trains. The 30 steps are lost.

Their results are in no state of the job: they are unsaved.
"""

import copy

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
loader = DataLoader(Points(480), batch_size=8, shuffle=True)


def train_step(x, y):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def find_lr():
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses = []
    for tried, (x, y) in enumerate(watch.waits(loader)):
        with watch("unsaved"):
            losses.append(train_step(x, y))
            optimizer.param_groups[0]["lr"] *= 1.3
        if tried == 29:
            break
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    return 1e-5 * 1.3 ** losses.index(min(losses))


optimizer.param_groups[0]["lr"] = find_lr()
for x, y in watch.waits(loader):
    with watch("effective"):
        train_step(x, y)
