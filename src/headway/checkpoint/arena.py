"""Memory that outlives a trainer: a `memfd` with room for one or two images of a rank's checkpoint file.

The first page has a record for each slot, which says what the slot holds. It is taken back before the slot is written
to and comes last, with a checksum, when all is there: whoever finds it whole finds the image whole.
"""

import ctypes
import errno
import mmap
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from headway.errors import PlatformError
from headway.machine import memory_file

PAGE = 4096
_RECORD = struct.Struct("<12sqqQ")
_SEALED = struct.Struct(f"<{_RECORD.size}sI")
_STEP = struct.Struct("<q")
_RECORD_ROOM = 256
_HUGE = 2 << 20
_PREFAULT_STEP = 64 << 20
_PASSES, _PASS_S = 10, 1.0
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
_MAP_FIXED, _MAP_NORESERVE, _PROT_NONE = 0x10, 0x4000, 0
_PRIO_PROCESS = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def aligned(size: int, to: int = PAGE) -> int:
    return -(-size // to) * to


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How an arena is divided, and whose image it holds."""

    plan: str
    """Images of the same plan have their tensors at the same places, on every rank."""
    rank: int
    world_size: int
    image_bytes: int
    metadata_bytes: int
    slots: int
    placeholder: str
    """Stands for the tag in the stored `.metadata`."""

    def slot_offset(self, slot: int) -> int:
        return PAGE + aligned(self.metadata_bytes) + slot * aligned(self.image_bytes)

    @property
    def total(self) -> int:
        return self.slot_offset(self.slots)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a slot holds."""

    tag: str
    step: int
    saved_ns: int
    slot: int


class Arena:
    """One rank's memory for checkpoints."""

    def __init__(self, shape: Shape, fd: int) -> None:
        self.shape, self.fd = shape, fd
        self.map = _mapped(fd, shape.total)
        self._prefault: threading.Thread | None = None
        self._leaving = threading.Event()

    @staticmethod
    def create(shape: Shape, metadata: bytes) -> "Arena":
        """An empty one. It has no name in any file system, and is gone with the last process that holds it."""
        fd = memory_file("headway-checkpoint")
        try:
            os.ftruncate(fd, shape.total)
            arena = Arena(shape, fd)
        except OSError as error:
            os.close(fd)
            raise PlatformError(f"{shape.total:,} bytes for checkpoints in memory cannot be had: {error}.") from error
        arena.map[PAGE : PAGE + len(metadata)] = metadata
        return arena

    # --- records ---

    def held(self) -> list[Held]:
        """What is complete here, oldest first."""
        found = [held for slot in range(self.shape.slots) if (held := self._read(slot))]
        return sorted(found, key=lambda held: held.tag)

    def _read(self, slot: int) -> Held | None:
        packed, checksum = _SEALED.unpack_from(self.map, slot * _RECORD_ROOM)
        if zlib.crc32(packed) != checksum:
            return None
        tag, step, saved_ns, size = _RECORD.unpack(packed)
        return Held(tag=tag.decode(), step=step, saved_ns=saved_ns, slot=slot) if size else None

    def open(self, slot: int) -> None:
        """What the slot held is gone; it may be written to."""
        self.map[slot * _RECORD_ROOM : slot * _RECORD_ROOM + _SEALED.size] = bytes(_SEALED.size)

    def seal(self, slot: int, tag: str, step: int, saved_ns: int) -> Held:
        """All of the image is there."""
        packed = _RECORD.pack(tag.encode(), step, saved_ns, self.shape.image_bytes)
        _SEALED.pack_into(self.map, slot * _RECORD_ROOM, packed, zlib.crc32(packed))
        return Held(tag=tag, step=step, saved_ns=saved_ns, slot=slot)

    @property
    def reached(self) -> int:
        """The step that training had got to, or -1: so that a restore can tell what was lost."""
        return int(_STEP.unpack_from(self.map, PAGE - _STEP.size)[0]) - 1

    @reached.setter
    def reached(self, step: int) -> None:
        _STEP.pack_into(self.map, PAGE - _STEP.size, step + 1)

    # --- contents ---

    def image(self, slot: int) -> memoryview:
        offset = self.shape.slot_offset(slot)
        return self.map[offset : offset + self.shape.image_bytes]

    def metadata(self, tag: str) -> bytes:
        """`.metadata` of the save with this tag."""
        template = bytes(self.map[PAGE : PAGE + self.shape.metadata_bytes])
        return template.replace(self.shape.placeholder.encode(), tag.encode())

    # --- pages ---

    def prefault(self, then: Callable[[int, int], None] = lambda address, size: None) -> None:
        """Has the kernel lay in the pages of all slots, in the background: the first copy is then as fast as any. Huge
        ones where it has some, which take a third of the time, and which another process maps at once when it restores.
        Calls `then` with where they are, and how many bytes."""
        self._prefault = threading.Thread(target=self._populate, args=(then,), name="headway-prefault", daemon=True)
        self._prefault.start()

    def _populate(self, then: Callable[[int, int], None]) -> None:
        with suppress(OSError):
            os.setpriority(_PRIO_PROCESS, threading.get_native_id(), 10)
        pages = self.map
        base, left = _address(pages), list(range(0, len(pages), _PREFAULT_STEP))
        for _ in range(_PASSES):
            for offset in list(left):
                if self._leaving.is_set():
                    return
                if _lay_in(base + offset, min(_PREFAULT_STEP, len(pages) - offset)):
                    left.remove(offset)
            if not left or self._leaving.wait(_PASS_S):
                break
        then(base, len(pages))

    def wait_for_pages(self) -> None:
        if self._prefault is not None:
            self._prefault.join()

    def close(self) -> None:
        """Lets go of the memory, unless tensors still look at it: then it goes with the last of them."""
        self._leaving.set()
        self.wait_for_pages()
        self.map = memoryview(b"")
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


# --- pages --------------------------------------------------------------------------------------------------------


def _mapped(fd: int, size: int) -> memoryview:
    """All of a memfd, at an address where a huge page can begin. It is unmapped when nobody looks at it any more."""
    room = _mmap(None, size + _HUGE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    start = aligned(room, _HUGE)
    try:
        _mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(room, size + _HUGE)
        raise
    if start > room:
        _libc.munmap(room, start - room)
    _libc.munmap(start + size, room + _HUGE - start)
    pages = (ctypes.c_ubyte * size).from_address(start)
    weakref.finalize(pages, _libc.munmap, start, size).atexit = False
    return memoryview(pages).cast("B")


def _mmap(start: int | None, size: int, *how: int) -> int:
    found: int = _libc.mmap(start, size, *how, 0)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _address(pages: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))


def _lay_in(start: int, size: int) -> bool:
    """False if it is worth another try: pages that are just being copied to, or read by a disk, cannot be joined."""
    # The kernel makes a huge page of small ones, of which a single one is enough; what they hold stays. An old one does
    # neither: there each page comes when it is touched.
    for page in range(start, start + size, _HUGE):
        _libc.madvise(page, PAGE, _MADV_POPULATE_WRITE)
    is_busy = bool(_libc.madvise(start, size, _MADV_COLLAPSE)) and ctypes.get_errno() in (errno.EAGAIN, errno.EBUSY)
    _libc.madvise(start, size, _MADV_POPULATE_WRITE)
    return not is_busy


# --- what is whole ------------------------------------------------------------------------------------------------


def complete(arenas: Sequence[Arena]) -> dict[str, int]:
    """The saves of which these hold every rank's image, and their steps; the parts of a stream are none."""
    images = [arena for arena in arenas if not arena.shape.plan.endswith("-0")]
    here = [(held.tag, held.step, arena.shape) for arena in images for held in arena.held()]
    ranks: dict[str, set[int]] = {}
    for tag, _, shape in here:
        ranks.setdefault(tag, set()).add(shape.rank)
    return {tag: step for tag, step, shape in here if ranks[tag] == set(range(shape.world_size))}


# --- how much there is --------------------------------------------------------------------------------------------


def slots_that_fit(image_bytes: int, free_bytes: int) -> int:
    """How many images to hold: two where they take no more than half of what is free, or one; else none."""
    return next((slots for slots in (2, 1) if slots * image_bytes <= free_bytes // 2), 0)


__all__ = ["PAGE", "Arena", "Held", "Shape", "aligned", "complete", "slots_that_fit"]
