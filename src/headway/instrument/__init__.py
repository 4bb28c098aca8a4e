"""Any PyTorch job, unmodified: what it does is seen from outside, and written to its journal.

In comes an interpreter that was started with the folder `site` on its path (`headway exec`), or with a line in its
site-packages (`headway inject`); out go records. Nothing happens until torch is imported. Then each module of torch
gets its hooks as it is imported, and none is imported for their sake. This room knows nothing of buckets: what the
records mean is for accounting to say.

Typical use::

    headway exec torchrun --nproc-per-node 8 train.py
    headway report

- `start` waits for torch, by `imports`; `session` is one process's part in its job; `witness` outlives it, and writes
  down how it ended
- `hooks` says where what is seen: `loop` makes steps of it, `checkpoints`, `collectives`, `compilation`, `devices` and
  `distributed` are about what their names say, `frameworks` about one framework each
- `patches` makes sure that none of it can hurt; `checkup` tells which hooks take; `origin` whose a file is
- `faststart` and `early_loaders` spare a start what they can
- `importers` tell what other tools have measured
"""
