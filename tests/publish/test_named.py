"""Functions by name: in a file, or in a module."""

from pathlib import Path

import pytest

from headway.errors import InputError
from headway.publish import named


def test_a_function_in_a_file_can_import_what_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_the_recipe.py").write_text("VALUE = 42\n")
    (tmp_path / "some_recipe.py").write_text("from beside_the_recipe import VALUE\n\ndef f():\n    return VALUE\n")
    assert named.function_named("some_recipe.py:f", str(tmp_path))() == 42
    assert named.function_named(f"{tmp_path}/some_recipe.py:f", "/")() == 42


def test_a_function_in_a_module_is_looked_for_where_the_trainer_ran(tmp_path: Path) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "recipes.py").write_text("class A:\n    @staticmethod\n    def f():\n        return 7\n")
    assert named.function_named("some_package.recipes:A.f", str(tmp_path))() == 7


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("publish", "names no function. Write it as file.py:function"),
        (":f", "names no function"),
        ("missing.py:f", "there is no file"),
        ("no_such_module_here:f", "there is no module no_such_module_here"),
        ("json:no_such", "there is no no_such to be called"),
        ("json:__doc__", "there is no __doc__ to be called"),
    ],
)
def test_what_is_no_function_is_told(tmp_path: Path, name: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        named.function_named(name, str(tmp_path))


def test_an_error_inside_a_recipe_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "broken_recipe.py").write_text("import no_such_module_either\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_either"):
        named.function_named("broken_recipe.py:f", str(tmp_path))
    (tmp_path / "broken_recipe.py").write_text("open('/no/such/file')\n")
    with pytest.raises(FileNotFoundError):
        named.function_named("broken_recipe.py:f", str(tmp_path))


def test_a_missing_file_is_seen_without_running_anything(tmp_path: Path) -> None:
    (tmp_path / "recipe_that_raises.py").write_text("raise RuntimeError\n")
    named.check_named("recipe_that_raises.py:f", str(tmp_path))
    with pytest.raises(InputError, match="there is no file"):
        named.check_named("missing.py:f", str(tmp_path))
    with pytest.raises(InputError, match="names no function"):
        named.check_named("recipe_that_raises.py", str(tmp_path))


def test_a_digest_changes_with_the_file_and_with_the_name(tmp_path: Path) -> None:
    path = tmp_path / "changing_recipe.py"
    path.write_text("def f(): pass\n")
    before = named.digest(["changing_recipe.py:f"], str(tmp_path))
    assert named.digest(["changing_recipe.py:f"], str(tmp_path)) == before
    assert named.digest(["changing_recipe.py:g"], str(tmp_path)) != before
    path.write_text("def f(): return 1\n")
    assert named.digest(["changing_recipe.py:f"], str(tmp_path)) != before
    assert named.digest(["safetensors"], str(tmp_path)) != named.digest(["export"], str(tmp_path))
