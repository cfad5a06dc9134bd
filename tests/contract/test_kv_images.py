"""Copies of KV between two nodes over every transport: what arrives, how, and what is left."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from services.node.core.kv import Image
from services.node.memory.checksum import CHECKSUM_BYTES
from services.node.moving import kv_images
from services.node.moving.kv_images import DEVICE_REGION, KV_REGION, KvImages
from shared.errors import NotFound, RegionUnknown
from tests.support.transports import KINDS, KV_ROOM, MIB, SILENCE_S, Cluster, End, clusters


@pytest.fixture(params=KINDS)
async def cluster(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    async with clusters(request.param, monkeypatch) as cluster:
        yield cluster


class Pages:
    def __init__(self, content: bytes = b"", nbytes: int = 0) -> None:
        self.nbytes = nbytes or len(content)
        self.content = content
        self.gone = False

    def read(self, image: Image) -> None:
        if self.gone:
            raise NotFound("the model was closed")
        memoryview(_host(image))[:] = self.content

    def fill(self, image: Image) -> None:
        if self.gone:
            raise NotFound("the model was closed")
        self.content = bytes(_host(image))


def _host(image: Image) -> Any:
    """What lies on a device is host memory here, too."""
    return image.numpy() if isinstance(image, torch.Tensor) else image


class Node:
    """KvImages over a transport, and what has carried KV to it."""

    def __init__(self, end: End) -> None:
        self.end = end
        self.ways: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()
        transport = end.transport
        read = transport.read

        async def watched(*args: Any, **more: Any) -> Any:
            result = await read(*args, **more)
            self.ways.append(result.way)
            return result

        transport.read = watched  # type: ignore[method-assign]
        self.copied: list[int] = []
        self.images = KvImages(transport, end.kv_room, self._spawn, self._note, end.kv_twins)

    def _note(self, nbytes: int, seconds: float) -> None:
        assert seconds > 0
        self.copied.append(nbytes)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def lending(
        self, pages: Pages, *, on_device: bool = False
    ) -> "asyncio.Future[tuple[str, bytes]]":
        told: asyncio.Future[tuple[str, bytes]] = asyncio.get_running_loop().create_future()
        self.images.lend(pages, lambda *what: told.set_result(what), on_device=on_device)
        return told

    async def lend(self, pages: Pages, *, on_device: bool = False) -> tuple[str, bytes]:
        return await asyncio.wait_for(self.lending(pages, on_device=on_device), SILENCE_S)

    async def bring(self, source: "Node", region: str, digest: bytes, pages: Pages) -> bool:
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.images.bring(source.end.address, region, digest, pages, told.set_result)
        return await asyncio.wait_for(told, SILENCE_S)

    async def has(self, source: "Node", region: str) -> bool:
        into = memoryview(bytearray(1))
        try:
            await self.end.transport.read(source.end.address, region, 0, into, priority=0)
        except RegionUnknown:
            return False
        return True


async def two(cluster: Cluster) -> tuple[Node, Node]:
    return Node(await cluster.start()), Node(await cluster.start())


KV = bytes(range(256)) * 1000


async def test_pages_arrive_by_the_best_way_and_the_copy_goes(cluster: Cluster) -> None:
    source, target = await two(cluster)
    region, digest = await source.lend(Pages(KV))
    pages = Pages(nbytes=len(KV))
    assert await target.bring(source, region, digest, pages)
    assert pages.content == KV
    assert target.ways == [target.end.way]
    assert source.copied == target.copied == [len(KV)]
    source.images.end(region)
    await asyncio.gather(*source.tasks)
    assert not await target.has(source, region)
    source.images.end(region)


@pytest.fixture
async def on_devices(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    async with clusters("cuda-ipc", monkeypatch) as cluster:
        yield cluster


def copies(cluster: Cluster) -> list[list[tuple[str, int]]]:
    """What the driver of each node has copied."""
    return [driver.copied for driver in cluster.machine.drivers]


async def test_from_device_to_device_nothing_comes_to_the_hosts(on_devices: Cluster) -> None:
    source, target = await two(on_devices)
    region, digest = await source.lend(Pages(KV), on_device=True)
    assert region.startswith(DEVICE_REGION)
    assert len(digest) == CHECKSUM_BYTES
    pages = Pages(nbytes=len(KV))
    assert await target.bring(source, region, digest, pages)
    assert pages.content == KV
    assert copies(on_devices) == [[], [("device", len(KV))]]
    assert source.copied == target.copied == [len(KV)]
    for twins in (source.end.kv_twins, target.end.kv_twins):
        assert twins is not None
        assert not any(any(memory.view) for memory in twins.room.memories)
    source.images.end(region)
    await asyncio.gather(*source.tasks)
    assert not await target.has(source, region)


async def test_wrong_bytes_on_a_device_are_not_taken(on_devices: Cluster) -> None:
    source, target = await two(on_devices)
    region, digest = await source.lend(Pages(KV), on_device=True)
    other, _ = await source.lend(Pages(KV[::-1]), on_device=True)
    pages = Pages(nbytes=len(KV))
    assert not await target.bring(source, other, digest, pages)
    assert pages.content == b""
    assert await target.bring(source, region, digest, pages)


async def test_a_place_on_the_device_is_used_again(on_devices: Cluster) -> None:
    """And what lay there before does not count as lent any more."""
    source, target = await two(on_devices)
    assert source.end.kv_twins is not None
    landing = source.end.kv_twins.device.landing
    assert landing is not None
    memory = source.end.kv_twins.room.going.memory.view
    for content in (KV, KV[::-1]):
        region, digest = await source.lend(Pages(content), on_device=True)
        assert landing.holds(memory[: len(KV)])
        pages = Pages(nbytes=len(KV))
        assert await target.bring(source, region, digest, pages)
        assert pages.content == content
        source.images.end(region)
        await asyncio.gather(*source.tasks)
        assert not landing.holds(memory[: len(KV)])


async def test_who_reads_a_copy_on_the_device_by_another_way_finds_zeros(
    on_devices: Cluster,
) -> None:
    """Not what was lent from the host's memory before."""
    source, target = await two(on_devices)
    region, _ = await source.lend(Pages(KV))
    source.images.end(region)
    await asyncio.gather(*source.tasks)
    region, _ = await source.lend(Pages(KV), on_device=True)
    into = memoryview(bytearray(len(KV)))  # which no direct way reaches
    await target.end.transport.read(source.end.address, region, 0, into, priority=0)
    assert not any(into)


