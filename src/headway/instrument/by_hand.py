"""Programs that change their weights without an optimizer of torch's: a step ends when the gradients are there.

Until an optimizer steps, calls of `backward` are watched. If a weight has changed between them again and again, the
program trains by hand, and each backward ends a step. As soon as an optimizer steps, nothing is watched any more.
"""

import weakref
from typing import TYPE_CHECKING, Any

from headway.instrument.patches import around

if TYPE_CHECKING:
    from headway.instrument.session import Session

CHANGES = 3
"""A weight that has changed this often between two calls of `backward` is trained."""

NODES = 10_000
"""So many nodes of a graph are looked through for a weight."""


class Hand:
    """Stands for the optimizer of a program that has none."""

    def __init__(self, weight: Any) -> None:
        self.state: dict[Any, Any] = {}
        self.param_groups = [{"params": [weight]}]


class ByHand:
    """Watches one process until it trains."""

    def __init__(self, session: "Session", autograd: Any) -> None:
        self._session = session
        self._weight: weakref.ref[Any] | None = None
        self._number = self._began_ns = self._changes = 0
        self._hand: Hand | None = None
        self._patch = session.patch(autograd, "backward", ("tensors",))
        if self._patch is not None:
            self._patch.put(around(self._patch, self._begins, self._ends))
            session.on_optimizer.append(self._patch.undo)

    def _begins(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Look whether a weight has changed since the last call."""
        weight = self._weight() if self._weight is not None else None
        if self._hand is not None or self._session.recorder is None:
            return
        if weight is None:
            weight = _weight_of(tensors[0] if isinstance(tensors, tuple | list) else tensors)
            if weight is None:
                return
            self._weight, self._changes = weakref.ref(weight), -1
            self._began_ns = self._session.recorder.now_ns()
        number = weight.detach().reshape(-1)[0].item()
        self._changes += self._changes < 0 or number != self._number
        self._number = number

    def _ends(self, token: Any, result: Any, error: BaseException | None) -> None:
        weight = self._weight() if self._weight is not None else None
        if error is not None or self._changes < CHANGES or weight is None:
            return
        if self._hand is not None and self._session.tracker is not None:
            self._session.tracker.stepped(self._hand)
            return
        self._hand = Hand(weight)
        self._session.trains().evaluation.began(self._began_ns)
        self._session.trains().stepped(self._hand)
        self._session.first_step_done()


def _weight_of(tensor: Any) -> Any:
    """A weight that a tensor was computed from, if its numbers can be looked at without waiting for a device."""
    nodes, seen = [tensor.grad_fn], 0
    while nodes and seen < NODES:
        node, seen = nodes.pop(), seen + 1
        variable = getattr(node, "variable", None)
        if variable is not None and variable.device.type == "cpu" and variable.numel():
            return variable
        nodes += [following for following, _ in getattr(node, "next_functions", ()) if following is not None]
    return None


def _torch(session: "Session", torch: Any) -> None:
    ByHand(session, torch.autograd)


MODULES = {"torch": _torch}
"""What to do with which module once it is imported."""
