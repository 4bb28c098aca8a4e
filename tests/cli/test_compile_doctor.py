"""`headway compile doctor` on real jobs, and what a value it prints does in the next."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headway.cli import main
from headway.compile.store import Store
from headway.compile.trust import Keys
from headway.paths import jobs_in
from headway.testing import Story

HEADWAY = [sys.executable, "-P", "-m", "headway"]
RAGGED = Path(__file__).parent.parent.parent / "examples" / "ragged.py"
VARIABLE = "TORCH_COMPILE_DYNAMIC_SOURCES"
KEY = "0123456789abcdef"


def doctor(*words: str | Path, code: int = 0) -> Result:
    """The command on a job that has run."""
    done = CliRunner().invoke(main, ["compile", "doctor", *map(str, words)], env={"COLUMNS": "100"})
    assert done.exit_code == code, done.output
    return done


def run(*words: str | Path, code: int = 0, **environ: str) -> "subprocess.CompletedProcess[str]":
    """The command with a command of its own."""
    given = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"} | environ
    command = [*HEADWAY, "compile", "doctor", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=given, timeout=500)
    assert done.returncode == code, done.stderr
    return done


def found(*words: str | Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(doctor(*words[:1], "--json", *words[1:]).stdout)
    return told


def recompiled(home: Path, source: str = "L['x']", now: int = 7, cache: Path | None = None) -> str:
    """A job that has compiled twice."""
    rank = Story(home, f"job-{now}").rank().steps(5, each=1.0)
    if cache is not None:
        about = json.dumps({"torch": "2.13.0"})
        rank.recorder.mark("compile_cache", outcome="miss", key=KEY, url=str(cache), about=about)
    forward = "forward (train.py:14)"
    change = {"function": forward, "source": source, "kind": "size", "dim": 0, "seen": [4], "now": now, "dims": True}
    rank.recorder.mark("compiled", id="0/0", function=forward, seconds=9.0, reason="")
    rank.recorder.mark("source_changed", id="0/1", **change)
    rank.recorder.mark("compiled", id="0/1", function=forward, seconds=5.0, reason="size mismatch")
    rank.steps(5, each=1.0).finished()
    return f"job-{now}"


@pytest.mark.thorough
def test_a_ragged_job_compiles_once_with_the_value_that_is_printed(home: Path) -> None:
    before = run("--", sys.executable, RAGGED, "eager")
    (job,) = jobs_in(home)
    assert f"job {job}: 8 compilations" in before.stdout
    assert "7 of them again" in before.stdout
    for number, name in enumerate(("clicks", "likes", "views", "shares", "queries", "carts")):
        assert f"L['ids']['{name}'] size 0: {40 + number}, {41 + 2 * number}\n" in before.stdout
    assert "L['k']: 4, 6\n" in before.stdout
    assert f"forward ({RAGGED}:32)" in before.stdout
    (export,) = [line for line in before.stdout.splitlines() if line.startswith(f"  export {VARIABLE}=")]
    script = f"{export}\nexec {shlex.join(HEADWAY)} compile doctor --json -- {sys.executable} {RAGGED} eager"
    after = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=500, check=True)
    told = json.loads(after.stdout)
    assert (told["compilations"], told["recompiles"], told["value"]) == (1, [], "")


@pytest.mark.thorough
def test_a_value_that_is_applied_spares_the_next_run_its_recompiles(home: Path) -> None:
    script = home / "cached.py"
    imports = f"import sys; sys.path.insert(0, {str(RAGGED.parent)!r})\nimport headway\n"
    script.write_text(
        imports + f"headway.compile_cache({str(home / 'cache')!r})\nimport ragged\nragged.main('eager')\n"
    )
    words = ["--apply", "--json", "--", sys.executable, script]
    counts = [json.loads(run(*words).stdout)["compilations"] for _ in range(2)]
    assert counts == [8, 1]  # `forward` calls `super().forward`, where what torch remembers itself is of no use


def test_a_commands_output_exit_code_and_signals_are_its_own(home: Path) -> None:
    done = run("--", sys.executable, "-c", "print('out'); raise SystemExit(3)", code=3)
    assert done.stdout.startswith("out\n")
    assert "compiled nothing" in done.stdout
    done = run("--json", "--", "sh", "-c", "echo out; kill -9 $$", code=137)
    assert done.stderr == "out\n"
    assert json.loads(done.stdout)["compilations"] == 0
    assert "cannot run no-such-command" in run("--", "no-such-command", code=127).stderr


def catches_sigterm(pid: int) -> bool:
    """Whether the doctor has its handlers, of which this is the last: it starts the command before."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_an_interrupted_command_is_reported(home: Path) -> None:
    ready = home / "ready"
    script = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(600)"
    command = [*HEADWAY, "compile", "doctor", "--", sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        while not (ready.exists() and catches_sigterm(child.pid)):
            assert child.poll() is None
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGINT)
        said, _ = child.communicate(timeout=120)
    assert "compiled nothing" in said
    assert child.returncode == 128 + signal.SIGINT


