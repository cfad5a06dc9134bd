"""Reads over RDMA between two processes."""

import asyncio
import ipaddress
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from services.node.memory.arena import Arena
from services.node.memory.landing import Landing
from services.node.memory.ranges import Ranges
from services.node.memory.views import address
from services.node.transport.direct import DirectReader, Place
from services.node.transport.rdma import RdmaDirect
from services.node.transport.rdma_endpoint import decode, encode
from shared.errors import BadInput, ConfigError, PeerLost, ProtocolViolation, TransportError
from tests.rdma.guest.peer import DEVICE, GID_INDEX, NBYTES, pattern
from tests.support.device_memory import HostDriver, Machine

MIB = 1 << 20
DATA = pattern()
LIMIT_S = 30.0
pytestmark = pytest.mark.asyncio(loop_scope="module")  # the peer's pipes belong to one loop


class Peer:
    """Another process, and where its bytes lie."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self.place = Place(0, 0)

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.rdma.guest.peer"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        key, address = (await self._line()).split()
        self.place = Place(int(key), int(address))

    async def ask(self, line: str) -> str:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        return await self._line()

    async def end(self, how: signal.Signals) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(how)
            await self._process.wait()

    async def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            return (await self._process.stdout.readline()).decode().strip()

    def at(self, offset: int) -> Place:
        return Place(self.place.key, self.place.address + offset)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    await peer.start()
    yield peer
    await peer.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(2 * NBYTES)


@pytest_asyncio.fixture(loop_scope="module")
async def rdma(arena: Arena) -> AsyncIterator[RdmaDirect]:
    async with RdmaDirect([arena.memory], DEVICE, GID_INDEX) as rdma:
        yield rdma


@pytest.fixture
def into(arena: Arena, rdma: RdmaDirect) -> memoryview:
    """Zeros, as many as the peer has bytes."""
    arena.memory.view[:] = bytes(2 * NBYTES)
    return arena.memory.view[:NBYTES]


@pytest.fixture
def spare(arena: Arena) -> memoryview:
    """As many bytes."""
    return arena.memory.view[NBYTES:]


@pytest_asyncio.fixture(loop_scope="module")
async def reader(rdma: RdmaDirect, peer: Peer) -> DirectReader:
    return await connect(rdma, peer)


async def connect(rdma: RdmaDirect, peer: Peer) -> DirectReader:
    offer = rdma.offer()
    return await offer.complete(bytes.fromhex(await peer.ask(offer.data.hex())))


async def take(reader: DirectReader, place: Place, into: memoryview) -> None:
    async with asyncio.timeout(LIMIT_S):
        await reader.take(place, into)


class Long:
    """Takes of all that the peer has, into one buffer, that have begun and are far from over."""

    def __init__(self, takes: list[asyncio.Future[None]]) -> None:
        self.takes = takes

    async def cut_off(self, by: type[BaseException]) -> str:
        """Waits for their end; what the last one, which had hardly begun, ended with."""
        *others, last = await asyncio.gather(*self.takes, return_exceptions=True)
        assert all(end is None or isinstance(end, by) for end in others)
        assert isinstance(last, by)
        return str(last)


async def begin(reader: DirectReader, peer: Peer, into: memoryview, spare: memoryview) -> Long:
    long = Long([asyncio.ensure_future(take(reader, peer.place, into)) for _ in range(20)])
    await asyncio.sleep(0)
    # Takes make their READs in turn: a short one, though it comes later, ends sooner.
    await take(reader, peer.place, spare[:1])
    assert not long.takes[-1].done()
    return long


def blank(view: memoryview) -> bool:
    return bytes(view).count(0) == len(view)


async def test_bytes_of_any_range(reader: DirectReader, peer: Peer, into: memoryview) -> None:
    for start, nbytes in ((0, 1), (4095, 2), (17, 3 * MIB + 5), (NBYTES - 9 * MIB, 9 * MIB)):
        await take(reader, peer.at(start), into[1 : nbytes + 1])
        assert into[1 : nbytes + 1] == DATA[start : start + nbytes]
        assert blank(into[nbytes + 1 : nbytes + 100])
        assert into[0] == 0


async def test_many_takes_at_once(reader: DirectReader, peer: Peer, into: memoryview) -> None:
    sizes = [1 + index * 18_888 for index in range(40)]
    starts = list(itertools.accumulate(sizes, initial=0))
    places = zip(starts, sizes, strict=False)
    await asyncio.gather(
        *(take(reader, peer.at(start), into[start : start + size]) for start, size in places)
    )
    assert into[: starts[-1]] == DATA[: starts[-1]]
    assert blank(into[starts[-1] : starts[-1] + MIB])


async def test_several_connections_at_once(rdma: RdmaDirect, peer: Peer, into: memoryview) -> None:
    readers = [await connect(rdma, peer) for _ in range(4)]
    parts = [slice(start, start + 2 * MIB) for start in range(0, 8 * MIB, 2 * MIB)]
    await asyncio.gather(
        *(
            take(reader, peer.at(part.start), into[part])
            for reader, part in zip(readers, parts, strict=True)
        )
    )
    assert into[: 8 * MIB] == DATA[: 8 * MIB]


async def test_cancelled_takes_leave_their_buffer_alone(
    reader: DirectReader, peer: Peer, into: memoryview, spare: memoryview
) -> None:
    long = await begin(reader, peer, into, spare)
    for read in long.takes:
        read.cancel()
    for read in long.takes:
        read.cancel()  # again: that cuts nothing short
    await long.cut_off(asyncio.CancelledError)
    assert not blank(into)
    into[:] = bytes(NBYTES)
    await take(reader, peer.place, spare)
    assert spare == DATA
    assert blank(into)


async def test_a_take_that_waits_its_turn_is_cancelled(
    reader: DirectReader, peer: Peer, into: memoryview, spare: memoryview
) -> None:
    first = asyncio.ensure_future(take(reader, peer.place, into))
    waiting = asyncio.ensure_future(take(reader, peer.place, spare))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    spare[:] = bytes(NBYTES)  # its turn may have come just before
    await first
    assert into == DATA
    assert blank(spare)


@pytest.mark.parametrize("wrong", ["past the end", "key", "nowhere"])
async def test_memory_that_the_peer_has_not(
    rdma: RdmaDirect, reader: DirectReader, peer: Peer, into: memoryview, wrong: str
) -> None:
    place = {
        "past the end": peer.at(NBYTES - 100),
        "key": Place(peer.place.key ^ 0x0500, peer.place.address),
        "nowhere": Place(peer.place.key, (1 << 64) - 4096),
    }[wrong]
    other = await connect(rdma, peer)
    with pytest.raises(TransportError) as refused:
        await take(reader, place, into[:4096])
    assert not isinstance(refused.value, PeerLost)
    assert blank(into[:4096])
    await take(other, peer.place, into[:MIB])
    assert into[:MIB] == DATA[:MIB]
    with pytest.raises(PeerLost, match="refused"):
        await take(reader, peer.place, into)
    again = await connect(rdma, peer)
    await take(again, peer.at(MIB), into[MIB : 2 * MIB])
    assert into[: 2 * MIB] == DATA[: 2 * MIB]


async def test_takes_beside_a_refused_one(
    reader: DirectReader, peer: Peer, into: memoryview, spare: memoryview
) -> None:
    long = await begin(reader, peer, into, spare)
    with pytest.raises(TransportError, match="no such memory"):
        await take(reader, peer.at(NBYTES), spare[:4096])
    await long.cut_off(PeerLost)


async def test_an_address_that_cannot_be(
    reader: DirectReader, peer: Peer, into: memoryview
) -> None:
    with pytest.raises(TransportError, match="no memory lies at"):
        await take(reader, Place(1, (1 << 64) - 1), into[:2])
    await take(reader, peer.place, into[:2])


async def test_a_peer_that_is_killed(
    rdma: RdmaDirect, peer: Peer, into: memoryview, spare: memoryview
) -> None:
    doomed = Peer()
    await doomed.start()
    reader, other = await connect(rdma, doomed), await connect(rdma, peer)
    long = await begin(reader, doomed, into, spare)
    await doomed.end(signal.SIGKILL)
    await long.cut_off(PeerLost)
    with pytest.raises(PeerLost, match="does not answer"):
        await take(reader, doomed.place, into)
    await take(other, peer.place, spare)
    assert spare == DATA


async def test_a_source_that_closes(
    rdma: RdmaDirect, reader: DirectReader, peer: Peer, into: memoryview
) -> None:
    assert await peer.ask("close") == "closed"
    with pytest.raises(PeerLost, match="does not answer"):
        await take(reader, peer.place, into[:1])
    again = await connect(rdma, peer)
    await take(again, peer.place, into[:MIB])
    assert into[:MIB] == DATA[:MIB]


async def test_closing_ends_takes_at_once(
    rdma: RdmaDirect, reader: DirectReader, peer: Peer, into: memoryview, spare: memoryview
) -> None:
    long = await begin(reader, peer, into, spare)
    reader.close()
    into[:] = bytes(NBYTES)
    assert "this end was closed" in await long.cut_off(PeerLost)
    reader.close()
    with pytest.raises(PeerLost):
        await take(reader, peer.place, spare)
    await take(await connect(rdma, peer), peer.place, spare)
    assert spare == DATA
    assert blank(into)


async def test_only_registered_memory_is_reached(
    rdma: RdmaDirect, reader: DirectReader, peer: Peer, arena: Arena
) -> None:
    view = arena.memory.view
    for buffer in (view, view[5:6], view[-100:]):
        assert reader.reaches(buffer)
    for buffer in (memoryview(bytearray(100)), memoryview(bytes(100)), view[:0], view.toreadonly()):
        assert not reader.reaches(buffer)
        with pytest.raises(BadInput):
            await take(reader, peer.place, buffer)
    accepted = rdma.accept(rdma.offer().data)
    assert accepted is not None
    source = accepted[1]
    whole, part = source.place(view), source.place(view[100:200])
    assert whole is not None
    assert part == Place(whole.key, whole.address + 100)
    assert source.place(memoryview(bytearray(100))) is None


async def test_offers_that_lead_nowhere(rdma: RdmaDirect) -> None:
    offer = rdma.offer()
    endpoint = decode(offer.data)
    with pytest.raises(ProtocolViolation):
        rdma.accept(offer.data[:-1])
    gid = ipaddress.IPv6Address("2001:db8::1").packed  # the devices' addresses are IPv4
    elsewhere = encode(msgspec.structs.replace(endpoint, gid=gid))
    assert rdma.accept(elsewhere) is None
    with pytest.raises(TransportError, match="2001:db8::1"):
        await offer.complete(elsewhere)
    with pytest.raises(ProtocolViolation):
        await rdma.offer().complete(b"")


async def test_nothing_is_left_behind(arena: Arena, peer: Peer) -> None:
    def resources() -> dict[str, int]:
        shown = subprocess.run(["rdma", "-j", "resource"], capture_output=True, check=True)
        (device,) = (d for d in json.loads(shown.stdout) if d["ifname"] == DEVICE)
        return {kind: count for kind, count in device.items() if isinstance(count, int)}

    await peer.ask("close")
    before = resources()
    async with RdmaDirect([arena.memory], DEVICE, GID_INDEX) as rdma:
        opened = resources()
        assert opened["mr"] == before["mr"] + 1
        for _ in range(3):
            rdma.offer().withdraw()
            (await connect(rdma, peer)).close()
            with pytest.raises(ProtocolViolation):
                await rdma.offer().complete(b"")
            accepted = rdma.accept(rdma.offer().data)
            assert accepted is not None
            accepted[1].close()
        await peer.ask("close")
        assert resources()["qp"] == opened["qp"] + 3  # offers that are still open
        rdma.accept(rdma.offer().data)
        await connect(rdma, peer)
        await peer.ask("close")
    assert resources() == before


@pytest.mark.parametrize(
    ("device", "gid_index", "message"),
    [("nope0", GID_INDEX, "no RDMA device nope0"), (DEVICE, 900, "index 900")],
)
async def test_a_device_that_is_not_there(device: str, gid_index: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with RdmaDirect([], device, gid_index):
            pass


async def test_a_gpu_that_the_adapter_does_not_reach(peer: Peer, arena: Arena) -> None:
    """What its double says is a dma-buf is none; real ones, Soft-RoCE does not take."""
    landing = Landing(
        arena.memory, address(arena.memory.view), Ranges(), lambda: HostDriver(Machine())
    )
    into = arena.memory.view[:NBYTES]
    into[:] = bytes(NBYTES)
    try:
        async with RdmaDirect([arena.memory], DEVICE, GID_INDEX, landing=landing) as rdma:
            assert landing.ways == []
            await take(await connect(rdma, peer), peer.place, into)
    finally:
        landing.close()
    assert bytes(into) == DATA
    assert not landing.holds(into)
