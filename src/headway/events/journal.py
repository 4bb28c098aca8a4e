"""The journal file: an append-only log in shared memory that a SIGKILL cannot tear, and its reader.

    0    magic, format, and two slots of the step cell, written in turn
    512  frames: length (4 bytes), CRC-32 of the payload (4), payload, padding to 4

A frame counts once its length is not zero. The writer stores CRC and payload first and the length last, so whatever
instant it dies at, the file ends with a whole frame. Space is allocated before it is mapped: a full disk is an error
that the writer survives, never a SIGBUS. A program may close descriptors that are not its own, and open its files under
their numbers: before each is used, it is made sure that it still is the journal's.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from headway.events.vocabulary import FORMAT, Dropped, Record, decode, encode

MAGIC = b"headway\n"
HEADER = struct.Struct("<8sI")
HEADER_BYTES = 512
FIRST_SEGMENT_BYTES = 16 * 1024
LAST_SEGMENT_BYTES = 1024 * 1024
FRAME_LIMIT_BYTES = 1 << 20

_FRAME = struct.Struct("<II")
_pack_u32 = struct.Struct("<I").pack
_HEADS = [_pack_u32(length) for length in range(64)]
# Packed far faster in the machine's own order, which is the file's on every machine that torch runs on but a few.
_ORDER = "@" if sys.byteorder == "little" else "<"
_CELL = struct.Struct(f"{_ORDER}QqqqqqqqQ")
_SINCE, _SINCE_AT = struct.Struct(f"{_ORDER}q"), 7 * 8
_SLOTS = (64, 192)
_RETRY_NS = 1_000_000_000
_SEARCH_BYTES = 64 << 20


BETWEEN = -2
"""In `Cell.since_ns`: a step is done, and nobody has asked for the data of the next one."""


@dataclass(slots=True)
class Cell:
    """Where the training loop stands: the run of like steps so far, and the step that is under way."""

    first: int
    next: int
    """The first step not yet finished."""
    begin_ns: int
    end_ns: int
    """End of the last finished step. The wait for the next batch begins here."""
    data_ns: int
    """Waits for data inside the run."""
    count: int
    since_ns: int
    """When the step under way got its data; 0 while it waits for it, -1 outside the loop, `BETWEEN` after a step, as
    long as no data was asked for."""


class Writer:
    """Appends records to one journal file; safe from any thread and from signal handlers."""

    def __init__(self, path: Path, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.path = path
        self.lost = 0
        """Records that found no space and are not yet accounted for by a `Dropped` record."""
        self._now_ns = now_ns
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._show_life()
        self._lock = threading.RLock()
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._retry_at_ns = 0
        self._size = 0
        self._room_until = 0
        self._end = HEADER_BYTES
        self._file = PlainFile(self._fd)
        self._memory: mmap.mmap | PlainFile = self._file
        self._grow(HEADER_BYTES)
        try:
            self._memory[len(MAGIC) : HEADER.size] = _pack_u32(FORMAT)
            self._memory[0 : len(MAGIC)] = MAGIC
        except OSError:
            self.close()
            raise
        memory = self._memory
        self.cell: CellWriter = PlainCellWriter(memory) if isinstance(memory, PlainFile) else CellWriter(memory)

    def append(self, payload: bytes, loss: int = 1) -> bool:
        """Writes one record; when this returns True, a kill of the process cannot lose it. Else there is no space, and
        `loss` records count as lost."""
        length = len(payload)
        size = length + 11 & ~3
        head = _HEADS[length] if length < 64 else _pack_u32(length)
        body = _pack_u32(crc32(payload)) + payload
        try:
            self._acquire()  # inside `try`: a signal handler that raises right after it must not leave it locked
            while self._end + size > self._room_until:
                if not self._make_room(size):
                    self.lost += loss
                    return False
            # Nothing is called between here and the last store, so no signal handler runs in between. With a plain file
            # one can: what it appends goes behind what is reserved here.
            begin = self._end
            self._end = begin + size
            memory = self._memory
            try:
                memory[begin + 4 : begin + 8 + length] = body
                memory[begin : begin + 4] = head
                return True
            except BaseException as error:  # only a plain file can fail here: mapped memory was allocated before
                self._give_back(begin, size)
                if not isinstance(error, OSError):
                    raise
                self.lost += loss
                self._room_until, self._retry_at_ns = 0, self._now_ns() + _RETRY_NS
                return False
        finally:
            try:
                self._release()
            except RuntimeError:  # a signal handler raised while this waited for the lock
                pass

    def _give_back(self, begin: int, size: int) -> None:
        """Frees what was reserved for a record that could not be written, unless others stand behind it by now."""
        if self._end == begin + size:
            self._end = begin
            with contextlib.suppress(OSError):
                if self._is_ours():
                    os.ftruncate(self._fd, begin)

    def _make_room(self, size: int) -> bool:
        """Grows the file; after a spell without space, first says how much was lost."""
        if self._fd < 0 or self._now_ns() < self._retry_at_ns:
            return False
        notice = encode(Dropped(t_ns=self._now_ns(), count=self.lost)) if self.lost else b""
        if not self._grow(self._end + size + len(notice) + 11):
            self._room_until, self._retry_at_ns = 0, self._now_ns() + _RETRY_NS
            return False
        self._room_until = self._size
        if notice:
            lost, self.lost = self.lost, 0
            if not self.append(notice, 0):
                self.lost += lost
                return False
        return True

    def _grow(self, need: int) -> bool:
        """Allocates and maps space for `need` bytes in all; a file that cannot be mapped is written to plainly."""
        if need <= self._size:
            return True
        if not self._is_ours():
            return False
        step = min(max(self._size, FIRST_SEGMENT_BYTES), LAST_SEGMENT_BYTES)
        for size in (max(need, self._size + step), -(-need // mmap.PAGESIZE) * mmap.PAGESIZE):
            try:
                os.posix_fallocate(self._fd, self._size, size - self._size)
                self._map(size)
                return True
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    self._size = 1 << 62  # no allocation on this file system: plain writes from here on
                    self._memory = self._file
                    return True
        return False

    def _map(self, size: int) -> None:
        if size <= self._size:  # a signal handler that appended in between has grown the file further
            return
        if isinstance(self._memory, mmap.mmap):
            self._memory.resize(size)
        else:
            try:
                self._memory = Mapping(self._fd, size)
            except OSError:
                self._show_life()  # to fail, it closed a descriptor of the file, and with that dropped the lock
                raise
        self._size = size

    def _is_ours(self) -> bool:
        """Whether the descriptors still are the journal's. If not, it falls silent: only memory is written on."""
        mapping = self._memory if isinstance(self._memory, Mapping) else None
        if self._file.is_ours() and (mapping is None or mapping.is_ours()):
            return True
        self._fd = self._file.fd = -1
        if mapping is not None:
            mapping.keep()
        return False

    def _show_life(self) -> None:
        # A POSIX lock dies with its process and is not inherited: readers take it as the sign of life.
        with contextlib.suppress(OSError):
            fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def close(self) -> None:
        """Trims the file to what was written."""
        with self._lock:
            if self._fd < 0 or not self._is_ours():
                return
            with contextlib.suppress(OSError):
                if isinstance(self._memory, mmap.mmap):
                    self._memory.flush()
                os.ftruncate(self._fd, self._end)
            os.close(self._fd)
            self._fd = self._file.fd = -1  # its number may soon be another file's
            self._room_until = 0  # pages past the end are gone: nothing may touch them again


