"""A DLRM as a good engineer trains it today: torchrun, TorchRec, torch.compile, dcp.async_save, an export at the end.

    torchrun --standalone --nproc-per-node 2 --max-restarts 100 examples/dlrm/train_plain.py

`train_headway.py` is the same with headway. Both end with the same losses, whatever happens in between.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from serve import package
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dlrm import DLRM, HAS_TORCHREC, Losses, arguments, loader_of, optimizer_of, planner, shard, sharders, train_step


def build() -> nn.Module:
    """The sharded model; the first rank plans, the others wait."""
    whole = DLRM("meta" if HAS_TORCHREC else "cpu")
    plan = planner().collective_plan(whole, sharders(), dist.group.WORLD) if HAS_TORCHREC else None
    return shard(whole, plan)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is saved, by names that do not depend on the number of ranks: TorchRec's own, or those that torch finds."""
    if HAS_TORCHREC:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def stager_of(state: dict[str, Any], reused: bool) -> BlockingAsyncStager:
    """Torch's own that takes TorchRec's tensors, as its default does not. If `reused`, it copies into the same memory
    at every save, as its `cache_staged_state_dict` would, which only an accelerator lets it."""
    stager = BlockingAsyncStager()
    if reused:
        stager.state_dict_cache = stager.stage(state)
        stager.cache_staged_state_dict = True
    return stager


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest checkpoint that is whole. Returns the step to go on with."""
    whole = sorted(int(each.parent.name) for each in folder.glob("*/.metadata"))
    if not whole:
        return 0
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder / f"{whole[-1]:08}")
    if HAS_TORCHREC:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return whole[-1]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--reuse-stager", action="store_true", help="copies into the same memory at every save")
    options = parser.parse_args()
    checkpoints = options.folder / "checkpoints"

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    saving = dist.new_group(backend="gloo")
    model = build()
    optimizer = optimizer_of(model)
    first = restore(checkpoints, model, optimizer)
    stager = stager_of(state_of(model, optimizer), options.reuse_stager)
    losses, saved = Losses(options.folder), None

    for step, batch in enumerate(loader_of(options, first), first):
        losses.add(step, train_step(model, optimizer, batch, options.step_s))
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            if saved is not None:
                saved.result()
            state, folder = state_of(model, optimizer), checkpoints / f"{step + 1:08}"
            saved = dcp.async_save(state, checkpoint_id=folder, process_group=saving, async_stager=stager)
    if saved is not None:
        saved.result()

    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        package(checkpoints / f"{options.steps:08}", options.folder / "published")


if __name__ == "__main__":
    main()
