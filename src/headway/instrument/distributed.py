"""Process groups, and torchrun's agent: the process that launches ranks and starts them again."""

from typing import TYPE_CHECKING, Any

from headway.events.recorder import Span
from headway.events.vocabulary import Activity
from headway.instrument.patches import around

if TYPE_CHECKING:
    from headway.instrument.session import Session


def _groups(session: "Session", module: Any) -> None:
    patch = session.patch(module, "init_process_group", ("backend",))
    if patch is not None:

        def begins(*args: Any, **kwargs: Any) -> Span | None:
            session.join()
            return session.begins(Activity.PROCESS_GROUP_INIT, what="init_process_group")

        def ends(span: Span | None, result: Any, error: BaseException | None) -> None:
            session.ends(span, error is not None)
            if error is None:
                session.join("rank", module.get_rank(), module.get_world_size())

        patch.put(around(patch, begins, ends))
    session.timed(module, "new_group", Activity.PROCESS_GROUP_INIT, ("ranks",), what="new_group")
    session.timed(module, "split_group", Activity.PROCESS_GROUP_INIT, ("parent_pg",), what="split_group")
    session.timed(module, "destroy_process_group", "destroy_process_group", ("group",))


def _agent(session: "Session", module: Any) -> None:
    """torchrun's own phases. Its methods are private: without them a recovery is not split into its parts."""
    for name, activity in (
        ("_rendezvous", Activity.RENDEZVOUS),
        ("_stop_workers", Activity.TEARDOWN),
        ("_start_workers", Activity.LAUNCHER_INIT),
    ):
        patch = session.patch(module.LocalElasticAgent, name, ("self", "worker_group"))
        if patch is not None:

            def begins(*args: Any, activity: str = activity, **kwargs: Any) -> Span | None:
                session.join("supervisor")
                return session.begins(activity)

            def ends(span: Span | None, result: Any, error: BaseException | None) -> None:
                session.ends(span, error is not None)

            patch.put(around(patch, begins, ends))


MODULES = {
    "torch.distributed.distributed_c10d": _groups,
    "torch.distributed.elastic.agent.server.local_elastic_agent": _agent,
}
"""What to do with which module once it is imported."""
