"""What is served of the trained DLRM: a compiled package, checked on golden batches. No headway here, either."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.export import Dim

from dlrm import DLRM, HAS_TORCHREC, TABLES, clicks


def golden() -> list[tuple[Tensor, Any]]:
    """Batches of several sizes."""
    return [clicks(seed, size)[:2] for seed, size in enumerate((2, 7, 64))]


def shapes() -> Any:
    """Any number of samples, with any number of ids."""
    rows, ids = Dim("rows", min=2), Dim("ids", min=2)
    lengths = {0: TABLES * rows}
    sparse = [{0: ids}, None, lengths, None, None, None] if HAS_TORCHREC else ({0: ids}, lengths)
    return {"dense": {0: rows}, "sparse": sparse}


def package(checkpoint: Path, folder: Path) -> None:
    """Publishes by hand: the whole model, its program, its package, and whether that gives what the model gives."""
    model = DLRM().eval()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    model.load_state_dict(state["model"])
    folder.mkdir(parents=True, exist_ok=True)
    program = torch.export.export(model, golden()[1], dynamic_shapes=shapes())
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    compiled = torch._inductor.aoti_load_package(path)
    with torch.no_grad():
        for batch, again in zip(golden(), golden(), strict=True):  # TorchRec remembers what it computed of a batch
            torch.testing.assert_close(compiled(*batch), model(*again), rtol=1e-4, atol=1e-5)