def test_the_json_has_all_of_it(home: Path) -> None:
    told = found(recompiled(home))
    assert list(told) == [
        "job", "compilations", "compiling_s", "lost_s", "recompiles", "graph_breaks", "cache_hits", "caches", "traces",
        "given", "sources", "variable", "value", "mark_dynamic",
    ]  # fmt: skip
    assert (told["compilations"], told["lost_s"], told["value"]) == (2, 5.0, "L['x']:0")
    (each,) = told["recompiles"]
    assert (each["function"], each["cause"]) == ("forward (train.py:14)", "a size changed")
    assert each["changes"][0]["values"] == [4, 7]


def test_without_a_name_the_last_job_is_meant(home: Path) -> None:
    recompiled(home, now=7)
    time.sleep(0.02)
    recompiled(home, now=8)
    assert found()["job"] == "job-8"


def test_a_value_that_a_shell_would_read_otherwise_is_quoted(home: Path) -> None:
    said = doctor(recompiled(home, source="L['d']['a$HOME, `b`']")).stdout
    (export,) = [line for line in said.splitlines() if "export" in line]
    shell = subprocess.run(["sh", "-c", f"{export}\nprintenv {VARIABLE}"], capture_output=True, text=True, check=True)
    assert shell.stdout == "L\\['d'\\]\\['a\\$HOME\\x2c\\x20`b`'\\]$:0\n"


def test_apply_stores_the_value_and_adds_to_what_is_there(home: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    said = doctor(recompiled(home, cache=cache), "--apply").stdout
    assert said.endswith(f"Stored 1 sources with {KEY[:12]} in {cache}: the next run starts with them.\n")
    doctor(recompiled(home, "L['y']", now=8, cache=cache), "--apply", "--json")
    loaded = Store(str(cache), keys=Keys.at(home / "keys")).load(KEY)
    assert json.loads(loaded.members["sources.json"].data) == {"sources": ["L['x']:0", "L['y']:0"]}
    assert loaded.about == {"torch": "2.13.0"}
    assert loaded.problems == []


def test_apply_without_a_cache_says_what_to_do_and_prints_the_value(home: Path) -> None:
    said = doctor(recompiled(home), "--apply", code=1).stderr
    assert "--compile-cache" in said
    assert f"export {VARIABLE}=\"L['x']:0\"" in said


def test_apply_with_nothing_to_apply_is_no_error(home: Path) -> None:
    Story(home, "plain").rank().steps(5, each=1.0).finished()
    assert "Nothing to apply" in doctor("plain", "--apply").stdout


def test_a_job_and_a_command_are_one_too_many(home: Path) -> None:
    for words in (["job", "--", "true"], ["--"]):
        assert "one of the two" in doctor(*words, code=1).stderr
    assert jobs_in(home) == []


def test_an_unknown_job_or_command_is_told_with_the_nearest(home: Path) -> None:
    job = recompiled(home)
    assert f"did you mean {job}?" in doctor("job-77", code=1).stderr
    done = subprocess.run([*HEADWAY, "compile", "docter"], capture_output=True, text=True)
    assert "did you mean doctor?" in done.stderr


def test_torchs_trace_and_caches_and_breaks_are_told(home: Path) -> None:
    rank = Story(home, "told").rank()
    rank.recorder.mark("compile_settings", trace="/traces/my job", sources="")
    rank.recorder.mark("graph_cache", id="0/0", cache="FX graph", state="bypass", reason="Can't cache cond")
    rank.recorder.mark("compiled", id="0/0", function="forward (train.py:14)", seconds=9.0, reason="")
    rank.recorder.mark("graph_break", where="forward (train.py:20)", reason="Failed to trace builtin operator")
    rank.steps(5, each=1.0).finished()
    said = doctor("told").stdout
    assert "tlparse '/traces/my job' --latest -o tl_out" in said
    assert "FX graph bypass 1x  forward (train.py:14)  Can't cache cond" in said
    assert "  forward (train.py:20)\n      Failed to trace builtin operator" in said


@pytest.mark.parametrize("words", [["report", "job-7"], ["report", "job-7", "--json"]])
def test_the_report_sends_its_reader_here(home: Path, words: list[str]) -> None:
    rank = Story(home, "job-7").rank().steps(20, each=1.0).span("pt2_compilation", 5)
    rank.recorder.mark("compiled", id="0/1", function="forward (train.py:14)", seconds=5.0, reason="n == 2")
    rank.steps(5, each=1.0).finished()
    assert "headway compile doctor job-7" in CliRunner().invoke(main, words).stdout


def test_no_torch_is_needed(home: Path) -> None:
    script = "import sys; sys.modules['torch'] = None; from headway.cli import main; main()"
    job = recompiled(home)
    done = subprocess.run([sys.executable, "-c", script, "compile", "doctor", job], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
