"""How long a job takes to its first step when another one has compiled the same before: headway's bundle next to no
cache, to torch's own cache folder, and to torch's archive (MegaCache).

Each session is a process on a machine of its own: a new temporary folder and a new cache folder. Imports are done
before the clock starts; building the model, loading the cache, compiling forward and backward, and one step count. Then
two more functions are compiled, each followed by a save. A round takes each way once, in turn.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.measure import Row

PATIENCE_S = 600.0
Told = dict[str, Any]


def run(quick: bool) -> list[Row]:
    """The rows on compilation."""
    Path("out").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="compile-", dir="out")).absolute()
    try:
        rows = []
        for model in ("DLRM",) if quick else ("DLRM", "transformer"):
            rows += _rows(model, [_round(folder / f"{model}-{number}", model) for number in range(1 if quick else 3)])
        return [*rows, *_recompile_rows(folder), _unused_row(folder)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _round(folder: Path, model: str) -> dict[str, Told]:
    """Each way once. The bundle is that of a job which found the first one's files in the cache folder."""
    told = {"model": model, "store": str(folder / "store"), "mega": str(folder / "mega")}
    found = {"cold": _session(folder / "first", told, "cold")}
    _session(folder / "first", told, "headway")
    found["folder"] = _session(folder / "first", told, "none")
    found["mega"] = _session(folder / "mega-machine", told, "mega")
    found["headway"] = _session(folder / "fresh", told, "headway")
    if len({tuple(each["losses"]) for each in found.values()}) > 1:
        raise RuntimeError(f"not all ways compute the same: {found}")
    shutil.rmtree(folder)
    return found


def _session(machine: Path, told: Told, cache: str) -> Told:
    environ = _machine(machine) | {"HEADWAY_HOME": str(machine / "home"), "HEADWAY_JOB": "bench"}
    environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, "-m", "bench.compilers", json.dumps(told | {"cache": cache})]
    if cache == "headway":
        command = [sys.executable, "-m", "headway", "exec", "--compile-cache", told["store"], *command]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: Told = json.loads(done.stdout.splitlines()[-1])
    print(f"  {told['model']}, {cache}: {found['took']:.1f} s", flush=True)
    return found


def _rows(model: str, rounds: list[dict[str, Told]]) -> list[Row]:
    share = {way: [100 * each[way]["took"] / each["cold"]["took"] for each in rounds] for way in rounds[0]}
    took = {way: median(each[way]["took"] for each in rounds) for way in rounds[0]}
    note = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in took.items())
    ours = [each["headway"] for each in rounds]
    name, unit = f"first step on a fresh machine, {model}", "% of cold"
    anew = {way: [100 * each[way]["misses"] / each["cold"]["misses"] for each in rounds] for way in ("headway", "mega")}
    waits = [1000 * each["outcome"].get("waited", 0) for each in ours]
    return [
        Row(name, unit, share["headway"], share["mega"], "torch's MegaCache", at_most=10, note=note),
        Row(f"… and torch's cache folder, {model}", unit, share["headway"], share["folder"], "on the same machine"),
        Row(
            f"graphs compiled anew after three saves, {model}",
            "%",
            anew["headway"],
            peer=_lost(anew["mega"]),
            at_most=0,
        ),
        Row(f"wait for the bundle, {model}", "ms", waits, at_most=5),
        Row(f"hooks, {model}", "% of compiling", [100 * _hooks(each) for each in rounds], at_most=1),
    ]


def _lost(shares: list[float]) -> str:
    return f"{median(shares):.0f} % torch's MegaCache"


def _hooks(found: dict[str, Told]) -> float:
    """What they take in a cold job's place: their own time, less the wait that is its own row."""
    own = found["headway"]["hooks"] - found["headway"]["outcome"].get("waited", 0)
    return float(own / found["cold"]["took"])


def _recompile_rows(folder: Path) -> list[Row]:
    """`examples/ragged.py`, whose `forward` calls its parent's: cold; then as the doctor has it, on a new machine."""
    store, found = str(folder / "ragged"), []
    for name in ("before", "after"):
        environ = _machine(folder / name) | {"HEADWAY_HOME": str(folder / "home")}
        _headway(["exec", "--job", name, "--compile-cache", store, sys.executable, "examples/ragged.py"], environ)
        found.append(json.loads(_headway(["compile", "doctor", name, "--json"], environ)))
        if name == "before":
            _headway(["compile", "doctor", name, "--apply"], environ)
    counts = [sum(each["times"] for each in told["recompiles"]) for told in found]
    before, after = ([float(told["compiling_s"])] for told in found)
    return [
        Row(
            "recompiles on the next run, ragged inputs", "", [float(counts[1])], peer=f"{counts[0]} at first", at_most=0
        ),
        Row("compiling on the next run, ragged inputs", "s", after, before, "at first"),
    ]


def _headway(words: list[str], environ: dict[str, str]) -> str:
    command = [sys.executable, "-m", "headway", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def _machine(folder: Path) -> dict[str, str]:
    """The environment of a machine that has compiled nothing yet."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "TORCHINDUCTOR"))}
    return environ | {"TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}


def _unused_row(folder: Path) -> Row:
    """Modules of torch's compiler that a job imports for the cache's sake, where it compiles nothing."""
    code = (
        "import torch, sys; print(sum(name.startswith(('torch._dynamo', 'torch._inductor')) for name in sys.modules))"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    environ["HEADWAY_HOME"] = str(folder / "home")
    plain, cached = (
        subprocess.run([*command, sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        for command in ([], [sys.executable, "-m", "headway", "exec", "--compile-cache", str(folder / "unused")])
    )
    more = int(cached.stdout.split()[-1]) - int(plain.stdout.split()[-1])
    return Row("modules imported where nothing compiles", "", [float(more)], at_most=0)
