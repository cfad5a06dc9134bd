"""Who shares memory with whom, and what goes another way. That bytes cross is the contract's."""

import asyncio
import gc
import os
import resource
import socket
from pathlib import Path

import pytest

from services.node.memory.arena import Arena
from services.node.memory.views import Memory
from services.node.transport.direct import Place
from services.node.transport.shm import ShmDirect
from services.node.transport.tcp import TcpTransport
from shared.errors import ProtocolViolation, TransportError
from tests.support.listeners import Hears

ROOM = 1 << 20


def node(arena: Arena, machine: str = "here", *, lost: asyncio.Event | None = None) -> TcpTransport:
    """`lost`: set once a peer is."""
    return TcpTransport(
        "127.0.0.1",
        0,
        link_bytes_per_s=0,
        ways=[ShmDirect([arena.memory], machine=machine)],
        listener=Hears(lost=lambda *_: lost.set() if lost else None),
    )


async def way(reader: TcpTransport, source: TcpTransport, into: memoryview, region: str) -> str:
    async with asyncio.timeout(10):
        result = await reader.read(source.address, region, 0, into, priority=1)
    return result.way


async def test_nodes_of_other_machines_go_by_tcp() -> None:
    ours, theirs = Arena(ROOM), Arena(ROOM)
    async with node(ours) as source, node(theirs, "elsewhere") as reader:
        source.register("w", ours.allocate(100).memory, ready=100)
        assert await way(reader, source, theirs.allocate(100).memory, "w") == "tcp"


async def test_what_lies_outside_the_arenas_goes_by_tcp() -> None:
    ours, theirs = Arena(ROOM), Arena(ROOM)
    data = bytes(range(100))
    async with node(ours) as source, node(theirs) as reader:
        inside = ours.allocate(100).memory
        inside[:] = data
        source.register("inside", inside, ready=100)
        source.register("outside", memoryview(data), ready=100)
        for into, region, expected in (
            (theirs.allocate(100).memory, "inside", "shm"),
            (theirs.allocate(100).memory, "outside", "tcp"),
            (memoryview(bytearray(100)), "inside", "tcp"),
        ):
            assert await way(reader, source, into, region) == expected
            assert into == data


async def test_memory_that_could_shrink_is_not_mapped() -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, ROOM)
        ours, theirs = Arena(ROOM), Arena(ROOM)
        source = ShmDirect([Memory(ours.memory.view, descriptor)], machine="here")
        reader = ShmDirect([theirs.memory], machine="here")
        async with source, reader:
            offer = reader.offer()
            accepted = source.accept(offer.data)
            assert accepted is not None
            with pytest.raises(TransportError, match="not sealed"):
                await offer.complete(accepted[0])
    finally:
        os.close(descriptor)


async def test_a_place_outside_the_peers_memory() -> None:
    ours, theirs = Arena(ROOM), Arena(ROOM)
    async with (
        ShmDirect([ours.memory], machine="here") as source,
        ShmDirect([theirs.memory], machine="here") as reader,
    ):
        offer = reader.offer()
        accepted = source.accept(offer.data)
        assert accepted is not None
        taking = await offer.complete(accepted[0])
        into = theirs.allocate(100).memory
        for place in (Place(1, 0), Place(0, ROOM - 99), Place(0, 1 << 63)):
            with pytest.raises(ProtocolViolation):
                await taking.take(place, into)
        await taking.take(Place(0, ROOM - 100), into)


async def test_an_answer_that_leads_nowhere() -> None:
    arena = Arena(ROOM)
    async with ShmDirect([arena.memory], machine="here") as direct:
        for answer in (b"\0lambdascale-nobody", b"", b"x" * 200):
            with pytest.raises(TransportError):
                await direct.offer().complete(answer)


async def test_a_dialler_that_hangs_up_gets_nothing_and_harms_nothing() -> None:
    ours, theirs = Arena(ROOM), Arena(ROOM)
    async with (
        ShmDirect([ours.memory], machine="here") as source,
        ShmDirect([theirs.memory], machine="here") as reader,
    ):
        offer = reader.offer()
        accepted = source.accept(offer.data)
        assert accepted is not None
        for _ in range(5):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.connect(accepted[0])
        await offer.complete(accepted[0])


def mappings() -> int:
    """The number of arenas that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:lambdascale-arena")


async def test_a_peers_memory_is_given_back_with_the_connection() -> None:
    """At once, and not when the collector comes by: it may be all of a process long dead."""
    ours, theirs = Arena(ROOM), Arena(ROOM)
    before = mappings()
    lost = asyncio.Event()
    gc.disable()
    try:
        async with node(theirs, lost=lost) as reader:
            async with node(ours) as source:
                source.register("w", ours.allocate(100).memory, ready=100)
                assert await way(reader, source, theirs.allocate(100).memory, "w") == "shm"
                assert mappings() > before
            await asyncio.wait_for(lost.wait(), 10)
            assert mappings() == before
    finally:
        gc.enable()


async def test_without_descriptors_it_waits_and_does_not_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = Arena(ROOM), Arena(ROOM)
    calls = 0
    hand_out = ShmDirect._hand_out

    def counting(direct: ShmDirect) -> None:
        nonlocal calls
        calls += 1
        hand_out(direct)

    monkeypatch.setattr(ShmDirect, "_hand_out", counting)
    async with (
        ShmDirect([ours.memory], machine="here") as source,
        ShmDirect([theirs.memory], machine="here") as reader,
    ):
        offer = reader.offer()
        accepted = source.accept(offer.data)
        assert accepted is not None
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            with socket.socket() as free:
                lowest = free.fileno()
            sock.connect(accepted[0])
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            try:
                for _ in range(1000):
                    await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert 1 <= calls < 100
        await offer.complete(accepted[0])
