"""Lightning: saves every 20 steps, is killed at step 50, and goes on from step 40 by `ckpt_path`.

A step is what lies between the callbacks around a batch. Steps 40 to 49 are trained twice.
"""

import os
import signal

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

newest = "saved/last.ckpt" if os.path.exists("saved/last.ckpt") else None


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = net(0.05)

    def training_step(self, batch, _):
        return cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Watched(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        watch.begin("effective", trainer.global_step)

    def on_train_batch_end(self, trainer, *_):
        watch.end()
        if trainer.global_step == 50 and not newest:
            os.kill(os.getpid(), signal.SIGKILL)


class Saving(ModelCheckpoint):
    def _save_checkpoint(self, *args):
        with watch("checkpoint_blocking"):
            super()._save_checkpoint(*args)
        watch.saved()


trainer = lightning.Trainer(
    max_steps=80, accelerator="cpu", logger=False, enable_progress_bar=False,
    callbacks=[Watched(), Saving("saved", save_last=True, every_n_train_steps=20, save_top_k=1)],
)  # fmt: skip
trainer.fit(Classifier(), DataLoader(Points(800), batch_size=8), ckpt_path=newest)
