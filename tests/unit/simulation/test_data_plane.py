"""The real mover over modelled links, on one loop."""

import asyncio

import pytest

from services.node.core.residency import PlanId
from services.planner.core.multicast.fabric import step_task
from services.planner.core.multicast.strategies import STRATEGIES, lower_bound
from shared.clock import now
from shared.errors import Conflict, NotFound, PeerLost
from shared.ids import EventId, ModelId, NodeId
from shared.messages.scaling import Pull
from simulation.loop import run
from simulation.transport import address_of
from tests.unit.simulation.planes import BLOCK, MODEL, RATE, Plane, planes

EVENT = EventId("ev-1")
ADDRESSES = {NodeId(f"n{index}"): address_of(f"n{index}") for index in range(200)}


async def pull(plane: Plane, *pulls: tuple[int, int, str], revision: int = 0) -> None:
    await plane.apply(
        MODEL,
        PlanId(EVENT, revision),
        [Pull(step, block, NodeId(source)) for step, block, source in pulls],
        ADDRESSES,
    )


@pytest.mark.parametrize(("nodes", "sources"), [(2, 1), (5, 1), (8, 1), (12, 1), (9, 3), (33, 1)])
def test_the_binomial_pipeline_takes_its_steps(nodes: int, sources: int) -> None:
    blocks = 16
    schedule = STRATEGIES["binomial"](step_task(nodes, blocks, range(sources)))

    async def main() -> float:
        async with planes(nodes, blocks) as (_, up):
            for plane in up[:sources]:
                await plane.hold_all()
            for node in schedule.destinations:
                moves = [move for move in schedule.moves if move.dst == node]
                await pull(up[node], *((m.step, m.block, f"n{m.src}") for m in moves))
            for plane in up[sources:]:
                await plane.until_arrived(blocks)
            assert all(plane.whole for plane in up)
            return now()

    steps = run(main()) / (BLOCK / RATE)
    least = lower_bound(nodes, blocks, sources)
    assert least / 1.001 <= steps <= 1.05 * least


def test_a_relay_forwards_by_chunks() -> None:
    async def main() -> float:
        async with planes(4, 1) as (_, (a, *rest)):
            await a.hold_all()
            for index, plane in enumerate(rest):
                await pull(plane, (index + 1, 0, f"n{index}"))
            await rest[-1].until_arrived(1)
            return now()

    assert run(main()) == pytest.approx(1 + 2 / 4)


def test_a_model_is_simulated_in_a_small_part_of_its_size() -> None:
    async def main() -> float:
        async with planes(2, 1, unit=1000) as (_, (a, b)):
            await a.hold_all()
            await pull(b, (1, 0, "n0"))
            await b.until_arrived(1)
            return now()

    assert run(main()) == 1000


def test_wrong_bytes_are_read_again_and_then_given_up() -> None:
    async def main() -> None:
        async with planes(2, 2) as (network, (a, b)):
            await a.hold_all()
            network.corrupt("n0", 1)
            await pull(b, (1, 0, "n0"))
            await asyncio.sleep(2)
            assert [arrival.block for arrival in b.arrived] == [0]
            network.corrupt("n0", 1000)
            await pull(b, (1, 1, "n0"), revision=1)
            await asyncio.sleep(5)
            assert [failure.error.code for failure in b.failed] == ["digest"]

    run(main())


def test_a_source_that_dies() -> None:
    async def main() -> None:
        async with planes(3, 2) as (network, (a, b, c)):
            await a.hold_all()
            await c.hold_all()
            await pull(b, (1, 0, "n0"), (2, 1, "n0"))
            await asyncio.sleep(1.5)
            network.kill("n0")
            await asyncio.sleep(0.01)
            assert {failure.block for failure in b.failed} == {1}
            assert all(isinstance(failure.error, PeerLost) for failure in b.failed)
            assert [address for address, _ in b.lost] == [a.address]
            await pull(b, (1, 1, "n2"), revision=1)
            await asyncio.sleep(0.6)
            assert b.whole  # what had arrived of the block stayed

    run(main())


def test_messages_keep_their_order_and_a_lost_peer_is_told() -> None:
    async def main() -> None:
        async with planes(2, 1, latency_s=0.001, rate=1e6) as (network, (a, b)):
            for number in range(100):
                a.send(b.address, b"%d" % number, [b"+"])
            await asyncio.sleep(1)
            assert b.messages == [(a.address, b"%d+" % number) for number in range(100)]
            network.kill("n1")
            a.lost.clear()
            a.send(b.address, b"one", [])
            a.send(b.address, b"two", [])
            await asyncio.sleep(1)
            assert [address for address, _ in a.lost] == [b.address]

    run(main())


def test_what_is_said_because_a_peer_was_lost_is_tried_too() -> None:
    """A leader frees what a lost stage keeps of its sequences: it may be there again."""

    async def main() -> None:
        async with planes(2, 1) as (network, (a, b)):
            network.block("n0", "n1")
            a.last_words = [b"free"]
            a.send(b.address, b"run", [])
            await asyncio.sleep(0.5)
            network.unblock("n0", "n1")
            await asyncio.sleep(1)
            assert [address for address, _ in a.lost] == [b.address]
            assert b.messages == [(a.address, b"free")]

    run(main())


def test_errors_and_the_end() -> None:
    async def main() -> None:
        async with planes(2, 1) as (network, (a, b)):
            with pytest.raises(NotFound, match="not hosted"):
                await a.mark_held(ModelId("other"), 0)
            with pytest.raises(PeerLost):
                await a.connect("sim://nobody")
            network.pause("n1")
            connecting = asyncio.create_task(a.connect(b.address))
            dropping = asyncio.create_task(b.drop(MODEL))
            await asyncio.sleep(0)
            dropping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dropping
            await b.drop(MODEL)
            assert b.space.span.users == []
            ended = asyncio.create_task(a.wait())
        await ended
        with pytest.raises(Conflict, match="closed"):
            await connecting
        with pytest.raises(Conflict, match="closed"):
            await a.mark_held(MODEL, 0)
        a.send(b.address, b"nobody", [])

    run(main())
