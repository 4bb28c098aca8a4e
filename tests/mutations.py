"""`make mutations`: break lines drawn at random, one at a time, and see whether the package's tests notice.

    make mutations                   # 12 lines, drawn with the commit's hash as seed
    make mutations ARGS="12 7"       # 12 others: drawn with another seed
    make mutations ARGS="12 7 all"   # with that package's part of make test-all

It changes the sources in place, one file at a time, puts them back, and prints each broken line with the test that
caught it. If it is killed, `git checkout src` puts them back.
"""

import ast
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

MISSED = "missed"
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
}  # fmt: skip


class Mutation(NamedTuple):
    """One statement as it was, and as it is broken."""

    path: Path
    line: int
    before: str
    after: str
    source: str
    """The whole file, broken."""


def mutation_of(path: Path, chance: random.Random) -> Mutation | None:
    """Break one statement of a file; None if the file has none that could be broken."""
    tree = ast.parse(path.read_text())
    changes = list(_changes(tree))
    if not changes:
        return None
    statement, change = chance.choice(changes)
    before = ast.unparse(statement)
    change()
    return Mutation(path, statement.lineno, before, ast.unparse(statement), ast.unparse(tree))


def _changes(tree: ast.AST) -> Iterator[tuple[ast.stmt, Callable[[], None]]]:
    """Each change that can be made to a tree, with the statement it is made to."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call | ast.Await):
            yield statement, _set(statement, "value", ast.Constant(value=None))
        elif isinstance(statement, ast.stmt) and not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield from ((statement, change) for node in _own_nodes(statement) for change in _changes_of(node))


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without the statements in its body."""
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        yield node
        todo += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def _changes_of(node: ast.AST) -> Iterator[Callable[[], None]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        yield _set(node, "ops", [_SWAPS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in _SWAPS:
        yield _set(node, "op", _SWAPS[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _set(node, "op", ast.UAdd())
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield _set(node, "value", not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield _set(node, "value", ast.Constant(value=None))


def _set(node: ast.AST, field: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, field, value)


def drawn(count: int, seed: str) -> Iterator[Mutation]:
    """Mutations drawn at random. Files are drawn by their size, each at most once."""
    chance = random.Random(seed)
    files = sorted(Path("src/headway").rglob("*.py"))
    while count and files:
        path = chance.choices(files, [file.stat().st_size for file in files])[0]
        files.remove(path)
        if (mutation := mutation_of(path, chance)) is not None:
            count -= 1
            yield mutation


def caught_by(mutation: Mutation, everything: bool) -> str:
    """Run the tests of a mutation's package. Return the first one that fails, or `missed`."""
    folder = Path("tests", mutation.path.parts[2])
    tests = [folder] if folder.is_dir() else [*Path("tests").glob("test_*.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "4", "--dist", "loadgroup", *map(str, tests)]
    command += [] if everything else ["-m", "not thorough"]
    intact = mutation.path.read_bytes()
    try:
        mutation.path.write_text(mutation.source)
        run = subprocess.run(command, capture_output=True, text=True)
    finally:
        mutation.path.write_bytes(intact)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.M)
    return failed[1] if failed else MISSED if run.returncode == 0 else (run.stdout + run.stderr)[-300:]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    if _git("status", "--porcelain", "src"):
        sys.exit("src has changes that are not committed: commit them, or run this in a clone.")
    count, seed = (*sys.argv[1:3], *("12", _git("rev-parse", "HEAD"))[len(sys.argv[1:3]) :])
    missed = 0
    for mutation in drawn(int(count), seed):
        print(f"{mutation.path}:{mutation.line}", *_difference(mutation), sep="\n  ", flush=True)
        test = caught_by(mutation, everything="all" in sys.argv[3:])
        missed += test == MISSED
        print(f"  {test}", flush=True)
    print(f"{missed} of {count} were missed (seed {seed})")
    return 1 if missed else 0


def _difference(mutation: Mutation) -> list[str]:
    pairs = zip(mutation.before.splitlines(), mutation.after.splitlines(), strict=False)
    return next(([f"- {before}", f"+ {after}"] for before, after in pairs if before != after), [])


if __name__ == "__main__":
    sys.exit(main())
