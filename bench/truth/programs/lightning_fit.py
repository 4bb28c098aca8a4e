"""Lightning: one or more fits in one process, each with a new model and trainer, with or without validation.
With `keep` each fit saves its model after each epoch, and the best one is loaded after it.

A step is what lies between the callbacks around a batch; Lightning's own work between them is some milliseconds.
"""

import sys

import lightning
import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

fits, validates, keeps = int(sys.argv[1]), "validate" in sys.argv, "keep" in sys.argv


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = net(0.05)

    def training_step(self, batch, _):
        return cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("val_loss", cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Watched(lightning.Callback):
    def on_train_batch_start(self, *_):
        watch.begin("effective")

    def on_train_batch_end(self, *_):
        watch.end()

    def on_validation_start(self, *_):
        watch.begin("evaluation")

    def on_validation_end(self, *_):
        watch.end()


for _ in range(fits):
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[Watched()], logger=False, enable_checkpointing=keeps,
        enable_progress_bar=False,
    )  # fmt: skip
    loader = DataLoader(Points(160), batch_size=8, shuffle=True)
    validation = DataLoader(Points(80), batch_size=8) if validates else None
    trainer.fit(Classifier(), loader, validation)
    if keeps:
        watch.saved()
        Classifier.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
