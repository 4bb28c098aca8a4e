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


def test_imported_code_counts_and_what_is_installed_or_not_imported_yet_does_not(tmp_path: Path) -> None:
    installed = tmp_path / "env" / "site-packages"
    installed.mkdir(parents=True)
    files = {name: tmp_path / f"{name}.py" for name in ("recipe_of_parts", "part_of_it", "part_for_later")}
    files["part_installed"] = installed / "part_installed.py"
    for path in files.values():
        path.write_text("VALUE = 1\n")
    files["recipe_of_parts"].write_text(
        f"import sys; sys.path.append({str(installed)!r})\nimport part_of_it, part_installed\n"
        "def f(): import part_for_later\n"
    )
    names = ["recipe_of_parts.py:f", "safetensors"]
    run = named.function_named(names[0], str(tmp_path))
    before = named.imported(names, str(tmp_path))
    for name, counts in (("part_installed", False), ("part_for_later", False), ("part_of_it", True)):
        files[name].write_text("VALUE = 2\n")
        assert (named.imported(names, str(tmp_path)) != before) == counts, name
    now = named.imported(names, str(tmp_path))
    run()
    assert named.imported(names, str(tmp_path)) != now, "once it is imported, it counts"
    assert named.imported(names[1:], str(tmp_path)) == named.imported([], "/")


def test_modules_of_a_named_package_count_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "package_of_recipes"
    package.mkdir(parents=True)
    for name, text in (("__init__", ""), ("parts", ""), ("recipes", "from . import parts\ndef f(): pass\n")):
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(package.parent)
    names, elsewhere = ["package_of_recipes.recipes:f"], str(tmp_path / "elsewhere")
    named.function_named(names[0], elsewhere)
    before = named.imported(names, elsewhere)
    (package / "parts.py").write_text("VALUE = 2\n")
    assert named.imported(names, elsewhere) != before


def test_a_digest_changes_with_the_file_and_with_the_name(tmp_path: Path) -> None:
    path = tmp_path / "changing_recipe.py"
    path.write_text("def f(): pass\n")
    before = named.digest(["changing_recipe.py:f"], str(tmp_path))
    assert named.digest(["changing_recipe.py:f"], str(tmp_path)) == before
    assert named.digest(["changing_recipe.py:g"], str(tmp_path)) != before
    path.write_text("def f(): return 1\n")
    assert named.digest(["changing_recipe.py:f"], str(tmp_path)) != before
    assert named.digest(["safetensors"], str(tmp_path)) != named.digest(["export"], str(tmp_path))
