"""One rank of a job on several nodes: joins the others over gloo, and trains until one of them is lost."""

import os
import sys
import time
from pathlib import Path

from headway.collect import ensure_collector
from headway.events.clock import Clock
from headway.events.journal import Writer
from headway.events.process import describe, process_name
from headway.events.recorder import Recorder
from headway.events.vocabulary import ProcessEnd
from headway.paths import JobPaths

spool, home, node = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
clock = Clock()
process = describe(os.environ, "job", clock, node=node)
recorder = Recorder(Writer(JobPaths(spool, "job").make().journal(process_name(process))), clock)
recorder.record(process)
assert ensure_collector(spool, home, "job") is None

with recorder.span("imports"):
    import torch
    import torch.distributed as dist
with recorder.span("process_group_init"):
    dist.init_process_group("gloo")

error = None
try:
    for step, _ in recorder.steps(range(1_000_000)):
        together = torch.ones(1000)
        dist.all_reduce(together)
        assert together[0] == process.world_size
        if step % 50 == 0:
            recorder.mark("fifty steps", step=step)
        time.sleep(0.005)
except RuntimeError as lost:
    error = f"{type(lost).__name__}: {lost}"[:200]
recorder.steps_meter.close()
recorder.record(ProcessEnd(t_ns=clock.now_ns(), error=error))
recorder.close()
os._exit(1)  # gloo would wait for its peers
