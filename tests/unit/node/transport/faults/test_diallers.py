"""Peers that dial and break off, stall, lie or ask for what they may not have: each gets a typed
error, and nobody else notices."""

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable

import pytest

from services.node.transport.reads import MAX_READS
from services.node.transport.wire import (
    MAX_BODY,
    PREFIX_BYTES,
    Kind,
    Prefix,
    Purpose,
    ReadRequest,
    encode_prefix,
    encode_read,
    parse_fault,
)
from shared.errors import (
    PeerLost,
    ProtocolViolation,
    RegionUnknown,
    TransportError,
    TransportTimeout,
)
from tests.support.raw_peer import (
    LIMIT_S,
    SILENCE_S,
    STRANGER,
    Node,
    Streams,
    closed,
    dial,
    hello,
    leave,
    next_frame,
    open_to,
)
from tests.unit.node.transport.faults.builders import reset, serves

READ = encode_read(3, ReadRequest(1, 0, 10, "w"))


CANCEL = encode_prefix(Kind.CANCEL, id=3)


MESSAGE = encode_prefix(Kind.MESSAGE, body=3, payload=5) + b"abc" + b"12345"


LIES = {
    "a body without end": encode_prefix(Kind.READ, id=1, body=(1 << 32) - 1),
    "a payload without end": encode_prefix(Kind.MESSAGE, body=1, payload=(1 << 64) - 1),
    "a byte too much of body": encode_prefix(Kind.READ, id=1, body=MAX_BODY + 1),
    "a read without a body": encode_prefix(Kind.READ, id=1),
    "a cancel with a body": encode_prefix(Kind.CANCEL, id=1, body=1) + b"1",
    "a heartbeat with a payload": encode_prefix(Kind.HEARTBEAT, payload=1) + b"1",
    "a heartbeat of a read": encode_prefix(Kind.HEARTBEAT, id=1),
    "data without data": encode_prefix(Kind.DATA, id=1),
}


async def told(node: Node) -> TransportError:
    """Why the stranger's connection ended: that is no word of the loss of whom it says it is."""
    async with asyncio.timeout(LIMIT_S):
        address, error = await node.ended.get()
    assert address == STRANGER
    assert node.lost.empty()
    return error


@pytest.mark.parametrize("part", [leave, reset])
@pytest.mark.parametrize("purpose", Purpose)
async def test_a_hello_that_breaks_off(
    node: Node, purpose: Purpose, part: Callable[[Streams], Awaitable[None]]
) -> None:
    whole = hello(purpose)
    for cut in range(len(whole)):
        streams = await open_to(node)
        streams[1].write(whole[:cut])
        await streams[1].drain()
        await part(streams)
    await serves(node)
    assert node.lost.empty()


@pytest.mark.parametrize(
    ("purpose", "frame"),
    [(Purpose.READS, READ), (Purpose.READS, CANCEL), (Purpose.MESSAGES, MESSAGE)],
    ids=["read", "cancel", "message"],
)
async def test_a_frame_that_breaks_off(node: Node, purpose: Purpose, frame: bytes) -> None:
    """At every byte. The part that came is not taken for a whole."""
    for cut in range(len(frame)):
        streams = await dial(node, purpose)
        streams[1].write(frame[:cut])
        await streams[1].drain()
        await leave(streams)
        assert isinstance(await told(node), PeerLost)
    await serves(node)
    assert node.received.empty()


@pytest.mark.parametrize("cut", [1, PREFIX_BYTES, PREFIX_BYTES + 2, len(MESSAGE) - 1])
async def test_a_frame_that_stalls(node: Node, cut: int) -> None:
    streams = await dial(node, Purpose.MESSAGES)
    streams[1].write(MESSAGE[:cut])
    await closed(streams)
    error = await told(node)
    assert type(error) is (PeerLost if cut < PREFIX_BYTES else TransportTimeout)
    assert node.received.empty()


async def test_frames_in_single_bytes(node: Node) -> None:
    """However the network cuts them: they are the same frames."""
    reads, messages = await open_to(node), await open_to(node)
    for streams, said in (
        (reads, hello(Purpose.READS) + READ),
        (messages, hello(Purpose.MESSAGES) + MESSAGE),
    ):
        for byte in said:
            streams[1].write(bytes([byte]))
            await asyncio.sleep(0)
    assert (await next_frame(reads[0]))[0].kind is Kind.HELLO
    assert await next_frame(reads[0]) == (Prefix(Kind.DATA, 3, 0, 10), b"x" * 10)
    assert await node.received.get() == (STRANGER, b"abc", b"12345")
    reads[1].close()
    messages[1].close()


@pytest.mark.parametrize("alive", [b"", encode_prefix(Kind.HEARTBEAT)], ids=["slow", "beating"])
async def test_a_hello_that_takes_its_time(node: Node, alive: bytes) -> None:
    """Never silent, and yet no peer: the handshake as a whole has its time."""
    streams = await open_to(node)

    async def dribble() -> None:
        said = alive * 10_000 or hello(Purpose.READS)
        for byte in said:
            streams[1].write(bytes([byte]))
            await asyncio.sleep(SILENCE_S / 8)

    dribbling = asyncio.ensure_future(dribble())
    await closed(streams)
    dribbling.cancel()
    assert node.lost.empty()


