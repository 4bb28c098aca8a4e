"""Hugging Face Trainer: evaluates every 20 steps, or saves, is killed at step 50 and goes on from step 40.

Its callbacks tell the stopwatch. A step is what lies between the callbacks around it. The wait for the next batch is
between two steps, and short.
"""

import os
import signal
import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

resumes = "resume" in sys.argv
newest = get_last_checkpoint("out") if os.path.isdir("out") else None


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = net(0.05)

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Watched(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        watch.begin("effective", state.global_step)

    def on_step_end(self, args, state, control, **_):
        watch.end()
        if resumes and state.global_step == 50 and not newest:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step % 20 == 0:
            watch.begin("checkpoint_blocking" if resumes else "evaluation")

    def on_evaluate(self, *_, **__):
        watch.end()

    def on_save(self, *_, **__):
        watch.end()
        watch.saved()


def collate(samples):
    return {"x": torch.stack([x for x, _ in samples]), "labels": torch.tensor([y for _, y in samples])}


settings = TrainingArguments(
    "out", max_steps=60, per_device_train_batch_size=8, eval_strategy="no" if resumes else "steps", eval_steps=20,
    save_strategy="steps" if resumes else "no", save_steps=20, use_cpu=True, report_to=[],
    disable_tqdm=True, remove_unused_columns=False,
)  # fmt: skip
Trainer(
    Classifier(), settings, collate, train_dataset=Points(480), eval_dataset=Points(40), callbacks=[Watched()]
).train(resume_from_checkpoint=newest)