class PlainFile:
    """Stands in for mapped memory where a file cannot be mapped: each store is a `write`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._identity = _identity(fd)

    def is_ours(self) -> bool:
        """Whether the descriptor still is this file's."""
        return self.fd >= 0 and _identity(self.fd) == self._identity

    def __setitem__(self, where: slice, data: bytes) -> None:
        if not self.is_ours():
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if os.pwrite(self.fd, data, where.start) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Mapping(mmap.mmap):
    """A file as memory. Python makes it a descriptor of its own, by which it resizes the file, and which it closes."""

    _fd = -1
    _identity: tuple[int, int] | None = None

    def __init__(self, fd: int, size: int) -> None:
        identity = _identity(fd)
        with contextlib.suppress(OSError):  # without /proc nobody can tell
            numbers = map(int, os.listdir("/proc/self/fd"))
            self._fd = next((number for number in numbers if number != fd and _identity(number) == identity), -1)
            self._identity = _identity(self._fd)

    def is_ours(self) -> bool:
        """Whether its descriptor still is this file's."""
        return _identity(self._fd) == self._identity

    def keep(self) -> None:
        """Makes it last as long as the process, so that Python never closes what has its descriptor's number now."""
        with contextlib.suppress(ImportError):
            import ctypes

            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and not self.is_ours():
            self.keep()


