"""Every place where headway looks into torch and its frameworks, by the module it is in.

Most entries only time a function. `install` waits for each module to be imported, and imports none.
"""

import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from threading import current_thread, get_ident, main_thread
from types import FunctionType
from typing import TYPE_CHECKING, Any

from headway.events.recorder import Span
from headway.events.vocabulary import Activity, Told
from headway.instrument import by_hand, checkpoints, collectives, compilation, distributed, faststart, modes, patches
from headway.instrument.devices import DeviceWaits
from headway.instrument.frameworks import ray
from headway.instrument.passes import Loader, Pass
from headway.instrument.patches import Patch, around, guarded, looks_like

if TYPE_CHECKING:
    from headway.instrument.session import Session

A = Activity

Timed = list[tuple[str, str, tuple[str, ...]]]

_LIGHTNING_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_LIGHTNING: dict[str, Timed] = {
    "trainer.trainer": [
        ("Trainer.__init__", A.INIT_PLUGINS, ("self",)),
        ("Trainer.fit", A.PRE_TRAIN, ("self", "model")),
    ],
    "loops.evaluation_loop": [("_EvaluationLoop.run", A.EVALUATION, ("self",))],
    "loops.prediction_loop": [("_PredictionLoop.run", A.EVALUATION, ("self",))],
}

TIMED: dict[str, Timed] = {
    "torch.cuda": [("set_device", A.DEVICE_INIT, ("device",))],
    "torch.nn.modules.module": [
        ("Module.to", A.TRAIN_MODULE_CREATION, ("self",)),
    ],
    "torch.optim.optimizer": [
        ("Optimizer.__init__", A.TRAIN_MODULE_CREATION, ("self", "params")),
    ],
    "torch.utils.data.dataloader": [("DataLoader.__init__", A.PREPROC_CREATION, ("self", "dataset"))],
    "torch.utils.data.distributed": [("DistributedSampler.__init__", A.PREPROC_CREATION, ("self", "dataset"))],
    "torch.nn.parallel.distributed": [
        ("DistributedDataParallel.__init__", A.TRAIN_MODULE_CREATION, ("self", "module")),
    ],
    "torch.distributed.fsdp.fully_sharded_data_parallel": [
        ("FullyShardedDataParallel.__init__", A.TRAIN_MODULE_CREATION, ("self", "module")),
    ],
    "torch.distributed.fsdp._fully_shard._fully_shard": [("fully_shard", A.TRAIN_MODULE_CREATION, ("module",))],
    "torch.distributed.tensor.parallel.api": [("parallelize_module", A.TRAIN_MODULE_CREATION, ("module",))],
    "torch.distributed.device_mesh": [("init_device_mesh", A.PROCESS_GROUP_INIT, ("device_type",))],
    "torch.export": [("export", A.PUBLISH, ("mod",))],
    "torch._inductor": [("aoti_compile_and_package", A.PUBLISH, ("exported_program",))],
    "torchrec.distributed.model_parallel": [
        ("DistributedModelParallel.__init__", A.TRAIN_MODULE_CREATION, ("self", "module")),
    ],
    "torchrec.distributed.planner.planners": [
        ("EmbeddingShardingPlanner.collective_plan", A.TRAIN_MODULE_CREATION, ("self",)),
    ],
    "datasets.load": [("load_dataset", A.PREPROC_CREATION, ("path",))],
    "transformers.modeling_utils": [("PreTrainedModel.from_pretrained", A.TRAIN_MODULE_CREATION, ("cls",))],
    "transformers.tokenization_utils_base": [("PreTrainedTokenizerBase.from_pretrained", A.PREPROC_CREATION, ("cls",))],
    "accelerate.accelerator": [("Accelerator.__init__", A.INIT_PLUGINS, ("self",))],
    "transformers.trainer": [
        ("Trainer.__init__", A.INIT_PLUGINS, ("self", "model")),
        ("Trainer.train", A.PRE_TRAIN, ("self",)),
        ("Trainer.evaluate", A.EVALUATION, ("self",)),
        ("Trainer.predict", A.EVALUATION, ("self",)),
        ("Trainer._load_best_model", A.CHECKPOINT_BLOCKING, ("self",)),  # not where training goes on from
    ],
    **{f"{package}.{name}": entries for package in _LIGHTNING_PACKAGES for name, entries in _LIGHTNING.items()},
}
"""Functions whose calls are recorded as an activity, with the arguments they must take; those that train count as
preparation up to their first step."""


