"""Messages between the supervisor and the processes it starts: JSON and file descriptors over a Unix socket."""

import array
import json
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

_HEAD = struct.Struct("<II")
"""Bytes and descriptors of the message that follows. One read may bring the descriptors of the next message too."""
_MOST_FDS = 8


class Channel:
    """One end of a socket. It dies with its process, so whoever holds the other end always learns of that."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()
        self._fds: list[int] = []

    @classmethod
    def pair(cls) -> "tuple[Channel, Channel]":
        """Two ends of a new channel."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(one), cls(other)

    @classmethod
    def from_fd(cls, fd: int) -> "Channel":
        """The end that this process was given as a descriptor; it is not passed on."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._socket.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """Sends a message, and copies of descriptors with it; False if nobody is there to get it."""
        data = json.dumps(message).encode()
        try:
            socket.send_fds(self._socket, [_HEAD.pack(len(data), len(fds))], fds)
            self._socket.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[Message, list[int]]:
        """Waits for the next message and the descriptors that came with it; EOFError if there will be none."""
        while (received := self._next()) is None:
            if not self._read(0):
                raise EOFError("the other end is closed")
        return received

    def arrived(self) -> tuple[list[Message], bool]:
        """The messages that are there, without waiting; and whether more can come."""
        is_open = True
        with suppress(BlockingIOError):
            while is_open:
                is_open = self._read(socket.MSG_DONTWAIT)
        messages = []
        while (received := self._next()) is not None:
            messages.append(received[0])
        return messages, is_open

    def close(self) -> None:
        """Gives up this end, and the descriptors of messages that nobody took: a fork that kept a copy of another's
        channel would hide from the supervisor that the other never came up."""
        self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _read(self, flags: int) -> bool:
        fds = array.array("i")
        try:
            # Not `socket.recv_fds`, which forgets its flags, and so waits.
            data, ancillary, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(_MOST_FDS * fds.itemsize), flags)
        except ConnectionError:
            return False
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds += fds
        self._received += data
        return bool(data)

    def _next(self) -> tuple[Message, list[int]] | None:
        if len(self._received) < _HEAD.size:
            return None
        length, count = _HEAD.unpack_from(self._received)
        end = _HEAD.size + length
        if len(self._received) < end:
            return None
        message: Message = json.loads(self._received[_HEAD.size : end])
        del self._received[:end]
        fds, self._fds = self._fds[:count], self._fds[count:]
        return message, fds
