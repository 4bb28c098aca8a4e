"""For a server of warm processes to import before torch: installs headway's hooks, and records nothing yet.

The hooks go in as they do in every measured Python. What is forked from the server is measured once it says so, like a
worker that is forked from a zygote.
"""

import os
import sys
from pathlib import Path

import headway

for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
    del os.environ[name]
if "hooked_fast" in sys.modules:
    os.environ["HEADWAY_FAST_START"] = "all"
sys.modules.pop("sitecustomize", None)
sys.path.insert(0, str(Path(headway.__file__).parent / "instrument" / "site"))
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401

from headway.instrument import start  # noqa: E402

start.lie_in_wait()
