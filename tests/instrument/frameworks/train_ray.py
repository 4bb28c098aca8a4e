"""An ordinary script with Ray Train: two workers, evaluation and checkpoint each epoch. Sleeps stand in for work."""

import sys
import tempfile
import time
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from stopwatch import note, timed
from torch.utils.data import DataLoader, Dataset

FOLDER, DIE_AT = Path(sys.argv[1]), int(sys.argv[2])


class Numbers(Dataset):
    def __init__(self, name: str, size: int) -> None:
        with timed("dataset"):
            self.name, self.size = name, size
            time.sleep(0.3)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.full((8,), float(index))

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        with timed(f"{self.name} batch"):
            return [self[index] for index in indices]


def evaluate(model: torch.nn.Module, batches: DataLoader) -> float:
    model.eval()
    losses = []
    with torch.no_grad():
        for batch in batches:
            time.sleep(0.1)
            losses.append(model(batch).square().mean().item())
    model.train()
    return sum(losses) / len(losses)


def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
    time.sleep(0.1)
    storage = ray.train.get_context().get_storage()
    return storage.persist_current_checkpoint(checkpoint, name)


def train() -> None:
    context = ray.train.get_context()
    ranks = context.get_world_size()
    note(f"rank {context.get_world_rank()} of {ranks}")
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batches = DataLoader(Numbers("train", 48 * ranks), batch_size=4)
    batches = ray.train.torch.prepare_data_loader(batches)
    val_batches = ray.train.torch.prepare_data_loader(DataLoader(Numbers("val", 8 * ranks), batch_size=4))
    time.sleep(0.2)
    step = 0
    if ray.train.get_checkpoint():
        with ray.train.get_checkpoint().as_directory() as folder:
            model.load_state_dict(torch.load(Path(folder) / "model.pt"))
        step = len(batches)
    while step < 2 * len(batches):
        for batch in batches:
            if step == DIE_AT and ranks == context.get_world_rank() + 1 and not (FOLDER / "died").exists():
                (FOLDER / "died").touch()
                note("killed")
                raise RuntimeError("the script wants it so")
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            time.sleep(0.06)
            optimizer.step()
            note("step")
            step += 1
        with timed("evaluation"):
            metrics = {"val_loss": evaluate(model, val_batches)}
        with tempfile.TemporaryDirectory() as folder, timed("checkpoint"):
            checkpoint = None
            if context.get_world_rank() == 0:
                torch.save(model.state_dict(), Path(folder) / "model.pt")
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_fn=upload)
    note("trained")
    time.sleep(0.4)
    note("script ends")


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(FOLDER), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    ray.shutdown()
