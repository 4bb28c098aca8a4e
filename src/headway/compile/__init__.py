"""What one job has compiled, kept for every job that would compile the same.

The files of torch's caches come in, under a key of all that they depend on; signed segments in a folder or an object
store come out, and in the next job the files again. This room knows nothing of checkpoints or restarts, and a failure
of it is never a failure of the job: it compiles then, as it would without.

    session    one process and its bundle
    key        which bundle that is
    caches     torch's cache folder: what is new in it, and how it gets there
    hashes     what torch asks of its own sources before it looks there, asked once
    store      where bundles are kept, as segments; bundle is a segment's file, trust who may be believed
    doctor     what was compiled again, why, and what to tell torch
    autotune   how few configs of a kernel do; tuning listens to the tuners, and keeps them to those

Typical use::

    headway.compile_cache("s3://bucket/compile", model=model)
    train_step = torch.compile(train_step)      # what another job has compiled is there at its first call
"""
