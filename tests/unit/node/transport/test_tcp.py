"""What only sockets can do wrong: garbage, lies, silence, stalls, half-sent frames."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress

import pytest
import uvloop

from services.node.transport.base import NoListener
from services.node.transport.connection import USED_S
from services.node.transport.tcp import TcpTransport
from services.node.transport.wire import (
    MAGIC,
    MAX_BODY,
    PREFIX_BYTES,
    Kind,
    Prefix,
    Purpose,
    ReadRequest,
    encode_fault,
    encode_prefix,
    encode_read,
    parse_fault,
)
from shared.clock import now
from shared.errors import (
    BadInput,
    ConfigError,
    PeerLost,
    ProtocolViolation,
    RegionUnknown,
    TransportError,
    TransportTimeout,
)
from tests.support.raw_peer import (
    LIMIT_S,
    SILENCE_S,
    Node,
    Streams,
    answering,
    beat,
    closed,
    dial,
    hello,
    impostor,
    leave,
    next_frame,
    open_to,
)

pytestmark = pytest.mark.usefixtures("relay")

HELLO = hello(Purpose.READS)
BEFORE_HELLO = {
    "http": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "not hello": encode_prefix(Kind.HEARTBEAT) + encode_prefix(Kind.CANCEL, id=1),
    "other magic": HELLO.replace(MAGIC, b"NOPE"),
    "other version": HELLO.replace(MAGIC + b"\0\3", MAGIC + b"\0\5"),
    "oversize": encode_prefix(Kind.HELLO, body=MAX_BODY + 1),
    "endless": encode_prefix(Kind.HELLO, body=MAX_BODY),
}


@pytest.mark.parametrize("data", BEFORE_HELLO.values(), ids=BEFORE_HELLO.keys())
async def test_strangers_are_shown_out(node: Node, data: bytes) -> None:
    streams = await open_to(node)
    streams[1].write(data)
    await closed(streams)
    assert node.lost.empty()


READ = ReadRequest(1, 0, 10, "w")
ON_READS = {
    "data": encode_prefix(Kind.DATA, id=1, payload=5) + b"12345",
    "message": encode_prefix(Kind.MESSAGE, body=1) + b"1",
    "the same id": encode_read(1, READ) + encode_read(1, READ),
    "truncated body": encode_prefix(Kind.READ, id=1, body=3) + b"abc",
    "no bytes": encode_read(1, ReadRequest(1, 0, 0, "w")),
    "garbage": bytes(range(64, 128)),
    "second hello": HELLO,
}


@pytest.mark.parametrize("data", ON_READS.values(), ids=ON_READS.keys())
async def test_a_violation_ends_its_own_connection_only(node: Node, data: bytes) -> None:
    node.transport.register("w", memoryview(bytearray(1000)), ready=5)
    good = await dial(node, Purpose.READS)
    bad = await dial(node, Purpose.READS)
    bad[1].write(data)
    await closed(bad)
    address, error = await node.ended.get()
    assert address == "tcp://127.0.0.1:1"
    assert isinstance(error, ProtocolViolation)
    good[1].write(encode_read(1, ReadRequest(1, 0, 5, "w")))
    assert (await next_frame(good[0]))[0] == Prefix(Kind.DATA, 1, 0, 5)
    good[1].close()


async def test_a_range_beyond_all_numbers(node: Node) -> None:
    node.transport.register("w", memoryview(bytearray(1000)), ready=1000)
    streams = await dial(node, Purpose.READS)
    huge = (1 << 64) - 1
    streams[1].write(encode_read(1, ReadRequest(1, huge, huge, "w")))
    prefix, body = await next_frame(streams[0])
    assert prefix.kind is Kind.FAULT
    assert parse_fault(body)[0] == RegionUnknown.code
    streams[1].close()


async def test_messages_too_large(node: Node) -> None:
    streams = await dial(node, Purpose.MESSAGES)
    streams[1].write(encode_prefix(Kind.MESSAGE, body=1, payload=(1 << 20) + 1))
    await closed(streams)
    with pytest.raises(BadInput, match="at most"):
        await node.transport.send("tcp://127.0.0.1:1", b"", [bytes((1 << 20) + 1)])
    with pytest.raises(BadInput, match="at most"):
        await node.transport.send("tcp://127.0.0.1:1", bytes(MAX_BODY + 1))


@pytest.mark.parametrize("address", ["memory://1", "tcp://", "tcp://host", "tcp://h:99999", "x"])
async def test_bad_addresses(node: Node, address: str) -> None:
    with pytest.raises(BadInput, match="address"):
        await node.transport.connect(address)


async def test_an_address_that_is_taken(node: Node) -> None:
    port = int(node.transport.address.rpartition(":")[2])
    other = TcpTransport(
        "127.0.0.1",
        port,
        link_bytes_per_s=0,
        listener=NoListener(),
    )
    with pytest.raises(ConfigError, match=f"cannot listen on tcp://127.0.0.1:{port}"):
        await other.__aenter__()


# --- the answering end misbehaves ------------------------------------------------


async def test_a_source_that_stops_within_a_frame(node: Node) -> None:
    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prefix, _ = await next_frame(reader)
        writer.write(encode_prefix(Kind.DATA, id=prefix.id, payload=1000) + b"some")
        await asyncio.Event().wait()

    async with impostor(stall) as address:
        for _ in range(2):  # it reconnects, and the same happens again
            with pytest.raises(TransportTimeout):
                await node.read(address)
            lost, error = await node.lost.get()
            assert lost == address
            assert isinstance(error, TransportTimeout)


async def test_a_silent_peer_is_lost(node: Node) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with impostor(mute) as address:
        with pytest.raises(PeerLost, match="silent"):
            await node.read(address)
        assert (await node.lost.get())[0] == address


async def test_a_peer_that_never_says_hello(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PeerLost, match="no connection within"):
            await node.read(f"tcp://127.0.0.1:{port}")
    assert node.lost.empty()


async def test_a_peer_that_is_busy_before_it_says_hello() -> None:
    """Its kernel takes the connection at once, its process only later: it has just been started."""
    silence_s = 0.05
    reader, source = Node(silence_s=silence_s, handshake_s=LIMIT_S), Node()
    awake = asyncio.Event()

    async def busy(incoming: asyncio.StreamReader, outgoing: asyncio.StreamWriter) -> None:
        await awake.wait()
        through = await open_to(source)
        through[1].write(await incoming.readexactly(PREFIX_BYTES))
        try:
            await asyncio.gather(copy(incoming, through[1]), copy(through[0], outgoing))
        finally:
            await leave(through)

    async with source.transport, reader.transport, answering(busy) as address:
        source.transport.register("w", memoryview(bytearray(b"x" * 1000)), ready=1000)
        read = asyncio.ensure_future(reader.read(address))
        await asyncio.wait([read], timeout=10 * silence_s)
        awake.set()
        assert await read == b"x" * 1000


async def test_a_host_that_takes_no_connection() -> None:
    """As one that is gone: only its silence says so."""
    node = Node(silence_s=0.2, handshake_s=LIMIT_S)
    with socket.socket() as listener, ExitStack() as crowd:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(2):  # more than it takes
            stranger = crowd.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(listener.getsockname())
        async with node.transport:
            with pytest.raises(PeerLost, match="the host does not answer"):
                await node.read(f"tcp://127.0.0.1:{listener.getsockname()[1]}")


ANSWERS = {
    "more than asked for": encode_prefix(Kind.DATA, id=0, payload=1001) + bytes(1001),
    "nobody asked": encode_prefix(Kind.DATA, id=5, payload=1) + b"1",
    "a request": encode_read(0, READ),
    "a message": encode_prefix(Kind.MESSAGE, body=1) + b"1",
    "a fault without code": encode_prefix(Kind.FAULT, id=0, body=2) + b"no",
    "garbage": bytes(range(64, 128)),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_answers_that_make_no_sense(node: Node, answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_frame(reader)
        writer.write(answer)
        await asyncio.Event().wait()

    async with impostor(reply) as address:
        with pytest.raises(ProtocolViolation):
            await node.read(address)


async def test_an_unknown_fault_is_still_an_answer(node: Node) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prefix, _ = await next_frame(reader)
        body = b"strange\0because"
        writer.write(encode_prefix(Kind.FAULT, id=prefix.id, body=len(body)) + body)
        await asyncio.Event().wait()

    async with impostor(reply) as address:
        with pytest.raises(TransportError, match="because"):
            await node.read(address)


# --- in good order -----------------------------------------------------------------


async def test_waiting_for_bytes_is_not_silence() -> None:
    """Reads that wait longer than `silence_s`, and peers that say nothing, are no failures."""
    source, reader = Node(), Node()
    async with source.transport, reader.transport:
        source.transport.register("w", memoryview(bytearray(b"x" * 1000)))
        await reader.transport.send(source.transport.address, b"hello")
        read = asyncio.ensure_future(reader.read(source.transport.address))
        await asyncio.wait([read], timeout=4 * SILENCE_S)
        assert not read.done()
        source.transport.advance("w", 1000)
        assert await read == b"x" * 1000
        assert source.lost.empty()
        assert reader.lost.empty()


async def test_connections_made_ahead_of_need_are_idle() -> None:
    here, there = Node(), Node()
    async with here.transport, there.transport:
        await here.transport.connect(there.transport.address)
        mesh = list(here.transport._standing)
        assert len(mesh) == 2
        assert all(connection._is_idle(now(), USED_S) for connection in mesh)
        for connection in (*mesh, *there.transport._standing):
            assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        await here.transport.send(there.transport.address, b"hello")
        assert sum(connection._is_idle(now(), USED_S) for connection in mesh) == 1


async def test_a_reader_that_is_slow_is_not_lost() -> None:
    """Its port is busy with more urgent bytes for longer than `silence_s`."""
    source = Node()
    reader = Node(rate=1_000_000)
    async with source.transport, reader.transport:
        data = memoryview(bytearray(600_000))
        source.transport.register("w", data, ready=len(data))
        reads = [
            asyncio.ensure_future(reader.read(source.transport.address, nbytes=len(data)))
            for _ in range(2)
        ]
        await asyncio.gather(*reads)
        assert source.lost.empty()
        assert reader.lost.empty()


async def test_many_users_of_an_address_dial_once(node: Node) -> None:
    handshakes = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal handshakes
        handshakes += 1
        await asyncio.Event().wait()

    async with impostor(count) as address:
        await asyncio.gather(*(node.transport.connect(address) for _ in range(5)))
        assert handshakes == 2  # one for reads, one for messages


async def test_a_send_cancelled_half_way_ends_the_connection(node: Node) -> None:
    async def never_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await beat(writer)

    async with impostor(never_read) as address, asyncio.timeout(10):
        big = bytes(1 << 20)
        sends = [asyncio.ensure_future(node.transport.send(address, b"", [big])) for _ in range(64)]
        await asyncio.wait(sends, timeout=SILENCE_S)
        stuck = [send for send in sends if not send.done()]
        assert len(stuck) > 1
        stuck[0].cancel()
        for send in stuck[1:]:
            with pytest.raises(PeerLost, match="half-way"):
                await send
        assert (await node.lost.get())[0] == address


async def test_a_cancelled_read_stops_the_source() -> None:
    """It sends the frame it is in and says that it stopped; the rest of the bytes stay home."""
    node = Node(rate=2_000_000)
    async with node.transport:
        data = memoryview(bytearray(4 << 20))
        node.transport.register("w", data, ready=len(data))
        streams = await dial(node, Purpose.READS)
        streams[1].write(encode_read(1, ReadRequest(1, 0, len(data), "w")))
        prefix, _ = await next_frame(streams[0])
        streams[1].write(encode_prefix(Kind.CANCEL, id=1) + encode_prefix(Kind.CANCEL, id=9))
        received = prefix.payload
        async with asyncio.timeout(5):
            while prefix.kind is Kind.DATA:
                prefix, body = await next_frame(streams[0])
                received += prefix.payload
        assert parse_fault(body)[0] == "cancelled"
        assert received < len(data) // 2
        streams[1].close()


async def stuck_within_a_frame(node: Node) -> Streams:
    """A read of region `w` by a peer that does not take its bytes in."""
    data = memoryview(bytearray(64 << 20))
    node.transport.register("w", data, ready=len(data))
    streams = await dial(node, Purpose.READS)
    transport = streams[1].transport
    assert isinstance(transport, asyncio.ReadTransport)
    transport.pause_reading()
    streams[1].write(encode_read(1, ReadRequest(1, 0, len(data), "w")))
    await streams[1].drain()
    await node.read(node.transport.address)  # by another connection: the port moved on
    return streams


async def resumed(streams: Streams) -> tuple[Prefix, bytes]:
    """What comes after the frames of DATA, all of which are whole."""
    transport = streams[1].transport
    assert isinstance(transport, asyncio.ReadTransport)
    transport.resume_reading()
    async with asyncio.timeout(5):
        while True:
            prefix, body = await next_frame(streams[0])
            if prefix.kind is not Kind.DATA:
                return prefix, body


async def test_a_frame_is_finished_though_its_read_is_cancelled(shallow: Node) -> None:
    node = shallow
    streams = await stuck_within_a_frame(node)
    streams[1].write(encode_prefix(Kind.CANCEL, id=1))
    await streams[1].drain()
    await node.read(node.transport.address)
    prefix, body = await resumed(streams)
    assert (prefix.kind, parse_fault(body)[0]) == (Kind.FAULT, "cancelled")
    streams[1].write(encode_read(2, ReadRequest(1, 0, 10, "w")))
    assert (await next_frame(streams[0]))[0] == Prefix(Kind.DATA, 2, 0, 10)
    streams[1].close()


async def test_unregister_waits_for_the_frame_that_is_on_its_way(shallow: Node) -> None:
    node = shallow
    streams = await stuck_within_a_frame(node)
    unregister = asyncio.ensure_future(node.transport.unregister("w"))
    with pytest.raises(RegionUnknown):
        await node.read(node.transport.address)
    assert not unregister.done()
    prefix, body = await resumed(streams)
    assert (prefix.kind, parse_fault(body)[0]) == (Kind.FAULT, RegionUnknown.code)
    await unregister
    streams[1].close()


async def test_a_read_cancelled_within_a_frame_is_drained(node: Node) -> None:
    """Not a byte more goes to its buffer, and the connection goes on."""
    half, rest = asyncio.Event(), asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, _ = await next_frame(reader)
        writer.write(encode_prefix(Kind.DATA, id=first.id, payload=1000) + b"a" * 500)
        half.set()
        await rest.wait()
        writer.write(b"a" * 500 + encode_fault(first.id, "cancelled", ""))
        cancel, _ = await next_frame(reader)
        assert (cancel.kind, cancel.id) == (Kind.CANCEL, first.id)
        second, _ = await next_frame(reader)
        writer.write(encode_prefix(Kind.DATA, id=second.id, payload=1000) + b"b" * 1000)
        await asyncio.Event().wait()

    async with impostor(slow) as address, asyncio.timeout(10):
        into = bytearray(2000)
        read = asyncio.ensure_future(
            node.transport.read(address, "w", 0, memoryview(into), priority=1)
        )
        await half.wait()
        read.cancel()
        await asyncio.wait([read])
        into[:] = bytes(2000)
        rest.set()
        assert await node.read(address) == b"b" * 1000
        assert not any(into)
        assert node.lost.empty()


async def test_closing_with_everything_in_flight() -> None:
    async with AsyncExitStack() as stack:
        nodes = [Node(rate=5_000_000) for _ in range(3)]
        for node in nodes:
            await stack.enter_async_context(node.transport)
            node.transport.register("w", memoryview(bytearray(1 << 20)), ready=1 << 20)
        reads = [
            asyncio.ensure_future(reader.read(source.transport.address, nbytes=1 << 20))
            for reader in nodes
            for source in nodes
            if reader is not source
        ]
        await nodes[0].transport.send(nodes[1].transport.address, b"first")
        await nodes[1].received.get()
    outcomes = await asyncio.gather(*reads, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {PeerLost}
    with pytest.raises(PeerLost, match="is closed"):
        await nodes[0].read(nodes[1].transport.address)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("turns", range(8))
def test_closing_while_strangers_come_in(
    turns: int, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """No socket is left open (warnings are errors), at whatever point the accepting is."""
    clients: list[socket.socket] = []

    async def open_and_close() -> None:
        async with Node().transport as transport:
            host, port = transport.address.removeprefix("tcp://").split(":")
            await asyncio.sleep(0.001)
            clients.extend(socket.create_connection((host, int(port))) for _ in range(5))
            for _ in range(turns):
                await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(open_and_close())
    for client in clients:
        with client:
            client.settimeout(10)
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""


async def copy(incoming: asyncio.StreamReader, outgoing: asyncio.StreamWriter) -> None:
    """Until the end."""
    while data := await incoming.read(1 << 16):
        outgoing.write(data)
