"""The ids of gateways: each holds its own, whatever happens to it or to the store."""

import asyncio

import pytest

from services.gateway import lease as lease_module
from services.gateway.lease import GatewayLease
from services.gateway.service import GatewayService
from shared import subjects, telemetry
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.config import GatewayConfig
from shared.errors import BusTimeout
from tests.unit.gateway.reader import Reader
from tests.unit.gateway.support import ids_of, replica, running

TEXT = "a text that outlives the id of its gateway"
LOG = telemetry.logger("test")


async def leases(count: int) -> list[GatewayLease]:
    bus = await MemoryBus(MemoryBroker()).__aenter__()
    bucket = await bus.kv(subjects.KV_GATEWAYS)
    return [GatewayLease(bucket, "gateway", LOG) for _ in range(count)]


def number(lease: GatewayLease) -> str:
    return lease.id.rsplit("-", 1)[0]


async def test_gateways_that_start_at_once_take_different_numbers() -> None:
    found = await leases(5)
    await asyncio.gather(*(lease.take() for lease in found))
    assert {number(lease) for lease in found} == {f"gateway-{n}" for n in range(1, 6)}


async def test_a_number_is_taken_again_but_never_an_id() -> None:
    first, second = await leases(2)
    await first.take()
    await first.release()
    await second.take()
    assert number(first) == number(second)
    assert first.id != second.id


async def test_a_write_that_nobody_acknowledged_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    (lease,) = await leases(1)
    bucket = lease._bucket
    create = bucket.create

    async def unacknowledged(key: str, value: bytes, *, ttl: float | None = None) -> int:
        await create(key, value, ttl=ttl)
        raise BusTimeout("the answer is lost")

    monkeypatch.setattr(bucket, "create", unacknowledged)
    with pytest.raises(BusTimeout):
        await lease.take()
    await lease.take()
    (entry,) = await bucket.entries()
    assert lease.id == f"{entry.key}-{entry.revision}"


async def test_a_gateway_that_lost_its_lease_goes_on_under_another_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a pause: its lease has expired, and a gateway that started meanwhile has its
    number."""
    monkeypatch.setattr(lease_module, "RENEW_S", 0.01)
    async with running(replica(1)) as cluster, asyncio.TaskGroup() as group:
        node = cluster.nodes[1]
        node.script, node.pause_at = (lambda submit: ids_of(TEXT)), 10
        reader = Reader(cluster)
        reading = group.create_task(reader.read())
        await reader.until(10)
        before = cluster.service.id
        bucket = await cluster.bus.kv(subjects.KV_GATEWAYS)
        await bucket.put(before.rsplit("-", 1)[0], b"another gateway")
        await node.submitted(2)
        node.resume.set()
        assert await reading == TEXT
        assert [submit.gateway for submit in node.submits] == [before, cluster.service.id]
        assert {cancel.request for cancel in node.cancels} <= {node.submits[0].request}
        late = node.submits[0]
        seen = len(node.cancels)
        await node.send(late, *(token for token in node.sent if token.attempt == 1))
        async with GatewayService(cluster.bus, GatewayConfig(port=0)) as other:
            assert other.id not in (before, cluster.service.id)
        assert len(node.cancels) == seen, "nobody answers under the old id"


async def test_a_lease_that_expired_while_the_store_was_away_is_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing that runs is disturbed if NATS was down for longer than a lease lasts."""
    monkeypatch.setattr(lease_module, "RENEW_S", 0.01)
    async with running(replica(1)) as cluster:
        before = cluster.service.id
        bucket = await cluster.bus.kv(subjects.KV_GATEWAYS)
        await bucket.delete(before.rsplit("-", 1)[0])
        async for change in bucket.watch():
            if change is not None:
                break
        assert cluster.service.id == before
