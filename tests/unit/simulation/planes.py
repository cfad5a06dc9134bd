"""Data planes on a modelled network, and a model to move."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from services.node.checkpoints.packing import digest
from services.node.memory.arena import Arena, ModelSpace
from services.node.moving.events import Arrival, PullFailure
from shared.errors import TransportError
from shared.ids import ModelId
from shared.layout import BlockSpec, Manifest
from simulation.data_plane import ModelledDataPlane
from simulation.network import Network
from simulation.transport import Ends
from tests.support.listeners import PlaneHears

MODEL = ModelId("m")
CHUNK = 1024
BLOCK = 4 * CHUNK
RATE = 4096.0
"""Bytes/s: a block takes a second."""


def content(block: int) -> bytes:
    return bytes((block + index) % 251 for index in range(BLOCK))


def manifest(blocks: int) -> Manifest:
    return Manifest(
        architecture="x",
        config={},
        chunk_bytes=CHUNK,
        blocks=tuple(
            BlockSpec(
                index,
                index,
                index,
                BLOCK,
                (),
                tuple(digest(content(index)[at : at + CHUNK]) for at in range(0, BLOCK, CHUNK)),
            )
            for index in range(blocks)
        ),
    )


class Plane(ModelledDataPlane):
    """Notes what it is told; hosts the model."""

    def __init__(self, ends: Ends, node: str, shape: Manifest) -> None:
        super().__init__(
            ends,
            node,
            PlaneHears(
                lambda sender, header, payload: self.messages.append(
                    (sender, bytes(header) + bytes(payload))
                ),
                self._note_loss,
                self._note,
                self._note_failure,
            ),
        )
        self.messages: list[tuple[str, bytes]] = []
        self.lost: list[tuple[str, TransportError]] = []
        self.last_words: list[bytes] = []
        """Sent to a peer that is lost, one each time."""
        self.arrived: list[Arrival] = []
        self.failed: list[PullFailure] = []
        self.shape = shape
        self._changed = asyncio.Event()
        size = ModelSpace.size(shape)
        self.space = ModelSpace(shape, Arena(size).allocate(size))

    def _note(self, arrival: Arrival) -> None:
        self.arrived.append(arrival)
        self._changed.set()

    def _note_loss(self, address: str, error: TransportError) -> None:
        self.lost.append((address, error))
        if self.last_words:
            self.send(address, self.last_words.pop(0), [])

    def _note_failure(self, failure: PullFailure) -> None:
        self.failed.append(failure)

    async def hold_all(self) -> None:
        for block in range(len(self.shape.blocks)):
            self.space.block(block)[:] = content(block)
            await self.mark_held(MODEL, block)

    async def until_arrived(self, count: int) -> None:
        while len(self.arrived) < count:
            self._changed.clear()
            await self._changed.wait()

    @property
    def whole(self) -> bool:
        return all(
            bytes(self.space.block(block)) == content(block)
            for block in range(len(self.shape.blocks))
        )


@asynccontextmanager
async def planes(
    count: int,
    blocks: int,
    *,
    latency_s: float = 0.0,
    unit: int = 1,
    rate: float = RATE,
) -> AsyncIterator[tuple[Network, list[Plane]]]:
    """Nodes n0, n1, ... that host the model and hold nothing of it."""
    network = Network(latency_s=latency_s)
    ends = Ends(network, unit=unit)
    shape = manifest(blocks)
    async with AsyncExitStack() as stack:
        up = []
        for index in range(count):
            network.add(f"n{index}", out=rate, into=rate)
            plane = await stack.enter_async_context(Plane(ends, f"n{index}", shape))
            await plane.host(MODEL, shape, plane.space)
            up.append(plane)
        yield network, up
