"""A TorchRec DLRM that starts through `headway.Startup`, and says when it began and when it trained.

Two kinds of tables, bags sharded by table and rows sharded by row, and a dense tower. `startup.py` runs it under one
launcher or another and reads what it wrote: lines of `pid attempt moment step monotonic_ns`, in one file for each rank
of the folder that it is given. The seconds that it is given stand for far-off machines, all in all.
"""

import os
import sys
import time

BEGIN_NS = time.monotonic_ns()
WAIT_S, FOLDER = float(sys.argv[1]), sys.argv[-2]
PEN = os.open(os.path.join(FOLDER, f"stamps-{os.environ['RANK']}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def stamp(moment: str, step: int = -1, at_ns: int = 0) -> None:
    """One line, in the file before this returns."""
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(PEN, f"{os.getpid()} {count} {moment} {step} {at_ns or time.monotonic_ns()}\n".encode())


def main() -> None:
    """Trains until somebody ends it."""
    stamp("begun", at_ns=BEGIN_NS)
    import torch
    import torch.distributed as dist

    import headway
    from bench.dlrm import TABLES, batch, built, remedied

    stamp("imported")
    setup = headway.Startup(seed=0)

    @setup.stage(lane="comm")
    def process_group_init() -> None:
        dist.init_process_group("gloo")

    @setup.stage(lane="io")
    def preproc_creation() -> None:
        time.sleep(0.2 * WAIT_S)

    @setup.stage(lane="io")
    def checkpoint_read() -> None:
        time.sleep(0.4 * WAIT_S)

    @setup.stage(lane="io")
    def init_plugins() -> None:
        time.sleep(0.2 * WAIT_S)

    @setup.stage(lane="io", needs=["preproc_creation"])
    def get_first_batch_data() -> object:
        time.sleep(0.2 * WAIT_S)
        return batch(TABLES, 0)

    @setup.stage
    def model() -> torch.nn.Module:
        return built(TABLES)

    @setup.stage(needs=["process_group_init"], activity="train_module_creation")
    def sharded(model: torch.nn.Module) -> torch.nn.Module:
        return remedied(model, os.path.join(FOLDER, "plans"))

    @setup.stage(needs=["checkpoint_read", "init_plugins"])
    def pre_train(sharded: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(sharded.parameters(), lr=0.1)

    parts = setup.run()
    stamp("built")
    step, data = 0, parts.get_first_batch_data
    while True:
        parts.pre_train.zero_grad()
        parts.sharded(*data).square().mean().backward()
        parts.pre_train.step()
        stamp("trained", step)
        time.sleep(0.02)
        step, data = step + 1, batch(TABLES, step + 1)


if __name__ == "__main__":
    main()
