"""Which peer is lost when a connection ends, or carries nothing any more."""

import asyncio
from contextlib import AsyncExitStack

from services.node.transport.wire import Purpose
from shared.errors import PeerLost, TransportTimeout
from tests.support.fault_proxy import FaultProxy
from tests.support.raw_peer import LIMIT_S, STRANGER, Node, dial, leave
from tests.unit.node.transport.faults.builders import reset


async def test_whoever_hangs_up_is_no_loss_of_whom_it_said_it_is(node: Node) -> None:
    """Not of the node itself, nor of a peer that the node has connections to, under whatever
    instance: that of a peer is told to everybody who dials it."""
    peer = Node()
    async with peer.transport:
        await node.transport.connect(peer.address)
        instance = peer.transport._handshake.instance
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
