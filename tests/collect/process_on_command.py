"""A process with a journal: says its name, then does what each line of its input says, and answers `done`."""

import os
import sys
from pathlib import Path

from headway.collect import ensure_collector
from headway.events.clock import Clock
from headway.events.journal import Writer
from headway.events.process import describe, process_name
from headway.events.recorder import Recorder
from headway.events.vocabulary import ProcessEnd
from headway.paths import JobPaths

spool, job = Path(sys.argv[1]), sys.argv[2]
clock = Clock()
process = describe(os.environ, job, clock)
path = JobPaths(spool, job).journal("-".join([process_name(process), *sys.argv[3:]]))
recorder = Recorder(Writer(path), clock)
recorder.record(process)
print(path.stem, flush=True)

for line in sys.stdin:
    command, _, value = line.strip().partition(" ")
    if command == "mark":
        recorder.mark(value)
    elif command == "marks":
        for number in range(int(value)):
            recorder.mark(f"mark {number}", text="x" * 100)
    elif command == "steps":
        for _ in recorder.steps(range(int(value))):
            pass
    elif command == "enter-step":
        recorder.steps_meter.open()
        recorder.steps_meter.begin()
    elif command == "next-step":
        recorder.steps_meter.end(recorder.steps_meter._next + 1)
        recorder.steps_meter.begin()
    elif command == "cell":  # as in a run of like steps, which is no record yet
        recorder.writer.cell.write(0, int(value), 1, clock.now_ns(), 0, int(value), 0)
    elif command == "lose-lock":
        path.read_bytes()
    elif command == "ensure":
        assert ensure_collector(spool, Path(value), job) is None
    elif command == "exec":
        os.execv(sys.executable, [sys.executable, __file__, str(spool), job, value])
    elif command == "finish":
        recorder.record(ProcessEnd(t_ns=clock.now_ns()))
        recorder.close()
    print("done", flush=True)
