"""A model and a dataset of which nearly all time is sleep, so that two busy cores do not change what is true."""

import time

import torch
from torch import nn
from torch.utils.data import Dataset


class Busy(nn.Module):
    """Passes its input on after a while."""

    def __init__(self, work_s):
        super().__init__()
        self.work_s = work_s

    def forward(self, x):
        time.sleep(self.work_s)
        return x


def net(work_s=0.03, norm=False):
    """A classifier of 8 numbers whose forward takes `work_s`."""
    middle = nn.BatchNorm1d(16) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(8, 16), middle, nn.ReLU(), Busy(work_s), nn.Linear(16, 2))


class Points(Dataset):
    """Random points of two classes; each takes `delay_s` to read."""

    def __init__(self, count, delay_s=0.0):
        self.points = torch.randn(count, 8)
        self.delay_s = delay_s

    def __len__(self):
        return len(self.points)

    def __getitem__(self, at):
        if self.delay_s:
            time.sleep(self.delay_s)
        return self.points[at], at % 2


class Lion(torch.optim.Optimizer):
    """An optimizer that keeps no count of its steps."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            moment = state.setdefault("moment", torch.zeros_like(param)).lerp_(param.grad, 0.1)
            param.sub_(moment.sign(), alpha=self.param_groups[0]["lr"])
