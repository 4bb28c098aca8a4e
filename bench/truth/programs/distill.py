"""A second model in evaluation mode inside each step: a teacher, or a frozen backbone. It is part of the step.

With `fresh` each epoch has a new loader of six batches.
"""

import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax
from torch.utils.data import DataLoader

variant, fresh = sys.argv[1], "fresh" in sys.argv
loader = DataLoader(Points(320), batch_size=8, shuffle=True)
teacher = net(0.03)


class FrozenBackbone(nn.Module):
    """A backbone that stays in evaluation mode, below a head that trains."""

    def __init__(self):
        super().__init__()
        self.backbone = net(0.03).requires_grad_(False)
        self.head = nn.Linear(2, 2)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


student = FrozenBackbone() if variant == "backbone" else net(0.02)
optimizer = torch.optim.Adam([p for p in student.parameters() if p.requires_grad], lr=1e-3)
for _ in range(14 if fresh else 2):
    student.train()
    teacher.eval()
    if fresh:
        loader = DataLoader(Points(48), batch_size=8, shuffle=True)
    for x, y in watch.waits(loader):
        with watch("effective"):
            loss = cross_entropy(student(x), y)
            if variant != "backbone":
                if variant == "teacher-each-step":
                    teacher.eval()
                with torch.no_grad():
                    wanted = softmax(teacher(x), 1)
                loss = loss + kl_div(log_softmax(student(x), 1), wanted, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
