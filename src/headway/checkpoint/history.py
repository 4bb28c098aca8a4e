"""How often the job that writes to a root has failed: kept beside its checkpoints, so that every restart knows."""

import json
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from headway.checkpoint.layout import HISTORY

if TYPE_CHECKING:
    from headway.checkpoint.lease import Owner
    from headway.storage import Storage


class History:
    """Failures of all runs so far, and how long they ran. Only the first rank keeps it."""

    def __init__(self, storage: "Storage", former: "Owner | None", first: bool) -> None:
        self._storage, self._former, self._first = storage, former, first
        self._began = time.time()
        self._writing: threading.Thread | None = None
        self._seen = {"process": 0, "node": 0, "over_s": 0.0}
        if first:
            with suppress(
                OSError, ValueError, TypeError, KeyError
            ):  # none yet, or unreadable: it is an estimate's prior
                told = json.loads(storage.read(HISTORY))
                self._seen = {
                    "process": int(told["process"]),
                    "node": int(told["node"]),
                    "over_s": float(told["over_s"]),
                }

    def restored(self, tier: str | None) -> None:
        """The run before this one has failed, if it said no goodbye: alone, if its memory was still there."""
        if self._former is not None:
            self._seen["process" if tier == "memory" else "node"] += 1
            self._seen["over_s"] += max(0.0, (self._former.seen_ns - self._former.began_ns) / 1e9)
            self._former = None
            self._writing = threading.Thread(target=self._write, daemon=True)  # training waits for no object store
            self._writing.start()

    def failures(self) -> dict[str, float]:
        """All so far, and over what time: up to now."""
        return self._seen | {"over_s": self._seen["over_s"] + time.time() - self._began}

    def close(self) -> None:
        self._seen = self.failures()
        self.wait()
        self._write()

    def wait(self) -> None:
        """Until what was restored is written down."""
        if self._writing is not None:
            self._writing.join()

    def _write(self) -> None:
        if self._first:
            with suppress(OSError):  # the next estimate is a little worse
                self._storage.write(HISTORY, json.dumps(self._seen).encode())
