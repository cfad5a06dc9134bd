"""Peers that are dialled and stall, lie or answer too much: each gives a typed error."""

import asyncio

import pytest

from services.node.transport.wire import (
    MAX_BODY,
    PREFIX_BYTES,
    Kind,
    Purpose,
    encode_fault,
    encode_prefix,
)
from shared.errors import (
    BadInput,
    PeerLost,
    ProtocolViolation,
    RegionUnknown,
    TransportError,
    TransportTimeout,
)
from tests.support.raw_peer import LIMIT_S, Node, answering, hello, impostor, next_frame
from tests.unit.node.transport.faults.builders import data


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


@pytest.mark.parametrize("host", ["a" * 70, "a..b", "a\0b", "é" * 80, "[::1%", "*", "256.1.1.1"])
async def test_hosts_that_there_cannot_be(node: Node, host: str) -> None:
    with pytest.raises((BadInput, PeerLost)):
        await node.transport.connect(f"tcp://{host}:1")
    await node.transport.connect(node.address)
