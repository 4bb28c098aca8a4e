"""Threads of numerical libraries: none while the zygote imports them, and the usual number in its children.

OpenBLAS starts its threads when it is imported, and Arrow one that gives memory back; a process with threads cannot be
forked. OpenMP starts its own only when they are needed.
"""

import ctypes
import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

_LIMITS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")
_SETTERS = ("openblas_set_num_threads", "openblas_set_num_threads64_", "scipy_openblas_set_num_threads",
            "scipy_openblas_set_num_threads64_")  # fmt: skip


def forbid_threads(environ: MutableMapping[str, str]) -> None:
    """Keeps libraries that are imported from now on from starting threads; to be called before any is."""
    environ["OPENBLAS_NUM_THREADS"] = "1"
    environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")  # memory is given back all the same


def allow_threads(environ: Mapping[str, str]) -> None:
    """Gives OpenBLAS, where it is loaded, the number of threads that this environment asks for."""
    wanted = _wanted(environ)
    for library in _loaded("openblas") if wanted > 1 else ():
        for name in _SETTERS:
            if setter := getattr(library, name, None):
                setter(wanted)


def _wanted(environ: Mapping[str, str]) -> int:
    given = (environ.get(name, "") for name in (*_LIMITS, "OMP_NUM_THREADS"))
    return next((int(text) for text in given if text.isdecimal() and text != "0"), len(os.sched_getaffinity(0)))


def _loaded(name: str) -> list[ctypes.CDLL]:
    if "numpy" not in sys.modules:
        return []
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if name in line and len(line.split(maxsplit=5)) == 6}
    return [ctypes.CDLL(path) for path in sorted(paths) if name in Path(path).name]


def count_threads() -> int:
    """How many threads this process has."""
    return len(os.listdir("/proc/self/task"))
