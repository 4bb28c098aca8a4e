"""A small job with a large state: it trains for as long as it is let, and saves at an interval. `waste.py` kills it.

`ballast.py FOLDER INTERVAL MEGABYTES PAUSE`
"""

import os
import sys
import time
from itertools import repeat
from pathlib import Path

import torch
from torch import nn

import headway


def main() -> None:
    """Trains until somebody ends it."""
    folder, interval, megabytes, pause_s = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    run, life = headway.current(), folder / f"trains-{os.getpid()}"
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    for number in range(16):
        model.register_buffer(f"ballast-{number}", torch.ones(megabytes * 250_000 // 16))
    optimizer = torch.optim.AdamW(model.parameters())
    with headway.Checkpointer(folder / "saved", model=model, optimizer=optimizer, interval=interval) as checkpointer:
        checkpointer.restore()
        checkpointer.prepare()
        for step, batch in run.steps(repeat(torch.randn(32, 64)), start=checkpointer.step):
            optimizer.zero_grad()
            model[:3](batch).square().mean().backward()
            optimizer.step()
            time.sleep(pause_s)  # a device would work meanwhile, and leave the cores alone
            checkpointer.after(step)
            if not life.exists():
                life.touch()


if __name__ == "__main__":
    main()
