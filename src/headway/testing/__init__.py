"""For tests, yours and ours: a clock you turn by hand, journals told as stories, and processes that die on cue.

In: what happened, in seconds. Out: real journal files in a real folder, written by the real recorder, and the ledger
read back from them. This room knows nothing of torch.

Typical use::

    story = Story(tmp_path)
    rank = story.rank(start=0)
    rank.span("train_module_creation", 5).steps(100, each=1.0).saved(50).killed()
    story.rank(start=120).restored(50).steps(50, each=1.0, first=50).finished()
    assert story.ledger().failures[0]["rank"] == 0
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.accounting.attempts import Instant
from headway.accounting.ledger import JobAccounts, Ledger
from headway.accounting.rules import StallRule
from headway.events.clock import Clock
from headway.events.job import JobReader
from headway.events.journal import Writer
from headway.events.recorder import Recorder, Span
from headway.events.vocabulary import Process, ProcessEnd, ProcessGone, Restored, Saved, Scheduled, Told
from headway.paths import JobPaths
from headway.run import Run

__all__ = ["FakeClock", "Rank", "Story", "kill_at", "kill_in"]

EPOCH_S = 1_700_000_000.0
"""Wall time at second 0 of a story."""


class FakeClock(Clock):
    """Clocks that move only when told to."""

    def __init__(self, at: float = 0.0, *, boot: str = "boot-0", wall_ahead: float = 0.0, booted: float = -5000.0):
        self._boot = boot
        self._now = round((at - booted) * 1e9)
        self._wall = round((EPOCH_S + wall_ahead + at) * 1e9)

    def now_ns(self) -> int:
        """The monotonic clock."""
        return self._now

    def wall_ns(self) -> int:
        """The wall clock."""
        return self._wall

    def boot(self) -> str:
        """The boot this clock belongs to."""
        return self._boot

    def process_started_ns(self, pid: int) -> int | None:
        """Now: in a story, processes start when they are told of."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Both clocks move on."""
        self._now += round(seconds * 1e9)
        self._wall += round(seconds * 1e9)

    def jump(self, seconds: float) -> None:
        """Somebody sets the wall clock; the monotonic one does not care."""
        self._wall += round(seconds * 1e9)


class Story:
    """A job told process by process, in seconds since its begin."""

    def __init__(self, home: Path, job: str = "story", stall: StallRule | None = None) -> None:
        self.paths = JobPaths(home, job).make()
        self.accounts = JobAccounts(stall)
        self.reader = JobReader(self.paths)
        self._pids = 1000
        self._ranks: list[Rank] = []

    def rank(
        self, rank: int = 0, of: int = 1, *, start: float = 0.0, wall_ahead: float = 0.0, boot: str = "boot-0",
        **process: Any,
    ) -> "Rank":  # fmt: skip
        """A process begins. `wall_ahead` is how far its host's wall clock is off; other words set `Process` fields."""
        self._pids += 1
        clock = FakeClock(start, boot=boot, wall_ahead=wall_ahead)
        fields: dict[str, Any] = {"node": boot, "pid": self._pids, "started_ns": clock.now_ns(), "program": "train.py"}
        record = Process(
            t_ns=clock.now_ns(), wall_ns=clock.wall_ns(), boot=boot, job=self.paths.job, rank=rank, world_size=of,
            **fields | process,
        )  # fmt: skip
        told = Rank(Recorder(Writer(self.paths.journal(f"p{self._pids}"), clock.now_ns), clock), clock, record)
        self._ranks.append(told)
        return told

    def launcher(self, *, start: float = 0.0, **process: Any) -> "Rank":
        """The command that the job was started with begins."""
        return self.rank(start=start, role="launcher", **process)

    def publisher(self, *, start: float, **process: Any) -> "Rank":
        """A process begins that publishes what another has trained."""
        return self.rank(start=start, role="publisher", **{"program": "headway.publish"} | process)

    def ledger(self, now: float | None = None, alive: tuple["Rank", ...] = (), lost: tuple["Rank", ...] = ()) -> Ledger:
        """The ledger `now` seconds into the story, with some processes still alive, and some lost with their node."""
        for name, batch in self.reader.poll():
            self.accounts.take(name, batch)
        at = now if now is not None else 0.0
        clock = FakeClock(at)
        living, missing = ({rank.recorder.writer.path.stem for rank in ranks} for ranks in (alive, lost))
        result = self.accounts.ledger(Instant(clock.boot(), clock.now_ns(), clock.wall_ns()), living, missing)
        assert result is not None, "no rank has begun in this story"
        return result


