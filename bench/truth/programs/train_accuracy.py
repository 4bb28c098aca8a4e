"""Measures the accuracy on the training loader after each epoch. That pass trains nothing: it is evaluation."""

import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

spelling = sys.argv[1]
loader = DataLoader(Points(160), batch_size=8, shuffle=True)
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def count_hits():
    hits = 0
    for x, y in loader:
        hits += int((model(x).argmax(1) == y).sum())
    return hits


@torch.no_grad()
def accuracy_decorated():
    return count_hits() / 160


def accuracy():
    if spelling == "decorator":
        return accuracy_decorated()
    if spelling == "eval":
        model.eval()
    with torch.inference_mode() if spelling == "inference_mode" else torch.no_grad():
        hits = count_hits()
    model.train()
    return hits / 160


for epoch in range(3):
    for x, y in watch.waits(loader):
        with watch("effective"):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    with watch("evaluation"):
        print(f"epoch {epoch}: train accuracy {accuracy():.2f}")
