"""Transports of every kind, for the suites over all of them."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from services.node.memory.arena import Arena
from services.node.memory.device import DeviceArena
from services.node.memory.views import Memory
from services.node.moving.kv_room import KvRoom, Twins
from services.node.transport import native
from services.node.transport.base import Brought, NoListener, Transport
from services.node.transport.cuda_ipc import CudaIpcDirect
from services.node.transport.direct import Direct
from services.node.transport.memory import MemoryNetwork, MemoryTransport
from services.node.transport.rdma import RdmaDirect
from services.node.transport.shm import ShmDirect
from services.node.transport.tcp import TcpTransport
from shared.errors import TransportError
from simulation.network import Network
from simulation.transport import Ends, ModelledTransport
from tests.support.device_memory import HostDriver, Machine
from tests.support.links import SlowLink
from tests.support.listeners import Bring, Hears
from tests.support.tls import certificates

MIB = 1 << 20
FAST = 10_000_000_000
ARENA = 8 * MIB
"""Bytes for weights, unless a test asks for more. An emulated machine takes long to lock them."""
KV_ROOM = 4 * MIB
"""Bytes for copies of KV that go, and as many for those that come."""
SILENCE_S = 60.0
"""Nobody is silent here: peers answer, close or refuse, however busy the machine is."""
RDMA = (os.environ.get("LS_RDMA_DEVICE", ""), int(os.environ.get("LS_RDMA_GID_INDEX", "0")))
"""Device and index of its address; without one, these tests run over RDMA in tests/rdma."""


@dataclass
class End:
    """A transport, the memory that it knows, and what it told its node."""

    transport: Transport
    arena: Arena
    kv_room: KvRoom
    way: str
    """What carries bytes between two such ends."""
    kv_twins: Twins | None = None
    """For copies of KV on a device, if the way reaches it."""
    received: list[tuple[str, bytes, bytes]] = field(default_factory=list)
    lost: list[tuple[str, TransportError]] = field(default_factory=list)
    bring: Bring = NoListener().bring
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    waker: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def address(self) -> str:
        return self.transport.address

    def room(self, nbytes: int) -> memoryview:
        return self.arena.allocate(nbytes).memory

    def put(self, data: bytes) -> memoryview:
        memory = self.room(len(data))
        memory[:] = data
        return memory

    def wake(self) -> None:
        async def notify() -> None:
            async with self.changed:
                self.changed.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self.waker.add(task)
        task.add_done_callback(self.waker.discard)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SILENCE_S), self.changed:
            await self.changed.wait_for(condition)


class Cluster:
    """Starts and stops the ends of a test, all of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.network = MemoryNetwork()
        self.links = Network()
        self.ends = Ends(self.links)
        self.machine = Machine()
        self.count = 0
        self.stacks: dict[str, AsyncExitStack] = {}

    async def start(self, *, rate: int = 0, at: str | None = None, nbytes: int = ARENA) -> End:
        """`nbytes`: of its arena."""
        end: End

        def on_message(sender: str, header: memoryview, payload: memoryview) -> None:
            end.received.append((sender, bytes(header), bytes(payload)))
            end.wake()

        def on_peer_lost(address: str, error: TransportError) -> None:
            end.lost.append((address, error))
            end.wake()

        async def bring(region: str, offset: int, nbytes: int) -> Brought:
            return await end.bring(region, offset, nbytes)

        listener = Hears(on_message, on_peer_lost, bring=bring)
        if self.kind == "rdma":
            rate //= 10  # an emulated machine is slow: the pace is to be its limit too
        arena, kv_room = Arena(nbytes), KvRoom(KV_ROOM)
        memories = [arena.memory, *kv_room.memories]
        stack, twins = AsyncExitStack(), None
        transport: TcpTransport | MemoryTransport | ModelledTransport
        if self.kind in ("tcp", "tcp in C", "tls", "cuda-ipc", "shm", "rdma"):
            ways: dict[str, Direct] = {
                "shm": ShmDirect(memories, machine="here", bytes_per_s=rate),
                "rdma": RdmaDirect(memories, *RDMA, bytes_per_s=rate),
            }
            if self.kind == "cuda-ipc":
                ways["cuda-ipc"], twins = stack.enter_context(self._on_device(memories, rate))
            transport = TcpTransport(
                "127.0.0.1",
                int(at.rpartition(":")[2]) if at else 0,
                link_bytes_per_s=rate,
                listener=listener,
                ways=[ways[self.kind]] if self.kind in ways else [],
                tls=certificates() if self.kind == "tls" else None,
                silence_s=SILENCE_S,
            )
        elif self.kind == "modelled":
            self.count += 1
            node = at.removeprefix("sim://") if at else str(self.count)
            if node not in self.links:
                self.links.add(node, out=rate or FAST, into=rate or FAST)
            transport = ModelledTransport(self.ends, node, listener=listener)
        else:
            self.count += 1
            transport = MemoryTransport(
                self.network,
                at or f"memory://{self.count}",
                link_bytes_per_s=rate,
                listener=listener,
            )
        way = "tcp" if self.kind in ("tcp in C", "tls") else self.kind
        end = End(transport, arena, kv_room, way, twins)
        await stack.enter_async_context(transport)
        self.stacks[end.address] = stack
        return end

    @contextmanager
    def _on_device(
        self, memories: list[Memory], rate: int
    ) -> Iterator[tuple[CudaIpcDirect, Twins]]:
        """The way of a node with a device, which is a double (`tests.support.device_memory`)."""
        driver = HostDriver(self.machine)
        host, cpu, room = memories[0], torch.device("cpu"), KvRoom(KV_ROOM)
        with DeviceArena(
            host, cpu, SlowLink(), lambda ordinal: driver, beside=room.memories
        ) as device:
            landing = device.landing
            assert landing is not None
            exported = landing.exported()
            yield (
                CudaIpcDirect(
                    [*memories, *room.memories],
                    landing,
                    exported,
                    machine="here",
                    bytes_per_s=rate,
                ),
                Twins(room, device),
            )
            driver.may_copy.set()

    async def stop(self, end: End) -> None:
        await self.stacks.pop(end.address).aclose()


KINDS = [
    "memory",
    "modelled",
    "tcp",
    "tcp in C",
    "tls",
    "cuda-ipc",
    "shm",
    *(["rdma"] if RDMA[0] else []),
]


@asynccontextmanager
async def clusters(kind: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    if kind == "tcp":
        monkeypatch.setattr(native, "load", lambda: None)
    cluster = Cluster(kind)
    yield cluster
    for stack in list(cluster.stacks.values()):
        await stack.aclose()
