"""Loaders, and passes through them."""

import itertools
from collections.abc import Callable
from threading import get_ident
from typing import ClassVar

_numbers = itertools.count(1)


class Loader:
    """What is known of one DataLoader."""

    __slots__ = ("batch_size", "is_quiet", "trains")

    def __init__(self, batch_size: int | None = None) -> None:
        self.batch_size = batch_size
        self.trains = False
        """Whether one of its passes has trained."""
        self.is_quiet = False
        """Whether the program fetches batches to train on while gradients are off."""


class Pass:
    """One way through a loader, from the call of `iter` to the end of its data, or until it is dropped."""

    __slots__ = (
        "__weakref__", "asked_ns", "began_ns", "drawn_at", "dropped", "fetches", "got_ns", "held_ns", "is_quiet",
        "left_ns", "loader", "number", "over", "resumes", "thread", "trains", "waited_ns",
    )  # fmt: skip

    KEPT: ClassVar = (
        "fetches", "waited_ns", "left_ns", "thread", "asked_ns", "got_ns", "held_ns", "resumes", "is_quiet", "over"
    )  # fmt: skip
    """What outlives a pass that is dropped."""

    def __init__(self, dropped: "Callable[[Pass], None]", loader: Loader, began_ns: int) -> None:
        self.dropped, self.loader, self.began_ns = dropped, loader, began_ns
        self.number = next(_numbers)
        self.thread = get_ident()
        self.fetches = self.waited_ns = self.left_ns = self.asked_ns = self.got_ns = self.held_ns = 0
        self.drawn_at = -2
        """The number of steps done when it was last drawn from without training."""
        self.over = self.trains = self.resumes = False
        self.is_quiet = False
        """Whether gradients were off at its last fetch."""

    def __del__(self) -> None:
        if not self.over:
            self.dropped(self)
