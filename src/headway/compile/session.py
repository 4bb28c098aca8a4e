"""One process and its bundle: fetched while the job starts, in place before it first compiles, saved after it last did.

Whatever goes wrong with the cache is told, and the job compiles as if there were none. One thread of its own loads,
agrees with the other ranks, and saves; the process waits for it twice: before its first compilation, and at its end.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway import batches
from headway.compile import caches, key
from headway.compile.autotune import CONFIGS, Tables, configs_in
from headway.compile.bundle import SOURCES, Member, Members
from headway.compile.hashes import SourceHashes
from headway.compile.store import Loaded, Store
from headway.compile.trust import Keys, others_can_write
from headway.compile.tuning import MODULES, Tuning
from headway.errors import PlatformError
from headway.meeting import met

WAIT_S = 20.0
"""So long, at most, the first compilation waits for the bundle, and ranks for each other."""
EXIT_S = 10.0
"""So long, at most, the end of the process waits for the last save."""
QUIET_S = 3.0
"""After a compilation, so long without another: then it is saved."""
_ROUNDS = 2
_POLL_S = 0.05
_FILE, _SECONDS, _UNITS = "file/", "seconds.json", "units.json"

Tell = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which of a job's ranks this process is, as far as its environment tells."""

    rank: int = 0
    world_size: int = 1
    is_known: bool = True
    """False: it may be a launcher, or a rank that nobody has numbered yet. It shows when it compiles."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """What a session has to know: who signs, what this node shares, what is known of torch's sources, when the process
    began."""

    keys: Path
    mirror: Path
    hashes: Path
    began: float
    number: int = 0
    """Counts the sessions of a process: the words of one are none of another's."""


