"""Hogwild: two processes train one model in shared memory, without a process group.

Both train all the time. The job trains while both do.
"""

import torch
import torch.multiprocessing as mp
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def train(rank, model):
    torch.manual_seed(rank)
    loader = DataLoader(Points(640), batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for x, y in watch.waits(loader):
        with watch("effective"):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    model = net()
    model.share_memory()
    workers = [mp.Process(target=train, args=(rank, model)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
