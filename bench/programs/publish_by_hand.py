"""Publishes a model as one does by hand: torch and safetensors alone, and not a word of headway.

python publish_by_hand.py package CHECKPOINT TO        weights, program and package of the DLRM, compared with eager
python publish_by_hand.py convert CHECKPOINT TO        weights alone, by way of a file of `torch.save`
python publish_by_hand.py load    CHECKPOINT TO        weights alone, from memory
"""

import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.export import AdditionalInputs

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from train_dlrm import DENSE, DLRM, ROWS, TABLES

ATOL, RTOL = 1e-5, 1e-4
Batch = tuple[Tensor, Tensor]


def golden_batches() -> list[Batch]:
    """What the model is compared on; the largest comes first."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, DENSE, generator=generator), torch.randint(ROWS, (size, TABLES), generator=generator))
        for size in (64, 7, 2)
    ]


def package(checkpoint: Path, to: Path) -> None:
    """The weights, what `torch.export` makes of the model, and what AOTInductor compiles of that."""
    model = DLRM()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    model.load_state_dict(state["model"])
    publish(model.eval(), to)


def publish(model: nn.Module, to: Path) -> None:
    """The same, once the weights are there. `latest` names it if all is well."""
    version = to / "version"
    for name in ("weights", "program", "package"):
        (version / name).mkdir(parents=True)
    save_file(model.state_dict(), version / "weights" / "model.safetensors")
    batches, more = golden_batches(), AdditionalInputs()
    for batch in batches[1:]:
        more.add(batch)
    with torch.no_grad():
        expected = [model(*batch) for batch in batches]
        program = torch.export.export(model, batches[0], dynamic_shapes=more)
    torch.export.save(program, version / "program" / "model.pt2")
    compare(torch.export.load(version / "program" / "model.pt2").module(), batches, expected)
    path, options = str(version / "package" / "model.pt2"), {"always_keep_tensor_constants": True}
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=options)
    compare(torch._inductor.aoti_load_package(path), batches, expected)
    torch.save({"batches": batches, "outputs": expected}, version / "golden.pt")
    (to / "latest").write_text("version")


def compare(run: Any, batches: list[Batch], expected: list[Tensor]) -> None:
    """An error unless it gives what eager gave."""
    with torch.no_grad():
        for batch, each in zip(batches, expected, strict=True):
            torch.testing.assert_close(run(*batch), each, atol=ATOL, rtol=RTOL)


def convert(checkpoint: Path, to: Path) -> None:
    """The weights, by the two calls that the libraries have for it."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to) as folder:
        whole = Path(folder, "whole.pt")
        dcp_to_torch_save(checkpoint, whole)
        save_file(flat(torch.load(whole, weights_only=False)["model"]), to / "model.safetensors")


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Tensors by their names with dots."""
    items = ((f"{prefix}{name}", value) for name, value in state.items())
    return dict(
        itertools.chain.from_iterable(
            flat(value, f"{name}.").items() if isinstance(value, dict) else [(name, value)] for name, value in items
        )
    )


def load(checkpoint: Path, to: Path) -> None:
    """The weights, read into memory that is as large, and written from there, safely."""
    told = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in told.items()
        if isinstance(each, TensorStorageMetadata) and name.startswith("model.")
    }
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    to.mkdir(parents=True, exist_ok=True)
    save_file({name.removeprefix("model."): each for name, each in state.items()}, to / "model.safetensors")
    with open(to / "model.safetensors", "rb") as file:
        os.fsync(file.fileno())


if __name__ == "__main__":
    {"package": package, "convert": convert, "load": load}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
