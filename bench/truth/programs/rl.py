"""Reinforcement learning: rollouts in an environment, then updates from them, without a DataLoader or with one.

Rollouts collect new experience that the next updates train on: they are effective, whatever mode the policy is in.
So is the first one, as the first step of a loop is.
"""

import argparse
import random
import time
from contextlib import nullcontext

import torch
from stopwatch import watch
from tiny import net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--rollouts", type=int, default=8)
parser.add_argument("--rollout-s", type=float, default=0.1)
parser.add_argument("--updates", type=int, default=4)
parser.add_argument("--eval", action="store_true")
parser.add_argument("--no-grad", action="store_true")
parser.add_argument("--loader", action="store_true")
args = parser.parse_args()

policy = net(0.015)
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)


def rollout():
    """Play 20 moves with the current policy."""
    if args.eval:
        policy.eval()
    states, actions = [], []
    with torch.no_grad() if args.no_grad else nullcontext():
        for _ in range(20):
            state = torch.randn(8)
            actions.append(policy(state.unsqueeze(0)).argmax())
            states.append(state)
            time.sleep(args.rollout_s / 20)
    policy.train()
    return torch.stack(states), torch.stack(actions)


for _ in range(args.rollouts):
    with watch("rollout"):
        states, actions = rollout()
    if args.loader:
        batches = DataLoader(TensorDataset(states, actions), batch_size=20 // args.updates, shuffle=True)
    else:
        batches = [(states[at], actions[at]) for at in (random.sample(range(20), 5) for _ in range(args.updates))]
    for x, y in batches:
        with watch("effective"):
            loss = cross_entropy(policy(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
