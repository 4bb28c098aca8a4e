"""`headway compile autotune` on real stores and real journals."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headway.cli import main
from headway.compile.autotune import CONFIGS, Timings, configs_in
from headway.compile.bundle import Member
from headway.compile.store import Store
from headway.compile.trust import Keys

KEY = "ab12" * 8
BLOCKS = [f"triton.Config({{'BLOCK': {size}}}, num_warps=4, num_stages=3)" for size in (16, 32, 64, 128)]
MATMUL = Timings(
    kernel="matmul-1f2e3d4c", kind="triton", benchmarks=8, seconds=3.25,
    ms={"n=100": dict(zip(BLOCKS, (1.0, 1.04, 2.0, 3.0), strict=True)),
        "n=900": dict(zip(BLOCKS, (4.0, 2.0, 1.02, 1.0), strict=True))},
)  # fmt: skip
BMM = Timings(
    kernel="inductor.bmm.cpu.float32",
    kind="inductor",
    ms={"[2, 3]": {"bmm": 1.0, "cpp": 2.0}},
    benchmarks=2,
    seconds=9.5,
)


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["compile", "autotune", *map(str, words)], env={"COLUMNS": "120"})


def put(home: Path, name: str, data: bytes, saved_ns: int = 1) -> Store:
    """Saves a member, as another job than the last."""
    store = Store(str(home / "compile"), keys=Keys.at(home / "keys"))
    store.save(KEY, {name: Member(data=data, saved_ns=saved_ns)}, {"torch": "2.13.0"}, os.urandom(4).hex())
    return store


@pytest.fixture
def store(home: Path) -> Store:
    """A bundle with the tables of two kernels."""
    put(home, MATMUL.member, MATMUL.as_bytes())
    return put(home, BMM.member, BMM.as_bytes())


def words(store: Store) -> tuple[str, ...]:
    return "--store", store.url, "--key", KEY[:8]


def a_job(name: str, marks: str) -> None:
    """Runs a program that is a job, and marks what it is told to."""
    program = f"import headway\nrun = headway.current()\n{marks}\n"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env={**os.environ, "HEADWAY_JOB": name})


def test_kernels_that_cost_most_come_first_with_how_few_configs_do(store: Store) -> None:
    told = run(*words(store))
    assert told.exit_code == 0, told.output
    header, first, second = told.output.splitlines()
    assert header.split() == ["kernel", "tuning", "benchmarks", "keys", "configs", "enough", "saved", "slower", "by"]
    assert first.split() == ["inductor.bmm.cpu.float32", "9.50", "s", "2", "1", "2", "1", "50%", "≤", "0.0%"]
    assert second.split() == ["matmul-1f2e3d4c", "3.25", "s", "8", "2", "4", "2", "50%", "≤", "0.0%"]


def test_a_looser_regret_takes_fewer(store: Store) -> None:
    rows = json.loads(run(*words(store), "--json", "--regret", "100").output)
    assert [len(row["kept"]) for row in rows] == [1, 1]
    matmul = rows[1]
    assert matmul["kept"] == [BLOCKS[1]]
    assert (matmul["saved_percent"], matmul["regret_percent"]) == (75.0, 100.0)
    assert [len(row["kept"]) for row in json.loads(run(*words(store), "--json", "--regret", "0").output)] == [1, 2]


def test_apply_stores_the_sets_and_a_second_apply_replaces_them(store: Store) -> None:
    told = run(*words(store), "--apply")
    assert f"Stored sets for 2 kernels with {KEY[:12]} in {store.url}" in told.output
    stored = configs_in(store.load(KEY).members[CONFIGS].data)
    assert stored["inductor.bmm.cpu.float32"] == ["bmm"]
    assert len(stored["matmul-1f2e3d4c"]) == 2
    assert "Nothing to store: these are the sets that the bundle has." in run(*words(store), "--apply").output
    run(*words(store), "--apply", "--regret", "100")
    loaded = store.load(KEY)
    assert configs_in(loaded.members[CONFIGS].data)["matmul-1f2e3d4c"] == [BLOCKS[1]]
    assert loaded.about == {"torch": "2.13.0"}
    assert {MATMUL.member, BMM.member} < set(loaded.members)


def test_apply_keeps_the_sets_of_kernels_that_were_not_tuned_again(home: Path, store: Store) -> None:
    other = json.dumps({"other-00000000": ["A"]}).encode()
    put(home, CONFIGS, other, 1 << 62)  # by a clock that is far ahead
    run(*words(store), "--apply")
    stored = configs_in(store.load(KEY).members[CONFIGS].data)
    assert stored["other-00000000"] == ["A"]
    assert len(stored) == 3


def test_damaged_sets_are_written_anew(home: Path, store: Store) -> None:
    put(home, CONFIGS, b"?")
    assert run(*words(store), "--apply").exit_code == 0
    assert len(configs_in(store.load(KEY).members[CONFIGS].data)) == 2


def test_export_is_python_to_paste(store: Store) -> None:
    told = run(*words(store), "--export").output
    lines = told.splitlines()
    assert lines[0].startswith("# inductor.bmm.cpu.float32: 1 of 2 configs")
    assert lines[1] == "# matmul-1f2e3d4c: 2 of 4 configs, at most 0.0% slower"
    call = ast.parse(f"triton.autotune(\n{told}\nkey=[])").body[0].value  # type: ignore[attr-defined]
    assert [ast.unparse(each) for each in call.keywords[0].value.elts] == [BLOCKS[0], BLOCKS[3]]
    assert call.keywords[0].arg == "configs"


def test_a_jobs_bundle_is_found_through_its_journal(store: Store) -> None:
    a_job("none", "pass")
    a_job(
        "tuned",
        f"run.mark('compile_cache', outcome='miss', key={'0' * 32!r}, url={store.url!r}, about='{{}}')\n"
        f"run.mark('compile_cache', outcome='hit', key={KEY!r}, url={store.url!r}, about='{{}}')\n"
        f"run.mark('compile_cache', outcome='saved', key={KEY!r})",
    )
    for named in (["tuned"], []):
        told = run(*named)
        assert told.exit_code == 0, told.output
        assert "matmul-1f2e3d4c" in told.output
    told = run("none")
    assert told.exit_code == 1
    assert "job 'none' used no compile cache" in told.output
    assert "no job 'tunde'" in run("tunde").output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--regret", "-1"], "--regret is -1."),
        (["--regret", "nan"], "--regret is nan."),
        (["--store", "x"], "both --store URL and --key KEY"),
        (["--key", "x"], "both --store URL and --key KEY"),
        (["job", "--store", "x", "--key", "y"], "give a job, or both"),
        (["--store", "nowhere", "--key", "abcd"], "no keys in"),
    ],
)
def test_what_cannot_be_used_is_said_in_words(home: Path, given: list[str], said: str) -> None:
    told = run(*given)
    assert told.exit_code == 1
    assert said in told.output
    assert "Traceback" not in told.output


def test_a_bundle_without_timings_says_how_to_get_them(home: Path) -> None:
    told = run(*words(put(home, "file/x", b"x")))
    assert told.exit_code == 1
    assert "has no autotune timings" in told.output


def test_a_damaged_table_is_named_and_the_others_are_used(home: Path, store: Store) -> None:
    put(home, "timings/bad.json", b"\x1b[31m?")
    told = run(*words(store))
    assert told.exit_code == 0
    assert "! timings/bad.json: a table of autotune timings cannot be read" in told.output
    assert "\x1b" not in told.output
    assert "matmul-1f2e3d4c" in told.output


def test_no_torch_is_needed(store: Store) -> None:
    program = "import sys; sys.modules['torch'] = None; from headway.cli import main; main()"
    command = [sys.executable, "-c", program, "compile", "autotune", *words(store)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
