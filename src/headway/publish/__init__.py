"""From a checkpoint to a model that is served, by a process that needs none of the accelerators which trained it.

An anchor comes in: a checkpoint that is pinned until it is published. A version comes out: a folder whose files have
passed every check, that is there whole or not at all. In between a recipe, a function of the user's or a ready one,
makes files in steps that are not done twice. This room trains nothing, and serves nothing.

    request      what is asked for, and how far it has got
    hand_over    from a trainer, or a command line, to whoever publishes
    anchor       the checkpoint, and where it comes from
    shards       its weights as a stream; pieces and stream are how, and weights writes them as safetensors
    named        functions by name
    out          what a recipe fills, step by step
    ready        recipes that are there: weights, a program, a package
    checks       what must hold before anything is served
    card         what is told of a version to people
    versions     what was published, and which of it is served; layout, history and claims are how
    publisher    all of this, in order
    supervisor   tries again what may pass, and ends what hangs
    runners      where that runs: a process of its own, Slurm

Typical use, in the trainer and in `serve.py`::

    run.finish(publish=headway.Publish("safetensors,aotinductor", model="serve.py:served"))

    def served() -> headway.Served:
        return headway.Served(Model(), batches=[...])
"""
