"""KV between modelled nodes: images in the unit of the network, over its links, with its faults.

The time of a copy in memory is left out.
"""

from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

from services.node.checkpoints.packing import digest
from services.node.core.kv import KvMover, KvPages
from services.node.moving.kv_images import KV_REGION
from services.node.transport.pacing import SERVING_FLOW
from shared.errors import TransportError
from simulation.transport import ModelledTransport


class ModelledKvMover(KvMover):
    def __init__(
        self,
        transport: ModelledTransport,
        unit: int,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._transport = transport
        self._unit = unit
        self._spawn = spawn
        self._numbers = count()
        self._lent: set[str] = set()

    def _image(self, pages: KvPages) -> memoryview:
        return memoryview(bytearray(-(-pages.nbytes // self._unit)))

    def lend(
        self, pages: KvPages, lent: Callable[[str, bytes], None], *, on_device: bool = False
    ) -> None:
        image, region = self._image(pages), f"{KV_REGION}{next(self._numbers)}"
        self._transport.register(region, image, ready=len(image), flow=SERVING_FLOW)
        self._lent.add(region)

        async def tell() -> None:
            lent(region, digest(image))

        self._spawn(tell())

    def bring(
        self,
        address: str,
        region: str,
        expected: bytes,
        pages: KvPages,
        brought: Callable[[bool], None],
    ) -> None:
        self._spawn(self._bring(address, region, expected, self._image(pages), brought))

    async def _bring(
        self,
        address: str,
        region: str,
        expected: bytes,
        image: memoryview,
        brought: Callable[[bool], None],
    ) -> None:
        try:
            await self._transport.read(address, region, 0, image, priority=0)
        except TransportError:
            brought(False)
        else:
            brought(digest(image) == expected)

    def end(self, region: str) -> None:
        if region in self._lent:
            self._lent.remove(region)
            self._spawn(self._transport.unregister(region))
