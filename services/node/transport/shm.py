"""Shared memory: nodes of one machine copy blocks directly out of each other's arenas.

A reader maps its peer's arenas once for each connection, read-only, and copies from there. That is
one pass over memory, where a socket takes two and the kernel's time. The descriptors of the arenas
come over a Unix socket that only processes of the same user on the same machine can reach.
"""

import asyncio
import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from services.node.memory.views import Memory, find
from services.node.transport.direct import Place
from services.node.transport.sockets import readable
from shared import telemetry
from shared.errors import PeerLost, ProtocolViolation, TransportError
from shared.threads import to_its_end

PIECE = 4 << 20
"""Bytes copied at a time. A copy can be stopped only between two pieces (after about 0.5 ms)."""
INLINE = 64 << 10
"""Fewer bytes than this are copied on the spot, because handing them to a thread takes longer."""
COPIERS = 2
MAX_MEMORIES = 16
MAX_BESIDE = 256
PAUSE_S = 0.05
"""Seconds to wait after the descriptors could not be handed out."""
_CREDENTIALS = struct.Struct("3i")

Bytes = npt.NDArray[np.uint8]


class ShmDirect:
    name = "shm"

    def __init__(self, memories: Sequence[Memory], *, machine: str, bytes_per_s: int = 0) -> None:
        """`machine`: the node's name for its machine. Nodes that name different machines do not
        share memory, even if they could."""
        self.bytes_per_s = bytes_per_s
        self._memories = memories
        self._here = "/".join((machine, *_kernel_identity())).encode()
        self._socket = f"\0lambdascale-{secrets.token_hex(8)}"
        self._beside = b""
        """Bytes that every dialler is told beside the descriptors; at most MAX_BESIDE."""
        self._pause: asyncio.TimerHandle | None = None
        self._log = telemetry.logger("shm")

    async def __aenter__(self) -> Self:
        self._copiers = ThreadPoolExecutor(COPIERS, thread_name_prefix="shm")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(self._socket)
        self._listener.listen(128)
        self._listen()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pause is not None:
            self._pause.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._copiers.shutdown(wait=False)

    def offer(self) -> "ShmOffer":
        return ShmOffer(self._here, self._memories, self._copiers)

    def accept(self, offer: bytes) -> "tuple[bytes, ShmSource] | None":
        if offer != self._here:
            return None
        return self._socket.encode(), ShmSource(self._memories)

    def _hand_out(self) -> None:
        """Sends the descriptors to whoever dials. They fit into any socket's buffer."""
        try:
            peer, _ = self._listener.accept()
            with peer:
                if _user(peer) in (0, os.getuid()):
                    descriptors = [memory.descriptor for memory in self._memories]
                    told = bytes([len(descriptors)]) + self._beside
                    socket.send_fds(peer, [told], descriptors)
        except (BlockingIOError, ConnectionError):
            return  # the dialler has gone already
        except OSError as error:  # no free descriptors, for example
            self._log.warning("memory was not shared", error=error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            self._pause = loop.call_later(PAUSE_S, self._listen)

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._hand_out)


class ShmSource:
    def __init__(self, memories: Sequence[Memory]) -> None:
        self._memories = memories

    def place(self, buffer: memoryview) -> Place | None:
        found = find(self._memories, buffer)
        return Place(*found) if found else None

    def close(self) -> None:
        """Does nothing: what the peer has mapped, it keeps until its own end."""


class ShmOffer:
    def __init__(
        self, here: bytes, memories: Sequence[Memory], copiers: ThreadPoolExecutor
    ) -> None:
        self.data = here
        self._memories = memories
        self._copiers = copiers

    async def complete(self, answer: bytes) -> "ShmReader":
        _, theirs = await self._dial(answer)
        return ShmReader(theirs, self._memories, self._copiers)

    async def _dial(self, answer: bytes) -> tuple[bytes, list[Bytes]]:
        """Returns what the peer says beside its descriptors, and its memories, mapped."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, answer)
                await readable(sock)
                told, descriptors, _, _ = socket.recv_fds(sock, 1 + MAX_BESIDE, MAX_MEMORIES)
            except (OSError, ValueError) as error:
                raise PeerLost(f"no shared memory: {error}") from error
        try:
            if told[:1] != bytes([len(descriptors)]):
                raise TransportError("the peer does not share its memory with this user")
            return told[1:], [_map(descriptor) for descriptor in descriptors]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def withdraw(self) -> None:
        """Does nothing, because nothing was set up for the offer."""


class ShmReader:
    def __init__(
        self, theirs: Sequence[Bytes], memories: Sequence[Memory], copiers: ThreadPoolExecutor
    ) -> None:
        self.name = ShmDirect.name
        self._theirs = theirs
        self._memories = memories
        self._copiers = copiers
        self._closed = False

    def reaches(self, into: memoryview) -> bool:
        return find(self._memories, into) is not None

    async def take(self, place: Place, into: memoryview) -> None:
        self._check()
        source = self._source(place, len(into))
        target = np.frombuffer(into, np.uint8)
        if len(into) <= INLINE:
            np.copyto(target, source)
            return
        for start in range(0, len(into), PIECE):
            piece = slice(start, start + PIECE)
            # numpy releases the GIL while it copies.
            await to_its_end(partial(np.copyto, target[piece], source[piece]), self._copiers)
            self._check()

    def _source(self, place: Place, nbytes: int) -> Bytes:
        if place.key >= len(self._theirs):
            raise ProtocolViolation(f"memory {place.key} of a peer that shares {len(self._theirs)}")
        source = self._theirs[place.key][place.address : place.address + nbytes]
        if len(source) != nbytes:
            raise ProtocolViolation(
                f"{nbytes} bytes at {place.address}: the peer's memory has "
                f"{len(self._theirs[place.key])}"
            )
        return source

    def _check(self) -> None:
        if self._closed:
            raise PeerLost("the connection to the owner of the memory is closed")

    def close(self) -> None:
        """Unmaps the peer's memory, which may be that of a process long gone."""
        self._closed = True
        self._theirs = ()


def _kernel_identity() -> tuple[str, str]:
    """Identifies the running kernel, and the network namespace that abstract sockets belong to."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, str(Path("/proc/self/ns/net").stat().st_ino)


def _user(peer: socket.socket) -> int:
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    return int(user)


def _map(descriptor: int) -> Bytes:
    """Maps a file for reading. It must be sealed against shrinking: reading bytes that are gone
    would kill the reader."""
    try:
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransportError("the peer's memory is not sealed against shrinking")
        return np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise TransportError(f"the peer's memory cannot be mapped: {error}") from error
