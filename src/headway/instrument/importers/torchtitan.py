"""torchtitan's structured traces as a job: its files found, each process told as a journal, the job put in place whole.

torchtitan writes one file a process, `DUMP_FOLDER/structured_logs/SOURCE.global_rank_N.DATE-TIME-XXXXXX.jsonl`, and a
restart adds files. Which of them ran together, nothing in them says: the ledger tells attempts apart as for any job.
"""

import errno
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.errors import InputError, PlatformError
from headway.instrument.importers.torchtitan_journal import JournalTeller
from headway.instrument.importers.torchtitan_trace import Damage, Line, by_process, lines
from headway.paths import JobPaths

FOLDERS = ("structured_logs", "system_logs")
"""Where torchtitan puts its traces below its dump folder; the second in commits before release 0.3."""

TRAINERS = ("training", "trainer")
"""Sources whose processes are the job's ranks. A job with one source has no other."""

_OWN_NAME = re.compile(r".+\.global_rank_\d+\.\d{8}-\d{6}-\w+\.jsonl|.+_rank_\d+_system\.jsonl")
_LOOK_AT_LINES = 10_000


@dataclass
class Imported:
    """What an import made, and what it could not read."""

    job: str
    processes: int = 0
    ranks: set[int] = field(default_factory=set)
    steps: int = 0
    """Of all ranks and attempts together, also those that were repeated."""
    spans_left_out: int = 0
    damage: Damage = field(default_factory=Damage)

    @property
    def problem(self) -> str:
        """What could not be read; empty if all could."""
        damage = self.damage
        if not damage.unreadable:
            return ""
        return f"{damage.unreadable} of {damage.lines} lines could not be read: first at {damage.first}"


@dataclass
class _Trace:
    path: Path
    first: Line
    world_size: int = 0


def import_traces(given: Sequence[Path], home: Path, job: str = "") -> Imported:
    """Makes a job of torchtitan's traces: all files given, and those in the folders given. Without a name it takes that
    of the dump folder. InputError, and no job, for a name that is taken or a file that is not torchtitan's."""
    files = find_files(given)
    told = Imported(job or _dump_folder(files[0]).name or "torchtitan")
    place = JobPaths(home, told.job)
    _refuse_taken(place)
    traces = _with_world_sizes([trace for file in files if (trace := _look_at(file, told.damage)) is not None])
    if not traces:
        raise InputError(f"{_some(files)}: no line in there can be read. There is nothing to import.")
    roles = _roles(traces)
    try:
        place.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".import-", dir=home) as scratch:
            made = JobPaths(Path(scratch), told.job).make()
            for trace in traces:
                _tell(trace, made, roles[trace.first.source], told)
            _put_in_place(made, place)
    except OSError as error:
        raise PlatformError(f"{home} cannot be written ({error}): nothing was imported.") from error
    return told


def find_files(given: Sequence[Path]) -> list[Path]:
    """The trace files given, and those of each folder given; InputError where a folder has none, or those of several
    jobs."""
    found: dict[str, Path] = {}
    for path in given:
        if not path.exists():
            raise InputError(f"{path} does not exist. Name torchtitan's dump folder, or files from its {FOLDERS[0]}.")
        for file in _files_in(path) if path.is_dir() else [path]:
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def _files_in(folder: Path) -> list[Path]:
    folders = sorted({file.parent for name in FOLDERS for file in folder.glob(f"**/{name}/*.jsonl")})
    if len(folders) > 1:
        raise InputError(
            f"{folder} holds the traces of {len(folders)} jobs: {_some(folders)}. Import one at a time; or name "
            f"several folders, if they are attempts of one job."
        )
    files = sorted((folders[0] if folders else folder).glob("*.jsonl"))
    if not files:
        raise InputError(
            f"{folder} holds no traces: no *.jsonl in it, nor in a folder {FOLDERS[0]} below it. torchtitan writes "
            f"them to its dump folder, unless debug.enable_structured_logging is off."
        )
    return files