async def test_strangers_in_crowds(node: Node) -> None:
    """Hundreds that say nothing keep nobody out, and are all shown out."""
    crowd = [await open_to(node) for _ in range(300)]
    await serves(node)
    streams = await dial(node, Purpose.MESSAGES)
    streams[1].write(MESSAGE)
    async with asyncio.timeout(LIMIT_S):
        assert await node.received.get() == (STRANGER, b"abc", b"12345")
    await asyncio.gather(*map(closed, crowd))
    streams[1].close()


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_lying_lengths(node: Node, lie: bytes, purpose: Purpose) -> None:
    """Refused by what the prefix says: nothing is made room for, nothing is waited for."""
    streams = await dial(node, purpose)
    tracemalloc.start()
    streams[1].write(lie)
    await closed(streams)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(await told(node), ProtocolViolation)
    assert peak < MAX_BODY
    await serves(node)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (ReadRequest(1, 0, 10, "other"), "no region other"),
        (ReadRequest(1, 991, 10, "w"), "outside"),
        (ReadRequest(1, 1000, 1, "w"), "outside"),
        (ReadRequest(1, 0, 1 << 63, "w"), "outside"),
        (ReadRequest(1, 0, 10, "w" * 100_000), "no region w"),
        (ReadRequest(1, 0, 10, "../w\0"), "no region"),
    ],
    ids=["unknown", "past the end", "at the end", "huge", "long name", "odd name"],
)
async def test_a_read_of_what_is_not_there(node: Node, request_: ReadRequest, why: str) -> None:
    """Refused, and the connection goes on. (It may go on sooner: what is in no region might be
    brought.)"""
    streams = await dial(node, Purpose.READS)
    streams[1].write(encode_read(1, request_) + READ)
    both = [await next_frame(streams[0]), await next_frame(streams[0])]
    frames = {prefix.id: (prefix, body) for prefix, body in both}
    prefix, body = frames[1]
    assert prefix.kind is Kind.FAULT
    code, message = parse_fault(body)
    assert code == RegionUnknown.code
    assert why in message
    assert frames[3] == (Prefix(Kind.DATA, 3, 0, 10), b"x" * 10)
    streams[1].close()


async def test_no_byte_that_is_not_ready_leaves_the_node(node: Node) -> None:
    """What lies behind may be anything: another's, or not yet verified."""
    region = bytearray(b"r" * 100_000 + b"secret" * 10)
    node.transport.register("part", memoryview(region), ready=10)
    streams = await dial(node, Purpose.READS)
    streams[1].write(encode_read(1, ReadRequest(1, 0, len(region), "part")))
    streams[1].write(encode_read(2, ReadRequest(0, 99_990, 20, "part")))
    assert await next_frame(streams[0]) == (Prefix(Kind.DATA, 1, 0, 10), b"r" * 10)
    node.transport.advance("part", 100_000)
    received = {1: b"r" * 10, 2: b""}
    while len(received[1]) < 100_000 or len(received[2]) < 10:
        prefix, data = await next_frame(streams[0])
        assert prefix.kind is Kind.DATA
        received[prefix.id] += data
    assert received == {1: b"r" * 100_000, 2: b"r" * 10}
    await node.transport.unregister("part")
    faults = [await next_frame(streams[0]) for _ in range(2)]
    assert {prefix.id for prefix, _ in faults} == {1, 2}
    assert {parse_fault(body)[0] for _, body in faults} == {RegionUnknown.code}
    streams[1].close()


async def test_more_reads_than_anyone_needs() -> None:
    node = Node(silence_s=LIMIT_S)
    async with node.transport:
        node.transport.register("never", memoryview(bytearray(10)))
        streams = await dial(node, Purpose.READS)
        for identity in range(MAX_READS + 1):
            streams[1].write(encode_read(identity, ReadRequest(1, 0, 10, "never")))
        await closed(streams)
        error = await told(node)
        assert isinstance(error, ProtocolViolation)
        assert str(MAX_READS) in str(error)
        async with asyncio.timeout(LIMIT_S):
            await node.transport.unregister("never")


def paused(streams: Streams) -> None:
    """From now on the peer takes nothing in."""
    transport = streams[1].transport
    assert isinstance(transport, asyncio.ReadTransport)
    transport.pause_reading()


async def test_a_reader_that_stops_taking_lets_go_of_the_region(node: Node) -> None:
    """It is lost, and what was being sent to it does not keep the memory."""
    data = memoryview(bytearray(8 << 20))
    node.transport.register("big", data, ready=len(data))
    streams = await dial(node, Purpose.READS, receive_buffer=4096)
    paused(streams)
    streams[1].write(encode_read(1, ReadRequest(1, 0, len(data), "big")))
    await serves(node)
    async with asyncio.timeout(LIMIT_S):
        await node.transport.unregister("big")
    assert isinstance(await told(node), PeerLost)
    streams[1].transport.abort()


async def test_another_process_at_an_old_address_is_another_peer(node: Node) -> None:
    """What the old one leaves undone is not held against the new one."""
    old = await dial(node, Purpose.MESSAGES, instance=1)
    old[1].write(MESSAGE[:-1])
    new = await dial(node, Purpose.MESSAGES, instance=2)
    old[1].close()
    assert isinstance(await told(node), PeerLost)
    new[1].write(MESSAGE)
    async with asyncio.timeout(LIMIT_S):
        assert await node.received.get() == (STRANGER, b"abc", b"12345")
    assert node.lost.empty()
    new[1].close()
    assert isinstance(await told(node), PeerLost)
