"""What publishing takes, and how much of it a trainer waits for.

A DLRM on two ranks ends in three ways, which take turns: it publishes by itself and then leaves; it hands over; it only
saves, which is the floor. The same recipe is then run by `headway publish run` and by hand. Every compilation is cold.
`programs/publishing.py` is the trainer, `programs/publish_by_hand.py` is what one does without headway.
"""

import html
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from bench.measure import Row, short
from headway.accounting.rules import Bucket
from headway.cli.source import Source
from headway.events.job import JobReader
from headway.observe.palette import COLOURS, PUBLISHING
from headway.paths import JobPaths
from headway.publish.request import all_desks

PROGRAMS = Path(__file__).with_name("programs")
TRAINER, BY_HAND = PROGRAMS / "publishing.py", PROGRAMS / "publish_by_hand.py"
INSIDE, HANDED, SAVED = "inside", "handed", "saved"
RECIPE = "safetensors,aotinductor"
PICTURE = Path("out", "publish.svg")
PATIENCE_S = 300.0
"""What any process here may take."""

Report = dict[str, Any]
T = TypeVar("T")


def run(quick: bool) -> list[Row]:
    """The rows on publishing."""
    rounds, steps = (1, 10) if quick else (3, 60)
    small_mb, large_mb = (64, 256) if quick else (1000, 4000)
    with _folder() as folder:
        bench = Bench(folder)
        jobs = bench.jobs(rounds, steps)
        rows = [
            *_shutdown_rows(jobs),
            bench.recipe_row(jobs[SAVED][-1].checkpoint, rounds),
            *bench.weights_rows(small_mb, rounds),
            *bench.memory_rows(large_mb),
        ]
    _draw(jobs)
    if quick:  # of a small checkpoint, what does not grow with it is most
        rows = [replace(row, at_most=None, times=None) for row in rows]
    return rows


@contextmanager
def _folder() -> Iterator[Path]:
    # The temporary folder may be in memory; `out` is where the results go, too.
    Path("out").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="publish-", dir="out")).absolute()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Piece(NamedTuple):
    """Something that was done, in seconds after the job's begin."""

    name: str
    begin_s: float
    end_s: float

    @property
    def took_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Job:
    """A trainer that has ended, and whose model is published."""

    checkpoint: Path
    watched_s: float
    """From the last rank's last step to its exit, as seen from outside."""
    report: Report
    publisher: list[Piece]

    @property
    def shutdown_s(self) -> float:
        """The same, as its ledger has it."""
        return sum(took for bucket, took in self.report["ledger"].items() if bucket.startswith("shutdown."))

    @property
    def saving_s(self) -> float:
        """Of that, the anchor save, on the rank that hands over."""
        return float(self.report["ranks"][0]["ledger"][Bucket.SHUTDOWN_FINAL_CHECKPOINT])

    @property
    def handing_over_s(self) -> float:
        """Of that, what `finish(publish=...)` adds to it, on the same rank."""
        return float(self.report["publications"][0]["handover_s"])


