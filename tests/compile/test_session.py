"""A process and its bundle: fresh machines that need no compiler, ranks that agree, stores that fail."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headway.compile.bundle import Member
from headway.compile.store import Store
from headway.events.job import JobReader
from headway.events.vocabulary import Mark, Told
from headway.paths import JobPaths

pytest.importorskip("torch")
pytestmark = pytest.mark.needs("g++")

PROGRAM = Path(__file__).with_name("compiling.py")


class Machine:
    """A folder that stands for a machine: with a cache, a temporary folder and a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("tmp", "home"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def start(self, rank: int = 0, ranks: int = 1, port: int = 0, **told: Any) -> "subprocess.Popen[str]":
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "TORCHIND"))}
        environ |= {
            "TMPDIR": str(self.folder / "tmp"), "HEADWAY_HOME": str(self.folder / "home"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"), "HEADWAY_JOB": "compiling",
        }  # fmt: skip
        if ranks > 1:
            environ |= {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)
            }  # fmt: skip
        through = told.pop("through", [])
        python = [sys.executable] if "run" not in through else []
        command = [*through, *python, str(PROGRAM), json.dumps(told)]
        return subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def run(self, **told: Any) -> dict[str, Any]:
        return answer(self.start(**told))

    def libraries(self) -> set[str]:
        return {path.name for path in (self.folder / "cache").rglob("*.so")}


def marks_of(machine: Machine) -> list[Mark]:
    """What the processes of its job have written down."""
    batches = [batch for _, batch in JobReader(JobPaths(machine.folder / "home", "compiling")).poll()]
    return [record for batch in batches for record in batch.records if isinstance(record, Mark)]


def answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    return answers(process)[-1]


def answers(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Machine, dict[str, Any]]:
    """A store that one machine has filled."""
    folder = tmp_path_factory.mktemp("first")
    machine = Machine(folder / "machine")
    return folder / "store", machine, machine.run(store=str(folder / "store"))


def test_hashes_of_torchs_sources_are_those_that_an_earlier_process_has_kept(
    first: tuple[Path, Machine, dict[str, Any]], tmp_path: Path
) -> None:
    store, machine, cold = first
    (kept,) = (machine.folder / "home" / "hashes").iterdir()
    other = Machine(tmp_path)
    (tmp_path / "home" / "hashes").mkdir()
    wrong = kept.read_text().replace('"torch_key": "', '"torch_key": "00')
    (tmp_path / "home" / "hashes" / kept.name).write_text(wrong)
    told = other.run(store=str(store))
    assert (told["hits"], told["misses"]) == (0, cold["misses"])  # so it was believed
    assert told["losses"] == cold["losses"]


