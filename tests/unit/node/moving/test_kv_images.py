"""Copies of KV between two nodes over TCP: what arrives, what does not, and what is left."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest

from services.node.moving import kv_images
from services.node.moving.kv_images import KvImages
from services.node.transport.base import NoListener
from services.node.transport.tcp import TcpTransport
from shared.errors import NotFound, RegionUnknown

WAIT_S = 20.0


class Pages:
    def __init__(self, content: bytes = b"", nbytes: int = 0) -> None:
        self.nbytes = nbytes or len(content)
        self.content = content
        self.gone = False

    def read(self, image: memoryview) -> None:
        if self.gone:
            raise NotFound("the model was closed")
        image[:] = self.content

    def fill(self, image: memoryview) -> None:
        if self.gone:
            raise NotFound("the model was closed")
        self.content = bytes(image)


class End:
    def __init__(self, transport: TcpTransport) -> None:
        self.transport = transport
        self.tasks: set[asyncio.Task[None]] = set()
        self.images = KvImages(transport, self._spawn)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def lend(self, pages: Pages) -> tuple[str, bytes]:
        told: asyncio.Future[tuple[str, bytes]] = asyncio.get_running_loop().create_future()
        self.images.lend(pages, lambda *what: told.set_result(what))
        return await asyncio.wait_for(told, WAIT_S)

    async def bring(self, source: "End", region: str, digest: bytes, pages: Pages) -> bool:
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.images.bring(source.transport.address, region, digest, pages, told.set_result)
        return await asyncio.wait_for(told, WAIT_S)

    async def has(self, region: str) -> bool:
        into = memoryview(bytearray(1))
        try:
            await self.transport.read(self.transport.address, region, 0, into, priority=0)
        except RegionUnknown:
            return False
        return True


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    async with AsyncExitStack() as stack:
        transports = [
            await stack.enter_async_context(
                TcpTransport("127.0.0.1", 0, link_bytes_per_s=0, listener=NoListener())
            )
            for _ in range(2)
        ]
        yield End(transports[0]), End(transports[1])


KV = bytes(range(256)) * 1000


async def test_pages_arrive_and_the_copy_goes(ends: tuple[End, End]) -> None:
    source, target = ends
    region, digest = await source.lend(Pages(KV))
    pages = Pages(nbytes=len(KV))
    assert await target.bring(source, region, digest, pages)
    assert pages.content == KV
    source.images.end(region)
    await asyncio.gather(*source.tasks)
    assert not await source.has(region)
    source.images.end(region)


async def test_wrong_bytes_are_not_taken(ends: tuple[End, End]) -> None:
    source, target = ends
    region, _ = await source.lend(Pages(KV))
    pages = Pages(nbytes=len(KV))
    assert not await target.bring(source, region, b"another digest", pages)
    assert pages.content == b""


async def test_a_region_that_is_unknown_or_shorter_is_no_kv(ends: tuple[End, End]) -> None:
    source, target = ends
    assert not await target.bring(source, "kv/unknown", b"", Pages(nbytes=10))
    region, digest = await source.lend(Pages(KV))
    assert not await target.bring(source, region, digest, Pages(nbytes=len(KV) + 1))


async def test_pages_that_are_gone_are_not_lent_and_not_filled(ends: tuple[End, End]) -> None:
    source, target = ends
    gone = Pages(KV)
    gone.gone = True
    assert await source.lend(gone) == ("", b"")
    region, digest = await source.lend(Pages(KV))
    assert not await target.bring(source, region, digest, gone)


async def test_what_is_lent_at_a_time_has_a_limit(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = ends
    monkeypatch.setattr(kv_images, "MOST_BYTES", 2 * len(KV))
    first, _ = await source.lend(Pages(KV))
    await source.lend(Pages(KV))
    assert await source.lend(Pages(KV)) == ("", b"")
    source.images.end(first)
    await asyncio.gather(*source.tasks)
    third, _ = await source.lend(Pages(KV))
    assert await source.has(third)


async def test_what_comes_at_a_time_has_the_same_limit(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = ends
    region, digest = await source.lend(Pages(KV))
    monkeypatch.setattr(kv_images, "MOST_BYTES", len(KV) - 1)
    assert not await target.bring(source, region, digest, Pages(nbytes=len(KV)))
    monkeypatch.setattr(kv_images, "MOST_BYTES", len(KV))
    for _ in range(2):  # what has come counts no more
        assert await target.bring(source, region, digest, Pages(nbytes=len(KV)))


async def test_a_copy_that_nobody_fetches_goes(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = ends
    monkeypatch.setattr(kv_images, "LENT_S", 0.01)
    region, _ = await source.lend(Pages(KV))
    await asyncio.sleep(0.05)
    await asyncio.gather(*source.tasks)
    assert not await source.has(region)
