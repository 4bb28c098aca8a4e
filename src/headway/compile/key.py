"""Which bundle a job uses: all that decides whether compiled code of one job can serve another.

It is known before torch is imported, so that the bundle can be fetched meanwhile. What torch itself compares for each
graph (the graph, its shapes, the settings a script makes) is not repeated here: where that differs, torch finds nothing
under the same key and compiles.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from headway.machine import answer_of

_SETTINGS = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TRITON_")
_NO_SETTINGS = ("_CACHE_DIR", "_DEBUG", "_LOGS", "_TRACE", "_THREADS", "_HOME", "JOB_ID", "DYNAMIC_SOURCES", "_DISABLE")
"""Variables that say where, or how loudly, and not what is compiled."""


def parts(program: str = "", group: str = "all", environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a job's key is made of: its machine, its software, its settings, and what it compiles. `program` names the
    script or the model; `group` the ranks that compile the same."""
    settings = {name: value for name, value in environ.items() if _is_setting(name)}
    return {
        "torch": _version("torch"),
        "triton": _version("triton", "pytorch-triton", "pytorch-triton-rocm"),
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "libc": " ".join(platform.libc_ver()),
        "compiler": _compiler(environ.get("CXX") or "g++"),
        "device": ", ".join(_devices(Path("/"))) or "none",
        "cpu": _cpu(Path("/proc/cpuinfo")),
        "settings": " ".join(f"{name}={value}" for name, value in sorted(settings.items())),
        "program": program,
        "group": group,
    }


def digest(parts: Mapping[str, str]) -> str:
    """The key itself."""
    return hashlib.sha256(json.dumps(dict(sorted(parts.items()))).encode()).hexdigest()[:32]


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Each part in which two keys differ, with what it is in the one and in the other."""
    names = [*one, *(name for name in other if name not in one)]
    return [(name, one.get(name, ""), other.get(name, "")) for name in names if one.get(name) != other.get(name)]


def model_name(named: Iterable[tuple[str, tuple[int, ...], str]], kind: str) -> str:
    """Names a model by what it consists of: the name, size and type of each parameter and buffer."""
    told = hashlib.sha256(json.dumps([kind, *named]).encode()).hexdigest()[:16]
    return f"{kind}-{told}"


def _is_setting(name: str) -> bool:
    return name.startswith(_SETTINGS) and not name.endswith(_NO_SETTINGS)


def _version(*names: str) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"


def _compiler(name: str) -> str:
    """What builds kernels for a CPU: they are linked against its library."""
    told = answer_of([name, "--version"], timeout_s=10)
    return told.stdout.partition("\n")[0] if told is not None else "none"


def _cpu(cpuinfo: Path) -> str:
    """Kernels are built for the very processor: its kind, and all that it can do."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return platform.machine()
    fields = dict(line.split(":", 1) for line in text.partition("\n\n")[0].splitlines() if ":" in line)
    told = {name.strip(): value.strip() for name, value in fields.items()}
    able = " ".join(sorted((told.get("flags") or told.get("Features") or "").split()))
    kind = " ".join(told[name] for name in ("vendor_id", "cpu family", "model", "CPU part") if name in told)
    return f"{platform.machine()} {kind} {hashlib.sha256(able.encode()).hexdigest()[:12]}"


def _devices(root: Path) -> list[str]:
    """The kinds of GPU of this machine, and their drivers, as the kernel tells them: asking CUDA would take seconds.
    Not run here: there was no GPU."""
    found = set()
    for path in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        lines = path.read_text().splitlines()
        found |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model")}
    for path in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        told = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
        if told.get("gfx_target_version", "0") != "0":
            found.add(f"gfx {told['gfx_target_version']}")
    version = root / "proc/driver/nvidia/version"
    driver = version.read_text().splitlines()[0].split("Module")[-1].split()[0] if version.exists() else ""
    return [*sorted(found), *([f"driver {driver}"] if driver else [])]
