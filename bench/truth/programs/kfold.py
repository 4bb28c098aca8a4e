"""Cross-validation: three models, each with its own optimizer and loaders, in one process. All steps are new work.

The weights of a fold are fresh, or those of a file that was written at the start (`init`) or published (`published`).
With `ensemble` all models and optimizers are kept. With `best`, each fold saves after each epoch, and loads that for
its test.
"""

import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

optimizer_name, weights = sys.argv[1:]
data = Points(240)
folds = torch.arange(240).chunk(3)
members = []


def train_fold(held_out):
    rest = torch.cat([fold for at, fold in enumerate(folds) if at != held_out])
    loader = DataLoader(Subset(data, rest.tolist()), batch_size=8, shuffle=True)
    validation = DataLoader(Subset(data, folds[held_out].tolist()), batch_size=8)
    model = net()
    if weights in ("init", "published", "ensemble"):
        model.load_state_dict(torch.load("init.pt" if weights == "init" else "published.pt"))
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=1e-3)
    if weights == "ensemble":
        members.append((model, optimizer))
    for _ in range(2):
        model.train()
        for x, y in watch.waits(loader):
            with watch("effective"):
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
        if weights == "best":
            with watch("checkpoint_blocking"):
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"best{held_out}.pt")
            watch.saved()
    with watch("evaluation"):
        if weights == "best":
            model.load_state_dict(torch.load(f"best{held_out}.pt")["model"])
        model.eval()
        with torch.no_grad():
            hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in validation)
    return hits / len(folds[held_out])


if weights == "init":
    torch.save(net().state_dict(), "init.pt")
scores = [train_fold(held_out) for held_out in range(3)]
print(f"accuracy {sum(scores) / 3:.2f}")
