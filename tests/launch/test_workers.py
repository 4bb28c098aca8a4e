"""A warm worker cannot be told from a fresh process: one probe under `headway run`, warm and cold, and under torchrun;
and programs that end in every way, against plain Python."""

import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

BIN = Path(sys.executable).parent
PATIENCE_S = 500.0

PROBE = """
import sys
MODULES, BEFORE = set(sys.modules), list(globals())
import gc, inspect, json, locale, multiprocessing, os, random, resource, signal, threading, warnings

def square(x):
    return x * x

class Squares:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index * index

def stream(file):
    raw = getattr(file.buffer, "raw", file.buffer)
    return [file.isatty(), file.encoding, file.errors, file.line_buffering, file.write_through, file.mode, file.name,
            type(file.buffer).__name__, raw.mode, raw.closefd, file is getattr(sys, f"__{file.name.strip('<>')}__")]

def by_processes(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(square, [2, 3])

def loaded(method):
    from torch.utils.data import DataLoader
    return [batch.tolist() for batch in DataLoader(Squares(), 4, num_workers=1, multiprocessing_context=method)]

def seen():
    return dict(
        argv=list(sys.argv), orig_argv=list(sys.orig_argv), path=list(sys.path),
        flags=list(sys.flags), options=sys._xoptions,
        name=__name__, file=__file__, spec=repr(__spec__), package=repr(__package__), doc=repr(__doc__),
        cached=repr(__cached__), loader=type(__loader__).__name__, builtins=type(__builtins__).__name__,
        globals=BEFORE, is_main=sys.modules["__main__"].__dict__ is globals(), cwd=os.getcwd(),
        environ=dict(os.environ), streams=[stream(file) for file in (sys.stdin, sys.stdout, sys.stderr)],
        signals={number.name: str(signal.getsignal(number)) for number in signal.Signals},
        mask=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])], umask=os.umask(0o22),
        limits=[resource.getrlimit(number) for number in range(16)], nice=os.nice(0),
        affinity=sorted(os.sched_getaffinity(0)), leads=[os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        gc=[gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
        hooks=[sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace(),
               sys.getprofile(), sys.unraisablehook is sys.__unraisablehook__, threading.excepthook.__name__],
        locale=[locale.getlocale(), locale.getpreferredencoding(), sys.getfilesystemencoding()],
        depths=[sys.getrecursionlimit(), sys.getswitchinterval()],
        finders=[getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
        threads=[thread.name for thread in threading.enumerate() if thread.name != "headway-dumps"],
        main_thread=[threading.current_thread() is threading.main_thread(),
                     threading.main_thread().native_id == os.getpid()],
        method=multiprocessing.get_start_method(True), process=multiprocessing.current_process().name,
        source=inspect.getsource(square), child=os.popen("echo $RANK $PYTHONPATH").read(),
        fork=by_processes("fork"), spawn=by_processes("spawn"), forkserver=by_processes("forkserver"),
    )

def seen_of_torch():
    import torch, torch.distributed
    return dict(
        threads=torch.get_num_threads(), interop=torch.get_num_interop_threads(),
        parallel=torch.__config__.parallel_info(), dtype=str(torch.get_default_dtype()),
        debug=str(torch.distributed.get_debug_level()), deterministic=torch.are_deterministic_algorithms_enabled(),
        tasks=len(os.listdir("/proc/self/task")) - sum(t.name == "headway-dumps" for t in threading.enumerate()),
    )

def drawn():
    import numpy, torch
    return [random.random(), float(numpy.random.rand()), float(torch.rand(())), torch.initial_seed()]

if __name__ == "__main__":
    preloaded = [name for name in ("torch", "sibling") if name in MODULES]
    filters = {str(filter) for filter in warnings.filters}
    import sibling
    told = dict(torch=seen_of_torch(), seen=seen(), drawn=drawn(), filters=list(filters), preloaded=preloaded,
                launcher=os.getppid() == int(os.popen("ps -o ppid= " + str(os.getpid())).read()))
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if "--loaders" in sys.argv and rank == attempt == "0":
        told["loaders"] = {method: loaded(method) for method in ("fork", "spawn", "forkserver")}
        import shutil, torch
        if shutil.which("g++"):
            told["compiled"] = torch.compile(lambda x: x.sin() + 1)(torch.zeros(8)).tolist()
    with open(os.path.join(os.environ["PROBE_OUT"], f"{rank}-{attempt}.json"), "w") as file:
        json.dump(told, file)
    import torch.distributed
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    if "--crash" in sys.argv and attempt == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""

OF_EACH_RUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "MASTER_ADDR",
               "MASTER_PORT", "PROBE_OUT", "HEADWAY_JOB", "HEADWAY_ATTEMPT", "HEADWAY_BOARD")  # fmt: skip

Told = dict[str, Any]


def clean_environment(folder: Path) -> dict[str, str]:
    ours = ("HEADWAY_", "SLURM_", "TORCH", "OMP_", "PYTHON", "PYTEST_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return environ | {"HEADWAY_HOME": str(folder / "home")}


# --- the same probe under three launchers ----------------------------------------------------------------------------


class Probes(dict[str, dict[str, Told]]):
    """What the probe saw, by launcher, and by rank and attempt. Each launcher runs once, when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "probe.py").write_text(PROBE)
        (folder / "sibling.py").write_text("")
        headway, options, script = str(BIN / "headway"), ["--nproc-per-node", "2"], ["probe.py", "--lr", "1"]
        warm = [headway, "run", "--preload", "sibling,nowhere"]
        self.commands = {
            "warm": [*warm, "--job", "warm", *options, *script, "--crash"],
            "loaders": [*warm, *script, "--loaders"],
            "cold": [headway, "run", "--cold", *options, *script],
            "torchrun": [headway, "exec", sys.executable, "-m", "torch.distributed.run", *options, *script],
        }

    def __missing__(self, launcher: str) -> dict[str, Told]:
        place = self.folder / launcher
        place.mkdir()
        environ = clean_environment(self.folder) | {"PROBE_OUT": str(place)}
        done = subprocess.run(self.commands[launcher], cwd=self.folder, env=environ, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=PATIENCE_S)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        if launcher == "warm":
            assert "nowhere cannot be preloaded" in done.stderr
            journals = (self.folder / "home" / "jobs" / "warm" / "journals").glob("supervisor-*")
            assert any(b"nowhere cannot be preloaded" in journal.read_bytes() for journal in journals)
        self[launcher] = {file.stem: json.loads(file.read_text()) for file in place.glob("*.json")}
        return self[launcher]


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Probes:
    """The same probe under each launcher."""
    return Probes(tmp_path_factory.mktemp("probe"))


