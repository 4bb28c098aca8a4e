"""Which jobs share compiled code, and why two do not."""

from pathlib import Path

import pytest

from headway.compile import key
from headway.compile.key import _cpu, _devices, differences, digest, model_name, parts

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 207
flags\t\t: {}

processor\t: 1
"""


def test_two_jobs_on_one_machine_share_a_key() -> None:
    assert digest(parts("train.py")) == digest(parts("train.py"))


def test_another_program_has_another_key_and_that_is_the_only_difference() -> None:
    assert differences(parts("train.py"), parts("other.py")) == [("program", "train.py", "other.py")]


def test_settings_of_the_compiler_count_and_where_its_files_lie_does_not() -> None:
    plain = parts(environ={})
    assert parts(environ={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}) != plain
    quiet = {"TORCHINDUCTOR_CACHE_DIR": "/x", "TRITON_CACHE_DIR": "/x", "TORCH_LOGS": "all", "TORCH_COMPILE_DEBUG": "1"}
    assert parts(environ=quiet) == plain


def test_versions_are_those_of_what_would_be_imported() -> None:
    import torch

    assert parts()["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_a_processor_that_can_do_more_has_another_key(tmp_path: Path) -> None:
    for name, flags in {"one": "sse avx2", "same": "avx2 sse", "more": "sse avx2 avx512f"}.items():
        (tmp_path / name).write_text(CPUINFO.format(flags))
    one, same, more = (_cpu(tmp_path / name) for name in ("one", "same", "more"))
    assert one == same != more
    assert "GenuineIntel 6 207" in one


def test_a_machine_that_does_not_tell_its_processor_still_has_a_key(tmp_path: Path) -> None:
    assert _cpu(tmp_path / "missing")


def test_gpus_are_named_once_each_kind_with_their_driver(tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 10\n")
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\n"
    )
    assert _devices(tmp_path) == ["NVIDIA H100 80GB HBM3", "driver 550.54.15"]


def test_a_model_is_known_by_its_structure() -> None:
    layers = [("weight", (3, 4), "torch.float32"), ("bias", (3,), "torch.float32")]
    name = model_name(layers, "Linear")
    assert name == model_name(list(layers), "Linear")
    assert len({name, model_name(layers[:1], "Linear"), model_name(layers, "Other")}) == 3


@pytest.mark.parametrize("other", [{}, {"torch": "2.13.0"}])
def test_a_part_that_one_key_lacks_is_a_difference(other: dict[str, str]) -> None:
    assert ("cpu", "a", "") in key.differences({"torch": "2.13.0", "cpu": "a"}, other)
