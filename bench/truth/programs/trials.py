"""Starts a training for each learning rate: one command after the other, or in a pool of two processes.

In the pool both processes train at once: the job trains while both do.
"""

import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from stopwatch import watch


def train(lr):
    import torch
    from tiny import Points, net
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in watch.waits(DataLoader(Points(640), batch_size=8)):
        with watch("effective"):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    return loss.item()


if __name__ == "__main__":
    if sys.argv[1] == "pool":
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            print(list(pool.map(train, [0.1, 0.01])))
    else:
        for lr in ("0.1", "0.01"):
            subprocess.run([sys.executable, "train.py", "--lr", lr], check=True)
