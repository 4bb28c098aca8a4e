"""Trains a small model, then loads weights somebody else published and fine-tunes them. All steps are new work.

`--publish` makes the file of weights; that is done before the job.
"""

import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

if sys.argv[1:] == ["--publish"]:
    torch.save(net().state_dict(), "published.pt")
    sys.exit()


def train(model, steps):
    loader = DataLoader(Points(8 * steps), batch_size=8, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in watch.waits(loader):
        with watch("effective"):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


scratch = net()
train(scratch, 50)
with watch("other"):
    fine_tuned = net()
    fine_tuned.load_state_dict(torch.load("published.pt"))
train(fine_tuned, 50)
