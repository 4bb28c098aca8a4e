"""Ready recipes: consolidated safetensors, a `torch.export` program, an AOTInductor package.

By name, with commas in between (`recipe="safetensors,aotinductor"`), or called from a recipe of one's own::

    def publish(anchor, out):
        safetensors(anchor, out)
        aotinductor(anchor, out, Served(Model(), [(torch.rand(8, 13),), (torch.rand(5, 13),)]))
        (out / "labels.txt").write_text("click\\n")

Each step is kept, so that a retry does not do it again; each check is done again, on the files that will be published.
"""

import functools
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import InputError, nearest
from headway.publish import checks
from headway.publish.anchor import Anchor
from headway.publish.out import Check, Out

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

WEIGHTS, GOLDEN, PROGRAM, PACKAGE = "weights", "golden", "program", "package"
"""The steps, which are folders of the version."""

_INDUCTOR = {"always_keep_tensor_constants": True}
"""Else small tensors are compiled in, and new weights could never be put into the package. It costs no time."""


@dataclass(frozen=True)
class Served:
    """What is served: a model, and batches on which all that is made of it must give what the model itself gives."""

    model: "nn.Module"
    """As in training, but whole, on the CPU. Its weights come from the checkpoint; it is run in evaluation mode."""
    batches: Sequence[checks.Batch]
    """Golden batches: each a tuple of positional arguments or a dict of keyword arguments. Where their sizes differ, a
    server may give others."""
    dynamic_shapes: Any = None
    """As `torch.export.export` takes it, if the sizes of the batches do not tell."""
    atol: float = 1e-5
    rtol: float = 1e-4
    """Numbers may be `atol + rtol * |eager|` apart from eager's."""
    options: Mapping[str, Any] | None = None
    """What to tell Inductor."""
    name: str = "model"
    """Of the files."""

    def __post_init__(self) -> None:
        if not callable(getattr(self.model, "state_dict", None)):
            raise InputError(f"Served has a {type(self.model).__name__} as its model. Give a torch.nn.Module.")
        wrong = [type(each).__name__ for each in self.batches if not isinstance(each, tuple | Mapping)]
        if wrong or not len(self.batches):
            text = f"Served has a {wrong[0]} as a golden batch" if wrong else "Served has no golden batch"
            raise InputError(
                f"{text}, and without those nobody knows what it should give. Give a list whose elements are tuples of "
                "positional arguments or dicts of keyword arguments."
            )
        if not self.name or Path(self.name).name != self.name or checks.CUDA in self.name:
            raise InputError(f"{self.name!r} cannot be the name of files. Use letters, digits and _")


def ready(names: str, served: Callable[[], Served] | None = None) -> Callable[[Anchor, Out], None]:
    """The recipe that does what is named; `served` gives the model, for those that need one."""
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in _NEEDS_MODEL:
            hint = f"{nearest(name, _NEEDS_MODEL)} One of your own is named file.py:function."
            raise InputError(f"there is no ready recipe {name!r}: {hint}")
        if _NEEDS_MODEL[name] and served is None:
            raise InputError(
                f"{name} needs the model, and a checkpoint has only its weights. Give model=file.py:function, or "
                "--model, which returns headway.Served(model, golden_batches)."
            )

    def publish(anchor: Anchor, out: Out) -> None:
        if "safetensors" in wanted:
            safetensors(anchor, out)
        if served is not None and any(_NEEDS_MODEL[name] for name in wanted):
            (aotinductor if "aotinductor" in wanted else export)(anchor, out, _given(served()))

    return publish


_NEEDS_MODEL = {"safetensors": False, "export": True, "aotinductor": True, "card": False}
"""The ready recipes. Every version has a card: that one adds nothing."""


def _given(served: Any) -> Served:
    if not isinstance(served, Served):
        text = "The function named by model= returns headway.Served(model, golden_batches)."
        raise InputError(f"a {type(served).__name__} was given to be served. {text}")
    return served


# --- weights ----------------------------------------------------------------------------------------------------------


def safetensors(anchor: Anchor, out: Out) -> None:
    """The weights in files that any framework reads; streamed, so that they need not fit into memory."""
    out.step(WEIGHTS, lambda folder: _write_weights(anchor, out, folder))
    told = out.told(WEIGHTS)
    out.signature[WEIGHTS] = told["signature"]
    out.facts[WEIGHTS] = {key: told[key] for key in ("tensors", "parameters", "bytes")}
    out.add(checks.finite(WEIGHTS, told["nonfinite"]))


def _write_weights(anchor: Anchor, out: Out, folder: Path) -> dict[str, Any]:
    from headway.publish.weights import write_safetensors

    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        out.progress(WEIGHTS, done, anchor.size)

    told: dict[str, Any] = write_safetensors(anchor.shards, folder, progress=count)
    return told | {"signature": {name: checks.described(each) for name, each in anchor.shards.tensors.items()}}


# --- program ----------------------------------------------------------------------------------------------------------


def export(anchor: Anchor, out: Out, served: Served) -> None:
    """What `torch.export` makes of the model: runs wherever torch does, without the model's code."""

    @functools.cache
    def model() -> "nn.Module":
        return anchor.load(served.model).eval()

    golden = _golden(out, served, model)
    place = out.step(PROGRAM, lambda folder: _write_program(model(), golden["batches"], served, folder))
    told = out.told(PROGRAM)
    out.signature |= told["signature"]
    out.facts |= {"sizes": told["sizes"], "atol": served.atol, "rtol": served.rtol}
    out.add(_parity(PROGRAM, checks.load_program(_file(place, served)), golden, served))