class Session:
    """What one process does about its bundle."""

    def __init__(self, url: str, parts: Callable[[], dict[str, str]], place: Place, where: Where, tell: Tell) -> None:
        """`url` is the store; `parts` says what the key is made of; `tell` is called with what happened, for the
        journal."""
        self.url, self.key, self.about = url, "", dict[str, str]()
        self.outcome: dict[str, Any] = {}
        """What became of the bundle: `outcome` is `hit` or `miss`, with a reason."""
        self.seconds = 0.0
        """Of compiling, so far."""
        self.number = where.number
        self._parts, self._place, self._where, self._tell = parts, place, where, tell
        self._tables = Tables()
        self._tuning = Tuning(self._tables.hear, lambda text: self._say(outcome="tuning", why=text))
        self._root, self._tag, self._pid = caches.folder(), os.urandom(8).hex(), os.getpid()
        self._store: Store | None = None
        self._hashes = SourceHashes(where.hashes)
        self._ranks: _Ranks | None = None
        self._known: dict[str, str] = {}
        """The hash of each member that was loaded."""
        self._saved: dict[str, str] = {}
        """The same, of what was saved last."""
        self._kept: Members = {}
        """Members that are no files."""
        self._batch, self._record, self._since, self._last = b"", b"", 0.0, 0.0
        self._compiling = False
        self._is_first = place.rank == 0
        self._is_ready = False
        self._ready, self._cancelled, self._leaving = threading.Event(), threading.Event(), threading.Event()
        self._compiles, self._woken = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-compile-cache", daemon=True)
        self._thread.start()
        caches.before_exit(self.finish)

    def _run(self) -> None:
        self._load()
        self._ready.set()
        if self.outcome["outcome"] == "hit" and self._store is not None:
            with suppress(Exception):  # it will be among the first to be evicted, then
                self._store.touch(self.key)
        while True:
            self._woken.wait()
            self._woken.clear()
            while not self._is_quiet() and not self._leaving.wait(QUIET_S / 4):
                pass
            is_last = self._leaving.is_set()  # if it is set during a save, what was compiled meanwhile needs another
            self.save()
            if self.seconds and self._is_first:
                with suppress(Exception):  # then the next process works them out, too
                    self._hashes.keep()
            if is_last:
                return

    def _is_quiet(self) -> bool:
        """Whether nothing compiles, and nothing has for a while: a save now would not miss the other half."""
        return not self._compiling and time.monotonic() - self._last >= QUIET_S

    def _say(self, **told: Any) -> None:
        """For the journal. What the key is made of is told by one rank: others would only repeat it."""
        about = {"about": json.dumps(self.about), "url": self.url} if self._is_first else {}
        self._tell(key=self.key, **about, **told)

    # --- in ---

    def _load(self) -> None:
        try:
            self._hashes.load()
            self._hashes.give()
            self.about = self._parts()
            self.key = key.digest(self.about)
            self._store = Store(self.url, keys=Keys.at(self._where.keys), mirror=self._where.mirror)
            if reason := others_can_write(self._root):
                raise PlatformError(f"torch's cache folder is not safe to use: {reason}")
            for number in range(_ROUNDS):
                if self._fetch(number) != "again":
                    return
        except Exception as error:  # the job compiles as if there were no cache
            self.outcome = {"outcome": "miss", "why": f"{type(error).__name__}: {error}"}
            with suppress(Exception):  # the others need not wait for this rank
                self._verdict("", 0)

    def _fetch(self, number: int) -> str:
        """Loads, and puts what was loaded into place if all ranks have the same. Returns their verdict."""
        assert self._store is not None
        began = time.perf_counter()
        loaded = self._store.load(self.key)
        took, word = time.perf_counter() - began, loaded.digest
        why = "; ".join(loaded.problems) or "nothing is stored under this key"
        staged = caches.Staged(self._root)
        try:
            staged.add(_files(loaded.members), self._job, self._rank())
        except OSError as error:  # no rank may have what another has not
            word, why = "", f"{type(error).__name__}: {error}"
        with staged:
            verdict = self._verdict(word, number)
            if verdict == "hit":
                staged.commit()
                self._keep(loaded)
                why = "; ".join(loaded.problems)
            elif word:
                why = "the ranks do not have the same bundle, or could not agree in time"
        self.outcome = {
            "outcome": "hit" if verdict == "hit" else "miss", "why": why, "seconds": round(took, 4),
            "members": len(loaded.members), "segments": loaded.segments,
            "bytes": sum(len(each.data) for each in loaded.members.values()),
        }  # fmt: skip
        return verdict

    def _keep(self, loaded: Loaded) -> None:
        """What is needed of a bundle once its files are in place: not their bytes."""
        self._known = {name: member.sha256 for name, member in loaded.members.items()}
        self._kept = {name: member for name, member in loaded.members.items() if not name.startswith(_FILE)}
        if CONFIGS in self._kept:
            self._tuning.apply(configs_in(self._kept[CONFIGS].data))

    @property
    def _job(self) -> str:
        """The name that torch files shapes under."""
        return f"headway-{self.key}"

    # --- the other ranks ---

    def _rank(self) -> int:
        return self._ranks.rank if self._ranks else self._place.rank

    def _verdict(self, word: str, number: int) -> str:
        """`hit` if each rank has what the others of its key have; `again` if some have something else; else `miss`."""
        if self._ranks is None:
            self._ranks = self._meet()
        if self._ranks is None or self._ranks.size == 1:
            is_alone = self._ranks is not None
            return "hit" if word and is_alone and not self._cancelled.is_set() else "miss"
        return self._ranks.verdict(f"{self.key}:{word}", number, self._until)

    def _meet(self) -> "_Ranks | None":
        """The ranks of this job, once they have met; None if they compile before."""
        if not self._place.is_known:
            self._compiles.wait()
        elif self._place.world_size > 1 and not self._until(lambda: met() is not None, float("inf")):
            return None
        return _Ranks.of_torch(self._where.number) if met() is not None else _Ranks(self._place.rank, 1, None, "")

    def _until(self, is_true: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
        end = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() > end or self._cancelled.wait(_POLL_S):
                return False
        return True

    # --- around compilations ---

    def fetched(self, fetched: Any) -> None:
        """A batch has come, before the first step: the last one of these is what the first step compiles for."""
        try:
            self._batch = batches.as_bytes(fetched)
        except (TypeError, ValueError, RuntimeError):  # of a kind that nobody could make up: then none will be
            self._batch = b""

    def recorded_batch(self) -> bytes:
        """What the bundle says of the first batch; empty if nothing. Something is about to compile for it: the bundle
        is in place when this returns."""
        self.before_compile()
        self._compiling = False  # not yet
        return self._kept[batches.NAME].data if batches.NAME in self._kept else b""

    def record_batch(self, record: bytes) -> None:
        """Keeps this of the first batch, rather than what was seen of those that were fetched."""
        self._record = record

    def imported(self, name: str) -> None:
        """One of the modules whose tuning is listened to has been imported: a process that tunes trains, too."""
        self._compiles.set()
        self._tuning.imported(name)

    def before_compile(self) -> None:
        """Called at the beginning of each compilation: at the first, the bundle is in place when this returns."""
        try:
            self._since = time.perf_counter()
            if os.getpid() == self._pid:
                self._compiling = True
                for name in MODULES:
                    if name in sys.modules:
                        self._tuning.imported(name)
                if not self._is_ready:
                    self._is_ready = True
                    self._make_ready()
        except Exception as error:  # torch would take it for a failure of the compilation
            self._say(outcome="miss", why=f"{type(error).__name__}: {error}")

    def _make_ready(self) -> None:
        began = time.perf_counter()
        self._compiles.set()
        if self._place.world_size > 1 and met() is None:
            self._cancelled.set()  # no collective can be in this compilation, and there is nobody to agree with
        if not self._ready.wait(WAIT_S):
            self._cancelled.set()
            self.outcome = {"outcome": "miss", "why": f"the bundle was not there after {WAIT_S:.0f} s"}
        if self.key:
            caches.remember_shapes(self._job)
        self._hashes.give()  # once more: its compiler may have been on its way in the first time
        old, self._root = self._root, caches.folder()  # the script may have chosen another one meanwhile
        if self.outcome["outcome"] == "hit":
            self._apply(old)
        self.outcome["waited"] = round(time.perf_counter() - began, 4)
        self._say(**self.outcome)

    def _apply(self, put: Path) -> None:
        """`put` is where the files were put."""
        names = [name[len(_FILE) :] for name in self._known if name.startswith(_FILE)]
        if put != self._root:
            caches.move(names, put, self._root)
        for problem in caches.unfit(names, self._root):
            self._say(outcome="left out", why=problem)
        if names:
            caches.skip_headers()
        if _UNITS in self._kept:
            caches.believe_vector_units(json.loads(self._kept[_UNITS].data)["units"])
        if SOURCES in self._kept:
            caches.make_dynamic(json.loads(self._kept[SOURCES].data)["sources"])

    def after_compile(self) -> None:
        """Called at the end of each compilation: what is new is saved once no other follows."""
        if os.getpid() == self._pid:
            self._last, self._compiling = time.monotonic(), False
            self.seconds += time.perf_counter() - self._since
            self._woken.set()

    # --- out ---

    def save(self) -> None:
        """Stores what this process has compiled and the bundle does not have yet, if it is the one of its kind to."""
        try:
            if not self.key or self._store is None or not (self.seconds or self._tables) or not self._saves():
                return
            if reason := others_can_write(self._root):
                raise PlatformError(f"torch's cache folder may hold what others have put there: {reason}")
            if new := self._new(caches.made(self._root, self._where.began, self._job)):
                size = self._store.save(self.key, new, self.about, self._tag)
                self._saved = {name: member.sha256 for name, member in new.items()}
                self._say(outcome="saved", members=len(new), bytes=size)
        except Exception as error:  # the next save tries again, and the job goes on
            self._say(outcome="not saved", why=f"{type(error).__name__}: {error}")

    def _saves(self) -> bool:
        """Whether this is the first rank of those that compile the same."""
        if self._ranks is not None:
            self._is_first = self._ranks.is_first_of(self.key)
        return self._is_first

    def _new(self, files: Mapping[str, bytes]) -> Members:
        """All that the bundle did not have when it was loaded. Empty if nothing of it is new since the last save but
        shapes, or what a batch looks like."""
        named = {_FILE + name: content for name, content in files.items()}
        named |= self._tables.members({name: member.data for name, member in self._kept.items()})
        beside = {}
        if record := self._record or self._batch:
            beside[batches.NAME] = record
        if _SECONDS not in self._known and caches.was_cold():
            beside[_SECONDS] = json.dumps({"cold_s": round(self.seconds, 3)}).encode()
        if _UNITS not in self._known and (units := caches.vector_units()):
            beside[_UNITS] = json.dumps({"units": units}).encode()
        now, shapes = time.time_ns(), _FILE + caches.shapes_file(self._job)
        new = {name: Member(data, now) for name, data in {**named, **beside}.items()}
        new = {name: member for name, member in new.items() if self._known.get(name) != member.sha256}
        is_new = any(self._saved.get(name) != new[name].sha256 for name in new.keys() - {shapes, *beside})
        return new if is_new else {}

    def seconds_saved(self) -> float | None:
        """How much longer this process would have compiled without its bundle, as far as that is known."""
        if self.outcome.get("outcome") != "hit" or _SECONDS not in self._kept or not self.seconds:
            return None
        return max(0.0, float(json.loads(self._kept[_SECONDS].data)["cold_s"]) - self.seconds)

    def cancel(self) -> None:
        """Another session takes this one's place."""
        for event in (self._leaving, self._cancelled, self._compiles, self._woken):
            event.set()

    def finish(self) -> None:
        """The script has ended: what is new is saved, if that does not take long."""
        if os.getpid() == self._pid:
            self.cancel()
            self._thread.join(EXIT_S)

    def close(self) -> None:
        """The process ends: what became of its bundle is told."""
        if os.getpid() == self._pid:
            self.finish()
            if self._tables and not self._is_ready:
                self._say(**self.outcome)
            if (saved := self.seconds_saved()) is not None:
                self._say(outcome="used", seconds_saved=round(saved, 2))


class _Ranks:
    """The ranks of a job, and the store that they have met through."""

    def __init__(self, rank: int, size: int, store: Any, prefix: str) -> None:
        self.rank, self.size, self._store, self._prefix = rank, size, store, prefix

    @classmethod
    def of_torch(cls, number: int) -> "_Ranks":
        """Those of the default group."""
        found = met(own_connection=True)
        if found is None or found.store is None:
            raise PlatformError("this version of torch hides its store: the ranks cannot agree on a bundle")
        return cls(*found, f"headway/compile/{number}")

    def verdict(self, word: str, number: int, until: Callable[..., bool]) -> str:
        """What becomes of everyone's word. The first rank decides, or whoever first gives up: all obey the same."""
        decided = f"{self._prefix}/{number}/verdict"
        self._store.set(self._name(self.rank, number), word)
        if word.endswith(":"):
            return self._settle(decided, "miss")
        names = [self._name(rank, number) for rank in range(self.size)]
        if self.rank == 0:
            all_there = until(lambda: self._store.check([decided]) or self._store.check(names))
            words = [self._store.get(name).decode() for name in names] if all_there and self._store.check(names) else []
            return self._settle(decided, _judged(words, number))
        if until(lambda: self._store.check([decided])):
            return str(self._store.get(decided).decode())
        return self._settle(decided, "miss")

    def _settle(self, name: str, verdict: str) -> str:
        return str(self._store.compare_set(name, "", verdict).decode())

    def _name(self, rank: int, number: int = 0) -> str:
        return f"{self._prefix}/{number}/{rank}"

    def is_first_of(self, key: str) -> bool:
        """Whether no rank before this one has the same key, as far as they have said."""
        if self._store is None or self.rank == 0:
            return self.rank == 0
        names = [self._name(rank) for rank in range(self.rank)]
        return self._store.check(names) and all(not self._store.get(name).startswith(key.encode()) for name in names)


def _judged(words: Iterable[str], number: int) -> str:
    """The verdict on what all ranks have said; `miss` if they have not."""
    by_key: dict[str, set[str]] = {}
    for word in words:
        by_key.setdefault(word.partition(":")[0], set()).add(word)
    if not by_key or any(word.endswith(":") for said in by_key.values() for word in said):
        return "miss"
    if all(len(said) == 1 for said in by_key.values()):
        return "hit"
    return "again" if number + 1 < _ROUNDS else "miss"  # another job has saved between two ranks' looks


def _files(members: Members) -> dict[str, bytes]:
    return {name[len(_FILE) :]: member.data for name, member in members.items() if name.startswith(_FILE)}
