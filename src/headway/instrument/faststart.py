"""What a start can be spared without a word in the script: data workers that start early, and packages that a zygote
could have imported before, which are told here for the next start."""

import os
import sys
from typing import TYPE_CHECKING, Any

from headway.config import Settings
from headway.events.vocabulary import Told, clean_text
from headway.instrument.early_loaders import EarlyLoaders
from headway.instrument.origin import file_of, is_installed, is_own
from headway.instrument.patches import around

if TYPE_CHECKING:
    from headway.instrument.session import Session

WORTH_NS = 20_000_000
"""A package that takes less to import need not be imported ahead."""
_SOURCES = 400
"""So many of the program's own files are told, at most."""


def install(session: "Session") -> None:
    """Does what the settings ask for."""
    items = Settings.from_environment().fast_start_items
    if "imports" in items:
        session.imports = Imports(session)
    if "loader" in items:
        session.watch.call_for("torch.utils.data.dataloader", lambda module: EarlyLoaders(session, module).install())


class Imports:
    """Which packages a zygote could have imported before: those that the program imports as it found itself started,
    and not after it has set something that they may read."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._sets = ""
        self._before: frozenset[str] = frozenset()
        """What was imported before it first did."""
        self._before_data: frozenset[str] | None = None
        """What was imported before data was on the way; None as long as it is not."""
        self._told = False
        for name in ("putenv", "unsetenv"):
            if patch := session.patch(os, name):
                patch.put(around(patch, self._changes, _nothing))
                session.on_first_step.append(patch.undo)

    def _changes(self, name: Any, value: Any = None) -> None:
        if self._session.recorder is not None and not self._sets and _is_programs_doing(sys._getframe(2)):
            self._sets = os.fsdecode(name)
            self._before = frozenset(self._session.watch.took_ns)

    def data_comes(self) -> None:
        """Data workers have been started: what is imported from now on holds no data up."""
        if self._before_data is None:
            self._before_data = frozenset(self._session.watch.took_ns)

    def tell(self) -> None:
        """Tells which packages these are, which of them were imported when data was on the way, and of which files the
        program is."""
        session = self._session
        if session.recorder is None or not session.waited or os.environ.get("LOCAL_RANK", "0") != "0":
            return
        took = {name: ns for name, ns in session.watch.took_ns.items() if ns >= WORTH_NS and file_of(name)}
        slow = sorted((name for name in took if not is_own(file_of(name))), key=lambda name: -took[name])
        late = [name for name in slow if self._sets and name not in self._before]
        modules = {name: (round(took[name] / 1e9, 3), file_of(name)) for name in slow if name not in late}
        if self._told and not modules:
            return
        self._told = True
        why = f"the program sets {self._sets} before it imports {', '.join(late)}" if late else ""
        files = {file_of(name) for name in list(sys.modules)}
        own = sorted(file for file in files if os.path.isabs(file) and is_own(file))[:_SOURCES]
        before = self._before_data
        later = None if before is None else [name for name in modules if name not in before]
        session.recorder.mark(
            Told.FAST_START, item="imports", on=not why, why=clean_text(why), modules=modules, later=later, sources=own
        )


def _nothing(token: Any, result: Any, error: BaseException | None) -> None:
    pass


_TORCH = f"{os.sep}torch{os.sep}"


def _is_programs_doing(frame: Any) -> bool:
    """Whether the program has this done, and not a package while it is imported, nor torch, which tells its own modules
    so what it has chosen."""
    setter = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_own(file) or file.startswith("<frozen importlib"):
            return is_own(file) and _TORCH not in setter
        setter = setter or (file if is_installed(file) else "")
        frame = frame.f_back
    return False
