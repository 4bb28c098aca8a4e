import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from headway.observe.summary import summary
from headway.publish.card import card
from headway.testing import Story

HOSTILE = "a|b `c` **d** [e](http://f) <script>g</script> | --- |\n\n# h\n```\n![i](j) _k_ \\| \x1b[2J &amp; $x$"


def manifest(**changes: Any) -> dict[str, Any]:
    return {
        "name": "step-00000500-3f9a2c41-a1b2", "step": 500, "key": "3f9a2c41", "job": "dlrm",
        "published_ns": 1_700_000_000_000_000_000, "recipe": "safetensors,export,aotinductor",
        "anchor": {
            "job": "dlrm", "attempt": 2, "step": 500, "checkpoint": "step-00000500", "world_size": 16,
            "data": {"epoch": 1, "batches": 250}, "commit": "c0ffee" * 7, "dirty": True, "torch": "2.13.0",
            "saved_ns": 1_699_999_990_000_000_000,
        },
        "signature": {"inputs": {"dense": "float32[*, 13]", "ids": "int64[*]"}, "call": "*, []"},
        "checks": [
            {"name": "parity", "passed": True, "told": "4 batches, rtol 1e-05, atol 1e-08", "figures": {"worst": 3e-7}}
        ],
        "facts": {"tensors": 12, "seconds": {"weights": 0.25, "package": 31.5}},
        "files": {
            "weights/model.safetensors": {"bytes": 4_000_000, "xxh3": "ab" * 16},
            "program/my_package.pt2": {"bytes": 1000, "xxh3": "cd" * 16},
            "package/model.pt2": {"bytes": 2000, "xxh3": "ef" * 16},
        },
    } | changes  # fmt: skip


