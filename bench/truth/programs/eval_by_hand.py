"""Trains on tensors without a DataLoader and evaluates every 15 steps, in one of the usual spellings."""

import sys

import torch
from stopwatch import watch
from tiny import net
from torch.nn.functional import cross_entropy

spelling, eval_batches = sys.argv[1], int(sys.argv[2])
points, labels = torch.randn(512, 8), torch.randint(2, (512,))
test_points, test_labels = torch.randn(320, 8), torch.randint(2, (320,))
model = net()
optimizer = torch.optim.Adam(model.parameters())


def test_loss():
    losses = [cross_entropy(model(test_points[:32]), test_labels[:32]).item() for _ in range(eval_batches)]
    return sum(losses) / eval_batches


@torch.no_grad()
def decorated():
    model.eval()
    loss = test_loss()
    model.train()
    return loss


def evaluate():
    if spelling == "decorator":
        return decorated()
    if spelling == "no_grad_only":
        with torch.no_grad():
            return test_loss()
    if spelling == "grad_first":
        with torch.no_grad():
            model.eval()
            loss = test_loss()
            model.train()
        return loss
    model.eval()
    if spelling == "set_grad_enabled":
        torch.set_grad_enabled(False)
        loss = test_loss()
        torch.set_grad_enabled(True)
    else:
        with torch.inference_mode() if spelling == "inference_mode" else torch.no_grad():
            loss = test_loss()
    model.train(True)
    return loss


for step in range(75):
    with watch("effective"):
        at = torch.randint(512, (32,))
        loss = cross_entropy(model(points[at]), labels[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if step % 15 == 14:
        with watch("evaluation"):
            print(step, evaluate())
