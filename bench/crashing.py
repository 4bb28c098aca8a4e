"""A small DDP job that fails when it is told to, and says when each thing happened.

Plain torch: two gloo ranks, a checkpoint every few steps, and a resume from the last one. It knows nothing of headway.
`recover.py` runs it under one launcher or another, reads what it wrote, and tells it how to fail. Every line it writes
is `pid attempt moment step monotonic_ns`, in one file for each rank of the folder that it is given.
"""

import os
import sys
import time

BEGIN_NS = time.monotonic_ns()
FOLDER, PAUSE_S = sys.argv[1], float(sys.argv[2])
SAVE_EVERY = 5
RANK = int(os.environ["RANK"])
WISH, CHECKPOINT = os.path.join(FOLDER, f"wish-{RANK}"), os.path.join(FOLDER, "checkpoint.pt")
PEN = os.open(os.path.join(FOLDER, f"stamps-{RANK}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def stamp(moment: str, step: int = -1, at_ns: int = 0) -> None:
    """One line, in the file before this returns."""
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(PEN, f"{os.getpid()} {count} {moment} {step} {at_ns or time.monotonic_ns()}\n".encode())


def main() -> None:
    """Trains until somebody ends it."""
    stamp("begun", at_ns=BEGIN_NS)
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    stamp("imported")
    dist.init_process_group("gloo")
    stamp("joined")
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
    optimizer = torch.optim.Adam(model.parameters())
    step = 0
    if os.path.exists(CHECKPOINT):
        saved = torch.load(CHECKPOINT)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    stamp("built")
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        stamp("trained", step)
        step += 1
        if step % SAVE_EVERY == 0 and RANK == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, f"{CHECKPOINT}.new")
            os.replace(f"{CHECKPOINT}.new", CHECKPOINT)
        time.sleep(PAUSE_S)
        if os.path.exists(WISH):
            grant(step)


def grant(step: int) -> None:
    """Does what is asked of this rank, once."""
    with open(WISH) as file:
        wish = file.read()
    os.unlink(WISH)
    stamp(wish, step)
    END[wish]()


def raise_error(error: Exception) -> None:
    """Fail by an exception."""
    raise error


def recurse(depth: int = 0) -> int:
    """Fail by a traceback of a thousand lines."""
    return recurse(depth + 1) + 1


def read_nothing() -> None:
    """Fail by a segmentation fault."""
    import ctypes

    ctypes.string_at(0)


def signal_self(name: str) -> None:
    """End by a signal, which no handler catches."""
    import signal

    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(60)


def block() -> None:
    """Waits in C++ for what never comes. Its handler for SIGTERM is Python's: it would run when the wait is over."""
    import signal
    from datetime import timedelta

    import torch.distributed as dist

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    dist.distributed_c10d._get_default_store().wait(["what never comes"], timedelta(hours=1))


END = {
    "exception": lambda: raise_error(ValueError("the loss is not what it was")),
    "cut-off": lambda: raise_error(RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer")),
    "recursion": recurse,
    "exit": lambda: sys.exit(1),
    "leave": lambda: os._exit(1),
    "abort": os.abort,
    "segfault": read_nothing,
    "bus": lambda: signal_self("SIGBUS"),
    "terminate": lambda: signal_self("SIGTERM"),
    "block": block,
}
"""What this job can be told to do."""


if __name__ == "__main__":
    main()
