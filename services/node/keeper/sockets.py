"""The socket between a node's process and its keeper."""

import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from services.node.keeper.messages import LARGEST, SOCKET

_CREDENTIALS = struct.Struct("3i")
FDS = 1
"""Descriptors that come with one message, at most."""
LOCK = "keeper.lock"
SEND_S = 2.0
"""An end that does not read for this long is given up."""


class Truncated(Exception):
    """A message is too long, or has too many descriptors with it."""


@contextmanager
def short_path(directory: Path) -> Iterator[str]:
    """The socket's path in a form that is short enough for a socket's address (107 bytes)."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end, as the kernel says."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


def send(connection: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Sends a message over a non-blocking socket. OSError: the other end is gone, or has not read
    for SEND_S."""
    while True:
        try:
            socket.send_fds(connection, [data], descriptors)
            return
        except BlockingIOError:
            _, writable, _ = select.select((), (connection,), (), SEND_S)
            if not writable:
                raise TimeoutError(f"the other end has read nothing for {SEND_S} s") from None


def receive(connection: socket.socket) -> tuple[bytes, int | None]:
    """A message from a non-blocking socket, and the descriptor that came with it; b"" at the end.
    The caller closes the descriptor. BlockingIOError: there is none yet. Truncated: nothing is left
    open."""
    data, descriptors, told, _ = socket.recv_fds(connection, LARGEST, FDS, socket.MSG_CMSG_CLOEXEC)
    if told & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(descriptors) > FDS:
        for descriptor in descriptors:
            os.close(descriptor)
        raise Truncated(f"a message of more than {LARGEST} bytes or {FDS} descriptors")
    return data, descriptors[0] if descriptors else None
