"""What torch.compile has made in this process, as files below its cache folder; and how they get back there.

Torch's own archive, MegaCache, has the graphs and leaves out the libraries that its C++ compiler made of them, so that
they are compiled again on another machine. Here both are files, at the places where torch looks for them: whoever puts
them there need not import torch. This is the only file that touches torch's private caches.
"""

import atexit
import ctypes
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.errors import PlatformError

_GRAPHS = {
    "inductor": ("torch._inductor.codecache", "FxGraphCache"),
    "aot_autograd": ("torch._functorch._aot_autograd.autograd_cache", "AOTAutogradCache"),
}
"""Where torch keeps graphs, by the name of their kind in its archive: each has a folder of its own a key."""
_GRAPH_FOLDERS = ("fxgraph", "aotautograd")
_LOCK_S = 5.0
_SHAPES = "dynamo"
"""Where torch remembers which sizes have changed."""


def folder() -> Path:
    """Torch's cache folder: without importing torch, and without making it."""
    if given := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(given).absolute()
    import getpass
    import re

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container the user may have no name
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


# --- out -----------------------------------------------------------------------------------------------------------


def made(root: Path, since: float, job: str) -> dict[str, bytes]:
    """All that this process has compiled, or found compiled and used, by its path below the cache folder. `since` is
    when the process began; `job` is the name that torch files its shapes under."""
    with _still():
        recorded = _recorded()
    found = dict(_graphs(root, since, recorded))
    for path in _built(root, since):
        with suppress(OSError):  # somebody tidies up there
            found[str(path.relative_to(root))] = path.read_bytes()
    for path in (root / _SHAPES).glob(f"code_state_{job}_*.pkl"):
        with suppress(OSError):
            found[shapes_file(job)] = path.read_bytes()
    return found


@contextmanager
def _still() -> Iterator[None]:
    """No other thread compiles meanwhile. One that does so for long is not waited for."""
    lock: Any = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    if lock is None:
        yield
        return
    if not lock.acquire(timeout=_LOCK_S):
        raise TimeoutError(f"another thread has been compiling for {_LOCK_S:.0f} s")
    try:
        yield
    finally:
        lock.release()


def _graphs(root: Path, since: float, recorded: list[Any] | None) -> Iterator[tuple[str, bytes]]:
    """Graphs that torch has written down for its archive. Where it no longer tells of them: all that are new."""
    for artifact in recorded or ():
        if (place := _place(artifact, root)) is not None:
            yield place, artifact.content
    for name in _GRAPH_FOLDERS if recorded is None else ():
        for path in (root / name).rglob("*"):
            if _is_own(path) and path.stat().st_mtime >= since and not path.name.startswith("."):
                yield str(path.relative_to(root)), path.read_bytes()


def _recorded() -> list[Any] | None:
    """The parts of torch's archive so far; None if this torch does not tell."""
    manager = getattr(sys.modules.get("torch.compiler._cache"), "CacheArtifactManager", None)
    if manager is None:
        return []
    seen = getattr(manager, "_seen_artifacts", None)
    return None if seen is None else list(seen)


def _place(artifact: Any, root: Path) -> str | None:
    """Where torch would put a part of its archive; None for a kind that is none of ours."""
    kind = artifact.type()
    if kind == "autotune":
        return str(artifact.key)
    if kind not in _GRAPHS:
        return None
    from hashlib import sha256  # only what makes the file's name unique: torch looks at all in the folder

    module, name = _GRAPHS[kind]
    where = Path(getattr(import_module(module), name)._get_tmp_dir_for_key(artifact.key))
    return str(where.relative_to(root) / sha256(artifact.content).hexdigest())


def _built(root: Path, since: float) -> set[Path]:
    """Libraries that this process has loaded, and the parts they were linked from."""
    real = root.resolve()
    loaded = {root / path.relative_to(real) for path in _loaded() if real in path.parents}
    parts = {part for path in loaded for part in path.parent.glob("*.o") if part.stat().st_mtime >= since}
    return {path for path in loaded | parts if _is_own(path)}


def _loaded() -> set[Path]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line[line.index("/") :]) for line in lines if line.endswith(".so") and "/" in line}


def _is_own(path: Path) -> bool:
    """Whether it is a file of this user's: what others have put there is not passed on in this user's name."""
    with suppress(OSError):
        told = path.lstat()
        return stat.S_ISREG(told.st_mode) and told.st_uid == os.getuid()
    return False


# --- in ------------------------------------------------------------------------------------------------------------


class Staged:
    """Files on their way to where torch looks for them: all are written first, and none is seen before `commit`."""

    def __init__(self, root: Path) -> None:
        self._root, self._names = root, list[str]()
        self._folder: Path | None = None

    def add(self, files: Mapping[str, bytes], job: str, rank: int | None) -> None:
        """Writes those that are not there; one that would be outside the folder is refused."""
        for name, content in files.items():
            for where in _names(name, job, rank):
                path = self._root / where
                if ".." in path.parts or self._root not in path.parents:
                    raise PlatformError(
                        f"a bundle has a file for {where}, outside torch's cache folder: it is not used."
                    )
                if not path.exists():
                    self._write(where, content)

    def _write(self, where: str, content: bytes) -> None:
        if self._folder is None:
            self._root.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=".headway-", dir=self._root))
        (self._root / where).parent.mkdir(parents=True, exist_ok=True)
        (self._folder / str(len(self._names))).write_bytes(content)
        self._names.append(where)

    def commit(self) -> int:
        """Puts them into place, and returns how many there were. None is overwritten, or ever half there."""
        for number, where in enumerate(self._names):
            assert self._folder is not None
            with suppress(FileExistsError):
                os.link(self._folder / str(number), self._root / where)
        return len(self._names)

    def __enter__(self) -> "Staged":
        return self

    def __exit__(self, *problem: object) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def move(names: Iterable[str], old: Path, new: Path) -> None:
    """Puts what is in one cache folder into another, too."""
    with Staged(new) as staged:
        staged.add({name: (old / name).read_bytes() for name in names if (old / name).is_file()}, "", None)
        staged.commit()


