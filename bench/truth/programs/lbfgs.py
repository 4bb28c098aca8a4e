"""Fits with LBFGS, which calls a closure several times for each step."""

import torch
from stopwatch import watch
from tiny import net
from torch.nn.functional import cross_entropy

points, labels = torch.randn(256, 8), torch.randint(2, (256,))
model = net(0.015)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)


def closure():
    optimizer.zero_grad()
    loss = cross_entropy(model(points), labels)
    loss.backward()
    return loss


for _ in range(40):
    with watch("effective"):
        loss = optimizer.step(closure)
print(loss.item())