def copied(store: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", store, to], check=True)
    return to


def test_a_fresh_machine_compiles_nothing_and_computes_the_same(
    first: tuple[Path, Machine, dict[str, Any]], tmp_path: Path
) -> None:
    store, machine, cold = first
    assert (cold["outcome"]["outcome"], cold["hits"]) == ("miss", 0)
    fresh = Machine(tmp_path)
    warm = fresh.run(store=str(store))
    assert warm["outcome"]["outcome"] == "hit", warm["outcome"]
    assert (warm["hits"], warm["misses"]) == (cold["misses"], 0)
    assert warm["losses"] == cold["losses"]
    assert fresh.libraries() <= machine.libraries()
    assert not list((tmp_path / "tmp").rglob("*.gch"))


def test_a_run_that_found_everything_saves_nothing(first: tuple[Path, Machine, dict[str, Any]], tmp_path: Path) -> None:
    store = copied(first[0], tmp_path / "store")
    before = sorted(path.name for path in store.rglob("*.bundle"))
    Machine(tmp_path / "machine").run(store=str(store))
    assert sorted(path.name for path in store.rglob("*.bundle")) == before


def test_several_saves_of_one_process_all_load(tmp_path: Path) -> None:
    cold = Machine(tmp_path / "one").run(store=str(tmp_path / "store"), second=True)
    warm = Machine(tmp_path / "two").run(store=str(tmp_path / "store"), second=True)
    assert (warm["hits"], warm["misses"]) == (cold["misses"], 0)
    assert warm["losses"] == cold["losses"]


def test_it_is_saved_while_training_goes_on_so_that_a_kill_loses_nothing(tmp_path: Path) -> None:
    process = Machine(tmp_path / "one").start(store=str(tmp_path / "store"), lingers=200)
    end = time.monotonic() + 120
    while not list((tmp_path / "store").rglob("*.bundle")):
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    process.kill()
    process.communicate()
    assert Machine(tmp_path / "two").run(store=str(tmp_path / "store"))["misses"] == 0


def test_an_unmodified_program_finds_and_keeps_what_it_compiles(tmp_path: Path) -> None:
    one, two = Machine(tmp_path / "one"), Machine(tmp_path / "two")
    through = [sys.executable, "-m", "headway", "exec", "--compile-cache", str(tmp_path / "store")]
    cold, warm = one.run(through=through), two.run(through=through)
    assert (cold["outcome"]["outcome"], warm["outcome"]["outcome"]) == ("miss", "hit")
    assert (warm["hits"], warm["misses"]) == (cold["misses"], 0)
    told = [mark.attrs for mark in marks_of(two) if mark.name == Told.COMPILE_CACHE]
    assert [each["outcome"] for each in told] == ["hit", "used"]
    assert told[0]["key"] == cold["key"]
    assert json.loads(told[0]["about"])["program"] == "compiling.py"
    assert told[1]["seconds_saved"] > 0


def test_what_its_first_batch_looks_like_is_kept_with_the_bundle(tmp_path: Path) -> None:
    through = [sys.executable, "-m", "headway", "exec", "--compile-cache", str(tmp_path / "store")]
    told = Machine(tmp_path / "one").run(through=through, loads=True)
    kept = Store(str(tmp_path / "store")).load(told["key"]).members["batch.json"]
    assert json.loads(kept.data)["sequence"][0]["tensor"] == [4, 8]


def test_a_script_that_chooses_its_cache_folder_late_is_served_there(tmp_path: Path) -> None:
    store, folders = str(tmp_path / "store"), [str(tmp_path / name) for name in ("there", "elsewhere")]
    cold = Machine(tmp_path / "one").run(store=store, moves_to=folders[0])
    warm = Machine(tmp_path / "two").run(store=store, moves_to=folders[1])
    assert (warm["hits"], warm["misses"]) == (cold["misses"], 0)


def test_a_program_that_compiles_nothing_imports_nothing_and_stores_nothing(tmp_path: Path) -> None:
    code = "import sys, torch; print([name for name in sys.modules if name.startswith('torch._inductor')])"
    plain, cached = (
        subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for command in ([], [sys.executable, "-m", "headway", "exec", "--compile-cache", str(tmp_path / "store")])
    )
    assert cached == plain
    assert not (tmp_path / "store").exists()


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_sizes_that_have_changed_are_compiled_for_once_at_the_next_start(tmp_path: Path) -> None:
    told = {"store": str(tmp_path / "store"), "backend": "aot_eager", "sizes": [4, 5, 6]}
    assert Machine(tmp_path / "one").run(**told)["compiles"] == 2
    # Nothing is in torch's archive that would be worth a save: only shapes, which go with something else.
    machine = Machine(tmp_path / "one")
    assert machine.run(**told)["compiles"] == 1


def test_a_forward_that_calls_its_parents_needs_its_sources_named(tmp_path: Path) -> None:
    told = {"store": str(tmp_path / "store"), "backend": "aot_eager", "sizes": [4, 5, 6], "inherits": True}
    machine = Machine(tmp_path / "machine")
    cold = machine.run(**told)
    assert cold["compiles"] == machine.run(**told)["compiles"] == 2
    sources = json.dumps({"sources": ["L['x']"]}).encode()
    Store(str(tmp_path / "store")).save(cold["key"], {"sources.json": Member(sources, time.time_ns())}, {}, "doctor")
    assert machine.run(**told)["compiles"] == 1


# --- ranks -----------------------------------------------------------------------------------------------------------


def on_two_ranks(machines: list[Machine], stores: list[str], **told: Any) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = [
        machine.start(rank, 2, port, store=store, meets=True, **{name: each[rank] for name, each in told.items()})
        for rank, (machine, store) in enumerate(zip(machines, stores, strict=True))
    ]
    return [answer(process) for process in both]


def test_ranks_that_have_the_same_all_use_it(first: tuple[Path, Machine, dict[str, Any]], tmp_path: Path) -> None:
    found = on_two_ranks([Machine(tmp_path / "a"), Machine(tmp_path / "b")], [str(first[0])] * 2)
    assert [each["outcome"]["outcome"] for each in found] == ["hit", "hit"]
    assert [each["misses"] for each in found] == [0, 0]


def test_warm_workers_of_a_supervisor_share_it(tmp_path: Path) -> None:
    through = [
        sys.executable,
        "-m",
        "headway",
        "run",
        "--nproc-per-node",
        "2",
        "--compile-cache",
        str(tmp_path / "store"),
    ]
    cold, warm = (answers(Machine(tmp_path / name).start(through=through, meets=True)) for name in ("first", "second"))
    assert [each["outcome"]["outcome"] for each in [*cold, *warm]] == ["miss", "miss", "hit", "hit"]
    assert [each["misses"] for each in warm] == [0, 0]
    assert len({tuple(each["losses"]) for each in [*cold, *warm]}) == 1


def test_ranks_that_compile_something_else_have_a_bundle_of_their_own(tmp_path: Path) -> None:
    stores, groups = [str(tmp_path / "store")] * 2, ["first", "second"]
    cold = on_two_ranks([Machine(tmp_path / "a"), Machine(tmp_path / "b")], stores, group=groups)
    assert [each["outcome"]["outcome"] for each in cold] == ["miss", "miss"]
    assert len(Store(stores[0]).stored()) == 2
    warm = on_two_ranks([Machine(tmp_path / "c"), Machine(tmp_path / "d")], stores, group=groups)
    assert [(each["outcome"]["outcome"], each["misses"]) for each in warm] == [("hit", 0)] * 2


def test_the_words_of_one_session_are_none_of_the_next_ones(
    first: tuple[Path, Machine, dict[str, Any]], tmp_path: Path
) -> None:
    machines, before = [Machine(tmp_path / "a"), Machine(tmp_path / "b")], [[str(tmp_path / "empty")], []]
    before[1] = before[0]
    found = on_two_ranks(machines, [str(first[0])] * 2, before=before)
    assert [each["outcome"]["outcome"] for each in found] == ["hit", "hit"]


def test_if_one_rank_has_none_nobody_uses_it(first: tuple[Path, Machine, dict[str, Any]], tmp_path: Path) -> None:
    found = on_two_ranks([Machine(tmp_path / "a"), Machine(tmp_path / "b")], [str(first[0]), str(tmp_path / "empty")])
    assert [each["outcome"]["outcome"] for each in found] == ["miss", "miss"]
    assert [each["hits"] for each in found] == [0, 0]
    assert len({tuple(each["losses"]) for each in found}) == 1


def test_a_rank_that_compiles_before_it_has_met_the_others_waits_for_nobody(
    first: tuple[Path, Machine, dict[str, Any]], tmp_path: Path
) -> None:
    alone = answer(Machine(tmp_path / "a").start(0, 2, 1, store=str(first[0]), backend="eager"))
    assert alone["outcome"]["outcome"] == "miss"


@pytest.mark.parametrize("error", ["full", "unwritable"])
def test_if_one_rank_cannot_put_it_into_place_nobody_uses_it(
    first: tuple[Path, Machine, dict[str, Any]], tmp_path: Path, error: str
) -> None:
    machines = [Machine(tmp_path / "a"), Machine(tmp_path / "b")]
    (tmp_path / "b" / "cache").mkdir()
    if error == "unwritable":
        (tmp_path / "b" / "cache").chmod(0o777)  # others could have put something there
    else:
        for name in ("fxgraph", "aotautograd"):
            (tmp_path / "b" / "cache" / name).write_text("in the way")
    found = on_two_ranks(machines, [str(first[0])] * 2, backend=["eager", "eager"])
    assert [each["outcome"]["outcome"] for each in found] == ["miss", "miss"]


# --- what goes wrong -------------------------------------------------------------------------------------------------


def damage(store: Path, how: str) -> None:
    for path in store.rglob("*.bundle"):
        data = bytearray(path.read_bytes())
        middle = len(data) // 2
        data[middle] ^= 1
        path.write_bytes(data[:middle] if how == "cut off" else data)


@pytest.mark.parametrize("how", ["cut off", "flipped"])
def test_a_damaged_bundle_is_a_miss_with_a_reason(
    first: tuple[Path, Machine, dict[str, Any]], tmp_path: Path, how: str
) -> None:
    store = copied(first[0], tmp_path / "store")
    damage(store, how)
    found = Machine(tmp_path / "machine").run(store=str(store), backend="eager")
    assert found["outcome"]["outcome"] == "miss"
    assert found["outcome"]["why"]


def test_a_store_that_cannot_be_is_no_failure_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    found = Machine(tmp_path / "machine").run(store=str(tmp_path / "file" / "store"), backend="eager")
    assert found["losses"]
    assert found["outcome"] is None or found["outcome"]["outcome"] == "miss"


def test_a_cache_folder_that_cannot_be_written_to_is_no_failure_of_the_job(
    first: tuple[Path, Machine, dict[str, Any]], tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "fxgraph").write_text("in the way")
    found = machine.run(store=str(first[0]), backend="eager")
    assert found["outcome"]["outcome"] == "miss"
    assert "Error" in found["outcome"]["why"]