def unfit(names: Iterable[str], root: Path) -> list[str]:
    """Deletes libraries that cannot be loaded here, so that torch builds them anew; says which, and why. Torch would
    take it for a failure of the compilation."""
    problems = []
    for path in (root / name for name in names if name.endswith(".so")):
        try:
            if path.is_file():
                ctypes.CDLL(str(path), os.RTLD_NOW)
        except OSError as error:
            path.unlink(missing_ok=True)
            problems.append(f"{path.name} cannot be loaded here: {error}")
    return problems


def shapes_file(job: str, rank: int | None = None) -> str:
    """Where torch looks for the shapes that a rank has seen: each for its own, before it has one under `None`."""
    return f"{_SHAPES}/code_state_{job}_{rank}_.pkl"


def _names(name: str, job: str, rank: int | None) -> list[str]:
    shared = shapes_file(job)
    return [shared, shapes_file(job, rank)] if name == shared else [name]


# --- compilations --------------------------------------------------------------------------------------------------


def call_around(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Has these called around each compilation, once torch's compiler has been imported: it is not for this."""

    def register(module: Any) -> None:
        handler = module.callback_handler
        clear = handler.clear

        def listen() -> None:
            handler.register_start_callback(lambda args: before())
            handler.register_end_callback(lambda args: after())

        def clear_others() -> None:  # `torch._dynamo.reset()` clears all, whoever put them there
            clear()
            listen()

        handler.clear = clear_others
        listen()

    when_imported("torch._dynamo.callback", register)


def when_imported(name: str, then: Callable[[Any], None]) -> None:
    """Calls this with a module once that has been imported; now, if it is."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        then(module)
    else:
        sys.meta_path.insert(0, _Awaited(name, then))


class _Awaited(MetaPathFinder):
    """Calls a function with one module, once, when that has been imported."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then, self._is_over = name, then, False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """What the others find, with a loader that calls back."""
        if fullname != self._name or self._is_over:
            return None
        self._is_over = True  # it stays in the list, which another thread may be going through
        found = find_spec(fullname)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._then(module)

            found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


def before_exit(call: Callable[[], None]) -> None:
    """Has this called when the script has ended, while threads can still be started. Python's `atexit` comes after:
    then a client of an object store no longer works. Where there is nothing better, `atexit` it is."""
    import concurrent.futures.thread  # noqa: F401  # its own call must come after

    with suppress(RuntimeError):  # the script has ended already
        getattr(threading, "_register_atexit", atexit.register)(call)


def was_cold() -> bool:
    """Whether nothing that was compiled was found in torch's own caches."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return not counters.get("inductor", {}).get("fxgraph_cache_hit") and not counters.get("aot_autograd", {}).get(
        "autograd_cache_hit"
    )


def is_disabled() -> bool:
    """Whether the user wants no cache of compiled code at all."""
    config = sys.modules.get("torch.compiler.config")
    return os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1" or bool(
        getattr(config, "force_disable_caches", False)
    )


# --- settings ------------------------------------------------------------------------------------------------------


def remember_shapes(job: str) -> None:
    """Has torch write down which sizes change, and read that at the next start; unless the script names it itself."""
    config: Any = import_module("torch.compiler.config")
    if getattr(config, "job_id", "") is None:
        config.job_id = job


def make_dynamic(sources: list[str]) -> None:
    """Has torch take these sources for dynamic from the first compilation on, beside those that were given."""
    config: Any = import_module("torch.compiler.config")
    given = [source for source in config.dynamic_sources.split(",") if source]
    config.dynamic_sources = ",".join([*given, *(source for source in sources if source not in given)])


def skip_headers() -> Callable[[], None]:
    """Has torch precompile its C++ headers only when something is to be built: it does so, for seconds, before it looks
    whether the library is there. Returns what undoes it."""
    module: Any = import_module("torch._inductor.codecache")
    original = getattr(module, "_precompile_header", None)
    if original is None:  # of another version: it takes what it takes
        return lambda: None

    def lazily(*args: Any, **kwargs: Any) -> Any:
        main = sys._getframe(1).f_locals.get("main_path", "")
        if main and os.path.exists(f"{os.path.splitext(main)[0]}.so"):
            return ""  # it only ever makes a build faster, and there will be none
        return original(*args, **kwargs)

    def undo() -> None:
        if module._precompile_header is lazily:
            module._precompile_header = original

    module._precompile_header = lazily
    return undo


def vector_units() -> list[str]:
    """The processor's vector units that torch has found to work; empty if it never asked."""
    module: Any = sys.modules.get("torch._inductor.cpu_vec_isa")
    asked = getattr(module, "valid_vec_isa_list", None)
    return [str(unit) for unit in asked()] if asked is not None and asked.cache_info().currsize else []


def believe_vector_units(names: list[str]) -> Callable[[], None]:
    """Has torch believe that these work, on what is the same kind of processor: it would start a Python for each, to
    load a library into. Returns what undoes it."""
    kind: Any = getattr(import_module("torch._inductor.cpu_vec_isa"), "VecISA", None)
    original = getattr(kind, "check_build", None)
    if original is None:
        return lambda: None

    def check_build(self: Any, code: str) -> bool:
        return str(self) in names or bool(original(self, code))

    def undo() -> None:
        if kind.check_build is check_build:
            kind.check_build = original

    kind.check_build = check_build
    return undo