def _dump_folder(file: Path) -> Path:
    folder = file.absolute().parent
    return folder.parent if folder.name in FOLDERS else folder


def _look_at(path: Path, damage: Damage) -> _Trace | None:
    """The file by its first readable line; None if its process wrote none. InputError if it is not torchtitan's."""
    seen = Damage()
    for line in lines(path, seen, _LOOK_AT_LINES):
        return _Trace(path, line)
    if seen.lines and not (seen.lines < _LOOK_AT_LINES and _OWN_NAME.fullmatch(path.name)):
        raise InputError(
            f"{path} is not a trace of torchtitan's: no line of it has log_type_name, time_us and a rank. Nothing was "
            f"imported. Name the files, or torchtitan's dump folder."
        )
    damage.add(seen)
    return None


def _with_world_sizes(traces: list[_Trace]) -> list[_Trace]:
    """The traces in the order they began. Those between one start of a rank and the next ran together: the highest rank
    among them tells how many there were."""
    traces = sorted(traces, key=lambda trace: (trace.first.wall_ns, trace.first.rank))
    together: list[dict[tuple[str, int], _Trace]] = []
    for trace in traces:
        who = (trace.first.source, trace.first.rank)
        if not together or who in together[-1]:
            together.append({})
        together[-1][who] = trace
    for group in together:
        for (source, _), trace in group.items():
            trace.world_size = 1 + max(rank for other, rank in group if other == source)
    return traces


def _roles(traces: Iterable[_Trace]) -> dict[str, str]:
    """Which sources are the ranks that train; the others keep their names."""
    sources = {trace.first.source for trace in traces}
    if len(sources) == 1:
        return dict.fromkeys(sources, "rank")
    trainers = sources.intersection(TRAINERS)
    if len(trainers) != 1:
        raise InputError(
            f"the traces are of {', '.join(sorted(sources))}, and headway cannot tell which of them are the ranks that "
            f"train. Name the files of one of them."
        )
    return {source: "rank" if source in trainers else source for source in sources}


def _tell(trace: _Trace, paths: JobPaths, role: str, told: Imported) -> None:
    """Writes a journal for each process in the file: usually one."""
    for own in by_process(lines(trace.path, told.damage)):
        teller: JournalTeller | None = None
        try:
            for line in own:
                if (line.rank, line.source) != (trace.first.rank, trace.first.source):
                    raise _mixed(trace, line)
                teller = teller or _open(trace, paths, line, role)
                teller.take(line)
            if teller is not None:
                teller.close()
                _count(teller, line, told)
        finally:
            if teller is not None:
                teller.drop()


def _open(trace: _Trace, paths: JobPaths, line: Line, role: str) -> JournalTeller:
    try:
        return JournalTeller(paths, line, role, trace.world_size)
    except FileExistsError:
        raise InputError(
            f"{trace.path} tells of a process that was told of before: a copy of another file? Nothing was imported. "
            f"Name each trace once."
        ) from None


def _count(teller: JournalTeller, line: Line, told: Imported) -> None:
    told.processes += 1
    told.ranks.add(line.rank)
    told.steps += teller.steps
    told.spans_left_out += teller.left_out


def _mixed(trace: _Trace, line: Line) -> InputError:
    first = trace.first
    return InputError(
        f"{trace.path} has lines of {first.source} rank {first.rank} and of {line.source} rank {line.rank}: "
        f"torchtitan writes a file for each. Nothing was imported. Name its own files."
    )


def _refuse_taken(place: JobPaths) -> None:
    if place.folder.exists():
        raise InputError(
            f"there is a job {place.job!r} already, and an import does not add to it. Give this one another name with "
            f"--job NAME, or remove {place.folder} first."
        )


def _put_in_place(made: JobPaths, place: JobPaths) -> None:
    try:
        os.rename(made.folder, place.folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        _refuse_taken(place)  # it came while this was written
        raise


def _some(paths: Sequence[Path]) -> str:
    shown = ", ".join(map(str, paths[:3]))
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"
