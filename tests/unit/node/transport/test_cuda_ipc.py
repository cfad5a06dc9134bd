"""Nodes with devices on one machine; the devices are doubles, see tests.support.device_memory."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
import torch
from structlog.testing import capture_logs

from services.node.memory.arena import Arena
from services.node.memory.cuda import EXPORTED_BYTES
from services.node.memory.device import DeviceArena
from services.node.transport.base import NoListener
from services.node.transport.cuda_ipc import ON_DEVICE, CudaIpcDirect, CudaIpcReader
from services.node.transport.direct import Direct, Place
from services.node.transport.shm import ShmDirect
from services.node.transport.tcp import TcpTransport
from shared.errors import PeerLost, ProtocolViolation
from tests.support.device_memory import HostDriver, Machine
from tests.support.links import SlowLink

HERE = "here"
ROOM = 1 << 20
NBYTES = 300_000
WHOLE = bytes(range(250)) * (NBYTES // 250)


class Node:
    """One with a device."""

    def __init__(self, machine: Machine) -> None:
        self.arena, self.driver = Arena(ROOM), HostDriver(machine)
        self.cache, self.beside = Arena(ROOM), Arena(ROOM)
        """Of these, the second has a twin on the device."""
        self.memories = [each.memory for each in (self.arena, self.cache, self.beside)]
        self.device = DeviceArena(
            self.arena.memory,
            torch.device("cpu"),
            SlowLink(),
            lambda ordinal: self.driver,
            beside=[self.beside.memory],
        )
        self.closed = asyncio.Event()

    async def __aenter__(self) -> "Node":
        async with AsyncExitStack() as stack:
            stack.enter_context(self.device)
            stack.callback(self.driver.may_copy.set)
            self.transport = await stack.enter_async_context(
                transport([self.direct(), ShmDirect(self.memories, machine=HERE)])
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def direct(self) -> CudaIpcDirect:
        landing = self.device.landing
        assert landing is not None
        return CudaIpcDirect(self.memories, landing, landing.exported(), machine=HERE)

    def block(self) -> memoryview:
        return self.arena.allocate(NBYTES).memory

    async def hold(self, *, on_device: int = NBYTES, ready: int = NBYTES) -> memoryview:
        """`w` with so many bytes on the device, and in the host's arena too, but as zeros there."""
        block = self.block()
        block[:] = WHOLE
        if on_device:
            await self.device.upload(block[:on_device])
            block[:on_device] = bytes(on_device)
        self.transport.register("w", block, ready=ready)
        return block

    def holds(self, block: memoryview) -> bool:
        assert self.device.landing is not None
        return self.device.landing.holds(block)


def transport(ways: list[Direct]) -> TcpTransport:
    return TcpTransport(
        "127.0.0.1",
        0,
        link_bytes_per_s=0,
        ways=ways,
        listener=NoListener(),
    )


async def read(reader: TcpTransport, source: Node, into: memoryview) -> tuple[str, bytes]:
    """What carried it, and what there was to check."""
    seen = bytearray()
    async with asyncio.timeout(10):
        result = await reader.read(
            source.transport.address, "w", 0, into, priority=1, received=seen.extend
        )
    return result.way, bytes(seen)


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    assert machine.opened == []


@pytest.fixture
async def source(machine: Machine) -> AsyncIterator[Node]:
    async with Node(machine) as node:
        yield node


@pytest.fixture
async def reader(machine: Machine, source: Node) -> AsyncIterator[Node]:
    async with Node(machine) as node:
        yield node


async def test_from_device_to_device(source: Node, reader: Node) -> None:
    await source.hold()
    into = reader.block()
    way, seen = await read(reader.transport, source, into)
    assert way == "cuda-ipc"
    assert seen == bytes(into) == WHOLE
    landed = reader.device.landed(into)
    assert landed is not None
    assert landed.numpy().tobytes() == WHOLE
    assert reader.driver.copied == [("device", NBYTES), ("host", NBYTES)]


async def test_from_twin_to_twin(source: Node, reader: Node) -> None:
    block, into = (each.beside.allocate(NBYTES).memory for each in (source, reader))
    source.device.twin(block)[:] = torch.frombuffer(bytearray(WHOLE), dtype=torch.uint8)
    source.device.show(block)
    source.transport.register("w", block, ready=NBYTES)
    way, _ = await read(reader.transport, source, into)
    assert way == reader.transport.way_to(source.transport.address) == "cuda-ipc"
    assert reader.device.twin(into).numpy().tobytes() == WHOLE
    assert bytes(into) == bytes(NBYTES)
    assert reader.driver.copied == [("device", NBYTES)]


async def test_a_peer_that_is_gone_is_not_read_by_any_way(machine: Machine, reader: Node) -> None:
    async with Node(machine) as source:
        await source.hold()
        address = source.transport.address
        assert reader.transport.way_to(address) == ""
        await read(reader.transport, source, reader.block())
        assert reader.transport.way_to(address) == "cuda-ipc"
    with pytest.raises(PeerLost):
        await read(reader.transport, source, reader.block())
    assert reader.transport.way_to(address) == ""


