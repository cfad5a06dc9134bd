"""Peers of the data plane made by hand: what they say and leave unsaid is up to the test."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from services.node.transport.connection import Connection
from services.node.transport.direct import Direct
from services.node.transport.secret import Secret
from services.node.transport.strangers import MOST
from services.node.transport.tcp import TcpTransport
from services.node.transport.wire import (
    PREFIX_BYTES,
    Hello,
    Kind,
    Prefix,
    Purpose,
    encode_hello,
    encode_prefix,
    parse_hello,
    parse_prefix,
)
from shared.errors import TransportError
from tests.support.listeners import Hears

SILENCE_S = 1.0
"""The silence after which nodes in tests give a peer up. It is no shorter because a busy machine
is silent, too."""
LIMIT_S = 200.0
"""Within which everything ends, in a typed error or well."""
STRANGER = "tcp://127.0.0.1:1"
"""Where the peers that dial say that they listen."""
NO_WAYS: Mapping[str, bytes] = {}
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Answer = Callable[[Mapping[str, bytes]], Mapping[str, bytes]]
"""To the direct ways that a dialler offers."""


class _Telling(TcpTransport):
    """Tells also what it only logs."""

    def __init__(
        self, ended: "asyncio.Queue[tuple[str, TransportError]]", *args: Any, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self._ended = ended

    def _accepted_ended(self, connection: Connection, error: TransportError) -> None:
        super()._accepted_ended(connection, error)
        self._ended.put_nowait((connection.address, error))


class Node:
    """A real transport and what it told."""

    def __init__(
        self,
        *,
        silence_s: float = SILENCE_S,
        handshake_s: float = SILENCE_S,
        rate: int = 0,
        ways: Sequence[Direct] = (),
        secret: Secret | None = None,
        most_strangers: int = MOST,
    ) -> None:
        self.received: asyncio.Queue[tuple[str, bytes, bytes]] = asyncio.Queue()
        self.lost: asyncio.Queue[tuple[str, TransportError]] = asyncio.Queue()
        self.dialled: asyncio.Queue[str] = asyncio.Queue()
        """Who says that it has connected."""
        self.ended: asyncio.Queue[tuple[str, TransportError]] = asyncio.Queue()
        """Connections of others, by where these say that they listen, and why they ended."""
        self.transport = _Telling(
            self.ended,
            "127.0.0.1",
            0,
            link_bytes_per_s=rate,
            listener=Hears(
                lambda sender, header, payload: self.received.put_nowait(
                    (sender, bytes(header), bytes(payload))
                ),
                lambda address, error: self.lost.put_nowait((address, error)),
                self.dialled.put_nowait,
            ),
            ways=ways,
            secret=secret,
            silence_s=silence_s,
            handshake_s=handshake_s,
            max_payload=1 << 20,
            most_strangers=most_strangers,
        )

    @property
    def address(self) -> str:
        return self.transport.address

    async def read(self, address: str, region: str = "w", nbytes: int = 1000) -> bytes:
        into = bytearray(nbytes)
        async with asyncio.timeout(LIMIT_S):
            await self.transport.read(address, region, 0, memoryview(into), priority=1)
        return bytes(into)


def hello(
    purpose: Purpose,
    instance: int = 7,
    address: str = STRANGER,
    ways: Mapping[str, bytes] = NO_WAYS,
) -> bytes:
    return encode_hello(Hello(purpose, instance, address, dict(ways)))


async def next_frame(reader: asyncio.StreamReader) -> tuple[Prefix, bytes]:
    while True:
        data = await reader.readexactly(PREFIX_BYTES)
        prefix = parse_prefix(data, max_payload=1 << 30)
        body = await reader.readexactly(prefix.body + prefix.payload)
        if prefix.kind is not Kind.HEARTBEAT:
            return prefix, body


async def open_to(node: Node, *, receive_buffer: int = 0) -> Streams:
    """A bare connection to the node. `receive_buffer`: of the socket, 0: as large as it comes."""
    host, port = node.address.removeprefix("tcp://").split(":")
    sock = socket.socket()
    sock.setblocking(False)
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return await asyncio.open_connection(sock=sock)


async def dial(
    node: Node,
    purpose: Purpose,
    *,
    instance: int = 7,
    address: str = STRANGER,
    ways: Mapping[str, bytes] = NO_WAYS,
    receive_buffer: int = 0,
) -> Streams:
    """A connection to the node, past its handshake."""
    reader, writer = await open_to(node, receive_buffer=receive_buffer)
    writer.write(hello(purpose, instance, address, ways))
    prefix, body = await next_frame(reader)
    assert prefix.kind is Kind.HELLO
    assert parse_hello(body).address == node.address
    return reader, writer


async def closed(streams: Streams) -> None:
    """Returns once the other end has closed the connection."""
    async with asyncio.timeout(LIMIT_S):
        try:
            while await streams[0].read(4096):
                pass
        except ConnectionResetError:
            pass
    streams[1].close()


async def leave(streams: Streams) -> None:
    """Closes the connection, whatever has become of it."""
    streams[1].close()
    with suppress(ConnectionError):
        await streams[1].wait_closed()


@asynccontextmanager
async def answering(behaviour: Behaviour) -> AsyncIterator[str]:
    """Listens at the address and behaves as told, from the first byte on."""
    tasks: set[asyncio.Task[None]] = set()
    accepted: list[Streams] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await behaviour(reader, writer)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.get_running_loop().create_task(serve(reader, writer)))
        accepted.append((reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for streams in accepted:
            await leave(streams)


@asynccontextmanager
async def impostor(
    behaviour: Behaviour, *, answer: Answer = lambda offers: NO_WAYS
) -> AsyncIterator[str]:
    """Welcomes whoever dials as a node does, and behaves as told from then on."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, body = await next_frame(reader)
        ways = answer(parse_hello(body).ways)
        writer.write(hello(Purpose.READS, address=address, ways=ways))
        await behaviour(reader, writer)

    async with answering(serve) as address:
        yield address


async def beat(writer: asyncio.StreamWriter) -> None:
    """Shows itself alive, for ever."""
    while True:
        writer.write(encode_prefix(Kind.HEARTBEAT))
        await asyncio.sleep(SILENCE_S / 4)
