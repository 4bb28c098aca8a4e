"""Where in the job's steps a process went on that could count only from its own start: what it loaded tells.

A program that was not written for headway loads a file, and does not say what is in it. If the job saved a checkpoint
there before, then that is where its steps go on.
"""

from collections.abc import Iterable, Iterator

from headway.accounting.members import Member
from headway.accounting.timeline import RankStint
from headway.events.vocabulary import Restored, Saved

Placed = list[tuple[int, int | None]]


def place_stints(attempts: Iterable[dict[int, Member]]) -> None:
    """Sets `Member.placed` of every rank that went on from something it, or another rank with it, had loaded."""
    attempts = list(attempts)
    if not any(member.timeline.loads for members in attempts for member in members.values()):
        return
    saved: dict[tuple[str, str], int] = {}
    for members in attempts:
        anchors = _Anchors(members)
        for rank, stint, record in _checkpoints(members):
            if isinstance(record, Saved):
                step = record.step + anchors.shift(rank, stint)
                saved |= dict.fromkeys(_keys(record), step)
            else:
                # Where a process says itself at which step it goes on, only the state itself tells better.
                keys = [key for key in _keys(record) if record.step is None or key[0] == "content"]
                found = [saved[key] for key in keys if key in saved]
                if found:
                    anchors.add(rank, stint, found[0])
                elif record.step is not None:
                    anchors.forget(rank, stint)
        for rank, member in members.items():
            placed = anchors.placed(rank)
            if any(shift or step is not None for shift, step in placed):
                member.placed = placed


def _keys(record: Saved | Restored) -> list[tuple[str, str]]:
    """By what a checkpoint is known again: the state in it, else its path, else the file, which may have been moved."""
    names = (("content", record.content), ("path", record.path), ("file", record.file))
    return [(kind, name) for kind, name in names if name]


def _checkpoints(members: dict[int, Member]) -> Iterator[tuple[int, int, Saved | Restored]]:
    """What all ranks of an attempt saved and restored, in order: rank, stint, record."""
    told = []
    for rank, member in members.items():
        at_ns = 0
        for place, (stint, record) in enumerate(member.timeline.checkpoints):
            at_ns = max(at_ns, record.t_ns)  # as written, whatever became of the clock
            told.append((at_ns + member.offset_ns, rank, place, stint, record))
    told.sort(key=lambda item: item[:3])
    for _, rank, _, stint, record in told:
        yield rank, stint, record


class _Anchors:
    """The steps at which stints of one attempt went on.

    Often one rank loads and the others get their weights from it. So what is known of a rank's n-th stint holds for the
    n-th of all ranks that begins at the same step by their own count.
    """

    def __init__(self, members: dict[int, Member]) -> None:
        self._stints: dict[int, list[RankStint]] = {rank: m.timeline.all_stints() for rank, m in members.items()}
        self._placed: dict[int, Placed] = {rank: [] for rank in members}
        self._own: dict[tuple[int, int], int] = {}
        self._shared: dict[tuple[int, int], tuple[int, int]] = {}

    def add(self, rank: int, stint: int, step: int) -> None:
        """This rank's stint went on at `step`, whatever it loaded before. The first rank to load speaks for others."""
        if stint >= len(self._stints[rank]):  # it has not begun
            return
        self._own[rank, stint] = step
        del self._placed[rank][stint:]
        key = (stint, self._stints[rank][stint].first)
        if self._shared.setdefault(key, (rank, step))[0] == rank:
            self._shared[key] = (rank, step)
            for placed in self._placed.values():
                del placed[stint:]

    def forget(self, rank: int, stint: int) -> None:
        """The rank itself says where this stint went on."""
        self._own.pop((rank, stint), None)
        del self._placed[rank][stint:]

    def shift(self, rank: int, stint: int) -> int:
        """What to add to the rank's own step numbers in one of its stints."""
        return self.placed(rank)[stint][0] if 0 <= stint < len(self._stints[rank]) else 0

    def placed(self, rank: int) -> Placed:
        """For each of the rank's stints that shift, and the step it was restored to."""
        placed, stints = self._placed[rank], self._stints[rank]
        for at in range(len(placed), len(stints)):
            placed.append(self._place(rank, at, stints[at]))
        return placed

    def _place(self, rank: int, at: int, stint: RankStint) -> tuple[int, int | None]:
        step = self._own.get((rank, at))
        if step is None and stint.restored is not None:
            return 0, stint.restored
        if step is None:
            step = self._shared.get((at, stint.first), (0, None))[1]
        if step is not None:
            return step - stint.first, step
        follows_on = at > 0 and self._stints[rank][at - 1].next == stint.first
        return self._placed[rank][at - 1][0] if follows_on else 0, None
