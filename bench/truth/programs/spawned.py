"""Two ranks of DDP, started by mp.spawn. The job trains while both ranks do."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def main(rank, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29643")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in watch.waits(DataLoader(Points(640), batch_size=8)):
        with watch("effective"):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(2,), nprocs=2)
