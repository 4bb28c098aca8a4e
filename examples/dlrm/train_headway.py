"""The DLRM of `train_plain.py` with headway.

    headway run --nproc-per-node 2 --fast-start examples/dlrm/train_headway.py

What can be done at the same time when it starts is; it saves when that pays, into memory first; it compiles before the
first batch has come; and it leaves before its model is published.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import headway
from dlrm import (
    DLRM,
    HAS_TORCHREC,
    Losses,
    arguments,
    loader_of,
    loss_of,
    optimizer_of,
    planner,
    shard,
    sharders,
    train_step,
)
from headway.startup import local_shard_metadata, sharding_plan


def start(options: Any) -> Any:
    """All that training needs; what can be done at the same time is."""
    setup = headway.Startup()

    @setup.stage(lane="comm")
    def process_group_init() -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))

    @setup.stage(lane="io", activity="pre_train")
    def saved() -> Any:
        return headway.read_ahead(options.folder / "checkpoints")

    @setup.stage(activity="preproc_creation")
    def loader(saved: Any) -> DataLoader[Any]:
        return saved.loader(loader_of(options))

    @setup.stage(activity="train_module_creation")
    def whole() -> DLRM:
        return DLRM("meta" if HAS_TORCHREC else "cpu")

    @setup.stage(lane="comm", computes=True, activity="train_module_creation")
    def model(whole: DLRM, process_group_init: None) -> nn.Module:
        if not HAS_TORCHREC:
            return shard(whole)
        with local_shard_metadata():
            return shard(whole, sharding_plan(planner(), whole, sharders()))

    @setup.stage(activity="pre_train")
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return optimizer_of(model)

    @setup.stage(activity="pre_train")
    def checkpointer(model: nn.Module, optimizer: Any, loader: Any, saved: Any) -> headway.Checkpointer:
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        ckpt = headway.Checkpointer(options.folder / "checkpoints", ahead=saved, **parts)
        ckpt.restore()
        return ckpt

    return setup.run()


def main() -> None:
    options = arguments(__doc__).parse_args()
    run = headway.current()
    parts = start(options)
    model, optimizer, ckpt = parts.model, parts.optimizer, parts.checkpointer
    losses = Losses(options.folder)

    if ckpt.step < options.steps:
        batches = headway.fast_batch(ckpt.loader, lambda batch: loss_of(model, batch), model=model)
        for step, batch in run.steps(batches, start=ckpt.step):
            losses.add(step, train_step(model, optimizer, batch, options.step_s))
            ckpt.after(step)
    recipe = headway.Publish("aotinductor", model=f"{Path(__file__).parent}/recipe.py:served")
    run.finish(publish=recipe)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