def comparable(told: Told) -> Told:
    seen = dict(told["seen"])
    seen["environ"] = {name: value for name, value in seen["environ"].items() if name not in OF_EACH_RUN}
    seen["argv"], seen["orig_argv"] = seen["argv"][:3], seen["orig_argv"][1:5]
    return seen


@pytest.mark.parametrize("launcher", ["warm", pytest.param("cold", marks=pytest.mark.thorough)])
def test_a_worker_sees_what_it_sees_under_torchrun(probes: Probes, launcher: str) -> None:
    for rank in ("0", "1"):
        ours, theirs = probes[launcher][f"{rank}-0"], probes["torchrun"][f"{rank}-0"]
        assert comparable(ours) == comparable(theirs)
        assert ours["torch"] == theirs["torch"]
        assert ours["launcher"]
        assert ours["preloaded"] == (["torch", "sibling"] if launcher == "warm" else [])


def test_workers_start_warm_again_after_a_crash(probes: Probes) -> None:
    warm = probes["warm"]
    assert [told["preloaded"] for told in warm.values()] == [["torch", "sibling"]] * 4
    assert set(probes["torchrun"]["0-0"]["filters"]) <= set(warm["0-0"]["filters"])


def test_no_two_workers_draw_the_same_random_numbers(probes: Probes) -> None:
    for generator in range(4):
        drawn = {told["drawn"][generator] for run in ("warm", "torchrun") for told in probes[run].values()}
        assert len(drawn) == 4 + 2


