"""An ordinary Hugging Face script: a small language model, evaluated each epoch. Sleeps stand in for work."""

# ruff: noqa: E402 (the stopwatch starts before the imports)
from stopwatch import note, timed

note("script begins")

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

FOLDER, RESUME, DIE_AT = Path(sys.argv[1]), sys.argv[2] == "resume", int(sys.argv[3])


class Texts(Dataset):
    def __init__(self, name: str, size: int) -> None:
        with timed("dataset"):
            self.name, self.size = name, size
            time.sleep(0.3)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.01)
        ids = torch.arange(index, index + 8) % 64
        return {"input_ids": ids, "labels": ids}

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        with timed(f"{self.name} batch"):
            return [self[index] for index in indices]


class Watch(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs) -> None:
        note("step")


class SlowTrainer(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.state.global_step == DIE_AT:
            note("killed")
            os.kill(os.getpid(), 9)
        time.sleep(0.06)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def evaluate(self, *args, **kwargs):
        with timed("evaluation"):
            return super().evaluate(*args, **kwargs)

    def save_model(self, *args, **kwargs) -> None:
        time.sleep(0.1)
        super().save_model(*args, **kwargs)

    def _save_checkpoint(self, *args, **kwargs) -> None:
        with timed("checkpoint"):
            super()._save_checkpoint(*args, **kwargs)


trainer = SlowTrainer(
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=16)),
    TrainingArguments(
        FOLDER,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        eval_strategy="epoch",
        save_steps=6,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=Texts("train", 48),
    eval_dataset=Texts("val", 8),
    callbacks=[Watch()],
)
time.sleep(0.2)
trainer.train(resume_from_checkpoint=RESUME)
note("trained")
time.sleep(0.4)
note("script ends")