def install(session: "Session") -> None:
    """Waits for every module in which something is to be seen."""
    for name, entries in TIMED.items():
        session.watch.call_for(name, _careful(session, name, _time(session, entries)))
    own: dict[str, Callable[[Session, Any], None]] = {
        "torch": _torch,
        "torch.cuda": _device,
        "torch.utils.data.dataloader": _data,
        "torch.utils.data.dataset": _datasets,
        "torchdata.stateful_dataloader.stateful_dataloader": _stateful_data,
        "cloudpickle.cloudpickle": _unpickled,
        "ray.cloudpickle.cloudpickle": _unpickled,
        "torch.optim.optimizer": _optimizers,
        "torch.amp.grad_scaler": _scalers,
        "torch.nn.modules.module": _modules,
        "subprocess": _processes,
    }
    rooms = (by_hand, checkpoints, compilation, distributed, collectives, modes, ray)
    for table in (own, *(room.MODULES for room in rooms)):
        for name, hook in table.items():
            session.watch.call_for(name, _careful(session, name, partial(hook, session)))
    faststart.install(session)
    _exits(session)


def _careful(session: "Session", name: str, hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """A hook on an import that never lets the import fail."""

    def call(module: Any) -> None:
        try:
            hook(module)
        except Exception as error:  # what cannot be hooked is not measured, and the module works as ever
            patch = Patch(name, module, "", session.tell)
            session.patches.append(patch)
            patch.state = "on"
            patch.failed(error)

    return call


def _leads_up(session: "Session", owner: Any, attribute: str, expected: tuple[str, ...], what: str) -> None:
    """Records a call as preparation up to its first step; if it takes none, to its end."""
    patch = session.patch(owner, attribute, expected)
    if patch is None:
        return

    def begins(*args: Any, **kwargs: Any) -> list[Span | None]:
        if session.tracker is None or session.tracker.steps_done:
            return []
        spans = [session.begins(Activity.PRE_TRAIN, what=what)]
        session.on_first_step.append(lambda: ends(spans, None, None))
        return spans

    def ends(spans: list[Span | None], result: Any, error: BaseException | None) -> None:
        while spans:
            session.ends(spans.pop(), error is not None)

    patch.put(around(patch, begins, ends))


def _time(session: "Session", entries: Timed) -> Callable[[Any], None]:
    def hook(module: Any) -> None:
        for path, activity, expected in entries:
            *owners, attribute = path.split(".")
            owner = module
            for name in owners:
                owner = getattr(owner, name)
            if activity == A.PRE_TRAIN:
                _leads_up(session, owner, attribute, expected, path)
            else:
                session.timed(owner, attribute, activity, expected, what=path)

    return hook


# --- data ----------------------------------------------------------------------------------------------------------


def _torch(session: "Session", torch: Any) -> None:
    patches.torch = torch
    session.gradients_on = torch.is_grad_enabled
    if session.tracker is not None:
        session.tracker.gradients_on = session.gradients_on


def _device(session: "Session", module: Any) -> None:
    """The device's first use. torch comes here again and again to see whether it was: once is enough for us."""
    patch = session.patch(module, "_lazy_init")
    if patch is None:
        return

    def done(span: Span | None, result: Any, error: BaseException | None) -> None:
        session.ends(span, error is not None)
        if error is None:
            patch.undo()

    patch.put(around(patch, lambda: session.begins(Activity.DEVICE_INIT, what="_lazy_init"), done))


def _data(session: "Session", module: Any) -> None:
    _loaders(session, module.DataLoader, module._BaseDataLoaderIter)


def _stateful_data(session: "Session", module: Any) -> None:
    _loaders(session, module.StatefulDataLoader, module._StatefulBaseDataLoaderIter)


def _loaders(session: "Session", loader_class: Any, iterator_class: Any) -> None:
    """Follows the loaders of a class and its iterators."""
    loaders: dict[int, tuple[weakref.ref[Any], Loader]] = {}  # by identity: some cannot be hashed
    ways: Any = "_headway_pass"  # where an iterator carries its pass: iterators are never pickled
    patch = session.patch(iterator_class, "__next__", ("self",))
    whole = session.patch(loader_class, "__iter__", ("self",))
    if patch is None or whole is None:
        return

    def begins(loader: Any) -> tuple[Any, Pass | None]:
        tracker = session.tracker
        if tracker is None or tracker.is_asking(get_ident()) or session.is_open(Activity.EVALUATION):
            return loader, None
        key = id(loader)
        if key not in loaders:
            size = loader.batch_size
            gone = weakref.ref(loader, lambda ref: loaders.pop(key, None))
            loaders[key] = (gone, Loader(size if isinstance(size, int) else None))
        way = tracker.begins(loaders[key][1])
        way.dropped = guarded(whole, way.dropped)
        return loader, way

    def ready(token: tuple[Any, Pass | None], iterator: Any, error: BaseException | None) -> None:
        loader, way = token
        if error is None and session.imports is not None and loader.num_workers:
            session.imports.data_comes()
        if way is not None and session.tracker is not None:
            session.tracker.ready(way)
            if error is None and isinstance(iterator, iterator_class):
                setattr(iterator, ways, way)
            else:
                session.tracker.exhausted(way, way.began_ns)

    whole.put(around(whole, begins, ready))
    original, failed = patch.original, patch.failed

    def __next__(self: Any) -> Any:  # noqa: N807
        tracker, way = session.tracker, self.__dict__.get(ways)
        if tracker is None or way is None or patch.state != "on":
            return original(self)
        try:
            asked = tracker.fetching(way)
        except Exception as error:  # measuring must not stop the job: the hook is switched off, and that is journaled
            failed(error)
            asked = None
        if asked is None:
            return original(self)
        try:
            batch = original(self)
        except BaseException:
            try:
                tracker.exhausted(way, asked)
            except Exception as error:  # as above
                failed(error)
            raise
        try:
            tracker.fetched(way, asked)
            if session.awaits_batch:
                session.came(batch)
        except Exception as error:  # as above
            failed(error)
        return batch

    __next__.__headway__ = patch  # type: ignore[attr-defined]
    patch.put(__next__)


def watch_queues(session: "Session") -> None:
    """Count waits at queues as waits for data: a thread of the program's fetches the batches."""
    module = sys.modules.get("queue")
    patch = session.patch(module.Queue, "get", ("self", "block")) if module is not None else None
    if patch is None:
        return

    def waits(*args: Any, **kwargs: Any) -> int:
        recorder = session.recorder
        return recorder.now_ns() if recorder is not None else 0

    def waited(began_ns: int, result: Any, error: BaseException | None) -> None:
        tracker, recorder = session.tracker, session.recorder
        if tracker is not None and recorder is not None and began_ns and get_ident() == tracker.thread:
            tracker.waited(recorder.now_ns() - began_ns)

    patch.put(around(patch, waits, waited))


def _timed_init(original: Any) -> Any:
    """A dataset's `__init__` that is timed. Whatever it needs it finds when it is called: a class may travel to a
    machine that has no headway, and works there as it did."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        start = sys.modules.get("headway.instrument.start")
        session: Any = getattr(start, "session", None)
        token = session.dataset_begins(original) if session is not None else None
        try:
            return original(self, *args, **kwargs)
        finally:
            if token is not None:
                session.ends(token)

    looks_like(__init__, original)
    return __init__


def _datasets(session: "Session", module: Any) -> None:
    Dataset = module.Dataset
    if "__init_subclass__" in vars(Dataset):
        return

    def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:  # noqa: N807
        super(Dataset, cls).__init_subclass__(**kwargs)
        if not cls.__module__.startswith("torch."):
            _time_init(session, cls)

    if patch := session.patch(Dataset, "__init_subclass__"):
        session.datasets = patch
        patch.put(classmethod(__init_subclass__))
        patch.handle = _TimedClasses()


def _unpickled(session: "Session", module: Any) -> None:
    """A class that comes from another process gets its methods only after it was made."""
    patch = session.patch(module, "_class_setstate", ("obj", "state"))
    if patch is None:
        return

    def made(cls: Any, result: Any, error: BaseException | None) -> None:
        data = sys.modules.get("torch.utils.data.dataset")
        if data is not None and isinstance(cls, type) and issubclass(cls, data.Dataset):
            _time_init(session, cls)

    patch.put(around(patch, lambda obj, state: obj, made))


class _TimedClasses:
    """The classes whose `__init__` is timed, to be given back."""

    def __init__(self) -> None:
        self._classes: list[tuple[weakref.ref[Any], Any, Any]] = []

    def add(self, cls: Any, original: Any, ours: Any) -> None:
        self._classes.append((weakref.ref(cls), original, ours))

    def remove(self) -> None:
        for ref, original, ours in self._classes:
            cls = ref()
            if cls is not None and vars(cls).get("__init__") is ours:
                cls.__init__ = original


def _time_init(session: "Session", cls: Any) -> None:
    original = vars(cls).get("__init__")
    if isinstance(original, FunctionType) and session.datasets is not None and session.datasets.handle is not None:
        ours = _timed_init(original)
        session.datasets.handle.add(cls, original, ours)
        cls.__init__ = ours


# --- steps ---------------------------------------------------------------------------------------------------------


def _optimizers(session: "Session", module: Any) -> None:
    patch = session.patch(module, "register_optimizer_step_post_hook", ("hook",))
    if patch is None:
        return

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            tracker = session.tracker
            if session.ignores_steps:
                return
            if tracker is not None and session.has_trained and not session.on_optimizer:
                tracker.stepped(optimizer)
            elif _has_gradients(optimizer):
                _first_step(session, optimizer)
        except Exception as error:  # measuring must not stop the job: the hook is switched off, and that is journaled
            patch.failed(error)

    stepped._torchdynamo_disable = True  # type: ignore[attr-defined]  # not for compiled code to look into
    patch.state = "on"
    patch.handle = module.register_optimizer_step_post_hook(stepped)


def _first_step(session: "Session", optimizer: Any) -> None:
    calls, session.on_optimizer = session.on_optimizer, []
    for call in calls:
        call()
    tracker = session.trains()  # in a child that seemed to be a helper, too
    look_at_device(session, optimizer)
    tracker.stepped(optimizer)
    session.first_step_done()


def _scalers(session: "Session", module: Any) -> None:
    """A step that a gradient scaler skips is no batch that was left out."""
    if patch := session.patch(module.GradScaler, "update", ("self",)):

        def updated(token: Any, result: Any, error: BaseException | None) -> None:
            if session.tracker is not None:
                session.tracker.skipped()

        patch.put(around(patch, lambda *args, **kwargs: None, updated))


def _processes(session: "Session", module: Any) -> None:
    """Waits for another process: in a loop, it evaluates what was trained, or uploads what was saved."""

    def begins(*args: Any, **kwargs: Any) -> int:
        return session.recorder.now_ns() if session.recorder is not None and session.has_trained else 0

    def ends(began_ns: int, result: Any, error: BaseException | None) -> None:
        tracker = session.tracker
        if began_ns and tracker is not None and tracker.thread == get_ident():
            tracker.waited_for_process(began_ns)

    for name in ("wait", "communicate"):
        if patch := session.patch(module.Popen, name, ("self",)):
            patch.put(around(patch, begins, ends))


def _has_gradients(optimizer: Any) -> bool:
    """Whether a step can have changed anything: some programs step once to have the optimizer make its state."""
    return any(each.grad is not None for group in optimizer.param_groups for each in group["params"])


def look_at_device(session: "Session", optimizer: Any) -> None:
    """Steps on an accelerator are not what the host's clock sees: there, events tell what waits cost."""
    tracker, torch = session.tracker, sys.modules["torch"]
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    # A sharded tensor of the old kind warns whoever asks it for anything.
    device = next((each.device.type for each in parameters if not hasattr(type(each), "local_shards")), "cpu")
    if device == "cpu" or tracker is None or session.recorder is None:
        return
    event = getattr(getattr(torch, device, None), "Event", None)
    waits = tracker.device = DeviceWaits((lambda: event(enable_timing=True)) if event is not None else None)
    recorder = session.recorder
    session.on_leave.append(lambda: recorder.mark(Told.ASYNCHRONOUS_DEVICE, device=device, looked=waits.looked))
    session.recorder.mark(Told.ASYNCHRONOUS_DEVICE, device=device, looked=0)


# --- models --------------------------------------------------------------------------------------------------------


class _Leaving:
    """Ends a span when a frame is left: the frame holds it, and lets go of it then.

    A frame keeps what `f_trace` is set to until it is done. As long as nobody traces, nothing else is done with it.
    """

    def __init__(self, session: "Session", span: Span | None) -> None:
        self._session, self._span = session, span

    def __call__(self, *args: Any) -> None:
        """Should somebody begin to trace: there is nothing to see."""

    def __del__(self) -> None:
        self._session.ends(self._span)


def _modules(session: "Session", module: Any) -> None:
    Module = module.Module
    building: weakref.ref[_Leaving] | None = None

    def registered(owner: Any, name: str, parameter: Any) -> None:
        nonlocal building
        if (building is not None and building() is not None) or session.recorder is None or sys.gettrace() is not None:
            return
        frame = _outermost_init(sys._getframe(2), Module)
        if frame is None or session.is_open(Activity.TRAIN_MODULE_CREATION):
            return
        leaving = _Leaving(session, session.begins(Activity.TRAIN_MODULE_CREATION, what=frame.f_code.co_qualname))
        building = weakref.ref(leaving)
        frame.f_trace = leaving

    patch = session.patch(module, "register_module_parameter_registration_hook", ("hook",))
    if patch is not None:
        patch.state = "on"
        patch.handle = module.register_module_parameter_registration_hook(guarded(patch, registered))
        session.on_first_step.append(patch.undo)  # what is built later is none of the start-up


def _outermost_init(frame: Any, base: type) -> Any:
    """The frame of the outermost module that is being built, as far as its class can be found by its name."""
    found = None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__":
            cls = frame.f_globals.get(code.co_qualname.partition(".")[0])
            if isinstance(cls, type) and issubclass(cls, base) and getattr(cls.__init__, "__code__", None) is code:
                found = frame
        frame = frame.f_back
    return found


# --- the end -------------------------------------------------------------------------------------------------------


def _exits(session: "Session") -> None:
    """`os._exit` calls no exit handlers, and `multiprocessing` ends its forked children by it. `sys.exit` is the only
    place where a process can see its own status. A program may catch it and go on: then the next step takes it back."""

    def leaves(status: int = 0) -> None:
        if session.run is not None:
            session.run.leave(status)

    def ends(status: Any = None) -> None:
        if session.run is None:
            return
        if sys._getframe(2).f_code.co_name == "spawn_main":
            session.run.status = status if isinstance(status, int) else session.run.status
        elif status and current_thread() is main_thread():
            steps = session.tracker.steps_done if session.tracker is not None else 0
            session.exits = (status if isinstance(status, int) else 1, steps)

    def nothing(token: Any, result: Any, error: BaseException | None) -> None:
        pass

    if patch := session.patch(os, "_exit"):
        patch.put(around(patch, leaves, nothing))
    if patch := session.patch(sys, "exit"):
        patch.put(around(patch, ends, nothing))
