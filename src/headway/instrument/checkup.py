"""Which hooks would take, in this Python: every module that has some is imported, and each hook's state is told."""

import importlib
import importlib.util
import json
import os
import sys
import sysconfig
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

from headway.instrument import start

_SHARES_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def main() -> None:
    """Prints the findings as JSON. To be run by the Python in question, under the shim."""
    print(json.dumps(findings()))


def findings() -> dict[str, Any]:
    """The versions, each hook with its state (`on`, or why it is not), and what this Python alone can say of itself."""
    began = monotonic()
    try:
        torch: ModuleType | None = importlib.import_module("torch")
        error = ""
    except Exception as problem:  # missing, or broken: to be told, with all that can be told without it
        torch, error = None, f"{type(problem).__name__}: {problem}"
    seen = {"error": error, "import_s": monotonic() - began} | _seen_of_torch(torch) | _seen_of_python()
    hooks = _hooks() if torch is not None else {}
    return {"python": sys.version.split()[0], "torch": seen["torch"], "hooks": hooks, "seen": seen}


def _hooks() -> dict[str, str]:
    session, hooks = start.session, dict[str, str]()
    if session is None:
        return hooks
    for name in session.watch.waited_for():
        try:
            importlib.import_module(name)
        except ImportError:
            hooks[name] = "not installed"
        except Exception as error:  # a package that is broken here: to be told, not to end the check-up
            hooks[name] = f"cannot be imported: {type(error).__name__}: {error}"
    return hooks | {patch.what: patch.state for patch in session.patches}


def _seen_of_torch(torch: ModuleType | None) -> dict[str, Any]:
    if torch is None or torch.__file__ is None or torch.__spec__ is None:
        return {"torch": "", "folder": "", "shares_store": False, "has_bytecode": False, "devices": 0}
    folder = Path(torch.__file__).parent
    rendezvous = folder / "distributed" / "elastic" / "rendezvous" / "dynamic_rendezvous.py"
    try:
        devices = int(torch.cuda.device_count())  # asks the driver, and makes no context
    except Exception:  # a torch without CUDA, or a driver that is out of order: none can be used
        devices = 0
    return {
        "torch": str(torch.__version__),
        "folder": str(folder),
        "shares_store": rendezvous.exists() and _SHARES_STORE in rendezvous.read_text(),
        "has_bytecode": os.path.exists(torch.__spec__.cached or ""),
        "devices": devices,
    }


def _seen_of_python() -> dict[str, Any]:
    return {
        "bin": os.path.dirname(sys.executable),
        "writes_bytecode": not sys.dont_write_bytecode,
        "header": os.path.join(sysconfig.get_path("include"), "Python.h"),
        "has_triton": importlib.util.find_spec("triton") is not None,
    }
