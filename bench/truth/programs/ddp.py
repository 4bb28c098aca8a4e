"""Two ranks under DDP with gloo. `--slow compute` or `--slow data` makes one rank 100 ms slower in each 130 ms step.

A rank that waits in the all-reduce is in a step, and so is the slow one: both are effective. The slow rank holds the
job up. While rank 0 evaluates alone, the other waits for it: the job evaluates.
"""

import argparse
import time

import torch
import torch.distributed as dist
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--slow", choices=["compute", "data", "late"])
parser.add_argument("--slow-rank", type=int, default=1)
parser.add_argument("--evaluate", choices=["rank0", "by-hand", "all"])
parser.add_argument("--eval-batches", type=int, default=10)
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
is_slow = rank == args.slow_rank
data = Points(16 * args.steps, delay_s=0.1 / 8 if is_slow and args.slow == "data" else 0.0)
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = DistributedDataParallel(net(0.13 if is_slow and args.slow == "compute" else 0.03))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def evaluate():
    model.eval()
    with torch.no_grad():
        if args.evaluate == "by-hand":
            batches = torch.randn(args.eval_batches, 1, 8, 8)
        else:
            batches = DataLoader(Points(8 * args.eval_batches), batch_size=8)
        for x, *_ in batches:
            model.module(x)
    model.train()


for step, (x, y) in enumerate(watch.waits(loader)):
    with watch("effective"):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if is_slow and args.slow == "late":  # such as logging, after the optimizer
            time.sleep(0.1)
    if step % 10 == 9 and args.evaluate:
        if rank == 0 or args.evaluate == "all":
            with watch("evaluation"):
                evaluate()
        with watch("other"):
            dist.barrier()
dist.destroy_process_group()
