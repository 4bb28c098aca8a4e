"""Random numbers of a stage's own, so that what it draws does not depend on what runs beside it.

A stage that computes has the process's generators to itself, seeded for it, and leaves them as they were. One that does
not may run at the same time as such a stage, and the process's generators are not its to touch: whatever it draws from
torch's default one comes from a generator of its own instead.
"""

import hashlib
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DRAWING = frozenset(
    (
        "_sample_dirichlet", "_standard_gamma", "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_",
        "geometric_", "kaiming_uniform_", "log_normal_", "multinomial", "normal", "normal_", "poisson", "rand",
        "rand_like", "randint", "randint_like", "randn", "randn_like", "random_", "randperm", "uniform_",
    )
)  # fmt: skip
"""What draws from a generator, and takes another one."""

_here = threading.local()
_no_fork = threading.RLock()
"""Held around calls into torch at the begin and end of a stage; forks wait for it.

torch takes locks there, its own and C++'s for static variables. A data worker forked by another stage at that instant
would find them taken for ever.
"""
os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_no_fork.release)


def seed_of(seed: int, name: str) -> int:
    """A seed for each stage: the same one on each run."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest(), "big")


@contextmanager
def own_random(seed: int, computes: bool) -> Iterator[None]:
    """Random numbers of this block's own, whatever is drawn elsewhere."""
    mode = before = None
    try:
        with _no_fork:
            if computes:
                before = states()
                _seed(seed)
            else:
                mode = _Own(seed).__enter__()
        yield
    finally:
        with _no_fork:
            if mode is not None:
                mode.__exit__(None, None, None)
            if before is not None:
                put_back(before)


def states() -> dict[str, Any]:
    """Of every generator that there is by now."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy_random := _numpy_random():
        found["numpy"] = numpy_random.get_state()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy_random := _numpy_random():
        numpy_random.seed(seed & 0xFFFFFFFF)


def _numpy_random() -> Any:
    """NumPy's generator, if there is NumPy: it makes this one when first asked, which may be inside of a stage."""
    return getattr(sys.modules.get("numpy"), "random", None)


def put_back(found: dict[str, Any]) -> None:
    """Sets the generators to what they were found at."""
    torch.set_rng_state(found["torch"])
    random.setstate(found["python"])
    if "numpy" in found:
        _numpy_random().set_state(found["numpy"])
    if "cuda" in found:
        torch.cuda.set_rng_state_all(found["cuda"])


def have_changed(found: dict[str, Any]) -> bool:
    """Whether a generator is elsewhere than it was found at."""
    now = states()
    same = torch.equal(now["torch"], found["torch"]) and now["python"] == found["python"]
    if same and "numpy" in found:
        same = all(map(_equal, now["numpy"], found["numpy"]))
    return not same


def _equal(one: Any, other: Any) -> bool:
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


class _Own(TorchFunctionMode):
    """Gives whatever draws in this thread from torch's default generator one of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._pid = os.getpid()

    def __enter__(self) -> "_Own":
        _here.mode = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _here.mode = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_shared = kwargs.get("generator") in (None, torch.default_generator)  # which `random_split` names
        if getattr(func, "__name__", "") in _DRAWING and is_shared and os.getpid() == self._pid:
            with_own = {**kwargs, "generator": self._generator}
            if _is_on_cpu(args, kwargs):
                with suppress(TypeError):  # `rand_like` of an older torch takes none
                    return func(*args, **with_own)
        return func(*args, **kwargs)


def _is_on_cpu(args: Any, kwargs: Any) -> bool:
    device = kwargs.get("device") or next((a.device for a in args if isinstance(a, torch.Tensor)), "cpu")
    return torch.device(device).type == "cpu"


def _current_mode() -> Any:
    """The innermost mode of this thread. The function is private to torch: without it, data workers are only slower."""
    return getattr(torch.overrides, "_get_current_function_mode", lambda: None)()


def _in_child() -> None:
    """Let a data worker that a stage has started draw as any other does."""
    mode = getattr(_here, "mode", None)
    if isinstance(mode, _Own) and _current_mode() is mode:
        mode.__exit__(None, None, None)


os.register_at_fork(after_in_child=_in_child)
