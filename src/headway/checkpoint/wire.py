"""Messages with file descriptors between the processes of a node that have to do with checkpoints."""

import hashlib
import json
import os
import select
import socket
import struct
from contextlib import suppress
from typing import Any

from headway.events.clock import pid_space

_ROOM = 1 << 18
_FDS = 4


class Wire:
    """One end of a connection. What is sent arrives whole, in order, or not at all."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: dict[str, Any], *fds: int) -> bool:
        """False if nobody is there."""
        try:
            socket.send_fds(self._end, [json.dumps(message).encode()], fds)
        except (BrokenPipeError, ConnectionError, OSError):
            return False
        return True

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """None if the other end is gone, and what it sent before was received."""
        try:
            try:
                data, fds, _, _ = socket.recv_fds(self._end, _ROOM, _FDS)
            except ConnectionResetError:  # it left something unread: the kernel says so once, before what it sent
                data, fds, _, _ = socket.recv_fds(self._end, _ROOM, _FDS)
        except (ConnectionError, OSError):
            return None
        for fd in fds:
            os.set_inheritable(fd, False)
        return (json.loads(data), list(fds)) if data else None

    def is_up(self) -> bool:
        """Whether the other end is still there."""
        poller = select.poll()
        poller.register(self._end, select.POLLRDHUP)
        return not poller.poll(0)

    def has_message(self, within_s: float = 0.0) -> bool:
        """Whether `receive` would return at once, or does within a time."""
        poller = select.poll()
        poller.register(self._end, select.POLLIN)
        return bool(poller.poll(within_s * 1000))

    def close(self) -> None:
        self._end.close()

    def shut(self) -> None:
        """Wakes whoever waits at this end."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def peer(self) -> tuple[int, int]:
        """The process and the user at the other end."""
        pid, user, _ = struct.unpack("3i", self._end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid, user


def pair() -> tuple[Wire, Wire]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Wire(ours), Wire(theirs)


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_PROFILE", "STORAGE_EMULATOR_HOST")
"""What in the environment decides which store a URL leads to."""


def place(root: str) -> str:
    """What tells a root from all others on this machine: a hash, since a store's settings may hold secrets.

    Its path does not: containers may have different folders at the same path, and share the network that keepers
    listen on. Nor can a keeper see the processes of another container, so each has its own.
    """
    which: list[object] = [root, pid_space()]
    if "://" in root:
        import fsspec.config  # type: ignore[import-untyped]

        settings = json.dumps(fsspec.config.conf.get(root.partition("://")[0], {}), sort_keys=True, default=str)
        which += [settings, *map(os.environ.get, _ENDPOINTS)]
    else:
        with suppress(OSError):
            found = os.stat(root)
            which[0] = (found.st_dev, found.st_ino)
    return hashlib.blake2b(repr(which).encode(), digest_size=16).hexdigest()


def address(place: str) -> str:
    """Where the keeper of a place listens. It is no file, so nothing is left behind."""
    return f"\0headway-keeper-{os.getuid()}-{place}"


def listen(place: str) -> socket.socket | None:
    """None if somebody else does."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.bind(address(place))
    except OSError:
        server.close()
        return None
    server.listen(64)
    return server


def connect(place: str) -> Wire | None:
    """None if nobody listens."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.connect(address(place))
    except OSError:
        end.close()
        return None
    return Wire(end)
