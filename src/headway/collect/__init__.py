"""From the spool to the job's folder: one collector a node brings all its processes' journals over, in batches.

In: the journals that the processes of one node write to a folder on that node. Out: one growing file a collector in
the job's folder, which may be on a network file system, and beside it what only a neighbour can tell: whether each
process lives, and when it was seen to end. This room does not know what the records mean, nor how they are counted.

Typical use::

    paths = JobPaths(settings.spool_folder, job).make()
    recorder = Recorder(Writer(paths.journal(process_name(process))))
    if problem := ensure_collector(settings.spool_folder, settings.home_folder, job):
        recorder.mark("no collector", problem=problem)
"""

from headway.collect.collector import BATCH_S, LINGER_S, Collector
from headway.collect.farewell import deliver_once
from headway.collect.start import ensure_collector

__all__ = ["BATCH_S", "LINGER_S", "Collector", "deliver_once", "ensure_collector"]
