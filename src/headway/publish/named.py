"""Functions by name: `file.py:function`, or `package.module:function`."""

import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from headway.errors import InputError

_HEADWAY = os.path.realpath(Path(__file__).parents[1])
"""headway imports its own modules when they are needed: which those are differs from try to try."""
_PYTHON = [os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
_EXAMPLE = "Write it as file.py:function, or as package.module:function."


def function_named(name: str, folder: str) -> Callable[..., Any]:
    """The function of that name; files count from `folder`, where modules are looked for, too."""
    where, separator, attribute = name.rpartition(":")
    if not separator or not where or not attribute:
        raise InputError(f"{name!r} names no function. {_EXAMPLE}")
    module = _module(name, where, folder)
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise InputError(f"{name!r} names no function: there is no {attribute} to be called in {module.__file__}.")
    return found  # type: ignore[no-any-return]


def is_function(name: str) -> bool:
    """Whether a name is a function's, and not that of a ready recipe."""
    return ":" in name


def check_named(name: str, folder: str) -> None:
    """InputError if it can be seen, without running any of it, that there is no such function."""
    where, separator, attribute = name.rpartition(":")
    if not separator or not where or not attribute:
        raise InputError(f"{name!r} names no function. {_EXAMPLE}")
    if is_file(where) and not (path := Path(folder, where)).is_file():
        raise InputError(f"{name!r} names no function: there is no file {path}.")


def digest(names: Iterable[str], folder: str) -> str:
    """Changes with the functions' names, and with the files that they are in."""
    hasher = xxhash.xxh3_128()
    for name in names:
        hasher.update(name.encode() + b"\0")
        if is_function(name) and (file := _file(name, folder)) is not None:
            hasher.update(file.read_bytes() + b"\0")
    return hasher.hexdigest()


def imported(names: Iterable[str], folder: str) -> str:
    """Changes with the code that the functions of these names have imported by now: the modules of their own packages,
    those below `folder`, and those beside a named file. What is installed besides does not count."""
    functions = [name.rpartition(":")[0] for name in names if is_function(name)]
    beside = [Path(folder, where).parent for where in functions if is_file(where)]
    places = [os.path.realpath(each) for each in (Path(folder), *beside)]
    packages = {where.partition(".")[0] for where in functions if not is_file(where)}
    hasher = xxhash.xxh3_128()
    for name, module in sorted(sys.modules.items()):
        path = os.path.realpath(getattr(module, "__file__", None) or "")
        is_own = name.partition(".")[0] in packages or (_is_below(path, places) and not _is_installed(path))
        if functions and is_own and not _is_below(path, [_HEADWAY]) and os.path.isfile(path):
            hasher.update(name.encode() + b"\0" + Path(path).read_bytes() + b"\0")
    return hasher.hexdigest()


def is_file(where: str) -> bool:
    """Whether a function is in a file that is named, and not in a module."""
    return where.endswith(".py")


def _is_installed(path: str) -> bool:
    """Whether it is Python's own, or a package that was installed: an environment may lie in the user's folder."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts) or _is_below(path, _PYTHON)


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _file(name: str, folder: str) -> Path | None:
    where = name.rpartition(":")[0]
    if is_file(where):
        return Path(folder, where)
    file = getattr(sys.modules.get(where), "__file__", None)
    return Path(file) if file else None


def _module(name: str, where: str, folder: str) -> ModuleType:
    path = Path(folder, where).absolute() if is_file(where) else None
    for entry in (folder, str(path.parent) if path else folder):  # as if it were run from there
        if entry not in sys.path:
            sys.path.insert(0, entry)
    try:
        return importlib.import_module(where) if path is None else _loaded(path)
    except FileNotFoundError as error:
        if path is not None and not path.exists():
            raise InputError(f"{name!r} names no function: there is no file {path}.") from error
        raise
    except ModuleNotFoundError as error:
        if path is None and error.name and (where == error.name or where.startswith(f"{error.name}.")):
            text = f"{name!r} names no function: there is no module {error.name} in {os.fspath(folder)} or on sys.path."
            raise InputError(text) from error
        raise


def _loaded(path: Path) -> ModuleType:
    """The module in a file; what is in it can be pickled, since it has a name."""
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before
        raise
    return module
