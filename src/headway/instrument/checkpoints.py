"""Saving and loading: what blocks, what happens in the background, and where training can go on from.

A file counts as a checkpoint if it holds at least half as many numbers as the optimizer trains: what a script saves
besides (losses, samples) says nothing about its work being safe.
"""

import hashlib
import os
import struct
from typing import TYPE_CHECKING, Any

from headway.events.recorder import Span
from headway.events.vocabulary import Activity, Saved, clean_text
from headway.instrument.loop import Tracker
from headway.instrument.modes import holds
from headway.instrument.past import Load
from headway.instrument.patches import around, looks_like

if TYPE_CHECKING:
    from headway.instrument.session import Session

BACKGROUND = "checkpoint_background"
"""Saving that nobody waits for: shown, not counted."""

MOST_LOOKED_AT = 10_000
"""Of what is saved, no more things than these are looked at."""

MOST_PARTS = 32
"""So many parts of what is saved are looked at for the model's state."""

LOOKED_AT = 64
"""To know a state again, so many of its tensors are looked at, and so many numbers of each."""

LOADING = "loading"
"""Loading after the first step: whether it is data or a checkpoint shows only when it is done."""

_saved: set[str] = set()
"""Where this process has saved checkpoints."""

_announced: dict[str, int] = {}
"""Where a save in the background is to go, and how many steps it holds."""


def _torch_files(session: "Session", module: Any) -> None:
    _saves(session, module, "save", ("obj", "f"), lambda obj, f, *args, **kwargs: (obj, f))
    _loads(session, module, "load", ("f",), lambda f, *args, **kwargs: f)


def _safetensors(session: "Session", module: Any) -> None:
    _saves(session, module, "save_file", ("tensors", "filename"), _safetensors_saved)
    _loads(session, module, "load_file", ("filename",), lambda filename, *args, **kwargs: filename)


