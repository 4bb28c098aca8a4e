"""Goes back to its own checkpoint when the loss has a spike at step 70, and goes on with a new loader.

Steps 40 to 69 are trained twice, from other batches: they count once. `loop` goes back in one
loop, `model` leaves the optimizer as it is.
"""

import copy
import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

place, optimizer_name = sys.argv[1:]
model = net()
optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=1e-3)
kept = {}


def save(step):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    if place == "memory":
        return kept.update(copy.deepcopy(state))
    with watch("checkpoint_blocking"):
        torch.save(state, "last.pt")
    return watch.saved()


def restore():
    with watch("restore"):
        state = kept if place == "memory" else torch.load("last.pt")
        model.load_state_dict(state["model"])
        if place != "model":
            optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def train_step(x, y, step):
    with watch("effective", step):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    if step + 1 in (20, 40, 80, 100):
        save(step + 1)
    return step + 1


def new_batches():
    return watch.waits(DataLoader(Points(960), batch_size=8, shuffle=True))


def train(step, until):
    for x, y in new_batches():
        step = train_step(x, y, step)
        if step == until:
            return


if place == "loop":
    batches, step, spiked = new_batches(), 0, False
    while step < 110:
        step = train_step(*next(batches), step)
        if step == 70 and not spiked:
            step, spiked, batches = restore(), True, new_batches()
else:
    train(0, 70)
    train(restore(), 110)
save(110)
