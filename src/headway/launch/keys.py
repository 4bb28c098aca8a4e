"""What torch works out anew in every process before it looks into its compile cache: hashes of all its own sources, and
of Triton's. They are the same as long as nobody installs another torch, so a zygote has them worked out once, by a
child, while it imports the rest. This is the only file that touches those functions of torch's.
"""

import os
import pickle
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

PATIENCE_S = 10.0
"""Longest wait for them, once all else is imported; after that every worker works them out by itself."""

_MODULE, _NAMES = "torch._inductor.codecache", ("torch_key", "triton_key")


class Keys:
    """On their way from the child. Whatever goes wrong, torch works out itself what is missing."""

    def __init__(self) -> None:
        self._child, self._pipe = 0, -1

    def begin(self) -> None:
        """Once torch's compiler is imported; before, and a second time, this does nothing. No thread may run here."""
        functions = _functions()
        if self._child or not functions:
            return
        self._pipe, theirs = os.pipe()
        self._child = os.fork()
        if not self._child:
            _work_out(functions, theirs)
        os.close(theirs)

    def take(self) -> None:
        """Has torch take them for known, here and in all that is forked from here."""
        if not self._child or not select.select([self._pipe], [], [], PATIENCE_S)[0]:
            return
        with open(self._pipe, "rb", closefd=False) as pipe:
            found = pipe.read()
        functions = _functions()
        for name, key in (pickle.loads(found) if found else {}).items():
            functions[name].set(key)

    def __enter__(self) -> "Keys":
        return self

    def __exit__(self, *problem: object) -> None:
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            os.close(self._pipe)


def _functions() -> dict[str, Any]:
    """Those of this torch that can be told their result; empty if its compiler is not imported."""
    module = sys.modules.get(_MODULE)
    found = {name: getattr(module, name, None) for name in _NAMES}
    return {name: function for name, function in found.items() if callable(getattr(function, "set", None))}


def _work_out(functions: dict[str, Callable[[], Any]], pipe: int) -> None:
    """In the child; does not return."""
    try:
        os.write(pipe, pickle.dumps({name: function() for name, function in functions.items()}))
    finally:
        os._exit(0)
