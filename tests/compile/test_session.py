"""A process and its bundle: fresh machines that need no compiler, ranks that agree, stores that fail."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import inductor
import shared
import warm
from headway.compile.bundle import Member
from headway.compile.session import Place, Session, Where
from headway.compile.store import Store
from headway.events.job import JobReader
from headway.events.vocabulary import Mark, Told
from headway.paths import JobPaths

pytest.importorskip("torch")
pytestmark = pytest.mark.needs("g++")

PROGRAM = Path(__file__).with_name("compiling.py")


EXEC = [sys.executable, "-m", "headway", "exec", "--compile-cache"]


class Machine:
    """A folder that stands for a machine: with a cache, a temporary folder and a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("tmp", "home"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def start(
        self, rank: int = 0, ranks: int = 1, through: list[str] | None = None, is_cheap: bool = True, **told: Any
    ) -> "subprocess.Popen[str]":
        """Run the program, forked from a server or through a command. Not cheap: with the compiler's own settings."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "TORCHIND"))}
        environ |= {
            "TMPDIR": str(self.folder / "tmp"), "HEADWAY_HOME": str(self.folder / "home"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"), "HEADWAY_JOB": "compiling",
            inductor.COMPILATIONS: str(self.folder / "compilations"), **(inductor.environ() if is_cheap else {}),
        }  # fmt: skip
        if ranks > 1:
            environ |= {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"
            }  # fmt: skip
        settings: dict[str, Any] = {
            "env": environ, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True
        }  # fmt: skip
        program = [str(PROGRAM), json.dumps(told)]
        if through is None and is_cheap:
            return warm.Popen([sys.executable, *program], imports=[inductor.__name__], **settings)
        through = through or []
        python = [sys.executable] if "run" not in through else []
        return subprocess.Popen([*through, *python, *program], **settings)

    def run(self, **told: Any) -> dict[str, Any]:
        return answer(self.start(**told))

    def libraries(self) -> set[str]:
        return {path.name for path in (self.folder / "cache").rglob("*.so")}

    def compilations(self) -> int:
        """How often the C++ compiler was called."""
        log = self.folder / "compilations"
        return len(log.read_text().splitlines()) if log.exists() else 0


def marks_of(machine: Machine) -> list[Mark]:
    """What the processes of its job have written down."""
    batches = [batch for _, batch in JobReader(JobPaths(machine.folder / "home", "compiling")).poll()]
    return [record for batch in batches for record in batch.records if isinstance(record, Mark)]


def answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    return answers(process)[-1]


def answers(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    output, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


First = tuple[Path, Machine, dict[str, Any]]


@pytest.fixture
def first(tmp_path: Path) -> First:
    """A copy of a store that one machine has filled, that machine, and what its program told."""
    folder = shared.folder() / "first-machine"
    told = shared.once("first", lambda: json.dumps(Machine(folder / "machine").run(store=str(folder / "store"))))
    store = tmp_path / "first-store"
    subprocess.run(["cp", "-r", folder / "store", store], check=True)
    return store, Machine(folder / "machine"), json.loads(told)


@pytest.mark.thorough
def test_hashes_of_torchs_sources_are_those_that_an_earlier_process_has_kept(first: First, tmp_path: Path) -> None:
    store, machine, cold = first
    (kept,) = (machine.folder / "home" / "hashes").iterdir()
    other = Machine(tmp_path)
    (tmp_path / "home" / "hashes").mkdir()
    wrong = kept.read_text().replace('"torch_key": "', '"torch_key": "00')
    (tmp_path / "home" / "hashes" / kept.name).write_text(wrong)
    told = other.run(store=str(store), through=[])  # not from the server, which has computed them
    assert (told["hits"], told["misses"]) == (0, cold["misses"])  # so it was believed
    assert told["losses"] == cold["losses"]


def test_a_fresh_machine_compiles_nothing_computes_the_same_and_saves_nothing(first: First, tmp_path: Path) -> None:
    store, machine, cold = first
    bundles = sorted(path.name for path in store.rglob("*.bundle"))
    assert (cold["outcome"]["outcome"], cold["hits"]) == ("miss", 0)
    assert machine.compilations() > 0
    fresh = Machine(tmp_path)
    found = fresh.run(store=str(store))
    assert found["outcome"]["outcome"] == "hit", found["outcome"]
    assert (found["hits"], found["misses"]) == (cold["misses"], 0)
    assert found["losses"] == cold["losses"]
    assert fresh.libraries() <= machine.libraries()
    assert fresh.compilations() == 0
    assert sorted(path.name for path in store.rglob("*.bundle")) == bundles


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_fresh_machine_neither_precompiles_headers_nor_tries_vector_units(tmp_path: Path) -> None:
    told = {"store": str(tmp_path / "store"), "is_cheap": False, "inherits": True}
    one, two = Machine(tmp_path / "one"), Machine(tmp_path / "two")
    cold, found = one.run(**told), two.run(**told)
    assert (found["hits"], found["misses"]) == (cold["misses"], 0)
    assert found["losses"] == cold["losses"]
    assert two.libraries() <= one.libraries()
    assert list((tmp_path / "one" / "tmp").rglob("*.gch"))
    assert not list((tmp_path / "two" / "tmp").rglob("*.gch"))


@pytest.mark.thorough
def test_several_saves_of_one_process_all_load(tmp_path: Path) -> None:
    cold = Machine(tmp_path / "one").run(store=str(tmp_path / "store"), second=True)
    found = Machine(tmp_path / "two").run(store=str(tmp_path / "store"), second=True)
    assert (found["hits"], found["misses"]) == (cold["misses"], 0)
    assert found["losses"] == cold["losses"]


def has_all(store: Path) -> bool:
    """Whether both passes are saved: torch writes this entry when it has compiled the backward pass, too. On a busy
    machine that takes so long that the forward pass is saved before."""
    saved = Store(str(store)) if store.exists() else None
    names = [name for key in saved.stored() for name in saved.load(key).members] if saved else []
    return any(name.startswith("file/aotautograd/") for name in names)


def test_it_is_saved_while_training_goes_on_so_that_a_kill_loses_nothing(tmp_path: Path) -> None:
    process = Machine(tmp_path / "one").start(store=str(tmp_path / "store"), lingers=250)
    end = time.monotonic() + 500
    while not has_all(tmp_path / "store"):
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    process.kill()
    process.communicate()
    assert Machine(tmp_path / "two").run(store=str(tmp_path / "store"))["misses"] == 0


def test_what_is_compiled_during_a_save_is_saved_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, saving = {"one": b"1"}, threading.Event()

    def made(*_: object) -> dict[str, bytes]:
        found = dict(files)
        files["two"] = b"2"
        saving.set()
        session.cancel()  # the process ends while it saves
        return found

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("headway.compile.caches.made", made)
    monkeypatch.setattr("headway.compile.session.QUIET_S", 0)
    for limit in ("WAIT_S", "EXIT_S"):  # a busy machine takes longer
        monkeypatch.setattr(f"headway.compile.session.{limit}", 100.0)
    where = Where(keys=tmp_path / "keys", mirror=tmp_path / "mirror", hashes=tmp_path / "hashes", began=time.time())
    session = Session(str(tmp_path / "store"), lambda: {"program": "it"}, Place(), where, lambda **_: None)
    session.before_compile()
    session.after_compile()
    assert saving.wait(120)
    session.finish()
    assert {"file/one", "file/two"} <= Store(str(tmp_path / "store")).load(session.key).members.keys()


@pytest.mark.thorough
def test_an_unmodified_program_finds_and_keeps_what_it_compiles_and_its_first_batch(tmp_path: Path) -> None:
    one, two = Machine(tmp_path / "one"), Machine(tmp_path / "two")
    through = [*EXEC, str(tmp_path / "store")]
    cold = one.run(through=through, loads=True)
    kept = Store(str(tmp_path / "store")).load(cold["key"]).members["batch.json"]
    assert json.loads(kept.data)["sequence"][0]["tensor"] == [4, 8]
    found = two.run(through=through, loads=True)
    assert (cold["outcome"]["outcome"], found["outcome"]["outcome"]) == ("miss", "hit")
    assert (found["hits"], found["misses"]) == (cold["misses"], 0)
    told = [mark.attrs for mark in marks_of(two) if mark.name == Told.COMPILE_CACHE]
    assert [each["outcome"] for each in told] == ["hit", "used"]
    assert told[0]["key"] == cold["key"]
    assert json.loads(told[0]["about"])["program"] == "compiling.py"
    assert told[1]["seconds_saved"] > 0


@pytest.mark.thorough
def test_a_script_that_chooses_its_cache_folder_late_is_served_there(tmp_path: Path) -> None:
    store, folders = str(tmp_path / "store"), [str(tmp_path / name) for name in ("there", "elsewhere")]
    cold = Machine(tmp_path / "one").run(store=store, moves_to=folders[0])
    found = Machine(tmp_path / "two").run(store=store, moves_to=folders[1])
    assert (found["hits"], found["misses"]) == (cold["misses"], 0)


def test_a_program_that_compiles_nothing_imports_nothing_and_stores_nothing(tmp_path: Path) -> None:
    code = "import sys, torch; print([name for name in sys.modules if name.startswith('torch._inductor')])"
    plain, cached = (
        subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for command in ([], [*EXEC, str(tmp_path / "store")])
    )
    assert cached == plain
    assert not (tmp_path / "store").exists()


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_sizes_that_have_changed_are_compiled_for_once_at_the_next_start(tmp_path: Path) -> None:
    told = {"store": str(tmp_path / "store"), "backend": "eager", "sizes": [4, 5, 6]}
    assert Machine(tmp_path / "one").run(**told)["compiles"] == 2
    # Nothing is in torch's archive that would be worth a save: only shapes, which go with something else.
    machine = Machine(tmp_path / "one")
    assert machine.run(**told)["compiles"] == 1


@pytest.mark.thorough
def test_a_forward_that_calls_its_parents_needs_its_sources_named(tmp_path: Path) -> None:
    told: dict[str, Any] = {
        "store": str(tmp_path / "store"), "backend": "eager", "sizes": [4, 5, 6], "inherits": True
    }  # fmt: skip
    told["through"] = []  # forks of one server hash closures alike, so that torch would find what it remembers itself
    machine = Machine(tmp_path / "machine")
    cold = machine.run(**told)
    assert cold["compiles"] == machine.run(**told)["compiles"] == 2
    sources = json.dumps({"sources": ["L['x']"]}).encode()
    Store(str(tmp_path / "store")).save(cold["key"], {"sources.json": Member(sources, time.time_ns())}, {}, "doctor")
    assert machine.run(**told)["compiles"] == 1


# --- ranks -----------------------------------------------------------------------------------------------------------


def on_two_ranks(machines: list[Machine], stores: list[str], **told: Any) -> list[dict[str, Any]]:
    """Run one rank per machine. They meet at a file."""
    meeting = str(machines[0].folder / "meeting")
    both = [
        machine.start(rank, 2, store=store, meets=meeting, **{name: each[rank] for name, each in told.items()})
        for rank, (machine, store) in enumerate(zip(machines, stores, strict=True))
    ]
    return [answer(process) for process in both]


def test_ranks_that_have_the_same_all_use_it(first: First, tmp_path: Path) -> None:
    found = on_two_ranks([Machine(tmp_path / "a"), Machine(tmp_path / "b")], [str(first[0])] * 2)
    assert [each["outcome"]["outcome"] for each in found] == ["hit", "hit"]
    assert [each["misses"] for each in found] == [0, 0]


@pytest.mark.thorough
def test_warm_workers_of_a_supervisor_share_it(tmp_path: Path) -> None:
    through = [sys.executable, "-m", "headway", "run", "--nproc-per-node", "2", "--compile-cache"]
    through.append(str(tmp_path / "store"))
    cold, found = (answers(Machine(tmp_path / name).start(through=through, meets=True)) for name in ("first", "second"))
    assert [each["outcome"]["outcome"] for each in [*cold, *found]] == ["miss", "miss", "hit", "hit"]
    assert [each["misses"] for each in found] == [0, 0]
    assert len({tuple(each["losses"]) for each in [*cold, *found]}) == 1


@pytest.mark.thorough
def test_ranks_that_compile_something_else_have_a_bundle_of_their_own(tmp_path: Path) -> None:
    stores, groups = [str(tmp_path / "store")] * 2, ["first", "second"]
    cold = on_two_ranks([Machine(tmp_path / "a"), Machine(tmp_path / "b")], stores, group=groups)
    assert [each["outcome"]["outcome"] for each in cold] == ["miss", "miss"]
    assert len(Store(stores[0]).stored()) == 2
    found = on_two_ranks([Machine(tmp_path / "c"), Machine(tmp_path / "d")], stores, group=groups)
    assert [(each["outcome"]["outcome"], each["misses"]) for each in found] == [("hit", 0)] * 2


@pytest.mark.thorough
def test_messages_of_one_session_are_not_taken_for_those_of_the_next(first: First, tmp_path: Path) -> None:
    machines, before = [Machine(tmp_path / "a"), Machine(tmp_path / "b")], [str(tmp_path / "empty")]
    found = on_two_ranks(machines, [str(first[0])] * 2, before=[before, before], backend=["eager", "eager"])
    assert [each["outcome"]["outcome"] for each in found] == ["hit", "hit"]


def test_if_one_rank_has_none_nobody_uses_it(first: First, tmp_path: Path) -> None:
    machines, stores = [Machine(tmp_path / "a"), Machine(tmp_path / "b")], [str(first[0]), str(tmp_path / "empty")]
    found = on_two_ranks(machines, stores, backend=["eager", "eager"])
    assert [each["outcome"]["outcome"] for each in found] == ["miss", "miss"]
    assert [machine.libraries() for machine in machines] == [set(), set()]
    assert len({tuple(each["losses"]) for each in found}) == 1


@pytest.mark.thorough
def test_a_rank_that_compiles_before_it_has_met_the_others_waits_for_nobody(first: First, tmp_path: Path) -> None:
    alone = answer(Machine(tmp_path / "a").start(0, 2, store=str(first[0]), backend="eager"))
    assert alone["outcome"]["outcome"] == "miss"


@pytest.mark.thorough
@pytest.mark.parametrize("error", ["full", "unwritable"])
def test_if_one_rank_cannot_put_it_into_place_nobody_uses_it(first: First, tmp_path: Path, error: str) -> None:
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


@pytest.mark.parametrize("how", ["cut off", pytest.param("flipped", marks=pytest.mark.thorough)])
def test_a_damaged_bundle_is_a_miss_with_a_reason(first: First, tmp_path: Path, how: str) -> None:
    store = first[0]
    damage(store, how)
    found = Machine(tmp_path / "machine").run(store=str(store), backend="eager")
    assert found["outcome"]["outcome"] == "miss"
    assert found["outcome"]["why"]


def test_a_store_that_cannot_be_is_no_failure_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    found = Machine(tmp_path / "machine").run(store=str(tmp_path / "file" / "store"), backend="eager")
    assert found["losses"]
    assert found["outcome"] is None or found["outcome"]["outcome"] == "miss"


@pytest.mark.thorough
def test_a_cache_folder_that_cannot_be_written_to_is_no_failure_of_the_job(first: First, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "fxgraph").write_text("in the way")
    found = machine.run(store=str(first[0]), backend="eager")
    assert found["outcome"]["outcome"] == "miss"
    assert "Error" in found["outcome"]["why"]
