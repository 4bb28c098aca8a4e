"""Models that are published in a moment, and real checkpoints of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from headway.publish.anchor import Anchor, open_anchor
from headway.storage import open_storage


class Clicks(nn.Module):
    """Has what differs between training and evaluation, small tensors, and two outputs, one of which is a number."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(11)
        self.dropout = nn.Dropout(0.5)
        self.first = nn.Linear(11, hidden)
        self.last = nn.Linear(hidden, 2)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> dict[str, Any]:
        features = self.dropout(self.norm(torch.cat([dense, self.table(ids)], 1)))
        return {"click": self.last(self.first(features).relu()).sigmoid(), "rows": dense.shape[0]}


def clicks(seed: int = 0, hidden: int = 16) -> Clicks:
    """A model that was trained a little: the statistics of its batches are not those it began with."""
    torch.manual_seed(seed)
    model = Clicks(hidden)
    for _ in range(3):
        model(**clicks_batch(16))
    return model


def clicks_batch(rows: int) -> dict[str, torch.Tensor]:
    return {"dense": torch.rand(rows, 3), "ids": torch.randint(0, 50, (rows,))}


class Line(nn.Module):
    """The least there is, done `times` times."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


@dataclass
class Point:
    """A type of the user's own, as golden batches may have it."""

    at: torch.Tensor


torch.export.register_dataclass(Point, serialized_type_name="small_models.Point")


class PointLine(Line):
    def forward(self, x: Point) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x.at)


def anchored(folder: Path, state: nn.Module | Mapping[str, Any]) -> Anchor:
    """The anchor of a checkpoint that `dcp.save` has made."""
    state = state.state_dict() if isinstance(state, nn.Module) else state
    dcp.save({"model": dict(state), "epoch": 3}, checkpoint_id=folder / "step-00000010", no_dist=True)
    return open_anchor(open_storage(folder), "step-00000010", "some-id", "safetensors", "model", lambda why: None)
