"""Imports that look as they always did, whoever else has a hand in them."""

import copy
import importlib
import importlib.machinery
import importlib.util
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from running import python

from headway.instrument.imports import ImportWatch


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImportWatch]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    watch = ImportWatch("never", lambda watch: None)
    sys.meta_path.insert(0, watch)
    yield watch
    sys.meta_path.remove(watch)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)


def test_a_module_looks_as_it_would_have_looked(watch: ImportWatch, tmp_path: Path) -> None:
    write(tmp_path, {"looked": "x = 1\nseen = __spec__.loader, __loader__\n"})
    module = importlib.import_module("looked")
    assert module.seen[0] is module.seen[1] is module.__spec__.loader
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert importlib.reload(module).x == 1


def test_packages_are_timed_and_hooks_called_when_their_module_is_done(watch: ImportWatch, tmp_path: Path) -> None:
    write(tmp_path, {"outer": "import inner.part\n", "inner/__init__": "", "inner/part": "done = True\n"})
    seen: list[Any] = []
    watch.call_for("inner.part", lambda module: seen.append(module.done))
    watch.call_for("json", lambda module: seen.append("json was there"))
    importlib.import_module("outer")
    assert seen == ["json was there", True]
    assert {"outer", "inner"} <= set(watch.took_ns)
    assert [name for name, *_ in watch.early] == ["outer"]


@pytest.mark.parametrize("error", ["RuntimeError('no')", "ImportError('no')", "KeyboardInterrupt()"])
def test_a_module_that_fails_has_the_traceback_it_always_had(watch: ImportWatch, tmp_path: Path, error: str) -> None:
    write(tmp_path, {"failing": f"raise {error}\n"})

    def lines() -> list[str]:
        try:
            importlib.import_module("failing")
        except BaseException as problem:
            return [f.name for f in traceback.extract_tb(problem.__traceback__) if "importlib" not in f.filename]
        raise AssertionError

    ours = lines()
    sys.meta_path.remove(watch)
    assert ours == lines()
    sys.meta_path.insert(0, watch)
    assert "failing" not in sys.modules
    assert not watch._inside


def test_namespaces_missing_modules_and_mere_questions_are_as_ever(watch: ImportWatch, tmp_path: Path) -> None:
    (tmp_path / "space").mkdir()
    write(tmp_path, {"space/one": "x = 1\n", "asked": "raise AssertionError\n"})
    assert importlib.import_module("space.one").x == 1
    assert importlib.util.find_spec("asked") is not None
    assert importlib.util.find_spec("not_there_at_all") is None
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        importlib.import_module("not_there_at_all")


def test_a_module_that_is_run_by_its_name_runs(home: Path) -> None:
    (home / "tool.py").write_text("import sys\nprint(__name__, __spec__.name, sys.argv[1:])\n")
    assert python("-m", "tool", "a", "b", path=str(home)) == "__main__ tool ['a', 'b']\n"


# --- other finders -------------------------------------------------------------------------------------------------


class Finder:
    """A finder of somebody else's, that finds one name."""

    def __init__(self, name: str, loader: Any) -> None:
        self.name, self.loader = name, loader
        self.asked: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        self.asked.append(name)
        return importlib.machinery.ModuleSpec(name, self.loader) if name == self.name else None