async def test_a_node_that_does_not_reach_the_device_takes_nothing_from_there(
    on_devices: Cluster,
) -> None:
    source = Node(await on_devices.start())
    on_devices.machine.peers = False
    target = Node(await on_devices.start())
    region, digest = await source.lend(Pages(KV), on_device=True)
    pages = Pages(nbytes=len(KV))
    with capture_logs() as logs:
        assert not await target.bring(source, region, digest, pages)
        target.images = KvImages(target.end.transport, target.end.kv_room, target._spawn)
        assert not await target.bring(source, region, digest, pages)
    assert pages.content == b""
    told = [line["error"] for line in logs if line["event"] == "KV did not come"]
    assert told == ["it lies on the peer's device: shm does not read it"] * 2


async def test_a_node_without_a_device_lends_from_the_hosts_memory(cluster: Cluster) -> None:
    source, target = await two(cluster)
    if source.end.kv_twins is not None:
        pytest.skip("it has one")
    region, digest = await source.lend(Pages(KV), on_device=True)
    pages = Pages(nbytes=len(KV))
    assert await target.bring(source, region, digest, pages)
    assert pages.content == KV


async def test_wrong_bytes_are_not_taken(cluster: Cluster) -> None:
    source, target = await two(cluster)
    region, _ = await source.lend(Pages(KV))
    pages = Pages(nbytes=len(KV))
    assert not await target.bring(source, region, b"another digest", pages)
    assert pages.content == b""
    assert target.copied == []


