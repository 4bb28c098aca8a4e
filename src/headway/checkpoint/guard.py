"""A supervisor's part: as long as it lives, memory is held for the trainers that it will start again."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from headway.checkpoint import wire
from headway.checkpoint.wire import Wire

PATIENCE_S = 900.0
"""How long the end of a job waits for its last uploads."""

_LOOK_S = 1.0
_ANSWER_S = 10.0
_FOLDER = "keepers"


def announce(root: str, place: str, board: str | None) -> None:
    """Tells the supervisor, where there is one, which keeper its job uses: a file beside the board it has given."""
    if board:
        folder = Path(board).parent / _FOLDER
        try:
            folder.mkdir(exist_ok=True)
            (folder / wire.address(place)[1:]).write_text(json.dumps([root, place]))
        except OSError:
            pass  # then the keeper waits for trainers by itself, for as long as it does


class Guard:
    """Holds a connection to each keeper of a job. At the end it waits for the uploads, and lets the keepers go."""

    def __init__(self, scratch: str, say: Callable[[str], None]) -> None:
        self._folder, self._say = Path(scratch) / _FOLDER, say
        self._wires: dict[str, Wire] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="headway-guard", daemon=True)

    def __enter__(self) -> "Guard":
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()
        until = time.monotonic() + PATIENCE_S
        for root, link in self._wires.items():
            link.send({"do": "flush"})
            if self._is_busy(link):
                self._say(f"waiting for the checkpoints to be uploaded to {root} …")
            while self._is_busy(link) and time.monotonic() < until:
                time.sleep(0.05)
            link.send({"do": "bye"})
            link.close()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        for name in os.listdir(self._folder) if self._folder.exists() else ():
            try:
                root, place = json.loads((self._folder / name).read_text())
            except ValueError:
                continue  # it is being written
            held = self._wires.get(root)
            if held is not None and held.is_up():
                continue
            if held is not None:
                self._wires.pop(root).close()
            if (link := wire.connect(place)) is not None:
                hello = link.send({"do": "hello", "place": place, "session": "", "rank": -1}) and link.has_message(
                    _ANSWER_S
                )
                if hello and link.receive() is not None:
                    self._wires[root] = link
                else:
                    link.close()

    def _is_busy(self, link: Wire) -> bool:
        answer = link.receive() if link.send({"do": "busy"}) and link.has_message(_ANSWER_S) else None
        return answer is not None and bool(answer[0]["busy"])
