"""The lease on virtual time: renewals, expiry, and who may have a name."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from services.node.lease import Lease, next_generation
from shared import clock, subjects, telemetry
from shared.bus.base import KeyValue, KvEntry
from shared.bus.memory import MemoryBroker, MemoryBus, MemoryKeyValue
from shared.errors import BusTimeout, Conflict
from shared.ids import Generation, NodeId
from shared.messages.pool import NodeInfo
from simulation.loop import run

NODE = NodeId("n0")
LEASE_S = 2
INFO = NodeInfo(
    node=NODE,
    generation=Generation(1),
    address="tcp://127.0.0.1:7001",
    host="h",
    device="cpu",
    arena_bytes=1,
    link_bytes_per_s=0,
    slots=1,
)


class Bucket(MemoryKeyValue):
    """Fails as told: writes that are refused, or stored without the writer learning of it."""

    counters: KeyValue
    refuse = False
    drop_next_answer = False
    writes = 0

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl: float | None = None
    ) -> int:
        if self.refuse:
            raise BusTimeout("no leader")
        found = await super().update(key, value, revision, ttl=ttl)
        self.writes += 1
        if self.drop_next_answer:
            self.drop_next_answer = False
            raise BusTimeout("no answer")
        return found

    @property
    def entry(self) -> KvEntry | None:
        return self._bucket.live.get(NODE)

    @property
    def info(self) -> NodeInfo | None:
        entry = self.entry
        return None if entry is None else msgspec.msgpack.decode(entry.value, type=NodeInfo)


def lease(bucket: Bucket, info: NodeInfo = INFO) -> Lease:
    return Lease(bucket, bucket.counters, info, LEASE_S, telemetry.logger("test"))


def with_bucket(test: Callable[[Bucket], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        broker = MemoryBroker()
        async with MemoryBus(broker) as bus:
            bucket = Bucket(bus, broker.bucket(subjects.KV_LEASES))
            bucket.counters = await bus.kv(subjects.KV_COUNTERS)
            await test(bucket)

    run(work())


async def kept(held: Lease, seconds: float) -> None:
    """Renews for that long."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await held.keep()


def test_it_lives_as_long_as_it_is_renewed() -> None:
    async def test(bucket: Bucket) -> None:
        held = lease(bucket)
        await held.take()
        await kept(held, 10 * LEASE_S)
        assert bucket.info == INFO
        await asyncio.sleep(LEASE_S + 0.1)
        assert bucket.info is None

    with_bucket(test)


def test_one_that_expired_is_taken_again_under_the_same_generation() -> None:
    async def test(bucket: Bucket) -> None:
        held = lease(bucket)
        await held.take()
        bucket.refuse = True
        await kept(held, 2 * LEASE_S)
        assert bucket.info is None
        bucket.refuse = False
        await kept(held, LEASE_S)
        assert bucket.info == INFO

    with_bucket(test)


def test_a_renewal_without_an_answer_costs_nothing() -> None:
    async def test(bucket: Bucket) -> None:
        held = lease(bucket)
        await held.take()
        bucket.drop_next_answer = True
        await kept(held, 1.2 * LEASE_S / 4)
        assert bucket.writes == 1
        await kept(held, 1.2 * LEASE_S / 4)
        assert bucket.writes == 2  # at once, not one interval later
        await kept(held, 2 * LEASE_S)
        assert bucket.info == INFO

    with_bucket(test)


def test_the_lease_of_a_process_that_is_known_to_be_dead_is_taken_at_once() -> None:
    async def test(bucket: Bucket) -> None:
        await lease(bucket).take()
        mine = msgspec.structs.replace(INFO, generation=Generation(2))
        other = Lease(
            bucket, bucket.counters, mine, LEASE_S, telemetry.logger("test"),
            ended=frozenset({INFO.generation}),
        )  # fmt: skip
        before = asyncio.get_running_loop().time()
        await other.wait_until_free()
        await other.take()
        assert asyncio.get_running_loop().time() == before
        assert bucket.info == mine
        await kept(other, 2 * LEASE_S)
        with pytest.raises(Conflict):
            await Lease(
                bucket, bucket.counters, INFO, LEASE_S, telemetry.logger("test"),
                ended=frozenset({Generation(7)}),
            ).take()  # fmt: skip

    with_bucket(test)