def _identity(fd: int) -> tuple[int, int] | None:
    """Which file a descriptor belongs to; None if to none."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class CellWriter:
    """Keeps the step cell: two slots written in turn, each with its number at both ends, so one is always whole."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memory
        self._number, self._since_at = 0, _SLOTS[0] + _SINCE_AT

    def write(self, first: int, next: int, begin: int, end: int, data: int, count: int, since: int) -> None:
        """Stores a `Cell`'s fields."""
        number = self._number = self._number + 1
        slot = _SLOTS[number & 1]
        self._since_at = slot + _SINCE_AT
        _pack_cell(self._memory, slot, number, first, next, begin, end, data, count, since, number)

    def touch(self, since: int) -> None:
        """Store a new `since` into the slot that was written last: eight aligned bytes, stored at once."""
        _pack_since(self._memory, self._since_at, since)


class PlainCellWriter(CellWriter):
    """Keeps the cell of a file that cannot be mapped."""

    def __init__(self, file: PlainFile) -> None:
        super().__init__(bytearray(HEADER_BYTES))
        self._file = file

    def write(self, *fields: int) -> None:
        """Stores a `Cell`'s fields."""
        super().write(*fields)
        self._copy(self._since_at - _SINCE_AT, _CELL.size)

    def touch(self, since: int) -> None:
        """Store a new `since` into the slot that was written last."""
        super().touch(since)
        self._copy(self._since_at, _SINCE.size)

    def _copy(self, at: int, size: int) -> None:
        with contextlib.suppress(OSError):  # the header's block was allocated when the file was made
            self._file[at : at + size] = bytes(self._memory[at : at + size])


_pack_cell, _pack_since = _CELL.pack_into, _SINCE.pack_into


class Nowhere(Writer):
    """A writer that keeps nothing: for a recorder that is switched off, or has no place to write to."""

    class _NoCell(CellWriter):
        def write(self, *fields: int) -> None:
            """Keeps nothing."""

        def touch(self, since: int) -> None:
            """Keeps nothing."""

    def __init__(self) -> None:
        self.path = Path(os.devnull)
        self.lost = 0
        self.cell = Nowhere._NoCell(bytearray())

    def append(self, payload: bytes, loss: int = 1) -> bool:
        """Keeps nothing, and says so."""
        return False

    def close(self) -> None:
        """Nothing to end."""


def parse_cell(header: bytes) -> Cell | None:
    """The newest whole slot of a header; None before the first loop."""
    best = (0,) * 9
    for slot in _SLOTS:
        if len(header) >= slot + _CELL.size:
            fields = _CELL.unpack_from(header, slot)
            if fields[0] == fields[-1] and fields[0] > best[0]:
                best = fields
    return Cell(*best[1:-1]) if best[0] else None


@dataclass
class Batch:
    """What a journal held beyond what was read before."""

    records: list[Record] = field(default_factory=list)
    cell: Cell | None = None
    problems: list[str] = field(default_factory=list)
    raw: bytes = b""
    """The frames as they stand in the file, from `offset` on."""
    offset: int = 0
    rolled_up: bytes = b""
    """In place of the records of a finished process, what its node made of them; `load` gives them all the same."""
    load: "Callable[[], tuple[list[Record], Cell | None]] | None" = None


