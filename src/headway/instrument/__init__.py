"""Any PyTorch job, unmodified: what it does is seen from outside, and written to its journal.

Input: an interpreter that was started with the folder `site` on its path (`headway exec`), or with a line in its
site-packages (`headway inject`). Output: records. Nothing happens until torch is imported. Then each module of torch
gets its hooks as it is imported, and none is imported for their sake. This package does not know buckets: what the
records mean is for accounting to decide.

Typical use::

    headway exec torchrun --nproc-per-node 8 train.py
    headway report

- `start` waits for torch, by `imports`. `session` is one process's part in its job. `witness` outlives the process, and
  records how it ended.
- `hooks` lists every place that is watched. `loop` turns fetches and optimizer steps into training steps, with `passes`
  through loaders, `evaluation`, and the `past` states that training may go on from. `modes` watches `eval()` and
  `train()`, `by_hand` programs without an optimizer.
- `checkpoints`, `collectives`, `compilation`, `devices` and `distributed` watch what their names say; `frameworks` has
  one file per framework.
- `patches` makes every change reversible and harmless. `checkup` reports which hooks are active. `origin` finds out
  which package a file belongs to.
- `faststart` and `early_loaders` shorten the start.
- `importers` read what other tools have measured.
"""
