"""Patches that can be undone, and hooks that cannot hurt."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running import HEADWAY, python

from headway.instrument import hooks, patches
from headway.instrument.patches import Patch, around, guarded, parameters


def test_gradients_that_are_off_are_a_sign_of_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "torch", None)
    session: Any = SimpleNamespace(tracker=SimpleNamespace())
    hooks._torch(session, torch)
    assert session.gradients_on()
    with torch.no_grad():
        assert not session.gradients_on()
        assert not session.tracker.gradients_on()


class Library:
    """Something to be patched."""

    def plain(self, x: int, y: int = 2) -> int:
        return x + y

    @classmethod
    def of_class(cls, x: int) -> str:
        return f"{cls.__name__} {x}"

    @staticmethod
    def static(x: int) -> int:
        return -x


@pytest.fixture
def said() -> list[str]:
    return []


def patched(said: list[str], owner: Any, name: str, before: Any = None, after: Any = None) -> Patch:
    patch = Patch(name, owner, name, lambda patch, error: said.append(f"{patch.what}: {error}"))
    patch.put(around(patch, before or (lambda *a, **k: None), after or (lambda token, result, error: None)))
    return patch


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("plain", lambda: Library().plain(1, y=3)),
        ("of_class", lambda: Library.of_class(2)),
        ("static", lambda: Library.static(3)),
    ],
)
def test_every_kind_of_function_can_be_patched_and_given_back(said: list[str], name: str, call: Any) -> None:
    plain, seen = call(), []
    was = vars(Library)[name]
    patch = patched(said, Library, name, after=lambda token, result, error: seen.append(result))
    assert call() == plain
    assert seen == [plain]
    patch.undo()
    assert vars(Library)[name] is was
    assert call() == plain
    assert seen == [plain]


def test_a_method_that_an_object_inherits_is_given_back_to_its_class(said: list[str]) -> None:
    library = Library()
    patch = patched(said, library, "plain")
    assert "plain" in vars(library)
    patch.undo()
    assert "plain" not in vars(library)
    assert library.plain(1) == 3


def test_a_patch_over_ours_is_left_in_place(said: list[str]) -> None:
    library = SimpleNamespace(f=lambda: 1)
    seen: list[int] = []
    patch = patched(said, library, "f", after=lambda token, result, error: seen.append(result))
    ours = library.f
    library.f = lambda: ours() + 1
    patch.undo()
    assert library.f() == 2
    assert not seen  # ours is still called, and silent


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_hook_that_raises_is_taken_out_and_told_of_once(said: list[str], place: str) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("oh")

    library = Library()
    patch = patched(said, library, "plain", **{place: broken})
    assert [library.plain(1) for _ in range(3)] == [3, 3, 3]
    assert said == ["plain: oh"]
    assert patch.state == "failed: ZeroDivisionError: oh"


def test_what_the_function_raises_comes_through_as_it_was(said: list[str]) -> None:
    problem, seen = ValueError("the user's own"), []

    def raises() -> None:
        raise problem

    library = SimpleNamespace(f=raises)
    patched(said, library, "f", after=lambda token, result, error: seen.append(error))
    with pytest.raises(ValueError, match="the user's own") as caught:
        library.f()
    assert caught.value is problem
    assert problem.__cause__ is None and problem.__context__ is None  # noqa: PT018
    assert seen == [problem]


def test_a_guarded_callback_is_called_no_more_once_it_raised(said: list[str]) -> None:
    calls: list[int] = []
    patch = patched(said, SimpleNamespace(f=len), "f")

    def hook(number: int) -> None:
        calls.append(number)
        raise RuntimeError("no")

    call = guarded(patch, hook)
    assert [call(number) for number in range(3)] == [None, None, None]
    assert calls == [0]
    assert len(said) == 1


def test_signatures_are_read_through_wrappers(said: list[str]) -> None:
    assert parameters(Library.plain) == ("self", "x", "y")
    assert parameters(vars(Library)["of_class"]) == ("cls", "x")
    patch = patched(said, Library, "plain")
    assert parameters(Library.plain) == ("self", "x", "y")
    patch.undo()
    assert parameters(len) == ()


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)


def test_a_dataset_class_that_travels_arrives_without_the_hook(home: Path) -> None:
    code = (
        "import pickle, torch\nfrom torch.utils.data import Dataset\n"
        "class Mine(Dataset):\n    def __init__(self, n): self.n = n\n"
        "assert hasattr(Mine.__init__, '__wrapped__')\n"
        "assert Mine(3).n == 3\n"
        "import inspect\nassert list(inspect.signature(Mine).parameters) == ['n']\n"
        "assert inspect.getfullargspec(Mine.__init__).args == ['self', 'n']\n"
        "print(pickle.loads(pickle.dumps(Mine(4))).n)\n"
    )
    assert python("-c", code) == "4\n"


# --- doctor --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_doctor_lists_every_hook_and_finds_them_all_in_place(home: Path) -> None:
    done = subprocess.run([*HEADWAY, "doctor", "--json"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    hooks = json.loads(done.stdout)["hooks"]
    assert hooks["torch.utils.data.dataloader._BaseDataLoaderIter.__next__"] == "on"
    assert hooks["torch._dynamo.callback.CompilationCallbackHandler.clear"] == "on"
    assert set(hooks.values()) <= {"on", "off", "not installed"}


def test_the_doctor_finds_what_a_torch_has_changed(home: Path) -> None:
    """A torch of our own making, whose loader takes other arguments and has no iterator of the known name."""
    files = dict.fromkeys(("utils/__init__", "utils/data/__init__"), "")
    files["__init__"] = "__version__ = '9.9'\nis_grad_enabled = bool\nimport torch.utils.data.dataloader\n"
    files["utils/data/dataloader"] = "class DataLoader:\n    def __init__(self, other): pass\n"
    write(home / "torch", files)
    environ = os.environ | {"PYTHONPATH": str(home)}
    done = subprocess.run([*HEADWAY, "doctor", "--json"], capture_output=True, text=True, env=environ, timeout=500)
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["torch"] == "9.9"
    assert found["hooks"]["torch.utils.data.dataloader.DataLoader.__init__"] == "skipped: it takes self, other"
    assert "AttributeError" in found["hooks"]["torch.utils.data.dataloader"]


def test_the_doctor_needs_a_python_with_torch(home: Path) -> None:
    done = subprocess.run([*HEADWAY, "doctor", "--python", "/bin/false"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "name the one that runs your jobs with --python" in done.stderr
