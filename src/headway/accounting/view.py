"""One rank's time in one attempt: the pieces of its timeline, put into buckets, over any stretch of the attempt."""

import math
from collections.abc import Callable
from functools import cache

from headway.accounting.attempts import Attempt
from headway.accounting.members import Member
from headway.accounting.rules import Bucket, Key, Loop, Part, bucket
from headway.accounting.timeline import Piece, cut
from headway.events.vocabulary import Activity

Sums = dict[Key, int]
Labels = list[tuple[float, float, Bucket]]

UNATTRIBUTED: Key = (Bucket.UNATTRIBUTED, "")

_CAUSES: tuple[str, ...] = (
    Activity.CHECKPOINT_BLOCKING, Activity.DATA_WAIT, Activity.PT2_COMPILATION, Activity.EVALUATION
)  # fmt: skip
_bucket = cache(bucket)
_STEP_KEYS: dict[Bucket, Key] = {b: (b, "") for b in Bucket}


class RankView:
    """One rank's time in one attempt, from the attempt's begin to its end."""

    __slots__ = ("_gap", "_labels", "_look", "_most_caused_ns", "_parts", "attempt", "end_ns", "first_step_end_ns",
                 "is_last", "last_step_end_ns", "member", "_sums_all")  # fmt: skip

    def __init__(self, attempt: Attempt, member: Member, is_last: bool, gap: list[Piece], labels: list[Labels]) -> None:
        self.attempt, self.member, self.is_last = attempt, member, is_last
        self._gap = gap
        self._labels = [labels[joint] for joint in member.joint]
        if member.placed:
            own = zip(self._labels, member.placed, strict=True)
            self._labels = [[(a - shift, b - shift, label) for a, b, label in steps] for steps, (shift, _) in own]
        timeline = member.timeline
        # A process that vanished was at whatever it was last seen at until its attempt failed.
        vanished = not member.is_clean and member.gone is None and timeline.ended is None
        self.end_ns = attempt.stopped_ns if member.alive or vanished else max(member.last_sign_ns, member.begin_ns)
        seen_ns = max(self.end_ns, member.last_sign_ns)  # a run in the cell may end after the attempt did: laid whole
        self._look = look = timeline.look(seen_ns - member.offset_ns, member.alive)
        trained = timeline.first_step is not None
        finishing = timeline.ended is not None or not member.alive
        tail = Part.INIT if not trained else Part.TAIL if finishing else Part.LOOP
        open_run = Part.LOOP if trained else Part.INIT
        self._parts = ((look.init, Part.INIT), (look.open_run, open_run), (look.tail, tail))
        offset = member.offset_ns
        self.first_step_end_ns = timeline.first_step[1] + offset if timeline.first_step else None
        last_steps = [p.end_ns + offset for p in look.open_run][-1:]
        if timeline.last_step_ns is not None:
            last_steps.append(timeline.last_step_ns + offset)
        self.last_step_end_ns = max(last_steps, default=None)
        self._sums_all: Sums | None = None
        self._most_caused_ns: int | None = None

    @property
    def sums_all(self) -> Sums:
        """Time by bucket in the whole attempt; worked out when first asked for, since few ranks ever are."""
        if self._sums_all is None:
            self._sums_all = self.sums(self.attempt.begin_ns, self.attempt.end_ns)
        return self._sums_all

    def sums(self, begin_ns: int, end_ns: int) -> Sums:
        """Time by bucket in a stretch of the attempt; adds up to the stretch."""
        sums: Sums = {}
        if end_ns <= begin_ns:
            return sums
        for piece in self._gap:
            if piece.begin_ns < end_ns and piece.end_ns > begin_ns:
                _add(sums, self._key(piece.what, Part.INIT), cut(piece, begin_ns, end_ns))
        offset = self.member.offset_ns
        # Time before a process became this program, by `exec`, belongs to the program before.
        begin, end = max(begin_ns, self.member.begin_ns) - offset, min(end_ns, self.end_ns) - offset
        for pieces, part in self._parts:
            for piece in pieces:
                if piece.begin_ns < end and piece.end_ns > begin:
                    self._add_piece(sums, cut(piece, begin, end), part)
        self._add_loop(sums, begin, end)
        if end_ns > self.end_ns:
            key = self._after()
            sums[key] = sums.get(key, 0) + end_ns - max(begin_ns, self.end_ns)
        return sums

    def pieces(self) -> list[tuple[int, int, Key]]:
        """The whole view as stretches of job time, for drawing; a run of steps shows its waits first."""
        offset, begin, end = self.member.offset_ns, self.attempt.begin_ns, self.attempt.end_ns
        drawn = [(p, 0, Part.INIT) for p in self._gap] + [(p, offset, Part.INIT) for p in self._look.init]
        drawn += [(p, offset, Part.LOOP) for p in self._look.loop.items]
        drawn += [(p, offset, part) for pieces, part in self._parts[1:] for p in pieces]
        result = []
        for piece, shift, part in drawn:
            first = max(begin, self.member.begin_ns) if shift else begin
            low, high = max(piece.begin_ns + shift, first), min(piece.end_ns + shift, end)
            if low >= high:
                continue
            if piece.what is not Loop.STEP:
                result.append((low, high, self._key(piece.what, part)))
                continue
            sums: Sums = {}
            self._add_piece(sums, cut(piece, low - shift, high - shift), part)
            for key, ns in sums.items():
                result.append((low, low + ns, key))
                low += ns
        if self.end_ns < end:
            result.append((max(self.end_ns, begin), end, self._after()))
        return result

    def stalls(self) -> list[tuple[int, int]]:
        """When this rank stalled."""
        pieces, offset = (*self._look.loop.items, *self._look.open_run), self.member.offset_ns
        return [(p.begin_ns + offset, p.end_ns + offset) for p in pieces if p.what is Loop.STALL]

    @property
    def most_caused_ns(self) -> int:
        """The most time it spent on any one thing that others may have stalled for: whether it is worth asking when."""
        if self._most_caused_ns is None:
            loop = self._look.loop.sums
            sums = {what: loop.get(what, 0) for what in _CAUSES}
            for pieces, _ in self._parts:
                for piece in pieces:
                    if piece.what in sums:
                        sums[piece.what] += piece.end_ns - piece.begin_ns
            self._most_caused_ns = max(sums.values())
        return self._most_caused_ns

    def bars(self) -> list[tuple[str, int, int, int]]:
        """Every span as recorded: name, thread, begin and end in job time."""
        timeline, offset = self.member.timeline, self.member.offset_ns
        return [(b.name, b.thread, b.begin_ns + offset, (b.end_ns or self.end_ns - offset) + offset)
                for b in timeline.bars()]  # fmt: skip

    @property
    def waited_for_ns(self) -> int:
        """How long after the attempt's begin this rank kept the others from training their first step."""
        if self.first_step_end_ns is None:
            return -1
        return self.first_step_end_ns - self.member.timeline.first_step_ns - self.attempt.begin_ns

    @property
    def lost_in_loop_ns(self) -> int:
        """Time between this rank's first step and its last that was not spent in steps."""
        if self.first_step_end_ns is None or self.last_step_end_ns is None:
            return -1
        begin, end = self.first_step_end_ns, min(self.last_step_end_ns, self.attempt.end_ns)
        return max(end - begin, 0) - self._stepping_ns(begin, end)

    def _stepping_ns(self, begin_ns: int, end_ns: int) -> int:
        """Time in steps inside a stretch: what `sums` gives, without telling new ones from others."""
        offset = self.member.offset_ns
        begin, end = begin_ns - offset, min(end_ns, self.end_ns) - offset
        within = self._look.loop.within(begin, end)
        took = sum([ns for what, ns in within.items() if not isinstance(what, str)])
        for pieces, _ in self._parts:
            for low, high, what, *_ in pieces:
                if high > begin and low < end and (what is Loop.STEP or what is Loop.CUT_STEP):
                    took += min(high, end) - max(low, begin)
        return took

    def _after(self) -> Key:
        """What the time behind this rank's end is: nobody has noticed yet that it died, or it waits for the others."""
        unnoticed = self.attempt.awaits_restart or (self.attempt.alive and not self.member.is_clean)
        return self._key(Activity.DETECTION if unnoticed else "", Part.TAIL)

    def _key(self, what: str, part: Part) -> Key:
        if self.member.is_launcher:
            return UNATTRIBUTED
        return _bucket(what, part, self.attempt.is_first, self.is_last)

    def _add_piece(self, sums: Sums, piece: Piece, part: Part) -> None:
        if piece.what is Loop.STEP:
            self._add_steps(sums, piece.stint, piece.end_ns - piece.begin_ns, piece.first, piece.next)
        else:
            _add(sums, self._key(piece.what, part), piece)

    def _add_loop(self, sums: Sums, begin: int, end: int) -> None:
        loop = self._look.loop
        bounds = loop.steps_within(begin, end)
        for what, ns in loop.within(begin, end).items():
            if isinstance(what, str):
                if ns:
                    key = self._key(what, Part.LOOP)
                    sums[key] = sums.get(key, 0) + ns
            else:
                first, next = bounds.get(what, (-math.inf, math.inf))
                self._add_steps(sums, what, ns, first, next, self.member.timeline.stints[what].took_ns)

    def _add_steps(
        self, sums: Sums, stint: int, ns: int, first: float, next: float,
        weigh: Callable[[float, float], float] = lambda a, b: b - a,
    ) -> None:  # fmt: skip
        """Shares step time out over the labels of the steps it was spent on."""
        labels = self._labels[stint] if stint < len(self._labels) else []
        weights = [(label, weigh(max(a, first), min(b, next))) for a, b, label in labels if a < next and b > first]
        if not weights:  # the step under way: as new as the data it is on
            label = next_label(labels, first)
            weights = [(label, 1)]
        for (label, _), part in zip(weights, share_out(ns, [weight for _, weight in weights]), strict=True):
            if part:
                key = _STEP_KEYS[label]
                sums[key] = sums.get(key, 0) + part


def next_label(labels: Labels, step: float) -> Bucket:
    """The label of a step that is not finished: that of the steps around it, new behind all others."""
    return next((label for a, b, label in labels if a <= step < b), Bucket.TRAINING_EFFECTIVE)


def share_out(total: int, weights: list[float]) -> list[int]:
    """Splits a whole number in proportion; the parts are whole, not negative, and add up to it."""
    whole = sum(weights)
    parts, given, seen = [], 0, 0.0
    for weight in weights:
        seen += weight
        upto = total if not whole or seen >= whole else round(total * (seen / whole))
        parts.append(upto - given)
        given = upto
    return parts


def _add(sums: Sums, key: Key, piece: Piece) -> None:
    sums[key] = sums.get(key, 0) + piece.end_ns - piece.begin_ns
