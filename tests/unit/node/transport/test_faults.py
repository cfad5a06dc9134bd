"""Peers that break off, stall, lie or ask for what they may not have: each gets a typed error, or
gives one, and nobody else notices."""

import asyncio
import socket
import struct
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from services.node.transport.reads import MAX_READS
from services.node.transport.wire import (
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
from shared.errors import (
    BadInput,
    PeerLost,
    ProtocolViolation,
    RegionUnknown,
    TransportError,
    TransportTimeout,
)
from tests.support.fault_proxy import FaultProxy
from tests.support.raw_peer import (
    LIMIT_S,
    SILENCE_S,
    STRANGER,
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


async def reset(streams: Streams) -> None:
    """Breaks the connection off without a word of parting (RST)."""
    sock = streams[1].get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    streams[1].transport.abort()


async def serves(node: Node) -> None:
    """The node still does for others what it is there for."""
    assert await node.read(node.address, "good", 4) == b"good"


@pytest.fixture
async def node(node: Node) -> Node:
    node.transport.register("good", memoryview(bytearray(b"good")), ready=4)
    node.transport.register("w", memoryview(bytearray(b"x" * 1000)), ready=1000)
    return node


async def told(node: Node) -> TransportError:
    """Why the stranger's connection ended: that is no word of the loss of whom it says it is."""
    async with asyncio.timeout(LIMIT_S):
        address, error = await node.ended.get()
    assert address == STRANGER
    assert node.lost.empty()
    return error


# --- who dials breaks off, stalls, dribbles ------------------------------------------


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


# --- who dials lies, or asks for what it may not have -----------------------------------


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
    """Refused, and the connection goes on."""
    streams = await dial(node, Purpose.READS)
    streams[1].write(encode_read(1, request_) + READ)
    prefix, body = await next_frame(streams[0])
    assert (prefix.kind, prefix.id) == (Kind.FAULT, 1)
    code, message = parse_fault(body)
    assert code == RegionUnknown.code
    assert why in message
    assert await next_frame(streams[0]) == (Prefix(Kind.DATA, 3, 0, 10), b"x" * 10)
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


# --- who is dialled misbehaves ------------------------------------------------------------


async def refuses(node: Node, address: str) -> TransportError:
    """The error in which a read from this peer ends."""
    with pytest.raises(TransportError) as caught:
        await node.read(address)
    return caught.value


@pytest.mark.parametrize("stalls", [False, True], ids=["closes", "stalls"])
async def test_no_welcome(node: Node, stalls: bool) -> None:
    """The answer to HELLO ends at any byte, or is something else: there never was a connection."""
    whole = hello(Purpose.READS)
    answers = [whole[:cut] for cut in range(0, len(whole), 11 if stalls else 1)]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_frame(reader)
        writer.write(answers[0])
        if stalls:
            await asyncio.Event().wait()
        writer.close()

    async with answering(answer) as address:
        while answers:
            with pytest.raises(PeerLost):
                await node.read(address)
            del answers[0]
    assert node.lost.empty()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n" * 2,
        b"\0" * 100,
        hello(Purpose.READS).replace(b"LSDP", b"PDSL"),
        encode_prefix(Kind.HELLO, body=MAX_BODY + 1),
        encode_prefix(Kind.DATA, id=0, payload=1000) + bytes(1000),
        encode_prefix(Kind.HELLO, body=4) + b"LSDP",
    ],
    ids=["ssh", "zeros", "magic", "oversize", "data", "short"],
)
async def test_a_welcome_that_makes_no_sense(node: Node, answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_frame(reader)
        writer.write(answer)
        await asyncio.Event().wait()

    async with answering(reply) as address:
        assert type(await refuses(node, address)) is ProtocolViolation
    assert node.lost.empty()


def data(identity: int, payload: bytes) -> bytes:
    return encode_prefix(Kind.DATA, id=identity, payload=len(payload)) + payload


ANSWER = data(0, b"a" * 600) + data(0, b"b" * 400)


@pytest.mark.parametrize("stalls", [False, True], ids=["closes", "stalls"])
@pytest.mark.parametrize("cut", [0, 1, PREFIX_BYTES, 300, 600, 600 + PREFIX_BYTES, 635, 1039])
async def test_an_answer_that_breaks_off(node: Node, cut: int, stalls: bool) -> None:
    """Nothing is written but what came."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_frame(reader)
        writer.write(ANSWER[:cut])
        if stalls:
            await asyncio.Event().wait()
        writer.close()

    room = bytearray(b"-" * 1200)
    async with impostor(answer) as address, asyncio.timeout(LIMIT_S):
        with pytest.raises((PeerLost, TransportTimeout)):
            await node.transport.read(address, "w", 0, memoryview(room)[100:1100], priority=1)
        lost, _ = await node.lost.get()
        assert lost == address
    assert room.count(b"-") >= 1200 - cut
    assert set(room[:100] + room[1100:]) == set(b"-")


OVERFLOWS = {
    "in one frame": data(0, b"!" * 1001),
    "in its second frame": data(0, b"a" * 600) + data(0, b"!" * 401),
    "after its end": ANSWER + data(0, b"!"),
    "without end": encode_prefix(Kind.DATA, id=0, payload=(1 << 64) - 1) + b"!" * 1000,
    "with a body": encode_prefix(Kind.DATA, id=0, body=1, payload=1000) + b"!" * 1001,
    "of another read": data(1, b"!" * 10),
}


@pytest.mark.parametrize("answer", OVERFLOWS.values(), ids=OVERFLOWS.keys())
async def test_more_data_than_was_asked_for(node: Node, answer: bytes) -> None:
    """Not a byte of it is written anywhere; every read of the connection ends."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_frame(reader)
        writer.write(answer)
        await asyncio.Event().wait()

    room = bytearray(b"-" * 1200)
    async with impostor(reply) as address, asyncio.timeout(LIMIT_S):
        reading = node.transport.read(address, "w", 0, memoryview(room)[100:1100], priority=1)
        outcome = (await asyncio.gather(reading, return_exceptions=True))[0]
        if answer.startswith(ANSWER):
            assert room[100:1100] == b"a" * 600 + b"b" * 400
        else:
            assert isinstance(outcome, ProtocolViolation)
        assert isinstance((await node.lost.get())[1], ProtocolViolation)
    assert b"!" not in room
    assert set(room[:100] + room[1100:]) == set(b"-")


async def test_a_violation_ends_all_reads_of_its_connection(node: Node) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(5):
            await next_frame(reader)
        writer.write(data(3, b"a" * 1000) + data(99, b"!"))
        await asyncio.Event().wait()

    async with impostor(reply) as address:
        reads = [node.read(address) for _ in range(5)]
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
    assert outcomes.pop(3) == b"a" * 1000
    assert {type(outcome) for outcome in outcomes} == {ProtocolViolation}
    assert (await node.lost.get())[0] == address
    assert node.lost.empty()


async def test_a_read_refused_half_way(node: Node) -> None:
    """It ends in what the source says, and the reads beside it go on."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await next_frame(reader)
        writer.write(data(0, b"a" * 600) + data(1, b"b" * 600))
        writer.write(encode_fault(0, RegionUnknown.code, "given up") + data(1, b"b" * 400))
        await asyncio.Event().wait()

    async with impostor(reply) as address:
        refused, served = await asyncio.gather(
            node.read(address), node.read(address), return_exceptions=True
        )
        assert isinstance(refused, RegionUnknown)
        assert served == b"b" * 1000
        assert node.lost.empty()


# --- who says that it is somebody else -----------------------------------------------------


async def test_whoever_hangs_up_is_no_loss_of_whom_it_said_it_is(node: Node) -> None:
    """Not of the node itself, nor of a peer that the node has connections to, under whatever
    instance: that of a peer is told to everybody who dials it."""
    peer = Node()
    async with peer.transport:
        await node.transport.connect(peer.address)
        instance = peer.transport._instance
        for address in (node.address, peer.address):
            for purpose in Purpose:
                streams = await dial(node, purpose, instance=instance, address=address)
                await reset(streams)
                assert (await node.ended.get())[0] == address
        peer.transport.register("w", memoryview(bytearray(1000)), ready=1000)
        assert await node.read(peer.address) == bytes(1000)
    async with asyncio.timeout(LIMIT_S):
        assert (await node.lost.get())[0] == peer.address
    assert node.lost.empty()


async def test_a_node_is_told_who_says_that_it_has_connected(node: Node) -> None:
    async with asyncio.timeout(LIMIT_S):
        for purpose in Purpose:
            streams = await dial(node, purpose)
            assert await node.dialled.get() == STRANGER
            await leave(streams)


# --- half-open connections --------------------------------------------------------------------


async def test_a_connection_that_carries_nothing_any_more() -> None:
    """No FIN, no RST, and what is sent into it is lost: both ends find out by themselves."""
    async with AsyncExitStack() as stack:
        source, reader = Node(rate=1_000_000), Node()
        await stack.enter_async_context(source.transport)
        await stack.enter_async_context(reader.transport)
        port = int(source.address.rpartition(":")[2])
        proxy = await stack.enter_async_context(FaultProxy(port))
        through = f"tcp://127.0.0.1:{proxy.port}"
        big = memoryview(bytearray(b"y" * 4_000_000))
        source.transport.register("w", big, ready=len(big))
        source.transport.register("never", big)
        await reader.transport.connect(through)
        reads = [
            asyncio.ensure_future(reader.read(through, region, 4_000_000))
            for region in ("w", "never")
        ]
        await reader.read(through, "w", 100)
        proxy.silence()
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {PeerLost, TransportTimeout}
        async with asyncio.timeout(LIMIT_S):
            assert (await reader.lost.get())[0] == through
            assert (await source.ended.get())[0] == reader.address
            await source.transport.unregister("w")
        # Later connections work, and so do reads by them.
        source.transport.register("w", big, ready=len(big))
        assert await reader.read(through, "w", 100) == b"y" * 100
        assert reader.lost.empty()


# --- what a fuzzer and many eyes found --------------------------------------------------------


async def test_a_reader_that_asks_and_is_gone(node: Node) -> None:
    """Its connection breaks at any point of the answering."""
    node.transport.register("mine", memoryview(bytearray(1000)), ready=1000)
    host, port = node.address.removeprefix("tcp://").split(":")
    for reads in range(2, 42):
        said = [
            encode_read(i, ReadRequest(1, 0, 1000, "mine" if i % 3 else "none"))
            for i in range(reads)
        ]
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(hello(Purpose.READS) + b"".join(said))
        assert await node.read(node.address, "mine") == bytes(1000)


@pytest.mark.parametrize("host", ["a" * 70, "a..b", "a\0b", "é" * 80, "[::1%", "*", "256.1.1.1"])
async def test_hosts_that_there_cannot_be(node: Node, host: str) -> None:
    with pytest.raises((BadInput, PeerLost)):
        await node.transport.connect(f"tcp://{host}:1")
    await node.transport.connect(node.address)


@pytest.mark.parametrize("turns", range(5))
async def test_reads_cancelled_as_they_are_asked_cost_nothing_but_themselves(turns: int) -> None:
    source, reader = Node(), Node()
    async with source.transport, reader.transport, asyncio.timeout(LIMIT_S):
        source.transport.register("w", memoryview(bytearray(1000)), ready=1000)
        source.transport.register("never", memoryview(bytearray(1000)))
        await reader.transport.connect(source.address)
        reads = [asyncio.ensure_future(reader.read(source.address, "never")) for _ in range(40)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for read in reads:
            read.cancel()
        await asyncio.wait(reads)
        channel = await reader.transport._readers.get(source.address)
        assert await reader.read(source.address) == bytes(1000)
        while channel._pending:  # until the source's last word on them is here
            await reader.read(source.address)
        assert reader.lost.empty()


async def test_answers_that_nobody_takes_in(node: Node) -> None:
    """A peer that asks on and on, lives, and takes none of the answers: they do not pile up."""
    streams = await dial(node, Purpose.READS, receive_buffer=4096)
    streams[1].transport.pause_reading()  # type: ignore[attr-defined]
    refused = ReadRequest(1, 0, 10, "no such region " * 100)
    for identity in range(2 * MAX_READS):
        streams[1].write(encode_read(identity, refused))
    async with asyncio.timeout(LIMIT_S):
        _, error = await node.ended.get()
    assert isinstance(error, ProtocolViolation)
    await reset(streams)


async def test_a_read_cancelled_twice_is_answered_once(node: Node) -> None:
    node.transport.register("mine", memoryview(bytearray(1000)), ready=0)
    streams = await dial(node, Purpose.READS)
    cancel = encode_prefix(Kind.CANCEL, id=1)
    streams[1].write(encode_read(1, ReadRequest(1, 0, 10, "mine")) + cancel + cancel)
    streams[1].write(encode_read(2, ReadRequest(1, 0, 10, "nowhere")))
    async with asyncio.timeout(LIMIT_S):
        answered = [(await next_frame(streams[0]))[0].id for _ in range(2)]
    await leave(streams)
    assert sorted(answered) == [1, 2]


async def test_a_region_goes_though_a_reader_that_lives_never_takes_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.node.transport.regions.EVICT_S", 0.2)
    data = memoryview(bytearray(64 << 20))
    node.transport.register("mine", data, ready=len(data))
    streams = await dial(node, Purpose.READS, receive_buffer=4096)
    streams[1].transport.pause_reading()  # type: ignore[attr-defined]
    beating = asyncio.ensure_future(beat(streams[1]))
    streams[1].write(encode_read(1, ReadRequest(1, 0, len(data), "mine")))
    await serves(node)
    async with asyncio.timeout(LIMIT_S):
        await node.transport.unregister("mine")
        _, error = await node.ended.get()
    assert isinstance(error, TransportTimeout)
    beating.cancel()
    await reset(streams)