async def test_a_region_that_is_unknown_or_shorter_is_no_kv(cluster: Cluster) -> None:
    source, target = await two(cluster)
    assert not await target.bring(source, "kv/unknown", b"", Pages(nbytes=10))
    region, digest = await source.lend(Pages(KV))
    assert not await target.bring(source, region, digest, Pages(nbytes=len(KV) + 1))


async def test_pages_that_are_gone_are_not_lent_and_not_filled(cluster: Cluster) -> None:
    source, target = await two(cluster)
    gone = Pages(KV)
    gone.gone = True
    assert await source.lend(gone) == ("", b"")
    region, digest = await source.lend(Pages(KV))
    assert not await target.bring(source, region, digest, gone)


async def test_what_finds_no_room_waits_for_what_was_lent_before(cluster: Cluster) -> None:
    source, target = await two(cluster)
    most = bytes(KV_ROOM // 2)
    first, _ = await source.lend(Pages(most))
    await source.lend(Pages(most))
    third, fourth = source.lending(Pages(KV)), source.lending(Pages(KV))
    await asyncio.sleep(0.05)
    assert not third.done()
    source.images.end(first)
    for later in (third, fourth):
        region, digest = await asyncio.wait_for(later, SILENCE_S)
        assert await target.bring(source, region, digest, Pages(nbytes=len(KV)))


async def test_more_than_there_is_room_for_is_not_lent(cluster: Cluster) -> None:
    source, target = await two(cluster)
    assert await source.lend(Pages(bytes(KV_ROOM + 1))) == ("", b"")
    region, digest = await source.lend(Pages(KV))
    assert not await target.bring(source, region, digest, Pages(nbytes=KV_ROOM + 1))
    for _ in range(2 * KV_ROOM // len(KV)):  # what has come takes no room any more
        source.images.end(region)
        region, digest = await source.lend(Pages(KV))
        assert await target.bring(source, region, digest, Pages(nbytes=len(KV)))


async def test_what_goes_and_what_comes_do_not_wait_for_each_other(cluster: Cluster) -> None:
    one, other = await two(cluster)
    whole = bytes(KV_ROOM)
    lent = [await each.lend(Pages(whole)) for each in (one, other)]
    pages = Pages(nbytes=KV_ROOM), Pages(nbytes=KV_ROOM)
    assert await one.bring(other, *lent[1], pages[0])
    assert await other.bring(one, *lent[0], pages[1])
    assert all(each.content == whole for each in pages)


async def test_a_copy_that_nobody_fetches_goes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await two(cluster)
    monkeypatch.setattr(kv_images, "LENT_S", 0.01)
    region, _ = await source.lend(Pages(KV))
    await asyncio.sleep(0.05)
    await asyncio.gather(*source.tasks)
    assert not await target.has(source, region)


async def test_kv_shares_the_port_with_blocks(cluster: Cluster) -> None:
    """A long read of weights is under way on a paced link: KV comes before it has ended."""
    if cluster.kind == "modelled":
        pytest.skip("what is modelled lands all at once")
    nbytes = 16 * MIB
    source = Node(await cluster.start(rate=20_000_000, nbytes=nbytes))
    target = Node(await cluster.start(nbytes=nbytes))
    weights = source.end.room(nbytes)
    source.end.transport.register("w", weights, ready=nbytes, flow="model")
    into = target.end.room(nbytes)
    address = source.end.address
    read = asyncio.ensure_future(target.end.transport.read(address, "w", 0, into, priority=0))
    region, digest = await source.lend(Pages(KV))
    assert region.startswith(KV_REGION)
    assert await target.bring(source, region, digest, Pages(nbytes=len(KV)))
    assert not read.done()
    read.cancel()
    await asyncio.wait([read])
