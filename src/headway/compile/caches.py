"""What torch.compile has made in this process, as files below its cache folder; and how they get back there.

Torch's own archive, MegaCache, has the graphs and leaves out the libraries that its C++ compiler made of them, so that
they are compiled again on another machine. Here both are files, at the places where torch looks for them: whoever puts
them there need not import torch. This is the only file that touches torch's private caches.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from headway.errors import PlatformError

_GRAPHS = {
    "inductor": ("torch._inductor.codecache", "FxGraphCache"),
    "aot_autograd": ("torch._functorch._aot_autograd.autograd_cache", "AOTAutogradCache"),
}
"""Where torch keeps graphs, by the name of their kind in its archive: each has a folder of its own a key."""
_GRAPH_FOLDERS = ("fxgraph", "aotautograd")
_BUILT = (".so", ".o", ".cubin", ".hsaco")
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


@contextmanager
def still() -> Iterator[None]:
    """No other thread compiles meanwhile."""
    lock = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    with lock or nullcontext():
        yield


def made(root: Path, since: float, job: str) -> dict[str, bytes]:
    """All that this process has compiled, or found compiled and used, by its path below the cache folder. `since` is
    when the process began; `job` is the name that torch files its shapes under."""
    found = dict(_graphs(root, since))
    for path in _built(root, since):
        with suppress(OSError):  # somebody tidies up there
            found[str(path.relative_to(root))] = path.read_bytes()
    for path in (root / _SHAPES).glob(f"code_state_{job}_*.pkl"):
        with suppress(OSError):
            found[shapes_file(job)] = path.read_bytes()
    return found


def _graphs(root: Path, since: float) -> Iterator[tuple[str, bytes]]:
    """Graphs that torch has written down for its archive. Where it no longer tells of them: all that are new."""
    try:
        artifacts = list(_recorded())
    except (AttributeError, ImportError):
        artifacts = []
        for name in _GRAPH_FOLDERS:
            for path in (root / name).rglob("*"):
                if path.is_file() and path.stat().st_mtime >= since and not path.name.startswith("."):
                    yield str(path.relative_to(root)), path.read_bytes()
    for artifact in artifacts:
        if (place := _place(artifact, root)) is not None:
            yield place, artifact.content


def _recorded() -> Iterator[Any]:
    cache = sys.modules.get("torch.compiler._cache")
    return iter(list(cache.CacheArtifactManager._seen_artifacts) if cache is not None else [])


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
    """Libraries that this process has loaded, and all that was built since it began."""
    found = {path for path in _loaded() if root in path.parents}
    for name in os.listdir(root) if root.is_dir() else ():
        if name not in (*_GRAPH_FOLDERS, _SHAPES, "locks", "triton"):
            for path in (root / name).rglob("*") if (root / name).is_dir() else ():
                with suppress(OSError):
                    if path.suffix in _BUILT and path.stat().st_mtime >= since:
                        found.add(path)
    return found


def _loaded() -> set[Path]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line[line.index("/") :]) for line in lines if line.endswith(".so") and "/" in line}


# --- in ------------------------------------------------------------------------------------------------------------


def put(files: Mapping[str, bytes], root: Path, job: str, rank: int | None) -> int:
    """Puts files to where torch looks for them, and returns how many were not there. No file is overwritten, or ever
    half there; one that would be outside the folder is refused."""
    count = 0
    for name, content in files.items():
        for where in _names(name, job, rank):
            path = root / where
            if ".." in path.parts or root not in path.parents:
                raise PlatformError(f"a bundle has a file for {where}, outside torch's cache folder: it is not used.")
            if not path.exists():
                _write(path, content)
                count += 1
    return count


def shapes_file(job: str, rank: int | None = None) -> str:
    """Where torch looks for the shapes that a rank has seen: each for its own, before it has one under `None`."""
    return f"{_SHAPES}/code_state_{job}_{rank}_.pkl"


def _names(name: str, job: str, rank: int | None) -> list[str]:
    shared = shapes_file(job)
    return [shared, shapes_file(job, rank)] if name == shared else [name]


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# --- compilations --------------------------------------------------------------------------------------------------


def call_around(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Has these called around each compilation, up to the next `torch._dynamo.reset()`."""
    handler = import_module("torch._dynamo.callback").callback_handler
    handler.register_start_callback(lambda args: before())
    handler.register_end_callback(lambda args: after())


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
