"""The shape of the project: who imports whom, what is public, what an import costs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import headway

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headway"
STANDARD_LIBRARY_ONLY = ("events", "accounting", "collect", "instrument", "recover", "run", "config", "paths", "errors")


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """All modules a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names if node.module == "headway"}
    return found


def drawn_map() -> dict[str, set[str]]:
    drawn: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        room = room_of(path)
        if room == "__init__":
            continue
        rooms = {name.split(".")[1] for name in imports(path) if name.startswith("headway.")}
        drawn.setdefault(room, set()).update(
            other for other in rooms - {room} if (SOURCE / other).exists() or (SOURCE / f"{other}.py").exists()
        )
    return drawn


def documented_map() -> dict[str, set[str]]:
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    block = re.search(r"```imports\n(.*?)```", text, re.S)
    assert block, "docs/how-it-works.md has no import map"
    lines = (line.split("->") for line in block[1].strip().splitlines())
    return {left.strip(): set(right.split()) for left, right in lines}


def test_rooms_import_each_other_as_the_docs_say() -> None:
    assert drawn_map() == documented_map()


def test_no_two_rooms_import_each_other() -> None:
    drawn = drawn_map()
    assert [(a, b) for a in drawn for b in drawn[a] if a in drawn.get(b, ())] == []


def test_what_runs_inside_a_job_needs_the_standard_library_alone() -> None:
    for path in SOURCE.rglob("*.py"):
        if room_of(path) in STANDARD_LIBRARY_ONLY:
            own = {"headway", "sitecustomize"}
            outside = {name.split(".")[0] for name in imports(path)} - own - sys.stdlib_module_names
            assert not outside, f"{path.relative_to(ROOT)} imports {outside}"


def test_the_public_names_are_these() -> None:
    assert headway.__all__ == [
        "Activity", "Checkpointer", "HeadwayError", "InputError", "PlatformError", "Publish", "Run", "Served",
        "StageError", "Startup", "UnknownJob", "__version__", "compile_cache", "current", "fast_batch", "read_ahead",
    ]  # fmt: skip
    assert all(getattr(headway, name) is not None for name in headway.__all__)


def test_importing_headway_imports_no_torch_and_no_third_party_package() -> None:
    code = "import sys, headway; headway.current; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": str(SOURCE.parent)})  # fmt: skip
    loaded = set(done.stdout.split()) - {"headway", "__main__"}
    assert loaded <= sys.stdlib_module_names
