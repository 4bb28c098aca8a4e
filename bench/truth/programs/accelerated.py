"""Hugging Face Accelerate: prepare, backward, accumulate, gather for evaluation, save_state."""

import torch
from accelerate import Accelerator
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader, validation = DataLoader(Points(240), batch_size=8, shuffle=True), DataLoader(Points(80), batch_size=8)
model, optimizer, loader, validation = accelerator.prepare(model, optimizer, loader, validation)
for _ in range(3):
    model.train()
    for x, y in watch.waits(loader):
        with watch("effective"), accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    with watch("evaluation"):
        model.eval()
        for x, y in validation:
            with torch.no_grad():
                accelerator.gather_for_metrics((model(x).argmax(-1), y))
    with watch("checkpoint_blocking"):
        accelerator.save_state("state")
    watch.saved()
