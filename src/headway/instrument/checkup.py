"""Which hooks would take, in this Python: every module that has some is imported, and each hook's state is told."""

import importlib
import importlib.util
import json
import sys
from typing import Any

from headway.instrument import start


def main() -> None:
    """Prints the findings as JSON. To be run by the Python in question, under the shim."""
    print(json.dumps(findings()))


def findings() -> dict[str, Any]:
    """The versions, and each hook with its state: `on`, or why it is not."""
    importlib.import_module("torch")
    session = start.session
    if session is None:
        return {"python": sys.version.split()[0], "torch": "", "hooks": {}}
    hooks: dict[str, str] = {}
    for name in session.watch.waited_for():
        try:
            importlib.import_module(name)
        except ImportError:
            hooks[name] = "not installed"
        except Exception as error:  # a package that is broken here: to be told, not to end the check-up
            hooks[name] = f"cannot be imported: {type(error).__name__}: {error}"
    hooks |= {patch.what: patch.state for patch in session.patches}
    torch = sys.modules["torch"]
    return {"python": sys.version.split()[0], "torch": str(torch.__version__), "hooks": hooks}
