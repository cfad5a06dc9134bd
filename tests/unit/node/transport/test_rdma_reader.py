"""How takes become READs, with an adapter that answers when the test says so."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from services.node.transport import rdma
from services.node.transport.direct import Place
from services.node.transport.rdma import READ_BYTES, RdmaReader
from shared.errors import PeerLost, TransportError

DEPTH = 3
LOCAL = 1_000_000
PLACE = Place(7, 5_000_000)


@dataclass
class Read:
    name: int
    local: int
    nbytes: int
    remote: int


@dataclass(frozen=True)
class Target:
    lkey: int
    address: int
    landing: "Landing | None"


class Landing:
    """A device's landing, from where bytes take as long to come down as the test says."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        """Bytes of each part."""
        self.may_end = asyncio.Event()
        self.error: TransportError | None = None

    async def land(self, into: memoryview) -> None:
        self.asked.append(len(into))
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        into[:] = b"l" * len(into)


class Adapter:
    """The device and the connection's end in one."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)
        self.max_message = READ_BYTES
        self.landing: Landing | None = None
        self.reads: list[Read] = []
        """All that were begun."""
        self.closed = False
        self._ended: list[tuple[int, str]] = []

    def target(self, buffer: memoryview) -> Target:
        return Target(9, LOCAL, self.landing)

    def read(self, name: int, local: int, lkey: int, nbytes: int, remote: int, rkey: int) -> None:
        assert (lkey, rkey) == (9, PLACE.key)
        self.reads.append(Read(name, local, nbytes, remote))

    def completed(self) -> list[tuple[int, str]]:
        os.eventfd_read(self.descriptor)
        ended, self._ended = self._ended, []
        return ended

    async def end(self, read: Read, outcome: str = "done") -> None:
        self._ended.append((read.name, outcome))
        os.eventfd_write(self.descriptor, 1)
        await settle()

    def close(self) -> None:
        self.closed = True


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def adapter() -> Iterator[Adapter]:
    adapter = Adapter()
    yield adapter
    os.close(adapter.descriptor)


def connect(adapter: Adapter) -> RdmaReader:
    end: Any = adapter
    return RdmaReader(set(), end, end, "peer", DEPTH)


async def begin(
    reader: RdmaReader, nbytes: int, into: bytearray | None = None
) -> asyncio.Future[None]:
    room = memoryview(bytearray(nbytes) if into is None else into)
    take = asyncio.ensure_future(reader.take(PLACE, room))
    await settle()
    return take


async def test_reads_are_no_longer_than_the_port_allows(adapter: Adapter) -> None:
    adapter.max_message = 1000
    take = await begin(connect(adapter), 2500)
    assert [(r.local, r.remote, r.nbytes) for r in adapter.reads] == [
        (LOCAL + at, PLACE.address + at, nbytes)
        for at, nbytes in ((0, 1000), (1000, 1000), (2000, 500))
    ]
    for read in list(adapter.reads):
        assert not take.done()
        await adapter.end(read)
    await take


async def test_takes_have_the_queue_in_turn(adapter: Adapter) -> None:
    reader = connect(adapter)
    long = await begin(reader, 5 * READ_BYTES)
    short = await begin(reader, 1)
    assert len(adapter.reads) == DEPTH
    await adapter.end(adapter.reads[0])
    await adapter.end(adapter.reads[1])
    assert [read.nbytes for read in adapter.reads[DEPTH:]] == [READ_BYTES, 1]
    await adapter.end(adapter.reads[DEPTH + 1])
    await short
    assert not long.done()
    reader.close()
    assert adapter.closed
    with pytest.raises(PeerLost, match="this end was closed"):
        await long


@pytest.mark.parametrize("outcome", ["unanswered", "broken"])
async def test_a_lone_read_that_fails(adapter: Adapter, outcome: str) -> None:
    reader = connect(adapter)
    take = await begin(reader, 1)
    await adapter.end(adapter.reads[0], outcome)
    with pytest.raises(PeerLost):
        await take
    assert adapter.closed
    with pytest.raises(PeerLost):
        await reader.take(PLACE, memoryview(bytearray(1)))
    assert len(adapter.reads) == 1


async def test_only_the_refused_take_is_told_so(adapter: Adapter) -> None:
    reader = connect(adapter)
    refused, other, waiting = [await begin(reader, 2 * READ_BYTES) for _ in range(3)]
    await adapter.end(adapter.reads[0], "refused")
    with pytest.raises(TransportError, match="no such memory") as raised:
        await refused
    assert not isinstance(raised.value, PeerLost)
    for take in (other, waiting):
        with pytest.raises(PeerLost):
            await take


async def test_a_cancelled_take_ends_with_its_reads(adapter: Adapter) -> None:
    take = await begin(connect(adapter), 5 * READ_BYTES)
    take.cancel()
    await settle()
    take.cancel()
    for read in list(adapter.reads):
        await settle()
        assert not take.done()
        await adapter.end(read)
    with pytest.raises(asyncio.CancelledError):
        await take
    assert len(adapter.reads) == DEPTH
    assert not adapter.closed


async def test_reads_that_never_end_cost_the_connection(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma, "DRAIN_S", 0.01)
    reader = connect(adapter)
    take, other = await begin(reader, 1), await begin(reader, 1)
    take.cancel()
    with pytest.raises(asyncio.CancelledError):
        await take
    assert adapter.closed
    with pytest.raises(PeerLost, match="did not end"):
        await other


async def test_what_came_to_a_device_is_taken_when_it_has_landed(adapter: Adapter) -> None:
    landing = adapter.landing = Landing()
    into = bytearray(2 * READ_BYTES)
    take = await begin(connect(adapter), len(into), into)
    await adapter.end(adapter.reads[0])
    assert landing.asked == []
    await adapter.end(adapter.reads[1])
    assert landing.asked == [len(into)]
    assert not take.done()
    landing.may_end.set()
    await take
    assert into == b"l" * len(into)


async def test_a_device_that_fails_fails_its_take_only(adapter: Adapter) -> None:
    landing = adapter.landing = Landing()
    landing.error = TransportError("device memory: gone")
    landing.may_end.set()
    reader = connect(adapter)
    failed = await begin(reader, 1)
    await adapter.end(adapter.reads[0])
    with pytest.raises(TransportError, match="gone"):
        await failed
    assert not adapter.closed


async def test_reads_that_fail_do_not_land(adapter: Adapter) -> None:
    landing = adapter.landing = Landing()
    take = await begin(connect(adapter), 1)
    await adapter.end(adapter.reads[0], "broken")
    with pytest.raises(PeerLost):
        await take
    assert landing.asked == []