class Bench:
    """A folder on a real disk, and the processes that publish from it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._home = folder, folder / "home"
        self._numbers = itertools.count()

    # --- trainers ---

    def jobs(self, rounds: int, steps: int) -> dict[str, list[Job]]:
        """Trainers of each way, after one that is not counted."""
        self._job(SAVED, 3)
        return _in_turns(rounds, {way: lambda way=way: self._job(way, steps) for way in (INSIDE, HANDED, SAVED)})

    def _job(self, way: str, steps: int) -> Job:
        folder, name = self._place(way), f"{way}-{next(self._numbers)}"
        os.sync()
        command = ("headway", "run", "--nproc-per-node", "2", "--job", name, TRAINER, way, folder, steps)
        with self._started(command, folder) as process:
            watched_s = _shutdown_s(folder, process)
            process.wait(PATIENCE_S)
        if process.returncode:
            raise RuntimeError(f"the trainer failed:\n{_last_lines(folder)}")
        if way == HANDED:
            self._wait_for(name)
        report = json.loads(self._told("headway", "report", name, "--json"))
        job = Job(max((folder / "checkpoints").glob("step-*")), watched_s, report, self._publisher(name))
        print(
            f"  {way}: {short(job.watched_s)} s after its last step, its report says {short(job.shutdown_s)} s",
            flush=True,
        )
        return job

    def _wait_for(self, job: str) -> None:
        """Until its publisher has ended."""
        until = time.monotonic() + PATIENCE_S
        desk = next(desk for desk in all_desks(self._home) if desk.request.job == job)
        while time.monotonic() < until:
            state = desk.state()
            if state.phase == "published":
                return
            if state.phase in ("failed", "rejected", "interrupted"):
                raise RuntimeError(f"{job} was not published: {state.problem}")
            time.sleep(0.5)
        raise RuntimeError(f"{job} was not published in {PATIENCE_S:.0f} s")

    def _publisher(self, job: str) -> list[Piece]:
        ledger = Source(JobReader(JobPaths(self._home, job))).ledger()
        return [
            Piece(name, (begin - ledger.begin_ns) / 1e9, (end - ledger.begin_ns) / 1e9)
            for each in ledger.publications
            for begin, end, name in each.pieces()
        ]

    # --- publishing ---

    def recipe_row(self, checkpoint: Path, rounds: int) -> Row:
        """Weights, program and package of the DLRM, from the start of a command to the version that is served."""
        model, steps = f"{TRAINER}:served", list[dict[str, float]]()

        def ours() -> float:
            to = self._place("ours")
            took = self._took("headway", "publish", "run", checkpoint, "--recipe", RECIPE, "--model", model, "--to", to)
            version = json.loads((to / (to / "latest").read_text() / "version.json").read_bytes())
            steps.append(version["facts"]["seconds"] | {"all else": took - sum(version["facts"]["seconds"].values())})
            return took

        def theirs() -> float:
            to = self._place("theirs")
            took = self._took(BY_HAND, "package", checkpoint, to)
            if not (to / "latest").is_file():
                raise RuntimeError("by hand, nothing was published")
            return took

        took = _in_turns(rounds, {"ours": ours, "theirs": theirs})
        parts = ", ".join(f"{name} {median(each[name] for each in steps):.1f} s" for name in steps[0])
        return _by_hand_row(f"publishing {RECIPE}", took["ours"], took["theirs"], f": {parts}")

    def weights_rows(self, megabytes: int, rounds: int) -> list[Row]:
        """Weights alone, of a larger model."""
        checkpoint = self._large(megabytes)
        took = _in_turns(rounds, {
            "ours": lambda: self._weights(checkpoint)[0],
            **{way: lambda way=way: self._weights(checkpoint, way)[0] for way in ("convert", "load")},
        })  # fmt: skip
        shutil.rmtree(checkpoint.parent)
        name = f"publishing safetensors, {megabytes / 1000:g} GB"
        return [
            _by_hand_row(name, took["ours"], took["convert"], ", with dcp_to_torch_save and save_file"),
            replace(_by_hand_row("… next to the least", took["ours"], took["load"], ", with dcp.load, save_file and "
                                 "fsync: nothing hashed, nothing checked"), at_most=None),
        ]  # fmt: skip

    def memory_rows(self, megabytes: int) -> list[Row]:
        """The most that any process of a publication held in memory."""
        checkpoint = self._large(megabytes)
        sizes = [file.stat().st_size for file in checkpoint.glob("*.distcp")]
        ours, theirs = (self._weights(checkpoint, way)[1] / max(sizes) for way in ("", "convert"))
        name = f"peak memory of safetensors, {megabytes / 1000:g} GB in {len(sizes)} shards"
        note = f"{ours * max(sizes) / 1e6:.0f} MB, of which a Python with torch is most"
        peer = "dcp_to_torch_save, save_file"
        return [Row(name, "× the largest shard", [ours], [theirs], peer, at_most=1.3, note=note)]

    def _weights(self, checkpoint: Path, by_hand: str = "") -> tuple[float, int]:
        """Seconds, and bytes at the most."""
        to = self._place("weights")
        words = (
            (BY_HAND, by_hand, checkpoint, to)
            if by_hand
            else ("headway", "publish", "run", checkpoint, "--recipe", "safetensors", "--to", to)
        )
        found = self._took_and_peak(*words)
        if not next(to.rglob("model.safetensors"), None):
            raise RuntimeError(f"{words[0]} has published nothing")
        shutil.rmtree(to)
        return found

    def _large(self, megabytes: int) -> Path:
        """A checkpoint that four ranks saved, each a quarter of every tensor."""
        folder = self._place("large")
        self._took("headway", "run", "--nproc-per-node", "4", "--job", folder.name, TRAINER, "large", folder, megabytes)
        return max((folder / "checkpoints").glob("step-*"))

    # --- processes ---

    def _place(self, name: str) -> Path:
        place = self._folder / f"{name}-{next(self._numbers)}"
        place.mkdir()
        return place

    def _took(self, *words: object) -> float:
        return self._took_and_peak(*words)[0]

    def _took_and_peak(self, *words: object) -> tuple[float, int]:
        """Seconds of a command, and the most bytes that it or any process of its held. Nothing is compiled yet, and all
        that was written before is on the disk."""
        folder = self._place("process")
        os.sync()
        with self._started(words, folder) as process:
            process.wait(PATIENCE_S)
        if process.returncode:
            raise RuntimeError(f"{' '.join(map(str, words))} failed:\n{_last_lines(folder)}")
        seconds, kilobytes = (folder / "log").read_text().split()[-2:]
        shutil.rmtree(folder)
        return float(seconds), 1024 * int(kilobytes)

    @contextmanager
    def _started(self, words: Sequence[object], folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
        """A script or module with its arguments; ended, with all that is in its session, when this is left."""
        is_script = isinstance(words[0], Path)
        command = [sys.executable, *([] if is_script else ["-m"]), *map(str, words)]
        environ = self._environ() | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
        with open(folder / "log", "wb") as log:
            # What is in between is small, as `ru_maxrss` begins with the size of the parent.
            process = subprocess.Popen(
                [sys.executable, "-c", _TIMED, *command],
                stdout=log, stderr=log, env=environ, cwd=self._folder, start_new_session=True,
            )  # fmt: skip
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _told(self, *words: str) -> str:
        command = [sys.executable, "-m", *words]
        return subprocess.run(
            command, env=self._environ(), capture_output=True, text=True, check=True, timeout=PATIENCE_S
        ).stdout

    def _environ(self) -> dict[str, str]:
        unwanted = ("HEADWAY_", "TORCH", "PET_", "OMP_")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        return environ | {"HEADWAY_HOME": str(self._home)}


_TIMED = """
import resource, subprocess, sys, time
began = time.monotonic()
code = subprocess.run(sys.argv[1:]).returncode
print(time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, flush=True)
sys.exit(code)
"""


def _in_turns(rounds: int, made: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Runs each once a round, every round beginning with another one."""
    names, found = list(made), {name: list[T]() for name in made}
    for number in range(rounds):
        for at in range(len(names)):
            name = names[(number + at) % len(names)]
            found[name].append(made[name]())
    return found


