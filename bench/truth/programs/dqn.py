"""Q-learning with a replay buffer: a move in the environment, then an update, and a target network.

The first moves only fill the buffer; they are few. Moves are effective: the updates train on them.
"""

import argparse
import copy
import random
import time
from collections import deque

import torch
from stopwatch import watch
from tiny import net
from torch.nn.functional import smooth_l1_loss

parser = argparse.ArgumentParser()
parser.add_argument("--move-s", type=float, default=0.01)
parser.add_argument("--moves", type=int, default=100)
parser.add_argument("--train-every", type=int, default=1)
args = parser.parse_args()

online = net(0.015)
target = copy.deepcopy(online).requires_grad_(False).eval()
optimizer = torch.optim.RMSprop(online.parameters(), lr=1e-3)
buffer = deque(maxlen=1000)

state = torch.randn(8)
for move in range(args.moves):
    with watch("rollout"):
        with torch.no_grad():
            action = random.randrange(2) if random.random() < 0.5 else int(online(state.unsqueeze(0)).argmax())
        time.sleep(args.move_s)
        following = torch.randn(8)
        buffer.append((state, action, random.random(), following))
        state = following
    if len(buffer) >= 4 and move % args.train_every == 0:
        with watch("effective"):
            states, actions, rewards, nexts = zip(*random.sample(buffer, 4), strict=True)
            with torch.no_grad():
                best = target(torch.stack(nexts)).max(1).values
            values = online(torch.stack(states))[range(4), actions]
            optimizer.zero_grad()
            smooth_l1_loss(values, torch.tensor(rewards) + 0.99 * best).backward()
            optimizer.step()
    if move % 50 == 49:
        target.load_state_dict(online.state_dict())
