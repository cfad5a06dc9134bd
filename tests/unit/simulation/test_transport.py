"""What the modelled transport adds to the contract: the time that bytes take, and the faults."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from services.node.transport.base import ReadResult
from services.node.transport.pacing import SERVING_FLOW
from shared.clock import now, wall_ns
from shared.errors import PeerLost, TransportError, TransportTimeout
from simulation.loop import EPOCH_NS, run
from simulation.network import Network
from simulation.transport import Ends, ModelledTransport
from tests.support.listeners import Hears

RATE = 1000.0
LATENCY_S = 0.25
SILENCE_S = 1.0


class End:
    def __init__(self, ends: Ends, node: str) -> None:
        self.transport = ModelledTransport(
            ends,
            node,
            listener=Hears(
                lambda sender, header, payload: self.heard.append(
                    (now(), bytes(header), bytes(payload))
                ),
                lambda address, error: self.lost.append((now(), address, error)),
            ),
        )
        self.heard: list[tuple[float, bytes, bytes]] = []
        self.lost: list[tuple[float, str, TransportError]] = []

    async def read(
        self, source: "End", nbytes: int, *, into: bytearray | None = None, priority: int = 1
    ) -> ReadResult:
        into = bytearray(nbytes) if into is None else into
        return await self.transport.read(
            source.transport.address, "w", 0, memoryview(into), priority=priority
        )


@asynccontextmanager
async def ends(
    count: int, *, unit: int = 1, latency_s: float = LATENCY_S
) -> AsyncIterator[tuple[Network, list[End]]]:
    """Each holds a region "w" of 1000 bytes; the first is connected to all others."""
    network = Network(latency_s=latency_s)
    known = Ends(network, unit=unit, silence_s=SILENCE_S)
    async with AsyncExitStack() as stack:
        up = []
        for index in range(count):
            network.add(f"n{index}", out=RATE, into=RATE)
            up.append(End(known, f"n{index}"))
            await stack.enter_async_context(up[-1].transport)
            up[-1].transport.register("w", memoryview(bytes([index]) * 1000), ready=1000)
        for end in up[1:]:
            await up[0].transport.connect(end.transport.address)
        yield network, up


def test_a_read_takes_its_way_there_its_bytes_and_the_way_back() -> None:
    async def main() -> None:
        async with ends(2) as (_, (a, b)):
            begun, into = now(), bytearray(500)
            result = await a.read(b, 500, into=into)
            assert now() == begun + 0.5 + 2 * LATENCY_S
            assert into == b"\1" * 500
            assert result.first_byte_ns == EPOCH_NS + round((begun + 2 * LATENCY_S) * 1e9)
            assert wall_ns() - result.first_byte_ns == 500_000_000

    run(main())


def test_a_byte_of_a_region_stands_for_a_unit_of_them_and_one_of_a_message_for_itself() -> None:
    async def main() -> None:
        async with ends(2, unit=100, latency_s=0) as (_, (a, b)):
            await a.read(b, 100)
            assert now() == 10
            await a.transport.send(b.transport.address, b"h" * 100, [b"p" * 900])
            await asyncio.sleep(5)
            assert b.heard == [(11, b"h" * 100, b"p" * 900)]

    run(main())


def test_messages_hold_reads_up() -> None:
    async def main() -> None:
        async with ends(2, latency_s=0) as (_, (a, b)):
            read = asyncio.ensure_future(a.read(b, 1000))
            await asyncio.sleep(0.5)
            await b.transport.send(a.transport.address, b"", [bytes(250)])
            await read
            assert now() == 1.25
            assert [at for at, _, _ in a.heard] == [0.75]

    run(main())


def test_a_silent_peer_is_lost_on_both_sides_and_reads_say_how() -> None:
    async def main() -> None:
        async with ends(3) as (network, (a, b, c)):
            begun = now()
            into = bytearray(1000)
            reads = [
                asyncio.ensure_future(a.read(b, 1000, into=into)),
                asyncio.ensure_future(a.read(c, 10)),
            ]
            b.transport.register("later", memoryview(bytearray(1)))
            waiting = asyncio.ensure_future(
                a.transport.read(
                    b.transport.address, "later", 0, memoryview(bytearray(1)), priority=1
                )
            )
            await asyncio.sleep(0.5)
            network.block("n0", "n1")
            stuck, fine, never = await asyncio.gather(*reads, waiting, return_exceptions=True)
            assert isinstance(stuck, TransportTimeout)
            assert isinstance(never, PeerLost)
            assert isinstance(fine, ReadResult)
            assert [(at, where) for at, where, _ in a.lost] == [
                (begun + 0.5 + SILENCE_S, b.transport.address)
            ]
            assert [where for _, where, _ in b.lost] == [a.transport.address]
            assert not any(into)
            with pytest.raises(PeerLost, match="within"):
                await a.read(b, 10)
            network.unblock("n0", "n1")
            await a.read(b, 10)

    run(main())


def test_kv_that_is_read_beside_weights_has_nine_tenths_of_the_port() -> None:
    async def main() -> None:
        async with ends(3, latency_s=0) as (_, (a, b, c)):
            source = memoryview(bytearray(1000))
            a.transport.register("weights", source, ready=1000, flow="model")
            a.transport.register("kv", source, ready=1000, flow=SERVING_FLOW)

            async def read(end: End, region: str, priority: int) -> float:
                into = memoryview(bytearray(900))
                address = a.transport.address
                await end.transport.read(address, region, 0, into, priority=priority)
                return now()

            weights = read(b, "weights", 0)
            assert await asyncio.gather(weights, read(c, "kv", 5)) == pytest.approx([1.8, 1.0])

    run(main())


def test_a_short_silence_costs_time_only() -> None:
    async def main() -> None:
        async with ends(2, latency_s=0) as (network, (a, b)):
            read = asyncio.ensure_future(a.read(b, 1000))
            await asyncio.sleep(0.5)
            network.pause("n1")
            await asyncio.sleep(0.9 * SILENCE_S)
            network.resume("n1")
            await read
            assert now() == pytest.approx(1.9)
            await asyncio.sleep(10)
            assert not a.lost
            assert not b.lost

    run(main())


def test_a_node_that_dies_is_lost_at_once_with_all_that_was_on_its_way() -> None:
    async def main() -> None:
        async with ends(3) as (network, (a, b, c)):
            reads = [asyncio.ensure_future(end.read(b, 1000)) for end in (a, c)]
            await b.transport.send(a.transport.address, b"last words")
            await asyncio.sleep(0.75)
            network.kill("n1")
            outcomes = await asyncio.gather(*reads, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [PeerLost] * 2
            assert [where for _, where, _ in a.lost + c.lost] == [b.transport.address] * 2
            assert not b.lost
            with pytest.raises(PeerLost, match="nobody"):
                await a.read(b, 10)
            with pytest.raises(PeerLost, match="closed"):
                await b.read(a, 10)

    run(main())


def test_wrong_bytes() -> None:
    async def main() -> None:
        async with ends(2) as (network, (a, b)):
            network.corrupt("n1", 2)
            got = [bytearray(100) for _ in range(3)]
            for into in got:
                await a.read(b, 100, into=into)
            assert [into == b"\1" * 100 for into in got] == [False, False, True]

    run(main())


def test_a_cancelled_read_takes_nothing_any_more() -> None:
    async def main() -> None:
        async with ends(2, latency_s=0) as (network, (a, b)):
            read = asyncio.ensure_future(a.read(b, 1000))
            await asyncio.sleep(0.5)
            read.cancel()
            await asyncio.sleep(0)
            await a.read(b, 500)
            assert now() == 1
            assert network.rates() == {}

    run(main())


def test_messages_on_a_connection_that_breaks_never_arrive() -> None:
    async def main() -> None:
        async with ends(2, latency_s=0) as (network, (a, b)):
            await a.transport.send(b.transport.address, b"", [bytes(1000)])
            await asyncio.sleep(0.5)
            network.pause("n1")
            await asyncio.sleep(2 * SILENCE_S)
            network.resume("n1")
            await asyncio.sleep(5)
            assert not b.heard
            assert len(b.lost) == 1

    run(main())
