"""Ray Train: which of its processes train, when their training ends, and where checkpoints go.

Ray trains in a thread beside the main one, and kills its workers when they are done: no exit handler ever runs there.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

from headway.events.recorder import Span
from headway.events.vocabulary import Activity, ProcessEnd, clean_text
from headway.instrument.checkpoints import place, tell_saved
from headway.instrument.patches import around

if TYPE_CHECKING:
    from headway.instrument.session import Session


def _processes(session: "Session", module: Any) -> None:
    """Controllers and watchers run the same program as workers do: one that never trains is no rank."""
    if os.path.basename(sys.argv[0]) == "default_worker.py":
        session.join("supervisor")


def _ends(session: "Session", module: Any) -> None:
    """Each training thread has one beside it that waits for its end."""
    patch = session.patch(module.ThreadRunner, "_monitor_target", ("self",))
    if patch is None:
        return

    def ended(runner: Any, result: Any, error: BaseException | None) -> None:
        recorder = session.recorder
        if recorder is None or session.run is None or session.tracker is None:
            return
        session.tracker.finish()
        for call in session.on_leave:
            call()
        raised = runner.get_error()
        if raised is None:
            session.run.finish()
        else:
            cause = getattr(raised, "_base_exc", raised)
            text = clean_text(f"{type(cause).__name__}: {cause}")
            recorder.record(ProcessEnd(t_ns=recorder.now_ns(), error=text))

    patch.put(around(patch, lambda self: self, ended))


def _reports(session: "Session", module: Any) -> None:
    """All ranks wait for each other in a report. One that uploads in the background holds the steps of its report."""
    report = session.patch(module.TrainContext, "report", ("self", "metrics", "checkpoint"))
    upload = session.patch(module.TrainContext, "_upload_checkpoint", ("self", "checkpoint_dir_name", "metrics"))
    if report is None or upload is None:
        return
    steps: dict[int, int] = {}

    def begins(self: Any, metrics: Any, checkpoint: Any = None, *args: Any, **kwargs: Any) -> Span | None:
        if checkpoint is not None and session.tracker is not None:
            steps[id(checkpoint)] = session.tracker.steps_done
        return session.begins(Activity.CHECKPOINT_BLOCKING)

    def ends(span: Span | None, result: Any, error: BaseException | None) -> None:
        session.ends(span, error is not None)

    def uploads(self: Any, name: Any, metrics: Any, checkpoint: Any = None, *args: Any, **kwargs: Any) -> int:
        return steps.pop(id(checkpoint), 0)

    def uploaded(step: int, result: Any, error: BaseException | None) -> None:
        if step and error is None:
            tell_saved(session, step, place(result.checkpoint.path))

    report.put(around(report, begins, ends))
    upload.put(around(upload, uploads, uploaded))


MODULES = {
    "ray._private.worker": _processes,
    "ray.train.v2._internal.execution.context": _reports,
    "ray.train.v2._internal.execution.worker_group.thread_runner": _ends,
}
"""What to do with which module once it is imported."""
