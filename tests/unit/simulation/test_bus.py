"""The bus under faults, as a client of NATS sees them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, cast

import pytest

from shared.bus.base import KvEntry, KvOp, On
from shared.bus.memory import MemoryBus
from shared.clock import now
from shared.errors import BusError, BusTimeout, CutOff, NoResponders
from shared.ids import RequestId
from shared.messages import Message
from shared.messages.serving import Cancel
from simulation.bus import BUFFER_BYTES, CALL_TIMEOUT_S, DETECT_S, RECONNECT_S, SimBroker
from simulation.loop import run

LATENCY_S = 0.001


def numbered(number: int) -> Cancel:
    return Cancel(request=RequestId("r"), attempt=number)


class Heard:
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.times: list[float] = []

    async def __call__(self, message: Cancel) -> None:
        self.numbers.append(message.attempt)
        self.times.append(now())


async def echo(message: Message) -> Message:
    return message


class World:
    """Two buses: `far` listens to "news" and serves "service"."""

    def __init__(self, broker: SimBroker) -> None:
        self.broker = broker
        self.near, self.far = MemoryBus(broker, "near"), MemoryBus(broker, "far")
        self.heard = Heard()

    async def say(self, *numbers: int) -> None:
        for number in numbers:
            await self.near.publish("news", numbered(number))

    async def ask(self, timeout: float = 1.0) -> Message:
        return await self.near.request("service", numbered(0), Cancel, timeout=timeout)


@asynccontextmanager
async def worlds(broker: SimBroker | None = None) -> AsyncIterator[World]:
    world = World(broker or SimBroker(latency_s=LATENCY_S))
    async with world.near, world.far:
        await world.far.subscribe("news", On(Message, world.heard))
        await world.far.serve("service", Cancel, echo)
        yield world


def in_world(test: Callable[[World], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        async with worlds() as world:
            await test(world)

    def case() -> None:
        run(main())

    case.__doc__ = test.__doc__
    return case


@in_world
async def test_a_message_takes_the_latency(world: World) -> None:
    begun = now()
    await world.say(1)
    await world.ask()
    assert world.heard.times == [pytest.approx(begun + LATENCY_S)]
    assert now() == pytest.approx(begun + 2 * LATENCY_S)
    bucket = await world.near.kv("bucket")
    await bucket.put("key", b"value")
    assert now() == pytest.approx(begun + 3 * LATENCY_S)


@in_world
async def test_a_short_cut_only_delays(world: World) -> None:
    world.broker.cut("far")
    await world.say(1, 2)
    with pytest.raises(BusTimeout):
        await world.ask()
    await world.far.publish("news", numbered(3))
    assert world.heard.numbers == []
    await asyncio.sleep(DETECT_S / 2)
    world.broker.heal("far")
    await asyncio.sleep(1)
    assert world.heard.numbers == [1, 2, 3]
    await world.ask()


@in_world
async def test_a_long_cut_loses_what_was_on_its_way_and_keeps_what_is_said_later(
    world: World,
) -> None:
    other = Heard()
    await world.near.subscribe("shouts", On(Message, other))
    world.broker.cut("far")
    await world.say(1)
    await world.far.publish("shouts", numbered(2))
    await asyncio.sleep(DETECT_S)
    await world.say(3)
    await world.far.publish("shouts", numbered(4))
    with pytest.raises(BusTimeout):
        await world.ask()
    world.broker.heal("far")
    with pytest.raises(BusTimeout):
        await world.ask(RECONNECT_S / 2)
    await asyncio.sleep(RECONNECT_S)
    await world.say(5)
    await world.ask()
    assert world.heard.numbers == [5]
    assert other.numbers == [4]


@in_world
async def test_a_request_waits_for_the_connection(world: World) -> None:
    world.broker.fail()
    asyncio.get_running_loop().call_later(3, world.broker.recover)
    assert await world.ask(10) == numbered(0)
    assert now() == pytest.approx(3 + RECONNECT_S, abs=0.01)


@in_world
async def test_an_error_says_whether_whoever_asked_was_cut_off(world: World) -> None:
    async def timed_out(timeout: float) -> bool:
        with pytest.raises(BusTimeout) as raised:
            await world.ask(timeout)
        return isinstance(raised.value, CutOff)

    world.broker.cut("far")
    assert not await timed_out(DETECT_S + 1)
    assert world.near.is_up
    assert not world.far.is_up
    world.broker.cut("near")
    assert world.near.is_up
    assert not await timed_out(DETECT_S - 1)
    assert await timed_out(2)
    assert not world.near.is_up
    asyncio.get_running_loop().call_later(1, world.broker.heal, "near")
    assert await timed_out(2)
    assert world.near.is_up
    assert not await timed_out(2)


@in_world
async def test_one_that_timed_out_is_never_sent(world: World) -> None:
    served: list[Message] = []

    async def server(message: Message) -> Message:
        served.append(message)
        return message

    await world.far.serve("other", Cancel, server)
    world.broker.fail()
    with pytest.raises(BusTimeout):
        await world.near.request("other", numbered(0), Cancel, timeout=1)
    world.broker.recover()
    await asyncio.sleep(1)
    assert served == []


@in_world
async def test_a_call_ends_when_the_client_notices_that_its_connection_is_lost(
    world: World,
) -> None:
    bucket = await world.near.kv("bucket")
    world.broker.cut("near")
    begun = now()
    with pytest.raises(BusTimeout, match="the connection was lost"):
        await bucket.put("key", b"value")
    assert now() - begun == DETECT_S
    with pytest.raises(BusTimeout, match="no answer within"):  # this call waits for a connection
        await bucket.put("key", b"value")


@in_world
async def test_a_store_without_a_leader_does_nothing_and_messages_pass(world: World) -> None:
    bucket = await world.near.kv("bucket")
    world.broker.leaderless = True
    with pytest.raises(BusTimeout, match="no answer within"):
        await bucket.put("key", b"value")
    assert await world.ask() == numbered(0)
    world.broker.leaderless = False
    assert await bucket.get("key") is None


@in_world
async def test_an_outage_leaves_buckets_and_what_clients_keep(world: World) -> None:
    bucket = await world.near.kv("bucket")
    objects = await world.near.objects()
    name = await objects.put(b"blob")
    await bucket.create("lasting", b"1")
    await bucket.create("lease", b"2", ttl=2)
    world.broker.fail()
    await world.say(1)
    begun = now()
    with pytest.raises(BusTimeout, match="lasting"):
        await bucket.get("lasting")
    assert now() == begun + CALL_TIMEOUT_S
    world.broker.recover()
    await asyncio.sleep(1)
    assert world.heard.numbers == [1]
    assert [entry.key for entry in await bucket.entries()] == ["lasting"]
    assert await objects.get(name) == b"blob"


@in_world
async def test_what_a_client_keeps_is_limited(world: World) -> None:
    world.broker.fail()
    message = Cancel(request=RequestId("x" * (1 << 19)), attempt=0)
    for _ in range(BUFFER_BYTES // (1 << 19) - 1):  # an envelope is a little more than its text
        await world.near.publish("news", message)
    with pytest.raises(BusError, match="full"):
        await world.near.publish("news", message)


@in_world
async def test_a_watch_catches_up(world: World) -> None:
    mine, theirs = await world.near.kv("bucket"), await world.far.kv("bucket")
    for key in ("same", "changed", "gone"):
        await mine.put(key, b"before")
    async with aclosing(cast(Any, theirs.watch())) as watch:
        told: list[KvEntry | None] = [await anext(watch) for _ in range(4)]
        assert told[-1] is None
        world.broker.cut("far")
        await mine.put("changed", b"once")
        await mine.put("changed", b"twice")
        await mine.delete("gone")
        await mine.put("short", b"lived")
        await mine.delete("short")
        await asyncio.sleep(DETECT_S)
        world.broker.heal("far")
        changes = [await anext(watch) for _ in range(2)]
        assert [(c.key, c.value, c.op) for c in changes] == [
            ("gone", b"", KvOp.DELETE),
            ("changed", b"twice", KvOp.PUT),
        ]
        await mine.put("later", b"x")
        assert (await anext(watch)).key == "later"


@in_world
async def test_a_watch_may_begin_while_the_connection_is_down(world: World) -> None:
    bucket = await world.far.kv("bucket")
    await bucket.put("key", b"value")
    world.broker.fail()
    asyncio.get_running_loop().call_later(12, world.broker.recover)
    async with aclosing(cast(Any, bucket.watch())) as watch:
        assert (await anext(watch)).key == "key"
        assert await anext(watch) is None
    assert now() > 12


@in_world
async def test_a_stopped_process_goes_on_as_if_nothing_had_been(world: World) -> None:
    world.broker.stop("far")
    await world.say(1)
    await world.far.publish("news", numbered(2))
    asking = asyncio.ensure_future(world.ask(100))
    await asyncio.sleep(60)
    assert not asking.done()
    assert world.heard.numbers == []
    world.broker.resume("far")
    await asking
    await asyncio.sleep(1)
    assert world.heard.numbers == [1, 2]


@in_world
async def test_a_dead_process_is_gone_and_cannot_be_heard(world: World) -> None:
    leases = await world.far.kv("leases")
    await leases.put("far", b"here")
    ear = Heard()
    await world.near.subscribe("shouts", On(Message, ear))
    world.broker.crash("far")
    with pytest.raises(NoResponders):
        await world.ask()
    await world.far.publish("shouts", numbered(1))
    with pytest.raises(BusTimeout):
        await leases.delete("far")
    await world.far.__aexit__(None, None, None)
    async with MemoryBus(world.broker, "far") as again:
        await again.publish("shouts", numbered(2))
        entry = await (await again.kv("leases")).get("far")
        assert entry is not None
    await asyncio.sleep(1)
    assert ear.numbers == [2]


@in_world
async def test_calls_end_when_their_bus_closes(world: World) -> None:
    world.broker.cut("near")
    bucket = await world.near.kv("bucket")
    calls = [asyncio.ensure_future(call) for call in (bucket.put("key", b""), world.ask(100))]
    await asyncio.sleep(1)
    await world.near.__aexit__(None, None, None)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [BusError] * 2
    assert now() < CALL_TIMEOUT_S


def test_nobody_connects_to_a_broker_that_is_down() -> None:
    async def main() -> None:
        broker = SimBroker()
        broker.fail()
        with pytest.raises(BusError, match="late"):
            async with MemoryBus(broker, "late"):
                pass
        asyncio.get_running_loop().call_later(2, broker.recover)
        async with MemoryBus(broker, "late"), AsyncExitStack():
            assert now() == pytest.approx(7, abs=0.2)

    run(main())


async def numbers_heard(broker: SimBroker, count: int) -> list[int]:
    async with worlds(broker) as world:
        await world.say(*range(count))
        await asyncio.sleep(1)
        return world.heard.numbers


def test_loss_follows_from_the_seed() -> None:
    kept = [run(numbers_heard(SimBroker(loss=0.3, seed=seed), 1000)) for seed in (1, 1, 2)]
    assert kept[0] == kept[1] != kept[2]
    assert 600 < len(kept[0]) < 800


def test_answers_are_lost_too() -> None:
    async def main() -> None:
        async with worlds(SimBroker(loss=0.5, seed=3)) as world:
            outcomes = await asyncio.gather(
                *(world.ask() for _ in range(100)), return_exceptions=True
            )
            assert 10 < sum(isinstance(outcome, Cancel) for outcome in outcomes) < 40
            bucket = await world.near.kv("bucket")
            for _ in range(20):
                await bucket.put("key", b"")

    run(main())


def test_subjects_overtake_each_other_but_not_themselves() -> None:
    async def main() -> None:
        async with worlds(SimBroker(jitter_s=0.1, seed=1)) as world:
            log: list[tuple[str, int]] = []
            for subject in ("a", "b"):

                async def hear(message: Message, subject: str = subject) -> None:
                    assert isinstance(message, Cancel)
                    log.append((subject, message.attempt))

                await world.far.subscribe(subject, On(Message, hear))
            for number in range(50):
                await world.near.publish("a", numbered(number))
                await world.near.publish("b", numbered(number))
            await asyncio.sleep(1)
            assert [n for s, n in log if s == "a"] == [n for s, n in log if s == "b"]
            assert [n for s, n in log if s == "a"] == list(range(50))
            assert [s for s, _ in log] != ["a", "b"] * 50

    run(main())