@pytest.mark.thorough
def test_data_loaders_and_the_compiler_work_in_a_warm_worker(probes: Probes) -> None:
    told = probes["loaders"]["0-0"]
    squares = [[0, 1, 4, 9], [16, 25, 36, 49]]
    assert told["loaders"] == {"fork": squares, "spawn": squares, "forkserver": squares}
    assert told.get("compiled", [1.0] * 8) == [1.0] * 8


# --- programs that end in every way, against plain Python ------------------------------------------------------------

CREW = """
import json, os, sys, tempfile, time
from headway.launch.crew import Crew
from headway.launch.worker import Assignment

asked = json.load(sys.stdin)
notes, told = [], []
crew = Crew(asked["command"], os.environ, asked["preload"], asked["warm"], asked["patience_s"])
crew.note = notes.append
for program in asked["programs"]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, **program.get("environ", {})}
        work = Assignment(kind=program["kind"], argv=program["argv"], environ=environ, folder=folder)
        crew.start([work], [[out.fileno(), err.fileno()]])
        [worker] = crew.workers
        while not worker.gone_ns:
            crew.look(1.0)
        crew.get_ready()
        for file in (out, err):
            file.seek(0)
        told.append(dict(
            stdout=out.read().decode("latin-1"), stderr=err.read().decode("latin-1"), code=worker.code,
            warm=worker.warm, said=worker.said_code, exception=worker.exception,
        ))
crew.close()
json.dump(dict(told=told, notes=notes), sys.stdout)
"""