def test_the_lease_of_a_dead_process_is_waited_out() -> None:
    async def test(bucket: Bucket) -> None:
        await lease(bucket).take()
        mine = msgspec.structs.replace(INFO, generation=Generation(2))
        late = lease(bucket, mine)
        await late.wait_until_free()
        await late.take()
        assert bucket.info == mine

    with_bucket(test)


def test_the_name_of_a_living_node_is_a_conflict() -> None:
    async def test(bucket: Bucket) -> None:
        held = lease(bucket)
        await held.take()
        keeping = asyncio.create_task(held.keep())
        with pytest.raises(Conflict, match="'n0' is in use by a running node; give this one"):
            await lease(bucket).wait_until_free()
        keeping.cancel()

    with_bucket(test)


def test_of_two_that_start_at_once_one_gets_the_name() -> None:
    async def test(bucket: Bucket) -> None:
        first, second = lease(bucket), lease(bucket)
        await asyncio.gather(first.wait_until_free(), second.wait_until_free())
        await first.take()
        with pytest.raises(Conflict):
            await second.take()

    with_bucket(test)


def test_a_process_that_slept_too_long_gives_way_and_leaves_the_others_lease_alone() -> None:
    async def test(bucket: Bucket) -> None:
        slept = lease(bucket)
        await slept.take()
        await asyncio.sleep(LEASE_S + 0.1)
        # As after a restart with a fixed port: everything but the generation is the same.
        theirs = msgspec.structs.replace(INFO, generation=Generation(2))
        await lease(bucket, theirs).take()
        with pytest.raises(Conflict):
            await slept.keep()
        await slept.give_back()
        assert bucket.info == theirs

    with_bucket(test)


def test_starting_over_says_a_newer_generation_at_once() -> None:
    async def test(bucket: Bucket) -> None:
        ahead = Generation(2**62)  # the counter was lost since
        held = lease(bucket, msgspec.structs.replace(INFO, generation=ahead))
        await held.take()
        bucket.drop_next_answer = True
        await held.start_over(ahead)
        assert held.info.generation > ahead
        assert bucket.info == held.info
        await kept(held, 2 * LEASE_S)
        assert bucket.info == held.info

    with_bucket(test)


def test_a_generation_that_is_told_twice_that_it_is_over_starts_over_once() -> None:
    async def test(bucket: Bucket) -> None:
        held = lease(bucket)
        await held.take()
        await asyncio.gather(held.start_over(INFO.generation), held.start_over(INFO.generation))
        first = held.info.generation
        assert first > INFO.generation
        await held.start_over(first)
        assert held.info.generation == first + 1

    with_bucket(test)


def test_a_process_takes_a_greater_generation_than_every_earlier_one_whatever_its_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(bucket: Bucket) -> None:
        today = clock.wall_ns()
        first = await next_generation(bucket.counters, NODE)
        with monkeypatch.context() as patch:
            patch.setattr(clock, "wall_source", lambda: today - 86_400 * 10**9)
            second = await next_generation(bucket.counters, NODE)
        assert today < first < second  # today: a process of an earlier release, before the upgrade

    with_bucket(test)


def test_what_was_given_back_stays_so() -> None:
    async def test(bucket: Bucket) -> None:
        held = lease(bucket)
        await held.take()
        keeping = asyncio.create_task(held.keep())
        await asyncio.sleep(LEASE_S / 4)  # a renewal is on its way
        await held.give_back()
        assert bucket.info is None
        await keeping
        await held.give_back()
        assert bucket.info is None

    with_bucket(test)