def _shutdown_s(folder: Path, process: "subprocess.Popen[bytes]") -> float:
    """From the last step of any rank until the last of them has left."""
    until = time.monotonic() + PATIENCE_S
    while not all((folder / f"begun-{rank}").is_file() for rank in (0, 1)):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the trainer does not begin:\n{_last_lines(folder)}")
        time.sleep(0.01)
    ranks = [os.pidfd_open(int((folder / f"begun-{rank}").read_text().split()[0])) for rank in (0, 1)]
    for rank in ranks:
        if not select.select([rank], [], [], PATIENCE_S)[0]:
            raise RuntimeError(f"the trainer does not end:\n{_last_lines(folder)}")
    ended_ns = time.monotonic_ns()
    for rank in ranks:
        os.close(rank)
    stamps = [folder / f"trained-{rank}" for rank in (0, 1)]
    if not all(stamp.is_file() for stamp in stamps):
        raise RuntimeError(f"the trainer has failed:\n{_last_lines(folder)}")
    return (ended_ns - max(int(stamp.read_text().split()[1]) for stamp in stamps)) / 1e9


def _last_lines(folder: Path) -> str:
    return "\n".join((folder / "log").read_text(errors="replace").splitlines()[-30:])


# --- rows ------------------------------------------------------------------------------------------------------------


def _shutdown_rows(jobs: Mapping[str, list[Job]]) -> list[Row]:
    rows = []
    for name, of in (
        ("shutdown of a trainer that hands over", lambda job: job.watched_s),
        ("… as the reports have it", lambda job: job.shutdown_s),
    ):
        took = {way: [of(job) for job in its] for way, its in jobs.items()}
        share = [100 * ours / theirs for ours, theirs in zip(took[HANDED], took[INSIDE], strict=True)]
        note = ", ".join(f"{way} {short(median(took[way]))} s" for way in jobs)
        rows.append(Row(name, "% of publishing inside", share, at_most=5.0, note=note))
    saved = [job.watched_s for job in jobs[SAVED]]
    more = [1000 * (job.watched_s - alone) for job, alone in zip(jobs[HANDED], saved, strict=True)]
    adds = [job.handing_over_s / job.saving_s for job in jobs[HANDED]]
    handing = 1000 * median(job.handing_over_s for job in jobs[HANDED])
    saving = 1000 * median(job.saving_s for job in jobs[HANDED])
    note = f"{handing:.0f} ms, the save {saving:.0f} ms; from outside, {median(more):.0f} ms more than saving alone"
    return [
        *rows,
        Row("… next to one that only saves", "s", [job.watched_s for job in jobs[HANDED]], saved, "saving alone"),
        Row("what handing over adds", "× the anchor save", adds, at_most=1.0, note=note),
    ]