class Asking(Finder):
    """As those of wrapt and wandb do: asks the others for the module that is imported, and wraps its loader."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name or self.asked:
            return None
        self.asked.append(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        spec.loader = self.loader(spec.loader)
        return spec


class Loader:
    """Makes modules of any kind."""

    def __init__(self, module: Any = None) -> None:
        self.module = module

    def create_module(self, spec: Any) -> Any:
        return self.module

    def exec_module(self, module: Any) -> None:
        module.x = 1


@pytest.fixture
def finders() -> Iterator[list[Any]]:
    """`sys.meta_path`, which is as it was afterwards."""
    before = sys.meta_path[:]
    yield sys.meta_path
    sys.meta_path[:] = before


@pytest.mark.filterwarnings("ignore::ImportWarning")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python has only `find_spec` from 3.12 on")
def test_a_finder_of_the_old_kind_keeps_its_turn(watch: ImportWatch, tmp_path: Path, finders: list[Any]) -> None:
    class Old:
        def find_module(self, name: str, path: Any = None) -> Any:
            return self if name == "contested" else None

        def load_module(self, name: str) -> ModuleType:
            sys.modules[name] = ModuleType(name, "the old one's")
            return sys.modules[name]

    write(tmp_path, {"contested": "", "other": ""})
    finders.insert(finders.index(importlib.machinery.PathFinder), old := Old())
    assert importlib.import_module("contested").__doc__ == "the old one's"
    finders.remove(old)
    finders.insert(0, old)
    importlib.import_module("other")
    assert "other" in watch.took_ns


def test_a_finder_in_front_is_asked_once(watch: ImportWatch, tmp_path: Path, finders: list[Any]) -> None:
    write(tmp_path, {"once": ""})
    finders.insert(0, finder := Finder("", None))
    importlib.import_module("once")
    assert finder.asked == ["once"]


def test_a_mere_question_has_the_answer_it_always_had(watch: ImportWatch, tmp_path: Path) -> None:
    write(tmp_path, {"asked": "", "asking": "import importlib.util\nspec = importlib.util.find_spec('asked')\n"})
    spec = importlib.util.find_spec("asked")
    assert spec is not None
    assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
    assert spec == importlib.util.find_spec("asked") == importlib.import_module("asking").spec
    assert spec == copy.deepcopy(spec) == pickle.loads(pickle.dumps(spec))
    assert importlib.import_module("asked").__spec__ == spec


def test_others_that_wrap_the_loader_of_an_import_are_called(
    watch: ImportWatch, tmp_path: Path, finders: list[Any]
) -> None:
    class Wrapped:
        def __init__(self, loader: Any) -> None:
            self.loader = loader
            self.create_module = loader.create_module

        def exec_module(self, module: Any) -> None:
            self.loader.exec_module(module)
            module.wrapped = True

    write(tmp_path, {"wrapped_by_two": ""})
    seen: list[Any] = []
    watch.call_for("wrapped_by_two", lambda module: seen.append(module.__name__))
    finders.insert(0, Asking("wrapped_by_two", Wrapped))
    module = importlib.import_module("wrapped_by_two")
    assert module.wrapped
    assert isinstance(module.__spec__.loader, Wrapped)
    assert seen == ["wrapped_by_two"]
    assert "wrapped_by_two" in watch.took_ns


def test_a_lazy_module_is_timed_from_its_first_use(watch: ImportWatch, tmp_path: Path, finders: list[Any]) -> None:
    write(tmp_path, {"lazy": "x = 1\n"})
    finders.insert(0, Asking("lazy", importlib.util.LazyLoader))
    module = importlib.import_module("lazy")
    assert "lazy" not in watch.took_ns
    time.sleep(0.1)
    used_ns = time.monotonic_ns()
    assert module.x == 1
    assert watch.took_ns["lazy"] <= time.monotonic_ns() - used_ns


class Odd:
    """What some loaders make in place of a module."""

    __slots__ = ("x",)


def test_a_module_may_be_any_object(watch: ImportWatch, finders: list[Any]) -> None:
    seen: list[Any] = []
    watch.call_for("odd", seen.append)
    finders.append(Finder("odd", Loader(Odd())))
    module = importlib.import_module("odd")
    assert (type(module), module.x) == (Odd, 1)  # type: ignore[comparison-overlap]
    assert seen == [module]


def test_a_module_may_put_another_in_its_place(watch: ImportWatch, tmp_path: Path) -> None:
    write(tmp_path, {"replaced": "import sys, types\nsys.modules[__name__] = types.SimpleNamespace(x=1)\n"})
    seen: list[Any] = []
    watch.call_for("replaced", lambda module: seen.append(module.x))
    assert importlib.import_module("replaced").x == 1
    assert seen == [1]


def test_a_loader_that_is_no_loader_is_refused_by_python_itself(watch: ImportWatch, finders: list[Any]) -> None:
    class Half:
        exec_module = print

    finders.append(Finder("half", Half()))
    with pytest.raises(ImportError, match="must also define create_module"):
        importlib.import_module("half")


# --- hooks, and who joins ------------------------------------------------------------------------------------------


def test_hooks_are_called_again_after_a_reload(watch: ImportWatch, tmp_path: Path) -> None:
    write(tmp_path, {"early": "", "again": "def f(): return 1\n"})
    seen: list[str] = []
    early = importlib.import_module("early")
    for name in ("early", "again"):
        watch.call_for(name, lambda module: seen.append(module.__name__))
    assert watch.waited_for() == ["again"]
    again = importlib.import_module("again")
    assert watch.waited_for() == []
    assert seen == ["early", "again"]
    loader = type(again.__loader__)
    for module in (again, early):
        assert type(importlib.reload(module).__spec__.loader) is loader
    assert seen == ["early", "again", "again", "early"]


BY_HAND = """\
spec = importlib.util.find_spec("torch")
sys.modules["torch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["torch"])
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("importlib.util.find_spec('torch')", "[]"),
        ("import torch", "['torch is asked for', 'its body runs']"),
        ("import torch.part", "['torch is asked for', 'its body runs']"),
        (BY_HAND, "['its body runs', 'torch is asked for']"),
    ],
    ids=["question", "import", "import of a part", "by hand"],
)
def test_only_an_import_pulls_the_trigger(tmp_path: Path, code: str, expected: str) -> None:
    write(
        tmp_path, {"torch/__init__": "import sys\nsys.seen += ['its body runs']\nimport torch.part", "torch/part": ""}
    )
    begin = (
        "import importlib.util, sys\nfrom headway.instrument.imports import ImportWatch\nsys.seen = []\n"
        "sys.meta_path.insert(0, ImportWatch('torch', lambda watch: sys.seen.append('torch is asked for')))\n"
    )
    told = python("-c", f"{begin}{code}\nprint(sys.seen)", path=str(tmp_path), environ={"HEADWAY_DISABLE": "1"})
    assert told == f"{expected}\n"


def test_a_process_that_only_asks_for_torch_writes_no_journal(home: Path) -> None:
    python("-c", "import importlib.util\nassert importlib.util.find_spec('torch')")
    assert not list(home.rglob("*.hwj"))


FORKING = """\
import os, sys, threading, time
from headway.instrument.start import watch
sys.go = threading.Event()
thread = threading.Thread(target=__import__, args=("slow",))
thread.start()
while thread.ident not in watch._inside:
    time.sleep(0.01)
import forking
if not forking.child:
    os._exit(bool(watch._inside or watch._busy))
sys.go.set()
print(os.waitpid(forking.child, 0)[1])
"""


def test_a_forked_child_forgets_the_threads_of_its_parent(home: Path) -> None:
    write(home, {"forking": "import os\nchild = os.fork()\n", "slow": "import sys\nsys.go.wait(120)\n"})
    assert python("-c", FORKING, path=str(home)) == "0\n"
