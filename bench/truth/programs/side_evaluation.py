"""Every 25 steps: evaluate in another process, an averaged model, sample from the model, or save in a thread."""

import copy
import subprocess
import sys
import threading

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

what = sys.argv[1]
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
validation = DataLoader(Points(80), batch_size=8)


@torch.no_grad()
def sample():
    model.eval()
    x = torch.randn(1, 8)
    for _ in range(10):
        x = x + model(x).mean()
    model.train()
    return x


def evaluate_ema():
    ema.eval()
    with torch.inference_mode():
        return sum(cross_entropy(ema(x), y).item() for x, y in validation)


def save(state):
    torch.save(state, "last.pt")
    watch.saved()


for step, (x, y) in enumerate(watch.waits(DataLoader(Points(800), batch_size=8)), 1):
    with watch("effective"):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        ema.update_parameters(model)
    if step % 25 == 0 and what == "thread-save":
        with watch("checkpoint_blocking"):
            writer = threading.Thread(target=save, args=(copy.deepcopy(model.state_dict()),))
            writer.start()
    elif step % 25 == 0:
        with watch("evaluation"):
            if what == "process":
                subprocess.run([sys.executable, "-c", "import time; time.sleep(0.4)"], check=True)
            else:
                print(sample() if what == "sample" else evaluate_ema())
