"""The network's links: how transfers share them in time, and the faults."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shared.clock import now
from shared.errors import BadInput, Conflict, NotFound, PeerLost
from simulation.loop import run
from simulation.network import Network

RATE = 100.0
Move = tuple[str, str, float, int]


def nodes(count: int, *, latency_s: float = 0.0) -> Network:
    network = Network(latency_s=latency_s)
    for index in range(count):
        network.add(f"n{index}", out=RATE, into=RATE)
    return network


async def finish(network: Network, *moves: Move) -> list[float]:
    """When each of the transfers ended, all begun now."""

    async def one(move: Move) -> float:
        await network.transfer(*move)
        return now()

    return list(await asyncio.gather(*(one(move) for move in moves)))


def ends(network: Network, *moves: Move) -> list[float]:
    return run(finish(network, *moves))


def test_one_transfer_has_its_link_and_then_the_latency() -> None:
    assert ends(nodes(2, latency_s=0.5), ("n0", "n1", 200, 0)) == [2.5]


def test_two_destinations_share_a_source_half_and_half() -> None:
    assert ends(nodes(3), ("n0", "n1", 100, 0), ("n0", "n2", 200, 0)) == [2, 3]


def test_two_sources_share_a_destination_half_and_half() -> None:
    assert ends(nodes(3), ("n0", "n2", 100, 0), ("n1", "n2", 200, 0)) == [2, 3]


def test_links_are_full_duplex() -> None:
    assert ends(nodes(2), ("n0", "n1", 100, 0), ("n1", "n0", 100, 0)) == [1, 1]


def test_transfers_of_one_pair_and_priority_go_one_after_the_other() -> None:
    assert ends(nodes(2), *[("n0", "n1", 100, 0)] * 3) == [1, 2, 3]


def test_the_better_priority_goes_first_at_both_ports() -> None:
    moves: list[Move] = [("n0", "n2", 100, 5), ("n1", "n2", 100, 3), ("n1", "n3", 100, 4)]
    assert ends(nodes(4), *moves) == [2, 1, 2]


def test_flows_share_a_link_evenly_whatever_their_priorities() -> None:
    async def main() -> list[float]:
        network = nodes(3)

        async def one(dst: str, nbytes: float, priority: int, flow: str) -> float:
            await network.transfer("n0", dst, nbytes, priority, flow)
            return now()

        weights = [one("n1", 100, step, "model") for step in (3, 4)]
        return list(await asyncio.gather(*weights, one("n2", 100, 0, "other")))

    assert run(main()) == [2, 3, 2]


def test_what_a_better_priority_cannot_use_goes_to_worse_ones() -> None:
    network = nodes(4)
    network.set_rates("n1", into=RATE / 4)
    assert ends(network, ("n0", "n1", 100, 0), ("n0", "n2", 75, 1)) == [4, 1]


def test_racks_share_a_trunk_each_way() -> None:
    network = Network(trunks={"a": RATE, "b": RATE})
    for name, rack in (("a0", "a"), ("a1", "a"), ("b0", "b"), ("b1", "b")):
        network.add(name, out=RATE, into=RATE, rack=rack)
    moves: list[Move] = [("a0", "b0", 100, 0), ("a1", "b1", 100, 0), ("b0", "a0", 100, 0)]
    assert ends(network, *moves, ("b1", "b0", 0.1, 0)) == [2, 2, 1, pytest.approx(0.002)]


def test_nodes_of_a_host_use_neither_ports_nor_trunks() -> None:
    network = Network(local_bytes_per_s=10 * RATE)
    for name, host in (("x0", "x"), ("x1", "x"), ("y0", "y")):
        network.add(name, out=RATE, into=RATE, host=host)
    assert ends(network, ("x0", "x1", 100, 0), ("x0", "y0", 100, 0)) == [pytest.approx(0.1), 1]


def test_a_link_that_slows_down_and_stops_and_goes_on() -> None:
    network = nodes(2)

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        loop.call_later(1, lambda: network.set_rates("n0", out=RATE / 2))
        loop.call_later(2, lambda: network.set_rates("n0", out=0))
        loop.call_later(5, lambda: network.set_rates("n0", out=RATE))
        return await finish(network, ("n0", "n1", 200, 0))

    assert run(main()) == [5.5]


Fault = Callable[[Network], object]


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        (lambda n: n.block("n0", "n1"), lambda n: n.unblock("n0", "n1")),
        (lambda n: n.pause("n1"), lambda n: n.resume("n1")),
        (lambda n: n.partition(["n0", "n2"]), lambda n: n.partition()),
    ],
    ids=["block", "pause", "partition"],
)
def test_what_is_cut_off_waits_and_leaves_its_share_to_others(begin: Fault, end: Fault) -> None:
    network = nodes(3)
    told: list[str] = []
    network.on_change[told.append] = None

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        loop.call_later(1, begin, network)
        loop.call_later(1.5, lambda: told.append(str(network.reachable("n0", "n1"))))
        loop.call_later(10, end, network)
        return await finish(network, ("n0", "n1", 100, 0), ("n0", "n2", 150, 0))

    assert run(main()) == [10.5, 2]
    assert {"n0", "n1"} & set(told)
    assert "False" in told
    assert network.reachable("n0", "n1")


def test_a_node_that_dies_takes_its_transfers_with_it() -> None:
    network = nodes(3)

    async def main() -> None:
        asyncio.get_running_loop().call_later(1, network.kill, "n1")
        moves = [("n0", "n1", 500.0, 0), ("n1", "n0", 500.0, 0), ("n0", "n1", 1.0, 0)]
        lost: list[Awaitable[None]] = [network.transfer(*move) for move in moves]
        other = asyncio.ensure_future(finish(network, ("n0", "n2", 150, 0)))
        outcomes = await asyncio.gather(*lost, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [PeerLost] * 3
        assert now() == 1
        assert await other == [2]
        with pytest.raises(PeerLost, match="n1"):
            await network.transfer("n0", "n1", 1, 0)
        network.add("n1", out=RATE, into=RATE)
        assert await finish(network, ("n0", "n1", 100, 0)) == [3]

    run(main())


def test_a_cancelled_transfer_makes_room() -> None:
    network = nodes(2)

    async def main() -> list[float]:
        first = asyncio.ensure_future(network.transfer("n0", "n1", 1000, 0))
        second = asyncio.ensure_future(finish(network, ("n0", "n1", 100, 0)))
        await asyncio.sleep(1)
        first.cancel()
        return await second

    assert run(main()) == [2]
    assert network.rates() == {}


def test_the_share_of_a_cancelled_transfer_goes_to_others() -> None:
    network = nodes(3)

    async def main() -> list[float]:
        first = asyncio.ensure_future(network.transfer("n0", "n1", 1000, 0))
        second = asyncio.ensure_future(finish(network, ("n0", "n2", 150, 0)))
        await asyncio.sleep(1)
        first.cancel()
        return await second

    assert run(main()) == [2]


def test_a_moment_is_shared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many transfers begin in it, and whoever of them follows one that has just ended."""
    network = nodes(2)
    shared: list[float] = []
    share = network._share

    def count() -> None:
        shared.append(now())
        share()

    monkeypatch.setattr(network, "_share", count)

    async def relay() -> None:
        for _ in range(5):
            await network.transfer("n0", "n1", 100, 0)

    async def main() -> None:
        await asyncio.gather(relay(), network.transfer("n1", "n0", 500, 1))

    run(main())
    assert shared == [0, 1, 2, 3, 4]


def test_counts_what_was_moved() -> None:
    network = nodes(2)
    ends(network, ("n0", "n1", 100, 0), ("n0", "n1", 50, 1))
    assert network.node("n0").sent_bytes == network.node("n1").received_bytes == 150
    assert network.node("n1").sent_bytes == 0


def test_bad_input() -> None:
    network = nodes(1)
    with pytest.raises(Conflict, match="n0"):
        network.add("n0", out=1, into=1)
    with pytest.raises(BadInput, match="n1"):
        network.add("n1", out=-1, into=1)
    with pytest.raises(NotFound, match="n2"):
        network.pause("n2")
