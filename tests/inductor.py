"""torch.compile at a low price, for tests in which the C++ compiler is not the subject.

Inductor generates the same graphs and calls the same compiler, but once per test run for equal code, without
optimization, precompiled headers, vector units and worker processes. As a module to import, it prepares a server of
warm processes.

Typical use::

    import inductor, warm

    subprocess.run([sys.executable, "train.py"], env=os.environ | inductor.environ())
    warm.run([sys.executable, "train.py"], env=os.environ | inductor.environ(), imports=[inductor.__name__])
"""

import os
import shutil
import sys
from importlib import import_module
from pathlib import Path

import shared

COMPILATIONS = "TESTS_COMPILATIONS"
"""The environment variable with the file to which the compiler adds a line for each compilation, cached or not."""

_COMPILER = """#!{python} -ISs
import fcntl, hashlib, os, shutil, sys

words = sys.argv[1:]
if "-o" not in words:  # it is asked for its version
    os.execv({compiler!r}, [{compiler!r}, *words])
at = words.index("-o")
output = words[at + 1]
del words[at : at + 2]
key = hashlib.sha256()
for word in words:
    key.update(open(word, "rb").read() if os.path.isfile(word) else word.encode() + b"\\0")
kept = os.path.join({folder!r}, key.hexdigest())
if os.environ.get({log!r}):
    with open(os.environ[{log!r}], "a") as log:
        log.write(output + "\\n")
with open(kept + ".lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not os.path.exists(kept):
        child = os.spawnv(os.P_WAIT, {compiler!r}, [{compiler!r}, *words, "-O0", "-g0", "-o", kept + ".new"])
        if child:
            sys.exit(child)
        os.rename(kept + ".new", kept)
shutil.copyfile(kept, output + ".new")
shutil.copymode(kept, output + ".new")
os.rename(output + ".new", output)
"""

_LAZY = (
    "torch._dynamo.repro.after_dynamo",
    "torch._functorch._aot_autograd.autograd_cache",
    "torch._inductor.async_compile",
    "torch._inductor.codegen.cpp",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.codegen.halide",
    "torch._inductor.codegen.pallas",
    "torch._inductor.compile_fx",
    "torch._inductor.fx_passes.freezing_patterns",
    "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.pad_mm",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.utils.cpp_extension",
)
"""Imported by the first compilation of a process."""


def environ() -> dict[str, str]:
    """The variables for a program that compiles."""
    return {
        "CXX": _compiler(), "TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }  # fmt: skip


def _compiler() -> str:
    """The path of a g++ that remembers what it has compiled in this test run."""
    return shared.once("compiler", _write_compiler)


def _write_compiler() -> str:
    folder = shared.folder() / "compiled"
    folder.mkdir()
    path = folder / "g++"
    path.write_text(
        _COMPILER.format(python=sys.executable, compiler=shutil.which("g++"), folder=str(folder), log=COMPILATIONS)
    )
    path.chmod(0o755)
    return str(path)


def _prepare() -> None:
    """Do in a server what `environ` does in a program, and import what a compilation needs."""
    given = environ()
    os.environ.update(given)
    config = import_module("torch._inductor.config")
    config.cpp.cxx, config.cpp.vec_isa_ok = (None, given["CXX"]), False
    config.cpp_cache_precompile_headers, config.compile_threads = False, 1
    for name in _LAZY:
        import_module(name)
    codecache = import_module("torch._inductor.codecache")
    codecache.torch_key()  # hashes of all sources, a second each; torch keeps them
    codecache.triton_key()


if Path(sys.argv[0]).name == "warm.py":
    _prepare()