def _safetensors_saved(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return tensors, filename


def _dcp_saver(session: "Session", module: Any) -> None:
    _saves(session, module, "save", ("state_dict",), lambda *a, **kwargs: (None, _dcp_place(kwargs, "storage_writer")))
    patch = session.patch(module, "async_save", ("state_dict",))
    if patch is None:
        return

    def begins(*args: Any, **kwargs: Any) -> tuple[Span | None, int, str]:
        steps = session.tracker.steps_done if session.tracker else 0
        return session.begins(Activity.CHECKPOINT_BLOCKING), steps, place(_dcp_place(kwargs, "storage_writer"))

    def ends(token: tuple[Span | None, int, str], response: Any, error: BaseException | None) -> None:
        span, steps, path = token
        session.ends(span, error is not None)
        future = getattr(response, "upload_completion", response)
        if span is not None and hasattr(future, "add_done_callback"):
            future.add_done_callback(lambda done: tell_saved(session, steps, path) if not done.exception() else None)

    patch.put(around(patch, begins, ends))


def _dcp_loader(session: "Session", module: Any) -> None:
    taken = lambda *args, **kwargs: _dcp_place(kwargs, "storage_reader")  # noqa: E731
    _loads(session, module, "load", ("state_dict",), taken, fills=True)


def _loaded_into(class_name: str) -> Any:
    """Hooks the filling of models or optimizers. It counts as a restore only if something was loaded: the weights of a
    target network, or an average, are copied the same way."""

    def hook(session: "Session", module: Any) -> None:
        patch = session.patch(getattr(module, class_name), "load_state_dict", ("self", "state_dict"))
        if patch is None:
            return

        def begins(filled: Any, state_dict: Any, *args: Any, **kwargs: Any) -> tuple[Span | None, Any, Any]:
            loaded = session.tracker is not None and session.tracker.past.loads
            return session.begins(Activity.CHECKPOINT_RESTORE) if loaded else None, filled, state_dict

        def ends(token: tuple[Span | None, Any, Any], result: Any, error: BaseException | None) -> None:
            span, filled, state = token
            session.ends(span, error is not None)
            if error is None and session.tracker is not None and not session.tracker.is_retired:
                _was_filled(session.tracker, filled, state)

        patch.put(around(patch, begins, ends))

    return hook


def _was_filled(tracker: Tracker, filled: Any, state: Any) -> None:
    """Training may go on from what was loaded, if it went into what is trained."""
    lead = tracker.lead
    if hasattr(filled, "param_groups"):
        if lead is not None and filled is not lead:
            return
        tracker.past.filled(optimizer=filled)
    elif lead is None or holds(filled, lead):
        tracker.past.filled(content_of(state, anywhere=True))


def _states(session: "Session", module: Any) -> None:
    """Hooks the copying of a model's state: however a program stores it, it is known again by what is in it."""
    patch = session.patch(module.Module, "state_dict", ("self",))
    if patch is None:
        return
    original, spent = patch.original, Spent()

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(self, *args, **kwargs)
        if not args and kwargs.get("destination") is None and patch.state == "on":  # else it is a part's
            try:
                _was_copied(session, self, state, spent)
            except Exception as error:  # measuring must not stop the job: the hook is switched off, and that is told
                patch.failed(error)
        return state

    looks_like(state_dict, original)
    state_dict.__headway__ = patch  # type: ignore[attr-defined]
    patch.put(state_dict)


class Spent:
    """Keeps what is looked at below a fiftieth of the time: some programs copy their state at every step."""

    def __init__(self) -> None:
        self._next_ns = -1

    def may_look(self, now_ns: int) -> bool:
        return now_ns >= self._next_ns

    def looked(self, began_ns: int, now_ns: int) -> None:
        is_first = self._next_ns < 0  # it took its time to warm up
        self._next_ns = 0 if is_first else now_ns + 50 * (now_ns - began_ns)


def _was_copied(session: "Session", module: Any, state: Any, spent: Spent) -> None:
    tracker, recorder = session.tracker, session.recorder
    if tracker is None or tracker.is_retired or recorder is None or not spent.may_look(began_ns := recorder.now_ns()):
        return
    lead, steps = tracker.lead, tracker.steps_done if session.has_trained else 0
    content = content_of(state) if lead is None or holds(module, lead) else ""
    if content and tracker.past.had(content, steps) and session.has_trained:
        recorder.record(Saved(t_ns=began_ns, step=steps, content=content, durable=False))
    spent.looked(began_ns, recorder.now_ns())


def content_of(state: Any, anywhere: bool = False) -> str:
    """Return a short name for the values in a state: equal states have equal names. Empty if there is nothing to tell
    by. A few numbers of each tensor are looked at; those of a device only with `anywhere`, since that waits for it."""
    tensors = [each for value in state.values() if (each := _plain(value, anywhere)) is not None]
    name = hashlib.blake2b(digest_size=8)
    for tensor in tensors[:: -(-len(tensors) // LOOKED_AT) or 1]:
        count = tensor.numel()
        some = tensor.view(-1)[:: -(-count // LOOKED_AT)] if tensor.is_contiguous() else tensor[:1].reshape(-1)[:8]
        numbers = some.double().tolist()
        name.update(struct.pack(f"{len(numbers)}d", *numbers))
    return name.hexdigest() if tensors else ""


def _plain(value: Any, anywhere: bool) -> Any:
    """The tensor that a value is on this rank, if its numbers can be looked at without asking other ranks."""
    local = getattr(value, "_local_tensor", value)
    if type(local).__name__ not in ("Tensor", "Parameter") or not local.numel() or not local.is_floating_point():
        return None
    is_here = local.device.type == "cpu" or (anywhere and local.device.type != "meta")
    return local.detach() if is_here else None


def _lightning(session: "Session", module: Any) -> None:
    def saved(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if type(self.strategy.checkpoint_io).__name__ != "AsyncCheckpointIO":
            return None, filepath
        _announced[place(filepath)] = session.tracker.steps_done if session.tracker else 0
        return (), filepath

    _saves(session, module.Trainer, "save_checkpoint", ("self", "filepath"), saved)


def _lightning_files(session: "Session", module: Any) -> None:
    def saved(self: Any, checkpoint: Any, path: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return checkpoint, path

    _saves(session, module.TorchCheckpointIO, "save_checkpoint", ("self", "checkpoint", "path"), saved)
    _loads(session, module.TorchCheckpointIO, "load_checkpoint", ("self", "path"), lambda self, path, *a, **k: path)


def _transformers(session: "Session", module: Any) -> None:
    def saved(self: Any, model: Any, trial: Any) -> tuple[Any, Any]:
        return None, os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")

    def loaded(self: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint

    _saves(session, module.Trainer, "_save_checkpoint", ("self", "model", "trial"), saved)
    _loads(session, module.Trainer, "_load_from_checkpoint", ("self", "resume_from_checkpoint"), loaded, fills=True)
    _loads(session, module.Trainer, "_load_optimizer_and_scheduler", ("self", "checkpoint"), loaded)


def _accelerate(session: "Session", module: Any) -> None:
    def saved(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return None, output_dir

    def loaded(self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        return input_dir

    _saves(session, module.Accelerator, "save_state", ("self", "output_dir"), saved)
    _loads(session, module.Accelerator, "load_state", ("self", "input_dir"), loaded, fills=True)


def _dcp_state(session: "Session", module: Any) -> None:
    """torch has an optimizer without state make one by a step that changes nothing: that is no training."""
    patch = session.patch(module, "_init_optim_state", ("optim",))
    if patch is None:
        return

    def begins(*args: Any, **kwargs: Any) -> None:
        session.ignores_steps += 1

    def ends(token: Any, result: Any, error: BaseException | None) -> None:
        session.ignores_steps -= 1

    patch.put(around(patch, begins, ends))


def _module(session: "Session", module: Any) -> None:
    _states(session, module)
    _loaded_into("Module")(session, module)


MODULES = {
    "torch.distributed.checkpoint.state_dict": _dcp_state,
    "torch.serialization": _torch_files,
    "torch.nn.modules.module": _module,
    "torch.optim.optimizer": _loaded_into("Optimizer"),
    "torch.distributed.checkpoint.state_dict_saver": _dcp_saver,
    "torch.distributed.checkpoint.state_dict_loader": _dcp_loader,
    "safetensors.torch": _safetensors,
    "lightning.pytorch.trainer.trainer": _lightning,
    "pytorch_lightning.trainer.trainer": _lightning,
    "lightning.fabric.plugins.io.torch_io": _lightning_files,
    "lightning_fabric.plugins.io.torch_io": _lightning_files,
    "transformers.trainer": _transformers,
    "accelerate.accelerator": _accelerate,
}
"""What to do with which module once it is imported."""


def _saves(session: "Session", owner: Any, name: str, expected: tuple[str, ...], taken: Any) -> None:
    """Hooks a function that saves; `taken(*args)` gives what and where to. None is a checkpoint for sure."""
    patch = session.patch(owner, name, expected)
    if patch is None:
        return

    def begins(*args: Any, **kwargs: Any) -> tuple[Span | None, int, Any]:
        background = session.in_background()
        if session.tracker is not None and not background:
            session.tracker.evaluation.saves()
        what, where = taken(*args, **kwargs)
        span = session.begins(BACKGROUND if background else Activity.CHECKPOINT_BLOCKING)
        if background:
            return span, _announced.pop(place(where), 0), (what, where)
        return span, session.tracker.steps_done if session.tracker else 0, (what, where)

    def ends(token: tuple[Span | None, int, Any], result: Any, error: BaseException | None) -> None:
        span, steps, (what, where) = token
        session.ends(span, error is not None)
        if span is not None and error is None and steps > 0 and (what is None or _holds_model(session, what)):
            tell_saved(session, steps, place(where) or place(result), content_of(_largest_state(what), anywhere=True))
            if session.tracker is not None and not session.in_background():
                session.tracker.saved()

    patch.put(around(patch, begins, ends))


def _loads(
    session: "Session", owner: Any, name: str, expected: tuple[str, ...], taken: Any, fills: bool = False
) -> None:
    """Hooks a function that loads; `taken(*args)` gives where from. What a dataset loads is data. `fills`: the model
    has it when the function returns."""
    patch = session.patch(owner, name, expected)
    if patch is None:
        return

    def begins(*args: Any, **kwargs: Any) -> tuple[Span | None, int, Any]:
        tracker, where = session.tracker, taken(*args, **kwargs)
        trained = tracker is not None and tracker.steps_done
        # Before the first step nobody knows which thread trains.
        data = (trained and session.in_background()) or session.is_open(Activity.PREPROC_CREATION)
        span = None if data else session.begins(LOADING if trained else Activity.CHECKPOINT_RESTORE)
        began_ns = session.recorder.now_ns() if session.recorder is not None and trained else 0
        return span, began_ns, where

    def ends(token: tuple[Span | None, int, Any], result: Any, error: BaseException | None) -> None:
        span, began_ns, where = token
        session.ends(span, error is not None)
        recorder, tracker, path = session.recorder, session.tracker, place(where)
        if span is None or error is not None or recorder is None or tracker is None:
            return
        is_data = bool(began_ns) and result is not None and not _is_checkpoint(session, result, path)
        if began_ns:
            activity = Activity.DATA_WAIT if is_data else Activity.CHECKPOINT_RESTORE
            recorder.period(activity, began_ns, recorder.now_ns())
        if path and not is_data:
            # Where a checkpoint is a folder, a script may load its files one by one.
            tracker.past.loaded(*(Load(*_known(each), fills=fills) for each in (os.path.dirname(path), path)))

    patch.put(around(patch, begins, ends))


def _is_checkpoint(session: "Session", what: Any, path: str) -> bool:
    """Whether something that was loaded in the middle of training is a checkpoint, and no shard of data."""
    return path in _saved or (isinstance(what, dict) and _holds_model(session, what))


def tell_saved(session: "Session", steps: int, path: str, content: str = "") -> None:
    """A checkpoint that holds so many steps is safely stored."""
    recorder = session.recorder
    if recorder is not None:
        _saved.add(path)
        told = Saved(t_ns=recorder.now_ns(), step=steps, path=clean_text(path), file=identity(path), content=content)
        recorder.record(told)


def _largest_state(what: Any, depth: int = 3) -> dict[Any, Any]:
    """The dictionary with most numbers directly in it, of those that something is made of: the model's state."""
    if not isinstance(what, dict):
        return {}
    parts = [_largest_state(part, depth - 1) for part in list(what.values())[:MOST_PARTS]] if depth else []
    return max([what, *parts], key=lambda part: sum(each.numel() for each in part.values() if hasattr(each, "numel")))


def _known(path: str) -> tuple[str, str]:
    return clean_text(path), identity(path)


def _dcp_place(kwargs: dict[str, Any], medium: str) -> Any:
    return kwargs.get("checkpoint_id") or getattr(kwargs.get(medium), "path", "")


def place(where: Any) -> str:
    """The absolute path of a file given by its name or as an open file; empty for what lies only in memory."""
    name = where if isinstance(where, str | bytes | os.PathLike) else getattr(where, "name", "")
    return os.path.abspath(os.fsdecode(name)) if isinstance(name, str | bytes | os.PathLike) and name else ""


def identity(path: str) -> str:
    """What stays the same when a file is renamed: many write to a temporary name first."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}:{found.st_mtime_ns}:{found.st_size}"


def _holds_model(session: "Session", what: Any) -> bool:
    lead = session.tracker.lead if session.tracker else None
    if lead is None:
        return False
    trained = sum(parameter.numel() for group in lead.param_groups for parameter in group["params"])
    return bool(_numbers(what, trained / 2, [MOST_LOOKED_AT]) >= trained / 2)


def _numbers(what: Any, enough: float, left: list[int], depth: int = 6) -> float:
    """How many numbers are in the tensors of a nested dictionary or list; stops counting when it is enough, or when
    `left`, the things still to be looked at, are none."""
    left[0] -= 1
    if hasattr(what, "numel") and callable(what.numel):
        return float(what.numel())
    if hasattr(what, "parameters") and callable(what.parameters):
        what = list(what.parameters())
    found = 0.0
    parts = what.values() if isinstance(what, dict) else what if isinstance(what, list | tuple) else ()
    for part in parts if depth else ():
        if found >= enough or left[0] <= 0:
            break
        found += _numbers(part, enough - found, left, depth - 1)
    return found