def _by_hand_row(name: str, ours: list[float], theirs: list[float], told: str) -> Row:
    ratio = [a / b for a, b in zip(ours, theirs, strict=True)]
    note = f"{short(median(ours))} s, by hand {short(median(theirs))} s{told}"
    return Row(name, "× by hand", ratio, at_most=1.1, note=note)


# --- picture ---------------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, LANE, BAR = 960, 100, 24, 26, 20
_BUCKETS = {
    "training": (Bucket.TRAINING_EFFECTIVE, ("training.", "waste.")),
    "final checkpoint": (Bucket.SHUTDOWN_FINAL_CHECKPOINT, (Bucket.SHUTDOWN_FINAL_CHECKPOINT,)),
    "publishing in the trainer": (Bucket.SHUTDOWN_PUBLISH, (Bucket.SHUTDOWN_PUBLISH,)),
    "leaving": (Bucket.SHUTDOWN_TEARDOWN, (Bucket.SHUTDOWN_TEARDOWN,)),
}
"""What is shown of a rank, in the order in which it comes in a job that nothing fails in: a colour, and what counts."""
_TRAINING = 0.2
"""So much of the time after the last step is shown of what was before it."""
_FILLS = {name: COLOURS[colour] for name, (colour, _) in _BUCKETS.items()} | {"publisher": PUBLISHING}
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
text { paint-order: stroke; stroke: #fff; stroke-width: 4px; stroke-linejoin: round }
.strong { font-weight: 600; font-size: 15px } .dim { fill: #59636e }
.card { fill: #fff; stroke: #d0d7de } .grid { stroke: #d0d7de } .step { stroke: #59636e; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; stroke: #0d1117 } .dim { fill: #9198a1 }
  .card { fill: #0d1117; stroke: #3d444d } .grid { stroke: #3d444d } .step { stroke: #9198a1 }
}
text.on { fill: #fff; stroke: none } text.in { fill: #1f2328; stroke: none }
"""


def rank_pieces(ledger: Mapping[str, float]) -> list[Piece]:
    """What a rank did, in seconds after its last step."""
    took = {
        name: sum(seconds for bucket, seconds in ledger.items() if bucket.startswith(of))
        for name, (_, of) in _BUCKETS.items()
    }
    at, pieces = -took["training"], []
    for name, seconds in took.items():
        pieces += [Piece(name, at, at + seconds)] if seconds else []
        at += seconds
    return pieces


def publisher_pieces(job: Job) -> list[Piece]:
    """What its publisher did, in seconds after the last step: its steps, and nameless what is between them."""
    last_s, pieces = job.report["wall_s"] - job.shutdown_s, list[Piece]()
    names = {name: name for name in job.report["publications"][0]["steps"]} | {"recipe": "imports"}
    for name, begin, end in job.publisher:
        piece = Piece(names.get(name, ""), begin - last_s, end - last_s)
        if pieces and pieces[-1].name == piece.name:
            pieces[-1] = pieces[-1]._replace(end_s=piece.end_s)
        else:
            pieces.append(piece)
    return pieces


class Picture:
    """Lanes of bars over one time axis, whose zero is the last step."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self._begin_s, self._scale = begin_s, (WIDTH - LEFT - RIGHT) / (end_s - begin_s)
        step = 10 if end_s - begin_s > 60 else 5
        self._ticks = range(-(int(-begin_s) // step * step), int(end_s) + 1, step)
        self._parts: list[str] = []
        self._y, self._top = 18, 0

    def heading(self, text: str, told: str) -> None:
        """Begins a job."""
        self._y += 22
        self._text(24, self._y, text, "strong")
        self._text(WIDTH - RIGHT, self._y, told, "dim", "end")
        self._y += 10
        self._top = self._top or self._y

    def lane(self, name: str, pieces: Sequence[Piece], after: str = "") -> None:
        """One process, and a word behind its last bar."""
        self._text(LEFT - 12, self._y + 15, name, "dim", "end")
        for piece in pieces:
            self._bar(piece)
        if after:
            self._text(self._x(pieces[-1].end_s) + 8, self._y + 15, after, "")
        self._y += LANE

    def words(self, text: str) -> None:
        """A line below the last lane."""
        self._text(LEFT, self._y + 12, text, "dim")
        self._y += 20

    def svg(self, legend: Sequence[str], caption: str, title: str) -> str:
        """All of it."""
        bottom = self._y + 6
        parts = [f'<line class="step" x1="{self._x(0):.1f}" x2="{self._x(0):.1f}" y1="{self._top}" y2="{bottom}"/>']
        for tick in self._ticks:
            x = self._x(tick)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{self._top}" y2="{bottom}"/>')
            word = "last step" if tick == 0 else f"{tick:+d} s".replace("-", "−")
            self._text(x, bottom + 16, word, "dim", "middle")
        self._legend(legend, bottom + 44)
        self._text(24, bottom + 70, caption, "dim")
        height = bottom + 86
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
            *reversed(parts),
            *self._parts,
            "</svg>\n",
        ])  # fmt: skip

    def _legend(self, names: Sequence[str], y: float) -> None:
        x = 24.0
        for name in names:
            self._parts.append(f'<rect x="{x:.0f}" y="{y - 10}" width="12" height="12" rx="3" fill="{_FILLS[name]}"/>')
            self._text(x + 18, y, name, "")
            x += 44 + _wide(name)

    def _bar(self, piece: Piece) -> None:
        x, fill = max(LEFT, self._x(piece.begin_s)), _FILLS.get(piece.name, PUBLISHING)
        width = max(1.5, self._x(piece.end_s) - x - 1)
        faint = "" if piece.name else ' opacity="0.55"'
        place = f'x="{x:.1f}" y="{self._y}" width="{width:.1f}" height="{BAR}" rx="2"'
        self._parts.append(f'<rect {place} fill="{fill}"{faint}/>')
        labels = [piece.name] if x == LEFT else [f"{piece.name} {piece.took_s:.1f} s", piece.name]
        for label in labels:  # of what is cut off, nobody sees how long it took
            if piece.name and _wide(label) + 12 < width:
                self._text(x + 6, self._y + 15, label, "in" if fill in _LIGHT else "on")
                return

    def _x(self, at_s: float) -> float:
        return LEFT + (at_s - self._begin_s) * self._scale

    def _text(self, x: float, y: float, text: str, kind: str, anchor: str = "start") -> None:
        place = f'x="{x:.1f}" y="{y:.0f}" class="{kind}" text-anchor="{anchor}"'
        self._parts.append(f"<text {place}>{html.escape(text)}</text>")


_LIGHT = (COLOURS[Bucket.SHUTDOWN_PUBLISH], COLOURS[Bucket.TRAINING_EFFECTIVE])
"""On those, dark letters are read better."""


def _wide(text: str) -> float:
    """About how many pixels a text takes, and rather more."""
    return 6.8 * len(text)


def picture(inside: Job, handed: Job) -> str:
    """Two jobs on one time axis."""
    before, after = ([rank_pieces(rank["ledger"]) for rank in job.report["ranks"]] for job in (inside, handed))
    publisher = publisher_pieces(handed)
    end_s = max(pieces[-1].end_s for pieces in (*before, *after, publisher))
    drawn = Picture(-_TRAINING * end_s, 1.02 * end_s)
    drawn.heading("Publishing in the trainer", f"its ranks are held for {inside.shutdown_s:.1f} s after the last step")
    for number, pieces in enumerate(before):
        drawn.lane(f"rank {number}", pieces)
    drawn.heading("Handing over", f"its ranks are held for {handed.shutdown_s:.1f} s after the last step")
    told = f"saved in {1000 * handed.saving_s:.0f} ms, handed over in {1000 * handed.handing_over_s:.0f} ms, gone"
    for number, pieces in enumerate(after):
        drawn.lane(f"rank {number}", pieces, "" if number else told)
    drawn.lane("publisher", publisher)
    steps = " · ".join(f"{piece.name} {piece.took_s:.1f} s" for piece in publisher if piece.name)
    rest_s = sum(piece.took_s for piece in publisher if not piece.name)
    drawn.words(f"{steps} · all else {rest_s:.1f} s")
    caption = (
        f"The end of two real runs of a DLRM on {len(after)} ranks of a small machine, from their reports. "
        f"The second is published after {publisher[-1].end_s:.1f} s."
    )
    return drawn.svg(list(_FILLS), caption, "Two jobs on one time axis: publishing in the trainer, and handing over")


def _draw(jobs: Mapping[str, list[Job]]) -> None:
    """The runs whose shutdown is the median one."""
    chosen = [sorted(jobs[way], key=lambda job: job.shutdown_s)[len(jobs[way]) // 2] for way in (INSIDE, HANDED)]
    PICTURE.write_text(picture(*chosen), encoding="utf-8")
    print(f"  {PICTURE} shows two of them")
