"""Steps of an unusual kind: weights changed by hand, two optimizers in turns, a new one each epoch, a model that trains
in evaluation mode, an attack inside each step. All of it is effective."""

import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

kind = sys.argv[1]
loader = DataLoader(Points(240), batch_size=8, shuffle=True)
model = net(0.015 if kind == "attack" else 0.03)
parts = [model[:2], model[2:]]
if kind == "eval-mode":
    model.eval()


def new_optimizer(module):
    return torch.optim.Adam(module.parameters(), lr=1e-3)


def attacked(x, y):
    """Perturb a batch with the model in evaluation mode."""
    model.eval()
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cross_entropy(model(x), y), x)
    model.train()
    return (x + 0.01 * slope.sign()).detach()


optimizer = new_optimizer(model)
in_turns = [new_optimizer(part) for part in parts]
for epoch in range(3):
    if kind == "unfreeze":
        optimizer = new_optimizer(model[-1 - epoch :])
    elif kind == "turns":
        optimizer = in_turns[epoch % 2]
    for x, y in watch.waits(loader):
        with watch("effective"):
            if kind == "attack":
                x = attacked(x, y)
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            if kind == "by-hand":
                with torch.no_grad():
                    for param in model.parameters():
                        param -= 0.01 * param.grad
            else:
                optimizer.step()
