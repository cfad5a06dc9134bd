"""Processes in virtual time: what they fail with gets out, unless they are dead."""

import asyncio
from functools import partial
from typing import ClassVar

import pytest

from shared.bus.base import Bus
from shared.bus.memory import MemoryBus
from shared.clock import wall_ns
from shared.errors import Conflict, Superseded
from shared.ids import RequestId
from shared.messages import Message, Ok, Ping
from shared.messages.serving import Cancel
from shared.service import Service
from simulation import loop
from simulation.bus import SimBroker
from simulation.loop import EPOCH_NS, WallClock
from simulation.supervisor import Process

HERE, CLOCK = "here", "clock"


class Echo(Service):
    """Serves `here`, and says to `log` what becomes of it."""

    role: ClassVar[str] = "echo"

    def __init__(self, bus: Bus, log: list[str]) -> None:
        super().__init__("echo")
        self._bus = bus
        self._said = log

    async def open(self) -> None:
        served = await self._bus.serve(HERE, Ping, self._answer)
        self.resources.push_async_callback(served.close)
        self.own(await self._bus.serve(CLOCK, Cancel, self._tell_time))
        self._said.append("open")

    async def drain(self) -> None:
        self._said.append("drained")

    async def _answer(self, message: Message) -> Message:
        return Ok()

    async def _tell_time(self, message: Message) -> Message:
        self._said.append(f"asked at {(wall_ns() - EPOCH_NS) // 10**9} s")
        return message


class World:
    def __init__(self) -> None:
        self.broker = SimBroker()
        self.log: list[str] = []

    def process(self, clock: WallClock | None = None) -> Process[Echo]:
        make = partial(Echo, log=self.log)
        return Process(self.broker, "echo", make, clock or WallClock())

    async def answers(self) -> bool:
        async with MemoryBus(self.broker, "asker") as bus:
            try:
                await bus.request(HERE, Ping(), Ok, timeout=1)
            except Exception:
                return False
            return True


async def fail() -> None:
    raise RuntimeError("broken")


def test_one_that_is_stopped_drains() -> None:
    world = World()

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            process = world.process()
            await process.begin(group)
            assert process.running is process.service
            assert await world.answers()
            await process.stop()
            assert not await world.answers()
            with pytest.raises(Conflict, match="echo is not up"):
                _ = process.running

    loop.run(work())
    assert world.log == ["open", "drained"]


def test_one_that_is_killed_is_gone_at_once_and_another_may_begin() -> None:
    world = World()

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            first, second = world.process(), world.process()
            await first.begin(group)
            first.kill()
            assert first.service is None
            assert not await world.answers()
            await second.begin(group)
            assert await world.answers()
            await second.stop()

    loop.run(work())
    assert world.log == ["open", "open", "drained"]


def test_what_it_fails_with_gets_out() -> None:
    world = World()

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            process = world.process()
            await process.begin(group)
            process.running.spawn(fail(), name="fails")
            await asyncio.sleep(10)

    with pytest.raises(ExceptionGroup) as caught:
        loop.run(work())
    assert caught.group_contains(RuntimeError, match="broken")


def test_what_a_dead_one_fails_with_does_not() -> None:
    world = World()

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            process = world.process()
            await process.begin(group)
            process.running.spawn(fail(), name="fails")
            process.kill()
            await asyncio.sleep(10)

    loop.run(work())


def test_without_a_bus_it_is_begun_again_until_there_is_one() -> None:
    world = World()

    async def work() -> float:
        world.broker.fail()
        asyncio.get_running_loop().call_later(20, world.broker.recover)
        async with asyncio.TaskGroup() as group:
            process = world.process()
            await process.begin(group)
            up_at = asyncio.get_running_loop().time()
            await process.stop()
            return up_at

    assert 20 <= loop.run(work()) < 26
    assert world.log == ["open", "drained"]


async def lose_its_role() -> None:
    raise Superseded("not active now")


def test_so_is_one_that_has_lost_its_role_while_there_is_no_bus() -> None:
    world = World()

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            process = world.process()
            await process.begin(group)
            world.broker.fail()
            asyncio.get_running_loop().call_later(20, world.broker.recover)
            process.running.spawn(lose_its_role(), name="loses its role")
            await asyncio.sleep(30)
            assert await world.answers()
            await process.stop()

    loop.run(work())
    assert world.log == ["open", "open", "drained"]


def test_one_may_be_stopped_while_it_waits_for_a_bus() -> None:
    world = World()

    async def work() -> None:
        world.broker.fail()
        async with asyncio.TaskGroup() as group:
            process = world.process()
            begun = asyncio.create_task(process.begin(group))
            await asyncio.sleep(1)
            await process.stop()
            await begun

    loop.run(work(), limit_s=30)
    assert world.log == []


def test_one_may_have_a_wrong_clock_whoever_asks_it() -> None:
    world, clock = World(), WallClock()

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            process = world.process(clock)
            await process.begin(group)
            async with MemoryBus(world.broker, "asker") as bus:
                for skew_s in (0, 3600):
                    clock.skew_ns = skew_s * 10**9
                    asked = Cancel(request=RequestId("r"), attempt=1)
                    await bus.request(CLOCK, asked, Cancel, timeout=1)
                    assert wall_ns() - EPOCH_NS < 10**9
            await process.stop()

    loop.run(work())
    assert world.log == ["open", "asked at 0 s", "asked at 3600 s", "drained"]
