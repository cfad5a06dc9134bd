"""What a connection does with the time that it is told."""

import asyncio
import socket
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial
from random import Random

import pytest

from services.node.transport import connection as module
from services.node.transport import sockets
from services.node.transport.connection import USED_S, Connection
from services.node.transport.wire import Kind, encode_prefix
from shared.clock import now
from shared.errors import PeerLost, TransportError

LIMIT_S = 3.0
INTERVAL_S = 0.5
CANCEL = encode_prefix(Kind.CANCEL, id=1)


@pytest.fixture
def peer() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Our end of a connection, and the peer's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    ours.setblocking(False)
    theirs.settimeout(LIMIT_S)
    yield ours, theirs
    theirs.close()


@pytest.fixture
async def connection(peer: tuple[socket.socket, socket.socket]) -> AsyncIterator[Connection]:
    """To a peer that says nothing, from which it waits for a frame."""
    made = Connection(peer[0], "the peer", max_payload=0)
    waiting = asyncio.ensure_future(made.receive_prefix())
    await asyncio.sleep(0)
    yield made
    made.close(PeerLost("the test is over"))
    with suppress(TransportError):
        await waiting


async def test_one_in_use_is_closed_after_a_silence(connection: Connection) -> None:
    connection.check_silence(now() + LIMIT_S - 0.5, LIMIT_S)
    assert connection.error is None
    connection.check_silence(now() + LIMIT_S, LIMIT_S)
    assert isinstance(connection.error, PeerLost)


async def test_an_idle_one_is_left_to_the_kernel(
    connection: Connection, peer: tuple[socket.socket, socket.socket]
) -> None:
    assert USED_S > LIMIT_S
    await connection.send([CANCEL])
    connection.watch(now() + 2 * USED_S + 0.1, LIMIT_S, INTERVAL_S)
    assert connection.error is None
    connection.close(PeerLost("the test is over"))
    assert b"".join(iter(partial(peer[1].recv, 1000), b"")) == CANCEL


async def test_one_that_is_used_again_is_watched_again_at_once(connection: Connection) -> None:
    at = now() + 2 * USED_S + 0.1
    connection.watch(at, LIMIT_S, INTERVAL_S)
    assert connection.error is None
    connection.busy = lambda: True
    connection.post(CANCEL)
    connection.watch(at, LIMIT_S, INTERVAL_S)
    assert isinstance(connection.error, PeerLost)


async def test_one_with_an_answer_to_come_is_in_use(connection: Connection) -> None:
    connection.busy = lambda: True
    connection.check_silence(now() + USED_S + 1, LIMIT_S)
    assert isinstance(connection.error, PeerLost)


async def test_silence_before_it_was_used_again_does_not_count(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "USED_S", 0.01)
    await asyncio.sleep(0.02)
    connection.busy = lambda: True
    connection.post(CANCEL)
    assert connection.posted == 2  # and a heartbeat, since the peer waits as well
    used = now()
    connection.check_silence(used + LIMIT_S - 0.01, LIMIT_S)
    assert connection.error is None
    connection.check_silence(used + LIMIT_S, LIMIT_S)
    assert isinstance(connection.error, PeerLost)


@pytest.mark.parametrize(
    ("after_s", "beats"), [(INTERVAL_S - 0.1, False), (INTERVAL_S, True), (USED_S + 1, True)]
)
async def test_heartbeats_come_while_nothing_else_is_sent(
    connection: Connection,
    peer: tuple[socket.socket, socket.socket],
    after_s: float,
    *,
    beats: bool,
) -> None:
    """Also when we count as idle: the peer may not have noticed yet."""
    await connection.send([CANCEL])
    connection.watch(now() + after_s, LIMIT_S, INTERVAL_S)
    connection.close(PeerLost("the test is over"))
    came = b"".join(iter(partial(peer[1].recv, 1000), b""))
    assert came == CANCEL + (encode_prefix(Kind.HEARTBEAT) if beats else b"")


async def test_a_heartbeat_that_the_kernel_has_no_room_for_is_sent_later(
    connection: Connection, peer: tuple[socket.socket, socket.socket]
) -> None:
    filled = 0
    with suppress(BlockingIOError):
        while True:
            filled += peer[0].send(bytes(1 << 20))
    connection.beat_after(now() + LIMIT_S, LIMIT_S)
    assert connection.posted == 1
    sending = asyncio.ensure_future(connection.send_posted())
    loop = asyncio.get_running_loop()
    beat = encode_prefix(Kind.HEARTBEAT)
    came = bytearray()
    peer[1].setblocking(False)
    async with asyncio.timeout(LIMIT_S):
        while len(came) < filled + len(beat):
            came += await loop.sock_recv(peer[1], 1 << 20)
    assert came.endswith(beat)
    sending.cancel()


async def test_heartbeats_are_signs_of_life_and_no_frames(
    connection: Connection, peer: tuple[socket.socket, socket.socket]
) -> None:
    before = connection._silent_since
    peer[1].sendall(encode_prefix(Kind.HEARTBEAT))
    async with asyncio.timeout(LIMIT_S):
        while connection._silent_since == before:  # noqa: ASYNC110
            await asyncio.sleep(0)
    connection.busy = lambda: True
    connection.check_silence(now() + LIMIT_S / 2 - 0.5, LIMIT_S)
    assert connection.error is None


class Scratch:
    def room(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def came(self, nbytes: int) -> None:
        pass


async def test_a_closed_one_is_waited_on_by_nobody(connection: Connection) -> None:
    """It may be closed between a frame's prefix and its payload."""
    connection.close(PeerLost("gone"))
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(PeerLost, match="gone"):
            await connection.receive(Scratch(), 1 << 20)


@pytest.mark.parametrize("most", [212992, 1 << 30], ids=["stock kernel", "raised limits"])
async def test_small_frames_leave_the_kernels_buffers_as_they_are(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setitem(sockets._most, socket.SO_SNDBUF, most)
    before = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    await connection.send([CANCEL])
    assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before


async def test_what_a_peer_only_announces_takes_no_memory(
    peer: tuple[socket.socket, socket.socket],
) -> None:
    made = Connection(peer[0], "the peer", max_payload=0)
    tracemalloc.start()
    waiting = asyncio.ensure_future(made.receive_exactly(64 << 20))
    peer[1].sendall(bytes(1000))
    await asyncio.sleep(0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    made.close(PeerLost("the test is over"))
    with pytest.raises(PeerLost):
        await waiting
    assert peak < 4 << 20


@pytest.mark.parametrize("nbytes", [0, 1, (1 << 20) + 1, 5_000_001])
async def test_a_large_message_comes_whole(
    nbytes: int, peer: tuple[socket.socket, socket.socket]
) -> None:
    made = Connection(peer[0], "the peer", max_payload=0)
    data = Random(nbytes).randbytes(nbytes)
    sending = asyncio.get_running_loop().run_in_executor(None, peer[1].sendall, data)
    assert await made.receive_exactly(nbytes) == data
    await sending
    made.close(PeerLost("the test is over"))
