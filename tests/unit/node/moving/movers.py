"""Movers over real TCP, and a small model for them to move."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from services.node.checkpoints.packing import digest
from services.node.core.pulling import FIRST_WINDOW
from services.node.core.residency import PlanId
from services.node.memory.arena import Arena, ModelSpace
from services.node.moving.events import Arrival, PullFailure
from services.node.moving.mover import Mover
from services.node.transport.base import NoListener, OnReceived, Permit, ReadResult
from services.node.transport.memory import MemoryNetwork, MemoryTransport
from services.node.transport.tcp import TcpTransport
from shared.ids import EventId, ModelId, NodeId
from shared.layout import BlockSpec, Manifest
from shared.messages.scaling import Pull
from tests.support.listeners import Hears

MODEL = ModelId("m")


EVENT = EventId("ev-1")


CHUNK = 64 * 1024


SIZES = (5 * CHUNK, 3 * CHUNK + 100, 4 * CHUNK)


CONTENT = [random.Random(index).randbytes(size) for index, size in enumerate(SIZES)]


def manifest_of(content: Sequence[bytes], chunk: int) -> Manifest:
    return Manifest(
        architecture="LlamaForCausalLM",
        config={},
        chunk_bytes=chunk,
        blocks=tuple(
            BlockSpec(
                index=index,
                first_unit=index,
                last_unit=index,
                nbytes=len(block),
                tensors=(),
                digests=tuple(
                    digest(block[start : start + chunk]) for start in range(0, len(block), chunk)
                ),
            )
            for index, block in enumerate(content)
        ),
    )


MANIFEST = manifest_of(CONTENT, CHUNK)


ALL = range(len(SIZES))


class Node:
    def __init__(
        self,
        name: str,
        rate: int = 0,
        *,
        host: str = "127.0.0.1",
        content: Sequence[bytes] = CONTENT,
        chunk: int = CHUNK,
        read_bytes: int = CHUNK,
    ) -> None:
        self.id = NodeId(name)
        self.right = content
        self.manifest = manifest_of(content, chunk)
        self.transport = TcpTransport(
            host,
            0,
            link_bytes_per_s=rate,
            listener=Hears(lost=lambda address, _: self._lost(address)),
        )
        self.lost: list[str] = []
        """Peers' addresses."""
        self.arrivals: list[Arrival] = []
        self.failures: list[PullFailure] = []
        self.changed = asyncio.Event()
        self.mover = Mover(
            self.transport,
            on_arrived=self._arrived,
            on_failed=self._failed,
            read_bytes=read_bytes,
        )
        self.arena = Arena(ModelSpace.size(self.manifest))
        self.span = self.arena.allocate(ModelSpace.size(self.manifest))
        self.space = ModelSpace(self.manifest, self.span)

    def _arrived(self, arrival: Arrival) -> None:
        self.arrivals.append(arrival)
        self.changed.set()

    def _failed(self, failure: PullFailure) -> None:
        self.failures.append(failure)
        self.changed.set()

    def _lost(self, address: str) -> None:
        self.lost.append(address)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def complete(self) -> None:
        await self.until(lambda: len({a.block for a in self.arrivals}) == len(self.right))

    def hold(self, blocks: Sequence[int]) -> None:
        """Hosts the model with these blocks' bytes in place."""
        for index in blocks:
            self.space.block(index)[:] = self.right[index]
        self.mover.host(MODEL, self.manifest, self.space, blocks)

    def pull(
        self, sources: "Sequence[Node]", *pulls: tuple[int, int, "Node"], revision: int = 1
    ) -> None:
        self.mover.apply(
            MODEL,
            PlanId(EVENT, revision),
            [Pull(step, block, source.id) for step, block, source in pulls],
            {source.id: source.transport.address for source in sources},
        )

    def content(self) -> list[bytes]:
        return [bytes(self.space.block(index)) for index in range(len(self.right))]


class Nodes:
    def __init__(self) -> None:
        self.running: dict[NodeId, AsyncExitStack] = {}

    async def start(self, name: str, rate: int = 0, *, read_bytes: int = CHUNK) -> Node:
        node = Node(name, rate, read_bytes=read_bytes)
        stack = AsyncExitStack()
        await stack.enter_async_context(node.transport)
        stack.push_async_callback(node.mover.close)
        self.running[node.id] = stack
        return node

    async def kill(self, node: Node) -> None:
        """Its connections break; no mover is closed in good order."""
        await node.transport.__aexit__(None, None, None)
        self.running.pop(node.id).pop_all()


async def probe(reader: Node, source: Node, block: int, nbytes: int) -> bytes:
    """The first bytes of a block, once the source shows them."""
    into = bytearray(nbytes)
    async with asyncio.timeout(10):
        await reader.transport.read(
            source.transport.address, f"{MODEL}/{block}", 0, memoryview(into), priority=0
        )
    return bytes(into)


class Lingering(MemoryTransport):
    """Its reads, once cancelled, have the buffer until they are let go: as with RDMA."""

    asked: asyncio.Queue[str]
    let_go: asyncio.Event

    async def read(
        self,
        address: str,
        region: str,
        offset: int,
        into: memoryview,
        *,
        priority: int,
        received: OnReceived | None = None,
        permit: Permit | None = None,
    ) -> ReadResult:
        self.asked.put_nowait(address)
        try:
            return await super().read(
                address, region, offset, into, priority=priority, received=received, permit=permit
            )
        except asyncio.CancelledError:
            await self.let_go.wait()
            raise


@asynccontextmanager
async def changing_sources() -> AsyncIterator[tuple[Lingering, Mover, ModelSpace]]:
    """Block 1 was being read from one source (the node itself, which never has it); a second
    revision names another, and the first one's reads linger."""
    transport = Lingering(
        MemoryNetwork(),
        "memory://t",
        link_bytes_per_s=0,
        listener=NoListener(),
    )
    transport.asked, transport.let_go = asyncio.Queue(), asyncio.Event()
    nbytes = ModelSpace.size(MANIFEST)
    space = ModelSpace(MANIFEST, Arena(nbytes).allocate(nbytes))
    mover = Mover(transport, on_arrived=lambda _: None, on_failed=lambda _: None, read_bytes=CHUNK)
    one, other = NodeId("one"), NodeId("other")
    addresses = {one: "memory://t", other: "memory://u"}
    async with transport, asyncio.timeout(10):
        mover.host(MODEL, MANIFEST, space, [])
        mover.apply(MODEL, PlanId(EVENT, 1), [Pull(1, 1, one)], addresses)
        for _ in range(FIRST_WINDOW):
            assert await transport.asked.get() == "memory://t"
        mover.apply(MODEL, PlanId(EVENT, 2), [Pull(1, 1, other)], addresses)
        for _ in range(50):
            await asyncio.sleep(0)
        assert transport.asked.empty()
        yield transport, mover, space
        await mover.close()
