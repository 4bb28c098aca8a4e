"""One process and its bundle: fetched while the job starts, in place before it first compiles, saved after it last did.

Whatever goes wrong with the cache is told, and the job compiles as if there were none.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.compile import batch, caches, key
from headway.compile.autotune import Tables, configs_in
from headway.compile.bundle import Member, Members
from headway.compile.store import Loaded, Store
from headway.compile.trust import Keys
from headway.compile.tuning import MODULES, Tuning

WAIT_S = 60.0
"""So long, at most, the first compilation waits for the bundle, and ranks for each other."""
QUIET_S = 3.0
"""After a compilation, so long without another: then it is saved."""
_POLL_S = 0.05
_FILE, _SOURCES, _SECONDS, _UNITS, _CONFIGS = "file/", "sources.json", "seconds.json", "units.json", "configs.json"

Tell = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which of a job's ranks this process is."""

    rank: int = 0
    world_size: int = 1
    is_known: bool = True
    """False: it may be a launcher, whose ranks are yet to agree."""


class Session:
    """What one process does about its bundle."""

    def __init__(
        self, url: str, keys: Path, mirror: Path, parts: Mapping[str, str], place: Place, tell: Tell
    ) -> None:  # fmt: skip
        """`url` is the store, `keys` the folder of those that are trusted, `mirror` one of this node's own; `tell` is
        called with what happened, for the journal."""
        self.key, self.about, self.url = key.digest(parts), dict(parts), url
        self._place, self._tell = place, tell
        self._store = Store(url, keys=Keys.at(keys), mirror=mirror)
        self._job = f"headway-{self.key}"
        self._began, self._tag = time.time() - time.process_time(), os.urandom(8).hex()
        self._tables = Tables()
        self._tuning = Tuning(self._tables.hear, lambda text: self._say(outcome="tuning", why=text))
        self._loaded: Loaded | None = None
        self._outcome: dict[str, Any] = {}
        self._seconds, self._since = 0.0, 0.0
        self._is_ready, self._cancelled, self._leaving = False, threading.Event(), threading.Event()
        self._compiles = threading.Event()
        """It does: this process trains."""
        self._compiled = threading.Event()
        self._last, self._batch = 0.0, b""
        self._saved: set[tuple[str, bytes]] = set()
        self._saver: threading.Thread | None = None
        self._loader = threading.Thread(target=self._load, name="headway-compile-cache", daemon=True)
        self._loader.start()

    def _say(self, **told: Any) -> None:
        self._tell(key=self.key, url=self.url, about=json.dumps(self.about), **told)

    # --- in ---

    def _load(self) -> None:
        began = time.perf_counter()
        try:
            self._loaded = loaded = self._store.load(self.key)
            took = time.perf_counter() - began
            why = "; ".join(loaded.problems) or "nothing is stored under this key"
            word = self._agreed(loaded.digest)
            if word != loaded.digest:
                why = "the ranks do not have the same bundle, or could not agree in time"
            if word and word == loaded.digest and not self._cancelled.is_set():
                why = ""
                files = {name[len(_FILE) :]: each.data for name, each in loaded.members.items() if name[:5] == _FILE}
                caches.put(files, caches.folder(), self._job, self._place.rank)
                if _CONFIGS in loaded.members:
                    self._tuning.apply(configs_in(loaded.members[_CONFIGS].data))
                with suppress(OSError):
                    self._store.touch(self.key)
            self._outcome = {
                "outcome": "miss" if why else "hit", "why": why, "members": len(loaded.members),
                "bytes": sum(len(each.data) for each in loaded.members.values()), "segments": loaded.segments,
                "seconds": round(took, 4),
            }  # fmt: skip
        except Exception as error:  # the job compiles as if there were no cache
            self._outcome = {"outcome": "miss", "why": f"{type(error).__name__}: {error}"}

    def _agreed(self, word: str) -> str:
        """What all ranks have, or nothing. The first rank asks all, and decides: one that compiles while others wait in
        a collective would have them time out."""
        if self._place.world_size == 1:
            return word if self._place.is_known or self._compiles.wait() else ""
        store = self._common_store()
        if store is None:
            return ""
        store.set(f"headway/compile/{self._place.rank}", word or "-")
        if self._place.rank == 0:
            names = [f"headway/compile/{rank}" for rank in range(self._place.world_size)]
            all_there = self._until(lambda: store.check(names), WAIT_S)
            words = {store.get(name).decode() for name in names} if all_there else set()
            store.set("headway/compile/verdict", word if words == {word} else "-")
        if not self._until(lambda: store.check(["headway/compile/verdict"]), 2 * WAIT_S):
            return ""
        return str(store.get("headway/compile/verdict").decode()).replace("-", "")

    def _common_store(self) -> Any:
        """The store that the job's ranks have met through, once they have; None if they compile before they do."""

        def found() -> bool:
            dist = sys.modules.get("torch.distributed")
            return bool(dist and getattr(dist, "is_initialized", bool)())

        if not self._until(found, float("inf")):
            return None
        return sys.modules["torch.distributed.distributed_c10d"]._get_default_store()

    def _until(self, is_true: Callable[[], bool], timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() > end or self._cancelled.wait(_POLL_S):
                return False
        return True

    # --- around compilations ---

    def fetched(self, fetched: Any) -> None:
        """A batch has come, before the first step: the last one of these is what the first step compiles for."""
        try:
            self._batch = batch.as_bytes(fetched)
        except (TypeError, ValueError, RuntimeError):  # of a kind that nobody could make up: then none will be
            self._batch = b""

    def imported(self, name: str) -> None:
        """One of the modules whose tuning is listened to has been imported: a process that tunes trains, too."""
        self._compiles.set()
        self._tuning.imported(name)

    def before_compile(self) -> None:
        """Called at the beginning of each compilation: at the first, the bundle is in place when this returns."""
        self._since = time.perf_counter()
        for name in MODULES:
            if name in sys.modules:
                self._tuning.imported(name)
        if not self._is_ready:
            self._is_ready = True
            try:
                self._make_ready()
            except Exception as error:  # as above
                self._say(outcome="miss", why=f"{type(error).__name__}: {error}")

    def _make_ready(self) -> None:
        began = time.perf_counter()
        self._compiles.set()
        if self._place.world_size > 1 and not self._have_met():
            self._cancelled.set()  # no collective can be in this compilation, and nobody to agree with
        self._loader.join(WAIT_S)
        self._cancelled.set()
        caches.remember_shapes(self._job)
        if self._outcome.get("outcome") == "hit" and self._loaded is not None:
            self._apply(self._loaded.members)
        self._outcome["waited"] = round(time.perf_counter() - began, 4)
        self._say(**self._outcome)

    def _have_met(self) -> bool:
        dist = sys.modules.get("torch.distributed")
        return bool(dist and dist.is_available() and dist.is_initialized())

    def _apply(self, members: Members) -> None:
        if any(name.startswith(_FILE) for name in members):
            caches.skip_headers()
        if _UNITS in members:
            caches.believe_vector_units(json.loads(members[_UNITS].data)["units"])
        if _SOURCES in members:
            caches.make_dynamic(json.loads(members[_SOURCES].data)["sources"])

    def after_compile(self) -> None:
        """Called at the end of each compilation: what is new is saved once no other follows."""
        self._last = time.monotonic()
        self._seconds += time.perf_counter() - self._since
        self._compiled.set()
        if self._saver is None and self._place.rank == 0:
            self._saver = threading.Thread(target=self._save_when_quiet, name="headway-compile-save", daemon=True)
            self._saver.start()

    # --- out ---

    def _save_when_quiet(self) -> None:
        while not self._leaving.is_set():
            self._compiled.wait()
            self._compiled.clear()
            while time.monotonic() - self._last < QUIET_S and not self._leaving.is_set():
                self._leaving.wait(QUIET_S / 4)
            if not self._leaving.is_set():
                self.save()

    def save(self) -> None:
        """Stores what this process has compiled and the bundle does not have yet."""
        try:
            with caches.still():
                files = caches.made(caches.folder(), self._began, self._job)
            new = self._new(files)
            if new:
                size = self._store.save(self.key, new, self.about, self._tag)
                self._say(outcome="saved", members=len(new), bytes=size)
        except Exception as error:  # the next run compiles again, and this one goes on
            self._say(outcome="not saved", why=f"{type(error).__name__}: {error}")

    def _new(self, files: Mapping[str, bytes]) -> Members:
        """Empty if there is nothing but shapes that were seen before."""
        now, known = time.time_ns(), self._loaded.members if self._loaded else {}
        named = {_FILE + name: content for name, content in files.items()}
        named |= self._tables.members({name: member.data for name, member in known.items()})
        new = {name: data for name, data in named.items() if name not in known or known[name].data != data}
        shapes = _FILE + caches.shapes_file(self._job)
        state = {(name, data) for name, data in new.items() if name != shapes}
        if state <= self._saved:
            return {}
        self._saved |= state
        if _SECONDS not in known:
            new[_SECONDS] = json.dumps({"cold_s": round(self._seconds, 3)}).encode()
        if self._batch and self._batch != known.get(batch.NAME, Member(b"", 0)).data:
            new[batch.NAME] = self._batch
        if _UNITS not in known and (units := caches.vector_units()):
            new[_UNITS] = json.dumps({"units": units}).encode()
        return {name: Member(data=data, saved_ns=now) for name, data in new.items()}

    def seconds_saved(self) -> float | None:
        """How much longer this process would have compiled without its bundle, as far as that is known."""
        members = self._loaded.members if self._loaded and self._outcome.get("outcome") == "hit" else {}
        if _SECONDS not in members:
            return None
        return max(0.0, float(json.loads(members[_SECONDS].data)["cold_s"]) - self._seconds)

    def close(self) -> None:
        """The process ends: what is new is saved."""
        self._leaving.set()
        self._cancelled.set()
        self._compiles.set()
        self._compiled.set()
        if self._saver is not None:
            self._saver.join(WAIT_S)
        if self._place.rank == 0 and (self._saver is not None or self._tables):
            self.save()
            if (saved := self.seconds_saved()) is not None:
                self._say(outcome="used", seconds_saved=round(saved, 2))