class Rank:
    """One process of a story. Every method tells what it does next, and returns it for the next word."""

    def __init__(self, recorder: Recorder, clock: FakeClock, process: Process) -> None:
        self.recorder, self.clock, self.process = recorder, clock, process
        recorder.record(process)

    def becomes(self, rank: int = 0, of: int = 1, *, role: str = "rank") -> "Rank":
        """It turns out to be something else than it began as."""
        self.process = replace(self.process, t_ns=self.clock.now_ns(), rank=rank, world_size=of, role=role)
        self.recorder.record(self.process)
        return self

    def wait(self, seconds: float) -> "Rank":
        """Time passes, and nothing says what for."""
        self.clock.advance(seconds)
        return self

    def span(self, name: str, seconds: float) -> "Rank":
        """An activity, from begin to end."""
        with self.recorder.span(name):
            self.clock.advance(seconds)
        return self

    def period(self, name: str, seconds: float, *, ago: float = 0.0) -> "Rank":
        """An activity is recognised only now: it took `seconds`, and was over `ago` seconds before."""
        end = self.clock.now_ns() - round(ago * 1e9)
        self.recorder.period(name, end - round(seconds * 1e9), end)
        return self

    @contextmanager
    def during(self, name: str) -> Iterator["Rank"]:
        """An activity around others."""
        with self.recorder.span(name):
            yield self

    def steps(
        self, count: int, *, each: float, data: float = 0.0, first: int | None = None, batch_size: int | None = None,
        inside: dict[int, tuple[str, float]] | None = None, stall: dict[int, float] | None = None,
    ) -> "Rank":  # fmt: skip
        """A loop of steps. `each` is one step's time, `data` the wait before it; `inside` puts spans into steps and
        `stall` lengthens them, by their place in this loop."""

        def batches() -> Iterator[int]:
            for number in range(count):
                self.clock.advance(data)
                yield number

        for _, number in self.recorder.steps(batches(), first, batch_size):
            if inside and number in inside:
                self.span(*inside[number])
            self.clock.advance(each + (stall or {}).get(number, 0.0))
        return self

    def dies_in_step(self, after: float = 0.0) -> None:
        """The next step gets its data and never ends."""
        meter = self.recorder.steps_meter
        meter.open()
        meter.begin()
        self.clock.advance(after)

    def saved(self, step: int, **known_by: Any) -> "Rank":
        """A checkpoint of all steps before `step` is committed; other words are fields of `Saved`."""
        self.recorder.record(Saved(t_ns=self.clock.now_ns(), step=step, **known_by))
        return self

    def restored(self, step: int | None, **known_by: str) -> "Rank":
        """Training will go on at `step`; without one, at the step that what is loaded holds. Other words are fields of
        `Restored`."""
        self.recorder.record(Restored(t_ns=self.clock.now_ns(), step=step, **known_by))
        return self

    def handed_over(self, id: str, step: int, **told: Any) -> "Rank":
        """A checkpoint is to be published by somebody else; other words are those of `Told.ANCHOR`."""
        about = {"recipe": "safetensors", "runner": "local", "submitted": True, "seconds": 0.0} | told
        self.recorder.mark(Told.ANCHOR, id=id, step=step, **about)
        return self

    def published(self, id: str, outcome: str = "published", **told: Any) -> "Rank":
        """A publisher says what became of it; other words are those of `Told.PUBLISHED`."""
        self.recorder.mark(Told.PUBLISHED, id=id, outcome=outcome, **told)
        return self

    def scheduled(self, eligible: float, allocated: float) -> "Rank":
        """The platform tells when the job could run and when it got its hardware, in the story's seconds."""
        moments = [round((EPOCH_S + at) * 1e9) for at in (eligible, allocated)]
        record = Scheduled(
            t_ns=self.clock.now_ns(), eligible_wall_ns=moments[0], allocated_wall_ns=moments[1], source="story"
        )
        self.recorder.record(record)
        return self

    def finished(self) -> None:
        """It ends well."""
        self.recorder.record(ProcessEnd(t_ns=self.clock.now_ns()))
        self.recorder.close()

    def crashed(self, error: str = "RuntimeError: boom") -> None:
        """It ends by an exception."""
        self.recorder.record(ProcessEnd(t_ns=self.clock.now_ns(), error=error))
        self.recorder.close()

    def killed(self, seen: bool = False) -> None:
        """It is gone without a word; if `seen`, somebody noted when."""
        if seen:
            self.gone(-9)
        else:
            os.close(self.recorder.writer._fd)

    def gone(self, exit_code: int = 0) -> None:
        """Somebody sees it end, and how."""
        self.recorder.record(ProcessGone(t_ns=self.clock.now_ns(), exit_code=exit_code))
        os.close(self.recorder.writer._fd)


def kill_at(
    step: int, now: int, *, marker: Path, rank: int = 0, this_rank: int | None = None, sig: int = signal.SIGKILL
) -> None:
    """Sends this process a real signal when step `now` is `step` on rank `rank`: once, however often the job restarts.

    `marker` is a file that remembers it. Without `this_rank`, the rank is taken from the environment.
    """
    mine = int(os.environ.get("RANK", "0")) if this_rank is None else this_rank
    if now == step and mine == rank:
        _kill_once(marker, sig)


def kill_in(run: Run, phase: str, *, marker: Path, rank: int = 0, sig: int = signal.SIGKILL) -> None:
    """Arms a run so that on rank `rank` the process gets a real signal as soon as it has begun `phase`: once."""
    span = run.recorder.span

    def deadly(name: str, **attrs: Any) -> Span:
        begun = span(name, **attrs)
        if name == phase and run.rank == rank:
            with begun:
                _kill_once(marker, sig)
        return begun

    run.recorder.span = deadly  # type: ignore[method-assign]


def _kill_once(marker: Path, sig: int) -> None:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), sig)
