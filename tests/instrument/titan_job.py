"""A small job that calls torchtitan's own logger where its trainer does: `titan_job.py FOLDER LOADED LAST [HOW]`.

It goes on after step LOADED and trains up to LAST, with a checkpoint every 5 steps. HOW is `kill` or `raise`: then it
ends inside step LAST.
"""

import os
import signal
import sys
import time

from torchtitan.observability import structured_logger as sl

STEP_S, FETCH_S, SAVE_S, LOAD_S = 0.02, 0.01, 0.05, 0.04


@sl.log_trace_span("checkpoint_save")
def save(step: int) -> None:
    if step % 5 == 0:
        sl.add_step_tag("checkpoint_save")
        time.sleep(SAVE_S)


@sl.log_trace_span("checkpoint_load")
def load(loaded: int) -> None:
    time.sleep(LOAD_S if loaded else 0)


def train_step(step: int, how: str) -> None:
    with sl.log_trace_span("fetching_batch"):
        time.sleep(FETCH_S)
    sl.log_trace_scalar({"local_valid_tokens": 4096, "loss": float("nan")})
    with sl.log_trace_span("fwd_bwd"):
        time.sleep(STEP_S)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise RuntimeError("boom")
    save(step)


def main(folder: str, loaded: int, last: int, how: str = "") -> None:
    sl.init_structured_logger(source="training", output_dir=folder)
    sl.log_trace_instant("structured_logger_started")
    with sl.log_trace_span("Trainer.Config.build"):
        with sl.log_trace_span("torch_distributed_init"):
            time.sleep(0.02)
        with sl.log_trace_span("model_parallelism_init"):
            time.sleep(0.06)
    sl.log_trace_instant("training_start")
    load(loaded)
    for step in range(loaded + 1, last + 1):
        sl.set_step(step, relative_step=step - loaded)
        with sl.log_trace_span("step"):
            train_step(step, how if step == last else "")
    with sl.log_trace_span("torch_distributed_teardown"):
        time.sleep(0.01)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
