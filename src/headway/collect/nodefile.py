"""A collector's two files in the job's folder: the node file, grown by what it brings, and beside it the pulse."""

import errno
import os
import secrets
from collections.abc import Sequence

from headway.events.clock import Clock
from headway.events.node import Chunk, encode_pulse
from headway.paths import JobPaths


class NodeFile:
    """Where the batches of one collector arrive. All of it raises OSError while the job's folder refuses."""

    def __init__(self, job: JobPaths, clock: Clock | None = None) -> None:
        name = f"{os.uname().nodename}-{(clock or Clock()).wall_ns()}-{secrets.token_hex(4)}"
        self.path, self.pulse_path = job.node(name), job.pulse(name)
        self.unsent = b""
        """What is not known to have arrived."""
        self._job = job
        self._length = 0
        """Bytes of the file that are known to have arrived."""
        self._has_pulse = False

    def deliver(self, batch: bytes = b"") -> int:
        """Writes what is unsent and the batch behind what has arrived, and returns how many bytes that were. A retry
        puts the same bytes in the same place, so that readers who saw a part of them go on as if nothing had happened.
        """
        self.unsent += batch
        if not self.unsent:
            return 0
        if not self._length:
            self._job.make()
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _write(fd, self.unsent, self._length)
            os.fsync(fd)
        finally:
            os.close(fd)
        arrived, self.unsent = len(self.unsent), b""
        self._length += arrived
        return arrived

    def pulse(self, signs: Sequence[Chunk]) -> None:
        """Writes over the pulse, or removes it if nobody lives. Only after the batch: its cells may not be newer than
        the records."""
        if signs:
            self._has_pulse = True
            fd = os.open(self.pulse_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _write(fd, encode_pulse(signs), 0)
            finally:
                os.close(fd)
        elif self._has_pulse:
            self.pulse_path.unlink(missing_ok=True)
            self._has_pulse = False

    def is_intact(self) -> bool:
        """Whether the file still holds what was delivered: somebody may have removed the job's folder."""
        try:
            return not self._length or os.stat(self.path).st_size >= self._length
        except FileNotFoundError:
            return False


def _write(fd: int, data: bytes, offset: int) -> None:
    if os.pwrite(fd, data, offset) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
