"""TorchRec's models and optimizers, saved under the names that they have themselves."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ranks as warm_ranks
import warm
from headway.checkpoint.state import TrainingState
from headway.errors import InputError

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
import headway

adam, init, steps = sys.argv[1] == "adam", sys.argv[2] == "init", int(sys.argv[3])
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", f"file://{os.getcwd()}/{os.environ['MEETING']}", rank=rank, world_size=2)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        names = ["a", "b", "c"]
        tables = [EmbeddingBagConfig(num_embeddings=50, embedding_dim=8, name=n, feature_names=[n]) for n in names]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.top = torch.nn.Linear(24, 1)

    def forward(self, sparse):
        return self.top(self.tables(sparse).values())

torch.manual_seed(0)
model = DistributedModelParallel(Model(), device=torch.device("cpu"))
kind = torch.optim.Adam if adam else torch.optim.Adagrad
top = {name: each for name, each in model.named_parameters() if "top." in name}
optimizer = CombinedOptimizer([model.fused_optimizer, KeyedOptimizerWrapper(top, lambda p: kind(p, lr=0.1))])
if init:
    optimizer.optimizers[1][1].init_state()
with headway.Checkpointer("saved", model=model, optimizer=optimizer, interval=None, keep=10) as ckpt:
    ckpt.restore()
    for step in range(ckpt.step, steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        lengths = torch.randint(3, (12,), generator=generator)
        ids = torch.randint(50, (int(lengths.sum()),), generator=generator)
        loss = model(KeyedJaggedTensor(["a", "b", "c"], ids, lengths=lengths)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        ckpt.after(step)
        ckpt.save()
        if dist.get_rank() == 0:
            print(json.dumps([step, loss.item().hex()]), flush=True)
"""


def losses(folder: Path, *words: str, **environ: str) -> tuple[dict[int, str], str]:
    """The losses of the steps that two ranks do, and why they failed."""
    (folder / "script.py").write_text(SCRIPT)
    meeting = secrets.token_hex(6)
    errors = folder / f"errors-{meeting}"
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors.open("a"), "text": True}
    ranks = [
        warm.Popen(
            [sys.executable, "script.py", *words], imports=warm_ranks.IMPORTS, cwd=folder, **streams,
            env=os.environ | environ | {
                "HEADWAY_HOME": str(folder / "home"), "HEADWAY_JOB": "j", "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank),
                "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MEETING": meeting,
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=500)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return dict(map(json.loads, said[0].splitlines())), errors.read_text() if any(r.returncode for r in ranks) else ""


@pytest.mark.needs_package("torchrec")
@pytest.mark.parametrize(
    ("optimizer", "init"), [("adagrad", "no"), pytest.param("adam", "init", marks=pytest.mark.thorough)]
)
def test_tables_of_two_ranks_and_their_optimizers_are_restored_to_the_bit(
    home: Path, optimizer: str, init: str
) -> None:
    whole, problem = losses(home, optimizer, init, "6")
    assert not problem, problem[-3000:]
    rest, problem = losses(home, optimizer, init, "6", HEADWAY_SKIP_CHECKPOINTS="3")
    assert not problem, problem[-3000:]
    assert rest == {step: whole[step] for step in (3, 4, 5)}


@pytest.mark.thorough
@pytest.mark.needs_package("torchrec")
def test_an_optimizer_whose_state_is_yet_to_be_made_is_told_of_and_not_silently_left_without_it(home: Path) -> None:
    losses(home, "adam", "no", "3")
    _, problem = losses(home, "adam", "no", "6")
    assert "the optimizer has no state of top.weight" in problem
    assert "call its init_state() before restore()" in problem


def test_several_optimizers_of_a_model_that_names_itself_are_to_be_joined() -> None:
    model = type("Sharded", (nn.Linear,), {"__module__": "torchrec.distributed.model_parallel"})(2, 2)
    with pytest.raises(InputError, match="CombinedOptimizer"):
        TrainingState(model, [object(), object()], {})
