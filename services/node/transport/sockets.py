"""What the kernel is asked for about sockets."""

import asyncio
import socket
from pathlib import Path

DEEP = 4 << 20
"""The largest buffer that a socket asks for."""
QUIET_S, PROBE_S, PROBES = 3, 1, 3
"""After QUIET_S seconds of silence the kernel probes the other host every PROBE_S seconds, and ends
the connection when PROBES of them were not answered."""


def _limit(name: str) -> int:
    """A limit of the kernel; 0 where it does not say."""
    try:
        return int(Path("/proc/sys/net/core", name).read_text())
    except OSError:
        return 0


_most = {socket.SO_RCVBUF: _limit("rmem_max"), socket.SO_SNDBUF: _limit("wmem_max")}


def set_buffer(sock: socket.socket, option: int, nbytes: int) -> None:
    """Sets SO_RCVBUF or SO_SNDBUF, but only where the kernel allows DEEP buffers. Elsewhere it
    would only stop the kernel's own sizing, which goes further."""
    if _most[option] >= DEEP:
        sock.setsockopt(socket.SOL_SOCKET, option, nbytes)


def deep_buffers() -> bool:
    """Whether the kernel allows send buffers as deep as a socket may ask for."""
    return _most[socket.SO_SNDBUF] >= DEEP


async def readable(sock: socket.socket) -> None:
    """Waits until the socket has bytes, a connection to accept, or an end."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


def give_up_after(sock: socket.socket, seconds: float) -> None:
    """For how long the kernel waits for the other host to say anything. 0: for as long as it wants.
    Unlike a timer of ours, it is not late when this process has to wait for a processor."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))


def keep_alive(sock: socket.socket) -> None:
    """Has the kernels at both ends watch the connection, which wakes no process: a node has
    connections to many peers, and exchanges bytes with few of them at a time."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, QUIET_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
