"""Starting a trainer: stages that overlap, compiling before the data has come, and no needless communication.

What comes in: stages, as functions that need one another; a batch as it looked the last time; a plan, groups and
parameters to agree on. What goes out: their results, and a mark in the journal of how long each took and what it waited
for. This room knows nothing of the supervisor, of checkpoints, or of how a report looks.

Typical use::

    setup = headway.Startup()

    @setup.stage(lane="comm")
    def process_group_init(): ...

    @setup.stage
    def model(): ...

    @setup.stage(lane="io")
    def batches(): ...

    parts = setup.run()
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headway.startup.fast import FastBatches, fast_batch
    from headway.startup.groups import device_mesh, lazy_groups, process_group
    from headway.startup.plans import sharding_plan
    from headway.startup.runner import Parts, StageError, Startup
    from headway.startup.shards import dtensor, local_shard_metadata, sharded_tensor
    from headway.startup.sync import broadcast_parameters, data_parallel, difference, same_parameters, synchronised

_HOMES = {
    "fast": ("FastBatches", "fast_batch"),
    "groups": ("device_mesh", "lazy_groups", "process_group"),
    "plans": ("sharding_plan",),
    "runner": ("Parts", "StageError", "Startup"),
    "shards": ("dtensor", "local_shard_metadata", "sharded_tensor"),
    "sync": ("broadcast_parameters", "data_parallel", "difference", "same_parameters", "synchronised"),
}

__all__ = [
    "FastBatches", "Parts", "StageError", "Startup", "broadcast_parameters", "data_parallel", "device_mesh",
    "difference", "dtensor", "fast_batch", "lazy_groups", "local_shard_metadata", "process_group", "same_parameters",
    "sharded_tensor", "sharding_plan", "synchronised",
]  # fmt: skip


def __getattr__(name: str) -> object:
    from importlib import import_module

    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'headway.startup' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"headway.startup.{home}"), name)
    return found
