"""One loop, fed in many ways: workers, streams, threads, files, two loaders at once, or no loader at all.

A wait for a batch is a wait whichever way it comes.
"""

import queue
import sys
import threading
import time

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

how = sys.argv[1]


class Stream(IterableDataset):
    """An endless stream, read in turns by the workers."""

    def __iter__(self):
        while True:
            time.sleep(0.001)
            yield torch.randn(8), 1


def epochs():
    """Yield the batches of an epoch, again and again."""
    if how == "workers":
        loader = DataLoader(Points(160, delay_s=0.02), batch_size=8, num_workers=2, persistent_workers=True)
    elif how == "fresh-workers":
        loader = DataLoader(Points(320, delay_s=0.002), batch_size=8, num_workers=2)
    elif how == "stream":
        loader = DataLoader(Stream(), batch_size=8)
    elif how == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(Points(160, delay_s=0.002), batch_size=8)
    elif how == "zip":
        pair = [DataLoader(Points(160, delay_s=delay_s), batch_size=8, shuffle=True) for delay_s in (0.0005, 0.003)]
        while True:
            yield ((left[0] + right[0], left[1]) for left, right in zip(*pair, strict=True))
    else:
        loader = DataLoader(Points(160, delay_s=0.005), batch_size=8, shuffle=True)
    while True:
        yield prefetched(loader) if how == "thread" else loader


def prefetched(loader):
    batches = queue.Queue(maxsize=2)
    threading.Thread(target=lambda: [*map(batches.put, loader), batches.put(None)], daemon=True).start()
    return iter(batches.get, None)


def train(model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for batches in epochs():
        for x, y in watch.waits(batches):
            with watch("effective"):
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                steps -= 1
            if not steps:
                return


train(net(), 100)
