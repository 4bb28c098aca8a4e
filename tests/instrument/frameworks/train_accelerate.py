"""An ordinary script with Accelerate: a loop of its own, an evaluation each epoch. Sleeps stand in for work."""

# ruff: noqa: E402 (the stopwatch starts before the imports)
from stopwatch import note, timed

note("script begins")

import sys
import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

FOLDER = sys.argv[1]


class Numbers(Dataset):
    def __init__(self, name: str, size: int) -> None:
        with timed("dataset"):
            self.name, self.size = name, size
            time.sleep(0.3)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.full((8,), float(index))

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        with timed(f"{self.name} batch"):
            return [self[index] for index in indices]


def evaluate(model: torch.nn.Module, batches: DataLoader) -> float:
    model.eval()
    losses = []
    with torch.no_grad():
        for batch in batches:
            time.sleep(0.1)
            losses.append(model(batch).square().mean().item())
    model.train()
    return sum(losses) / len(losses)


accelerator = Accelerator(cpu=True)
ranks = accelerator.num_processes
note(f"rank {accelerator.process_index} of {ranks}")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
batches = DataLoader(Numbers("train", 48 * ranks), batch_size=4, shuffle=True)
val_batches = DataLoader(Numbers("val", 8 * ranks), batch_size=4)
model, optimizer, batches, val_batches = accelerator.prepare(model, optimizer, batches, val_batches)
accelerator.register_save_state_pre_hook(lambda *args: time.sleep(0.1))
time.sleep(0.2)

step = 0
for _epoch in range(2):
    for batch in batches:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        time.sleep(0.06)
        optimizer.step()
        optimizer.zero_grad()
        note("step")
        step += 1
        if step % 6 == 0:
            with timed("checkpoint"):
                accelerator.save_state(f"{FOLDER}/step-{step}")
    with timed("evaluation"):
        evaluate(model, val_batches)
note("trained")
time.sleep(0.4)
accelerator.end_training()
note("script ends")
