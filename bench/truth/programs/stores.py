"""Ways to keep a checkpoint: a file, a copy of it, a bucket, pickle, NumPy."""

import io
import os
import pickle
import shutil
from pathlib import Path

import numpy
import torch
import torch.distributed.checkpoint as dcp

Path("bucket").mkdir(exist_ok=True)


def save(store, state):
    """Keep a state."""
    if store in ("file", "copy"):
        torch.save(state, "ckpt.tmp")
        os.replace("ckpt.tmp", "ckpt.pt")
    elif store in ("memory", "cloud"):
        buffer = io.BytesIO()
        torch.save(state, buffer)
        Path("bucket/ckpt").write_bytes(buffer.getvalue())
    elif store == "dcp":
        dcp.save(state, checkpoint_id=f"dcp/{state['step']}")
    elif store == "pickle":
        Path("ckpt.pkl").write_bytes(pickle.dumps(state))
    else:
        numpy.savez("ckpt.npz", step=state["step"], **{k: v.numpy() for k, v in state["model"].items()})
    if store == "copy":
        shutil.copy("ckpt.pt", "bucket/ckpt")
        os.remove("ckpt.pt")


def load(store, fresh):
    """Return the newest checkpoint, or None. dcp loads into a fresh state."""
    if store == "numpy" and Path("ckpt.npz").exists():
        arrays = dict(numpy.load("ckpt.npz"))
        return {"step": int(arrays.pop("step")), "model": {k: torch.from_numpy(v) for k, v in arrays.items()}}
    if store == "dcp" and Path("dcp").exists():
        newest = max(Path("dcp").iterdir(), key=lambda folder: int(folder.name))
        dcp.load(fresh, checkpoint_id=newest)
        return fresh
    if store == "pickle" and Path("ckpt.pkl").exists():
        return pickle.loads(Path("ckpt.pkl").read_bytes())
    if store == "file" and Path("ckpt.pt").exists():
        return torch.load("ckpt.pt")
    if Path("bucket/ckpt").exists():
        if store == "memory":
            return torch.load(io.BytesIO(Path("bucket/ckpt").read_bytes()))
        shutil.copy("bucket/ckpt", "downloaded.pt")
        return torch.load("downloaded.pt")
    return None