def _file(place: Path, served: Served) -> Path:
    if not (path := place / f"{served.name}.pt2").is_file():
        text = "a version holds one model. Publish the other one to a place of its own, or as an output of this one."
        raise InputError(f"{served.name} is not what {place.name} was made of in this version: {text}")
    return path


def _golden(out: Out, served: Served, model: Callable[[], "nn.Module"]) -> dict[str, Any]:
    """Golden batches, and what the model gives for them. They stay those of the first try, should they be random."""
    place = out.step(GOLDEN, lambda folder: _write_golden(model(), served, folder))
    found = out.told(GOLDEN)
    out.add(checks.finite("weights of the model", found["weights"]))
    out.add(checks.finite("outputs of the model", found["outputs"]))
    return checks.read_golden(place / Path(checks.GOLDEN).name)


def _write_golden(model: "nn.Module", served: Served, folder: Path) -> dict[str, Any]:
    import torch

    batches = [checks.own(each if isinstance(each, tuple) else dict(each)) for each in served.batches]
    outputs = [checks.own(checks.call(model, each)) for each in batches]
    kept = {"batches": batches, "outputs": outputs, "atol": served.atol, "rtol": served.rtol}
    torch.save(kept, folder / Path(checks.GOLDEN).name)
    by_batch = {f"batch {number}, {name}": leaf for number, each in enumerate(outputs) for name, leaf in _items(each)}
    return {"weights": checks.nonfinite(model.state_dict()), "outputs": checks.nonfinite(by_batch)}


def _items(tree: Any) -> list[tuple[str, Any]]:
    return list(checks.leaves(tree).items())


def _write_program(model: "nn.Module", batches: list[checks.Batch], served: Served, folder: Path) -> dict[str, Any]:
    import torch

    # The largest comes first: of a size that is 0 or 1 in the example, torch makes a fixed one.
    example, *others = sorted(map(_arguments, batches), key=_volume, reverse=True)
    shapes = served.dynamic_shapes
    if shapes is None and others:
        shapes = _sizes_that_differ(others)
    try:
        with torch.no_grad():
            program = torch.export.export(model, *example, dynamic_shapes=shapes)
    except Exception as error:
        error.add_note(
            f"torch.export has made no program of {served.name}. Sizes that may differ are those that do in the golden "
            "batches, unless Served(dynamic_shapes=...) tells; code it cannot follow is best replaced in the model."
        )
        raise
    program.example_inputs = None  # they are in the golden batches; here, a server would unpickle them
    torch.export.save(program, folder / f"{served.name}.pt2")
    return _signature(program)


def _sizes_that_differ(others: list[Any]) -> Any:
    from torch.export import AdditionalInputs

    told: Any = AdditionalInputs()  # type: ignore[no-untyped-call]
    for args, kwargs in others:
        told.add(args, kwargs)
    return told


def _arguments(batch: checks.Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})


def _volume(arguments: Any) -> int:
    return sum(leaf.numel() for _, leaf in _items(arguments) if hasattr(leaf, "numel"))


def _signature(program: "ExportedProgram") -> dict[str, Any]:
    """What goes in and comes out of a program, how it is called, and which sizes may differ."""
    from torch.export.graph_signature import ConstantArgument, InputKind

    values = {node.name: node.meta.get("val") for node in program.graph.nodes}

    def value(arg: Any) -> str:
        return checks.described(arg.value if isinstance(arg, ConstantArgument) else values[arg.name])

    given = [spec.arg for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    inputs = {arg.name: value(arg) for arg in given}
    results = [spec.arg for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    outputs = {name: value(arg) for name, arg in checks.leaves(results, program.call_spec.out_spec).items()}
    call = " ".join(str(program.call_spec.in_spec).split())  # by position or by name, and with which keys
    free = [f"{name}: {told}" for name, told in inputs.items() if "*" in told]
    sizes = (
        f"any for * in {', '.join(free)}" if free else "those of the golden batches, which have one size, and no other"
    )
    return {"signature": {"inputs": inputs, "outputs": outputs, "call": call}, "sizes": sizes}


def _parity(what: str, run: Callable[..., Any], golden: Mapping[str, Any], served: Served) -> Check:
    return checks.parity(what, run, golden["outputs"], golden["batches"], atol=served.atol, rtol=served.rtol)


# --- package ----------------------------------------------------------------------------------------------------------


def aotinductor(anchor: Anchor, out: Out, served: Served) -> None:
    """What AOTInductor compiles of the model, for CPUs as this machine has; and for its GPU, if it has one. The program
    it is made from is published, too: that one runs on others."""
    import torch

    if f"{PROGRAM} parity" not in {check.name for check in out.checks}:
        export(anchor, out, served)
    program, golden = _file(out / PROGRAM, served), checks.read_golden(out / checks.GOLDEN)
    place = out.step(PACKAGE, lambda folder: _write_packages(program, golden["batches"], served, folder))
    out.facts |= {"cpu": torch.backends.cpu.get_cpu_capability(), "machine": platform.machine()}
    for path in sorted(place.glob("*.pt2")):
        what = "GPU package" if path.stem.endswith(checks.CUDA) else PACKAGE
        out.add(_parity(what, checks.load_package(path), golden, served))


def _write_packages(path: Path, batches: list[checks.Batch], served: Served, folder: Path) -> None:
    import torch

    program = torch.export.load(path)
    program.example_inputs = max(map(_arguments, batches), key=_volume)
    options = _INDUCTOR | dict(served.options or {})
    make = checks.inductor().aoti_compile_and_package
    make(program, package_path=str(folder / f"{served.name}.pt2"), inductor_configs=options)
    if torch.cuda.is_available():
        from torch.export.passes import move_to_device_pass

        moved = move_to_device_pass(program, "cuda")
        make(moved, package_path=str(folder / f"{served.name}{checks.CUDA}.pt2"), inductor_configs=options)