async def test_to_memory_that_has_no_twin(source: Node, reader: Node) -> None:
    """Such as the host cache: the bytes come from the host's arena, where they are, too."""
    block = await source.hold()
    block[:] = WHOLE
    into = reader.cache.allocate(NBYTES).memory
    way, _ = await read(reader.transport, source, into)
    assert (way, bytes(into)) == ("cuda-ipc", WHOLE)
    assert reader.driver.copied == []


async def test_what_is_not_on_the_device_comes_from_the_host(source: Node, reader: Node) -> None:
    await source.hold(on_device=0)
    into = reader.block()
    assert await read(reader.transport, source, into) == ("cuda-ipc", WHOLE)
    assert bytes(into) == WHOLE
    assert not reader.holds(into)
    assert reader.driver.copied == []


async def test_each_part_comes_from_where_it_is_when_it_is_there(
    source: Node, reader: Node
) -> None:
    """As of a block that the source is itself receiving: on the device when it is asked for, or
    not, is not what counts."""
    first, second = NBYTES // 4, NBYTES // 2
    block = await source.hold(on_device=first, ready=first)
    into, came = reader.block(), asyncio.Queue[int]()
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        reading = asyncio.create_task(
            reader.transport.read(
                source.transport.address,
                "w",
                0,
                into,
                priority=1,
                received=lambda part: loop.call_soon_threadsafe(came.put_nowait, len(part)),
            )
        )
        assert await came.get() == first
        await source.device.upload(block[first:second])
        source.transport.advance("w", second)
        assert await came.get() == second - first
        assert reader.holds(into[:second])
        source.transport.advance("w", NBYTES)
        assert (await reading).way == "cuda-ipc"
    assert bytes(into) == WHOLE
    assert not reader.holds(into[second : second + 1])


async def test_devices_that_do_not_reach_each_other_share_the_hosts_memory(
    machine: Machine, source: Node, reader: Node
) -> None:
    machine.peers = False
    block = await source.hold()
    block[:] = WHOLE  # as it is in life
    into = reader.block()
    with capture_logs() as logs:
        assert await read(reader.transport, source, into) == ("shm", WHOLE)
    assert bytes(into) == WHOLE
    assert not reader.holds(into)
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert "PEER_ACCESS_UNSUPPORTED" in warning["error"]


async def test_a_node_without_a_device_shares_the_hosts_memory(source: Node) -> None:
    block = await source.hold()
    block[:] = WHOLE
    arena = Arena(ROOM)
    into = arena.allocate(NBYTES).memory
    async with transport([ShmDirect([arena.memory], machine=HERE)]) as plain:
        assert await read(plain, source, into) == ("shm", WHOLE)
        plain.register("v", into, ready=NBYTES)
        room = source.block()
        async with asyncio.timeout(10):
            result = await source.transport.read(plain.address, "v", 0, room, priority=1)
    assert (result.way, bytes(room)) == ("shm", WHOLE)


@pytest.fixture
async def connected(source: Node, reader: Node) -> AsyncIterator[CudaIpcReader]:
    async with source.direct() as there, reader.direct() as here:
        offer = here.offer()
        accepted = there.accept(offer.data)
        assert accepted is not None
        connected = await offer.complete(accepted[0])
        yield connected
        connected.close()


async def test_places_that_are_not_the_peers(reader: Node, connected: CudaIpcReader) -> None:
    into = reader.block()
    for place in (
        Place(ON_DEVICE, ROOM - NBYTES + 1),
        Place(ON_DEVICE | 1, 0),
        Place(ON_DEVICE | 3, 0),
        Place(3, 0),
    ):
        with pytest.raises(ProtocolViolation):
            await connected.take(place, into)
    assert reader.driver.copied == []


async def test_a_peer_of_an_earlier_version_has_its_arena_on_its_device(
    source: Node, reader: Node
) -> None:
    """It says only how its device memory is opened, and not what lies where."""
    async with source.direct() as there, reader.direct() as here:
        there._beside = there._beside[:EXPORTED_BYTES]
        offer = here.offer()
        accepted = there.accept(offer.data)
        assert accepted is not None
        connected = await offer.complete(accepted[0])
        await source.hold()
        into = reader.block()
        await connected.take(Place(ON_DEVICE, 0), into)
        assert bytes(into) == WHOLE
        with pytest.raises(ProtocolViolation, match="not on its device"):
            await connected.take(Place(ON_DEVICE | 2, 0), into)
        connected.close()


async def test_a_connection_that_ends_gives_the_peers_memory_back(
    machine: Machine, reader: Node, connected: CudaIpcReader
) -> None:
    reader.driver.may_copy.clear()
    take = asyncio.create_task(connected.take(Place(ON_DEVICE, 0), reader.block()))
    assert await asyncio.to_thread(reader.driver.waited.wait, 10)
    connected.close()
    connected.close()
    assert len(machine.opened) == 1
    reader.driver.may_copy.set()
    with pytest.raises(PeerLost):
        await take
    with pytest.raises(PeerLost):
        await connected.take(Place(ON_DEVICE, 0), reader.block())
