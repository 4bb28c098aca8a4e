"""The loop of the transfer learning tutorial: two phases in each epoch, gradients on or off by the phase."""

import copy

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

loaders = {"train": DataLoader(Points(160), batch_size=8, shuffle=True), "val": DataLoader(Points(80), batch_size=8)}
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
best, best_weights = 0.0, {}


def run_phase(phase):
    """Go through one loader; return the accuracy."""
    hits = 0
    for x, y in watch.waits(loaders[phase]):
        with watch("effective" if phase == "train" else "evaluation"):
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                outputs = model(x)
                loss = cross_entropy(outputs, y)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            hits += int((outputs.argmax(1) == y).sum())
    return hits / len(loaders[phase].dataset)


for _ in range(4):
    model.train()
    run_phase("train")
    scheduler.step()
    model.eval()
    accuracy = run_phase("val")
    if accuracy > best:
        best, best_weights = accuracy, copy.deepcopy(model.state_dict())
model.load_state_dict(best_weights)
