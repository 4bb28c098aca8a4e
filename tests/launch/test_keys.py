"""What torch works out of its own sources, worked out once: workers find it, and it is what they would find out."""

import subprocess
import sys
from pathlib import Path

from supervising import run

PLAIN = "from torch._inductor import codecache\nprint(codecache.torch_key().hex(), codecache.triton_key())"
SPARED = PLAIN.replace("\n", "\ncodecache.build_code_hash = None\n")  # whoever works it out after that fails


def printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def taken(before: str, after: str) -> str:
    """What a process prints that has taken its keys from a child."""
    keys = "from headway.launch.keys import Keys\nwith Keys() as keys:\n"
    keys += "    keys.begin()\n    keys.begin()\n    keys.take()\n"
    return printed(f"import os, torch\nfrom torch._inductor import codecache\n{before}\n{keys}{after}")


def test_they_are_what_torch_works_out() -> None:
    assert taken("", SPARED) == printed(PLAIN)


def test_a_child_that_fails_leaves_it_to_torch() -> None:
    broken = "right, codecache.build_code_hash = codecache.build_code_hash, lambda *words: os._exit(1)"
    assert taken(broken, f"codecache.build_code_hash = right\n{PLAIN}") == printed(PLAIN)


def test_a_child_that_takes_too_long_is_not_waited_for() -> None:
    slow = "import time, headway.launch.keys\nheadway.launch.keys.PATIENCE_S = 0.1\n"
    slow += "right, codecache.build_code_hash = codecache.build_code_hash, lambda *words: time.sleep(600)"
    assert taken(slow, f"codecache.build_code_hash = right\n{PLAIN}") == printed(PLAIN)


def test_a_torch_that_cannot_be_told_works_them_out_itself() -> None:
    other = "for key in (codecache.torch_key, codecache.triton_key):\n    del key.set"
    assert taken(other, PLAIN) == printed(PLAIN)


def test_without_torchs_compiler_there_is_nothing_to_work_out() -> None:
    code = "from headway.launch.keys import Keys\nimport os\nos.fork = None\nkeys = Keys()\nkeys.begin()\nkeys.take()"
    assert printed(code) == ""


def test_workers_find_them_once_the_program_is_known_to_compile(home: Path) -> None:
    script = home / "train.py"
    step = "import torch\nweight = torch.nn.Parameter(torch.ones(1))\noptimizer = torch.optim.SGD([weight], 0.1)\n"
    step += "weight.sum().backward()\noptimizer.step()\n"
    script.write_text(f"{PLAIN}\n{step}")
    code, first, _ = run(["--fast-start", "train.py"], home)
    assert code == 0
    script.write_text(f"{SPARED}\n{step}")
    code, both, problems = run(["--fast-start", "train.py"], home)
    assert code == 0, problems
    assert both == 2 * first == 2 * printed(PLAIN)
