"""Connections that say nothing keep no peer out."""

import asyncio
import socket
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node.transport.connection import Connection
from services.node.transport.strangers import Strangers
from services.node.transport.wire import Purpose
from tests.support.raw_peer import LIMIT_S, Node, dial, leave

MOST = 8


class Silent:
    """A stranger's socket, from an address of its own."""

    def __init__(self, node: Node, source: str) -> None:
        self._node = node
        self._sock = socket.socket()
        self._sock.setblocking(False)
        self._sock.bind((source, 0))

    async def connect(self) -> None:
        host, port = self._node.address.removeprefix("tcp://").split(":")
        await asyncio.get_running_loop().sock_connect(self._sock, (host, int(port)))

    async def dropped(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            assert await asyncio.get_running_loop().sock_recv(self._sock, 1) == b""

    def close(self) -> None:
        self._sock.close()


@pytest.mark.parametrize("apart", [False, True], ids=["one address", "many addresses"])
async def test_silent_strangers_keep_no_peer_out(apart: bool) -> None:
    """Nobody is dropped for taking long here: only because of the others."""
    node = Node(most_strangers=MOST, handshake_s=10 * LIMIT_S)
    async with node.transport, AsyncExitStack() as opened:
        strangers = []
        for number in range(4 * MOST):
            stranger = Silent(node, f"127.0.1.{number + 1}" if apart else "127.0.1.1")
            opened.callback(stranger.close)
            await stranger.connect()
            strangers.append(stranger)
        for stranger in strangers[:-MOST]:
            await stranger.dropped()
        async with asyncio.timeout(LIMIT_S):
            await leave(await dial(node, Purpose.READS))
        async with (friend := Node()).transport, asyncio.timeout(LIMIT_S):
            await friend.transport.connect(node.address)


async def test_who_is_let_in_is_a_stranger_no_more() -> None:
    node = Node(most_strangers=MOST)
    async with node.transport, AsyncExitStack() as opened:
        for _ in range(3 * MOST):
            streams = await dial(node, Purpose.READS)
            opened.push_async_callback(leave, streams)
        assert node.ended.empty()


def connections(count: int) -> list[Connection]:
    """Compared by identity only."""
    return [Connection.__new__(Connection) for _ in range(count)]


def test_the_oldest_of_the_address_with_the_most_goes() -> None:
    strangers = Strangers(4)
    peer, *flood = connections(6)
    assert strangers.enter("10.0.0.1", peer) is None
    assert [strangers.enter("10.0.0.2", each) for each in flood] == [None] * 3 + flood[:2]
    strangers.leave("10.0.0.1", peer)
    assert strangers.enter("10.0.0.3", peer) is None


def test_one_customers_ipv6_addresses_are_one() -> None:
    strangers = Strangers(3)
    peer, first, second, third = connections(4)
    for host, connection in (("1::1", peer), ("2::1%eth0", first), ("2::2", second)):
        assert strangers.enter(f"2001:db8:{host}", connection) is None
    assert strangers.enter("2001:db8:3::1", third) is first


@given(steps=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_never_more_than_the_most_and_each_leaves_once(steps: list[tuple[str, bool]]) -> None:
    strangers = Strangers(3)
    waiting: dict[Connection, str] = {}
    for host, goes in steps:
        if goes and waiting:
            connection = next(iter(waiting))
            strangers.leave(waiting.pop(connection), connection)
            strangers.leave(host, connection)  # nothing happens
            continue
        (connection,) = connections(1)
        expelled = strangers.enter(host, connection)
        assert (expelled is None) == (len(waiting) < 3)
        if expelled is not None:
            hosts = list(waiting.values())
            assert hosts.count(waiting.pop(expelled)) == max(map(hosts.count, hosts))
        waiting[connection] = host
