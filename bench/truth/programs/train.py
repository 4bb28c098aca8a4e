"""The plain program: arguments, a loader, an optimizer, and a model that is saved at the end if asked for."""

import argparse
import time

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--optimizer", default="Adam")
parser.add_argument("--init")
parser.add_argument("--out")
parser.add_argument("--stall-at", type=int)
args = parser.parse_args()

torch.manual_seed(args.seed)
loader = DataLoader(Points(8 * args.steps), batch_size=8, shuffle=True)
model = net()
if args.init:
    with watch("restore"):
        model.load_state_dict(torch.load(args.init))
optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=args.lr)

for step, (x, y) in enumerate(watch.waits(loader)):
    with watch("effective"):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step == args.stall_at:
            with watch("stall"):
                time.sleep(3)
print(f"lr {args.lr}, seed {args.seed}: loss {loss.item():.3f}")
if args.out:
    with watch("checkpoint_blocking"):
        torch.save(model.state_dict(), args.out)
    watch.saved()