def run_crew(
    folder: Path, programs: Sequence[Mapping[str, Any]], preload: Sequence[str], *, warm: bool = True,
    patience_s: float = PATIENCE_S, **environ: str,
) -> tuple[list[Told], list[str]]:  # fmt: skip
    """What became of each program, one after the other; and what the user was told."""
    asked = {"command": programs[0]["argv"], "preload": list(preload), "warm": warm, "patience_s": patience_s}
    ended = subprocess.run(
        [sys.executable, "-P", "-c", CREW], input=json.dumps({**asked, "programs": programs}), capture_output=True,
        text=True,
        cwd=folder, env={**clean_environment(folder), **environ}, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    return result["told"], result["notes"]


TORCH = """
class cuda:
    is_initialized = staticmethod(lambda: False)
    _is_in_bad_fork = staticmethod(lambda: False)
class backends:
    class cuda:
        is_built = staticmethod(lambda: True)
class default_generator:
    seed = staticmethod(lambda: None)
"""
"""Enough of torch for a zygote, where it matters when it forks, and not what."""

HEAD = "import atexit, os, signal, sys, threading, time\n"
ENDINGS = {
    "nothing": "",
    "none": "sys.exit()",
    "zero": "sys.exit(0)",
    "three": "sys.exit(3)",
    "true": "sys.exit(True)",
    "minus_one": "sys.exit(-1)",
    "a_byte_too_much": "sys.exit(256)",
    "huge": "sys.exit(10 ** 30)",
    "text": "sys.exit('no data')",
    "tuple": "raise SystemExit(1, 2)",
    "at_once": "os._exit(7)",
    "raises": """
        def inner():
            raise ValueError("bad b\\u00e4tch")
        def outer():
            try:
                {}["key"]
            except KeyError as error:
                inner()
        outer()""",
    "raises_from": """
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise RuntimeError("two\\nlines") from error""",
    "group": "raise ExceptionGroup('both', [ValueError(1), TypeError(2)])",
    "unprintable": """
        class Odd(Exception):
            def __str__(self):
                raise ValueError
        raise Odd""",
    "syntax": "if True print(1)",
    "indentation": "  print(1)\n print(2)",
    "interrupted": "atexit.register(print, 'left', flush=True); raise KeyboardInterrupt",
    "at_exit": """
        atexit.register(print, "first")
        atexit.register(lambda: 1 / 0)
        atexit.register(print, "last")""",
    "leaves_otherwise": "atexit.register(os._exit, 4)",
    "own_hook": "sys.excepthook = lambda kind, error, trace: print('hook', error, trace.tb_lineno); 1 / 0",
    "hook_raises": """
        def hook(kind, error, trace):
            raise ValueError("in the hook")
        sys.excepthook = hook
        1 / 0""",
    "hook_exits": "sys.excepthook = lambda *_: sys.exit(5); 1 / 0",
    "thread_goes_on": """
        said = threading.Event()
        def late():
            said.wait()
            time.sleep(0.2)
            print("late")
        threading.Thread(target=late).start()
        print("early")
        said.set()""",
    "thread_raises": "threading.Thread(target=lambda: 1 / 0, name='t').start()",
    "fork_exits": """
        if not (child := os.fork()):
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))""",
    "fork_raises": """
        if not (child := os.fork()):
            raise ValueError("only the child")
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))""",
    "torn_down": """
        class Last:
            def __del__(self):
                print("gone")
        last = Last()
        def main():
            local = Last()
            sys.exit(2)
        main()""",
    "aborts": "print('to be seen', end=''); os.abort()",
    "by_signal": "os.kill(os.getpid(), signal.SIGTERM)",
    "warns": "import warnings; warnings.warn('careful')",
    "stderr": "print('out'); print('err', file=sys.stderr); os.system('echo child; echo child >&2')",
}


def scripts(folder: Path) -> dict[str, dict[str, Any]]:
    """Every way to name a program, and every way to end one."""
    programs = {}
    for name, text in ENDINGS.items():
        (folder / f"end_{name}.py").write_text(HEAD + textwrap.dedent(text))
        programs[name] = {"kind": "script", "argv": [f"end_{name}.py"]}
    body = (
        "import sys, tool; print(sys.argv, sys.path[0], __file__, __name__, __spec__ and __spec__.name, __package__)\n"
    )
    for place in (folder, folder / "deep", folder / "package", folder / "bundle"):
        place.mkdir(exist_ok=True)
        for name in ("main_script.py", "__main__.py"):
            (place / name).write_text(body)
        (place / "tool.py").write_text("")
    (folder / "package" / "__init__.py").write_text("import sys; print(sys.argv)")
    (folder / "package" / "broken.py").write_text("print('here')\n1 / 0\n")
    (folder / "link.py").symlink_to(Path("deep", "main_script.py"))
    (folder / "latin.py").write_bytes(b"# coding: latin-1\nprint(ascii('\xe9'))\nraise ValueError('\xe9')\n")
    shutil.make_archive(str(folder / "zipped"), "zip", folder / "bundle")
    py_compile.compile(str(folder / "main_script.py"), str(folder / "compiled.pyc"))
    for path in ("main_script.py", "./main_script.py", "deep/main_script.py", "deep/../main_script.py", "link.py",
                 "bundle", "zipped.zip", "latin.py", "compiled.pyc", "not_there.py", "home-less",
                 str(folder / "main_script.py")):  # fmt: skip
        programs[path] = {"kind": "script", "argv": [path, "--lr", "1"]}
    for module in ("main_script", "package", "package.main_script", "package.broken", "package.missing"):
        programs[f"-m {module}"] = {"kind": "module", "argv": [module, "--lr", "1"]}
    return programs


def fatal_scripts(folder: Path) -> dict[str, dict[str, Any]]:
    """Programs whose last words go elsewhere."""
    (folder / "fault.py").write_text("import faulthandler, os\nfaulthandler.enable()\nos.kill(os.getpid(), 11)\n")
    (folder / "recorded.py").write_text(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('recorded')\nmain()\n"
    )
    environ = {"TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    return {
        "fault": {"kind": "script", "argv": ["fault.py"]},
        "recorded": {"kind": "script", "argv": ["recorded.py"], "environ": environ},
    }


class Endings(dict[str, dict[str, Told]]):
    """How each program ended, by how it was run: by plain Python, by a warm worker with a stand-in for torch, by one
    with torch, and by a fresh one. Each way is tried once, when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs, fatal = scripts(folder), fatal_scripts(folder)
        few = ("raises", "interrupted", "at_exit", "fork_exits", "torn_down")
        (folder / "lib").mkdir()
        (folder / "lib" / "torch.py").write_text(TORCH)
        self.runs: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
            "fresh": (self.programs, [], {"warm": False}),
            "warm": (self.programs, ["torch"], {"PYTHONPATH": str(folder / "lib")}),
            "torch": ({name: self.programs[name] for name in few} | fatal, ["torch"], {}),
        }

    def __missing__(self, kind: str) -> dict[str, Told]:
        self[kind] = self._plain() if kind == "plain" else self._by_crew(*self.runs[kind])
        if kind == "torch":
            self[kind]["recorded"]["error_file"] = json.loads((self.folder / "error.json").read_text())
        return self[kind]

    def _by_crew(self, programs: dict[str, Any], preload: list[str], options: dict[str, Any]) -> dict[str, Told]:
        return dict(zip(programs, run_crew(self.folder, list(programs.values()), preload, **options)[0], strict=True))

    def _plain(self) -> dict[str, Told]:
        found = {}
        for name, program in self.programs.items():
            words = [sys.executable, "-u", *(["-m"] if program["kind"] == "module" else []), *program["argv"]]
            ended = subprocess.run(words, cwd=self.folder, env=clean_environment(self.folder), capture_output=True)
            found[name] = {
                "stdout": ended.stdout.decode("latin-1"),
                "stderr": ended.stderr.decode("latin-1"),
                "code": ended.returncode,
            }
        return found


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Endings:
    """The same programs, run in each way."""
    return Endings(tmp_path_factory.mktemp("endings"))


FRESH, WITH_TORCH = (pytest.param(kind, marks=pytest.mark.thorough) for kind in ("fresh", "torch"))


def without_addresses(told: Told, keys: Iterable[str]) -> Told:
    return {key: re.sub("0x[0-9a-f]{6,}", "0x", str(told[key])) for key in keys}


@pytest.mark.parametrize("kind", ["warm", FRESH, WITH_TORCH])
def test_programs_print_and_end_as_under_plain_python(endings: Endings, kind: str) -> None:
    for name in endings["plain"].keys() & endings[kind].keys():
        plain, told = endings["plain"][name], endings[kind][name]
        assert told["warm"] == (kind != "fresh")
        assert without_addresses(told, plain) == without_addresses(plain, plain), name


@pytest.mark.parametrize("kind", ["warm", FRESH])
def test_a_failure_is_told_before_the_interpreter_is_taken_down(endings: Endings, kind: str) -> None:
    told = endings[kind]
    assert told["raises"]["exception"] == endings["plain"]["raises"]["stderr"].encode("latin-1").decode()
    assert told["three"]["said"] == 3
    assert told["unprintable"]["exception"]
    assert told["fork_raises"]["said"] == 0
    assert not told["fork_raises"]["exception"]
    assert told["interrupted"]["code"] == -2
    assert (told["leaves_otherwise"]["said"], told["leaves_otherwise"]["code"]) == (0, 4)


@pytest.mark.thorough
def test_last_words_of_other_kinds_are_said_in_a_warm_worker_too(endings: Endings) -> None:
    fault, recorded = endings["torch"]["fault"], endings["torch"]["recorded"]
    assert fault["code"] == -11
    assert "Segmentation fault" in fault["stderr"]
    assert 'fault.py", line 3 in <module>' in fault["stderr"]
    assert recorded["code"] == 1
    assert recorded["error_file"]["message"]["message"] == "ValueError: recorded"


# --- when workers are not forked -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script, and torch's stand-in elsewhere on the path."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "torch.py").write_text(TORCH)
    (tmp_path / "script.py").write_text("import sys; print(sorted({'torch', 'sibling'} & set(sys.modules)))")
    return tmp_path


def start(folder: Path, *environs: Mapping[str, str], preload: str = "", patience_s: float = PATIENCE_S) -> Any:
    """How the script was started, under each of these environments in turn, and what the user was told."""
    programs = [{"kind": "script", "argv": ["script.py"], "environ": environ} for environ in environs or [{}]]
    names = ["torch", *([preload] if preload else [])]
    told, notes = run_crew(folder, programs, names, patience_s=patience_s, PYTHONPATH=str(folder / "lib"))
    assert [one["code"] for one in told] == [0] * len(told), told
    return [one["warm"] for one in told], notes, [one["stdout"].strip() for one in told]


def test_a_module_beside_the_script_can_be_preloaded(folder: Path) -> None:
    (folder / "sibling.py").write_text("")
    assert start(folder, preload="sibling") == ([True], [], ["['sibling', 'torch']"])


def test_an_import_that_starts_a_thread_means_fresh_workers(folder: Path) -> None:
    (folder / "sibling.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()"
    )
    warm, [note], _ = start(folder, preload="sibling")
    assert warm == [False]
    assert "1 threads were started by an import" in note


def test_an_import_after_which_forks_have_no_cuda_means_fresh_workers(folder: Path) -> None:
    (folder / "sibling.py").write_text(
        "import os, torch\ndef poison():\n    torch.cuda._is_in_bad_fork = lambda: True\n"
        "os.register_at_fork(after_in_child=poison)\ntorch.backends.cuda.is_built = lambda: True\n"
    )
    warm, [note], _ = start(folder, preload="sibling")
    assert warm == [False]
    assert "CUDA" in note


@pytest.mark.parametrize(
    "text", ["raise SystemExit(3)", *(pytest.param(text, marks=pytest.mark.thorough) for text in (None, "1 / 0"))]
)
def test_a_module_that_cannot_be_imported_is_told_of_once_and_left_out(folder: Path, text: str | None) -> None:
    if text:
        (folder / "sibling.py").write_text(text)
    warm, [note], _ = start(folder, {}, {}, preload="sibling")
    assert warm == [True, True]
    assert "sibling cannot be preloaded" in note


def test_an_import_that_kills_the_zygote_means_fresh_workers_and_no_other_zygote(folder: Path) -> None:
    (folder / "sibling.py").write_text("import os\nopen('imports', 'a').write('x')\nos._exit(3)")
    warm, notes, _ = start(folder, {}, {}, preload="sibling")
    assert warm == [False, False]
    assert "the zygote died of an import" in notes[0]
    assert (folder / "imports").read_text() == "x"


def test_an_import_that_hangs_is_waited_for_once(folder: Path) -> None:
    (folder / "sibling.py").write_text("import time\ntime.sleep(1000)")
    warm, notes, _ = start(folder, {}, {}, preload="sibling", patience_s=0.5)
    assert warm == [False, False]
    assert "the preloaded imports took more than 0.5 s" in notes[0]


def test_a_variable_that_libraries_read_at_import_renews_the_zygote(folder: Path) -> None:
    environs: list[dict[str, str]] = [{}, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}]
    warm, [note], _ = start(folder, *environs)
    assert warm == [True, True, True]
    assert "TORCH_DISTRIBUTED_DEBUG has changed" in note


def test_a_variable_that_is_read_later_does_not(folder: Path) -> None:
    assert start(folder, {}, {"TORCH_NCCL_BLOCKING_WAIT": "1", "RANK": "1"})[:2] == ([True, True], [])


def test_a_variable_that_the_script_sets_before_torch_means_fresh_workers(folder: Path) -> None:
    (folder / "script.py").write_text(
        'import os\nif "OMP_NUM_THREADS" in os.environ and os.environ["OMP_NUM_THREADS"] == "7": pass\n'
        'os.environ["MY_OWN"] = "1"\nimport torch\n'
        'os.environ["TORCH_LOGS"] = "too late anyway"\n'
    )
    assert start(folder)[:2] == ([True], [])
    (folder / "script.py").write_text('import os\nos.environ["OMP_NUM_THREADS"] = "3"\nimport torch\n')
    warm, [note], _ = start(folder)
    assert warm == [False]
    assert "the script sets OMP_NUM_THREADS itself" in note


def test_a_module_of_the_script_s_with_the_name_of_an_imported_one_means_fresh_workers(folder: Path) -> None:
    (folder / "importlib").mkdir()  # no package, and so nothing that Python would take
    (folder / "queue.txt").touch()
    assert start(folder)[:2] == ([True], [])
    (folder / "traceback.py").write_text("MINE = True\n")
    (folder / "script.py").write_text("import traceback; print(traceback.MINE)")
    warm, [note], said = start(folder)
    assert warm == [False]
    assert "modules of its own called traceback" in note
    assert said == ["True"]


def test_modules_of_the_working_directory_are_not_taken_for_the_script_s(folder: Path) -> None:
    (folder / "scripts").mkdir()
    (folder / "scripts" / "script.py").write_text("import traceback, sibling; print(hasattr(traceback, 'MINE'))")
    (folder / "scripts" / "sibling.py").touch()
    for name in ("traceback", "socket", "json"):
        (folder / f"{name}.py").write_text("MINE = True\n")
    for warm in (True, False):
        program = {"kind": "script", "argv": ["scripts/script.py"]}
        [told], _ = run_crew(folder, [program], ["torch", "sibling"], warm=warm, PYTHONPATH=str(folder / "lib"))
        assert (told["stdout"], told["stderr"], told["warm"]) == ("False\n", "", warm)


# --- leaving ---------------------------------------------------------------------------------------------------------

FINISHES = """
import atexit, ctypes, logging.handlers, os, sys, threading, time, weakref
import headway

class Late:
    def __del__(self):
        os.write(1, b"taken down\\n")

late = Late()
file = open("unflushed.txt", "w")
file.write("text")
binary = open("unflushed.bin", "wb")
binary.write(b"bytes")
gone = weakref.proxy(type("Gone", (), {{}})())
closed = open("closed.txt", "w")
os.close(closed.fileno())
logger = logging.getLogger()
logger.addHandler(logging.handlers.MemoryHandler(1000, target=logging.FileHandler("log.txt")))
logger.warning("logged")
atexit.register(lambda: open("atexit.txt", "w").write("called"))
atexit.register(lambda: 1 / 0)
threading.Thread(target=lambda: (time.sleep(0.3), open("thread.txt", "w").write("joined"))).start()
ctypes.CDLL(None).printf(b"from C\\n")
sys.stdout = open(1, "w", closefd=False)
print("from Python", end="")
if {finishes}:
    headway.current().finish()
sys.exit({code})
"""


@pytest.mark.parametrize(("finishes", "code"), [(True, 0), (False, 0), (True, 3)])
def test_a_program_that_says_it_is_done_leaves_at_once_and_leaves_nothing_undone(
    folder: Path, finishes: bool, code: int
) -> None:
    (folder / "script.py").write_text(FINISHES.format(finishes=finishes, code=code))
    programs = [{"kind": "script", "argv": ["script.py"], "environ": {"HEADWAY_DISABLE": "1"}}]
    ((told,), _) = run_crew(folder, programs, ["torch"], PYTHONPATH=str(folder / "lib"))
    assert told["code"] == code
    assert ("taken down" in told["stdout"]) == (code != 0 or not finishes)
    assert "from C" in told["stdout"]
    assert "from Python" in told["stdout"]
    assert "ZeroDivisionError" in told["stderr"]
    for name, text in {"unflushed.txt": "text", "unflushed.bin": "bytes", "log.txt": "logged\n"}.items():
        assert (folder / name).read_text() == text
    assert (folder / "atexit.txt").read_text() == "called"
    assert (folder / "thread.txt").read_text() == "joined"
