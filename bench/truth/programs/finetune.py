"""Fine-tunes what another script of the same job has saved. Its steps are new work, on other data."""

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

loader = DataLoader(Points(400), batch_size=8, shuffle=True)
model = net()
with watch("restore"):
    model.load_state_dict(torch.load("base.pt"))
optimizer = torch.optim.AdamW(model[-1].parameters(), lr=1e-3)
for x, y in watch.waits(loader):
    with watch("effective"):
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
with watch("checkpoint_blocking"):
    torch.save(model.state_dict(), "finetuned.pt")
watch.saved()