def parsed(markdown: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(markdown)


def headings(markdown: str) -> list[str]:
    tokens = parsed(markdown)
    return [tokens[at + 1].content for at, token in enumerate(tokens) if token.type == "heading_open"]


def tables(markdown: str) -> list[list[list[str]]]:
    """The cells of each table, as they are read."""
    found: list[list[list[str]]] = []
    cell = False
    for token in parsed(markdown):
        if token.type.startswith(("th_", "td_")):
            cell = token.nesting == 1
        match token.type:
            case "table_open":
                found.append([])
            case "tr_open":
                found[-1].append([])
            case "inline" if cell:
                found[-1][-1].append(_words(token))
    return found


def _words(token: Token) -> str:
    assert all(each.type in ("text", "text_special") for each in token.children or ()), token.children
    return "".join(each.content for each in token.children or ())


def code(markdown: str) -> list[str]:
    return [token.content for token in parsed(markdown) if token.type == "fence" and token.info == "python"]


def report(home: Path, job: str = "dlrm") -> dict[str, Any]:
    story = Story(home, job)
    story.rank().span("imports", 10).steps(50, each=1.0).saved(50).killed(seen=True)
    story.rank(start=100).restored(50).steps(50, each=1.0, first=50).saved(100).wait(5).finished()
    told: dict[str, Any] = json.loads(json.dumps(summary(story.ledger())))
    return told


def test_a_card_tells_what_it_is_and_where_it_comes_from(tmp_path: Path) -> None:
    told = card(manifest(), report(tmp_path))
    assert headings(told) == [
        "step-00000500-3f9a2c41-a1b2", "How to load it", "Where it comes from", "What its training took",
        "What was checked before it was published", "Signature", "Facts", "Files",
    ]  # fmt: skip
    origin = dict(tables(told)[0][1:])
    assert origin == {
        "job": "dlrm", "attempt": "2", "ranks": "16", "step": "500", "checkpoint": "step-00000500",
        "saved": "2023-11-14 22:13:10 UTC", "position in the data": "epoch 1, batches 250",
        "commit of the code": "c0ffee" * 7 + ", with changes that were not committed", "torch": "2.13.0",
        "recipe": "safetensors,export,aotinductor",
    }  # fmt: skip
    assert "published on 2023-11-14 22:13:20 UTC" in told


def test_a_card_has_the_ledger_of_the_job_in_the_words_of_its_report(tmp_path: Path) -> None:
    ledger = report(tmp_path)
    told = card(manifest(), ledger)
    for key in ("ett", "idleness", "failure"):
        assert f"{ledger[f'{key}_percent']:.1f}%" in told
    assert "Wall time 155.0 s, 2 attempts, 1 failure." in told
    rows = {bucket: (took, share) for bucket, took, share in tables(told)[1][1:]}
    assert rows.keys() == {bucket for bucket, took in ledger["ledger"].items() if took}
    assert rows["training.effective"] == ("100.0", f"{ledger['ett_percent']:.1f}%")
    assert sum(float(took) for took, _ in rows.values()) == pytest.approx(155.0)


def test_without_a_ledger_a_card_says_so() -> None:
    assert "The journal of the job was not there" in card(manifest(), None)


def test_checks_facts_and_files_are_told_with_their_figures() -> None:
    _, checks, inputs, facts, files = tables(card(manifest()))
    assert checks[1] == ["parity", "passed", "4 batches, rtol 1e-05, atol 1e-08", "worst 3e-07"]
    assert inputs == [["inputs", ""], ["dense", "float32[*, 13]"], ["ids", "int64[*]"]]
    assert facts[1:] == [["tensors", "12"], ["seconds", "weights 0.25, package 31.5"]]
    assert files[1:] == [
        ["package/model.pt2", "2,000", "ef" * 16],
        ["program/my_package.pt2", "1,000", "cd" * 16],
        ["weights/model.safetensors", "4,000,000", "ab" * 16],
    ]


def test_what_a_job_brought_in_stays_text(tmp_path: Path) -> None:
    ledger = report(tmp_path) | {"ledger": {HOSTILE: 3.0}, "notes": [HOSTILE]}
    told = card(
        manifest(
            name=HOSTILE, job=HOSTILE, recipe=HOSTILE, anchor={"job": HOSTILE, "data": {HOSTILE: HOSTILE}},
            checks=[{"name": HOSTILE, "passed": True, "told": HOSTILE, "figures": {HOSTILE: HOSTILE}}],
            facts={HOSTILE: HOSTILE}, signature={HOSTILE: HOSTILE}, files={HOSTILE: {"bytes": 1, "xxh3": HOSTILE}},
        ),
        ledger,
    )  # fmt: skip
    kept = " ".join(HOSTILE.replace("\x1b", " ").split())
    assert len(headings(told)) == 7  # nothing of it can be loaded
    cells = tables(told)
    assert [[len(row) for row in table] for table in cells] == [[2] * 5, [3] * 2, [4] * 2, [2] * 2, [2] * 2, [3] * 2]
    assert cells[0][1] == ["job", kept]
    assert cells[2][1] == [kept, "passed", kept, f"{kept} {kept}"]
    kinds = {child.type for token in parsed(told) for child in token.children or ()}
    assert kinds <= {"text", "text_special", "softbreak"}
    assert not any(token.type == "html_block" for token in parsed(told))
    assert "\x1b" not in told


def test_the_code_of_a_card_is_python_that_names_the_files() -> None:
    weights, program, package = code(card(manifest()))
    for each in (weights, program, package):
        ast.parse(each)
        assert "headway" not in each
    assert 'load_file("weights/model.safetensors")' in weights
    assert 'torch.export.load("program/my_package.pt2")' in program
    assert 'torch._inductor.aoti_load_package("package/model.pt2")' in package
    (quoted,) = code(card(manifest(files={'a"b\n.safetensors': {"bytes": 1, "xxh3": ""}})))
    ast.parse(quoted)


def test_the_code_for_weights_loads_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    layer = torch.nn.Linear(3, 2)
    state = layer.state_dict()
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    save_file(state, tmp_path / "one" / "model.safetensors")
    for number, (name, tensor) in enumerate(state.items(), 1):
        save_file({name: tensor}, tmp_path / "many" / f"model-{number:05d}-of-00002.safetensors")
    script = "import sys, torch\n"
    for folder in ("one", "many"):
        names = [path.relative_to(tmp_path).as_posix() for path in (tmp_path / folder).iterdir()]
        (told,) = code(card(manifest(files={name: {"bytes": 1, "xxh3": ""} for name in names})))
        script += f"model = torch.nn.Linear(3, 2)\n{told}\nprint(model.bias.tolist())\n"
    script += "assert 'headway' not in sys.modules"
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert [ast.literal_eval(line) for line in ran.stdout.splitlines()] == [layer.bias.tolist()] * 2


def test_the_card_needs_no_torch() -> None:
    script = "import sys; from headway.publish.card import card; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_of_very_many_weights_a_card_shows_the_first_and_counts_the_rest() -> None:
    told = card(manifest(signature={"weights": {f"table.{number}": "float32[9]" for number in range(1500)}}))
    assert "1,400 more are in version.json." in told
    assert len(tables(told)[2]) == 1 + 100


def test_a_version_of_which_little_is_known_has_a_card() -> None:
    told = card({"step": 3})
    assert headings(told)[0] == "step 3"
    assert "Nothing." in told