class Follower:
    """Reads a journal from where it last stopped, while it is written or after."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    @property
    def has_begun(self) -> bool:
        """Whether anything was read yet."""
        return self._offset > HEADER_BYTES

    def poll(self) -> Batch:
        """All whole records since the last poll, and the step cell. Raises nothing for a damaged file: it says so."""
        try:
            with open(self.path, "rb") as file:
                return self._read(file.fileno())
        except OSError as error:
            return Batch(problems=[f"{self.path.name} cannot be read ({error.strerror}): its process is missing here"])

    def _read(self, fd: int) -> Batch:
        header, again = os.pread(fd, HEADER_BYTES, 0), None
        while header != again:  # the cell may be written while it is read
            header, again = os.pread(fd, HEADER_BYTES, 0), header
        if not self._offset:
            if not (header[: len(MAGIC)] + header[HEADER.size :]).strip(b"\0"):
                return Batch()  # its process has only just made it, or died right then
            if problem := header_problem(header):
                return Batch(problems=[f"{self.path.name} {problem}"])
            self._offset = HEADER_BYTES
        # Cell before frames: a run that is flushed in between is then seen twice, which readers notice, not lost.
        cell = parse_cell(header)
        data, begin = _read_from(fd, self._offset), self._offset
        # What was read is no snapshot of a live file: damage is only what is still no record when it is read again.
        batch = decode_frames(data, lambda at: not _payload_at(_read_from(fd, begin + at), 0))
        batch.cell, batch.offset = cell, begin
        batch.problems = [f"{self.path.name} {problem}" for problem in batch.problems]
        self._offset += len(batch.raw)
        return batch


def decode_frames(data: bytes, is_damage: Callable[[int], bool] = lambda at: True) -> Batch:
    """All whole records in `data`. `is_damage` tells damage at an offset from a record that is still being written."""
    batch = Batch()
    used = 0
    for payload, used in _salvage(data, batch.problems, is_damage):  # noqa: B007
        try:
            record = decode(payload)
        except Exception as error:  # whatever is wrong with one record, the others count
            batch.problems.append(f"holds a record that makes no sense, which is left out ({error})")
            continue
        if record is not None:
            batch.records.append(record)
    batch.raw = data[:used].ljust(used, b"\0")  # a plain file ends without its last frame's padding
    return batch


def _salvage(data: bytes, problems: list[str], is_damage: Callable[[int], bool]) -> Iterator[tuple[bytes, int]]:
    """Like `frames`, for a log whose payloads hold no frames: after damage it goes on wherever a whole frame begins."""
    at, last, unpack = 0, len(data) - 8, _FRAME.unpack_from
    while at < len(data):
        if at <= last:  # as `_payload_at`, but a call for each frame is what reading a large job would spend most on
            length, crc = unpack(data, at)
            payload = data[at + 8 : at + 8 + length]
            if crc32(payload) == crc and length and len(payload) == length:
                at += 8 + (length + 3 & ~3)
                yield payload, at
                continue
        found = _find_frame(data, at + 4)
        if found is None and not data[at : at + 4].strip(b"\0"):  # the end, or a record that was under way
            return
        if not is_damage(at):
            return
        problems.append(f"{'ends in' if found is None else 'has'} a damaged record, which is left out")
        if found is None:
            return
        at = found


def _payload_at(data: bytes, at: int) -> bytes:
    """The payload of the whole frame at an offset; empty if there is none."""
    if at + 8 > len(data):
        return b""
    length, crc = _FRAME.unpack_from(data, at)
    payload = data[at + 8 : at + 8 + length]
    return payload if len(payload) == length and crc32(payload) == crc else b""


def _find_frame(data: bytes, begin: int) -> int | None:
    """Where the next whole frame begins; None if none does."""
    rest = data[begin:]
    if rest == bytes(len(rest)):  # far faster than the search, and so do most files end
        return None
    budget = _SEARCH_BYTES  # absurd lengths must not make the search long
    for at in range(begin, begin + len(rest.rstrip(b"\0")) - 8, 4):
        length = _FRAME.unpack_from(data, at)[0]
        if 0 < length <= len(data) - at - 8:
            budget -= length
            if budget < 0 or _payload_at(data, at):
                return at if budget >= 0 else None
    return None


def frame(payload: bytes) -> bytes:
    """A payload as it stands in a log."""
    return _pack_u32(len(payload)) + _pack_u32(crc32(payload)) + payload + bytes(-len(payload) % 4)


def header_problem(header: bytes) -> str:
    """Why the file cannot be read as a journal; empty if it can."""
    if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
        return "is not a headway journal, and is left out"
    _, version = HEADER.unpack_from(header)
    if version > FORMAT:
        return f"has format {version}, and this headway reads up to {FORMAT}: upgrade headway to count its process"
    return ""


def frames(data: bytes, problems: list[str]) -> Iterator[tuple[bytes, int]]:
    """Each whole frame's payload and the offset behind it. A damaged frame is skipped if a whole one follows it."""
    at = 0
    while at + 8 <= len(data):
        length, crc = _FRAME.unpack_from(data, at)
        if not length:
            return
        after = at + 8 + (length + 3 & ~3)
        if length > FRAME_LIMIT_BYTES or at + 8 + length > len(data):
            if length > FRAME_LIMIT_BYTES:
                problems.append(f"is damaged at byte {at} of what was read: the rest of it is left out")
            return
        payload = data[at + 8 : at + 8 + length]
        if crc32(payload) == crc:
            yield payload, after
        elif after + 8 <= len(data) and _FRAME.unpack_from(data, after)[0]:
            problems.append("has a damaged record, which is left out")
        else:
            return
        at = after


def is_being_written(path: Path) -> bool:
    """Whether the process that writes this journal lives (on this machine). Never call it from that process:
    closing any descriptor of the file would drop its lock."""
    try:
        with open(path, "rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def _read_from(fd: int, offset: int) -> bytes:
    os.lseek(fd, offset, os.SEEK_SET)
    with os.fdopen(os.dup(fd), "rb") as file:
        return file.read()
