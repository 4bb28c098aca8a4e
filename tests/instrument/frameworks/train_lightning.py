"""An ordinary Lightning script: a fit with validation and checkpoints. Sleeps stand in for work."""

# ruff: noqa: E402, N812 (the stopwatch starts before the imports)
from stopwatch import note, timed

note("script begins")

import os
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

FOLDER, RESUME, DIE_AT = Path(sys.argv[1]), sys.argv[2] == "resume", int(sys.argv[3])


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


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def setup(self, stage: str) -> None:
        time.sleep(0.2)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Numbers("train", 48), batch_size=4)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Numbers("val", 8), batch_size=4)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if self.global_step == DIE_AT:
            note("killed")
            os.kill(os.getpid(), 9)
        time.sleep(0.06)
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        time.sleep(0.1)
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        time.sleep(0.1)


class Watch(L.Callback):
    def on_train_batch_end(self, *args: object) -> None:
        note("step")

    def on_sanity_check_start(self, *args: object) -> None:
        note("evaluation begins")

    def on_sanity_check_end(self, *args: object) -> None:
        note("evaluation ends")

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            note("evaluation begins")

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            note("evaluation ends")


class WatchedTrainer(L.Trainer):
    def save_checkpoint(self, *args: object, **kwargs: object) -> None:
        with timed("checkpoint"):
            super().save_checkpoint(*args, **kwargs)


L.seed_everything(0)
trainer = WatchedTrainer(
    accelerator="cpu",
    max_epochs=2,
    default_root_dir=FOLDER,
    callbacks=[
        ModelCheckpoint(dirpath=FOLDER / "checkpoints", filename="{step}", every_n_train_steps=6, save_top_k=-1),
        Watch(),
    ],
    enable_progress_bar=False,
    logger=False,
    num_sanity_val_steps=2,
)
saved = sorted((FOLDER / "checkpoints").glob("*.ckpt"), key=os.path.getmtime)
trainer.fit(Model(), ckpt_path=saved[-1] if RESUME else None, weights_only=False)
note("trained")
time.sleep(0.4)
note("script ends")
