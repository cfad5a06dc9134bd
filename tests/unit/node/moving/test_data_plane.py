"""The data thread: its start and end, calls across the loops, messages in order."""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.node.core.residency import PlanId
from services.node.memory.arena import Arena, ModelSpace
from services.node.moving.data_plane import DataPlane
from services.node.moving.events import Arrival
from shared.errors import ConfigError, Conflict, NotFound, PeerLost, TransportError
from shared.ids import EventId, NodeId
from shared.messages.scaling import Pull
from tests.support.listeners import PlaneHears
from tests.unit.node.moving.movers import CONTENT, MANIFEST, MODEL

WAIT_S = 100.0
EVENT = EventId("ev-1")


class Plane(DataPlane):
    """Notes what its callbacks are told, on the test's loop."""

    def __init__(self, port: int = 0, on_message: Callable[..., None] | None = None) -> None:
        super().__init__(
            "127.0.0.1",
            port,
            0,
            listener=PlaneHears(
                on_message or self._on_message,
                lambda address, error: self._note(self.lost, (address, error)),
                lambda arrival: self._note(self.arrived, arrival),
            ),
        )
        self.messages: list[tuple[str, bytes]] = []
        self.lost: list[tuple[str, TransportError]] = []
        self.arrived: list[Arrival] = []
        self.changed = asyncio.Event()
        self._test_loop = asyncio.get_running_loop()

    def _on_message(self, sender: str, header: memoryview, payload: memoryview) -> None:
        self._note(self.messages, (sender, bytes(header) + bytes(payload)))

    def _note(self, where: list[Any], what: object) -> None:
        def note() -> None:
            where.append(what)
            self.changed.set()

        self._test_loop.call_soon_threadsafe(note)

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not reached():
                self.changed.clear()
                await self.changed.wait()


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "data"]


async def test_a_port_in_use_is_a_clear_error_and_leaves_no_thread() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on tcp://127.0.0.1:{port}"):
            await Plane(port).__aenter__()
    assert data_threads() == []


async def test_messages_to_a_peer_keep_their_order() -> None:
    async with Plane() as a, Plane() as b:
        sent = [f"message {number}".encode() for number in range(500)]
        for message in sent[:250]:
            a.send(b.address, message, [b"+", b"payload"])
        await b.until(lambda: len(b.messages) >= 100)  # while the rest is on its way
        for message in sent[250:]:
            a.send(b.address, message, [b"+payload"])
        await b.until(lambda: len(b.messages) == len(sent))
        assert b.messages == [(a.address, message + b"+payload") for message in sent]


async def test_a_peer_that_cannot_be_reached_is_lost_and_found_again() -> None:
    async with Plane() as a:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}"
        a.send(address, b"one", [])
        a.send(address, b"two", [])
        await a.until(lambda: bool(a.lost))
        assert a.lost[0][0] == address
        assert isinstance(a.lost[0][1], PeerLost)
        async with Plane(port) as b:
            a.send(address, b"three", [])
            await b.until(lambda: bool(b.messages))
            assert b.messages == [(a.address, b"three")]


async def test_a_message_that_cannot_be_sent_ends_nothing_but_what_waits_for_it() -> None:
    async with Plane() as a, Plane() as b:
        a.send(b.address, b"too long", [bytes(65 << 20)])
        a.send("no address", b"lost", [])
        await a.until(lambda: len(a.lost) == 2)
        assert {address for address, _ in a.lost} == {b.address, "no address"}
        a.send(b.address, b"fine", [])
        await b.until(lambda: bool(b.messages))
        assert b.messages == [(a.address, b"fine")]


async def test_errors_of_the_other_loop_arrive_as_they_are() -> None:
    async with Plane() as a:
        with pytest.raises(NotFound, match="model m is not hosted"):
            await a.mark_held(MODEL, 0)
        with pytest.raises(TransportError):
            await a.connect("tcp://127.0.0.1:1")


async def test_a_block_goes_over() -> None:
    async with Plane() as a, Plane() as b:
        arenas = [Arena(ModelSpace.size(MANIFEST)) for _ in (a, b)]
        spaces = [ModelSpace(MANIFEST, x.allocate(ModelSpace.size(MANIFEST))) for x in arenas]
        for plane, space in zip((a, b), spaces, strict=True):
            await plane.host(MODEL, MANIFEST, space)
        spaces[0].block(1)[:] = CONTENT[1]
        await a.mark_held(MODEL, 1)
        source = NodeId("a")
        await b.apply(MODEL, PlanId(EVENT, 0), [Pull(1, 1, source)], {source: a.address})
        await b.until(lambda: bool(b.arrived))
        assert bytes(spaces[1].block(1)) == CONTENT[1]
        await b.drop(MODEL)
        arenas[1].free(spaces[1].span)


async def test_closed_it_refuses_calls_and_swallows_messages() -> None:
    async with Plane() as a:
        pass
    assert data_threads() == []
    with pytest.raises(Conflict, match="data plane is closed"):
        await a.mark_held(MODEL, 0)
    with pytest.raises(Conflict, match="data plane is closed"):
        await a.drop(MODEL)
    a.send("tcp://127.0.0.1:1", b"nobody", [])
    await a.wait()


async def test_closing_ends_calls_that_are_under_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection, says nothing
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        async with Plane() as a:
            connecting = asyncio.create_task(a.connect(address))
            accepted, _ = await asyncio.to_thread(silent.accept)
        with accepted, pytest.raises((Conflict, PeerLost)):
            await connecting
    assert data_threads() == []


async def test_a_cancelled_call_is_finished_all_the_same() -> None:
    async with Plane() as a:
        arena = Arena(ModelSpace.size(MANIFEST))
        space = ModelSpace(MANIFEST, arena.allocate(ModelSpace.size(MANIFEST)))
        await a.host(MODEL, MANIFEST, space)
        dropping = asyncio.create_task(a.drop(MODEL))
        await asyncio.sleep(0)
        dropping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropping
        await a.drop(MODEL)
        arena.free(space.span)  # nothing holds it


async def test_a_listener_that_breaks_ends_the_connection_and_nothing_else() -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with capture_logs():  # to draw the traceback takes seconds
        async with Plane(on_message=broken) as a, Plane() as b:
            b.send(a.address, b"hello", [])
            await b.until(lambda: bool(b.lost))
            a.send(b.address, b"still here", [])
            await b.until(lambda: bool(b.messages))
            assert b.messages == [(a.address, b"still here")]


async def test_a_data_thread_that_dies_is_noticed() -> None:
    async def broken() -> None:
        raise ZeroDivisionError("a bug")

    async with Plane() as a:
        a._loop.call_soon_threadsafe(lambda: a._group.create_task(broken()))
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(BaseExceptionGroup) as caught:
                await a.wait()
        assert caught.group_contains(ZeroDivisionError)
        with pytest.raises(Conflict, match="data plane is closed"):
            await a.mark_held(MODEL, 0)
