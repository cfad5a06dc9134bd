"""Readers that go, cancel, or never take what they asked for."""

import asyncio
import socket

import pytest

from services.node.transport.reads import MAX_READS
from services.node.transport.wire import Kind, Purpose, ReadRequest, encode_prefix, encode_read
from shared.errors import ProtocolViolation, TransportTimeout
from tests.support.raw_peer import LIMIT_S, Node, beat, dial, hello, leave, next_frame
from tests.unit.node.transport.faults.builders import reset, serves


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
    shallow: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = shallow
    node.transport.register("good", memoryview(bytearray(b"good")), ready=4)
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
